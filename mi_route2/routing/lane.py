"""From features to flags to weights: what the kept adapter's lane does at each module, within one part of a batch.

A lane is told of every factor's gradient, a module at a time. Where its flags exist by then it weighs the gradient at once; where
they need every module (a pooled gradient score) it holds what it was told until the step is finished.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mi_route2.adapters.gradients import NOISE, FactorGradient, Feature, Written, added, compact, rounding
from mi_route2.routing.directions import Directions
from mi_route2.routing.features import ActivationReader, Features, FullGradientReader, floors
from mi_route2.routing.spec import MaskSpec

SCORED = frozenset({"dS", "B"})


def cosine(feature: Feature, v: Tensor, floor: Float[Tensor, " b"] | None = None) -> Float[Tensor, " b"]:
    """``cos(feature_b, v)``; 0 for a rollout whose feature is 0 (it has nothing to flag), or rounding: a norm up to ``floor``."""
    inner, norms = feature.inner(v), feature.norms()
    real = norms > (rounding([feature]) if floor is None else floor)
    return torch.where(real, inner / torch.where(real, norms * v.norm(), torch.ones_like(norms)), torch.zeros_like(inner))


def pooled(features: Features, directions: Directions) -> Float[Tensor, " b"]:
    """The mean over modules of the cosine."""
    missing = directions.vectors.keys() - features.keys()
    if missing:
        raise RuntimeError(f"no feature arrived from {', '.join(sorted(missing))}, so a pooled score would be of fewer modules")
    # In name order, so that directions read back from a file give the same sum to the last bit.
    floor = floors(features, directions.provenance.kind)
    cosines = [cosine(features[site], directions.vectors[site], floor[site]) for site in sorted(directions.vectors)]
    return torch.stack(cosines).mean(dim=0)


class TokenReader:
    """Per token ``cos(Vh x, v)`` at each site, in the forward; -1 off the predictors."""

    def __init__(self, predictors: Bool[Tensor, "b s"], basis: dict[str, Tensor], directions: Directions):
        self._mask, self._basis, self._directions = predictors, basis, directions
        self.scores: dict[str, Tensor] = {}

    def read(self, site: str, x: Float[Tensor, "b s d_in"]) -> None:
        if site in self.scores:
            raise RuntimeError(f"{site} runs twice in one forward, so its tokens have no one score: use unit='pooled'")
        a = torch.where(self._mask[..., None], x, torch.zeros_like(x)) @ self._basis[site].to(x).mT
        v = self._directions.vectors[site].to(x)
        scores = torch.nn.functional.cosine_similarity(a, v.expand_as(a), dim=-1)
        self.scores[site] = torch.where(self._mask, scores, torch.full_like(scores, -1.0))


def flag(spec: MaskSpec, scores: Tensor, advantages: Float[Tensor, " b"]) -> Tensor:
    """Over the threshold, and reinforced where the rule asks for that; in the shape of ``scores``, ``[b]`` or ``[b s]``."""
    over = scores > spec.tau
    if spec.reinforced_only:
        over &= (advantages > 0) if scores.ndim == 1 else (advantages > 0)[:, None]
    return over


@dataclass(frozen=True)
class Rule:
    """From scores to weights, for the rollouts of one part."""

    spec: MaskSpec
    advantages: Float[Tensor, " b"]
    kept_advantages: Float[Tensor, " b"]
    predictors: Bool[Tensor, "b s"]

    def flags(self, scores: Tensor) -> Tensor:
        """``[b]``, or ``[b s]`` on predictors alone."""
        flags = flag(self.spec, scores, self.advantages)
        return flags & self.predictors if scores.ndim == 2 else flags

    def weights(self, keep: Tensor) -> Tensor:
        """``keep`` (1 learn, 0 flagged) times the scale of the kept advantage's sign."""
        ones = torch.ones_like(self.kept_advantages)  # where() of two Python numbers would be float32, and 0.3 no longer 0.3
        scale = torch.where(self.kept_advantages < 0, self.spec.negative_scale * ones, ones)
        return keep * (scale if keep.ndim == 1 else scale[:, None])


