"""The machine's processes and System V objects, read from /proc."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    """Name, state and parent of a process."""

    name: str
    state: str
    parent: int


def processes() -> dict[int, Process]:
    """Return all processes by id."""
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
    """Return the ids of all processes below a process, including zombies."""
    table, found, level = processes(), set(), {pid}
    while level := {each for each, process in table.items() if process.parent in level} - found:
        found |= level
    return found


def system_v() -> Mapping[str, dict[int, int]]:
    """Return ``{kind of object: {key: id}}`` of the machine's System V objects."""
    found = {}
    for kind in ("shm", "sem", "msg"):
        path = Path("/proc/sysvipc") / kind
        rows = [line.split() for line in path.read_text().splitlines()[1:]] if path.exists() else []
        found[kind] = {int(row[0]): int(row[1]) for row in rows}
    return found
