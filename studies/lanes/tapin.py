"""Tap-In: hints about the next token at every position of a stream, from earlier occurrences of the last tokens.

    hints = find_hints(stream.tokens, window=256)        for windows of 256 tokens, every 64
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

from studies.lanes.config import BOS
from studies.lanes.tapin_index import LEAST, automaton, match, table_size

MOST = 100
STRIDE = 64
_NOTHING = np.iinfo(np.uint16).max


@dataclass(frozen=True)
class Hints:
    """The hint for ``tokens[t + 1]`` at every position t of a stream; -1, 0, 0 and False if there is none.

    Attributes:
        token: Token of the winner.
        length: Number of matched tokens, 3 to 100.
        votes: Number of votes, 1 or more.
        cross: True if the match lies outside of the window.
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


def window_starts(n: int, window: int, stride: int = STRIDE) -> Int64[Tensor, " n"]:
    """Return the start of the window that scores each of ``n`` positions.

    The first window scores all of its positions; each later one starts a stride later and scores its last ``stride``. The last
    window may be short: no position is scored twice.

    Raises:
        ValueError: Unless 1 <= stride <= window.
    """
    if not 1 <= stride <= window:
        raise ValueError(f"windows of {window} tokens every {stride} leave tokens out: choose a stride from 1 to the window")
    return (torch.arange(n) - (window - 1)).clamp(min=0).add(stride - 1).div(stride, rounding_mode="floor") * stride


def find_hints(
    tokens: Int64[Tensor, " s"], window: int, *, stride: int = STRIDE, starts: Int64[Tensor, " n"] | None = None
) -> Hints:
    """Return the hints at all positions of a stream, whose documents start at its BOS tokens (and at 0).

    ``starts`` is the start of the window that scores each position, if it is not ``window_starts(s, window, stride)``.

    Raises:
        ValueError: If tokens are outside of the vocabulary, or if starts decrease or lie ``window`` tokens or more back.
    """
    ids = tokens.cpu().numpy()
    if len(ids) and not 0 <= ids.min() <= ids.max() < _NOTHING:
        raise ValueError(f"tokens must be from 0 to {_NOTHING - 1}, but they range from {ids.min()} to {ids.max()}")
    first = (window_starts(len(ids), window, stride) if starts is None else starts).cpu().numpy()
    _check(first, len(ids), window)
    n = len(ids)
    documents = _documents(ids)
    lost = _lost_lengths(documents, window)
    padded = np.full(window + n, _NOTHING, dtype=np.uint16)
    padded[window:] = ids
    token, length, votes = (np.empty(n, dtype=np.int64) for _ in range(3))
    cross = np.empty(n, dtype=np.bool_)
    if n:
        slots = np.zeros(n, dtype=np.int64)
        at, sizes = lost
        slots[at] = [table_size(int(size)) for size in sizes]
        index = automaton(int(sizes.max()))
        runs, count = np.zeros(window, dtype=np.uint16), np.zeros(n, dtype=np.int64)
        match(padded, _four_grams(ids), first, documents, slots, MOST, index, runs, count, token, length, votes, cross)
    return Hints(*(torch.from_numpy(found) for found in (token, length, votes, cross)))


def _check(starts: np.ndarray, n: int, window: int) -> None:
    if len(starts) != n:
        raise ValueError(f"there are {len(starts)} window starts for {n} tokens: give one for each token")
    back = np.arange(n) - starts
    if n and (starts[0] < 0 or (np.diff(starts) < 0).any() or back.min() < 0 or back.max() >= window):
        raise ValueError(f"window starts must not decrease, and each must lie 0 to {window - 1} tokens before its position")


def _documents(ids: np.ndarray) -> np.ndarray:
    """Return [n]: the start of the document of each position."""
    return np.maximum.accumulate(np.where(ids == BOS, np.arange(len(ids)), 0))


