"""Tap-In: hints about the next token at every position of a stream, from earlier occurrences of the last tokens.

    hints = find_hints(tokens, 256, window_starts(len(tokens), 256, 64))          for windows of 256 tokens, every 64
    hints.token[t], hints.length[t], hints.votes[t]      the hint for tokens[t + 1]; -1, 0, 0 if there is none

For the query that ends at t, scored by the window that starts at w (PR 1518 of parameter-golf, "Tap-In V6"):

    within      p in [w, t - 2] with tokens[p] == tokens[t]; the match extends backwards from p and t, not before w
    cross       p in [d, t - W - 1] with tokens[p] == tokens[t], d where t's document starts: p and p + 1 have left the W tokens
                that end at t, and are in t's document; the match extends not before d at p, and not before w at t
    candidate   tokens[p + 1], if the match has 3 tokens or more (counted up to 100)
    winner      the strictly longest match; of equals the earliest p; cross must be longer than within
    votes       the candidates of both kinds, of any length, that offer the winner's token

Details: a position is emitted once, by the window that scores it (`window_starts`). A match within the window may lie in an earlier
document; only the text that has left the window is limited to the document, and it is the document of t, not (as in V6's public
code) that of the window's first token. A match may include the first token of a window or document, which that code's loop never
reaches; its threshold on the model's entropy is not implemented. Positions between t - W and w are neither within nor cross, as in
that code.

A hint at t depends on tokens up to t alone: all hints of a stream can be found at once, however it is scored later.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from mi_route2.validation import Fraction, NonNegative, validated
from studies.lanes.config import BOS
from studies.lanes.scoring.tapin_index import LEAST, automaton, match, table_size

MOST = 100
_NOTHING = np.iinfo(np.uint16).max


@dataclass(frozen=True)
class Hints:
    """The hint for ``tokens[t + 1]`` at every position t of a stream: the winner's token, matched tokens (3 to 100) and votes.

    They are -1, 0 and 0 if there is none; ``cross`` is True if the match lies outside of the window.
    """

    token: Int64[Tensor, " s"]
    length: Int64[Tensor, " s"]
    votes: Int64[Tensor, " s"]
    cross: Bool[Tensor, " s"]

    def __len__(self) -> int:
        return len(self.token)

    @property
    def offered(self) -> Bool[Tensor, " s"]:
        """Mask of the positions that have a hint."""
        return self.token >= 0

    def at(self, places: slice | Int64[Tensor, " k"]) -> "Hints":
        """Return the hints of some positions."""
        return Hints(self.token[places], self.length[places], self.votes[places], self.cross[places])


def find_hints(tokens: Int64[Tensor, " s"], window: int, starts: Int64[Tensor, " s"]) -> Hints:
    """Return the hints at all positions of a stream, whose documents start at its BOS tokens (and at 0).

    ``starts`` is the start of the window that scores each position (see ``window_starts``).

    Raises:
        ValueError: If tokens are outside of the vocabulary, or if starts decrease or lie ``window`` tokens or more back.
    """
    ids, first, n = tokens.numpy(), starts.numpy(), len(tokens)
    if n and not 0 <= ids.min() <= ids.max() < _NOTHING:
        raise ValueError(f"tokens must be from 0 to {_NOTHING - 1}, but they range from {ids.min()} to {ids.max()}")
    back = np.arange(n) - first
    if n and (first[0] < 0 or (np.diff(first) < 0).any() or back.min() < 0 or back.max() >= window):
        raise ValueError(f"window starts must not decrease, and each must lie 0 to {window - 1} tokens before its position")
    padded = np.concatenate([np.full(window, _NOTHING, dtype=np.uint16), ids], dtype=np.uint16, casting="unsafe")
    token, length, votes, slots = (np.zeros(n, dtype=np.int64) for _ in range(4))
    cross = np.zeros(n, dtype=np.bool_)
    if n:
        documents = np.maximum.accumulate(np.where(ids == BOS, np.arange(n), 0))  # the start of each position's document
        at, sizes = np.unique(documents, return_counts=True)
        lost = np.maximum(sizes - window, 0)  # tokens of each document that leave a window before the document ends
        slots[at] = [table_size(int(size)) for size in lost]
        runs, count = np.zeros(window, dtype=np.uint16), np.zeros(n, dtype=np.int64)
        room = automaton(int(lost.max()))
        match(padded, _four_grams(ids), first, documents, slots, MOST, room, runs, count, token, length, votes, cross)
    return Hints(*(torch.from_numpy(values) for values in (token, length, votes, cross)))


def _four_grams(ids: np.ndarray) -> np.ndarray:
    """Return [n]: a number for tokens[p - 2 .. p + 1], equal if these are equal; 0 at the ends, where there is no four-gram."""
    numbers = np.zeros(len(ids), dtype=np.int64)
    if len(ids) >= LEAST + 1:
        keys = np.zeros(len(ids) - LEAST, dtype=np.int64)
        for k in range(LEAST + 1):
            keys = keys * 65536 + ids[k : len(ids) - LEAST + k]
        numbers[LEAST - 1 : -1] = np.unique(keys, return_inverse=True)[1]
    return numbers


@validated
class Mixing:
    """Constants of the weight of a hint that matched `length` tokens and has so many `votes`.

    w = min(most, base (1 + per_length (length - 3)) (1 + per_vote ln votes))       base: within the window, or across windows
    """

    within: NonNegative = 0.02
    cross: NonNegative = 0.12
    per_length: NonNegative = 0.15
    per_vote: NonNegative = 0.2
    most: Fraction = 0.5

    def weights(self, hints: Hints) -> Float64[Tensor, " s"]:
        """Return the weight of each hint; 0 if there is no hint."""
        base = self.within + (self.cross - self.within) * hints.cross.double()
        length = 1 + self.per_length * (hints.length - LEAST).double()
        votes = 1 + self.per_vote * hints.votes.clamp(min=1).double().log()
        return torch.where(hints.offered, (base * length * votes).clamp(max=self.most), 0.0)


def mixed_nll(logits: Float[Tensor, "s v"], targets: Int64[Tensor, " s"], hints: Hints, mixing: Mixing) -> Float64[Tensor, " s"]:
    """Return -ln p'(target) in nats, where the hint c at a position takes its weight from all tokens:  p' = (1 - w) p,  p'(c) += w.

    The record drops a hint whose token is not among the 1,000 likeliest; a vocabulary of 257 has no such token.
    """
    if len(hints) != len(logits):
        raise ValueError(
            f"there are {len(hints)} hints for {len(logits)} positions: select those of the positions by hints.at(...)"
        )
    w = mixing.weights(hints)
    log_prob = logits.gather(-1, targets[:, None])[:, 0].double() - logits.double().logsumexp(-1) + torch.log1p(-w)
    return -torch.where(targets == hints.token, torch.logaddexp(log_prob, w.log()), log_prob)
