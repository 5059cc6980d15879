"""Fixtures of the LeetCode environment: one jail, a problem written by hand, and the real ones if there are any."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from studies.environments.leetcode.problem import LeetCodeProblem
from studies.environments.leetcode.problems import STATEMENT_END, LeetCodeTask, read_task
from studies.environments.leetcode.programs import Programs
from studies.sandbox import JailUnavailableError

ROOT = Path(__file__).parents[4]

SETUP = """from typing import *
import collections
inf = float("inf")

class ListNode:
    def __init__(self, val=0, next=None):
        self.val = val
        self.next = next

class TreeNode:
    def __init__(self, val=0, left=None, right=None):
        self.val = val
        self.left = left
        self.right = right
"""
INPUTS = [
    ([1], 1),
    ([1, 2], 3),
    ([], 4),
    ([5, 5, 5], 2),
    ([-1, 1], 7),
    ([10], -1),
    ([2, 3, 4], 5),
    ([8, 1], 1),
    ([6] * 6, 6),
    ([0], 9),
]


@pytest.fixture(scope="session")
def row() -> dict[str, Any]:
    """A problem in the project's layout: the sum of a list, times k."""
    tests = [f"assert Solution().total(nums = {nums}, k = {k}) == {sum(nums) * k}" for nums, k in INPUTS]
    starter = "class Solution:\n    def total(self, nums: List[int], k: int) -> int:\n        "
    return {
        "id": 7,
        "difficulty": "medium",
        "question": f"PROBLEM:\nAdd them up, k times.{STATEMENT_END} called total",
        "func_name": "Solution().total",
        "setup_code": SETUP,
        "canonical_solution": starter.rstrip() + "\n        return sum(nums) * k\n",
        "tests": tests,
        "starter_code": starter,
    }


@pytest.fixture(scope="session")
def task(row: dict[str, Any]) -> LeetCodeTask:
    return read_task(row)


@pytest.fixture(scope="session")
def programs() -> Iterator[Programs]:
    """One jail for all tests; with what protections this machine has, since these programs are our own."""
    try:
        jail = Programs(unsafe=True)
    except JailUnavailableError as error:
        pytest.skip(str(error))
    with jail:
        yield jail


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of real problems and rollouts."""
    folder = Path(os.environ.get("ROUTE2_DATA", ROOT.parent / "shared" / "data"))
    if not (folder / "leetcode.jsonl").is_file():
        pytest.skip(f"no real problems in {folder}: set ROUTE2_DATA to their folder")
    return folder


@pytest.fixture(scope="session")
def real(data: Path, programs: Programs) -> Iterator[LeetCodeProblem]:
    """The real problems behind the protocol."""
    with LeetCodeProblem(data, unsafe=True) as problem:
        yield problem


@pytest.fixture(scope="session")
def real_tasks(real: LeetCodeProblem) -> dict[str, LeetCodeTask]:
    return real._tasks
