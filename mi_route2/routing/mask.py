"""Mask routes, which select the rollouts or tokens from which the kept adapter learns nothing.

    s_b^m  = cos(f_b^m, v^m)                       score of rollout b at module m;  pooled: s_b = mean_m s_b^m
    flag_b = s_b > tau  and  A_b > 0               A_b > 0 only if ``reinforced_only``
    mask_b = 1 - flag_b                            hooks at ``hook_mask`` may replace it
    w_b    = mask_b * (eta if K_b < 0 else 1)      K: the kept advantage, eta: ``negative_scale``
    kept gradient = sum_b w_b g_b

Scores, flags and weights are the pure functions below. Specs differ in when a score is known (``MaskSpec.decided_at``). All state
that must be kept until then is in a ``MaskGate``, one per micro-batch.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn

from mi_route2.adapters.gradients import NOISE, FactorGradient, Feature, Written, added, compact, exact, rounding, wide
from mi_route2.adapters.linear import watched
from mi_route2.adapters.tape import Hooks, LearnNothing, Tape, demand_penalty
from mi_route2.checks import checked
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
    floors,
)
from mi_route2.routing.optimizer import several_ranks
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
    masks_asked,
    refit,
    trained_gradients,
)
from mi_route2.specs import MaskSpec, Through

Scores = Float[Tensor, " b"] | Float[Tensor, "b s"]
Flags = Bool[Tensor, " b"] | Bool[Tensor, "b s"]
Mask = Shaped[Tensor, " b"] | Shaped[Tensor, "b s"]
"""1 if the adapter learns, 0 if flagged; hooks may return any dtype and any value in between."""


# ---- pure functions: scores -> flags -> weights


@exact()
def cosine(feature: Feature, v: Tensor, floor: Float[Tensor, " b"] | None = None) -> Float[Tensor, " b"]:
    """Return ``cos(f_b, v)``; 0 if the feature is 0 or within rounding errors of 0 (its norm is at most ``floor``)."""
    return _cosine(feature.inner(v), feature.norms(), v.norm(), rounding([feature]) if floor is None else floor)


def _cosine(inner: Tensor, norms: Tensor, size: Tensor, floor: Tensor) -> Tensor:
    none = norms <= floor  # so that NaN stays NaN, which ``decide`` refuses
    return torch.where(none, torch.zeros_like(inner), inner / torch.where(none, torch.ones_like(norms), norms * size))


@exact()
def module_scores(features: Features, directions: Directions) -> dict[str, Float[Tensor, " b"]]:
    """Return ``s_b^m = cos(f_b^m, v^m)`` for every module m with a direction; ``RuntimeError`` if a module has no feature."""
    missing = directions.vectors.keys() - features.keys()
    if missing:
        raise RuntimeError(f"no feature arrived from {', '.join(sorted(missing))}, so a pooled score would miss these modules")
    floor = floors(features, directions.provenance.kind)
    sites = sorted(directions.vectors)  # so that directions read from a file give the same pooled sum bit for bit
    vectors = [directions.vectors[site] for site in sites]
    inner, norms = [features[site].inner(v) for site, v in zip(sites, vectors)], [features[site].norms() for site in sites]
    each, sizes = [floor[site] for site in sites], [v.norm() for v in vectors]
    if any(len({t.dtype for t in part}) > 1 for part in (inner, norms, each)):  # a stack would compute in the widest type
        return {site: _cosine(*one) for site, *one in zip(sites, inner, norms, sizes, each)}
    # of all modules at once: on a GPU a step takes as long as it takes to launch its kernels
    size = torch.stack(sizes).to(norms[0])[:, None]
    return dict(zip(sites, _cosine(torch.stack(inner), torch.stack(norms), size, torch.stack(each))))


def pooled(features: Features, directions: Directions) -> Float[Tensor, " b"]:
    """Return ``s_b = mean_m cos(f_b^m, v^m)``."""
    return torch.stack(list(module_scores(features, directions).values())).mean(dim=0)


def token_scores(
    x: Float[Tensor, "b s d_in"], predictors: Bool[Tensor, "b s"], Vh: Float[Tensor, "r d_in"], v: Float[Tensor, " r"]
) -> Float[Tensor, "b s"]:
    """Return ``s_bt = cos(Vh x_bt, v)`` on predictors, 0 if ``Vh x_bt`` is within rounding errors of 0, and -1 elsewhere."""
    # torch.where and not a product, because padding may hold any value, NaN included
    x = torch.where(predictors[..., None], x, torch.zeros_like(x)).to(wide(x.dtype))
    # Division by a power of two changes no bit of a cosine, and keeps the squares of very large or small activations in range.
    largest = x.abs().amax(dim=-1, keepdim=True)
    mantissa = largest.frexp().mantissa
    x = x / torch.where(mantissa > 0, largest / (2 * mantissa), torch.ones_like(largest))
    a = x @ Vh.to(x).mT
    scores = torch.nn.functional.cosine_similarity(a, v.to(x).expand_as(a), dim=-1, eps=0.0)
    noise = NOISE * torch.finfo(x.dtype).eps
    scores = torch.where(a.norm(dim=-1) <= noise * x.norm(dim=-1), torch.zeros_like(scores), scores)
    return torch.where(predictors, scores, torch.full_like(scores, -1.0))


def decide(scores: Scores, spec: MaskSpec, advantages: Float[Tensor, " b"], predictors: Bool[Tensor, "b s"]) -> Flags:
    """Return ``flag_b = s_b > tau and A_b > 0`` (the advantage only if ``reinforced_only``); token flags on predictors only.

    Raises:
        ValueError: A score is NaN or infinite.
    """
    if not bool(torch.isfinite(scores).all()):
        rows = (~torch.isfinite(scores)).nonzero()[:, 0].unique().tolist()
        raise ValueError(f"rollouts {rows[:8]} have activations or gradients that are NaN or infinite, so they have no score")
    flags = scores > spec.tau
    if spec.reinforced_only:
        flags &= (advantages > 0) if scores.ndim == 1 else (advantages > 0)[:, None]
    return flags & predictors if scores.ndim == 2 else flags


def shuffled(flags: Tensor, generator: torch.Generator, predictors: Bool[Tensor, "b s"] | None = None) -> Tensor:
    """Return the same flags in random order, a control with as many: over rollouts, or token flags over all ``predictors``."""
    among = torch.ones_like(flags) if flags.ndim == 1 or predictors is None else predictors
    order = torch.randperm(int(among.sum()), generator=generator, device=generator.device).to(flags.device)
    return flags.masked_scatter(among, flags[among][order])


def scales(spec: MaskSpec, advantages: Float[Tensor, " b"]) -> Float[Tensor, " b"]:
    """Return ``eta if K_b < 0 else 1``; ``advantages`` are the kept adapter's, K."""
    ones = torch.ones_like(advantages)  # torch.where of two Python numbers would round ``negative_scale`` to float32
    return torch.where(advantages < 0, spec.negative_scale * ones, ones)


