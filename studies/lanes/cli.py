"""``python -m studies.lanes COMMAND``: rebuild the mechanisms of a language-model record and test its claims.

``run`` makes everything from scratch: the arms of a small byte-level model that the record's claims need, float64 instruments,
tables and figures. ``run --quick`` takes about a minute and shows that all parts work, but resolves no claim. If a run was
interrupted, the same command resumes it and produces the same bytes.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from studies.common.command_line import Workers, read_seeds, report_command, run_command, show_paths
from studies.common.workers import Executor


@dataclass(frozen=True)
class LanesRun:
    """Train what is missing, measure it, and write the table of claims and the figures. Safe to interrupt and start again."""

    quick: Annotated[bool, tyro.conf.arg(help="run every part once at a small size: two seeds, about a minute")] = False
    seeds: Annotated[
        str | None,
        tyro.conf.arg(help="a number (3 means 0, 1, 2), a range or a list (4,9); default 10-12, or 2 if quick"),
    ] = None
    out: Annotated[Path, tyro.conf.arg(help="folder for study folders")] = Path("runs")
    text: Annotated[Path | None, tyro.conf.arg(help="folder of UTF-8 text; default: this Python's standard library")] = None
    workers: Workers = 2
    place: Annotated[Executor, tyro.conf.OmitArgPrefixes] = field(default_factory=Executor)

    def __call__(self) -> None:
        from studies.lanes.report import TABLE, write_report
        from studies.lanes.settings import LanesSettings, open_text, quick
        from studies.lanes.study import run_study

        self.place.check()
        seeds = read_seeds(self.seeds or ("2" if self.quick else "10-12"))  # rates and sizes were tuned on seeds from 100 on
        settings = (quick if self.quick else LanesSettings)(open_text(self.text).sha256)
        folder = run_study(settings, seeds, self.out, text=self.text, workers=self.workers, executor=self.place)
        show_paths(write_report(folder))
        print((folder / TABLE).read_text(encoding="utf-8"))


@dataclass(frozen=True)
class LanesArms:
    """List the arms with their differences."""

    def __call__(self) -> None:
        from studies.lanes.arms import ARMS

        width = max(map(len, ARMS))
        for arm in ARMS.values():
            print(f"{arm.name:{width}}  {arm.about}")


COMMANDS: dict[str, Any] = {"run": LanesRun, "report": report_command("studies.lanes.report", "claims.md"), "arms": LanesArms}


def main() -> int:
    return run_command(COMMANDS, "studies.lanes", __doc__, "goes on with the parts that are missing")
