"""The benchmark of vLLM as a sampler: every side samples, and the page prints what was measured."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from studies.benchmarks.measurement.paired import Ratio, Result, token_table
from studies.benchmarks.options import VllmSamplerOptions
from studies.benchmarks.vllm_sampler import ROWS, run

DOCS = Path(__file__).parents[3] / "docs"
HERE = importlib.util.find_spec("vllm") is not None


def printed(document: dict[str, Any]) -> str:
    rows = [Result(**(row | {"time": Ratio(**row["time"])})) for row in document["rows"]]
    return token_table(rows, document["seconds"], document["tokens"])


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
    document = json.loads((DOCS / f"results/benchmarks/{name}.json").read_text(encoding="utf-8"))
    found = re.search(rf"<!-- table: {name} -->\n\n((?:\|.*\n)+)", (DOCS / "vllm.md").read_text(encoding="utf-8"))
    expected = printed(document) + "\n"
    assert found
    assert found[1] == expected, f"docs/vllm.md must have, below <!-- table: {name} -->:\n\n{expected}"
    assert document["rounds"] >= rounds
    assert document["requests"] == requests
