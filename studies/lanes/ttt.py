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

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

from mi_route2.validation import AtLeastOne, Fraction, NonNegative, Positive, validated
from studies.lanes.bpb import Mix, Window, bits, bpb, byte_targets, in_eval, plan_windows, score_windows, unscored
from studies.lanes.config import BOS
from studies.lanes.model import is_matrix

SCOPES: dict[str, tuple[str, ...]] = {"all": ("matrix", "control"), "controls": ("control",), "none": ()}
"""Scope -> the kinds of parameters that are trained."""


def get_scope(name: str) -> tuple[str, ...]:
    """Return the kinds of parameters that a scope trains.

    Raises:
        KeyError: If the scope is unknown; the message lists the valid scopes.
    """
    if name not in SCOPES:
        raise KeyError(f"unknown scope {name!r}: choose from {', '.join(SCOPES)}")
    return SCOPES[name]


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
        ValueError: If sizes or rates are invalid.
        KeyError: If the scope is unknown.
    """

    scope: str = "all"
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
        get_scope(self.scope)
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
    windows: tuple[Window, ...]
    sequences: tuple[int, ...]


@dataclass(frozen=True)
class ChunkResult:
    """The cost of a chunk before it was trained on, and the recorded order of events.

    Attributes:
        bits: Bits of the chunk.
        bytes: Bytes of the chunk that count.
        rate: Rate of the chunk's training steps; None without training.
        steps: Number of training steps.
        scored: First and last token that the chunk scored.
        trained_to: The last token that was a training target by the end of the chunk; None if there was none.
    """

    bits: float
    bytes: int
    rate: float | None
    steps: int
    scored: tuple[int, int]
    trained_to: int | None

    @property
    def bpb(self) -> float:
        return self.bits / self.bytes if self.bytes else math.nan


@dataclass(frozen=True, eq=False)
class Adaptation:
    """Scores of a stream, and the training behind them.

    Attributes:
        nll: Nats per token in float64; inf from the chunk in which the run diverged.
        bpb: Bits per byte.
        chunks: Results by chunk.
        parameters: Number of trained parameters.
        share: Share of the model's parameters that were trained.
    """

    nll: Float[Tensor, " s"]
    bpb: float
    chunks: tuple[ChunkResult, ...]
    parameters: int
    share: float

    @property
    def diverged(self) -> bool:
        return not math.isfinite(self.bpb)


def trained(model: nn.Module, scope: str) -> dict[str, nn.Parameter]:
    """Return the parameters that a scope trains, by name; frozen parameters (no `requires_grad`) stay frozen.

    Raises:
        ValueError: If a scope other than `none` selects nothing.
        KeyError: If the scope is unknown.
    """
    wanted = get_scope(scope)
    kinds = {name: "matrix" if is_matrix(model, name) else "control" for name, _ in model.named_parameters()}
    chosen = {name: own for name, own in model.named_parameters() if own.requires_grad and kinds[name] in wanted}
    if wanted and not chosen:
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
        own = tuple(one for one in windows if first <= one.score_from < end)
        plans.append(ChunkPlan(first, end, own, () if end == n else tuple(range(first, end, settings.window))))
    return tuple(plans)


def cosine(rate: float, chunk: int, chunks: int) -> float:
    """Return the rate of a chunk: `rate` at the first, 0 at the last."""
    return rate * (1 + math.cos(math.pi * chunk / max(chunks - 1, 1))) / 2


def adapt(model: nn.Module, tokens: Int[Tensor, " s"], settings: TTTSettings, *, mix: Mix | None = None) -> Adaptation:
    """Score a stream while the model learns from the scored part; the model is restored afterwards, bit for bit.

    Args:
        model: `model(tokens [b s]) -> logits [b s v]`. It runs in eval mode throughout, so a run is deterministic.
        tokens: The stream.
        settings: Scope, rate and sizes.
        mix: As in `score`; training uses the model's own distribution.

    Returns:
        The scores. A run that diverges is not an error: its bits per byte are inf.

    Raises:
        ValueError: If the stream is empty, if no byte of it is predicted, or if the scope selects nothing.
    """
    nll, plans, results = unscored(tokens), plan_chunks(len(tokens) - 1, settings), []
    trained_to: int | None = None
    total = sum(own.numel() for own in model.parameters())
    with borrowed(model, settings.scope) as chosen:
        optimiser = torch.optim.SGD(chosen, settings.rate, settings.momentum) if chosen else None
        for c, plan in enumerate(tqdm(plans, f"training {settings.scope} as it reads", disable=None, leave=False)):
            score_windows(model, tokens, plan.windows, nll, batch=settings.batch, mix=mix)
            own = slice(plan.first, plan.end + 1)  # a chunk's targets, and the token before them, which does not count
            if not nll[own].isfinite().all():
                nll[plan.first + 1 :] = math.inf
                break
            rate, steps = cosine(settings.rate, c, len(plans)), 0
            if optimiser and plan.sequences:
                optimiser.param_groups[0]["lr"] = rate
                steps, trained_to = train_chunk(model, tokens, plan, optimiser, settings)
            scored = plan.windows[0].score_from + 1, plan.windows[-1].end
            counted = int(byte_targets(tokens[own]).sum())
            results.append(ChunkResult(bits(nll[own], tokens[own]), counted, rate if steps else None, steps, scored, trained_to))
        parameters = sum(own.numel() for own in chosen)
    return Adaptation(nll, bpb(nll, tokens), tuple(results), parameters, parameters / total)


@torch.enable_grad()
def train_chunk(
    model: nn.Module, tokens: Int[Tensor, " s"], plan: ChunkPlan, optimiser: torch.optim.Optimizer, settings: TTTSettings
) -> tuple[int, int]:
    """Train on a chunk's sequences in order, `epochs` times; return the number of steps and the last target token."""
    own = [parameter for group in optimiser.param_groups for parameter in group["params"]]
    steps, last = 0, 0
    for _ in range(settings.epochs):
        for first in range(0, len(plan.sequences), settings.train_batch):
            starts = plan.sequences[first : first + settings.train_batch]
            text = torch.stack([tokens[start : start + settings.window + 1] for start in starts])
            optimiser.zero_grad()
            _loss(model, text).backward()
            nn.utils.clip_grad_norm_(own, settings.clip)
            optimiser.step()
            steps, last = steps + 1, max(last, starts[-1] + settings.window)
    return steps, last


