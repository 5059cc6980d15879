"""What a person at the terminal sees of a run: a table of arms and seeds that is drawn in place, or one progress bar.

The table needs a terminal; it picks the fullest layout that fits the window as it is now, and takes itself away at the end. Where
stderr is no terminal, or the window too small, there is the bar.
"""

import os
import sys
import time
from typing import Any, Protocol, runtime_checkable

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text
from tqdm import tqdm

from studies.route2.follow import Follower
from studies.route2.job import Job
from studies.route2.layouts import LAYOUTS, STYLES, Pace, Seen, clock
from studies.route2.recorder import METRICS

SMALLEST = (60, 10)  # columns and lines of a window; the bar below that
REDRAW = 0.5  # seconds between two drawings, at least
WHOLE = ("\x1b[?2026h", "\x1b[?2026l")
"""Around a drawing: a terminal that knows these shows it when it is whole (DEC mode 2026), the others skip them."""
SAID = 3  # failures that are shown at a time; the command repeats them all at its end


@runtime_checkable
class Display(Protocol):
    """Told of what happens to the jobs. ``warmed`` is how far a base model's training is, ``say`` shows a line that stays."""

    def __enter__(self) -> "Display": ...

    def __exit__(self, *_: object) -> None: ...

    def began(self, job: Job) -> None: ...

    def moved(self, job: Job, steps: int) -> None: ...

    def warmed(self, job: Job, steps: int) -> None: ...

    def ended(self, job: Job, failure: str | None) -> None: ...

    def say(self, text: str) -> None: ...

    def tick(self) -> None: ...


def open_display(jobs: list[Job], todo: list[Job], *, quiet: bool = False, live: bool = True) -> Display:
    """The table where it was asked for and fits, else the bar. ``todo``: the jobs that were not finished before."""
    console = Console(stderr=True, highlight=False)
    roomy = console.width >= SMALLEST[0] and console.height >= SMALLEST[1]
    if live and not quiet and sys.stderr.isatty() and os.environ.get("TERM") not in ("dumb", "unknown") and roomy:
        return Grid(jobs, todo, console)
    return Bar(jobs, todo, quiet)


def units(job: Job) -> int:
    """What a job counts in the overall bar: its steps; a base model counts one."""
    return 1 if job.arm is None else job.settings.steps


class Bar:
    """One tqdm bar over all steps."""

    def __init__(self, jobs: list[Job], todo: list[Job], quiet: bool):
        # What an earlier run did is not this one's speed: it counts as where the bar starts.
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


class Grid:
    """The table, drawn by rich on stderr."""

    def __init__(self, jobs: list[Job], todo: list[Job], console: Console):
        self._seen = {_key(job): Seen(job, Follower(job.folder / METRICS)) for job in jobs}
        self._failures: list[str] = []
        self._console = console
        self._drawn = 0.0
        for job in jobs:
            seen = self._seen[_key(job)]
            seen.read()
            if job not in todo:
                seen.state, seen.done = "finished", units(job)
        self._pace = Pace()
        self._live = Live(
            self, console=console, auto_refresh=False, transient=True, vertical_overflow="crop", redirect_stdout=False
        )

    def __enter__(self) -> "Grid":
        self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def began(self, job: Job) -> None:
        self._seen[_key(job)].state = "running"

    def moved(self, job: Job, steps: int) -> None:
        seen = self._seen[_key(job)]
        seen.done += steps
        if seen.since is None:  # what an earlier start did
            seen.since = (time.monotonic(), seen.done)
        else:
            self._pace.add(steps)

    def warmed(self, job: Job, steps: int) -> None:
        self._seen[_key(job)].warmed = steps

    def ended(self, job: Job, failure: str | None) -> None:
        seen = self._seen[_key(job)]
        seen.state = "failed" if failure else "finished"
        seen.read()
        if failure:
            self._failures.append(failure)

    def say(self, text: str) -> None:
        self._console.print(Text(text))

    def tick(self) -> None:
        """Draw anew, unless that was just now."""
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
        height = max(1, console.height - 1)  # the cursor's own line
        below: list[RenderableType] = [Text(text, "bold red", no_wrap=True, overflow="ellipsis") for text in self._failures[-SAID:]]
        below.append(self._counts())
        below.append(self._overall())
        for layout in LAYOUTS:
            tables = [table(list(self._seen.values())) for table in layout]
            widest = max(console.measure(table, options=options.update(width=10_000)).maximum for table in tables)
            if widest <= options.max_width and sum(table.row_count + 1 for table in tables) + len(below) <= height:
                yield Group(*tables, *below)
                return
        yield Group(*below[-height:])

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


def _key(job: Job) -> tuple[str, int]:
    return job.name, job.seed
