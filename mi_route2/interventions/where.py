"""Which positions of a sequence are captured.

    Where()                                   every position that the model reads
    Where("last")                             the last token of the prompt
    Where(positions=(3, 40))                  logical positions, which may lie in what is generated
    Where("generated", token_ids={198})       line breaks that were generated

Positions are logical: the first token of the sequence is 0, padding does not count. A sequence comes in chunks (chunked prefill,
then one token at a time): what is kept does not depend on where it is cut. The last token that was sampled is never read by the
model, so it has no activations and no position here.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal, get_args

from pydantic import PlainValidator

from mi_route2.validation import validated

Part = Literal["all", "prompt", "generated", "last"]
PARTS = get_args(Part)


def _ordered(numbers: object, info: Any) -> tuple[int, ...] | frozenset[int] | None:
    """Positions in order, or a set of token ids; ``ValueError`` says what is wrong with them."""
    name = info.field_name
    if numbers is None:
        return None
    if not isinstance(numbers, Iterable):
        raise ValueError(f"{name} is a sequence of whole numbers, as {name}=(3, 40), not {numbers!r:.60}")
    given = list(numbers)
    if not given:
        raise ValueError(f"{name} is empty: name at least one, or leave it out for no limit")
    if wrong := [number for number in given if not isinstance(number, int) or isinstance(number, bool) or number < 0]:
        raise ValueError(f"{wrong[0]!r} in {name} is not a whole number from 0 on: logical positions and ids count from 0")
    ordered = sorted(given)
    if twice := [one for one, other in pairwise(ordered) if one == other]:
        raise ValueError(f"{twice[0]} stands twice in {name}: name each number once")
    return frozenset(ordered) if name == "token_ids" else tuple(ordered)


@validated
class Where:
    """A part of the sequence (one of ``PARTS``) or ``positions`` by number; of these, where ``token_ids`` holds the token.

    ``positions`` and ``token_ids`` take any iterable of whole numbers from 0 on, and are kept in order. ``ValueError`` for a
    negative or repeated number, an empty choice, an unknown part, and for a part together with positions.
    """

    part: Part = "all"
    positions: Annotated[Iterable[int] | None, PlainValidator(_ordered)] = None
    token_ids: Annotated[Iterable[int] | None, PlainValidator(_ordered)] = None

    def __post_init__(self) -> None:
        if self.positions is not None and self.part != "all":
            raise ValueError(f"part={self.part!r} and positions contradict each other: give one of them")

    def rows(self, tokens: Sequence[int], start: int, prompt_length: int) -> list[int]:
        """The rows of a chunk that are kept, in order, counted from the chunk's first token.

        Args:
            tokens: the ids of the chunk's tokens.
            start: the position of the first of them.
            prompt_length: tokens in the prompt of the whole sequence; one at least.
        """
        if start < 0 or prompt_length < 1:
            raise ValueError(f"start={start} and prompt_length={prompt_length} cannot be: they count from 0 and from 1")
        places = self._places(start, start + len(tokens), prompt_length)
        wanted = self.token_ids
        return [place - start for place in places if wanted is None or tokens[place - start] in wanted]

    def missing(self, length: int) -> tuple[int, ...]:
        """The asked-for ``positions`` that never came in a sequence of which the model read ``length`` tokens.

        A position that came and held another token than ``token_ids`` asks for did come.
        """
        positions = self._numbers()
        return positions[bisect_left(positions, length) :]

    def _places(self, start: int, stop: int, prompt_length: int) -> Sequence[int]:
        if self.positions is not None:
            numbers = self._numbers()
            return numbers[bisect_left(numbers, start) : bisect_left(numbers, stop)]
        low = {"generated": prompt_length, "last": prompt_length - 1}.get(self.part, 0)
        high = prompt_length if self.part in ("prompt", "last") else stop
        return range(max(low, start), min(high, stop))

    def _numbers(self) -> tuple[int, ...]:
        return () if self.positions is None else tuple(self.positions)
