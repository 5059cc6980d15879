"""Metrics of the server, in a registry of its own, as Prometheus reads them."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_GAUGES = {
    "running": "requests that run",
    "waiting": "requests that wait",
    "sweeps": "patch sweeps that run",
    "slots": "rows of keys and values in use",
    "slot_bytes": "bytes of keys and values of running requests",
    "steering_rows": "steering rows in use",
    "prefix_bytes": "bytes of the prefix cache",
}
_COUNTERS = {
    "steps": "steps of the engine",
    "tokens": "generated tokens",
    "slow_readers": "streams that were cancelled because their readers were too slow",
    "prefix_hits": "blocks found in the prefix cache",
    "prefix_misses": "blocks not found in the prefix cache",
}


class Metrics:
    """Counts and times of requests, and the engine's own gauges, which are read from ``snapshot`` at each scrape."""

    def __init__(self, snapshot: Callable[[], Mapping[str, Any]]):
        self._registry, self._snapshot = CollectorRegistry(), snapshot
        self._requests = Counter("mi_route2_requests", "HTTP requests", ["path", "status"], registry=self._registry)
        self._errors = Counter(
            "mi_route2_errors",
            "requests that were refused or failed, also within a stream",
            ["path", "reason"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "mi_route2_request_seconds", "time of an HTTP request", ["path"], buckets=SECONDS, registry=self._registry
        )
        self.first = Histogram("mi_route2_first_token_seconds", "time to the first token", buckets=SECONDS, registry=self._registry)
        self.prompted = Counter("mi_route2_prompt_tokens", "tokens of prompts", registry=self._registry)
        self.cells = Counter("mi_route2_cells", "cells of patch sweeps", registry=self._registry)
        self._registry.register(self)  # pyright: ignore[reportArgumentType]

    def done(self, path: str, status: int, seconds: float, error: str | None) -> None:
        """Count a request; ``error`` is why it was refused or failed."""
        if error is not None:
            self._errors.labels(path, error).inc()
        self._requests.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

    def collect(self) -> Iterator[Metric]:
        """Yield the engine's numbers; the registry calls this."""
        snapshot = self._snapshot()
        for name, what in _GAUGES.items():
            yield GaugeMetricFamily(f"mi_route2_{name}", what, value=snapshot.get(name, 0))
        for name, what in _COUNTERS.items():
            yield CounterMetricFamily(f"mi_route2_{name}", what, value=snapshot.get(name, 0))

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self._registry)
