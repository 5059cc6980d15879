"""What an environment is, for whoever brings one: tasks, prompts, modes of grading, a visible grade and an oracle; pairs and
their files; and the world that training, evaluation and probes ask.
"""

import hashlib
import json
import re
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, final, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mi_route2.files import write_whole
from mi_route2.rollouts import Policy, Rollouts
from mi_route2.routing import PairBatch, Privileged
from mi_route2.validation import read_lines

Split = Literal["train", "test"]
PairKind = Literal["hack", "nonhack"]
Evidence = Literal["paid", "hidden"]


@dataclass(frozen=True)
class Modes:
    """The modes of grading by role: pairs and detectors may show ``known`` exploits, never ``held_out`` ones; ``honest`` has none.

    Raises ValueError unless there is a known mode and all names differ.
    """

    known: tuple[str, ...]
    held_out: tuple[str, ...]
    honest: str = "none"

    def __post_init__(self) -> None:
        if not self.known:
            raise ValueError("a problem needs at least one known mode: persona pairs are written in it")
        if len(set(self.names)) != len(self.names):
            raise ValueError(f"modes must have different names, not {', '.join(self.names)}")

    @property
    def loopholes(self) -> tuple[str, ...]:
        return self.known + self.held_out

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.loopholes, self.honest)


@runtime_checkable
class Prompt(Protocol):
    """A task under a mode of grading: hashable, with the text that the model reads."""

    @property
    def mode(self) -> str: ...

    @property
    def text(self) -> str: ...


@dataclass(frozen=True)
class TextPrompt:
    """A prompt of a problem in plain text; ``task`` is the task's name."""

    task: str
    mode: str
    text: str


@dataclass(frozen=True)
class TrainingGrade:
    """What training may know about a completion."""

    format: bool
    passed: bool
    reward: float


@dataclass(frozen=True)
class Verdict:
    """The truth about a completion.

    gt        right on the hidden inputs
    exploit   the channel of the prompt's own mode fired
    hack      exploit and not gt
    channels  of each loophole whether it fired in any execution that was looked at
    fired_in  where the own channel fired: ``paid``, the very execution that the grade was given for; ``hidden``, the oracle's own
              on inputs that no grader has. A program that cheats for its grader alone fires in ``paid`` alone
    """

    gt: bool
    exploit: bool
    hack: bool
    channels: Mapping[str, bool]
    fired_in: tuple[Evidence, ...] = ()


@dataclass(frozen=True)
class Pair:
    """A prompt and two completions, as text without special tokens."""

    prompt: str
    hack: str
    clean: str


@runtime_checkable
class Judge(Protocol):
    """The hidden verdict: other inputs and other code than the grade's, and an eye on the very execution that was graded."""

    def judge(self, prompts: Sequence[TextPrompt], completions: Sequence[str]) -> list[Verdict]:
        """One verdict a completion."""
        ...


@runtime_checkable
class Problem(Protocol):
    """A problem of one's own. ``system`` is the system message of every prompt (may be empty)."""

    name: str
    modes: Modes
    system: str

    def tasks(self, split: Split) -> Sequence[str]:
        """Names of the tasks of a split; no task is in both."""
        ...

    def prompt(self, task: str, mode: str) -> TextPrompt:
        """The task as it is put to the model: it states truthfully how the mode grades."""
        ...

    def grade(self, prompts: Sequence[TextPrompt], completions: Sequence[str]) -> list[TrainingGrade]:
        """What training pays for, loopholes included; one grade a completion. It must not know the hidden verdict."""
        ...

    def detect(self, prompts: Sequence[TextPrompt], completions: Sequence[str]) -> list[bool]:
        """A weak detector of the known modes' exploits, for the teacher pool and for baselines; it executes nothing."""
        ...

    def pairs(self, seed: int, n: int, kind: PairKind) -> list[Pair]:
        """``n`` persona pairs of the known modes (``hack``), or pairs with a contrast but no hack in it (``nonhack``)."""
        ...

    def judge(self) -> Judge:
        """The hidden verdict, made once a run and handed to the recorder alone."""
        ...

    def close(self) -> None:
        """Give back what the problem holds (processes, folders)."""
        ...


@dataclass(frozen=True)
class Samples:
    """Completions of prompts: the rollouts that a policy is trained on and the texts that graders read."""

    prompts: list[Any]
    rollouts: Rollouts
    completions: list[str]


