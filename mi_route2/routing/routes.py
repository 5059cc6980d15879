"""Routes: which gradients of one batch reach the kept adapter.

    decision = route.backward(policy, batch, loss_fn, context)     # now every .grad is final

is short for

    step = route.begin(policy, batch, context)
    for micro_batch in step.micro_batches:        # two of the same rollouts if the adapters learn from different advantages
        with policy.adapters.recording(micro_batch.tape):
            loss(micro_batch.batch, micro_batch.advantages).backward()
    decision = step.finish()                      # now every .grad is final

State is explicit: a route's directions are in ``route.directions`` (saved with a checkpoint); all other state is in the step, but
for the calibration of a canary, which the first ``refresh`` computes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float
from torch import Tensor, nn

from mi_route2.adapters.attach import Adapters
from mi_route2.adapters.gradients import exact
from mi_route2.adapters.linear import SharedQuarantine
from mi_route2.adapters.tape import LearnNothing, Tape, demand_penalty
from mi_route2.checks import all_finite, checked, on_host
from mi_route2.rollouts import Policy, Privileged, Rollouts, TrainBatch
from mi_route2.routing.directions import Directions, FeatureKind, Fitter, PairBatch, TopKFitter, feature_shapes
from mi_route2.specs import EraseSpec, OpenSpec, RouteSpec

Reduce = Callable[[Sequence[Tensor]], None]
"""Sums gradients over data-parallel ranks, in place."""
Loss = Callable[[Tensor, TrainBatch], Tensor]
"""Function from logits ``[b s v]`` and their batch to a loss: one number, or one per rollout or token, which are summed."""


@dataclass(frozen=True)
class MicroBatch:
    """One forward and backward: the rollouts, the tape to open, and the advantages for the loss, if the batch has any."""

    batch: TrainBatch
    tape: Tape
    advantages: Float[Tensor, " b"] | None


@dataclass(frozen=True)
class Decision:
    """Scores and flags of a route in one step.

    Attributes:
        scores: Per rollout, if the route scores.
        flags: Per rollout; the majority over modules and tokens if the unit is finer.
        extra: Further numbers to report.
    """

    scores: Float[Tensor, " b"] | None = None
    flags: Bool[Tensor, " b"] | None = None
    extra: dict[str, float] = field(default_factory=dict)


@checked
@dataclass(frozen=True)
class StepContext:
    """Context of a step besides the batch.

    Attributes:
        generator: Source of random choices (shuffled flags).
        micro: Number of rollouts in a micro-batch; ``None`` for the whole batch at once.
        privileged: Detector verdicts, for privileged routes only.
        scores: Scores of a judge, for ``MaskSpec(score="judge")``: it reads prompts and answers, and no grade.

    Raises:
        ValueError: ``micro`` is less than 1.

    Examples:
        >>> context = StepContext(torch.Generator().manual_seed(0), micro=2)
        >>> decision = route.backward(policy, batch, loss_fn, context)
    """

    generator: torch.Generator
    micro: int | None = None
    privileged: Privileged | None = None
    scores: Float[Tensor, " b"] | None = None

    def __post_init__(self) -> None:
        if self.micro is not None and self.micro < 1:
            raise ValueError(f"micro must be a number of rollouts, at least 1, or None for all at once, not {self.micro}")


def chunks(batch: TrainBatch, micro: int | None) -> list[Tensor]:
    """Return the indices of the micro-batches, in order."""
    return list(torch.arange(len(batch.rollouts)).split(micro or len(batch.rollouts)))


def pieces(batch: TrainBatch, micro: int | None) -> list[TrainBatch]:
    """Return the micro-batches, in order."""
    return [batch.rows(index) for index in chunks(batch, micro)]


@runtime_checkable
class RouteStep(Protocol):
    """One batch under a route."""

    micro_batches: list[MicroBatch]

    def settle(self, micro_batch: MicroBatch) -> None:
        """Release the stored tensors of a micro-batch after its backward, if its flags need no other; optional, to save memory."""
        ...

    def finish(self, reduce: Reduce | None = None) -> Decision:
        """Make every gradient final; call once, after the last backward. ``reduce`` sums the gradients over ranks."""
        ...


@runtime_checkable
class Route(Protocol):
    """Protocol of routes, which decide per token or rollout what the kept adapter may learn.

    Examples:
        >>> isinstance(route, Route)  # a mask, erase or open route, or your own
        True
    """

    @property
    def spec(self) -> RouteSpec: ...

    directions: Directions | None

    def refresh(self, policy: Policy, step: int) -> float | None:
        """Fit the directions if a refresh is due; return the overlap with the previous ones, ``None`` if nothing was refitted."""
        ...

    def begin(self, policy: Policy, batch: TrainBatch, context: StepContext) -> RouteStep:
        """Start a step. Micro-batches change the memory use and nothing else."""
        ...

    def backward(
        self,
        policy: Policy,
        batch: TrainBatch,
        loss_fn: Loss,
        context: StepContext | None = None,
        *,
        reduction: Literal["sum"] | None = None,
        reduce: Reduce | None = None,
    ) -> Decision:
        """Run a whole step except for the optimizer's: ``begin``, a forward and backward per micro-batch, and ``finish``."""
        ...

    def score(self, policy: Policy, rollouts: Rollouts) -> Float[Tensor, " b"] | None:
        """Return the route's scores of rollouts outside of training (advantage 1), for recorders."""
        ...

    def after_update(self, update: dict[str, Tensor]) -> dict[str, float]:
        """Return the route's report on an optimizer step; ``update[site]`` is the change of the scored kept factor."""
        ...


