"""Routed steps on rollouts of different lengths: one row without padding against the padded layout.

    python -m studies.benchmarks packed [--quick] [--smollm2] [--rollouts 16] [--routes NAME ...] [--rounds 15] [--out FILE.json]

16 rollouts whose completions have a long tail of lengths (log-normal, median 48 tokens, at most 512), on the random Qwen3 of
``studies.benchmarks.engine`` or, with ``--smollm2``, on SmolLM2-135M with 8 rollouts. Adapters r8 + r8 at every Linear of the
blocks. One forward and backward each, one thread, sides in turns; gradients of both sides are compared before.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from mi_route2.adapters import AdapterSpec, attach
from mi_route2.models import smollm2
from mi_route2.rollouts import Policy, Rollouts, packed_forward, vocabulary
from mi_route2.routing import Route, StepContext, TrainBatch
from studies.benchmarks.engine import random_model
from studies.benchmarks.measurement.contenders import move, random_route
from studies.benchmarks.measurement.paired import Contender, Measured, Ratio, measure, ratio, report
from studies.benchmarks.options import SPECS, PackedOptions
from studies.common.tables import markdown_table

PROMPT, MEDIAN, SPREAD = 32, 48, 1.0


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
    times = {}
    for name in options.routes:
        over, under = both(name, measured)
        times[name] = ratio(over.seconds, under.seconds, rng)
    rows = [{"route": name, "time": time, "memory": memory(name, measured)} for name, time in times.items()]
    document = {"lengths": lengths, "smollm2": options.smollm2, "rows": rows, "sides": measured}
    report(options, describe(lengths), table(times, measured), document)


def describe(lengths: list[int]) -> str:
    """Return a sentence about the batch."""
    b, s = len(lengths), PROMPT + max(lengths)
    real = b * PROMPT + sum(lengths)
    return f"{b} rollouts of {PROMPT + min(lengths)} to {s} tokens: {real:,} of the {b * s:,} tokens in the padded layout are real."


def demand_equal(policy: Policy, *steps: Callable[[], object]) -> None:
    """Raise ``AssertionError`` unless both steps give the same gradients, to rounding, of both adapters."""
    gradients = []
    for step in steps:
        step()
        parameters = [*policy.adapters.kept_parameters().values(), *policy.adapters.quarantine_parameters().values()]
        gradients.append([None if p.grad is None else p.grad.clone() for p in parameters])
        policy.model.zero_grad()
    size = max(float(g.abs().max()) for g in gradients[0] if g is not None)
    for one, other in zip(*gradients, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.allclose(one, other, rtol=0, atol=1e-3 * size)


def both(route: str, measured: Mapping[str, Measured]) -> tuple[Measured, Measured]:
    """Return the measurements of the packed and of the padded step."""
    return measured[f"{route}, packed"], measured[f"{route}, padded"]


def memory(route: str, measured: Mapping[str, Measured]) -> float:
    """Return the peak memory of the packed step relative to the padded one."""
    packed, padded = both(route, measured)
    return packed.peak_bytes / padded.peak_bytes


def table(times: Mapping[str, Ratio], measured: Mapping[str, Measured]) -> str:
    """Return a Markdown table of seconds and MiB of both layouts and their ratios, of each route's ``times``."""
    rows = []
    for route, time in times.items():
        packed, padded = both(route, measured)
        seconds = (f"{np.median(side.seconds):.2f} s" for side in (padded, packed))
        sizes = (f"{side.peak_bytes / 2**20:,.0f} MiB" for side in (padded, packed))
        rows.append((route, *seconds, *time.cells(), *sizes, f"{memory(route, measured):.3f}"))
    return markdown_table(("route", "padded", "packed", "time", "95%", "padded", "packed", "memory"), rows)
