"""Ctrl-C between two steps in place of within one.

An interrupt may come between any two lines, also between those that belong together: a vector in one line of a table and not in the
other one, a row that is taken and not noted, a token without its end. So it is held back until what was begun is done.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Holding:
    """Handler of SIGINT that keeps the first signal for ``let_through``, and calls the usual handler for a second one."""

    def __init__(self, usual: Callable[[int, FrameType | None], Any]):
        self._usual = usual
        self._came: tuple[int, FrameType | None] | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        again, self._came = self._came is not None, (number, frame)
        if again:
            self.let_through()

    def let_through(self) -> None:
        """Call the usual handler if an interrupt came, which raises ``KeyboardInterrupt``."""
        came, self._came = self._came, None
        if came is not None:
            self._usual(*came)


@contextmanager
def unbroken() -> Iterator[Callable[[], None]]:
    """Hold back Ctrl-C until the end of the context; a second one comes through at once, in case that a forward never ends.

    Yields a function that lets through what has come so far. Within another such context only the outer one lets anything through,
    and in other threads than the main one there is nothing to hold back.
    """
    usual = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(usual) or isinstance(usual, Holding):
        yield lambda: None
        return
    holding = Holding(usual)
    signal.signal(signal.SIGINT, holding)
    try:
        yield holding.let_through
    finally:
        signal.signal(signal.SIGINT, usual)
        holding.let_through()
