"""Prompts as callers give them: token ids, or a text with a tokenizer; positions by number, or by what stands there."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

import numpy as np
from torch import Tensor

from mi_route2.interventions.sweeps.alignment import tokens_of

Given = str | Tensor | np.ndarray | Sequence[int]


@dataclass(frozen=True)
class Span:
    """The tokens that overlap ``text`` where it stands in the corrupt prompt for the ``occurrence``-th time, counted from 0."""

    text: str
    occurrence: int = 0


Positions = None | int | str | Span | Iterable[int | str | Span]
"""``None`` is every position; a text is its first ``Span``."""


@dataclass(frozen=True)
class Prompt:
    """Token ids, the text of each (its number where there is no tokenizer), and the whole text where it was given as one."""

    tokens: tuple[int, ...]
    labels: tuple[str, ...]
    text: str | None = None
    offsets: tuple[tuple[int, int], ...] | None = None

    def spans(self, span: Span) -> tuple[int, ...]:
        """The positions of ``span``; ``ValueError`` where the prompt is no text, or its tokenizer does not know characters."""
        if self.text is None:
            raise ValueError(
                f"the position {span.text!r} is a text, but the prompt was given as token ids: give the prompt as text"
            )
        if self.offsets is None:
            raise ValueError(
                f"this tokenizer does not say which characters a token has: give positions of {span.text!r} as numbers"
            )
        return tokens_of(self.text, span.text, self.offsets, span.occurrence)


def read(given: Given, tokenizer: Any, name: str) -> Prompt:
    """The prompt called ``name`` in errors: ids ``[s]`` or ``[1 s]``, or a text, which the tokenizer begins as it always does.

    ``ValueError`` for an empty prompt, for a text without a tokenizer, and for several prompts at once.
    """
    if isinstance(given, str):
        return _read_text(given, tokenizer, name)
    if isinstance(given, Tensor):
        if given.ndim == 2 and len(given) == 1:
            given = given[0]
        if given.ndim != 1 or given.is_floating_point():
            raise ValueError(f"the {name} prompt is one row of token ids, not {given.dtype} of shape {list(given.shape)}")
        given = given.tolist()
    try:
        tokens = tuple(map(index, given))
    except TypeError as error:
        raise ValueError(f"the {name} prompt is one row of token ids, or a text, not {given!r:.60}") from error
    if not tokens:
        raise ValueError(f"the {name} prompt has no tokens")
    return Prompt(tokens, _labels(tokens, tokenizer))


def _read_text(text: str, tokenizer: Any, name: str) -> Prompt:
    if tokenizer is None:
        raise ValueError(f"the {name} prompt is a text, and there is no tokenizer: pass one, or give token ids")
    offsets = None
    if not callable(tokenizer):
        tokens = tokenizer.encode(text)
    elif getattr(tokenizer, "is_fast", False):
        encoded: Any = tokenizer(text, return_offsets_mapping=True)
        tokens, offsets = encoded["input_ids"], tuple((int(a), int(b)) for a, b in encoded["offset_mapping"])
    else:
        encoded = tokenizer(text)
        tokens = encoded["input_ids"]
    if not len(tokens):
        raise ValueError(f"the {name} prompt has no tokens")
    ids = tuple(int(token) for token in tokens)
    return Prompt(ids, _labels(ids, tokenizer), text, offsets)


def _labels(tokens: tuple[int, ...], tokenizer: Any) -> tuple[str, ...]:
    return tuple(str(token) if tokenizer is None else str(tokenizer.decode([token])) for token in tokens)


def places(given: Positions, prompt: Prompt) -> tuple[int, ...]:
    """The positions that are meant, in order, each once. ``ValueError`` outside of the prompt, and for none at all."""
    if given is None:
        return tuple(range(len(prompt.tokens)))
    found: set[int] = set()
    for one in given if isinstance(given, Iterable) and not isinstance(given, str) else [given]:
        if isinstance(one, str | Span):
            found.update(prompt.spans(Span(one) if isinstance(one, str) else one))
            continue
        try:
            found.add(inside(index(one), prompt))
        except TypeError as error:
            raise ValueError(f"{one!r:.60} is no position: give a number, a text that stands there, or a Span") from error
    if not found:
        raise ValueError("no positions: name at least one, or leave them out for all")
    return tuple(sorted(found))


def inside(position: int, prompt: Prompt) -> int:
    """``position``, where the prompt has it."""
    if not 0 <= position < len(prompt.tokens):
        raise ValueError(
            f"position {position} is outside the corrupt prompt, which has 0..{len(prompt.tokens) - 1}: positions count from 0"
        )
    return position
