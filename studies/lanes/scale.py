"""The same training at an accelerator's size: what do two lanes cost a step, beside one stream of the same size?

    ratio = median over rounds of (lanes' tokens a second / one stream's)

Both models train in the same process, in turn, round by round, the order changing with every round: what slows the machine slows
both. Rounds before `warmup` steps are done do not count, so no time of compilation does.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import tyro
from torch import Tensor
from tqdm import tqdm

from mi_route2.validation import write_json
from studies.common.seeds import torch_generator
from studies.lanes.arms import Size, get_arms
from studies.lanes.model import LanesModel
from studies.lanes.optim import LanesOptimiser, build_optimizer
from studies.lanes.settings import open_text
from studies.lanes.text import batches
from studies.lanes.train import Precision, Training, build, loss_of

BASELINE = "sequential"


@dataclass(frozen=True)
class Timing:
    """Tokens a second: medians over rounds, and the median of the rounds' ratios with their extremes. losses: at the last step."""

    arm: str
    tokens: float
    baseline: float
    ratio: float
    low: float
    high: float
    losses: tuple[float, float]


@dataclass(frozen=True)
class Scale:
    """Train an arm at another size and time it against a sequential model of that size, in one process, in turn."""

    layers: Annotated[int, tyro.conf.arg(help="blocks, 6 or more; lanes fork at two thirds of them")] = 12
    d_model: Annotated[int, tyro.conf.arg(help="features, a multiple of twice the heads")] = 512
    heads: int = 8
    batch: Annotated[int, tyro.conf.arg(help="windows of a step")] = 64
    length: Annotated[int, tyro.conf.arg(help="bytes of a window")] = 1024
    rounds: Annotated[int, tyro.conf.arg(help="times that each of the two is timed")] = 10
    steps: Annotated[int, tyro.conf.arg(help="steps of a round")] = 10
    warmup: Annotated[int, tyro.conf.arg(help="steps of each before anything is timed")] = 20
    arms: Annotated[tuple[str, ...], tyro.conf.arg(help="what is timed against the sequential model")] = ("gptj", "shipped")
    precision: Annotated[Precision, tyro.conf.arg(help="of the forward; weights and optimiser stay float32")] = "bf16"
    compile: Annotated[bool, tyro.conf.arg(help="torch.compile the loss of both models")] = False
    device: Annotated[str | None, tyro.conf.arg(help="cuda, cuda:1, cpu; without it, the accelerator")] = None
    text: Annotated[Path | None, tyro.conf.arg(help="a folder of UTF-8 text; without it, the running Python's own library")] = None
    out: Annotated[Path | None, tyro.conf.arg(help="a JSON file for the numbers")] = None

    def __call__(self) -> None:
        found = timings(self)
        for one in found:
            print(
                f"{one.arm}: {one.tokens:,.0f} tokens/s, {BASELINE} {one.baseline:,.0f}; ratio {one.ratio:.3f} "
                f"({one.low:.3f} to {one.high:.3f}, {self.rounds} rounds); losses {one.losses[0]:.3f} and {one.losses[1]:.3f} nats"
            )
        if self.out is not None:
            write_json(self.out, {"settings": {**vars(self), "text": None, "out": None}, "timings": [vars(one) for one in found]})


@dataclass(eq=False)
class _Runner:
    """A model at work: its optimiser, its loss, its batches."""

    model: LanesModel
    optimiser: LanesOptimiser
    loss: Callable[[Tensor], Tensor]
    total: int
    device: torch.device
    done: int = 0
    last: float = float("nan")

    def run(self, rows: list[Tensor]) -> float:
        """Seconds that these steps take."""
        _settle(self.device)
        start = time.perf_counter()
        loss = None
        for batch in rows:
            self.optimiser.set(self.done, self.total)
            self.optimiser.zero_grad()
            loss = self.loss(batch)
            loss.backward()
            self.optimiser.step()
            self.done += 1
        _settle(self.device)
        seconds = time.perf_counter() - start
        self.last = float("nan") if loss is None else float(loss.detach())
        return seconds


def timings(scale: Scale) -> list[Timing]:
    """A row for each arm. ``ValueError`` without an accelerator where none else was asked for, and for sizes that cannot be."""
    if min(scale.rounds, scale.steps, scale.batch, scale.length) < 1 or scale.warmup < 0:
        raise ValueError("rounds, steps, batch and length must be at least 1, and warmup at least 0")
    device = device_of(scale.device)
    size = Size.of_layers(scale.layers, scale.d_model, scale.heads)
    names = [name for name in scale.arms if name != BASELINE]
    total = scale.warmup + scale.rounds * scale.steps
    runners = {arm.name: _runner(scale, size, arm.name, device, total) for arm in get_arms((BASELINE, *names))}
    tokens = open_text(scale.text).stream("train", 50_000_000).tokens
    drawn = batches(tokens, size=scale.batch, length=scale.length, steps=total, generator=torch_generator(0, "lanes scale"))
    warm = [next(drawn).to(device) for _ in range(scale.warmup)]
    for runner in tqdm(runners.values(), "warming up", leave=False, disable=None):
        runner.run(warm)
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    for r in tqdm(range(scale.rounds), "rounds", leave=False, disable=None):
        rows = [next(drawn).to(device) for _ in range(scale.steps)]
        order = list(runners) if r % 2 == 0 else list(reversed(runners))
        for name in order:
            seconds[name].append(runners[name].run(rows))
    return [_timing(scale, name, seconds, runners) for name in names]


def device_of(asked: str | None) -> torch.device:
    """The device of that name, or the accelerator. ``ValueError`` where there is none."""
    if asked is not None:
        try:
            return torch.empty(0, device=asked).device
        except (RuntimeError, AssertionError) as error:
            raise ValueError(f"the device {asked!r} cannot be used here ({str(error).splitlines()[0]})") from error
    if not torch.cuda.is_available():
        raise ValueError("there is no accelerator here: run this where CUDA is, or pass --device cpu with a small size")
    return torch.device("cuda")


def _runner(scale: Scale, size: Size, name: str, device: torch.device, total: int) -> _Runner:
    arm = replace(get_arms((name,))[0], enable_at=0.0)  # a loop is timed as it runs
    model = build(arm.config(size), 0).to(device)
    optimiser = build_optimizer(model.named_parameters(), Training(steps=total).optim_of(arm))
    loss = loss_of(device.type, scale.precision, scale.compile)
    return _Runner(model, optimiser, partial(loss, model), total, device)


def _timing(scale: Scale, name: str, seconds: dict[str, list[float]], runners: dict[str, _Runner]) -> Timing:
    tokens = scale.steps * scale.batch * scale.length
    speeds = {own: [tokens / s for s in seconds[own]] for own in (name, BASELINE)}
    ratios = [a / b for a, b in zip(speeds[name], speeds[BASELINE], strict=True)]
    medians = {own: statistics.median(values) for own, values in speeds.items()}
    losses = (runners[name].last, runners[BASELINE].last)
    return Timing(name, medians[name], medians[BASELINE], statistics.median(ratios), min(ratios), max(ratios), losses)


def _settle(device: torch.device) -> None:
    """Wait for what was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
