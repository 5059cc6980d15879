"""Trials: a run that is killed, loses disk space or is damaged, is started again until it ends, and is compared byte for byte."""

import contextlib
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from studies.training.checkpoint import CHECKPOINT, PREVIOUS
from studies.training.job import Job
from tests.soak.points import ANY, EVERY_WRITE, RESUME, UPDATE, WRITE, Aim
from tests.soak.starts import FAILED, KILLED, Ending, differences, start

DISK = 1 << 21  # bytes of the disk that is filled up; a run needs at most half of it
SHORT, FULL_DISK, DAMAGED = "a write that is cut short", "a full disk", "a damaged newest checkpoint"
FOREIGN = "another run's"
FAULTS = (SHORT, FULL_DISK, DAMAGED)
TRIES = 20
PASSAGES = 6  # of a resume: a read, what it restores, and two logs


class SoakError(Exception):
    """Failure of a trial, in one sentence."""


@dataclass
class Stop:
    """Place where a run was stopped: class, exact place, arm; and whether the run then finished, with the same bytes."""

    where: str
    place: str
    arm: str
    went_on: bool = False
    alike: bool = False


@dataclass
class Reference:
    """Undisturbed run of a job: its folder, its passages of each class of moments, and its duration in seconds."""

    job: Job
    passed: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @staticmethod
    def of(job: Job, every: int = 2) -> "Reference":
        """Run ``job`` undisturbed twice, the second time with a timer, when the base model exists."""
        again = replace(job, root=job.root.with_name(f"{job.root.name}-again"))
        for each in (job, again):
            began = time.monotonic()
            ending = start(each, every=every)
            _demand(ending.code == 0, ending, "the undisturbed run did not get to its end")
        differing = differences(job.root, again.root)
        _demand(not differing, ending, f"two undisturbed runs differ in {', '.join(differing)}")
        return Reference(job, ending.passed, time.monotonic() - began)


