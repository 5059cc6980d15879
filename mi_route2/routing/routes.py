"""Routes: what the kept adapter may learn from one batch.

    decision = route.backward(policy, batch, loss_fn, context)     # now every .grad is final

is short for

    step = route.begin(policy, batch, context)
    for part in step.parts:                       # a micro-batch; twice where the adapters learn from different advantages
        with policy.adapters.recording(part.tape):
            loss(part.batch, part.advantages).backward()
    decision = step.finish()                      # now every .grad is final

State is explicit: a route's directions are in ``route.directions`` (saved with a checkpoint); everything else lives in the step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from mi_route2.adapters.attach import Adapters
from mi_route2.adapters.tape import NO_MASK, LearnNothing, Tape
from mi_route2.checks import checked
from mi_route2.rollouts import Policy, Rollouts
from mi_route2.routing.batch import Privileged, TrainBatch
from mi_route2.routing.directions import Directions, Fitter
from mi_route2.routing.spec import EraseSpec, RouteSpec

Reduce = Callable[[Sequence[Tensor]], None]
"""Sums gradients over data-parallel ranks, in place."""
Loss = Callable[[Tensor, TrainBatch], Tensor]
"""From logits ``[b s v]``, and the rollouts that they are of, to a loss: one number, or one a rollout or token to be summed."""


@dataclass(frozen=True)
class Part:
    """One forward and backward: the rollouts, the tape to open, and the advantages to put into the loss."""

    batch: TrainBatch
    tape: Tape
    advantages: Float[Tensor, " b"]


@dataclass(frozen=True)
class Decision:
    """What a route did. ``flags`` is per rollout (the majority over modules and tokens where the unit is finer).

    ``unrouted`` maps a kept parameter's name to the gradient that it would have had without the route, where asked for.
    """

    scores: Float[Tensor, " b"] | None = None
    flags: Bool[Tensor, " b"] | None = None
    unrouted: dict[str, Tensor] = field(default_factory=dict)
    extra: dict[str, float] = field(default_factory=dict)


@checked
@dataclass(frozen=True)
class StepContext:
    """What a step needs beside the batch: a generator for random choices (shuffled flags), the size of a micro-batch in rollouts
    (``None``: all at once), and, for privileged routes alone, the detector verdicts."""

    generator: torch.Generator
    micro: int | None = None
    privileged: Privileged | None = None

    def __post_init__(self) -> None:
        if self.micro is not None and self.micro < 1:
            raise ValueError(f"micro is a number of rollouts from 1 on, or None for all at once, not {self.micro}")


def chunks(batch: TrainBatch, micro: int | None) -> list[Tensor]:
    """Indices of the micro-batches, in order."""
    return list(torch.arange(len(batch.rollouts)).split(micro or len(batch.rollouts)))


def pieces(batch: TrainBatch, micro: int | None) -> list[TrainBatch]:
    """The micro-batches, in order."""
    return [batch.rows(index) for index in chunks(batch, micro)]


@runtime_checkable
class RouteStep(Protocol):
    """One batch under a route."""

    parts: list[Part]

    def finish(self, reduce: Reduce | None = None) -> Decision:
        """Make every gradient final; ``reduce`` sums over ranks at the right moment. Call once, after the last backward."""
        ...


@runtime_checkable
class Route(Protocol):
    """Decides, per token or rollout, what the kept adapter may learn."""

    @property
    def spec(self) -> RouteSpec: ...

    directions: Directions | None

    def refresh(self, policy: Policy, step: int) -> float | None:
        """Fit the directions where it is time to; the overlap with the previous ones, ``None`` where nothing was refitted."""
        ...

    def begin(self, policy: Policy, batch: TrainBatch, context: StepContext) -> RouteStep:
        """Start a step. Micro-batches change nothing but memory."""
        ...

    def backward(
        self,
        policy: Policy,
        batch: TrainBatch,
        loss_fn: Loss,
        context: StepContext | None = None,
        *,
        reduce: Reduce | None = None,
    ) -> Decision:
        """A whole step but for the optimiser's: ``begin``, a forward and backward a part, and ``finish``."""
        ...

    def score(self, policy: Policy, rollouts: Rollouts) -> Float[Tensor, " b"] | None:
        """The route's score of rollouts outside training (advantage 1), for recorders."""
        ...

    def after_update(self, update: dict[str, Tensor]) -> dict[str, float]:
        """What the route reports on the optimiser's step; ``update[site]`` is the change of the kept factor that is scored."""
        ...


def refit(directions: Directions | None, fitter: Fitter, every: int, policy: Policy, step: int) -> tuple[Directions, float | None]:
    """New directions and their overlap with the old, or the old ones where it is not time."""
    if directions is None:
        return fitter.fit(policy, step), None
    if every == 0 or step % every != 0 or not fitter.refreshes:
        return directions, None
    fresh = fitter.fit(policy, step)
    return fresh, fresh.overlap(directions)


