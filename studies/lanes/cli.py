"""``python -m studies.lanes COMMAND``: rebuild the mechanisms of a language-model record and test its claims about them.

``run`` makes everything from nothing: those arms of a small byte-level model that the record's claims need, float64 instruments,
tables and figures. ``run --full`` trains the other arms too, and all of them for longer. Start with ``run --quick``, which shows in
about a minute that all parts work and resolves nothing. The same command started again goes on where it stopped, and leaves the
same bytes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import tyro

from studies.common.command_line import read_seeds, run_command, show_paths
from studies.lanes.arms import ARMS
from studies.lanes.settings import Settings, full, open_text, quick
from studies.lanes.train import Precision, check_device

SEEDS = "10-12"
PROFILES: Mapping[str, tuple[Callable[[str], Settings], str]] = MappingProxyType({"quick": (quick, "2"), "full": (full, "10-15")})
"""Profile -> its settings, and the seeds that it runs. Rates and sizes were tuned on seeds from 100 on."""


@dataclass(frozen=True)
class Dev:
    """Sizes of the training, for trials: a study of other sizes is another study, in a folder of its own."""

    steps: int | None = None
    batch: int | None = None
    length: int | None = None
    device: str | None = None
    precision: Precision | None = None
    compile: bool | None = None

    def apply(self, settings: Settings) -> Settings:
        given = {field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None}
        if not given:
            return settings
        return replace(settings, training=replace(settings.training, **given), profile=f"{settings.profile}-dev")


@dataclass(frozen=True)
class Run:
    """Train what is missing, measure it, write the table of claims and the figures. Safe to interrupt and start again."""

    quick: Annotated[bool, tyro.conf.arg(help="everything once over, small: two seeds in about a minute")] = False
    full: Annotated[bool, tyro.conf.arg(help="all arms, five times the training, six seeds: hours")] = False
    seeds: Annotated[
        str | None,
        tyro.conf.arg(help="how many (3 means 0, 1, 2), a range or a list (4,9); 10-12, or 2 if quick, 10-15 if full"),
    ] = None
    out: Annotated[Path, tyro.conf.arg(help="where study folders are kept")] = Path("runs")
    text: Annotated[Path | None, tyro.conf.arg(help="a folder of UTF-8 text; without it, the running Python's own library")] = None
    workers: Annotated[int | None, tyro.conf.arg(help="processes; 2 of one thread each, or 1 with an accelerator")] = None
    dev: Dev = Dev()

    def __call__(self) -> None:
        from studies.lanes.report import TABLE, write_report
        from studies.lanes.study import run_study

        chosen = [name for name in PROFILES if getattr(self, name)]
        if len(chosen) > 1:
            raise ValueError("a study is quick or full: give one of --quick and --full")
        make, usual = PROFILES[chosen[0]] if chosen else (Settings, SEEDS)
        seeds = read_seeds(self.seeds or usual)
        settings = self.dev.apply(make(open_text(self.text).sha256))
        device = settings.training.device
        check_device(device)  # or it says that there is none, before anything is written
        workers = self.workers if self.workers is not None else 2 if device == "cpu" else 1
        folder = run_study(settings, seeds, self.out, text=self.text, workers=workers)
        show_paths(write_report(folder))
        print((folder / TABLE).read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Report:
    """Write the tables and figures of a study folder again, from its artifacts alone, and print the table of claims."""

    root: tyro.conf.Positional[Path]

    def __call__(self) -> None:
        from studies.lanes.report import TABLE, write_report

        show_paths(write_report(self.root))
        print((self.root / TABLE).read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Publish:
    """Copy the tables and figures of a study folder into the write-up."""

    root: tyro.conf.Positional[Path]
    to: Annotated[Path, tyro.conf.arg(help="results folder of the write-up")] = Path("docs/results")

    def __call__(self) -> None:
        from studies.lanes.report import publish

        print(f"wrote {publish(self.root, self.to)}")


@dataclass(frozen=True)
class Arms:
    """List the arms, and what each differs in."""

    def __call__(self) -> None:
        width = max(map(len, ARMS))
        for arm in ARMS.values():
            print(f"{arm.name:{width}}  {arm.about}")


COMMANDS: dict[str, Any] = {"run": Run, "report": Report, "publish": Publish, "arms": Arms}


def main() -> int:
    return run_command(COMMANDS, "studies.lanes", __doc__, "goes on with the parts that are missing")
