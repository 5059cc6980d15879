"""Mask routes: the kept adapter learns nothing from flagged rollouts, the quarantine learns from every one.

Where flags are known before the backward, a step is these lines (``L``: loss per rollout; ``flags`` may be per token under detach):

    filter    kept.grad       = autograd.grad((L * ~flags).sum(), kept)
              quarantine.grad = autograd.grad(L.sum(), quarantine)
    detach    y = W x + where(flags, kept(x).detach(), kept(x)) + quarantine(x)      at every Linear
              L.sum().backward()

This module computes the same in one backward, and for flags that are known in it or after it:

    s_b^m  = cos(f_b^m, v^m)                       score of rollout b at module m;  pooled: s_b = mean_m s_b^m
    flag_b = s_b > tau  and  A_b > 0               A_b > 0 only if ``reinforced_only``
    mask_b = 1 - flag_b                            hooks at ``hook_mask`` may replace it
    w_b    = mask_b * (eta if K_b < 0 else 1)      K: the kept advantage, eta: ``negative_scale``
    kept gradient = sum_b w_b g_b

Scores, flags and weights are the pure functions below. Specs differ in when flags are known (``MaskSpec.decided_at``). All state
that must be kept until then is in a ``MaskGate``, one per micro-batch.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor, nn

from mi_route2.adapters.gradients import NOISE, DenseGrad, FactorGradient, added, compact, exact, wide
from mi_route2.adapters.linear import watched
from mi_route2.adapters.tape import Hooks, LearnNothing, Tape, demand_penalty
from mi_route2.checks import all_finite, checked, on_host
from mi_route2.rollouts import Policy, Rollouts, TrainBatch, group_advantages
from mi_route2.routing.directions import (
    SCORED,
    ActivationReader,
    Directions,
    FeatureKind,
    Features,
    Fitter,
    FullGradientReader,
    PairBatch,
    PersonaFitter,
    collect,
    compare,
    floors,
)
from mi_route2.routing.routes import (
    REDUCING,
    Before,
    Decision,
    MicroBatch,
    Once,
    OneCall,
    Reduce,
    RouteStep,
    StepContext,
    check_directions,
    check_kind,
    check_step,
    chunks,
    gradients_before,
    refit,
    several_ranks,
    trained_gradients,
)
from mi_route2.specs import MaskSpec, Through

Scores = Float[Tensor, " b"] | Float[Tensor, "b s"]
Flags = Bool[Tensor, " b"] | Bool[Tensor, "b s"]
Mask = Shaped[Tensor, " b"] | Shaped[Tensor, "b s"]
"""1 if the adapter learns, 0 if flagged; hooks may return any dtype and any value in between."""


# ---- pure functions: scores -> flags -> weights


def cosine(inner: Tensor, norms: Tensor, size: Tensor, floor: Tensor) -> Tensor:
    """Return ``inner / (norms * size)``; 0 if the feature is within rounding errors of 0 (its norm is at most ``floor``)."""
    none = norms <= floor  # so that NaN stays NaN, which ``decide`` refuses
    return torch.where(none, torch.zeros_like(inner), inner / torch.where(none, torch.ones_like(norms), norms * size))


@exact()
def module_scores(features: Features, directions: Directions) -> dict[str, Float[Tensor, " b"]]:
    """Return ``s_b^m = cos(f_b^m, v^m)`` for every module m with a direction; ``RuntimeError`` if a module has no feature."""
    missing = directions.vectors.keys() - features.keys()
    if missing:
        raise RuntimeError(f"no feature arrived from {', '.join(sorted(missing))}, so a pooled score would miss these modules")
    sites = sorted(directions.vectors)  # so that directions read from a file give the same pooled sum bit for bit
    compared = {site: compare(features[site], directions.vectors[site]) for site in sites}
    floor = floors({site: each.magnitude for site, each in compared.items()}, directions.provenance.kind)
    inner, norms = (torch.stack([compared[site][i] for site in sites]) for i in (0, 1))
    # of all modules at once: on a GPU a step takes as long as it takes to launch its kernels
    size = torch.stack([directions.vectors[site].norm() for site in sites]).to(norms)[:, None]
    return dict(zip(sites, cosine(inner, norms, size, torch.stack([floor[site] for site in sites]))))


def pooled(features: Features, directions: Directions) -> Float[Tensor, " b"]:
    """Return ``s_b = mean_m cos(f_b^m, v^m)``."""
    return torch.stack(list(module_scores(features, directions).values())).mean(dim=0)


def token_scores(
    x: Float[Tensor, "b s d_in"], real: Bool[Tensor, "b s"], Vh: Float[Tensor, "r d_in"], v: Float[Tensor, " r"]
) -> Float[Tensor, "b s"]:
    """Return ``s_bt = cos(Vh x_bt, v)`` on real tokens, 0 if ``Vh x_bt`` is within rounding errors of 0, and -1 on padding."""
    # torch.where and not a product, because padding may hold any value, NaN included
    x = torch.where(real[..., None], x, torch.zeros_like(x)).to(wide(x.dtype))
    # Division by a power of two changes no bit of a cosine, and keeps the squares of very large or small activations in range.
    largest = x.abs().amax(dim=-1, keepdim=True)
    mantissa = largest.frexp().mantissa
    x = x / torch.where(mantissa > 0, largest / (2 * mantissa), torch.ones_like(largest))
    a = x @ Vh.to(x).mT
    scores = torch.nn.functional.cosine_similarity(a, v.to(x).expand_as(a), dim=-1, eps=0.0)
    noise = NOISE * torch.finfo(x.dtype).eps
    scores = torch.where(a.norm(dim=-1) <= noise * x.norm(dim=-1), torch.zeros_like(scores), scores)
    return torch.where(real, scores, torch.full_like(scores, -1.0))


def decide(scores: Scores, spec: MaskSpec, advantages: Float[Tensor, " b"] | None, real: Bool[Tensor, "b s"]) -> Flags:
    """Return ``flag_b = s_b > tau and A_b > 0``; token flags on real tokens only.

    The advantage counts only if ``reinforced_only`` and the batch has any.

    Raises:
        ValueError: A score is NaN or infinite.
    """
    demand_scores({"": scores})
    return flagged(scores, spec, advantages, real)


def demand_scores(scores: Mapping[str, Scores]) -> None:
    """Raise ``ValueError`` if a module's score is NaN or infinite; the host waits once for all modules."""
    if not all_finite(scores):
        wrong = next(~score.isfinite() for score in scores.values() if not score.isfinite().all())
        rows = wrong.nonzero()[:, 0].unique().tolist()
        raise ValueError(f"rollouts {rows[:8]} have activations or gradients that are NaN or infinite, so they have no score")


