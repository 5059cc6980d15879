"""Calibration: what true probabilities must score, and what the two maps must do."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit

from mi_route2.probes.auroc import auroc
from mi_route2.probes.calibration import Isotonic, brier, ece, fit_isotonic, fit_platt, reliability

PROBABILITIES = st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=20)


def drawn(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities and labels drawn from them."""
    rng = np.random.default_rng(seed)
    p = rng.random(n)
    return p, rng.random(n) < p


def test_ece_of_perfect_probabilities_goes_to_zero_as_one_over_root_n():
    small, large = (np.mean([ece(*drawn(n, seed)) for seed in range(10)]) for n in (1_000, 100_000))
    assert large < 0.005
    assert 5 < small / large < 20  # sqrt(100) = 10


def test_ece_of_exact_frequencies_is_zero_and_of_shifted_ones_the_shift():
    p = np.repeat([0.25, 0.75], 8)
    positive = np.concatenate([np.arange(8) < 2, np.arange(8) < 6])
    assert ece(p, positive) == 0
    assert ece(p + 0.125, positive) == pytest.approx(0.125)
    assert brier(p, positive) == pytest.approx(0.25 * 0.75)


def test_overconfidence_raises_ece_and_brier_but_not_auroc():
    p, positive = drawn(20_000)
    sharp = expit(3 * np.log(p / (1 - p)))
    assert ece(sharp, positive) > 0.1 > ece(p, positive)
    assert brier(sharp, positive) > brier(p, positive)
    assert auroc(sharp, positive) == auroc(p, positive)


@given(PROBABILITIES, st.integers(1, 15))
@settings(max_examples=200, deadline=None)
def test_reliability_bins_partition_the_items(items, bins):
    p, positive = np.array([x for x, _ in items]), np.array([y for _, y in items])
    curve = reliability(p, positive, bins)
    assert sum(point.count for point in curve) == len(items)
    assert sum(point.count * point.rate for point in curve) == pytest.approx(positive.sum())
    assert sum(point.count * point.confidence for point in curve) == pytest.approx(p.sum())
    assert all(point.low - 1e-12 <= point.confidence <= point.high + 1e-12 for point in curve)
    assert [point.low for point in curve] == sorted({point.low for point in curve})
    assert 0 <= ece(p, positive, bins) <= 1
    # Jensen: coarser bins can only hide miscalibration, and one bin sees the means alone.
    assert ece(p, positive, 1) == pytest.approx(abs(p.mean() - positive.mean()), abs=1e-12)
    assert ece(p, positive, 2 * bins) >= ece(p, positive, bins) - 1e-9


@pytest.mark.parametrize("bins", [10, 49, 100])
def test_a_probability_is_between_the_edges_of_its_own_bin(bins):
    """The edges themselves open their bin, and what is just below belongs to the one before."""
    edges = np.arange(bins) / bins
    for p in (edges, np.nextafter(edges[1:], 0)):
        for point, value in zip(reliability(p, np.zeros(len(p), dtype=bool), bins), p, strict=True):
            assert point.count == 1
            assert point.low <= value < point.high


@pytest.mark.parametrize("p", [np.array([0.5, 1.5]), np.array([-0.1, 0.5]), np.array([np.nan, 0.5])])
def test_what_is_no_probability_is_refused(p):
    with pytest.raises(ValueError, match="fit_platt"):
        brier(p, np.array([True, False]))


def test_platt_recovers_a_known_logistic_curve():
    rng = np.random.default_rng(0)
    scores = 50 + 10 * rng.normal(size=50_000)
    positive = rng.random(50_000) < expit(0.3 * (scores - 55))
    platt = fit_platt(scores, positive)
    assert platt.slope == pytest.approx(0.3, rel=0.03)
    assert -platt.intercept / platt.slope == pytest.approx(55, abs=0.2)


def test_platt_is_equivariant_to_the_units_of_the_score():
    p, positive = drawn(500)
    a, b = fit_platt(p, positive), fit_platt(1e4 * p + 3, positive)
    np.testing.assert_allclose(a(p), b(1e4 * p + 3), rtol=1e-3)
    fallen = fit_platt(-p, positive)
    np.testing.assert_allclose(a(p), fallen(-p), rtol=1e-6)
    assert auroc(fallen(-p), positive) == pytest.approx(1 - auroc(-p, positive))


def test_platt_stays_finite_on_separated_scores_and_meets_its_soft_targets():
    """With one score a class the fit can reach Platt's targets (n1 + 1)/(n1 + 2) and 1/(n0 + 2) exactly."""
    scores, positive = np.array([0.0] * 6 + [1.0] * 3), np.array([False] * 6 + [True] * 3)
    platt = fit_platt(scores, positive)
    np.testing.assert_allclose(platt(np.array([0.0, 1.0])), [1 / 8, 4 / 5], atol=1e-3)


