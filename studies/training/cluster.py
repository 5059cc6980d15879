"""Runs of a study, on this machine or on a cluster (see ``studies.common.cluster``).

Each arm at a seed is a job. A seed's base job is queued first and its arms as an array that waits for it (arms with a canary: for
the runs of their canary too).
"""

import time
from pathlib import Path

import torch

from studies.common.cluster import LOOKS, Cluster, Queue, failed
from studies.training.job import PRECISIONS, Job
from studies.training.progress import Display, open_display
from studies.training.recorder import METRICS, Follower
from studies.training.run import run_job
from studies.training.schedule import Order, run_jobs, unfinished, without
from studies.training.worlds import base_model


def run_training(
    jobs: list[Job],
    workers: int,
    cluster: Cluster | None = None,
    *,
    quiet: bool = False,
    live: bool = True,
    report_to: str | None = None,
) -> list[str]:
    """Run all jobs that are not finished, in workers of this machine or on a cluster; return a sentence for each failure.

    Raises:
        ValueError: There is no cluster.
        KeyboardInterrupt: After the workers have stopped, or the jobs have been taken out of the queue.
    """
    if cluster is None:
        return run_jobs(jobs, workers, quiet=quiet, live=live, report_to=report_to)
    assert report_to is None  # the command refuses it
    return run_submitted(jobs, cluster, quiet=quiet, live=live)


def run_queued(job: Job) -> None:
    """Run a job on a machine of the cluster, after making its seed's base model if the job is that of the base."""
    torch.set_num_threads(1)  # a warm start's bits depend on the number of threads, and not every cluster binds a job to its core
    if job.arm is None and job.settings.chat is None and not job.finished:
        base_model(job.settings, job.seed, job.cache, PRECISIONS[job.precision], device=job.device)
    run_job(job)


def run_submitted(jobs: list[Job], cluster: Cluster, *, quiet: bool = False, live: bool = True) -> list[str]:
    """Run all jobs that are not finished on a cluster; return a sentence for each failure.

    Raises:
        ValueError: There is no cluster.
        KeyboardInterrupt: After the jobs have been taken out of the queue.
    """
    todo = unfinished(jobs)
    if not todo:
        return []
    with open_display(jobs, todo, quiet=quiet, live=live) as display, Queue(run_queued, cluster, todo[0].root / "cluster") as queue:
        order = Order(todo)
        _submit(queue, order, {job.folder: job for job in todo})
        return _watch(queue, order, todo, display)


def _submit(queue: Queue[Job], order: Order, jobs: dict[Path, Job]) -> None:
    """Queue what may start; with Slurm, which knows which job waits for which, all the rest too."""
    queue.submit(order.free)
    while queue.kind == "slurm" and order.waiting:
        for folders in dict.fromkeys(frozenset(folders) for _, folders in order.waiting.values()):
            awaited = [jobs[folder] for folder in folders]
            if all(job in queue for job in awaited):
                queue.submit(order.take(folders), awaited)


def _watch(queue: Queue[Job], order: Order, jobs: list[Job], display: Display) -> list[str]:
    """Show the jobs' progress until all have ended; return a sentence for each failure."""
    logs = {job: Follower(job.folder / METRICS) for job in jobs if job.arm is not None}
    begun, failures = set[Job](), list[str]()
    while queue:
        for job, running, ended, failure in queue.looks():
            rows = logs[job].read() if job in logs else []  # after its end was seen
            if job not in begun and (running or ended or rows):
                begun.add(job)
                display.began(job)
            if rows:
                display.moved(job, len(rows))
            if failure is not None:
                failures.append(failed(job, failure + without(len(order.lose(job)) + len(queue.drop(job)))))
                display.ended(job, failures[-1])
            elif ended:
                display.moved(job, 1 if job.arm is None else 0)
                display.ended(job, None)
                queue.submit(order.release(job))
        display.tick()
        time.sleep(LOOKS)
    return failures
