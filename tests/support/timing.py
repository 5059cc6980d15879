"""Bounds on processor time that mean the same on a slow machine, and on a busy one; waiting for another process."""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

REFERENCE = 0.08
"""Seconds for a million squares, on the machine on which the bounds were chosen."""


def slowness() -> float:
    """Return the time of a million squares here and now, in times of `REFERENCE`; at least 1."""
    start = time.process_time()
    total = 0
    for i in range(1_000_000):
        total += i * i
    return max(1.0, (time.process_time() - start) / REFERENCE)


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Fail if the body takes more than these seconds of processor time, times the `slowness` before or after.

    Nothing is collected meanwhile: a collection takes as long as all earlier tests of the process left objects to look at.
    """
    before = slowness()
    collects = gc.isenabled()
    gc.disable()
    try:
        start = time.process_time()
        yield
        taken = time.process_time() - start
    finally:
        if collects:
            gc.enable()
    allowed = seconds * max(before, slowness())
    assert taken < allowed, f"{taken:.2f} s of processor time, where {allowed:.2f} s are allowed"
