"""What a tracing shares between arms and seeds. It is hashed, with the training's own settings, into the folder's name."""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mi_route2.validation import AtLeastOne, Words, read_settings, validated
from studies.training.arms import get_arms

ARMS = ("vanilla", "absorb", "route2-full")
UNTRAINED = "untrained"
"""The arm whose adapters are at init, so that the model is the base model: every effect of a patch is 0 there."""


@validated
class Settings:
    """``arms`` are trained ones; beside them ``UNTRAINED`` is always traced.

    prompts   of each mode, over test tasks; the base model answers each ``answers`` times, and pairs are looked for among these
    pairs     the most pairs of one contrast and seed
    draws     random directions, other sites and shuffles a control; a pair's effect is the mean over them
    rated     prompts of each loophole on which hack rates are sampled
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
        """SHA-256 of what a traced arm depends on. Which other arms are traced beside it is no part of that."""
        described = {name: value for name, value in self.as_dict().items() if name != "arms"}
        return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()

    @property
    def folder(self) -> str:
        """``tracing-<8 hex digits>``."""
        return f"tracing-{self.digest[:8]}"

    def as_dict(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self)))

    @staticmethod
    def read(path: Path) -> "Settings":
        """Settings that ``as_dict`` wrote; ``ValueError`` where the file is not theirs."""
        return read_settings(Settings, path, "point at a folder of it")
