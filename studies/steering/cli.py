"""``python -m studies.steering COMMAND``: gate steering and a quarantine by probes, and measure the benefit.

``run`` makes everything from scratch: base models, runs of studies.route2 (existing ones are reused), probes, experiments, tables
and figures. If a run was interrupted, the same command resumes it.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from studies.common.command_line import Config, Override, Seeds, Workers, read_seeds, report_command, run_command, show_paths
from studies.common.workers import Executor
from studies.steering.settings import SteeringSettings
from studies.training.settings import PRESETS, get_settings, override


@dataclass(frozen=True)
class SteeringRun:
    """Train what is missing, fit probes, run every experiment and write the report. Safe to interrupt and start again."""

    preset: Annotated[str, tyro.conf.arg(help=f"one of {', '.join(PRESETS)}")] = "strong"
    seeds: Seeds = "3"
    workers: Workers = 2
    out: Annotated[Path, tyro.conf.arg(help="folder for run folders; its runs of studies.route2 are reused")] = Path("runs")
    config: Config = None
    override: Override = ()
    tasks: Annotated[int, tyro.conf.arg(help="number of test tasks, each used in every mode")] = SteeringSettings.tasks
    train: Annotated[int, tyro.conf.arg(help="training rollouts for the probes, from the model, and as many from its base")] = (
        SteeringSettings.train
    )
    place: Annotated[Executor, tyro.conf.OmitArgPrefixes] = field(default_factory=Executor)

    def __call__(self) -> None:
        from studies.steering.study import run_study

        settings = SteeringSettings(
            run=override(get_settings(self.preset), self.override, self.config),
            tasks=self.tasks,
            train=self.train,
        )
        self.place.check()
        show_paths(run_study(settings, read_seeds(self.seeds), self.out, self.workers, self.place))


COMMANDS = {"run": SteeringRun, "report": report_command("studies.steering.report")}


def main() -> int:
    return run_command(COMMANDS, "studies.steering", __doc__, "goes on with the parts that are missing")
