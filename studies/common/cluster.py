"""Jobs of a study on a cluster with Slurm, through submitit.

    python -m studies.route2 run --executor slurm --partition cpu --hours 4 --slurm account=me

A job is one process on one processor. A job that the cluster preempts, or that reaches its time limit, is queued again by itself
and goes on with what its files hold, so it ends with the bytes of a run that nothing interrupted. The command that submitted the
jobs watches them; Ctrl-C takes them out of the queue, and the same command, started again, goes on where they stopped.

submitit keeps its own files, pickles among them, in ``<run folder>/cluster``: only what you submitted yourself is read from there.
"""

import contextlib
import importlib.util
import logging
import math
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar

import tyro
from tqdm import tqdm

from mi_route2.validation import read_assignments
from studies.common.command_line import sentence
from studies.common.processes import run_pool, without_sigint

LOOKS = 0.5
"""Seconds between two looks at the queue."""
WARNING = 120
"""Seconds before the time limit at which a job is told to go back to the queue."""
ASKS = 10.0
"""Seconds between two questions to Slurm for its queue."""
GRACE = 60.0
"""Seconds that a job without a result may be missing in the queue: a shared folder can show its result that much later."""
LOST = "its job ended without a result ({state}): see {log}; run the same command again to go on"
FORGOTTEN = "Slurm's queue does not know it any more"


@dataclass(frozen=True)
class Cluster:
    """Cluster, and the shape of a job on it.

    Attributes:
        partition: Slurm's partition; ``None`` for the cluster's default.
        hours: Time limit of one stay on a machine; a job that needs more is queued again.
        memory: GB of a job.
        options: Further options of ``sbatch``.
        kind: ``slurm``, or submitit's ``local``, which starts processes on this machine.

    Raises:
        ValueError: A time limit that is too short to be told before it.
    """

    partition: str | None = None
    hours: float = 4.0
    memory: float = 4.0
    options: Mapping[str, str | bool] = field(default_factory=dict)
    kind: str = "slurm"

    def __post_init__(self) -> None:
        if not self.hours * 3600 > 2 * WARNING:
            raise ValueError(f"{self.hours:g} hours are too short: a job is told {WARNING} s before its end, so give at least 0.1")
        if math.isinf(self.hours):
            raise ValueError(f"{self.hours:g} hours are no time limit: give that of the partition")
        if not self.memory > 0:
            raise ValueError(f"{self.memory:g} GB of memory are none: give at least 1")
        if math.isinf(self.memory):
            raise ValueError(f"{self.memory:g} GB of memory are none that a machine has: give those of a job")

    def demand(self) -> None:
        """Raise ``ValueError`` if submitit is missing, or there is no Slurm on this machine."""
        if importlib.util.find_spec("submitit") is None:
            raise ValueError("a cluster needs submitit: pip install 'mi-route2[slurm]'")
        if self.kind == "slurm" and shutil.which("srun") is None:
            raise ValueError("there is no Slurm here (no srun): run this on a machine of a cluster, or leave --executor out")

    def executor(self, folder: Path) -> Any:
        """Return submitit's executor with these settings; the errors of ``demand``."""
        self.demand()
        import submitit

        executor = submitit.AutoExecutor(folder / "%j", cluster=self.kind, slurm_max_num_timeout=1000)
        logging.getLogger("submitit").setLevel(logging.ERROR)  # a cluster without accounting would be told of at each look
        shape = {"cpus_per_task": 1, "nodes": 1, "tasks_per_node": 1}
        executor.update_parameters(timeout_min=round(60 * self.hours), slurm_mem=f"{math.ceil(1024 * self.memory)}MB", **shape)
        executor.update_parameters(slurm_signal_delay_s=WARNING)
        if self.partition is not None:
            executor.update_parameters(slurm_partition=self.partition)
        return executor


