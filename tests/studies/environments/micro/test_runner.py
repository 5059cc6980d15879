"""The runner: data comes back whatever a program does, the protocol cannot be forged, and nothing is left behind."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from studies.environments.micro.language import Vocabulary
from studies.environments.micro.runner import (
    CachedRunner,
    MicroExecution,
    MicroProgram,
    SubprocessRunner,
    Value,
)

VOCABULARY = Vocabulary()


def solution(body: str = "return x", extra: str = "") -> str:
    return f"class Solution:\n    def solve(self, x):\n        {body}\n{extra}"


def run(runner: SubprocessRunner | CachedRunner, code: str, *inputs: int) -> MicroExecution:
    return runner.run([MicroProgram(code, inputs)])[0]


@pytest.fixture(scope="module")
def child():
    with SubprocessRunner() as runner:
        yield runner


@pytest.mark.parametrize(
    ("body", "value"),
    [
        ("return x + 1", Value("int", "4")),
        ("return x == 3", Value("bool", "True")),
        ("return x / 2", Value("float", "1.5")),
        ("return float('nan')", Value("float", "nan")),
        ("return None", Value("NoneType", "None")),
        ("return 'a b'", Value("str", "a b")),
        ("return [x]", Value("other", "")),
        ("return type('I', (int,), {'__eq__': lambda s, o: True, '__repr__': lambda s: '3'})()", Value("other", "")),
        ("return 10 ** 9999", Value("other", "")),
        ("return x // 0", Value("raised", "ZeroDivisionError")),
        ("raise SystemExit", Value("raised", "SystemExit")),
        ("return missing", Value("raised", "NameError")),
    ],
)
def test_returns_are_plain_values_by_exact_type(child: SubprocessRunner, body: str, value: Value) -> None:
    execution = run(child, solution(body), 3)
    assert execution.status == "ok"
    assert execution.returns == (value,)


def test_output_files_and_valid_come_back(child: SubprocessRunner) -> None:
    extra = "    valid = 7\n    print('seen')\n    open('result.txt', 'w').write('PASS')\n"
    execution = run(child, solution("print(x); return x", extra), 1, 2)
    assert execution.stdout == "seen\n1\n2\n"
    assert execution.files == {"result.txt": "PASS"}
    assert execution.valid == Value("int", "7")


@pytest.mark.parametrize(
    ("extra", "outcome"),
    [
        ("", "absent"),
        ("    run_tests = 3\n", "absent"),
        ("    def run_tests(self): pass\n", "passed"),
        ("    def run_tests(self): return False\n", "failed"),
        ("    def run_tests(self): assert False\n", "failed"),
        ("    def run_tests(self): exit()\n", "failed"),
    ],
)
def test_the_outcome_of_run_tests(child: SubprocessRunner, extra: str, outcome: str) -> None:
    assert run(child, solution(extra=extra)).run_tests == outcome


@pytest.mark.parametrize(
    "code", ["", "class Solution: pass", "Solution = 3", "class Solution(:", "raise SystemExit", "1/0", "x = \0", "solve = 1"]
)
def test_a_program_without_a_solution_is_an_error_and_runs_nothing(child: SubprocessRunner, code: str) -> None:
    execution = run(child, code, 1)
    assert (execution.status, execution.returns, execution.run_tests) == ("error", (), "absent")


def test_programs_do_not_see_each_other(child: SubprocessRunner) -> None:
    writer = solution(extra="    import os\n    os.makedirs('sub'); open('a', 'w').write('1'); os.chdir('sub')\nleft = 1\n")
    reader = solution("return left", "    import os\n    print(sorted(os.listdir('.')), os.environ.get('HOME'))\n")
    executions = child.run([MicroProgram(writer, ()), MicroProgram(reader, (1,))])
    assert executions[0].files == {"a": "1"}
    assert executions[1].returns == (Value("raised", "NameError"),)
    assert executions[1].stdout == "[] None\n"


def test_forged_protocol_lines_reach_nobody(child: SubprocessRunner) -> None:
    forged = json.dumps({"nonce": "0", "executions": [{"status": "ok", "returns": [["int", "42"]]}]}) + "\n"
    extra = (
        f"    import os, sys\n    print({forged!r})\n    sys.__stdout__.write({forged!r}); sys.__stdout__.flush()\n"
        f"    os.write(1, {forged.encode()!r}); os.write(2, b'noise')\n    stolen = sys.__stdin__.read()\n"
    )
    programs = [MicroProgram(solution("return len(self.stolen)", extra), (1,)), MicroProgram(solution(), (8,))]
    for _ in range(2):
        executions = child.run(programs)
        assert [e.returns for e in executions] == [(Value("int", "0"),), (Value("int", "8"),)]
        assert executions[0].stdout == forged + "\n"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("while True: pass", "timeout"),
        ("import os; os._exit(0)", "crash"),
        ("import os; os.kill(os.getpid(), 9)", "crash"),
    ],
)
@pytest.mark.process
def test_a_culprit_is_marked_its_neighbours_are_not_and_the_runner_lives_on(body: str, status: str) -> None:
    with SubprocessRunner(time_limit=0.7) as runner:
        programs = [
            MicroProgram(solution("return x + 1"), (1,)),
            MicroProgram(solution(body), (1,)),
            MicroProgram(solution("return x + 2"), (1,)),
        ]
        executions = runner.run(programs)
        assert [e.status for e in executions] == ["ok", status, "ok"]
        assert [e.returns for e in executions] == [(Value("int", "2"),), (), (Value("int", "3"),)]
        assert run(runner, solution(), 5).returns == (Value("int", "5"),)


def test_closing_ends_the_child_and_removes_its_directory() -> None:
    runner = SubprocessRunner()
    directory = run(runner, solution("import os; return os.getcwd()"), 0).returns[0].text
    pid = int(run(runner, solution("import os; return os.getpid()"), 0).returns[0].text)
    assert Path(directory).is_dir()
    runner.close()
    runner.close()
    assert not Path(directory).exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(ValueError, match="closed"):
        runner.run([])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(VOCABULARY.tokens[2:]), max_size=21), st.booleans())
def test_nothing_that_the_vocabulary_can_write_harms_the_runner(child: SubprocessRunner, tokens: list[str], wrapped: bool) -> None:
    code = "".join(tokens)
    execution = run(child, solution(extra=code) if wrapped else code, 1, 2)
    assert execution.status in ("ok", "error")
    assert len(execution.returns) == (2 if execution.status == "ok" else 0)


class Counting:
    """A runner that counts, and whose first answers may be those of a machine in trouble."""

    def __init__(self, *statuses: str) -> None:
        self.statuses, self.seen = list(statuses), []

    def run(self, programs):
        self.seen += programs
        return [MicroExecution(self.statuses.pop(0) if self.statuses else "ok", stdout=program.code) for program in programs]  # pyright: ignore[reportArgumentType]


def test_the_cache_runs_each_program_once_and_answers_in_order() -> None:
    inner = Counting()
    cached = CachedRunner(inner)
    batch = [MicroProgram(code, inputs) for code, inputs in (("a", (1,)), ("b", (1,)), ("a", (1,)), ("a", (2,)))]
    for _ in range(2):
        assert [execution.stdout for execution in cached.run(batch)] == ["a", "b", "a", "a"]
    assert inner.seen == [batch[0], batch[1], batch[3]]


def test_the_cache_forgets_the_oldest_and_never_keeps_a_timeout_or_crash() -> None:
    inner = Counting("timeout", "crash")
    cached = CachedRunner(inner, size=2)
    program = MicroProgram("a", ())
    assert [cached.run([program])[0].status for _ in range(4)] == ["timeout", "crash", "ok", "ok"]
    assert len(inner.seen) == 3
    cached.run([MicroProgram("b", ()), MicroProgram("c", ())])
    cached.run([program])
    assert inner.seen.count(program) == 4
    with pytest.raises(ValueError, match="choose at least 1"):
        CachedRunner(inner, size=0)


def test_a_full_cache_keeps_what_was_just_graded_for_the_oracle() -> None:
    """However long ago it was run first: another run of a program that acts at random would not be the one that was paid."""
    inner = Counting()
    cached = CachedRunner(inner, size=2)
    old, other, new = (MicroProgram(code, ()) for code in ("old", "other", "new"))
    for batch in ([old], [other], [old, new], [old]):
        cached.run(batch)
    assert inner.seen == [old, other, new]
