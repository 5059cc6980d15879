"""Every benchmark runs all of its sides; a paired ratio is that of medians, and what slows a whole round cancels."""

import json
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from studies.benchmarks.__main__ import NAMES
from studies.benchmarks.paired import BenchmarkOptions, peak_bytes, ratio, run, take_turns


@pytest.mark.study
@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_measures_every_side(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = run(import_module(f"studies.benchmarks.{name}").build, BenchmarkOptions(quick=True, out=tmp_path / "out.json"))
    document = json.loads((tmp_path / "out.json").read_text())
    assert {side for row in results for side in (row.side, row.peer)} == set(document["seconds"])
    assert all(len(seconds) == 3 for seconds in document["seconds"].values())
    printed = capsys.readouterr().out
    assert all(f"{row.value:.3f}" in printed for row in results)


def test_a_slow_round_cancels_in_a_paired_ratio() -> None:
    rng = np.random.default_rng(0)
    under = rng.uniform(1, 2, size=15) * np.where(np.arange(15) < 5, 10, 1)
    assert ratio(list(2 * under), list(under), rng) == pytest.approx((2, 2, 2))
    with pytest.raises(ValueError, match="2 and 1 rounds do not pair"):
        ratio([1, 2], [1], rng)


def test_sides_take_equally_many_turns_and_may_measure_themselves() -> None:
    calls: list[str] = []
    sides = {"own": lambda: calls.append("own") or 2.5, "timed": lambda: calls.append("timed")}
    seconds = take_turns(sides, 4, np.random.default_rng(0))
    assert seconds["own"] == [2.5] * 4
    assert len(seconds["timed"]) == 4
    assert sorted(calls) == ["own"] * 5 + ["timed"] * 5


def test_peak_memory_counts_what_is_held_at_one_time() -> None:
    import torch

    def step() -> None:
        for _ in range(3):
            torch.zeros(1 << 18)  # 1 MiB, released before the next

    assert 1 << 20 <= peak_bytes(step) < 3 << 20


def test_fewer_than_three_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match="--rounds must be at least 3"):
        run(import_module("studies.benchmarks.sweeps").build, BenchmarkOptions(quick=True, rounds=2))
