"""Bits per byte of a stream, by windows that slide over it.

    BPB = (sum of nll / ln 2) / bytes             over targets that are bytes: BOS counts neither bits nor a byte

A stream of s tokens has n = s - 1 predictions: prediction p reads tokens up to p and is scored on token p + 1. Windows of W inputs
end every `stride` predictions; the first scores all of its predictions, each other those that no window before it scored, and the
last is shifted left to end with the stream. So each prediction is scored once, all windows of a stream have one length, and each
prediction but those of the first window reads at least W - stride + 1 tokens. The plan depends on n alone.

Windows slide over the stream as it is, across the ends of documents: a model reads BOS there, as it did in training.
Source: the sliding evaluation of parameter-golf, pull request 1518, which scores 64 predictions at its tail twice; here none is.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from tqdm import tqdm

from studies.lanes.config import BOS

PRIOR = 64.0
"""Bytes that the single-byte table counts for in the table of pairs; between 16 and 256 the result hardly depends on it."""
Mix = Callable[[Float[Tensor, "p v"], Int[Tensor, " p"]], Float[Tensor, "p v"]]
"""(log-probabilities in float64, the last position that each may read) -> log-probabilities. It may read tokens up to that position
only: row i is the distribution of token `positions[i] + 1`. Positions come in rising order, each once."""


class Window(NamedTuple):
    """Inputs are tokens `start .. end - 1`; predictions `score_from .. end - 1` are scored."""

    start: int
    end: int
    score_from: int


def plan_windows(n: int, window: int, stride: int) -> tuple[Window, ...]:
    """The windows that score each of `n` predictions once, in order; all of them `min(window, n)` long.

    Raises ValueError for a negative `n` and unless 1 <= stride <= window (a longer stride would leave predictions out).
    """
    if n < 0:
        raise ValueError(f"n = {n} predictions cannot be: give 0 or more")
    if not 1 <= stride <= window:
        raise ValueError(f"stride = {stride} with windows of {window} is out of range: choose 1 to {window}")
    size = min(window, n)
    windows = [Window(0, size, 0)] if n else []
    while windows and (done := windows[-1].end) < n:
        end = min(done + stride, n)
        windows.append(Window(end - size, end, done))
    return tuple(windows)


def score(
    model: nn.Module, tokens: Int[Tensor, " s"], *, window: int = 128, stride: int = 64, batch: int = 32, mix: Mix | None = None
) -> Float[Tensor, " s"]:
    """The negative log-likelihood of every token, in nats and float64; 0 at position 0, which nothing predicts.

    Args:
        model: `model(tokens [b s]) -> logits [b s v]`; it runs in eval mode without gradients and keeps the modes that it had.
        tokens: the stream.
        window: inputs of a window.
        stride: predictions from the end of one window to the end of the next.
        batch: windows of one forward; results do not depend on it but for the order of floating-point sums.
        mix: changes the distributions before they are scored (see `Mix`); None scores the model's own.

    Raises:
        ValueError: an empty stream, a stride that does not fit, or a `mix` that gives another shape than it was given.
    """
    nll = unscored(tokens)
    with in_eval(model):
        score_windows(model, tokens, plan_windows(len(tokens) - 1, window, stride), nll, batch=batch, mix=mix)
    return nll


def unscored(tokens: Int[Tensor, " s"]) -> Float[Tensor, " s"]:
    """Zeros for `score_windows` to fill in. Raises ValueError for an empty stream."""
    if not len(tokens):
        raise ValueError("the stream is empty: give at least one token")
    return torch.zeros(len(tokens), dtype=torch.float64, device=tokens.device)


@torch.no_grad()
def score_windows(
    model: nn.Module,
    tokens: Int[Tensor, " s"],
    windows: Sequence[Window],
    nll: Float[Tensor, " s"],
    *,
    batch: int = 32,
    mix: Mix | None = None,
) -> None:
    """Write into `nll` what `windows`, all of one length, score; the model is taken in the mode that it has."""
    if batch < 1:
        raise ValueError(f"batch = {batch} windows cannot be: choose 1 or more")
    for first in tqdm(range(0, len(windows), batch), "scoring", disable=None, leave=False):
        group = windows[first : first + batch]
        logits = model(torch.stack([tokens[one.start : one.end] for one in group]))
        rows = torch.cat([own[one.score_from - one.start :] for own, one in zip(logits, group, strict=True)])
        positions = torch.cat([torch.arange(one.score_from, one.end, device=tokens.device) for one in group])
        log_probs = rows.double().log_softmax(-1)
        if mix is not None:
            mixed = mix(log_probs, positions)
            if mixed.shape != log_probs.shape:
                raise ValueError(f"mix gave {tuple(mixed.shape)} for log-probabilities of {tuple(log_probs.shape)}: keep the shape")
            log_probs = mixed
        nll[positions + 1] = -log_probs.gather(-1, tokens[positions + 1, None])[:, 0].double()


def byte_targets(tokens: Int[Tensor, " s"]) -> Bool[Tensor, " s"]:
    """Which tokens count in bits per byte: all that are bytes but the first of the stream, which nothing predicts."""
    return (tokens != BOS) & (torch.arange(len(tokens), device=tokens.device) > 0)


def bits(nll: Float[Tensor, " s"], tokens: Int[Tensor, " s"]) -> float:
    """Bits that the bytes of the stream cost, in all."""
    return float(nll[byte_targets(tokens)].double().sum() / math.log(2))


def bpb(nll: Float[Tensor, " s"], tokens: Int[Tensor, " s"]) -> float:
    """Bits per byte. Raises ValueError for a stream in which nothing counts."""
    counted = int(byte_targets(tokens).sum())
    if not counted:
        raise ValueError("no byte of the stream is predicted: give at least two tokens, of which one behind the first is a byte")
    return bits(nll, tokens) / counted


def table_bpb(train: Int[Tensor, " n"], tokens: Int[Tensor, " s"]) -> dict[str, float]:
    """Bits per byte of counts of `train`, on the bytes of `tokens`: of single bytes, and of a byte given the one before it.

        p(b) = (n(b) + 1) / (n + 256)               p(b | a) = (n(a, b) + PRIOR p(b)) / (n(a) + PRIOR)

    Starts of documents are read and not predicted, as everywhere.
    """
    size = BOS + 1
    pairs = torch.bincount(train[:-1] * size + train[1:], minlength=size * size).reshape(size, size).double()[:, :BOS]
    single = (pairs.sum(0) + 1) / (pairs.sum() + BOS)
    given = (pairs + PRIOR * single) / (pairs.sum(1, keepdim=True) + PRIOR)
    counted = byte_targets(tokens)[1:]
    before, after = tokens[:-1][counted], tokens[1:][counted]
    return {"unigram": float(-single[after].log2().mean()), "bigram": float(-given[before, after].log2().mean())}


@contextmanager
def in_eval(model: nn.Module) -> Iterator[None]:
    """Eval mode inside the block; each module's own mode comes back afterwards."""
    found = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in found:
            module.training = training
