"""The mask route: a flag a rollout (or token) decides what the kept adapter learns; the quarantine learns from everything.

    score_b^m = cos(f_b^m, v^m)          at module m; act, grad or full features
    pooled:    score_b = mean_m score_b^m

When a flag exists decides how it acts. Flags known before or during the forward weight the gradient inside the backward. A flag
from a module's own gradient is decided inside that module's backward. A pooled gradient flag exists only when every module has
reported: each factor's per-rollout gradient is held, and the weighted sum is added once at ``finish`` (added, never subtracted:
taking a flagged rollout out again would leave rounding where the answer is 0). What happens at one module is in ``lane``.
"""

from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mi_route2.adapters.tape import LearnNothing, Tape
from mi_route2.rollouts import Policy, Rollouts
from mi_route2.routing.batch import TrainBatch, group_advantages
from mi_route2.routing.directions import Directions, Fitter, PairBatch, PersonaFitter
from mi_route2.routing.features import ActivationReader, FeatureKind, FullGradientReader, collect, coordinates
from mi_route2.routing.lane import MaskLane, Rule, TokenReader, flag, pooled, shuffled
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
