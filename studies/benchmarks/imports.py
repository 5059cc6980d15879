"""Seconds until the library is there, and until a command line answers: fresh processes, in turns.

    python -m studies.benchmarks imports [--quick] [--rounds 15] [--out FILE.json]

A start is that of an interpreter whose modules are compiled already, as at every start but the first. What ``import torch`` takes
by itself is taken off the imports, round by round, because the library cannot change it.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np

from studies.benchmarks.measurement.paired import Ratio, ratio, report, take_turns
from studies.benchmarks.options import ImportsOptions
from studies.common.tables import markdown_table

TORCH = "import torch"
EVERY = "every name of mi_route2"
STARTS = {
    TORCH: ("-c", "import torch"),
    "import mi_route2": ("-c", "import torch, mi_route2"),
    EVERY: ("-c", "import torch, mi_route2; [getattr(mi_route2, name) for name in mi_route2.__all__]"),
    **{
        f"{module} --help": ("-m", *module.split(), "--help")
        for module in ("studies.route2", "studies.route2 run", "studies.steering run", "mi_route2.serve")
    },
}
"""Name -> arguments of the interpreter."""
BEYOND, HELP = 0.5, 1.5
"""Seconds that ``import mi_route2`` may take beyond torch, and a help altogether."""


@dataclass(frozen=True)
class StartCost:
    """Median processor seconds of a start, of an import beyond torch's, with a 95% bootstrap interval; at most ``limit``."""

    name: str
    time: Ratio
    limit: float | None


def start(name: str) -> dict[str, float]:
    """Run a fresh process to its end and return its processor seconds."""
    before = os.times()
    subprocess.run([sys.executable, *STARTS[name]], check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    return {name: after.children_user + after.children_system - before.children_user - before.children_system}


def rows(seconds: dict[str, list[float]], rng: np.random.Generator) -> list[StartCost]:
    """Return the rows of what was measured."""
    measured = []
    for name, (how, *_) in STARTS.items():
        beyond = np.array(seconds[name]) - (np.array(seconds[TORCH]) if how == "-c" and name != TORCH else 0.0)
        limit = HELP if how == "-m" else BEYOND if name != TORCH else None
        measured.append(StartCost(name, ratio(beyond.tolist(), [1.0] * len(beyond), rng), limit))
    return measured


def table(results: Sequence[StartCost], seconds: dict[str, list[float]]) -> str:
    """Return a Markdown table of the rows."""
    body = []
    for row in results:
        limit = "" if row.limit is None else f"{row.limit:.1f} s"
        value, interval = f"{row.time.value:.2f} s", f"{row.time.lo:.2f} - {row.time.hi:.2f}"
        body.append((row.name, f"{median(seconds[row.name]):.2f} s", value, interval, limit))
    return markdown_table(("start", "processor", "beyond torch, if an import", "95%", "at most"), body)


def run(options: ImportsOptions) -> None:
    """Measure, print the table, and write ``options.out``."""
    rng = np.random.default_rng(options.seed)
    seconds = take_turns({name: partial(start, name) for name in STARTS}, options.turns, rng)
    results = rows(seconds, rng)
    report(options, f"{options.turns} rounds", table(results, seconds), {"rows": results, "seconds": seconds})
