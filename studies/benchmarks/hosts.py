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

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

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
from studies.benchmarks.measurement.paired import Measured, Ratio, measure, ratio, report
from studies.benchmarks.options import HostsOptions
from studies.common.tables import markdown_table

ROWS = ((TORCH, BARE), (NNSIGHT, BARE), (BRIDGE, EAGER), (EAGER, BARE), (BRIDGE, BARE))
"""(side, the side that it is compared with)."""


@dataclass(frozen=True)
class HostResult:
    """``over`` relative to ``under``: time of a ``task``, with both medians in milliseconds per unit, and peak memory."""

    setting: str
    task: str
    over: str
    under: str
    time: Ratio
    over_ms: float
    under_ms: float
    memory: float


def compare(setting: Setting, rounds: int, seed: int) -> tuple[list[HostResult], dict[str, Measured]]:
    """Return all rows of a setting, and the measurements of every side."""
    with TemporaryDirectory() as folder:
        bench = HostBench(setting, seed, Path(folder))
        sides = [bench.build(name) for name in tqdm(SIDES, desc=f"building {setting.name}", unit="side", leave=False)]
    measured = measure([bench.contender(task, side) for task in TASKS for side in sides], rounds, np.random.default_rng(seed))
    rng = np.random.default_rng(seed)

    def result(task: str, over: str, under: str) -> HostResult:
        above, below = measured[f"{task}: {over}"], measured[f"{task}: {under}"]
        over_ms, under_ms = (1000 * median(side.seconds) / bench.units(task) for side in (above, below))
        time = ratio(above.seconds, below.seconds, rng)
        return HostResult(setting.name, task, over, under, time, over_ms, under_ms, above.peak_bytes / max(below.peak_bytes, 1))

    return [result(task, over, under) for over, under in ROWS for task in TASKS], measured


def table(results: list[HostResult]) -> str:
    """Return a Markdown table. A cell has the ratio of medians, its 95% bootstrap interval, and the added milliseconds per unit."""
    by_cell = {(r.setting, r.over, r.under, r.task): r for r in results}
    rows = []
    for setting in dict.fromkeys(r.setting for r in results):
        rows.append((setting, BARE, "", *(f"{by_cell[setting, TORCH, BARE, task].under_ms:.1f} ms" for task in TASKS)))
        for over, under in ROWS:
            cells = (by_cell[setting, over, under, task] for task in TASKS)
            rows.append((setting, over, under, *(f"{r.time:.2f}, {r.over_ms - r.under_ms:+.1f} ms" for r in cells)))
    return markdown_table(("model", "what", "against", *TASKS), rows, left=3)


def run(options: HostsOptions) -> None:
    """Measure, print the table, and write ``options.out``."""
    settings = QUICK if options.quick else SMOLLM2 if options.smollm2 else SETTINGS
    results, sides, head = [], {}, []
    for setting in settings:
        rows, sides[setting.name] = compare(setting, options.turns, options.seed)
        results += rows
        size = setting.size
        head.append(
            f"{setting.name}: {size.layers} layers, d {size.d}; {size.rollouts} rollouts of {size.tokens} tokens; "
            f"{setting.new} tokens generated from prompts of {size.prompt}; kept r{size.kept_rank}, q r{size.quarantine_rank}"
        )
    head.append(f"{options.turns} rounds, 1 thread")
    document = {"settings": {setting.name: setting for setting in settings}, "rows": results, "sides": sides}
    report(options, "\n".join(head), table(results), document)