def flagged(scores: Scores, spec: MaskSpec, advantages: Float[Tensor, " b"] | None, real: Bool[Tensor, "b s"]) -> Flags:
    """Return the flags of ``decide`` without its check."""
    flags = scores > spec.tau
    if spec.reinforced_only and advantages is not None:
        flags &= (advantages > 0) if scores.ndim == 1 else (advantages > 0)[:, None]
    return flags & real if scores.ndim == 2 else flags


def shuffled(flags: Bool[Tensor, " b"], generator: torch.Generator) -> Bool[Tensor, " b"]:
    """Return the same flags on random rollouts, a control with as many."""
    return flags[torch.randperm(len(flags), generator=generator, device=generator.device).to(flags.device)]


def scales(spec: MaskSpec, advantages: Float[Tensor, " b"]) -> Float[Tensor, " b"]:
    """Return ``eta if K_b < 0 else 1``; ``advantages`` are the kept adapter's, K."""
    ones = torch.ones_like(advantages)  # torch.where of two Python numbers would round ``negative_scale`` to float32
    return torch.where(advantages < 0, spec.negative_scale * ones, ones)


def weigh(mask: Mask, scale: Float[Tensor, " b"]) -> Mask:
    """Return ``w_b = mask_b * scale_b``."""
    return mask * (scale if mask.ndim == 1 else scale[:, None])


