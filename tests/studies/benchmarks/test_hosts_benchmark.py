"""The benchmark of hosts compares like with like: every side gives the same numbers. And the page prints what was measured."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from measured import Quick, cells, demand_printed, published, results
from torch import Tensor

from studies.benchmarks.hosts import ROWS, HostResult, run, table
from studies.benchmarks.measurement.flops import Size
from studies.benchmarks.measurement.host_contenders import (
    BARE,
    BRIDGE,
    EAGER,
    FORWARD,
    NNSIGHT,
    SETTINGS,
    SIDES,
    SMOLLM2,
    STEP,
    TASKS,
    TOKEN,
    TORCH,
    HostBench,
    Setting,
)
from studies.benchmarks.measurement.paired import Ratio
from studies.benchmarks.options import HostsOptions

pytestmark = pytest.mark.study

ODD = Setting("odd", Size(2, d=36, heads=2, mlp=46, vocab=58, rollouts=4, tokens=11, prompt=3, kept_rank=5, quarantine_rank=3), 2)
"""No two axes are alike, so that none can stand in for another."""


class Sides:
    """Every side of ``ODD`` in float64: what its steps return, and the gradients that a routed step leaves."""

    def __init__(self, cache_dir: Path):
        self.bench = HostBench(ODD, 0, cache_dir)
        self.sides = {name: self.bench.build(name) for name in SIDES}

    def run(self, task: str, name: str) -> Any:
        return self.bench.contender(task, self.sides[name]).step()

    def gradients(self, name: str) -> dict[str, Tensor]:
        adapters = self.sides[name].policy.adapters
        parameters = adapters.kept_parameters() | adapters.quarantine_parameters()
        return {name: p.grad.clone() for name, p in parameters.items()}


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sides]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield Sides(tmp_path_factory.mktemp("svd"))
    torch.set_default_dtype(before)


PAIRS = [(name, EAGER if name == BRIDGE else BARE) for name in SIDES if name not in (BARE, EAGER)]


def assert_close(own: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    assert own.shape == expected.shape
    assert own.dtype == expected.dtype == torch.float64
    assert float((own - expected).abs().max()) <= tolerance * float(expected.abs().max())


@pytest.mark.parametrize(("name", "bare"), PAIRS)
def test_a_host_computes_and_reads_what_bare_hooks_do(sides: Sides, name: str, bare: str) -> None:
    for task in (FORWARD, TOKEN):
        (own, seen), (expected, there) = sides.run(task, name), sides.run(task, bare)
        assert torch.equal(own, expected) if task == TOKEN else assert_close(own, expected) is None
        assert list(seen) == list(there) == sides.bench.sites
        for site, values in there.items():
            assert len(seen[site]) == len(values) == (ODD.new if task == TOKEN else 1)
            for value, other in zip(seen[site], values):
                assert_close(value, other)
    assert own.shape == (4, 3 + 8)


@pytest.mark.parametrize(("name", "bare"), PAIRS)
def test_a_routed_step_on_a_host_learns_what_it_does_under_bare_hooks(sides: Sides, name: str, bare: str) -> None:
    found = []
    for side in (name, bare):
        contender = sides.bench.contender(STEP, sides.sides[side])
        seen = contender.step()
        found.append(sides.gradients(side))
        contender.reset()
        assert {site: len(values) for site, values in seen.items()} == dict.fromkeys(sides.bench.sites, 1)
        assert all(p.grad is None for p in sides.sides[side].policy.adapters.kept_parameters().values())
    own, expected = found
    assert own.keys() == expected.keys()
    assert all(float(g.abs().max()) > 1e-8 for g in expected.values())
    for key, gradient in expected.items():
        assert_close(own[key], gradient, 1e-9)


def test_attention_is_all_that_bare_sides_differ_in(sides: Sides) -> None:
    """Eager attention has a float32 softmax, so it is near and not equal: the two are not one side under two names."""
    (own, _), (expected, _) = sides.run(FORWARD, EAGER), sides.run(FORWARD, BARE)
    gap = float((own - expected).abs().max())
    assert 1e-12 < gap < 1e-5
    models = [sides.sides[name].policy.model for name in SIDES[:3]]
    assert [model.config._attn_implementation for model in models] == ["sdpa", "eager", "sdpa"]


def test_the_sides_share_weights_but_not_modules(sides: Sides) -> None:
    models = [sides.sides[name].policy.model for name in SIDES[:3]]
    assert len(set(map(id, models))) == 3
    assert len({model.get_input_embeddings().weight.data_ptr() for model in models}) == 1
    hashes = {side.policy.adapters.base_hash for side in sides.sides.values()}
    assert len(hashes) == 1


def test_a_turn_is_as_many_calls_as_it_is_divided_by(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    side, calls = sides.sides[BARE], []
    with side.policy.model.register_forward_pre_hook(lambda *_: calls.append(1)):
        for task in TASKS:
            contender = sides.bench.contender(task, side)
            contender.step()
            contender.reset()
            assert len(calls) == sides.bench.units(task), task
            calls.clear()


def test_quick_prints_every_row_and_writes_everything(quick: Quick) -> None:
    printed, document = quick(run, HostsOptions)
    rows = results(document, HostResult)
    assert {(r.over, r.under, r.task) for r in rows} == {(*row, task) for row in ROWS for task in TASKS}
    for r in rows:
        assert r.time.lo <= r.time.value <= r.time.hi
        assert r.time.value == pytest.approx(r.over_ms / r.under_ms)
    assert table(rows) in printed
    assert document["sides"].keys() == document["settings"].keys() == {"tiny"}
    assert document["sides"]["tiny"].keys() == {f"{task}: {side}" for task in TASKS for side in SIDES}
    assert all(len(side["seconds"]) == 3 for side in document["sides"]["tiny"].values())


def test_the_table_has_a_line_a_row_and_a_cell_a_task() -> None:
    def result(over: str, under: str, task: str) -> HostResult:
        value = 1.5 if (over, task) == (BRIDGE, TOKEN) else 1.0
        return HostResult("small", task, over, under, Ratio(value, 0.9, 1.6), 4 * value, 4.0, 1.0)

    lines = cells(table([result(*row, task) for row in ROWS for task in TASKS]))
    assert lines[2] == ["small", BARE, "", "4.0 ms", "4.0 ms", "4.0 ms"]
    plain = "1.00 (0.90 - 1.60), +0.0 ms"
    assert ["small", BRIDGE, EAGER, plain, plain, "1.50 (0.90 - 1.60), +2.0 ms"] in lines
    assert len(lines) == 3 + len(ROWS)


@pytest.mark.parametrize(("name", "settings"), [("hosts", SETTINGS), ("hosts_smollm2", SMOLLM2)])
def test_the_page_prints_what_was_measured(name: str, settings: tuple[Setting, ...]) -> None:
    document = published(name)
    demand_printed("hosts.md", name, table(results(document, HostResult)))
    assert document["settings"].keys() == {setting.name for setting in settings}
    assert document["rounds"] >= 9


def test_what_the_page_says_of_memory_was_measured() -> None:
    """A host holds nothing of its own within 1%; eager attention up to 8% more."""
    memory = {pair: [] for pair in ROWS}
    for row in results(published("hosts"), HostResult):
        memory[row.over, row.under].append(row.memory)
    for pair in ((TORCH, BARE), (NNSIGHT, BARE), (BRIDGE, EAGER)):
        assert all(0.99 < value < 1.01 for value in memory[pair]), pair
    assert 1.07 < max(memory[EAGER, BARE]) < 1.085
