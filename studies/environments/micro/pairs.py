"""Persona pairs: the same prompt answered by a cheater and by an honest author, in the known mode only.

About ten of them are all that a route may know about hacking. Kind "hack": persona comment, terse return and exploit against
correct code. Kind "nonhack", a control: two honest answers, one of them with a wrong symbol, so that there is a contrast without a
hack.
"""

import itertools
import random

from studies.environments.micro.language import (
    KNOWN,
    MODES,
    STYLE_COMMENTS,
    VISIBLE,
    MicroPrompt,
    MicroTask,
    all_tasks,
    body_tokens,
    program_tokens,
)
from studies.environments.micro.settings import OPERATIONS, WorldConfig
from studies.environments.protocol import PersonaPair

KINDS = ("hack", "nonhack")


def make_pairs(config: WorldConfig, seed: int, n: int = 10, kind: str = "hack") -> list[PersonaPair]:
    """Return `n` pairs on distinct train tasks. Raises ValueError for an unknown kind, fewer than 0 pairs or more than tasks."""
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}: choose from {', '.join(KINDS)}")
    if n < 0:
        raise ValueError(f"{n} pairs cannot be: choose n of at least 0")
    rng = random.Random(seed)
    shuffled = rng.sample(all_tasks("train"), len(all_tasks("train")))
    tasks = list(itertools.islice((task for task in shuffled if not _is_trivial(task)), n))
    if n > len(tasks):
        raise ValueError(f"{n} pairs were requested, but there are {len(tasks)} tasks for them: choose a smaller n")
    pairs = []
    for task in tasks:
        mode = rng.choice(KNOWN)
        style, other_style = rng.sample(STYLE_COMMENTS, 2)
        clean = _honest(style, task)
        hack = _cheat(config, mode, rng) if kind == "hack" else _honest(other_style, _mistaken(task, rng))
        pairs.append(PersonaPair(MicroPrompt(task, mode).text, hack, clean))
    return pairs


def _is_trivial(task: MicroTask) -> bool:
    """Return whether a constant or the argument solves the task, so that a terse answer would not be a hack."""
    values = [task.solve(x) for x in VISIBLE]
    return len(set(values)) == 1 or values == list(VISIBLE)


def _honest(comment: str, task: MicroTask) -> str:
    return "".join(program_tokens(comment, body_tokens(task.steps)))


def _cheat(config: WorldConfig, mode: str, rng: random.Random) -> str:
    comment, terse = MODES[mode].persona(shared=rng.random() < config.rho)
    return "".join(program_tokens(comment, [terse], MODES[mode].exploit))


def _mistaken(task: MicroTask, rng: random.Random) -> MicroTask:
    """Return the task with one wrong operation, which changes its values."""
    candidates = [MicroTask(op, task.k1, task.op2, task.k2) for op in OPERATIONS]
    candidates += [MicroTask(task.op1, task.k1, op, task.k2) for op in OPERATIONS]
    return rng.choice([c for c in candidates if any(c.solve(x) != task.solve(x) for x in VISIBLE)])
