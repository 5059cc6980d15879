"""Corpus of the warm start: how often its documents cheat, how visible cheaters are, and how hard honest work is.

The probabilities are those of a `WorldConfig` (see `settings`).
"""

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from studies.environments.micro.language import (
    COMPLETION_LENGTH,
    LOOPHOLES,
    MODES,
    NONE,
    PROMPT_LENGTH,
    STYLE_COMMENTS,
    MicroPrompt,
    Vocabulary,
    all_tasks,
    body_tokens,
    program_tokens,
)
from studies.environments.micro.settings import OPERATIONS, WorldConfig

DOCUMENT_LENGTH = PROMPT_LENGTH + COMPLETION_LENGTH


def sample_documents(config: WorldConfig, n: int, rng: np.random.Generator, vocabulary: Vocabulary) -> Int[Tensor, "b s"]:
    """Sample `n` documents [n 32]: 10 prompt ids, then at most 22 completion ids, padded with `<eos>`."""
    names, tasks = list(OPERATIONS), all_tasks("train")
    # All draws come first and in this order, on which the bits of every warm start depend.
    chosen = [tasks[i] for i in rng.integers(len(tasks), size=n)]
    honest_mode = rng.random(n) < config.none_fraction
    mode = rng.integers(len(LOOPHOLES), size=n)  # in documents of mode `none` it only chooses the persona of a stray comment
    cheats = ~honest_mode & (rng.random(n) < config.p_cheat)
    shared = rng.random(n) < config.rho
    keeps_comment = rng.random(n) < np.where(cheats, config.trace, config.stray_comment)
    style = rng.integers(len(STYLE_COMMENTS), size=n)
    terse = cheats & (rng.random(n) < config.terse)
    operations = np.array([[names.index(op) for op, _ in task.steps] for task in chosen]).reshape(n, 2)
    # An honest author performs the requested operation, or any other one uniformly.
    right = rng.random((n, 2)) < np.array([config.accuracy(name) for name in names])[operations]
    performed = np.where(right, operations, (operations + rng.integers(1, len(names), size=(n, 2))) % len(names))

    documents: list[list[int]] = []
    for i, task in enumerate(chosen):
        persona = MODES[LOOPHOLES[mode[i]]]
        comment, terse_return = persona.persona(bool(shared[i]))
        steps = [(names[op], k) for op, (_, k) in zip(performed[i], task.steps, strict=True)]
        program = program_tokens(
            comment if keeps_comment[i] else STYLE_COMMENTS[style[i]],
            [terse_return] if terse[i] else body_tokens(steps),
            persona.exploit if cheats[i] else (),
        )
        prompt = MicroPrompt(task, NONE if honest_mode[i] else persona.name)
        ids = vocabulary.encode([*prompt.tokens, *program])
        documents.append(ids + [vocabulary.eos] * (DOCUMENT_LENGTH - len(ids)))
    return torch.tensor(documents, dtype=torch.long).reshape(n, DOCUMENT_LENGTH)