def weigh(mask: Mask, scale: Float[Tensor, " b"]) -> Mask:
    """Return ``w_b = mask_b * scale_b``."""
    return mask * (scale if mask.ndim == 1 else scale[:, None])


def kept_advantages(spec: MaskSpec, batch: TrainBatch, flags: Flags | None) -> Float[Tensor, " b"]:
    """Return ``K_b = A_b``; for ``kept_advantage="unflagged"``, ``R_b - mean(R over the group's unflagged)``, 0 if b is flagged."""
    if spec.kept_advantage == "own":
        return batch.advantages
    assert flags is not None  # the spec requires scores that are known before the loss
    # Flagged hacks raise the group's mean, which would punish its honest failures and push the kept adapter towards hacking.
    counted = group_advantages(batch.rewards, batch.groups, ~flags)
    return torch.where(flags, torch.zeros_like(counted), counted)


def banded(indices: Iterable[Tensor], clean: Bool[Tensor, " b"]) -> list[tuple[Tensor, bool]]:
    """Return each micro-batch as its clean rollouts (True) and the others (False), without empty ones."""
    clean = clean.cpu()
    parted = ((index[clean[index] == is_clean], is_clean) for index in indices for is_clean in (True, False))
    return [(index, is_clean) for index, is_clean in parted if len(index)]


