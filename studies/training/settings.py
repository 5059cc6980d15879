"""Settings that all arms of one run folder share. Two arms in a folder differ only in their ``Arm``.

The settings are hashed into the folder's name, so that numbers from different settings are never in one table. Nothing here needs
torch, because command lines print the names.
"""

import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, field, fields, is_dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field

from mi_route2.specs import AdapterSpec
from mi_route2.validation import (
    AtLeastOne,
    Fraction,
    Name,
    Natural,
    NonNegative,
    Positive,
    Probability,
    Words,
    read_assignments,
    read_settings,
    replace_fields,
    unknown_name,
    validated,
)
from studies.environments.micro.settings import MicroConfig, WarmStartConfig, get_world


@validated
class ChatModel:
    """The user's chat model, which replaces the micro model.

    Attributes:
        path: Folder with a Hugging Face checkpoint and its tokenizer.
        weights: Hash of the content of ``path``.
        data: Source of the problem's tasks, if it reads any.
        max_new: Tokens of the longest completion, and the fixed length by which losses are divided.
        token_budget: Tokens of one micro-batch, including padding; replaces ``micro``.
        at_once: Number of completions that are sampled at one time.
        tries: Samples of the base model among which teachers are searched, if the settings require teachers.
        checkpointing: True to recompute blocks in the backward: less memory, a third more time.
        thinking: Value of the chat template's thinking option, if it has one.
        device: Device of the model; ``auto`` is CUDA if available.
        data_hash: Hash of the content of ``data``.
    """

    path: str
    weights: str
    data: str = ""
    max_new: AtLeastOne = 512
    token_budget: AtLeastOne = 16384
    at_once: AtLeastOne = 32
    tries: AtLeastOne = 512
    checkpointing: bool = True
    thinking: bool = False
    device: str = "auto"
    data_hash: str = ""


FIXED = ("path", "weights", "data", "data_hash")
"""Fields of a ``ChatModel`` that options of the command line give, and `override` does not."""
PRECISION_NAMES = ("float32", "float64", "bfloat16")
"""Dtypes of training."""
TRACKER_NAMES = ("tensorboard", "wandb", "trackio")
"""Packages that show curves as they grow."""
UNHASHED = ("path", "data", "device", "at_once")
"""Fields of a ``ChatModel`` about places and memory, which do not change the results."""