def refit(directions: Directions | None, fitter: Fitter, every: int, policy: Policy, step: int) -> tuple[Directions, float | None]:
    """Return new directions and their overlap with the old ones if a refit is due; otherwise the old ones and ``None``."""
    if directions is None:
        return fitter.fit(policy, step), None
    if every == 0 or step % every != 0 or not fitter.refreshes:
        return directions, None
    fresh = fitter.fit(policy, step)
    return fresh, fresh.overlap(directions)


def check_kind(directions: Directions, kind: str) -> None:
    """Raise ``ValueError`` for directions of another kind of feature, because their shapes may be equal."""
    if directions.provenance.kind != kind:
        raise ValueError(f"this route needs directions of {kind!r} features, but has those of {directions.provenance.kind!r} ones")


def check_directions(
    directions: Directions, kind: FeatureKind, adapters: Adapters, basis: Mapping[str, Tensor], *, axes: bool = False
) -> None:
    """Raise ``ValueError`` if ``directions``, which anybody may set, are not directions of these adapters' features.

    Args:
        directions: one vector per site, or orthonormal ``axes [k, *feature]``.
        kind: the features.
        adapters: the adapters that are routed.
        basis: the coordinates of activations; empty for other features.
        axes: True for a route that projects.
    """
    check_kind(directions, kind)
    again = "set route.directions = None and fit them with route.refresh(policy, step)"
    if (fitted := directions.provenance.base_hash) != (current := adapters.known_hash):
        raise ValueError(f"the directions belong to base weights {fitted[:12]!r}, but this policy has {current[:12]!r}: {again}")
    shapes = feature_shapes(adapters, kind, basis)
    if missing := sorted(shapes.keys() ^ directions.vectors.keys()):
        raise ValueError(f"there is a direction without an adapter, or the reverse, at {', '.join(missing)}: {again}")
    finite = all_finite(directions.vectors)
    for site, shape in shapes.items():
        v = directions.vectors[site]
        if v.shape[axes:] != shape or v.ndim != len(shape) + axes or not (finite or v.isfinite().all()):
            raise ValueError(f"the direction at {site} is {list(v.shape)} or not finite, not {['k'] * axes + list(shape)}: {again}")


def check_step(spec: RouteSpec, batch: TrainBatch, context: StepContext) -> None:
    """Check the context of a step.

    Raises:
        TypeError: Detector verdicts are given to a route that is a method and not privileged (that would be cheating).
        ValueError: There is not one verdict, or not one score of a judge, per rollout.
    """
    if context.scores is not None and len(context.scores) != len(batch.rollouts):
        raise ValueError(f"there are {len(context.scores)} scores, but the batch has {len(batch.rollouts)} rollouts: give one each")
    if context.privileged is None:
        return
    if not spec.privileged:
        raise TypeError("this route is a method: it must not see detector verdicts over the student's rollouts")
    if (count := len(context.privileged.own_channel)) != len(batch.rollouts):
        raise ValueError(f"there are verdicts on {count} rollouts, but the batch has {len(batch.rollouts)}: give one each")