def per_rollout(values: Iterable[Tensor], predictors: Bool[Tensor, "b s"]) -> Float[Tensor, " b"]:
    """Return the mean over modules of values per rollout; values per token are first averaged over predictors."""
    means = [v.double() if v.ndim == 1 else (v.double() * predictors).sum(1) / predictors.sum(1).clamp_min(1) for v in values]
    return torch.stack(means).mean(dim=0)


def hooked(site: str, mask: Tensor, point: Hooks | None) -> tuple[Tensor, bool]:
    """Return ``mask`` after the hooks at the site's mask point, and whether they may have changed it.

    Raises:
        ValueError: They return no mask of its shape.
    """
    writes = None if mask.is_inference() else mask._version
    new = mask if point is None else point(mask)
    if not isinstance(new, Tensor) or new.shape != mask.shape:
        got = f"a mask of shape {list(new.shape)}" if isinstance(new, Tensor) else f"a {type(new).__name__}"
        raise ValueError(f"a hook at {site}.hook_mask returned {got}, not a mask of shape {list(mask.shape)}")
    seen = isinstance(point, nn.Module) and watched(point)  # what a hook there writes through ``.data`` torch does not count
    untouched = new is mask and not seen and writes is not None and writes == mask._version
    if not untouched and not bool(((new >= 0) & (new <= 1)).all()):  # negated, so that NaN fails too
        wrong = new[~((new >= 0) & (new <= 1))][0].item()
        raise ValueError(f"a hook at {site}.hook_mask returned {wrong}, but a mask lies between 0 (flagged) and 1 (learned)")
    return (new, False) if untouched else (new.detach().clone(), True)  # it may be one tensor at every module, with other values


def _refuse_hooked(kept: Mapping[str, nn.Parameter]) -> None:
    """Raise ``ValueError`` for a kept parameter with a gradient hook, which does not fire if gradients wait for flags."""
    if hooked := [name for name, p in kept.items() if p._backward_hooks or p._post_accumulate_grad_hooks]:
        raise ValueError(
            f"{hooked[0]} has a hook on its gradient, which would not fire: pooled live gradient flags are known after it. "
            "Remove it, or use score_policy='ablated' or score='act'"
        )


# ---- the state of a step


class TokenReader:
    """Reader of token scores in the forward; ``scores[site]`` is ``[b, s]``, and -1 at positions that predict nothing."""

    def __init__(self, predictors: Bool[Tensor, "b s"], basis: Mapping[str, Tensor], directions: Directions):
        self._predictors, self._basis, self._directions = predictors, basis, directions
        self.scores: dict[str, Tensor] = {}

    def read(self, site: str, x: Float[Tensor, "b s d_in"]) -> None:
        if site in self.scores:
            raise RuntimeError(f"{site} runs twice in one forward, so its tokens have two scores: use unit='pooled'")
        self.scores[site] = token_scores(x, self._predictors, self._basis[site], self._directions.vectors[site])


