"""What the engine's tests do again and again: a tiny host, steps until all is done, a controller made of a function."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from alone import alone
from families import make_family

from mi_route2.engine import Engine, Request, Result
from mi_route2.engine.controllers import Change, StepView
from mi_route2.hosts import open_host
from mi_route2.hosts.base import Host
from mi_route2.sites import Site


def tiny(family: str = "MicroGPT", dtype: torch.dtype = torch.float64, name: str = "torch") -> Host:
    return open_host(name, make_family(family, dtype))


def finish(engine: Engine, most: int = 200) -> dict[int, Result]:
    """All results, by request in the order in which they ended, within ``most`` steps."""
    results: dict[int, Result] = {}
    for _ in range(most):
        if not engine.busy:
            return results
        results |= {one.request: one for one in engine.step()}
    raise AssertionError(f"still busy after {most} steps: {engine.scheduler.waiting} wait, {engine.scheduler.running} run")


def followed(engine: Engine, most: int = 40) -> tuple[dict[int, Result], dict[int, list[int]], int]:
    """All results, the tokens that events told of each request, and the number of steps that were interrupted."""
    results: dict[int, Result] = {}
    told: defaultdict[int, list[int]] = defaultdict(list)
    interrupts = 0
    for _ in range(most):
        try:
            results |= {one.request: one for one in engine.step()}
        except KeyboardInterrupt:
            interrupts += 1
        for event in engine.events:
            told[event.request] += [] if event.token is None else [event.token.token]
    assert not engine.busy
    return results, {number: told[number] for number in results}, interrupts


def table(result: Result) -> torch.Tensor:
    """The log-probabilities that were asked for at each generated token ``[n v]``."""
    assert result.finish == "length", result.error
    return torch.tensor([token.requested for token in result.tokens], dtype=torch.float64)


def right(host: Host, result: Result, request: Request) -> None:
    """Compare with whole forwards over the request alone."""
    torch.testing.assert_close(table(result), alone(host, request).logits.log_softmax(-1), rtol=0, atol=1e-10)


class Letters:
    """A tokenizer whose tokens are letters."""

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(ord("A") + token) for token in ids)


@dataclass
class Doing:
    """A controller that does what a function says after each step; ``None`` is no action."""

    do: Callable[[StepView], Sequence[Change] | None]
    name: str = "doing"
    wants: frozenset[Site] = frozenset()

    def on_step(self, view: StepView) -> Sequence[Change]:
        return self.do(view) or ()
