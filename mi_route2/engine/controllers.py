"""Who decides about steering while requests run: code beside the engine, or in its step.

    AsyncController    any thread submits actions; they apply at the start of the next step
    SyncController     is asked after each step, on the engine's thread: having read token N, it acts from token N+1 on
    Monitor            is a part of the forward itself and gates the very token that it reads (``interventions/specs.py``)

The token that a prompt's last position predicts is out before any controller saw anything: none acts on it. What a finished request
left (a captured run) can only steer a later request.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from threading import Lock
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from mi_route2.engine.actions import Action, Ledger, Outcome, apply_all
from mi_route2.interventions.steering import Reading, SteeringState
from mi_route2.sites import Site

QUEUE = 1024


@dataclass(frozen=True, eq=False)
class RequestView:
    """One request after a step in which it ran.

    ``position`` is that of the last token which the model read, and ``captured`` and ``readings`` are of this token. ``token`` is
    the one that was sampled then, with its ``logprob`` (``None`` within a prompt). The token that was read is a generated one where
    ``position`` is at or behind ``prompt``, the prompt's length.
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
    """All requests that ran in a step."""

    step: int
    requests: tuple[RequestView, ...] = ()


@runtime_checkable
class SyncController(Protocol):
    """Reads a step and says what is to change. Its name is the source of its actions.

    A controller that needs activations has an attribute ``wants``, a set of sites: the engine puts them into ``captured``.
    """

    @property
    def name(self) -> str: ...

    def on_step(self, view: StepView) -> Sequence[Action]:
        """Called after every step on the engine's thread. What it raises is counted, and none of its actions apply in this step."""
        ...


class AsyncController:
    """A queue of actions from any thread. ``submit`` never raises; where the queue is full, what comes new is dropped."""

    def __init__(self, name: str = "async", capacity: int = QUEUE):
        self.name, self.capacity = name, capacity
        self._lock = Lock()
        self._queue: deque[tuple[Action, ...]] = deque()
        self._waiting = self._dropped = self._told = 0

    def submit(self, *actions: Action) -> bool:
        """Queue actions that belong together, all or none of them; whether there was room."""
        with self._lock:
            if self._waiting + len(actions) > self.capacity:
                self._dropped += len(actions)
                return False
            self._queue.append(actions)
            self._waiting += len(actions)
            return True

    def drain(self) -> list[tuple[Action, ...]]:
        """All that waits, in order."""
        with self._lock:
            found = list(self._queue)
            self._queue.clear()
            self._waiting = 0
            return found

    def lost(self) -> int:
        """Actions that were dropped since this was last asked."""
        with self._lock:
            new, self._told = self._dropped - self._told, self._dropped
            return new

    def snapshot(self) -> dict[str, int]:
        """Plain data: how many actions wait, may wait, and were dropped so far."""
        with self._lock:
            return {"waiting": self._waiting, "capacity": self.capacity, "dropped": self._dropped}


class Controllers:
    """All controllers of an engine, and the ledger of what they did."""

    def __init__(self, sync: Iterable[SyncController] = (), queues: Iterable[AsyncController] = ()):
        self.sync, self.queues, self.ledger = list(sync), list(queues), Ledger()
        names = [controller.name for controller in (*self.sync, *self.queues)]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two controllers are called {twice[0]!r}: their actions could not be told apart")
        self.step = 0
        self._times: deque[float] = deque(maxlen=256)

    def wants(self, shape: Callable[[Site], object]) -> frozenset[Site]:
        """Sites whose values the controllers want to see at each request's last token, as far as ``shape`` does not raise for them;
        the others are counted and explained."""
        found: set[Site] = set()
        for controller in self.sync:
            for site in getattr(controller, "wants", ()):
                try:
                    shape(site)
                    found.add(site)
                except Exception as error:  # as in after_step
                    self.ledger.note(controller.name, "failed", f"it wants {site!s:.60}: {error}", self.step)
        return frozenset(found)

    def before_step(self, state: SteeringState) -> list[Outcome]:
        """Apply what was queued."""
        outcomes: list[Outcome] = []
        for queue in self.queues:
            if lost := queue.lost():
                self.ledger.note(queue.name, "dropped", f"the queue of {queue.capacity} actions was full", self.step, lost)
            for actions in queue.drain():
                outcomes += apply_all(state, actions, queue.name)
        self.ledger.record(outcomes, self.step)
        return outcomes

    def after_step(self, view: StepView, state: SteeringState) -> list[Outcome]:
        """Ask every controller in turn and apply what it answers. One that raises is counted and explained, and that is all."""
        if not self.sync:
            return []
        start = time.perf_counter()
        self.step = view.step
        outcomes: list[Outcome] = []
        for controller in self.sync:
            try:
                actions = tuple(controller.on_step(view))
            except Exception as error:  # a controller is foreign code: it must not end the requests of others
                self.ledger.note(controller.name, "failed", f"{type(error).__name__}: {error}", view.step)
                continue
            found = apply_all(state, actions, controller.name)
            self.ledger.record(found, view.step)
            outcomes += found
        self._times.append(time.perf_counter() - start)
        return outcomes

    def snapshot(self) -> dict[str, Any]:
        """Plain data: queues, counts by source, recent actions, and how long controllers take in a step, in milliseconds."""
        times = [1e3 * seconds for seconds in self._times]
        took = {"median": median(times), "longest": max(times)} if times else {}
        queues = {queue.name: queue.snapshot() for queue in self.queues}
        return {**self.ledger.snapshot(), "queues": queues, "step": self.step, "milliseconds": took}