def check_kind(directions: Directions, kind: str) -> None:
    """``ValueError`` for directions in another feature's space: an act and a grad direction may have the same shape."""
    if directions.provenance.kind != kind:
        raise ValueError(f"this route scores {kind!r} features, but its fitter gives {directions.provenance.kind!r} directions")


def check_step(spec: RouteSpec, batch: TrainBatch, context: StepContext) -> None:
    """``ValueError`` for a batch or context that no route can take. No cheat: ``TypeError`` where a route that is a method is shown
    detector verdicts."""
    if context.privileged is not None and not spec.privileged:
        raise TypeError("this route is a method: it must not see detector verdicts over the student's rollouts")
    b = len(batch.rollouts)
    columns = {name: getattr(batch, name) for name in ("rewards", "advantages", "groups", "teacher")}
    if context.privileged is not None:
        columns |= {name: getattr(context.privileged, name) for name in ("own_channel", "known_channel")}
    for name, column in columns.items():
        if column.shape != (b,):
            raise ValueError(f"{name} has shape {list(column.shape)}, but the batch has {b} rollouts: give one entry a rollout")
        if not torch.isfinite(column).all():
            rows = (~torch.isfinite(column)).nonzero()[:, 0].tolist()
            raise ValueError(f"{name} of rollouts {rows} are NaN or infinite: leave these rollouts out, or mend their rewards")


def trained_gradients(*named: Mapping[str, nn.Parameter]) -> list[Tensor]:
    """The ``.grad`` of every parameter that trains, made 0 if missing: a reduction needs the same tensors from each rank.

    Frozen parameters are left out: a gradient of 0 would still let an optimizer's momentum or weight decay move them.
    """
    gradients = []
    for p in (p for parameters in named for p in parameters.values() if p.requires_grad):
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        gradients.append(p.grad)
    return gradients


class OneCall:
    """Routes whose step can be taken in one call."""

    @checked
    def backward(
        self: Route,
        policy: Policy,
        batch: TrainBatch,
        loss_fn: Loss,
        context: StepContext | None = None,
        *,
        reduce: Reduce | None = None,
    ) -> Decision:
        """Add a step's gradients to every adapter's ``.grad``, as the route decides; what ``begin`` to ``finish`` does by hand.

        Args:
            loss_fn: called as ``loss_fn(logits, batch)`` for each part of the step, a micro-batch perhaps, with the advantages
                that this part is to learn from in ``batch.advantages``. It returns a loss that is summed over rollouts (a mean
                would make a rollout louder in a smaller micro-batch): one number, ``[b]`` or ``[b s]``.
            context: the size of a micro-batch, a generator, verdicts for privileged routes; by default one forward, and torch's
                global generator.

        ``ValueError`` for a loss of another shape, and for one that no gradient can come from.
        """
        step = self.begin(policy, batch, context or StepContext(torch.default_generator))
        for part in step.parts:
            with policy.adapters.recording(part.tape):
                given = replace(part.batch, advantages=part.advantages)
                loss = summed(loss_fn(policy.logits(given.rollouts), given), given)
                loss.backward()
        return step.finish(reduce)


def summed(loss: object, batch: TrainBatch) -> Tensor:
    """What a user's loss function returned, as one number."""
    shapes = ((), (len(batch.rollouts),), tuple(batch.rollouts.tokens.shape))
    if not isinstance(loss, Tensor) or tuple(loss.shape) not in shapes:
        told = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise ValueError(
            f"loss_fn returned {told}: return one number, one a rollout {list(shapes[1])} or one a token {list(shapes[2])}"
        )
    if not loss.requires_grad:
        raise ValueError(
            "loss_fn returned a loss without a gradient: make it of the logits that it is given, without detach(), and call "
            "backward outside of torch.no_grad()"
        )
    return loss if loss.ndim == 0 else loss.sum()


class Once:
    """``finish`` works once: a second call would sum over ranks, or erase, twice."""

    _finished = False

    def _finish(self, parts: Sequence[Part], adapters: Adapters, *, masks: bool = False) -> None:
        """``RuntimeError`` for a second call, for a hook that asks for a mask of a route without ``masks``, and for a step whose
        backward is still to run: that may run, and be finished then."""
        if self._finished:
            raise RuntimeError("finish() was already called for this step: it would count its gradients twice")
        for part in parts:
            part.tape.assert_fired(adapters.sites, backward=True)
            if part.tape.without_quarantine:
                raise RuntimeError(
                    "the quarantine was switched off in this step's forward, so it learnt nothing and the kept adapter learnt in "
                    "its place: leave adapters.deployed() before the step"
                )
        asked = [site for site, branch in adapters.sites.items() if branch.mask_requested]
        if asked and not masks:
            raise RuntimeError(f"hook_mask was hooked at {', '.join(asked)} and did not fire: {NO_MASK}")
        self._finished = True


