"""Probes: activations to one score a token and one a rollout, and what such a score is worth."""
