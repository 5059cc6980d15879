"""Run ``python -m tests.attacks.soak --grades N``: grade honest programs and attacks in turn, then check for leftovers.

Grades go through one warm jail. At the end no wrong answer may have passed, no honest program may have failed, and no process,
file, shared memory, semaphore or queue may exist that did not exist before. Otherwise the exit code is 1.
"""

import contextlib
import ctypes
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import tyro
from tqdm import tqdm

from studies.sandbox import JailUnavailableError
from tests.attacks.attack import Attack
from tests.attacks.canary import LITTER, own_mark
from tests.attacks.honest import Honest, programs
from tests.attacks.suite import Run, Suite, attacks
from tests.attacks.table import descendants, system_v

PR_SET_CHILD_SUBREAPER = 36
BLOCK, ATTACKS = 50, 12
"""Number of grades per block, and the maximum number of attacks among them."""
WARM = "class Solution:\n    def solve(self, x):\n        return x\n"
"""Program that every server runs before the first listing, because a server keeps an empty folder for its next job."""
PATIENCE = 10.0
"""Seconds to wait until objects that other programs of the machine may have created disappear, before they count as ours."""
QUEUES = Path("/dev/mqueue")


@dataclass
class Tally:
    """Result of a soak; all lists must be empty at its end."""

    grades: int = 0
    attacks: int = 0
    passed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """One line with "soak passed" or "soak failed" and the numbers."""
        bad = {"passed": self.passed, "failed": self.failed, "left": self.left}
        details = "".join(f"; {name}: {', '.join(sorted(set(found))[:10])}" for name, found in bad.items() if found)
        return (
            f"soak {'failed' if details else 'passed'}: {self.grades} grades, {self.attacks} of them attacks; "
            f"{len(self.passed)} attacks succeeded, {len(self.failed)} honest programs failed, "
            f"{len(self.left)} processes and files left{details}"
        )


def soak(grades: int, *, seed: int = 0, workers: int = 2, progress: bool = False) -> Tally:
    """Grade programs and attacks block by block, then list leftovers.

    Raises:
        JailUnavailableError: The machine lacks a protection.
    """
    tally, rng = Tally(), random.Random(seed)
    honest = iter(programs(grades, rng))
    with _orphans_come_home(), _scratch() as scratch:
        outside = _outside()
        children = descendants(os.getpid())
        with Suite(workers=workers, seed=seed) as suite, tqdm(total=grades, desc="grades", disable=not progress) as bar:
            suite.grade([(WARM, [1], [1])] * workers)
            servers, folders = descendants(os.getpid()), _tree(scratch)
            while tally.grades < grades:
                size = min(BLOCK, grades - tally.grades)
                hostile = rng.choices(attacks(), k=min(ATTACKS, size // 2))
                _block(suite, hostile, [next(honest) for _ in range(size - len(hostile))], tally)
                bar.update(size)
            tally.left += [f"process {pid}" for pid in descendants(os.getpid()) - servers]
            tally.left += [f"server {pid} is gone" for pid in servers - descendants(os.getpid())]
            tally.left += [f"file {path}" for path in _tree(scratch) - folders]
        tally.left += [f"process {pid}" for pid in descendants(os.getpid()) - children]
        tally.left += [f"file {path}" for path in _tree(scratch)]
        tally.left += _new_outside(outside)
    return tally


def _block(suite: Suite, hostile: list[Attack], honest: list[Honest], tally: Tally) -> None:
    """Grade attacks between honest programs on the same warm servers."""
    half = len(honest) // 2
    tally.failed += _failures(suite, honest[:half])
    trials = suite.trials([Run(attack) for attack in hostile])
    tally.passed += [attack.id for attack, trial in zip(hostile, trials, strict=True) if trial.succeeded]
    tally.failed += _failures(suite, honest[half:])
    tally.grades += len(honest) + len(hostile)
    tally.attacks += len(hostile)


def _failures(suite: Suite, honest: list[Honest]) -> list[str]:
    right = suite.grade([(program.code, program.inputs, program.expected) for program in honest])
    return [program.name for program, good in zip(honest, right, strict=True) if not good]


@contextlib.contextmanager
def _orphans_come_home() -> Iterator[None]:
    """Make this process a subreaper, so that orphans below it become its children and can be listed."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """Yield a folder in which this process creates all of its temporary files."""
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="soak-", ignore_cleanup_errors=True) as scratch:
        os.chmod(scratch, 0o755)
        tempfile.tempdir = scratch
        try:
            yield Path(scratch)
        finally:
            tempfile.tempdir = before


def _tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def _outside() -> set[str]:
    """Return possible leftovers outside of the temporary folder: files with our mark, message queues and System V objects."""
    marked = {str(path) for folder in LITTER if folder.is_dir() for path in folder.iterdir() if own_mark() in path.name}
    queues = {str(path) for path in QUEUES.iterdir()} if QUEUES.is_dir() else set()
    return marked | queues | {f"{kind} {key}" for kind, objects in system_v().items() for key in objects}


def _new_outside(before: set[str]) -> list[str]:
    deadline = time.monotonic() + PATIENCE
    while (new := _outside() - before) and time.monotonic() < deadline:
        time.sleep(0.1)
    return sorted(new)


@dataclass(frozen=True)
class Soak:
    """Grade thousands of honest programs and attacks in turn, then check for leftover processes and files."""

    grades: int = 10_000
    seed: int = 0
    workers: int = 2

    def __call__(self) -> int:
        if self.grades < 1:
            print(f"error: grades must be at least 1, not {self.grades}", file=sys.stderr)
            return 2
        try:
            print(verdict := soak(self.grades, seed=self.seed, workers=self.workers, progress=True).verdict)
        except JailUnavailableError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        return 0 if verdict.startswith("soak passed") else 1


if __name__ == "__main__":
    sys.exit(tyro.cli(Soak)())