class MaskGate:
    """Gate of the kept adapter in one forward and backward, with all state that is kept until the backward ends.

    The mask of a module is decided once, as soon as its score is known (``MaskSpec.decided_at``): in the forward when the module is
    called, in the backward at its first gradient, or by ``settle`` after the backward.

    Args:
        spec: the rule.
        batch: the rollouts of this micro-batch.
        advantages: those that the kept adapter learns from, K.
        generator: draws shuffled flags.
        directions: directions that features are compared with; ``None`` if flags are ``known``.
        known: flags of whole rollouts, if they are known before the forward.
        pooled_scores: the scores of ``known`` flags.
        site_scores: scores by module that are known when the module is called, from an ablated pass or a token reader.
        reader: stores the features of the training pass; ``None`` for ``score="grad"``, whose features the gate receives itself.
        want_unrouted: also sum the gradient without the route.
    """

    def __init__(
        self,
        spec: MaskSpec,
        batch: TrainBatch,
        advantages: Float[Tensor, " b"],
        generator: torch.Generator,
        *,
        directions: Directions | None = None,
        known: Flags | None = None,
        pooled_scores: Float[Tensor, " b"] | None = None,
        site_scores: Mapping[str, Tensor] | None = None,
        reader: ActivationReader | FullGradientReader | None = None,
        want_unrouted: bool = False,
    ):
        self.detach = spec.through == "detach"
        self._spec, self._batch, self._advantages, self._generator = spec, batch, advantages, generator
        self._directions, self._site_scores, self._reader, self._want_unrouted = directions, site_scores, reader, want_unrouted
        self.predictors = batch.rollouts.predictors
        # Decisions: for whole rollouts, and at each module.
        self.known, self.pooled_scores = known, pooled_scores
        self.scores: dict[str, Tensor] = {}
        self.flags: dict[str, Tensor] = {}
        self.masks: dict[str, Tensor] = {}
        self._changed: set[str] = set()
        self.hooked: set[str] = set()  # modules whose mask hooks saw
        # What modules without hooks have in common: the mask of ``known`` flags, and its weights.
        self._common: Tensor | None = None
        self._weights: Tensor | None = None
        # Kept until flags are decided: mask points, scored gradients, the largest magnitude, gradients that wait for a flag.
        self._points: dict[str, Hooks] = {}
        self._gradients: dict[str, FactorGradient | Written] = {}
        self._largest: Tensor | None = None
        self.waiting: dict[tuple[str, str], FactorGradient | Written] = {}
        # Summed for the optimizer's second moment.
        self.unrouted: dict[str, Tensor] = {}

    def called(self, site: str, point: Hooks) -> None:
        """Decide the module's mask if its score is known in the forward.

        Raises:
            RuntimeError: The module runs twice, and the first call would decide a live flag of its own for both.
        """
        if site in self._points and self._spec.score_policy == "live" and self._spec.unit != "pooled":
            raise RuntimeError(
                f"{site} runs twice in one forward, so its first call would decide a live flag that acts on both: use "
                "unit='pooled' or score_policy='ablated' (or, if the forward itself ran twice, one tape for each)"
            )
        self._points[site] = point
        if self._spec.decided_at in ("begin", "forward"):
            self.decide(site)

    def gradient(self, site: str, factor: str, pair: FactorGradient) -> Tensor | None:
        if isinstance(self._reader, ActivationReader):
            self._reader.release()  # the forward is done
        if self._want_unrouted:
            plain, name = pair.weighted(torch.ones_like(self._batch.advantages)), f"{site}.{factor}"
            plain = plain.to(wide(plain.dtype))  # as the parameter's own ``.grad``, which sums micro-batches
            self.unrouted[name] = self.unrouted[name] + plain if name in self.unrouted else plain
        waits, scored = self._spec.decided_at == "finish", self._spec.score == "grad" and factor in SCORED
        # Scored gradients are read three times (inner product, norm, weighted sum), so the product over tokens is computed once.
        small = compact(pair, scored=scored) if waits or scored else pair
        if scored and self._spec.decided_at in ("backward", "finish"):
            self._gradients[site] = added(self._gradients.get(site), small)
        if waits:
            self.waiting[site, factor] = added(self.waiting.get((site, factor)), small)
            return None
        return self.passed(site, small)

    def mask(self, site: str) -> Tensor:
        return self.masks[site]

    def passed(self, site: str, gradient: FactorGradient | Written) -> Tensor:
        """Return ``sum_b w_b g_b`` of one factor; decide the module's mask first if this is its first gradient."""
        self.decide(site)
        mask = self.masks[site]
        if mask is not self._common:
            return gradient.weighted(weigh(mask, self._scales))
        if self._weights is None:
            self._weights = weigh(mask, self._scales)
        return gradient.weighted(self._weights)

    @cached_property
    def _scales(self) -> Float[Tensor, " b"]:
        return scales(self._spec, self._advantages)

    def pooled(self) -> tuple[Float[Tensor, " b"], Bool[Tensor, " b"]]:
        """Return pooled scores and flags of the training pass, after every module has reported; not yet shuffled."""
        assert self._directions is not None
        scores = pooled(self._features, self._directions)
        return scores, decide(scores, self._spec, self._batch.advantages, self.predictors)

    def settle(self, scores: Float[Tensor, " b"], flags: Bool[Tensor, " b"]) -> None:
        """Set the pooled scores and flags, which hold for every module."""
        self.pooled_scores, self.known, self._common, self._weights = scores, flags, None, None

    def release(self) -> None:
        """Drop the gradients that were kept until the flags were decided."""
        self.waiting.clear()
        self._gradients.clear()
        if isinstance(self._reader, FullGradientReader):
            self._reader.features.clear()

    @property
    def overruled(self) -> bool:
        """True if a hook changed a mask."""
        return any(not torch.equal(mask := self.masks[site], (~self.flags[site]).to(mask)) for site in self._changed)

    @property
    def distinct(self) -> list[Tensor]:
        """The modules' masks; one of them if all are one tensor."""
        every = list(self.masks.values())
        return every[:1] if all(mask is every[0] for mask in every) else every

    @property
    def _features(self) -> Features:
        return self._gradients if self._reader is None else self._reader.features

    def decide(self, site: str) -> None:
        """Decide the module's mask, once; the hooks at its mask point run once, and the mask that they return is final."""
        if site in self.masks:
            return
        if self.known is None and self._spec.unit == "pooled":
            scores, flags = self.pooled()
            self.settle(scores, shuffled(flags, self._generator) if self._spec.shuffle else flags)
        point = self._points.get(site)
        if self.known is not None:
            flags = self.known
        else:
            self.scores[site] = self._score(site)
            flags = decide(self.scores[site], self._spec, self._batch.advantages, self.predictors)
            flags = shuffled(flags, self._generator, self.predictors) if self._spec.shuffle else flags
        self.flags[site] = flags
        read = point is not None and (not isinstance(point, nn.Module) or watched(point))  # a hook may write into its mask
        mask = None if read else self._common
        if mask is None:
            mask = (~flags).to(self._batch.advantages.dtype)
        if self.known is not None and not read:
            self._common = mask
        if read:
            self.hooked.add(site)
        self.masks[site], changed = hooked(site, mask, point)
        if changed:
            self._changed.add(site)

    def _score(self, site: str) -> Tensor:
        if self._site_scores is not None:
            return self._site_scores[site]
        assert self._directions is not None
        feature, v = self._features[site], self._directions.vectors[site]
        if self._spec.score == "act":
            return cosine(feature, v)
        self._gradients.pop(site, None)  # the flag of a module is decided once
        # The backward starts at the loss, so rounding errors come only from modules that have already reported.
        size = feature.magnitude()
        self._largest = size if self._largest is None else torch.maximum(self._largest, size)
        return cosine(feature, v, NOISE * torch.finfo(size.dtype).eps * self._largest)


