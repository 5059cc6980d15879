"""Scheduler of many jobs over a few processes, with one progress display and an orderly shutdown.

A seed's base job runs first, because it makes the warm start from which the seed's arms begin; they may start when the warm start
exists, while the base job goes on to its evaluation. An arm with a canary waits until the runs of its canary are finished. Each
worker has its own pipe to the parent, and workers share nothing: a killed worker holds no lock, its end is noticed at once, and a
worker whose parent is gone reads the end of its pipe and stops. Ctrl-C lets each worker finish its step; steps after the last
checkpoint are computed again on resume.
"""

import contextlib
import os
import signal
import sys
import time
import warnings
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from studies.common.command_line import sentence
from studies.common.processes import start
from studies.training.job import PRECISIONS, Job
from studies.training.progress import Display, open_display
from studies.training.run import run_job
from studies.training.tracking import Tracking
from studies.training.worlds import base_model

ENDS_A_STEP, ENDS_ITSELF = 10.0, 3.0  # seconds that a worker gets to finish its step, and then to clean up
PROJECT = Path(__file__).parents[2]
LOOKS = 0.25  # seconds between two updates of the display


@dataclass(eq=False)
class _Worker:
    """A process, the parent's ends of its pipes, and its current job. ``errors`` is its stderr."""

    process: BaseProcess
    link: Connection
    errors: Connection | None = None
    job: Job | None = None


def _work(link: Connection, errors: Connection) -> None:
    """Run the jobs that come through the link until ``None`` or its end; any message during a job means stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the parent handles Ctrl-C
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that temporary files are deleted
    os.dup2(errors.fileno(), 2)  # output of libraries would break the terminal's table, so the parent shows it
    errors.close()
    warnings.formatwarning = _worded
    torch.set_num_threads(1)  # one core per worker; and a warm start's bits depend on the number of threads
    with contextlib.suppress(EOFError, ConnectionError):
        while (job := link.recv()) is not None:
            try:
                if job.arm is None and job.settings.chat is None and not job.finished:
                    base_model(
                        job.settings, job.seed, job.cache, PRECISIONS[job.precision], lambda n: link.send(("base", n)), job.device
                    )
                    link.send(("warm", None))
                whole = run_job(job, lambda n: link.send(("steps", n)), link.poll)
                outcome = ("done", None) if whole else ("failed", "it was stopped before its end")
            except Exception as error:  # reported by the parent in one sentence; the other jobs go on
                outcome = ("failed", sentence(error))
            link.send(outcome)


def _worded(message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None) -> str:
    """Format a warning as its sentence, with its place if it does not come from this project."""
    place = "" if Path(filename).is_relative_to(PROJECT) else f" ({category.__name__} at {filename}:{lineno})"
    return f"warning: {message}{place}\n"


def run_jobs(jobs: list[Job], workers: int, *, quiet: bool = False, live: bool = True, report_to: str | None = None) -> list[str]:
    """Run all jobs that are not finished; return a sentence for each failure.

    Args:
        jobs: The jobs.
        workers: Number of processes.
        quiet: Show nothing.
        live: Show the table of arms and seeds if stderr is a terminal.
        report_to: Name of a tracker in ``tracking.TRACKERS``.

    Raises:
        KeyboardInterrupt: After the workers have stopped.
    """
    todo = unfinished(jobs)
    crew: list[_Worker] = []
    with Tracking(report_to, jobs) if report_to else contextlib.nullcontext() as tracking:
        try:
            with open_display(jobs, todo, quiet=quiet, live=live) as display:
                for _ in range(min(workers, len(todo))):
                    _hire(crew)
                return _Dispatch(todo, crew, display, tracking).run()
        finally:
            _dismiss(crew)


def unfinished(jobs: list[Job]) -> list[Job]:
    """Return the jobs that are not finished; a folder that cannot be read is left to a worker, which reports the error."""

    def finished(job: Job) -> bool:
        try:
            return job.finished and run_job(job)
        except ValueError:
            return False

    return [job for job in jobs if not finished(job)]


def _hire(crew: list[_Worker]) -> None:
    errors, far = Pipe(duplex=False)
    with far:
        process, link = start(_work, far)
    crew.append(_Worker(process, link, errors))


class Order:
    """Order in which jobs may start: an arm waits for its seed's base job, which makes the warm start, and for its canaries.

    Attributes:
        waiting: Jobs that may not start yet, with the folders of the jobs for which they wait.
        free: Jobs that wait for nothing at the beginning.
    """

    def __init__(self, jobs: list[Job]):
        here = {job.folder for job in jobs}
        # Arms of a chat model do not depend on its base job.
        bases = {(job.root, job.seed): job.folder for job in jobs if job.arm is None and job.settings.chat is None}
        self.waiting: dict[Path, tuple[Job, set[Path]]] = {}
        for job in jobs:
            awaited = {canary.folder for canary in job.canaries} & here
            base = bases.get((job.root, job.seed))
            awaited |= {base} if job.arm is not None and base is not None else set()
            self.waiting[job.folder] = job, awaited
        self.free = self._free()

    def _free(self) -> list[Job]:
        free = [job for job, awaited in self.waiting.values() if not awaited]
        for job in free:
            del self.waiting[job.folder]
        return free

    def release(self, done: Job) -> list[Job]:
        """Return the jobs that waited only for this one."""
        for _, awaited in self.waiting.values():
            awaited.discard(done.folder)
        return self._free()

    def take(self, awaited: Collection[Path]) -> list[Job]:
        """Return the jobs that wait for exactly these folders, which do not wait any more."""
        for _, folders in self.waiting.values():
            if folders == set(awaited):
                folders.clear()
        return self._free()

    def lose(self, failed: Job) -> list[Job]:
        """Return the jobs that cannot start any more, because they wait for this one or for each other."""
        late = [job for job, awaited in self.waiting.values() if failed.folder in awaited]
        for job in late:
            del self.waiting[job.folder]
        return late + [further for job in late for further in self.lose(job)]


class _Dispatch:
    """Dispatcher of jobs to workers, base jobs first, until all are done or no worker is left."""

    def __init__(self, jobs: list[Job], crew: list[_Worker], display: Display, tracking: Tracking | None = None):
        self._order = Order(jobs)
        self._ready = deque(sorted(self._order.free, key=lambda job: job.arm is not None))
        self._crew, self._display, self._tracking = crew, display, tracking
        self._failures: list[str] = []

    def run(self) -> list[str]:
        """Run all jobs and return a sentence for each failure."""
        while self._crew:
            self._hand_out()
            if all(worker.job is None for worker in self._crew):
                return self._failures
            self._listen()
            self._display.tick()
        left = len(self._ready) + len(self._order.waiting)
        return [*self._failures, f"no worker process is left for {_runs(left)}"] if left else self._failures

    def _hand_out(self) -> None:
        for worker in self._crew:
            if worker.job is None and self._ready:
                worker.job = self._ready.popleft()
                self._display.began(worker.job)
                with contextlib.suppress(ConnectionError):  # a dead worker is noticed when it is listened to
                    worker.link.send(worker.job)

    def _listen(self) -> None:
        """Wait a moment for messages from workers, from their stderr, and from the tracker."""
        links = [worker.link for worker in self._crew]
        errors = [worker.errors for worker in self._crew if worker.errors is not None]
        tracker = [self._tracking.link] if self._tracking is not None and not self._tracking.link.closed else []
        came = wait([*links, *errors, *tracker], LOOKS)
        for worker in list(self._crew):
            if worker.errors in came:
                self._show(worker)
            if worker.link in came:
                self._take(worker, *_hear(worker))
        if self._tracking is not None and self._tracking.link in came:
            for text in self._tracking.hear():
                self._display.say(text)

    def _show(self, worker: _Worker) -> None:
        """Show a worker's output on stderr."""
        assert worker.errors is not None
        text = os.read(worker.errors.fileno(), 1 << 16).decode(errors="replace")
        if text.strip():
            self._display.say(text.rstrip())
        elif not text:
            worker.errors.close()
            worker.errors = None

    def _take(self, worker: _Worker, kind: str, value: Any) -> None:
        """Handle a worker's message."""
        job = worker.job
        if kind == "steps" and job is not None:
            self._display.moved(job, value)
        elif kind == "base" and job is not None:
            self._display.warmed(job, value)
        elif kind == "warm" and job is not None:
            self._ready.extend(self._order.release(job))
        else:
            worker.job = None
            if kind == "died":
                self._crew.remove(worker)
                _hang_up(worker)
            if job is not None:
                self._end(job, kind, value)

    def _end(self, job: Job, kind: str, value: Any) -> None:
        failure = None
        if kind == "done":
            self._ready.extend(self._order.release(job))
        else:
            failure = f"{job.name} at seed {job.seed} failed: {value}{without(len(self._order.lose(job)))}"
            self._failures.append(failure)
        self._display.ended(job, failure)


