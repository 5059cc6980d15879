"""Recorded rollouts of a real model under graders with loopholes, with the problems that they answer.

A row of the file has pool, problem_id, mode, hacked, gt_pass, prompt (a chat as text, or null) and completion, but not the
problem's tests. So a rollout's `LeetCodeTask` is made from the first of these that is available:

    tests      the problem by its id, from a file of problems
    examples   the worked examples in its prompt, or in another rollout's prompt of the same problem, as tests
    signature  a made-up call according to the parameters' annotations, which runs the program and judges nothing
"""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from mi_route2.validation import read_lines
from studies.environments.leetcode.expressions import HELPERS, Call, parse_call, parse_value
from studies.environments.leetcode.modes import MODES
from studies.environments.leetcode.problems import Case, LeetCodeTask, make_test, statement_of
from studies.environments.leetcode.programs import readable
from studies.environments.leetcode.values import Opaque

FILE = "rollouts.jsonl"
Evidence = Literal["tests", "examples", "signature"]

_FIELDS: Mapping[str, tuple[type, ...]] = {
    "pool": (str,),
    "problem_id": (int, str),
    "mode": (str,),
    "hacked": (bool,),
    "gt_pass": (bool,),
    "prompt": (str, type(None)),
    "completion": (str,),
}
_USER, _END = "<|im_start|>user\n", "<|im_end|>"
_FUNCTION = re.compile(r"should be a method of the class Solution called (\w+)")
_STARTER = re.compile(r"```python\n((?:(?!```).)*?)\n[ \t]*# Add your code here\n```", re.DOTALL)
# possessive groups (++) that end at the next head: one walk over the text, whatever it repeats
_EXAMPLE = re.compile(r"^Input:((?:(?!^(?:Input|Output):)[\s\S])++)^Output:\s*+(?!^(?:Input|Output):)(.+)", re.MULTILINE)


@dataclass(frozen=True)
class Rollout:
    """One completion and its labels. ``index`` is its line in the file, from 0."""

    index: int
    pool: str
    problem: str
    mode: str
    hacked: bool
    gt_pass: bool
    prompt: str | None
    completion: str


def load_rollouts(path: Path) -> list[Rollout]:
    """Load the rollouts of a JSONL file, or of `FILE` in a folder.

    Raises:
        OSError: There is no such file.
        ValueError: A row is not valid; the message names file and line.
    """
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {file}: give a folder that holds {FILE}, or a JSONL file of rollouts")
    rollouts = read_lines(file, _read)
    if not rollouts:
        raise ValueError(f"{file} holds no rollout: each line is a JSON object with {', '.join(_FIELDS)}")
    return rollouts


def _read(index: int, row: Any) -> Rollout:
    if not isinstance(row, dict):
        raise ValueError("a row is a JSON object")
    for name, kinds in _FIELDS.items():
        if name not in row or type(row[name]) not in kinds:
            raise ValueError(f"{name} is {' or '.join(kind.__name__ for kind in kinds)}")
    if row["mode"] not in MODES:
        raise ValueError(f"unknown mode {row['mode']!r}: choose from {', '.join(MODES)}")
    fields = {name: row[name] for name in _FIELDS if name != "problem_id"}
    return Rollout(index=index, problem=str(row["problem_id"]), **fields)


def tasks_of(rollouts: Sequence[Rollout], problems: Mapping[str, LeetCodeTask], setup: str) -> list[tuple[LeetCodeTask, Evidence]]:
    """Return the task that each rollout answers, and the source of its tests; ``setup`` is used for unknown problems."""
    prompts = {rollout.problem: rollout.prompt for rollout in rollouts if rollout.prompt is not None}
    tasks: list[tuple[LeetCodeTask, Evidence]] = []
    for rollout in rollouts:
        known = problems.get(rollout.problem)
        prompt = rollout.prompt or prompts.get(rollout.problem)
        shown = None if prompt is None else prompt_task(rollout.problem, prompt, setup)
        if known is not None and f"def {known.function}(" in rollout.completion:  # ids of some problems differ between releases
            tasks.append((known, "tests"))
        elif shown is not None and shown.hidden:
            tasks.append((shown, "examples"))
        else:
            tasks.append((signature_task(rollout, setup), "signature"))
    return tasks