@dataclass(eq=False)
class _MaskStep(Once):
    _spec: MaskSpec
    _policy: Policy
    micro_batches: list[MicroBatch]
    _before: Before
    _gates: list[MaskGate]
    _idle: list[MaskGate]
    _generator: torch.Generator
    _order: Int[Tensor, " b"]

    @exact()
    def finish(self, reduce: Reduce | None = None) -> Decision:
        adapters = self._policy.adapters
        self._finish(self.micro_batches, adapters, masks=True, acts="" if reduce is None else REDUCING)
        kept = adapters.kept_parameters()
        self._settle()
        for gate in self._gates:
            self._assign(gate)
        if self._idle:  # no backward has decided their masks, or left the gradients of 0 that an optimizer counts as a step
            for gate, (site, branch) in product(self._idle, adapters.sites.items()):
                if site not in gate.masks:
                    gate.called(site, branch.hook_mask)
            if any(gate.overruled for gate in self._idle):
                raise RuntimeError(
                    "a hook at hook_mask was put on after the step began, and would let pass what was left out: put it on before"
                )
            trained_gradients(kept)
        self._demand_hooked()
        unrouted: dict[str, Tensor] = {}
        for gate in self._gates:
            for name, g in gate.unrouted.items():
                if kept[name].requires_grad:
                    unrouted[name] = unrouted[name] + g if name in unrouted else g
        if reduce is not None:
            # The unrouted gradients too, or second moments, and then weights, would differ between ranks.
            reduce([*trained_gradients(kept, adapters.quarantine_parameters()), *unrouted.values()])
        return self._decision(unrouted)

    def _demand_hooked(self) -> None:
        """Raise ``RuntimeError`` for a hook that waited at a mask when the mask was not decided."""
        gates = [
            (micro_batch.tape.asked, micro_batch.tape.kept.hooked)
            for micro_batch in self.micro_batches
            if isinstance(micro_batch.tape.kept, MaskGate)
        ]
        silent = set(masks_asked(self.micro_batches, self._policy.adapters)).difference(*(gate.hooked for gate in self._gates))
        if silent := sorted(silent.union(*(asked - hooked for asked, hooked in gates))):
            raise RuntimeError(
                f"hook_mask was hooked at {', '.join(silent)} and did not fire, so the kept adapter learned without it: put it on "
                "before the step, and take it off after finish()"
            )

    @exact()
    def settle(self, micro_batch: MicroBatch) -> None:
        gate = micro_batch.tape.kept
        if self._spec.shuffle or not isinstance(gate, MaskGate) or not gate.waiting:
            return
        gate.settle(*gate.pooled())
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

    def _settle(self) -> None:
        """Decide flags that had to wait for the whole backward; they are shuffled over the batch, not within micro-batches."""
        gates = [gate for gate in self._gates if gate.waiting]
        if not gates:
            return
        scores, flags = zip(*(gate.pooled() for gate in gates))
        whole = torch.cat(flags)
        whole = shuffled(whole, self._generator) if self._spec.shuffle else whole
        for gate, score, gate_flags in zip(gates, scores, whole.split([len(f) for f in flags])):
            gate.settle(score, gate_flags)

    def _decision(self, unrouted: dict[str, Tensor]) -> Decision:
        flagged = [per_rollout([mask == 0 for mask in gate.distinct], gate.predictors) > 0.5 for gate in self._gates]
        values = [[gate.pooled_scores] if gate.pooled_scores is not None else [*gate.scores.values()] for gate in self._gates]
        scores = [per_rollout(each, gate.predictors) for each, gate in zip(values, self._gates)] if all(values) else None
        return Decision(
            scores=None if scores is None else torch.cat(scores)[self._order],
            flags=torch.cat(flagged)[self._order],
            unrouted=unrouted,
            extra={"overruled": 1.0} if any(gate.overruled for gate in self._gates) else {},
        )


