"""A study of the lanes that takes seconds: a corpus of made-up text, and settings of a few steps."""

import hashlib
from pathlib import Path

from studies.lanes.arms import LanesSize
from studies.lanes.gradients.symmetry import QuarantineSettings, SymmetrySettings
from studies.lanes.quantization.gptq import GPTQSettings
from studies.lanes.scoring.ttt import TTTSettings
from studies.lanes.settings import Evaluation, Instruments, LanesSettings, open_text
from studies.lanes.train import LanesTraining

SIZE = LanesSize(d_model=8, heads=2, mlp=1)
TRAINING = LanesTraining(steps=4, batch=2, length=24)
FEW = ("gptj", "wide-embeddings")  # a plain arm and a looped one, for what needs no table of claims


def write_texts(folder: Path, documents: int = 60) -> Path:
    """Documents of words that a hash draws, of which every split has some."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(documents):
        digests = [hashlib.sha256(f"{i}/{j}".encode()).hexdigest() for j in range(12)]
        (folder / f"{i}.txt").write_text("\n".join(f"word {d[:5]} said {d[5:9]} and {digests[0][:6]}" for d in digests))
    return folder


def tiny_settings(text: Path, profile: str = "default") -> LanesSettings:
    """Sizes at which all arms and all that is measured on them take seconds."""
    evaluation = Evaluation(
        window=24,
        stride=12,
        test=192,
        piece=96,
        tune=96,
        tune_piece=48,
        adapted=96,
        adapted_piece=96,
        ttt=TTTSettings(window=24, stride=12, chunk=48, epochs=1),
        rates_all=(0.1,),
        rates_controls=(0.1, 1.0),
        gptq=GPTQSettings(batches=1),
        many=2,
        clips=(12.85, 13.1),
        compressor="lzma",
    )
    instruments = Instruments(
        draws=1,
        layers=6,
        d_model=8,
        mlp=1,
        lane_start=4,
        batch=2,
        length=12,
        symmetry=SymmetrySettings(layers=4, d_model=8, heads=2, mlp=1, lane_start=2, batch=2, length=12, steps=2, every=1),
        quarantine=QuarantineSettings(layers=1, d_model=8, heads=2, mlp=8, rank=2, batch=2, length=12, steps=3, every=1),
    )
    return LanesSettings(open_text(text).sha256, SIZE, TRAINING, evaluation, instruments, train_bytes=20_000, profile=profile)