class _OpenStep(Once):
    def __init__(self, policy: Policy, parts: list[Part]):
        self._policy, self.parts = policy, parts

    def finish(self, reduce: Reduce | None = None) -> Decision:
        self._finish(self.parts, self._policy.adapters)
        if reduce is not None:
            reduce(trained_gradients(self._policy.adapters.kept_parameters(), self._policy.adapters.quarantine_parameters()))
        return Decision()


class OpenRoute(OneCall):
    """Learns everything everywhere: vanilla, and absorb where there is a quarantine to delete."""

    directions: Directions | None = None

    def __init__(self, spec: RouteSpec, l1: float = 0.0):
        self.spec, self._l1 = spec, l1

    def refresh(self, policy: Policy, step: int) -> float | None:
        return None

    def begin(self, policy: Policy, batch: TrainBatch, context: StepContext) -> RouteStep:
        check_step(self.spec, batch, context)
        parts = []
        for piece in pieces(batch, context.micro):
            b, s = piece.rollouts.tokens.shape
            # The penalty is a mean over rollouts, so a micro-batch adds its share of it.
            tape = Tape(b, s, l1=self._l1 * b / len(batch.rollouts), real=piece.rollouts.attention)
            parts.append(Part(piece, tape, piece.advantages))
        return _OpenStep(policy, parts)

    def score(self, policy: Policy, rollouts: Rollouts) -> Float[Tensor, " b"] | None:
        return None

    def after_update(self, update: dict[str, Tensor]) -> dict[str, float]:
        return {}


def hack_component(gradient: Tensor, axes: Tensor) -> Tensor:
    """``relu(V g) V``: the part of ``gradient`` along the orthonormal ``axes [k, *shape]`` that points hack-ward."""
    flat = axes.flatten(1)
    return ((flat @ gradient.flatten()).clamp_min(0) @ flat).view_as(gradient)


class _EraseStep(Once):
    def __init__(self, route: "EraseRoute", policy: Policy, parts: list[Part]):
        self._route, self._policy, self.parts = route, policy, parts

    def finish(self, reduce: Reduce | None = None) -> Decision:
        adapters, directions = self._policy.adapters, self._route.directions
        self._finish(self.parts, adapters)
        assert directions is not None
        if reduce is not None:  # before: the component of a sum is not the sum of the components
            reduce(trained_gradients(adapters.kept_parameters()))
        removed, total = 0.0, 0.0
        for site, axes in directions.vectors.items():
            p = adapters.scored(site)
            if p.grad is None:
                raise RuntimeError(f"{site} has no gradient to erase from: call finish() after the backward")
            part = hack_component(p.grad, axes.to(p.grad.dtype))
            removed, total = removed + float(part.square().sum()), total + float(p.grad.square().sum())
            p.grad = p.grad - part
            if self._route.spec.dispose == "quarantine":
                shared = getattr(adapters.sites[site].quarantine, "shared", None)
                if shared is None:
                    raise ValueError("route-additive needs the shared-basis quarantine: AdapterSpec(quarantine='shared')")
                shared.grad = part if shared.grad is None else shared.grad + part
        return Decision(extra={"removed": (removed / total) ** 0.5 if total > 0 else 0.0})


class EraseRoute(OneCall):
    """Removes the hack component from the summed kept gradient, and drops it or gives it to a shared-basis quarantine."""

    def __init__(self, spec: EraseSpec, fitter: Fitter):
        self.spec, self._fitter = spec, fitter
        self.directions: Directions | None = None

    def refresh(self, policy: Policy, step: int) -> float | None:
        # Axes of different number do not compare, so a top-k refresh reports no overlap.
        every, due = self.spec.refresh_every, self._fitter.refreshes
        if self.directions is None or (due and every and step % every == 0):
            self.directions = self._fitter.fit(policy, step)
        check_kind(self.directions, "grad")
        return None

    def begin(self, policy: Policy, batch: TrainBatch, context: StepContext) -> RouteStep:
        check_step(self.spec, batch, context)
        if self.directions is None:
            raise RuntimeError("the route has no direction yet: call route.refresh(policy, step) before the first step")
        # The quarantine of the additive form learns the removed part alone, so its own gradient is discarded.
        parts = [
            Part(piece, Tape(*piece.rollouts.tokens.shape, quarantine=LearnNothing()), piece.advantages)
            for piece in pieces(batch, context.micro)
        ]
        return _EraseStep(self, policy, parts)

    def score(self, policy: Policy, rollouts: Rollouts) -> Float[Tensor, " b"] | None:
        return None

    def after_update(self, update: dict[str, Tensor]) -> dict[str, float]:
        """The share of the step that still points hack-ward: Adam's momentum and scaling leak what the gradient lost."""
        assert self.directions is not None
        leaked, total = 0.0, 0.0
        for site, axes in self.directions.vectors.items():
            delta = update[site]
            leaked += float(hack_component(-delta, axes.to(delta.dtype)).square().sum())
            total += float(delta.square().sum())
        return {"update_residual": (leaked / total) ** 0.5 if total > 0 else 0.0}
