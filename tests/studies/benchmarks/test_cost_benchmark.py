"""The cost of routing on paper is what torch and the kernel count, and the page prints it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from measured import Quick, demand_printed, published

from mi_route2.adapters import AdapterSpec
from mi_route2.routing import MaskSpec
from studies.benchmarks import cost
from studies.benchmarks.cost import LARGE, ROUTES, SIZES, Compared, run, table
from studies.benchmarks.measurement.contenders import Bench
from studies.benchmarks.measurement.paired import peak_bytes
from studies.benchmarks.options import CostOptions

pytestmark = pytest.mark.study


def test_quick_predicts_what_is_counted(quick: Quick) -> None:
    """FLOPs and bytes held to the last one; on the wire come headers, and the bytes of barriers."""
    printed, document = quick(run, CostOptions)
    rows = [Compared(**row) for row in document["rows"]]
    counted = [row for row in rows if not row.what.startswith("bytes sent")]
    assert len(counted) == 2 * 2 * len(ROUTES)
    assert [row for row in counted if row.predicted != row.measured] == []
    sent = [row for row in rows if row.what.startswith("bytes sent")]
    assert len(sent) == 2 * len(ROUTES)
    assert all(0.9 < row.ratio < 1.1 for row in sent)
    assert table(rows) in printed


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable")
@pytest.mark.parametrize("score", ["grad", "full"])
def test_a_scoring_pass_needs_the_memory_of_a_training_pass_and_no_more(score: str, tmp_path: Path) -> None:
    """Gradients are compared module by module: held until the end, they would be larger than what checkpointing stores."""
    size = replace(SIZES["base case"], layers=6, kept_rank=48, tokens=64)
    bench = Bench(size, 0, tmp_path)
    policy = bench.policy(AdapterSpec("lora", rank=size.kept_rank, quarantine_rank=1))
    model: Any = policy.model
    model.gradient_checkpointing_enable()
    begin = bench.route(policy, MaskSpec(score=score, score_policy="ablated"))  # pyright: ignore[reportArgumentType]
    training = peak_bytes(bench.plain("plain", policy, 0).step)
    policy.model.zero_grad()
    assert peak_bytes(begin) < 1.02 * training


def test_a_whole_step_in_one_call_holds_the_gradients_of_one_micro_batch(tmp_path: Path) -> None:
    size = replace(SIZES["base case"], rollouts=8, kept_rank=32)
    bench = Bench(size, 0, tmp_path)
    policy = bench.policy(AdapterSpec("lora", rank=size.kept_rank, quarantine_rank=1))
    small, whole = (peak_bytes(bench.whole(policy, MaskSpec(), micro)) for micro in (2, None))
    one_by_one = peak_bytes(bench.whole(policy, MaskSpec(score="act"), 2))
    assert small < one_by_one + cost.retained(replace(size, rollouts=2), "lora", MaskSpec()) < whole


@pytest.mark.parametrize("name", ["cost", "cost FLOPs", "cost memory", "cost wire"])
def test_the_page_prints_what_was_counted(name: str) -> None:
    document = published("cost")
    rows = [Compared(**row) for row in document["rows"]]
    expected = {
        "cost": table(rows),
        "cost FLOPs": cost.flops_table(),
        "cost memory": cost.memory_table(),
        "cost wire": cost.wire_table(CostOptions.rate, CostOptions.link),
    }[name]
    demand_printed("scale.md", name, expected)
    assert len(rows) == 2 * len(SIZES) * (2 + len(cost.RANKS)) * len(ROUTES)
    assert all(0.9 < row.ratio < 1.1 for row in rows)
    assert document["isolated"]


def test_large_models_have_the_parameters_of_their_class() -> None:
    """Dense models: Linears, embeddings and unembedding; the experts of the third are not among its adapted Linears."""
    for one in LARGE[:2]:
        size = one.size
        count = size.layers * sum(d_in * d_out for d_in, d_out in size.linears) + 2 * size.vocab * size.d
        assert count == pytest.approx(one.weights, rel=0.02)
    assert len(LARGE[2].size.adapted) == 4


@pytest.mark.parametrize("wrong", [{"rate": 0.0}, {"link": -1.0}, {"rate": torch.nan}])
def test_rates_must_be_positive(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="give positive numbers"):
        CostOptions(**wrong).check()
