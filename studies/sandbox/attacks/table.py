"""The machine's tables of processes and of System V objects, as /proc has them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    """A line of the process table."""

    name: str
    state: str
    parent: int


def processes() -> dict[int, Process]:
    """Every process by its id."""
    found = {}
    for place in Path("/proc").iterdir():
        if place.name.isdigit():
            try:
                before, _, after = (place / "stat").read_text(errors="replace").rpartition(")")
            except (FileNotFoundError, ProcessLookupError):  # it has just ended
                continue
            fields = after.split()
            found[int(place.name)] = Process(before.partition("(")[2], fields[0], int(fields[1]))
    return found


def descendants(pid: int) -> set[int]:
    """The living and the unburied below a process."""
    table, found, level = processes(), set(), {pid}
    while level := {each for each, process in table.items() if process.parent in level} - found:
        found |= level
    return found


def system_v() -> Mapping[str, dict[int, int]]:
    """Kind of object -> key -> id."""
    found = {}
    for kind in ("shm", "sem", "msg"):
        path = Path("/proc/sysvipc") / kind
        rows = [line.split() for line in path.read_text().splitlines()[1:]] if path.exists() else []
        found[kind] = {int(row[0]): int(row[1]) for row in rows}
    return found
