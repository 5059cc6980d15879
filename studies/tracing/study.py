"""The parts of a study that take hours: training of the arms, and their tracings."""

from pathlib import Path

from mi_route2.validation import write_json
from studies.common.cluster import Cluster, run_each
from studies.common.processes import exclusive
from studies.tracing.job import seed_tracings, trace_seed
from studies.tracing.settings import Settings
from studies.training.arms import get_arms
from studies.training.cluster import run_training
from studies.training.job import Job
from studies.training.settings import Settings as Training


def train(
    training: Training,
    seeds: list[int],
    arms: tuple[str, ...],
    workers: int,
    out: Path,
    cluster: Cluster | None = None,
    *,
    live: bool = True,
) -> list[Job]:
    """Run the unfinished jobs of the base model and of every arm at every seed; return all jobs.

    Raises:
        RuntimeError: If a job failed.
    """
    root = out / training.folder
    jobs = [Job(root, out / "warmstarts", training, seed, arm) for seed in seeds for arm in (None, *get_arms(arms))]
    todo = [job for job in jobs if not job.finished]
    if todo:
        with exclusive(root):
            write_json(root / "settings.json", training.as_dict())
            print(f"{len(todo)} of {len(jobs)} runs are still to be trained, into {root}")
            failures = run_training(jobs, workers, cluster, live=live)
        if failures:
            raise RuntimeError("; ".join(failures))
    return jobs


def trace_jobs(
    root: Path, settings: Settings, jobs: list[Job], workers: int = 1, cluster: Cluster | None = None, *, quiet: bool = False
) -> None:
    """Trace every job that is not traced yet."""
    todo = [seed for seed in seed_tracings(root, settings, jobs) if not seed.finished]
    files = [tracing.path for seed in todo for tracing in seed.tracings]
    run_each(trace_seed, todo, files, "tracing", workers=workers, cluster=cluster, folder=root, quiet=quiet)
