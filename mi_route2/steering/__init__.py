"""Steering: vectors, clamps and monitors at sites of a forward pass, for many requests at once."""
