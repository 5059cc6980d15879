"""Jobs in processes of this machine (concurrent.futures) or on a Slurm cluster (submitit), and locks on their folders.

Every job writes its files atomically and goes on from them, so a process may be killed at any moment: the same command, started
again, ends with equal numbers. That is all that Ctrl-C, a preempted job and a job at its time limit need.
"""

import contextlib
import importlib.util
import multiprocessing as mp
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro
from filelock import FileLock, Timeout
from tqdm import tqdm

from studies.common.command_line import sentence

POLL = 0.2
"""Seconds between two looks at running jobs."""
KILLED = "a worker process was killed, perhaps for its memory; run the same command again to go on"
J = TypeVar("J")


@dataclass(frozen=True)
class Executor:
    """Options of a command that say where its jobs run."""

    executor: Annotated[
        Literal["local", "slurm", "submitit"],
        tyro.conf.arg(help="processes of this machine, a Slurm cluster (extra slurm), or submitit's local executor"),
    ] = "local"
    partition: Annotated[str | None, tyro.conf.arg(help="with slurm: the partition")] = None
    hours: Annotated[float, tyro.conf.arg(help="with slurm: time limit of a job, which is queued again if it needs more")] = 4.0
    memory: Annotated[float, tyro.conf.arg(help="with slurm: GB of a job")] = 4.0
    slurm: Annotated[tuple[str, ...], tyro.conf.arg(help="with slurm: further options of sbatch, e.g. account=me qos=low")] = ()

    def check(self) -> None:
        """Check the options before anything is written.

        Raises:
            ValueError: If submitit or Slurm is missing, or an option cannot be read.
        """
        if self.executor == "local":
            if self != Executor():
                raise ValueError("--partition, --hours, --memory and --slurm need a cluster: add --executor slurm")
            return
        if wrong := [option for option in self.slurm if not all(option.partition("="))]:
            raise ValueError(f"{wrong[0]!r} is no option of sbatch: write NAME=VALUE, as account=me")
        if importlib.util.find_spec("submitit") is None:
            raise ValueError("a cluster needs submitit: pip install 'mi-route2[slurm]'")
        if self.executor == "slurm" and shutil.which("srun") is None:
            raise ValueError("there is no Slurm on this machine (no srun): start the command on a machine of a cluster")


@dataclass(frozen=True)
class _Requeued:
    """A task of submitit that runs its job again if the cluster takes the machine away."""

    work: Callable[[Any], object]

    def __call__(self, job: Any) -> None:
        self.work(job)

    def checkpoint(self, job: Any) -> Any:
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, job)


def run_each(
    work: Callable[[J], object],
    jobs: Sequence[J],
    *,
    workers: int,
    executor: Executor,
    folder: Path,
    what: str,
    quiet: bool = False,
) -> list[tuple[J, str]]:
    """Call ``work`` on every job, and return the jobs that failed with a sentence for each.

    Args:
        work: Function of a module, so that another process can import it.
        jobs: The jobs, the longest first.
        workers: Number of processes of this machine; with one, jobs run in this process.
        executor: Where jobs run.
        folder: Folder of the run; submitit keeps its files in ``cluster`` there.
        what: Label of the progress bar, which counts finished jobs.
        quiet: Show no bar.

    Raises:
        KeyboardInterrupt: After all workers have ended, or the jobs have left the cluster's queue.
    """
    failures: list[tuple[J, str]] = []
    with tqdm(total=len(jobs), desc=what, unit="job", leave=False, disable=True if quiet else None) as bar:
        if executor.executor == "local" and (workers == 1 or len(jobs) < 2):
            for job in jobs:
                try:
                    work(job)
                except Exception as error:  # the other jobs go on
                    failures.append((job, sentence(error)))
                bar.update()
            return failures
        opened = _processes(min(workers, len(jobs))) if executor.executor == "local" else _cluster(executor, folder / "cluster")
        with opened as submit:
            running = submit(work, jobs)
            while running:
                for handle, job in [pair for pair in running if pair[0].done()]:
                    running.remove((handle, job))
                    try:
                        handle.result()
                    except BrokenExecutor:
                        failures.append((job, KILLED))
                    except Exception as error:
                        # submitit's own error ends with the trace of the job's
                        text = str(error).strip().rpartition("\n")[2] if executor.executor != "local" else sentence(error)
                        failures.append((job, text))
                    bar.update()
                time.sleep(POLL)
    return failures


