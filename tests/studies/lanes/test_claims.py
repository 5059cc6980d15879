"""The verdict is a function of rule and interval, and the table of claims is one of the artifacts."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ttest_1samp
from tiny_lanes import tiny_settings, write_texts

from studies.lanes.claims import VERDICTS, Claim, Rule, judge, needed, verdict
from studies.lanes.claims_table import CLAIMS
from studies.lanes.estimates import TTT_ARMS, bpb, controls, extraction, gains, tuned, worst
from studies.lanes.found import Estimate, Found, load

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
    with pytest.raises(ValueError, match="says neither"):
        verdict("identity", interval(0.0, 1.0))


@given(spread, st.floats(0.01, 10))
def test_more_seeds_are_needed_for_less(values: list[float], size: float) -> None:
    estimate = Estimate.of(values, "BPB")
    found, half = needed(estimate, size), needed(estimate, size / 2)
    assert found is not None
    assert half is not None
    assert half >= found >= 2
    deviation = math.sqrt(sum((v - sum(values) / len(values)) ** 2 for v in values) / (len(values) - 1))
    assert found >= (2.8 * deviation / size) ** 2  # z_.975 + z_.8 = 1.96 + .84, rounded down
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
        ([-0.02, 0.02, 0.001], 1e-14, ("null", "exact")),
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


def rows_of(scope: str, gains: dict[float, float | None]) -> list[dict[str, Any]]:
    return [{"scope": scope, "rate": rate, "gain": gain, "share": 0.01} for rate, gain in gains.items()]


def adapted(settings: Any) -> Found:
    """Two seeds that would choose other rates on their own; at the largest one of them diverged."""
    alone = ({0.03: 0.02, 0.1: 0.05, 0.3: 0.9}, {0.03: 0.04, 0.1: 0.03, 0.3: None})
    contents: dict[tuple[str, int, str], Any] = {}
    for seed, by_rate in enumerate(alone):
        tuning = rows_of("all", by_rate) + rows_of("controls", {0.03: 0.0, 0.1: 0.001, 1.0: 0.002})
        test = rows_of("all", {0.03: 1.0, 0.1: 0.2 + seed, 0.3: 3.0}) + rows_of("controls", {0.03: 4.0, 0.1: 0.05, 1.0: 0.15})
        for arm in TTT_ARMS:
            contents[arm, seed, "bpb"] = {"bpb": 4.0}
            contents[arm, seed, "ttt"] = {"tuning": tuning, "test": test}
    return Found(settings, contents)


def test_rates_come_from_the_tuning_texts_of_all_seeds_and_gains_from_the_test_texts(settings: Any) -> None:
    found = adapted(settings)
    assert (tuned(found, "shipped", "all"), tuned(found, "shipped", "controls")) == (0.1, 1.0)
    assert gains(found, "shipped", "all") == {0: 0.2, 1: 1.2}
    assert gains(found, "shipped", "controls") == {0: 0.15, 1: 0.15}
    assert gains(found, "shipped", "shared") == {0: 0.05, 1: 0.05}
    assert controls("controls")(found).each == pytest.approx((0.15 - 0.1, 0.15 - 0.6))
    assert controls("shared")(found).note.endswith("4 of 8 tuned rates at an edge of the sweep")
    assert extraction("shipped", "sequential")(found).value == 0


def test_a_claim_about_what_was_not_measured_says_so(settings: Any) -> None:
    with pytest.raises(ValueError, match="no part 'bpb' of 'wide': run it again"):
        bpb("wide", "sequential")(synthetic(settings, [0.0]))


def test_every_claim_is_judged_from_a_study(study: Path) -> None:
    rows = judge(load(study), CLAIMS)
    assert [row.claim.id for row in rows] == [claim.id for claim in CLAIMS]
    assert len({claim.id for claim in CLAIMS}) == len(CLAIMS)
    assert {row.verdict for row in rows} <= set(VERDICTS)
    for row in rows:
        assert (row.claim.rule == "identity") == (row.estimate.holds is not None)


def test_what_theory_says_is_exact_at_every_size(study: Path) -> None:
    rows = {row.claim.id: row.verdict for row in judge(load(study), CLAIMS)}
    controls = ("z2", "z2-exchange", "z2-stays", "gauge", "zero-init", "gptj", "path-sum", "closed-form")
    assert {name: rows[name] for name in controls} == dict.fromkeys(controls, "exact")
    refuted = ("symmetry", "scalars", "amplification-2", "amplification-3")
    assert {name: rows[name] for name in refuted} == dict.fromkeys(refuted, "contradicted")
