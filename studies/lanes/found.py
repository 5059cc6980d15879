"""A finished study as its artifacts have it: checked, and asked by arm, part and seed."""

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
    """What was measured: the mean of n values with its Student-t interval (None for fewer than two), or an identity.

    holds: whether an identity holds, None for a quantity. `value` is then the worst deviation, or the number that was found.
    each: the values. note: what a reader should know beside the number.
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
        """Of the defined ones among `values`."""
        s = summary(values)
        return Estimate(s["mean"], s["lo"], s["hi"], s["n"], unit, None, tuple(s["seeds"]), note)

    @staticmethod
    def identity(worst: float, holds: bool, n: int, unit: str, note: str = "") -> "Estimate":
        return Estimate(worst, None, None, n, unit, holds, (), note)


@dataclass(frozen=True)
class Found:
    """`contents`: (name of an arm or an instrument, seed or draw, part) -> what the part says."""

    settings: Settings
    contents: Mapping[tuple[str, int, str], Content]

    @property
    def seeds(self) -> tuple[int, ...]:
        """Those at which every arm was measured."""
        return tuple(sorted({seed for name, seed, part in self.contents if name in ARMS and part == "bpb"}))

    def by_seed(self, arm: str, part: str, read: Read) -> dict[int, Value]:
        """Of an arm, seed by seed. Raises ValueError where it was not measured."""
        found = {seed: read(content) for (name, seed, own), content in self.contents.items() if (name, own) == (arm, part)}
        if not found:
            raise ValueError(f"the study has no part {part!r} of {arm!r}: run it again, which makes what is missing")
        return dict(sorted(found.items()))

    def measured(self, part: str) -> list[str]:
        """The arms of which the study has a part, in the order of the table."""
        return [arm for arm in ARMS if any((arm, part) == (name, own) for name, _, own in self.contents)]

    def drawn(self, instrument: str) -> list[Content]:
        """All draws of an instrument, in order."""
        return list(self.by_draw(instrument).values())

    def by_draw(self, instrument: str) -> dict[int, Content]:
        """All draws of an instrument by number. Raises ValueError where there is none."""
        found = {draw: content for (name, draw, _), content in self.contents.items() if name == instrument}
        if not found:
            raise ValueError(f"the study has no draw of {instrument!r}: run it again, which makes what is missing")
        return dict(sorted(found.items()))

    def mean(self, arm: str, part: str, read: Read, unit: str) -> Estimate:
        return Estimate.of(list(self.by_seed(arm, part, read).values()), unit)

    def difference(self, arm: str, reference: str, part: str, read: Read, unit: str, note: str = "") -> Estimate:
        """`arm - reference`, paired by seed."""
        _, s = paired_difference(self.by_seed(arm, part, read), self.by_seed(reference, part, read))
        return Estimate(s["mean"], s["lo"], s["hi"], s["n"], unit, None, tuple(s["seeds"]), note)

    def wiring(self, name: str, read: Callable[[Content], float]) -> list[float]:
        """Of one wiring of the instrument `symmetry`, draw by draw."""
        return [read(row) for content in self.drawn("symmetry") for row in content["wirings"] if row["wiring"] == name]


def load(folder: Path) -> Found:
    """Read and check all parts of a study. ``ValueError`` where a part is missing or damaged, or nothing was finished."""
    settings = Settings.read(folder)
    places = sorted((folder / "arms").glob("*/seed-*"))
    seeds = sorted({int(place.name.partition("-")[2]) for place in places})
    if folder.name != settings.folder or not seeds:
        raise ValueError(f"{folder} holds no finished study; `run` makes one, and goes on with one that was ended")
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
                raise ValueError(f"{job.path(part)} is missing: the run was ended early, and the same command goes on with it")
            contents[job.name, job.seed, part] = found[0]
    return Found(settings, contents)


def tensors(folder: Path, found: Found, arm: str, seed: int, part: str) -> dict[str, Tensor]:
    """The tensors of a part."""
    read = Job(found.settings, folder, None, arm, seed).read(part)
    assert read is not None
    return read[1]
