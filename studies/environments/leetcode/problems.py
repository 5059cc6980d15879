"""LeetCode problems: read from JSON lines, checked strictly, with tests as data that are split into visible and hidden ones.

A row has one of three layouts, recognized by its fields:

    project        id, difficulty, question, func_name, setup_code, canonical_solution, tests, starter_code
    rl             the same with gt_answer and prompt_metadata.starter_code
    dataset        question_id, difficulty, problem_description, starter_code, prompt, completion, entry_point, test

``rl`` are the files leetcode_train_medhard_*.jsonl of rl-rewardhacking, ``dataset`` is LeetCodeDataset. ``tests`` and ``gt_answer``
are lists of asserts, ``test`` is ``def check(candidate): ...``. Other fields are not read.
"""

import ast
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mi_route2.validation import read_lines
from studies.environments.leetcode.expressions import Call, parse_assert, parse_check
from studies.environments.leetcode.programs import LeetCodeProgram
from studies.environments.leetcode.values import Linked, Tree, encode

FILE = "leetcode.jsonl"
VISIBLE_FRACTION = 0.2
STATEMENT_END = "\n\nYour solution to the problem should be a method of the class Solution"


@dataclass(frozen=True, eq=False)
class Case:
    """Test: one call and its expected result.

    The program's process gets ``call``, a JSON text; ``expected`` is never sent there.
    """

    call: str
    key: str
    expected: object


