"""Settings that all parts of a study folder share; their hash is part of the folder's name."""

import hashlib
import json
import platform
from dataclasses import asdict, field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field

from mi_route2.validation import AtLeastOne, Name, NonNegative, Positive, read_settings, validated, write_json
from studies.lanes.arms import LanesSize
from studies.lanes.config import LanesConfig, StartName, WiringName, sized
from studies.lanes.gradients.symmetry import QuarantineSettings, SymmetrySettings
from studies.lanes.quantization.gptq import GPTQSettings
from studies.lanes.quantization.size import Compressor, compress
from studies.lanes.scoring.ttt import TTTSettings
from studies.lanes.text import SPLITS, TextCorpus, read_folder, standard_library
from studies.lanes.train import LanesTraining

FILE = "settings.json"
BEFORE = 12.85
"""The clip of matrices before the record's, with which a claim compares."""
FORMAT = 1
"""Increased if the computation changes in a way that no setting shows."""
Piece = Annotated[int, Field(ge=2)]  # its first token only opens it
Rates = Annotated[tuple[NonNegative, ...], Field(min_length=1, description="a tuple of one or more rates")]


@validated
class Evaluation:
    """Settings of the evaluation of a trained model.

    Attributes:
        window: Inputs of a window, in the sliding evaluation and in every other scoring.
        stride: Predictions between the ends of two windows.
        test: Tokens on which bits per byte are reported: excerpts from positions that the seed draws.
        piece: Tokens per test excerpt.
        tune: Tokens on which rates of test-time training are chosen: more than five excerpts of other documents.
        tune_piece: Tokens per tuning excerpt.
        adapted: Tokens on which test-time training is then evaluated at these rates.
        adapted_piece: Tokens per excerpt of these: longer, because a continuous text has more to learn from.
        ttt: Settings of test-time training, except for scope and rate.
        rates_all: Rates in the sweep for all parameters.
        rates_controls: Rates in the sweep for controls.
        gptq: Settings of quantization, except for those that are compared.
        many: Calibration batches of the larger calibration; gptq.batches is the smaller one.
        clip_lambda: The record's older Hessian clip, compared with 0.
        clips: Values of k on the rate-distortion curve; gptq.k and `BEFORE` are among them.
        cross: The two compared weights of Tap-In's hints across windows, the record's old one first.
        compressor: brotli (as in the record) if it is installed, otherwise lzma.
    """

    window: AtLeastOne = 128
    stride: AtLeastOne = 64
    test: AtLeastOne = 12288
    piece: Piece = 2048
    tune: AtLeastOne = 3072
    tune_piece: Piece = 512
    adapted: AtLeastOne = 6144
    adapted_piece: Piece = 1536
    ttt: TTTSettings = field(default_factory=lambda: TTTSettings(chunk=512, epochs=1, train_batch=4))
    rates_all: Rates = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
    rates_controls: Rates = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
    gptq: GPTQSettings = field(default_factory=GPTQSettings)
    many: AtLeastOne = 64
    clip_lambda: NonNegative = 0.175
    clips: tuple[Positive, ...] = (3.0, 6.0, 12.85, 13.1, 20.0)
    cross: tuple[NonNegative, NonNegative] = (0.06, 0.12)
    compressor: Compressor = field(default_factory=lambda: "brotli" if find_spec("brotli") else "lzma")


@validated
class Instruments:
    """Settings of the float64 measurements on small models with random weights, of as many blocks as the record's.

    Attributes:
        draws: Models of each wiring, each with its own weights and text; they are cheap, so there are more draws than seeds.
        batch: Windows of a measurement.
        length: Predictions per window.
        texts: Windows used to find directions of the routing scalars without a slope.
        text: Predictions per such window.
        symmetry: The training of lanes that is traced, once per seed.
        quarantine: The training of quarantines that is traced, once per seed.
    """

    draws: AtLeastOne = 8
    layers: AtLeastOne = 11
    d_model: AtLeastOne = 16
    heads: AtLeastOne = 2
    mlp: AtLeastOne = 2
    lane_start: AtLeastOne = 8
    batch: AtLeastOne = 4
    length: AtLeastOne = 32
    texts: AtLeastOne = 24
    text: AtLeastOne = 8
    symmetry: SymmetrySettings = field(default_factory=lambda: SymmetrySettings(d_model=16, heads=2, length=48, steps=60, every=3))
    quarantine: QuarantineSettings = field(default_factory=lambda: QuarantineSettings(length=48, every=3))

    def config(self, wiring: WiringName, start: StartName = "symmetric") -> LanesConfig:
        """Return the model configuration for a wiring; output projections are not 0, or no routing scalar would have a gradient."""
        return sized(self, wiring=wiring, start=start, zero_init=False)


