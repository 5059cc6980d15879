"""Legal test-time training: each chunk of a stream is scored before the model learns from it.

    for chunk c of C:   score every window of c, without gradients          scores are final: nothing is scored twice
                        unless c is the last: train on c, at rate_c         rate_c = rate (1 + cos(pi c / (C - 1))) / 2

Training is SGD with momentum over the chunk's own text, in order: sequences of `window` inputs, clipped gradient norm, several
epochs. One optimizer runs through all chunks, so momentum carries over. A chunk of predictions [a, b) trains on targets up to token
b; the next one scores from token b + 1 on. With rate 0, and with the scope `none`, this is the plain sliding evaluation. Source:
the score-first protocol of parameter-golf, pull request 1518.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

from mi_route2.validation import AtLeastOne, Fraction, NonNegative, Positive, validated
from studies.lanes.config import BOS
from studies.lanes.model import kinds_of
from studies.lanes.scoring.bpb import ScoredWindow, Watch, bpb, in_eval, plan_windows, score_windows, unscored

Scope = Literal["all", "controls", "none"]


@validated
class TTTSettings:
    """Settings of one run of test-time training.

    Windows are a multiple of strides and chunks a multiple of windows, so that no window scores in two chunks.

    Attributes:
        scope: Which parameters learn: `all`, `controls` (all except weights of Linear and Embedding modules) or `none`.
        rate: Learning rate of the first chunk.
        epochs: Passes over a chunk.
        window: Inputs of a window.
        stride: Predictions that a window adds.
        chunk: Predictions of a chunk.
        momentum: Momentum of SGD.
        clip: Bound of the gradient norm.
        batch: Windows per forward.
        train_batch: Sequences per training step.

    Raises:
        ValueError: If sizes do not divide each other.
    """

    scope: Scope = "all"
    rate: NonNegative = 0.005
    epochs: AtLeastOne = 3
    window: AtLeastOne = 128
    stride: AtLeastOne = 64
    chunk: AtLeastOne = 32768
    momentum: Fraction = 0.9
    clip: Positive = 1.0
    batch: AtLeastOne = 32
    train_batch: AtLeastOne = 8

    def __post_init__(self) -> None:
        if self.window % self.stride or self.chunk % self.window:
            raise ValueError(
                f"chunk = {self.chunk}, window = {self.window}, stride = {self.stride}: "
                "the window must be a multiple of the stride, and the chunk a multiple of the window"
            )


@dataclass(frozen=True)
class ChunkPlan:
    """Predictions `[first, end)`: the windows that score them, and the first inputs of the sequences of the training after."""

    first: int
    end: int
    windows: tuple[ScoredWindow, ...]
    sequences: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Adaptation:
    """Scores of a stream.

    Attributes:
        nll: Nats per token in float64; inf from the chunk in which the run diverged.
        bpb: Bits per byte.
        share: Share of the model's parameters that were trained.
    """

    nll: Float[Tensor, " s"]
    bpb: float
    share: float

    @property
    def diverged(self) -> bool:
        return not math.isfinite(self.bpb)


def trained(model: nn.Module, scope: Scope) -> dict[str, nn.Parameter]:
    """Return the parameters that a scope trains, by name; frozen parameters (no `requires_grad`) stay frozen.

    Raises:
        ValueError: If a scope other than `none` selects nothing.
    """
    kinds, free = kinds_of(model), {name: p for name, p in model.named_parameters() if p.requires_grad and scope != "none"}
    chosen = {name: p for name, p in free.items() if scope == "all" or kinds[name] == "control"}
    if scope != "none" and not chosen:
        raise ValueError(
            f"the scope {scope!r} selects no parameter of this {type(model).__name__} that requires gradients: "
            "choose another scope, or 'none' to train nothing"
        )
    return chosen


def plan_chunks(n: int, settings: TTTSettings) -> tuple[ChunkPlan, ...]:
    """Return the chunks of `n` predictions; the last one may be short and has no sequences."""
    windows = plan_windows(n, settings.window, settings.stride)
    plans = []
    for first in range(0, n, settings.chunk):
        end = min(first + settings.chunk, n)
        scored = tuple(window for window in windows if first <= window.score_from < end)
        plans.append(ChunkPlan(first, end, scored, () if end == n else tuple(range(first, end, settings.window))))
    return tuple(plans)


def cosine(rate: float, chunk: int, chunks: int) -> float:
    """Return the rate of a chunk: `rate` at the first, 0 at the last."""
    return rate * (1 + math.cos(math.pi * chunk / max(chunks - 1, 1))) / 2


def adapt(model: nn.Module, tokens: Int[Tensor, " s"], settings: TTTSettings, *, watch: Watch | None = None) -> Adaptation:
    """Score a stream while the model learns from the scored part; the model is restored afterwards, bit for bit.

    Args:
        model: `model(tokens [b s]) -> logits [b s v]`. It runs in eval mode throughout, so a run is deterministic.
        tokens: The stream.
        settings: Scope, rate and sizes.
        watch: As in `score`.

    Returns:
        The scores. A run that diverges is not an error: its bits per byte are inf.

    Raises:
        ValueError: If the stream is empty, if no byte of it is predicted, or if the scope selects nothing.
    """
    nll, plans = unscored(tokens), plan_chunks(len(tokens) - 1, settings)
    with borrowed(model, settings.scope) as chosen:
        optimizer = torch.optim.SGD(chosen, settings.rate, settings.momentum) if chosen else None
        for c, plan in enumerate(tqdm(plans, f"training {settings.scope} as it reads", disable=None, leave=False)):
            score_windows(model, tokens, plan.windows, nll, batch=settings.batch, watch=watch)
            if not nll[plan.first : plan.end + 1].isfinite().all():
                nll[plan.first + 1 :] = math.inf
                break
            if optimizer:
                optimizer.param_groups[0]["lr"] = cosine(settings.rate, c, len(plans))
                train_chunk(model, tokens, plan, optimizer, settings)
        share = sum(p.numel() for p in chosen) / sum(p.numel() for p in model.parameters())
    return Adaptation(nll, bpb(nll, tokens), share)


@torch.enable_grad()
def train_chunk(
    model: nn.Module, tokens: Int[Tensor, " s"], plan: ChunkPlan, optimizer: torch.optim.Optimizer, settings: TTTSettings
) -> None:
    """Train on a chunk's sequences in order, `epochs` times."""
    for _ in range(settings.epochs):
        for first in range(0, len(plan.sequences), settings.train_batch):
            starts = plan.sequences[first : first + settings.train_batch]
            text = torch.stack([tokens[start : start + settings.window + 1] for start in starts])
            optimizer.zero_grad()
            targets = text[:, 1:].flatten()
            nats = functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), targets, ignore_index=BOS, reduction="sum")
            (nats / (targets != BOS).sum().clamp(min=1)).backward()  # 0 if every target starts a document
            nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], settings.clip)
            optimizer.step()


