"""Request and result types."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import nan
from types import MappingProxyType
from typing import Annotated, Literal, NamedTuple

from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from mi_route2.engine.rules import Rule
from mi_route2.engine.sampling import Sampling, TokenIds
from mi_route2.interventions.patches import Patch
from mi_route2.interventions.specs import At, Plain, Steering, several
from mi_route2.interventions.where import Where
from mi_route2.sites import Site
from mi_route2.validation import validated

Finish = Literal["length", "stop", "cancelled", "error"]


@validated
class Capture:
    """Keep the values at ``site`` at the positions that ``where`` names, as they are before any patch or steering there."""

    site: At
    where: Annotated[Where, Field(description="a Where, as Where('prompt')")] = field(default_factory=Where)


@validated
class Request:
    """One sequence and its own interventions.

    ``prompt`` is token ids. What ``capture`` keeps comes with the result, or goes to the run store as run ``run`` where that is
    given. Higher ``priority`` goes first. ``rules`` say what is to change as it is generated, ``conversation`` where they hold
    beyond the request. ``owner`` is who held configurations and set monitors that end with the last of the owner's requests.
    ``ValueError`` for what is of another kind.
    """

    prompt: TokenIds
    sampling: Annotated[Sampling, Field(description="a Sampling: write Sampling(...)")] = field(default_factory=Sampling)
    patch: Annotated[tuple[Patch, ...], several(Patch)] = ()
    steering: Annotated[Steering, Field(description="a Steering: write Steering(...)")] | None = None
    capture: Annotated[tuple[Capture, ...], several(Capture)] = ()
    run: str | None = None
    priority: Annotated[int, Plain] = 0
    rules: Annotated[tuple[Rule, ...], several(Rule)] = ()
    conversation: str | None = None
    owner: str = "client"

    __eq__, __hash__ = object.__eq__, object.__hash__  # two requests of equal fields are two


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
    before, and each capture of which no token came. ``seed`` is that of the request, or the one that the engine drew for it.
    ``cached`` is the number of prompt tokens whose keys and values were found, ``preemptions`` how often it was put back.
    """

    request: int
    tokens: list[Token] = field(default_factory=list)
    finish: Finish | None = None
    text: str | None = None
    error: str | None = None
    captured: dict[Site, Captured] = field(default_factory=dict)
    unfired: list[str] = field(default_factory=list)
    seed: int | None = None
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
