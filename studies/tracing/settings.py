"""What a tracing shares between arms and seeds. It is hashed, with the training's own settings, into the folder's name."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from studies.route2.arms import get_arms

ARMS = ("vanilla", "absorb", "route2-full")
UNTRAINED = "untrained"
"""The arm whose adapters are at init, so that the model is the base model: every effect of a patch is 0 there."""


@dataclass(frozen=True)
class Settings:
    """``arms`` are trained ones; beside them ``UNTRAINED`` is always traced.

    prompts   of each mode, over test tasks; the base model answers each ``answers`` times, and pairs are looked for among these
    pairs     the most pairs of one contrast and seed
    draws     random directions, other sites and shuffles a control; a pair's effect is the mean over them
    rated     prompts of each loophole on which hack rates are sampled
    """

    training: str
    arms: tuple[str, ...] = ARMS
    prompts: int = 384
    answers: int = 2
    pairs: int = 64
    draws: int = 3
    rated: int = 64

    def __post_init__(self) -> None:
        get_arms(self.arms)
        for name in ("prompts", "answers", "pairs", "draws", "rated"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if len(set(self.arms)) < len(self.arms) or not self.arms:
            raise ValueError(f"arms must be given once each, at least one, not {', '.join(self.arms) or 'none'}")

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
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            return Settings(**{**raw, "arms": tuple(raw["arms"])})
        except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} holds no settings of this study ({error}); point at a folder of it") from error
