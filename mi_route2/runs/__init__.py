"""Store of captured runs: activations that are read, compared and patched in later."""

from mi_route2.runs.rows import Kind, RunInfo, Stats
from mi_route2.runs.store import RunStore
from mi_route2.runs.writer import Writer

__all__ = ["Kind", "RunInfo", "RunStore", "Stats", "Writer"]
