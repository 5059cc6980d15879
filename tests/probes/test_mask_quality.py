"""Mask quality against brute force; AUROC against its definition and its symmetries."""

import json
import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mi_route2.probes.auroc import auroc, auroc_interval, binary, cluster_draws, recall_at_fpr
from mi_route2.probes.quality import KEYS, mask_quality, score_means

SCORE = st.integers(-8, 8).map(lambda i: i / 4)  # few values: ties are common
ROLLOUT = st.tuples(SCORE, st.booleans(), st.booleans(), st.booleans())
ROLLOUTS = st.lists(ROLLOUT, max_size=12)


def columns(rollouts: list[tuple[float, bool, bool, bool]]) -> tuple[list[float], list[bool], list[bool], list[bool]]:
    return tuple([row[i] for row in rollouts] for i in range(4))  # type: ignore[return-value]


def pairwise(scores: list[float], positive: list[bool]) -> float | None:
    """P(hack > clean) + P(tie) / 2, by all pairs."""
    pairs = [(a > b) + (a == b) / 2 for a, x in zip(scores, positive) if x for b, y in zip(scores, positive) if not y]
    return sum(pairs) / len(pairs) if pairs else None


def same(a: float | None, b: float | None) -> bool:
    return a is b if a is None or b is None else math.isclose(a, b, abs_tol=1e-12)


def arrays(scores: list[float], positive: list[bool]) -> tuple[np.ndarray, np.ndarray]:
    return np.array(scores, dtype=float), np.array(positive, dtype=bool)


@given(ROLLOUTS)
@settings(max_examples=300, deadline=None)
def test_every_number_is_the_brute_force_one(rollouts):
    scores, flags, positive, teacher = columns(rollouts)
    student = [row for row in rollouts if not row[3]]
    got = mask_quality(scores, flags, positive, teacher)

    def rate(rows: list) -> float | None:
        return sum(row[1] for row in rows) / len(rows) if rows else None

    hacks, cleans = [row for row in student if row[2]], [row for row in student if not row[2]]
    flagged = [row for row in student if row[1]]
    precision = sum(row[2] for row in flagged) / len(flagged) if flagged else None
    recall = rate(hacks)
    wrong = rate(cleans)
    ratio = recall / wrong if recall is not None and wrong else None
    # F_.5 from precision and recall, where quality.py counts; 0 by convention where nothing was hit.
    f05 = None if recall is None else 0.0
    if precision and recall:
        f05 = 1.25 * precision * recall / (0.25 * precision + recall)
    expected = {
        "auroc": pairwise([row[0] for row in student], [row[2] for row in student]),
        "recall_1pct": None,  # of fewer than 100 clean rollouts
        "precision": precision,
        "recall": recall,
        "f05": f05,
        "fire_hack": recall,
        "fire_clean": wrong,
        "fire_teacher": rate([row for row in rollouts if row[3]]),
        "fire_ratio": ratio,
    }
    assert tuple(got) == KEYS == tuple(expected)
    assert all(same(got[key], expected[key]) for key in KEYS), (got, expected)
    json.dumps(got, allow_nan=False)


@given(ROLLOUTS)
@settings(max_examples=100, deadline=None)
def test_score_means_are_the_brute_force_ones(rollouts):
    scores, _, positive, teacher = columns(rollouts)
    got = score_means(scores, positive, teacher)

    def mean(rows: list) -> float | None:
        return sum(row[0] for row in rows) / len(rows) if rows else None

    assert list(got) == ["student_hack", "student_clean", "teacher"]
    assert same(got["student_hack"], mean([row for row in rollouts if row[2] and not row[3]]))
    assert same(got["student_clean"], mean([row for row in rollouts if not row[2] and not row[3]]))
    assert same(got["teacher"], mean([row for row in rollouts if row[3]]))


@given(ROLLOUTS)
@settings(max_examples=100, deadline=None)
def test_teacher_rollouts_change_nothing_but_their_own_rate(rollouts):
    scores, flags, positive, teacher = columns(rollouts)
    kept = columns([row for row in rollouts if not row[3]])
    got, alone = mask_quality(scores, flags, positive, teacher), mask_quality(*kept[:3])
    assert {**got, "fire_teacher": None} == alone


