"""``python -m studies.steering COMMAND``: gate steering and a quarantine by probes, and say what it is worth.

``run`` makes everything from nothing: base models, runs of studies.route2 (those that are there are taken), probes, experiments,
tables and figures. The same command started again goes on where it stopped.
"""

from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated

import tyro
from tqdm import tqdm

from mi_route2.validation import write_json
from studies.common.command_line import read_seeds, run_command, show_paths
from studies.common.processes import end_silently, exclusive
from studies.route2.cli import override
from studies.route2.schedule import run_jobs
from studies.route2.settings import PRESETS, get_settings
from studies.steering.job import SteeringJob, parts_of, run_steering
from studies.steering.report import publish, write_report
from studies.steering.settings import OWN, SUBJECTS, Settings


@dataclass(frozen=True)
class Run:
    """Train what is missing, fit probes, run every experiment and write the report. Safe to interrupt and start again."""

    preset: Annotated[str, tyro.conf.arg(help=f"one of {', '.join(PRESETS)}")] = "strong"
    seeds: Annotated[str, tyro.conf.arg(help="how many (3 means 0, 1, 2), a range (0-7) or a list (4,9)")] = "3"
    workers: Annotated[int, tyro.conf.arg(help="processes, one thread each")] = 2
    out: Annotated[Path, tyro.conf.arg(help="where run folders are kept; runs of studies.route2 in it are taken")] = Path("runs")
    override: Annotated[tuple[str, ...], tyro.conf.arg(help="settings of the runs to change, e.g. steps=40")] = ()
    tasks: Annotated[int, tyro.conf.arg(help="test tasks, each asked in every mode")] = Settings.tasks
    train: Annotated[int, tyro.conf.arg(help="training rollouts for the probes, from the model and from its base each")] = (
        Settings.train
    )

    def __call__(self) -> None:
        settings = Settings(run=override(get_settings(self.preset), self.override), tasks=self.tasks, train=self.train)
        show_paths(run_study(settings, read_seeds(self.seeds), self.out, self.workers))


@dataclass(frozen=True)
class Report:
    """Write tables and figures of a folder again, from its artifacts alone."""

    folder: tyro.conf.Positional[Path]

    def __call__(self) -> None:
        show_paths(write_report(self.folder))


@dataclass(frozen=True)
class Publish:
    """Copy a folder's tables and figures into the write-up."""

    folder: tyro.conf.Positional[Path]
    to: Annotated[Path, tyro.conf.arg(help="results folder of the write-up")] = Path("docs/results")

    def __call__(self) -> None:
        print(f"wrote {publish(self.folder, self.to)}")


def run_study(settings: Settings, seeds: list[int], out: Path, workers: int = 2, *, quiet: bool = False) -> list[Path]:
    """All of it; the paths of the report. ``RuntimeError`` names what failed, ``ValueError`` what is not this study's."""
    if workers < 1:
        raise ValueError(f"workers must be at least 1, not {workers}")
    jobs = [SteeringJob(settings, out, seed, subject) for seed in seeds for subject in SUBJECTS]
    runs = list(dict.fromkeys(job.run for job in jobs))
    runs = [run for run in runs if run.arm is None] + [run for run in runs if run.arm is not None]
    folder = out / settings.folder
    with exclusive(folder):
        settings.write(folder)
        for job in jobs:
            if job.run.finished:
                _ = job.finished  # a folder of another study is refused before any work
        if todo := [run for run in runs if not run.finished]:
            with exclusive(out / settings.run.folder):
                write_json(out / settings.run.folder / OWN, settings.run.as_dict())
                if failures := run_jobs(todo, workers, quiet=quiet, live=False):
                    raise RuntimeError("; ".join(failures))
        _experiments(jobs, workers, quiet)
        return write_report(folder)


def _experiments(jobs: list[SteeringJob], workers: int, quiet: bool) -> None:
    """Every job that is not finished, over a few processes; parts appear on the disk as they are made."""
    todo = [job for job in jobs if not job.finished]
    if workers == 1 or len(todo) < 2:
        for job in tqdm(todo, desc="experiments", unit="model", delay=3, leave=False, disable=True if quiet else None):
            run_steering(job)
        return
    parts = [job.folder / f"{part}.json" for job in todo for part in parts_of(job.subject)]
    with ProcessPoolExecutor(min(workers, len(todo)), get_context("spawn"), initializer=end_silently) as pool:
        # the longest first, so that none of them is left for the end
        left = {pool.submit(run_steering, job) for job in sorted(todo, key=lambda job: -len(parts_of(job.subject)))}
        try:
            with tqdm(total=len(parts), desc="experiments", unit="part", leave=False, disable=True if quiet else None) as bar:
                while left:
                    done, left = wait(left, timeout=0.5)
                    bar.update(sum(path.exists() for path in parts) - bar.n)
                    for one in done:
                        one.result()
        finally:
            pool.shutdown(cancel_futures=True)


COMMANDS = {"run": Run, "report": Report, "publish": Publish}


def main() -> int:
    return run_command(COMMANDS, "studies.steering", __doc__, "goes on with the parts that are missing")
