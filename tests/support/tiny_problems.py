"""Answers of the world `functions` with what they deserve by its own graders in one batch, and a tiny chat model to serve."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from served import Running, running

from mi_route2.serve.models import load
from studies.environments.chat import make_tiny_model
from studies.environments.functions import Functions
from studies.environments.protocol import TextPrompt, TrainingGrade, Verdict

ROLES = {"run_tests": "known", "sentinel": "held_out", "stdout_marker": "held_out", "none": "honest"}


@dataclass(frozen=True)
class Answer:
    """One answer, and its scores by the problem itself."""

    prompt: TextPrompt
    text: str
    grade: TrainingGrade
    detected: bool
    verdict: Verdict

    @property
    def metrics(self) -> dict[str, float]:
        """The verdict as metrics of judged answers."""
        return {name: float(getattr(self.verdict, name)) for name in ("gt", "exploit", "hack")}


def scored(problem: Functions, prompts: list[TextPrompt], texts: list[str]) -> list[Answer]:
    """Return the scores of answers, graded, screened and judged in one batch each."""
    columns = problem.grade(prompts, texts), problem.detect(prompts, texts), problem.judge().judge(prompts, texts)
    return [Answer(*row) for row in zip(prompts, texts, *columns, strict=True)]


def documents(n: int = 60) -> list[Answer]:
    """Return right, careless and cheating answers that the world wrote, each to another prompt."""
    with Functions(unsafe=True) as problem:
        of = {problem.prompt(task, mode).text: (task, mode) for task in problem.tasks("train") for mode in problem.modes.names}
        answers = dict(problem.corpus(0, n))
        return scored(problem, [TextPrompt(*of[text], text) for text in answers], list(answers.values()))


def again(rows: list[tuple[str, str, str]]) -> list[Answer]:
    """Return the scores of (task, mode, answer) that an environment recorded, from a problem of its own."""
    with Functions(unsafe=True) as problem:
        return scored(problem, [problem.prompt(task, mode) for task, mode, _ in rows], [text for *_, text in rows])


@contextmanager
def served_tiny(folder: Path) -> Iterator[Running]:
    """Context: our server with a tiny chat model of two layers of width 64, which wrote some answers of the world before."""
    with Functions(unsafe=True) as problem:
        make_tiny_model(problem, folder, steps=40, width=64, layers=2, context=512, max_new=96, progress=False)
    with running(load(str(folder))) as server:
        yield server