# ---- the route


@checked
class MaskRoute(OneCall):
    """Route by masks; see the module's equations.

    Args:
        spec: the rule.
        fitter: gives the directions; ``None`` if the score needs none (channels, none).
        l1: weight of the mean absolute output of the quarantine in the loss.
        want_unrouted: also return the kept gradient that the step would have had without the route.
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
        want_unrouted: bool = False,
        flags: Flags | Callable[[TrainBatch], Tensor] | None = None,
    ):
        demand_penalty(l1)
        if spec.needs_direction and fitter is None:
            raise ValueError(f"score={spec.score!r} compares with a direction, so the route needs a fitter")
        if want_unrouted and (spec.through != "filter" or spec.kept_advantage != "own"):
            raise ValueError(
                "the unrouted gradient exists in the same backward only for through='filter' and kept_advantage='own': detaching, "
                "or another advantage, changes the gradients of all modules below"
            )
        if flags is not None and spec.score != "none":
            raise ValueError(f"score={spec.score!r} computes its own flags: use MaskRoute.from_flags(flags)")
        self.spec, self._fitter, self.l1, self.want_unrouted = spec, fitter, l1, want_unrouted
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
        want_unrouted: bool = False,
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
            want_unrouted: as in ``MaskRoute``.

        Raises:
            ValueError: ``begin`` raises it for flags that do not fit the batch.
        """
        spec = MaskSpec(
            score="none", through=through, reinforced_only=False, kept_advantage=kept_advantage, negative_scale=negative_scale
        )
        return MaskRoute(spec, None, l1=l1, want_unrouted=want_unrouted, flags=flags)

    @staticmethod
    @checked
    def from_pairs(pairs: PairBatch, spec: MaskSpec | None = None, *, l1: float = 0.0, want_unrouted: bool = False) -> "MaskRoute":
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
        return MaskRoute(spec, PersonaFitter("persona", spec.score, pairs), l1=l1, want_unrouted=want_unrouted)

    def _given_flags(self, batch: TrainBatch) -> Tensor:
        """Return the user's flags; ``ValueError`` if they do not fit the batch."""
        flags = self._given(batch) if callable(self._given) else self._given
        by_rollout, by_token = batch.rollouts.tokens.shape[:1], batch.rollouts.tokens.shape
        if not isinstance(flags, Tensor) or flags.dtype != torch.bool:
            kind = f"of {flags.dtype}" if isinstance(flags, Tensor) else f"a {type(flags).__name__}"
            raise ValueError(f"flags must be a tensor of torch.bool, True if the kept adapter must learn nothing, not {kind}")
        if flags.shape not in (by_rollout, by_token):
            raise ValueError(
                f"flags have shape {list(flags.shape)}: give one per rollout, {list(by_rollout)}, or per token, {list(by_token)}"
            )
        if flags.ndim == 2 and self.spec.kept_advantage == "unflagged":
            raise ValueError("kept_advantage='unflagged' counts the rollouts without a flag: give one flag per rollout")
        return flags.to(batch.advantages.device)

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
        spec, indices, clean = self.spec, chunks(batch, context.micro), context.clean
        if clean is not None and not policy.adapters.has_quarantine:
            raise ValueError("clean rollouts are learned without the quarantine, and there is none: leave StepContext.clean out")
        if spec.shuffle and spec.decided_at in ("forward", "backward") and len(indices) > 1:
            raise ValueError(
                "these flags are decided per micro-batch and would be shuffled only within it, which is not a valid control: use "
                "micro=None, or unit='pooled' with score_policy='ablated'"
            )
        scores, flags = self._early(policy, batch, context)
        kept = kept_advantages(spec, batch, flags)
        # Two adapters with different advantages each need their own backward; otherwise one backward serves both.
        split = spec.kept_advantage == "unflagged" and policy.adapters.has_quarantine
        hooked_masks = any(branch.mask_requested for branch in policy.adapters.sites.values())
        micro_batches: list[MicroBatch] = []
        gates: list[MaskGate] = []
        idle: list[MaskGate] = []
        bands = [(index, False) for index in indices] if clean is None else banded(indices, clean)
        for index, is_clean in bands:
            piece = batch.rows(index)
            tape = partial(Tape, *piece.rollouts.tokens.shape, real=piece.rollouts.attention)
            # the penalty is a mean over rollouts, so a micro-batch adds its share
            l1 = self.l1 * len(piece.rollouts) / len(batch.rollouts)
            inputs, outputs, site_scores = self._sources(policy, piece)
            gate = MaskGate(
                spec,
                piece,
                kept[index],
                context.generator,
                directions=self.directions,
                known=None if flags is None else flags[index],
                pooled_scores=None if scores is None else scores[index],
                site_scores=site_scores,
                reader=inputs if isinstance(inputs, ActivationReader) else outputs,
                want_unrouted=self.want_unrouted,
            )
            gates.append(gate)
            if is_clean:
                micro_batches.append(MicroBatch(piece, tape(kept=gate, without_quarantine=True), kept[index]))
            elif split:
                for_quarantine = tape(kept=LearnNothing(gate if gate.detach else None), l1=l1)
                micro_batches.append(MicroBatch(piece, for_quarantine, piece.advantages))
                if flags is not None and bool(flags[index].all()) and not hooked_masks and not several_ranks():
                    idle.append(gate)  # its backward would be weighted by 0; other ranks would wait for its forward
                else:
                    micro_batches.append(MicroBatch(piece, tape(kept=gate, quarantine=LearnNothing()), kept[index]))
            else:
                micro_batches.append(MicroBatch(piece, tape(kept=gate, inputs=inputs, outputs=outputs, l1=l1), kept[index]))
        order = torch.cat([index for index, _ in bands]).argsort()
        return _MaskStep(spec, policy, micro_batches, gradients_before(policy.adapters), gates, idle, context.generator, order)

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
            flags = torch.zeros(b, dtype=torch.bool, device=batch.advantages.device)
        elif spec.privileged:
            if context.privileged is None:
                raise ValueError(f"score={spec.score!r} needs the marked detector verdicts (StepContext.privileged)")
            by_own_channel = spec.score == "own_channel"
            flags = context.privileged.own_channel if by_own_channel else context.privileged.known_channel
            flags = flags.to(batch.advantages.device)
            flags = flags & (batch.advantages > 0) if spec.reinforced_only else flags
        elif spec.decided_at == "begin":
            pieces = [self.score(policy, batch.rollouts.rows(index)) for index in chunks(batch, context.micro)]
            scores = torch.cat([p for p in pieces if p is not None])
            flags = decide(scores, spec, batch.advantages, batch.rollouts.predictors)
        else:
            return None, None
        return scores, shuffled(flags, context.generator) if spec.shuffle else flags

    def _sources(
        self, policy: Policy, piece: TrainBatch
    ) -> tuple[TokenReader | ActivationReader | None, FullGradientReader | None, Mapping[str, Tensor] | None]:
        """Return the source of a micro-batch's flags: a reader of inputs, a reader of outputs, or scores by module."""
        spec, predictors = self.spec, piece.rollouts.predictors
        if spec.decided_at == "begin":
            return None, None, None
        assert self.directions is not None
        basis = self._basis_of(policy)
        if spec.score_policy == "ablated":
            return None, None, module_scores(self._compared(policy, piece.rollouts, basis), self.directions)
        if spec.unit == "token":
            reader = TokenReader(predictors, basis, self.directions)
            return reader, None, reader.scores
        if spec.score == "act":
            return ActivationReader(predictors, basis), None, None
        # for "grad" the gate itself receives factor gradients
        return None, FullGradientReader(self.directions.vectors) if spec.score == "full" else None, None

    @property
    def _kind(self) -> FeatureKind:
        assert self.spec.score in ("act", "grad", "full")
        return self.spec.score

    @checked
    def score(self, policy: Policy, rollouts: Rollouts) -> Float[Tensor, " b"] | None:
        if self.directions is None or not self.spec.needs_direction:
            return None
        self._check_directions(policy)
        return pooled(self._compared(policy, rollouts, self._basis_of(policy)), self.directions)

    def _compared(self, policy: Policy, rollouts: Rollouts, basis: Mapping[str, Tensor]) -> Features:
        assert self.directions is not None
        return collect(policy, rollouts, self._kind, basis, self.directions.vectors)
