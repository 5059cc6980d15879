"""One folder a question: the world with loopholes, the routing study, and paired benchmarks."""