def test_isotonic_is_monotone_and_exactly_calibrated_on_its_own_data():
    rng = np.random.default_rng(3)
    scores = rng.normal(size=400)
    positive = rng.random(400) < expit(2 * scores)
    isotonic = fit_isotonic(scores, positive)
    p = isotonic(np.sort(scores))
    assert (np.diff(p) >= 0).all()
    for level in np.unique(p):  # pool-adjacent-violators: every level is the rate of its own block
        block = np.isclose(isotonic(scores), level)
        assert positive[block].mean() == pytest.approx(level, abs=1e-6)
    assert isotonic(np.array([-99.0, 99.0])).tolist() == [p[0], p[-1]]


@pytest.mark.parametrize("fit", [fit_platt, fit_isotonic])
def test_calibrators_improve_held_out_scores_and_keep_their_order(fit):
    rng = np.random.default_rng(4)
    scores = rng.normal(size=4000)
    positive = rng.random(4000) < expit(2 * scores - 1)
    calibrator = fit(scores[:2000], positive[:2000])
    raw, calibrated = expit(scores[2000:]), calibrator(scores[2000:])
    assert ece(calibrated, positive[2000:]) < 0.04 < ece(raw, positive[2000:])
    assert brier(calibrated, positive[2000:]) < brier(raw, positive[2000:])
    before, after = auroc(scores[2000:], positive[2000:]), auroc(calibrated, positive[2000:])
    assert after == pytest.approx(before, abs=0.01)  # isotonic makes ties


@pytest.mark.parametrize("n", [7, 10, 23])
def test_a_score_that_is_the_same_everywhere_says_the_rate_everywhere(n):
    """The spread of so many 3.3 is a rounding error, not the unit in which the score is to be read."""
    positive = np.arange(n) % 2 == 0
    for value in (0.0, 0.1, 3.3, -1e9 / 7):
        platt, near = fit_platt(np.full(n, value), positive), np.array([value, value + 1e-3, value - 1e-3])
        np.testing.assert_allclose(platt(near), platt(near[:1])[0], atol=1e-3)
        target = (positive.sum() * (positive.sum() + 1) / (positive.sum() + 2) + (~positive).sum() / ((~positive).sum() + 2)) / n
        assert platt(near[:1])[0] == pytest.approx(target, abs=1e-6)


@pytest.mark.parametrize("fit", [fit_platt, fit_isotonic])
@pytest.mark.parametrize("power", [-1000, -200, -30, 30, 200, 1000])
def test_a_power_of_two_in_the_units_of_the_score_changes_no_bit_of_a_probability(fit, power):
    p, positive = drawn(300)
    for scores in (p, p - 0.5, -p):
        scaled = np.ldexp(scores, power)
        np.testing.assert_array_equal(fit(scaled, positive)(scaled), fit(scores, positive)(scores))


@pytest.mark.parametrize("fit", [fit_platt, fit_isotonic])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_narrow_scores_have_the_probabilities_of_the_same_numbers_in_float64(fit, dtype):
    p, positive = drawn(300)
    for scale in (1e-7, 1.0, 60_000.0):
        scores = (scale * p).astype(dtype)
        narrow, wide = fit(scores, positive), fit(scores.astype(np.float64), positive)
        assert narrow == wide
        np.testing.assert_array_equal(narrow(scores), wide(scores.astype(np.float64)))


@pytest.mark.parametrize("value", [1.0, -3e-300, 5e-324, 5e307])
def test_isotonic_ranks_scores_that_differ_in_the_last_bit_alone(value):
    positive = np.arange(60) % 3 > 0
    below = np.nextafter(value, -np.inf)
    assert fit_isotonic(np.where(positive, value, below), positive)(np.array([below, value])).tolist() == [0, 1]


def test_isotonic_keeps_small_scores_apart_beside_the_largest():
    """Between two knots the map is a line, in exact fractions; every knot has its own probability."""
    knots = np.array([-1.7e308, -1.0, -5e-324, 0.0, 5e-324, 1e-323, 2e-300, 1.0, 1e300, 1.7e308])
    p = np.arange(len(knots)) / (len(knots) - 1)
    isotonic = Isotonic(tuple(knots.tolist()), tuple(p.tolist()))
    assert isotonic(knots).tolist() == p.tolist()
    between = np.array([-1e308, -0.25, 1e-300, 0.5, 3e299, 1.2e308])
    exact = [Fraction(score) for score in knots.tolist()]
    for score, mapped in zip(between.tolist(), isotonic(between).tolist()):
        i = sum(knot <= score for knot in knots.tolist()) - 1
        share = (Fraction(score) - exact[i]) / (exact[i + 1] - exact[i])
        assert mapped == pytest.approx(p[i] + float(share) * (p[i + 1] - p[i]), abs=1e-15)
    scores = np.repeat([5e-324, 1e-323, 1e300], 20)
    positive = np.arange(60) % 20 < np.repeat([2, 10, 18], 20)
    assert fit_isotonic(scores, positive)(np.array([5e-324, 1e-323, 1e300])).tolist() == pytest.approx([0.1, 0.5, 0.9])


