"""Persona directions, a unit vector at each site, and the features of rollouts that they are fitted on and scores are read from."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mi_route2.adapters.attach import Adapters
from mi_route2.adapters.gradients import FactorGradient, Feature, Pairs, Written, added, compact, rounding, wide
from mi_route2.adapters.io import read_tensors, write_tensors
from mi_route2.adapters.linear import Branch, SVDKept
from mi_route2.adapters.svd import decompose
from mi_route2.adapters.tape import Hooks, LearnNothing, Tape
from mi_route2.checks import checked
from mi_route2.rollouts import Policy, Rollouts
from mi_route2.validation import Natural, read_record, validated

FeatureKind = Literal["act", "grad", "full"]
Features = Mapping[str, Feature]
SCORED = frozenset({"dS", "B"})
"""The factor of a kept adapter whose gradient is a ``grad`` feature."""


def coordinates(adapters: Adapters) -> dict[str, Float[Tensor, "r d_in"]]:
    """``Vh`` of every site's base weight: the coordinates of activation directions.

    They are those of ``dS``, the adapter's own, and all of them where the kept adapter is a LoRA, which has none of its own.
    """

    def of(branch: Branch) -> Tensor:
        return branch.kept.Vh if isinstance(branch.kept, SVDKept) else decompose(branch.weight, adapters.cache_dir).Vh

    return {site: of(branch) for site, branch in adapters.sites.items()}


class ActivationReader:
    """Reader of activation features in the forward: ``Vh`` times each site's mean input over predictor positions.

    The mean commutes with ``Vh``, so one vector a rollout is projected.
    """

    def __init__(self, predictors: Bool[Tensor, "b s"], basis: Mapping[str, Tensor]):
        self._mask = predictors
        self._count = predictors.sum(dim=1, keepdim=True).clamp_min(1)
        self._basis = basis
        self._calls: dict[str, list[Written]] = {}

    def read(self, site: str, x: Float[Tensor, "b s d_in"]) -> None:
        dtype = wide(x.dtype)
        # where, not a product: padding may hold anything, NaN included
        kept = torch.where(self._mask[..., None], x, torch.zeros_like(x))
        mean = kept.sum(dim=1, dtype=dtype) / self._count.to(dtype)
        feature = Written(mean @ self._basis[site].to(mean).mT, mean.norm(dim=1))
        self._calls.setdefault(site, []).append(feature)

    @property
    def features(self) -> dict[str, Written]:
        """The mean over the calls of each site; there are several only if the model shares modules."""
        return {site: calls[0] if len(calls) == 1 else _mean(calls) for site, calls in self._calls.items()}


def _mean(calls: list[Written]) -> Written:
    return Written(
        torch.stack([call.values() for call in calls]).mean(dim=0), torch.stack([call.magnitude() for call in calls]).mean(dim=0)
    )


class GradientReader:
    """A gate that lets nothing pass and holds each rollout's gradient on the scored factor."""

    detach = False

    def __init__(self) -> None:
        self.features: dict[str, FactorGradient | Written] = {}

    def called(self, site: str, point: Hooks) -> None:
        return None

    def gradient(self, site: str, factor: str, pair: FactorGradient) -> None:
        if factor in SCORED:
            self.features[site] = added(self.features.get(site), compact(pair, scored=True))

    def mask(self, site: str) -> Tensor:
        raise RuntimeError(f"a gate that only reads has no mask (asked at {site})")


class FullGradientReader:
    """Reader of full-weight gradients: the pair (x, dL/dy) of each site, whose inner products and norms are those of ``G_b``."""

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
            return acts.features
        grad, full = GradientReader(), FullGradientReader()
        tape = Tape(b, s, kept=LearnNothing(), outputs=full) if kind == "full" else Tape(b, s, kept=grad)
        with torch.enable_grad(), policy.adapters.recording(tape):
            (-policy.logprobs(rollouts).sum()).backward()
        tape.assert_fired(policy.adapters.sites, backward=True)
        return full.features if kind == "full" else grad.features


FORMAT = "mi-route2 directions 1"
Bases = WeakKeyDictionary[Adapters, dict[str, Tensor]]
"""The SVD coordinates of base weights, which are frozen: worked out once, at the first fit of an activation direction."""


