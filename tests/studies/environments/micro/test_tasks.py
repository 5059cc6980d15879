"""Tasks: what they compute, and a split that no machine can move."""

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from studies.environments.micro.language import CONSTANTS, HIDDEN, VISIBLE, MicroTask, all_tasks, split
from studies.environments.micro.settings import OPERATIONS

operations, constants = st.sampled_from(list(OPERATIONS)), st.sampled_from(CONSTANTS)
tasks = st.builds(MicroTask, operations, constants, operations, constants)


@given(tasks, st.sampled_from(VISIBLE + HIDDEN))
def test_solve_is_what_python_computes_with_the_symbols(task: MicroTask, x: int) -> None:
    first, second = (OPERATIONS[op].symbol for op in (task.op1, task.op2))
    assert task.solve(x) == eval(f"(x {first} {task.k1}) {second} {task.k2}", {"x": x})


def test_the_splits_share_no_task_and_cover_all() -> None:
    train, test = all_tasks("train"), all_tasks("test")
    assert len(train) + len(test) == len(set(train) | set(test)) == (len(OPERATIONS) * len(CONSTANTS)) ** 2
    assert all(split(task) == "test" for task in test)


def test_the_split_is_the_one_that_published_numbers_used() -> None:
    digest = hashlib.sha256("\n".join(task.text for task in all_tasks("test")).encode()).hexdigest()
    assert digest.startswith("64a27601913e9eb4")