def test_no_rounding_lifts_a_probability_above_one():
    """No measure would take a probability above 1: numpy's interpolation gives 1 + 2e-16 here."""
    isotonic, score = Isotonic((-0.6202134520153778, 0.04762023969457816), (0.2627311587765138, 1.0)), 0.047620239694578154
    assert np.interp(score, isotonic.scores, isotonic.probabilities) > 1
    p = isotonic(np.array([score]))
    assert p.tolist() == [1.0]
    assert brier(p, np.array([True])) == 0


def test_isotonic_is_numpys_interpolation_where_that_does_not_collapse():
    rng = np.random.default_rng(6)
    for n in (1, 2, 3, 40):
        knots = np.unique(rng.normal(size=n) * 10.0 ** rng.integers(-3, 3))
        p = np.sort(rng.random(len(knots)))
        scores = np.concatenate([knots, rng.normal(size=500) * 3, [-np.inf, np.inf]])
        mapped = Isotonic(tuple(knots.tolist()), tuple(p.tolist()))(scores)
        np.testing.assert_allclose(mapped, np.interp(scores, knots, p), rtol=0, atol=1e-15)
        assert np.isnan(Isotonic(tuple(knots.tolist()), tuple(p.tolist()))(np.array([np.nan])))


@pytest.mark.parametrize("fit", [fit_platt, fit_isotonic])
def test_the_widest_scores_have_finite_probabilities(fit):
    scores, positive = np.array([-1.7e308] * 6 + [1.7e308] * 6), np.arange(12) >= 6
    p = fit(scores, positive)(np.array([-1.7e308, 0.0, 1.7e308]))
    assert p[0] < 0.2 < p[1] < 0.8 < p[2]


def test_scores_too_small_for_a_slope_are_refused_by_platt():
    scores = np.array([0.0] * 6 + [5e-324] * 6)
    with pytest.raises(ValueError, match="slope is larger than any float: give scores in a smaller unit"):
        fit_platt(scores, np.arange(12) >= 6)


@pytest.mark.parametrize("fit", [fit_platt, fit_isotonic])
def test_a_calibrator_needs_both_classes_and_finite_scores(fit):
    with pytest.raises(ValueError, match="both classes"):
        fit(np.array([0.0, 1.0]), np.array([True, True]))
    with pytest.raises(ValueError, match="finite"):
        fit(np.array([0.0, np.nan]), np.array([True, False]))


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("measure", [brier, ece, reliability])
def test_narrow_probabilities_are_measured_as_the_same_numbers_in_float64(measure, dtype):
    p, positive = drawn(3000)
    assert measure(p.astype(dtype), positive) == measure(p.astype(dtype).astype(np.float64), positive)


def test_bins_and_sizes_are_checked():
    with pytest.raises(ValueError, match="at least 1"):
        reliability(np.array([0.5]), np.array([True]), bins=0)
    with pytest.raises(ValueError, match="at least one"):
        ece(np.array([]), np.array([], dtype=bool))


def test_lists_and_halves_of_a_bin_are_refused():
    p, positive = drawn(9)
    for score in (brier, ece, reliability, fit_platt, fit_isotonic):
        with pytest.raises(TypeError, match=r"must be Float\[ndarray, 'n'\], not the list"):
            score(p.tolist(), positive)
    for fit in (fit_platt, fit_isotonic):
        with pytest.raises(ValueError, match=r"scores must be Float\[ndarray, 'n'\], not a Tensor of torch.float64"):
            fit(p, positive)(torch.from_numpy(p))
    with pytest.raises(TypeError, match=r"bins must be int, not the float 2\.5"):
        ece(p, positive, 2.5)


def test_labels_of_zero_and_one_are_those_of_false_and_true():
    p, positive = drawn(60)
    for score in (brier, ece, reliability, fit_platt, fit_isotonic):
        assert score(p, positive.astype(int)) == score(p, positive)
        with pytest.raises(ValueError, match=r"Labels are True and False, or 1 and 0, not \[2\]"):
            score(p, positive * 2)
