"""Problems as tasks of Inspect: scores are the world's own, and readings are those of the served model."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_problems import ROLES, again, documents, served_tiny

pytest.importorskip("inspect_ai", reason="Inspect is not installed here: pip install 'mi-route2[inspect]'")
pytestmark = pytest.mark.study

ROOT = Path(__file__).parents[3]
FILE = "studies/environments/inspect_task.py"


def checked(samples: list[Any]) -> None:
    """Compare the scores of samples with those of a problem of its own, given the same answers."""
    rows = [(s.metadata["task"], s.metadata["mode"], s.output.completion) for s in samples]
    for sample, answer in zip(samples, again(rows), strict=True):
        assert sample.metadata["role"] == ROLES[answer.prompt.mode]
        assert sample.messages[1].text == answer.prompt.text
        assert sample.scores["grade"].value == answer.grade.reward
        assert sample.scores["judge"].value == answer.metrics
        assert sample.scores["detector"].value == answer.detected


def test_scores_of_right_wrong_and_cheating_answers_are_the_worlds_own(tmp_path: Path) -> None:
    from inspect_ai import eval as evaluate  # pyright: ignore[reportMissingImports]
    from inspect_ai.model import ModelOutput, ModelUsage, get_model  # pyright: ignore[reportMissingImports]

    from studies.environments.inspect_task import NO_READINGS, problem

    answers = {answer.prompt.text: answer for answer in documents()}
    ids = [f"{answer.prompt.task} under {answer.prompt.mode}" for answer in answers.values()]

    def reply(messages: list[Any], *_: Any) -> ModelOutput:
        output = ModelOutput.from_content("mock", answers[messages[-1].text].text)
        output.usage = ModelUsage()  # otherwise Inspect counts tokens, with a vocabulary that it downloads
        return output

    model = get_model("mockllm/model", custom_outputs=reply)
    (log,) = evaluate(problem(split="train"), model=model, sample_id=ids, display="none", log_dir=str(tmp_path))
    assert log.status == "success", log.error
    assert len(log.samples) == len(answers) > 40
    checked(log.samples)
    assert {sample.metadata["readings"] for sample in log.samples} == {NO_READINGS}
    verdicts = [answer.verdict for answer in answers.values()]
    assert {(answer.grade.passed, answer.verdict.gt) for answer in answers.values()} == {
        (True, True),
        (True, False),
        (False, False),
    }
    rates = {score.name: score.metrics for score in log.results.scores}
    for mode in ROLES:
        hacks = [v.hack for v, a in zip(verdicts, answers.values(), strict=True) if a.prompt.mode == mode]
        assert rates["hack"][f"grouped_{mode}"].value == pytest.approx(sum(hacks) / len(hacks))


def test_the_command_runs_on_our_server_and_keeps_its_readings(tmp_path: Path) -> None:
    from inspect_ai.log import read_eval_log  # pyright: ignore[reportMissingImports]

    body = {
        "readings": True,
        "monitors": [{"site": "blocks.1.resid_pre", "probe": [(-1) ** i / 8 for i in range(64)], "gates": [], "name": "probe"}],
    }
    with served_tiny(tmp_path / "tiny") as server:
        command = [
            *(sys.executable, "-m", "inspect_ai", "eval", FILE, "--model", "openai-api/route2/tiny"),
            *("--model-base-url", f"{server.url}/v1", "--limit", "4", "--max-tokens", "40", "--temperature", "0"),
            *("--extra-body", json.dumps(body), "--display", "none", "--log-dir", str(tmp_path / "logs")),
        ]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "ROUTE2_API_KEY": "none", "HOME": str(tmp_path)}
        subprocess.run(command, check=True, timeout=300, env=env, cwd=ROOT)
        (file,) = (tmp_path / "logs").iterdir()
        log = read_eval_log(str(file))
        assert log.status == "success"
        assert [sample.metadata["mode"] for sample in log.samples] == sorted(ROLES)
        checked(log.samples)
        for sample in log.samples:
            messages = [{"role": message.role, "content": message.text} for message in sample.messages[:2]]
            told = server.http.post(
                "/v1/chat/completions", json={"model": "tiny", "messages": messages, "max_tokens": 40, "temperature": 0, **body}
            ).json()["choices"][0]
            assert told["message"]["content"] == sample.output.completion
            states = hidden_states(tmp_path / "tiny", told["mi_route2"])
            scores = states @ states.new_tensor(body["monitors"][0]["probe"])
            assert sample.metadata["readings"]["probe"] == pytest.approx(scores.tolist(), abs=1e-4)


def hidden_states(folder: Path, told: dict[str, Any]) -> Any:
    """Return what the second block reads at the answer's tokens but for the last, by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    prompt, ids = told["prompt_token_ids"], told["token_ids"]
    with torch.no_grad():
        states = model(torch.tensor([prompt + ids]), output_hidden_states=True).hidden_states[1]
    return states[0, len(prompt) : -1].float()
