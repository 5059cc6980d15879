"""Training of one arm at one seed; the same seed gives the same bits on the same machine.

    before `ENABLED_AT`  the plain model             from there on   the looped one, with the plain one's weights and moments

A looped model has all parameters of the plain one, and additional ones: skips of further steps, embeddings of passes. Additional
parameters start as in a fresh model and have no moments yet. This is equivalent to one set of parameters under two schedules,
because an unused parameter has no gradient, or a gradient of 0. Source: parameter-golf, pull requests 1420 and 1518.
"""

import math
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from tqdm import tqdm

from mi_route2.validation import AtLeastOne, validated
from studies.common.seeds import torch_generator
from studies.lanes.arms import ENABLED_AT, LanesArm, LanesSize
from studies.lanes.config import LanesConfig
from studies.lanes.model import LanesModel
from studies.lanes.optim import LanesOptimizer, OptimSettings, widened
from studies.lanes.text import batches

WARMED_OF = 500
"""Steps of training of which `OptimSettings.momentum_warmup` are the warm-up; an arm of any length has the same share."""


@validated
class LanesTraining:
    """Settings of the training of an arm.

    Attributes:
        steps: Optimization steps.
        batch: Windows per step.
        length: Predictions per window.
        optim: Optimizer settings that an arm does not change; its `momentum_warmup` is of `WARMED_OF` steps (see `optim_of`).
    """

    steps: AtLeastOne = 150
    batch: AtLeastOne = 4
    length: AtLeastOne = 128
    optim: OptimSettings = field(default_factory=OptimSettings)

    def optim_of(self, arm: LanesArm) -> OptimSettings:
        """Return the arm's optimizer settings, with the momentum warmed up over the same share of every arm's steps: a fifth."""
        return arm.optim(replace(self.optim, momentum_warmup=self.optim.momentum_warmup * self.steps_of(arm) // WARMED_OF))

    def steps_of(self, arm: LanesArm) -> int:
        """Return the number of training steps of the arm: at least one."""
        return max(1, round(arm.steps * self.steps))


@dataclass(frozen=True, eq=False)
class Trained:
    """A trained model, and the nats per byte of each step's batch, before the step."""

    model: LanesModel
    losses: Float[Tensor, " steps"]


def build(config: LanesConfig, seed: int) -> LanesModel:
    """Return the untrained model of a configuration at a seed."""
    return LanesModel(config, torch_generator(seed, "lanes weights"))


def plain(config: LanesConfig) -> LanesConfig:
    """Return the configuration without its loop and without the loop's parameters."""
    return replace(config, loop=None, loop_embeddings=False, head_bias=False)


def switch_step(arm: LanesArm, steps: int) -> int:
    """Return the first step at which the arm's loop runs; 0 for an arm without a loop."""
    return 0 if arm.looped == "none" else math.ceil(ENABLED_AT * steps)


def train(arm: LanesArm, size: LanesSize, training: LanesTraining, tokens: Int64[Tensor, " n"], seed: int) -> Trained:
    """Train an arm on windows of a stream.

    Args:
        arm: The arm to train.
        size: Model sizes.
        training: Steps and batches.
        tokens: The stream from which windows are drawn.
        seed: Seed of the weights and of the order of the data; two arms of one seed share both.

    Raises:
        ValueError: If the stream is shorter than a window, or if the loss is not finite.
    """
    config, optim = arm.config(size), training.optim_of(arm)
    steps = training.steps_of(arm)
    switch = switch_step(arm, steps)
    model = build(plain(config) if switch else config, seed)
    optimizer = LanesOptimizer(model, optim)
    losses = []
    generator = torch_generator(seed, "lanes batches")
    drawn = batches(tokens, size=training.batch, length=training.length, steps=steps, generator=generator)
    for i, batch in enumerate(tqdm(drawn, arm.name, steps, delay=3, leave=False, disable=None)):
        if i == switch > 0:
            model, optimizer = looped(model, optimizer, build(config, seed))
        optimizer.set(i, steps)
        model.zero_grad()
        loss = model.loss(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    if switch >= steps:  # too few steps for the loop to run: its model is returned all the same
        model, _ = looped(model, optimizer, build(config, seed))
    curve = torch.stack(losses)
    if not bool(curve.isfinite().all()):
        raise ValueError(f"the loss of {arm.name} at seed {seed} is not finite: lower the learning rates or the decay")
    return Trained(model, curve)


def looped(model: LanesModel, optimizer: LanesOptimizer, new: LanesModel) -> tuple[LanesModel, LanesOptimizer]:
    """Return `new` with the weights of `model` in all parameters that both have, and an optimizer with their moments."""
    start = new.state_dict()
    new.load_state_dict(start | {name: widened(value, start[name]) for name, value in model.state_dict().items()})
    fresh = LanesOptimizer(new, optimizer.settings)
    fresh.adopt(optimizer)
    return new, fresh
