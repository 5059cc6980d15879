"""Trains one arm at one seed, on the CPU or an accelerator; the same seed gives the same bits on the same machine.

    before `enable_at`   the plain model             from there on   the looped one, with the plain one's weights and moments

A looped model has what the plain one has, and more: skips of further steps, embeddings of passes. What is new starts as it does in
a fresh model, and has no moments yet. That is what one set of parameters under two schedules would do, since a parameter that is
not used has no gradient, or one of 0. Source: parameter-golf, pull requests 1420 and 1518.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from tqdm import tqdm

from mi_route2.validation import AtLeastOne, validated
from studies.common.seeds import torch_generator
from studies.lanes.arms import Arm, Size
from studies.lanes.config import LanesConfig
from studies.lanes.model import LanesModel
from studies.lanes.optim import LanesOptimiser, OptimSettings, build_optimizer
from studies.lanes.text import batches

Precision = Literal["float32", "bf16"]
WARMED = 5  # the momentum's warm-up takes one part of so many of all steps


@validated
class Training:
    """How an arm is trained.

    steps, batch, length        of optimisation; windows of a step; predictions of a window
    optim                       what an arm does not change
    device                      where it is trained; what is measured on the trained model is measured on the CPU, in float32
    precision, compile          of forward and backward; weights and optimiser stay float32
    """

    steps: AtLeastOne = 150
    batch: AtLeastOne = 4
    length: AtLeastOne = 128
    optim: OptimSettings = field(default_factory=OptimSettings)
    device: str = "cpu"
    precision: Precision = "float32"
    compile: bool = False

    def optim_of(self, arm: Arm) -> OptimSettings:
        """The arm's optimizer, its momentum warmed over a fifth of its steps."""
        return arm.optim(replace(self.optim, momentum_warmup=self.steps_of(arm) // WARMED))

    def steps_of(self, arm: Arm) -> int:
        """How many steps the arm is trained for: at least one."""
        return max(1, round(arm.steps * self.steps))


@dataclass(frozen=True, eq=False)
class Trained:
    """The model, on the CPU. `losses`: nats per byte of each step's batch, before the step."""

    model: LanesModel
    losses: Float[Tensor, " steps"]


def build(config: LanesConfig, seed: int) -> LanesModel:
    """The model of a configuration at a seed, untrained."""
    return LanesModel(config, torch_generator(seed, "lanes weights"))


def check_device(name: str) -> None:
    """Raise ``ValueError`` if torch cannot use the device here."""
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"the device {name!r} cannot be used here ({str(error).splitlines()[0]})") from error


def plain(config: LanesConfig) -> LanesConfig:
    """The same without its loop, and without what only a loop has."""
    return replace(config, loop=None, loop_embeddings=False, head_bias=False)


def switch_step(arm: Arm, steps: int) -> int:
    """The first step at which the arm's loop runs; 0 for an arm without one."""
    return 0 if arm.looped == "none" else math.ceil(arm.enable_at * steps)


def loss_of(device: str, precision: str, compiled: bool) -> Callable[[LanesModel, Tensor], Tensor]:
    """The loss of a model on a batch, autocast and compiled as asked for. Each call compiles anew."""

    def loss(model: LanesModel, batch: Tensor) -> Tensor:
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=precision == "bf16"):
            return model.loss(batch)

    return torch.compile(loss, fullgraph=True) if compiled else loss


def train(arm: Arm, size: Size, training: Training, tokens: Int64[Tensor, " n"], seed: int) -> Trained:
    """Train an arm on windows of a stream.

    Args:
        arm: what is trained.
        size: how large it is.
        training: for how long it is trained, on what batches, where.
        tokens: the stream that windows are drawn from, on the CPU.
        seed: of the weights and of the order of the data; two arms of one seed share both.

    Raises:
        ValueError: the stream is shorter than a window, or the loss is no longer finite.
    """
    config, optim = arm.config(size), training.optim_of(arm)
    steps = training.steps_of(arm)
    switch = switch_step(arm, steps)
    device = training.device
    model = build(plain(config) if switch else config, seed).to(device)
    optimiser = build_optimizer(model.named_parameters(), optim)
    loss_on, losses = loss_of(device, training.precision, training.compile), []
    generator = torch_generator(seed, "lanes batches")
    drawn = batches(tokens, size=training.batch, length=training.length, steps=steps, generator=generator)
    for i, batch in enumerate(tqdm(drawn, arm.name, steps, delay=3, leave=False, disable=None)):
        if i == switch > 0:
            model, optimiser = looped(model, optimiser, build(config, seed).to(device))
        optimiser.set(i, steps)
        optimiser.zero_grad()
        loss = loss_on(model, batch.to(device))
        loss.backward()
        optimiser.step()
        losses.append(loss.detach())
    found = torch.stack(losses).float().cpu()
    if not bool(found.isfinite().all()):
        raise ValueError(f"the loss of {arm.name} at seed {seed} is not finite: lower the rates, or the decay")
    return Trained(model.cpu(), found)


def looped(model: LanesModel, optimiser: LanesOptimiser, new: LanesModel) -> tuple[LanesModel, LanesOptimiser]:
    """`new`, with the weights of `model` in all that both have, and an optimiser with the moments of these."""
    start = new.state_dict()
    new.load_state_dict(start | {name: widened(value, start[name]) for name, value in model.state_dict().items()})
    own = dict(new.named_parameters())
    moments = {entry: _moment(value, own[entry.partition("/")[2]]) for entry, value in optimiser.state_dict().items()}
    fresh = build_optimizer(new.named_parameters(), optimiser.settings)
    fresh.load_state_dict(moments)
    return new, fresh


def widened(value: Tensor, like: Tensor) -> Tensor:
    """`value` in the first rows of `like`: skips are numbered from the innermost on, in every schedule."""
    return torch.cat((value, like[len(value) :])) if value.ndim and len(value) < len(like) else value


def _moment(value: Tensor, parameter: nn.Parameter) -> Tensor:
    """A moment for all rows of a parameter, 0 in those that are new; the count of steps as it is."""
    return value if not value.ndim else widened(value, torch.zeros_like(parameter))