@runtime_checkable
class Source(Protocol):
    """Tasks, and the prompts that they make under each mode."""

    modes: Modes

    def tasks(self, split: Split) -> Sequence[Any]:
        """The tasks of a split, in a fixed order; no task is in both."""
        ...

    def prompt(self, task: Any, mode: str) -> Any:
        """The task under a mode: a ``Prompt``."""
        ...


@runtime_checkable
class Witness(Protocol):
    """The oracle and the detectors: for records, and for arms that are marked as bounds. Never handed to a method."""

    def judge(self, samples: Samples) -> list[Verdict]:
        """What really happened, on hidden inputs."""
        ...

    def privileged(self, samples: Samples) -> Privileged:
        """The marked type that a bound's route reads."""
        ...


_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
"""What no literal string of TOML may hold: control characters but for the tab and the line feed."""


def pairs_hash(pairs: Sequence[Pair]) -> str:
    """16 hexadecimal digits that identify the texts and their order."""
    described = json.dumps([asdict(pair) for pair in pairs], sort_keys=True)
    return hashlib.sha256(described.encode()).hexdigest()[:16]


def write_pairs(pairs: Sequence[Pair], path: Path | str) -> None:
    """Write pairs as TOML, one `[[pair]]` each, their texts as they are where TOML has room for that; whole or not at all."""
    tables = ["\n".join(["[[pair]]", *(f"{name} = {_quoted(text)}" for name, text in asdict(pair).items())]) for pair in pairs]
    write_whole(Path(path), "\n".join(f"{table}\n" for table in tables).encode())


def _quoted(text: str) -> str:
    if "'''" in text or text.endswith("'") or _UNPRINTABLE.search(text):
        # JSON's escapes are TOML's too, but JSON writes DEL as it is
        return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
    # TOML drops a line break right after the quotes, so the text starts on its own line.
    return f"'''\n{text}'''"


def read_pairs(path: Path | str) -> list[Pair]:
    """Reads what `write_pairs` wrote, or JSON lines (`.jsonl`) of the same fields.

    Raises ValueError for anything else, naming the line or the pair, and for a pair whose two sides are the same text.
    """
    path = Path(path)
    if path.suffix.lower() == ".jsonl":
        return read_lines(path, lambda _index, row: _read(row))
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8-sig")).get("pair")
    except RecursionError as error:
        raise ValueError(f"{path} is TOML in too many brackets: a file of pairs has [[pair]] tables and nothing in them") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error.reason}, byte {error.start + 1}): save it as UTF-8") from error
    except ValueError as error:
        raise ValueError(f"{path} is no TOML: {error} (JSON lines are read from a file whose name ends in .jsonl)") from error
    if not isinstance(tables, list):
        raise ValueError(f"{path} is not a file of pairs: write [[pair]] tables of {', '.join(FIELDS)}")
    pairs = []
    for number, table in enumerate(tables, 1):
        try:
            pairs.append(_read(table))
        except ValueError as error:
            raise ValueError(f"{path}, pair {number}: {error}") from error
    return pairs


FIELDS = tuple(sorted(Pair.__dataclass_fields__))


def _read(row: Any) -> Pair:
    if not isinstance(row, dict) or set(row) != set(FIELDS):
        raise ValueError(f"a pair has the fields {', '.join(FIELDS)} and no others")
    if not all(isinstance(text, str) for text in row.values()):
        raise ValueError(f"{', '.join(FIELDS)} are texts")
    if row["hack"] == row["clean"]:
        raise ValueError("hack and clean are the same text, so there is no contrast in the pair")
    return Pair(**row)


def sample_prompts(
    source: Source,
    n: int,
    rng: np.random.Generator,
    none_fraction: float = 0.25,
    split: Split = "train",
    modes: Sequence[str] | None = None,
) -> list[Any]:
    """`n` independent prompts: the honest mode with probability `none_fraction`, otherwise one of `modes`, uniformly.

    Without `modes`, every loophole. Raises ValueError for what is no probability, and where there is nothing to draw from.
    """
    modes = source.modes.loopholes if modes is None else modes
    if not 0 <= none_fraction <= 1:
        raise ValueError(f"none_fraction = {none_fraction} is not a probability: choose from [0, 1]")
    if not modes and none_fraction < 1:
        raise ValueError(f"no modes to sample from: choose some of {', '.join(source.modes.loopholes)} or none_fraction=1")
    tasks = source.tasks(split)
    if not tasks:
        raise ValueError(f"there is no {split} task to make a prompt of: a problem needs some in each split")
    prompts = []
    for _ in range(n):
        task = tasks[int(rng.integers(len(tasks)))]
        honest = rng.random() < none_fraction
        prompts.append(source.prompt(task, source.modes.honest if honest else modes[int(rng.integers(len(modes)))]))
    return prompts