def kept_advantages(spec: MaskSpec, batch: TrainBatch, flags: Flags | None) -> Float[Tensor, " b"] | None:
    """Return ``K_b = A_b``; for ``kept_advantage="unflagged"``, ``R_b - mean(R over the group's unflagged)``, 0 if b is flagged."""
    if spec.kept_advantage == "own":
        return batch.advantages
    assert flags is not None  # the spec requires scores that are known before the loss
    rewards, groups, _ = (batch.demand(name, "kept_advantage='unflagged'") for name in ("rewards", "groups", "advantages"))
    # Flagged hacks raise the group's mean, which would punish its honest failures and push the kept adapter towards hacking.
    counted = group_advantages(rewards, groups, ~flags)
    return torch.where(flags, torch.zeros_like(counted), counted)


def per_rollout(values: Iterable[Tensor], predictors: Bool[Tensor, "b s"]) -> Float[Tensor, " b"]:
    """Return the mean over modules of values per rollout; values per token are first averaged over predictors."""
    means = [v.double() if v.ndim == 1 else (v.double() * predictors).sum(1) / predictors.sum(1).clamp_min(1) for v in values]
    return torch.stack(means).mean(dim=0)


def hooked(site: str, mask: Tensor, point: Hooks) -> Tensor:
    """Return ``mask`` after the hooks at the site's mask point; ``ValueError`` if they return no mask of its shape.

    Whether it lies between 0 and 1 is checked of all sites together, by ``MaskGate.demand_valid``.
    """
    new = point(mask)
    if not isinstance(new, Tensor) or new.shape != mask.shape:
        got = f"a mask of shape {list(new.shape)}" if isinstance(new, Tensor) else f"a {type(new).__name__}"
        raise ValueError(f"a hook at {site}.hook_mask returned {got}, not a mask of shape {list(mask.shape)}")
    return new.detach().clone()  # it may be one tensor at every module, with other values


def _refuse_hooked(kept: Mapping[str, nn.Parameter]) -> None:
    """Raise ``ValueError`` for a kept parameter with a gradient hook, which does not fire if gradients wait for flags."""
    if hooked := [name for name, p in kept.items() if p._backward_hooks or p._post_accumulate_grad_hooks]:
        raise ValueError(
            f"{hooked[0]} has a hook on its gradient, which would not fire: pooled live gradient flags are known after it. "
            "Remove it, or use score_policy='ablated' or score='act'"
        )


# ---- the state of a step


class TokenReader:
    """Reader of token scores in the forward; ``scores[site]`` is ``[b, s]``, and -1 on padding."""

    def __init__(self, real: Bool[Tensor, "b s"], basis: Mapping[str, Tensor], directions: Directions):
        self._real, self._basis, self._directions = real, basis, directions
        self.scores: dict[str, Tensor] = {}

    def read(self, site: str, x: Float[Tensor, "b s d_in"]) -> None:
        if site in self.scores:
            raise RuntimeError(f"{site} runs twice in one forward, so its tokens have two scores: use unit='pooled'")
        self.scores[site] = token_scores(x, self._real, self._basis[site], self._directions.vectors[site])


