"""Problems as tasksets of verifiers: the reward is the world's grade, whatever the judge says, and rows know their modes."""

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_problems import ROLES, Answer, again, documents, served_tiny

if importlib.util.find_spec("verifiers") is None:
    pytest.skip("verifiers is not installed here: make test-verifiers runs these tests", allow_module_level=True)
pytestmark = pytest.mark.study

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "studies/environments/taskset"


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]

    monkeypatch.syspath_prepend(FOLDER)
    return vf.load_environment(vf.resolve_env_config({"taskset": {"id": "route2-problems"}}))


def traced(task: Any, text: str) -> Any:
    """Return a scored trace in which the task was answered with ``text``."""
    import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]

    trace = vf.Trace(
        task=vf.TraceTask(type=type(task).__name__, data=task.data),
        agent=vf.AgentInfo(config=vf.AgentConfig()),
        nodes=[vf.MessageNode(message=vf.AssistantMessage(content=text), sampled=True)],
    )
    asyncio.run(task.score(trace))
    return trace


def agrees(reward: float, metrics: dict[str, float], answer: Answer) -> None:
    """Compare a reward and metrics with the scores of the same answer by the problem itself."""
    assert reward == answer.grade.reward
    memorized = float(answer.verdict.memorized)
    assert metrics == {**answer.metrics, "memorized": memorized, "judged": 1.0, "detector": float(answer.detected)}


def test_rewards_are_grades_and_no_judge_changes_them(environment: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from studies.environments.problems import shared_scorer

    tasks = {(task.data.task, task.data.mode): task for task in environment.taskset}
    answers = documents()
    assert {(answer.grade.passed, answer.verdict.gt) for answer in answers} == {(True, True), (True, False), (False, False)}
    for answer in answers:
        task = tasks[answer.prompt.task, answer.prompt.mode]
        assert (task.data.prompt, task.data.role) == (answer.prompt.text, ROLES[answer.prompt.mode])
        trace = traced(task, answer.text)
        agrees(trace.reward, trace.metrics, answer)
        assert set(trace.rewards) == {"grade"}

    scorer = shared_scorer("functions", "")
    honest = scorer._judge.judge

    def lying(*given: Any) -> list[Any]:
        return [replace(verdict, gt=not verdict.gt, hack=not verdict.hack) for verdict in honest(*given)]

    monkeypatch.setattr(scorer._judge, "judge", lying)
    scorer._scores.cache_clear()
    for answer in answers:
        trace = traced(tasks[answer.prompt.task, answer.prompt.mode], answer.text)
        assert trace.reward == answer.grade.reward
        assert trace.metrics["hack"] != answer.verdict.hack
    scorer._scores.cache_clear()


def test_the_command_runs_on_our_server(tmp_path: Path) -> None:
    with served_tiny(tmp_path / "tiny") as server:
        command = [
            *(
                str(Path(sys.executable).parent / "vf-eval"),
                "route2-problems",
                "--model",
                "tiny",
                "-n",
                "4",
                "--no-push",
                "--no-rich",
            ),
            *("--client.base-url", f"{server.url}/v1", "--sampling.max-tokens", "40", "--output-dir", str(tmp_path / "out")),
        ]
        env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{FOLDER}", "HOME": str(tmp_path)}
        subprocess.run(command, check=True, timeout=300, env=env, cwd=tmp_path, stdout=subprocess.DEVNULL)
    (file,) = tmp_path.glob("out/*/traces.jsonl")
    traces = [trace for line in file.read_text().splitlines() for trace in json.loads(line)["traces"]]
    rows = [trace["task"]["data"] for trace in traces]
    assert sorted((row["mode"], row["role"]) for row in rows) == sorted(ROLES.items())
    told = [trace["nodes"][-1]["message"].get("content") or "" for trace in traces]
    for trace, answer in zip(traces, again([(row["task"], row["mode"], text) for row, text in zip(rows, told)]), strict=True):
        assert trace["ok"]
        agrees(trace["rewards"]["grade"]["score"], trace["metrics"], answer)
