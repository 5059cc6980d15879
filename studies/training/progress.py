"""Progress display of a run: a live table of arms and seeds, or a bar."""

import os
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text
from tqdm import tqdm

from studies.training.job import Job
from studies.training.recorder import METRICS, Follower

WINDOW = 60.0  # seconds over which the speed is averaged
STYLES = {"waiting": "dim", "running": "cyan", "finished": "green", "failed": "bold red"}


@dataclass
class Seen:
    """Displayed state of one job."""

    job: Job
    log: Follower
    name: str
    """Name of the arm, with its preset if there are several."""
    state: str = "waiting"
    done: int = 0
    warmed: int = 0
    """Finished steps of the base model's training."""
    since: tuple[float, int] | None = None
    """Time of the first message, and the number of steps that were finished before."""
    row: dict[str, Any] = field(default_factory=dict)
    """Last metrics row."""

    def read(self) -> None:
        self.row = (self.log.read() or [self.row])[-1]

    @property
    def steps(self) -> str:
        if self.job.arm is not None:
            return f"{self.done}/{self.job.steps}"
        return f"{self.warmed}/{self.job.settings.warm.steps}" if self.warmed and self.state == "running" else ""

    @property
    def place(self) -> str:
        """Short text of the job's state."""
        return {"waiting": "-", "running": self.steps or "runs", "finished": "done"}.get(self.state, self.state)

    def rate(self, name: str) -> str:
        return f"{self.row[name]:.2f}".lstrip("0") if name in self.row else ""

    @property
    def speed(self) -> str:
        """Steps per second since this start, while the job runs."""
        if self.job.arm is None or self.state != "running" or self.since is None or self.done == self.since[1]:
            return ""
        return f"{(self.done - self.since[1]) / (time.monotonic() - self.since[0]):.1f}/s"


class Pace:
    """Steps per second over the last minute."""

    def __init__(self, now: Callable[[], float] = time.monotonic):
        self._now, self._start = now, now()
        self._steps: deque[tuple[float, int]] = deque()

    def add(self, steps: int) -> None:
        self._steps.append((self._now(), steps))

    @property
    def elapsed(self) -> float:
        return self._now() - self._start

    def speed(self) -> float:
        """Return the speed; 0.0 before the first step."""
        now = self._now()
        while self._steps and self._steps[0][0] < now - WINDOW:
            self._steps.popleft()
        span = now - self._steps[0][0] if self._steps else 0.0
        return sum(steps for _, steps in self._steps) / span if span > 0 else 0.0


def clock(seconds: float) -> str:
    """Format hours, minutes and seconds: ``1:02:03``."""
    return str(timedelta(seconds=int(seconds)))


def _listing(seen: list[Seen]) -> Table:
    """Return a table with a row for each job."""
    table = Table("arm", "seed", "", "step", "hack", "solve", "speed", box=None, pad_edge=False)
    for one in seen:
        cells = (str(one.job.seed), one.state, one.steps, one.rate("hack"), one.rate("solve"), one.speed)
        table.add_row(one.name, *cells, style=STYLES[one.state])
    return table


def _by_seed(seen: list[Seen], title: str, cell: Callable[[Seen], str]) -> Table:
    """Return a table with a row for each arm and a column for each seed."""
    seeds = sorted({one.job.seed for one in seen})
    table = Table(title, *(f"seed {seed}" for seed in seeds), box=None, pad_edge=False)
    cells = {(one.name, one.job.seed): Text(cell(one), STYLES[one.state]) for one in seen}
    for arm in dict.fromkeys(one.name for one in seen):
        table.add_row(arm, *(cells.get((arm, seed), "") for seed in seeds))
    return table


def _everything(one: Seen) -> str:
    rates = [f"{name} {one.rate(name)}" for name in ("hack", "solve") if one.row]
    return "  ".join(text for text in (one.place, *rates, one.speed) if text)


def _rates(one: Seen) -> str:
    return f"{one.place} {one.rate('hack')}/{one.rate('solve')}" if one.row else one.place


def _tables(seen: list[Seen], fits: Callable[[list[Table]], bool]) -> list[Table]:
    """Return the most detailed tables that fit the window; none in the smallest."""
    for table in (_listing(seen), _by_seed(seen, "arm", _everything)):
        if fits([table]):
            return [table]
    short = (
        _by_seed(seen, "hack/solve", _rates),
        _by_seed(seen, "hack", lambda one: f"{one.place} {one.rate('hack')}"),
        _by_seed(seen, "arm", lambda one: one.place),
    )
    tables = next(([table] for table in short if fits([table])), [])
    running = _listing([one for one in seen if one.state == "running"])  # with what the short cells leave out
    return [*tables, running] if fits([*tables, running]) else tables


SMALLEST = (60, 10)  # columns and lines of the smallest window with a table; a bar is shown in smaller ones
REDRAW = 0.5  # minimum seconds between two drawings
WHOLE = ("\x1b[?2026h", "\x1b[?2026l")
"""Start and end of a synchronized update (DEC mode 2026), so that terminals show complete drawings only; others ignore it."""
SAID = 3  # maximum number of failures shown at a time; the command prints all of them at its end


def units(job: Job) -> int:
    """Return the weight of a job in the overall bar: its steps, or one for a base model."""
    return 1 if job.arm is None else job.steps


