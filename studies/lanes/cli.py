"""``python -m studies.lanes COMMAND``: rebuild the mechanisms of a language-model record and test its claims.

``run`` makes everything from scratch: the arms of a small byte-level model that the record's claims need, float64 instruments,
tables and figures. ``run --full`` also trains the other arms, and trains all arms for longer. Start with ``run --quick``, which
takes about a minute and shows that all parts work, but resolves no claim. If a run was interrupted, the same command resumes it and
produces the same bytes.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from mi_route2.validation import demand_device
from studies.common.command_line import read_seeds, report_command, run_command, show_paths
from studies.common.workers import Executor
from studies.lanes.config import Precision

SEEDS = {"default": "10-12", "quick": "2", "full": "10-15"}
"""Profile -> its seeds. Rates and sizes were tuned on seeds from 100 on."""


@dataclass(frozen=True)
class Dev:
    """Training options for trials. Other options make another study, with its own folder."""

    steps: int | None = None
    batch: int | None = None
    length: int | None = None
    device: str | None = None
    precision: Precision | None = None
    compile: bool | None = None

    def given(self) -> dict[str, Any]:
        """Return the options that were given."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class Run:
    """Train what is missing, measure it, and write the table of claims and the figures. Safe to interrupt and start again."""

    quick: Annotated[bool, tyro.conf.arg(help="run every part once at a small size: two seeds, about a minute")] = False
    full: Annotated[bool, tyro.conf.arg(help="train all arms for five times as long, with six seeds; takes hours")] = False
    seeds: Annotated[
        str | None,
        tyro.conf.arg(help="a number (3 means 0, 1, 2), a range or a list (4,9); default 10-12; 2 if quick, 10-15 if full"),
    ] = None
    out: Annotated[Path, tyro.conf.arg(help="folder for study folders")] = Path("runs")
    text: Annotated[Path | None, tyro.conf.arg(help="folder of UTF-8 text; default: this Python's standard library")] = None
    workers: Annotated[int | None, tyro.conf.arg(help="processes; default: 2 of one thread each, or 1 with an accelerator")] = None
    dev: Dev = Dev()
    place: Annotated[Executor, tyro.conf.OmitArgPrefixes] = field(default_factory=Executor)

    def __call__(self) -> None:
        from studies.lanes.report import TABLE, write_report
        from studies.lanes.settings import open_text, settings_of
        from studies.lanes.study import run_study

        if self.quick and self.full:
            raise ValueError("--quick and --full exclude each other: give only one of them")
        profile = "quick" if self.quick else "full" if self.full else "default"
        seeds = read_seeds(self.seeds or SEEDS[profile])
        settings = settings_of(profile, open_text(self.text).sha256, self.dev.given())
        device = settings.training.device
        demand_device(device)  # before anything is written: raises if the device is not available
        self.place.check()
        workers = self.workers if self.workers is not None else 2 if device == "cpu" else 1
        folder = run_study(settings, seeds, self.out, text=self.text, workers=workers, executor=self.place)
        show_paths(write_report(folder))
        print((folder / TABLE).read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Arms:
    """List the arms with their differences."""

    def __call__(self) -> None:
        from studies.lanes.arms import ARMS

        width = max(map(len, ARMS))
        for arm in ARMS.values():
            print(f"{arm.name:{width}}  {arm.about}")


COMMANDS: dict[str, Any] = {"run": Run, "report": report_command("studies.lanes.report", "claims.md"), "arms": Arms}


def main() -> int:
    return run_command(COMMANDS, "studies.lanes", __doc__, "goes on with the parts that are missing")
