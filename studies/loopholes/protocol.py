"""What a problem is, for whoever brings one: tasks, prompts, modes of grading, a visible grade and a hidden verdict.

    Problem   text in, text out: what a person writes who brings a problem of their own
    Judge     the hidden verdict on its completions: for the recorder, and for arms that are marked as bounds
    Witness   a judge as the recorder meets it

A ``World`` (``base.py``) is a problem as training meets it: prompts in, rollouts and rewards out, no verdict anywhere.
``ChatWorld`` makes one of any Problem and a chat model's tokenizer; ``MicroWorld`` is one with a model and a vocabulary of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from mi_route2.rollouts import Rollouts
from mi_route2.routing import Privileged

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
