"""Cost of a host: paired ratios of time to bare torch hooks, for a forward, a routed step and a generated token.

    python -m studies.benchmarks hosts [--quick] [--smollm2] [--rounds 15] [--out FILE.json]

Every side is the same random Qwen3 (with ``--smollm2`` SmolLM2-135M) with the same adapters at every Linear of its blocks, and
reads the same sites: the stream after each block and one bottleneck. The bare side uses ``register_forward_hook``, the others their
host:

    forward           hooks open, logits without gradients, hooks closed
    routed step       hooks open over the forward and backward of a step under a mask route, its flags and its gradients
    generated token   greedy generation with a cache, by the library's own ``generate``, hooks open; time over new tokens

TransformerLens's bridge makes attention eager, so its own overhead is the ratio to bare hooks on eager attention; the ratio of
those to bare hooks on fused attention is a row of its own. Importing nnsight makes every ``backward()`` in the process 20
microseconds longer, on all sides alike.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from tqdm import tqdm

from studies.benchmarks.measurement.host_contenders import (
    BARE,
    BRIDGE,
    EAGER,
    NNSIGHT,
    QUICK,
    SETTINGS,
    SIDES,
    SMOLLM2,
    TASKS,
    TORCH,
    HostBench,
    Setting,
)
from studies.benchmarks.measurement.paired import Measured, Ratio, machine, measure, ratio
from studies.benchmarks.options import HostsOptions

ROWS = ((TORCH, BARE), (NNSIGHT, BARE), (BRIDGE, EAGER), (EAGER, BARE), (BRIDGE, BARE))
"""(side, the side that it is compared with)."""


@dataclass(frozen=True)
class Result:
    """``over`` relative to ``under``: time of a ``task``, with both medians in milliseconds per unit, and peak memory."""

    setting: str
    task: str
    over: str
    under: str
    time: Ratio
    over_ms: float
    under_ms: float
    memory: float

    @staticmethod
    def read(row: dict[str, Any]) -> "Result":
        """Return a row of the JSON file."""
        return Result(**{**row, "time": Ratio(**row["time"])})


def compare(setting: Setting, rounds: int, seed: int) -> tuple[list[Result], dict[str, Measured]]:
    """Return all rows of a setting, and the measurements of every side."""
    with TemporaryDirectory() as folder:
        bench = HostBench(setting, seed, Path(folder))
        sides = [bench.build(name) for name in tqdm(SIDES, desc=f"building {setting.name}", unit="side", leave=False)]
    measured = measure([bench.contender(task, side) for task in TASKS for side in sides], rounds, np.random.default_rng(seed))
    rng = np.random.default_rng(seed)

    def result(task: str, over: str, under: str) -> Result:
        above, below = measured[f"{task}: {over}"], measured[f"{task}: {under}"]
        over_ms, under_ms = (1000 * median(side.seconds) / bench.units(task) for side in (above, below))
        time = ratio(above.seconds, below.seconds, rng)
        return Result(setting.name, task, over, under, time, over_ms, under_ms, above.peak_bytes / max(below.peak_bytes, 1))

    return [result(task, over, under) for over, under in ROWS for task in TASKS], measured


def table(results: list[Result]) -> str:
    """Return a Markdown table. A cell has the ratio of medians, its 95% bootstrap interval, and the added milliseconds per unit."""
    found = {(r.setting, r.over, r.under, r.task): r for r in results}
    lines = ["| model | what | against | " + " | ".join(TASKS) + " |", "|---" * (3 + len(TASKS)) + "|"]
    for setting in dict.fromkeys(r.setting for r in results):
        bare = [f"{found[setting, TORCH, BARE, task].under_ms:.1f} ms" for task in TASKS]
        lines.append("| " + " | ".join([setting, BARE, "", *bare]) + " |")
        for over, under in ROWS:
            cells = [cell(found[setting, over, under, task]) for task in TASKS]
            lines.append("| " + " | ".join([setting, over, under, *cells]) + " |")
    return "\n".join(lines) + "\n"


def cell(r: Result) -> str:
    return f"{r.time.value:.2f} ({r.time.lo:.2f} - {r.time.hi:.2f}), {r.over_ms - r.under_ms:+.1f} ms"


def run(options: HostsOptions) -> None:
    """Measure, print the table, and write ``options.out``."""
    settings = QUICK if options.quick else SMOLLM2 if options.smollm2 else SETTINGS
    runs = {setting: compare(setting, options.turns, options.seed) for setting in settings}
    for setting in settings:
        size = setting.size
        print(
            f"{setting.name}: {size.layers} layers, d {size.d}; {size.rollouts} rollouts of {size.tokens} tokens; "
            f"{setting.new} tokens generated from prompts of {size.prompt}; kept r{size.kept_rank}, q r{size.quarantine_rank}"
        )
    small = "; so small a model shows that every row runs, and no more" if options.quick else ""
    print(f"{options.turns} rounds, 1 thread{small}\n")
    print(table([row for rows, _ in runs.values() for row in rows]), end="")
    options.write(document(options.turns, runs))


def document(rounds: int, runs: dict[Setting, tuple[list[Result], dict[str, Measured]]]) -> dict[str, object]:
    """Return all measurements, ready for JSON."""
    return {
        "machine": machine(),
        "rounds": rounds,
        "settings": {setting.name: asdict(setting) for setting in runs},
        "rows": [asdict(row) for rows, _ in runs.values() for row in rows],
        "sides": {setting.name: {name: asdict(m) for name, m in sides.items()} for setting, (_, sides) in runs.items()},
    }
