"""Kills of the whole command at random times: everything at once, its parent only, or one worker.

Killing everything is like a power cut; after a kill of the parent, its workers must stop by themselves while the next start may
already run; after a kill of a worker, the parent must finish the rest and report it. The state at a kill depends on the machine.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.soak.starts import PATIENCE, differences
from tests.soak.trials import SoakError, Stop
from tests.support.tiny_study import overrides

ARMS = ("route2-full", "erase")
ENDS = {"everything": -signal.SIGKILL, "the parent": -signal.SIGKILL, "a worker": 2}
"""Target of the kill -> the exit code of the command afterwards."""
TARGETS = tuple(ENDS)
COMMAND = "the whole command"


def kill_commands(scratch: Path, kills: int, rng: random.Random, stops: list[Stop], progress: Callable[[int], object]) -> None:
    """Kill the command ``kills`` times, over as many runs as needed, and record each kill; ``SoakError`` says what failed."""
    starts: list[Start] = []
    try:
        pace, left = _undisturbed(scratch / "whole", starts) if kills else 0.0, kills
        while left:
            left -= _one_run(scratch, left, pace, rng, starts, stops, progress)
    finally:
        for start in starts:
            start.end()


def _undisturbed(out: Path, starts: list["Start"]) -> float:
    """Run the command to its end; return the seconds of its work, without its start-up."""
    began = time.monotonic()
    starts.append(whole := Start(out))
    working = whole.until_at_work()
    if (code := whole.wait()) != 0:
        raise SoakError(f"the undisturbed command ended with exit code {code}: {whole.said()}")
    return max(1.0, time.monotonic() - began - working)


def _one_run(
    scratch: Path,
    most: int,
    pace: float,
    rng: random.Random,
    starts: list["Start"],
    stops: list[Stop],
    progress: Callable[[int], object],
) -> int:
    """Start a command, kill it up to ``most`` times, and compare the result; return the number of kills.

    Each kill comes about a sixth of the total work after a start.
    """
    out, code = scratch / f"run-{len(list(scratch.iterdir()))}", None
    ours: list[Stop] = []
    while code != 0:
        target = TARGETS[(most - len(ours)) % len(TARGETS)] if len(ours) < most else "nothing"
        starts.append(start := Start(out))
        hit = start.kill(target, rng.expovariate(6 / pace))
        code = start.wait()
        if hit:
            ours.append(Stop(COMMAND, target, "all"))
            stops.append(ours[-1])
            progress(1)
        if code not in ({0, ENDS[target]} if hit else {0}):
            raise SoakError(f"a command of which {target} was killed ended with exit code {code}: {start.said()}")
    if not all(start.all_gone() for start in starts):
        raise SoakError("a worker goes on without its parent")
    starts.clear()
    differing = differences(run_folder(scratch / "whole"), run_folder(out))
    for stop in ours:
        stop.went_on, stop.alike = True, not differing
    if differing:
        raise SoakError(f"a command that was killed {len(ours)} times left a run that differs in {', '.join(differing)}")
    return len(ours)


def run_folder(out: Path) -> Path:
    """Return the only run folder under a command's ``--out``."""
    return next(out.glob("strong-*"))


class Start:
    """One start of the command, in its own process group."""

    def __init__(self, out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self._log = out / "stderr"
        environment = {**os.environ, "TMPDIR": str(out), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "studies.route2", "run", "--out", str(out), "--no-report", "--seeds", "1"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "--workers", "2", "--arms", *ARMS, "--override", *overrides(steps=60)],
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
                env=environment,
            )

    def until_at_work(self) -> float:
        """Wait until a job has begun (its grader's child exists) or the command has ended; return the seconds."""
        began = time.monotonic()
        while self._process.poll() is None and not any("worker.py" in line for _, line in self._members().values()):
            time.sleep(0.02)
        return time.monotonic() - began

    def kill(self, target: str, delay: float) -> bool:
        """Kill ``target`` (one of ``ENDS``) after ``delay`` seconds of work; return False if the command had already ended."""
        if target not in ENDS:
            return False
        self.until_at_work()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(delay)
        workers = self._workers()
        if self._process.poll() is not None or (target == "a worker" and not workers):
            return False
        if target == "everything":
            os.killpg(self._process.pid, signal.SIGKILL)
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid if target == "the parent" else workers[0], signal.SIGKILL)
        return True

    def wait(self) -> int | None:
        """Return the command's exit code; None if it hangs (it is killed then)."""
        try:
            return self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.end()
            return None

    def end(self) -> None:
        """Kill all remaining processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def all_gone(self, seconds: float = 20.0) -> bool:
        """Return whether every process of this start ends within this time."""
        deadline = time.monotonic() + seconds
        while self._members() and time.monotonic() < deadline:
            time.sleep(0.1)
        return not self._members()

    def said(self) -> str:
        """Return the last line of its stderr."""
        return (self._log.read_text(errors="replace").splitlines() or ["nothing"])[-1]

    def _workers(self) -> list[int]:
        """Return the forks of the command's server, which has their command line."""
        members = self._members()
        servers = {pid for pid, (parent, line) in members.items() if parent == self._process.pid and "forkserver" in line}
        return [pid for pid, (parent, _) in members.items() if parent in servers]

    def _members(self) -> dict[int, tuple[int, str]]:
        """Return the living processes of the group: id -> parent's id and command line."""
        listed = subprocess.run(
            ["ps", "-A", "-o", "pid=,ppid=,pgid=,stat=,args="], capture_output=True, text=True, check=True
        ).stdout
        fields = [line.split(None, 4) for line in listed.splitlines()]
        group = [f for f in fields if len(f) == 5 and int(f[2]) == self._process.pid and not f[3].startswith("Z")]
        return {int(f[0]): (int(f[1]), f[4]) for f in group}
