"""``python -m studies.route2.soak --kills N``: kill -9 a run again and again; it must still end with an undisturbed run's bytes.

A tiny study (a warm start and two arms over two workers) runs once undisturbed, as the very command that users type. Then it is
started, killed, and started again until it gets to its end; then the next one begins from nothing, until N kills have fallen.
A kill takes everything at once (as a power cut does), the parent alone (its workers must stop by themselves, while the next start
is already there) or one worker (the parent must finish the rest and say so). ``--seed`` draws the moments; what lies
at a moment depends on the machine. Exit code 1 on any difference.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import tyro
from tqdm import tqdm

from studies.route2.recorder import TIMINGS

ARMS = ("route2-full", "erase")
TINY = (
    "warm.steps=120", "warm.batch=64", "steps=60", "prompts=3", "group=4", "evaluation_prompts=4", "pairs=4", "probe_every=2",
    "teachers=4",
)  # fmt: skip
ENDS = {"everything": -signal.SIGKILL, "the parent": -signal.SIGKILL, "a worker": 2}
"""What is killed, and the exit code that the command then has."""
TARGETS = tuple(ENDS)
PATIENCE = 600.0  # seconds that a start gets to reach its end; a start that hangs is a failure too


@dataclass(frozen=True)
class Soak:
    """Kill a tiny run N times at random moments, resume it, and compare every byte with an uninterrupted one."""

    kills: int = 20
    seed: int = 0

    def __call__(self) -> int:
        if self.kills < 1:
            print(f"error: kills must be at least 1, not {self.kills}", file=sys.stderr)
            return 2
        with tempfile.TemporaryDirectory(prefix="soak-", ignore_cleanup_errors=True) as scratch:
            try:
                print(verdict := soak(Path(scratch), self.kills, random.Random(self.seed)))
            except KeyboardInterrupt:
                print("\nsoak stopped before its end", file=sys.stderr)
                return 130
        return 0 if verdict.startswith("soak passed") else 1


def soak(scratch: Path, kills: int, rng: random.Random) -> str:
    """One line: "soak passed" and what was done, or "soak failed" and why."""
    starts: list[Start] = []
    try:
        return _soak(scratch, kills, rng, starts)
    finally:
        for start in starts:
            start.end()


def _soak(scratch: Path, kills: int, rng: random.Random, starts: list["Start"]) -> str:
    began = time.monotonic()
    starts.append(whole := Start(scratch / "whole"))
    working = whole.until_at_work()
    if (code := whole.wait()) != 0:
        return f"soak failed: the undisturbed run ended with exit code {code}: {whole.said()}"
    pace = max(1.0, time.monotonic() - began - working)  # seconds of work; a kill falls about a sixth of it after the start
    fallen: Counter[str] = Counter()
    with tqdm(total=kills, desc="kills", unit="kill") as bar:
        while fallen.total() < kills:
            out, code = scratch / f"run-{len(list(scratch.iterdir()))}", None
            while code != 0:
                target = TARGETS[fallen.total() % len(TARGETS)] if fallen.total() < kills else "nothing"
                starts.append(start := Start(out))
                hit = start.kill(target, rng.expovariate(6 / pace))
                code = start.wait()
                fallen[target] += hit
                bar.update(int(hit))
                if code not in ({0, ENDS[target]} if hit else {0}):
                    return f"soak failed: after {fallen.total()} kills a run ended with exit code {code}: {start.said()}"
            if not all(start.all_gone() for start in starts):
                return "soak failed: a worker goes on without its parent"
            starts.clear()
            if differing := differences(scratch / "whole", out):
                return f"soak failed: after {fallen.total()} kills a run differs in {', '.join(differing)}"
    how = ", ".join(f"{fallen[target]} of {target}" for target in ENDS if fallen[target])
    runs = len(list(scratch.iterdir())) - 1
    return f"soak passed: {kills} kills ({how}) over {runs} runs; every file is that of the undisturbed run"


class Start:
    """One start of the command, in a process group of its own."""

    def __init__(self, out: Path) -> None:
        out.mkdir(exist_ok=True)
        self._log = out / "stderr"
        environment = {**os.environ, "TMPDIR": str(out), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "studies.route2", "run", "--out", str(out), "--no-report", "--seeds", "1"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "--workers", "2", "--arms", *ARMS, "--override", *TINY],
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
                env=environment,
            )

    def until_at_work(self) -> float:
        """Wait until a job has begun (its grader's child is there) or the command has ended; the seconds that it took."""
        began = time.monotonic()
        while self._process.poll() is None and not any("worker.py" in line for line in self._members().values()):
            time.sleep(0.02)
        return time.monotonic() - began

    def kill(self, target: str, delay: float) -> bool:
        """Kill ``target`` (one of ``ENDS``), ``delay`` seconds into the work; False where the command had ended by then."""
        if target not in ENDS:
            return False
        self.until_at_work()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(delay)
        workers = [pid for pid, line in self._members().items() if "spawn_main" in line]
        if self._process.poll() is not None or (target == "a worker" and not workers):
            return False
        if target == "everything":
            os.killpg(self._process.pid, signal.SIGKILL)
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid if target == "the parent" else workers[0], signal.SIGKILL)
        return True

    def wait(self) -> int | None:
        """The command's exit code; None where it hangs (it is then ended)."""
        try:
            return self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.end()
            return None

    def end(self) -> None:
        """Kill whatever is left."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def all_gone(self, seconds: float = 20.0) -> bool:
        """Whether every process of this start has ended by then."""
        deadline = time.monotonic() + seconds
        while self._members() and time.monotonic() < deadline:
            time.sleep(0.1)
        return not self._members()

    def said(self) -> str:
        """The last line of its stderr."""
        return (self._log.read_text(errors="replace").splitlines() or ["nothing"])[-1]

    def _members(self) -> dict[int, str]:
        """The living processes of the group: id -> command line."""
        listed = subprocess.run(["ps", "-A", "-o", "pid=,pgid=,stat=,args="], capture_output=True, text=True, check=True).stdout
        fields = [line.split(None, 3) for line in listed.splitlines()]
        return {int(f[0]): f[3] for f in fields if len(f) == 4 and int(f[1]) == self._process.pid and not f[2].startswith("Z")}


def differences(whole: Path, other: Path) -> list[str]:
    """Names of the run folder's files that only one side has, or that differ: all but timings, and hidden files outside of arms."""

    def files(out: Path) -> dict[str, bytes]:
        found = {path.relative_to(out): path for path in out.glob("strong-*/**/*") if path.is_file() and path.name != TIMINGS}
        return {str(at): path.read_bytes() for at, path in found.items() if len(at.parts) > 3 or not path.name.startswith(".")}

    a, b = files(whole), files(other)
    return sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))


if __name__ == "__main__":
    sys.exit(tyro.cli(Soak)())
