"""``python -m studies.benchmarks NAME``: print the paired ratios of one benchmark.

    routing      a routed training step against PEFT's LoRA and a plain backward
    hosts        a forward with hooks against one without, and against TransformerLens
    sweeps       a patch sweep against TransformerLens's own loop
    attribution  estimates of heads, MLPs and edges against exact sweeps
    engine       the generation engine against transformers' generate
    serve        completions over HTTP against the engine in this process
    jail         a grade in the jail against a child process without one

``NAME --help`` lists the options.
"""

import os
import subprocess
import sys
from importlib import import_module

import tyro

NAMES = ("routing", "hosts", "sweeps", "attribution", "engine", "serve", "jail")
ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(2**26),
    "MALLOC_TRIM_THRESHOLD_": str(2**32),
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "KINETO_LOG_LEVEL": "9",
}
"""Environment of the process that measures.

Its allocator keeps freed memory: with glibc's default threshold, tensors are returned to the system and faulted in again at each
step, which can simulate a factor of two.
"""


def main() -> int:
    """Run a benchmark in a process with ``ENVIRONMENT``; return the exit status."""
    if len(sys.argv) < 2 or sys.argv[1] not in NAMES:
        print(__doc__)
        return 0 if sys.argv[1:] in ([], ["-h"], ["--help"]) else 2
    if any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):
        command = [sys.executable, "-W", "ignore::FutureWarning", "-m", "studies.benchmarks", *sys.argv[1:]]
        return subprocess.run(command, env=os.environ | ENVIRONMENT, check=False).returncode
    import torch

    from studies.benchmarks.paired import BenchmarkOptions, run

    torch.set_num_threads(1)
    name = sys.argv[1]
    module = import_module(f"studies.benchmarks.{name}")
    options = tyro.cli(BenchmarkOptions, args=sys.argv[2:], prog=f"python -m studies.benchmarks {name}", description=module.__doc__)
    try:
        run(module.build, options)
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
