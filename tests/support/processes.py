"""Processes and what comes of them in time."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def alive(pid: int) -> bool:
    """True if there is such a process; a dead one that nobody has waited for is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def eventually(look: Callable[[], T], seconds: float = 10.0) -> T:
    """Return what ``look`` finds as soon as it is true; fail if it is not by then."""
    deadline = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.005)
    return found
