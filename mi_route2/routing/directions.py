"""Persona directions, one unit vector per site, and the features of rollouts that directions and scores are computed from."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from mi_route2.adapters.attach import Adapters
from mi_route2.adapters.gradients import DenseGrad, FactorGradient, Feature, added, compact, rounding, wide
from mi_route2.adapters.tape import Hooks, LearnNothing, Tape
from mi_route2.checks import all_finite, checked, on_host
from mi_route2.rollouts import Policy, Rollouts
from mi_route2.tensor_files import read_tensors, refuse_infinite, write_tensors
from mi_route2.validation import Natural, read_record, validated

FeatureKind = Literal["act", "grad", "full"]
SCORED = frozenset({"dS", "B"})
"""Factors of kept adapters whose gradient is a ``grad`` feature."""


class Comparison(NamedTuple):
    """Inner product with one direction, norm and magnitude of a feature: three numbers per rollout."""

    inner: Float[Tensor, " b"]
    norms: Float[Tensor, " b"]
    magnitude: Float[Tensor, " b"]


Features = Mapping[str, Any]
"""Site -> feature, or its comparison with a direction."""


def compare(feature: Feature | Comparison, direction: Tensor) -> Comparison:
    """Return the comparison of a feature with a direction; a feature that was compared already is returned as it is."""
    if isinstance(feature, Comparison):
        return feature
    return Comparison(feature.inner(direction), feature.norms(), feature.magnitude())


class ActivationReader:
    """Reader of activation features in the forward: ``Vh`` times the mean input of each site over predictor positions.

    The mean commutes with ``Vh``, so only one vector per rollout is projected.
    """

    def __init__(self, predictors: Bool[Tensor, "b s"], basis: Mapping[str, Tensor]):
        self._others = (~predictors).flatten().nonzero()[:, 0]
        self._count = predictors.sum(dim=1, keepdim=True).clamp_min(1)
        self._basis = basis
        self._calls: dict[str, list[DenseGrad]] = {}

    def read(self, site: str, x: Float[Tensor, "b s d_in"]) -> None:
        dtype = wide(x.dtype)
        # filled and not multiplied, because padding may hold any value, NaN included; torch.where takes twice the time
        real = x.clone(memory_format=torch.contiguous_format)
        real.view(-1, x.shape[-1]).index_fill_(0, self._others, 0.0)
        count = self._count.to(dtype)
        magnitude = torch.linalg.vector_norm(real, dim=2, dtype=dtype).sum(dim=1) / count[:, 0]
        mean = real.sum(dim=1, dtype=dtype) / count
        self._calls.setdefault(site, []).append(DenseGrad(mean @ self._basis[site].to(mean).mT, magnitude))

    @property
    def features(self) -> dict[str, DenseGrad]:
        """Mean over the calls of each site; there are several calls only if the model shares modules."""
        return {site: calls[0] if len(calls) == 1 else _mean(calls) for site, calls in self._calls.items()}


def _mean(calls: list[DenseGrad]) -> DenseGrad:
    values, magnitudes = [call.values() for call in calls], [call.magnitude() for call in calls]
    return DenseGrad(torch.stack(values).mean(dim=0), torch.stack(magnitudes).mean(dim=0))


class _Storing:
    """Sums of gradients by site; with ``directions``, a whole sum is replaced by its comparison with the site's.

    So the memory does not grow with the model.
    """

    def __init__(self, directions: Mapping[str, Tensor] | None = None) -> None:
        self.features: dict[str, FactorGradient | DenseGrad | Comparison] = {}
        self._directions = directions

    def _store(self, site: str, gradient: FactorGradient | DenseGrad, last: bool) -> None:
        before = self.features.get(site)
        assert not isinstance(before, Comparison)
        whole = added(before, gradient)
        self.features[site] = compare(whole, self._directions[site]) if last and self._directions is not None else whole


class GradientReader(_Storing):
    """Gate that passes no gradient and stores each rollout's of the scored factor, or its comparison with ``directions``."""

    detach = False

    def __init__(self, directions: Mapping[str, Tensor] | None = None) -> None:
        super().__init__(directions)
        self._left: Counter[str] = Counter()

    def called(self, site: str, point: Hooks) -> None:
        self._left[site] += 1

    def gradient(self, site: str, factor: str, pair: FactorGradient) -> None:
        if factor in SCORED:
            self._left[site] -= 1
            self._store(site, compact(pair, scored=True), last=not self._left[site])

    def mask(self, site: str) -> Tensor:
        raise RuntimeError(f"a gate that only reads has no mask (requested at {site})")


