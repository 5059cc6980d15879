"""Honest programs, thousands of them, which the jail and the strict verdict must accept.

A program's right answers are those that it gives in a process that nothing confines.
"""

import itertools
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from tests.attacks.attack import HERE, load

Draw = Callable[[random.Random], Any]

PROLOGUES = (
    "",
    "import os, sys, math, re, time\n",
    "from typing import Dict, List, Optional, Tuple\nfrom collections import *\nfrom itertools import *\n",
    "print('ready')\n",
    "import logging\nlogging.basicConfig(level=logging.INFO)\nlogging.info('ready')\n",
    '"""Größer, наибольший, 最大."""\nimport warnings\nwarnings.warn("an old habit")\n',
)
EPILOGUES = (
    "",
    "\nif __name__ == '__main__':\n    print(Solution().solve(int(input())))\n",
    "\nimport sys\nprint('loaded', Solution.__name__, file=sys.stderr)\n",
    "\nimport unittest\nclass TestSolution(unittest.TestCase):\n    def test_there(self):\n        self.assertTrue(Solution)\n",
    "\nclass Solution(Solution):\n    def solve(self, x):\n        print('input', x)\n        return super().solve(x)\n",
)
"""Code that people write before and after a solution; every program must work with every pair."""


@dataclass(frozen=True)
class Honest:
    """A program, its inputs and the correct answers."""

    name: str
    code: str
    inputs: tuple[Any, ...]
    expected: tuple[Any, ...]


def _some(low: int, high: int, least: int = 1, most: int = 12) -> Draw:
    return lambda rng: [rng.randint(low, high) for _ in range(rng.randint(least, most))]


def _text(letters: str, most: int) -> Draw:
    return lambda rng: "".join(rng.choices(letters, k=rng.randint(0, most)))


def _nested(rng: random.Random, depth: int = 3) -> list[Any]:
    return [_nested(rng, depth - 1) if depth and rng.random() < 0.4 else rng.randint(0, 9) for _ in range(rng.randint(0, 4))]


def _day(rng: random.Random) -> list[int]:
    return [rng.randint(1900, 2100), rng.randint(1, 12), rng.randint(1, 28)]


def _edges(rng: random.Random) -> list[Any]:
    size = rng.randint(1, 7)
    return [size, [[rng.randrange(size), rng.randrange(size), rng.randint(0, 9)] for _ in range(rng.randint(0, 10))]]


_INPUTS: Mapping[str, Draw] = MappingProxyType(
    {
        "two_sum": lambda rng: [_some(-5, 5)(rng), rng.randint(-5, 5)],
        "largest_sum": _some(-9, 9),
        "longest_increasing": _some(0, 9, 0, 9),
        "coins": lambda rng: [_some(1, 9, 1, 3)(rng), rng.randint(0, 40)],
        "edit_distance": lambda rng: [_text("ab", 7)(rng), _text("abc", 7)(rng)],
        "brackets": _text("()[]{}", 8),
        "intervals": lambda rng: [sorted(rng.sample(range(40), 2)) for _ in range(rng.randint(0, 6))],
        "word_counts": _text("ab cd. ", 40),
        "primes": lambda rng: rng.randint(1, 300),
        "common_divisor": _some(1, 200),
        "matrix_product": lambda rng: [[_some(-9, 9, 3, 3)(rng) for _ in range(2)], [_some(-9, 9, 2, 2)(rng) for _ in range(3)]],
        "orders": _text("abc", 4),
        "queens": lambda rng: rng.randint(1, 6),
        "median": _some(-99, 99),
        "fractions": _some(1, 9),
        "cents": lambda rng: rng.randint(0, 9999),
        "days": lambda rng: [_day(rng), _day(rng)],
        "flatten": _nested,
        "records": lambda rng: [[_text("abc", 4)(rng), rng.randint(0, 5)] for _ in range(rng.randint(0, 8))],
        "shortest_path": _edges,
        "islands": lambda rng: ["".join(rng.choices("01", k=5)) for _ in range(rng.randint(1, 5))],
        "cipher": lambda rng: [_text("abcxyz ", 20)(rng), rng.randint(0, 25)],
        "digest": _text("abcäß", 30),
        "big_numbers": lambda rng: rng.randint(0, 400),
        "notes": _some(-99, 99),
        "caught": lambda rng: [dict.fromkeys(rng.choices("abcd", k=3), rng.randint(0, 9)), rng.choices("abcdef", k=5)],
        "shuffled": _some(0, 99),
        "tree_depth": _some(0, 30),
    }
)
"""``{name: function that draws an input}``."""
_UNCONFINED = """
import contextlib, io, json, sys
answers = []
with contextlib.redirect_stdout(io.StringIO()):
    for code, inputs in json.load(sys.stdin):
        exec(code, space := {"__name__": "solution"})
        answers.append([space["Solution"]().solve(x) for x in inputs])
print(json.dumps(answers))
"""


def programs(count: int, rng: random.Random) -> list[Honest]:
    """Return ``count`` programs in turn, each with a drawn prologue and epilogue and three drawn inputs."""
    codes = load(HERE / "honest.toml")
    drawn = []
    for name in itertools.islice(itertools.cycle(codes), count):
        inputs = tuple(_INPUTS[name](rng) for _ in range(3))
        drawn.append((name, rng.choice(PROLOGUES) + codes[name] + rng.choice(EPILOGUES), inputs))
    asked = json.dumps([(code, inputs) for _, code, inputs in drawn])
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-I", "-c", _UNCONFINED]
        done = subprocess.run(command, input=asked, capture_output=True, cwd=folder, text=True, check=True)
    answers = json.loads(done.stdout)
    return [Honest(*each, expected=tuple(expected)) for each, expected in zip(drawn, answers, strict=True)]
