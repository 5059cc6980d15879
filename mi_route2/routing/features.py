"""What a rollout looks like at each site: the features that directions are fitted on and scores are read from.

    act    mean over predictor positions of Vh x                 in the SVD coordinates of W, [r]
    grad   g_b, the rollout's own gradient on the scored factor  dS [r] or B [d_out r]
    full   G_b = sum_t dy_t x_t^T, the full-weight gradient      [d_out d_in], never written down for a batch

``collect`` reads them in a pass of its own with the quarantine ablated and the summed completion NLL as the loss (no advantage).
A loss constant is irrelevant: only directions and cosines are used.

Where a Linear runs more than once in the forward, its gradients are summed over the calls, and its activations averaged. A feature
that is 0 in theory (q and k of a rollout whose loss is at its first token) is rounding in practice: ``floors`` tells it from one.
"""

from collections.abc import Mapping
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mi_route2.adapters.attach import Adapters
from mi_route2.adapters.gradients import FactorGradient, Feature, Pairs, Written, added, compact, rounding, wide
from mi_route2.adapters.kept import SVDKept
from mi_route2.adapters.routed import Branch
from mi_route2.adapters.svd import decompose
from mi_route2.adapters.tape import LearnNothing, Tape
from mi_route2.rollouts import Policy, Rollouts

FeatureKind = Literal["act", "grad", "full"]
Features = Mapping[str, Feature]


def coordinates(adapters: Adapters) -> dict[str, Float[Tensor, "r d_in"]]:
    """``Vh`` of every site's base weight: the coordinates of activation directions.

    They are those of ``dS``, the adapter's own, and all of them where the kept adapter is a LoRA, which has none of its own.
    """

    def of(branch: Branch) -> Tensor:
        return branch.kept.Vh if isinstance(branch.kept, SVDKept) else decompose(branch.weight, adapters.cache_dir).Vh

    return {site: of(branch) for site, branch in adapters.sites.items()}


class ActivationReader:
    """Pools each site's input over predictor positions as the forward runs; ``features()`` gives ``Vh`` times the mean.

    The mean commutes with ``Vh``, so the projection is of one vector a rollout.
    """

    def __init__(self, predictors: Bool[Tensor, "b s"], basis: Mapping[str, Tensor]):
        self._mask = predictors
        self._count = predictors.sum(dim=1, keepdim=True).clamp_min(1)
        self._basis = basis
        self._features: dict[str, list[Written]] = {}

    def read(self, site: str, x: Float[Tensor, "b s d_in"]) -> None:
        dtype = wide(x.dtype)
        # where, not a product: padding may hold anything, NaN included
        kept = torch.where(self._mask[..., None], x, torch.zeros_like(x))
        mean = kept.sum(dim=1, dtype=dtype) / self._count.to(dtype)
        feature = Written(mean @ self._basis[site].to(mean).mT, mean.norm(dim=1))
        self._features.setdefault(site, []).append(feature)

    def features(self) -> dict[str, Written]:
        """The mean over the calls of a site, which are one but where modules are shared."""
        return {site: calls[0] if len(calls) == 1 else _mean(calls) for site, calls in self._features.items()}


def _mean(calls: list[Written]) -> Written:
    return Written(
        torch.stack([call.values() for call in calls]).mean(dim=0), torch.stack([call.magnitude() for call in calls]).mean(dim=0)
    )


class GradientReader:
    """A lane that learns nothing and holds each rollout's gradient on the scored factor."""

    detach = False

    def __init__(self, scored: frozenset[str] = frozenset({"dS", "B"})):
        self._scored = scored
        self.features: dict[str, FactorGradient | Written] = {}

    def gradient(self, site: str, factor: str, pair: FactorGradient) -> None:
        if factor in self._scored:
            self.features[site] = added(self.features.get(site), compact(pair, scored=True))

    def decide(self, site: str) -> None:
        return None

    def weights(self, site: str) -> Tensor:
        raise RuntimeError(f"a reading lane has no weights (asked at {site})")


class FullGradientReader:
    """Holds the pair (x, dL/dy) of every site: its inner products and norms are those of ``G_b``."""

    def __init__(self) -> None:
        self.features: dict[str, FactorGradient | Written] = {}

    def read(self, site: str, pair: Pairs) -> None:
        self.features[site] = added(self.features.get(site), Pairs(pair.h.detach(), pair.dy.detach()))


def floors(features: Features, kind: FeatureKind) -> dict[str, Tensor]:
    """Per site, the norm ``[b]`` up to which a feature is rounding: of its own sum, and for gradients of the whole backward."""
    if kind == "act":
        return {site: rounding([feature]) for site, feature in features.items()}
    return dict.fromkeys(features, rounding(features.values())) if features else {}


def collect(policy: Policy, rollouts: Rollouts, kind: FeatureKind, basis: Mapping[str, Tensor]) -> Features:
    """Features of ``rollouts`` at every site, quarantine ablated; no parameter's ``.grad`` is touched."""
    b, s = rollouts.tokens.shape
    with policy.adapters.deployed():
        if kind == "act":
            acts = ActivationReader(rollouts.predictors, basis)
            with torch.no_grad(), policy.adapters.recording(Tape(b, s, inputs=acts)):
                policy.forward(policy.model, rollouts.tokens, rollouts.attention)
            return acts.features()
        lane, full = GradientReader(), FullGradientReader()
        tape = Tape(b, s, kept=LearnNothing(), outputs=full) if kind == "full" else Tape(b, s, kept=lane)
        with torch.enable_grad(), policy.adapters.recording(tape):
            (-policy.logprobs(rollouts).sum()).backward()
        tape.assert_fired(policy.adapters.sites, backward=True)
        return full.features if kind == "full" else lane.features