class FullGradientReader(_Storing):
    """Reader of full-weight gradients: the pair (x, dL/dy) of each site, or its comparison with ``directions``."""

    def read(self, site: str, pair: FactorGradient, last: bool) -> None:
        self._store(site, pair, last)


def floors(magnitudes: Mapping[str, Tensor], kind: FeatureKind) -> dict[str, Tensor]:
    """Return, per site, the norm ``[b]`` up to which a feature may be a rounding error.

    For activations it depends on the feature's own sum, for gradients on the whole backward.
    """
    if kind == "act":
        return {site: rounding([magnitude]) for site, magnitude in magnitudes.items()}
    return dict.fromkeys(magnitudes, rounding(magnitudes.values())) if magnitudes else {}


@torch.inference_mode(False)  # in which nothing has a gradient
def collect(
    policy: Policy,
    rollouts: Rollouts,
    kind: FeatureKind,
    basis: Mapping[str, Tensor],
    directions: Mapping[str, Tensor] | None = None,
) -> Features:
    """Compute the features of ``rollouts`` at every site with the quarantine off; no parameter's ``.grad`` is touched.

    With ``directions``, gradients are compared with them one module at a time, and only the comparisons are returned.
    """
    (b, s), real = rollouts.tokens.shape, rollouts.attention
    policy.adapters.demand_replicated()
    with policy.adapters.deployed():
        if kind == "act":
            acts = ActivationReader(rollouts.predictors, basis)
            with torch.no_grad(), policy.adapters.recording(Tape(b, s, inputs=acts, real=real)):
                policy.logits(rollouts)
            return acts.features
        grad, full = GradientReader(directions), FullGradientReader(directions)
        tape = Tape(b, s, kept=LearnNothing(), outputs=full, real=real) if kind == "full" else Tape(b, s, kept=grad, real=real)
        backward(policy, rollouts, tape, policy.adapters.sites)
        return full.features if kind == "full" else grad.features


def backward(policy: Policy, rollouts: Rollouts, tape: Tape, sites: Iterable[str]) -> None:
    """Run the backward of ``-log p`` of the rollouts under ``tape``, in which ``sites`` report; no ``.grad`` is touched."""
    with untouched(policy.model.parameters()), torch.enable_grad(), policy.adapters.recording(tape):
        (-policy.logprobs(rollouts).sum()).backward()
    tape.assert_fired(sites, backward=True)


