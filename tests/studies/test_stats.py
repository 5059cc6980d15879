"""Theorems of the statistics over seeds, against scipy and the standard library."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from studies.common.stats import interval, mean, median, summary

RATES = st.floats(0, 1).map(lambda value: round(value, 9))
SAMPLES = st.lists(RATES, min_size=2, max_size=12)


@given(SAMPLES, st.floats(0.5, 0.99))
def test_the_interval_is_scipys_student_t(values: list[float], level: float) -> None:
    lo, hi = interval(values, level)
    centre, error = np.mean(values), scipy_stats.sem(values)
    expected = scipy_stats.t.interval(level, len(values) - 1, loc=centre, scale=error) if error > 1e-12 else (centre, centre)
    assert lo == pytest.approx(expected[0], abs=1e-9)
    assert hi == pytest.approx(expected[1], abs=1e-9)


@given(st.lists(RATES, min_size=1, max_size=12))
def test_mean_and_median_are_those_of_the_standard_library(values: list[float]) -> None:
    result = summary(values)
    assert result["mean"] == pytest.approx(statistics.fmean(values), abs=1e-15)
    assert result["median"] == statistics.median(values)
    assert result["n"] == len(values)


@given(SAMPLES, st.randoms(use_true_random=False))
def test_the_order_of_the_seeds_changes_no_digit(values: list[float], random) -> None:
    shuffled = random.sample(values, len(values))
    before, after = summary(values), summary(shuffled)
    assert {**before, "seeds": None} == {**after, "seeds": None}
    assert after["seeds"] == shuffled


def test_one_seed_has_no_interval_and_no_seed_has_nothing() -> None:
    assert summary([0.25]) == {"mean": 0.25, "median": 0.25, "lo": None, "hi": None, "n": 1, "seeds": [0.25]}
    assert summary([]) == {"mean": None, "median": None, "lo": None, "hi": None, "n": 0, "seeds": []}


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_is_refused_wherever_it_stands(wrong: float) -> None:
    for values in ([wrong, 1.0, 2.0], [1.0, wrong, None], [2.0, 1.0, wrong]):
        for statistic in (mean, median, interval, summary):
            with pytest.raises(ValueError, match="holds NaN or infinity: correct its computation, or give None"):
                statistic(values)


@given(SAMPLES, st.integers(-1100, 1000))
def test_no_size_overflows_and_a_power_of_two_changes_no_digit(values: list[float], power: int) -> None:
    """Nor does it underflow, as long as the values themselves do not."""
    scaled = [math.ldexp(value, power) for value in values]
    if any(value and abs(math.frexp(value)[1] + power) > 1020 for value in values):
        return
    before, after = summary(values), summary(scaled)
    for key in ("mean", "median", "lo", "hi"):
        if abs(math.frexp(before[key])[1] + power) < 1020:
            assert after[key] == math.ldexp(before[key], power)
