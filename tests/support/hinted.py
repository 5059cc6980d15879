"""Tap-In's whole distributions, and scores under distributions that are changed before they are scored."""

from collections.abc import Callable

import torch
from torch import Tensor

from studies.lanes.scoring.bpb import Watch
from studies.lanes.scoring.tapin import Hints, Mixing


def mix(logits: Tensor, hints: Hints, mixing: Mixing) -> Tensor:
    """ln p' over the vocabulary: p' = (1 - w) p and p'(c) += w, as logarithms."""
    w, c = mixing.weights(hints), hints.token.clamp(min=0)[:, None]
    mixed = torch.log_softmax(logits.double(), -1) + torch.log1p(-w)[:, None]
    return mixed.scatter(-1, c, torch.logaddexp(mixed.gather(-1, c), w.log()[:, None]))


def changed_scores(run: Callable[[Watch], object], tokens: Tensor, change: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Nats per token of a stream under `change(log_probs, positions)`, for the distributions that `run` shows to a watch."""
    nll = torch.zeros(len(tokens), dtype=torch.float64)

    def watch(log_probs: Tensor, positions: Tensor) -> None:
        nll[positions + 1] = -change(log_probs, positions).gather(-1, tokens[positions + 1, None])[:, 0]

    run(watch)
    return nll


def mixed_scores(run: Callable[[Watch], object], tokens: Tensor, hints: Hints, mixing: Mixing) -> Tensor:
    """Nats per token of a stream with its hints mixed in, for the distributions that `run` shows to a watch."""
    return changed_scores(run, tokens, lambda log_probs, positions: mix(log_probs, hints.at(positions), mixing))
