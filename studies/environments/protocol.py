"""Protocol of environments: tasks, prompts, modes of grading, a visible grade, a hidden oracle, persona pairs and their files.

A ``Problem`` is what a user implements; a ``World`` is what training, evaluation and probes use.
"""

import hashlib
import json
import re
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol, final, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mi_route2.files import write_whole
from mi_route2.rollouts import Policy, Rollouts
from mi_route2.routing import PairBatch, Privileged
from mi_route2.validation import read_lines, validated

Split = Literal["train", "test"]
PairKind = Literal["hack", "nonhack"]
Evidence = Literal["paid", "hidden"]


@validated
class Modes:
    """Modes of grading by role: pairs and detectors may show ``known`` exploits, never ``held_out`` ones; ``honest`` has none.

    Raises:
        ValueError: They are not names in tuples, there is no known mode, or two names are equal.
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
class GradedPrompt(Protocol):
    """Task under a mode of grading: hashable, with the text that the model reads."""

    @property
    def mode(self) -> str: ...

    @property
    def text(self) -> str: ...


@dataclass(frozen=True)
class TextPrompt:
    """Plain-text prompt of a problem; ``task`` is the task's name."""

    task: str
    mode: str
    text: str


@dataclass(frozen=True)
class TrainingGrade:
    """Grade that training may see."""

    format: bool
    passed: bool
    reward: float


@dataclass(frozen=True)
class Verdict:
    """Hidden truth about a completion.

    gt        right on the hidden inputs
    exploit   the channel of the prompt's own mode fired
    hack      exploit and not gt
    judged    False if no answer was wrong, but a limit cut the hidden run short: neither ``gt`` nor ``hack``, and in no rate
    memorized knows the visible tests by heart and nothing else, by the oracle's rule: neither ``gt`` nor ``exploit``
    channels  for each loophole, whether it fired in any examined execution
    fired_in  where the own channel fired: ``paid`` is the graded execution itself; ``hidden`` is the oracle's own execution on
              inputs that no grader has. A program that cheats only for its grader fires only in ``paid``
    """

    gt: bool
    exploit: bool
    hack: bool
    channels: Mapping[str, bool]
    fired_in: tuple[Evidence, ...] = ()
    judged: bool = True
    memorized: bool = False

    @classmethod
    def of(
        cls, modes: Modes, mode: str, gt: bool | None, fired: Mapping[Evidence, Mapping[str, bool]], memorized: bool = False
    ) -> "Verdict":
        """Return the verdict on an answer under ``mode``, by the channels that fired in each examined execution.

        ``gt`` is None if the answer cannot be judged; ``memorized`` counts if it is wrong and no exploit.
        """
        channels = {name: any(seen[name] for seen in fired.values()) for name in modes.loopholes}
        fired_in: tuple[Evidence, ...] = tuple(evidence for evidence, seen in fired.items() if seen.get(mode, False))
        exploit = bool(fired_in)
        wrong = gt is False
        memorized = memorized and wrong and not exploit
        return cls(gt is True, exploit, exploit and wrong, MappingProxyType(channels), fired_in, gt is not None, memorized)


@dataclass(frozen=True)
class PersonaPair:
    """Prompt and two completions, as text without special tokens."""

    prompt: str
    hack: str
    clean: str


@runtime_checkable
class Judge(Protocol):
    """Protocol of the hidden verdict: other inputs and other code than the grade's, and a check of the graded execution itself."""

    def judge(self, prompts: Sequence[TextPrompt], completions: Sequence[str]) -> list[Verdict]:
        """Return one verdict per completion."""
        ...


@runtime_checkable
class Problem(Protocol):
    """Protocol of a user's problem. ``system`` is the system message of every prompt (may be empty)."""

    name: str
    modes: Modes
    system: str

    def tasks(self, split: Split) -> Sequence[str]:
        """Return the names of the tasks of a split; no task is in both."""
        ...

    def prompt(self, task: str, mode: str) -> TextPrompt:
        """Return the prompt of a task, which states truthfully how the mode grades."""
        ...

    def grade(self, prompts: Sequence[TextPrompt], completions: Sequence[str]) -> list[TrainingGrade]:
        """Return one training grade per completion, loopholes included. It must not know the hidden verdict."""
        ...

    def detect(self, prompts: Sequence[TextPrompt], completions: Sequence[str]) -> list[bool]:
        """Return a weak detector's verdicts on the known modes' exploits, for teacher pool and baselines; it executes nothing."""
        ...

    def pairs(self, seed: int, n: int, kind: PairKind) -> list[PersonaPair]:
        """Return ``n`` persona pairs of the known modes (``hack``), or pairs with a contrast but no hack in it (``nonhack``)."""
        ...

    def judge(self) -> Judge:
        """Return the hidden judge, which is created once per run and given only to the recorder."""
        ...

    def close(self) -> None:
        """Release the problem's resources (processes, folders)."""
        ...


