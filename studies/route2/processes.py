"""Starts a process with a pipe of its own to the parent. Nothing is shared: what dies takes nothing along, and is noticed."""

import multiprocessing as mp
import signal
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any


def start(target: Callable[..., None], *args: Any) -> tuple[BaseProcess, Connection]:
    """Run ``target(link, *args)`` in a new process; the process, and the parent's end of the link.

    It never gets SIGINT: Ctrl-C goes to every process of the terminal, and some may still be importing.
    """
    context = mp.get_context("spawn")
    resource_tracker.ensure_running()  # otherwise the first start starts it, and that unblocks SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        link, far = context.Pipe()
        process = context.Process(target=target, args=(far, *args), daemon=True)
        process.start()
        far.close()  # ours alone would keep the pipe open after the process's death
        return process, link
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