def demand(failures: Sequence[tuple[Any, str]]) -> None:
    """Raise ``RuntimeError`` with a sentence for each job that failed."""
    if failures:
        raise RuntimeError("; ".join(f"{job.name} at seed {job.seed} failed: {reason}" for job, reason in failures))


Submit = Callable[[Callable[[Any], object], Sequence[Any]], list[tuple[Any, Any]]]
"""Function of the work and its jobs to pairs of a handle and a job."""


@contextmanager
def _processes(workers: int) -> Iterator[Submit]:
    with tempfile.TemporaryDirectory(prefix="workers-", ignore_cleanup_errors=True) as folder:
        pool = ProcessPoolExecutor(workers, mp.get_context("spawn"), initializer=_begin, initargs=(folder,))
        try:
            yield lambda work, jobs: [(pool.submit(work, job), job) for job in jobs]
        except BaseException:
            for process in mp.active_children():
                process.terminate()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def _begin(folder: str) -> None:
    """Let a worker end at once, without a trace: at Ctrl-C, which reaches every process of a terminal, and with its parent.

    Its temporary files (``pymp-*`` of multiprocessing, for example) are in ``folder``, because a killed worker removes none.
    """
    tempfile.tempdir = folder
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    tqdm.set_lock(threading.RLock())  # the usual lock is a semaphore that a killed worker would leave in the system
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()


def _end_with_parent(folder: str) -> None:
    parent = mp.parent_process()
    assert parent is not None
    parent.join()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


@contextmanager
def _cluster(options: Executor, folder: Path) -> Iterator[Submit]:
    import submitit

    cluster = "slurm" if options.executor == "slurm" else "local"
    executor = submitit.AutoExecutor(folder / "%j", cluster=cluster, slurm_max_num_timeout=1000)
    executor.update_parameters(timeout_min=round(60 * options.hours), cpus_per_task=1, nodes=1, tasks_per_node=1)
    executor.update_parameters(slurm_mem=f"{round(1024 * options.memory)}MB", slurm_signal_delay_s=120)
    extra = dict(option.split("=", 1) for option in options.slurm)
    executor.update_parameters(slurm_additional_parameters={"requeue": True, **extra})
    if options.partition is not None:
        executor.update_parameters(slurm_partition=options.partition)
    handles: list[Any] = []

    def submit(work: Callable[[Any], object], jobs: Sequence[Any]) -> list[tuple[Any, Any]]:
        with executor.batch():
            handles.extend(executor.submit(_Requeued(work), job) for job in jobs)
        return list(zip(handles, jobs, strict=True))

    try:
        yield submit
    finally:
        for handle in handles:
            handle.cancel(check=False)


@contextmanager
def exclusive(root: Path) -> Iterator[None]:
    """Context: hold the lock of the run folder, which is created if it is missing.

    Raises:
        ValueError: If another process holds it, or the folder cannot be written.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        (root / ".lock").touch()
    except OSError as error:
        raise ValueError(f"cannot write to {root} ({error.strerror}): choose another --out") from error
    with _locked(root / ".lock", f"another process is writing to {root}; wait for it, or choose another --out", 0.0):
        yield


@contextmanager
def job_lock(folder: Path, patience: float = 60.0) -> Iterator[None]:
    """Context: hold the lock of a job's folder, which is created if it is missing; temporary files left by a kill are deleted.

    Raises:
        ValueError: If another process still holds it after ``patience`` seconds.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = folder.with_name(f".{folder.name}.lock")
    with _locked(lock, f"another process is still writing to {folder}; wait for it, or end it", patience):
        for left in (*folder.glob(".*.tmp"), *folder.glob(".tmp*")):  # ours, and those of safetensors
            left.unlink(missing_ok=True)
        yield


@contextmanager
def _locked(path: Path, refusal: str, patience: float) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(FileLock(path, timeout=patience))
        except Timeout as error:
            raise ValueError(refusal) from error
        yield