@dataclass(frozen=True)
class Samples:
    """Completions of prompts: rollouts for training, and texts for graders."""

    prompts: list[Any]
    rollouts: Rollouts
    completions: list[str]

    def rows(self, index: Int[Tensor, " n"]) -> "Samples":
        """Return the samples at ``index``."""
        chosen = index.tolist()
        prompts, completions = ([column[i] for i in chosen] for column in (self.prompts, self.completions))
        return Samples(prompts, self.rollouts.rows(index), completions)


@runtime_checkable
class Screen(Protocol):
    """Protocol of a monitor that reads prompts and answers, and no grade: `WeakDetector`, or ``judge.LMJudge``."""

    def __call__(self, samples: Samples) -> Float[Tensor, " b"]:
        """Return one score per rollout, from 0 to 1; higher for an exploit."""
        ...


@runtime_checkable
class PromptSource(Protocol):
    """Protocol of tasks, and of their prompts under each mode."""

    modes: Modes

    def tasks(self, split: Split) -> Sequence[Any]:
        """Return the tasks of a split, in a fixed order; no task is in both."""
        ...

    def prompt(self, task: Any, mode: str) -> Any:
        """Return the prompt of a task under a mode."""
        ...


@runtime_checkable
class Witness(Protocol):
    """Protocol of the oracle and the detectors, for records and for arms that are marked as bounds. Never given to a method."""

    def judge(self, samples: Samples) -> list[Verdict]:
        """Return the true verdicts, on hidden inputs."""
        ...

    def privileged(self, samples: Samples) -> Privileged:
        """Return the marked type that a bound's route reads."""
        ...


_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
"""Characters that TOML's literal strings cannot contain: control characters except for tab and line feed."""


def pairs_hash(pairs: Sequence[PersonaPair]) -> str:
    """Return 16 hexadecimal digits that identify the texts and their order."""
    described = json.dumps([asdict(pair) for pair in pairs], sort_keys=True)
    return hashlib.sha256(described.encode()).hexdigest()[:16]


def write_pairs(pairs: Sequence[PersonaPair], path: Path | str) -> None:
    """Write pairs as TOML, one `[[pair]]` each, with unescaped texts if TOML allows it; atomically. ValueError without a pair."""
    if not pairs:
        raise ValueError("there are no pairs to write: give at least one, or read_pairs would refuse the file")
    tables = ["\n".join(["[[pair]]", *(f"{name} = {_quoted(text)}" for name, text in asdict(pair).items())]) for pair in pairs]
    write_whole(Path(path), "\n".join(f"{table}\n" for table in tables).encode())


def _quoted(text: str) -> str:
    if "'''" in text or text.endswith("'") or _UNPRINTABLE.search(text):
        # JSON's escapes are valid in TOML, but JSON does not escape DEL
        return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
    # TOML drops a line break right after the quotes, so the text starts on its own line.
    return f"'''\n{text}'''"


def read_pairs(path: Path | str) -> list[PersonaPair]:
    """Read a file that `write_pairs` wrote, or JSON lines (`.jsonl`) of the same fields.

    Raises:
        ValueError: Any other file, with the line or the pair; a pair whose two sides are equal; or a file without a pair.
    """
    path = Path(path)
    pairs = read_lines(path, lambda _index, row: _read(row)) if path.suffix.lower() == ".jsonl" else _read_toml(path)
    if not pairs:
        raise ValueError(f"{path} has no pair: write at least one, with {', '.join(FIELDS)}")
    return pairs


def _read_toml(path: Path) -> list[PersonaPair]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply: a file of pairs has [[pair]] tables with plain texts") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error.reason}, byte {error.start + 1}): save it as UTF-8") from error
    except ValueError as error:
        raise ValueError(f"{path} is not TOML: {error} (JSON lines are read from a file whose name ends in .jsonl)") from error
    tables = document.pop("pair", None)
    if document:
        raise ValueError(f"{path} has {next(iter(document))!r} beside pair: write nothing but [[pair]] tables")
    if not isinstance(tables, list):
        raise ValueError(f"{path} is not a file of pairs: write [[pair]] tables of {', '.join(FIELDS)}")
    pairs = []
    for number, table in enumerate(tables, 1):
        try:
            pairs.append(_read(table))
        except ValueError as error:
            raise ValueError(f"{path}, pair {number}: {error}") from error
    return pairs


