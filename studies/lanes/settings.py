"""What all parts of one folder share, hashed into its name."""

import hashlib
import json
import platform
from dataclasses import asdict, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from mi_route2.validation import AtLeastOne, Name, NonNegative, Positive, read_settings, validated, write_json
from studies.lanes.arms import Size
from studies.lanes.config import LanesConfig, sized
from studies.lanes.gptq import GPTQSettings
from studies.lanes.quarantine_symmetry import QuarantineSettings
from studies.lanes.size import Compressor
from studies.lanes.symmetry import SymmetrySettings
from studies.lanes.text import SPLITS, Corpus, read_folder, standard_library
from studies.lanes.train import Training
from studies.lanes.ttt import TTTSettings

FILE = "settings.json"
FORMAT = 1
"""Raised when what is computed changes in a way that no setting shows."""


@validated
class Evaluation:
    """How a trained model is judged.

    window, stride      of the sliding evaluation, and of everything that scores
    test, piece         tokens that bits per byte are reported on: excerpts of a piece each, from places that the seed draws
    tune, tune_piece    tokens that rates of test-time training are chosen on: excerpts of other documents, more than five of them
    adapted             tokens that are then read with these rates
    adapted_piece       tokens of an excerpt of theirs: longer, for there is more to be learnt from a text that goes on
    ttt                 test-time training, but for scope and rate
    rates_all, rates_controls       what is swept
    gptq                quantisation, but for what is compared
    many                calibration batches of the larger calibration; gptq.batches of the smaller one
    clip_lambda         the record's older Hessian clip, against 0
    clips               the k of the rate-distortion curve; gptq.k is one of them
    cross               weights of Tap-In's hints across windows that are compared, the record's old one first
    compressor          brotli, which the record takes, where it is installed
    """

    window: AtLeastOne = 128
    stride: AtLeastOne = 64
    test: AtLeastOne = 12288
    piece: AtLeastOne = 2048
    tune: AtLeastOne = 3072
    tune_piece: AtLeastOne = 512
    adapted: AtLeastOne = 6144
    adapted_piece: AtLeastOne = 1536
    ttt: TTTSettings = field(default_factory=lambda: TTTSettings(chunk=512, epochs=1, train_batch=4))
    rates_all: tuple[NonNegative, ...] = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
    rates_controls: tuple[NonNegative, ...] = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
    gptq: GPTQSettings = field(default_factory=GPTQSettings)
    many: AtLeastOne = 64
    clip_lambda: NonNegative = 0.175
    clips: tuple[Positive, ...] = (3.0, 6.0, 12.85, 13.1, 20.0)
    cross: tuple[NonNegative, NonNegative] = (0.06, 0.12)
    compressor: Compressor = field(default_factory=lambda: "brotli" if find_spec("brotli") else "lzma")

    def __post_init__(self) -> None:
        if (self.ttt.window, self.ttt.stride) != (self.window, self.stride):
            raise ValueError("test-time training scores the windows that the plain evaluation scores: give both the same")
        for name, piece in (("test", self.piece), ("tune", self.tune_piece), ("adapted", self.adapted_piece)):
            if getattr(self, name) % piece:
                raise ValueError(f"{name} {getattr(self, name)} must be whole pieces of {piece} tokens")
        if self.gptq.k not in self.clips:
            raise ValueError(f"the clips {self.clips} lack {self.gptq.k}, the one that everything else is quantised with")
        if self.gptq.batches >= self.many:
            raise ValueError(f"many = {self.many} batches must be more than the usual {self.gptq.batches}")


@validated
class Instruments:
    """The float64 measurements on small models at random weights.

    draws           models of each wiring, each of its own weights and text; they are cheap, so there are more than seeds
    layers, d_model, heads, mlp, lane_start         of these models; layers and fork are the record's
    batch, length   windows and predictions that they are measured on
    texts, text     windows and predictions of each that routing scalars are searched for directions without a slope with
    symmetry, quarantine        the trainings that are watched, once a seed
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

    def config(self, wiring: str, start: str = "symmetric") -> LanesConfig:
        """The model that a wiring is measured on: its output projections are not 0, or nothing would reach a routing scalar."""
        return sized(self, wiring=wiring, start=start, zero_init=False)


@validated
class Settings:
    """One study. text: the hash of the corpus. train_bytes: how much of it is trained on. full: whether it has every arm."""

    text: str
    size: Size = field(default_factory=Size)
    training: Training = field(default_factory=Training)
    evaluation: Evaluation = field(default_factory=Evaluation)
    instruments: Instruments = field(default_factory=Instruments)
    train_bytes: AtLeastOne = 4_000_000
    profile: Name = "default"
    full: bool = False
    runtime: str = field(default_factory=lambda: f"torch {torch.__version__}, {platform.machine()}")

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return json.loads(json.dumps(asdict(self)))

    @property
    def digest(self) -> str:
        """SHA-256 of all of it."""
        return hashlib.sha256(json.dumps({"format": FORMAT, **self.as_dict()}, sort_keys=True).encode()).hexdigest()

    @property
    def folder(self) -> str:
        """``lanes-<profile>-<8 hex digits>``."""
        return f"lanes-{self.profile}-{self.digest[:8]}"

    def write(self, folder: Path) -> None:
        write_json(folder / FILE, self.as_dict())

    @staticmethod
    def read(folder: Path) -> "Settings":
        """The settings that ``write`` left in a folder; ``ValueError`` where they are not there."""
        return read_settings(Settings, folder / FILE, "point at a folder that `run` made")


def quick(text: str) -> Settings:
    """Everything once over in a minute: it shows that all parts run, and resolves nothing."""
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
    training = Training(steps=40, batch=4)
    instruments = Instruments(
        draws=4,
        symmetry=SymmetrySettings(d_model=16, heads=2, length=32, steps=20, every=2),
        quarantine=QuarantineSettings(length=32, steps=20, every=2),
    )
    size = Size(d_model=32, heads=2, mlp=2)
    return Settings(text, size, training, evaluation, instruments, train_bytes=1_000_000, profile="quick")


def full(text: str) -> Settings:
    """Every arm, trained for five times as long: the questions of ours beside the record's claims."""
    usual = Settings(text)
    training = replace(usual.training, steps=5 * usual.training.steps)
    return replace(usual, training=training, profile="full", full=True)


def open_text(folder: Path | None, expected: str | None = None) -> Corpus:
    """The corpus of a folder, or of the running Python.

    ``ValueError`` where a split of it is empty, or where it is not the one whose hash is ``expected``.
    """
    corpus = standard_library() if folder is None else read_folder(folder)
    for split in SPLITS:
        corpus.split(split)
    if expected is not None and corpus.sha256 != expected:
        raise ValueError(
            f"the text in {folder or 'this Python'} changed while the study ran: start again, with text that stays as it is"
        )
    return corpus
