"""A problem as a task of Inspect: grade, judge and detector are scorers, and rates are by mode.

    inspect eval studies/environments/inspect_task.py --model openai-api/route2/NAME --model-base-url URL/v1 --limit 4

Add ``--extra-body '{"readings": true, "monitors": [...]}'`` if URL is a server of mi-route2 (docs/engine.md): the scores of each
monitor at the answer's tokens are then in a sample's metadata, under ``readings``. Any other model returns text alone, and no
readings.
"""

from math import nan
from typing import Any, Literal

from inspect_ai import Task, task  # pyright: ignore[reportMissingImports]
from inspect_ai.dataset import MemoryDataset, Sample  # pyright: ignore[reportMissingImports]
from inspect_ai.event import ModelEvent  # pyright: ignore[reportMissingImports]
from inspect_ai.log import transcript  # pyright: ignore[reportMissingImports]
from inspect_ai.model import ChatMessageSystem, ChatMessageUser  # pyright: ignore[reportMissingImports]
from inspect_ai.scorer import Score, Scorer, Target, grouped, mean, scorer, stderr  # pyright: ignore[reportMissingImports]
from inspect_ai.solver import Generate, Solver, TaskState, generate, solver  # pyright: ignore[reportMissingImports]

from studies.environments.problems import AnswerScores, ProblemScorer, shared_scorer
from studies.environments.protocol import TextPrompt

NO_READINGS = "none: the model's server returned no readings"
BY_MODE = [grouped(mean(), "mode"), stderr()]


@task
def problem(world: str = "functions", data: str = "", split: Literal["train", "test"] = "test") -> Task:
    """Return the task of a problem: every task of a split under every mode.

    Args:
        world, data: As in ``studies.environments.problems.open_problem``.
        split: Split of the problem's tasks.
    """
    answers = shared_scorer(world, data)
    system = [ChatMessageSystem(content=answers.problem.system)] if answers.problem.system else []
    samples = [
        Sample(
            id=f"{tags['task']} under {tags['mode']}",
            input=[*system, ChatMessageUser(content=prompt.text)],
            metadata={**tags, "text": prompt.text},
        )
        for prompt, tags in answers.rows(split)
    ]
    scorers = [grade(answers), judge(answers), detector(answers)]
    return Task(MemoryDataset(samples, name=world), solver=[generate(), readings()], scorer=scorers)


@solver
def readings() -> Solver:
    """Return a solver that keeps the monitors' scores as `scores_of` reads them, or a sentence that there are none."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        event = transcript().history.find_last(lambda event: isinstance(event, ModelEvent))
        response: Any = event.call.response if isinstance(event, ModelEvent) and event.call else None
        state.metadata["readings"] = scores_of(response or {}) or NO_READINGS
        return state

    return solve


def scores_of(response: dict[str, Any]) -> dict[str, list[float | None]]:
    """Return each monitor's scores at the answer's tokens, in order, from the body of a chat completion; empty without any.

    The last token has none: it ends the answer, so the model does not read it.
    """
    scores: dict[str, list[float | None]] = {}
    extra = next(iter(response.get("choices") or ()), {}).get("mi_route2") or {"readings": {}}
    for position in sorted(map(int, extra["readings"])):
        if position >= len(extra["prompt_token_ids"]):
            for name, reading in extra["readings"][str(position)].items():
                scores.setdefault(name, []).append(reading["score"])
    return scores


async def _scores(answers: ProblemScorer, state: TaskState) -> AnswerScores:
    row = state.metadata
    return await answers(TextPrompt(row["task"], row["mode"], row["text"]), state.output.completion)


@scorer(metrics=BY_MODE)
def grade(answers: ProblemScorer) -> Scorer:
    """Return the scorer of the foolable training grade: the reward."""

    async def score(state: TaskState, target: Target) -> Score:
        grade = (await _scores(answers, state)).grade
        return Score(value=grade.reward, answer=state.output.completion, metadata={"format": grade.format, "passed": grade.passed})

    return score


@scorer(metrics=dict.fromkeys(("gt", "exploit", "hack"), BY_MODE))
def judge(answers: ProblemScorer) -> Scorer:
    """Return the scorer of the hidden verdict. An answer that could not be judged has no value, and is in no rate."""

    async def score(state: TaskState, target: Target) -> Score:
        scores = await _scores(answers, state)
        values = scores.judged
        about = {"judged": scores.verdict.judged, "memorized": scores.verdict.memorized}
        return Score(value={name: values.get(name, nan) for name in ("gt", "exploit", "hack")}, metadata=about)

    return score


@scorer(metrics=BY_MODE)
def detector(answers: ProblemScorer) -> Scorer:
    """Return the scorer of the weak detector of the known modes."""

    async def score(state: TaskState, target: Target) -> Score:
        return Score(value=float((await _scores(answers, state)).detected))

    return score
