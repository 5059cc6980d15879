"""What monitors read in one forward: a score and a gate for every token of every piece that they watch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from mi_route2.interventions.buffers import Watched
from mi_route2.interventions.layout import Layout


class Reading(NamedTuple):
    """A monitor at one token: ``score = h.probe`` and ``gate = sigmoid(sharpness * (score - threshold))``."""

    score: float
    gate: float


@dataclass(frozen=True)
class Track:
    """A monitor over the tokens of a piece, one number a token."""

    scores: Float[Tensor, " n"]
    gates: Float[Tensor, " n"]


@dataclass(frozen=True)
class Readings:
    """Of one forward; nothing is calculated before it is asked for, so that an idle monitor costs its scores alone."""

    layout: Layout | None = None
    scores: Sequence[tuple[Watched, Tensor]] = field(default=())

    def __bool__(self) -> bool:
        return bool(self.scores)

    def _entries(self) -> Iterator[tuple[Watched, Tensor, int, str, int, int]]:
        for watched, scores in self.scores:
            start = 0
            for piece, watch, cells in watched.entries:
                yield watched, scores, piece, watch.name, start, start + len(cells)
                start += len(cells)

    def of(self, request: int) -> dict[str, Track]:
        """Monitor -> scores and gates of the request's tokens in this forward, in their order."""
        found: dict[str, Track] = {}
        for watched, scores, piece, name, start, stop in self._entries():
            if self.layout is not None and self.layout.pieces[piece].request == request:
                found[name] = Track(scores[start:stop], watched.gate(scores)[start:stop])
        return found

    def last(self) -> Mapping[int, Mapping[str, Reading]]:
        """Request -> monitor -> its reading at the last token of the request in this forward."""
        found: dict[int, dict[str, Reading]] = {}
        numbers = {id(scores): (scores.tolist(), watched.gate(scores).tolist()) for watched, scores in self.scores}
        for _, scores, piece, name, _, stop in self._entries():
            assert self.layout is not None
            values, gates = numbers[id(scores)]
            found.setdefault(self.layout.pieces[piece].request, {})[name] = Reading(values[stop - 1], gates[stop - 1])
        return found
