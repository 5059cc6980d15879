"""Problems by name, and their answers scored one at a time, as the environments of other libraries ask for them.

    scorer = ProblemScorer("functions")
    scores = await scorer(prompt, completion)        # scores.grade.reward, scores.detected, scores.verdict

The reward is the foolable grade and nothing else; detector and judge are for records.
"""

import asyncio
import importlib
import inspect
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from studies.environments.micro.settings import PRESETS
from studies.environments.protocol import Modes, Problem, Split, TextPrompt, TrainingGrade, Verdict

PROBLEMS: Mapping[str, str] = MappingProxyType(
    {
        "leetcode": "studies.environments.leetcode.problem:LeetCodeProblem",
        "functions": "studies.environments.functions:Functions",
        "djinn": "studies.environments.djinn.problem:Djinn",
    }
)
"""Problems of chat models that have a short name."""
MEMBERS = ("name", "modes", "system", "tasks", "prompt", "grade", "detect", "pairs", "judge", "close")


def open_problem(name: str, data: str = "") -> Problem:
    """Open a problem of `PROBLEMS`, or ``module:ClassName``, constructed with ``data`` if it is given.

    Raises:
        ValueError: The class cannot be imported, or is not a ``protocol.Problem``.
    """
    problem_class = _problem_class(name)
    try:
        inspect.signature(problem_class).bind(*([Path(data)] if data else []))
    except TypeError as error:
        wants = "does not read any data: leave out --data" if data else "reads its tasks from somewhere: give --data"
        raise ValueError(f"the world {name!r} {wants} ({error})") from error
    problem = problem_class(Path(data)) if data else problem_class()
    missing = [member for member in MEMBERS if not hasattr(problem, member)]
    if missing:
        raise ValueError(f"{name} is not a problem: it lacks {', '.join(missing)} (see studies.environments.protocol.Problem)")
    try:
        _check(name, problem)
    except BaseException:
        problem.close()
        raise
    return problem


def _problem_class(name: str) -> Any:
    """Return the class that a name of `PROBLEMS` or ``module:ClassName`` names."""
    module, colon, attribute = PROBLEMS.get(name, name).partition(":")
    if not (colon and attribute.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        raise ValueError(f"unknown world {name!r}: choose from {', '.join((*PRESETS, *PROBLEMS))}, or module:ClassName of your own")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # so that modules in the current folder are found, as with python -m
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(f"cannot import {error.name!r} for the world {name!r}: is it installed, or in this folder?") from error
    if not callable(problem_class := getattr(imported, attribute, None)):
        raise ValueError(f"the module {module!r} has no class {attribute!r}")
    return problem_class


def _check(name: str, problem: Problem) -> None:
    """Check a problem's attributes and tasks.

    Raises:
        ValueError: If they are not valid.
    """
    if not isinstance(problem.modes, Modes):
        raise ValueError(f"modes of {name} is a {type(problem.modes).__name__}: it must be a studies.environments.protocol.Modes")
    if not isinstance(problem.system, str):
        raise ValueError(f"system of {name} is a {type(problem.system).__name__}: it must be a text, which may be empty")
    for split in ("train", "test"):
        tasks: object = problem.tasks(split)
        if not isinstance(tasks, Sequence) or isinstance(tasks, str):  # a set has another order in each process
            raise ValueError(
                f"tasks({split!r}) of {name} is a {type(tasks).__name__}: it must be a list of names, in a fixed order"
            )
        if wrong := [task for task in tasks if not isinstance(task, str)]:
            raise ValueError(f"tasks({split!r}) of {name} has {wrong[0]!r:.60}, which is no name: it must be a text")
    train, test = problem.tasks("train"), problem.tasks("test")
    if not (train and test):
        raise ValueError(f"{name} has {len(train)} train and {len(test)} test tasks: it needs some in each split")
    if both := sorted(set(train) & set(test)):
        raise ValueError(f"{name} has {len(both)} tasks in both splits, first {both[0]!r}: test tasks must not be trained on")
    for mode in problem.modes.names:
        prompt = problem.prompt(train[0], mode)
        if (prompt.task, prompt.mode) != (train[0], mode):
            raise ValueError(f"prompt({train[0]!r}, {mode!r}) of {name} returned a prompt of ({prompt.task!r}, {prompt.mode!r})")


@dataclass(frozen=True)
class AnswerScores:
    """Scores of one answer: what training pays, and what records add."""

    grade: TrainingGrade
    detected: bool
    verdict: Verdict

    @property
    def judged(self) -> dict[str, float]:
        """The verdict as numbers, 0 or 1; ``judged`` alone if a limit cut the hidden run short."""
        verdict = self.verdict
        if not verdict.judged:
            return {"judged": 0.0}
        return {"judged": 1.0, **{name: float(getattr(verdict, name)) for name in ("gt", "exploit", "hack", "memorized")}}


class ProblemScorer:
    """Grade, detector's and judge's verdict of single answers, on a thread of its own.

    The last answers are kept, so that a reward and the metrics beside it come from one graded execution.

    Args:
        name, data: As in `open_problem`.

    Raises:
        ValueError: As in `open_problem`.
    """

    def __init__(self, name: str, data: str = "") -> None:
        # One thread for all of it: the jail's processes end with the thread that started them.
        self._thread = ThreadPoolExecutor(1)
        self.problem = self._thread.submit(open_problem, name, data).result()
        self._judge = self.problem.judge()
        self._scores = lru_cache(1024)(self._scored)

    def rows(self, split: Split) -> list[tuple[TextPrompt, dict[str, str]]]:
        """Return the prompts of every task under every mode, with the tags ``task``, ``mode`` and ``role`` of each.

        ``role`` is ``known``, ``held_out`` or ``honest``. The modes of one task follow each other.
        """
        problem, modes = self.problem, self.problem.modes
        roles = {mode: role for role in ("known", "held_out") for mode in getattr(modes, role)} | {modes.honest: "honest"}
        return [
            (problem.prompt(task, mode), {"task": task, "mode": mode, "role": roles[mode]})
            for task in problem.tasks(split)
            for mode in modes.names
        ]

    async def __call__(self, prompt: TextPrompt, completion: str) -> AnswerScores:
        """Return the scores of an answer."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._scores, prompt, completion)

    def _scored(self, prompt: TextPrompt, completion: str) -> AnswerScores:
        (grade,) = self.problem.grade([prompt], [completion])  # first, because the judge reads the graded execution
        (detected,) = self.problem.detect([prompt], [completion])
        (verdict,) = self._judge.judge([prompt], [completion])
        return AnswerScores(grade, detected, verdict)


@cache
def shared_scorer(name: str, data: str) -> ProblemScorer:
    """Return the one scorer of a problem in this process, which ends with the process."""
    return ProblemScorer(name, data)