@dataclass(frozen=True, eq=False)
class LeetCodeTask:
    """Problem with tests. No input of a visible test is among the hidden ones."""

    name: str
    difficulty: str
    statement: str
    starter: str
    function: str
    setup: str
    solution: str
    visible: tuple[Case, ...]
    hidden: tuple[Case, ...]

    @property
    def tests(self) -> tuple[Case, ...]:
        return self.visible + self.hidden

    @property
    def scale(self) -> int:
        """Number of hidden inputs for each visible one, rounded up."""
        return -(-len(self.hidden) // len(self.visible))

    def calling(self, code: str, tests: Sequence[Case], scale: int = 1) -> LeetCodeProgram:
        """Return the program that calls a solution on the inputs of tests, with ``scale`` times the limits of a visible run."""
        return LeetCodeProgram(code, self.setup, self.function, tuple(test.call for test in tests), scale=scale)

    def testing(self, code: str) -> LeetCodeProgram:
        """Return the program that calls a solution's own ``run_tests``."""
        return LeetCodeProgram(code, self.setup, self.function, run_tests=True)


def call_text(args: Sequence[object], kwargs: Mapping[str, object]) -> str:
    """Return a call as the text for a program's process: JSON of encoded positional and named arguments."""
    return json.dumps([[encode(value) for value in args], {name: encode(value) for name, value in kwargs.items()}])


def make_test(call: Call, expected: object) -> Case:
    """Return a test of a parsed call. Two calls have the same ``key`` if their values are equal, including an int and a float."""
    values = [*call.args, *(call.kwargs[name] for name in sorted(call.kwargs))]
    text = json.dumps([_unified(value) for value in values])
    return Case(call_text(call.args, call.kwargs), hashlib.sha256(text.encode()).hexdigest(), expected)


def split_tests(tests: Sequence[Case]) -> tuple[tuple[Case, ...], tuple[Case, ...]]:
    """Split tests into visible and hidden tests by the hash of their inputs.

    The distinct inputs are ordered by their hash; the first fifth of them, at least one, is visible.

    Raises:
        ValueError: There are fewer than two different inputs, or one input has two expected values.
    """
    by_input: dict[str, Case] = {}
    for test in tests:
        known = by_input.setdefault(test.key, test)
        if json.dumps(_unified(known.expected)) != json.dumps(_unified(test.expected)):
            raise ValueError("two tests expect different values of the same input")
    if len(by_input) < 2:
        raise ValueError("a problem needs tests of at least two different inputs: one to show and one to hide")
    ordered = [by_input[key] for key in sorted(by_input)]
    count = max(1, round(VISIBLE_FRACTION * len(ordered)))
    return tuple(ordered[:count]), tuple(ordered[count:])


def load_tasks(path: Path) -> dict[str, LeetCodeTask]:
    """Load the problems of a JSONL file, or of `FILE` in a folder, by name (the id as text), in the file's order.

    Raises:
        OSError: There is no such file.
        ValueError: A row is not a valid problem; the message names file and line.
    """
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {file}: give a folder that holds {FILE}, or a JSONL file of problems")
    tasks: dict[str, LeetCodeTask] = {}

    def read(_index: int, row: object) -> None:
        task = read_task(row)
        if task.name in tasks:
            raise ValueError(f"problem {task.name} appears twice")
        tasks[task.name] = task

    read_lines(file, read)
    if not tasks:
        raise ValueError(f"{file} holds no problem: each line is a JSON object in the layout {' or '.join(LAYOUTS)}")
    return tasks


def read_task(row: object) -> LeetCodeTask:
    """Return the problem of a row in any layout. Raises ValueError in one sentence without file and line."""
    if not isinstance(row, dict):
        raise ValueError("a row is a JSON object")
    nearest = min(LAYOUTS.values(), key=lambda layout: len(layout.missing(row)))
    if missing := nearest.missing(row):
        raise ValueError(f"a row in the layout {nearest.name} needs {', '.join(missing)} too")
    return nearest.read(row)


@dataclass(frozen=True)
class RowLayout:
    """Fields of a row by their meaning for a `LeetCodeTask`. A dotted name is a field of a field."""

    name: str
    identity: str
    difficulty: str
    statement: str
    starter: str
    function: str
    setup: str
    solution: str
    tests: str
    read_tests: Callable[[Any, str], list[Case]]

    @property
    def fields(self) -> tuple[str, ...]:
        return (self.identity, self.difficulty, self.statement, self.starter, self.function, self.setup, self.solution, self.tests)

    def missing(self, row: Mapping[str, Any]) -> list[str]:
        return [field for field in self.fields if _get(row, field) is None]

    def read(self, row: Mapping[str, Any]) -> LeetCodeTask:
        identity = _get(row, self.identity)
        if type(identity) not in (int, str) or not str(identity):
            raise ValueError(f"{self.identity} must be a number or a text")
        texts = {field: _text(row, field) for field in self.fields[1:-1]}
        entry = texts[self.function]
        function = entry.removeprefix("Solution().")
        if function == entry or not function.isidentifier():
            raise ValueError(f"{self.function} must be Solution().NAME, not {entry!r}")
        for field in (self.setup, self.solution):
            _require_python(field, texts[field])
        visible, hidden = split_tests(self.read_tests(_get(row, self.tests), function))
        return LeetCodeTask(
            name=str(identity),
            difficulty=texts[self.difficulty].lower(),
            statement=statement_of(texts[self.statement]),
            starter=texts[self.starter].rstrip(),
            function=function,
            setup=texts[self.setup],
            solution=texts[self.solution].strip() + "\n",
            visible=visible,
            hidden=hidden,
        )


def statement_of(question: str) -> str:
    """Return the problem statement of a question, without the instructions for the answer."""
    return question.removeprefix("PROBLEM:\n").partition(STATEMENT_END)[0].strip()


def _get(row: Mapping[str, Any], field: str) -> Any:
    """Return a field of a row, None if it has none."""
    value: Any = row
    for part in field.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _text(row: Mapping[str, Any], field: str) -> str:
    value = _get(row, field)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{field} must be a text that is not empty")
    return value


def _require_python(field: str, code: str) -> None:
    """Raise ValueError for code that does not parse, because all programs of the problem would fail without an error."""
    try:
        ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{field} is not Python ({error})") from error


def _read_asserts(asserts: object, function: str) -> list[Case]:
    if not isinstance(asserts, list) or not all(isinstance(text, str) for text in asserts):
        raise ValueError("tests are a list of texts")
    tests = []
    for number, text in enumerate(asserts, 1):
        try:
            tests.append(read_test(*parse_assert(text, function)))
        except ValueError as error:
            raise ValueError(f"test {number}: {error}") from error
    return tests


def _read_check(text: object, function: str) -> list[Case]:
    if not isinstance(text, str):
        raise ValueError("test is the text of a function check(candidate)")
    return [read_test(*parsed) for parsed in parse_check(text, function)]


def read_test(call: Call, expected: object) -> Case:
    """Return `make_test` of values within the bounds of `values`, one by one and together; ValueError for other values."""
    each = [(value, "an argument") for value in (*call.args, *call.kwargs.values())]
    together = [(part, "the arguments together") for part in (list(call.args), dict(call.kwargs))]  # as the driver decodes them
    for value, what in (*each, *together, (expected, "what it expects")):
        encoded = encode(value)
        if isinstance(encoded, dict) and "opaque" in encoded:
            raise ValueError(f"{what} cannot be sent to a program ({encoded['opaque']})")
    return make_test(call, expected)


def _unified(value: object) -> object:
    """Return a value as JSON data in which equal values are identical: 2.0 is 2, and sets and dicts have one order."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return value if all(type(item) is int for item in value) else [_unified(item) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [_unified(item) for item in value]}
    if isinstance(value, set):  # texts have another hash, and so sets another order, in every process
        return {"set": sorted((_unified(item) for item in value), key=json.dumps)}
    if isinstance(value, dict):
        return {"dict": sorted(([_unified(key), _unified(inner)] for key, inner in value.items()), key=json.dumps)}
    if isinstance(value, Linked | Tree):
        return {type(value).__name__: _unified(value.values if isinstance(value, Linked) else value.levels)}
    return encode(value)


_PROJECT = RowLayout(
    name="project",
    identity="id",
    difficulty="difficulty",
    statement="question",
    starter="starter_code",
    function="func_name",
    setup="setup_code",
    solution="canonical_solution",
    tests="tests",
    read_tests=_read_asserts,
)
_DATASET = RowLayout(
    name="dataset",
    identity="question_id",
    difficulty="difficulty",
    statement="problem_description",
    starter="starter_code",
    function="entry_point",
    setup="prompt",
    solution="completion",
    tests="test",
    read_tests=_read_check,
)


LAYOUTS: Mapping[str, RowLayout] = MappingProxyType(
    {
        layout.name: layout
        for layout in (
            _PROJECT,
            replace(_PROJECT, name="rl", tests="gt_answer", starter="prompt_metadata.starter_code"),
            _DATASET,
        )
    }
)