@checked
@dataclass(frozen=True)
class PairBatch:
    """Contrast pairs as two aligned batches, and the hash of the text that they came from."""

    hack: Rollouts
    clean: Rollouts
    pairs_hash: str

    def __post_init__(self) -> None:
        if len(self.hack) != len(self.clean):
            raise ValueError(f"{len(self.hack)} hack and {len(self.clean)} clean rollouts are not pairs")


@validated
class Provenance:
    """Where a direction came from."""

    fitter: str
    kind: FeatureKind
    pairs_hash: str
    base_hash: str
    step: Natural
    seed: int | None = None


@dataclass(frozen=True, repr=False)
class Directions:
    """``vectors[site]`` has unit norm: ``[*feature]``, or ``[k, *feature]`` for top-k (orthonormal rows; ``k`` may be 0)."""

    vectors: Mapping[str, Tensor]
    provenance: Provenance

    def __repr__(self) -> str:
        p = self.provenance
        seed = "" if p.seed is None else f", seed {p.seed}"
        return (
            f"Directions({len(self.vectors)} sites, {p.fitter} on {p.kind}, step {p.step}{seed}, pairs {p.pairs_hash[:12]}, "
            f"base {p.base_hash[:12]})"
        )

    def overlap(self, other: "Directions") -> float:
        """Mean over sites of the cosine with ``other``; below .2 the direction has rotated off."""
        cosines = [
            torch.nn.functional.cosine_similarity(v.flatten(), other.vectors[site].flatten(), dim=0)
            for site, v in self.vectors.items()
        ]
        return float(torch.stack(cosines).mean())

    @checked
    def save(self, path: Path | str) -> None:
        write_tensors(
            Path(path),
            dict(self.vectors),
            {"format": FORMAT, "provenance": json.dumps(asdict(self.provenance))},
        )

    @staticmethod
    @checked
    def load(path: Path | str, *, unchecked: bool = False) -> "Directions":
        """What ``save`` wrote; ``ValueError`` for another file, and for one without a checksum unless it may be ``unchecked``."""
        tensors, metadata = read_tensors(Path(path), unchecked=unchecked)
        if metadata.get("format") != FORMAT:
            raise ValueError(f"{path} holds no directions (format {metadata.get('format')!r}, expected {FORMAT!r})")
        for site, v in tensors.items():
            if not torch.isfinite(v).all():
                raise ValueError(f"the direction at {site} in {path} holds values that are not finite")
        try:
            return Directions(tensors, read_record(Provenance, metadata.get("provenance", "{}")))
        except ValueError as error:
            raise ValueError(f"{path} does not say where its directions came from ({error}); fit them again") from error


@runtime_checkable
class Fitter(Protocol):
    """Gives directions for the policy as it now is."""

    @property
    def refreshes(self) -> bool: ...

    def fit(self, policy: Policy, step: int) -> Directions: ...


def unit(v: Tensor, site: str = "") -> Tensor:
    """``v`` over its norm; ``ValueError`` for a vector of norm 0 (at ``site``), which has no direction."""
    norm = v.norm()
    if not norm > 0:
        at = f" ({site})" if site else ""
        raise ValueError(
            f"a contrast of norm 0 has no direction{at}: are the hack and clean sides of the pairs the same, or so short that "
            "nothing is left but rounding (attention to one token has no gradient)?"
        )
    return (v / norm).contiguous()


def differences(policy: Policy, pairs: PairBatch, kind: FeatureKind, bases: Bases) -> dict[str, Tensor]:
    """Per site, one row a pair: ``f(hack) - f(clean)``; for ``full`` each side is first scaled to unit norm."""
    if kind == "act" and policy.adapters not in bases:
        bases[policy.adapters] = coordinates(policy.adapters)
    basis = bases.get(policy.adapters, {})

    def rows(features: Features, floor: Mapping[str, Tensor], site: str) -> Tensor:
        values = features[site].values()
        real = values.flatten(1).norm(dim=1) > floor[site]
        values = torch.where(real.view(-1, *[1] * (values.ndim - 1)), values, torch.zeros_like(values))
        if kind != "full":
            return values
        return torch.nn.functional.normalize(values.flatten(1), dim=1).view_as(values)

    hack, clean = (collect(policy, side, kind, basis) for side in (pairs.hack, pairs.clean))
    floor = floors(hack, kind), floors(clean, kind)
    return {site: contrast(rows(hack, floor[0], site), rows(clean, floor[1], site)) for site in policy.adapters.sites}


