"""The benchmark of the engine compares equal work, and the page prints what was measured."""

import json
import re
from pathlib import Path

import pytest
import torch

from mi_route2.engine import Engine, Request, Sampling
from studies.benchmarks.engine import ROWS, Sides, run
from studies.benchmarks.measurement.paired import Ratio, Result, token_table
from studies.benchmarks.options import EngineOptions

pytestmark = pytest.mark.study

DOCS = Path(__file__).parents[3] / "docs"


def read(row: dict) -> Result:
    return Result(**(row | {"time": Ratio(**row["time"])}))


def test_both_sides_generate_the_same_tokens() -> None:
    sides = Sides(0, quick=True)
    requests = [Request(tuple(prompt), Sampling(max_new=sides.new)) for prompt in sides.prompts.tolist()]
    found = [result.ids for result in Engine(sides.host).generate(requests, progress=False)]
    with torch.no_grad():
        options = {"max_new_tokens": sides.new, "min_new_tokens": sides.new, "do_sample": False}
        whole = sides.model.generate(sides.prompts, attention_mask=torch.ones_like(sides.prompts), **options)
    assert found == whole[:, sides.prompts.shape[1] :].tolist()


def test_quick_prints_every_row_and_writes_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(EngineOptions(quick=True, out=tmp_path / "out.json"))
    printed, document = capsys.readouterr().out, json.loads((tmp_path / "out.json").read_text())
    results = [read(row) for row in document["rows"]]
    assert [(r.over, r.under) for r in results if r.under != "vLLM"] == [(row.over, row.under) for row in ROWS]
    assert all(r.time.lo <= r.time.value <= r.time.hi for r in results)
    assert token_table(results, document["seconds"], document["tokens"]) in printed
    assert all(len(seconds) == 3 for seconds in document["seconds"].values())


@pytest.mark.parametrize(("name", "rounds", "requests"), [("engine", 9, 64), ("engine_again", 15, 64), ("engine_smollm2", 3, 8)])
def test_the_page_prints_what_was_measured(name: str, rounds: int, requests: int) -> None:
    document = json.loads((DOCS / f"results/benchmarks/{name}.json").read_text(encoding="utf-8"))
    expected = token_table([read(row) for row in document["rows"]], document["seconds"], document["tokens"]) + "\n"
    found = re.search(rf"<!-- table: {name} -->\n\n((?:\|.*\n)+)", (DOCS / "engine.md").read_text(encoding="utf-8"))
    assert found
    assert found[1] == expected, f"docs/engine.md must have, below <!-- table: {name} -->:\n\n{expected}"
    assert document["rounds"] >= rounds
    assert document["requests"] == requests
