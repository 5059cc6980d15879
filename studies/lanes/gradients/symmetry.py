"""The symmetry instrument: whether two routes with equal starts receive equal gradients, and whether training separates them.

    g_j = dL / d post[layer, sublayer, j]          relative(g_0, g_1) = |g_0 - g_1| / max(|g_0|, |g_1|),  0 if both are 0

A wiring of two lanes may have one of two symmetries, or none; each case has its own consequence:

    exchange   L is unchanged if lane 0's weights are exchanged for lane 1's. Then g_0 = g_1 if all pairs are equal, and what starts
               equal stays equal; elsewhere they differ (`z2`)
    gauge      L depends on post[.., 0] + post[.., 1] alone. Then g_0 = g_1 everywhere, and the split of a weight has no effect
               (`gauge`, which has the exchange symmetry too)
    none       g_0 != g_1 at the symmetric start, which is then not special (`shipped`, `simultaneous`)

If output projections are 0, every g_j is exactly 0 in every wiring.

The same question about this project's two adapters, which are added to a weight: W' = W + kept + quarantine. In a shared basis the
loss depends on the sum of their factors alone, the gauge symmetry again: both receive the same gradient, bit for bit, so unequal
starts keep their distance too. In a basis of its own the quarantine receives another gradient from the first step on. Nothing is
routed here: there is no mask. Gradients and weights are compared as matrices of the Linear, U diag(dS) Vh or B A, because factors
of two bases have no common coordinates; the compared factor is the one behind the bottleneck (`dS`, `B`), since at its initial
value 0 the gradient of `A` is exactly 0.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.func import functional_call
from tqdm import tqdm

from mi_route2.adapters import Adapters, AdapterSpec, attach
from mi_route2.adapters.linear import Branch, Kept, SharedQuarantine, SVDKept
from mi_route2.validation import AtLeastOne, Natural, Positive, validated
from studies.environments.micro.model import MicroGPT
from studies.environments.micro.settings import MicroConfig
from studies.lanes.config import STARTS, VOCABULARY, WIRINGS, LanesConfig, StartName, WiringName, sized
from studies.lanes.model import LanesModel, byte_loss

Kind = Literal["lanes", "quarantine"]
SUBLAYERS = ("attn", "mlp")
TWO_LANES: tuple[WiringName, ...] = tuple(name for name, wiring in WIRINGS.items() if wiring.lanes == 2)


@torch.no_grad()
def relative(a: Tensor, b: Tensor) -> float:
    """Return `|a - b| / max(|a|, |b|)` in the Euclidean norm, 0 if both are 0. It is between 0 and 2."""
    larger = max(float(a.norm()), float(b.norm()))
    return float((a - b).norm()) / larger if larger else 0.0


# Lanes at given weights


def partials(model: LanesModel, tokens: Int[Tensor, "b s"]) -> dict[str, Float[Tensor, "layers 2 ..."]]:
    """Return the derivatives of the loss in nats by `post` [layer, sublayer, lane] and `resid`; the model is unchanged.

    They are 0 before the fork. The scalars are differentiated whether they are learned or frozen.
    """
    free = {name: model.get_parameter(name).detach().requires_grad_() for name in ("post", "resid")}
    gradients = torch.autograd.grad(_loss_with(model, tokens, free), list(free.values()), materialize_grads=True)
    return dict(zip(free, gradients, strict=True))


def slopes(model: LanesModel, texts: Int[Tensor, "n s"]) -> dict[str, int]:
    """Return the number of routing scalars behind the fork, and in how many directions the loss has a slope on some text.

    The number of directions is the rank of the gradients of many texts, one row each, at these weights: the other directions are
    gauges, at least to first order.

    Raises:
        ValueError: If there are fewer texts than scalars.
    """
    fork = model.config.lane_start
    used = (model.config.layers - fork) * 3 * len(SUBLAYERS)
    if len(texts) < used:
        raise ValueError(f"{len(texts)} texts cannot show {used} directions: give at least as many texts as directions")
    gradients = torch.stack([torch.cat([g[fork:].flatten() for g in partials(model, text[None]).values()]) for text in texts])
    return {"used": used, "sloped": int(torch.linalg.matrix_rank(gradients, rtol=1e-10))}


def exchange_gap(model: LanesModel, tokens: Int[Tensor, "b s"]) -> float:
    """Return the change of the loss, in nats, if the lanes exchange their weights: 0 for any wiring if they are equal."""
    return _gap(model, tokens, model.post.detach().flip(-1))


def gauge_gap(model: LanesModel, tokens: Int[Tensor, "b s"], amount: float = 0.1) -> float:
    """Return the change of the loss, in nats, if `amount` of every sublayer's weight moves from lane 1 to lane 0."""
    return _gap(model, tokens, model.post.detach() + amount * model.post.new_tensor((1.0, -1.0)))


