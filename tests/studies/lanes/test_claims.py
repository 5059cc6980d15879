"""The verdict is a function of rule and interval, and the table of claims is one of the artifacts."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ttest_1samp
from tiny_lanes import tiny_settings, write_texts

from studies.lanes.arms import ARMS
from studies.lanes.claims import CLAIMS, VERDICTS, Claim, Rule, deviation, floor, judge, needed, power, verdict
from studies.lanes.estimates import bpb, combined, controls, extraction, gains, gauge_share, worst
from studies.lanes.found import Estimate, Found, load
from studies.lanes.measures import measured

pytestmark = pytest.mark.study

numbers = st.floats(-1e3, 1e3)
spread = st.lists(st.floats(-10, 10).map(lambda x: round(x, 3)), min_size=2, max_size=8)


def interval(low: float, high: float) -> Estimate:
    return Estimate((low + high) / 2, low, high, 3, "BPB")


@given(numbers, numbers, numbers)
def test_a_verdict_follows_from_where_the_interval_lies(a: float, b: float, reference: float) -> None:
    low, high = sorted((a, b))
    found = {rule: verdict(rule, interval(low, high), reference) for rule in ("higher", "lower")}
    if low <= reference <= high:
        assert set(found.values()) == {"null"}
    else:
        right: Rule = "higher" if low > reference else "lower"
        assert found.pop(right) == "supported"
        assert set(found.values()) == {"contradicted"}


@given(numbers, numbers, numbers)
def test_turning_everything_round_leaves_the_verdict(a: float, b: float, reference: float) -> None:
    low, high = sorted((a, b))
    assert verdict("higher", interval(low, high), reference) == verdict("lower", interval(-high, -low), -reference)


@given(spread)
def test_a_verdict_on_values_is_that_of_a_t_test(values: list[float]) -> None:
    estimate = Estimate.of(values, "BPB")
    if len(set(values)) > 1:
        p = float(ttest_1samp(values, 0.0).pvalue)
        if abs(p - 0.05) > 1e-6:
            assert (verdict("lower", estimate) == "null") == (p > 0.05)


@pytest.mark.parametrize(("holds", "expected"), [(True, "exact"), (False, "contradicted")])
def test_an_identity_holds_or_is_contradicted(holds: bool, expected: str) -> None:
    assert verdict("identity", Estimate.identity(0.0, holds, 1, "nats")) == expected


def test_one_seed_shows_nothing_and_a_quantity_is_no_identity() -> None:
    assert verdict("lower", Estimate.of([-5.0], "BPB")) == "null"
    assert verdict("lower", Estimate.of([-5.0], "BPB"), size=0.1) == "not testable here"
    with pytest.raises(ValueError, match="says neither"):
        verdict("identity", interval(0.0, 1.0))


@given(numbers, numbers, numbers, st.floats(0.01, 1e3), st.sampled_from(["higher", "lower"]))
def test_what_the_interval_rules_out_decides_on_a_claim_with_a_size(
    a: float, b: float, reference: float, size: float, rule: Rule
) -> None:
    """Three effects are in question: none, the claimed one, and one of the other sign. The verdict names what is left of them."""
    low, high = sorted((a, b))
    claimed = reference + size if rule == "higher" else reference - size
    found = verdict(rule, interval(low, high), reference, size)
    wrong_side = high < reference if rule == "higher" else low > reference
    reaches = high >= claimed if rule == "higher" else low <= claimed
    if wrong_side:
        assert found == "contradicted"
    elif not reaches:
        assert found == "claimed size excluded"
    elif low <= reference <= high:
        assert found == "not testable here"  # an estimate without values has no floor to show
    else:
        assert found == "supported"


def test_an_effect_above_the_floor_that_is_not_seen_is_null_and_one_below_is_not_testable() -> None:
    estimate = Estimate.of([-1.0, 1.0, -1.1, 1.2, 0.9, -0.8], "BPB")
    smallest = floor(estimate)
    assert smallest is not None
    assert estimate.high is not None
    assert verdict("higher", estimate, 0.0, estimate.high) == "not testable here"
    assert smallest > estimate.high  # the interval is narrower than what would be found in four runs of five
    assert verdict("higher", Estimate.of([5.0], "BPB"), 0.0, 1.0) == "not testable here"


@pytest.mark.parametrize("n", [2, 3, 5, 12])
def test_the_floor_is_found_in_four_studies_of_five(n: int) -> None:
    """By drawing the studies."""
    values = [float(i % 3) for i in range(n)]
    estimate = Estimate.of(values, "BPB")
    smallest = floor(estimate)
    assert smallest is not None
    drawn = np.random.default_rng(n).normal(smallest, np.std(values, ddof=1), (40_000, n))
    found = (ttest_1samp(drawn, 0.0, axis=1).pvalue < 0.05) & (drawn.mean(1) > 0)
    assert float(found.mean()) == pytest.approx(0.8, abs=0.01)


@given(spread, st.floats(0.05, 10))
def test_needed_is_the_fewest_values_that_put_the_floor_at_the_size(values: list[float], size: float) -> None:
    estimate = Estimate.of(values, "BPB")
    found, spread_of = needed(estimate, size), deviation(estimate)
    assert found is not None
    assert spread_of is not None
    if spread_of:
        assert power(found, math.sqrt(found) * size / spread_of) >= 0.8
        assert found == 2 or power(found - 1, math.sqrt(found - 1) * size / spread_of) < 0.8
    assert needed(estimate, None) is None


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny_settings(write_texts(tmp_path_factory.mktemp("claims")))


def synthetic(settings: Any, shipped: Sequence[float], partial: float = 0.0) -> Found:
    """Artifacts of two arms whose sequential one has 4 bits per byte and a seed's own offset, and of one wiring."""
    contents: dict[tuple[str, int, str], Any] = {}
    for seed, difference in enumerate(shipped):
        contents["sequential", seed, "bpb"] = {"bpb": 4.0 + seed}
        contents["shipped", seed, "bpb"] = {"bpb": 4.0 + seed + difference}
        contents["symmetry", seed, "symmetry"] = {"wirings": [{"wiring": "z2", "largest": partial}]}
    return Found(settings, contents)


