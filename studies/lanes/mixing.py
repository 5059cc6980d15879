"""A hint moves some probability to the token that it offers: p' = (1 - w) p, and p'(c) += w.

    w = min(0.5, base * (1 + 0.15 (length - 3)) * (1 + 0.2 ln votes))      base 0.02 within the window, 0.12 for the lost text

(PR 1518 of parameter-golf.) A hint is dropped where its token is not among the model's 1000 likeliest; a smaller vocabulary drops
none. p' sums to one whatever the hint, and a wrong hint costs -ln(1 - w) nats.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from studies.lanes.tapin import LEAST, Hints

_ROWS = 4096


@dataclass(frozen=True)
class Mixing:
    """The numbers in the formula of a hint's weight. ``ValueError`` for a weight that could leave [0, 1)."""

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
            raise ValueError(f"within, cross, per_length and per_vote must be at least 0, unlike those of {self}")
        if self.top < 1:
            raise ValueError(f"top is {self.top}: at least the likeliest token must count; a large number drops no hint")

    def weights(self, hints: Hints) -> Float64[Tensor, " s"]:
        """Of each hint, before any is dropped; 0 where nothing is offered."""
        base = self.within + (self.cross - self.within) * hints.cross.double()
        length = 1 + self.per_length * (hints.length - LEAST).double()
        votes = 1 + self.per_vote * hints.votes.clamp(min=1).double().log()
        return torch.where(hints.offered, (base * length * votes).clamp(max=self.most), 0.0)


def kept(logits: Float[Tensor, "s v"], hints: Hints, top: int) -> Bool[Tensor, " s"]:
    """Where the offered token is among the ``top`` likeliest: fewer than ``top`` logits are larger than its own."""
    offered = hints.offered.to(logits.device)
    if top >= logits.shape[-1]:
        return offered
    own = logits.gather(-1, _tokens(logits, hints))
    return offered & ((logits > own).sum(-1) < top)


def mix(logits: Float[Tensor, "s v"], hints: Hints, mixing: Mixing = Mixing()) -> Float64[Tensor, "s v"]:
    """ln p' over the vocabulary, from logits (or log-probabilities) and the hints at the same positions."""
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
    """-ln p'(target) in nats: that of ``mix``, of which only the targets' entries are made, from a few rows at a time."""
    w = _weights(logits, hints, mixing)
    total = torch.cat([rows.double().logsumexp(-1) for rows in logits.split(_ROWS)])
    own = logits.gather(-1, targets[:, None])[:, 0].double() - total + torch.log1p(-w)
    hit = targets == hints.token.to(targets.device)
    return -torch.where(hit, torch.logaddexp(own, w.log()), own)


def _tokens(logits: Tensor, hints: Hints) -> Int64[Tensor, "s 1"]:
    """The offered tokens as an index; 0, with no weight, where nothing is offered."""
    return hints.token.clamp(min=0)[:, None].to(logits.device)


def _weights(logits: Tensor, hints: Hints, mixing: Mixing) -> Float64[Tensor, " s"]:
    if len(hints) != len(logits):
        raise ValueError(f"there are {len(hints)} hints for {len(logits)} positions: take theirs by hints.at(...)")
    return torch.where(kept(logits, hints, mixing.top), mixing.weights(hints).to(logits.device), 0.0)
