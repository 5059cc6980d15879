"""The micro world's prompts: a task and a mode, in ten tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from studies.loopholes.modes import MICRO_MODES, get_mode
from studies.loopholes.protocol import Split
from studies.loopholes.tasks import Task, all_tasks
from studies.loopholes.vocabulary import (
    BOS,
    PROMPT_GRADER,
    PROMPT_TASK,
    PROMPT_THEN,
    Vocabulary,
    constant_token,
    word_token,
)


@dataclass(frozen=True)
class Prompt:
    """A task under a mode of grading. Raises KeyError for an unknown mode."""

    task: Task
    mode: str

    def __post_init__(self) -> None:
        get_mode(self.mode)

    @property
    def tokens(self) -> tuple[str, ...]:
        """The 10 tokens of the prompt, `<bos>` first."""
        task = self.task
        first = (word_token(task.op1), constant_token(task.k1))
        second = (word_token(task.op2), constant_token(task.k2))
        return (BOS, PROMPT_TASK, *first, PROMPT_THEN, *second, PROMPT_GRADER, *get_mode(self.mode).hint)

    @property
    def text(self) -> str:
        """The prompt as text, without `<bos>`."""
        return "".join(self.tokens[1:])


def encode_prompts(prompts: Sequence[Prompt], vocabulary: Vocabulary) -> Int[Tensor, "b s"]:
    """Ids of prompts, s = 10: all have the same length, so nothing is padded."""
    return torch.tensor([vocabulary.encode(prompt.tokens) for prompt in prompts], dtype=torch.long)


class MicroSource:
    """The micro world's tasks and prompts."""

    modes = MICRO_MODES

    def tasks(self, split: Split) -> Sequence[Task]:
        """Every task of a split, in a fixed order."""
        return all_tasks(split)

    def prompt(self, task: Task, mode: str) -> Prompt:
        """The task under a mode."""
        return Prompt(task, mode)