@contextmanager
def borrowed(model: nn.Module, scope: Scope) -> Iterator[list[nn.Parameter]]:
    """Context: the parameters that a scope trains; only these have gradients inside, and the model is restored afterwards.

    Restored are: values bit for bit, `requires_grad`, `grad`, and the mode of every module, also after an exception.
    """
    chosen = list(trained(model, scope).values())
    values = [parameter.detach().clone() for parameter in chosen]
    before = [(parameter, parameter.requires_grad, parameter.grad) for parameter in model.parameters()]
    ids = {id(parameter) for parameter in chosen}
    try:
        with in_eval(model):
            for parameter, _, _ in before:
                parameter.requires_grad_(id(parameter) in ids)
                parameter.grad = None
            yield chosen
    finally:
        with torch.no_grad():
            for parameter, value in zip(chosen, values, strict=True):
                parameter.copy_(value)
        for parameter, required, gradient in before:
            parameter.requires_grad_(required)
            parameter.grad = gradient


@dataclass(frozen=True)
class SweepRow:
    """One scope at one rate on the tuning stream: bits per byte (inf if it diverged), and the gain over the plain evaluation."""

    scope: Scope
    rate: float
    bpb: float
    gain: float
    share: float


def sweep(
    model: nn.Module, tokens: Int[Tensor, " s"], settings: TTTSettings, rates: Mapping[Scope, Sequence[float]]
) -> list[SweepRow]:
    """Evaluate every scope at each of its rates, on a tuning stream that is not the test stream.

    `rates` are by scope, because controls need larger ones.
    """
    plain = adapt(model, tokens, replace(settings, scope="none")).bpb
    tried = [replace(settings, scope=scope, rate=rate) for scope, scope_rates in rates.items() for rate in scope_rates]
    rows = []
    for chosen in tqdm(tried, "rates", disable=None, leave=False):
        run = adapt(model, tokens, chosen)
        rows.append(SweepRow(chosen.scope, chosen.rate, run.bpb, plain - run.bpb, run.share))
    return rows


def best(rows: Sequence[SweepRow], scope: Scope) -> SweepRow:
    """Return a scope's row with the lowest bits per byte (ties: the smaller rate)."""
    return min((row for row in rows if row.scope == scope), key=lambda row: (row.bpb, row.rate))