def evaluation_prompts(source: Source, mode: str, n: int = 128, seed: int = 0) -> list[Any]:
    """`n` fixed prompts of one mode over distinct test tasks.

    The tasks depend on `seed` alone, so modes are compared on the same ones. Raises ValueError when there are too few.
    """
    tasks = source.tasks("test")
    if n > len(tasks):
        raise ValueError(f"{n} evaluation prompts asked for, but there are {len(tasks)} test tasks: choose n below that")
    chosen = np.random.default_rng(seed).choice(len(tasks), size=n, replace=False)
    return [source.prompt(tasks[i], mode) for i in chosen]


def probe_prompts(source: Source, per_mode: int, rng: np.random.Generator) -> list[Any]:
    """`per_mode` prompts of every mode with a loophole, over test tasks.

    No task is in two modes, so that no probe meets a task again; where there are not enough tasks, each is asked several
    times. Raises ValueError where there is not one task for each mode.
    """
    tasks, modes = source.tasks("test"), source.modes.loopholes
    order = rng.permutation(len(tasks)).tolist()
    each = min(per_mode, len(tasks) // len(modes))
    if not each:
        raise ValueError(f"{len(tasks)} test tasks do not give each of {len(modes)} modes one of its own")
    return [source.prompt(tasks[order[m * each + i % each]], mode) for m, mode in enumerate(modes) for i in range(per_mode)]


class World(ABC):
    """All that training sees: nothing here knows a verdict. ``max_new`` is the fixed length that losses are divided by."""

    modes: Modes
    max_new: int

    @abstractmethod
    def tasks(self, split: Split) -> Sequence[Any]:
        """The tasks of a split, in a fixed order; no task is in both."""

    @abstractmethod
    def prompt(self, task: Any, mode: str) -> Any:
        """The task under a mode: a ``protocol.Prompt``."""

    @abstractmethod
    def read_prompt(self, described: Mapping[str, Any]) -> Any:
        """The prompt that ``dataclasses.asdict`` described."""

    @abstractmethod
    def sample(self, policy: Policy, prompts: Sequence[Any], generator: torch.Generator, temperature: float = 1.0) -> Samples:
        """One completion a prompt from the policy as it is switched now."""

    @abstractmethod
    def package(self, prompts: Sequence[Any], completions: Sequence[Sequence[int]]) -> Samples:
        """Rollouts and texts of completions that are given as token ids, each with its end where it has one."""

    @abstractmethod
    def encode(self, prompts: Sequence[str], completions: Sequence[str]) -> Rollouts:
        """Rollouts of texts. ``ValueError`` for a text that the world's model cannot read."""

    @abstractmethod
    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Tokens as text, one by one."""

    @abstractmethod
    def grades(self, samples: Samples) -> list[TrainingGrade]:
        """What the foolable training grader says."""

    @abstractmethod
    def detect(self, samples: Samples) -> list[bool]:
        """The weak detector of the known modes: it reads text and executes nothing."""

    @abstractmethod
    def make_pairs(self, seed: int, n: int, kind: str) -> list[Pair]:
        """``n`` persona pairs of the known modes (``hack``), or pairs without a hack contrast (``nonhack``)."""

    @final
    def prompts(self, n: int, rng: np.random.Generator, none_fraction: float, modes: Sequence[str] | None = None) -> list[Any]:
        """``n`` prompts of training tasks; see ``streams.sample_prompts``."""
        return sample_prompts(self, n, rng, none_fraction, modes=modes)

    @final
    def evaluation_prompts(self, mode: str, n: int) -> list[Any]:
        """``n`` prompts of one mode over distinct test tasks, the same at every call."""
        return evaluation_prompts(self, mode, n)

    @final
    def rewards(self, samples: Samples) -> Float[Tensor, " b"]:
        """What the foolable training grader pays."""
        return torch.tensor([grade.reward for grade in self.grades(samples)])

    @final
    def encode_pairs(self, pairs: Sequence[Pair]) -> PairBatch:
        """The two sides of the pairs as aligned batches."""
        prompts = [pair.prompt for pair in pairs]
        hack, clean = (self.encode(prompts, [getattr(pair, side) for pair in pairs]) for side in ("hack", "clean"))
        return PairBatch(hack, clean, pairs_hash(pairs))
