"""The chat study with vLLM as its sampler: runs, resumes and says so; and the usual sampler's run paths are what they were."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_study import run_until

from mi_route2.adapters import load_adapters
from mi_route2.vllm import sampler as sampler_module
from studies.environments.chat import make_tiny_model
from studies.training.arms import ARMS
from studies.training.job import EVAL, FULL, Job, build_policy
from studies.training.manifest import MANIFEST
from studies.training.recorder import METRICS
from studies.training.run import run_job
from studies.training.settings import CHAT, ChatModel, Settings
from studies.training.worlds import open_world, weights_hash

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here: make test-vllm runs these tests"
)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    from parity import Parity

    folder = tmp_path_factory.mktemp("chat") / "tiny"
    make_tiny_model(Parity(), folder, steps=40, width=128, layers=2, batch=16, max_new=10, context=256, progress=False)
    chat = ChatModel(str(folder), weights_hash(folder), max_new=10, token_budget=1 << 20, device="cpu")
    return replace(
        CHAT, world="parity:Parity", chat=chat, steps=3, prompts=4, group=6, kept_rank=4, kept_lr=3e-3, quarantine_rank=4,
        quarantine_lr=1e-3, pairs=4, teachers=2, evaluation_prompts=6, probe_every=2,
    )  # fmt: skip


def job(root: Path, settings: Settings, **changes: Any) -> Job:
    return Job(root / "run", root / "cache", settings, 0, ARMS["route2-full"], **changes)


@needs_vllm
@pytest.mark.parametrize(("precision", "close"), [("float32", 2e-5), ("bfloat16", 0.3)])
def test_a_run_on_vllm_ends_goes_on_and_says_what_it_cannot_promise(
    precision: str, close: float, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step samples from adapters that moved; each gap to torch's log-probabilities is that of rounding."""
    gaps: list[float] = []
    check = sampler_module.refuse_stale

    def noted(theirs: torch.Tensor, ours: torch.Tensor, dtype: torch.dtype) -> None:
        gaps.append(float((theirs - ours).abs().max()))
        check(theirs, ours, dtype)

    monkeypatch.setattr(sampler_module, "refuse_stale", noted)
    own = job(tmp_path, settings, sampler="vllm", precision=precision)
    run_until(own, 2)
    run_job(own)
    manifest = json.loads((own.folder / MANIFEST).read_text())
    assert manifest["sampler"] == "vllm"
    assert manifest["versions"]["vllm"].startswith("0.")
    assert len((own.folder / METRICS).read_text().splitlines()) == 3
    assert len(gaps) >= 1 + 3 + 2  # teachers, steps, both evaluations
    assert max(gaps) <= close
    policy = build_policy(own, own.cache)
    moved = {name: p.detach().clone() for name, p in policy.adapters.kept_parameters().items()}
    load_adapters(policy.adapters, own.folder / FULL)
    assert max(float((p.detach() - moved[name]).abs().max()) for name, p in policy.adapters.kept_parameters().items()) > 1e-3
    assert next(own.cache.glob("teachers-*")).name.endswith("-vllm.safetensors")
    rates = json.loads((own.folder / EVAL).read_text())["modes"]
    assert list(rates) == ["last_word", "confidence", "none"]


def test_a_world_gives_its_sampler_what_it_would_have_sampled_itself(settings: Settings, tmp_path: Path) -> None:
    """Prompts in tokens, length, temperature, generator and ends; and takes the completions as its own."""
    seen: dict[str, Any] = {}

    def sampler(policy: Any, prompts: Any, **how: Any) -> list[list[int]]:
        seen.update(how, prompts=prompts)
        return [[5, how["ends"][0]]] * len(prompts)

    generator, own = torch.Generator(), job(tmp_path, settings)
    with open_world(settings, sampler) as (world, _):
        prompts = world.evaluation_prompts("none", 3)
        samples = world.sample(build_policy(own, own.cache), prompts, generator, 0.7)
        whole = world.encode([prompt.text for prompt in prompts], [""] * 3)
    assert (seen["max_new"], seen["temperature"], seen["generator"]) == (10, 0.7, generator)
    asked = [row[real].tolist()[:-1] for row, real in zip(whole.tokens, whole.attention)]
    assert seen["prompts"] == asked
    assert samples.rollouts.completions() == [[5, seen["ends"][0]]] * 3
