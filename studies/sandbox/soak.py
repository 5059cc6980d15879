"""``python -m studies.sandbox.soak --grades N``: honest programs and attacks in turn, then a look at what is left behind.

Grades go through one warm jail. At the end no wrong answer may have passed, no honest program failed, and no process, file, shared
memory, semaphore or queue may be left that was not there before. Exit code 1 where any of this is not so.
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
from studies.sandbox.attacks.attack import Attack
from studies.sandbox.attacks.canary import LITTER, own_mark
from studies.sandbox.attacks.honest import Honest, programs
from studies.sandbox.attacks.suite import Run, Suite, attacks
from studies.sandbox.attacks.table import descendants, system_v

PR_SET_CHILD_SUBREAPER = 36
BLOCK, ATTACKS = 50, 12
"""Grades at a time, and how many of them are attacks."""
WARM = "class Solution:\n    def solve(self, x):\n        return x\n"
"""What servers run before they are looked at: one keeps an empty folder for its next job."""
PATIENCE = 10.0
"""Seconds in which what other programs of the machine made may go away again before it is taken for ours."""
QUEUES = Path("/dev/mqueue")


@dataclass
class Tally:
    """What came of the grades; all but `grades` and `attacks` must be empty at the end."""

    grades: int = 0
    attacks: int = 0
    passed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """One line: "soak passed" or "soak failed", and the numbers."""
        bad = {"passed": self.passed, "failed": self.failed, "left": self.left}
        details = "".join(f"; {name}: {', '.join(sorted(set(found))[:10])}" for name, found in bad.items() if found)
        return (
            f"soak {'failed' if details else 'passed'}: {self.grades} grades, {self.attacks} of them attacks; "
            f"{len(self.passed)} attacks succeeded, {len(self.failed)} honest programs failed, "
            f"{len(self.left)} processes and files left{details}"
        )


def soak(grades: int, *, seed: int = 0, workers: int = 2, progress: bool = False) -> Tally:
    """Grades by the block, then the count of what is left. Raises JailUnavailableError where the machine lacks a protection."""
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
    """Attacks between honest programs, on the same warm servers."""
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
    """While this lasts, what loses its parent below this process becomes its child, and is seen."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """A folder in which all temporary files of this process are made."""
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
    """What could be left elsewhere: files with our mark, queues, System V objects."""
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
    """Grade honest programs and attacks in turn, thousands of them, then look at what is left behind."""

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
