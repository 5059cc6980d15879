"""``python -m studies.steering COMMAND``: gate steering and a quarantine by probes, and measure the benefit.

``run`` makes everything from scratch: base models, runs of studies.route2 (existing ones are reused), probes, experiments, tables
and figures. If a run was interrupted, the same command resumes it.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from mi_route2.validation import write_json
from studies.common.cluster import Cluster, Executor, run_each
from studies.common.command_line import read_seeds, run_command, show_paths
from studies.common.processes import exclusive
from studies.steering.settings import OWN, SUBJECTS, Settings
from studies.training.cluster import run_training
from studies.training.settings import PRESETS, get_settings, override


@dataclass(frozen=True)
class Run:
    """Train what is missing, fit probes, run every experiment and write the report. Safe to interrupt and start again."""

    preset: Annotated[str, tyro.conf.arg(help=f"one of {', '.join(PRESETS)}")] = "strong"
    seeds: Annotated[str, tyro.conf.arg(help="a number (3 means 0, 1, 2), a range (0-7) or a list (4,9)")] = "3"
    workers: Annotated[int, tyro.conf.arg(help="number of processes, one thread each")] = 2
    out: Annotated[Path, tyro.conf.arg(help="folder for run folders; its runs of studies.route2 are reused")] = Path("runs")
    config: Annotated[Path | None, tyro.conf.arg(help="TOML file of run settings to change; --override takes precedence")] = None
    override: Annotated[tuple[str, ...], tyro.conf.arg(help="run settings to change, e.g. steps=40")] = ()
    tasks: Annotated[int, tyro.conf.arg(help="number of test tasks, each used in every mode")] = Settings.tasks
    train: Annotated[int, tyro.conf.arg(help="training rollouts for the probes, from the model, and as many from its base")] = (
        Settings.train
    )
    place: Annotated[Executor, tyro.conf.OmitArgPrefixes] = field(default_factory=Executor)

    def __call__(self) -> None:
        settings = Settings(
            run=override(get_settings(self.preset), self.override, self.config),
            tasks=self.tasks,
            train=self.train,
        )
        show_paths(run_study(settings, read_seeds(self.seeds), self.out, self.workers, self.place.cluster()))


@dataclass(frozen=True)
class Report:
    """Rewrite the tables and figures of a folder from its artifacts alone."""

    folder: tyro.conf.Positional[Path]

    def __call__(self) -> None:
        from studies.steering.report import write_report

        show_paths(write_report(self.folder))


@dataclass(frozen=True)
class Publish:
    """Copy a folder's tables and figures to the write-up."""

    folder: tyro.conf.Positional[Path]
    to: Annotated[Path, tyro.conf.arg(help="results folder of the write-up")] = Path("docs/results")

    def __call__(self) -> None:
        from studies.steering.report import publish

        print(f"wrote {publish(self.folder, self.to)}")


def run_study(
    settings: Settings, seeds: list[int], out: Path, workers: int = 2, cluster: Cluster | None = None, *, quiet: bool = False
) -> list[Path]:
    """Run the whole study and return the paths of the report.

    Raises:
        RuntimeError: If a job failed; the message names it.
        ValueError: If ``workers`` is less than 1, or if a file belongs to another study.
    """
    from studies.steering.job import SteeringJob, parts_of, run_steering
    from studies.steering.report import write_report

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
                _ = job.finished  # refuses a folder of another study before any work
        if todo := [run for run in runs if not run.finished]:
            with exclusive(out / settings.run.folder):
                write_json(out / settings.run.folder / OWN, settings.run.as_dict())
                if failures := run_training(todo, workers, cluster, quiet=quiet, live=False):
                    raise RuntimeError("; ".join(failures))
        left = sorted((job for job in jobs if not job.finished), key=lambda job: -len(parts_of(job.subject)))
        parts = [job.path(part) for job in left for part in parts_of(job.subject)]
        run_each(run_steering, left, parts, "experiments", workers=workers, cluster=cluster, folder=folder, quiet=quiet)
        return write_report(folder)


COMMANDS = {"run": Run, "report": Report, "publish": Publish}


def main() -> int:
    return run_command(COMMANDS, "studies.steering", __doc__, "goes on with the parts that are missing")
