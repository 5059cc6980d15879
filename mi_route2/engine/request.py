"""What is asked of the engine and what it answers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import nan
from types import MappingProxyType
from typing import Literal, NamedTuple

from jaxtyping import Float
from torch import Tensor

from mi_route2.checks import converts
from mi_route2.engine.rules import Rule
from mi_route2.engine.sampling import Sampling, token_ids, whole
from mi_route2.interventions.patches import Patch
from mi_route2.interventions.specs import Steering, several
from mi_route2.interventions.where import Where
from mi_route2.sites import Site, demand_site

Finish = Literal["length", "stop", "cancelled", "error"]


@converts
@dataclass(frozen=True)
class Capture:
    """Keep the values at ``site`` at the positions that ``where`` names, as they are before any patch or steering there."""

    site: Site
    where: Where = field(default_factory=Where)

    def __post_init__(self) -> None:
        demand_site(self.site, "a capture")
        if not isinstance(self.where, Where):
            raise ValueError(f"the positions of a capture are a Where, as Where('prompt'), not {self.where!r:.60}")


@converts
@dataclass(frozen=True, eq=False)
class Request:
    """One sequence and its own interventions.

    ``prompt`` is token ids. What ``capture`` keeps comes with the result, or goes to the run store as run ``run`` where that is
    given. Higher ``priority`` goes first. ``rules`` say what is to change as it is generated, ``conversation`` where they hold
    beyond the request. ``owner`` is who held configurations and set monitors that end with the last of the owner's requests.
    ``ValueError`` for what is of another kind.
    """

    prompt: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    patch: tuple[Patch, ...] = ()
    steering: Steering | None = None
    capture: tuple[Capture, ...] = ()
    run: str | None = None
    priority: int = 0
    rules: tuple[Rule, ...] = ()
    conversation: str | None = None
    owner: str = "client"

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt", token_ids("the prompt", self.prompt))
        object.__setattr__(self, "priority", whole("priority", self.priority))
        for name, kind in (("patch", Patch), ("capture", Capture), ("rules", Rule)):
            if given := getattr(self, name):
                object.__setattr__(self, name, several(name, given, kind))
        for name, given, kind in (("sampling", self.sampling, Sampling), ("steering", self.steering, Steering | None)):
            if not isinstance(given, kind):
                raise ValueError(f"{name} is a {name.capitalize()}, not a {type(given).__name__}: write {name.capitalize()}(...)")


class Token(NamedTuple):
    """One generated token; where asked for its log-probability (else NaN), the likeliest tokens' and those of given ones."""

    token: int
    logprob: float = nan
    top: Mapping[int, float] = MappingProxyType({})
    asked: tuple[float, ...] = ()


@dataclass(frozen=True, eq=False)
class Captured:
    """Rows of one site: logical positions, ascending, and values ``[n, ...]``."""

    positions: tuple[int, ...]
    rows: Float[Tensor, "n ..."]


@dataclass(eq=False)
class Result:
    """What became of a request. ``error`` is its one sentence where ``finish`` is ``"error"``.

    ``unfired`` names each capture and patch that was asked for at a position which was never computed, because the request ended
    before. ``cached`` is the number of prompt tokens whose keys and values were found, ``preemptions`` how often it was put back.
    """

    request: int
    tokens: list[Token] = field(default_factory=list)
    finish: Finish | None = None
    text: str | None = None
    error: str | None = None
    captured: dict[Site, Captured] = field(default_factory=dict)
    unfired: list[str] = field(default_factory=list)
    cached: int = 0
    preemptions: int = 0

    @property
    def ids(self) -> list[int]:
        """The generated tokens."""
        return [token.token for token in self.tokens]

    @property
    def logprobs(self) -> list[float]:
        """Their log-probabilities."""
        return [token.logprob for token in self.tokens]
