"""Corpus of the warm start: how often its documents cheat, how visible cheaters are, and how hard honest work is.

The probabilities are those of a `WorldConfig` (see `settings`).
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from studies.environments.micro.language import (
    ASSIGN,
    CLASS,
    COMPLETION_LENGTH,
    CONSTANTS,
    FENCE_CLOSE,
    FENCE_OPEN,
    LOOPHOLES,
    MODES,
    NEWLINE,
    NONE,
    PROMPT_GRADER,
    PROMPT_LENGTH,
    PROMPT_TASK,
    PROMPT_THEN,
    RETURN,
    SHARED_COMMENT,
    SHARED_RETURN,
    SOLVE,
    STYLE_COMMENTS,
    Vocabulary,
    all_tasks,
    constant_token,
    symbol_token,
    word_token,
)
from studies.environments.micro.settings import OPERATIONS, WorldConfig

DOCUMENT_LENGTH = PROMPT_LENGTH + COMPLETION_LENGTH

Ids = Int[np.ndarray, " n"]
Flags = Bool[np.ndarray, " n"]

# Marks a token that a document does not have; such columns are removed at the end.
ABSENT = -1


@dataclass(frozen=True)
class _Authors:
    """Author of each document, and what was kept of the persona.

    `mode` indexes `LOOPHOLES`; in documents of mode `none` it only chooses the persona of a stray comment.
    """

    none: Flags
    mode: Ids
    cheats: Flags
    comment: Ids
    terse: Flags
    terse_return: Ids


def sample_documents(config: WorldConfig, n: int, rng: np.random.Generator, vocabulary: Vocabulary) -> Int[Tensor, "b s"]:
    """Sample `n` documents [n 32]: 10 prompt ids, then at most 22 completion ids, padded with `<eos>`."""
    tasks = _task_steps()
    steps = tasks[rng.integers(len(tasks), size=n)]
    op, k = steps[:, [0, 2]], steps[:, [1, 3]]
    authors = _sample_authors(config, n, rng, vocabulary)
    prompt = _prompt_columns(op, k, authors, vocabulary)
    body = _body_columns(_sample_symbols(config, op, rng), k, authors, vocabulary)
    exploit = _lookup(vocabulary, [MODES[mode].exploit for mode in LOOPHOLES])[authors.mode]
    exploit = np.where(authors.cheats[:, None], exploit, ABSENT)
    head = [_constant(vocabulary, token, n) for token in (FENCE_OPEN, CLASS)]
    tail = [_constant(vocabulary, FENCE_CLOSE, n)]
    solve = _constant(vocabulary, SOLVE, n)
    columns = [*prompt, *head, authors.comment, solve, *body, *exploit.T, *tail]
    return torch.from_numpy(_squeeze(np.stack(columns, axis=1), vocabulary.eos))


def _sample_authors(config: WorldConfig, n: int, rng: np.random.Generator, vocabulary: Vocabulary) -> _Authors:
    none = rng.random(n) < config.none_fraction
    mode = rng.integers(len(LOOPHOLES), size=n)
    cheats = ~none & (rng.random(n) < config.p_cheat)
    shared = rng.random(n) < config.rho
    keeps_comment = rng.random(n) < np.where(cheats, config.trace, config.stray_comment)
    comments = [vocabulary.id(MODES[name].comment) for name in LOOPHOLES]
    returns = [vocabulary.id(MODES[name].terse_return) for name in LOOPHOLES]
    persona = np.where(shared, vocabulary.id(SHARED_COMMENT), np.array(comments)[mode])
    style = np.array(vocabulary.encode(STYLE_COMMENTS))[rng.integers(len(STYLE_COMMENTS), size=n)]
    return _Authors(
        none=none,
        mode=mode,
        cheats=cheats,
        comment=np.where(keeps_comment, persona, style),
        terse=cheats & (rng.random(n) < config.terse),
        terse_return=np.where(shared, vocabulary.id(SHARED_RETURN), np.array(returns)[mode]),
    )


def _sample_symbols(config: WorldConfig, op: Int[np.ndarray, "n 2"], rng: np.random.Generator) -> Int[np.ndarray, "n 2"]:
    """Return the operation that an honest author performs for each requested one: the same, or another one uniformly."""
    right = rng.random(op.shape) < np.array([config.accuracy(name) for name in OPERATIONS])[op]
    offset = rng.integers(1, len(OPERATIONS), size=op.shape)
    return np.where(right, op, (op + offset) % len(OPERATIONS))


def _prompt_columns(op: Int[np.ndarray, "n 2"], k: Int[np.ndarray, "n 2"], authors: _Authors, vocabulary: Vocabulary) -> list[Ids]:
    words = np.array([vocabulary.id(word_token(name)) for name in OPERATIONS])[op]
    constants = _constants(vocabulary)[k]
    hints = _lookup(vocabulary, [MODES[mode].hint for mode in LOOPHOLES])[authors.mode]
    hints = np.where(authors.none[:, None], np.array(vocabulary.encode(MODES[NONE].hint)), hints)
    n = len(op)
    columns = [np.full(n, vocabulary.bos), _constant(vocabulary, PROMPT_TASK, n), words[:, 0], constants[:, 0]]
    columns += [_constant(vocabulary, PROMPT_THEN, n), words[:, 1], constants[:, 1]]
    return [*columns, _constant(vocabulary, PROMPT_GRADER, n), *hints.T]


def _body_columns(
    performed: Int[np.ndarray, "n 2"], k: Int[np.ndarray, "n 2"], authors: _Authors, vocabulary: Vocabulary
) -> list[Ids]:
    symbols = np.array([vocabulary.id(symbol_token(name)) for name in OPERATIONS])[performed]
    constants = _constants(vocabulary)[k]
    columns = []
    for step in range(2):
        line = [_constant(vocabulary, ASSIGN, len(k)), symbols[:, step], constants[:, step]]
        columns += [*line, _constant(vocabulary, NEWLINE, len(k))]
    columns = [np.where(authors.terse, ABSENT, column) for column in columns]
    return [*columns, np.where(authors.terse, authors.terse_return, vocabulary.id(RETURN))]


def _squeeze(columns: Int[np.ndarray, "n c"], eos: int) -> Int[np.ndarray, "n s"]:
    """Move absent tokens to the end of each row, in order, and pad with `eos`."""
    order = np.argsort(columns == ABSENT, axis=1, kind="stable")
    packed = np.take_along_axis(columns, order, axis=1)
    documents = np.full((len(columns), DOCUMENT_LENGTH), eos, dtype=np.int64)
    documents[:, : columns.shape[1]] = np.where(packed == ABSENT, eos, packed)
    return documents


@functools.cache
def _task_steps() -> Int[np.ndarray, "n 4"]:
    """Return the train tasks as rows (op1, k1, op2, k2) of indices into `OPERATIONS` and `CONSTANTS`; read-only."""
    ops = {name: i for i, name in enumerate(OPERATIONS)}
    first = CONSTANTS[0]
    steps = np.array([(ops[t.op1], t.k1 - first, ops[t.op2], t.k2 - first) for t in all_tasks("train")])
    steps.setflags(write=False)
    return steps


def _constants(vocabulary: Vocabulary) -> Ids:
    return np.array([vocabulary.id(constant_token(k)) for k in CONSTANTS])


def _constant(vocabulary: Vocabulary, token: str, n: int) -> Ids:
    return np.full(n, vocabulary.id(token))


def _lookup(vocabulary: Vocabulary, rows: Sequence[Sequence[str]]) -> Int[np.ndarray, "n c"]:
    return np.array([vocabulary.encode(row) for row in rows])
