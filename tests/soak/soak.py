"""Soak test: kill runs, fill their disk or damage their checkpoint, and check that they end with an undisturbed run's bytes.

Tiny jobs run once undisturbed. Then each run is killed at a moment of a random class and started again, until it ends; every fourth
one is killed a second time. ``--seed`` determines classes, moments and bytes, so a soak can be repeated, except for kills by the
clock.
Other faults: writes that the kernel cuts short, full disks, damaged newest checkpoints. Last, the whole command with its workers is
killed ``--commands`` times (``command``).
"""

import contextlib
import itertools
import random
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from tqdm import tqdm

from studies.common.tables import markdown_table
from tests.soak.command import kill_commands
from tests.soak.points import RESUME, SHARES, UPDATE
from tests.soak.trials import DAMAGES, FAULTS, FOREIGN, Reference, SoakError, Stop, Trials
from tests.support.tiny_study import FEW, tiny_job

SOAKED = ("route2-full", "route2-grad", "erase")
HEADER = ("stopped", "times", "went on", "ended with the same bytes")
ENOUGH = 10
"""Number of failed trials after which the soak stops."""
Result = TypeVar("Result")


@dataclass
class Tally:
    """Result of a soak: where runs were stopped, and what failed."""

    stops: list[Stop] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def attempt(self, trial: Callable[[], Result]) -> Result | None:
        """Return a trial's result; ``None`` if it failed, which is recorded. ``SoakError`` after too many failures."""
        try:
            return trial()
        except SoakError as error:
            self.failures.append(str(error))
            if len(self.failures) == ENOUGH:
                raise
            return None

    def __str__(self) -> str:
        """Return the table, and a line that says "soak passed" or "soak failed"."""
        found = {stop.where for stop in self.stops}
        order = [*SHARES, *sorted(found - SHARES.keys() - set(FAULTS)), *FAULTS]
        table = markdown_table(HEADER, [self._row(where) for where in order if where in found])
        kills = sum(stop.where not in FAULTS for stop in self.stops)
        done = f"{kills} kills and {len(self.stops) - kills} faults in {self.seconds:.0f} s"
        verdict = f"soak {'failed' if self.failures else 'passed'}: {done}"
        return "\n".join([table, "; ".join([verdict, *self.skipped]), *self.failures])

    def _row(self, where: str) -> list[str]:
        stops = [stop for stop in self.stops if stop.where == where]
        counts = (len(stops), sum(stop.went_on for stop in stops), sum(stop.alike for stop in stops))
        return [where, *map(str, counts)]


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Context: a folder for all temporary files of this process and its children."""
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="soak-", ignore_cleanup_errors=True) as scratch:
        tempfile.tempdir = scratch
        try:
            yield Path(scratch)
        finally:
            tempfile.tempdir = before


def soak(scratch: Path, kills: int, commands: int, rng: random.Random) -> Tally:
    """Run all requested trials; stop early after too many failures."""
    tqdm.monitor_interval = 0  # no monitor thread, because threads do not survive a fork
    torch.set_num_threads(1)
    tally, began = Tally(), time.monotonic()
    faults = -(-kills // 10)
    with tqdm(total=kills + commands + len(FAULTS) * faults, desc="soak", unit="stop", disable=None) as bar:
        with contextlib.suppress(SoakError):
            out, small = scratch / "whole", {"steps": 6, "adapt": FEW}
            jobs = [tiny_job(out / arm, arm, cache=out / "warmstarts", **small) for arm in SOAKED]
            references = tally.attempt(lambda: [Reference.of(job) for job in jobs])
            if references:
                trials = Trials(references, scratch, rng, stops=tally.stops)
                _kills(trials, kills, tally, bar.update)
                _faults(trials, faults, tally, bar.update)
            tally.attempt(lambda: kill_commands(scratch / "commands", commands, rng, tally.stops, bar.update))
    tally.seconds = time.monotonic() - began
    return tally


def deck(kills: int) -> list[str]:
    """Return the classes of moments for ``kills`` kills: each class once if possible, and the rest by their shares."""
    given = Counter(sorted(SHARES, key=lambda where: -SHARES[where])[:kills])
    while given.total() < kills:
        given[max(SHARES, key=lambda where: SHARES[where] / (given[where] + 1))] += 1
    return sorted(given.elements())


def _kills(trials: Trials, kills: int, tally: Tally, progress: Callable[[int], object]) -> None:
    """Run trials with all kills. A kill during a resume needs an earlier kill, so it is the second one of its run."""
    rest = deck(kills)
    trials.rng.shuffle(rest)
    first, second = deque(w for w in rest if w != RESUME), deque(w for w in rest if w == RESUME)
    while first or second:
        targets = [first.popleft() if first else UPDATE]
        if second:
            targets.append(second.popleft())
        elif first and trials.rng.random() < 0.25:
            targets.append(first.popleft())
        missed = tally.attempt(lambda: trials.killed(targets)) or []  # noqa: B023 - called at once
        first.extend(where for where in missed if where != RESUME)
        second.extend(where for where in missed if where == RESUME)
        progress(len(targets) - len(missed))


def _faults(trials: Trials, each: int, tally: Tally, progress: Callable[[int], object]) -> None:
    """Run ``each`` faults of every kind."""
    damages = itertools.cycle((FOREIGN, *DAMAGES))
    for _ in range(each):
        tally.attempt(trials.cut_short)
        tally.attempt(lambda: trials.damaged(next(damages)))
        progress(2)
    for _ in range(each):
        try:
            tally.attempt(trials.full_disk)
        except PermissionError as error:
            tally.skipped.append(f"without full disks: {error}")
            return
        progress(1)
