"""Which position of the clean prompt stands for which of the corrupt one: its partner, whose value is put in.

    equal lengths    every position is its own partner
    otherwise        the common prefix by identity, the common suffix by the difference of the lengths; the middle has no partner

And which tokens a part of a text is: ``tokens_of("The cat sat on the cat", "cat", offsets, occurrence=1)``.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Alignment:
    """The first ``prefix`` and the last ``suffix`` tokens of two prompts are partners. ``ValueError`` where these do not fit."""

    clean_length: int
    corrupt_length: int
    prefix: int
    suffix: int

    def __post_init__(self) -> None:
        shorter = min(self.clean_length, self.corrupt_length)
        if min(self.prefix, self.suffix) < 0 or self.prefix + self.suffix > shorter:
            raise ValueError(f"{self} cannot be: prefix and suffix are parts of both prompts, apart from each other")

    def source(self, position: int) -> int | None:
        """The clean position for a corrupt one, ``None`` where it has none. ``ValueError`` outside of the corrupt prompt."""
        if not 0 <= position < self.corrupt_length:
            raise ValueError(f"position {position} is outside the corrupt prompt, which has 0..{self.corrupt_length - 1}")
        if position < self.prefix:
            return position
        if position >= self.corrupt_length - self.suffix:
            return position + self.clean_length - self.corrupt_length
        return None

    @property
    def skipped(self) -> range:
        """Corrupt positions without a partner."""
        return range(self.prefix, self.corrupt_length - self.suffix)

    @property
    def summary(self) -> str:
        """What is paired with what, in a sentence."""
        if self.prefix == self.clean_length == self.corrupt_length:
            return f"equal lengths: each of the {self.prefix} positions is its own partner"
        shift = self.clean_length - self.corrupt_length
        return (
            f"{self.corrupt_length} corrupt tokens on {self.clean_length} clean ones: the first {self.prefix} by identity, the "
            f"last {self.suffix} shifted by {shift:+d}; {len(self.skipped)} corrupt and "
            f"{self.clean_length - self.prefix - self.suffix} clean positions in between have no partner"
        )


def align(clean: Sequence[int] | None, corrupt: Sequence[int], *, clean_length: int | None = None) -> Alignment:
    """The alignment of two prompts' tokens.

    Without the clean tokens (a captured run that did not keep them) its ``clean_length`` must be the corrupt prompt's, else
    ``ValueError``. ``ValueError`` for an empty prompt, and for prompts that share neither their beginning nor their end.
    """
    length = clean_length if clean is None else len(clean)
    if length is None:
        raise ValueError("give the clean prompt's tokens, or at least their number as clean_length")
    if not length or not len(corrupt):
        raise ValueError(f"a prompt is empty: the clean one has {length} tokens and the corrupt one {len(corrupt)}")
    if length == len(corrupt):
        return Alignment(length, length, length, 0)
    if clean is None:
        raise ValueError(
            f"the clean run has {length} tokens and the corrupt prompt {len(corrupt)}: give the clean prompt's tokens to align them"
        )
    shorter = min(length, len(corrupt))
    prefix = _common(clean, corrupt, shorter)
    suffix = _common(clean[::-1], corrupt[::-1], shorter - prefix)
    if not prefix and not suffix:
        raise ValueError(
            f"the clean prompt ({length} tokens) and the corrupt one ({len(corrupt)}) share neither their beginning nor their end: "
            "write prompts that differ in the middle, or that have as many tokens"
        )
    return Alignment(length, len(corrupt), prefix, suffix)


def _common(one: Sequence[int], other: Sequence[int], limit: int) -> int:
    """How many of the first ``limit`` tokens are equal, from the front."""
    return next((i for i in range(limit) if one[i] != other[i]), limit)


def tokens_of(text: str, part: str, offsets: Sequence[tuple[int, int]], occurrence: int = 0) -> tuple[int, ...]:
    """The tokens that overlap ``part`` where it stands in ``text`` for the ``occurrence``-th time, counted from 0.

    ``offsets`` are each token's characters ``[start, end)``; an empty one (a special token) overlaps nothing. Occurrences may
    overlap each other. ``ValueError`` where ``part`` does not stand there so often, or no token is there.
    """
    if not part:
        raise ValueError("the part is empty: give the characters whose tokens are meant")
    starts = [i for i in range(len(text)) if text.startswith(part, i)]
    if not 0 <= occurrence < len(starts):
        raise ValueError(
            f"{part!r} stands in the text {len(starts)} times, so there is no occurrence {occurrence} (they count from 0)"
        )
    low = starts[occurrence]
    found = tuple(i for i, (a, b) in enumerate(offsets) if a < b and a < low + len(part) and low < b)
    if not found:
        raise ValueError(f"no token overlaps {part!r} at character {low}: the tokenizer drops these characters")
    return found