class MaskGate:
    """Gate of the kept adapter in one forward and backward, with all state that is kept until the backward ends.

    The mask of a module is decided once, as soon as its score is known (``MaskSpec.decided_at``): when the module is called, at its
    first gradient, or by ``know`` after the backward.

    Args:
        spec: the rule.
        batch: the rollouts of this micro-batch.
        advantages: those that the kept adapter learns from, K, if there are any.
        generator: draws shuffled flags.
        directions: directions that features are compared with; ``None`` if flags are ``known``.
        known: flags, if they are known before the forward.
        pooled_scores: the scores of ``known`` flags.
        reader: stores the features of the training pass; ``None`` for ``score="grad"``, whose features the gate receives itself.
    """

    def __init__(
        self,
        spec: MaskSpec,
        batch: TrainBatch,
        advantages: Float[Tensor, " b"] | None,
        generator: torch.Generator,
        *,
        directions: Directions | None = None,
        known: Flags | None = None,
        pooled_scores: Float[Tensor, " b"] | None = None,
        reader: "ActivationReader | FullGradientReader | TokenReader | None" = None,
    ):
        self.detach = spec.through == "detach"
        self._spec, self._batch, self._generator = spec, batch, generator
        self._directions, self._reader = directions, reader
        ones = torch.ones(len(batch.rollouts), device=batch.rollouts.tokens.device)
        self._scales = ones if advantages is None else scales(spec, advantages)
        self.scores: dict[str, Tensor] = {}
        self.masks: dict[str, Tensor] = {}
        self._weights: dict[str, Tensor] = {}
        self._points: dict[str, Hooks] = {}
        self.known: Tensor | None = None  # flags of every module
        self.pooled_scores = pooled_scores
        self.hooked: dict[str, tuple[Tensor, Tensor]] = {}
        """Whether a hook changed the mask of a site, and whether it returned a number outside of 0 to 1."""
        # Kept until flags are decided: scored gradients, the largest magnitude, gradients that wait for a flag.
        self._gradients: dict[str, FactorGradient | DenseGrad] = {}
        self._largest: Tensor | None = None
        self.waiting: dict[tuple[str, str], FactorGradient | DenseGrad] = {}
        if known is not None:
            self.know(known, pooled_scores)

    def know(self, flags: Flags, scores: Float[Tensor, " b"] | None) -> None:
        """Set the flags of every module, and their scores."""
        self.known, self.pooled_scores = flags, scores
        self._mask = (~flags).to(self._scales.dtype)
        self._weight = weigh(self._mask, self._scales)

    def called(self, site: str, point: Hooks) -> None:
        """Decide the module's mask if its flags are known in the forward.

        Raises:
            RuntimeError: The module runs twice, and the first call would decide a flag of its own for both.
        """
        if site in self._points and self._spec.unit != "pooled":
            raise RuntimeError(
                f"{site} runs twice in one forward, so its first call would decide a live flag that acts on both: use "
                "unit='pooled' (or, if the forward itself ran twice, one tape for each)"
            )
        self._points[site] = point
        if self.known is not None or self._spec.unit == "token":
            self.decide(site)

    def gradient(self, site: str, factor: str, pair: FactorGradient) -> Tensor | None:
        waits = self._spec.decided_at == "finish"
        scored = self._spec.score == "grad" and self._spec.decided_at != "begin" and factor in SCORED
        # Scored gradients are read three times (inner product, norm, weighted sum), so the product over tokens is computed once.
        small = compact(pair, scored=scored) if waits or scored else pair
        if scored:
            self._gradients[site] = added(self._gradients.get(site), small)
        if waits:
            self.waiting[site, factor] = added(self.waiting.get((site, factor)), small)
            return None
        return self.passed(site, small)

    def mask(self, site: str) -> Tensor:
        return self.masks[site]

    def passed(self, site: str, gradient: FactorGradient | DenseGrad) -> Tensor:
        """Return ``sum_b w_b g_b`` of one factor; decide the module's mask first if this is its first gradient."""
        self.decide(site)
        return gradient.weighted(self._weights[site])

    def pooled(self) -> tuple[Float[Tensor, " b"], Bool[Tensor, " b"]]:
        """Return pooled scores and flags of the training pass, after every module has reported; not yet shuffled."""
        assert self._directions is not None
        assert not isinstance(self._reader, TokenReader)
        scores = pooled(self._gradients if self._reader is None else self._reader.features, self._directions)
        return scores, decide(scores, self._spec, self._batch.advantages, self._batch.rollouts.attention)

    def release(self) -> None:
        """Drop the gradients that were kept until the flags were decided."""
        self.waiting.clear()
        self._gradients.clear()
        if isinstance(self._reader, FullGradientReader):
            self._reader.features.clear()

    def flagged(self) -> Bool[Tensor, " b"]:
        """Return the majority over modules and predictors of each rollout's flags, after hooks."""
        every = list(self.masks.values()) or [self._mask]  # no module ran if nothing was to be learned
        distinct = every[:1] if all(mask is every[0] for mask in every) else every
        return per_rollout([mask == 0 for mask in distinct], self._batch.rollouts.predictors) > 0.5

    def demand_valid(self) -> bool:
        """Return whether a hook changed a mask; the host waits once for all modules.

        Raises:
            ValueError: The score of a module is NaN or infinite, or a hook's mask does not lie between 0 and 1.
        """
        demand_scores(self.scores)
        found = on_host([flag for pair in self.hooked.values() for flag in pair])
        for site, outside in zip(self.hooked, found[1::2]):
            if outside:
                mask = self.masks[site]
                wrong = mask[~((mask >= 0) & (mask <= 1))][0].item()
                raise ValueError(
                    f"a hook at {site}.hook_mask returned {wrong}, but a mask lies between 0 (flagged) and 1 (learned)"
                )
        return any(found[::2])

    def scored(self) -> Float[Tensor, " b"] | None:
        """Return the score of each rollout, the mean over modules and predictors; ``None`` if there is none."""
        values = [*self.scores.values()] if self.pooled_scores is None else [self.pooled_scores]
        return per_rollout(values, self._batch.rollouts.predictors) if values else None

    def decide(self, site: str) -> None:
        """Decide the module's mask, once; the hooks at its mask point run once, and the mask that they return is final."""
        if site in self.masks:
            return
        if self.known is None and self._spec.unit == "pooled":
            scores, flags = self.pooled()
            self.know(shuffled(flags, self._generator) if self._spec.shuffle else flags, scores)
        if self.known is None:
            self.scores[site] = self._score(site)
            flags = flagged(self.scores[site], self._spec, self._batch.advantages, self._batch.rollouts.attention)
            mask = (~flags).to(self._scales.dtype)
            weights = weigh(mask, self._scales)
        else:
            mask, weights = self._mask, self._weight
        point = self._points.get(site)
        if point is not None and (not isinstance(point, nn.Module) or watched(point)):
            new = hooked(site, mask.clone(), point)  # a hook may write into its mask
            outside = ~((new >= 0) & (new <= 1))  # negated, so that NaN counts too
            self.hooked[site] = (new != mask.to(new)).any(), outside.any()
            mask, weights = new, weigh(new, self._scales)
        self.masks[site], self._weights[site] = mask, weights

    def _score(self, site: str) -> Tensor:
        """Return the score of one module: of its tokens, or of the gradient of each rollout."""
        if isinstance(self._reader, TokenReader):
            return self._reader.scores[site]
        assert self._directions is not None
        inner, norms, size = compare(self._gradients.pop(site), v := self._directions.vectors[site])
        # The backward starts at the loss, so rounding errors come only from modules that have already reported.
        self._largest = size if self._largest is None else torch.maximum(self._largest, size)
        return cosine(inner, norms, v.norm(), NOISE * torch.finfo(size.dtype).eps * self._largest)


