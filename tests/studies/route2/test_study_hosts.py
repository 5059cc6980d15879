"""The whole study under each library's hooks: one table, and the same weights."""

import json
from pathlib import Path

import pytest
import torch
from tiny_study import tiny_job

from mi_route2.hosts import HOSTS
from mi_route2.tensor_files import read_tensors
from studies.training.job import BACKEND, FULL, Job
from studies.training.run import run_job

pytestmark = pytest.mark.study

STEPS = 3
ARMS = ("base", "vanilla", "route2-full", "preventative-4")


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> dict[str, Path]:
    """Every host's finished run folder, of one seed in float64."""
    found = {}
    for host in HOSTS:
        root = tmp_path_factory.mktemp(host)
        for arm in ARMS:
            job = tiny_job(root, arm, cache=cache, steps=STEPS, host=host, precision="float64")
            run_job(job)
            found[host] = job.root
        (job.root / "settings.json").write_text(json.dumps(job.settings.as_dict()))
    return found


@pytest.mark.parametrize("host", [host for host in HOSTS if host != "torch"])
def test_every_host_ends_with_the_same_weights(host: str, roots: dict[str, Path]) -> None:
    for arm in ARMS[1:]:
        ours, _ = read_tensors(roots[host] / "seed-0" / arm / FULL)
        plain, _ = read_tensors(roots["torch"] / "seed-0" / arm / FULL)
        assert ours.keys() == plain.keys()
        for name, t in plain.items():
            assert t.dtype == torch.float64
            assert torch.allclose(ours[name], t, rtol=0, atol=1e-8), (arm, name)
            if name.endswith("B"):
                assert t.abs().max() > 1e-3, "nothing was trained"


def test_a_host_is_a_part_of_a_runs_identity(tmp_path: Path) -> None:
    jobs = [tiny_job(tmp_path, "vanilla", host=host, precision=p) for host in HOSTS for p in ("float32", "float64")]
    assert len({job.identity for job in jobs}) == len(jobs)


def test_teachers_are_shared_by_runs_that_draw_them_alike_and_by_no_others(tmp_path: Path) -> None:
    """The base model in bfloat16 draws other rollouts, so a run would depend on what was run before beside the same cache."""
    usual = tiny_job(tmp_path, "vanilla").pool
    assert usual == tiny_job(tmp_path, "absorb").pool
    others = [{"precision": "bfloat16"}, {"precision": "float64"}, {"host": "nnsight"}, {"host": "nnsight", "precision": "float64"}]
    assert len({usual, *(tiny_job(tmp_path, "vanilla", **other).pool for other in others)}) == 5


@pytest.mark.parametrize(("field", "valid"), [("host", "torch, transformer_lens, nnsight"), ("precision", "float32, float64")])
def test_an_unknown_host_or_precision_is_one_sentence(field: str, valid: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"unknown {field} 'abacus': choose from {valid}"):
        tiny_job(tmp_path, "vanilla", **{field: "abacus"})


def test_a_run_on_a_gpu_is_another_one_beside_base_models_of_its_own(tmp_path: Path) -> None:
    usual, on_gpu = tiny_job(tmp_path, "vanilla"), tiny_job(tmp_path, "vanilla", device="cuda")
    assert on_gpu.identity != usual.identity
    assert (on_gpu.backend, on_gpu.unusual) == ({"device": "cuda"}, {"device": "cuda"})
    on_gpu.root.mkdir(parents=True)
    (on_gpu.root / "settings.json").write_text(json.dumps(on_gpu.settings.as_dict()))
    (on_gpu.root / BACKEND).write_text(json.dumps({"device": "cuda"}))
    again = Job.of(on_gpu.root, on_gpu.seed, on_gpu.arm)
    assert (again.identity, again.cache) == (on_gpu.identity, tmp_path / "warmstarts-cuda")
