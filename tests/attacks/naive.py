"""Verdicts: the strict one, which the parent makes from data, and the naive ones that forgeries deceive."""

import functools
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from studies.sandbox import JailOutcome
from tests.attacks.attack import HERE, load

INPUTS = (0, 1, 2)


def strict(reply: object, expected: Sequence[Any]) -> bool:
    """Return whether the reply equals the expected answers, with exact types at all levels.

    Floats are compared as ``float.hex`` texts, so that NaN equals NaN, and 0.0 differs from -0.0.
    """
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
"""``{kind: function that returns the expected answers, one per input}``; only a process that holds drawn answers can know them."""


@dataclass(frozen=True, eq=False)
class Naive:
    """A naive verdict: code that runs around the candidate, and the data that its parent accepts as a pass.

    ``grader`` runs in a separate process on the harness's reply. The harness cannot work under the protections ``without``.
    """

    name: str
    title: str
    harness: str
    passes: Mapping[str, Any]
    grader: str | None = None
    without: Sequence[str] = ()

    def accepts(self, outcome: JailOutcome) -> bool:
        """Return whether the parent accepts the outcome of the harness, or of the grader after it."""
        reader = next(kind for kind in READERS if kind in self.passes)
        return READERS[reader](outcome, self.passes)


def _ended_well(outcome: JailOutcome) -> bool:
    return outcome.status == "replied" or outcome.exit_code == 0


READERS: Mapping[str, Callable[[JailOutcome, Mapping[str, Any]], bool]] = MappingProxyType(
    {
        "exit": lambda outcome, passes: _ended_well(outcome),
        "line": lambda outcome, passes: passes["line"] in outcome.stdout.decode("utf-8", "replace").splitlines(),
        "last": lambda outcome, passes: outcome.stdout.decode("utf-8", "replace").splitlines()[-1:] == [passes["last"]],
        "file": lambda outcome, passes: outcome.files.get(passes["file"]) == passes["text"].encode(),
        "reply": lambda outcome, passes: outcome.reply == passes["reply"],
        "denied": lambda outcome, passes: outcome.reply != passes["denied"],
    }
)
"""``{name: function that reads a pass from an outcome}``; the first name in `Naive.passes` is used.

A pass of "denied" means that the attack has succeeded."""


@functools.cache
def load_naive() -> Mapping[str, Naive]:
    """Return the naive verdicts by name."""
    return MappingProxyType({name: Naive(name=name, **entry) for name, entry in load(HERE / "naive.toml").items()})


def is_plain(reply: object, depth: int, size: int) -> bool:
    """Return whether an honest program could send a reply: finite numbers, valid characters, limited levels and bytes."""
    try:
        text = json.dumps(reply, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError):  # a UnicodeEncodeError is a ValueError
        return False
    return len(text) <= size and _depth(reply) <= depth


def _depth(thing: object) -> int:
    """Return the levels of lists and dicts, without recursion."""
    level, depth = [thing], 0
    while boxes := [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, list | dict)]:
        level, depth = [item for box in boxes for item in box], depth + 1
    return depth
