"""Command line of a benchmark: its options, and a child process whose allocator keeps freed memory.

Otherwise a tensor above glibc's default mmap threshold is returned to the system and faulted in again at each step, which can
simulate a factor of two. Tensors of more than 64 MiB are returned, because a process that kept those of a real model too was seen
to grow to three times what its steps hold. With gradient checkpointing glibc's heap grows even so; preload jemalloc for that.
"""

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated

import tyro

from mi_route2.files import write_whole

ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(2**26),
    "MALLOC_TRIM_THRESHOLD_": str(2**32),
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "KINETO_LOG_LEVEL": "9",  # suppresses messages of the memory profiler
}


@dataclass(frozen=True)
class Benchmark:
    """Options of every benchmark. The docstring of a subclass is its help text."""

    quick: Annotated[bool, tyro.conf.arg(help="a tiny model and three rounds: shows that every row runs, not how fast")] = False
    rounds: Annotated[int | None, tyro.conf.arg(help="turns per side; default: 15, or 3 with --quick")] = None
    seed: Annotated[int, tyro.conf.arg(help="seed of the weights, the adapters, the tokens and the order of turns")] = 0
    out: Annotated[Path | None, tyro.conf.arg(help="write all measurements to this JSON file")] = None

    @property
    def turns(self) -> int:
        """Number of rounds."""
        return self.rounds or (3 if self.quick else 15)

    def check(self) -> None:
        """Check the options before anything is measured.

        Raises:
            ValueError: If an option cannot work.
        """
        if self.rounds is not None and self.rounds < 3:
            raise ValueError(f"a median of {self.rounds} rounds is meaningless: --rounds must be at least 3")
        if self.out is not None and not self.out.parent.is_dir():
            raise ValueError(f"there is no folder {self.out.parent} to write {self.out.name} into")

    def write(self, document: Mapping[str, object]) -> None:
        """Write ``document`` to ``out``, if given."""
        if self.out is not None:
            write_whole(self.out, (json.dumps(document, indent=1) + "\n").encode())
            print(f"\nwrote {self.out}")


def main(benchmark: type[Benchmark], name: str) -> int:
    """Run ``python -m studies.benchmarks name`` in a child process with ``ENVIRONMENT``; return the exit status.

    Args:
        benchmark: Class of the options.
        name: Name of the module, which has ``run(options)``.
    """
    try:
        options = tyro.cli(benchmark, prog=f"python -m studies.benchmarks {name}", description=inspect.getdoc(benchmark))
        options.check()
        if any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):
            command = [sys.executable, "-W", "ignore::FutureWarning", "-m", "studies.benchmarks", name, *sys.argv[1:]]
            return subprocess.run(command, env=os.environ | ENVIRONMENT, check=False).returncode
        import torch

        torch.set_num_threads(1)
        import_module(f"studies.benchmarks.{name}").run(options)
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
