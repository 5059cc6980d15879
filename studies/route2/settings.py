"""What all arms of one run folder share. Two arms in a folder differ in their ``Arm`` and in nothing else.

The settings are hashed into the folder's name, so that numbers from different settings never meet in one table.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from mi_route2.adapters import AdapterSpec
from mi_route2.rollouts import Rollouts
from studies.loopholes.micro import MicroConfig
from studies.loopholes.presets import get_world
from studies.loopholes.warmstart import WarmStartConfig


@dataclass(frozen=True)
class ChatModel:
    """A chat model of one's own in place of the micro model.

    path          a folder with a Hugging Face checkpoint and its tokenizer; ``weights`` is the hash of what is in it
    data          what the problem reads its tasks from, where it reads any; ``data_hash`` is the hash of what is in it
    max_new       tokens of the longest completion, and the fixed length that losses are divided by
    token_budget  tokens of one micro-batch, padding included; it takes the place of ``micro``
    at_once       completions that are sampled at one time
    tries         samples of the base model among which teachers are looked for, where the settings want teachers
    checkpointing recompute blocks in the backward: less memory, a third more time
    thinking      what a chat template that asks is told
    device        where the model is: ``auto`` is CUDA where there is one
    """

    path: str
    weights: str
    data: str = ""
    max_new: int = 512
    token_budget: int = 16384
    at_once: int = 32
    tries: int = 512
    checkpointing: bool = True
    thinking: bool = False
    device: str = "auto"
    data_hash: str = ""

    def __post_init__(self) -> None:
        for name in ("max_new", "token_budget", "at_once", "tries"):
            if getattr(self, name) < 1:
                raise ValueError(f"chat.{name} must be at least 1, not {getattr(self, name)}")


ELSEWHERE = ("path", "data", "device", "at_once")
"""Fields of a ``ChatModel`` that say where things are and how they fit, and nothing of what is computed."""


@dataclass(frozen=True)
class Settings:
    """See the presets; rates are per optimiser step, ``steps`` are GRPO steps of ``prompts * group`` rollouts.

    ``adapt``: patterns of the Linear modules that carry both adapters. The unembedding is among them: without it the honest skill
    stops short, because a block writes to the residual stream alone and has to raise a symbol against the whole vocabulary.
    """

    preset: str = "strong"
    world: str = "strong"
    warm: WarmStartConfig = field(default_factory=WarmStartConfig)
    adapt: tuple[str, ...] = ("blocks.*.attn.*", "blocks.*.mlp.*", "unembed")
    kept: Literal["svd", "lora"] = "lora"
    kept_rank: int | None = 4
    kept_lr: float = 3e-3
    quarantine_rank: int = 4
    quarantine_lr: float = 1e-3
    steps: int = 80
    prompts: int = 12
    group: int = 8
    none_fraction: float = 0.25
    temperature: float = 1.0
    updates_per_batch: int = 1
    clip: float = 0.2
    kl: float = 0.0
    betas: tuple[float, float] = (0.9, 0.99)
    max_norm: float = 1.0
    micro: int | None = None
    pairs: int = 10
    teachers: int = 32
    teachers_per_group: int = 0
    evaluation_prompts: int = 128
    evaluation_temperature: float = 1.0
    probe_every: int = 5
    chat: ChatModel | None = None

    def __post_init__(self) -> None:
        if self.chat is None:
            get_world(self.world)
        for name in ("steps", "prompts", "pairs", "evaluation_prompts", "updates_per_batch", "probe_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("kept_lr", "quarantine_lr", "temperature", "evaluation_temperature", "max_norm", "clip"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
        if not 0 <= self.none_fraction <= 1:
            raise ValueError(f"none_fraction is a probability between 0 and 1, not {self.none_fraction}")
        if self.kl < 0 or (self.micro is not None and self.micro < 1):
            raise ValueError(f"kl must be at least 0 and micro at least 1 (or none), not {self.kl} and {self.micro}")
        AdapterSpec(self.kept, self.kept_rank, "lora", self.quarantine_rank)
        if self.group < 2:
            raise ValueError(f"group must be at least 2 (an advantage compares rollouts of one prompt), not {self.group}")
        if self.teachers < 0 or (self.teachers == 0 and self.teachers_per_group):
            raise ValueError(f"teachers must be at least {int(self.teachers_per_group > 0)}, not {self.teachers}")
        if not 0 <= self.teachers_per_group < self.group:
            raise ValueError(
                f"teachers_per_group must be between 0 and group - 1 = {self.group - 1}, not {self.teachers_per_group}"
            )

    def micro_batch(self, rollouts: Rollouts) -> int | None:
        """Rollouts in a micro-batch: ``micro``, or as many as the chat model's token budget holds; ``None`` for all."""
        if self.chat is None:
            return self.micro
        return max(1, self.chat.token_budget // rollouts.tokens.shape[1])

    def as_dict(self) -> dict[str, Any]:
        """As JSON; ``chat`` only where there is one."""
        described = json.loads(json.dumps(asdict(self)))
        return described if self.chat is not None else {name: v for name, v in described.items() if name != "chat"}

    @staticmethod
    def read(path: Path) -> "Settings":
        """Settings that ``as_dict`` wrote; ``ValueError`` where the file is not theirs."""
        try:
            raw = json.loads(path.read_text())
            warm = raw["warm"] | {"model": MicroConfig(**raw["warm"]["model"]), "betas": tuple(raw["warm"]["betas"])}
            tuples = {name: tuple(raw[name]) for name in ("adapt", "betas")}
            chat = None if raw.get("chat") is None else ChatModel(**raw["chat"])
            return Settings(**{**raw, **tuples, "warm": WarmStartConfig(**warm), "chat": chat})
        except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} holds no settings of this study ({error}); point at a run folder") from error

    @property
    def digest(self) -> str:
        """SHA-256 of every setting that results depend on."""
        described = self.as_dict()
        if self.chat is not None:
            without = ELSEWHERE if self.chat.data_hash else (*ELSEWHERE, "data_hash")
            described["chat"] = {name: v for name, v in described["chat"].items() if name not in without}
        return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()

    @property
    def folder(self) -> str:
        """``<preset>-<8 hex digits>``."""
        return f"{self.preset}-{self.digest[:8]}"


# The quarantine learns at a third to a half of the kept adapter's rate: at the same rate it takes a tenth of the honest skill with
# it when it is deleted, and the lower the rate, the more exploits are left where the mask sees little (docs/log.md).
_STRONG = Settings()
PRESETS: Mapping[str, Settings] = MappingProxyType(
    {
        "strong": _STRONG,
        "weak": replace(_STRONG, preset="weak", world="weak", quarantine_lr=1.7e-3),
        # dS is one number a direction: a tenth of this rate is too weak to move it.
        "delta_s": replace(_STRONG, preset="delta_s", kept="svd", kept_rank=None, kept_lr=3e-2, quarantine_lr=3e-3, steps=100),
    }
)


# A start for a model of a few billion parameters; nothing here was tuned on one (docs/real_model.md).
CHAT = replace(
    _STRONG, preset="chat", adapt=("blocks.*.attn.*", "blocks.*.mlp.*"), kept_rank=32, kept_lr=1e-4, quarantine_rank=32,
    quarantine_lr=5e-5, steps=200, prompts=8, group=8, evaluation_prompts=8, teachers=0,
)  # fmt: skip


def get_settings(preset: str) -> Settings:
    """The preset's settings; ``KeyError`` with the valid names."""
    if preset not in PRESETS:
        raise KeyError(f"unknown preset {preset!r}: choose from {', '.join(PRESETS)}")
    return PRESETS[preset]
