"""Settings that a tracing shares between arms and seeds; they are hashed, with the training's settings, into the folder's name."""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mi_route2.validation import AtLeastOne, Words, read_settings, validated
from studies.training.arms import get_arms

ARMS = ("vanilla", "absorb", "route2-full")
UNTRAINED = "untrained"
"""The arm whose adapters are at initialization, so that the model is the base model: every effect of a patch is 0 there."""


@validated
class TracingSettings:
    """TracingSettings of one tracing.

    Attributes:
        training: Hash of the training's settings.
        arms: Trained arms; ``UNTRAINED`` is always traced as well.
        prompts: Prompts of each mode, over test tasks; pairs are chosen from their answers.
        answers: Answers of the base model to each prompt.
        pairs: Maximum number of pairs per contrast and seed.
        draws: Random directions, other sites and shuffles per control; a pair's effect is the mean over them.
        rated: Prompts of each loophole on which hack rates are sampled.
    """

    training: str
    arms: Words = ARMS
    prompts: AtLeastOne = 384
    answers: AtLeastOne = 2
    pairs: AtLeastOne = 64
    draws: AtLeastOne = 3
    rated: AtLeastOne = 64

    def __post_init__(self) -> None:
        get_arms(self.arms)
        if len(set(self.arms)) < len(self.arms):
            raise ValueError(f"arms must be given once each, not {', '.join(self.arms)}")

    @property
    def digest(self) -> str:
        """SHA-256 of everything in the settings that a traced arm depends on; the other arms are not part of it."""
        described = {name: value for name, value in self.as_dict().items() if name != "arms"}
        return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()

    @property
    def folder(self) -> str:
        """Name of the folder: ``tracing-<8 hex digits>``."""
        return f"tracing-{self.digest[:8]}"

    def as_dict(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self)))

    @staticmethod
    def read(path: Path) -> "TracingSettings":
        """Return the settings that ``as_dict`` wrote; ``ValueError`` if the file does not contain them."""
        return read_settings(TracingSettings, path, "give a folder of this study")