@torch.no_grad()
def _gap(model: LanesModel, tokens: Tensor, post: Tensor) -> float:
    return float(_loss_with(model, tokens, {"post": post}) - model.loss(tokens))


def _loss_with(model: LanesModel, tokens: Tensor, parameters: dict[str, Tensor]) -> Tensor:
    return byte_loss(functional_call(model, parameters, (tokens[:, :-1],)), tokens)


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


# Two routes over a training


@validated
class SymmetrySettings:
    """Sizes of the lanes' models that are trained (see `LanesConfig`), and settings of their training by Adam.

    Attributes:
        batch: Rows of tokens per step.
        length: Predictions per row; a row has one token more.
        every: Steps between two readings.
        rate: Learning rate.
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


@validated
class QuarantineSettings:
    """Sizes of the frozen base model, a random MicroGPT over bytes, and its adapters' training (see `SymmetrySettings`).

    Attributes:
        mlp: Hidden features of the base model's MLP.
        rank: Rank of every LoRA.
        unequal: Standard deviation of the quarantine's factor at an unequal start.
    """

    layers: AtLeastOne = 2
    d_model: AtLeastOne = 32
    heads: AtLeastOne = 4
    mlp: AtLeastOne = 64
    rank: AtLeastOne = 4
    unequal: Positive = 0.05
    batch: AtLeastOne = 4
    length: AtLeastOne = 64
    steps: AtLeastOne = 60
    every: AtLeastOne = 5
    rate: Positive = 3e-3


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


def rows_at(tokens: Int[Tensor, "n s"], step: int, batch: int) -> Int[Tensor, "b s"]:
    """Return the rows of a step: the next `batch` rows, again from the top after the last."""
    return tokens[torch.arange(step * batch, (step + 1) * batch, device=tokens.device) % len(tokens)]


def train_symmetry(config: LanesConfig, settings: SymmetrySettings, tokens: Int[Tensor, "n s"], seed: int) -> Trace:
    """Train all parameters of a model, drawn by `seed`, in float64, and record the lanes' weights (see `Trace`)."""
    model = LanesModel(config, torch.Generator().manual_seed(seed)).double()
    layers = list(compared(config))

    def read() -> tuple[float, float]:
        post = model.post.detach()
        gradient = torch.zeros_like(post) if model.post.grad is None else model.post.grad  # None if the scalars are frozen
        pairs = [relative(g[0], g[1]) for g in gradient[layers].flatten(0, 1)]
        return float((post[layers, :, 0] - post[layers, :, 1]).abs().mean()), sum(pairs) / len(pairs)

    readings = _train(model.parameters(), model.loss, read, settings, tokens)
    return Trace(config.wiring, "lanes", config.start, *zip(*readings, strict=True))


def trace_wirings(settings: SymmetrySettings, tokens: Int[Tensor, "n s"], seed: int) -> tuple[Trace, ...]:
    """Return a trace of every wiring of two lanes from every start, all from the same weights, drawn by `seed`."""
    runs: list[tuple[WiringName, StartName]] = list(product(TWO_LANES, STARTS))
    return tuple(
        train_symmetry(sized(settings, wiring=wiring, start=start), settings, tokens, seed)
        for wiring, start in tqdm(runs, desc="symmetry", unit="training", leave=False, disable=None)
    )


def _train(
    parameters: Iterable[nn.Parameter],
    loss_of: Callable[[Tensor], Tensor],
    read: Callable[[], tuple[float, float]],
    settings: SymmetrySettings | QuarantineSettings,
    tokens: Int[Tensor, "n s"],
) -> list[tuple[int, float, float, float]]:
    """Train by Adam; return step, distance, difference of gradients (by `read`) and loss every few steps and at the end."""
    optimizer, readings = torch.optim.Adam(parameters, lr=settings.rate), []
    for step in range(settings.steps + 1):
        loss = loss_of(rows_at(tokens, step, settings.batch))
        optimizer.zero_grad()
        loss.backward()
        if step % settings.every == 0 or step == settings.steps:
            readings.append((step, *read(), float(loss.detach())))
        if step < settings.steps:
            optimizer.step()
    return readings


