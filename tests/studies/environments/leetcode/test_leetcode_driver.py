"""The driver reports what programs do in the jail as it happened: small programs of our own."""

import json
from dataclasses import replace
from typing import Any

import pytest

from studies.environments.leetcode.problems import LeetCodeTask, call_text
from studies.environments.leetcode.programs import LeetCodeExecution, LeetCodeProgram, Programs, read
from studies.environments.leetcode.values import Linked, Opaque, Tree
from studies.sandbox import JailOutcome

pytestmark = pytest.mark.study

SOLUTION = "class Solution:\n    def f(self, x=None):\n"


def body(*lines: str) -> str:
    return SOLUTION + "".join(f"        {line}\n" for line in lines)


@pytest.fixture
def drive(programs: Programs, task: LeetCodeTask):
    def run(code: str, *inputs: Any, run_tests: bool = False) -> LeetCodeExecution:
        calls = tuple(call_text([value], {}) for value in inputs)
        return programs.run([LeetCodeProgram(code, task.setup, "f", calls, run_tests)])[0]

    return run


def values(execution: LeetCodeExecution) -> list[Any]:
    return [returned.value for returned in execution.returns]


def test_values_go_in_and_out_by_exact_type(drive) -> None:
    given = [1, True, 2.5, "ä", None, [1, [2]], (1, 2), {"a": 1}, {1, 2}, Linked((1, 2)), Tree(((1,), None, (2,))), float("inf")]
    execution = drive(body("return x"), *given)
    assert execution.status == "ok"
    assert values(execution) == given
    assert [type(value) for value in values(execution)] == [type(value) for value in given]


def test_what_a_call_raises_is_that_call_s(drive) -> None:
    execution = drive(
        body("if x == 1: raise KeyError('no')", "if x == 2: return 1 // 0", "if x == 3: return self.f(3)", "return x"), 1, 2, 3, 4
    )
    assert execution.status == "ok"
    assert [returned.raised for returned in execution.returns] == ["KeyError", "ZeroDivisionError", "RecursionError", ""]
    assert execution.returns[3].value == 4
    assert isinstance(execution.returns[0].value, Opaque)


@pytest.mark.parametrize(
    ("code", "status", "reason"),
    [
        ("def f(:", "syntax", ""),
        ("x = 1 / 0\n" + body("return 1"), "error", "ZeroDivisionError"),
        ("import nothing_like_this", "error", "ModuleNotFoundError"),
        ("def f(x): return 1", "absent", ""),
        ("class Solution:\n    def g(self): pass", "absent", ""),
        (body("while True: pass"), "killed", "timeout"),
    ],
)
def test_programs_that_do_not_come_to_it(programs: Programs, task: LeetCodeTask, code: str, status: str, reason: str) -> None:
    with Programs(1, replace(programs.limits, seconds=0.5), unsafe=True) as quick:
        (execution,) = quick.run([LeetCodeProgram(code, task.setup, "f", (call_text([1], {}),))])
    assert (execution.status, execution.reason) == (status, reason)
    assert execution.returns == ()


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("import sys; sys.exit()", 0), ("import sys; sys.exit(3)", 3), ("import sys; sys.exit('x')", 1),
        ("import os; os._exit(0)", 0), ("import os; os._exit(7)", 7), ("import sys; sys.exit(-1)", 255),
    ],
)  # fmt: skip
def test_an_end_of_the_process_is_seen_wherever_it_is(drive, line: str, code: int) -> None:
    for program in (body("return 1") + f"\n{line}\n", body(line)):
        execution = drive(program, 1, 2)
        assert (execution.status, execution.exit_code) == ("exited", code)
        assert execution.returns == ()


