"""Paired benchmarks: ratios of medians, with both sides interleaved in one process and the floor in FLOPs beside each."""
