"""From features to flags to weights: what the kept adapter's lane does at each module, within one part of a batch.

A lane is told of every factor's gradient, a module at a time. Where its flags exist by then it weighs the gradient at once; where
they need every module (a pooled gradient score) it holds what it was told until the step is finished.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from mi_route2.adapters.gradients import NOISE, FactorGradient, Feature, Written, added, compact, rounding
from mi_route2.adapters.tape import LearnNothing, Tape
from mi_route2.rollouts import Policy, Rollouts
from mi_route2.routing.batch import TrainBatch, group_advantages
from mi_route2.routing.directions import (
    ActivationReader,
    Directions,
    FeatureKind,
    Features,
    Fitter,
    FullGradientReader,
    PairBatch,
    PersonaFitter,
    collect,
    coordinates,
    floors,
)
from mi_route2.routing.routes import (
    Decision,
    Once,
    OneCall,
    Part,
    Reduce,
    RouteStep,
    StepContext,
    check_kind,
    check_step,
    chunks,
    refit,
    trainable,
)
from mi_route2.routing.spec import MaskSpec, Through

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


def _either(first: Tape, second: Tape) -> Callable[[str, Tensor], Tensor]:
    """A mask passes its point in one of two passes, whichever comes to it first: the other's tape has not seen the site then."""
    return lambda site, keep: second.mask(site, first.mask(site, keep))


class _MaskStep(Once):
    def __init__(self, route: "MaskRoute", policy: Policy, batch: TrainBatch, context: StepContext):
        self._route, self._policy = route, policy
        spec = route.spec
        scores, flags = route.early(policy, batch, context)
        kept_advantages = batch.advantages
        if spec.kept_advantage == "unflagged":
            assert flags is not None
            counted = group_advantages(batch.rewards, batch.groups, ~flags)
            kept_advantages = torch.where(flags, torch.zeros_like(counted), counted)
        # Two adapters, two advantages: each learns from a backward of its own. With one adapter, or one advantage, one will do.
        split = spec.kept_advantage == "unflagged" and policy.adapters.has_quarantine
        self.parts: list[Part] = []
        self._lanes: list[MaskLane] = []
        self._generator, pieces = context.generator, chunks(batch, context.micro)
        if spec.shuffle and flags is None and not spec.settles_at_finish and len(pieces) > 1:
            raise ValueError(
                "these flags are known a micro-batch at a time and would be shuffled within it alone, which is no control: use "
                "micro=None, or unit='pooled' with score_policy='ablated'"
            )
        for index in pieces:
            piece = batch.rows(index)
            b, s = piece.rollouts.tokens.shape
            l1 = route.l1 * b / len(batch.rollouts)
            rule = Rule(spec, piece.advantages, kept_advantages[index], piece.rollouts.predictors)
            lane = MaskLane(rule, route.directions, context.generator, route.want_unrouted)
            if flags is not None:
                lane.know(None if scores is None else scores[index], flags[index])
            tape = route.tape(policy, lane, piece, l1=0.0 if split else l1)
            if split:
                tape.quarantine = LearnNothing()
                first = Tape(b, s, kept=LearnNothing(), l1=l1, real=piece.rollouts.attention)
                if spec.through == "detach":
                    first.kept, lane.overrule = LearnNothing(lane), _either(first, tape)
                self.parts.append(Part(piece, first, piece.advantages))
            self.parts.append(Part(piece, tape, kept_advantages[index]))
            self._lanes.append(lane)

    def finish(self, reduce: Reduce | None = None) -> Decision:
        adapters = self._policy.adapters
        self._finish(self.parts, adapters, masks=True)
        kept = adapters.kept_parameters()
        self._settle()
        for lane in self._lanes:
            for (site, factor), gradient in lane.held.items():
                p = kept[f"{site}.{factor}"]
                if not p.requires_grad:
                    continue  # frozen: it is scored like any other, and autograd would give it no gradient either
                assert lane.known is not None
                routed = gradient.weighted(lane.rule.weights(lane.weights(site))).to(p.dtype)
                p.grad = routed if p.grad is None else p.grad + routed
        if reduce is not None:
            reduce(trainable(kept, adapters.quarantine_parameters()))
        return self._decision(reduce)

    def _settle(self) -> None:
        """Make flags known that waited for the whole backward; shuffled over the batch, not within each micro-batch."""
        lanes = [lane for lane in self._lanes if lane.held]
        if not lanes:
            return
        scores, flags = zip(*(lane.pooled() for lane in lanes))
        whole = torch.cat(flags)
        whole = shuffled(whole, self._generator) if self._route.spec.shuffle else whole
        for lane, score, own in zip(lanes, scores, whole.split([len(f) for f in flags])):
            lane.know(score, own)

    def _decision(self, reduce: Reduce | None) -> Decision:
        def summary(per_site: dict[str, Tensor], predictors: Tensor) -> Tensor:
            rows = [
                v.double() if v.ndim == 1 else (v.double() * predictors).sum(1) / predictors.sum(1).clamp_min(1)
                for v in per_site.values()
            ]
            return torch.stack(rows).mean(dim=0)

        masks = [lane.rule.predictors for lane in self._lanes]
        flags = torch.cat([summary(lane.decided, m) > 0.5 for lane, m in zip(self._lanes, masks)])
        scored = all(lane.scores for lane in self._lanes)
        scores = torch.cat([summary(lane.scores, m) for lane, m in zip(self._lanes, masks)]) if scored else None
        unrouted: dict[str, Tensor] = {}
        for lane in self._lanes:
            for name, g in lane.unrouted.items():
                unrouted[name] = unrouted[name] + g if name in unrouted else g
        kept = self._policy.adapters.kept_parameters()
        unrouted = {name: g for name, g in unrouted.items() if kept[name].requires_grad}
        if reduce is not None and unrouted:  # or the second moments, and with them the weights, would differ between ranks
            carriers = {name: nn.Parameter(torch.zeros_like(g)) for name, g in unrouted.items()}
            for name, p in carriers.items():
                p.grad = unrouted[name]
            reduce(list(carriers.values()))
            unrouted = {name: p.grad for name, p in carriers.items() if p.grad is not None}
        extra = {"overruled": 1.0} if any(lane.overruled for lane in self._lanes) else {}
        return Decision(scores=scores, flags=flags, unrouted=unrouted, extra=extra)


