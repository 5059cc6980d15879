"""Theorems of the statistics over seeds, against scipy and the standard library."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats
from scipy.special import stdtrit

from studies.common.stats import interval, mean, median, outliers, paired_difference, rate, summary
from studies.common.tables import percent

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


@given(SAMPLES, st.integers(0, 12))
def test_an_undefined_value_keeps_its_place_and_counts_in_nothing(values: list[float], place: int) -> None:
    with_hole = [*values[:place], None, *values[place:]]
    assert summary(with_hole) == {**summary(values), "seeds": with_hole}


@pytest.mark.parametrize("level", [0.0, 1.0, -0.5, 95.0])
def test_a_level_outside_zero_and_one_is_refused(level: float) -> None:
    with pytest.raises(ValueError, match="strictly between 0 and 1"):
        interval([0.1, 0.2], level)


@given(st.dictionaries(st.integers(0, 20), RATES, min_size=1))
def test_the_difference_of_an_arm_from_itself_is_exactly_zero(arm: dict[int, float]) -> None:
    seeds, result = paired_difference(arm, dict(arm))
    assert seeds == sorted(arm)
    assert result["seeds"] == [0.0] * len(arm)
    assert (result["mean"], result["median"]) == (0.0, 0.0)
    assert (result["lo"], result["hi"]) == ((0.0, 0.0) if len(arm) > 1 else (None, None))


def test_the_paired_interval_is_that_of_the_paired_t_test_and_not_of_two_independent_means() -> None:
    rng = np.random.default_rng(2)
    luck = rng.normal(0, 0.3, 8)  # what a seed does to both arms
    arm, reference = luck + rng.normal(0.1, 0.02, 8), luck + rng.normal(0, 0.02, 8)
    _, result = paired_difference(dict(enumerate(arm.tolist())), dict(enumerate(reference.tolist())))
    paired = scipy_stats.ttest_rel(arm, reference).confidence_interval(0.95)
    assert (result["lo"], result["hi"]) == pytest.approx((paired.low, paired.high), abs=1e-12)
    unpaired = scipy_stats.ttest_ind(arm, reference).confidence_interval(0.95)
    assert paired.high - paired.low < 0.3 * (unpaired.high - unpaired.low)


def test_only_seeds_of_both_arms_are_paired_and_undefined_ones_stay_undefined() -> None:
    seeds, result = paired_difference({3: 0.5, 1: 0.9, 2: None}, {2: 0.1, 3: 0.25, 7: 0.0})
    assert seeds == [2, 3]
    assert result["seeds"] == [None, 0.25]
    assert result["n"] == 1


@given(st.dictionaries(st.integers(0, 9), RATES, min_size=2), st.dictionaries(st.integers(0, 9), RATES, min_size=2))
def test_a_difference_changes_its_sign_with_its_sides(a: dict[int, float], b: dict[int, float]) -> None:
    forth, back = paired_difference(a, b)[1], paired_difference(b, a)[1]
    for key, mirrored in (("mean", "mean"), ("median", "median"), ("lo", "hi")):
        one, other = forth[key], back[mirrored]
        assert (one is None and other is None) or one == pytest.approx(-other, abs=1e-15)


def test_the_seed_that_fails_is_marked_and_the_others_are_not() -> None:
    values = [0.05, 0.04, 0.24, 0.03, 0.05, 0.05, 0.02, 0.04]
    assert outliers(values) == [value == 0.24 for value in values]
    assert outliers([None, *values]) == [False, *outliers(values)]


def test_small_or_common_differences_are_no_outliers() -> None:
    assert not any(outliers([0.010, 0.010, 0.010, 0.060]))  # far in deviations, near in what matters
    assert not any(outliers([0.1, 0.3, 0.5, 0.7, 0.9]))
    assert not any(outliers([0.4, 0.4, 0.5, 0.6, 0.94]))  # three robust deviations are .445 here, and three plain ones .3
    assert outliers([0.4, 0.4, 0.5, 0.6, 0.95])[-1]
    assert outliers([0.0, 1.0]) == [False, False]
    assert outliers([]) == []


def test_nothing_has_no_mean() -> None:
    assert mean([None]) is None
    assert median([]) is None


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_is_refused_wherever_it_stands(wrong: float) -> None:
    for values in ([wrong, 1.0, 2.0], [1.0, wrong, None], [2.0, 1.0, wrong]):
        for statistic in (mean, median, interval, summary, outliers):
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


def test_large_values_of_both_signs_have_an_interval() -> None:
    lo, hi = interval([1e200, -1e200])
    assert (lo, hi) == pytest.approx(scipy_stats.t.interval(0.95, 1, loc=0, scale=1e200), rel=1e-12)
    assert mean([1.5e308, 1.5e308]) == median([1.5e308, 1.5e308]) == 1.5e308


@given(st.floats(allow_nan=False, allow_infinity=False), st.integers(2, 12))
def test_seeds_that_agree_have_their_value_as_mean_and_median_and_an_interval_of_no_width(value: float, n: int) -> None:
    result = summary([value] * n)
    assert [result[key] for key in ("mean", "median", "lo", "hi")] == [value] * 4
    assert paired_difference(dict.fromkeys(range(n), value), dict.fromkeys(range(n), 0.0))[1]["lo"] == value


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=6))
def test_mean_and_median_are_between_the_least_and_the_greatest(values: list[float]) -> None:
    for statistic in (mean, median):
        centre = statistic(values)
        assert centre is not None
        assert min(values) <= centre <= max(values)


def test_an_interval_wider_than_a_float_names_the_remedy_and_outliers_have_none() -> None:
    huge = [1e308, -1e308]
    assert mean(huge) == median(huge) == 0
    for statistic in (interval, summary):
        with pytest.raises(ValueError, match=r"larger than any float: give the values in a larger unit"):
            statistic(huge)
    assert outliers([1.7e308, -1.7e308, 0.0, 1.0, -1.0, 2.0]) == [True, True, False, False, False, False]
    assert outliers([1.7e308, -1.7e308, -1.7e308]) == [True, False, False]


@given(SAMPLES)
def test_the_numbers_are_those_of_the_plain_formulas_to_the_last_bit(values: list[float]) -> None:
    """Published tables hold them; only what rounding puts outside of the values is another."""
    n, result = len(values), summary(values)
    centre = min(max(math.fsum(values) / n, min(values)), max(values))
    half = float(stdtrit(n - 1, 0.975)) * math.sqrt(math.fsum((v - centre) ** 2 for v in values) / (n - 1)) / math.sqrt(n)
    assert (result["mean"], result["lo"], result["hi"]) == (centre, centre - half, centre + half)


def test_a_rate_is_printed_in_percent_with_its_wilson_interval() -> None:
    z, p, n = 1.959963984540054, 0.25, 40
    center, half = (p + z**2 / (2 * n)) / (1 + z**2 / n), z / (1 + z**2 / n) * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    assert percent(rate(10, 40)) == f"25.0 [{100 * (center - half):.1f}, {100 * (center + half):.1f}]"
    assert percent(rate(0, 0)) == "n/a"