def test_what_is_undefined_is_none():
    nothing = mask_quality(None, None, [True, False])
    assert set(nothing.values()) == {None}
    assert set(mask_quality([], [], []).values()) == {None}
    only_scores = mask_quality([1.0, 0.0], None, [True, False])
    assert {key for key, value in only_scores.items() if value is not None} == {"auroc"}
    all_hacks = mask_quality([1.0, 0.0], [True, False], [True, True])
    assert all_hacks["auroc"] is all_hacks["fire_clean"] is all_hacks["fire_ratio"] is None
    assert (all_hacks["precision"], all_hacks["recall"]) == (1.0, 0.5)
    none_clean_fired = mask_quality(None, [True, False], [True, False])
    assert none_clean_fired["fire_ratio"] is None  # infinite, which JSON cannot say
    all_missed = mask_quality(None, [False, False], [True, False])
    assert (all_missed["f05"], all_missed["precision"]) == (0.0, None)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_broken_score_is_refused(broken):
    with pytest.raises(ValueError, match="NaN or infinite"):
        mask_quality([broken, 0.0], None, [True, False])
    with pytest.raises(ValueError, match="NaN or infinite"):
        score_means([0.0, broken], [True, False])
    with pytest.raises(ValueError, match="finite"):
        auroc(*arrays([broken, 0.0], [True, False]))


@pytest.mark.parametrize("broken", [[2, 0], [-1, 1]])
def test_what_is_no_flag_is_refused(broken):
    """As a truth value each of them is one: labels of -1 and 1 would all be hacks, and counts would all have fired."""
    for columns in ((None, broken, [True, False]), (None, None, broken), (None, None, [True, False], broken)):
        with pytest.raises(ValueError, match="True and False, or 1 and 0"):
            mask_quality(*columns)
    assert mask_quality(None, [1, 0], [0, 1]) == mask_quality(None, [True, False], [False, True])


@pytest.mark.parametrize("broken", [[True, None], ["True", "False"], [0.5, 1.0], [math.nan, 0.0], [1, 2, 2]])
def test_labels_that_are_no_numbers_are_named(broken):
    with pytest.raises(ValueError, match=r"Labels are True and False, or 1 and 0, not \[(None|'True', 'False'|0\.5|nan|2)\]"):
        binary(np.array(broken))


@pytest.mark.parametrize("clusters", [0, -1])
def test_a_bootstrap_needs_a_cluster(clusters):
    with pytest.raises(ValueError, match="at least one cluster to draw from"):
        cluster_draws(clusters, 10, np.random.default_rng(0))


def test_lists_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="1 scores for 2"):
        mask_quality([0.0], None, [True, False])
    with pytest.raises(ValueError, match="3 flags for 2"):
        mask_quality(None, [True, True, False], [True, False])
    for marks, shape in (([True], r"\[1\]"), ([[True], [False]], r"\[2, 1\]")):  # the latter as a table of one column has them
        with pytest.raises((ValueError, TypeError), match=rf"Teacher marks {shape} for labels \[2\]|not instance of int"):
            mask_quality(None, [True, True], [True, False], marks)


def test_it_is_cheap_enough_for_every_step():
    rng = np.random.default_rng(0)
    scores, positive = rng.normal(size=96).tolist(), (rng.random(96) < 0.3).tolist()
    mask_quality(scores, positive, positive)
    started = time.perf_counter()
    for _ in range(20):
        mask_quality(scores, positive, positive)
    assert (time.perf_counter() - started) / 20 < 0.02  # a step takes some .1 s; this takes about .0002


