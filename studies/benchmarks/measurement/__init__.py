"""Paired measurement, floors in FLOPs, and the builders of the sides of several benchmarks."""
