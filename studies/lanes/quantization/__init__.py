"""Six-bit matrices, the bytes that they take, and the growth of their error over the passes of a loop."""
