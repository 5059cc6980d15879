"""``python -m studies.benchmarks [NAME] [OPTIONS]``: list the benchmarks, or run one; ``NAME --help`` explains its options."""

import inspect
import os
import subprocess
import sys
from importlib import import_module

import tyro

from mi_route2.validation import unknown_name
from studies.benchmarks.options import BENCHMARKS
from studies.common.command_line import given_twice

ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(2**26),
    "MALLOC_TRIM_THRESHOLD_": str(2**32),
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "KINETO_LOG_LEVEL": "9",  # suppresses messages of the memory profiler
}
"""Environment of the process that measures: its allocator keeps freed memory.

Otherwise a tensor above glibc's default mmap threshold is returned to the system and faulted in again at each step, which can
simulate a factor of two. Tensors of more than 64 MiB are returned, because a process that kept those of a real model too was seen
to grow to three times what its steps hold. With gradient checkpointing glibc's heap grows even so; preload jemalloc for that.
"""


def main() -> int:
    """Run a benchmark in a child process with ``ENVIRONMENT``; return the exit status."""
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(f"{__doc__}\n\nbenchmarks: {', '.join(BENCHMARKS)}")
        return 0
    name = sys.argv.pop(1)
    if name not in BENCHMARKS:
        print(f"error: {unknown_name(name, list(BENCHMARKS), 'benchmark')}", file=sys.stderr)
        return 2
    benchmark = BENCHMARKS[name]
    try:
        if twice := given_twice(sys.argv[1:]):
            raise ValueError(f"{twice} is given twice: give it once, with all of its values behind it")
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
    except ModuleNotFoundError as error:
        print(f"error: {error.name} is not installed: pip install 'mi-route2[bench,lanes,serve]'", file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
