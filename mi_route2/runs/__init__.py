"""Store of captured runs: activations that are read, compared and patched in later."""

from mi_route2.runs.store import RunInfo, RunStore, SiteRows, Stats, Writer

__all__ = ["RunInfo", "RunStore", "SiteRows", "Stats", "Writer"]
