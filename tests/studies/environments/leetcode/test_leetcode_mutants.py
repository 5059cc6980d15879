"""Mutants differ in one place, inputs keep their shape, the oracle fails what differs: theorems, and a sample of real problems."""

import ast

import pytest

from studies.environments.leetcode.mutants import KINDS, mutants
from studies.environments.leetcode.oracle import LeetCodeOracle
from studies.environments.leetcode.problems import LeetCodeTask
from studies.environments.leetcode.programs import Programs

pytestmark = pytest.mark.process

CODE = '''
class Solution:
    def f(self, xs: List[int], k: int = 2) -> int:
        """Nothing in here 1 < 2 is changed."""
        best, flag = 0, True
        for i in range(k, len(xs)):
            if xs[i] < xs[i - 1] and flag:
                best += max(xs[i] * 2, k // 3)
            elif k in xs or xs[i] == 7 != k:
                return "x"
        return best
'''


def lines_that_differ(one: str, other: str) -> int:
    pairs = zip(one.splitlines(), other.splitlines(), strict=True)
    return sum(a != b for a, b in pairs)


def test_a_mutant_differs_in_one_line_and_is_python() -> None:
    original = ast.unparse(ast.parse(CODE))
    found = mutants(CODE, 0)
    assert {mutant.kind for mutant in found} == set(KINDS)
    assert len({mutant.code for mutant in found}) == len(found)
    for mutant in found:
        assert lines_that_differ(original, mutant.code) == 1, mutant
        assert original.splitlines()[mutant.line - 1] != mutant.code.splitlines()[mutant.line - 1]
        ast.parse(mutant.code)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("off_by_one", ("k: int=2", "k: int=3")), ("off_by_one", ("best, flag = (0,", "best, flag = (-1,")), ("off_by_one",
        ("len(xs)", "len(xs) - 1")),
        ("off_by_one", ("range(k,", "range(k + 1,")), ("off_by_one", ("xs[i - 1]", "xs[i - 0]")), ("constant", ("True", "False")),
        ("constant", ("'x'", "''")), ("constant", ("== 7", "== 0")), ("comparison", ("xs[i] < xs", "xs[i] <= xs")), ("comparison",
        ("xs[i] < xs", "xs[i] > xs")),
        ("comparison", ("k in xs", "k not in xs")), ("comparison", ("7 != k", "7 == k")), ("comparison", ("== 7", "!= 7")),
        ("operator", ("and flag", "or flag")),
        ("operator", ("k // 3", "k % 3")), ("operator", ("best += ", "best -= ")), ("operator", ("max(", "min(")), ("operator",
        ("i - 1", "i + 1")),
    ],
)  # fmt: skip
def test_these_are_among_them(kind: str, change: tuple[str, str]) -> None:
    original = ast.unparse(ast.parse(CODE))
    assert original.count(change[0]) == 1
    assert original.replace(*change) + "\n" in {mutant.code for mutant in mutants(CODE, 0) if mutant.kind == kind}


def test_mutants_depend_on_the_seed_alone() -> None:
    assert mutants(CODE, 3, 2) == mutants(CODE, 3, 2)
    assert mutants(CODE, 3, 2) != mutants(CODE, 4, 2)
    assert {kind: sum(mutant.kind == kind for mutant in mutants(CODE, 3, 2)) for kind in KINDS} == dict.fromkeys(KINDS, 2)
    assert {mutant.code for mutant in mutants(CODE, 3, 2)} <= {mutant.code for mutant in mutants(CODE, 4)}


def test_every_reference_passes_and_fires_nothing(real_tasks: dict[str, LeetCodeTask], programs: Programs) -> None:
    found = LeetCodeOracle(programs, real_tasks).inspect(list(real_tasks.values()), [task.solution for task in real_tasks.values()])
    assert [task.name for task, (right, _) in zip(real_tasks.values(), found, strict=True) if not right] == []
    assert not any(fired for _, channels in found for fired in channels.values())


"""Problems in the sample; the slowest three are left to the full table."""
