"""The benchmark of sweeps compares like with like: every side gives the same grid. And the page prints what was measured."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from measured import Quick, cells, demand_printed, published, results

from studies.benchmarks.measurement.paired import Ratio, ratio
from studies.benchmarks.options import SweepsOptions
from studies.benchmarks.sweeps import (
    BRIDGED,
    EVERY,
    LENS,
    LONG,
    QUICK,
    RESUMED,
    SETTINGS,
    SIDES,
    WHOLE,
    Setting,
    SweepBench,
    SweepResult,
    run,
    table,
)

pytestmark = pytest.mark.study

ODD = Setting("odd", 3, 24, 40, heads=3, vocab=50, tokens=7)
"""No two axes are alike, so that none can stand in for another."""


@cache
def bench() -> SweepBench:
    return SweepBench(ODD, 0)


@pytest.mark.parametrize("side", SIDES)
def test_a_side_gives_the_grid_of_transformer_lens(side: str) -> None:
    expected, grid = bench().lens(), bench().grid(side)
    assert expected.shape == grid.values.shape == (3, 7)
    assert grid.forwards == (WHOLE if side == WHOLE else "resumed")
    assert np.abs(grid.values - expected).max() < 1e-5
    assert np.abs(grid.effect).max() > 0.1


def test_no_cell_is_known_without_a_run() -> None:
    """Prompts differ everywhere, so that nothing is spared: the ratio is that of cells that are run."""
    assert (bench().clean != bench().corrupt).all()
    assert int(bench().corrupt.min()) >= 3
    assert int(bench().corrupt.max()) < ODD.vocab
    grid = bench().grid(RESUMED)
    assert (grid.values[:, :-1] != grid.corrupt).all()


def test_the_sides_share_weights() -> None:
    own = dict(bench().host.model.named_parameters())
    bridged = [p for p in bench().bridged.model.parameters() if p.ndim == 2]
    for name, p in own.items():
        if p.ndim == 2:
            assert any(q.shape == p.shape and torch.equal(p, q) for q in bridged), name


def test_quick_prints_every_row_and_writes_everything(quick: Quick) -> None:
    printed, document = quick(run, SweepsOptions)
    rows = results(document, SweepResult)
    assert [(r.setting, r.side, r.cells) for r in rows] == [(one.name, side, one.cells) for one in QUICK for side in one.sides]
    assert [one.cells for one in QUICK] == [12, 36]
    for r in rows:
        assert r.times.lo <= r.times.value <= r.times.hi
        assert r.times.value == pytest.approx(r.lens_ms / r.own_ms)
        assert r.difference < 1e-5
        assert r.bound >= r.run
        assert (r.run > 1) == (r.side != WHOLE)
    assert table(rows) in printed
    assert document["sides"]["tiny"].keys() == {LENS, *SIDES}
    assert all(len(side["seconds"]) == 3 for side in document["sides"]["tiny"].values())


def test_the_table_has_a_line_a_side() -> None:
    def result(side: str, run: float) -> SweepResult:
        return SweepResult("small", side, 12, Ratio(8.04, 7.5, 8.5), 24.0, 3.0, 4.3, run, 2e-6, 1.0)

    lines = cells(table([result(RESUMED, 4.14), result(WHOLE, 0.0)]))
    assert lines[2] == ["small", "resumed", "12", "24.00 ms", "3.00 ms", "8.0 (7.5 - 8.5)", "4.3, 4.1", "2.0e-06"]
    assert lines[3][6] == ""


def test_one_round_has_no_interval() -> None:
    once = ratio([3.0], [2.0], np.random.default_rng(0))
    assert (f"{once:.1f}", once.cells(".1f")) == ("1.5", ("1.5", ""))
    assert f"{ratio([3.0, 4.0, 5.0], [2.0, 2.0, 2.0], np.random.default_rng(0)):.1f}" == "2.0 (1.5 - 2.5)"


def printed_in_the_page(name: str) -> tuple[dict[str, Any], list[SweepResult]]:
    """Return what was measured; the page must have its table."""
    document = published(name)
    rows = results(document, SweepResult)
    demand_printed("patching.md", name, table(rows))
    return document, rows


def test_the_page_prints_what_was_measured_of_long_prompts_and_a_real_model() -> None:
    document, rows = printed_in_the_page("sweeps_long")
    assert document["settings"].keys() == {setting.name for setting in LONG}
    assert all(r.difference < 1e-4 for r in rows)
    least = {(r.setting, r.side): r.times.lo for r in rows if r.side != WHOLE}
    wide = {key: lo for key, lo in least.items() if "d 256" in key[0]}  # what the page says in words:
    assert all(lo > 9 for key, lo in least.items() if key not in wide)
    assert [f"{lo:.1f}" for lo in wide.values()] == ["6.5", "6.0", "5.6", "5.6"]


def test_the_page_prints_what_was_measured_of_three_points() -> None:
    document, rows = printed_in_the_page("sweeps_every")
    assert document["settings"].keys() == {setting.name for setting in EVERY}
    assert {r.side for r in rows} == {RESUMED, BRIDGED}
    assert all(r.difference < 1e-5 for r in rows)
    assert all(r.times.lo > 6 for r in rows)  # what the page says in words


def test_the_page_prints_what_was_measured_on_a_gpu() -> None:
    document, rows = printed_in_the_page("sweeps_h100")
    assert "H100" in document["device"]  # what the page says in words, here and below
    assert all(r.difference < 1e-5 and r.times.lo > 29 for r in rows)
    whole, resumed = (next(r for r in rows if r.side == side) for side in (WHOLE, RESUMED))
    assert whole.own_ms < resumed.own_ms


def test_only_chooses_models_by_their_names(capsys: pytest.CaptureFixture[str]) -> None:
    run(SweepsOptions(quick=True, only="three", device="cpu:0"))
    assert QUICK[1].name in capsys.readouterr().out
    with pytest.raises(ValueError, match="no model here has 'thre3' in its name: choose of 'tiny', 'tiny, three points'"):
        run(SweepsOptions(quick=True, only="thre3"))
    with pytest.raises(ValueError, match="the device 'cuda:63' cannot be used here: choose from cpu"):
        SweepsOptions(device="cuda:63").check()


def test_long_and_every_are_two_loads() -> None:
    with pytest.raises(ValueError, match="give one"):
        SweepsOptions(long=True, every=True).check()


def test_the_page_prints_what_was_measured() -> None:
    document, rows = printed_in_the_page("sweeps")
    assert document["settings"].keys() == {setting.name for setting in SETTINGS}
    assert document["rounds"] >= 9
    assert all(r.difference < 1e-5 for r in rows)
    assert {r.side for r in rows} == {RESUMED, BRIDGED, WHOLE}
    fastest = {(r.setting, r.side): r for r in rows if r.side != WHOLE}
    for name, least in (("6 layers, d 256", 7), ("12 layers, d 64", 17)):  # what the page says in words
        assert fastest[name, RESUMED].times.lo > fastest[name, BRIDGED].times.lo > least
        assert fastest[name, BRIDGED].own_ms < 1.29 * fastest[name, RESUMED].own_ms
