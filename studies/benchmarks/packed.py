"""Routed steps on rollouts of different lengths: one row without padding against the padded layout.

    python -m studies.benchmarks packed [--quick] [--smollm2] [--rollouts 16] [--routes NAME ...] [--rounds 15] [--out FILE.json]

16 rollouts whose completions have a long tail of lengths (log-normal, median 48 tokens, at most 512), on the random Qwen3 of
``studies.benchmarks.engine`` or, with ``--smollm2``, on SmolLM2-135M with 8 rollouts. Adapters r8 + r8 at every Linear of the
blocks. One forward and backward each, one thread, sides in turns; gradients of both sides are compared before.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
from torch import Tensor

from mi_route2.adapters import AdapterSpec, attach
from mi_route2.models import smollm2
from mi_route2.rollouts import Policy, Rollouts, packed_forward, vocabulary
from mi_route2.routing import Route, StepContext, TrainBatch
from studies.benchmarks.engine import random_model
from studies.benchmarks.measurement.contenders import move, random_route
from studies.benchmarks.measurement.paired import Contender, Measured, Ratio, machine, measure, ratio
from studies.benchmarks.options import SPECS, PackedOptions

PROMPT, MEDIAN, SPREAD = 32, 48, 1.0


@dataclass(frozen=True)
class Result:
    """Time and peak memory of the packed step relative to the padded one."""

    route: str
    time: Ratio
    memory: float


def tail(count: int, longest: int, rng: np.random.Generator) -> list[int]:
    """Return lengths of completions: log-normal, the longest one at the limit."""
    drawn = np.exp(np.log(MEDIAN) + SPREAD * rng.standard_normal(count))
    return [longest, *(int(length) for length in drawn.clip(1, longest)[1:])]


def batch_of(lengths: list[int], size: int, generator: torch.Generator) -> TrainBatch:
    """Return random rollouts with completions of these lengths."""

    def drawn(count: int) -> list[int]:
        return torch.randint(size, (count,), generator=generator).tolist()

    rollouts = Rollouts.from_lists([drawn(PROMPT) for _ in lengths], [drawn(length) for length in lengths], pad=0)
    rewards = torch.randn(len(lengths), generator=generator)
    return TrainBatch(rollouts, rewards, rewards, torch.arange(len(lengths)) // 4, torch.zeros(len(lengths), dtype=torch.bool))


def step_of(policy: Policy, route: Route, batch: TrainBatch) -> Callable[[], object]:
    """Return a whole routed forward and backward."""

    def loss(logits: Tensor, given: TrainBatch) -> Tensor:
        return -(given.advantages[:, None] * given.rollouts.logprobs(logits)).sum() / batch.rollouts.attention.sum()

    context = StepContext(torch.Generator().manual_seed(0))
    return lambda: route.backward(policy, batch, loss, context)


def run(options: PackedOptions) -> None:
    """Measure, print the table, and write ``options.out``."""
    model = smollm2().model if options.smollm2 else random_model(options.seed)
    rollouts, longest = (4, 64) if options.quick else (8, 256) if options.smollm2 else (16, 448)
    lengths = tail(options.rollouts or rollouts, longest, np.random.default_rng(options.seed))
    generator = torch.Generator().manual_seed(options.seed)
    spec = AdapterSpec(kept="lora", rank=8, quarantine_rank=8)
    padded = Policy(model, attach(model, "blocks.*", spec=spec, generator=generator))
    move([*padded.adapters.kept_parameters().values(), *padded.adapters.quarantine_parameters().values()], generator)
    packed = replace(padded, forward=packed_forward(model))
    batch = batch_of(lengths, vocabulary(model) or 100, generator)
    sides = []
    for name in options.routes:
        route = random_route(SPECS[name], padded.adapters, options.seed)
        steps = {layout: step_of(policy, route, batch) for layout, policy in (("padded", padded), ("packed", packed))}
        demand_equal(padded, steps["padded"], steps["packed"])
        sides += [Contender(f"{name}, {layout}", 0, step, model.zero_grad) for layout, step in steps.items()]
    measured, rng = measure(sides, options.turns, np.random.default_rng(options.seed)), np.random.default_rng(options.seed)
    results = [result(name, measured, rng) for name in options.routes]
    print(describe(lengths))
    print("so small a load shows that every side runs, and no more\n" if options.quick else "")
    print(table(results, measured))
    document = {"machine": machine(), "rounds": options.turns, "lengths": lengths, "smollm2": options.smollm2}
    document |= {"rows": [asdict(r) for r in results], "sides": {name: asdict(m) for name, m in measured.items()}}
    options.write(document)


def describe(lengths: list[int]) -> str:
    """Return a sentence about the batch."""
    b, s = len(lengths), PROMPT + max(lengths)
    real = b * PROMPT + sum(lengths)
    return f"{b} rollouts of {PROMPT + min(lengths)} to {s} tokens: {real:,} of the {b * s:,} tokens in the padded layout are real."


def demand_equal(policy: Policy, *steps: Callable[[], object]) -> None:
    """Raise ``AssertionError`` unless all steps give the same gradients, to rounding."""
    found = []
    for step in steps:
        step()
        found.append({n: p.grad.clone() for n, p in policy.adapters.kept_parameters().items() if p.grad is not None})
        policy.model.zero_grad()
    size = max(float(g.abs().max()) for g in found[0].values())
    assert all(torch.allclose(found[0][name], g, rtol=0, atol=1e-3 * size) for name, g in found[1].items())


def result(name: str, measured: dict[str, Measured], rng: np.random.Generator) -> Result:
    """Return the row of a route."""
    packed, padded = measured[f"{name}, packed"], measured[f"{name}, padded"]
    return Result(name, ratio(packed.seconds, padded.seconds, rng), packed.peak_bytes / padded.peak_bytes)


def table(results: list[Result], measured: dict[str, Measured]) -> str:
    """Return a Markdown table of seconds and MiB of both layouts and their ratios."""
    lines = ["| route | padded | packed | time | 95% | padded | packed | memory |", "|---|---|---|---|---|---|---|---|"]
    for r in results:
        sides = [measured[f"{r.route}, {layout}"] for layout in ("padded", "packed")]
        seconds = [f"{np.median(side.seconds):.2f} s" for side in sides]
        sizes = [f"{side.peak_bytes / 2**20:,.0f} MiB" for side in sides]
        spread = f"{r.time.lo:.3f} - {r.time.hi:.3f}"
        lines.append(
            f"| {r.route} | {' | '.join(seconds)} | {r.time.value:.3f} | {spread} | {' | '.join(sizes)} | {r.memory:.3f} |"
        )
    return "\n".join(lines)
