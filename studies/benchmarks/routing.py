"""Cost of routing: paired ratios of time and peak memory, each with the floor in FLOPs.

    python -m studies.benchmarks routing [--quick | --smollm2 [--dtype bfloat16] [--checkpointing]] [--rounds 15] [--out FILE.json]

One thread, all sides interleaved in one process.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from torch import nn
from tqdm import tqdm

from mi_route2.adapters import AdapterSpec
from mi_route2.models import smollm2
from mi_route2.rollouts import Policy
from mi_route2.routing import MaskSpec
from studies.benchmarks.measurement import flops
from studies.benchmarks.measurement.contenders import Bench
from studies.benchmarks.measurement.flops import MICRO, Size
from studies.benchmarks.measurement.paired import Contender, Measured, PairedRatio, Ratio, measure, ratio, report
from studies.benchmarks.options import RoutingOptions
from studies.common.tables import markdown_table

FROZEN = "frozen"
SVD, LORA = "svd + quarantine", "LoRA + quarantine"
SVD_STACKED, STACKED = f"{SVD}, stacked", f"{LORA}, stacked"
PEFT, PEFT_SPLIT, PEFT_HALF = "PEFT LoRA", "PEFT LoRA, two adapters", "PEFT LoRA in bfloat16"
FOLDED, UNFOLDED = "svd full rank, folded", "svd full rank, unfolded"
POOLED, MODULE, ACT = "pooled gradient flag", "gradient flag per module", "pooled activation flag"
FULL = "full score, a pass of its own"
VMAP, OPACUS = "torch.func vmap(grad)", "Opacus GradSampleModule"


ROWS = (
    *(PairedRatio(f"{SVD}: {flag}", SVD, 1.05, 1.10) for flag in (POOLED, MODULE, ACT)),
    PairedRatio(f"{SVD}: {FULL}", SVD),
    *(PairedRatio(f"{LORA}: {flag}", LORA, 1.05, 1.10) for flag in (POOLED, MODULE)),
    PairedRatio(f"{SVD_STACKED}: {POOLED}", f"{SVD}: {POOLED}", 1.00),
    PairedRatio(f"{SVD_STACKED}: {POOLED}", PEFT, 1.00),
    PairedRatio(STACKED, LORA, 1.00),
    PairedRatio(f"{STACKED}: {POOLED}", STACKED, 1.05, 1.10),
    PairedRatio(f"{SVD}: {VMAP}", SVD),
    PairedRatio(f"{PEFT}: {OPACUS}", PEFT),
    PairedRatio(SVD, PEFT, 1.00),
    PairedRatio(SVD, PEFT_SPLIT, 1.00),
    PairedRatio(LORA, PEFT),
    PairedRatio(FOLDED, FROZEN, 1.60),
    PairedRatio(UNFOLDED, FROZEN),
    PairedRatio(SVD, FROZEN),
    PairedRatio(PEFT, FROZEN),
)
"""The limits are the project's targets; rows without one have no target."""

SMOLLM2 = Size(30, 576, 9, 1536, 49152, rollouts=8, tokens=512, prompt=64, kept_rank=16, quarantine_rank=16, kv=192)
SMOLLM2_ROWS = (
    PairedRatio(LORA, PEFT, 1.00),
    PairedRatio(LORA, PEFT_SPLIT, 1.00),
    PairedRatio(f"{LORA}: {POOLED}", LORA, 1.05, 1.10),
    PairedRatio(STACKED, PEFT, 1.00),
    PairedRatio(STACKED, LORA, 1.00),
    PairedRatio(f"{STACKED}: {POOLED}", STACKED, 1.05, 1.10),
    PairedRatio(f"{LORA}: {POOLED}", PEFT, 1.00),
    PairedRatio(f"{STACKED}: {POOLED}", PEFT, 1.00),
    PairedRatio(f"{STACKED}: {ACT}", STACKED, 1.05, 1.10),
    PairedRatio(f"{STACKED}: {ACT}", PEFT, 1.00),
)
# Beside a model in bfloat16, PEFT's factors are float32 and so are its products with them, unless it is asked for bfloat16. Ours
# are float32, their products bfloat16. So the last rows compare equal arithmetic, but not equal precision of what is learned.
BFLOAT16_ROWS = (*SMOLLM2_ROWS, *(PairedRatio(side, PEFT_HALF) for side in (LORA, STACKED, f"{STACKED}: {POOLED}")))


