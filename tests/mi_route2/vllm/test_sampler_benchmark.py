"""The benchmark of vLLM as a sampler: every side samples, and the page prints what was measured."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from measured import demand_printed, published, results

from studies.benchmarks.measurement.paired import token_table
from studies.benchmarks.options import VllmSamplerOptions
from studies.benchmarks.vllm_sampler import ROWS, run

HERE = importlib.util.find_spec("vllm") is not None


def printed(document: dict[str, Any]) -> str:
    return token_table(results(document), document["seconds"], document["tokens"])


@pytest.mark.skipif(not HERE, reason="vLLM is not installed here: make test-vllm runs these tests")
def test_quick_samples_on_every_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(VllmSamplerOptions(quick=True, out=tmp_path / "out.json"))
    document = json.loads((tmp_path / "out.json").read_text())
    assert [(row["over"], row["under"]) for row in document["rows"]] == [(row.over, row.under) for row in ROWS]
    assert {name: len(seconds) for name, seconds in document["seconds"].items()} == dict.fromkeys(document["tokens"], 3)
    assert printed(document) in capsys.readouterr().out


@pytest.mark.skipif(HERE, reason="vLLM is installed")
def test_without_vllm_the_benchmark_says_where_to_run_it() -> None:
    with pytest.raises(ValueError, match="vLLM is not installed here: run this in an environment of its own"):
        VllmSamplerOptions().check()


@pytest.mark.parametrize(("name", "rounds", "requests"), [("vllm_sampler", 9, 64), ("vllm_sampler_smollm2", 5, 8)])
def test_the_page_prints_what_was_measured(name: str, rounds: int, requests: int) -> None:
    document = published(name)
    demand_printed("vllm.md", name, printed(document))
    assert document["rounds"] >= rounds
    assert document["requests"] == requests
