"""Many jobs over a few processes, one progress bar, and an orderly end.

A seed's base job runs first, because it makes the warm start that the seed's arms begin from. Ctrl-C lets each worker stop
after its step; whatever was not checkpointed is done again on resume. A worker whose parent is gone stops by itself.
"""

import fcntl
import multiprocessing as mp
import os
import queue
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from tqdm import tqdm

from studies.route2.job import Job, run_job


@contextmanager
def exclusive(root: Path) -> Iterator[None]:
    """Hold the run folder; ``ValueError`` where another process does."""
    root.mkdir(parents=True, exist_ok=True)
    with (root / ".lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"another process is writing to {root}; wait for it, or choose another --out") from error
        yield


@dataclass(frozen=True)
class _Message:
    worker: int
    kind: str  # "steps" | "done" | "stopped" | "failed"
    value: Any = None


def _worker(number: int, tasks: Any, messages: Any, stopping: Event, parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides; a second Ctrl-C reaches it, not us

    def stop() -> bool:
        return stopping.is_set() or os.getppid() != parent

    while (job := tasks.get()) is not None:
        try:
            whole = run_job(job, lambda n: messages.put(_Message(number, "steps", n)), stop)
            messages.put(_Message(number, "done" if whole else "stopped", job))
        except Exception as error:  # reported by the parent in one sentence; the other jobs go on
            messages.put(_Message(number, "failed", (job, f"{type(error).__name__}: {error}")))


def run_jobs(jobs: list[Job], workers: int, *, quiet: bool = False) -> list[str]:
    """Run all jobs; the failures' sentences. ``KeyboardInterrupt`` passes through once the workers have stopped."""
    context = mp.get_context("spawn")
    tasks, messages, stopping = context.Queue(), context.Queue(), context.Event()
    processes = [
        context.Process(target=_worker, args=(i, tasks, messages, stopping, os.getpid()), daemon=True) for i in range(workers)
    ]
    for process in processes:
        process.start()
    units = sum(1 if job.arm is None else job.settings.steps for job in jobs)
    try:
        with tqdm(total=units, unit="step", disable=quiet, desc="training", smoothing=0.05) as bar:
            return _dispatch(jobs, tasks, messages, bar, processes)
    except KeyboardInterrupt:
        stopping.set()
        raise
    finally:
        _close(processes, tasks)


def _dispatch(jobs: list[Job], tasks: Any, messages: Any, bar: Any, processes: list[Any]) -> list[str]:
    waiting = {job.seed: [j for j in jobs if j.seed == job.seed and j.arm is not None] for job in jobs}
    bases = {job.seed: job for job in jobs if job.arm is None}
    for job in bases.values():
        tasks.put(job)
    running, failures = len(bases), []
    while running:
        try:
            message = messages.get(timeout=1.0)
        except queue.Empty:
            if any(not p.is_alive() for p in processes):
                return [*failures, "a worker process died (out of memory?); run the same command again to go on"]
            continue
        if message.kind == "steps":
            bar.update(message.value)
            continue
        running -= 1
        if message.kind == "failed":
            job, why = message.value
            failures.append(f"{job.name} at seed {job.seed} failed: {why}")
            continue
        job = message.value
        bar.set_postfix_str(f"seed {job.seed} {job.name}")
        if job.arm is None:
            for arm_job in waiting[job.seed]:
                tasks.put(arm_job)
                running += 1
    return failures


def _close(processes: list[Any], tasks: Any) -> None:
    for _ in processes:
        tasks.put(None)
    deadline = time.monotonic() + 20
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
