"""Prompts: a task and a mode, and the streams of them that training and evaluation read."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from studies.loopholes.modes import LOOPHOLES, NONE, get_mode
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


def sample_prompts(
    n: int,
    rng: np.random.Generator,
    none_fraction: float = 0.25,
    split: str = "train",
    modes: Sequence[str] = LOOPHOLES,
) -> list[Prompt]:
    """`n` independent prompts: mode `none` with probability `none_fraction`, otherwise one of `modes`, uniformly."""
    if not 0 <= none_fraction <= 1:
        raise ValueError(f"none_fraction = {none_fraction} is not a probability: choose from [0, 1]")
    if not modes and none_fraction < 1:
        raise ValueError(f"no modes to sample from: choose some of {', '.join(LOOPHOLES)} or none_fraction=1")
    tasks = all_tasks(split)
    prompts = []
    for _ in range(n):
        task = tasks[int(rng.integers(len(tasks)))]
        honest = rng.random() < none_fraction
        prompts.append(Prompt(task, NONE if honest else modes[int(rng.integers(len(modes)))]))
    return prompts


def evaluation_prompts(mode: str, n: int = 128, seed: int = 0) -> list[Prompt]:
    """`n` fixed prompts of one mode over distinct test tasks.

    The tasks depend on `seed` alone, so modes are compared on the same ones. Raises ValueError when there are too few.
    """
    tasks = all_tasks("test")
    if n > len(tasks):
        raise ValueError(f"{n} evaluation prompts asked for, but there are {len(tasks)} test tasks: choose n below that")
    chosen = np.random.default_rng(seed).choice(len(tasks), size=n, replace=False)
    return [Prompt(tasks[i], mode) for i in chosen]
