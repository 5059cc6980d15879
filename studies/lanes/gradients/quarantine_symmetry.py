"""The symmetry instrument on adapters: a quarantine in the kept adapter's basis, and one in a basis of its own.

    W' = W + kept + quarantine                 G = dL/d factor, written into the weight:  U diag(G) Vh,  or  G A

In a shared basis the loss depends on the sum of the two factors alone. This is the gauge symmetry of the lanes: both adapters
receive the same gradient, bit for bit, at any values, so equal starts stay equal and unequal starts keep their distance. In a basis
of its own the quarantine receives another gradient from the first step on. Nothing is routed here: there is no mask, and both are
trained as usual.

Gradients and weights of the two are compared as matrices of the Linear, because factors of two bases have no common coordinates.
The compared factor is the one behind the bottleneck (`dS`, `B`); at its initial value 0 the gradient of `A` is exactly 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from tqdm import tqdm

from mi_route2.adapters import Adapters, AdapterSpec, attach
from mi_route2.adapters.linear import Branch, Kept, SharedQuarantine, SVDKept
from mi_route2.validation import AtLeastOne, Positive, validated
from studies.environments.micro.model import MicroGPT
from studies.environments.micro.settings import MicroConfig
from studies.lanes.config import VOCABULARY
from studies.lanes.gradients.symmetry import Reading, Trace, relative, rows_at
from studies.lanes.model import byte_loss

PATTERN = "blocks.*"


@validated
class QuarantineSettings:
    """Sizes of the frozen base model (a random MicroGPT over bytes) and of the training of its adapters.

    All of `trace_quarantines` takes 6 s of one thread.

    Attributes:
        layers: Blocks of the base model.
        d_model: Features of the base model.
        heads: Attention heads of the base model.
        mlp: Hidden features of the base model's MLP.
        rank: Rank of every LoRA.
        unequal: Standard deviation of the quarantine's factor at an unequal start.
        batch: Rows of tokens per step.
        length: Predictions per row.
        steps: Training steps.
        every: Steps between two readings.
        rate: Learning rate of Adam.
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
class AdapterPair:
    """A pair of adapters and their start: both at 0 (`equal`), or the quarantine at random values (`unequal`)."""

    name: str
    kept: Literal["svd", "lora"]
    quarantine: Literal["shared", "lora"]
    start: Literal["equal", "unequal"] = "equal"

    def spec(self, rank: int) -> AdapterSpec:
        return AdapterSpec(self.kept, None if self.kept == "svd" else rank, self.quarantine, rank)


PAIRS: tuple[AdapterPair, ...] = (
    AdapterPair("shared basis (SVD)", "svd", "shared"),
    AdapterPair("shared basis (SVD)", "svd", "shared", "unequal"),
    AdapterPair("shared basis (LoRA)", "lora", "shared"),
    AdapterPair("distinct basis (SVD)", "svd", "lora"),
    AdapterPair("distinct basis (LoRA)", "lora", "lora"),
)


def written(branch: Branch, factors: Mapping[str, Tensor]) -> tuple[Float[Tensor, "d_out d_in"], Float[Tensor, "d_out d_in"]]:
    """Return the kept adapter's and the quarantine's `factors` (`kept`, `quarantine`) as matrices of the Linear."""
    quarantine = branch.quarantine
    basis = branch.kept if isinstance(quarantine, SharedQuarantine) else quarantine
    assert basis is not None
    return _in_weight(branch.kept, factors["kept"]), _in_weight(basis, factors["quarantine"])


def factors(branch: Branch) -> dict[str, nn.Parameter]:
    """Return the factor behind each adapter's bottleneck."""
    quarantine = branch.quarantine
    assert quarantine is not None, "every pair has one"
    return {
        "kept": branch.kept.get_parameter(branch.kept.scored),
        "quarantine": quarantine.get_parameter("shared" if isinstance(quarantine, SharedQuarantine) else "B"),
    }


def train_quarantine(
    pair: AdapterPair, settings: QuarantineSettings, tokens: Int[Tensor, "n s"], generator: torch.Generator
) -> Trace:
    """Train kept adapter and quarantine by Adam in float64, without a mask, and record both every `every` steps and at the end.

    `generator` draws the base model, then the adapters. Steps take rows of `tokens` as in `train_symmetry`.
    """
    model = base(settings, tokens.shape[1], generator)
    adapters = attach(model, PATTERN, spec=pair.spec(settings.rank), generator=generator)
    if pair.start == "unequal":
        _spread(adapters, settings.unequal, generator)
    optimizer = torch.optim.Adam(
        [*adapters.kept_parameters().values(), *adapters.quarantine_parameters().values()], lr=settings.rate
    )
    readings: list[Reading] = []
    for step in range(settings.steps + 1):
        optimizer.zero_grad()
        with adapters.unrouted():  # both learn from all data: only their bases can separate them
            rows = rows_at(tokens, step, settings.batch)
            loss = byte_loss(model(rows[:, :-1]), rows)
            loss.backward()
        if step % settings.every == 0 or step == settings.steps:
            readings.append(_reading(adapters, step, loss))
        if step < settings.steps:
            optimizer.step()
    return Trace.of(pair.name, "quarantine", pair.start, readings)


def trace_quarantines(settings: QuarantineSettings, tokens: Int[Tensor, "n s"], seed: int) -> tuple[Trace, ...]:
    """Return a trace of every pair, all on the same base model, drawn by `seed`."""
    return tuple(
        train_quarantine(pair, settings, tokens, torch.Generator().manual_seed(seed))
        for pair in tqdm(PAIRS, desc="quarantines", unit="training", leave=False, disable=None)
    )


def base(settings: QuarantineSettings, context: int, generator: torch.Generator) -> MicroGPT:
    """Return the base model under the adapters, in float64."""
    config = MicroConfig(VOCABULARY, settings.d_model, settings.layers, settings.heads, settings.mlp, context)
    return MicroGPT(config, generator).double()


@torch.no_grad()
def _spread(adapters: Adapters, scale: float, generator: torch.Generator) -> None:
    for branch in adapters.sites.values():
        factor = factors(branch)["quarantine"]
        factor += scale * torch.randn(factor.shape, generator=generator, dtype=torch.float64)


@torch.no_grad()
def _reading(adapters: Adapters, step: int, loss: Tensor) -> Reading:
    apart, partial = [], []
    for branch in adapters.sites.values():
        parameters = factors(branch)
        kept, quarantine = written(branch, parameters)
        apart.append(float((kept - quarantine).norm()))
        gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in parameters.items()}
        partial.append(relative(*written(branch, gradients)))
    return Reading(step, sum(apart) / len(apart), sum(partial) / len(partial), float(loss))


def _in_weight(adapter: Kept, factor: Tensor) -> Float[Tensor, "d_out d_in"]:
    return (adapter.U * factor) @ adapter.Vh if isinstance(adapter, SVDKept) else factor @ adapter.A.detach()
