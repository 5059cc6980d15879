"""Controllers that change steering between steps: actions, queues, the ledger, and a ready-made probe controller."""

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from inspect import iscoroutinefunction
from statistics import median
from threading import Lock
from typing import Any, NamedTuple, Protocol, get_args, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from mi_route2.checks import checked
from mi_route2.sites import Site
from mi_route2.steering.specs import GLOBAL, Monitor, Number, Steer, Vector, VectorLike, score
from mi_route2.steering.state import Reading, SteeringState
from mi_route2.steering.table import demand_fit


@dataclass(frozen=True)
class SetTier:
    """Replace the dynamic vectors, which act on every generated token, times the tier's gain."""

    entries: Sequence[Steer]


@dataclass(frozen=True)
class ClearTier:
    """Remove the dynamic vectors and reset the gain to 1."""


@dataclass(frozen=True)
class Override:
    """Route a request to one of its own configurations or to a held one; ``None`` routes it to its own row."""

    request: int
    config: str | None


@dataclass(frozen=True)
class ClearOverride:
    """Route a request to its own row; its scale stays, and there is no effect if it is not overridden."""

    request: int


@dataclass(frozen=True)
class SetScale:
    """Scale the static vectors of a request or of a held configuration, or the tier if neither is given; finite, not negative."""

    scale: Number
    request: int | None = None
    config: str | None = None


@dataclass(frozen=True)
class SetMonitor:
    """Set a monitor on one request, or (``None``) on all."""

    monitor: Monitor
    request: int | None = None


@dataclass(frozen=True)
class ClearMonitor:
    """Remove a monitor that ``SetMonitor`` set; no effect if there is none."""

    name: str
    request: int | None = None


Action = SetTier | ClearTier | Override | ClearOverride | SetScale | SetMonitor | ClearMonitor
ACTIONS = get_args(Action)


@dataclass(frozen=True)
class Applied:
    action: object
    source: str


@dataclass(frozen=True)
class Rejected:
    action: object
    source: str
    reason: str


Outcome = Applied | Rejected


def apply(state: SteeringState, action: object, source: str = "") -> Outcome:
    """Apply one action, or return the reason of its rejection.

    Nothing in an action can raise, and a rejected action leaves the state unchanged.
    """
    try:
        _do(state, action)
    except Exception as error:  # isolated: an invalid action must not affect other actions or the engine
        return Rejected(action, source, str(error) or type(error).__name__)
    return Applied(action, source)


def _do(state: SteeringState, action: object) -> None:
    match action:
        case SetTier(entries):
            state.set_tier(entries)
        case ClearTier():
            state.clear_tier()
        case Override(request, config):
            state.override(request, config)
        case ClearOverride(request):
            state.override(request, None)
        case SetScale(scale, request, config):
            state.set_scale(scale, request=request, config=config)
        case SetMonitor(monitor, request):
            state.set_monitor(monitor, request=request)
        case ClearMonitor(name, request):
            state.clear_monitor(name, request=request)
        case _:
            raise ValueError(f"{type(action).__name__} is not an action: choose among {', '.join(a.__name__ for a in ACTIONS)}")


TIER, ALL = "tier", "all requests"


def apply_all(state: SteeringState, actions: Iterable[object], source: str = "") -> list[Outcome]:
    """Apply the actions of one source in one step, in order; then take back what must not act without one that was rejected.

    An override whose monitor is rejected would act on every token instead of the tokens that the monitor gates, and the scale of an
    override that is rejected on the request's own vectors. So they fail closed: if a ``SetMonitor`` or ``Override`` of a request is
    rejected, the request keeps the row and scale that it had before this call, and all that was to change them is rejected too. The
    same holds for the tier if a ``SetTier`` is rejected (what was cleared stays so), and, if a ``SetMonitor`` of all requests is,
    for each request that was overridden, and a tier that was set.
    """
    before: dict[int | str, Callable[[], None]] = {}  # puts back what there was
    outcomes: list[tuple[int | str | None, Outcome]] = []
    for action in actions:
        if (target := _target(state, action)) is not None:
            before.setdefault(target, _restoring(state, target))
        outcomes.append((target, apply(state, action, source)))
        if isinstance(action, ClearTier):
            before.pop(TIER, None)
    rejected = [(target, one.action) for target, one in outcomes if target is not None and isinstance(one, Rejected)]
    closed = {target: action for target, action in rejected if isinstance(action, SetMonitor | Override | SetTier)}
    if (monitor := closed.pop(ALL, None)) is not None:
        closed |= {target: monitor for target, one in outcomes if target is not None and _steers(one.action)}
    for target in closed.keys() & before.keys():
        before[target]()
    return [
        Rejected(one.action, source, f"{described(closed[target])} was rejected, and this goes with it")
        if target in closed and isinstance(one, Applied) and not isinstance(one.action, SetMonitor)
        else one
        for target, one in outcomes
    ]