@pytest.mark.parametrize(
    ("differences", "partial", "expected"),
    [
        ([-0.010, -0.011, -0.012], 0.0, ("supported", "exact")),
        ([0.010, 0.011, 0.012], 1e-3, ("contradicted", "contradicted")),
        ([-0.02, 0.02, 0.001], 1e-14, ("not testable here", "exact")),
        ([-0.001, -0.002, -0.003], 0.0, ("claimed size excluded", "exact")),
    ],
)
def test_artifacts_come_to_their_verdicts(
    settings: Any, differences: list[float], partial: float, expected: tuple[str, str]
) -> None:
    """Seeds differ by whole bits, so that only a paired difference can tell these arms apart."""
    claims = (
        Claim("a", "lanes", "better", "-.01", "lower", bpb("shipped", "sequential"), size=0.01),
        Claim("b", "lanes", "equal", "", "identity", worst("z2", "largest", "relative")),
    )
    rows = judge(synthetic(settings, differences, partial), claims)
    assert tuple(row.verdict for row in rows) == expected
    assert rows[0].estimate.value == pytest.approx(sum(differences) / 3)


TTT_ARMS = [arm for arm in ARMS if "ttt" in measured(arm)]


def adapted(settings: Any) -> Found:
    """Two seeds; at the second one training of all parameters diverged in the arm `wide`."""
    contents: dict[tuple[str, int, str], Any] = {}
    for seed in (0, 1):
        for arm in TTT_ARMS:
            costs = {"plain": 4.0, "all": 3.8 - seed, "controls": 3.85, "shared": 3.95}
            hinted = {name: cost - 0.5 for name, cost in costs.items()}
            if (arm, seed) == ("wide", 1):
                costs["all"] = hinted["all"] = None
            edges = {"all": arm == "wide", "controls": False}
            contents[arm, seed, "bpb"] = {"bpb": 4.0}
            contents[arm, seed, "ttt"] = {"bpb": costs, "hinted": hinted, "edges": edges, "share": 0.01}
    return Found(settings, contents)


def test_gains_are_what_a_run_is_below_the_plain_one_and_none_where_it_diverged(settings: Any) -> None:
    found = adapted(settings)
    assert gains(found, "shipped", "all") == pytest.approx({0: 0.2, 1: 1.2})
    assert gains(found, "shipped", "shared") == pytest.approx({0: 0.05, 1: 0.05})
    assert gains(found, "wide", "all")[1] is None
    assert controls("controls")(found).each == pytest.approx((0.15 - 0.1, None))
    assert controls("shared")(found).note.endswith(f"2 of {4 * len(TTT_ARMS)} tuned rates at an edge of the sweep")
    assert extraction("shipped", "gptj")(found).value == 0
    assert combined(found).each == pytest.approx((-0.7, -1.7))
    assert combined(found).note == "of which -0.5000 by hints alone"


@pytest.mark.parametrize(
    ("used", "sloped", "scalars", "holds"),
    [(18, 9, 66, True), (18, 13, 66, False), (18, 13, 26, True), (20, 14, 66, False), (20, 12, 66, True), (20, 8, 66, True)],
)
def test_roughly_half_is_two_to_three_fifths_of_the_scalars_in_use_or_of_all(
    settings: Any, used: int, sloped: int, scalars: int, holds: bool
) -> None:
    row = {"wiring": "shipped", "used": used, "sloped": sloped, "scalars": scalars}
    estimate = gauge_share("shipped")(Found(settings, {("symmetry", 0, "symmetry"): {"wirings": [row]}}))
    assert estimate.holds is holds
    assert estimate.value == pytest.approx(1 - sloped / used)


def test_a_claim_about_what_was_not_measured_says_so(settings: Any) -> None:
    with pytest.raises(ValueError, match="no part 'bpb' of 'wide': run it again"):
        bpb("wide", "sequential")(synthetic(settings, [0.0]))


def test_every_claim_is_judged_from_a_study(study: Path) -> None:
    rows = judge(load(study), CLAIMS)
    assert [row.claim.id for row in rows] == [claim.id for claim in CLAIMS if not claim.full]
    assert len({claim.id for claim in CLAIMS}) == len(CLAIMS)
    assert {row.verdict for row in rows} <= set(VERDICTS)
    for row in rows:
        assert (row.claim.rule == "identity") == (row.estimate.holds is not None)


def test_what_theory_says_is_exact_at_every_size(study: Path) -> None:
    rows = {row.claim.id: row.verdict for row in judge(load(study), CLAIMS)}
    controls = ("z2", "z2-exchange", "z2-stays", "gauge", "zero-init", "gptj", "path-sum", "closed-form")
    assert {name: rows[name] for name in controls} == dict.fromkeys(controls, "exact")
    refuted = ("symmetry", "amplification-2", "amplification-3")
    assert {name: rows[name] for name in refuted} == dict.fromkeys(refuted, "contradicted")