@dataclass(eq=False)
class _MaskStep(Once):
    _spec: MaskSpec
    _policy: Policy
    micro_batches: list[MicroBatch]
    _before: Before
    _gates: list[MaskGate]
    _skipped: bool
    _generator: torch.Generator

    @exact()
    def finish(self, reduce: Reduce | None = None) -> Decision:
        adapters = self._policy.adapters
        self._finish(self.micro_batches, adapters, acts="" if reduce is None else REDUCING)
        kept = adapters.kept_parameters()
        if gates := [gate for gate in self._gates if gate.waiting]:
            # Flags that wait for the whole backward are shuffled over the batch, not within micro-batches.
            scores, flags = zip(*(gate.pooled() for gate in gates))
            whole = shuffled(torch.cat(flags), self._generator) if self._spec.shuffle else torch.cat(flags)
            for gate, score, gate_flags in zip(gates, scores, whole.split([len(f) for f in flags])):
                gate.know(gate_flags, score)
                self._assign(gate)
        overruled = [gate.demand_valid() for gate in self._gates]
        if self._skipped:  # a backward that was left out leaves no gradients of 0, which an optimizer counts as a step
            trained_gradients(kept)
        if reduce is not None:
            reduce(trained_gradients(kept, adapters.quarantine_parameters()))
        scored = [gate.scored() for gate in self._gates]
        return Decision(
            scores=torch.cat([score for score in scored if score is not None]) if scored[0] is not None else None,
            flags=torch.cat([gate.flagged() for gate in self._gates]),
            extra={"overruled": 1.0} if any(overruled) else {},
        )

    @exact()
    def settle(self, micro_batch: MicroBatch) -> None:
        gate = micro_batch.tape.kept
        if self._spec.shuffle or not isinstance(gate, MaskGate) or not gate.waiting:
            return
        scores, flags = gate.pooled()
        gate.know(flags, scores)
        self._assign(gate)

    def _assign(self, gate: MaskGate) -> None:
        """Add the gradients that waited for their flags, and release them."""
        kept = self._policy.adapters.kept_parameters()
        for (site, factor), gradient in gate.waiting.items():
            p = kept[f"{site}.{factor}"]
            gate.decide(site)
            if not p.requires_grad:
                continue  # a frozen factor is scored too, but autograd would give it no gradient either
            routed = gate.passed(site, gradient).to(p.dtype)
            if p.grad is None:
                p.grad = routed
            else:
                p.grad += routed  # in place, as autograd does: ``Once`` knows a gradient from before the step by its identity
        gate.release()