def _target(state: SteeringState, action: object) -> int | str | None:
    """Return what an action is for: a running request, ``TIER``, or (a monitor) ``ALL``; ``None`` if nothing can be taken back."""
    match action:
        case SetTier() | SetScale(request=None, config=None):
            return TIER
        case SetMonitor(request=None):
            return ALL
        case Override() | ClearOverride() | SetScale() | SetMonitor() if action.request in state:
            return action.request
    return None


def _steers(action: object) -> bool:
    return isinstance(action, SetTier) or (isinstance(action, Override) and action.config is not None)


def _restoring(state: SteeringState, target: int | str) -> Callable[[], None]:
    """Return a function that puts back the row and scale that a request has now, or the tier."""
    if isinstance(target, str):
        return partial(state.restore_tier, state.tier, state.gain)
    return partial(state.restore, target, state.routing(target), state.scale_of(target))


class Ledger:
    """Counts of actions by source, and a log of the most recent ones."""

    def __init__(self, recent: int = 256):
        self.counts: dict[str, Counter[str]] = {}
        self.recent: deque[dict[str, Any]] = deque(maxlen=recent)

    def record(self, outcomes: Iterable[Outcome], step: int) -> None:
        """Record the outcomes of ``apply_all``."""
        for outcome in outcomes:
            rejected = isinstance(outcome, Rejected)
            self._count(outcome.source, "rejected" if rejected else "applied", 1)
            entry = {"step": step, "source": outcome.source, "action": described(outcome.action)}
            self.recent.append(entry | ({"rejected": outcome.reason} if rejected else {}))

    def note(self, source: str, what: str, reason: str, step: int, count: int = 1) -> None:
        """Record another event of a source (dropped, failed) with its reason."""
        self._count(source, what, count)
        self.recent.append({"step": step, "source": source, what: reason})

    def _count(self, source: str, what: str, count: int) -> None:
        self.counts.setdefault(source, Counter())[what] += count

    def snapshot(self) -> Mapping[str, Any]:
        """Return plain data: counts by source, and the recent actions, oldest first."""
        return {"sources": {source: dict(counts) for source, counts in self.counts.items()}, "recent": list(self.recent)}


def described(action: object) -> str:
    """Return a short one-line description of an action, without vector values."""
    match action:
        case SetTier(list() | tuple() as entries):
            return f"SetTier({', '.join(str(getattr(entry, 'site', entry)) for entry in entries)})"
        case SetMonitor(monitor, request):
            return f"SetMonitor({getattr(monitor, 'name', type(monitor).__name__)!s:.60}, request={request!s:.20})"
        case _:
            try:
                return f"{' '.join(repr(action).split()):.120}"
            except Exception:  # as in apply: nothing in an action can raise
                return type(action).__name__


QUEUE = 1024


@dataclass(frozen=True, eq=False)
class RequestView:
    """One request after a step in which it ran.

    ``position`` is that of the last token that the model read; ``captured`` and ``readings`` belong to this token. ``token`` is the
    token that was sampled from it, with its ``logprob`` (``None`` within a prompt, or, ``logprob`` alone, without memory for it).
    The token that was read is a generated one if ``position >= prompt``, the prompt's length.
    """

    request: int
    position: int
    token: int | None = None
    logprob: float | None = None
    captured: Mapping[Site, Float[Tensor, "..."]] = field(default_factory=dict)
    readings: Mapping[str, Reading] = field(default_factory=dict)
    finished: bool = False
    prompt: int = 0


