"""Problems are read strictly: every layout, every form of a test, and a sentence for whatever is neither."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from studies.environments.leetcode.expressions import Call, parse_assert, parse_check
from studies.environments.leetcode.problems import Case, LeetCodeTask, load_tasks, make_test, read_task, split_tests
from studies.environments.leetcode.values import Linked, Tree, decode

pytestmark = pytest.mark.study


def expected_of(text: str) -> Any:
    return parse_assert(f"assert Solution().f(x = 1) == {text}", "f")[1]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3), ("-3", -3), ("+2.5", 2.5), ("- -1", 1), ("True", True), ("false", False), ("null", None), ("None", None),
        ('"a\\n"', "a\n"),
        ("inf", math.inf), ("-inf", -math.inf), ("nan", math.nan),
        ("math.inf", math.inf), ('float("-inf")', -math.inf), ("float(3)", 3.0), ("1e400", math.inf),
        ("[1, [2.0, true], ()]", [1, [2.0, True], ()]), ("(1,)", (1,)), ("{1, 2}", {1, 2}),
        ('{"a": [1], 2: null}', {"a": [1], 2: None}),
        ("list_node([1, 2])", Linked((1, 2))), ("list_node([])", None), ("tree_node([])", None), ("[list_node([1])]",
        [Linked((1,))]),
        ("tree_node([1, None, 2, 3])", Tree(((1,), None, (2,), (3,)))), ("tree_node([1, null, null, 5])", Tree(((1,),))),
        ("tree_node([1, None, 2, 3, None, None, None])", Tree(((1,), None, (2,), (3,)))),
    ],
)  # fmt: skip
def test_values_are_read(text: str, value: Any) -> None:
    assert repr(expected_of(text)) == repr(value)  # by type too, and NaN is NaN


@pytest.mark.parametrize(
    "text",
    [
        "x", "open('x')", "__import__('os')", "[1 for _ in x]", "1 + 1", "b'a'", "3j", "...", "f'{1}'", "-True", "-'a'", "x.y",
        "math.pi",
        "list_node(3)", "tree_node([None])", "list_node([1], 2)", "float([1])", "float(x)", "{[]}", "{[]: 1}", "{**{}}",
        "(lambda: 1)", "{*[]}",
    ],
)  # fmt: skip
def test_no_other_expression_is_evaluated(text: str) -> None:
    with pytest.raises(ValueError, match=r"cannot read a value|sign must stand|takes a|hashable|could not convert"):
        expected_of(text)


@pytest.mark.parametrize(
    ("text", "call", "expected"),
    [
        ("assert Solution().f(a = [1], b = -inf) == 2", Call((), {"a": [1], "b": -math.inf}), 2),
        ("assert Solution().f(1, b = 2) == [3]", Call((1,), {"b": 2}), [3]),
        ("assert candidate(a = 1) == 2", Call((), {"a": 1}), 2),
        ("assert is_same_list(Solution().f(a = list_node([1])), list_node([2]))", Call((), {"a": Linked((1,))}), Linked((2,))),
        ("assert is_same_tree(candidate(), tree_node([]))", Call((), {}), None),
    ],
)
def test_asserts_are_read(text: str, call: Call, expected: Any) -> None:
    found = parse_assert(text, "f")
    assert (found[0].args, dict(found[0].kwargs), found[1]) == (call.args, dict(call.kwargs), expected)


def test_a_check_function_is_read() -> None:
    text = "def check(candidate):\n    assert candidate(a = 1) == 2\n    assert candidate(a = 2) == 3\n"
    assert [expected for _, expected in parse_check(text, "f")] == [2, 3]
    for wrong in ("assert candidate(1) == 1", "def check(c):\n    print(c)\n", text + text, text + "    for i in []: pass\n"):
        with pytest.raises(ValueError, match=r"tests must be one function check\(candidate\) of assert statements"):
            parse_check(wrong, "f")


def without(row: dict[str, Any], *names: str, **more: Any) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in names} | more


def layouts(row: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The same problem in every layout."""
    checks = "".join(f"    {text.replace('Solution().total', 'candidate')}\n" for text in row["tests"])
    dataset = {
        "task_id": "total",
        "question_id": 7,
        "difficulty": "Medium",
        "problem_description": "Add them up, k times.\n",
        "starter_code": row["starter_code"],
        "prompt": row["setup_code"],
        "completion": row["canonical_solution"],
        "entry_point": "Solution().total",
        "test": f"def check(candidate):\n{checks}",
        "input_output": [{"input": "nums = [1], k = 1", "output": "1"}],
    }
    return {
        "project": row,
        "rl": without(
            row, "tests", "starter_code", gt_answer=row["tests"], prompt_metadata={"starter_code": row["starter_code"]}, hint=None
        ),
        "dataset": dataset,
    }


