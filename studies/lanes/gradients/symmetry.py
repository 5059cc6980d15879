"""The symmetry instrument: whether two routes with equal starts receive equal gradients, and whether training separates them.

    g_j = dL / d post[layer, sublayer, j]          relative(g_0, g_1) = |g_0 - g_1| / max(|g_0|, |g_1|),  0 if both are 0

A wiring may have one of two symmetries, or none; each case has its own consequence:

    exchange   L is unchanged if lane 0's weights are exchanged for lane 1's. Then g_0 = g_1 if all pairs are equal, and what starts
               equal stays equal; elsewhere they differ (`z2`)
    gauge      L depends on post[.., 0] + post[.., 1] alone. Then g_0 = g_1 everywhere, and the split of a weight has no effect
               (`gauge`, which has the exchange symmetry too)
    none       g_0 != g_1 at the symmetric start, which is then not special (`shipped`, `simultaneous`)

If output projections are 0, every g_j is exactly 0 in every wiring. `quarantine_symmetry` records a `Trace` too, so lanes and
quarantines share one figure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.func import functional_call
from tqdm import tqdm

from mi_route2.validation import AtLeastOne, Natural, Positive, validated
from studies.lanes.config import STARTS, WIRINGS, LanesConfig, StartName, WiringName, sized
from studies.lanes.model import LanesModel, byte_loss

Kind = Literal["lanes", "quarantine"]
SUBLAYERS = ("attn", "mlp")
TWO_LANES: tuple[WiringName, ...] = tuple(name for name, wiring in WIRINGS.items() if wiring.lanes == 2)


@validated
class SymmetrySettings:
    """Sizes of the models that are trained, and settings of their training.

    At these sizes a step takes 10 to 25 ms of one thread in float64; all of `trace_wirings` takes 10 to 20 s.

    Attributes:
        layers: Number of blocks.
        d_model: Number of features.
        heads: Number of attention heads.
        mlp: Hidden features of the MLP as a multiple of d_model.
        lane_start: First block behind the fork.
        batch: Rows of tokens per step.
        length: Predictions per row; a row has one token more.
        steps: Training steps.
        every: Steps between two readings.
        rate: Learning rate of Adam.
    """

    layers: AtLeastOne = 4
    d_model: AtLeastOne = 32
    heads: AtLeastOne = 4
    mlp: AtLeastOne = 2
    lane_start: Natural = 2
    batch: AtLeastOne = 4
    length: AtLeastOne = 64
    steps: AtLeastOne = 100
    every: AtLeastOne = 5
    rate: Positive = 3e-3

    def config(self, wiring: WiringName, start: StartName) -> LanesConfig:
        return sized(self, wiring=wiring, start=start)


@dataclass(frozen=True)
class Partial:
    """Derivatives of the loss in nats by both lanes' weights of a sublayer, and their relative difference."""

    layer: int
    sublayer: str
    lane0: float
    lane1: float
    difference: float


@dataclass(frozen=True)
class Trace:
    """Two routes over a training, recorded before step `steps[i]`.

    Attributes:
        name: Wiring or pair of adapters.
        kind: Lanes or quarantine.
        start: Name of the start.
        steps: Steps of the readings.
        differences: Distance of the routes' weights. For lanes it is the mean of |alpha_0 - alpha_1| over layers and sublayers,
            where alpha are the elements of `post` (`compared`); for a quarantine it is the mean over sites of the Frobenius
            distance between the weight that it adds and the one that the kept adapter adds.
        partials: Mean relative difference of the gradients that both receive, over the same pairs.
        losses: Nats per byte on the batch of that step.
    """

    name: str
    kind: Kind
    start: str
    steps: tuple[int, ...]
    differences: tuple[float, ...]
    partials: tuple[float, ...]
    losses: tuple[float, ...]

    @staticmethod
    def of(name: str, kind: Kind, start: str, readings: Sequence["Reading"]) -> "Trace":
        return Trace(name, kind, start, *zip(*readings, strict=True))


class Reading(NamedTuple):
    """One reading of a trace."""

    step: int
    difference: float
    partial: float
    loss: float


@torch.no_grad()
def relative(a: Tensor, b: Tensor) -> float:
    """Return `|a - b| / max(|a|, |b|)` in the Euclidean norm, 0 if both are 0. It is between 0 and 2."""
    larger = max(float(a.norm()), float(b.norm()))
    return float((a - b).norm()) / larger if larger else 0.0


def partials(model: LanesModel, tokens: Int[Tensor, "b s"]) -> tuple[Partial, ...]:
    """Return one row per layer and sublayer, including those before the fork (all 0).

    The scalars are differentiated whether they are learned or frozen.
    """
    post = _gradients(model, tokens)["post"]
    return tuple(
        Partial(layer, sublayer, float(g[0]), float(g[1]), relative(g[0], g[1]))
        for layer in range(model.config.layers)
        for sublayer, g in zip(SUBLAYERS, post[layer], strict=True)
    )


def live(model: LanesModel, tokens: Int[Tensor, "b s"]) -> dict[str, Bool[Tensor, "layers 2 ..."]]:
    """Return a mask of the routing scalars (`post`, `resid`) that have a gradient that is not exactly 0 on these tokens."""
    return {name: gradient != 0 for name, gradient in _gradients(model, tokens).items()}


