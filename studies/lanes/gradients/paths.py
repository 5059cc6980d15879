"""Gradient paths of every sublayer: directly to the loss, or through later sublayers.

    total     dL / d out_s, where out_s is `steps.k.hook_attn_out` or `hook_mlp_out`
    direct    the same with the read of every sublayer detached: only lanes, skips and the read-out are left
    cascade   total - direct
    term(s, t) = (d read_t / d out_s, every read in between detached)^T  dL / d read_t       for each later sublayer t

A path that is not direct enters a first later sublayer t, so direct + sum_t term(s, t) = total: the terms are computed
independently of the total and must add up to it. Lanes and skips are linear, so direct is dL / d hook_final times one coefficient
per feature. Behind the fork, if lane 1 is read out and no skip is mixed into it:

    in turn     attention  ap[1] * mr * prod_{l' > l} ar mr          MLP  mp[1] * prod_{l' > l} ar mr
    at once     attention  ap[1] * prod_{l' > l} mr                  MLP  mp[1] * prod_{l' > l} mr
    one stream  1, times sigmoid(gate) for every later skip that is mixed in
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from studies.lanes.gradients.symmetry import SUBLAYERS
from studies.lanes.model import LanesModel


class Sublayer(NamedTuple):
    """Attention or MLP (`attn`, `mlp`) of a virtual step."""

    step: int
    name: str

    @property
    def out(self) -> str:
        return f"steps.{self.step}.hook_{self.name}_out"

    @property
    def read(self) -> str:
        return f"steps.{self.step}.hook_{self.name}_read"


@dataclass(frozen=True, eq=False)
class Paths:
    """Gradients of the loss with respect to one sublayer's output, in nats per unit, by path.

    `terms` are keyed by the first later sublayer.
    """

    sublayer: Sublayer
    total: Float[Tensor, "b s d"]
    direct: Float[Tensor, "b s d"]
    terms: dict[Sublayer, Float[Tensor, "b s d"]]

    @property
    def cascade(self) -> Float[Tensor, "b s d"]:
        return self.total - self.direct

    @property
    def missing(self) -> float:
        """The largest absolute entry of total - direct - terms, relative to the total's largest."""
        rest = self.total - self.direct - sum(self.terms.values(), start=torch.zeros_like(self.total))
        largest = float(self.total.abs().max())
        return float(rest.abs().max()) / largest if largest else float(rest.abs().max())


@dataclass(frozen=True)
class PathRatio:
    """|direct| / |total| and |cascade| / |total| of one sublayer, in the Frobenius norm; `missing` as in `Paths`."""

    wiring: str
    start: str
    seed: int
    step: int
    layer: int
    sublayer: str
    direct: float
    cascade: float
    missing: float


def sublayers(model: LanesModel) -> tuple[Sublayer, ...]:
    """Return all sublayers in the order of the forward."""
    return tuple(Sublayer(k, name) for k in range(len(model.steps_plan)) for name in SUBLAYERS)


def decompose(model: LanesModel, tokens: Int[Tensor, "b s"]) -> tuple[Paths, ...]:
    """Return the gradient paths of every sublayer, in the model's dtype (in float64 they add up)."""
    order = sublayers(model)
    outs, reads = [s.out for s in order], [s.read for s in order]
    seen, loss = _run(model, tokens, [*outs, *reads], cut=())
    gradients = _gradients(loss, [seen[name] for name in (*outs, *reads)])
    total, by_read = gradients[: len(order)], gradients[len(order) :]
    cut, loss = _run(model, tokens, outs, cut=reads)
    leaves = [cut[name] for name in outs]
    direct = _gradients(loss, leaves)
    terms: list[dict[Sublayer, Tensor]] = [{} for _ in order]
    for i, (through, gradient) in enumerate(zip(order, by_read, strict=True)):
        partials = _gradients(cut[through.read], leaves[:i], gradient) if i else []
        for term, of in zip(partials, terms, strict=False):
            of[through] = term
    return tuple(Paths(*row) for row in zip(order, total, direct, terms, strict=True))


