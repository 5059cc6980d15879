"""Two real gloo ranks on unequal halves give the single process's gradient, flags and all."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mask_oracle import assert_same
from safetensors.torch import load_file
from tiny_policy import SPECS, make_batch, make_policy
from torch import Tensor, nn
from two_ranks import HALVES, cases, routed

from mi_route2.routing.routes import sum_over_ranks

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[3]
CASES = ["open", "erase", *(f"{s}-{p}" for s in ("act", "grad", "full") for p in ("live", "ablated")), "grad-rollout"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Tensor]]:
    """Return the file of each rank."""
    out = tmp_path_factory.mktemp("ranks")
    path = os.pathsep.join([str(ROOT / "tests" / "support"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ran = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "support" / "two_ranks.py"), str(out)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return [load_file(out / f"rank-{rank}.safetensors") for rank in range(2)]


def of(results: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(f"{prefix}/"): g for n, g in results.items() if n.startswith(f"{prefix}/")}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["svd", "lora-shared"])
def test_the_reduced_gradient_is_the_single_process_one(name: str, case: str, ranks: list[dict[str, Tensor]]) -> None:
    """So is that of a base model that FSDP2 shards, with whole adapters."""
    policy = make_policy(SPECS[name])
    single = routed(policy, cases(policy)[case], make_batch(8), reduced=False)
    assert single
    for results in ranks:
        assert_same(of(results, f"{name}/{case}"), single)
        assert_same(of(results, f"{name}/{case}-fsdp"), single)


@pytest.mark.parametrize("name", ["svd", "lora-shared"])
def test_flags_inside_the_backward_pass_through_ddps_own_reducer(name: str, ranks: list[dict[str, Tensor]]) -> None:
    policy = make_policy(SPECS[name])
    single = routed(policy, cases(policy)["grad-rollout"], make_batch(8), reduced=False)
    for results in ranks:
        assert_same(of(results, f"{name}/grad-rollout-ddp"), single)


def test_the_halves_differ_and_make_the_whole() -> None:
    """The two theorems can fail: neither half alone, nor their mean, would pass."""
    policy = make_policy(SPECS["svd"])
    route = cases(policy)["grad-live"]
    halves = [routed(policy, route, make_batch(8).rows(h), reduced=False) for h in HALVES]
    whole = routed(policy, route, make_batch(8), reduced=False)
    assert sorted(torch.cat(HALVES).tolist()) == list(range(8))
    for other in (*halves, {n: (g + halves[1][n]) / 2 for n, g in halves[0].items()}):
        with pytest.raises(AssertionError, match="off by"):
            assert_same(other, whole)


def test_without_a_process_group_it_says_so() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        sum_over_ranks([nn.Parameter(torch.zeros(2))])