@dataclass
class Trials:
    """Trials of jobs that have an undisturbed reference. Each trial raises ``SoakError`` if it fails."""

    references: list[Reference]
    scratch: Path
    rng: random.Random
    every: int = 2
    stops: list[Stop] = field(default_factory=list)
    runs: int = 0

    def killed(self, targets: list[str]) -> list[str]:
        """Kill a run at a moment of each target in turn and resume it after each kill; return the missed targets."""
        reference = self.rng.choice(self.references)
        job = self._fresh(reference)
        stops, missed = [], []
        for i, where in enumerate(targets):
            ending = self._kill(job, where, reference)
            if ending.code == 0:
                missed = targets[i:]
                break
            _demand(ending.code == KILLED, ending, f"a start that was to be killed {where} ended otherwise")
            stops += self._stop(where, ending.place, job)
            _demand(where != WRITE or any(job.folder.glob(".*")), ending, "a kill inside a checkpoint write left no half of one")
        self._ends_alike(job, reference, stops)
        return missed

    def _kill(self, job: Job, where: str, reference: Reference) -> Ending:
        if where == ANY:
            return start(job, seconds=self.rng.uniform(0, reference.seconds), every=self.every)
        passages = PASSAGES if where == RESUME else reference.passed[where]
        return start(job, Aim(where, self.rng.randint(1, passages), self.rng.random()), every=self.every)

    def cut_short(self) -> None:
        """Let the kernel accept a random part of a write and refuse the rest."""
        reference = self.rng.choice(self.references)
        job = self._fresh(reference)
        nth = self.rng.randint(1, reference.passed[EVERY_WRITE])
        ending = start(job, Aim(EVERY_WRITE, nth, self.rng.random(), "refuse"), every=self.every)
        stops = self._stop(SHORT, ending.place, job)
        self._said_so(ending, "File too large", job)
        self._ends_alike(job, reference, stops)

    def full_disk(self) -> None:
        """Run on a small disk with little free space, then with more. ``PermissionError`` if no disk can be mounted."""
        folder = self.scratch / "disk"
        with small_disk(folder):
            reference = self.rng.choice(self.references)
            job = self._fresh(reference, folder)
            ballast, page = folder / "ballast", 4096
            most = 5 * sum(path.stat().st_size for path in reference.job.folder.iterdir())  # three checkpoints, and some
            for _ in range(TRIES):  # small and large alike, until the run fails
                shutil.rmtree(job.root, ignore_errors=True)
                room = int(page * (most / page) ** self.rng.random())
                ballast.write_bytes(bytes(DISK - room))
                ending = start(job, every=self.every)
                ballast.unlink()
                if ending.code != 0:
                    break
            stops = self._stop(FULL_DISK, f"{room} bytes left, {ending.said.strip()}", job)
            self._said_so(ending, "No space left on device", job)
            self._ends_alike(job, reference, stops)

    def damaged(self, how: str) -> None:
        """Damage the newest checkpoint of a killed run: the previous one must be used, with a warning that says why."""
        reference = self.rng.choice(self.references)
        job = self._stopped_late(reference)
        newest = job.folder / CHECKPOINT
        if how == FOREIGN:
            other = self._stopped_late(self.rng.choice([each for each in self.references if each is not reference]))
            shutil.copy(other.folder / CHECKPOINT, newest)
        else:
            newest.write_bytes(DAMAGES[how](newest.read_bytes(), self.rng))
        stops = self._stop(DAMAGED, how, job)
        ending = start(job, every=self.every)
        _demand(ending.code == 0, ending, f"a run whose newest checkpoint was {how} did not go on")
        warned = [line for line in ending.said.splitlines() if f"going on from {PREVIOUS}" in line]
        _demand(len(warned) == 1 and CHECKPOINT in warned[0], ending, f"a newest checkpoint that was {how} was not reported")
        self._ends_alike(job, reference, stops)

    def _stopped_late(self, reference: Reference) -> Job:
        """Return a run that was killed when it had two checkpoints."""
        last = reference.passed[UPDATE]
        for _ in range(TRIES):
            job = self._fresh(reference)
            ending = start(job, Aim(UPDATE, self.rng.randint(last // 2, last)), every=self.every)
            _demand(ending.code == KILLED, ending, "a start that was to be killed ended otherwise")
            if (job.folder / CHECKPOINT).exists() and (job.folder / PREVIOUS).exists():
                return job
        raise SoakError("no run was stopped with two checkpoints behind it")

    def _fresh(self, reference: Reference, below: Path | None = None) -> Job:
        """Return the reference's job in its own folder."""
        self.runs += 1
        return replace(reference.job, root=(below or self.scratch) / f"run-{self.runs}" / reference.job.root.name)

    def _stop(self, where: str, place: str, job: Job) -> list[Stop]:
        self.stops.append(Stop(where, place, job.name))
        return self.stops[-1:]

    def _said_so(self, ending: Ending, reason: str, job: Job) -> None:
        said = ending.said.splitlines()
        _demand(ending.code == FAILED and len(said) == 1 and reason in said[0], ending, f"{reason} was not told in one sentence")
        left = [path.name for path in job.folder.glob(".*")]
        _demand(not left, ending, f"{reason} left {', '.join(left)}")

    def _ends_alike(self, job: Job, reference: Reference, stops: list[Stop]) -> None:
        ending = start(job, every=self.every)
        where = ", then ".join(f"{stop.where} ({stop.place})" for stop in stops)
        _demand(ending.code == 0, ending, f"after it was stopped {where}, a run did not go on")
        differing = differences(reference.job.root, job.root)
        for stop in stops:
            stop.went_on, stop.alike = True, not differing
        _demand(not differing, ending, f"after it was stopped {where}, a run differs in {', '.join(differing)}")
        shutil.rmtree(job.root.parent)


def _demand(holds: bool, ending: Ending, sentence: str) -> None:
    if not holds:
        said = (ending.said.splitlines() or ["nothing"])[-1]
        raise SoakError(f"{sentence}: exit code {ending.code}, {ending.place or 'no place'}, {said}")


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Context: a disk of ``DISK`` bytes in memory at ``folder``; ``PermissionError`` if this user may not mount one."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "none", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise PermissionError("there is no mount here") from error
    if done.returncode:
        raise PermissionError(done.stderr.strip())
    try:
        yield
    finally:
        with contextlib.suppress(subprocess.SubprocessError):
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


DAMAGES: Mapping[str, Callable[[bytes, random.Random], bytes]] = {
    "cut short": lambda whole, rng: whole[: rng.randrange(len(whole))],
    "changed in one bit": lambda whole, rng: _flipped(whole, rng.randrange(8 * len(whole))),
    "emptied": lambda whole, rng: b"",
    "zeros from somewhere on": lambda whole, rng: whole[: (cut := rng.randrange(len(whole) // 2))] + bytes(len(whole) - cut),
}
"""Name of a damage -> function of the newest checkpoint's bytes."""


def _flipped(whole: bytes, bit: int) -> bytes:
    out = bytearray(whole)
    out[bit // 8] ^= 1 << bit % 8
    return bytes(out)