def contrast(hack: Tensor, clean: Tensor) -> Tensor:
    """``hack - clean``, rows ``[n, ...]``; a row that is equal up to rounding is 0, or its noise would pass for a direction."""
    delta = hack - clean
    size = torch.maximum(hack.flatten(1).norm(dim=1), clean.flatten(1).norm(dim=1))
    real = delta.flatten(1).norm(dim=1) > 32 * torch.finfo(delta.dtype).eps * size
    return torch.where(real.view(-1, *[1] * (delta.ndim - 1)), delta, torch.zeros_like(delta))


@dataclass(frozen=True)
class PersonaFitter:
    """The mean contrast of the pairs, on the policy as it is when asked."""

    name: str
    kind: FeatureKind
    pairs: PairBatch
    refreshes: bool = field(default=True, kw_only=True)
    _bases: Bases = field(default_factory=WeakKeyDictionary, init=False, repr=False, compare=False)

    def fit(self, policy: Policy, step: int) -> Directions:
        deltas = differences(policy, self.pairs, self.kind, self._bases)
        vectors = {site: unit(d.mean(dim=0), site) for site, d in deltas.items()}
        return Directions(vectors, Provenance(self.name, self.kind, self.pairs.pairs_hash, policy.adapters.base_hash, step))


@dataclass(frozen=True)
class TopKFitter:
    """The leading ``k`` axes of the per-pair differences, oriented by majority vote, noise floor across modules."""

    kind: FeatureKind
    pairs: PairBatch
    k: int = field(default=3, kw_only=True)
    noise_quantile: float = field(default=0.25, kw_only=True)
    refreshes: bool = field(default=True, kw_only=True)
    _bases: Bases = field(default_factory=WeakKeyDictionary, init=False, repr=False, compare=False)

    def fit(self, policy: Policy, step: int) -> Directions:
        deltas = differences(policy, self.pairs, self.kind, self._bases)
        axes, strengths = {}, {}
        for site, delta in deltas.items():
            _, S, Vh = torch.linalg.svd(delta.flatten(1), full_matrices=False)
            # A singular value of 0 has no axis: what the SVD gives there is arbitrary.
            real = S[: self.k] > S.numel() * torch.finfo(S.dtype).eps * S[0]
            axis, strengths[site] = Vh[: self.k][real], S[: self.k][real]
            along = delta.flatten(1) @ axis.mT
            votes = along.sign().sum(dim=0)
            votes = torch.where(votes == 0, along.sum(dim=0), votes)  # a tie goes to the mean, not to the SVD's own sign
            axes[site] = axis * torch.where(votes < 0, -1.0, 1.0).to(axis.dtype)[:, None]
        found = torch.cat(list(strengths.values()))
        if not found.numel():
            raise ValueError("contrasts of norm 0 have no axes: are the hack and clean sides of the pairs the same?")
        floor = found.quantile(self.noise_quantile)
        vectors = {site: axes[site][strengths[site] >= floor].view(-1, *delta.shape[1:]) for site, delta in deltas.items()}
        return Directions(vectors, Provenance(f"top{self.k}", self.kind, self.pairs.pairs_hash, policy.adapters.base_hash, step))


@dataclass(frozen=True)
class HaarFitter:
    """A uniformly random direction a site (orthonormal ones for top-k), in the space of ``like``'s, drawn once from ``seed``."""

    like: Fitter
    seed: int
    refreshes: bool = False

    def fit(self, policy: Policy, step: int) -> Directions:
        real = self.like.fit(policy, step)
        generator = torch.Generator().manual_seed(self.seed)
        vectors = {}
        for site, v in real.vectors.items():
            draw = torch.randn(v.shape, generator=generator, dtype=torch.float64)
            if isinstance(self.like, TopKFitter):
                draw = torch.linalg.qr(draw.flatten(1).mT).Q.mT.reshape(v.shape)
            vectors[site] = (draw if isinstance(self.like, TopKFitter) else unit(draw)).to(v.device, v.dtype)
        return Directions(vectors, Provenance("haar", real.provenance.kind, "none", real.provenance.base_hash, 0, self.seed))