class MaskLane:
    """The kept adapter's lane in one part. ``known`` are pooled flags that exist already; otherwise they are worked out here."""

    def __init__(self, rule: Rule, directions: Directions | None, generator: torch.Generator, want_unrouted: bool):
        self.detach = rule.spec.through == "detach"
        self.rule, self._directions, self._generator, self._want_unrouted = rule, directions, generator, want_unrouted
        self.known: Tensor | None = None
        self.given: Features | None = None
        self.acts: ActivationReader | None = None
        self.tokens: TokenReader | None = None
        self.full: FullGradientReader | None = None
        self.grads: dict[str, FactorGradient | Written] = {}
        self.held: dict[tuple[str, str], FactorGradient | Written] = {}
        self.unrouted: dict[str, Tensor] = {}
        self.flags: dict[str, Tensor] = {}
        self.scores: dict[str, Tensor] = {}
        self.overrule: Callable[[str, Tensor], Tensor] = lambda site, keep: keep
        self._keep: dict[str, Tensor] = {}
        self._called: set[str] = set()
        self._largest: Tensor | None = None
        self._floors: dict[str, Tensor] = {}

    def gradient(self, site: str, factor: str, pair: FactorGradient) -> Tensor | None:
        if self._want_unrouted:
            ones = torch.ones_like(self.rule.advantages)
            plain, name = pair.weighted(ones), f"{site}.{factor}"
            self.unrouted[name] = self.unrouted[name] + plain if name in self.unrouted else plain
        scored = self.rule.spec.score == "grad" and factor in SCORED
        # Scored gradients are read three times (inner product, norm, weighted sum): one product over the tokens will do for all.
        small = compact(pair, scored=scored) if self._waits or scored else pair
        if scored:
            self.grads[site] = added(self.grads.get(site), small)
        if self._waits:
            self.held[site, factor] = added(self.held.get((site, factor)), small)
            return None
        return small.weighted(self.rule.weights(self.weights(site)))

    def decide(self, site: str) -> None:
        """Flags that the forward gives, of this site or of the whole rollout, pass the site's mask point while it runs.

        ``RuntimeError`` where a module's own live flag would be decided by the first of several calls.
        """
        if site in self._called and self.known is None and self.given is None and self.rule.spec.unit != "pooled":
            raise RuntimeError(
                f"{site} runs twice in one forward, so a live flag of its own would be decided by one call and act on both: use "
                "unit='pooled' or score_policy='ablated' (or, where the forward itself ran twice, a tape for each)"
            )
        self._called.add(site)
        in_forward = (
            self.tokens is not None or (self.acts is not None and self.rule.spec.unit == "rollout") or self.given is not None
        )
        if self.known is not None or in_forward:
            self.weights(site)

    @property
    def _waits(self) -> bool:
        """Whether the flag exists only after the whole backward."""
        return self.known is None and self.rule.spec.settles_at_finish

    def weights(self, site: str) -> Tensor:
        """0 where flagged, 1 elsewhere (``negative_scale`` scales what is learnt, it does not flag), as hooks at the site's mask
        point leave it; they see it once."""
        if site not in self._keep:
            self._keep[site] = self.overrule(site, (~self._flags(site)).to(self.rule.advantages.dtype))
        return self._keep[site]

    @property
    def overruled(self) -> bool:
        """Whether a hook changed a mask."""
        whole = self.known is not None
        return any(not torch.equal(keep, (~self.flags["" if whole else site]).to(keep)) for site, keep in self._keep.items())

    @property
    def decided(self) -> dict[str, Tensor]:
        """Flags by site as hooks left them: what was learnt nothing from."""
        return {site: keep == 0 for site, keep in self._keep.items()}

    def _flags(self, site: str) -> Tensor:
        if self.known is None and self.rule.spec.unit == "pooled":
            self.settle()
        if self.known is not None:
            return self.known
        if site not in self.flags:
            scores = self._site_scores(site)
            flags = self.rule.flags(scores)
            self.scores[site], self.flags[site] = scores, shuffled(flags, self._generator) if self.rule.spec.shuffle else flags
        return self.flags[site]

    def _site_scores(self, site: str) -> Tensor:
        assert self._directions is not None
        if self.tokens is not None:
            return self.tokens.scores[site]
        features, v = self._features(), self._directions.vectors[site]
        if self.given is not None:
            self._floors = self._floors or floors(features, self._directions.provenance.kind)
            return cosine(features[site], v, self._floors[site])
        if self.acts is not None:
            return cosine(features[site], v)
        # A backward comes from the loss, so what rounding a module inherits is from modules that have reported.
        size = features[site].magnitude()
        self._largest = size if self._largest is None else torch.maximum(self._largest, size)
        return cosine(features[site], v, NOISE * torch.finfo(size.dtype).eps * self._largest)

    def _features(self) -> Features:
        if self.given is not None:
            return self.given
        if self.acts is not None:
            return self.acts.features()
        return self.grads if self.full is None else self.full.features

    def pooled(self) -> tuple[Tensor, Tensor]:
        """Pooled scores and flags, once every module has reported; not yet shuffled."""
        assert self._directions is not None
        scores = pooled(self._features(), self._directions)
        return scores, self.rule.flags(scores)

    def settle(self) -> None:
        """Make the pooled flags of this part known."""
        scores, flags = self.pooled()
        self.know(scores, shuffled(flags, self._generator) if self.rule.spec.shuffle else flags)

    def know(self, scores: Tensor | None, flags: Tensor) -> None:
        self.known = self.flags[""] = flags
        if scores is not None:
            self.scores[""] = scores


def shuffled(flags: Tensor, generator: torch.Generator) -> Tensor:
    """The same number of flags on random rollouts (each row of tokens moves as one)."""
    return flags[torch.randperm(len(flags), generator=generator, device=generator.device).to(flags.device)]
