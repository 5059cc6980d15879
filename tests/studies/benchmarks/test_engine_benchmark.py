"""The benchmark of the engine compares equal work, and the page prints what was measured."""

import pytest
import torch
from measured import DOCS, Quick, demand_printed, published, results

from mi_route2.engine import Engine, Request, Sampling
from studies.benchmarks.engine import LOOK, ROWS, EngineSides, look_line, run
from studies.benchmarks.measurement.paired import token_table
from studies.benchmarks.options import EngineOptions

pytestmark = pytest.mark.study


def test_both_sides_generate_the_same_tokens() -> None:
    sides = EngineSides(0, quick=True)
    requests = [Request(tuple(prompt), Sampling(max_new=sides.new)) for prompt in sides.prompts.tolist()]
    found = [result.ids for result in Engine(sides.host).generate(requests, progress=False)]
    with torch.no_grad():
        options = {"max_new_tokens": sides.new, "min_new_tokens": sides.new, "do_sample": False}
        whole = sides.model.generate(sides.prompts, attention_mask=torch.ones_like(sides.prompts), **options)
    assert found == whole[:, sides.prompts.shape[1] :].tolist()


def test_quick_prints_every_row_and_writes_everything(quick: Quick) -> None:
    printed, document = quick(run, EngineOptions)
    rows = results(document)
    assert [(r.over, r.under) for r in rows if r.under != "vLLM"] == [(row.over, row.under) for row in ROWS]
    assert all(r.time.lo <= r.time.value <= r.time.hi for r in rows)
    assert token_table(rows, document["seconds"], document["tokens"]) in printed
    assert all(len(seconds) == 3 for seconds in document["seconds"].values())


def test_a_look_is_measured_alone(quick: Quick) -> None:
    printed, document = quick(run, EngineOptions, look=True)
    (row,) = results(document)
    assert (row.over, row.under) == (LOOK.over, LOOK.under)
    assert look_line(row, document["seconds"], document["numbers"]) in printed
    assert all(min(seconds) > 0 for seconds in document["seconds"].values())


def test_the_page_says_what_a_look_costs() -> None:
    document = published("engine_look")
    (row,) = results(document)
    line = look_line(row, document["seconds"], document["numbers"])
    assert document["rounds"] >= 15
    assert line in " ".join((DOCS / "engine.md").read_text(encoding="utf-8").split()), f"docs/engine.md must say:\n\n{line}"


@pytest.mark.parametrize(("name", "rounds", "requests"), [("engine", 15, 64), ("engine_smollm2", 3, 8)])
def test_the_page_prints_what_was_measured(name: str, rounds: int, requests: int) -> None:
    document = published(name)
    demand_printed("engine.md", name, token_table(results(document), document["seconds"], document["tokens"]))
    assert document["rounds"] >= rounds
    assert document["requests"] == requests
