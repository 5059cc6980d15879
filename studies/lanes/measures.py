"""What is measured on a trained arm, a part each: bits per byte, quantisation, test-time training, Tap-In, gradient paths, growth.

Each function takes a `Subject` and gives a part's content (JSON) and tensors. They draw nothing but from generators of the seed.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from studies.lanes.arms import Arm
from studies.lanes.bpb import bpb, plan_windows, score
from studies.lanes.gptq import collect_hessians, dequantized, quantize
from studies.lanes.growth import growth
from studies.lanes.mixing import Mixing, mixed_nll
from studies.lanes.model import LanesModel
from studies.lanes.paths import ratios_of
from studies.lanes.settings import Settings
from studies.lanes.size import rate_distortion
from studies.lanes.tapin import Hints, find_hints
from studies.lanes.text import BOS, Corpus, batches
from studies.lanes.ttt import Sweep, sweep
from studies.route2.randomness import torch_generator

GROWTH_DRAWS = 3
Part = tuple[dict[str, Any], dict[str, Tensor]]


@dataclass(frozen=True, eq=False)
class Subject:
    """A trained model of an arm at a seed, and the text that it is judged by."""

    settings: Settings
    corpus: Corpus
    arm: Arm
    seed: int
    model: LanesModel

    @property
    def test(self) -> Int64[Tensor, " s"]:
        evaluation = self.settings.evaluation
        return excerpt(self.corpus, "test", evaluation.test, evaluation.piece, self.seed)

    def bpb(self, model: LanesModel | None = None) -> float:
        """Bits per byte on the seed's test text."""
        evaluation, tokens = self.settings.evaluation, self.test
        found = score(model or self.model, tokens, window=evaluation.window, stride=evaluation.stride)
        return bpb(found, tokens)

    def calibration(self, count: int) -> Iterator[Tensor]:
        """Inputs of training windows for Hessians: the smaller count is the start of the larger one."""
        training = self.settings.training
        drawn = batches(
            training_tokens(self.settings, self.corpus),
            size=training.batch,
            length=training.length,
            steps=count,
            generator=torch_generator(self.seed, "lanes calibration"),
        )
        return (batch[:, :-1] for batch in drawn)


def training_tokens(settings: Settings, corpus: Corpus) -> Int64[Tensor, " n"]:
    return corpus.stream("train", settings.train_bytes).tokens


