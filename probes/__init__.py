"""Probes: map activations to one score per token and one per rollout, and evaluate such scores."""
