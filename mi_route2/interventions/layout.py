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
        if not pieces or len({piece.request for piece in pieces}) < len(pieces):
            raise ValueError("a layout needs at least one piece, and at most one of each request")
        if min(map(min, pieces)) < 0 or min(piece.count for piece in pieces) < 1 or min(piece.prompt for piece in pieces) < 1:
            raise ValueError(f"pieces {pieces} cannot be: each has at least one token, and no number is negative")
        start = torch.tensor([piece.start for piece in pieces], device=device)[:, None]
        prompt = torch.tensor([piece.prompt for piece in pieces], device=device)[:, None]
        if all(piece.count == 1 for piece in pieces):
            decode = start >= prompt
            return Layout(tuple(pieces), start, torch.ones_like(decode), decode)
        count = torch.tensor([piece.count for piece in pieces], device=device)[:, None]
        steps = torch.arange(max(piece.count for piece in pieces), device=device)[None]
        real = steps < count
        positions = torch.where(real, start + steps, 0)
        return Layout(tuple(pieces), positions, real, real & (positions >= prompt))