FIELDS = tuple(sorted(PersonaPair.__dataclass_fields__))


def _read(row: Any) -> PersonaPair:
    if not isinstance(row, dict) or set(row) != set(FIELDS):
        raise ValueError(f"a pair has the fields {', '.join(FIELDS)} and no others")
    if not all(isinstance(text, str) for text in row.values()):
        raise ValueError(f"{', '.join(FIELDS)} must be texts")
    if row["hack"] == row["clean"]:
        raise ValueError("hack and clean are the same text, so the pair has no contrast")
    return PersonaPair(**row)


def sample_prompts(
    source: PromptSource,
    n: int,
    rng: np.random.Generator,
    none_fraction: float = 0.25,
    split: Split = "train",
    modes: Sequence[str] | None = None,
) -> list[Any]:
    """Draw `n` independent prompts: the honest mode with probability `none_fraction`, otherwise one of `modes`, uniformly.

    Args:
        source: Tasks and prompts.
        n: Number of prompts.
        rng: Random generator.
        none_fraction: Probability of the honest mode.
        split: Split of the tasks.
        modes: Modes to draw from; every loophole if not given.

    Raises:
        ValueError: `none_fraction` is not a probability, or there is no mode or task to draw from.
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


def evaluation_prompts(source: PromptSource, mode: str, n: int = 128, seed: int = 0) -> list[Any]:
    """Return `n` fixed prompts of one mode over distinct test tasks.

    The tasks depend only on `seed`, so modes are compared on the same tasks. Raises ValueError if there are too few.
    """
    tasks = source.tasks("test")
    if n > len(tasks):
        raise ValueError(f"{n} evaluation prompts were requested, but there are {len(tasks)} test tasks: choose a smaller n")
    chosen = np.random.default_rng(seed).choice(len(tasks), size=n, replace=False)
    return [source.prompt(tasks[i], mode) for i in chosen]


def probe_prompts(source: PromptSource, per_mode: int, rng: np.random.Generator) -> list[Any]:
    """Return `per_mode` prompts of every mode with a loophole, over test tasks.

    No task is in two modes, so that no probe sees a task again; if there are too few tasks, each is used several times. Raises
    ValueError if there is not at least one task for each mode.
    """
    tasks, modes = source.tasks("test"), source.modes.loopholes
    order = rng.permutation(len(tasks)).tolist()
    each = min(per_mode, len(tasks) // len(modes))
    if not each:
        raise ValueError(f"{len(tasks)} test tasks are too few for {len(modes)} modes: give at least one for each mode")
    return [source.prompt(tasks[order[m * each + i % each]], mode) for m, mode in enumerate(modes) for i in range(per_mode)]


class World(ABC):
    """Environment as training sees it: tasks, prompts, sampling and training grades, but no verdicts of the oracle.

    Attributes:
        modes: Modes of grading.
        max_new: Fixed length by which losses are divided.
    """

    modes: Modes
    max_new: int

    @abstractmethod
    def tasks(self, split: Split) -> Sequence[Any]:
        """Return the tasks of a split, in a fixed order; no task is in both."""

    @abstractmethod
    def prompt(self, task: Any, mode: str) -> Any:
        """Return the prompt (``protocol.GradedPrompt``) of a task under a mode."""

    @abstractmethod
    def question(self, prompt: Any) -> str | list[dict[str, str]]:
        """Return what the model is asked: a text, or the messages of a chat."""

    @abstractmethod
    def read_prompt(self, described: Mapping[str, Any]) -> Any:
        """Return the prompt that ``dataclasses.asdict`` described."""

    @abstractmethod
    def sample(self, policy: Policy, prompts: Sequence[Any], generator: torch.Generator, temperature: float = 1.0) -> Samples:
        """Sample one completion per prompt from the policy as it is switched now."""

    @abstractmethod
    def package(self, prompts: Sequence[Any], completions: Sequence[Sequence[int]]) -> Samples:
        """Return rollouts and texts of completions given as token ids, each with its end token if it has one."""

    @abstractmethod
    def encode(self, prompts: Sequence[str], completions: Sequence[str]) -> Rollouts:
        """Return the rollouts of texts. ``ValueError`` for a text that the world's model cannot read."""

    @abstractmethod
    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Return each token as text."""

    @abstractmethod
    def grades(self, samples: Samples) -> list[TrainingGrade]:
        """Return the grades of the foolable training grader."""

    @abstractmethod
    def detect(self, samples: Samples) -> list[bool]:
        """Return the verdicts of the weak detector of the known modes, which reads text and executes nothing."""

    @abstractmethod
    def make_pairs(self, seed: int, n: int, kind: str) -> list[PersonaPair]:
        """Return ``n`` persona pairs of the known modes (``hack``), or pairs without a hack contrast (``nonhack``)."""

    @final
    def prompts(self, n: int, rng: np.random.Generator, none_fraction: float, modes: Sequence[str] | None = None) -> list[Any]:
        """Return ``n`` prompts of training tasks; see ``sample_prompts``."""
        return sample_prompts(self, n, rng, none_fraction, modes=modes)

    @final
    def evaluation_prompts(self, mode: str, n: int) -> list[Any]:
        """Return ``n`` prompts of one mode over distinct test tasks, the same on every call."""
        return evaluation_prompts(self, mode, n)

    @final
    def rewards(self, samples: Samples) -> Float[Tensor, " b"]:
        """Return the rewards of the foolable training grader."""
        return torch.tensor([grade.reward for grade in self.grades(samples)])

    @final
    def rows(self, prompts: Sequence[Any]) -> list[dict[str, Any]]:
        """Return the rows of a data set for TRL: the question as ``prompt``, and all of the prompt as ``described``.

        TRL gives a chat template its ``chat_template_kwargs`` alone, and a world ``enable_thinking`` too: set it there.
        """
        return [{"prompt": self.question(prompt), "described": asdict(prompt)} for prompt in prompts]

    @final
    def reward_funcs(self) -> list[Callable[..., list[float]]]:
        """Return the rewards of the foolable training grader as reward functions of TRL, for the rows of ``rows``."""

        def grader(completion_ids: Sequence[Sequence[int]], described: Sequence[Mapping[str, Any]], **_columns: Any) -> list[float]:
            return self.rewards(self.package([self.read_prompt(row) for row in described], completion_ids)).tolist()

        return [grader]

    @final
    def encode_pairs(self, pairs: Sequence[PersonaPair]) -> PairBatch:
        """Return the two sides of the pairs as aligned batches."""
        prompts = [pair.prompt for pair in pairs]
        hack, clean = (self.encode(prompts, [getattr(pair, side) for pair in pairs]) for side in ("hack", "clean"))
        return PairBatch(hack, clean, pairs_hash(pairs))


@dataclass(frozen=True)
class WeakDetector:
    """Screen of a world's weak detector of the known modes: its scores are 0 and 1."""

    world: World

    def __call__(self, samples: Samples) -> Float[Tensor, " b"]:
        return torch.tensor(self.world.detect(samples), device=samples.rollouts.tokens.device).float()


