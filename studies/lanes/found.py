"""A finished study, read from its artifacts, checked, and accessible by arm, part and seed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from studies.common.stats import Value, paired_difference, summary
from studies.lanes.arms import ARMS
from studies.lanes.instruments import DRAWN, INSTRUMENTS
from studies.lanes.settings import Settings
from studies.lanes.study import Job

Content = Mapping[str, Any]
Read = Callable[[Content], Value]


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
    def of(values: Sequence[Value], unit: str, note: str = "") -> "Estimate":
        """Return the estimate from the defined ones of `values`."""
        s = summary(values)
        return Estimate(s["mean"], s["lo"], s["hi"], s["n"], unit, None, tuple(s["seeds"]), note)

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

    def by_seed(self, arm: str, part: str, read: Read) -> dict[int, Value]:
        """Return the values of an arm by seed.

        Raises:
            ValueError: If the study has no such part of the arm.
        """
        found = {seed: read(content) for (name, seed, own), content in self.contents.items() if (name, own) == (arm, part)}
        if not found:
            raise ValueError(f"the study has no part {part!r} of {arm!r}: run it again to create what is missing")
        return dict(sorted(found.items()))

    def measured(self, part: str) -> list[str]:
        """Return the arms for which the study has a part, in the order of the table."""
        return [arm for arm in ARMS if any((arm, part) == (name, own) for name, _, own in self.contents)]

    def drawn(self, instrument: str) -> list[Content]:
        """Return all draws of an instrument, in order."""
        return list(self.by_draw(instrument).values())

    def by_draw(self, instrument: str) -> dict[int, Content]:
        """Return all draws of an instrument by number.

        Raises:
            ValueError: If there are none.
        """
        found = {draw: content for (name, draw, _), content in self.contents.items() if name == instrument}
        if not found:
            raise ValueError(f"the study has no draw of {instrument!r}: run it again to create what is missing")
        return dict(sorted(found.items()))

    def mean(self, arm: str, part: str, read: Read, unit: str) -> Estimate:
        return Estimate.of(list(self.by_seed(arm, part, read).values()), unit)

    def difference(self, arm: str, reference: str, part: str, read: Read, unit: str, note: str = "") -> Estimate:
        """Return the estimate of `arm - reference`, paired by seed."""
        _, s = paired_difference(self.by_seed(arm, part, read), self.by_seed(reference, part, read))
        return Estimate(s["mean"], s["lo"], s["hi"], s["n"], unit, None, tuple(s["seeds"]), note)

    def wiring(self, name: str, read: Callable[[Content], float]) -> list[float]:
        """Return the values of one wiring of the instrument `symmetry`, by draw."""
        return [read(row) for content in self.drawn("symmetry") for row in content["wirings"] if row["wiring"] == name]


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
    jobs = [Job(settings, folder, None, arm, seed) for arm in arms for seed in seeds]
    for name in INSTRUMENTS:
        draws = range(settings.instruments.draws) if name in DRAWN else seeds
        jobs += [Job(settings, folder, None, name, draw) for draw in draws]
    contents: dict[tuple[str, int, str], Content] = {}
    for job in jobs:
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
