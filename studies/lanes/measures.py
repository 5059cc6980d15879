"""Measurements on a trained arm, one part each: bits per byte, quantization, test-time training, Tap-In, gradient paths, growth.

Each function takes a `Subject` and returns a part's content (JSON) and tensors. All randomness comes from generators of the seed.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType

import torch
from jaxtyping import Int64
from torch import Tensor

from studies.common.artifacts import Artifact
from studies.common.seeds import torch_generator
from studies.lanes.arms import LanesArm
from studies.lanes.config import STARTS
from studies.lanes.gradients.paths import ratios
from studies.lanes.gradients.symmetry import SUBLAYERS, compared
from studies.lanes.model import LanesModel
from studies.lanes.quantization.gptq import QuantizedWeights, collect_hessians, dequantized, distortion, quantize
from studies.lanes.quantization.growth import growth
from studies.lanes.quantization.size import sizes
from studies.lanes.scoring.bpb import bpb, score, window_starts
from studies.lanes.scoring.tapin import Hints, Mixing, find_hints, mixed_nll
from studies.lanes.scoring.ttt import Scope, SweepRow, adapt, best, sweep
from studies.lanes.settings import Evaluation, LanesSettings, check_enough
from studies.lanes.text import BOS, TextCorpus, batches

GROWTH_DRAWS = 3


@dataclass(frozen=True, eq=False)
class Subject:
    """A trained model of an arm at a seed, and the text on which it is evaluated."""

    settings: LanesSettings
    corpus: TextCorpus
    arm: LanesArm
    seed: int
    model: LanesModel

    @property
    def test(self) -> Int64[Tensor, " s"]:
        evaluation = self.settings.evaluation
        return excerpt(self.corpus, "test", evaluation.test, evaluation.piece, self.seed)

    @property
    def windows(self) -> Int64[Tensor, "b s"]:
        """The first adjacent windows of the test text, as many as the instruments measure."""
        instruments = self.settings.instruments
        return self.test[: instruments.batch * (instruments.length + 1)].reshape(instruments.batch, -1)

    def bpb(self) -> float:
        """Return the bits per byte on the seed's test text."""
        evaluation, tokens = self.settings.evaluation, self.test
        return bpb(score(self.model, tokens, window=evaluation.window, stride=evaluation.stride), tokens)

    def quantized_bpb(self, weights: QuantizedWeights) -> float:
        """Return the same of the model with quantized weights."""
        with dequantized(self.model, weights):
            return self.bpb()

    def calibration(self, count: int) -> Iterator[Tensor]:
        """Return inputs of training windows for Hessians: a smaller count gives the beginning of a larger one."""
        training = self.settings.training
        drawn = batches(
            training_tokens(self.settings, self.corpus),
            size=training.batch,
            length=training.length,
            steps=count,
            generator=torch_generator(self.seed, "lanes calibration"),
        )
        return (batch[:, :-1] for batch in drawn)


def training_tokens(settings: LanesSettings, corpus: TextCorpus) -> Int64[Tensor, " n"]:
    return corpus.stream("train", settings.train_bytes)


def excerpt(corpus: TextCorpus, split: str, size: int, piece: int, seed: int) -> Int64[Tensor, " s"]:
    """Return `size` tokens of a split, in pieces at positions drawn by the seed: an interval over seeds is one over texts too.

    Each piece starts with BOS, as a document does. No two pieces overlap, because test-time training would read the text twice.

    Raises:
        ValueError: If the split is shorter than all pieces together.
    """
    check_enough(corpus, split, size)
    tokens = corpus.stream(split)
    generator, pieces = torch_generator(seed, f"lanes {split}"), size // piece
    places = torch.randint(len(tokens) - piece + 1, (pieces,), generator=generator)
    if bool((places.sort().values.diff() < piece).any()):
        # The gaps between pieces are drawn, so that no position needs a second try; in a long text this is rarely needed.
        gaps = torch.randint(len(tokens) - size + 1, (pieces,), generator=generator).sort().values
        places = (gaps + piece * torch.arange(pieces))[torch.randperm(pieces, generator=generator)]
    pieces_of_text = torch.stack([tokens[place : place + piece] for place in places.tolist()])
    pieces_of_text[:, 0] = BOS
    return pieces_of_text.flatten()


def plain_bpb(subject: Subject) -> Artifact:
    """Return the bits per byte of the model as trained."""
    return {"bpb": subject.bpb()}, {}