@dataclass(frozen=True)
class Executor:
    """Options of a command that say where its jobs run."""

    executor: Annotated[
        Literal["local", "slurm"], tyro.conf.arg(help="processes of this machine, or jobs of a cluster (extra slurm)")
    ] = "local"
    partition: Annotated[str | None, tyro.conf.arg(help="with slurm: the partition")] = None
    hours: Annotated[float, tyro.conf.arg(help="with slurm: time limit of a job, which is queued again if it needs more")] = 4.0
    memory: Annotated[float, tyro.conf.arg(help="with slurm: GB of a job")] = 4.0
    slurm: Annotated[tuple[str, ...], tyro.conf.arg(help="with slurm: further options of sbatch, e.g. account=me qos=low")] = ()

    def cluster(self) -> Cluster | None:
        """Return the cluster that the options name; ``None`` for this machine.

        Raises:
            ValueError: Options that contradict each other, or there is no cluster.
        """
        if self.executor == "local":
            if self != Executor():
                raise ValueError("--partition, --hours, --memory and --slurm are options of a cluster: add --executor slurm")
            return None
        # submitit writes its own options with underscores, and of two spellings of one the later one would hold
        words = [word.partition("=") for word in self.slurm]
        given = read_assignments([name.replace("-", "_") + rest + value for name, rest, value in words], "--slurm")
        options = {name: value for name, value in given.items() if name and value}
        if wrong := [word for word, (name, _, value) in zip(self.slurm, words, strict=True) if not (name and value)]:
            raise ValueError(f"{wrong[0]!r} is no option of sbatch: write NAME=VALUE, as account=me")
        if moved := sorted(options.keys() & {"chdir", "D"}):
            raise ValueError(
                f"{moved[0]} would move the jobs away from the files of this command: leave it out, and start the command there"
            )
        cluster = Cluster(self.partition, self.hours, self.memory, options)
        cluster.demand()
        return cluster


J = TypeVar("J")
"""A job: a value that can be hashed and pickled, with ``name``, ``seed``, and ``finished``, which its files say."""


class JobError(RuntimeError):
    """A job failed; the message is the sentence for the user."""


@dataclass
class Task(Generic[J]):
    """Work of one job as the cluster runs it; ``JobError`` if it fails, so that jobs which wait for it do not start.

    Attributes:
        work: What is done with the job.
        left: Whether the job was queued again, so that this process only ends.
    """

    work: Callable[[J], object]
    left: bool = False

    def __call__(self, job: J) -> None:
        try:
            self.work(job)
        except Exception as error:
            if self.left:  # submitit's exit was raised inside of a library that made another error of it
                from submitit.local.local import LOCAL_REQUEUE_RETURN_CODE

                raise SystemExit(LOCAL_REQUEUE_RETURN_CODE) from error
            raise JobError(sentence(error)) from error

    def checkpoint(self, job: J) -> Any:
        """Return the job that is queued again if the cluster takes the machine away: the same, which resumes from its files."""
        from submitit.helpers import DelayedSubmission

        self.left = True
        return DelayedSubmission(Task(self.work), job)


class Look(NamedTuple, Generic[J]):
    """State of a job: whether it runs, whether it has ended, and the sentence of its failure."""

    job: J
    running: bool
    ended: bool
    failure: str | None


class _Entry(NamedTuple):
    """A submitted job's handle, and the jobs for which it waits."""

    handle: Any
    after: frozenset[Any]