def trained_gradients(*named: Mapping[str, nn.Parameter]) -> list[Tensor]:
    """Return the ``.grad`` of every trainable parameter, set to 0 if missing: a reduction needs the same tensors from each rank.

    Frozen parameters are left out, because a gradient of 0 would still let an optimizer's momentum or weight decay change them.
    """
    gradients = []
    for p in (p for parameters in named for p in parameters.values() if p.requires_grad):
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        gradients.append(p.grad)
    return gradients


class OneCall:
    """Mixin of routes: a whole step in one call, and for routes that need no other, no scores and no report on an update."""

    @checked
    def score(self, policy: Policy, rollouts: Rollouts) -> Float[Tensor, " b"] | None:
        return None

    def after_update(self, update: dict[str, Tensor]) -> dict[str, float]:
        return {}

    @checked
    def backward(
        self: Route,
        policy: Policy,
        batch: TrainBatch,
        loss_fn: Loss,
        context: StepContext | None = None,
        *,
        reduction: Literal["sum"] | None = None,
        reduce: Reduce | None = None,
    ) -> Decision:
        """Add a step's gradients to every adapter's ``.grad`` as the route decides; the same as ``begin`` to ``finish`` by hand.

        Args:
            policy: the model with its adapters.
            batch: the rollouts.
            loss_fn: called as ``loss_fn(logits, batch)`` for each micro-batch of the step, with its advantages in
                ``batch.advantages``. It returns the loss of each rollout ``[b]`` or token ``[b s]``, which is summed.
            reduction: ``sum`` if ``loss_fn`` returns one number that is a sum over rollouts. (A mean would give a rollout
                more weight in a smaller micro-batch.)
            context: the size of a micro-batch, a generator, verdicts for privileged routes; by default one forward, and torch's
                global generator.
            reduce: sums the gradients over ranks.

        Raises:
            ValueError: A loss of another shape, or one without a gradient.

        After any error the gradients of the micro-batches that had run stay: call zero_grad() before another try.
        """
        step = self.begin(policy, batch, context or StepContext(torch.default_generator))
        for micro_batch in step.micro_batches:
            with policy.adapters.recording(micro_batch.tape):
                scored = replace(micro_batch.batch, advantages=micro_batch.advantages)
                loss = summed(loss_fn(policy.logits(scored.rollouts), scored), scored, reduction)
                loss.backward()
            step.settle(micro_batch)
        return step.finish(reduce)


def summed(loss: object, batch: TrainBatch, reduction: Literal["sum"] | None = None) -> Tensor:
    """Return the loss of a user's loss function as one number.

    ``ValueError`` for another shape, one number that nobody called a sum, or a loss without a gradient.
    """
    if isinstance(loss, Tensor) and loss.ndim == 0 and reduction is None:
        raise ValueError(
            "loss_fn returned one number, which may be a mean, and a mean weighs rollouts by the size of their micro-batch: return "
            "one number per rollout, or give reduction='sum' if it is a sum over rollouts"
        )
    shapes = ((), (len(batch.rollouts),), tuple(batch.rollouts.tokens.shape))
    if not isinstance(loss, Tensor) or tuple(loss.shape) not in shapes:
        found = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise ValueError(
            f"loss_fn returned {found}: return one number, one per rollout {list(shapes[1])} or one per token {list(shapes[2])}"
        )
    if not loss.requires_grad:
        raise ValueError(
            "loss_fn returned a loss without a gradient: compute it from the given logits, without detach(), call backward "
            "outside of torch.no_grad(), and freeze no more than some of the adapters"
        )
    return loss if loss.ndim == 0 else loss.sum()


REDUCING = "the reduction over ranks"


Before = Mapping[nn.Parameter, Tensor]
"""Parameter -> its gradient before a step, if that is not 0; the backward of the step adds to these very tensors."""


def gradients_before(adapters: Adapters) -> Before:
    """Return the gradients before a step; ``RuntimeError`` if the quarantine is off, or processes have different adapters."""
    adapters.demand_replicated()
    if adapters.has_quarantine and adapters.mode != "full":
        raise RuntimeError(
            "the quarantine is off, so the kept adapter would learn in its place: leave adapters.deployed() before the step"
        )
    trained = (*adapters.kept_parameters().values(), *adapters.quarantine_parameters().values())
    earlier = {p: p.grad for p in trained if p.grad is not None}
    return {p: grad for (p, grad), left in zip(earlier.items(), on_host([grad.any() for grad in earlier.values()])) if left}


