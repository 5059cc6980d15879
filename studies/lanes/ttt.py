"""Legal test-time training: each chunk of a stream is scored before the model learns from it.

    for chunk c of C:   score every window of c, without gradients          scores are final: nothing is scored twice
                        unless c is the last: train on c, at rate_c         rate_c = rate (1 + cos(pi c / (C - 1))) / 2

Training is SGD with momentum over the chunk's own text, in order: sequences of `window` inputs, a gradient whose norm is clipped,
some epochs. One optimiser runs through all chunks, so momentum carries over. A chunk of predictions [a, b) trains on targets up to
token b; the next one scores from token b + 1 on. With rate 0 and with the scope `none` this is the plain sliding evaluation.
Source: the score-first protocol of parameter-golf, pull request 1518.
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
    """The kinds that a scope trains. Raises KeyError with the scopes that there are."""
    if name not in SCOPES:
        raise KeyError(f"{name!r} is no scope: choose one of {', '.join(SCOPES)}")
    return SCOPES[name]


@validated
class TTTSettings:
    """One run of test-time training. Raises ValueError for sizes and rates that cannot be, KeyError for an unknown scope.

    scope: which parameters learn: `all`, `controls` (all but the weights of Linear and Embedding modules) or `none`.
    rate: the learning rate of the first chunk. epochs: passes over a chunk.
    window, stride, chunk: inputs of a window; predictions that a window adds; predictions of a chunk. Windows are whole strides and
        chunks whole windows, so that no window scores in two chunks.
    batch: windows of one forward. train_batch: sequences of one step.
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
                "a window must be whole strides and a chunk whole windows"
            )


@dataclass(frozen=True)
class ChunkPlan:
    """Predictions `[first, end)`: the windows that score them, and the first inputs of the sequences that are trained on after."""

    first: int
    end: int
    windows: tuple[Window, ...]
    sequences: tuple[int, ...]


@dataclass(frozen=True)
class ChunkResult:
    """What a chunk cost before it was trained on, and the order of events as it happened.

    rate: that of its training steps, None where nothing was trained.
    scored: the first and the last token that it scored. trained_to: the last token that was a training target up to its end.
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
    """The scores of a stream (nats, float64; inf from the chunk on in which the run diverged), and what was trained for them."""

    nll: Float[Tensor, " s"]
    bpb: float
    chunks: tuple[ChunkResult, ...]
    parameters: int
    share: float

    @property
    def diverged(self) -> bool:
        return not math.isfinite(self.bpb)


def trained(model: nn.Module, scope: str) -> dict[str, nn.Parameter]:
    """The parameters that a scope trains, by name; those that are frozen (no `requires_grad`) stay so.

    Raises ValueError for a scope other than `none` that selects nothing, KeyError for one that is unknown.
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
    """`n` predictions in chunks; the last, which may be short, has no sequences."""
    windows = plan_windows(n, settings.window, settings.stride)
    plans = []
    for first in range(0, n, settings.chunk):
        end = min(first + settings.chunk, n)
        own = tuple(one for one in windows if first <= one.score_from < end)
        plans.append(ChunkPlan(first, end, own, () if end == n else tuple(range(first, end, settings.window))))
    return tuple(plans)


def cosine(rate: float, chunk: int, chunks: int) -> float:
    """The rate of a chunk: `rate` at the first, 0 at the last."""
    return rate * (1 + math.cos(math.pi * chunk / max(chunks - 1, 1))) / 2


def adapt(model: nn.Module, tokens: Int[Tensor, " s"], settings: TTTSettings, *, mix: Mix | None = None) -> Adaptation:
    """Score a stream while the model learns from what was scored; afterwards the model is as it was, bit for bit.

    Args:
        model: `model(tokens [b s]) -> logits [b s v]`. It runs in eval mode throughout, so a run is deterministic.
        tokens: the stream.
        settings: scope, rate and sizes.
        mix: as in `score`; training sees the model's own distribution.

    Raises:
        ValueError: an empty stream, one in which no byte is predicted, or a scope that selects nothing. A run that diverges is no
            error: its bits per byte are inf.
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
    """Train on a chunk's sequences in order, `epochs` times: the number of steps, and the last token that was a target."""
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
    """Mean nats per byte of all tokens but the first; starts of documents are not predicted, as in training (0 where all are)."""
    targets = text[:, 1:].flatten()
    total = functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), targets, ignore_index=BOS, reduction="sum")
    return total / (targets != BOS).sum().clamp(min=1)


@contextmanager
def borrowed(model: nn.Module, scope: str) -> Iterator[list[nn.Parameter]]:
    """The parameters that a scope trains, for the block alone: nothing else has gradients, and all comes back as it was.

    What comes back: values bit for bit, `requires_grad`, `grad` and the mode of every module, also after an exception.
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
    """One scope at one rate on the tuning stream. bpb: inf where it diverged. gain: bits per byte below the plain evaluation."""

    scope: str
    rate: float
    bpb: float
    gain: float
    parameters: int
    share: float


@dataclass(frozen=True)
class Sweep:
    """`plain`: bits per byte without training."""

    plain: float
    rows: tuple[SweepRow, ...]

    def best(self, scope: str) -> SweepRow:
        """The row of least bits per byte (ties: the smaller rate). Raises KeyError for a scope that was not swept."""
        return min(self._of(scope), key=lambda row: (row.bpb, row.rate))

    def at_edge(self, scope: str) -> bool:
        """Whether the best rate is the smallest or the largest that was tried, so that a better one may lie beyond."""
        tried = [row.rate for row in self._of(scope)]
        return self.best(scope).rate in (min(tried), max(tried))

    def _of(self, scope: str) -> list[SweepRow]:
        if not (rows := [row for row in self.rows if row.scope == scope]):
            raise KeyError(
                f"the scope {scope!r} was not swept; there are {', '.join(dict.fromkeys(row.scope for row in self.rows))}"
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
    """Every scope at each of its rates, on a tuning stream that is no test stream. Rates are by scope: controls want larger ones.

    Raises ValueError where there is no rate for a scope, and what `adapt` raises.
    """
    if not rates or not all(rates.values()):
        raise ValueError("no rate to try: give at least one for each scope, as {'controls': (0.01, 0.1)}")
    plain = adapt(model, tokens, replace(settings, scope="none"), mix=mix).bpb
    tried = [replace(settings, scope=scope, rate=rate) for scope, own in rates.items() for rate in own]
    rows = []
    for one in tqdm(tried, "rates", disable=None, leave=False):
        run = adapt(model, tokens, one, mix=mix)
        rows.append(SweepRow(one.scope, one.rate, run.bpb, plain - run.bpb, run.parameters, run.share))
    return Sweep(plain, tuple(rows))