@pytest.mark.parametrize("layout", ["project", "rl", "dataset"])
def test_every_layout_is_the_same_problem(row: dict[str, Any], task: LeetCodeTask, layout: str) -> None:
    found = read_task(layouts(row)[layout])
    for name in ("name", "difficulty", "statement", "starter", "function", "setup", "solution"):
        assert getattr(found, name) == getattr(task, name), name
    for side in ("visible", "hidden"):
        assert [vars(one) for one in getattr(found, side)] == [vars(one) for one in getattr(task, side)]


def test_the_sentence_names_file_and_line(row: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "problems.jsonl"
    file.write_text(json.dumps(row) + "\n\n" + json.dumps(row | {"id": 8, "question": ""}) + "\n")
    with pytest.raises(ValueError, match=r"problems\.jsonl, line 3: question must be a text that is not empty"):
        load_tasks(file)
    twice = f"{json.dumps(row)}\n{json.dumps(row)}"
    wrong = {
        "[1]": "line 1: a row is a JSON object",
        "{": "line 1: ",
        "": "holds no problem",
        twice: "line 2: problem 7 appears twice",
        json.dumps(row).replace('"id"', '"id": 3, "id"'): "line 1: this JSON has the key 'id' twice",
        json.dumps(row | {"question": "\udc80"}): "line 1: this JSON holds half a character",
    }
    for text, sentence in wrong.items():
        file.write_text(text)
        with pytest.raises(ValueError, match=sentence):
            load_tasks(file)
    with pytest.raises(FileNotFoundError, match=r"give a folder that holds leetcode\.jsonl, or a JSONL file of problems"):
        load_tasks(tmp_path)


CASES = st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=2, max_size=30)


@given(CASES, st.randoms(use_true_random=False))
def test_visible_and_hidden_inputs_are_disjoint_and_of_no_order(inputs: list[tuple[int, bool]], rng: Any) -> None:
    tests = [make_test(Call((), {"x": float(x) if as_float else x}), x) for x, as_float in inputs]
    distinct = {x for x, _ in inputs}
    if len(distinct) < 2:
        with pytest.raises(ValueError, match="at least two different inputs"):
            split_tests(tests)
        return
    visible, hidden = split_tests(tests)
    shown, kept = values_of(visible), values_of(hidden)
    assert shown
    assert kept
    assert not shown & kept
    assert shown | kept == distinct
    again = rng.sample(tests, len(tests))
    assert [values_of(side) for side in split_tests(again)] == [shown, kept]


def values_of(tests: tuple[Case, ...]) -> set[Any]:
    return {decode(json.loads(test.call)[1]["x"]) for test in tests}


def test_one_input_has_one_key() -> None:
    def key(*args: Any, **kwargs: Any) -> str:
        return make_test(Call(args, kwargs), 0).key

    assert key(a=[1, 2.0], b=3) == key(b=3.0, a=[1.0, 2])
    assert len({key(a=1), key(a=True), key(a="1"), key(a=[1]), key(a=(1,)), key(a=Linked((1,))), key(a=1.5)}) == 7


def test_the_real_problems_load(real_tasks: dict[str, LeetCodeTask]) -> None:
    assert len(real_tasks) == 58
    assert sum(len(task.tests) for task in real_tasks.values()) > 5000
    for task in real_tasks.values():
        assert not {test.key for test in task.visible} & {test.key for test in task.hidden}
        assert 0.15 < len(task.visible) / len(task.tests) < 0.25