@dataclass(frozen=True, eq=False)
class StepView:
    """All requests that ran in one step.

    ``unfinished`` are the numbers of all requests in the engine now, waiting and preempted ones included; ``None`` if unknown.
    """

    step: int
    requests: tuple[RequestView, ...] = ()
    unfinished: Collection[int] | None = None


@runtime_checkable
class SyncController(Protocol):
    """A controller that is called after each step and returns actions. Its name is their source.

    If it needs activations, it has an attribute ``wants``, a set of sites: the engine puts their values into ``captured``.
    """

    @property
    def name(self) -> str: ...

    def on_step(self, view: StepView) -> Sequence[Action]:
        """Return actions; called after every step on the engine's thread.

        If it raises, the exception is counted and no action applies in this step.
        """
        ...


@checked
class AsyncController:
    """A queue of actions from any thread. ``submit`` never raises; if the queue is full, new actions are dropped."""

    def __init__(self, name: str = "async", capacity: int = QUEUE):
        if isinstance(capacity, bool) or capacity < 1:
            raise ValueError(f"capacity = {capacity} is not valid: give the number of actions that may wait, at least 1")
        self.name, self.capacity = name, capacity
        self._lock = Lock()
        self._queue: deque[tuple[Action, ...]] = deque()
        self._waiting = self._dropped = self._told = 0

    def submit(self, *actions: Action) -> bool:
        """Queue a group of actions, all or none; return whether there was room."""
        with self._lock:
            if self._waiting + len(actions) > self.capacity:
                self._dropped += len(actions)
                return False
            if actions:  # an empty group would take room that nobody counts
                self._queue.append(actions)
            self._waiting += len(actions)
            return True

    def drain(self) -> list[tuple[Action, ...]]:
        """Remove and return all queued actions, in order."""
        with self._lock:
            queued = list(self._queue)
            self._queue.clear()
            self._waiting = 0
            return queued

    def lost(self) -> int:
        """Return the number of actions dropped since the last call."""
        with self._lock:
            new, self._told = self._dropped - self._told, self._dropped
            return new

    def snapshot(self) -> dict[str, int]:
        """Return plain data: the number of queued actions, the capacity, and the number dropped so far."""
        with self._lock:
            return {"waiting": self._waiting, "capacity": self.capacity, "dropped": self._dropped}


