"""The streams of prompts that training, evaluation and probes read, from any world's tasks."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from studies.loopholes.protocol import Source, Split


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
