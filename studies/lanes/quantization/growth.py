"""Growth of an error over the passes of a loop, and a test of whether one rate describes it.

    A(k) = 1 + rho + ... + rho^(k-1) = (1 - rho^k) / (1 - rho)

A(k) is the sum of k equal errors, one per pass, if each pass multiplies earlier errors by rho and all point in the same direction.
rho is estimated from a small perturbation at the start of a pass and the stream's difference at each later pass (`spread`, `rate`).
A(k) is then compared with the error that accumulates if every pass errs (`accumulated`):

    same     the same direction is added at the start of every pass
    fresh    another direction at every pass: independent errors add up in quadrature, sqrt(A(k; rho^2))
    weights  the looped blocks' matrices are noisy, as after quantization: every pass repeats the error

All measurements are in float64, on a copy of the model, at hook points. Source of A(k): parameter-golf, pull request 1518, which
claims A(2) = 1.67 and A(3) = 1.96 at rho = .63; the formula gives 1.63 and 2.03, and no rho gives both.
"""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from studies.lanes.model import LanesModel

SIZE = 1e-4
CLAIMED_RHO = 0.63
CLAIMED = {2: 1.67, 3: 1.96}
"""k -> A(k) as claimed for `CLAIMED_RHO`."""


@dataclass(frozen=True)
class Spread:
    """Norms of the stream's displacement by a perturbation at the start of `loop_pass`, relative to the perturbation.

    `steps` are at the start of each virtual step from there on, `passes` at the start of each pass; both end at the loop's end.
    """

    loop_pass: int
    steps: tuple[float, ...]
    passes: tuple[float, ...]


@dataclass(frozen=True)
class Growth:
    """The measurements of one seed.

    Attributes:
        seed: Seed of perturbations and noise.
        rho: Rate per pass: least squares over the perturbations at all passes.
        rho_step: Rate per virtual step.
        spreads: The perturbation at each pass.
    """

    seed: int
    rho: float
    rho_step: float
    spreads: tuple[Spread, ...]


def amplification(rho: float, k: int) -> float:
    """Return A(k), computed as a sum so that rho = 1 is valid."""
    return sum(rho**i for i in range(k))


def rate(sequences: Iterable[Sequence[float]]) -> float:
    """Return the rho that fits x[i + 1] = rho x[i] best over all sequences: sum x[i] x[i + 1] / sum x[i]^2."""
    pairs = [pair for sequence in sequences for pair in pairwise(sequence)]
    return sum(a * b for a, b in pairs) / sum(a * a for a, _ in pairs)


def growth(model: LanesModel, tokens: Int[Tensor, "b s"], seeds: Iterable[int], size: float = SIZE) -> tuple[Growth, ...]:
    """Return one result per seed of perturbations and noise, for any model with a loop."""
    model = copy.deepcopy(model).double()
    results = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        spreads = tuple(spread(model, tokens, i, generator, size) for i in range(len(entries(model))))
        rho = rate(spread.passes for spread in spreads)
        results.append(Growth(seed, rho, rate(spread.steps for spread in spreads), spreads))
    return tuple(results)


def spread(model: LanesModel, tokens: Int[Tensor, "b s"], loop_pass: int, generator: torch.Generator, size: float = SIZE) -> Spread:
    """Perturb the stream at the start of pass `loop_pass` by `size` times its norm, in a random direction of all its entries."""
    starts = entries(model)
    points = _points(model)
    clean = _read(model, tokens, points)
    push = _direction(clean[_pre(starts[loop_pass])], generator, size)
    moved = _read(model, tokens, points, {_pre(starts[loop_pass]): push})
    norms = {point: float((moved[point] - clean[point]).norm() / push.norm()) for point in points}
    later = [_pre(start) for start in starts[loop_pass:]] + points[-1:]
    return Spread(loop_pass, tuple(norms[point] for point in points[points.index(later[0]) :]), tuple(norms[p] for p in later))


def entries(model: LanesModel) -> tuple[int, ...]:
    """Return the virtual steps at which passes begin."""
    return tuple(k for k, step in enumerate(model.steps_plan) if step.entry is not None)


def _pre(k: int) -> str:
    return f"steps.{k}.hook_lane0_pre"


def _points(model: LanesModel) -> list[str]:
    """Return the hook points at the start of each virtual step of the loop, and at the loop's end."""
    looped = [k for k, step in enumerate(model.steps_plan) if step.loop_pass is not None]
    return [*map(_pre, looped), f"steps.{looped[-1]}.hook_lane0_post"]


def _direction(like: Tensor, generator: torch.Generator, size: float) -> Tensor:
    """Return a random direction over all entries, with `size` times the norm of `like`."""
    drawn = torch.randn(like.shape, generator=generator, dtype=torch.float64)
    return drawn.to(like) * (size * float(like.norm()) / float(drawn.norm()))


@torch.no_grad()
def _read(
    model: LanesModel,
    tokens: Tensor,
    points: Sequence[str],
    pushes: dict[str, Tensor] | None = None,
) -> dict[str, Float[Tensor, "b s d"]]:
    """Return the values at `points`, with `pushes` added at their points."""
    seen: dict[str, Tensor] = {}
    pushes = pushes or {}

    def read(value: Tensor, hook: HookPoint, push: Tensor | None) -> Tensor | None:
        assert hook.name is not None
        seen[hook.name] = value if push is None else value + push
        return seen[hook.name]

    with model.hooks(fwd_hooks=[(point, partial(read, push=pushes.get(point))) for point in points]):
        model(tokens)
    return seen
