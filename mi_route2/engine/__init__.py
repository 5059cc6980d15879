"""Continuous batching over a model, with capture, patches and steering per request."""

from mi_route2.engine.engine import Engine, QueueFullError
from mi_route2.engine.request import Capture, Captured, Event, Request, Result, Token
from mi_route2.engine.sampling import Sampling

__all__ = ["Capture", "Captured", "Engine", "Event", "QueueFullError", "Request", "Result", "Sampling", "Token"]
