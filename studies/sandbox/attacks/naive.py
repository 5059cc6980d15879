"""Verdicts: the strict one, made in the parent from data, and the naive ones that the forgeries deceive."""

import functools
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from studies.sandbox import Outcome
from studies.sandbox.attacks.attack import HERE, load

INPUTS = (0, 1, 2)


def strict(reply: object, expected: Sequence[Any]) -> bool:
    """Whether the reply is the expected answers, by exact type all the way down; a float bit by bit, so that NaN is NaN's equal."""
    return _same(reply, list(expected))


def _same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if type(b) is float:
        return a.hex() == b.hex()
    if type(b) is list:
        return len(a) == len(b) and all(map(_same, a, b))
    if type(b) is dict:
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in b)
    return a == b


def _drawn(draw: Callable[[random.Random], Any]) -> Callable[[random.Random], list[Any]]:
    return lambda rng: [draw(rng) for _ in INPUTS]


def _number(rng: random.Random) -> int:
    return rng.getrandbits(60) + 2


ANSWERS: Mapping[str, Callable[[random.Random], list[Any]]] = MappingProxyType(
    {
        "int": _drawn(_number),
        "float": _drawn(lambda rng: rng.random() + 2),
        "str": _drawn(lambda rng: f"{_number(rng):x}"),
        "list": _drawn(lambda rng: [_number(rng) for _ in range(3)]),
        "dict": _drawn(lambda rng: {f"{_number(rng):x}": _number(rng)}),
        "square": lambda rng: [x * x for x in INPUTS],
        "pairs": lambda rng: [[x + 2, x * x] for x in INPUTS],
        "one": lambda rng: [1 for _ in INPUTS],
        "true": lambda rng: [True for _ in INPUTS],
        "zero": lambda rng: [0 for _ in INPUTS],
    }
)
"""Expected answers, one an input, by kind. Where they are drawn, only a process that holds them can know them."""


@dataclass(frozen=True, eq=False)
class Naive:
    """A naive verdict: the text that runs around the candidate, and what its parent takes for a pass.

    `grader` runs in a process of its own, with the harness's reply; under the protections `without` the harness could not work.
    """

    name: str
    title: str
    harness: str
    passes: Mapping[str, Any]
    grader: str | None = None
    without: Sequence[str] = ()

    def accepts(self, outcome: Outcome) -> bool:
        """What the parent believes of what the harness (or the grader after it) left."""
        reader = next(kind for kind in READERS if kind in self.passes)
        return READERS[reader](outcome, self.passes)


def _ended_well(outcome: Outcome) -> bool:
    return outcome.status == "replied" or outcome.exit_code == 0


READERS: Mapping[str, Callable[[Outcome, Mapping[str, Any]], bool]] = MappingProxyType(
    {
        "exit": lambda outcome, passes: _ended_well(outcome),
        "line": lambda outcome, passes: passes["line"] in outcome.stdout.decode("utf-8", "replace").splitlines(),
        "last": lambda outcome, passes: outcome.stdout.decode("utf-8", "replace").splitlines()[-1:] == [passes["last"]],
        "file": lambda outcome, passes: outcome.files.get(passes["file"]) == passes["text"].encode(),
        "reply": lambda outcome, passes: outcome.reply == passes["reply"],
        "denied": lambda outcome, passes: outcome.reply != passes["denied"],
    }
)
"""How a pass is read out of an outcome, by the first of these names in `Naive.passes`. For "denied" the pass is the attack's."""


@functools.cache
def load_naive() -> Mapping[str, Naive]:
    """The naive verdicts by name."""
    return MappingProxyType({name: Naive(name=name, **entry) for name, entry in load(HERE / "naive.toml").items()})


def is_plain(reply: object, depth: int, size: int) -> bool:
    """Whether a reply is what an honest program can send: finite numbers, whole characters, not too deep, not too long."""
    try:
        text = json.dumps(reply, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError):  # a UnicodeEncodeError is a ValueError
        return False
    return len(text) <= size and _depth(reply) <= depth


def _depth(thing: object) -> int:
    """Levels of lists and dicts, without recursion."""
    level, depth = [thing], 0
    while boxes := [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, list | dict)]:
        level, depth = [item for box in boxes for item in box], depth + 1
    return depth