class Bar:
    """Display as one tqdm bar over all steps; see ``JobGrid`` for what it is told."""

    def __init__(self, jobs: list[Job], todo: list[Job], quiet: bool):
        # Steps of an earlier start must not count in the speed, so the bar starts after them.
        total = sum(map(units, jobs))
        start = total - sum(map(units, todo))
        self._bar: Any = tqdm(total=total, initial=start, unit="step", disable=quiet, desc="training", smoothing=0.05)

    def __enter__(self) -> "Bar":
        self._bar.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.__exit__(*exception)

    def began(self, job: Job) -> None: ...

    def moved(self, job: Job, steps: int) -> None:
        self._bar.update(steps)

    def warmed(self, job: Job, steps: int) -> None:
        self._bar.set_postfix_str(f"seed {job.seed} {job.name} {steps}/{job.settings.warm.steps}")

    def ended(self, job: Job, failure: str | None) -> None:
        self._bar.set_postfix_str(f"seed {job.seed} {job.name}")

    def say(self, text: str) -> None:
        tqdm.write(text, file=sys.stderr)

    def tick(self) -> None: ...


class JobGrid:
    """Display as a table, drawn by rich on stderr.

    It is told when a job ``began``, ``moved`` by some steps, or ``ended``, and which step of its own training a base model has
    (``warmed``). ``say`` prints a permanent line.
    """

    def __init__(self, jobs: list[Job], todo: list[Job], console: Console):
        several = len({job.root for job in jobs}) > 1
        self._seen = {
            job.folder: Seen(job, Follower(job.folder / METRICS), f"{job.name} ({job.settings.preset})" if several else job.name)
            for job in jobs
        }
        self._failures: list[str] = []
        self._console = console
        self._drawn = 0.0
        for job in jobs:
            seen = self._seen[job.folder]
            seen.read()
            if job not in todo:
                seen.state, seen.done = "finished", units(job)
        self._pace = Pace()
        self._live = Live(
            self, console=console, auto_refresh=False, transient=True, vertical_overflow="crop", redirect_stdout=False
        )

    def __enter__(self) -> "JobGrid":
        self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def began(self, job: Job) -> None:
        self._seen[job.folder].state = "running"

    def moved(self, job: Job, steps: int) -> None:
        seen = self._seen[job.folder]
        seen.done += steps
        if seen.since is None:  # the first message reports the steps of an earlier start
            seen.since = (time.monotonic(), seen.done)
        else:
            self._pace.add(steps)

    def warmed(self, job: Job, steps: int) -> None:
        self._seen[job.folder].warmed = steps

    def ended(self, job: Job, failure: str | None) -> None:
        seen = self._seen[job.folder]
        seen.state = "failed" if failure else "finished"
        seen.read()
        if failure:
            self._failures.append(failure)

    def say(self, text: str) -> None:
        self._console.print(Text(text))

    def tick(self) -> None:
        """Redraw, unless the last drawing is too recent."""
        if time.monotonic() - self._drawn < REDRAW:
            return
        for seen in self._seen.values():
            if seen.state == "running":
                seen.read()
        begin, end = WHOLE
        self._console.file.write(begin)
        try:
            self._live.refresh()
        finally:
            self._console.file.write(end)
            self._console.file.flush()
        self._drawn = time.monotonic()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height = max(1, console.height - 1)  # one line is for the cursor
        below: list[RenderableType] = [Text(text, "bold red", no_wrap=True, overflow="ellipsis") for text in self._failures[-SAID:]]
        below.append(self._counts())
        below.append(self._overall())

        def fits(tables: list[Table]) -> bool:
            widest = max(console.measure(table, options=options.update(width=10_000)).maximum for table in tables)
            return widest <= options.max_width and sum(table.row_count + 1 for table in tables) + len(below) <= height

        yield Group(*_tables(list(self._seen.values()), fits), *below[-height:])

    def _counts(self) -> Text:
        states = [seen.state for seen in self._seen.values()]
        line = Text(no_wrap=True, overflow="ellipsis")
        for state, style in STYLES.items():
            if state in states:
                line.append(f"{states.count(state)} {state}  ", style)
        return line

    def _overall(self) -> RenderableType:
        done, total = sum(seen.done for seen in self._seen.values()), sum(units(seen.job) for seen in self._seen.values())
        speed = self._pace.speed()
        ahead = f"{speed:.1f}/s  ETA {clock((total - done) / speed)}" if speed else "ETA -:--:--"
        line = Table.grid(Column(ratio=1), Column(no_wrap=True), expand=True, padding=(0, 2, 0, 0))
        bar = ProgressBar(total, done, complete_style="cyan", finished_style="green")
        line.add_row(bar, f"{done}/{total} steps  {clock(self._pace.elapsed)}  {ahead}")
        return line


Display = Bar | JobGrid


def open_display(jobs: list[Job], todo: list[Job], *, quiet: bool = False, live: bool = True) -> Display:
    """Return the table if it was requested and fits, otherwise the bar; ``todo`` are the jobs that were not finished before."""
    console = Console(stderr=True, highlight=False)
    roomy = console.width >= SMALLEST[0] and console.height >= SMALLEST[1]
    if live and not quiet and sys.stderr.isatty() and os.environ.get("TERM") not in ("dumb", "unknown") and roomy:
        return JobGrid(jobs, todo, console)
    return Bar(jobs, todo, quiet)
