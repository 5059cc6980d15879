"""A finished study, read from its artifacts, checked, and accessible by arm, part and seed."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from studies.common.stats import Value, paired_difference, summary
from studies.lanes.arms import ARMS
from studies.lanes.settings import Settings
from studies.lanes.study import Job, jobs_of

Content = Mapping[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Estimate:
    """An estimate: the mean of n values with its Student-t interval (None for fewer than two values), or an identity.

    Attributes:
        value: The mean; of an identity the largest deviation, or the number that was measured.
        low: Lower end of the interval.
        high: Upper end of the interval.
        n: Number of values.
        unit: Unit of the value.
        holds: Whether an identity holds; None for a quantity.
        each: The values.
        note: What a reader should know beside the number.
    """

    value: float | None
    low: float | None
    high: float | None
    n: int
    unit: str
    holds: bool | None = None
    each: tuple[float | None, ...] = ()
    note: str = ""

    @staticmethod
    def of(values: Iterable[Value], unit: str, note: str = "") -> "Estimate":
        """Return the estimate from the defined ones of `values`."""
        s = summary(list(values))
        return Estimate(s["mean"], s["lo"], s["hi"], s["n"], unit, None, tuple(s["seeds"]), note)

    @staticmethod
    def paired(arm: Mapping[int, Value], reference: Mapping[int, Value], unit: str, note: str = "") -> "Estimate":
        """Return the estimate of `arm - reference`, paired by seed."""
        return Estimate.of(paired_difference(arm, reference)[1]["seeds"], unit, note)

    @staticmethod
    def identity(worst: float, holds: bool, n: int, unit: str, note: str = "") -> "Estimate":
        return Estimate(worst, None, None, n, unit, holds, (), note)


@dataclass(frozen=True)
class Found:
    """The settings of a study and the contents of its artifacts.

    Attributes:
        settings: The study's settings.
        contents: (arm or instrument, seed or draw, part) -> content of the part.
    """

    settings: Settings
    contents: Mapping[tuple[str, int, str], Content]

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds at which arms were measured."""
        return tuple(sorted({seed for name, seed, part in self.contents if name in ARMS and part == "bpb"}))

    def by_seed(self, name: str, part: str, read: Callable[[Content], T] = lambda content: content) -> dict[int, T]:
        """Return what `read` reads from a part of an arm or an instrument, by seed or draw.

        Raises:
            ValueError: If the study has no such part.
        """
        found = {seed: read(content) for (arm, seed, own), content in self.contents.items() if (arm, own) == (name, part)}
        if not found:
            raise ValueError(f"the study has no part {part!r} of {name!r}: run it again to create what is missing")
        return dict(sorted(found.items()))

    def drawn(self, instrument: str) -> list[Content]:
        """Return all draws of an instrument, in order."""
        return list(self.by_seed(instrument, instrument).values())

    def measured(self, part: str) -> list[str]:
        """Return the arms for which the study has a part, in the order of the table."""
        return [arm for arm in ARMS if any((arm, part) == (name, own) for name, _, own in self.contents)]


def load(folder: Path) -> Found:
    """Read and check all parts of a study.

    Raises:
        ValueError: If a part is missing or damaged, or if the folder has no finished study.
    """
    settings = Settings.read(folder)
    places = sorted((folder / "arms").glob("*/seed-*"))
    seeds = sorted({int(place.name.partition("-")[2]) for place in places})
    if folder.name != settings.folder or not seeds:
        raise ValueError(f"{folder} contains no finished study: `run` creates one, or resumes an interrupted one")
    arms = [name for name in ARMS if (folder / "arms" / name).is_dir()]
    contents: dict[tuple[str, int, str], Content] = {}
    for job in jobs_of(settings, folder, None, seeds, arms):
        for part in job.parts:
            found = job.read(part)
            if found is None:
                raise ValueError(f"{job.path(part)} is missing because the run was interrupted: the same command resumes it")
            contents[job.name, job.seed, part] = found[0]
    return Found(settings, contents)


def tensors(folder: Path, found: Found, arm: str, seed: int, part: str) -> dict[str, Tensor]:
    """Return the tensors of a part."""
    read = Job(found.settings, folder, None, arm, seed).read(part)
    assert read is not None
    return read[1]