def several_ranks() -> bool:
    """Return whether processes train together: each of them then needs as many forwards as the others."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def sum_over_ranks(gradients: Sequence[Tensor]) -> None:
    """Replace each tensor by its sum over all ranks (one all-reduce of a flat buffer); shapes must be equal on every rank."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("sum_over_ranks needs an initialized process group (torch.distributed.init_process_group)")
    flat = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(flat)
    for g, piece in zip(gradients, flat.split([g.numel() for g in gradients])):
        g.copy_(piece.view_as(g))


class Once:
    """Mixin whose ``finish`` works once, because a second call would sum over ranks, or erase, twice."""

    _finished = False
    _before: Before

    def settle(self, micro_batch: MicroBatch) -> None:
        return None

    def _finish(self, micro_batches: Sequence[MicroBatch], adapters: Adapters, *, acts: str = "") -> None:
        """Check that the step may be finished now; ``acts`` names what will be done to whole gradients, if anything.

        Raises:
            RuntimeError: A second call, activations of a second forward among the scores, gradients from before the step on which
                the step would act too, or a micro-batch whose backward did not run yet (``finish`` may be called again after it).
        """
        if self._finished:
            raise RuntimeError("finish() was already called for this step: it would count its gradients twice")
        for micro_batch in micro_batches:
            micro_batch.tape.assert_fired(adapters.sites, backward=True)
            micro_batch.tape.assert_read_once()
        if acts and any(p.grad is earlier for p, earlier in self._before.items()):
            raise RuntimeError(
                f"the adapters already had gradients when this step began, and {acts} would act on the sum: call zero_grad() "
                "before begin(), and give rollouts that are to be accumulated to one step, with StepContext(micro=...)"
            )
        self._finished = True


class _OpenStep(Once):
    def __init__(self, policy: Policy, micro_batches: list[MicroBatch], before: Before):
        self._policy, self.micro_batches, self._before = policy, micro_batches, before

    def finish(self, reduce: Reduce | None = None) -> Decision:
        self._finish(self.micro_batches, self._policy.adapters, acts="" if reduce is None else REDUCING)
        if reduce is not None:
            reduce(trained_gradients(self._policy.adapters.kept_parameters(), self._policy.adapters.quarantine_parameters()))
        return Decision()


@checked
class OpenRoute(OneCall):
    """Route without a rule: every adapter learns everything (vanilla; absorb, if there is a quarantine to delete).

    Examples:
        >>> decision = OpenRoute(OpenSpec()).backward(policy, batch, loss_fn)
        >>> decision.flags is None
        True
    """

    directions: Directions | None = None

    def __init__(self, spec: OpenSpec, l1: float = 0.0):
        demand_penalty(l1)
        self.spec, self._l1 = spec, l1

    @checked
    def refresh(self, policy: Policy, step: int) -> float | None:
        return None

    @checked
    def begin(self, policy: Policy, batch: TrainBatch, context: StepContext) -> RouteStep:
        check_step(self.spec, batch, context)
        micro_batches = []
        for piece in pieces(batch, context.micro):
            # The penalty is a mean over rollouts, so a micro-batch adds its share.
            l1 = self._l1 * len(piece.rollouts) / len(batch.rollouts)
            tape = Tape(*piece.rollouts.tokens.shape, l1=l1, real=piece.rollouts.attention)
            micro_batches.append(MicroBatch(piece, tape, piece.advantages))
        return _OpenStep(policy, micro_batches, gradients_before(policy.adapters))


