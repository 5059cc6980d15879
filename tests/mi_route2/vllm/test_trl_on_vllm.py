"""TRL's GRPO with vLLM in its process: completions of every step come from both adapters as they are in that step."""

import gc
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed here: make test-vllm installs it beside vLLM")
if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here: make test-vllm runs these tests", allow_module_level=True)

import tiny_trl
from datasets import Dataset
from families import VOCAB, move_all
from safetensors.torch import load_file
from tiny_trl import TEXTS, make_trainer, tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config
from vllm import SamplingParams

from mi_route2 import MaskSpec
from mi_route2.rollouts import Rollouts
from mi_route2.vllm.sampler import PolicyLora

ROOT = Path(__file__).parents[3]
SUPPORT = ROOT / "tests" / "support"
CLOSE = 2e-5
TEMPERATURE = 0.8
ENDS = [2, *range(20, 30)]
"""Tokens that end a completion, as a script has set them."""
FORMER = range(30, 40)
"""Tokens that end one according to the folder, beside the first of those."""


SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 128, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
"""The heads of the other tests' models are too small for vLLM's attention."""


@pytest.fixture(autouse=True)
def little_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")


@pytest.fixture(scope="module", params=[Qwen3Config, LlamaConfig])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a base model and its tokenizer."""
    folder = tmp_path_factory.mktemp("base")
    model: Any = AutoModelForCausalLM.from_config(request.param(**SIZES), dtype=torch.float32)
    model.generation_config.eos_token_id = [2, *FORMER]
    move_all(model, scale=0.05).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def trainer_of(base: Path, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Make a trainer; its vLLM, which holds a gigabyte and which TRL never ends, is ended after the test."""
    made: list[Any] = []

    def make(**settings: Any) -> Any:
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        model.generation_config.eos_token_id = ENDS
        usual = {"use_vllm": True, "vllm_max_model_length": 64, "temperature": TEMPERATURE}
        made.append(make_trainer(tmp_path, MaskSpec(score="grad"), model=model, **({"sampled": True} | usual | settings))[0])
        return made[-1]

    yield make
    for trainer in made:
        generation = trainer.vllm_generation
        generation._lora.close()
        generation.llm.llm_engine.engine_core.shutdown()
        del generation._lora, generation.llm, generation
    made.clear()
    gc.collect()


class Watch:
    """Prompts, completions and log-probabilities of each call of vLLM, with the adapters' tensors at that time."""

    def __init__(self, trainer: Any, monkeypatch: pytest.MonkeyPatch):
        self.gaps: list[float] = []
        self.modes: list[str] = []
        self.completions: list[list[int]] = []
        self.moved: list[float] = []
        before: dict[str, torch.Tensor] = {}
        generate = trainer.vllm_generation.generate

        def seen(prompts: Any, *given: Any, **named: Any) -> Any:
            found = generate(prompts, *given, **named)
            _, completions, logprobs, _ = found
            rows = Rollouts.from_lists(prompts, completions, 0)
            self.completions += completions
            with torch.no_grad():
                logits = trainer.model(rows.tokens).logits / TEMPERATURE
            theirs = torch.tensor([kept[0] for row in logprobs for kept in row])
            self.gaps.append(float((rows.logprobs(logits)[rows.predictors] - theirs).abs().max()))
            self.modes.append(trainer.adapters.mode)
            now = {name: value.clone() for name, value in trainer.adapters.tensors().items()}
            self.moved.append(max((float((now[n] - before[n]).abs().max()) for n in before), default=0.0))
            before.update(now)
            return found

        monkeypatch.setattr(trainer.vllm_generation, "generate", seen)