def prompt_task(name: str, prompt: str, setup: str) -> LeetCodeTask | None:
    """Return the problem of a prompt with its worked examples as visible and hidden tests; None if it names no method."""
    chat, end, _ = prompt.partition(_USER)[2].partition(_END)
    question = chat if end else prompt
    function, starter = _FUNCTION.search(question), _STARTER.search(question)
    if function is None or starter is None:
        return None
    text = starter[1]
    tests = tuple(_examples(question, function[1], _signature(text, function[1])))
    return LeetCodeTask(name, "", statement_of(question), text, function[1], setup, "", tests, tests)


def signature_task(rollout: Rollout, setup: str) -> LeetCodeTask:
    """Return a task whose only test calls the completion's own method, with an expected value that nothing equals."""
    code = "\n".join(line for line in rollout.completion.splitlines() if not line.startswith("```"))
    methods = re.findall(r"^[ \t]+def ((?!__|run_tests\b)\w+)\(", code, re.MULTILINE)
    function = methods[0] if methods else "solve"
    starter = "class Solution:\n" + (_definition(code, function) or f"    def {function}(self):")
    arguments = _signature(starter, function)
    parameters = [] if arguments is None else arguments.args.args[1:]
    kwargs = {parameter.arg: _made_up(parameter.annotation) for parameter in parameters}
    test = make_test(Call((), kwargs), Opaque("unknown"))
    return LeetCodeTask(rollout.problem, "", "", starter, function, setup, "", (test,), (test,))


def _definition(code: str, function: str) -> str:
    """Return a method's head up to the first colon after its first closing bracket; "" without one. Linear in the text."""
    start = re.search(rf"^[ \t]+def {function}\(", code, re.MULTILINE)
    if start is None:
        return ""
    rest = code[start.start() :]
    head, bracket, rest = rest.partition(")")
    arrow, colon, _ = rest.partition(":")
    return f"{head}{bracket}{arrow}{colon}" if bracket and colon else ""


def _signature(starter: str, function: str) -> ast.FunctionDef | None:
    """Return the method of a starter code, whose body is missing; None if there is none, or the text is not `readable`."""
    if not readable(starter):
        return None
    try:
        tree = ast.parse(starter.rstrip() + " pass\n")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return next((node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == function), None)


def _examples(question: str, function: str, signature: ast.FunctionDef | None) -> Iterator[Case]:
    """Yield worked examples as tests; those that are not a simple call and value, or not `readable`, are left out."""
    for arguments, result in _EXAMPLE.findall(question):
        if not (readable(arguments) and readable(result)):
            continue
        try:
            call, expected = parse_call(arguments.replace("\n", " ")), parse_value(result)
            if signature is not None:
                kinds = {parameter.arg: parameter.annotation for parameter in signature.args.args}
                named = {name: _as_annotated(value, kinds.get(name)) for name, value in call.kwargs.items()}
                call, expected = replace(call, kwargs=named), _as_annotated(expected, signature.returns)
            test = make_test(call, expected)
        except ValueError:
            continue
        yield test


def _as_annotated(value: object, annotation: ast.expr | None) -> object:
    """Convert a list to linked nodes or a tree if the annotation says so, because statements print nodes as lists."""
    kind = _printed(annotation)
    if isinstance(value, list) and "List[" not in kind:
        if "TreeNode" in kind:
            return HELPERS["tree_node"](value)
        if "ListNode" in kind:
            return HELPERS["list_node"](value)
    return value


_MADE_UP: Mapping[str, object] = {
    "int": 3,
    "float": 1.5,
    "bool": True,
    "str": "abca",
    "List[int]": [3, 1, 2],
    "List[str]": ["ab", "b"],
    "List[List[int]]": [[1, 2], [3, 4]],
    "List[List[str]]": [["a", "b"], ["b", "a"]],
}


def _made_up(annotation: ast.expr | None) -> object:
    return _MADE_UP.get(_printed(annotation), [3, 1, 2])


def _printed(annotation: ast.expr | None) -> str:
    """Return an annotation as text; "" without one, and if it is nested too deeply or has a value that cannot be printed."""
    try:
        return "" if annotation is None else ast.unparse(annotation)
    except (RecursionError, ValueError):
        return ""