def _share(squares: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Return the norm of a part as a share of the whole's, from the squares of both at every site."""
    numbers = on_host([t for pair in squares for t in pair])
    part, whole = sum(numbers[::2]), sum(numbers[1::2])
    return (part / whole) ** 0.5 if whole > 0 else 0.0


@exact()
def hack_component(gradient: Tensor, axes: Tensor) -> Tensor:
    """Return ``relu(V g) V``: the part of ``gradient`` along the orthonormal ``axes [k, *shape]`` that points hack-ward."""
    flat = axes.flatten(1)
    return ((flat @ gradient.flatten()).clamp_min(0) @ flat).view_as(gradient)


class _EraseStep(Once):
    def __init__(self, route: "EraseRoute", policy: Policy, micro_batches: list[MicroBatch], before: Before):
        self._route, self._policy, self.micro_batches, self._before = route, policy, micro_batches, before

    def finish(self, reduce: Reduce | None = None) -> Decision:
        adapters, directions = self._policy.adapters, self._route.directions
        self._finish(self.micro_batches, adapters, acts="removing a component")
        assert directions is not None
        if reduce is not None:  # before erasing, because the component of a sum is not the sum of the components
            reduce(trained_gradients(adapters.kept_parameters()))
        squares: list[tuple[Tensor, Tensor]] = []
        for site, axes in directions.vectors.items():
            p = adapters.scored(site)
            if p.grad is None:
                raise RuntimeError(f"{site} has no gradient to erase from: call finish() after the backward")
            part = hack_component(p.grad, axes.to(p.grad))
            squares.append((part.square().sum(), p.grad.square().sum()))
            p.grad = p.grad - part
            if self._route.spec.dispose == "quarantine":
                quarantine = adapters.sites[site].quarantine
                assert isinstance(quarantine, SharedQuarantine)
                shared = quarantine.shared
                if shared.requires_grad:  # an optimizer would change a frozen one that has a gradient
                    shared.grad = part if shared.grad is None else shared.grad + part
        return Decision(extra={"removed": _share(squares)})


@checked
class EraseRoute(OneCall):
    """Route that removes the hack component from the summed kept gradient, and drops it or adds it to a shared-basis quarantine.

    Examples:
        >>> route = EraseRoute(EraseSpec(k=3), TopKFitter("grad", pairs, k=3))
    """

    def __init__(self, spec: EraseSpec, fitter: Fitter):
        self.spec, self._fitter = spec, fitter
        self.directions: Directions | None = None
        self._fits: tuple[object, object] = (None, None)  # the directions and adapters that were checked last

    @staticmethod
    @checked
    def from_pairs(pairs: PairBatch, spec: EraseSpec | None = None) -> "EraseRoute":
        """Erase the leading directions of contrast pairs from the kept gradient (``None``: ``EraseSpec()``).

        Raises:
            ValueError: The spec's fitter is a control.

        Example:
            >>> EraseRoute.from_pairs(pairs, EraseSpec(k=1))  # doctest: +SKIP
        """
        spec = EraseSpec() if spec is None else spec
        if spec.fitter != "persona":
            raise ValueError(f"fitter={spec.fitter!r} is a control: use EraseRoute(spec, fitter) with the fitter that draws it")
        return EraseRoute(spec, TopKFitter("grad", pairs, k=spec.k))

    @checked
    def refresh(self, policy: Policy, step: int) -> float | None:
        # The number of axes may change, so a top-k refresh reports no overlap.
        every, due = self.spec.refresh_every, self._fitter.refreshes
        if self.directions is None or (due and every and step % every == 0):
            self.directions = self._fitter.fit(policy, step)
        check_kind(self.directions, "grad")
        return None

    @checked
    def begin(self, policy: Policy, batch: TrainBatch, context: StepContext) -> RouteStep:
        check_step(self.spec, batch, context)
        if self.directions is None:
            raise RuntimeError("the route has no direction yet: call route.refresh(policy, step) before the first step")
        if self.spec.dispose == "quarantine" and policy.adapters.spec.quarantine != "shared":
            raise ValueError("dispose='quarantine' needs the shared-basis quarantine: AdapterSpec(quarantine='shared')")
        if self._fits[0] is not self.directions or self._fits[1] is not policy.adapters:
            check_directions(self.directions, "grad", policy.adapters, {}, axes=True)
            self._fits = self.directions, policy.adapters
        if frozen := [site for site in self.directions.vectors if not policy.adapters.scored(site).requires_grad]:
            raise ValueError(
                f"the kept adapter of {frozen[0]} is frozen, so there is no gradient to erase from: call requires_grad_(True) on "
                "its parameters, or leave this Linear out of the patterns of attach"
            )
        # The quarantine of the additive form learns only the removed part, so its own gradient is discarded.
        micro_batches = [
            MicroBatch(
                piece,
                Tape(*piece.rollouts.tokens.shape, quarantine=LearnNothing(), real=piece.rollouts.attention),
                piece.advantages,
            )
            for piece in pieces(batch, context.micro)
        ]
        return _EraseStep(self, policy, micro_batches, gradients_before(policy.adapters))

    def after_update(self, update: dict[str, Tensor]) -> dict[str, float]:
        """Return the share of the update that still points hack-ward, which Adam's momentum and scaling let through."""
        assert self.directions is not None
        squares = [
            (hack_component(-(delta := update[site]), axes.to(delta)).square().sum(), delta.square().sum())
            for site, axes in self.directions.vectors.items()
        ]
        return {"update_residual": _share(squares)}