# ---- the route


@checked
class MaskRoute(OneCall):
    """Route by masks; see the module's equations.

    Args:
        spec: the rule.
        fitter: gives the directions; ``None`` if the score needs none (channels, none).
        l1: weight of the mean absolute output of the quarantine in the loss.
        flags: your own flags instead of a score's; see ``from_flags``.

    Raises:
        ValueError: Arguments that contradict each other.

    Examples:
        >>> route = MaskRoute.from_pairs(pairs, MaskSpec(score="act"))
        >>> overlap = route.refresh(policy, step=0)
        >>> decision = route.backward(policy, batch, loss_fn)
    """

    def __init__(
        self,
        spec: MaskSpec,
        fitter: Fitter | None,
        *,
        l1: float = 0.0,
        flags: Flags | Callable[[TrainBatch], Tensor] | None = None,
    ):
        demand_penalty(l1)
        if spec.needs_direction and fitter is None:
            raise ValueError(f"score={spec.score!r} compares with a direction, so the route needs a fitter")
        if flags is not None and spec.score != "none":
            raise ValueError(f"score={spec.score!r} computes its own flags: use MaskRoute.from_flags(flags)")
        self.spec, self._fitter, self.l1 = spec, fitter, l1
        self._given = flags
        self.directions: Directions | None = None
        self._fits: tuple[object, ...] = ()  # the directions, the adapters and the coordinates that were checked last

    @staticmethod
    @checked
    def from_flags(
        flags: Flags | Callable[[TrainBatch], Tensor],
        *,
        through: Through = "filter",
        kept_advantage: Literal["own", "unflagged"] = "own",
        negative_scale: float = 1.0,
        l1: float = 0.0,
    ) -> "MaskRoute":
        """Route by your own flags: True if the kept adapter must learn nothing.

        Flags are used as given and are not combined with advantages.

        Args:
            flags: bool, ``[b]`` or by token ``[b, s]``, for every batch; or a function of the batch that returns them. A token's
                flag is of the position that reads it and predicts the next one; positions of the prompt learn too.
            through: effect of a flag; see ``MaskSpec``, also for the next two.
            kept_advantage: advantage that the kept adapter learns from.
            negative_scale: weight of rollouts with a negative kept advantage.
            l1: as in ``MaskRoute``.

        Raises:
            ValueError: ``begin`` raises it for flags that do not fit the batch.
        """
        spec = MaskSpec(
            score="none", through=through, reinforced_only=False, kept_advantage=kept_advantage, negative_scale=negative_scale
        )
        return MaskRoute(spec, None, l1=l1, flags=flags)

    @staticmethod
    @checked
    def from_pairs(pairs: PairBatch, spec: MaskSpec | None = None, *, l1: float = 0.0) -> "MaskRoute":
        """Route by the persona direction of contrast pairs, in the features that ``spec`` scores (``None``: ``MaskSpec()``).

        Raises:
            ValueError: The spec compares with no direction, or with that of a control.
        """
        spec = MaskSpec() if spec is None else spec
        if spec.score not in ("act", "grad", "full"):
            raise ValueError(
                f"score={spec.score!r} compares with no direction: use score='act', 'grad' or 'full', or MaskRoute(spec, None)"
            )
        if spec.fitter != "persona":
            raise ValueError(f"fitter={spec.fitter!r} is a control: use MaskRoute(spec, fitter) with the fitter that draws it")
        return MaskRoute(spec, PersonaFitter("persona", spec.score, pairs), l1=l1)

    def _given_flags(self, batch: TrainBatch) -> Tensor:
        """Return the user's flags; ``ValueError`` if they do not fit the batch."""
        flags = self._given(batch) if callable(self._given) else self._given
        by_rollout, by_token = batch.rollouts.tokens.shape[:1], batch.rollouts.tokens.shape
        if not isinstance(flags, Tensor) or flags.dtype != torch.bool:
            found = f"of {flags.dtype}" if isinstance(flags, Tensor) else f"a {type(flags).__name__}"
            raise ValueError(f"flags must be a tensor of torch.bool, True if the kept adapter must learn nothing, not {found}")
        if flags.shape not in (by_rollout, by_token):
            raise ValueError(
                f"flags have shape {list(flags.shape)}: give one per rollout, {list(by_rollout)}, or per token, {list(by_token)}"
            )
        if flags.ndim == 2 and self.spec.kept_advantage == "unflagged":
            raise ValueError("kept_advantage='unflagged' counts the rollouts without a flag: give one flag per rollout")
        return flags.to(batch.rollouts.tokens.device)

    @checked
    def refresh(self, policy: Policy, step: int) -> float | None:
        if self._fitter is None:
            return None
        self.directions, overlap = refit(self.directions, self._fitter, self.spec.refresh_every, policy, step)
        check_kind(self.directions, self.spec.score)
        return overlap

    @checked
    def begin(self, policy: Policy, batch: TrainBatch, context: StepContext) -> RouteStep:
        if self.spec.needs_direction and self.directions is None:
            raise RuntimeError("the route has no direction yet: call route.refresh(policy, step) before the first step")
        check_step(self.spec, batch, context)
        if self.spec.decided_at == "finish":
            _refuse_hooked(policy.adapters.kept_parameters())
        self._check_directions(policy)
        spec, indices = self.spec, chunks(batch, context.micro)
        if spec.shuffle and spec.decided_at == "backward" and len(indices) > 1:
            raise ValueError(
                "these flags are decided per micro-batch and would be shuffled only within it, which is not a valid control: use "
                "micro=None, or unit='pooled' with score_policy='ablated'"
            )
        scores, flags = self._early(policy, batch, context)
        kept = kept_advantages(spec, batch, flags)
        # Two adapters with different advantages each need their own backward; otherwise one backward serves both.
        split = spec.kept_advantage == "unflagged" and policy.adapters.has_quarantine
        skips = not any(watched(branch.hook_mask) for branch in policy.adapters.sites.values()) and not several_ranks()
        micro_batches: list[MicroBatch] = []
        gates: list[MaskGate] = []
        skipped = False
        for index in indices:
            piece = batch.rows(index)
            tape = partial(Tape, *piece.rollouts.tokens.shape, real=piece.rollouts.attention)
            # the penalty is a mean over rollouts, so a micro-batch adds its share
            l1 = self.l1 * len(piece.rollouts) / len(batch.rollouts)
            reader = self._reader(policy, piece.rollouts)
            advantages = None if kept is None else kept[index]
            gate = MaskGate(
                spec,
                piece,
                advantages,
                context.generator,
                directions=self.directions,
                known=None if flags is None else flags[index],
                pooled_scores=None if scores is None else scores[index],
                reader=reader,
            )
            gates.append(gate)
            if split:
                for_quarantine = tape(kept=LearnNothing(gate if gate.detach else None), l1=l1)
                micro_batches.append(MicroBatch(piece, for_quarantine, piece.advantages))
                # A backward that is weighted by 0 is left out, unless other ranks would wait for its forward.
                if skips and flags is not None and bool(flags[index].all()):
                    skipped = True
                else:
                    micro_batches.append(MicroBatch(piece, tape(kept=gate, quarantine=LearnNothing()), advantages))
            else:
                full = isinstance(reader, FullGradientReader)
                read = {"outputs": reader} if full else {"inputs": reader}
                micro_batches.append(MicroBatch(piece, tape(kept=gate, l1=l1, **read), advantages))
        return _MaskStep(spec, policy, micro_batches, gradients_before(policy.adapters), gates, skipped, context.generator)

    def _basis_of(self, policy: Policy) -> dict[str, Tensor]:
        """Return ``Vh`` at every site, which activation directions need."""
        return policy.adapters.coordinates() if self.spec.score == "act" else {}

    def _check_directions(self, policy: Policy) -> None:
        """Raise ``ValueError`` if directions that were not checked yet do not fit the policy."""
        if self.directions is None or not self.spec.needs_direction:
            return
        basis = self._basis_of(policy)
        # directions are in the coordinates of one base weight, and mean nothing in those of another
        fits = (self.directions, policy.adapters, basis if self._kind == "act" else None)
        if tuple(map(id, self._fits)) != tuple(map(id, fits)):
            check_directions(self.directions, self._kind, policy.adapters, basis)
            self._fits = fits

    def _early(self, policy: Policy, batch: TrainBatch, context: StepContext) -> tuple[Tensor | None, Tensor | None]:
        """Return pooled scores and flags, if they are known before the loss."""
        spec, b = self.spec, len(batch.rollouts)
        scores = None
        if self._given is not None:
            flags = self._given_flags(batch)
        elif spec.score == "none":
            flags = torch.zeros(b, dtype=torch.bool, device=batch.rollouts.tokens.device)
        elif spec.score == "judge":
            if context.scores is None:
                raise ValueError("score='judge' needs the scores of a judge (StepContext.scores)")
            scores = context.scores.to(batch.rollouts.tokens.device)
            flags = decide(scores, spec, batch.advantages, batch.rollouts.attention)
        elif spec.privileged:
            if context.privileged is None:
                raise ValueError(f"score={spec.score!r} needs the marked detector verdicts (StepContext.privileged)")
            by_own_channel = spec.score == "own_channel"
            flags = context.privileged.own_channel if by_own_channel else context.privileged.known_channel
            flags = flags.to(batch.rollouts.tokens.device)
            flags = flags & (batch.demand("advantages", "reinforced_only") > 0) if spec.reinforced_only else flags
        elif spec.decided_at == "begin":
            pieces = [self.score(policy, batch.rollouts.rows(index)) for index in chunks(batch, context.micro)]
            scores = torch.cat([p for p in pieces if p is not None])
            flags = decide(scores, spec, batch.advantages, batch.rollouts.attention)
        else:
            return None, None
        return scores, shuffled(flags, context.generator) if spec.shuffle else flags

    def _reader(self, policy: Policy, rollouts: Rollouts) -> TokenReader | ActivationReader | FullGradientReader | None:
        """Return the reader of a micro-batch's features; ``None`` if flags are known, or are of the gradients that a gate gets."""
        spec, directions = self.spec, self.directions
        if spec.decided_at == "begin" or spec.score == "grad":
            return None
        assert directions is not None
        if spec.score == "full":
            return FullGradientReader(directions.vectors)
        basis = self._basis_of(policy)
        return (
            TokenReader(rollouts.attention, basis, directions)
            if spec.unit == "token"
            else ActivationReader(rollouts.predictors, basis)
        )

    @property
    def _kind(self) -> FeatureKind:
        assert self.spec.score in ("act", "grad", "full")
        return self.spec.score

    @checked
    def score(self, policy: Policy, rollouts: Rollouts) -> Float[Tensor, " b"] | None:
        if self.directions is None or not self.spec.needs_direction:
            return None
        self._check_directions(policy)
        features = collect(policy, rollouts, self._kind, self._basis_of(policy), self.directions.vectors)
        return pooled(features, self.directions)
