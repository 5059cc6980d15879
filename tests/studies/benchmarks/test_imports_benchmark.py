"""The cost of a start is that process's processor time, and torch's own is taken off imports round by round."""

import numpy as np
import pytest
from measured import Quick

from studies.benchmarks import imports
from studies.benchmarks.imports import BEYOND, HELP, STARTS, TORCH, rows, run, start
from studies.benchmarks.options import ImportsOptions


def test_torchs_own_time_is_taken_off_round_by_round() -> None:
    torchs, imported, helped = [1.0, 2.0, 3.0], [1.3, 2.3, 3.3], [0.4, 0.5, 0.6]
    seconds = {name: imported if how == "-c" else helped for name, (how, *_) in STARTS.items()} | {TORCH: torchs}
    found = {row.name: row for row in rows(seconds, np.random.default_rng(0))}
    own = found["import mi_route2"]
    assert (own.time.value, own.time.lo, own.time.hi, own.limit) == (*[pytest.approx(0.3)] * 3, BEYOND)
    assert (found[TORCH].time.value, found[TORCH].limit) == (2.0, None)
    told = found["studies.route2 --help"]
    assert (told.time.value, told.limit) == (0.5, HELP)
    assert 0.4 <= told.time.lo < told.time.hi <= 0.6


def test_a_start_that_fails_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(imports.STARTS, "broken", ("-c", "raise SystemExit(3)"))
    with pytest.raises(Exception, match="returned non-zero exit status 3"):
        start("broken")


@pytest.mark.process
def test_what_a_process_works_is_counted_and_its_sleep_is_not(monkeypatch: pytest.MonkeyPatch, quick: Quick) -> None:
    works = "import time; end = time.process_time() + {}\nwhile time.process_time() < end: pass\ntime.sleep(0.3)"
    monkeypatch.setattr(imports, "STARTS", {TORCH: ("-c", works.format(0.1)), "import mi_route2": ("-c", works.format(0.35))})
    _, document = quick(run, ImportsOptions)
    assert document["rounds"] == 3
    assert document["rows"][1]["time"]["value"] == pytest.approx(0.25, abs=0.1)