@validated
class Settings:
    """Settings of a run; see the presets. Rates are per optimizer step, ``steps`` are GRPO steps of ``prompts * group`` rollouts.

    ``adapt`` are patterns of the Linear modules that have both adapters. They include the unembedding, because without it the
    honest skill is learned less well: a block writes only to the residual stream, and has to raise one symbol against the whole
    vocabulary.
    """

    preset: Name = "strong"
    world: str = "strong"
    warm: WarmStartConfig = field(default_factory=WarmStartConfig)
    adapt: Words = ("blocks.*.attn.*", "blocks.*.mlp.*", "unembed")
    kept: Literal["svd", "lora"] = "lora"
    kept_rank: AtLeastOne | None = 4
    kept_lr: Positive = 3e-3
    quarantine_rank: AtLeastOne = 4
    quarantine_lr: Positive = 1e-3
    steps: AtLeastOne = 80
    prompts: AtLeastOne = 12
    group: Annotated[int, Field(ge=2)] = 8  # an advantage compares rollouts of one prompt
    none_fraction: Probability = 0.25
    temperature: Positive = 1.0
    updates_per_batch: AtLeastOne = 1
    clip: Positive = 0.2
    kl: NonNegative = 0.0
    betas: tuple[Fraction, Fraction] = (0.9, 0.99)
    max_norm: Positive = 1.0
    micro: AtLeastOne | None = None
    pairs: AtLeastOne = 10
    teachers: Natural = 32
    teachers_per_group: Natural = 0
    evaluation_prompts: AtLeastOne = 128
    evaluation_temperature: Positive = 1.0
    probe_every: AtLeastOne = 5
    chat: ChatModel | None = None

    def __post_init__(self) -> None:
        if self.chat is None:
            get_world(self.world)
        AdapterSpec(self.kept, self.kept_rank, "lora", self.quarantine_rank)
        if self.teachers == 0 and self.teachers_per_group:
            raise ValueError("teachers must be at least 1 if teachers_per_group is, not 0")
        if self.teachers_per_group >= self.group:
            raise ValueError(
                f"teachers_per_group must be between 0 and group - 1 = {self.group - 1}, not {self.teachers_per_group}"
            )

    def micro_batch(self, tokens: int) -> int | None:
        """Return the number of rollouts of a micro-batch; ``None`` for all at once.

        It is ``micro``, or the number of padded rollouts of this many tokens that fits the chat model's token budget.
        """
        return self.micro if self.chat is None else max(1, self.chat.token_budget // tokens)

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as JSON values; ``chat`` only if it is set."""
        described = json.loads(json.dumps(asdict(self)))
        return described if self.chat is not None else {name: v for name, v in described.items() if name != "chat"}

    @staticmethod
    def read(path: Path) -> "Settings":
        """Read settings that ``as_dict`` wrote.

        Raises:
            ValueError: If the file does not contain them.
        """
        inside = ", ".join(str(found.parent) for found in sorted(path.parent.glob("*/settings.json")))
        run = inside or "runs/<preset>-<hash>, which `python -m studies.route2 run` makes"
        return read_settings(Settings, path, f"point at a run folder{':' if inside else ','} {run}")

    @property
    def digest(self) -> str:
        """SHA-256 of every setting that results depend on."""
        described = self.as_dict()
        if self.chat is not None:
            without = UNHASHED if self.chat.data_hash else (*UNHASHED, "data_hash")
            described["chat"] = {name: v for name, v in described["chat"].items() if name not in without}
        return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()

    @property
    def folder(self) -> str:
        """Name of the run folder, ``<preset>-<8 hex digits>``."""
        return f"{self.preset}-{self.digest[:8]}"


# The quarantine learns at a third to a half of the kept adapter's rate. At the same rate, a tenth of the honest skill is lost
# when the quarantine is deleted; the lower its rate, the more exploits remain if the mask detects little.
_STRONG = Settings()
_WEAK = replace(_STRONG, preset="weak", world="weak", quarantine_lr=1.7e-3)


SIZES = {"30k": (32, 6e-3), "400k": (128, 1.5e-3), "1600k": (256, 7.5e-4), "8m": (576, 3.3e-4)}
"""Width and learning rate of base models of other sizes; the rate falls as the width rises."""


def _sized(of: Settings, size: str) -> Settings:
    width, lr = SIZES[size]
    warm = WarmStartConfig(lr=lr, model=MicroConfig(d=width, mlp=4 * width))
    return replace(of, preset=f"{of.preset}-{size}", warm=warm)


PRESETS: Mapping[str, Settings] = MappingProxyType(
    {
        "strong": _STRONG,
        "weak": _WEAK,
        "sparse": replace(_STRONG, preset="sparse", world="sparse"),
        "persona-20": replace(_STRONG, preset="persona-20", world="persona-20"),
        **{f"{of.preset}-{size}": _sized(of, size) for of in (_STRONG, _WEAK) for size in SIZES},
        # dS has only one number per direction, and a tenth of this rate hardly changes it.
        "delta_s": replace(_STRONG, preset="delta_s", kept="svd", kept_rank=None, kept_lr=3e-2, quarantine_lr=3e-3, steps=100),
    }
)


# A starting point for a model of a few billion parameters; nothing here was tuned on one.
CHAT = replace(
    _STRONG, preset="chat", adapt=("blocks.*.attn.*", "blocks.*.mlp.*"), kept_rank=32, kept_lr=1e-4, quarantine_rank=32,
    quarantine_lr=5e-5, steps=200, prompts=8, group=8, evaluation_prompts=8, teachers=0,
)  # fmt: skip


# Qwen3-4B on LeetCode with a grader that can be overwritten, as in "Steering RL Training: Benchmarking Interventions Against Reward
# Hacking" (Wong, Engels, Nanda, 2025): 16 prompts of 16 completions, LoRA of rank 32, 200 steps. Never run here at this size.
_QWEN = replace(
    CHAT, preset="qwen3-4b", kept_lr=7e-5, quarantine_lr=3.5e-5, prompts=16, group=16, none_fraction=0.0, temperature=0.7,
    evaluation_prompts=64, evaluation_temperature=0.7,
)  # fmt: skip
# SmolLM2-135M after a warm-up on the world of functions (``tiny-model --start smollm2``); for two cores. With a quarter of prompts
# that nobody can cheat, the skill learned on these overtook the hacks in one run of three without a defence (docs/lessons.md).
_SMOLLM2 = replace(
    CHAT, preset="smollm2", kept_rank=8, kept_lr=1e-3, quarantine_rank=8, quarantine_lr=3e-4, steps=24, prompts=6, group=4,
    none_fraction=0.1, evaluation_prompts=24,
)  # fmt: skip
CHAT_PRESETS: Mapping[str, tuple[Settings, Mapping[str, int]]] = MappingProxyType(
    {
        "chat": (CHAT, {}),
        "smollm2": (_SMOLLM2, MappingProxyType({"max_new": 64, "token_budget": 1536, "checkpointing": False, "at_once": 24})),
        "qwen3-4b": (_QWEN, MappingProxyType({"max_new": 1536, "token_budget": 8192, "at_once": 64})),
    }
)
"""Presets for a chat model, each with fields of its ``ChatModel``."""


def get_settings(preset: str) -> Settings:
    """Return the preset's settings.

    Raises:
        KeyError: If there is no such preset; the message lists the valid names.
    """
    if preset not in PRESETS:
        raise KeyError(unknown_name(preset, list(PRESETS), "preset"))
    return PRESETS[preset]


def _apart(value: Any, base: Any, other: Any) -> Any:
    changes = {
        field.name: _apart(getattr(value, field.name), a, b) if is_dataclass(a) and is_dataclass(b) else b
        for field in fields(value)
        if (a := getattr(base, field.name)) != (b := getattr(other, field.name))
    }
    return replace(value, **changes)


def override(settings: Settings, changes: tuple[str, ...], config: Path | None = None) -> Settings:
    """Return ``settings`` with the changes in the TOML file ``config``, and then with ``name=value`` changes.

    ``warm.name=value`` changes the warm start, ``chat.name=value`` the chat model.

    Raises:
        ValueError: If a name is unknown (the message lists the valid names) or given twice, or if a value is missing or invalid.
            Errors of the file are those of `read_config`.
    """
    sections = (("", settings, ("preset", "warm", "chat")), ("warm.", settings.warm, ("model",)), ("chat.", settings.chat, FIXED))
    known = {
        f"{prefix}{field.name}": getattr(section, field.name)
        for prefix, section, fixed in sections
        if section is not None
        for field in fields(section)
        if field.name not in fixed
    }
    values = {} if config is None else read_config(config)
    changed = read_assignments(changes, "--override")
    if bare := [name for name, value in changed.items() if value is None and name in known]:
        raise ValueError(f"--override {bare[0]} has no value: write {bare[0]}=VALUE (it is {known[bare[0]]} now)")
    values |= changed
    if unknown := [name for name in values if name not in known]:
        raise ValueError(unknown_name(unknown[0], list(known), "setting"))
    return replace_fields(settings, values)


def read_config(path: Path) -> dict[str, Any]:
    """Return the settings in a TOML file by name; ``steps = 300`` under ``[warm]`` is ``warm.steps``.

    Raises:
        ValueError: The file cannot be read, is not TOML, or gives a setting twice.
    """
    values: dict[str, Any] = {}
    try:
        for name, value in tomllib.loads(path.read_text(encoding="utf-8-sig")).items():
            section = {f"{name}.{inner}": each for inner, each in value.items()} if isinstance(value, dict) else {name: value}
            if twice := sorted(values.keys() & section.keys()):
                raise ValueError(f"it gives {twice[0]} twice: remove one of them")
            values |= section
    except OSError as error:
        raise ValueError(f"--config {path} cannot be read ({error.strerror}): give a TOML file of settings") from error
    except RecursionError as error:
        raise ValueError(f"--config {path} is nested too deeply: write lines as steps = 100") from error
    except ValueError as error:
        raise ValueError(f"--config {path} is not a TOML file of settings ({error}): write lines as steps = 100") from error
    return values


def changes(settings: Mapping[str, Any], preset: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return ``name=value`` for each setting that differs from the preset's, in the syntax of ``--override``."""
    differing = []
    for name in sorted(settings.keys() | preset.keys()):
        value, usual = settings.get(name), preset.get(name)
        if isinstance(value, dict) and isinstance(usual, dict):
            differing += changes(value, usual, f"{prefix}{name}.")
        elif value != usual:
            word = ",".join(map(str, value)) if isinstance(value, list) else "none" if value is None else value
            differing.append(f"{prefix}{name}={word}")
    return differing
