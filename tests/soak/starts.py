"""One start of a job in a forked child, killed on the way or not, with its ending and its files."""

import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NoReturn

from studies.training.job import Job
from studies.training.recorder import TIMINGS
from studies.training.run import run_job
from tests.soak.points import Aim, Gates, install

PATIENCE = 600.0  # maximum seconds of a start; a start that hangs is a failure too
KILLED, FAILED = -signal.SIGKILL, 2


@dataclass(frozen=True)
class Ending:
    """Ending of a start.

    Attributes:
        code: Exit code (negative: the signal; None: it hung).
        place: Place of the kill.
        said: Its stderr.
        passed: Number of passages of each class of moments, if it finished.
    """

    code: int | None
    place: str
    said: str
    passed: Mapping[str, int]


def start(job: Job, aim: Aim | None = None, *, seconds: float | None = None, every: int = 2) -> Ending:
    """Run (or resume) ``job`` in a child, with a checkpoint every ``every`` steps; kill it at ``aim``, or after ``seconds``.

    The caller must have no other threads, because the fork copies only the calling one.
    """
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as said:
        pid = os.fork()
        if not pid:
            _child(job, aim, every, writing, said)
        os.close(writing)
        code = _outlast(pid, PATIENCE if seconds is None else seconds)
        if code is None:
            os.kill(pid, signal.SIGKILL)
            ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            code = None if seconds is None else ended
        with os.fdopen(reading) as told:
            lines = told.read().splitlines()
        said.seek(0)
        passed = json.loads(lines.pop()) if lines and code == 0 else {}
        return Ending(code, lines[-1] if lines else "", said.read().decode(errors="replace"), passed)


def _child(job: Job, aim: Aim | None, every: int, told: int, said: BinaryIO) -> NoReturn:
    def tell(line: str) -> None:
        os.write(told, f"{line}\n".encode())

    code = 70
    try:
        os.dup2(said.fileno(), 2)
        gates = Gates(aim, tell)
        install(gates, every)
        run_job(job)
        tell(json.dumps(gates.passed))
        code = 0
    except (OSError, ValueError) as error:  # written for users: the command prints it as it is
        print(error, file=sys.stderr)
        code = FAILED
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _outlast(pid: int, seconds: float) -> int | None:
    """Return the exit code of a child that ends within that time; ``None`` if it does not."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    return None


def differences(whole: Path, other: Path) -> list[str]:
    """Return the names of a run folder's files that differ, or that only one side has.

    Timings, and hidden files outside of arm folders, are not compared.
    """

    def files(root: Path) -> dict[str, bytes]:
        found = {path.relative_to(root): path for path in root.glob("**/*") if path.is_file() and path.name != TIMINGS}
        return {str(at): path.read_bytes() for at, path in found.items() if len(at.parts) > 2 or not path.name.startswith(".")}

    a, b = files(whole), files(other)
    return sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))
