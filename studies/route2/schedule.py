"""Many jobs over a few processes, one progress bar, and an orderly end.

A seed's base job runs first, because it makes the warm start that the seed's arms begin from. Each worker has a pipe of its own
to the parent and the workers share nothing: there is no lock that a killed worker could take along, its end is seen at once,
and a worker whose parent is gone reads the end of its pipe and stops. Ctrl-C lets each worker end its step; whatever was not
checkpointed is done again on resume.
"""

import contextlib
import fcntl
import multiprocessing as mp
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tqdm import tqdm

from studies.route2.job import Job, run_job

ENDS_A_STEP, ENDS_ITSELF = 10.0, 3.0  # seconds that a worker gets to stop, and then to tidy up


@contextmanager
def exclusive(root: Path) -> Iterator[None]:
    """Hold the run folder; ``ValueError`` where another process does, or where it cannot be written."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        handle = (root / ".lock").open("w")
    except OSError as error:
        raise ValueError(f"cannot write to {root} ({error.strerror}): choose another --out") from error
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"another process is writing to {root}; wait for it, or choose another --out") from error
        yield


@dataclass(eq=False)
class _Worker:
    """A process, the parent's end of its pipe, and what it is at work on."""

    process: BaseProcess
    link: Connection
    job: Job | None = None


def _work(link: Connection) -> None:
    """Run the jobs that come down the link until ``None`` does, or its end. Whatever comes during a job means: stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides; a second Ctrl-C reaches it, not us
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by an exception, so that temporary files go
    with contextlib.suppress(EOFError, ConnectionError):
        while (job := link.recv()) is not None:
            try:
                whole = run_job(job, lambda n: link.send(("steps", n)), link.poll)
                outcome = ("done", None) if whole else ("failed", "it was stopped before its end")
            except Exception as error:  # reported by the parent in one sentence; the other jobs go on
                outcome = ("failed", sentence(error))
            link.send(outcome)


def sentence(error: Exception) -> str:
    """What went wrong, in words: the type only where the text was not written for users."""
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return text if isinstance(error, ValueError | KeyError | OSError) and text else f"{type(error).__name__}: {text}"


def run_jobs(jobs: list[Job], workers: int, *, quiet: bool = False) -> list[str]:
    """Run all jobs that are not finished; the failures' sentences.

    ``KeyboardInterrupt`` passes through once the workers have stopped.
    """
    todo = [job for job in jobs if not _was_finished(job)]
    units = sum(map(_units, jobs))
    crew: list[_Worker] = []
    try:
        # What an earlier run did is not this one's speed: it counts as where the bar starts.
        start = units - sum(map(_units, todo))
        with tqdm(total=units, initial=start, unit="step", disable=quiet, desc="training", smoothing=0.05) as bar:
            for _ in range(min(workers, len(todo))):
                _hire(crew)
            return _dispatch(todo, crew, bar)
    finally:
        _dismiss(crew)


def _units(job: Job) -> int:
    return 1 if job.arm is None else job.settings.steps


def _was_finished(job: Job) -> bool:
    """Whether nothing is left to do; a folder that cannot be read is a worker's to fail on."""
    try:
        return job.finished and run_job(job)
    except ValueError:
        return False


def _hire(crew: list[_Worker]) -> None:
    """Start a worker that never gets SIGINT: Ctrl-C goes to every process of the terminal, and some may still be importing."""
    context = mp.get_context("spawn")
    resource_tracker.ensure_running()  # otherwise the first start starts it, and that unblocks SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        link, far = context.Pipe()
        process = context.Process(target=_work, args=(far,), daemon=True)
        process.start()
        far.close()  # ours alone would keep the pipe open after the worker's death
        crew.append(_Worker(process, link))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _dispatch(jobs: list[Job], crew: list[_Worker], bar: Any) -> list[str]:
    """Hand out the jobs, base jobs first, until all are done or nobody is left to do them."""
    bases = {job.seed for job in jobs if job.arm is None}
    ready = deque(sorted((j for j in jobs if j.arm is None or j.seed not in bases), key=lambda j: j.arm is not None))
    waiting = {seed: [j for j in jobs if j.seed == seed and j.arm is not None] for seed in bases}
    failures: list[str] = []
    while crew:
        for worker in crew:
            if worker.job is None and ready:
                worker.job = ready.popleft()
                with contextlib.suppress(ConnectionError):  # a dead worker is noticed below
                    worker.link.send(worker.job)
        if all(worker.job is None for worker in crew):
            return failures
        for link in wait([worker.link for worker in crew]):
            worker = next(w for w in crew if w.link is link)
            kind, value = _hear(worker)
            if kind == "steps":
                bar.update(value)
                continue
            job, worker.job = worker.job, None
            if kind == "gone":
                crew.remove(worker)
                worker.link.close()
            if job is None:
                continue
            bar.set_postfix_str(f"seed {job.seed} {job.name}")
            arms = waiting.pop(job.seed, []) if job.arm is None else []
            if kind == "done":
                ready.extend(arms)
            else:
                without = f" (so {_runs(len(arms))} that would start from it cannot be made)" if arms else ""
                failures.append(f"{job.name} at seed {job.seed} failed: {value}{without}")
    left = len(ready) + sum(map(len, waiting.values()))
    return [*failures, f"no worker process is left for {_runs(left)}"] if left else failures


def _runs(n: int) -> str:
    return f"{n} run" if n == 1 else f"{n} runs"


def _hear(worker: _Worker) -> tuple[str, Any]:
    """A worker's next message; ``gone`` and how it ended where there is none."""
    try:
        return worker.link.recv()
    except (EOFError, ConnectionError):
        worker.process.join()
        code = worker.process.exitcode or 0
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        hint = ", out of memory?" if code == -signal.SIGKILL else ""
        return "gone", f"its worker process died ({how}{hint}); run the same command again to go on"


def _dismiss(crew: list[_Worker]) -> None:
    """Ask, then insist, then kill: a resumed run ends with the same bytes after any of them. A second Ctrl-C goes to the last."""
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
            worker.link.close()


def _outlast(crew: list[_Worker], seconds: float) -> bool:
    """Whether any worker is still there after that long."""
    deadline = time.monotonic() + seconds
    for worker in crew:
        worker.process.join(max(0.0, deadline - time.monotonic()))
    return any(worker.process.is_alive() for worker in crew)