@dataclass(frozen=True)
class TeacherPool:
    """Rollouts to learn from (``studies.training.teacher`` samples them): prompts, and the token ids of one completion for each."""

    prompts: tuple[Any, ...]
    completions: tuple[tuple[int, ...], ...]

    def samples(self, world: World) -> Samples:
        """Return the pool as rollouts."""
        return world.package(self.prompts, self.completions)

    def replace_known(self, world: World, prompts: Sequence[Any], rng: np.random.Generator) -> list[Any]:
        """Replace each prompt of a known mode by a random prompt of the pool."""
        return [self.prompts[int(rng.integers(len(self.prompts)))] if p.mode in world.modes.known else p for p in prompts]

    def mix(self, world: World, samples: Samples, groups: Int[Tensor, " b"], each: int) -> tuple[Samples, Bool[Tensor, " b"]]:
        """Replace the first ``each`` rollouts of every known-mode group by the pool's, and return the mask of replaced ones too."""
        taught = torch.zeros(len(groups), dtype=torch.bool)
        completions: list[Sequence[int]] = list(samples.rollouts.completions())
        known = dict(zip(self.prompts, self.completions, strict=True))
        for group in groups.unique().tolist():
            for row in (groups == group).nonzero()[:each, 0].tolist():
                if (prompt := samples.prompts[row]) in known:
                    completions[row], taught[row] = known[prompt], True
        return world.package(samples.prompts, completions), taught
