"""What a controller may do to the steering of running requests, one small change at a time.

    apply(state, Override(7, "calm"), "policy")          Applied, or Rejected with the reason; a rejected action changed nothing

Actions of one step apply in their order: an override, then its scale. They act on generated tokens alone, from the next forward on.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mi_route2.interventions.requests import Held
from mi_route2.interventions.specs import Monitor, Number, Steer
from mi_route2.interventions.steering import SteeringState


@dataclass(frozen=True)
class SetTier:
    """These dynamic vectors, and no others, act on every generated token, times the tier's gain."""

    entries: Sequence[Steer]


@dataclass(frozen=True)
class ClearTier:
    """No dynamic vectors, and a gain of 1."""


@dataclass(frozen=True)
class Override:
    """Route a request to one of its own configurations, or to one that the state holds; ``None`` is its own row."""

    request: int
    config: str | None


@dataclass(frozen=True)
class ClearOverride:
    """Route a request to its own row; also where it is not routed elsewhere."""

    request: int


@dataclass(frozen=True)
class SetScale:
    """Scale the static vectors of a request, or of a held configuration, or (neither) the tier: finite, not negative."""

    scale: Number
    request: int | None = None
    config: str | None = None


@dataclass(frozen=True)
class SetMonitor:
    """Watch a request, or (``None``) all of them."""

    monitor: Monitor
    request: int | None = None


@dataclass(frozen=True)
class ClearMonitor:
    """End what ``SetMonitor`` began; also where there is none."""

    name: str
    request: int | None = None


Action = SetTier | ClearTier | Override | ClearOverride | SetScale | SetMonitor | ClearMonitor


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
    """Do one thing, or say why not; nothing that an action holds can raise, and a rejected one leaves the state as it was."""
    try:
        _do(state, action)
    except Exception as error:  # isolated: what is wrong with one action is no matter of the others, nor of the engine
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
            raise ValueError(f"{type(action).__name__} is no action: choose among {', '.join(a.__name__ for a in ACTIONS)}")


ACTIONS = (SetTier, ClearTier, Override, ClearOverride, SetScale, SetMonitor, ClearMonitor)


def apply_all(state: SteeringState, actions: Iterable[object], source: str = "") -> list[Outcome]:
    """The actions of one source in one step, in order.

    An override whose monitor is rejected would act on every token instead of those that the monitor picks. So it fails closed: a
    rejected ``SetMonitor`` of a request puts its row and scale back to what they were before this call, and an override of that
    request further down is rejected.
    """
    before: dict[int, tuple[Held | None, float]] = {}
    closed: set[int] = set()
    outcomes: list[Outcome] = []
    for action in actions:
        request = getattr(action, "request", None)
        if not isinstance(request, int) or request not in state:
            outcomes.append(apply(state, action, source))
            continue
        if isinstance(action, Override | SetScale) and request in closed:
            outcomes.append(Rejected(action, source, f"the monitor of request {request} was rejected, and this goes with it"))
            continue
        if isinstance(action, Override | ClearOverride | SetScale) and request not in before:
            before[request] = state.routing(request), state.scale_of(request)
        outcomes.append(apply(state, action, source))
        if isinstance(action, SetMonitor) and isinstance(outcomes[-1], Rejected):
            closed.add(request)
            if request in before:
                routing, scale = before[request]
                state.route(request, routing)
                state.set_scale(scale, request=request)
    return outcomes


class Ledger:
    """Counts what was done by source, and keeps the last of it."""

    def __init__(self, recent: int = 256):
        self.counts: dict[str, Counter[str]] = {}
        self.recent: deque[dict[str, Any]] = deque(maxlen=recent)

    def record(self, outcomes: Iterable[Outcome], step: int) -> None:
        """Count what ``apply_all`` answered."""
        for outcome in outcomes:
            rejected = isinstance(outcome, Rejected)
            self._count(outcome.source, "rejected" if rejected else "applied", 1)
            entry = {"step": step, "source": outcome.source, "action": described(outcome.action)}
            self.recent.append(entry | ({"rejected": outcome.reason} if rejected else {}))

    def note(self, source: str, what: str, reason: str, step: int, count: int = 1) -> None:
        """Count something else that befell a source (dropped, failed), and keep why."""
        self._count(source, what, count)
        self.recent.append({"step": step, "source": source, what: reason})

    def _count(self, source: str, what: str, count: int) -> None:
        self.counts.setdefault(source, Counter())[what] += count

    def snapshot(self) -> Mapping[str, Any]:
        """Plain data: counts by source, and the recent actions, the oldest first."""
        return {"sources": {source: dict(counts) for source, counts in self.counts.items()}, "recent": list(self.recent)}


def described(action: object) -> str:
    """An action in one short line, without the numbers of its vectors."""
    match action:
        case SetTier(entries):
            return f"SetTier({', '.join(str(getattr(entry, 'site', entry)) for entry in entries)})"
        case SetMonitor(monitor, request):
            return f"SetMonitor({getattr(monitor, 'name', monitor)}, request={request})"
        case _:
            return f"{action!r:.120}"
