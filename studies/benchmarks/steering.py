"""Cost of steering at a decode step, in microseconds beside the forward: preparation, actions at each site, monitors.

    python -m studies.benchmarks steering [--quick] [--rounds 15] [--out FILE.json]

A batch of requests decodes one token each, in float32 on one thread. Every side is ``begin``, ``at`` for each of its sites, and
``end``, on existing activations; the first side is the single addition that any steering requires. The batch is the same at every
step except for the last side, in which an action changes a request's scale before every step, so that each step is laid out again.
"""

from collections.abc import Callable
from functools import partial
from statistics import median

import numpy as np
import torch
from torch import Tensor

from mi_route2.sites import Site
from mi_route2.steering.plan import Layout, Piece
from mi_route2.steering.specs import Clamp, Monitor, Steer, Steering
from mi_route2.steering.state import SteeringState
from studies.benchmarks.measurement.paired import report, take_turns, timers
from studies.benchmarks.options import SteeringOptions
from studies.common.tables import markdown_table

WIDTHS, REQUESTS, CALLS = (128, 512, 2048), 64, 200
EARLY, SITE = Site(0, "resid_post"), Site(1, "resid_post")
ADDITION = "the addition alone"


class SteeringBench:
    """Builder of the sides over a batch of ``requests`` activations of ``width`` numbers."""

    def __init__(self, width: int, requests: int, seed: int):
        self.width, self.requests = width, requests
        self.generator = torch.Generator().manual_seed(seed)
        self.h = torch.randn(requests, 1, width, generator=self.generator)
        self.layout = Layout.of([Piece(request, 10, 1, 5) for request in range(requests)])

    def vector(self) -> Tensor:
        return torch.randn(self.width, generator=self.generator)

    def state(self, spec: Callable[[int], Steering | None]) -> SteeringState:
        """Return a state with all requests admitted, each with its own steering."""
        state = SteeringState(lambda _: (self.width,), rows=self.requests)
        for request in range(self.requests):
            state.admit(request, spec(request))
        return state

    def step(self, state: SteeringState) -> None:
        """Run the steering of one forward."""
        h = self.h
        if state.begin(self.layout):
            for site in sorted(state.sites()):
                h = state.at(site, h)
        state.end()

    def sides(self) -> dict[str, Callable[[], object]]:
        """Return the sides by name."""
        added = torch.randn(self.requests, 1, self.width, generator=self.generator)
        steered = self.state(lambda _: self._steered())
        changing = self.state(lambda _: self._steered())
        gated = self.state(lambda _: None)
        gated.set_tier([Steer(SITE, self.vector())])
        gated.set_monitor(Monitor(EARLY, self.vector()))
        states = {
            "nothing that acts": self.state(lambda _: None),
            "a site, each request its own vector": steered,
            "a site, every second request": self.state(lambda request: self._steered() if request % 2 else None),
            "an idle monitor, each request its own": self.state(
                lambda _: Steering(monitors=(Monitor(SITE, self.vector(), gates=()),))
            ),
            "a monitor that gates vectors at a later site": gated,
            "a clamp, each request its own": self.state(lambda _: Steering(clamps=(Clamp(SITE, self.vector(), value=1),))),
        }

        def changed() -> None:
            changing.set_scale(0.5, request=0)
            self.step(changing)

        sides: dict[str, Callable[[], object]] = {ADDITION: lambda: self.h + added}
        sides |= {name: lambda state=state: self.step(state) for name, state in states.items()}
        return sides | {"the same site, and an action before every step": changed}

    def _steered(self) -> Steering:
        return Steering(base=(Steer(SITE, self.vector()),))


def microseconds(width: int, requests: int, calls: int, rounds: int, seed: int) -> dict[str, tuple[float, ...]]:
    """Return the time of a step of every side in each round, averaged over ``calls`` consecutive steps."""

    def many(step: Callable[[], object]) -> None:
        for _ in range(calls):
            step()

    sides = timers({name: partial(many, step) for name, step in SteeringBench(width, requests, seed).sides().items()})
    with torch.inference_mode():
        measured = take_turns(sides, rounds, np.random.default_rng(seed))
    return {name: tuple(1e6 * one / calls for one in seconds) for name, seconds in measured.items()}


def table(times: dict[int, dict[str, tuple[float, ...]]]) -> str:
    """Return a Markdown table of medians, one column per width."""
    rows = [(name, *(f"{median(sides[name]):.0f}" for sides in times.values())) for name in next(iter(times.values()))]
    return markdown_table(("", *(f"d = {width}" for width in times)), rows)


def run(options: SteeringOptions) -> None:
    """Measure, print the table, and write ``options.out``."""
    widths, requests, calls = ((8,), 4, 2) if options.quick else (WIDTHS, REQUESTS, CALLS)
    times = {width: microseconds(width, requests, calls, options.turns, options.seed) for width in widths}
    head = f"{options.turns} rounds, {requests} requests, one thread: microseconds of a step"
    report(options, head, table(times), {"requests": requests, "microseconds": times})