@contextmanager
def untouched(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Context: put the ``.grad`` of parameters back, because others than the adapters' may train too; their hooks do not fire."""
    before = [(p, p.grad) for p in parameters if p.requires_grad]
    hooks = [hooks for p, _ in before for hooks in (p._backward_hooks, p._post_accumulate_grad_hooks) if hooks]
    registered = [dict(each) for each in hooks]
    for p, _ in before:
        p.grad = None  # or the backward would add to the tensor that is to be put back
    for each in hooks:  # one of them may be an optimizer's step
        each.clear()
    try:
        yield
    finally:
        for each, functions in zip(hooks, registered, strict=True):
            each.update(functions)
        for p, grad in before:
            p.grad = grad


def feature_shapes(adapters: Adapters, kind: FeatureKind, basis: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the shape of a direction at every site; activations are in the coordinates ``basis``."""
    if kind == "act":
        return {site: tuple(basis[site].shape[:1]) for site in adapters.sites}
    full = kind == "full"
    return {site: tuple(branch.shape if full else adapters.scored(site).shape) for site, branch in adapters.sites.items()}


FORMAT = "mi-route2 directions 1"


@checked
@dataclass(frozen=True)
class PairBatch:
    """Contrast pairs as two aligned batches, with the hash of the text of the pairs.

    Attributes:
        hack: Rollouts that hack.
        clean: Rollouts that do not, in the same order.
        pairs_hash: Name or hash of the pairs.
        micro: Pairs that run at one time when directions are fitted, all if not given. Of the others only their sum is held;
            results are equal up to rounding.

    Examples:
        >>> pairs = PairBatch(hack=rollouts, clean=honest, pairs_hash="my pairs")
    """

    hack: Rollouts
    clean: Rollouts
    pairs_hash: str
    micro: int | None = None

    def __post_init__(self) -> None:
        if self.micro is not None and self.micro < 1:
            raise ValueError(f"micro must be a number of pairs, at least 1, or None for all at once, not {self.micro}")
        if len(self.hack) != len(self.clean):
            raise ValueError(f"{len(self.hack)} hack and {len(self.clean)} clean rollouts are not pairs")


@validated
class Provenance:
    """Origin of a direction: fitter, features, pairs, base model and step."""

    fitter: str
    kind: FeatureKind
    pairs_hash: str
    base_hash: str
    step: Natural
    seed: int | None = None


@dataclass(frozen=True, repr=False)
class Directions:
    """Unit directions by site, and their provenance.

    Attributes:
        vectors: Unit vectors ``[*feature]``, or orthonormal rows ``[k, *feature]`` for top-k (``k`` may be 0).
        provenance: Origin of the directions.
    """

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
        """Return the mean over sites of the cosine with ``other``; below .2 the direction has rotated away.

        Raises:
            ValueError: ``other`` has another kind of feature, other sites or other shapes.
        """
        spaces = [(d.provenance.kind, {site: v.shape for site, v in d.vectors.items()}) for d in (self, other)]
        if spaces[0] != spaces[1]:
            raise ValueError(
                "directions of other features, sites or shapes have no overlap: set route.directions = None before "
                "route.refresh(policy, step)"
            )
        cosines = [
            torch.nn.functional.cosine_similarity(v.flatten(), other.vectors[site].flatten().to(v), dim=0)
            for site, v in self.vectors.items()
        ]
        return float(torch.stack(cosines).mean())

    @checked
    def save(self, path: Path | str) -> None:
        """Write the directions to a safetensors file; ``ValueError`` for a value that is not finite, which ``load`` refuses."""
        refuse_infinite(self.vectors)
        write_tensors(
            Path(path),
            {site: v.clone() for site, v in self.vectors.items()},  # safetensors refuses one tensor at two sites
            {"format": FORMAT, "provenance": json.dumps(asdict(self.provenance))},
        )

    @staticmethod
    @checked
    def load(path: Path | str, *, unchecked: bool = False) -> "Directions":
        """Load a file that ``save`` wrote.

        Raises:
            ValueError: Another kind of file, or one without a checksum unless ``unchecked``.
        """
        tensors, metadata = read_tensors(Path(path), unchecked=unchecked)
        if metadata.get("format") != FORMAT:
            raise ValueError(f"{path} does not hold directions (format {metadata.get('format')!r}, expected {FORMAT!r})")
        for site, v in tensors.items():
            if not torch.isfinite(v).all():
                raise ValueError(f"the direction at {site} in {path} holds values that are not finite")
        try:
            return Directions(tensors, read_record(Provenance, metadata.get("provenance", "{}")))
        except ValueError as error:
            raise ValueError(f"{path} has no valid provenance of its directions ({error}); fit them again") from error


@runtime_checkable
class Fitter(Protocol):
    """Protocol: fits directions to the current policy."""

    @property
    def refreshes(self) -> bool: ...

    def fit(self, policy: Policy, step: int) -> Directions: ...


def units(vectors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Divide each vector by its norm, in place, and return them; ``ValueError`` for norm 0, with the name of the site."""
    norms = {site: v.norm() for site, v in vectors.items()}
    for site, real in zip(norms, on_host([norm > 0 for norm in norms.values()])):
        if not real:
            raise ValueError(
                f"a contrast of norm 0 has no direction ({site}): are the hack and clean sides of the pairs the same (in another "
                "order, perhaps), or so short that only rounding errors remain (attention to one token has no gradient)?"
            )
    for site, norm in norms.items():  # one by one, because all together may be as large as the weights
        vectors[site] = (vectors[site] / norm).contiguous()
    return vectors


class Contrast(NamedTuple):
    """``f(hack) - f(clean)`` of pairs at a site, and the norm up to which each may be a rounding error."""

    rows: Float[Tensor, "n ..."]
    noise: Float[Tensor, " n"]


def differences(policy: Policy, pairs: PairBatch, kind: FeatureKind) -> Iterator[tuple[str, Contrast]]:
    """Yield the contrast at every site, of one micro-batch of pairs after another; for ``full``, sides are first scaled to norm 1.

    One contrast of ``full`` has the size of the site's weights for every pair, so none is held here.
    """
    basis = policy.adapters.coordinates() if kind == "act" else {}

    def read(side: Rollouts) -> tuple[Features, dict[str, Tensor]]:
        features = collect(policy, side.to(policy.device), kind, basis)
        return features, floors({site: feature.magnitude() for site, feature in features.items()}, kind)

    def rows(side: tuple[Features, dict[str, Tensor]], site: str) -> Tensor:
        values = side[0][site].values()
        norms = values.flatten(1).norm(dim=1)
        sizes.append((site, norms))
        values = torch.where((norms > side[1][site]).view(-1, *[1] * (values.ndim - 1)), values, torch.zeros_like(values))
        if kind != "full":
            return values
        return torch.nn.functional.normalize(values.flatten(1), dim=1, eps=torch.finfo(values.dtype).tiny).view_as(values)

    for index in torch.arange(len(pairs.hack)).split(pairs.micro or len(pairs.hack)):
        hack, clean, sizes = read(pairs.hack.rows(index)), read(pairs.clean.rows(index)), []
        for site in policy.adapters.sites:
            yield site, contrast(rows(hack, site), rows(clean, site))
        if not all_finite({i: norms for i, (_, norms) in enumerate(sizes)}):  # a comparison has taken NaN for a rounding error
            site, wrong = next((site, ~norms.isfinite().cpu()) for site, norms in sizes if not norms.isfinite().all())
            raise ValueError(
                f"pairs {index[wrong][:8].tolist()} have activations or gradients at {site} that are NaN or infinite: leave them "
                "out"
            )


def contrast(hack: Tensor, clean: Tensor) -> Contrast:
    """Return the contrast of features ``[n, ...]``.

    A row whose two sides are equal up to rounding is set to 0, because its rounding error would look like a direction.
    """
    delta = hack - clean
    size = torch.maximum(hack.flatten(1).norm(dim=1), clean.flatten(1).norm(dim=1))
    noise = 32 * torch.finfo(delta.dtype).eps * size
    real = delta.flatten(1).norm(dim=1) > noise
    return Contrast(torch.where(real.view(-1, *[1] * (delta.ndim - 1)), delta, torch.zeros_like(delta)), noise)


@torch.inference_mode(False)  # or directions would be tensors that no backward may save
def mean_directions(contrasts: Iterable[tuple[str, Contrast]]) -> dict[str, Tensor]:
    """Return the unit vector along each site's mean contrast; ``ValueError`` if the pairs of one cancel up to rounding."""
    sums: dict[str, Tensor] = {}
    noise: dict[str, list[Tensor]] = {}
    for site, each in contrasts:
        sums[site] = each.rows.sum(dim=0) if site not in sums else sums[site].add_(each.rows.sum(dim=0))
        noise.setdefault(site, []).append(each.noise)
    for site, total in sums.items():
        floors = torch.cat(noise[site])
        mean = total.div_(len(floors))
        sums[site] = torch.where(mean.norm() > floors.mean(), mean, 0.0)
    return units(sums)


@torch.inference_mode(False)
def stacked_rows(contrasts: Iterable[tuple[str, Contrast]]) -> dict[str, Tensor]:
    """Return the contrast of every pair, ``[n, ...]`` at each site."""
    rows: dict[str, list[Tensor]] = {}
    for site, each in contrasts:
        rows.setdefault(site, []).append(each.rows)
    return {site: torch.cat(parts) for site, parts in rows.items()}


@checked
@dataclass(frozen=True)
class PersonaFitter:
    """Fitter of the mean contrast of the pairs, on the current policy."""

    name: str
    kind: FeatureKind
    pairs: PairBatch
    refreshes: bool = field(default=True, kw_only=True)

    def fit(self, policy: Policy, step: int) -> Directions:
        vectors = mean_directions(differences(policy, self.pairs, self.kind))
        return Directions(vectors, Provenance(self.name, self.kind, self.pairs.pairs_hash, policy.adapters.known_hash, step))


@checked
@dataclass(frozen=True)
class TopKFitter:
    """Fitter of the leading ``k`` singular directions of the per-pair differences at each site.

    Each axis is oriented by the majority of the pairs. Axes whose singular value is below the ``noise_quantile`` of all sites are
    dropped.

    Raises:
        ValueError: ``k`` is below 1, or ``noise_quantile`` is not between 0 and 1.
    """

    kind: FeatureKind
    pairs: PairBatch
    k: int = field(default=3, kw_only=True)
    noise_quantile: float = field(default=0.25, kw_only=True)
    refreshes: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        if isinstance(self.k, bool) or self.k < 1 or not 0 <= self.noise_quantile <= 1:
            raise ValueError(
                f"k={self.k}, noise_quantile={self.noise_quantile} are not valid: give at least one axis, and a share from 0 to 1"
            )

    @property
    def name(self) -> str:
        return f"top{self.k}"

    def fit(self, policy: Policy, step: int) -> Directions:
        deltas = stacked_rows(differences(policy, self.pairs, self.kind))
        axes, strengths = {}, {}
        factors = {site: torch.linalg.svd(delta.flatten(1), full_matrices=False)[1:] for site, delta in deltas.items()}
        # A singular value of 0 has no axis: the SVD returns an arbitrary vector for it.
        real = on_host([(S[: self.k] > S.numel() * torch.finfo(S.dtype).eps * S[0]).sum() for S, _ in factors.values()])
        for (site, delta), (S, Vh), count in zip(deltas.items(), factors.values(), real):
            axis, strengths[site] = Vh[:count].contiguous(), S[:count]  # as a file gives them back: rounding depends on the layout
            along = delta.flatten(1) @ axis.mT
            votes = along.sign().sum(dim=0)
            votes = torch.where(votes == 0, along.sum(dim=0), votes)  # the mean decides a tie, not the SVD's arbitrary sign
            axes[site] = axis * torch.where(votes < 0, -1.0, 1.0).to(axis.dtype)[:, None]
        every = torch.cat(list(strengths.values()))
        if not every.numel():
            raise ValueError("contrasts of norm 0 have no axes: are the hack and clean sides of the pairs the same?")
        floor = every.quantile(self.noise_quantile)
        strong = on_host([(floor <= S).sum() for S in strengths.values()])  # singular values descend
        vectors = {site: axes[site][:n].view(-1, *delta.shape[1:]) for (site, delta), n in zip(deltas.items(), strong)}
        return Directions(vectors, Provenance(self.name, self.kind, self.pairs.pairs_hash, policy.adapters.known_hash, step))


@dataclass(frozen=True)
class KnownFitter:
    """Fitter that returns directions that were fitted before."""

    directions: Directions
    name: str = "known"
    refreshes: bool = False

    def fit(self, policy: Policy, step: int) -> Directions:
        return self.directions


@dataclass(frozen=True)
class HaarFitter:
    """Control fitter: uniformly random directions in the space of ``like``'s, drawn once from ``seed``.

    One direction per site, or orthonormal ones if ``like`` is a ``TopKFitter``.
    """

    like: Fitter
    seed: int
    refreshes: bool = False

    @property
    def name(self) -> str:
        return f"haar of {self.like.name}" if isinstance(self.like, TopKFitter) else "haar"

    def fit(self, policy: Policy, step: int) -> Directions:
        real = self.like.fit(policy, step)
        generator = torch.Generator().manual_seed(self.seed)
        vectors = {}
        for site, v in real.vectors.items():
            draw = torch.randn(v.shape, generator=generator, dtype=torch.float64, device="cpu")
            if isinstance(self.like, TopKFitter):
                draw = torch.linalg.qr(draw.flatten(1).mT).Q.mT.reshape(v.shape)
            vectors[site] = (draw if isinstance(self.like, TopKFitter) else draw / draw.norm()).to(v.device, v.dtype)
        return Directions(vectors, Provenance(self.name, real.provenance.kind, "none", real.provenance.base_hash, 0, self.seed))
