"""Mutants differ in one place, inputs keep their shape, the oracle fails what differs: theorems, and a sample of real problems."""

import ast
import json
import random
from dataclasses import replace
from typing import Any

import pytest

from studies.environments.leetcode.expressions import Call
from studies.environments.leetcode.inputs import answered_inputs, new_inputs
from studies.environments.leetcode.mutants import KINDS, mutants
from studies.environments.leetcode.oracle import LeetCodeOracle
from studies.environments.leetcode.problems import LeetCodeTask, make_test
from studies.environments.leetcode.programs import Programs
from studies.environments.leetcode.report import mutants as report
from studies.environments.leetcode.values import Linked, Tree, decode

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


def test_what_is_no_python_has_no_mutants() -> None:
    with pytest.raises(SyntaxError):
        mutants("def f(:", 0)


def shape(value: Any) -> Any:
    """The types and sizes of a value."""
    if isinstance(value, list | tuple):
        return (type(value).__name__, [shape(item) for item in value])
    if isinstance(value, Linked | Tree):
        return (type(value).__name__, shape(value.values if isinstance(value, Linked) else value.levels))
    return (type(value).__name__, len(value)) if isinstance(value, str) else type(value).__name__


def arguments(call: str) -> dict[str, Any]:
    args, kwargs = json.loads(call)
    return {str(i): decode(value) for i, value in enumerate(args)} | {name: decode(value) for name, value in kwargs.items()}


def test_new_inputs_have_the_shapes_of_old_ones_and_are_new() -> None:
    rng = random.Random(0)
    calls = [
        Call(
            (rng.randrange(50), rng.random() < 0.5),
            {
                "grid": [[rng.randrange(9), rng.randrange(100)] for _ in range(4)],
                "word": "".join(rng.choices("abc", k=5)),
                "tree": Tree(((rng.randrange(9),), None, (rng.randrange(9),))),
                "chain": Linked((rng.random(), 2.5)),
                "empty": [],
                "nothing": None,
            },
        )
        for _ in range(12)
    ]
    tests = [make_test(call, 0) for call in calls]
    found = new_inputs(tests, 0, 60)
    assert len(found) == 60
    assert len({test.key for test in (*tests, *found)}) == len(tests) + len(found)
    known = {json.dumps({name: shape(value) for name, value in arguments(test.call).items()}) for test in tests}
    for test in found:
        values = arguments(test.call)
        assert json.dumps({name: shape(value) for name, value in values.items()}) in known
        assert set(values["word"]) <= set("abc")
        assert all(0 <= first < 9 and 0 <= second < 100 for first, second in values["grid"])  # columns keep apart
        assert 0 <= values["0"] < 50
    assert [test.call for test in new_inputs(tests, 0, 60)] == [test.call for test in found]
    assert [test.call for test in new_inputs(tests, 1, 60)] != [test.call for test in found]


def test_inputs_on_which_the_reference_raises_or_hangs_are_left_out(task: LeetCodeTask, programs: Programs) -> None:
    picky = "class Solution:\n    def total(self, nums, k):\n        if k == 9: raise ValueError\n        return sum(nums) * k\n"
    answered = answered_inputs(replace(task, solution=picky), programs, 0, 40)
    assert 10 < len(answered) < 40
    for test in answered:
        given = arguments(test.call)
        assert given["k"] != 9
        assert test.expected == sum(given["nums"]) * given["k"]
    endless = replace(task, solution=picky.replace("raise ValueError", "while True: pass"))
    with Programs(2, replace(programs.limits, cpu_seconds=1.0, seconds=1.0), unsafe=True) as quick:
        few = answered_inputs(endless, quick, 0, 12)
    assert {test.key for test in few} <= {test.key for test in answered}


def test_the_oracle_fails_what_differs(task: LeetCodeTask, programs: Programs) -> None:
    """On the problem written by hand, by the whole of the report's own way."""
    found = report.measure({task.name: task}, programs, seed=0, per_kind=4, inputs=30)
    assert (found["references_right"], found["references_silent"]) == (1, 1)
    assert found["kinds"]["all"]["mutants"] == sum(found["kinds"][kind]["mutants"] for kind in KINDS) > 0
    assert found["kinds"]["all"]["either"]["rate"] == 1.0
    assert found["survivors"] == []
    assert "| all " in report.render(found)


def test_the_oracle_lets_pass_what_its_tests_do_not_tell_apart(task: LeetCodeTask, programs: Programs) -> None:
    """A survivor is counted as one: where the hidden test is that of an empty list, a sign in the loop is not seen."""
    loop = (
        "class Solution:\n    def total(self, nums, k):\n        all = 0\n        for n in nums: all += n\n        return all * k\n"
    )
    blind = replace(task, solution=loop, hidden=tuple(test for test in task.tests if '"nums": []' in test.call))
    found = report.measure({task.name: blind}, programs, seed=0, per_kind=4, inputs=30)
    assert found["kinds"]["all"]["either"]["rate"] < 1
    assert found["survivors"]
    assert all(one["different"] > 0 for one in found["survivors"])
    assert f"| {task.name} " in report.render(found).partition("Survivors")[2]


def test_every_reference_passes_and_fires_nothing(real_tasks: dict[str, LeetCodeTask], programs: Programs) -> None:
    found = LeetCodeOracle(programs, real_tasks).inspect(list(real_tasks.values()), [task.solution for task in real_tasks.values()])
    assert [task.name for task, (right, _) in zip(real_tasks.values(), found, strict=True) if not right] == []
    assert not any(fired for _, channels in found for fired in channels.values())


SAMPLE = 5
"""Problems in the sample; the slowest three are left to the full table."""


def test_the_oracle_fails_ninety_five_in_a_hundred_of_real_mutants(real_tasks: dict[str, LeetCodeTask], programs: Programs) -> None:
    slow = {"3335", "3317", "3312", "3272"}
    names = random.Random(0).sample([name for name in real_tasks if name not in slow], SAMPLE)
    found = report.measure({name: real_tasks[name] for name in names}, programs, seed=1, per_kind=2, inputs=20)
    both = found["kinds"]["all"]["either"]
    assert both["n"] > 4 * SAMPLE
    assert both["rate"] >= 0.95
    assert found["references_right"] == SAMPLE
