"""How much of a run fits a window: from a row for each job, over arms by seeds, down to what runs now."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table
from rich.text import Text

from studies.route2.follow import Follower
from studies.route2.job import Job

WINDOW = 60.0  # seconds that the speed is a mean over
STYLES = {"waiting": "dim", "running": "cyan", "finished": "green", "failed": "bold red"}


@dataclass
class Seen:
    """What is known of one job."""

    job: Job
    log: Follower
    state: str = "waiting"
    done: int = 0
    warmed: int = 0
    """Steps of a base model's training."""
    since: tuple[float, int] | None = None
    """When this start's first message came, and how many steps an earlier start had made by then."""
    row: dict[str, Any] = field(default_factory=dict)
    """The last metrics row."""

    def read(self) -> None:
        self.row = (self.log.read() or [self.row])[-1]

    @property
    def steps(self) -> str:
        if self.job.arm is not None:
            return f"{self.done}/{self.job.settings.steps}"
        return f"{self.warmed}/{self.job.settings.warm.steps}" if self.warmed and self.state == "running" else ""

    @property
    def place(self) -> str:
        """Where it is, in few letters."""
        return {"waiting": "-", "running": self.steps or "runs", "finished": "done"}.get(self.state, self.state)

    def rate(self, name: str) -> str:
        return f"{self.row[name]:.2f}".lstrip("0") if name in self.row else ""

    @property
    def speed(self) -> str:
        """Steps a second in this start, while it runs."""
        if self.job.arm is None or self.state != "running" or self.since is None or self.done == self.since[1]:
            return ""
        return f"{(self.done - self.since[1]) / (time.monotonic() - self.since[0]):.1f}/s"


class Pace:
    """Steps a second over the last minute."""

    def __init__(self, now: Callable[[], float] = time.monotonic):
        self._now, self._start = now, now()
        self._steps: deque[tuple[float, int]] = deque()

    def add(self, steps: int) -> None:
        self._steps.append((self._now(), steps))

    @property
    def elapsed(self) -> float:
        return self._now() - self._start

    def speed(self) -> float:
        """0.0 before the first step."""
        now = self._now()
        while self._steps and self._steps[0][0] < now - WINDOW:
            self._steps.popleft()
        span = now - self._steps[0][0] if self._steps else 0.0
        return sum(steps for _, steps in self._steps) / span if span > 0 else 0.0


def clock(seconds: float) -> str:
    """Hours, minutes and seconds: ``1:02:03``."""
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


def _listing(seen: list[Seen]) -> Table:
    """A row for each job."""
    table = Table("arm", "seed", "", "step", "hack", "solve", "speed", box=None, pad_edge=False)
    for one in seen:
        cells = (str(one.job.seed), one.state, one.steps, one.rate("hack"), one.rate("solve"), one.speed)
        table.add_row(one.job.name, *cells, style=STYLES[one.state])
    return table


def _at_work(seen: list[Seen]) -> Table:
    """A row for each job that runs now."""
    return _listing([one for one in seen if one.state == "running"])


def _grid(cell: Callable[[Seen], str], title: str) -> Callable[[list[Seen]], Table]:
    """A row for each arm, a column for each seed."""

    def layout(seen: list[Seen]) -> Table:
        seeds = sorted({one.job.seed for one in seen})
        arms = list(dict.fromkeys(one.job.name for one in seen))
        place = {(one.job.name, one.job.seed): one for one in seen}
        table = Table(title, *(f"seed {seed}" for seed in seeds), box=None, pad_edge=False)
        for arm in arms:
            row = [place.get((arm, seed)) for seed in seeds]
            table.add_row(arm, *(Text("" if one is None else cell(one), STYLES[one.state] if one else "") for one in row))
        return table

    return layout


def _wide(one: Seen) -> str:
    rates = [f"{name} {one.rate(name)}" for name in ("hack", "solve") if one.row]
    return "  ".join(part for part in (one.place, *rates, one.speed) if part)


def _rates(one: Seen) -> str:
    return f"{one.place} {one.rate('hack')}/{one.rate('solve')}" if one.row else one.place


def _hack(one: Seen) -> str:
    return f"{one.place} {one.rate('hack')}"


def _place(one: Seen) -> str:
    return one.place


RATES, HACK, PLACE = _grid(_rates, "hack/solve"), _grid(_hack, "hack"), _grid(_place, "arm")
LAYOUTS: tuple[tuple[Callable[[list[Seen]], Table], ...], ...] = (
    (_listing,),
    (_grid(_wide, "arm"),),
    (RATES, _at_work),
    (RATES,),
    (HACK, _at_work),
    (HACK,),
    (PLACE, _at_work),
    (PLACE,),
    (_at_work,),
)
"""From the fullest to the least; a window that fits none of them gets the lines below the tables."""
