"""Captured runs: what is kept of forwards, to be read, compared and patched in later."""

from mi_route2.interventions.runs.info import Kind, RunInfo, Stats
from mi_route2.interventions.runs.store import RunStore
from mi_route2.interventions.runs.writer import Writer

__all__ = ["Kind", "RunInfo", "RunStore", "Stats", "Writer"]
