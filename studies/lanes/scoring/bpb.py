"""Bits per byte of a stream, from sliding-window evaluation.

    BPB = (sum of nll / ln 2) / bytes             over targets that are bytes: BOS counts neither bits nor a byte

A stream of s tokens has n = s - 1 predictions: prediction p reads tokens up to p and is scored on token p + 1. Windows of W inputs
end every `stride` predictions. The first window scores all of its predictions, each later window those that no earlier window
scored, and the last window is shifted left to end with the stream. Thus each prediction is scored once, all windows of a stream
have the same length, and each prediction outside of the first window reads at least W - stride + 1 tokens. The plan depends on n
alone.

Windows slide across the ends of documents: a model reads BOS there, as in training. Source: the sliding evaluation of
parameter-golf, pull request 1518, which scores 64 predictions at its tail twice; here no prediction is scored twice.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor, nn
from tqdm import tqdm

from studies.lanes.config import BOS

PRIOR = 64.0
"""Pseudocount of the single-byte table in the table of pairs; between 16 and 256 the result hardly depends on it."""
Watch = Callable[[Float[Tensor, "p v"], Int[Tensor, " p"]], None]
"""Called with each batch of distributions before it is scored: log-probabilities in float64, and their positions.

Row i is the distribution of token `positions[i] + 1`. Positions are ascending and distinct.
"""


class ScoredWindow(NamedTuple):
    """A window with inputs `start .. end - 1` of which predictions `score_from .. end - 1` are scored."""

    start: int
    end: int
    score_from: int


def plan_windows(n: int, window: int, stride: int) -> tuple[ScoredWindow, ...]:
    """Return the windows that score each of `n` predictions once, in order; each is `min(window, n)` long.

    Raises:
        ValueError: If `n` is negative, or unless 1 <= stride <= window (a longer stride would leave predictions out).
    """
    if n < 0:
        raise ValueError(f"n = {n} is not a number of predictions: give 0 or more")
    if not 1 <= stride <= window:
        raise ValueError(f"stride = {stride} with windows of {window} is out of range: choose 1 to {window}")
    size = min(window, n)
    windows = [ScoredWindow(0, size, 0)] if n else []
    while windows and (done := windows[-1].end) < n:
        end = min(done + stride, n)
        windows.append(ScoredWindow(end - size, end, done))
    return tuple(windows)


def window_starts(n: int, window: int, stride: int) -> Int64[Tensor, " n"]:
    """Return the first input of the window that scores the prediction at each of `n` positions, of which the last has none."""
    windows = plan_windows(n - 1, window, stride)
    starts = torch.cat([torch.full((window.end - window.score_from,), window.start) for window in windows])
    return torch.cat((starts, starts[-1:] + 1))


def score(
    model: nn.Module, tokens: Int[Tensor, " s"], *, window: int = 128, stride: int = 64, batch: int = 32, watch: Watch | None = None
) -> Float[Tensor, " s"]:
    """Return the negative log-likelihood of every token, in nats and float64; 0 at position 0, which nothing predicts.

    Args:
        model: `model(tokens [b s]) -> logits [b s v]`; runs in eval mode without gradients. Its modes are restored afterwards.
        tokens: The stream.
        window: Inputs per window.
        stride: Predictions from the end of one window to the end of the next.
        batch: Windows per forward; results do not depend on it except for the order of floating-point sums.
        watch: Function that sees the distributions (see `Watch`).

    Raises:
        ValueError: If the stream is empty, or the stride is out of range.
    """
    nll = unscored(tokens)
    with in_eval(model):
        score_windows(model, tokens, plan_windows(len(tokens) - 1, window, stride), nll, batch=batch, watch=watch)
    return nll


def unscored(tokens: Int[Tensor, " s"]) -> Float[Tensor, " s"]:
    """Return zeros for `score_windows` to fill in; ``ValueError`` if the stream is empty."""
    if not len(tokens):
        raise ValueError("the stream is empty: give at least one token")
    return torch.zeros(len(tokens), dtype=torch.float64, device=tokens.device)


@torch.no_grad()
def score_windows(
    model: nn.Module,
    tokens: Int[Tensor, " s"],
    windows: Sequence[ScoredWindow],
    nll: Float[Tensor, " s"],
    *,
    batch: int = 32,
    watch: Watch | None = None,
) -> None:
    """Write the scores of `windows`, all of one length, into `nll`; the model runs in its current mode."""
    for first in tqdm(range(0, len(windows), batch), "scoring", disable=None, leave=False):
        group = windows[first : first + batch]
        logits = model(torch.stack([tokens[window.start : window.end] for window in group]))
        rows = torch.cat([of_window[window.score_from - window.start :] for of_window, window in zip(logits, group, strict=True)])
        positions = torch.cat([torch.arange(window.score_from, window.end, device=tokens.device) for window in group])
        log_probs = rows.double().log_softmax(-1)
        if watch is not None:
            watch(log_probs, positions)
        nll[positions + 1] = -log_probs.gather(-1, tokens[positions + 1, None])[:, 0].double()


def byte_targets(tokens: Int[Tensor, " s"]) -> Bool[Tensor, " s"]:
    """Return the mask of the tokens that count in bits per byte: all bytes except the first token, which nothing predicts."""
    return (tokens != BOS) & (torch.arange(len(tokens), device=tokens.device) > 0)


def bpb(nll: Float[Tensor, " s"], tokens: Int[Tensor, " s"]) -> float:
    """Return the bits per byte; ``ValueError`` if no token of the stream counts."""
    counted = byte_targets(tokens)
    if not bool(counted.any()):
        raise ValueError("no byte of the stream is predicted: give at least two tokens, of which one after the first is a byte")
    return float(nll[counted].double().sum() / math.log(2)) / int(counted.sum())


def table_bpb(train: Int[Tensor, " n"], tokens: Int[Tensor, " s"]) -> dict[str, float]:
    """Return the bits per byte of count tables of `train` on the bytes of `tokens`: of single bytes, and of pairs of bytes.

        p(b) = (n(b) + 1) / (n + 256)               p(b | a) = (n(a, b) + PRIOR p(b)) / (n(a) + PRIOR)

    Starts of documents are read but not predicted, as everywhere in the study.
    """
    size = BOS + 1
    pairs = torch.bincount(train[:-1] * size + train[1:], minlength=size * size).reshape(size, size).double()[:, :BOS]
    single = (pairs.sum(0) + 1) / (pairs.sum() + BOS)
    conditional = (pairs + PRIOR * single) / (pairs.sum(1, keepdim=True) + PRIOR)
    counted = byte_targets(tokens)[1:]
    before, after = tokens[:-1][counted], tokens[1:][counted]
    return {"unigram": float(-single[after].log2().mean()), "bigram": float(-conditional[before, after].log2().mean())}


@contextmanager
def in_eval(model: nn.Module) -> Iterator[None]:
    """Context: the model in eval mode; each module's mode is restored afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
