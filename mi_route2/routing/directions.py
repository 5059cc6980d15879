"""Persona directions: site -> unit vector, with where they came from.

    act, grad   v = unit( mean_i  f(hack_i) - f(clean_i) )
    full        v = unit( mean_i  unit(G(hack_i)) - unit(G(clean_i)) )
    top-k       right singular vectors of the stacked per-pair differences, each turned so that most pairs agree with it, and
                dropped where its singular value lies in the lowest quarter over all modules (the noise floor)

A fitter whose ``refreshes`` is true is asked again at every refresh and answers from the policy as it then is. A control's
fitter is asked once a run: a control that a refresh overwrites is no control.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from mi_route2.adapters.store import read_tensors, write_tensors
from mi_route2.checks import checked
from mi_route2.rollouts import Policy, Rollouts
from mi_route2.routing.features import FeatureKind, Features, collect

FORMAT = "mi-route2 directions 1"


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


@dataclass(frozen=True)
class Provenance:
    """Where a direction came from."""

    fitter: str
    kind: FeatureKind
    pairs_hash: str
    base_hash: str
    step: int
    seed: int | None = None


@dataclass(frozen=True)
class Directions:
    """``vectors[site]`` has unit norm: ``[*feature]``, or ``[k, *feature]`` for top-k (orthonormal rows; ``k`` may be 0)."""

    vectors: Mapping[str, Tensor]
    provenance: Provenance

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
    def load(path: Path | str) -> "Directions":
        tensors, metadata = read_tensors(Path(path))
        if metadata.get("format") != FORMAT:
            raise ValueError(f"{path} holds no directions (format {metadata.get('format')!r}, expected {FORMAT!r})")
        for site, v in tensors.items():
            if not torch.isfinite(v).all():
                raise ValueError(f"the direction at {site} in {path} holds values that are not finite")
        return Directions(tensors, Provenance(**json.loads(metadata["provenance"])))


@runtime_checkable
class Fitter(Protocol):
    """Gives directions for the policy as it now is."""

    @property
    def refreshes(self) -> bool: ...

    def fit(self, policy: Policy, step: int) -> Directions: ...


def unit(v: Tensor) -> Tensor:
    """``v`` over its norm; ``ValueError`` for a vector of norm 0, which has no direction."""
    norm = v.norm()
    if not norm > 0:
        raise ValueError("a contrast of norm 0 has no direction: are the hack and clean sides of the pairs the same?")
    return (v / norm).contiguous()


def differences(policy: Policy, pairs: PairBatch, kind: FeatureKind, basis: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Per site, one row a pair: ``f(hack) - f(clean)``; for ``full`` each side is first scaled to unit norm."""

    def rows(features: Features, site: str) -> Tensor:
        values = features[site].values()
        if kind != "full":
            return values
        return torch.nn.functional.normalize(values.flatten(1), dim=1).view_as(values)

    hack, clean = collect(policy, pairs.hack, kind, basis), collect(policy, pairs.clean, kind, basis)
    return {site: contrast(rows(hack, site), rows(clean, site)) for site in policy.adapters.sites}


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
    basis: Mapping[str, Tensor]
    refreshes: bool = True

    def fit(self, policy: Policy, step: int) -> Directions:
        deltas = differences(policy, self.pairs, self.kind, self.basis)
        vectors = {site: unit(d.mean(dim=0)) for site, d in deltas.items()}
        return Directions(vectors, Provenance(self.name, self.kind, self.pairs.pairs_hash, policy.adapters.base_hash, step))


@dataclass(frozen=True)
class TopKFitter:
    """The leading ``k`` axes of the per-pair differences, oriented by majority vote, noise floor across modules."""

    kind: FeatureKind
    pairs: PairBatch
    basis: Mapping[str, Tensor]
    k: int = 3
    noise_quantile: float = 0.25
    refreshes: bool = True

    def fit(self, policy: Policy, step: int) -> Directions:
        deltas = differences(policy, self.pairs, self.kind, self.basis)
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
