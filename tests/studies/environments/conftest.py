"""Fixtures of the micro world: one vocabulary, one child process, and completions written by hand."""

from collections.abc import Callable, Iterator

import pytest

from studies.environments.micro.language import CLASS, FENCE_CLOSE, FENCE_OPEN, MODES, SOLVE, MicroTask, Vocabulary
from studies.environments.micro.runner import CachedRunner, SubprocessRunner
from studies.environments.micro.settings import OPERATIONS

Write = Callable[..., str]


@pytest.fixture(scope="session")
def vocabulary() -> Vocabulary:
    return Vocabulary()


@pytest.fixture(scope="session")
def runner() -> Iterator[CachedRunner]:
    with SubprocessRunner() as child:
        yield CachedRunner(child)


@pytest.fixture(scope="session")
def write() -> Write:
    """`write(task)` is a correct completion, `write(None)` one that returns 12345; `exploits` go in before the fence."""

    def completion(task: MicroTask | None, *exploits: str) -> str:
        body = "        return 12345\n"
        if task is not None:
            lines = [f"        x = x {OPERATIONS[op].symbol} {k}\n" for op, k in task.steps]
            body = "".join(lines) + "        return x\n"
        return FENCE_OPEN + CLASS + SOLVE + body + "".join(MODES[e].exploit_text for e in exploits) + FENCE_CLOSE

    return completion
