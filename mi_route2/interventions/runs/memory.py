"""The memory tier: whole runs under a budget of bytes, the least recently used leave first."""

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mi_route2.interventions.runs.info import About, Kind
from mi_route2.interventions.runs.rows import Chunk
from mi_route2.sites import Site

LEAST, MOST, SHARE = 256 << 20, 8 << 30, 8
A_RUN = 1024
"""Bytes that a run without rows is taken for, so that no number of such runs is free."""


@dataclass(frozen=True)
class Held:
    """A finished run in memory: by site what its rows are, and its rows."""

    about: About
    sites: Mapping[Site, tuple[Kind, tuple[Chunk, ...]]]
    nbytes: int


class Memory:
    """Finished runs, and how much those take that are being written. ``budget=0`` holds no finished run."""

    def __init__(self, budget: int | None):
        if budget is not None and budget < 0:
            raise ValueError(f"budget={budget} cannot be: give bytes, 0 for no memory tier, or None for a share of what is free")
        self.budget = automatic(available()) if budget is None else budget
        self.nbytes = 0
        """Bytes that are taken now."""
        self._held: OrderedDict[str, Held] = OrderedDict()
        self._writing: dict[object, int] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, run: str) -> bool:
        return run in self._held

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._held))

    def take(self, writer: object, nbytes: int) -> None:
        """What ``writer`` has in memory by now; 0 when it is through."""
        self.nbytes += nbytes - self._writing.pop(writer, 0)
        if nbytes:
            self._writing[writer] = nbytes

    def put(self, run: str, held: Held) -> None:
        """Hold a finished run."""
        self._held[run] = held
        self.nbytes += held.nbytes

    def get(self, run: str) -> Held | None:
        """The run, which is then the most recently used one."""
        if run in self._held:
            self._held.move_to_end(run)
        return self._held.get(run)

    def pop(self, run: str) -> Held | None:
        """Let a run go."""
        held = self._held.pop(run, None)
        self.nbytes -= held.nbytes if held else 0
        return held

    def evict(self, leased: Callable[[str], bool]) -> dict[str, int]:
        """Let runs go until the budget is kept, but none that is leased; those that went, with their bytes."""
        went: dict[str, int] = {}
        if self.nbytes > self.budget:
            for run in self:
                if not leased(run) and (held := self.pop(run)):
                    went[run] = held.nbytes
                if self.nbytes <= self.budget:
                    break
        return went


def automatic(free: int) -> int:
    """The budget where none is given: an eighth of the memory that is free, but at least 256 MiB and at most 8 GiB."""
    return min(max(free // SHARE, LEAST), MOST)


def available() -> int:
    """Bytes of memory that could be taken now, or all that a container may have, if less; of the machine where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) << 10
    except (OSError, StopIteration):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # no such file, or "max"
            free = min(free, int(Path("/sys/fs/cgroup", limit).read_text(encoding="ascii")))
    return free