@dataclass(frozen=True)
class RoutingResult:
    """A measured row. ``floor`` is the ratio of FLOPs; ``missing`` is the reason if there are no numbers."""

    row: PairedRatio
    floor: float | None = None
    over_frozen: float | None = None
    time: Ratio | None = None
    memory: float | None = None
    missing: str | None = None

    @property
    def verdict(self) -> str:
        if self.time is None or self.memory is None:
            return "not measured"
        if self.row.memory_limit is not None and self.memory > self.row.memory_limit:
            return "missed"
        if self.row.limit is None:
            return ""
        if self.time.value <= self.row.limit:
            return "met"
        return "within noise" if self.time.lo <= self.row.limit else "missed"

    def record(self) -> dict[str, object]:
        """Return the row of the JSON file, in which the limit of time is called ``time_limit``."""
        row = asdict(self.row)
        row["time_limit"] = row.pop("limit")
        return asdict(self) | {"row": row, "verdict": self.verdict}


def builders(bench: Bench) -> dict[str, Callable[[], Contender]]:
    """Return the builder of each side, by name."""
    size, base = bench.size, flops.frozen(bench.size)
    r, k = size.kept_rank, size.quarantine_rank
    svd = AdapterSpec(rank=r, quarantine_rank=k)
    lora = AdapterSpec(kept="lora", rank=r, quarantine_rank=k)

    @cache
    def policy(spec: AdapterSpec, stack: bool = False) -> Policy:
        """Made if a row needs it: an SVD of every weight takes minutes for a real model."""
        made = bench.policy(spec)
        made.adapters.stack = stack
        return made

    work = {SVD: base + flops.svd(size, r) + flops.lora(size, k), LORA: base + flops.lora(size, r + k)}
    work[PEFT] = work[STACKED] = work[LORA]
    scored = flops.deployed_pass(size) + flops.full_score(size)
    grad, module, act = MaskSpec(score="grad"), MaskSpec(score="grad", unit="rollout"), MaskSpec(score="act")
    full = MaskSpec(score="full", score_policy="ablated", negative_scale=0.3)

    def full_rank(name: str, fold: bool, extra: int) -> Contender:
        return bench.plain(name, bench.policy(AdapterSpec(quarantine="none", fold=fold)), base + extra)

    sides: dict[str, Callable[[str], Contender]] = {
        FROZEN: lambda name: bench.plain(name, bench.model(), base),
        SVD: lambda name: bench.plain(name, policy(svd), work[SVD]),
        LORA: lambda name: bench.plain(name, policy(lora), work[LORA]),
        STACKED: lambda name: bench.plain(name, policy(lora, True), work[STACKED]),
        PEFT: lambda name: bench.plain(name, bench.peft(r + k), work[PEFT]),
        PEFT_SPLIT: lambda name: bench.plain(name, bench.peft(r, k), work[PEFT]),
        PEFT_HALF: lambda name: bench.plain(name, bench.peft(r + k, wide=False), work[PEFT]),
        FOLDED: lambda name: full_rank(name, True, flops.folded(size)),
        UNFOLDED: lambda name: full_rank(name, False, flops.svd(size, None)),
        f"{SVD}: {POOLED}": lambda name: bench.routed(name, policy(svd), grad, work[SVD]),
        f"{SVD}: {MODULE}": lambda name: bench.routed(name, policy(svd), module, work[SVD]),
        f"{SVD}: {ACT}": lambda name: bench.routed(name, policy(svd), act, work[SVD] + flops.act_score(size, r)),
        f"{SVD}: {FULL}": lambda name: bench.routed(name, policy(svd), full, work[SVD] + scored),
        f"{LORA}: {POOLED}": lambda name: bench.routed(name, policy(lora), grad, work[LORA]),
        f"{LORA}: {MODULE}": lambda name: bench.routed(name, policy(lora), module, work[LORA]),
        f"{SVD_STACKED}: {POOLED}": lambda name: bench.routed(name, policy(svd, True), grad, work[SVD]),
        f"{STACKED}: {POOLED}": lambda name: bench.routed(name, policy(lora, True), grad, work[STACKED]),
        f"{STACKED}: {ACT}": lambda name: bench.routed(name, policy(lora, True), act, work[STACKED] + flops.act_score(size, r)),
        f"{STACKED}: {FULL}": lambda name: bench.routed(name, policy(lora, True), full, work[STACKED] + scored),
        f"{SVD}: {VMAP}": lambda name: bench.vmap(name, svd, work[SVD]),
        f"{PEFT}: {OPACUS}": lambda name: bench.opacus(name, bench.peft(r + k), work[PEFT]),
    }
    return {name: lambda name=name, side=side: side(name) for name, side in sides.items()}