def slopes(model: LanesModel, texts: Int[Tensor, "n s"]) -> dict[str, int]:
    """Return the number of routing scalars behind the fork, and in how many directions the loss has a slope on some text.

    The number of directions is the rank of the gradients of many texts, one row each, at these weights: the other directions are
    gauges, at least to first order.

    Raises:
        ValueError: If there are fewer texts than scalars.
    """
    used = (model.config.layers - model.config.lane_start) * 3 * len(SUBLAYERS)
    if len(texts) < used:
        raise ValueError(f"{len(texts)} texts cannot show {used} directions: give at least as many texts as directions")
    gradients = torch.stack(
        [torch.cat([g[model.config.lane_start :].flatten() for g in _gradients(model, text[None]).values()]) for text in texts]
    )
    return {"used": used, "sloped": int(torch.linalg.matrix_rank(gradients, rtol=1e-10))}


def exchange_gap(model: LanesModel, tokens: Int[Tensor, "b s"]) -> float:
    """Return the change of the loss, in nats, if the lanes exchange their weights: 0 for any wiring if they are equal."""
    return _gap(model, tokens, model.post.detach().flip(-1))


def gauge_gap(model: LanesModel, tokens: Int[Tensor, "b s"], amount: float = 0.1) -> float:
    """Return the change of the loss, in nats, if `amount` of every sublayer's weight moves from lane 1 to lane 0."""
    return _gap(model, tokens, model.post.detach() + amount * model.post.new_tensor((1.0, -1.0)))


def train_symmetry(
    config: LanesConfig,
    tokens: Int[Tensor, "n s"],
    generator: torch.Generator,
    *,
    steps: int,
    every: int = 5,
    batch: int = 4,
    rate: float = 3e-3,
) -> Trace:
    """Train all parameters by Adam in float64 and record the lanes' weights every `every` steps and at the end.

    `generator` draws the model. A step takes the next `batch` rows of `tokens` and starts again at the top after the last; if there
    are as many rows as a batch has, every step takes the same batch.
    """
    model = LanesModel(config, generator).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    readings: list[Reading] = []
    for step in range(steps + 1):
        loss = model.loss(rows_at(tokens, step, batch))
        optimizer.zero_grad()
        loss.backward()
        if step % every == 0 or step == steps:
            readings.append(_reading(model, step, loss))
        if step < steps:
            optimizer.step()
    return Trace.of(config.wiring, "lanes", config.start, readings)


def trace_wirings(settings: SymmetrySettings, tokens: Int[Tensor, "n s"], seed: int) -> tuple[Trace, ...]:
    """Return a trace of every wiring of two lanes from every start, all from the same weights, drawn by `seed`."""
    runs = list(product(TWO_LANES, STARTS))
    given = {name: getattr(settings, name) for name in ("steps", "every", "batch", "rate")}
    return tuple(
        train_symmetry(settings.config(wiring, start), tokens, torch.Generator().manual_seed(seed), **given)
        for wiring, start in tqdm(runs, desc="symmetry", unit="training", leave=False, disable=None)
    )


def compared(config: LanesConfig) -> range:
    """Return the layers whose lanes are compared: those behind the fork, except the last if a lane is not read out.

    In that layer one of the two gradients is 0 because nothing reads the lane, whatever the symmetry.

    Raises:
        ValueError: If no layer is left.
    """
    layers = range(config.lane_start, config.layers - (0 in config.lanes.out))
    if not layers:
        raise ValueError(f"{config.wiring} has no two lanes to compare in {config.layers} layers: lower lane_start")
    return layers


def rows_at(tokens: Int[Tensor, "n s"], step: int, batch: int) -> Int[Tensor, "b s"]:
    """Return the rows of a step: the next `batch` rows, again from the top after the last."""
    return tokens[torch.arange(step * batch, (step + 1) * batch, device=tokens.device) % len(tokens)]


def _reading(model: LanesModel, step: int, loss: Tensor) -> Reading:
    """Return a reading from the parameters' `.grad`, which is taken as 0 if the scalars are frozen."""
    layers = list(compared(model.config))
    post = model.post.detach()
    gradient = torch.zeros_like(post) if model.post.grad is None else model.post.grad
    apart = (post[layers, :, 0] - post[layers, :, 1]).abs().mean()
    pairs = [relative(g[0], g[1]) for g in gradient[layers].flatten(0, 1)]
    return Reading(step, float(apart), sum(pairs) / len(pairs), float(loss.detach()))


def _gradients(model: LanesModel, tokens: Tensor) -> dict[str, Tensor]:
    """Return the gradients of the routing scalars, zeros if the loss does not depend on one; the model is unchanged."""
    free = {name: model.get_parameter(name).detach().requires_grad_() for name in ("post", "resid")}
    gradients = torch.autograd.grad(_loss_with(model, tokens, free), list(free.values()), materialize_grads=True)
    return dict(zip(free, gradients, strict=True))


def _loss_with(model: LanesModel, tokens: Tensor, parameters: dict[str, Tensor]) -> Tensor:
    return byte_loss(functional_call(model, parameters, (tokens[:, :-1],)), tokens)


@torch.no_grad()
def _gap(model: LanesModel, tokens: Tensor, post: Tensor) -> float:
    return float(_loss_with(model, tokens, {"post": post}) - model.loss(tokens))