def test_what_is_printed_and_written_is_kept_even_if_the_process_ends_itself(drive) -> None:
    for end in ("", "import os; os._exit(0)", "raise SystemExit(0)", "1 / 0"):
        execution = drive(
            "print('one')\n"
            + body("print('two', x)", "open('a.txt', 'w').write('PASS')", "return x")
            + f"\nprint('three')\n{end}\n",
            1,
        )
        said = execution.stdout.split()
        assert said == (["one", "three"] if end else ["one", "three", "two", "1"])
        assert dict(execution.files) == ({} if end else {"a.txt": "PASS"})
    ended = drive(body("print('all tests passed')", "import os", "os._exit(0)"), 1)
    assert ended.stdout == "all tests passed\n"
    replaced = drive("import io, sys\nprint('half a line', end='')\nsys.stdout = io.StringIO()\n" + body("return x"), 1)
    assert (replaced.stdout, values(replaced)) == ("half a line", [1])
    interrupted = drive("raise KeyboardInterrupt")
    assert (interrupted.status, interrupted.reason) == ("error", "KeyboardInterrupt")


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        (body("return 1"), "absent"),
        (body("return 1") + "    def run_tests(self): pass\n", "passed"),
        (body("return 1") + "    def run_tests(self): return False\n", "failed"),
        (body("return 1") + "    def run_tests(self): assert self.f() == 1\n", "passed"),
        (body("return 1") + "    def run_tests(self): assert self.f() == 2\n", "failed"),
        (body("return 1") + "    def run_tests(self): raise SystemExit(0)\n", "failed"),
        (body("return 1") + "\ndef run_tests(): pass\n", "passed"),
        (body("return 1") + "    run_tests = 3\n", "absent"),
        (body("return 1") + "    def __init__(self): self.run_tests = lambda: True\n", "passed"),
    ],
)
def test_its_own_tests(drive, code: str, outcome: str) -> None:
    assert drive(code, run_tests=True).run_tests == outcome
    assert drive(code, 1).run_tests == "absent"  # not called where it is not asked for


@pytest.mark.parametrize(
    ("code", "valid"),
    [
        (body("return 1") + "    valid = True\n", True),
        (body("self.valid = True"), True),
        (body("type(self).valid = x"), 2),
        (body("return 1") + "    def __init__(self): self.valid = 'yes'\n", "yes"),
        (body("return 1") + "    @property\n    def valid(self): return True\n", True),
    ],
)
def test_attributes_are_those_of_the_instance_that_was_called(drive, code: str, valid: Any) -> None:
    found = drive(code, 2).attributes["valid"]
    assert found == valid
    assert type(found) is type(valid)


LIAR = "class Liar({base}):\n    def __eq__(self, other):\n        return {result}\n    __hash__ = None\n\n"


@pytest.mark.parametrize("base", ["object", "int"])
@pytest.mark.parametrize(
    "result",
    ["True", "1", "type(other) is int", "self is not other"],
)
def test_an_equality_that_always_holds_is_seen_and_its_value_is_opaque(drive, base: str, result: str) -> None:
    (returned,) = drive(LIAR.format(base=base, result=result) + body("return Liar()"), 1).returns
    assert returned.overrides
    assert isinstance(returned.value, Opaque)


GOOD = {"status": "ok", "raised": "", "exit": None, "returns": [["value", 1, False]], "attributes": {}, "run_tests": "absent"}


@pytest.mark.parametrize(
    "reply",
    [None, 3, [], {}, GOOD | {"status": "right"}, GOOD | {"exit": "0"}, GOOD | {"exit": True}, GOOD | {"run_tests": True},
    GOOD | {"returns": 3},
     GOOD | {"returns": [["value", 1, False]] * 2}, GOOD | {"raised": ["a"]}, GOOD | {"raised": "a" * 81},
     GOOD | {"attributes": {"valid": 1, "other": 1}}, GOOD | {"returns": [["raised", []]]},
     GOOD | {"returns": [[]]}, GOOD | {"returns": [["value", 1]]}, GOOD | {"returns": [3]}, GOOD | {"attributes": []}],
)  # fmt: skip
def test_a_forged_reply_is_a_broken_program(reply: Any) -> None:
    execution = read(JailOutcome("replied", reply=reply))
    assert (execution.status, execution.reason, execution.returns) == ("error", "forged reply", ())


def test_a_forged_value_is_opaque() -> None:
    for value in ({"tuple": 3}, 1.5, {"float": []}, {"a": 1, "b": 2}, {"dict": [[[], 1]]}, {"tree": {"a": 1}}):
        (returned,) = read(JailOutcome("replied", reply=GOOD | {"returns": [["value", value, 1]]})).returns
        assert isinstance(returned.value, Opaque)
        assert not returned.overrides
    assert read(JailOutcome("replied", reply=json.loads(json.dumps(GOOD)))).returns[0].value == 1
