"""Continuous batching over any host's model, with capture, patches and steering per request."""

from mi_route2.engine.engine import Engine
from mi_route2.engine.request import Capture, Captured, Request, Result, Token
from mi_route2.engine.sampling import Sampling

__all__ = ["Capture", "Captured", "Engine", "Request", "Result", "Sampling", "Token"]
