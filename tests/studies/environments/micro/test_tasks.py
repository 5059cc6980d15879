"""Tasks: what they compute, and a split that no machine can move."""

import hashlib
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from studies.environments.micro.language import CONSTANTS, HIDDEN, VISIBLE, MicroTask, all_tasks, split
from studies.environments.micro.settings import OPERATIONS

operations, constants = st.sampled_from(list(OPERATIONS)), st.sampled_from(CONSTANTS)
tasks = st.builds(MicroTask, operations, constants, operations, constants)


def test_visible_and_hidden_inputs_are_disjoint() -> None:
    assert len(set(VISIBLE)) == len(set(HIDDEN)) == 10
    assert not set(VISIBLE) & set(HIDDEN)


@given(tasks, st.sampled_from(VISIBLE + HIDDEN))
def test_solve_is_what_python_computes_with_the_symbols(task: MicroTask, x: int) -> None:
    first, second = (OPERATIONS[op].symbol for op in (task.op1, task.op2))
    assert task.solve(x) == eval(f"(x {first} {task.k1}) {second} {task.k2}", {"x": x})


def test_the_splits_share_no_task_and_cover_all() -> None:
    train, test = all_tasks("train"), all_tasks("test")
    assert len(train) + len(test) == len(set(train) | set(test)) == (len(OPERATIONS) * len(CONSTANTS)) ** 2
    assert all(split(task) == "test" for task in test)


def test_a_fifth_is_reserved_within_two_points_overall_and_five_for_every_operation() -> None:
    test = all_tasks("test")
    assert len(test) / 4096 == pytest.approx(0.2, abs=0.02)
    for op in OPERATIONS:
        assert sum(task.op1 == op for task in test) / 512 == pytest.approx(0.2, abs=0.05)
        assert sum(task.op2 == op for task in test) / 512 == pytest.approx(0.2, abs=0.05)


def test_the_split_is_the_one_that_published_numbers_used() -> None:
    digest = hashlib.sha256("\n".join(task.text for task in all_tasks("test")).encode()).hexdigest()
    assert digest.startswith("64a27601913e9eb4")


def test_hidden_inputs_tell_apart_what_visible_ones_do() -> None:
    """A wrong operation that passes one set passes the other, but for one program in a thousand."""
    disagree = total = 0
    for task in all_tasks("test")[::8]:
        for op in OPERATIONS:
            other = MicroTask(op, task.k1, task.op2, task.k2)
            visible = all(other.solve(x) == task.solve(x) for x in VISIBLE)
            hidden = all(other.solve(x) == task.solve(x) for x in HIDDEN)
            disagree, total = disagree + (visible != hidden), total + 1
    assert disagree / total < 0.01


def test_errors_name_the_choices() -> None:
    with pytest.raises(KeyError, match="choose from add, sub"):
        MicroTask("power", 2, "add", 2)
    with pytest.raises(ValueError, match=r"choose from 2\.\.9"):
        MicroTask("add", 10, "add", 2)
    with pytest.raises(ValueError, match=r"constant 2\.0 is not a whole number"):  # it equals 2, but is no token
        MicroTask.__post_init__(SimpleNamespace(op1="add", k1=2, op2="add", k2=2.0))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="choose from train, test"):
        all_tasks("validation")
