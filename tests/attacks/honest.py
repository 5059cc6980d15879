"""Honest programs, thousands of them, which the jail and the strict verdict must accept."""

import functools
import hashlib
import itertools
import math
import random
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date
from fractions import Fraction
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


def _two_sum(x: list[Any]) -> list[int]:
    pairs = [(j, i) for j in range(len(x[0])) for i in range(j) if x[0][i] + x[0][j] == x[1]]
    if not pairs:
        return []
    last = min(pairs)[0]
    return [max(i for j, i in pairs if j == last), last]


def _brackets(x: str) -> bool:
    while (less := x.replace("()", "").replace("[]", "").replace("{}", "")) != x:
        x = less
    return not x


def _coins(x: list[Any]) -> int:
    reached, count = {0}, 0
    while x[1] not in reached:
        more = reached | {have + coin for have in reached for coin in x[0] if have + coin <= x[1]}
        if more == reached:
            return -1
        reached, count = more, count + 1
    return count


@functools.cache
def _distance(a: str, b: str) -> int:
    if not a or not b:
        return len(a) + len(b)
    if a[0] == b[0]:
        return _distance(a[1:], b[1:])
    return 1 + min(_distance(a[1:], b), _distance(a, b[1:]), _distance(a[1:], b[1:]))


def _intervals(x: list[list[int]]) -> list[list[int]]:
    """Merge intervals: collect the covered points and the open ranges between them at twice the scale, and return the runs."""
    covered = {point for start, end in x for point in range(2 * start, 2 * end + 1)}
    starts = sorted(point for point in covered if point - 1 not in covered)
    ends = sorted(point for point in covered if point + 1 not in covered)
    return [[start // 2, end // 2] for start, end in zip(starts, ends)]


def _paths(x: list[Any]) -> list[int]:
    """Return shortest distances by the Bellman-Ford algorithm."""
    distance = [0.0, *[math.inf] * (x[0] - 1)]
    for _ in range(x[0]):
        for a, b, length in x[1]:
            distance[a], distance[b] = min(distance[a], distance[b] + length), min(distance[b], distance[a] + length)
    return [-1 if math.isinf(each) else int(each) for each in distance]


def _islands(x: list[str]) -> int:
    """Count islands: spread the smallest label among neighbors until no label changes."""
    label = {(r, c): (r, c) for r, row in enumerate(x) for c, cell in enumerate(row) if cell == "1"}
    for _ in label:
        label = {
            (r, c): min(label.get(at, own) for at in ((r, c), (r + 1, c), (r - 1, c), (r, c + 1), (r, c - 1)))
            for (r, c), own in label.items()
        }
    return len(set(label.values()))


def _flat(x: Any) -> list[Any]:
    return [leaf for item in x for leaf in _flat(item)] if isinstance(x, list) else [x]


def _nested(rng: random.Random, depth: int = 3) -> list[Any]:
    return [_nested(rng, depth - 1) if depth and rng.random() < 0.4 else rng.randint(0, 9) for _ in range(rng.randint(0, 4))]


def _depth(x: list[int]) -> int:
    return 1 + max(_depth([v for v in x[1:] if v < x[0]]), _depth([v for v in x[1:] if v >= x[0]])) if x else 0


def _queens(x: int) -> int:
    """Count permutations in which all sums and all differences of row and column are distinct."""
    boards = (list(enumerate(columns)) for columns in itertools.permutations(range(x)))
    return sum(len({r + c for r, c in board}) == x == len({r - c for r, c in board}) for board in boards)


def _product(x: list[Any]) -> list[list[int]]:
    a, b = x
    return [[a[i][0] * b[0][j] + a[i][1] * b[1][j] + a[i][2] * b[2][j] for j in (0, 1)] for i in (0, 1)]


def _words(x: str) -> dict[str, int]:
    words = x.replace(".", " ").split()
    return {word: words.count(word) for word in words}


def _day(rng: random.Random) -> list[int]:
    return [rng.randint(1900, 2100), rng.randint(1, 12), rng.randint(1, 28)]


def _edges(rng: random.Random) -> list[Any]:
    size = rng.randint(1, 7)
    return [size, [[rng.randrange(size), rng.randrange(size), rng.randint(0, 9)] for _ in range(rng.randint(0, 10))]]


_PROBLEMS: Mapping[str, tuple[Draw, Callable[[Any], Any]]] = MappingProxyType(
    {
        "two_sum": (lambda rng: [_some(-5, 5)(rng), rng.randint(-5, 5)], _two_sum),
        "largest_sum": (_some(-9, 9), lambda x: max(sum(x[i:j]) for i in range(len(x)) for j in range(i + 1, len(x) + 1))),
        "longest_increasing": (
            _some(0, 9, 0, 9),
            lambda x: max(len(c) for n in range(len(x) + 1) for c in itertools.combinations(x, n) if list(c) == sorted(set(c))),
        ),
        "coins": (lambda rng: [_some(1, 9, 1, 3)(rng), rng.randint(0, 40)], _coins),
        "edit_distance": (lambda rng: [_text("ab", 7)(rng), _text("abc", 7)(rng)], lambda x: _distance(*x)),
        "brackets": (_text("()[]{}", 8), _brackets),
        "intervals": (lambda rng: [sorted(rng.sample(range(40), 2)) for _ in range(rng.randint(0, 6))], _intervals),
        "word_counts": (_text("ab cd. ", 40), _words),
        "primes": (lambda rng: rng.randint(1, 300), lambda x: [n for n in range(2, x + 1) if all(n % d for d in range(2, n))]),
        "common_divisor": (_some(1, 200), lambda x: max(d for d in range(1, min(x) + 1) if not any(n % d for n in x))),
        "matrix_product": (
            lambda rng: [[_some(-9, 9, 3, 3)(rng) for _ in range(2)], [_some(-9, 9, 2, 2)(rng) for _ in range(3)]],
            _product,
        ),
        "orders": (_text("abc", 4), lambda x: sorted({"".join(x[i] for i in p) for p in itertools.permutations(range(len(x)))})),
        "queens": (lambda rng: rng.randint(1, 6), _queens),
        "median": (_some(-99, 99), lambda x: (sorted(x)[len(x) // 2] + sorted(x)[(len(x) - 1) // 2]) / 2),
        "fractions": (
            _some(1, 9),
            lambda x: list(Fraction(sum(math.prod(x) // n for n in x), math.prod(x)).as_integer_ratio()),
        ),
        "cents": (lambda rng: rng.randint(0, 9999), lambda x: f"{(x + 5) // 10 // 10}.{(x + 5) // 10 % 10}"),
        "days": (lambda rng: [_day(rng), _day(rng)], lambda x: abs(date(*x[0]).toordinal() - date(*x[1]).toordinal())),
        "flatten": (_nested, _flat),
        "records": (
            lambda rng: [[_text("abc", 4)(rng), rng.randint(0, 5)] for _ in range(rng.randint(0, 8))],
            lambda x: [name for age in range(6) for name in sorted(n for n, a in x if a == age)],
        ),
        "shortest_path": (_edges, _paths),
        "islands": (lambda rng: ["".join(rng.choices("01", k=5)) for _ in range(rng.randint(1, 5))], _islands),
        "cipher": (
            lambda rng: [_text("abcxyz ", 20)(rng), rng.randint(0, 25)],
            lambda x: "".join(chr((ord(c) - 97 + x[1]) % 26 + 97) if c.isalpha() else c for c in x[0]),
        ),
        "digest": (_text("abcäß", 30), lambda x: b64encode(hashlib.new("sha256", x.encode()).digest()).decode()),
        "big_numbers": (
            lambda rng: rng.randint(0, 400),
            lambda x: sum(math.comb(x - 1 - k, k) for k in range((x + 1) // 2)),
        ),
        "notes": (_some(-99, 99), sum),
        "caught": (
            lambda rng: [dict.fromkeys(rng.choices("abcd", k=3), rng.randint(0, 9)), rng.choices("abcdef", k=5)],
            lambda x: [x[0].get(key) for key in x[1]],
        ),
        "shuffled": (_some(0, 99), sorted),
        "tree_depth": (_some(0, 30), _depth),
    }
)
"""``{name: (function that draws an input, function that returns the answer)}``; the algorithms differ from the programs'."""


def programs(count: int, rng: random.Random) -> list[Honest]:
    """Return ``count`` programs in turn, each with a drawn prologue and epilogue and three drawn inputs."""
    codes = load(HERE / "honest.toml")
    drawn = []
    for name in itertools.islice(itertools.cycle(codes), count):
        draw, right = _PROBLEMS[name]
        inputs = tuple(draw(rng) for _ in range(3))
        code = rng.choice(PROLOGUES) + codes[name] + rng.choice(EPILOGUES)
        drawn.append(Honest(name, code, inputs, tuple(right(x) for x in inputs)))
    return drawn