class Queue(Generic[J]):
    """Jobs in the queue of a cluster; a context that takes them out of it if it is left early.

    Attributes:
        kind: ``slurm``, which knows that a job waits for others, or ``local``, to which a job is given when it may start.
    """

    def __init__(self, work: Callable[[J], object], cluster: Cluster, folder: Path):
        self.kind = cluster.kind
        self._task = Task(work)
        self._executor = cluster.executor(folder)
        self._options = {"kill_on_invalid_dep": "yes", "requeue": True, **cluster.options}
        self._entries: dict[J, _Entry] = {}
        self._asked, self._missed = -ASKS, dict[J, float]()

    def __enter__(self) -> "Queue[J]":
        return self

    def __exit__(self, *_: object) -> None:
        for entry in self._entries.values():
            entry.handle.cancel(check=False)

    def __contains__(self, job: J) -> bool:
        return job in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def submit(self, jobs: Sequence[J], after: Iterable[J] = ()) -> None:
        """Queue jobs, as an array if there are many; with Slurm they wait until the jobs ``after`` have ended well."""
        awaited = frozenset(after)
        if not jobs:
            return
        if self.kind == "slurm":
            ids = sorted(self._entries[job].handle.job_id for job in awaited)
            wait = {"dependency": ":".join(["afterok", *ids])} if ids else {}
            self._executor.update_parameters(slurm_additional_parameters=self._options | wait)
        # A job could be in the cluster's queue that nobody here knows; submitit cancels its local ones with the signal itself.
        with without_sigint() if self.kind == "slurm" else contextlib.nullcontext():
            with self._executor.batch():
                handles = [self._executor.submit(self._task, job) for job in jobs]
            self._entries |= {job: _Entry(handle, awaited) for job, handle in zip(jobs, handles, strict=True)}

    def looks(self) -> Iterator[Look[J]]:
        """Look at every job once; those that have ended leave the queue."""
        forgotten = self._forgotten(time.monotonic())
        for job, (handle, _) in list(self._entries.items()):
            if job not in self._entries:  # it was dropped since
                continue
            ended = handle.done()
            if ended or job in forgotten:
                del self._entries[job]
                failure = self._failure(job, handle) if ended else self._lost(job, handle, self._accounted(handle) or FORGOTTEN)
                yield Look(job, running=False, ended=True, failure=failure)
            else:
                yield Look(job, running=handle.state == "RUNNING", ended=False, failure=None)

    def _forgotten(self, now: float) -> list[J]:
        """Return the jobs that Slurm has not known for ``GRACE`` seconds.

        Without accounting, submitit waits for ever for the result of a job that was killed.
        """
        if self.kind != "slurm" or now < self._asked + ASKS:
            return []
        self._asked = now
        if (known := queued()) is None:
            return []
        missing = [job for job, entry in self._entries.items() if entry.handle.job_id not in known]
        self._missed = {job: self._missed.get(job, now) for job in missing}
        return [job for job, since in self._missed.items() if now >= since + GRACE]

    def drop(self, failed: J) -> list[J]:
        """Take the jobs that wait for this one out of the queue, and return them."""
        late = [job for job, entry in self._entries.items() if failed in entry.after]
        for job in late:
            self._entries.pop(job).handle.cancel(check=False)
        return late + [further for job in late for further in self.drop(job)]

    @staticmethod
    def _accounted(handle: Any) -> str | None:
        """Return what accounting says of a job, which submitit asks at ever longer intervals; ``None`` if it knows nothing."""
        state = handle.watcher.get_state(handle.job_id, mode="force").lower()
        return None if state == "unknown" else state

    def _failure(self, job: J, handle: Any) -> str | None:
        try:
            handle.result()
        except Exception as error:  # the job's own, with its trace, or submitit's if it ended without a result
            if told := re.search(r"JobError: (.*)", str(error)):
                return told[1]
            return self._lost(job, handle, handle.state.lower())
        return None

    def _lost(self, job: Any, handle: Any, state: str) -> str | None:
        """Return the sentence for a job without a result; ``None`` if its files are complete."""
        handle.cancel(check=False)  # a job that Slurm has queued again would run beside the next command's
        with contextlib.suppress(ValueError):  # its files are damaged
            if job.finished:
                return None
        return LOST.format(state=state, log=handle.paths.stderr)


def queued() -> set[str] | None:
    """Return the ids of this user's jobs that wait or run, those of arrays one by one; ``None`` if Slurm does not answer."""
    command = ["squeue", "--noheader", "--all", "--array", f"--user={os.getuid()}", "--format=%i"]
    plain = {name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")}  # which would filter
    try:
        return set(subprocess.run(command, env=plain, capture_output=True, text=True, timeout=30, check=True).stdout.split())
    except (OSError, subprocess.SubprocessError):
        return None


def run_each(
    work: Callable[[J], object],
    jobs: Sequence[J],
    files: Sequence[Path],
    what: str,
    *,
    workers: int,
    cluster: Cluster | None,
    folder: Path,
    quiet: bool,
) -> None:
    """Run jobs that wait for nothing, in processes of this machine (see ``run_pool``) or on a cluster.

    Args:
        work: What is done with a job; both are named by modules, so that a new process can import them.
        jobs: What is still to be done, the longest first.
        files: Files that the jobs leave; the bar counts those that are there.
        what: Named by the bar.
        workers: Processes of this machine.
        cluster: The cluster; ``None`` for this machine.
        folder: Folder of the run; submitit's files are kept in ``cluster`` there.
        quiet: Show no bar.

    Raises:
        RuntimeError: Jobs of a cluster failed, with a sentence for each, or a worker was killed.
        ValueError: There is no cluster. What a job raises on this machine passes through.
    """
    if cluster is None or not jobs:
        run_pool(work, jobs, workers, files, what, quiet=quiet)
        return
    failures = list[str]()
    with (
        tqdm(total=len(files), desc=what, unit="part", leave=False, disable=True if quiet else None) as bar,
        Queue(work, cluster, folder / "cluster") as queue,
    ):
        queue.submit(jobs)
        while queue:
            failures += [failed(look.job, look.failure) for look in queue.looks() if look.failure is not None]
            bar.update(sum(path.exists() for path in files) - bar.n)
            time.sleep(LOOKS)
    if failures:
        raise RuntimeError("; ".join(failures))


def failed(job: Any, reason: str) -> str:
    """Return the sentence for a job that failed."""
    return f"{job.name} at seed {job.seed} failed: {reason}"
