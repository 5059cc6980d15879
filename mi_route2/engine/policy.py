"""A ready-made controller: steer a request while a probe says so, with hysteresis.

    e_t = (1 - a) * e_(t-1) + a * s_t            e_0 = s_0: the smoothed score of a request
    engaged from e >= T on, until e < T - hysteresis
    gain         binary: gain        proportional: gain * clip((e - (T - hysteresis)) / hysteresis, 0, 1)

An engaged request is routed to a held configuration, at a scale of ``gain``. With ``gain=0`` the policy is a shadow: it decides and
keeps its decisions, and changes nothing. A score counts where a token was sampled from it, so that it does not matter how a prompt
is cut into pieces; the first one is therefore that of the prompt's last token, unless ``generated`` leaves it out.
"""

import math
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from mi_route2.engine.actions import Action, ClearOverride, Override, SetScale
from mi_route2.engine.controllers import RequestView, StepView
from mi_route2.interventions.edits import score
from mi_route2.interventions.specs import Vector, VectorLike
from mi_route2.sites import Site

STEP, UNSEEN = 0.05, 16
"""How far the gain moves before it is said again; after how many steps a request that was not seen is forgotten."""


class Decision(NamedTuple):
    """What was decided after a step; ``score`` is the smoothed one, ``gain`` what an engaged request gets."""

    step: int
    request: int
    engaged: bool
    score: float
    gain: float


@dataclass
class Follow:
    """What is remembered of a request."""

    score: float
    seen: int
    engaged: bool = False
    gain: float = 0.0


class ProbePolicy:
    """See the module.

    Args:
        config: the held configuration to which an engaged request is routed.
        threshold: in units of the score.
        hysteresis: in the same units; not negative, and positive for ``proportional``.
        monitor: the name of the monitor whose score is read. Or:
        site: where the engine captures at the request's last token, for the score ``h.probe``.
        probe: the vector of that score.
        gain: see the module; so is ``proportional``.
        smoothing: ``a`` there.
        generated: count scores of generated tokens alone, on which monitors act in the forward: a threshold that was set on such
            tokens says nothing of a prompt's last one.
    """

    def __init__(
        self,
        config: str,
        threshold: float,
        hysteresis: float = 0.0,
        *,
        monitor: str | None = None,
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
            raise ValueError("the policy reads a monitor, or a probe at a site: give monitor, or site and probe")
        if not (math.isfinite(threshold) and math.isfinite(hysteresis) and hysteresis >= 0 and math.isfinite(gain) and gain >= 0):
            raise ValueError("threshold, hysteresis and gain are finite, and neither hysteresis nor gain is negative")
        if proportional and hysteresis == 0:
            raise ValueError("a proportional gain rises over the hysteresis: give one above 0")
        if not 0 < smoothing <= 1:
            raise ValueError(f"smoothing={smoothing} is not between 0 and 1: 1 takes each score as it is")
        self.name, self.config, self.threshold, self.hysteresis = name, config, threshold, hysteresis
        self.gain, self.proportional, self.smoothing = gain, proportional, smoothing
        self.wants = frozenset[Site]() if site is None else frozenset({site})
        self._monitor, self._site, self._generated = monitor, site, generated
        self._probe = None if probe is None else Vector(probe).data
        self.follows: dict[int, Follow] = {}
        self.decisions: deque[Decision] = deque(maxlen=keep)
        """The last flips and moves of the gain, the oldest first."""

    def on_step(self, view: StepView) -> list[Action]:
        """What is to change for the requests of this step, and for those that were not seen for too long."""
        actions: list[Action] = []
        for request in view.requests:
            if request.finished:
                self.follows.pop(request.request, None)
            elif (value := self._score(request)) is not None:
                actions += self._decide(view.step, request.request, value)
        for request in [number for number, follow in self.follows.items() if view.step - follow.seen > UNSEEN]:
            if self.follows.pop(request).engaged and self.gain:
                actions += (ClearOverride(request), SetScale(1.0, request))
        return actions

    def _score(self, request: RequestView) -> float | None:
        if request.token is None or (self._generated and request.position < request.prompt):
            return None
        if self._monitor is not None:
            reading = request.readings.get(self._monitor)
            value = None if reading is None else reading.score
        else:
            row = None if self._site is None else request.captured.get(self._site)
            value = None if row is None or self._probe is None else float(score(row.flatten(), self._probe.to(row.device)))
        return value if value is not None and math.isfinite(value) else None

    def _decide(self, step: int, request: int, value: float) -> list[Action]:
        follow = self.follows.get(request)
        if follow is None:
            follow = self.follows[request] = Follow(value, step)
        else:
            follow.score, follow.seen = (1 - self.smoothing) * follow.score + self.smoothing * value, step
        low = self.threshold - self.hysteresis
        was, follow.engaged = follow.engaged, follow.score >= (low if follow.engaged else self.threshold)
        gain = self._gain(follow.score - low) if follow.engaged else 0.0
        if was == follow.engaged and abs(gain - follow.gain) < STEP:
            return []
        follow.gain = gain
        self.decisions.append(Decision(step, request, follow.engaged, follow.score, gain))
        if not self.gain:
            return []
        if not follow.engaged:
            return [ClearOverride(request), SetScale(1.0, request)]
        scale = SetScale(gain, request)
        return [scale] if was else [Override(request, self.config), scale]

    def _gain(self, above: float) -> float:
        return self.gain * min(max(above / self.hysteresis, 0.0), 1.0) if self.proportional else self.gain