def excerpt(corpus: Corpus, split: str, size: int, piece: int, seed: int) -> Int64[Tensor, " s"]:
    """`size` tokens of a split, in pieces from places that the seed draws: an interval over seeds is one over texts too.

    Each piece starts with BOS, as a document does. ``ValueError`` where the split is shorter than a piece.
    """
    tokens = corpus.stream(split).tokens
    if len(tokens) < piece:
        raise ValueError(f"the split {split!r} has {len(tokens)} tokens, and a piece of it {piece}: give more text")
    places = torch.randint(len(tokens) - piece + 1, (size // piece,), generator=torch_generator(seed, f"lanes {split}"))
    found = torch.stack([tokens[place : place + piece] for place in places.tolist()])
    found[:, 0] = BOS
    return found.flatten()


def plain_bpb(subject: Subject) -> Part:
    """Bits per byte of the model as it was trained."""
    return {"bpb": subject.bpb()}, {}


def quantised(subject: Subject) -> Part:
    """Bits per byte of the usual quantisation."""
    usual = subject.settings.evaluation.gptq
    hessians = collect_hessians(subject.model, subject.calibration(usual.batches), usual.batches)
    weights = quantize(subject.model, hessians, usual)
    with dequantized(subject.model, weights):
        found = subject.bpb()
    return {"bpb": found}, {}


def calibrations(subject: Subject) -> Part:
    """What else the record changed of its quantisation: calibration batches and the Hessian's clip; the curve over clips; and
    rounding to nearest."""
    evaluation = subject.settings.evaluation
    usual, many = evaluation.gptq, evaluation.many
    hessians = collect_hessians(subject.model, subject.calibration(many), many)
    few = collect_hessians(subject.model, subject.calibration(usual.batches), usual.batches)
    found: dict[str, Any] = {}
    for name, own, settings in (
        ("few", few, usual),
        ("many", hessians, usual),
        ("clipped", few, replace(usual, clip_lambda=evaluation.clip_lambda)),
        ("nearest", few, replace(usual, method="nearest")),
    ):
        with dequantized(subject.model, quantize(subject.model, own, settings)):
            found[name] = subject.bpb()
    batches = subject.calibration(usual.batches)
    points = rate_distortion(subject.model, batches, evaluation.clips, lambda _: subject.bpb(), usual, evaluation.compressor)
    return {**found, "points": [asdict(point) for point in points]}, {}


def score_first_training(subject: Subject) -> Part:
    """What every scope gains at every rate, on a tuning text and on a test text. Which rate counts is chosen later, by the tuning
    texts of all seeds; controls are tried at the rates of all parameters too."""
    evaluation = subject.settings.evaluation
    rates = {"all": evaluation.rates_all, "controls": tuple(sorted({*evaluation.rates_all, *evaluation.rates_controls}))}
    found = {}
    for name, split, size in (("tuning", "tune", evaluation.tune), ("test", "test", evaluation.adapted)):
        tokens = excerpt(subject.corpus, split, size, evaluation.adapted_piece, subject.seed)
        found[name] = _rows(sweep(subject.model, tokens, evaluation.ttt, rates))
    return found, {}


def _rows(tried: Sweep) -> list[dict[str, Any]]:
    """gain: bits per byte below the plain evaluation; None where the run diverged."""
    return [
        {"scope": row.scope, "rate": row.rate, "gain": row.gain if math.isfinite(row.gain) else None, "share": row.share}
        for row in tried.rows
    ]


def tap_in(subject: Subject) -> Part:
    """Bits per byte with hints mixed in, of all variants from one forward; and what hints saved, token by token."""
    evaluation, tokens = subject.settings.evaluation, subject.test
    hints = find_hints(tokens, evaluation.window, stride=evaluation.stride, starts=_starts(len(tokens), evaluation))
    old, new = evaluation.cross
    variants = {
        "plain": Mixing(within=0.0, cross=0.0),
        "within": Mixing(cross=0.0),
        "old": Mixing(cross=old),
        "new": Mixing(cross=new),
    }
    nll = {name: torch.zeros(len(tokens), dtype=torch.float64) for name in variants}

    def note(log_probs: Tensor, positions: Tensor) -> Tensor:
        for name, mixing in variants.items():
            nll[name][positions + 1] = mixed_nll(log_probs, tokens[positions + 1], hints.at(positions), mixing)
        return log_probs

    score(subject.model, tokens, window=evaluation.window, stride=evaluation.stride, mix=note)
    content = {"bpb": {name: bpb(own, tokens) for name, own in nll.items()}, "hints": _counts(hints, tokens)}
    return content, {"plain": nll["plain"], "new": nll["new"], "within": nll["within"], "tokens": tokens, "cross": hints.cross}


def _starts(n: int, evaluation: Any) -> Int64[Tensor, " s"]:
    """The start of the window that scores each position; the last position predicts nothing."""
    windows = plan_windows(n - 1, evaluation.window, evaluation.stride)
    starts = torch.cat([torch.full((one.end - one.score_from,), one.start) for one in windows])
    return torch.cat((starts, starts[-1:] + 1))


def _counts(hints: Hints, tokens: Tensor) -> dict[str, float]:
    """Of all predictions, the share with a hint, and of these the share that was right."""
    offered, right = hints.offered[:-1], hints.token[:-1] == tokens[1:]
    cross = hints.cross[:-1] & offered
    count = lambda mask: float(mask.double().mean()) if len(mask) else 0.0  # noqa: E731
    return {
        "offered": count(offered),
        "right": count(right[offered]),
        "cross": count(cross),
        "cross_right": count(right[cross]),
    }


def gradient_paths(subject: Subject) -> Part:
    """Direct and cascade of every sublayer of the trained model, on a few test windows, in float64."""
    instruments = subject.settings.instruments
    rows = windows(subject.test, instruments.batch, instruments.length)
    model = LanesModel(subject.model.config, torch.Generator()).double()
    model.load_state_dict(subject.model.state_dict())
    return {"rows": [asdict(row) for row in ratios_of(model, rows, subject.seed)]}, {}


def error_growth(subject: Subject) -> Part:
    """How a push grows over the passes of the trained loop, for a few draws of the push."""
    instruments = subject.settings.instruments
    rows = windows(subject.test, instruments.batch, instruments.length)
    return {"draws": [asdict(row) for row in growth(subject.model, rows, range(GROWTH_DRAWS))]}, {}


def windows(tokens: Int64[Tensor, " n"], batch: int, length: int) -> Int64[Tensor, "b s"]:
    """The first `batch` windows of `length` + 1 tokens that lie side by side."""
    return tokens[: batch * (length + 1)].reshape(batch, length + 1)


MEASURES: Mapping[str, Callable[[Subject], Part]] = MappingProxyType(
    {
        "bpb": plain_bpb,
        "quantised": quantised,
        "calibrations": calibrations,
        "ttt": score_first_training,
        "tapin": tap_in,
        "paths": gradient_paths,
        "growth": error_growth,
    }
)

_ALSO: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "sequential": ("quantised", "ttt", "paths"),
        "shipped": ("quantised", "calibrations", "ttt", "tapin", "paths"),
        "asymmetric": ("quantised",),
        "narrow": ("quantised",),
        "wide": ("quantised", "ttt", "growth"),
        "wide-embeddings": ("quantised",),
        "wide-head-bias": ("quantised",),
        "wide-early": ("ttt",),
        "low-decay": ("quantised",),
    }
)


def measured(arm: str) -> tuple[str, ...]:
    """The parts that are measured on an arm."""
    return "bpb", *_ALSO.get(arm, ())
