"""Where a kill falls: gates around a job's functions, put up in a child that is there to be killed. The study knows none of them.

A gate is passed again and again; at the n-th passage of its class the process sends itself SIGKILL. A kill in the middle of a write
is made by the kernel's own limit on the size of a file: the real writer (safetensors' too) gets so many bytes out and no more,
and the signal that tells of the limit kills. Where a handler is not put in, the same limit is a disk that refuses the bytes.
"""

import contextlib
import ctypes
import functools
import os
import resource
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import mi_route2.files as files_module
import studies.environments.sampling as sampling_module
import studies.training.checkpoint as checkpoint_module
import studies.training.grpo as grpo_module
import studies.training.job as job_module
import studies.training.recorder as recorder_module
from mi_route2.routing.optimizer import RoutedAdamW
from studies.training.checkpoint import CHECKPOINT, PREVIOUS
from studies.training.job import DEPLOYED, EVAL, FULL, MANIFEST

GENERATION, BETWEEN, UPDATE = "during generation", "between generation and update", "during the update"
LOGS, WRITE, EVALUATION = "inside a log append", "inside a checkpoint write", "during evaluation"
RESULTS, RESUME, ANY = "while results are written", "while resuming", "at any time"
SHARES = {
    GENERATION: 10, BETWEEN: 23, UPDATE: 8, LOGS: 9, WRITE: 24, EVALUATION: 5, RESULTS: 8, RESUME: 6, ANY: 7,
}  # fmt: skip
"""Class of moments -> how many of a hundred kills fall there. ``at any time`` goes by the clock, from outside."""
EVERY_WRITE = "a write"
_RENAMED = {CHECKPOINT: WRITE, PREVIOUS: WRITE, **dict.fromkeys((EVAL, FULL, DEPLOYED, MANIFEST), RESULTS)}


@dataclass(frozen=True)
class Aim:
    """The ``nth`` passage of a class, from 1. Inside a write, ``share`` in [0, 1) of its bytes reach the file.

    ``kill`` ends the process there; ``refuse`` makes the write fail (class ``EVERY_WRITE``).
    """

    where: str
    nth: int
    share: float = 0.5
    end: Literal["kill", "refuse"] = "kill"


class Gates:
    """Counts passages by class, and ends the process at the one that is aimed at; ``tell`` hears the place first."""

    def __init__(self, aim: Aim | None, tell: Callable[[str], None]):
        self.passed: Counter[str] = Counter()
        self._aim, self._tell = aim, tell
        self.phase = ""

    def through(self, where: str, place: str) -> None:
        """A moment between two actions."""
        if self._reached(where):
            self._tell(place)
            os.kill(os.getpid(), signal.SIGKILL)

    @contextlib.contextmanager
    def writing(self, where: str, path: Path, size: int, before: int = 0) -> Iterator[None]:
        """The write of ``size`` bytes to a file of ``before`` bytes."""
        hit = [self._reached(each) for each in (where, EVERY_WRITE)]
        if self._aim is None or not any(hit) or not size:
            yield
            return
        limit = before + int(self._aim.share * size)
        self._tell(f"byte {limit} of {path.name}")
        with _limited(limit, kill=self._aim.end == "kill"):
            yield

    def _reached(self, where: str) -> bool:
        self.passed[where] += 1
        return self._aim is not None and self._aim.where == where and self._aim.nth == self.passed[where]


@contextlib.contextmanager
def _limited(size: int, *, kill: bool) -> Iterator[None]:
    """No file grows past ``size`` bytes. The write that would is refused, as Python ignores the kernel's signal; or it kills."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if kill:
        # Python's own handlers run once the C code is done: this one runs as the system call returns.
        handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        ctypes.CDLL(None).signal(int(signal.SIGXFSZ), handler)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def install(gates: Gates, checkpoint_every: int) -> None:
    """Put the gates up in this process, for good. More checkpoints than a user's run has: there is more to hit."""
    job_module.CHECKPOINT_EVERY = checkpoint_every
    _learning(gates)
    _resuming(gates)
    _files(gates)


def _around(owner: Any, name: str, gates: Gates, where: str, when: Literal["before", "after", "both"] = "before") -> None:
    true = getattr(owner, name)

    @functools.wraps(true)
    def passing(*args: Any, **kwargs: Any) -> Any:
        if when != "after":
            gates.through(where, f"before {name}")
        out = true(*args, **kwargs)
        if when != "before":
            gates.through(where, f"after {name}")
        return out

    setattr(owner, name, passing)


def _phase(owner: Any, name: str, gates: Gates, where: str) -> None:
    """Tokens that are drawn inside of this function are passages of ``where``."""
    true = getattr(owner, name)

    @functools.wraps(true)
    def within(*args: Any, **kwargs: Any) -> Any:
        gates.phase = where
        try:
            return true(*args, **kwargs)
        finally:
            gates.phase = ""

    setattr(owner, name, within)


def _learning(gates: Gates) -> None:
    true = sampling_module.draw

    def draw(*args: Any) -> Any:
        if gates.phase:
            gates.through(gates.phase, "before a token is drawn")
        return true(*args)

    sampling_module.draw = draw
    _phase(grpo_module, "gather", gates, GENERATION)
    _phase(job_module, "evaluate", gates, EVALUATION)
    _around(grpo_module, "gather", gates, BETWEEN, "after")
    for name in ("varied", "with_anchors", "update"):
        _around(grpo_module, name, gates, BETWEEN)
    for name in ("objective", "clip_gradients"):
        _around(grpo_module, name, gates, UPDATE)
    _around(RoutedAdamW, "step", gates, UPDATE, "both")


def _resuming(gates: Gates) -> None:
    """A first start passes none of these: there is nothing to read."""
    _around(checkpoint_module, "read_checkpoint", gates, RESUME, "both")
    _around(checkpoint_module.Checkpoint, "restore", gates, RESUME, "both")
    true = checkpoint_module.cut

    def cut(log: Path, length: int) -> None:
        true(log, length)
        if length:
            gates.through(RESUME, f"after {log.name} was cut")

    checkpoint_module.cut = cut


def _files(gates: Gates) -> None:
    append, write_synced = recorder_module.append, files_module.write_synced

    def appending(path: Path, data: bytes) -> int:
        with gates.writing(LOGS, path, len(data), path.stat().st_size if path.exists() else 0):
            length = append(path, data)
        gates.through(LOGS, f"after the append to {path.name}")
        return length

    def saving(path: Path, data: bytes) -> None:
        with gates.writing(WRITE if CHECKPOINT in path.name else RESULTS, path, len(data)):
            write_synced(path, data)

    recorder_module.append = job_module.append = appending
    files_module.write_synced = saving
    _renames(gates)


def _renames(gates: Gates) -> None:
    replace, unlink = Path.replace, Path.unlink

    def replacing(path: Path, target: Path) -> Path:
        where = WRITE if CHECKPOINT in target.name else _RENAMED.get(target.name)
        if where is not None:
            gates.through(where, f"before {path.name} becomes {target.name}")
        return replace(path, target)

    def unlinking(path: Path, missing_ok: bool = False) -> None:
        if path.name in (CHECKPOINT, PREVIOUS):
            gates.through(RESULTS, f"before {path.name} is dropped")
        unlink(path, missing_ok)

    paths: Any = Path
    paths.replace, paths.unlink = replacing, unlinking