class MaskRoute(OneCall):
    """See the module. ``fitter`` is ``None`` where the score needs no direction (channels, none).

    ``flags`` are flags of your own in the place of a score's; see ``from_flags``.
    """

    def __init__(
        self,
        spec: MaskSpec,
        fitter: Fitter | None,
        *,
        l1: float = 0.0,
        want_unrouted: bool = False,
        flags: Tensor | Callable[[TrainBatch], Tensor] | None = None,
    ):
        if spec.needs_direction and fitter is None:
            raise ValueError(f"score={spec.score!r} compares with a direction, so the route needs a fitter")
        if want_unrouted and (spec.through != "filter" or spec.kept_advantage != "own"):
            raise ValueError(
                "the unrouted gradient exists in the same backward only for through='filter' and kept_advantage='own': detaching, "
                "or another advantage, changes what every rollout sends down"
            )
        if flags is not None and spec.score != "none":
            raise ValueError(f"score={spec.score!r} makes its own flags: use MaskRoute.from_flags(flags)")
        self.spec, self._fitter, self.l1, self.want_unrouted = spec, fitter, l1, want_unrouted
        self._given = flags
        self.directions: Directions | None = None
        self._basis: dict[str, Tensor] | None = None

    @staticmethod
    def from_flags(
        flags: Tensor | Callable[[TrainBatch], Tensor],
        *,
        through: Through = "filter",
        kept_advantage: Literal["own", "unflagged"] = "own",
        negative_scale: float = 1.0,
        l1: float = 0.0,
        want_unrouted: bool = False,
    ) -> "MaskRoute":
        """Route by flags of your own: True where the kept adapter must learn nothing.

        Args:
            flags: bool, ``[b]`` or by token ``[b, s]``, for every batch that comes; or a function of the batch that gives them.
            through: what a flag does; see ``MaskSpec``, for this and what follows.

        Flags are taken as they are: nothing is compared with advantages. ``begin`` raises ``ValueError`` for flags that do not
        fit the batch.
        """
        spec = MaskSpec(
            score="none", through=through, reinforced_only=False, kept_advantage=kept_advantage, negative_scale=negative_scale
        )
        return MaskRoute(spec, None, l1=l1, want_unrouted=want_unrouted, flags=flags)

    @staticmethod
    def from_pairs(pairs: PairBatch, spec: MaskSpec | None = None, *, l1: float = 0.0, want_unrouted: bool = False) -> "MaskRoute":
        """Route by the persona direction of contrast pairs, in the features that ``spec`` scores (``None``: ``MaskSpec()``).

        ``ValueError`` for a rule that compares with no direction, or with another one.
        """
        spec = MaskSpec() if spec is None else spec
        if spec.score not in ("act", "grad", "full"):
            raise ValueError(
                f"score={spec.score!r} compares with no direction: use score='act', 'grad' or 'full', or MaskRoute(spec, None)"
            )
        if spec.fitter != "persona":
            raise ValueError(f"fitter={spec.fitter!r} is a control's: use MaskRoute(spec, fitter) with the fitter that draws it")
        return MaskRoute(spec, PersonaFitter("persona", spec.score, pairs), l1=l1, want_unrouted=want_unrouted)

    def _own_flags(self, batch: TrainBatch) -> Tensor:
        """Flags that the user gave; ``ValueError`` where they do not fit the batch."""
        flags = self._given(batch) if callable(self._given) else self._given
        by_rollout, by_token = batch.rollouts.tokens.shape[:1], batch.rollouts.tokens.shape
        if not isinstance(flags, Tensor) or flags.dtype != torch.bool:
            kind = f"of {flags.dtype}" if isinstance(flags, Tensor) else f"a {type(flags).__name__}"
            raise ValueError(f"flags are a tensor of torch.bool, True where the kept adapter must learn nothing, not {kind}")
        if flags.shape not in (by_rollout, by_token):
            raise ValueError(
                f"flags have shape {list(flags.shape)}: give one a rollout, {list(by_rollout)}, or one a token, {list(by_token)}"
            )
        if flags.ndim == 2 and self.spec.kept_advantage == "unflagged":
            raise ValueError("kept_advantage='unflagged' counts the rollouts without a flag: give one flag a rollout")
        return flags.to(batch.advantages.device)

    def refresh(self, policy: Policy, step: int) -> float | None:
        if self._fitter is None:
            return None
        self.directions, overlap = refit(self.directions, self._fitter, self.spec.refresh_every, policy, step)
        check_kind(self.directions, self.spec.score)
        return overlap

    def begin(self, policy: Policy, batch: TrainBatch, context: StepContext) -> RouteStep:
        if self.spec.needs_direction and self.directions is None:
            raise RuntimeError("the route has no direction yet: call route.refresh(policy, step) before the first step")
        check_step(self.spec, batch, context)
        return _MaskStep(self, policy, batch, context)

    def basis(self, policy: Policy) -> dict[str, Tensor]:
        """``Vh`` at every site, worked out once."""
        if self._basis is None:
            self._basis = coordinates(policy.adapters) if self.spec.score == "act" else {}
        return self._basis

    def early(self, policy: Policy, batch: TrainBatch, context: StepContext) -> tuple[Tensor | None, Tensor | None]:
        """Pooled scores and flags where they exist before the loss."""
        spec, b = self.spec, len(batch.rollouts)
        scores = None
        if self._given is not None:
            flags = self._own_flags(batch)
        elif spec.score == "none":
            flags = torch.zeros(b, dtype=torch.bool, device=batch.advantages.device)
        elif spec.privileged:
            if context.privileged is None:
                raise ValueError(f"score={spec.score!r} needs the marked detector verdicts (StepContext.privileged)")
            own = spec.score == "own_channel"
            flags = context.privileged.own_channel if own else context.privileged.known_channel
            flags = flags & (batch.advantages > 0) if spec.reinforced_only else flags
        elif spec.score_policy == "ablated" and spec.unit == "pooled":
            pieces = [self.score(policy, batch.rollouts.rows(index)) for index in chunks(batch, context.micro)]
            scores = torch.cat([p for p in pieces if p is not None])
            flags = flag(spec, scores, batch.advantages)
        else:
            return None, None
        return scores, shuffled(flags, context.generator) if spec.shuffle else flags

    def tape(self, policy: Policy, lane: MaskLane, piece: TrainBatch, l1: float) -> Tape:
        """The tape of one part, with the readers that the lane's flags need."""
        b, s = piece.rollouts.tokens.shape
        spec, tape = self.spec, Tape(b, s, kept=lane, l1=l1, real=piece.rollouts.attention)
        lane.overrule = tape.mask
        if lane.known is not None:
            return tape
        assert self.directions is not None
        predictors, basis = piece.rollouts.predictors, self.basis(policy)
        if spec.score_policy == "ablated":
            lane.given = collect(policy, piece.rollouts, self._kind, basis)
        elif spec.score == "act" and spec.unit == "token":
            lane.tokens = tape.inputs = TokenReader(predictors, basis, self.directions)
        elif spec.score == "act":
            lane.acts = tape.inputs = ActivationReader(predictors, basis)
        elif spec.score == "full":
            lane.full = tape.outputs = FullGradientReader()
        return tape

    @property
    def _kind(self) -> FeatureKind:
        assert self.spec.score in ("act", "grad", "full")
        return self.spec.score

    def score(self, policy: Policy, rollouts: Rollouts) -> Float[Tensor, " b"] | None:
        if self.directions is None or not self.spec.needs_direction:
            return None
        return pooled(collect(policy, rollouts, self._kind, self.basis(policy)), self.directions)

    def after_update(self, update: dict[str, Tensor]) -> dict[str, float]:
        return {}