@dataclass(frozen=True)
class AdapterPair:
    """A pair of adapters and their start: both at 0 (`equal`), or the quarantine at random values (`unequal`)."""

    name: str
    kept: Literal["svd", "lora"]
    quarantine: Literal["shared", "lora"]
    start: Literal["equal", "unequal"] = "equal"

    def attach(self, model: nn.Module, rank: int, generator: torch.Generator) -> Adapters:
        spec = AdapterSpec(self.kept, None if self.kept == "svd" else rank, self.quarantine, rank)
        return attach(model, "blocks.*", spec=spec, generator=generator)


PAIRS: tuple[AdapterPair, ...] = (
    AdapterPair("shared basis (SVD)", "svd", "shared"),
    AdapterPair("shared basis (SVD)", "svd", "shared", "unequal"),
    AdapterPair("shared basis (LoRA)", "lora", "shared"),
    AdapterPair("distinct basis (SVD)", "svd", "lora"),
    AdapterPair("distinct basis (LoRA)", "lora", "lora"),
)


def base(settings: QuarantineSettings, context: int, generator: torch.Generator) -> MicroGPT:
    """Return the base model under the adapters, in float64."""
    config = MicroConfig(VOCABULARY, settings.d_model, settings.layers, settings.heads, settings.mlp, context)
    return MicroGPT(config, generator).double()


def train_quarantine(pair: AdapterPair, settings: QuarantineSettings, tokens: Int[Tensor, "n s"], seed: int) -> Trace:
    """Train kept adapter and quarantine in float64, without a mask, and record both (see `Trace`).

    `seed` draws the base model, then the adapters.
    """
    generator = torch.Generator().manual_seed(seed)
    model = base(settings, tokens.shape[1], generator)
    adapters = pair.attach(model, settings.rank, generator)
    branches = list(adapters.sites.values())
    if pair.start == "unequal":
        with torch.no_grad():
            for factor in (factors(branch)["quarantine"] for branch in branches):
                factor += settings.unequal * torch.randn(factor.shape, generator=generator, dtype=torch.float64)

    @torch.no_grad()
    def read() -> tuple[float, float]:
        apart, partial = [], []
        for branch in branches:
            parameters = factors(branch)
            kept, quarantine = written(branch, parameters)
            apart.append(float((kept - quarantine).norm()))
            gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in parameters.items()}
            partial.append(relative(*written(branch, gradients)))
        return sum(apart) / len(apart), sum(partial) / len(partial)

    trained = [*adapters.kept_parameters().values(), *adapters.quarantine_parameters().values()]
    with adapters.unrouted():  # both learn from all data: only their bases can separate them
        readings = _train(trained, lambda rows: byte_loss(model(rows[:, :-1]), rows), read, settings, tokens)
    return Trace(pair.name, "quarantine", pair.start, *zip(*readings, strict=True))


def trace_quarantines(settings: QuarantineSettings, tokens: Int[Tensor, "n s"], seed: int) -> tuple[Trace, ...]:
    """Return a trace of every pair, all on the same base model, drawn by `seed`."""
    pairs = tqdm(PAIRS, desc="quarantines", unit="training", leave=False, disable=None)
    return tuple(train_quarantine(pair, settings, tokens, seed) for pair in pairs)


def factors(branch: Branch) -> dict[str, nn.Parameter]:
    """Return the factor behind each adapter's bottleneck."""
    quarantine = branch.quarantine
    assert quarantine is not None, "every pair has one"
    return {
        "kept": branch.kept.get_parameter(branch.kept.scored),
        "quarantine": quarantine.get_parameter("shared" if isinstance(quarantine, SharedQuarantine) else "B"),
    }


def written(branch: Branch, factors: Mapping[str, Tensor]) -> tuple[Float[Tensor, "d_out d_in"], Float[Tensor, "d_out d_in"]]:
    """Return the kept adapter's and the quarantine's `factors` (`kept`, `quarantine`) as matrices of the Linear."""
    quarantine = branch.quarantine
    basis = branch.kept if isinstance(quarantine, SharedQuarantine) else quarantine
    assert basis is not None
    return _in_weight(branch.kept, factors["kept"]), _in_weight(basis, factors["quarantine"])


def _in_weight(adapter: Kept, factor: Tensor) -> Float[Tensor, "d_out d_in"]:
    return (adapter.U * factor) @ adapter.Vh if isinstance(adapter, SVDKept) else factor @ adapter.A.detach()