def _loss(model: nn.Module, text: Int[Tensor, "b s"]) -> Float[Tensor, ""]:
    """Return the mean nats per byte of all tokens but the first; starts of documents are not predicted (0 if all are)."""
    targets = text[:, 1:].flatten()
    total = functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), targets, ignore_index=BOS, reduction="sum")
    return total / (targets != BOS).sum().clamp(min=1)


@contextmanager
def borrowed(model: nn.Module, scope: str) -> Iterator[list[nn.Parameter]]:
    """Context: the parameters that a scope trains; only these have gradients inside, and the model is restored afterwards.

    Restored are: values bit for bit, `requires_grad`, `grad`, and the mode of every module, also after an exception.
    """
    chosen = list(trained(model, scope).values())
    values = [own.detach().clone() for own in chosen]
    found = [(own, own.requires_grad, own.grad) for own in model.parameters()]
    ids = {id(own) for own in chosen}
    try:
        with in_eval(model):
            for own, _, _ in found:
                own.requires_grad_(id(own) in ids)
                own.grad = None
            yield chosen
    finally:
        with torch.no_grad():
            for own, value in zip(chosen, values, strict=True):
                own.copy_(value)
        for own, required, gradient in found:
            own.requires_grad_(required)
            own.grad = gradient


@dataclass(frozen=True)
class SweepRow:
    """One scope at one rate on the tuning stream.

    Attributes:
        scope: The scope.
        rate: The rate.
        bpb: Bits per byte; inf if the run diverged.
        gain: Bits per byte below the plain evaluation.
        parameters: Number of trained parameters.
        share: Share of the model's parameters that were trained.
    """

    scope: str
    rate: float
    bpb: float
    gain: float
    parameters: int
    share: float


@dataclass(frozen=True)
class Sweep:
    """A sweep over rates.

    Attributes:
        plain: Bits per byte without training.
        rows: Results by scope and rate.
    """

    plain: float
    rows: tuple[SweepRow, ...]

    def best(self, scope: str) -> SweepRow:
        """Return the row with the lowest bits per byte (ties: the smaller rate).

        Raises:
            KeyError: If the scope was not swept.
        """
        return min(self._of(scope), key=lambda row: (row.bpb, row.rate))

    def at_edge(self, scope: str) -> bool:
        """Return True if the best rate is the smallest or the largest of the sweep, so that a better one may lie beyond."""
        tried = [row.rate for row in self._of(scope)]
        return self.best(scope).rate in (min(tried), max(tried))

    def _of(self, scope: str) -> list[SweepRow]:
        if not (rows := [row for row in self.rows if row.scope == scope]):
            raise KeyError(
                f"the scope {scope!r} was not swept: choose from {', '.join(dict.fromkeys(row.scope for row in self.rows))}"
            )
        return rows


def sweep(
    model: nn.Module,
    tokens: Int[Tensor, " s"],
    settings: TTTSettings,
    rates: Mapping[str, Sequence[float]],
    *,
    mix: Mix | None = None,
) -> Sweep:
    """Evaluate every scope at each of its rates, on a tuning stream that is not the test stream.

    `rates` are by scope, because controls need larger ones.

    Raises:
        ValueError: If a scope has no rate. Also raises the errors of `adapt`.
    """
    if not rates or not all(rates.values()):
        raise ValueError("give at least one rate for each scope, such as {'controls': (0.01, 0.1)}")
    plain = adapt(model, tokens, replace(settings, scope="none"), mix=mix).bpb
    tried = [replace(settings, scope=scope, rate=rate) for scope, own in rates.items() for rate in own]
    rows = []
    for one in tqdm(tried, "rates", disable=None, leave=False):
        run = adapt(model, tokens, one, mix=mix)
        rows.append(SweepRow(one.scope, one.rate, run.bpb, plain - run.bpb, run.parameters, run.share))
    return Sweep(plain, tuple(rows))