def usual_weights(subject: Subject) -> QuantizedWeights:
    """Return the model quantized with the usual settings."""
    usual = subject.settings.evaluation.gptq
    return quantize(subject.model, collect_hessians(subject.model, subject.calibration(usual.batches), usual.batches), usual)


def quantized_bpb(subject: Subject) -> Artifact:
    """Return the bits per byte of the usual quantization."""
    return {"bpb": subject.quantized_bpb(usual_weights(subject))}, {}


def calibrations(subject: Subject) -> Artifact:
    """Return the bits per byte of other quantizations, and a rate-distortion curve over clips.

    The other quantizations are: few and many calibration batches, a Hessian clip, and rounding to nearest. A point of the curve
    has the packed and the predicted bytes, and `distortion`: the sum of tr(d H d^T) over the matrices.
    """
    evaluation, model = subject.settings.evaluation, subject.model
    usual = evaluation.gptq
    few, many = (collect_hessians(model, subject.calibration(count), count) for count in (usual.batches, evaluation.many))
    variants = {
        "few": quantize(model, few, usual),
        "many": quantize(model, many, usual),
        "clipped": quantize(model, few, replace(usual, clip_lambda=evaluation.clip_lambda)),
        "nearest": quantize(model, few, replace(usual, method="nearest")),
    }
    points = []
    for k in evaluation.clips:
        weights = quantize(model, few, replace(usual, k=k))
        lost = sum(
            distortion(model.get_parameter(name).detach(), weights.matrices[name].dequantize(), h) for name, h in few.items()
        )
        numbers = {**asdict(sizes(weights, evaluation.compressor)), "distortion": lost, "loss": subject.quantized_bpb(weights)}
        points.append({"k": k, **numbers})
    return {name: subject.quantized_bpb(weights) for name, weights in variants.items()} | {"points": points}, {}


def score_first_training(subject: Subject) -> Artifact:
    """Return the costs and gains of test-time training of the quantized model on a test text, without hints and with them.

    The rate of a scope is the one with the largest gain on the seed's own tuning texts. `bpb` has the bits per byte of `plain` (no
    training), `all`, `controls`, and `shared` (controls at the rate of `all`). `hinted` has the same with hints mixed in. A run
    that diverged is None.
    """
    evaluation = subject.settings.evaluation
    tuning = excerpt(subject.corpus, "tune", evaluation.tune, evaluation.tune_piece, subject.seed)
    tokens = excerpt(subject.corpus, "test", evaluation.adapted, evaluation.adapted_piece, subject.seed)
    noted = Noted(tokens, evaluation, {"hinted": Mixing(cross=evaluation.cross[1])})
    rates: dict[Scope, tuple[float, ...]] = {"all": evaluation.rates_all, "controls": evaluation.rates_controls}
    plain, hinted = {}, {}
    with dequantized(subject.model, usual_weights(subject)):
        rows = sweep(subject.model, tuning, evaluation.ttt, rates)
        chosen: dict[Scope, SweepRow] = {scope: best(rows, scope) for scope in rates}
        runs: dict[str, tuple[Scope, float]] = {
            "plain": ("none", 0.0),
            "all": ("all", chosen["all"].rate),
            "controls": ("controls", chosen["controls"].rate),
            "shared": ("controls", chosen["all"].rate),
        }
        for name, (scope, rate) in runs.items():
            run = adapt(subject.model, tokens, replace(evaluation.ttt, scope=scope, rate=rate), watch=noted)
            plain[name] = None if run.diverged else run.bpb
            hinted[name] = None if run.diverged else bpb(noted.nll["hinted"], tokens)
    return {
        "tuning": [{"scope": r.scope, "rate": r.rate, "gain": r.gain if math.isfinite(r.gain) else None} for r in rows],
        "rates": {scope: row.rate for scope, row in chosen.items()},
        "edges": {scope: row.rate in (min(rates[scope]), max(rates[scope])) for scope, row in chosen.items()},
        "bpb": plain,
        "hinted": hinted,
        "share": chosen["controls"].share,
    }, {}


