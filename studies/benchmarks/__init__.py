"""Paired benchmarks: ratios of medians, both sides interleaved in one run, with the floor in FLOPs beside each."""
