"""Measurements of the environment on real problems and rollouts (mutants, rollouts, detectors), as aggregates only."""
