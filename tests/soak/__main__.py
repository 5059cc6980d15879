"""Run ``python -m tests.soak --kills N`` from a checkout."""

import os
import platform
import random
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import tyro

from mi_route2.validation import write_json


@dataclass(frozen=True)
class Soak:
    """Kill tiny runs N times at random moments, resume after each kill, and compare every byte with an undisturbed run."""

    kills: Annotated[
        int, tyro.conf.arg(help="of jobs, spread over all classes of moments; a tenth as many faults of each kind")
    ] = 100
    commands: Annotated[int, tyro.conf.arg(help="kills of the whole command, of its parent, or of a worker; seconds each")] = 12
    seed: int = 0
    out: Annotated[Path | None, tyro.conf.arg(help="write every stop to this JSON file")] = None

    def __call__(self) -> int:
        if self.kills < 1 or self.commands < 0:
            print(f"error: kills must be at least 1 and commands at least 0, not {self.kills} and {self.commands}", file=sys.stderr)
            return 2
        if self.out is not None and (self.out.is_dir() or not self.out.parent.is_dir()):  # told now, and not when all is killed
            print(f"error: --out {self.out} is no file in a folder that is there: give another", file=sys.stderr)
            return 2
        from tests.soak.soak import scratch_folder, soak  # with torch, which ``--help`` need not wait for

        with scratch_folder() as scratch:
            try:
                print(tally := soak(scratch, self.kills, self.commands, random.Random(self.seed)))
            except KeyboardInterrupt:
                print("\nsoak stopped before its end", file=sys.stderr)
                return 130
        if self.out is not None:
            versions = {"python": platform.python_version(), **{name: version(name) for name in ("torch", "safetensors")}}
            write_json(self.out, {"seed": self.seed, "versions": versions, "cpus": os.cpu_count(), **asdict(tally)})
        return 1 if tally.failures else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, because a pool of threads does not survive a fork
    sys.exit(tyro.cli(Soak, prog="python -m tests.soak")())