def test_each_step_samples_both_adapters_as_they_are_and_ships_the_kept_one(
    trainer_of: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation in between samples the deployed model, and the next step both adapters again."""
    evaluated = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
    trainer = trainer_of(steps=3, **evaluated, own={"eval_dataset": Dataset.from_dict({"prompt": TEXTS[:2]})})
    assert torch.initial_seed() == trainer.args.seed  # from which vLLM draws, and not from a seed of its own
    assert (
        not {"WORLD_SIZE", "MASTER_PORT"} & os.environ.keys()
    )  # from which a later trainer would conclude that it is one of several
    watch = Watch(trainer, monkeypatch)
    trainer.train()
    assert watch.modes.count("full") == 3
    assert "deployed" in watch.modes
    assert max(watch.gaps) <= CLOSE
    assert not any(token in ENDS for row in watch.completions for token in row[:-1])
    assert any(row[-1] in ENDS[1:] for row in watch.completions)
    assert any(token in FORMER for row in watch.completions for token in row[:-1])
    assert sum(gap > 1e-3 for gap in watch.moved) >= 2  # the adapters did move between samplings
    logs = [log for log in trainer.state.log_history if "sampling/sampling_logp_difference/max" in log]
    assert len(logs) >= 3
    assert max(log["sampling/sampling_logp_difference/max"] for log in logs) <= CLOSE
    assert all(abs(log["sampling/importance_sampling_ratio/max"] - 1) <= CLOSE for log in logs)
    trainer.save_model(str(tmp_path / "deployed"))
    assert not list((tmp_path / "deployed").glob("HOLDS*"))
    written = load_file(tmp_path / "deployed" / "adapter_model.safetensors")
    assert {value.shape[0] for name, value in written.items() if "lora_A" in name} == {3}  # the kept rank alone
    kept = trainer.adapters.tensors(quarantine=False)
    total = sum(float(value.double().sum()) for name, value in kept.items())
    assert sum(float(value.double().sum()) for value in written.values()) == pytest.approx(total, rel=1e-9)


def test_a_rollout_func_samples_the_adapters_as_they_are_switched(
    trainer_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without log-probabilities of its own nothing is compared. An evaluation in between, at the same step, switches adapters."""
    gaps: list[tuple[str, float]] = []

    def rollouts(prompts: list[str], trainer: Any) -> dict[str, Any]:
        llm, how = trainer.vllm_generation.llm, SamplingParams(max_tokens=6, logprobs=0)
        rows = trainer.processing_class(list(prompts))["input_ids"]
        template = "{{ messages[0]['content'] }}"
        asked = [[{"role": "user", "content": text}] for text in prompts]
        told = llm.generate([{"prompt_token_ids": row} for row in rows], how, use_tqdm=False, lora_request=None)
        said = llm.chat(asked, how, use_tqdm=False, chat_template=template, add_generation_prompt=False)
        for answers in (told, said):
            outputs = [answer.outputs[0] for answer in answers]
            theirs = torch.tensor([kept[token].logprob for one in outputs for token, kept in zip(one.token_ids, one.logprobs)])
            whole = Rollouts.from_lists([answer.prompt_token_ids for answer in answers], [one.token_ids for one in outputs], 0)
            with torch.no_grad():
                ours = whole.logprobs(trainer.model(whole.tokens).logits)[whole.predictors]
            gaps.append((trainer.adapters.mode, float((ours - theirs).abs().max())))
        return {"prompt_ids": rows, "completion_ids": [list(one.outputs[0].token_ids) for one in told], "logprobs": None}

    monkeypatch.setattr(tiny_trl, "rollouts", rollouts)
    evaluated = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4, "sampled": False}
    own = {"eval_dataset": Dataset.from_dict({"prompt": TEXTS[:2]})}
    trainer = trainer_of(steps=3, vllm_importance_sampling_correction=False, **evaluated, own=own)
    trainer.train()
    assert [mode for mode, _ in gaps].count("full") == 6
    assert max(gap for _, gap in gaps) <= CLOSE


def test_each_process_samples_from_a_vllm_of_its_own_and_all_keep_the_same_adapters(base: Path, tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    path = os.pathsep.join([str(ROOT), str(SUPPORT)])
    done = subprocess.run(
        [*launch, str(SUPPORT / "vllm_ranks.py"), str(base), str(tmp_path)],
        env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    first, second = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2))
    assert first["steps"] == second["steps"] == 2
    assert first["digests"] == second["digests"]
    assert len(set(first["digests"])) == 3  # before, after and between the steps
    assert 0 < max(*first["gaps"], *second["gaps"]) <= CLOSE


@pytest.mark.parametrize("settings", [{}, {"vllm_importance_sampling_correction": False}], ids=str)
def test_stale_adapters_end_the_training(
    trainer_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """Also where TRL itself does not compare log-probabilities."""
    trainer = trainer_of(steps=3, **settings)
    load: Callable[..., None] = PolicyLora._load
    monkeypatch.setattr(PolicyLora, "_load", lambda self, mode: None if self._request is not None else load(self, mode))
    with pytest.raises(RuntimeError, match="it runs other weights"):
        trainer.train()
    assert trainer.state.global_step == 1  # the first step was sampled from what vLLM had read