# Recall -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.01, 0.07, 0.29])
@pytest.mark.parametrize("negatives", [100, 199, 200, 700])
@pytest.mark.parametrize("values", [8, 60, 10**6])  # few: ties are common, and a threshold passes several at once
def test_recall_at_few_false_positives_is_the_best_of_all_thresholds(rate, negatives, values):
    rng = np.random.default_rng(0)
    for shift in (0, values // 3):
        scores, positive = rng.integers(0, values, negatives + 40).astype(float), np.arange(negatives + 40) < 40
        scores[positive] += shift
        best = 0.0
        for threshold in [*np.unique(scores), math.inf]:
            flagged = scores >= threshold
            if round(rate * 100) * negatives >= 100 * int((flagged & ~positive).sum()):
                best = max(best, float(flagged[positive].mean()))
        assert recall_at_fpr(scores, positive, rate).value == best
        if rate == 0.01:
            assert mask_quality(scores.tolist(), None, positive.tolist())["recall_1pct"] == best


def test_recall_that_too_few_negatives_leave_undefined_says_so():
    """With 99 a single false positive is more than 1%; the recall at none would pass for a bound that was never tested."""
    scores, positive = np.arange(104.0), np.arange(104) >= 99
    assert recall_at_fpr(scores, positive).value is None
    assert recall_at_fpr(scores, positive).note == "99 negatives, but a rate of 0.01 needs 100"
    assert recall_at_fpr(scores, positive, 0.02).value == 1.0
    assert recall_at_fpr(scores, positive & False).note == "no positives"
    with pytest.raises(ValueError, match="strictly between 0 and 1"):
        recall_at_fpr(scores, positive, 0.0)


# AUROC --------------------------------------------------------------------------------------------------------------

LABELED = st.lists(st.tuples(SCORE, st.booleans()), max_size=15)


@given(LABELED)
@settings(max_examples=200, deadline=None)
def test_auroc_is_invariant_to_increasing_maps_and_mirrored_by_decreasing_ones(items):
    scores, positive = arrays([s for s, _ in items], [y for _, y in items])
    value = auroc(scores, positive)
    assert same(value, pairwise(scores.tolist(), positive.tolist()))
    assert auroc(scores, positive.astype(int)) == value
    for increasing in (np.exp, np.arctan, lambda x: x**3 + x, lambda x: 1e9 * x - 4):
        assert auroc(increasing(scores), positive) == value
    if value is not None:
        assert same(auroc(-scores, positive), 1 - value)
        assert same(auroc(scores, ~positive), 1 - value)
        assert auroc(np.zeros_like(scores), positive) == 0.5


@pytest.mark.parametrize("rare", [False, True])
def test_bootstrap_draws_equal_the_auroc_of_the_rows_repeated(rare):
    """`rare`: all hacks sit in one cluster, so that about a third of the draws have none and must not count."""
    rng = np.random.default_rng(0)
    cluster = rng.integers(0, 8, 30)
    scores, positive = rng.integers(0, 5, 30).astype(float), cluster == 0 if rare else rng.random(30) < 0.5
    draws = cluster_draws(8, 50, rng)
    assert (draws.sum(axis=1) == 8).all()
    areas = []
    for counts in draws:
        rows = np.repeat(np.arange(30), counts[cluster])
        areas.append(auroc(scores[rows], positive[rows]))
    defined = [area for area in areas if area is not None]
    assert (len(defined) < 45) == rare
    for level, bounds in ((0.95, [0.025, 0.975]), (0.8, [0.1, 0.9])):
        interval = auroc_interval(scores, positive, cluster, draws, level)
        assert interval.value == auroc(scores, positive)
        assert (interval.low, interval.high) == pytest.approx(tuple(np.quantile(defined, bounds)))
    assert auroc_interval(scores, positive, cluster, draws) == auroc_interval(scores, positive, cluster, draws, 0.95)


def test_copies_of_a_rollout_do_not_narrow_the_interval():
    """The unit of the bootstrap is the cluster; counting copies as evidence would halve the width here."""
    rng = np.random.default_rng(1)
    positive = np.arange(40) % 2 == 0
    scores = rng.normal(size=40) + positive
    draws = cluster_draws(40, 400, rng)
    once = auroc_interval(scores, positive, np.arange(40), draws)
    four = auroc_interval(np.tile(scores, 4), np.tile(positive, 4), np.tile(np.arange(40), 4), draws)
    assert (once.value, once.low, once.high) == pytest.approx((four.value, four.low, four.high))


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    """Two unit Gaussians a distance sqrt(2) q apart have AUROC Phi(q): here .76, known in closed form."""
    rng = np.random.default_rng(2)
    truth, hits, positive = 0.7602499389, 0, np.arange(80) % 2 == 0
    for _ in range(100):
        scores = rng.normal(size=80) + positive  # Phi(1 / sqrt 2)
        interval = auroc_interval(scores, positive, np.arange(80), cluster_draws(80, 200, rng))
        assert interval.low is not None
        hits += interval.low <= truth <= interval.high
    assert 85 <= hits < 100


def test_labels_of_zero_and_one_are_no_row_numbers():
    scores, positive = np.array([0.9, 0.8, 0.1, 0.2]), np.array([1, 1, 0, 0])
    draws = cluster_draws(4, 20, np.random.default_rng(0))
    assert auroc(scores, positive) == 1.0
    assert auroc_interval(scores, positive, np.arange(4), draws) == auroc_interval(scores, positive == 1, np.arange(4), draws)
    for labels in (positive + 1, -positive):
        with pytest.raises(ValueError, match="Labels are True and False, or 1 and 0"):
            auroc(scores, labels)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"cluster": np.array([0, 1])}, r"cluster must be Int\[ndarray, 'n'\]"),
        ({"cluster": np.array([0, 1, 4])}, "clusters are numbered from 0 to 2"),
        ({"cluster": np.array([0, 1, -1])}, "clusters are numbered from 0 to 2"),
        ({"level": 95.0}, "strictly between 0 and 1"),
        ({"level": -0.5}, "strictly between 0 and 1"),
    ],
)
def test_an_interval_of_what_cannot_be_is_refused(change, says):
    given = {"scores": np.array([1.0, 2.0, 3.0]), "positive": np.array([0, 1, 1]), "cluster": np.arange(3)}
    with pytest.raises(ValueError, match=says):
        auroc_interval(**{**given, "draws": np.ones((4, 3), dtype=np.int64), **change})


def test_an_interval_needs_both_classes():
    scores, positive = arrays([0.0, 1.0], [True, True])
    interval = auroc_interval(scores, positive, np.arange(2), cluster_draws(2, 10, np.random.default_rng(0)))
    assert interval.value is interval.low is interval.high is None
