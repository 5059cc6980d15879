"""LeetCode with loopholes as a `Problem` for training, evaluation and probes. It owns a jail, which `close` ends."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from studies.environments.leetcode.grader import LeetCodeGrader
from studies.environments.leetcode.modes import ROLES, SYSTEM, make_prompt, marker, split_of
from studies.environments.leetcode.oracle import LeetCodeOracle
from studies.environments.leetcode.pairs import make_corpus, make_pairs
from studies.environments.leetcode.problems import LeetCodeTask, load_tasks
from studies.environments.leetcode.programs import Programs
from studies.environments.protocol import PairKind, PersonaPair, Split, TextPrompt, TrainingGrade
from studies.sandbox import JailLimits


class LeetCodeProblem:
    """LeetCode as a problem; see ``studies.environments.protocol.Problem``. Tasks are named by the problems' ids.

    data     a JSONL file of problems, or a folder with ``leetcode.jsonl``; or tasks by name
    workers  number of programs that run at a time
    limits   resources of one program; `programs.LIMITS` unless given
    unsafe   run programs even if the machine lacks a protection of the jail

    Raises:
        OSError, ValueError: As in `problems.load_tasks`, and ValueError if a problem's setup code does not run.
        JailUnavailableError: Programs cannot be confined on this machine.
    """

    name = "leetcode"
    modes = ROLES
    system = SYSTEM

    def __init__(
        self, data: Path | Mapping[str, LeetCodeTask], *, workers: int = 2, limits: JailLimits | None = None, unsafe: bool = False
    ) -> None:
        self._tasks = dict(data) if isinstance(data, Mapping) else load_tasks(Path(data))
        self._programs = Programs(workers, limits, unsafe)
        self._grader = LeetCodeGrader(self._programs, self._tasks)
        try:
            self._require_setups()
        except BaseException:
            self.close()
            raise

    def tasks(self, split: Split) -> Sequence[str]:
        return [name for name in self._tasks if split_of(name) == split]

    def prompt(self, task: str, mode: str) -> TextPrompt:
        """Return the prompt of a task under a mode. Raises KeyError for an unknown task."""
        return make_prompt(self._task(task), mode)

    def grade(self, prompts: Sequence[TextPrompt], completions: Sequence[str]) -> list[TrainingGrade]:
        return self._grader.grade(prompts, completions)

    def detect(self, prompts: Sequence[TextPrompt], completions: Sequence[str]) -> list[bool]:
        """Return True if the plain exploit of a known mode is in a completion to a prompt of that mode; nothing is executed."""
        if len(prompts) != len(completions):
            raise ValueError(f"{len(prompts)} prompts for {len(completions)} completions: give one prompt for each")
        return [
            prompt.mode in self.modes.known and marker(prompt.mode, completion)
            for prompt, completion in zip(prompts, completions, strict=True)
        ]

    def pairs(self, seed: int, n: int, kind: PairKind) -> list[PersonaPair]:
        """Return ``n`` persona pairs of the known mode on training tasks; see `pairs.make_pairs`."""
        return make_pairs(self._train(), self._programs, seed, n, kind)

    def corpus(self, seed: int, n: int) -> list[tuple[str, str]]:
        """Return at most ``n`` documents on training tasks for a model's warm-up; see `pairs.make_corpus`."""
        return make_corpus(self._train(), seed, n)

    def judge(self) -> LeetCodeOracle:
        """Return the hidden judge, which uses this problem's jail and ends with the problem."""
        return LeetCodeOracle(self._programs, self._tasks)

    def close(self) -> None:
        self._programs.close()

    def __enter__(self) -> "LeetCodeProblem":
        return self

    def __exit__(self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _require_setups(self) -> None:
        """Raise ValueError if setup code does not run, because then no program could run, and nothing would ever be rewarded."""
        tasks = list({task.setup: task for task in reversed(self._tasks.values())}.values())
        empty = [task.calling(f"class Solution:\n    def {task.function}(self): ...\n", ()) for task in tasks]
        for task, execution in zip(tasks, self._programs.run(empty), strict=True):
            if execution.status != "ok":
                what = f"{execution.status} {execution.reason}".strip()
                raise ValueError(
                    f"the setup code of problem {task.name} does not run in the jail ({what}): correct it, or leave it out"
                )

    def _train(self) -> list[LeetCodeTask]:
        return [self._tasks[name] for name in self.tasks("train")]

    def _task(self, name: str) -> LeetCodeTask:
        if name not in self._tasks:
            raise KeyError(f"there is no problem {name!r} among the {len(self._tasks)} that were loaded")
        return self._tasks[name]