def _lost_lengths(documents: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the starts of documents, and how many tokens of each can leave a window before the document ends."""
    at, sizes = np.unique(documents, return_counts=True)
    return at, np.maximum(sizes - window, 0)


def _four_grams(ids: np.ndarray) -> np.ndarray:
    """Return [n]: a number for tokens[p - 2 .. p + 1], equal if these are equal; 0 at the ends, where there is no four-gram."""
    numbers = np.zeros(len(ids), dtype=np.int64)
    if len(ids) >= LEAST + 1:
        keys = np.zeros(len(ids) - LEAST, dtype=np.int64)
        for k in range(LEAST + 1):
            keys = keys * 65536 + ids[k : len(ids) - LEAST + k]
        numbers[LEAST - 1 : -1] = np.unique(keys, return_inverse=True)[1]
    return numbers


_ROWS = 4096


@dataclass(frozen=True)
class Mixing:
    """Constants of the formula of a hint's weight.

    Raises:
        ValueError: If a weight could be outside of [0, 1), or if ``top`` is less than 1.
    """

    within: float = 0.02
    cross: float = 0.12
    per_length: float = 0.15
    per_vote: float = 0.2
    most: float = 0.5
    top: int = 1000

    def __post_init__(self) -> None:
        if not 0 <= self.most < 1:
            raise ValueError(f"most is {self.most}: a hint's weight must be at least 0 and below 1")
        if not all(number >= 0 for number in (self.within, self.cross, self.per_length, self.per_vote)):
            raise ValueError(f"within, cross, per_length and per_vote must be at least 0, but this is {self}")
        if self.top < 1:
            raise ValueError(f"top is {self.top}: it must be at least 1; a large number drops no hint")

    def weights(self, hints: Hints) -> Float64[Tensor, " s"]:
        """Return the weight of each hint before any is dropped; 0 if there is no hint."""
        base = self.within + (self.cross - self.within) * hints.cross.double()
        length = 1 + self.per_length * (hints.length - LEAST).double()
        votes = 1 + self.per_vote * hints.votes.clamp(min=1).double().log()
        return torch.where(hints.offered, (base * length * votes).clamp(max=self.most), 0.0)


def kept(logits: Float[Tensor, "s v"], hints: Hints, top: int) -> Bool[Tensor, " s"]:
    """Return the mask of hints whose token is among the ``top`` likeliest: fewer than ``top`` logits are larger than its own."""
    offered = hints.offered.to(logits.device)
    if top >= logits.shape[-1]:
        return offered
    own = logits.gather(-1, _tokens(logits, hints))
    return offered & ((logits > own).sum(-1) < top)


def mix(logits: Float[Tensor, "s v"], hints: Hints, mixing: Mixing = Mixing()) -> Float64[Tensor, "s v"]:
    """Return ln p' over the vocabulary, from logits (or log-probabilities) and the hints at the same positions."""
    w = _weights(logits, hints, mixing)
    mixed = torch.log_softmax(logits.double(), -1) + torch.log1p(-w)[:, None]
    tokens = _tokens(logits, hints)
    return mixed.scatter(-1, tokens, torch.logaddexp(mixed.gather(-1, tokens), w.log()[:, None]))


def mixed_nll(
    logits: Float[Tensor, "s v"],
    targets: Int64[Tensor, " s"],
    hints: Hints,
    mixing: Mixing = Mixing(),
) -> Float64[Tensor, " s"]:
    """Return -ln p'(target) in nats, as from ``mix``, but only for the targets and a few rows at a time."""
    w = _weights(logits, hints, mixing)
    total = torch.cat([rows.double().logsumexp(-1) for rows in logits.split(_ROWS)])
    own = logits.gather(-1, targets[:, None])[:, 0].double() - total + torch.log1p(-w)
    hit = targets == hints.token.to(targets.device)
    return -torch.where(hit, torch.logaddexp(own, w.log()), own)


def _tokens(logits: Tensor, hints: Hints) -> Int64[Tensor, "s 1"]:
    """Return the hinted tokens as an index; 0 (with weight 0) if there is no hint."""
    return hints.token.clamp(min=0)[:, None].to(logits.device)


def _weights(logits: Tensor, hints: Hints, mixing: Mixing) -> Float64[Tensor, " s"]:
    if len(hints) != len(logits):
        raise ValueError(
            f"there are {len(hints)} hints for {len(logits)} positions: select those of the positions by hints.at(...)"
        )
    return torch.where(kept(logits, hints, mixing.top), mixing.weights(hints).to(logits.device), 0.0)
