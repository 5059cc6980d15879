"""Training on a CUDA device, in float64: TRL's trainer and a study on a chat model take the steps of our own loop on the CPU."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gpu import DEVICE, NEEDS, assert_close
from parity import Parity
from safetensors.torch import load_file
from tiny_study import tiny_chat
from tiny_trl import LORA, Ours, make_trainer, our_loop, our_policy, pairs

from mi_route2 import AdapterSpec, MaskRoute, MaskSpec
from mi_route2.routing import EraseRoute, EraseSpec, OpenRoute, OpenSpec, Route
from studies.environments.chat import make_tiny_model
from studies.training.arms import ARMS
from studies.training.build import rotate
from studies.training.job import EVAL, FULL, Job
from studies.training.manifest import MANIFEST
from studies.training.run import run_job
from studies.training.settings import Settings

pytestmark = [pytest.mark.gpu, NEEDS]
ROOT = Path(__file__).parents[2]
RULES = {
    "open": (OpenSpec(), LORA),
    "live gradient": (MaskSpec(), AdapterSpec("svd", rank=5, quarantine_rank=2)),
    "tokens": (MaskSpec(score="act", unit="token"), LORA),
    "ablated": (MaskSpec(score="full", score_policy="ablated", kept_advantage="unflagged"), LORA),
    "erase": (EraseSpec(k=2), LORA),
}


def ours(rule: OpenSpec | MaskSpec | EraseSpec) -> Route:
    if isinstance(rule, OpenSpec):
        return OpenRoute(rule)
    return EraseRoute.from_pairs(pairs(), rule) if isinstance(rule, EraseSpec) else MaskRoute.from_pairs(pairs(), rule)


@pytest.mark.parametrize("name", RULES)
def test_trl_takes_the_steps_of_our_own_loop_on_the_cpu(name: str, tmp_path: Path) -> None:
    rule, adapters = RULES[name]
    trainer, seen = make_trainer(tmp_path, rule, adapters, size=4, gradient_accumulation_steps=2, use_cpu=DEVICE == "cpu")
    trainer.train()
    assert {p.device.type for p in trainer.model.parameters()} == {torch.device(DEVICE).type}
    policy = our_policy(adapters)
    expected, _ = our_loop(policy, ours(rule), Ours())
    assert len(seen.gradients) == len(expected) == 2
    for own, right in zip(seen.gradients, expected):
        assert_close(own, right)


def test_trl_samples_checkpoints_and_resumes_on_the_device(tmp_path: Path) -> None:
    usual = {"size": 8, "sampled": True, "use_cpu": DEVICE == "cpu", "save_strategy": "steps", "save_steps": 1}
    whole, _ = make_trainer(tmp_path / "run", MaskSpec(), **usual)
    whole.train()
    whole.save_model(str(tmp_path / "deployed"))
    broken, _ = make_trainer(tmp_path / "again", MaskSpec(), **usual)
    broken.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    assert_close(broken.adapters.tensors(), {name: t.cpu() for name, t in whole.adapters.tensors().items()})


@pytest.mark.skipif(DEVICE == "cpu", reason="accelerate shards on accelerators alone")
def test_fsdp_of_accelerate_shards_on_one_gpu_and_learns_what_a_whole_model_does(tmp_path: Path) -> None:
    """The launcher's configuration of tests/support/fsdp.yaml, with one process over NCCL."""
    config = (ROOT / "tests/support/fsdp.yaml").read_text(encoding="utf-8").replace("num_processes: 2", "num_processes: 1")
    (tmp_path / "fsdp.yaml").write_text(config)
    script = tmp_path / "train.py"
    script.write_text(
        "import json, sys\n"
        f"sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests' / 'support')!r}]\n"
        "from safetensors.torch import save_file\n"
        "from tiny_trl import make_trainer\n"
        "from mi_route2 import MaskSpec\n"
        "trainer, seen = make_trainer(sys.argv[1] + '/run', MaskSpec(), size=8, use_cpu=False)\n"
        "trainer.train()\n"
        "assert any(hasattr(p, 'full_tensor') for p in trainer.model.parameters())\n"
        "for step, one in enumerate(seen.gradients):\n"
        "    save_file({n: g.cpu() for n, g in one.items()}, f'{sys.argv[1]}/{step}.safetensors')\n"
    )
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(tmp_path / "fsdp.yaml")]
    done = subprocess.run([*launch, str(script), str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    policy = our_policy(LORA)
    expected, _ = our_loop(policy, ours(MaskSpec()), Ours())
    for step, right in enumerate(expected):
        assert_close(load_file(tmp_path / f"{step}.safetensors"), right)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat") / "tiny"
    make_tiny_model(Parity(), folder, steps=30, width=32, layers=2, batch=16, max_new=16, progress=False)
    return folder


@pytest.fixture
def settings(folder: Path) -> Settings:
    return tiny_chat(folder, DEVICE, steps=3)


@pytest.mark.parametrize("arm", ["vanilla", "route2-full", "route2-act", "absorb"])
def test_a_study_on_the_device_is_the_cpus_in_float64(arm: str, settings: Settings, tmp_path: Path) -> None:
    """Rollouts are drawn by generators of the CPU, so that they are the same; what is learned is equal up to rounding."""
    found = []
    for device in (DEVICE, "cpu"):
        own = Job(
            tmp_path / device / "run", tmp_path / device / "cache",
            replace(settings, chat=replace(settings.chat, device=device)), 0, ARMS[arm], precision="float64",
        )  # fmt: skip
        run_job(own)
        found.append(own)
    own, cpu = (load_file(one.folder / FULL) for one in found)
    assert_close(own, cpu)
    named = json.loads((found[0].folder / MANIFEST).read_text())["platform"].get("accelerator")
    assert named == (torch.cuda.get_device_name() if DEVICE == "cuda" else None)
    rates, expected = (json.loads((one.folder / EVAL).read_text())["modes"] for one in found)
    assert rates == expected


def test_factors_on_the_device_are_rotated_as_those_of_the_cpu() -> None:
    rotated = []
    for device in (DEVICE, "cpu"):
        factor = torch.randn(12, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(device)
        rotate([factor], torch.Generator().manual_seed(1))
        rotated.append(factor.cpu())
    torch.testing.assert_close(*rotated)
