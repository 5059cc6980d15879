"""Controllers, which change steering between steps, and a ready-made one that follows a probe."""

import math
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from mi_route2.checks import checked
from mi_route2.sites import Site
from mi_route2.steering.plan import MonitorReading
from mi_route2.steering.specs import GLOBAL, Monitor, Number, Steer
from mi_route2.steering.state import SteeringState


@runtime_checkable
class Change(Protocol):
    """Change of the steering between two steps: ``SetTier``, ``Override``, ``SetScale``, ``SetMonitor`` or ``ClearMonitor``."""

    def apply(self, state: SteeringState) -> None: ...


@dataclass(frozen=True)
class SetTier:
    """Replace the dynamic vectors, which act on every generated token, times the tier's gain."""

    entries: Sequence[Steer]

    def apply(self, state: SteeringState) -> None:
        state.set_tier(self.entries)


@dataclass(frozen=True)
class Override:
    """Route a request to a held configuration; ``None`` routes it to its own row."""

    request: int
    config: str | None

    def apply(self, state: SteeringState) -> None:
        state.override(self.request, self.config)


@dataclass(frozen=True)
class SetScale:
    """Scale the static vectors of a request or of a held configuration, or the tier if neither is given."""

    scale: Number
    request: int | None = None
    config: str | None = None

    def apply(self, state: SteeringState) -> None:
        state.set_scale(self.scale, request=self.request, config=self.config)


@dataclass(frozen=True)
class SetMonitor:
    """Set a monitor on one request, or (``None``) on all."""

    monitor: Monitor
    request: int | None = None

    def apply(self, state: SteeringState) -> None:
        state.set_monitor(self.monitor, request=self.request)


@dataclass(frozen=True)
class ClearMonitor:
    """Remove a monitor that ``SetMonitor`` set; no effect if there is none."""

    name: str
    request: int | None = None

    def apply(self, state: SteeringState) -> None:
        state.clear_monitor(self.name, request=self.request)


@dataclass(frozen=True, eq=False)
class RequestView:
    """One request after a step in which it ran.

    ``position`` is that of the last token that the model read; ``captured`` and ``readings`` belong to this token. ``token`` is the
    token that was sampled from it, with its ``logprob`` (``None`` within a prompt). The token that was read is a generated one if
    ``position >= prompt``, the prompt's length.
    """

    request: int
    position: int
    token: int | None = None
    logprob: float | None = None
    captured: Mapping[Site, Float[Tensor, "..."]] = field(default_factory=dict)
    readings: Mapping[str, MonitorReading] = field(default_factory=dict)
    finished: bool = False
    prompt: int = 0


@dataclass(frozen=True, eq=False)
class StepView:
    """All requests that ran in one step; ``unfinished`` are the numbers of all requests in the engine, waiting ones included."""

    step: int
    requests: tuple[RequestView, ...] = ()
    unfinished: Collection[int] = ()


@runtime_checkable
class Controller(Protocol):
    """A controller, called after each step.

    An attribute ``wants``, if there is one, is a set of sites whose values the engine puts into ``RequestView.captured``.
    """

    @property
    def name(self) -> str: ...

    def on_step(self, view: StepView) -> Sequence[Change]:
        """Return changes, which apply before the next step."""
        ...


class Controllers:
    """The controllers of an engine. ``applied`` counts changes by controller; ``problems`` are the latest failures.

    A problem is ``(step, controller, reason)``. Changes apply in order; if one is invalid, those behind it in that step are left
    out, so that an override does not act without the monitor before it.
    """

    def __init__(self, controllers: Iterable[Controller] = ()):
        self.controllers = list(controllers)
        for controller in self.controllers:
            if not isinstance(controller, Controller) or isinstance(controller, type):
                raise TypeError(f"{controller!r:.60} is not a controller: give an object with a name and on_step(view)")
        names = [controller.name for controller in self.controllers]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two controllers are called {twice[0]!r}: give each its own name")
        self.wants = frozenset[Site]().union(*(getattr(controller, "wants", ()) for controller in self.controllers))
        self.applied = Counter[str]()
        self.problems: deque[tuple[int, str, str]] = deque(maxlen=256)

    def after_step(self, view: StepView, state: SteeringState) -> None:
        """Call every controller in turn and apply its changes. An error of a controller ends no request."""
        for controller in self.controllers:
            try:
                for change in controller.on_step(view):
                    change.apply(state)
                    self.applied[controller.name] += 1
            except Exception as error:  # a controller is the user's code
                self.problems.append((view.step, controller.name, f"{type(error).__name__}: {error}"))


