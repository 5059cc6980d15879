"""Gates around a job's functions, at which a kill can happen. They are installed in a child process; the study does not know them.

A gate is passed many times; at the n-th passage of its class the process sends itself SIGKILL. A kill in the middle of a write uses
the kernel's limit on the size of a file: the real writer (safetensors' too) writes up to the limit, and the signal at the limit
kills. Without a handler for the signal, the same limit acts as a disk that refuses the bytes.
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

import torch

import mi_route2.files as files_module
import studies.environments.sampling as sampling_module
import studies.training.checkpoint as checkpoint_module
import studies.training.grpo as grpo_module
import studies.training.recorder as recorder_module
import studies.training.run as run_module
from studies.training.checkpoint import CHECKPOINT, PREVIOUS
from studies.training.job import DEPLOYED, EVAL, FULL
from studies.training.manifest import MANIFEST

GENERATION, BETWEEN, UPDATE = "during generation", "between generation and update", "during the update"
LOGS, WRITE, EVALUATION = "inside a log append", "inside a checkpoint write", "during evaluation"
RESULTS, RESUME, ANY = "while results are written", "while resuming", "at any time"
SHARES = {
    GENERATION: 10, BETWEEN: 23, UPDATE: 8, LOGS: 9, WRITE: 24, EVALUATION: 5, RESULTS: 8, RESUME: 6, ANY: 7,
}  # fmt: skip
"""Class of moments -> percentage of the kills. ``at any time`` kills from outside, after a random time."""
EVERY_WRITE = "a write"
_RENAMED = {CHECKPOINT: WRITE, PREVIOUS: WRITE, **dict.fromkeys((EVAL, FULL, DEPLOYED, MANIFEST), RESULTS)}


@dataclass(frozen=True)
class Aim:
    """The ``nth`` passage of a class, from 1. Inside a write, the share ``share`` in [0, 1) of its bytes reaches the file.

    ``kill`` ends the process there; ``refuse`` makes the write fail (class ``EVERY_WRITE``).
    """

    where: str
    nth: int
    share: float = 0.5
    end: Literal["kill", "refuse"] = "kill"


class Gates:
    """Counter of passages by class that ends the process at the aimed passage; ``tell`` is called with the place first."""

    def __init__(self, aim: Aim | None, tell: Callable[[str], None]):
        self.passed: Counter[str] = Counter()
        self._aim, self._tell = aim, tell
        self.phase = ""

    def through(self, where: str, place: str) -> None:
        """Pass a moment between two actions."""
        if self._reached(where):
            self._tell(place)
            os.kill(os.getpid(), signal.SIGKILL)

    @contextlib.contextmanager
    def writing(self, where: str, path: Path, size: int, before: int = 0) -> Iterator[None]:
        """Context: the write of ``size`` bytes to a file of ``before`` bytes."""
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
    """Context: no file can grow beyond ``size`` bytes.

    A larger write fails, because Python ignores the kernel's signal; with ``kill`` it kills the process.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if kill:
        # Python's own signal handlers run only after the C code; a C handler runs when the system call returns.
        handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        ctypes.CDLL(None).signal(int(signal.SIGXFSZ), handler)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def install(gates: Gates, checkpoint_every: int) -> None:
    """Install the gates in this process permanently, with more frequent checkpoints than a user's run, as more targets."""
    run_module.CHECKPOINT_EVERY = checkpoint_every
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
    """Count tokens that are drawn inside of this function as passages of ``where``."""
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
    _phase(run_module, "evaluate", gates, EVALUATION)
    _around(grpo_module, "gather", gates, BETWEEN, "after")
    for name in ("varied", "with_anchors", "update"):
        _around(grpo_module, name, gates, BETWEEN)
    for name in ("objective", "clip_gradients"):
        _around(grpo_module, name, gates, UPDATE)
    _around(torch.optim.AdamW, "step", gates, UPDATE, "both")


def _resuming(gates: Gates) -> None:
    """Install the gates of a resume. A first start passes none of them, because there is nothing to read."""
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

    recorder_module.append = run_module.append = appending
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
