"""The whole study: runs of studies.route2, probes, experiments, and the report."""

from pathlib import Path

from mi_route2.validation import write_json
from studies.common.workers import Executor, demand, exclusive, run_each
from studies.environments.micro.language import all_tasks
from studies.steering.job import SteeringJob, parts_of, run_steering
from studies.steering.report import write_report
from studies.steering.settings import FILE, SUBJECTS, SteeringSettings
from studies.training.run import run_jobs


def run_study(
    settings: SteeringSettings,
    seeds: list[int],
    out: Path,
    workers: int = 2,
    executor: Executor = Executor(),  # noqa: B008 - frozen
    *,
    quiet: bool = False,
) -> list[Path]:
    """Run the whole study and return the paths of the report.

    Raises:
        RuntimeError: If a job failed; the message names it.
        ValueError: If ``workers`` is less than 1, if there are too few test tasks, or if a file belongs to another study.
    """
    if workers < 1:
        raise ValueError(f"workers must be at least 1, not {workers}")
    if settings.tasks > (there := len(all_tasks("test"))):
        raise ValueError(f"there are {there} test tasks: choose fewer tasks than {settings.tasks}")
    jobs = [SteeringJob(settings, out, seed, subject) for seed in seeds for subject in SUBJECTS]
    runs = list(dict.fromkeys(job.run for job in jobs))
    folder = out / settings.folder
    with exclusive(folder):
        settings.write(folder)
        for job in jobs:
            if job.run.finished:
                _ = job.finished  # refuses a folder of another study before any work
        if todo := [run for run in runs if not run.finished]:
            with exclusive(out / settings.run.folder):
                write_json(out / settings.run.folder / FILE, settings.run.as_dict())
                if failures := run_jobs(todo, workers, executor, quiet=quiet):
                    raise RuntimeError("; ".join(failures))
        # the longest jobs first, so that no worker is left with one at the end
        left = sorted((job for job in jobs if not job.finished), key=lambda job: -len(parts_of(job.subject)))
        demand(run_each(run_steering, left, workers=workers, executor=executor, folder=folder, what="experiments", quiet=quiet))
        return write_report(folder)