def build(bench: Bench, rows: Sequence[PairedRatio]) -> tuple[list[Contender], dict[str, str]]:
    """Return the sides of ``rows`` that work here, and the reason for each foreign library that does not."""
    ready, missing, named = [], {}, {name for row in rows for name in (row.over, row.under)}
    sides = {name: side for name, side in builders(bench).items() if name in named}
    for name, side in tqdm(sides.items(), desc="building", unit="side", leave=False):
        if not any(foreign in name for foreign in (PEFT, VMAP)):
            ready.append(side())
            continue
        try:
            contender = side()
            contender.step()
            contender.reset()
        except Exception as error:  # a foreign library may fail in any way; its row then shows the error
            missing[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        else:
            ready.append(contender)
    return ready, missing


def compare(
    size: Size, rounds: int, seed: int, *, rows: Sequence[PairedRatio] = ROWS, model: nn.Module | None = None
) -> tuple[list[RoutingResult], dict[str, Measured], dict[str, int]]:
    """Return the ratios of ``rows``, and for each side its measurements and least FLOPs; ``model`` replaces the random one."""
    with TemporaryDirectory() as folder:
        ready, missing = build(Bench(size, seed, Path(folder), model=model), rows)
    measured = measure(ready, rounds, np.random.default_rng(seed))
    work = {c.name: c.flops for c in ready}
    rng = np.random.default_rng(seed)

    def result(row: PairedRatio) -> RoutingResult:
        for name in (row.over, row.under):
            if name in missing:
                return RoutingResult(row, missing=f"{name}: {missing[name]}")
        over, under = measured[row.over], measured[row.under]
        return RoutingResult(
            row,
            floor=work[row.over] / work[row.under],
            over_frozen=work[row.over] / flops.frozen(size),
            time=ratio(over.seconds, under.seconds, rng),
            memory=over.peak_bytes / under.peak_bytes,
        )

    return [result(row) for row in rows], measured, work


def table(results: list[RoutingResult], judge: bool = True) -> str:
    """Return a Markdown table; times are ratios of medians with a 95% bootstrap interval. ``judge``: show which targets are met."""
    rows = []
    for r in results:
        limits = ((r.row.limit, "time"), (r.row.memory_limit, "memory"))
        target = ", ".join(f"{what} <= {limit:.2f}" for limit, what in limits if limit is not None)
        if r.time is None:
            cells = ("-", "-", "-", "-", "-", target, r.missing or r.verdict)
        else:
            ratios = (f"{value:.3f}" for value in (r.floor, r.over_frozen, r.memory))
            cells = (*r.time.cells(), *ratios, target, r.verdict if judge else "")
        rows.append((r.row.over, r.row.under, *cells))
    return markdown_table(("what", "against", "time", "95%", "floor", "FLOPs / frozen", "peak memory", "target", ""), rows, left=2)


def run(options: RoutingOptions) -> None:
    """Measure, print the table, and write ``options.out``."""
    size, every = MICRO if options.quick else Size(), ROWS
    model: Any = None
    if options.smollm2:
        size, every = SMOLLM2, SMOLLM2_ROWS if options.dtype == "float32" else BFLOAT16_ROWS
    if not (rows := [row for row in every if options.only in row.over]):
        raise ValueError(f"no row is called {options.only!r}: choose from {', '.join(dict.fromkeys(row.over for row in every))}")
    if options.smollm2:
        model = smollm2(dtype=options.dtype).model.train().requires_grad_(False)
        if options.checkpointing:
            model.gradient_checkpointing_enable()
    results, measured, work = compare(size, options.turns, options.seed, rows=rows, model=model)
    sides = {name: asdict(one) | {"flops": work[name]} for name, one in measured.items()}
    document = {"size": size, "rows": [one.record() for one in results], "sides": sides}
    document |= {"smollm2": options.smollm2, "dtype": options.dtype, "checkpointing": options.checkpointing}
    quick = "so small a model times Python, not arithmetic: nothing is judged"
    report(options, headline(size, options.turns), table(results, judge=not options.quick), document, quick)


def headline(size: Size, rounds: int) -> str:
    """Return the sizes that were measured."""
    r, k = size.kept_rank, size.quarantine_rank
    return (
        f"{size.layers} layers, d {size.d}, mlp {size.mlp}; {size.rollouts} rollouts of {size.tokens} tokens\n"
        f"kept r{r}, quarantine r{k}; {PEFT} r{r + k}, {PEFT_SPLIT} r{r} and r{k}; {rounds} rounds, 1 thread"
    )