def coefficients(model: LanesModel) -> dict[Sublayer, Float[Tensor, " d"]]:
    """Return, by feature, the factor of dL / d hook_final that gives each sublayer's direct gradient.

    Computed backwards from the routing scalars and the gates.

    Raises:
        ValueError: If the wiring reads out the norm of each lane: the direct path is then not linear in one read-out.
    """
    if model.wiring.norm == "of each lane":
        raise ValueError(f"{model.config.wiring} norms each lane before it is read out, so its direct path has no coefficient")
    lanes = [torch.full((model.config.d_model,), weight, dtype=model.embed.weight.dtype) for weight in model.wiring.out]
    saved: dict[int | None, Tensor] = {}
    direct: dict[Sublayer, Tensor] = {}
    for k in reversed(range(len(model.steps_plan))):
        if k in saved:
            lanes = [lanes[0] + saved[k], *lanes[1:]]
        attn, mlp, lanes = _written(model, k, lanes)
        direct |= {Sublayer(k, "mlp"): mlp, Sublayer(k, "attn"): attn}
        lanes = _entered(model, k, lanes, saved)
    return dict(reversed(direct.items()))


def ratios(model: LanesModel, tokens: Int[Tensor, "b s"], seed: int) -> tuple[PathRatio, ...]:
    """Return one row per sublayer of a model, trained or random; `seed` is only recorded."""
    rows = []
    for paths in decompose(model, tokens):
        (step, name), total = paths.sublayer, float(paths.total.norm())
        direct, cascade = (float(part.norm()) / total if total else 0.0 for part in (paths.direct, paths.cascade))
        layer, config = model.schedule[step], model.config
        rows.append(PathRatio(config.wiring, config.start, seed, step, layer, name, direct, cascade, paths.missing))
    return tuple(rows)


def _run(model: LanesModel, tokens: Tensor, names: Sequence[str], cut: Sequence[str]) -> tuple[dict[str, Tensor], Tensor]:
    """Return the values at `names` and at `cut`, and the loss, in one graph; values at `cut` are passed on detached."""
    seen: dict[str, Tensor] = {}

    def keep(value: Tensor, hook: HookPoint, goes_on: bool) -> Tensor | None:
        assert hook.name is not None
        seen[hook.name] = value
        return None if goes_on else value.detach()

    with model.hooks(fwd_hooks=[(name, partial(keep, goes_on=name not in cut)) for name in (*names, *cut)]), torch.enable_grad():
        loss = model.loss(tokens)
    return seen, loss


def _gradients(of: Tensor, by: Sequence[Tensor], weights: Tensor | None = None) -> list[Tensor]:
    """Return the gradients; zeros if there is no path."""
    return list(torch.autograd.grad(of, by, weights, retain_graph=True, materialize_grads=True))


def _written(model: LanesModel, k: int, lanes: list[Tensor]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return the coefficients of attention, of the MLP, and of the lanes before both writes, given those of the lanes after."""
    if len(lanes) == 1:
        return lanes[0], lanes[0], lanes
    layer = model.steps_plan[k].block
    post, (ar, mr) = model.post.detach()[layer], model.resid.detach()[layer]
    at_once = model.wiring.writes == "at once"
    attn = sum(post[0, j] * (1 if at_once else mr) * lane for j, lane in enumerate(lanes))
    mlp = sum(post[1, j] * lane for j, lane in enumerate(lanes))
    keep = (ar, mr) if at_once else (ar * mr, ar * mr)
    assert isinstance(attn, Tensor)
    assert isinstance(mlp, Tensor)
    return attn, mlp, [factor * lane for factor, lane in zip(keep, lanes, strict=True)]


def _entered(model: LanesModel, k: int, lanes: list[Tensor], saved: dict[int | None, Tensor]) -> list[Tensor]:
    """Return the coefficients of the lanes as they leave the step before; add that of the saved stream, if any, to `saved`."""
    step = model.steps_plan[k]
    if step.skip is not None:
        gate, weight = model.skip_gate.detach()[step.skip].sigmoid(), model.skip_weight.detach()[step.skip]
        into = lanes if model.wiring.skips == "every lane" else lanes[:1]
        skipped = weight * (1 - gate) * sum(into)
        saved[step.source] = saved.get(step.source, 0) + skipped
        lanes = [gate * lane for lane in into] + lanes[len(into) :]
    forked = step.parallel and (k == 0 or not model.steps_plan[k - 1].parallel)
    return [sum(lanes[1:], start=lanes[0])] if forked else lanes
