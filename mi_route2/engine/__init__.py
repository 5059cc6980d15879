"""Continuous batching over any host's model, with capture, patches and steering per request."""
