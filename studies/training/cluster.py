"""Runs of a study on a cluster with Slurm, through submitit.

    python -m studies.route2 run --executor slurm --partition cpu --hours 4 --slurm account=me

Each arm at a seed is a job of one processor. A seed's base job is queued first and its arms as an array that waits for it (arms
with a canary: for the runs of their canary too). A job that the cluster preempts, or that reaches its time limit, is queued again
by itself and goes on at its last checkpoint, with the bytes of a run that nothing interrupted. The command that submitted the jobs
watches the logs on the shared folder and writes the report at the end; Ctrl-C takes the jobs out of the queue, and the same
command, started again, goes on where they stopped.

submitit keeps its own files, pickles among them, in ``<run folder>/cluster``: only what you submitted yourself is read from there.
"""

import contextlib
import importlib.util
import logging
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from studies.training.job import PRECISIONS, Job, run_job
from studies.training.progress import Display, Follower, open_display
from studies.training.recorder import METRICS
from studies.training.schedule import Order, sentence, unfinished
from studies.training.worlds import base_model

LOOKS = 0.5
"""Seconds between two looks at the logs and the queue."""
WARNING = 120
"""Seconds before the time limit at which a job is told to go back to the queue."""
LOST = "its job ended without a result ({state}): see {log}; run the same command again to go on"


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
        if not self.memory > 0:
            raise ValueError(f"{self.memory:g} GB of memory are none: give at least 1")

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
        executor.update_parameters(timeout_min=round(60 * self.hours), slurm_mem=f"{self.memory:g}GB", **shape)
        executor.update_parameters(slurm_signal_delay_s=WARNING)
        if self.partition is not None:
            executor.update_parameters(slurm_partition=self.partition)
        return executor


class JobError(RuntimeError):
    """A job failed; the message is the sentence for the user."""


class Run:
    """One job as the cluster runs it; ``JobError`` if it fails, so that jobs which wait for it do not start."""

    def __call__(self, job: Job) -> None:
        try:
            if job.arm is None and job.settings.chat is None and not job.finished:
                base_model(job.settings, job.seed, job.cache, PRECISIONS[job.precision])
            run_job(job)
        except Exception as error:
            raise JobError(sentence(error)) from error

    def checkpoint(self, job: Job) -> Any:
        """Return what is queued again if the cluster takes the machine away: the same, which goes on at its last checkpoint."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, job)


def run_submitted(jobs: list[Job], cluster: Cluster, *, quiet: bool = False, live: bool = True) -> list[str]:
    """Run all jobs that are not finished on a cluster; return a sentence for each failure.

    Raises:
        ValueError: There is no cluster.
        KeyboardInterrupt: After the jobs have been taken out of the queue.
    """
    todo = unfinished(jobs)
    if not todo:
        return []
    queue = _Queue(todo, cluster)
    with open_display(jobs, todo, quiet=quiet, live=live) as display, queue.submitted():
        return queue.watch(display)


class _Queue:
    """Jobs in the queue of a cluster."""

    def __init__(self, jobs: list[Job], cluster: Cluster):
        self._jobs, self._kind = jobs, cluster.kind
        self._executor = cluster.executor(jobs[0].root / "cluster")
        self._options = {"kill_on_invalid_dep": "yes", "requeue": True, **cluster.options}
        self._order = Order(jobs)
        self._running: dict[Path, tuple[Job, Any]] = {}
        self._failures: list[str] = []

    @contextlib.contextmanager
    def submitted(self) -> Iterator[None]:
        """Context: the jobs are in the queue, and taken out of it if it is left early.

        Slurm knows which job waits for which; an executor without dependencies gets a job when it may start.
        """
        try:
            self._submit(self._order.free)
            while self._kind == "slurm" and self._order.waiting:
                for awaited in dict.fromkeys(frozenset(folders) for _, folders in self._order.waiting.values()):
                    if awaited <= self._running.keys():
                        self._submit(self._order.take(awaited), after=[self._running[folder][1] for folder in sorted(awaited)])
            yield
        finally:
            for _, handle in self._running.values():
                handle.cancel(check=False)

    def _submit(self, jobs: list[Job], after: Sequence[Any] = ()) -> None:
        if not jobs:
            return
        if self._kind == "slurm":
            wait = {"dependency": ":".join(["afterok", *(handle.job_id for handle in after)])} if after else {}
            self._executor.update_parameters(slurm_additional_parameters=self._options | wait)
        with self._executor.batch():
            handles = [self._executor.submit(Run(), job) for job in jobs]
        self._running |= {job.folder: (job, handle) for job, handle in zip(jobs, handles, strict=True)}

    def watch(self, display: Display) -> list[str]:
        """Show the jobs' progress until all have ended; return a sentence for each failure."""
        logs = {job.folder: Follower(job.folder / METRICS) for job in self._jobs if job.arm is not None}
        begun: set[Path] = set()
        while self._running:
            for folder, (job, handle) in list(self._running.items()):
                ended = handle.done()  # before the last look at its log
                rows = logs[folder].read() if folder in logs else []
                if folder not in begun and (ended or rows or handle.state == "RUNNING"):
                    begun.add(folder)
                    display.began(job)
                if rows:
                    display.moved(job, len(rows))
                if ended:
                    del self._running[folder]
                    self._end(job, handle, display)
            display.tick()
            time.sleep(LOOKS)
        return self._failures

    def _end(self, job: Job, handle: Any, display: Display) -> None:
        failure = None
        try:
            handle.result()
        except Exception as error:  # the job's own, with its trace, or submitit's if it ended without a result
            told = re.search(r"JobError: (.*)", str(error))
            if not told:
                handle.cancel(check=False)  # a job that Slurm has queued again would run beside the next command's
            if told or not job.finished:
                lost = LOST.format(state=handle.state.lower(), log=handle.paths.stderr)
                failure = f"{job.name} at seed {job.seed} failed: {told[1] if told else lost}"
        if failure is None:
            display.moved(job, 1 if job.arm is None else 0)
            self._submit(self._order.release(job))
        else:
            self._order.lose(job)
            self._failures.append(failure)
        display.ended(job, failure)