STEP = 0.05
"""Smallest change of the gain that is sent, as a share of ``gain``."""


class GainDecision(NamedTuple):
    """One decision of a probe controller: ``score`` is smoothed, ``gain`` is the one applied if the request is engaged."""

    step: int
    request: int
    engaged: bool
    score: float
    gain: float


@dataclass
class Follow:
    """A probe controller's state of one request."""

    score: float
    engaged: bool = False
    gain: float = 0.0


@checked
class ProbeController:
    """Route requests to a held configuration while a smoothed probe score is high, with hysteresis.

        s_0 = score_0,   s_t = (1 - smoothing) * s_{t-1} + smoothing * score_t
        engage if s >= threshold,   disengage if s < threshold - hysteresis

    An engaged request gets the scale ``gain``, or with ``proportional`` the scale ``gain * clip((s - threshold + hysteresis) /
    hysteresis, 0, 1)``, which is sent again once it has changed by a twentieth of ``gain``. With ``gain = 0`` decisions are
    recorded and nothing is changed.

    Args:
        config: the held configuration to which an engaged request is routed.
        threshold: in units of the score.
        hysteresis: in the same units; not negative, and positive for ``proportional``.
        monitor: name of the monitor whose score is read, as requests carry it or ``SetMonitor`` sets it.
        gain: the scale of an engaged request.
        proportional: whether the scale grows with the score, as above.
        smoothing: weight of the newest score, in (0, 1].
        generated: use only the scores of generated tokens, on which monitors act in the forward: a threshold set on such tokens
            says nothing about a prompt's last token.
        name: name of the controller.
        keep: number of decisions kept.
    """

    def __init__(
        self,
        config: str,
        threshold: float,
        hysteresis: float = 0.0,
        *,
        monitor: str,
        gain: float = 1.0,
        proportional: bool = False,
        smoothing: float = 0.25,
        generated: bool = False,
        name: str = "policy",
        keep: int = 4096,
    ):
        if not (math.isfinite(threshold) and math.isfinite(hysteresis) and hysteresis >= 0 and math.isfinite(gain) and gain >= 0):
            raise ValueError("threshold, hysteresis and gain must be finite, and hysteresis and gain not negative")
        if proportional and hysteresis == 0:
            raise ValueError("a proportional gain rises over the width of the hysteresis: give one above 0")
        if not 0 < smoothing <= 1:
            raise ValueError(f"smoothing={smoothing} is not between 0 and 1: 1 uses each score without smoothing")
        self.name, self.config, self.threshold, self.hysteresis = name, config, threshold, hysteresis
        self.gain, self.proportional, self.smoothing = gain, proportional, smoothing
        self._readings, self._generated = (monitor, GLOBAL + monitor), generated
        self.follows: dict[int, Follow] = {}
        self.decisions: deque[GainDecision] = deque(maxlen=keep)
        """The latest engagements, disengagements and gain changes, oldest first."""

    def on_step(self, view: StepView) -> list[Change]:
        """Return the changes for the requests of this step, and forget those that have ended."""
        changes: list[Change] = []
        for request in view.requests:
            score = None if request.finished else self._score(request)
            if score is not None:
                changes += self._decide(view.step, request.request, score)
        self.follows = {number: follow for number, follow in self.follows.items() if number in view.unfinished}
        return changes

    def _score(self, request: RequestView) -> float | None:
        if request.token is None or (self._generated and request.position < request.prompt):
            return None
        scores = (request.readings[name].score for name in self._readings if name in request.readings)
        return next((score for score in scores if math.isfinite(score)), None)

    def _decide(self, step: int, request: int, score: float) -> list[Change]:
        follow = self.follows.get(request)
        if follow is None:
            follow = self.follows[request] = Follow(score)
        else:
            follow.score = (1 - self.smoothing) * follow.score + self.smoothing * score
        low = self.threshold - self.hysteresis
        was, follow.engaged = follow.engaged, follow.score >= (low if follow.engaged else self.threshold)
        gain = self._gain(follow.score - low) if follow.engaged else 0.0
        if was == follow.engaged and (gain == follow.gain or abs(gain - follow.gain) < STEP * self.gain):
            return []
        follow.gain = gain
        self.decisions.append(GainDecision(step, request, follow.engaged, follow.score, gain))
        if not self.gain:
            return []
        if not follow.engaged:
            return [Override(request, None), SetScale(1.0, request)]
        return [Override(request, self.config), SetScale(gain, request)]

    def _gain(self, above: float) -> float:
        return self.gain * min(max(above / self.hysteresis, 0.0), 1.0) if self.proportional else self.gain