@validated
class LanesSettings:
    """Settings of one study.

    Attributes:
        text: Hash of the corpus.
        size: Model sizes.
        training: Training of the arms.
        evaluation: Evaluation of the trained models.
        instruments: The float64 measurements.
        train_bytes: Number of bytes to train on.
        profile: Name of the profile.
        runtime: Version of torch and the machine's architecture.
    """

    text: str
    size: LanesSize = field(default_factory=LanesSize)
    training: LanesTraining = field(default_factory=LanesTraining)
    evaluation: Evaluation = field(default_factory=Evaluation)
    instruments: Instruments = field(default_factory=Instruments)
    train_bytes: AtLeastOne = 4_000_000
    profile: Name = "default"
    runtime: str = field(default_factory=lambda: f"torch {torch.__version__}, {platform.machine()}")

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as JSON objects."""
        return json.loads(json.dumps(asdict(self)))

    @property
    def digest(self) -> str:
        """SHA-256 of all settings."""
        return hashlib.sha256(json.dumps({"format": FORMAT, **self.as_dict()}, sort_keys=True).encode()).hexdigest()

    @property
    def folder(self) -> str:
        """Name of the study folder: ``lanes-<profile>-<8 hex digits>``."""
        return f"lanes-{self.profile}-{self.digest[:8]}"

    def write(self, folder: Path) -> None:
        write_json(folder / FILE, self.as_dict())

    @staticmethod
    def read(folder: Path) -> "LanesSettings":
        """Return the settings that ``write`` stored in a folder; ``ValueError`` if the folder has none."""
        return read_settings(LanesSettings, folder / FILE, "give a folder that `run` created")


def quick(text: str) -> LanesSettings:
    """Return settings that run every part in about a minute: a check that all parts work; no claim is resolved."""
    evaluation = Evaluation(
        test=6144,
        tune=3072,
        adapted=1536,
        rates_all=(0.1, 0.3),
        rates_controls=(1.0,),
        gptq=GPTQSettings(batches=4),
        many=16,
        clips=(6.0, 12.85, 13.1, 20.0),
    )
    training = LanesTraining(steps=40, batch=4)
    instruments = Instruments(
        draws=4,
        symmetry=SymmetrySettings(d_model=16, heads=2, length=32, steps=20, every=2),
        quarantine=QuarantineSettings(length=32, steps=20, every=2),
    )
    size = LanesSize(d_model=32, heads=2, mlp=2)
    return LanesSettings(text, size, training, evaluation, instruments, train_bytes=1_000_000, profile="quick")


def check_enough(corpus: TextCorpus, split: str, size: int) -> None:
    """Raise ``ValueError`` if a split has fewer tokens than the excerpts from it need."""
    if (there := len(corpus.stream(split))) < size:
        raise ValueError(f"the split {split!r} has {there} tokens, but its pieces need {size}: give more text")


def check_evaluation(corpus: TextCorpus, evaluation: Evaluation) -> None:
    """Check what an evaluation needs of the text and of this machine, before a model is trained.

    Raises:
        ValueError: If a split is too short, or the compressor is not installed.
    """
    for split, size in (("test", max(evaluation.test, evaluation.adapted)), ("tune", evaluation.tune)):
        check_enough(corpus, split, size)
    compress(b"", evaluation.compressor)


def open_text(folder: Path | None, expected: str | None = None) -> TextCorpus:
    """Return the corpus of a folder, or of the running Python.

    Raises:
        ValueError: If a split is empty, or if the hash of the corpus is not ``expected``.
    """
    corpus = standard_library() if folder is None else read_folder(folder)
    for split in SPLITS:
        corpus.split(split)
    if expected is not None and corpus.sha256 != expected:
        raise ValueError(
            f"the text in {folder or 'this Python'} changed while the study ran: start again with text that does not change"
        )
    return corpus
