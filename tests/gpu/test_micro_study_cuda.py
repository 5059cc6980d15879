"""A study of a micro model on a CUDA device, in float64: its arms learn and exploit what they do on the CPU."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gpu import DEVICE, NEEDS, assert_close
from safetensors.torch import load_file
from tiny_study import tiny_job

from studies.environments.micro.corpus import sample_documents
from studies.environments.micro.language import Vocabulary
from studies.environments.micro.settings import WarmStartConfig, get_world
from studies.environments.micro.warmstart import completion_loss, warm_start
from studies.training.arms import ARMS
from studies.training.job import EVAL, FULL
from studies.training.manifest import MANIFEST
from studies.training.run import run_job

pytestmark = [pytest.mark.gpu, NEEDS]

MICRO = {
    "vanilla": ARMS["vanilla"],
    "a direction of pairs": ARMS["route2-full"],
    "a penalty": ARMS["penalty-known"],
    "lessons": ARMS["taught-honest"],
    "a detector": ARMS["sees-known-quarantine-fast"],
    "a canary": ARMS["filter-canary"],
}


# On a CPU both sides are the same run, of which one is enough to see that the test itself works.
@pytest.mark.parametrize("name", ["vanilla"] if DEVICE == "cpu" else MICRO)
def test_a_micro_study_on_the_device_is_the_cpus_in_float64(name: str, tmp_path: Path) -> None:
    """Both start from the base model that the CPU trained; another device's has other bits."""
    found = []
    for device in ("cpu", DEVICE):
        own = tiny_job(tmp_path / device, MICRO[name], cache=tmp_path / "cache", device=device, precision="float64")
        for one in (*own.canaries, own):
            run_job(one)
        found.append(own)
    assert_close(*(load_file(one.folder / FULL) for one in reversed(found)))
    assert json.loads((found[1].folder / MANIFEST).read_text()).get("device") == (None if DEVICE == "cpu" else DEVICE)
    rates, expected = (json.loads((one.folder / EVAL).read_text())["modes"] for one in found)
    assert rates == expected


@pytest.mark.skipif(DEVICE == "cpu", reason="both sides are the same training on a CPU")
def test_a_base_model_that_the_device_trains_is_the_cpus_but_for_rounding() -> None:
    training = WarmStartConfig(steps=120, batch=64)
    models = [warm_start(get_world("strong"), training, 0, None, progress=False, device=torch.device(d)) for d in (DEVICE, "cpu")]
    documents = sample_documents(get_world("strong"), 64, np.random.default_rng(5), Vocabulary())
    own, cpu = (float(completion_loss(model, documents, Vocabulary().eos).detach()) for model in models)
    assert {p.device.type for model in models for p in model.parameters()} == {"cpu"}
    assert abs(own - cpu) < 0.02
