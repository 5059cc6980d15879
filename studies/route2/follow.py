"""Reads what the workers of a run write, while they write it.

Nothing here imports torch: the tracker's process reads through it too, and has to be small.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class Follower:
    """A JSON-lines log that grows: every step comes once.

    A resumed run cuts its log back to the last checkpoint and writes the same rows again, so a row whose step was there before is
    dropped. A line that is not whole yet, or not JSON (a crash left it, and the run will cut it away), is left for later.
    """

    def __init__(self, path: Path):
        self.last = -1
        """The highest step that was read; -1 before the first."""
        self._path, self._at, self._inode = path, 0, -1

    def read(self) -> list[dict[str, Any]]:
        """The rows of steps that are new since the last call. A log that is not there yet has none."""
        try:
            with self._path.open("rb") as log:
                now = os.fstat(log.fileno())
                if now.st_size < self._at or now.st_ino != self._inode:
                    self._at, self._inode = 0, now.st_ino
                log.seek(self._at)
                lines = log.read().split(b"\n")[:-1]
        except FileNotFoundError:
            return []
        return list(self._new(lines))

    def _new(self, lines: list[bytes]) -> Iterator[dict[str, Any]]:
        for line in lines:
            try:
                row = json.loads(line)
                step = int(row["step"])
            except (ValueError, TypeError, KeyError):
                return
            self._at += len(line) + 1
            if step > self.last:
                self.last = step
                yield row


@dataclass(frozen=True)
class Tracked:
    """An arm at a seed, as a tracker sees it.

    ``root`` is the run folder, ``steps`` how many training steps there will be (0 for the base model), ``identity`` a hash of
    all that the result depends on, ``config`` what the tracker shows beside the curves. ``metrics``, ``evaluation`` and
    ``manifest`` are the files to read; the last of them is there once the others are complete.
    """

    root: Path
    arm: str
    seed: int
    steps: int
    identity: str
    config: dict[str, Any]
    metrics: Path
    evaluation: Path
    manifest: Path

    @property
    def key(self) -> str:
        return f"{self.arm}/seed-{self.seed}"


def scalars(row: dict[str, Any]) -> dict[str, float]:
    """The numbers of a metrics row by name: ``train/loss``, ``grad_norm/kept``, ``modes/run_tests/hack``; ``None`` has no entry."""
    found = dict(_numbers(row, ""))
    return {name if "/" in name else f"train/{name}": value for name, value in found.items() if name != "step"}


def evaluated(report: dict[str, Any]) -> dict[str, float]:
    """The numbers of an evaluation: ``eval/deploy/run_tests/hack`` with the quarantine deleted, ``eval/on/...`` with it."""
    modes = report["modes"].items()
    return {
        f"eval/{switched}/{mode}/{rate}": float(value)
        for mode, halves in modes
        for switched, rates in halves.items()
        for rate, value in rates.items()
    }


def _numbers(value: Any, name: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _numbers(inner, f"{name}/{key}" if name else key)
    elif isinstance(value, int | float):
        yield name, float(value)
