"""Controllers of this study: a delayed policy, and one that opens and closes the quarantine between tokens."""

from collections import deque
from collections.abc import Sequence

from mi_route2.engine.controllers import Change, ClearMonitor, Controller, RequestView, SetMonitor, StepView
from mi_route2.sites import Site
from mi_route2.steering.specs import Monitor

CERTAIN = 1e6
"""Beyond every score: a gate with this threshold is always shut, and one with the opposite threshold always open."""
SHUT = "shut"


def saturated(site: Site, probe: Sequence[float]) -> Monitor:
    """Return a monitor that closes every quarantine at or behind its site, whatever it reads."""
    return Monitor(site, probe, -CERTAIN, gates=(), quarantine="close", prompt=False, name=SHUT)


class Late:
    """A controller that delays the changes of ``policy`` to ``delay`` tokens after the score.

    Changes act on the next token at the earliest; ``delay - 1`` steps of waiting make up the rest. Changes of requests that have
    ended meanwhile are left out.

    Raises:
        ValueError: If ``delay`` is less than 1.
    """

    def __init__(self, policy: Controller, delay: int):
        if delay < 1:
            raise ValueError(f"delay={delay} must be at least 1: between steps, the next token is the earliest")
        self.name, self.delay = policy.name, delay
        self._policy = policy
        self._waiting: deque[tuple[int, Sequence[Change]]] = deque()

    def on_step(self, view: StepView) -> Sequence[Change]:
        """Return the changes that are due."""
        self._waiting.append((view.step + self.delay - 1, self._policy.on_step(view)))
        changes: list[Change] = []
        while self._waiting and self._waiting[0][0] <= view.step:
            changes += self._waiting.popleft()[1]
        ended = {request.request for request in view.requests if request.finished}
        running = set(view.unfinished) - ended
        return [change for change in changes if getattr(change, "request", None) in {None, *running}]


class QuarantineSwitch:
    """A controller that closes the whole quarantine of a request from the next token on if the score is at least ``threshold``.

    Only scores of generated tokens count, as in a gate of the forward: the threshold is a quantile of such scores, and the last
    token of every prompt, always the same, may be permanently above or below it. With ``latch`` a closed quarantine stays closed;
    otherwise it opens after a token with a lower score.
    """

    def __init__(self, name: str, monitor: str, threshold: float, shut: Monitor, *, latch: bool = False):
        self.name, self._monitor, self._threshold, self._shut, self._latch = name, monitor, threshold, shut, latch
        self._closed: set[int] = set()

    def on_step(self, view: StepView) -> Sequence[Change]:
        """Return changes that close and open, for the requests that carry the monitor."""
        changes: list[Change] = []
        for request in view.requests:
            if request.finished:
                self._closed.discard(request.request)
            elif request.token is not None and request.position >= request.prompt:
                changes += self._judge(request)
        return changes

    def _judge(self, request: RequestView) -> list[Change]:
        reading = request.readings.get(self._monitor)
        if reading is None:
            return []
        fires, closed = reading.score >= self._threshold, request.request in self._closed
        if fires and not closed:
            self._closed.add(request.request)
            return [SetMonitor(self._shut, request.request)]
        if closed and not fires and not self._latch:
            self._closed.discard(request.request)
            return [ClearMonitor(SHUT, request.request)]
        return []
