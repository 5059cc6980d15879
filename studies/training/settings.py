"""Settings that all arms of one run folder share. Two arms in a folder differ only in their ``Arm``.

The settings are hashed into the folder's name, so that numbers from different settings are never in one table. Nothing here needs
torch, because command lines print the names.
"""

import hashlib
import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, field, fields, replace
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
    parse_words,
    read_settings,
    unknown_name,
    validated,
)
from studies.environments.micro.settings import WarmStartConfig, get_world


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
ELSEWHERE = ("path", "data", "device", "at_once")
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
        inside = ", ".join(str(one.parent) for one in sorted(path.parent.glob("*/settings.json")))
        run = inside or "runs/<preset>-<hash>, which `python -m studies.route2 run` makes"
        return read_settings(Settings, path, f"point at a run folder{':' if inside else ','} {run}", optional=("chat",))

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
        """Name of the run folder, ``<preset>-<8 hex digits>``."""
        return f"{self.preset}-{self.digest[:8]}"


# The quarantine learns at a third to a half of the kept adapter's rate. At the same rate, a tenth of the honest skill is lost
# when the quarantine is deleted; the lower its rate, the more exploits remain if the mask detects little (docs/log.md).
_STRONG = Settings()
PRESETS: Mapping[str, Settings] = MappingProxyType(
    {
        "strong": _STRONG,
        "weak": replace(_STRONG, preset="weak", world="weak", quarantine_lr=1.7e-3),
        "sparse": replace(_STRONG, preset="sparse", world="sparse"),
        "persona-20": replace(_STRONG, preset="persona-20", world="persona-20"),
        # dS has only one number per direction, and a tenth of this rate hardly changes it.
        "delta_s": replace(_STRONG, preset="delta_s", kept="svd", kept_rank=None, kept_lr=3e-2, quarantine_lr=3e-3, steps=100),
    }
)


STUDIED = ("strong", "weak", "delta_s")
"""Presets of the main study; the other ones are of evidence alone."""

# A starting point for a model of a few billion parameters; nothing here was tuned on one (docs/real_model.md).
CHAT = replace(
    _STRONG, preset="chat", adapt=("blocks.*.attn.*", "blocks.*.mlp.*"), kept_rank=32, kept_lr=1e-4, quarantine_rank=32,
    quarantine_lr=5e-5, steps=200, prompts=8, group=8, evaluation_prompts=8, teachers=0,
)  # fmt: skip


def get_settings(preset: str) -> Settings:
    """Return the preset's settings.

    Raises:
        KeyError: If there is no such preset; the message lists the valid names.
    """
    if preset not in PRESETS:
        raise KeyError(unknown_name(preset, list(PRESETS), "preset"))
    return PRESETS[preset]


def override(settings: Settings, changes: tuple[str, ...], config: Path | None = None) -> Settings:
    """Return ``settings`` with the changes in the TOML file ``config``, and then with ``name=value`` changes.

    ``warm.name=value`` changes the warm start, ``chat.name=value`` the chat model.

    Raises:
        ValueError: If a name is unknown (the message lists the valid names) or given twice, or if a value is missing or invalid.
            Errors of the file are those of `read_changes`.
    """
    own = _changeable(settings, "", ("preset", "warm", "chat"))
    known = own | _changeable(settings.warm, "warm.", ("model",))
    known |= _changeable(settings.chat, "chat.", FIXED) if settings.chat else {}
    words: dict[str, str] = {}
    given = [change.partition("=")[0] for change in changes]
    if twice := [name for place, name in enumerate(given) if name in given[:place]]:
        raise ValueError(f"--override gives {twice[0]} twice: remove one of them")
    for change in (*read_changes(config), *changes):
        name, equals, words[name] = change.partition("=")
        if name not in known:
            raise ValueError(unknown_name(name, list(known), "setting"))
        if not equals:
            raise ValueError(f"--override {name} has no value: write {name}=VALUE (it is {known[name]} now)")
    return parse_words(settings, words)


def changes(settings: Mapping[str, Any], preset: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return ``name=value`` for each setting that differs from the preset's, in the syntax of ``--override``."""
    found = []
    for name in sorted(settings.keys() | preset.keys()):
        own, other = settings.get(name), preset.get(name)
        if isinstance(own, dict) and isinstance(other, dict):
            found += changes(own, other, f"{prefix}{name}.")
        elif own != other:
            word = ",".join(map(str, own)) if isinstance(own, list) else "none" if own is None else own
            found.append(f"{prefix}{name}={word}")
    return found


def read_changes(path: Path | None) -> tuple[str, ...]:
    """Return the settings in a TOML file as `override` takes them; none if ``path`` is None.

    Tables are prefixes: ``steps = 300`` under ``[warm]`` is ``warm.steps=300``. Lists are joined by commas.

    Raises:
        ValueError: The file cannot be read, is not TOML, gives a setting twice, or holds a value that no setting takes.
    """
    if path is None:
        return ()
    words: dict[str, str] = {}
    try:
        for name, value in _flat(tomllib.loads(path.read_text(encoding="utf-8-sig")), ""):
            if name in words:
                raise ValueError(f"it gives {name} twice: remove one of them")
            words[name] = _word(name, value)
    except OSError as error:
        raise ValueError(f"--config {path} cannot be read ({error.strerror}): give a TOML file of settings") from error
    except RecursionError as error:
        raise ValueError(f"--config {path} is nested too deeply: write lines as steps = 100") from error
    except ValueError as error:
        raise ValueError(f"--config {path} is not a TOML file of settings ({error}): write lines as steps = 100") from error
    return tuple(f"{name}={word}" for name, word in words.items())


def _flat(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _word(name: str, value: Any) -> str:
    """Return the text of a value on a command line."""
    if "=" in name:
        raise ValueError(f"the name {name!r} has an equals sign")
    if not isinstance(value, list):
        return str(value).lower() if isinstance(value, bool) else str(value)
    for entry in value:
        if isinstance(entry, list | Mapping):
            raise ValueError(
                f"{name} must be one value or a list of values, not a list that holds the {type(entry).__name__} {entry}"
            )
        if "," in str(entry):
            raise ValueError(f"{name} has the entry {entry!r} with a comma: give each as an entry of its own")
    return ",".join(_word(name, entry) for entry in value)


def _changeable(settings: Any, prefix: str, fixed: tuple[str, ...]) -> dict[str, Any]:
    return {f"{prefix}{f.name}": getattr(settings, f.name) for f in fields(settings) if f.name not in fixed}