class Noted:
    """A `Watch` that records what every token would cost with hints mixed in, beside scores that stay as they are.

    Attributes:
        hints: The hints of the stream.
        nll: By name of the mixture, the costs in the last run over the stream.
    """

    def __init__(self, tokens: Int64[Tensor, " s"], evaluation: Evaluation, mixtures: Mapping[str, Mixing]):
        self.tokens, self.mixtures = tokens, mixtures
        starts = window_starts(len(tokens), evaluation.window, evaluation.stride)
        self.hints = find_hints(tokens, evaluation.window, starts)
        self.nll = {name: torch.zeros(len(tokens), dtype=torch.float64) for name in mixtures}

    def __call__(self, log_probs: Tensor, positions: Tensor) -> None:
        for name, mixing in self.mixtures.items():
            nll = mixed_nll(log_probs, self.tokens[positions + 1], self.hints.at(positions), mixing)
            self.nll[name][positions + 1] = nll


def tap_in(subject: Subject) -> Artifact:
    """Return the bits per byte with hints mixed in, of all variants from one forward; and the savings of hints by token."""
    evaluation, tokens = subject.settings.evaluation, subject.test
    old, new = evaluation.cross
    variants = {
        "plain": Mixing(within=0.0, cross=0.0),
        "within": Mixing(cross=0.0),
        "old": Mixing(cross=old),
        "new": Mixing(cross=new),
    }
    noted = Noted(tokens, evaluation, variants)
    score(subject.model, tokens, window=evaluation.window, stride=evaluation.stride, watch=noted)
    nll, hints = noted.nll, noted.hints
    data = {"bpb": {name: bpb(costs, tokens) for name, costs in nll.items()}, "hints": _counts(hints, tokens)}
    return data, {}


def _counts(hints: Hints, tokens: Tensor) -> dict[str, float]:
    """Return the share of predictions with a hint, and of these the share that was right; the same for hints across windows."""
    offered, right = hints.offered[:-1], hints.token[:-1] == tokens[1:]
    cross = hints.cross[:-1] & offered
    count = lambda mask: float(mask.double().mean()) if len(mask) else 0.0  # noqa: E731
    return {
        "offered": count(offered),
        "right": count(right[offered]),
        "cross": count(cross),
        "cross_right": count(right[cross]),
    }


def routing(subject: Subject) -> Artifact:
    """Return the weights with which attention and MLP are routed after training, in the layers whose lanes can be compared.

    `pattern`: how strongly each sublayer prefers the lane that the asymmetric start gives it, relative to that start's preference.
    `apart`: the mean distance of a sublayer's two weights, relative to the mean distance of a weight from 1; None if none moved.
    """
    post = subject.model.post.detach().double()[list(compared(subject.model.config))]
    asymmetric = STARTS["asymmetric"]
    start = torch.tensor((asymmetric.attn, asymmetric.mlp), dtype=torch.float64)
    preferred, apart, moved = (start[:, 0] - start[:, 1]), post[..., 0] - post[..., 1], (post - 1).abs().mean()
    return {
        "pattern": float((apart / preferred).mean()),
        "by_sublayer": dict(zip(SUBLAYERS, (apart / preferred).mean(0).tolist(), strict=True)),
        "apart": float(apart.abs().mean() / moved) if moved else None,
    }, {}


def gradient_paths(subject: Subject) -> Artifact:
    """Return direct and cascade of every sublayer of the trained model, on a few test windows, in float64."""
    model = copy.deepcopy(subject.model).double()
    return {"rows": [asdict(row) for row in ratios(model, subject.windows, subject.seed)]}, {}


def error_growth(subject: Subject) -> Artifact:
    """Return the growth of a perturbation over the passes of the trained loop, for a few draws of the perturbation.

    The draws are the same for every seed's model: an interval over seeds is about models and texts, given these directions.
    """
    return {"draws": [asdict(row) for row in growth(subject.model, subject.windows, range(GROWTH_DRAWS))]}, {}


MEASURES: Mapping[str, Callable[[Subject], Artifact]] = MappingProxyType(
    {
        "bpb": plain_bpb,
        "quantised": quantized_bpb,
        "calibrations": calibrations,
        "ttt": score_first_training,
        "tapin": tap_in,
        "routing": routing,
        "paths": gradient_paths,
        "growth": error_growth,
    }
)

_ALSO: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "gptj": ("quantised", "ttt", "paths"),
        "shipped": ("quantised", "calibrations", "ttt", "tapin", "routing", "paths"),
        "asymmetric": ("routing",),
        "narrow": ("quantised",),
        "narrow-embeddings": ("quantised",),
        "wide": ("quantised", "ttt", "growth"),
        "wide-embeddings": ("quantised",),
        "momentum-99": ("quantised",),
    }
)


def measured(arm: str) -> tuple[str, ...]:
    """Return the names of an arm's measurements."""
    return "bpb", *_ALSO.get(arm, ())