class Controllers:
    """All controllers of an engine, and the ledger of their actions."""

    def __init__(self, sync: Iterable[SyncController] = (), queues: Iterable[AsyncController] = ()):
        for what, given in (("sync", sync), ("queues", queues)):
            if not isinstance(given, Iterable) or isinstance(given, str | Mapping):
                raise TypeError(f"{what} is a list of controllers, not {_told(given)}: write Controllers({what}=[controller])")
        self.sync, self.queues, self.ledger = list(sync), list(queues), Ledger()
        for controller in self.sync:
            _refuse_sync(controller)
        for queue in self.queues:
            if not isinstance(queue, AsyncController):
                raise TypeError(f"queues take an AsyncController, not {_told(queue)}: give what has on_step in sync")
        names = [controller.name for controller in (*self.sync, *self.queues)]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two controllers are called {twice[0]!r}: their actions could not be told apart")
        self.step = 0
        self._times: deque[float] = deque(maxlen=256)

    def wants(self, shape: Callable[[Site], object]) -> frozenset[Site]:
        """Return the sites that the controllers want captured at each request's last token.

        Sites for which ``shape`` raises are left out and recorded in the ledger with the reason.
        """
        wanted: set[Site] = set()
        for controller in self.sync:
            try:
                sites = tuple(getattr(controller, "wants", ()))
            except Exception as error:  # as in after_step
                self.ledger.note(controller.name, "failed", f"what it wants is no set of sites: {error}", self.step)
                continue
            for site in sites:
                try:
                    shape(site)
                    wanted.add(site)
                except Exception as error:  # as in after_step
                    self.ledger.note(controller.name, "failed", f"it wants {site!s:.60}: {error}", self.step)
        return frozenset(wanted)

    @property
    def _probes(self) -> list["ProbeController"]:
        return [one for one in self.sync if isinstance(one, ProbeController)]

    def probe_controllers(self, monitors: Collection[str], request: int | None = None) -> list[str]:
        """Return the names of the probe controllers that set the scale and the row of a ``request`` with ``monitors``."""
        return [one.name for one in self._probes if one.steers(monitors, request)]

    def demand_held(self, names: Collection[str], configurations: Collection[str]) -> None:
        """Raise ``ValueError`` if one of these probe controllers routes to a configuration that is not among the held ones."""
        for one in self._probes:
            if one.name in names and one.config not in configurations:
                raise ValueError(
                    f"the controller {one.name!r} would route a request to {one.config!r}, which is not held; there are: "
                    f"{', '.join(sorted(configurations)) or 'none'}. Call engine.steering.hold({one.config!r}, ...) before"
                )

    def demand_same(self, monitor: Monitor, vectors: Mapping[str, Vector]) -> None:
        """Raise ``ValueError`` for a monitor that a probe controller would take for its own, whose name it has."""
        for one in self._probes:
            one.demand_same(monitor, vectors)

    def before_step(self, state: SteeringState) -> list[Outcome]:
        """Apply the queued actions."""
        outcomes: list[Outcome] = []
        for queue in self.queues:
            if lost := queue.lost():
                self.ledger.note(queue.name, "dropped", f"the queue of {queue.capacity} actions was full", self.step, lost)
            for actions in queue.drain():
                outcomes += apply_all(state, actions, queue.name)
        self.ledger.record(outcomes, self.step)
        return outcomes

    def after_step(self, view: StepView, state: SteeringState) -> list[Outcome]:
        """Call every controller in turn and apply its actions. A controller that raises is recorded in the ledger and skipped."""
        if not self.sync:
            return []
        start = time.perf_counter()
        self.step = view.step
        outcomes: list[Outcome] = []
        for controller in self.sync:
            try:
                actions = tuple(controller.on_step(view))
            except Exception as error:  # a controller is the user's code, whose errors must not end requests
                self.ledger.note(controller.name, "failed", f"{type(error).__name__}: {error}", view.step)
                continue
            controller_outcomes = apply_all(state, actions, controller.name)
            self.ledger.record(controller_outcomes, view.step)
            if isinstance(controller, ProbeController):
                controller.take_back(view.step, controller_outcomes)
            outcomes += controller_outcomes
        self._times.append(time.perf_counter() - start)
        return outcomes

    def snapshot(self) -> dict[str, Any]:
        """Return plain data: queues, counts by source, recent actions, and controller time per step in milliseconds."""
        times = [1e3 * seconds for seconds in self._times]
        took = {"median": median(times), "longest": max(times)} if times else {}
        queues = {queue.name: queue.snapshot() for queue in self.queues}
        return {**self.ledger.snapshot(), "queues": queues, "step": self.step, "milliseconds": took}


def _told(given: object) -> str:
    return f"the class {given.__name__}" if isinstance(given, type) else f"one {type(given).__name__}"


def _refuse_sync(controller: object) -> None:
    """Raise ``TypeError`` if this is no object that could be called after each step."""
    if isinstance(controller, type):
        raise TypeError(f"a controller is an object, not the class {controller.__name__}: write {controller.__name__}(...)")
    on_step = getattr(controller, "on_step", None)
    if not callable(on_step):
        queue = isinstance(controller, AsyncController)
        remedy = "give it in queues" if queue else "give it on_step(view), which returns actions"
        raise TypeError(f"{_told(controller)} in sync cannot be called after a step: {remedy}")
    if iscoroutinefunction(on_step):
        raise TypeError(f"on_step of {type(controller).__name__} is async, and no loop runs it: write it as a plain function")
    if not isinstance(name := getattr(controller, "name", None), str) or not name:
        raise TypeError(f"the name of {type(controller).__name__} is {name!r:.40}: give it one that is text, by which to tell it")
    wanted: Any = getattr(controller, "wants", ())
    if isinstance(wanted, str) or not isinstance(wanted, Collection) or not all(isinstance(site, Site) for site in wanted):
        raise TypeError(f"{name!r} wants {wanted!s:.60}: give a set of sites, as {{Site(3, 'resid_mid')}}, or leave wants out")


