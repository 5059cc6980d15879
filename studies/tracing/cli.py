"""``python -m studies.tracing COMMAND``: find the adapter and the layer that carry the hack, and compare deleting with patching.

Start with ``run --help``. All results are written to ``--out``: trained arms to ``<preset>-<hash>/`` as by ``studies.route2``
(finished ones are reused), and traces to ``tracing-<hash>/``. If a run was interrupted, the same command resumes it.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from mi_route2.validation import unknown_name, write_json
from studies.common.command_line import (
    Config,
    Override,
    Seeds,
    Workers,
    named,
    read_seeds,
    report_command,
    run_command,
    show_paths,
)
from studies.common.workers import Executor, exclusive
from studies.tracing.settings import ARMS, TracingSettings
from studies.training.settings import get_settings, override


@dataclass(frozen=True)
class TracingRun:
    """Train the arms (or reuse finished ones), patch their adapters between hacking and honest rollouts, and write the report."""

    preset: Annotated[str, tyro.conf.arg(help="strong, weak or delta_s, as in studies.route2")] = "strong"
    seeds: Seeds = "3"
    arms: Annotated[tuple[str, ...], tyro.conf.arg(help="any arms of studies.route2")] = ARMS
    workers: Workers = 2
    out: Annotated[Path, tyro.conf.arg(help="folder for run folders")] = Path("runs")
    config: Config = None
    override: Override = ()
    prompts: Annotated[int, tyro.conf.arg(help="prompts of each mode; pairs are chosen from their answers")] = (
        TracingSettings.prompts
    )
    answers: Annotated[int, tyro.conf.arg(help="answers to each of these prompts")] = TracingSettings.answers
    pairs: Annotated[int, tyro.conf.arg(help="maximum number of pairs per contrast and seed")] = TracingSettings.pairs
    draws: Annotated[int, tyro.conf.arg(help="number of draws of each control")] = TracingSettings.draws
    rated: Annotated[int, tyro.conf.arg(help="prompts of each loophole for sampling hack rates")] = TracingSettings.rated
    place: Annotated[Executor, tyro.conf.OmitArgPrefixes] = field(default_factory=Executor)

    def __call__(self) -> None:
        from studies.environments.micro.language import all_tasks
        from studies.tracing.job import trace_jobs, train
        from studies.tracing.report import write_report

        training = override(get_settings(self.preset), self.override, self.config)
        settings = TracingSettings(training.digest, self.arms, self.prompts, self.answers, self.pairs, self.draws, self.rated)
        if self.workers < 1:
            raise ValueError(f"workers must be at least 1, not {self.workers}")
        there = len(all_tasks("test"))
        for name in ("prompts", "rated"):
            if (wanted := getattr(settings, name)) > there:
                raise ValueError(f"there are {there} test tasks: choose fewer {name} than {wanted}")
        self.place.check()
        jobs = train(training, read_seeds(self.seeds), self.arms, self.workers, self.out, self.place)
        root = self.out / settings.folder
        with exclusive(root):
            write_json(root / "settings.json", settings.as_dict())
            write_json(root / "training.json", training.as_dict())
            trace_jobs(root, settings, jobs, self.workers, self.place)
            show_paths(write_report(root))
            print((root / "table.md").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Blocks:
    """Say in which blocks the adapters of a chat model carry a hack, by leaving them out of finished runs.

    A hack of the arm and an honest answer of the base model to one prompt are a pair. Results are in --out: a table, a figure, and
    every number.
    """

    root: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(help="run folder of studies.route2")]
    arms: Annotated[tuple[str, ...], tyro.conf.arg(help="arms that are finished there")] = ("vanilla",)
    seeds: Seeds = "1"
    out: Annotated[
        Path | None, tyro.conf.arg(help="folder of the results of this run folder alone; default: PATH-blocks, beside it")
    ] = None
    prompts: Annotated[int, tyro.conf.arg(help="test tasks, each under every loophole")] = 8
    answers: Annotated[int, tyro.conf.arg(help="answers of the arm and of the base model to each prompt")] = 2
    groups: Annotated[int, tyro.conf.arg(help="groups of neighbouring blocks")] = 6
    pairs: Annotated[Path | None, tyro.conf.arg(help="the persona pairs that the run was given, if it was given its own")] = None

    def __call__(self) -> None:
        from studies.tracing.blocks import trace
        from studies.training.arms import ARMS as EVERY_ARM

        for name in ("prompts", "answers", "groups"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if unknown := [arm for arm in self.arms if arm not in EVERY_ARM]:
            raise ValueError(unknown_name(unknown[0], list(EVERY_ARM), "arm"))
        root = named(self.root)  # `..` has a folder beside it only by its path
        out = root.with_name(f"{root.name}-blocks") if self.out is None else self.out
        show_paths(trace(root, self.arms, read_seeds(self.seeds), out, self.prompts, self.answers, self.groups, self.pairs))
        print((out / "blocks.md").read_text(encoding="utf-8"))


COMMANDS = {"run": TracingRun, "blocks": Blocks, "report": report_command("studies.tracing.report")}


def main() -> int:
    return run_command(COMMANDS, "studies.tracing", __doc__, "goes on where it was")
