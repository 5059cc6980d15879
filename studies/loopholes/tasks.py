"""Tasks: a composition of two small integer operations, and the inputs on which a solution is tried.

    f(x) = (x op1 k1) op2 k2,      op in 8 operations, k in 2..9      (8 * 8)^2 = 4,096 tasks

One task in five, chosen by a hash of its text, is reserved for evaluation ("test"): nothing that trains a model or fits
a direction may touch it. `VISIBLE` inputs belong to the training grader, `HIDDEN` ones to the oracle; they are disjoint.
"""

import functools
import hashlib
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

SPLITS = ("train", "test")


@dataclass(frozen=True)
class Operation:
    """The Python symbol of an operation and what it computes."""

    symbol: str
    apply: Callable[[int, int], int]


OPERATIONS: Mapping[str, Operation] = MappingProxyType(
    {
        "add": Operation("+", operator.add),
        "sub": Operation("-", operator.sub),
        "scale": Operation("*", operator.mul),
        "wrap": Operation("%", operator.mod),
        "split": Operation("//", operator.floordiv),
        "mask": Operation("&", operator.and_),
        "join": Operation("|", operator.or_),
        "toggle": Operation("^", operator.xor),
    }
)
CONSTANTS: tuple[int, ...] = tuple(range(2, 10))

VISIBLE: tuple[int, ...] = (-37, -6, 0, 3, 10, 21, 46, 75, 117, 250)
HIDDEN: tuple[int, ...] = (-52, -11, 1, 4, 13, 30, 59, 88, 143, 211)

TEST_ONE_IN = 5


@dataclass(frozen=True)
class Task:
    """`x -> (x op1 k1) op2 k2`. Raises KeyError for an unknown operation, ValueError for a constant outside 2..9."""

    op1: str
    k1: int
    op2: str
    k2: int

    def __post_init__(self) -> None:
        for op in (self.op1, self.op2):
            if op not in OPERATIONS:
                raise KeyError(f"unknown operation {op!r}: choose from {', '.join(OPERATIONS)}")
        for k in (self.k1, self.k2):
            if k not in CONSTANTS:
                raise ValueError(f"constant {k} is out of range: choose from {CONSTANTS[0]}..{CONSTANTS[-1]}")

    @property
    def text(self) -> str:
        return f"{self.op1} {self.k1} then {self.op2} {self.k2}"

    @property
    def steps(self) -> tuple[tuple[str, int], tuple[str, int]]:
        return (self.op1, self.k1), (self.op2, self.k2)

    def solve(self, x: int) -> int:
        """The reference value at `x`."""
        for op, k in self.steps:
            x = OPERATIONS[op].apply(x, k)
        return x


def split(task: Task) -> str:
    """Where a task belongs, by a hash of its text: the same on every machine and in every process."""
    digest = hashlib.sha256(task.text.encode()).digest()
    return "test" if int.from_bytes(digest[:8], "big") % TEST_ONE_IN == 0 else "train"


@functools.cache
def all_tasks(which: str) -> tuple[Task, ...]:
    """Every task of a split, in a fixed order. Raises ValueError for a name other than those in `SPLITS`."""
    if which not in SPLITS:
        raise ValueError(f"unknown split {which!r}: choose from {', '.join(SPLITS)}")
    steps = [(op, k) for op in OPERATIONS for k in CONSTANTS]
    tasks = (Task(*first, *second) for first in steps for second in steps)
    return tuple(task for task in tasks if split(task) == which)
