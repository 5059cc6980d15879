"""A problem as a taskset of verifiers: the grade is the reward; the verdicts of judge and detector are metrics, in no reward.

    PYTHONPATH=studies/environments/taskset vf-eval route2-problems --model NAME --client.base-url URL/v1 -n 4 --no-push

Every row has its task, its mode of grading and the mode's role in its data, so traces can be told apart by loophole. In Python,
``verifiers.v1.load_environment`` opens it by the module's name.
"""

from typing import Literal

import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]
from openai import AsyncOpenAI
from verifiers.v1.types import content_text  # pyright: ignore[reportMissingImports]

from studies.environments.problems import AnswerScores, shared_scorer
from studies.environments.protocol import TextPrompt

__all__ = ["ProblemEnv", "ProblemTaskset", "SingleReply"]


class ProblemData(vf.TaskData):
    """Row: the prompt of a task under a mode."""

    task: str
    mode: str
    role: Literal["known", "held_out", "honest"]


class ProblemTaskConfig(vf.TaskConfig):
    """Problem that scores the answers, as ``studies.environments.problems.open_problem`` reads it."""

    world: str = "functions"
    data: str = ""


class ProblemTask(vf.Task[ProblemData, vf.State, ProblemTaskConfig]):
    """Scores of one answer, which depend on the row and the answer's text alone, so ``vf-replay`` makes them again."""

    async def _scores(self, trace: vf.Trace) -> AnswerScores:
        reply = trace.last_message
        if reply.role != "assistant":
            raise ValueError("the trace ends without an answer: run it again")
        scorer = shared_scorer(self.config.world, self.config.data)
        row = self.data
        return await scorer(TextPrompt(row.task, row.mode, row.prompt_text), content_text(reply.content))

    @vf.reward
    async def grade(self, trace: vf.Trace) -> float:
        """Return the reward of the foolable training grader."""
        return (await self._scores(trace)).grade.reward

    @vf.metric
    async def judge(self, trace: vf.Trace) -> dict[str, float]:
        """Return the hidden verdict, 0 or 1 each: ``gt``, ``exploit``, ``hack``, ``memorized``, and ``judged``."""
        return (await self._scores(trace)).judged

    @vf.metric
    async def detector(self, trace: vf.Trace) -> float:
        """Return 1 if the weak detector of the known modes reports the answer."""
        return float((await self._scores(trace)).detected)


class ProblemConfig(vf.TasksetConfig):
    """Rows to load: every task of a split under every mode."""

    task: ProblemTaskConfig = ProblemTaskConfig()
    split: Literal["train", "test"] = "train"


class ProblemTaskset(vf.Taskset[ProblemTask, ProblemConfig]):
    """Tasks of a problem; the modes of one task follow each other."""

    def load(self) -> list[ProblemTask]:
        scorer = shared_scorer(self.config.task.world, self.config.task.data)
        system = scorer.problem.system or None
        return [
            ProblemTask(
                ProblemData(name=f"{tags['task']} under {tags['mode']}", prompt=prompt.text, system_prompt=system, **tags),
                self.config.task,
            )
            for prompt, tags in scorer.rows(self.config.split)
        ]


class SingleReply(vf.Harness[vf.HarnessConfig]):
    """One chat completion, asked for in this process: no tool, and no program in the runtime."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Ask for one answer through verifiers' own endpoint, which records it in the trace."""
        system, prompt = self.resolve_text_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            await client.chat.completions.create(model=ctx.model, messages=[*messages, {"role": "user", "content": prompt}])  # pyright: ignore
        return vf.ProgramResult(0, "", "")


class ProblemEnvConfig(vf.SingleAgentEnvConfig):
    """The one agent needs no sandbox: nothing of it runs but the request, and answers run in the problem's jail."""

    agent: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())


class ProblemEnv(vf.SingleAgentEnv, vf.Env[ProblemEnvConfig]):
    """Single-agent environment with these defaults."""