STEP, UNREAD = 0.05, 16
"""Smallest change of the gain that is sent, as a share of ``gain``; tokens without a score after which a request is put back."""


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
    unread: int = 0
    """Tokens since the last score, because the monitor was removed, or its score is no number."""


@checked
class ProbeController:
    """Route requests to a held configuration while a smoothed probe score is high, with hysteresis.

        s_0 = score_0,   s_t = (1 - smoothing) * s_{t-1} + smoothing * score_t
        engage if s >= threshold,   disengage if s < threshold - hysteresis

    An engaged request gets the scale ``gain``, or with ``proportional`` the scale ``gain * clip((s - threshold + hysteresis) /
    hysteresis, 0, 1)``, which is sent again once it has changed by a twentieth of ``gain``. With ``gain = 0`` decisions are
    recorded and nothing is changed; if it is set to 0 later, a request is put back at its next token.

    Args:
        config: the held configuration to which an engaged request is routed.
        threshold: in units of the score.
        hysteresis: in the same units; not negative, and positive for ``proportional``.
        monitor: the monitor whose score is read, as requests carry it or ``SetMonitor`` sets it; or give ``site`` and ``probe``.
        site: the site captured at the request's last token, for the score ``h.probe``.
        probe: the vector of that score.
        gain: the scale of an engaged request.
        proportional: whether the scale grows with the score, as above.
        smoothing: weight of the newest score, in (0, 1].
        generated: use only the scores of generated tokens, on which monitors act in the forward: a threshold set on such tokens
            says nothing about a prompt's last token.
    """

    def __init__(
        self,
        config: str,
        threshold: float,
        hysteresis: float = 0.0,
        *,
        monitor: Monitor | None = None,
        site: Site | None = None,
        probe: VectorLike | None = None,
        gain: float = 1.0,
        proportional: bool = False,
        smoothing: float = 0.25,
        generated: bool = False,
        name: str = "policy",
        keep: int = 4096,
    ):
        if (monitor is None) == (site is None) or (site is None) != (probe is None):
            raise ValueError("a probe controller reads a monitor, or a probe at a site: give monitor, or site and probe")
        if not (math.isfinite(threshold) and math.isfinite(hysteresis) and hysteresis >= 0 and math.isfinite(gain) and gain >= 0):
            raise ValueError("threshold, hysteresis and gain must be finite, and hysteresis and gain not negative")
        if proportional and hysteresis == 0:
            raise ValueError("a proportional gain rises over the width of the hysteresis: give one above 0")
        if not 0 < smoothing <= 1:
            raise ValueError(f"smoothing={smoothing} is not between 0 and 1: 1 uses each score without smoothing")
        self.name, self.config, self.threshold, self.hysteresis = name, config, threshold, hysteresis
        self.gain, self.proportional, self.smoothing = gain, proportional, smoothing
        self.wants = frozenset[Site]() if site is None else frozenset({site})
        self._monitor = monitor
        self._readings = () if monitor is None else (monitor.name, GLOBAL + monitor.name)
        self._site, self._generated = site, generated
        self._probe = None if probe is None else Vector(probe)
        if self._probe is not None and self._probe.values is None:
            raise ValueError(f"the controller's probe is the name {self._probe.name!r}: give its numbers")
        self._shape: tuple[int, ...] | None = None
        """The shape of the site's value with which the probe was compared."""
        self.follows: dict[int, Follow] = {}
        self.decisions: deque[GainDecision] = deque(maxlen=keep)
        """The most recent engagements, disengagements and gain changes that were not rejected, oldest first."""

    def on_step(self, view: StepView) -> list[Action]:
        """Return the actions for the requests of this step, and forget those that have ended or are not read any more."""
        actions: list[Action] = []
        for request in view.requests:
            if request.finished:
                self.follows.pop(request.request, None)
            elif (value := self._score(request)) is not None:
                actions += self._decide(view.step, request.request, value)
            elif request.token is not None and (follow := self.follows.get(request.request)) is not None:
                follow.unread += 1
                if follow.unread > UNREAD and self._acts(self.follows.pop(request.request)):
                    actions += (ClearOverride(request.request), SetScale(1.0, request.request))
        if view.unfinished is not None:
            for number in [number for number in self.follows if number not in view.unfinished]:
                del self.follows[number]
        return actions

    def take_back(self, step: int, outcomes: Iterable[Outcome]) -> None:
        """Take back what was decided in a step for requests whose override was rejected: they are not engaged, and tried again."""
        rejected = [one.action for one in outcomes if isinstance(one, Rejected)]
        for request in {action.request for action in rejected if isinstance(action, Override)}:
            if (follow := self.follows.get(request)) is not None:  # else a controller before this one has cancelled the request
                follow.engaged, follow.gain = False, 0.0
            for decision in [one for one in self.decisions if (one.step, one.request) == (step, request)]:
                self.decisions.remove(decision)

    def demand_fit(self, shape: Callable[[Site], tuple[int, ...]]) -> None:
        """Raise ``ValueError`` if the probe does not fit its site; errors of ``shape`` propagate."""
        if self._site is not None and self._probe is not None:
            demand_fit(shape(self._site), self._site, self._probe, f"the probe of {self.name!r}")

    def demand_same(self, monitor: Monitor, vectors: Mapping[str, Vector]) -> None:
        """Raise ``ValueError`` if ``monitor`` has the name of the controller's, and another site or probe (among ``vectors``)."""
        expected = self._monitor
        if expected is None or expected.name != monitor.name:
            return
        probes = [Vector(one.probe) for one in (expected, monitor)]
        mine, given = (vectors.get(one.name) if one.values is None else one for one in probes)
        if expected.site != monitor.site or mine != given:
            raise ValueError(
                f"the controller {self.name!r} would read the monitor {monitor.name!r}, which has another site or probe than its "
                "own of that name: give it another name"
            )

    def steers(self, monitors: Collection[str], request: int | None = None) -> bool:
        """Return whether the controller acts on a ``request`` with ``monitors`` (names as in readings).

        One with a site acts on all, and each on a request that it has engaged and does not read any more, until it puts it back.
        """
        follow = None if request is None else self.follows.get(request)
        read = not self._readings or any(name in monitors for name in self._readings)
        return (read and self.gain > 0) or (follow is not None and self._acts(follow))

    def _acts(self, follow: Follow) -> bool:
        """Return whether the request is routed: a shadow engages without that, also one that has acted before."""
        return follow.engaged and (self.gain > 0 or follow.gain > 0)

    def _score(self, request: RequestView) -> float | None:
        if request.token is None or (self._generated and request.position < request.prompt):
            return None
        if self._readings:
            reading = next((request.readings[name] for name in self._readings if name in request.readings), None)
            value = None if reading is None else reading.score
        else:
            row = None if self._site is None else request.captured.get(self._site)
            if row is None or self._probe is None or self._site is None:
                return None
            if row.shape != self._shape:  # of adapters that were attached anew
                demand_fit(tuple(row.shape), self._site, self._probe, f"the probe of {self.name!r}")
                self._shape = row.shape
            value = float(score(row.flatten(), self._probe.data.to(row.device)))
        return value if value is not None and math.isfinite(value) else None

    def _decide(self, step: int, request: int, value: float) -> list[Action]:
        follow = self.follows.get(request)
        if follow is None:
            follow = self.follows[request] = Follow(value)
        else:
            follow.score, follow.unread = (1 - self.smoothing) * follow.score + self.smoothing * value, 0
        low = self.threshold - self.hysteresis
        was, follow.engaged = follow.engaged, follow.score >= (low if follow.engaged else self.threshold)
        gain = self._gain(follow.score - low) if follow.engaged else 0.0
        if was == follow.engaged and (gain == follow.gain or abs(gain - follow.gain) < STEP * self.gain):
            return []
        acted, follow.gain = follow.gain > 0, gain
        self.decisions.append(GainDecision(step, request, follow.engaged, follow.score, gain))
        if not (self.gain or acted):
            return []
        if not (self.gain and follow.engaged):  # a gain that was set to 0 takes back what it did
            return [ClearOverride(request), SetScale(1.0, request)]
        return [Override(request, self.config), SetScale(gain, request)]  # together, because the scale is the configuration's

    def _gain(self, above: float) -> float:
        return self.gain * min(max(above / self.hysteresis, 0.0), 1.0) if self.proportional else self.gain
