"""Which tokens one forward runs: the rows of a rectangular batch, each a piece of one request's sequence.

Positions are logical: a request's first token is 0, wherever it stands in the batch. Padding stands right of the real tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor


class Piece(NamedTuple):
    """The tokens ``start .. start + count - 1`` of a request whose prompt has ``prompt`` tokens."""

    request: int
    start: int
    count: int
    prompt: int


@dataclass(frozen=True)
class Layout:
    """One forward over ``b`` pieces of at most ``t`` tokens.

    ``decode`` marks the tokens that were generated (position at or after the prompt's length), per token: one piece may hold both.
    """

    pieces: tuple[Piece, ...]
    positions: Int[Tensor, "b t"]
    real: Bool[Tensor, "b t"]
    decode: Bool[Tensor, "b t"]

    @property
    def requests(self) -> tuple[int, ...]:
        """The request of each row."""
        return tuple(piece.request for piece in self.pieces)

    @property
    def single(self) -> bool:
        """Whether every row is one token, so that nothing is padded."""
        return self.positions.shape[1] == 1

    @staticmethod
    def of(pieces: Sequence[Piece], device: torch.device | str = "cpu") -> "Layout":
        """The layout of ``pieces``; ``ValueError`` for none, two of one request, and numbers that cannot be."""
        requests, starts, counts, prompts = zip(*pieces, strict=True) if pieces else ((), (), (), ())
        if len(set(requests)) < max(len(pieces), 1):
            raise ValueError("a layout needs at least one piece, and at most one of each request")
        if min(min(requests), min(starts)) < 0 or min(min(counts), min(prompts)) < 1:
            raise ValueError(f"pieces {pieces} cannot be: each has at least one token, and no number is negative")
        start, prompt = torch.tensor(starts, device=device)[:, None], torch.tensor(prompts, device=device)[:, None]
        longest = max(counts)
        if longest == 1:
            decode = start >= prompt
            return Layout(tuple(pieces), start, torch.ones_like(decode), decode)
        count = torch.tensor(counts, device=device)[:, None]
        steps = torch.arange(longest, device=device)[None]
        real = steps < count
        positions = torch.where(real, start + steps, 0)
        return Layout(tuple(pieces), positions, real, real & (positions >= prompt))