def without(lost: int) -> str:
    """Return the end of a failure's sentence: how many runs cannot start any more; an empty text if all can."""
    return f" (so {_runs(lost)} that would start from it cannot be made)" if lost else ""


def _runs(n: int) -> str:
    return f"{n} run" if n == 1 else f"{n} runs"


def _hear(worker: _Worker) -> tuple[str, Any]:
    """Return a worker's next message; ``died`` with the reason if the worker has ended."""
    try:
        return worker.link.recv()
    except (EOFError, ConnectionError):
        worker.process.join()
        code = worker.process.exitcode or 0
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        hint = ", out of memory?" if code == -signal.SIGKILL else ""
        return "died", f"its worker process died ({how}{hint}); run the same command again to go on"


def _dismiss(crew: list[_Worker]) -> None:
    """Stop all workers: request, then terminate, then kill. A resumed run gives the same bytes after any of them.

    A second Ctrl-C skips to the kill.
    """
    try:
        for worker in crew:
            with contextlib.suppress(ConnectionError):
                worker.link.send(None)
        if _outlast(crew, ENDS_A_STEP):
            for worker in crew:
                worker.process.terminate()
            _outlast(crew, ENDS_ITSELF)
    finally:
        for worker in crew:
            worker.process.kill()
            worker.process.join()
            _hang_up(worker)


def _hang_up(worker: _Worker) -> None:
    worker.link.close()
    if worker.errors is not None:
        worker.errors.close()


def _outlast(crew: list[_Worker], seconds: float) -> bool:
    """Return True if any worker still runs after this many seconds."""
    deadline = time.monotonic() + seconds
    for worker in crew:
        worker.process.join(max(0.0, deadline - time.monotonic()))
    return any(worker.process.is_alive() for worker in crew)
