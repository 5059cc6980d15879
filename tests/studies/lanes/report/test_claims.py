"""The verdict is a function of rule and interval, and the table of claims and every figure are functions of the artifacts."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ttest_1samp
from tiny_lanes import tiny_settings, write_texts

from studies.common.stats import power
from studies.lanes.arms import ARMS
from studies.lanes.measures import measured
from studies.lanes.report import measured_text
from studies.lanes.report.claims import CLAIMS, VERDICTS, Rule, deviation, floor, judge, needed, verdict
from studies.lanes.report.estimates import ClaimEstimate
from studies.lanes.study import LanesStudy, load

pytestmark = pytest.mark.study

numbers = st.floats(-1e3, 1e3)
spread = st.lists(st.floats(-10, 10).map(lambda x: round(x, 3)), min_size=2, max_size=8)


def interval(low: float, high: float) -> ClaimEstimate:
    return ClaimEstimate((low + high) / 2, low, high, 3, "BPB")


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


@given(spread)
def test_a_verdict_on_values_is_that_of_a_t_test(values: list[float]) -> None:
    estimate = ClaimEstimate.of(values, "BPB")
    if len(set(values)) > 1:
        p = float(ttest_1samp(values, 0.0).pvalue)
        if abs(p - 0.05) > 1e-6:
            assert (verdict("lower", estimate) == "null") == (p > 0.05)


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


@pytest.mark.parametrize("n", [2, 3, 5, 12])
def test_the_floor_is_found_in_four_studies_of_five(n: int) -> None:
    """By drawing the studies."""
    values = [float(i % 3) for i in range(n)]
    estimate = ClaimEstimate.of(values, "BPB")
    smallest = floor(estimate)
    assert smallest is not None
    drawn = np.random.default_rng(n).normal(smallest, np.std(values, ddof=1), (40_000, n))
    found = (ttest_1samp(drawn, 0.0, axis=1).pvalue < 0.05) & (drawn.mean(1) > 0)
    assert float(found.mean()) == pytest.approx(0.8, abs=0.01)


@given(spread, st.floats(0.05, 10))
def test_needed_is_the_fewest_values_that_put_the_floor_at_the_size(values: list[float], size: float) -> None:
    estimate = ClaimEstimate.of(values, "BPB")
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


def judged(settings: Any, claim: str, part: str, values: dict[str, Sequence[float]]) -> Any:
    """The row of one claim, from bits per byte by arm and seed; of `ttt` from the gains."""
    contents: dict[tuple[str, int, str], Any] = {}
    for arm, by_seed in values.items():
        for seed, value in enumerate(by_seed):
            contents[arm, seed, part] = {"bpb": {"plain": 4.0 + seed, "all": 4.0 + seed - value} if part == "ttt" else 4.0 + value}
    (row,) = judge(LanesStudy(settings, contents), [each for each in CLAIMS if each.id == claim])
    return row


TTT_ARMS = [arm for arm in ARMS if "ttt" in measured(arm)]
GAINS = (0.100, 0.102, 0.101, 0.099)
NOISE = (0.0004, -0.0002, 0.0001, -0.0003)


@pytest.mark.parametrize(
    ("one", "two", "expected"),
    [
        (GAINS, [g - 0.00264 + e for g, e in zip(GAINS, NOISE, strict=True)], "contradicted"),  # the record's difference: 3% of it
        (GAINS, [0.6 * g + e for g, e in zip(GAINS, NOISE, strict=True)], "claimed size excluded"),
        (GAINS, [0.5 * g + e for g, e in zip(GAINS, NOISE, strict=True)], "supported"),
        (GAINS, [0.1 * g + e for g, e in zip(GAINS, NOISE, strict=True)], "supported"),
        (GAINS, [0.5 * g + 40 * e for g, e in zip(GAINS, NOISE, strict=True)], "supported"),
        (GAINS, [0.5 * g + 90 * e for g, e in zip(GAINS, NOISE, strict=True)], "not testable here"),
        (GAINS, [-g for g in GAINS], "supported"),
        ((-0.01, 0.03, 0.02, -0.02), (-0.05, -0.01, -0.02, -0.06), "not testable here"),  # a gain of the baseline is not shown
        ([-g for g in GAINS], [-2 * g for g in GAINS], "not testable here"),  # both lose
    ],
)
def test_half_of_a_gain_is_a_half_and_needs_a_gain(
    settings: Any, one: Sequence[float], two: Sequence[float], expected: str
) -> None:
    row = judged(settings, "halves", "ttt", {"gptj": one, "shipped": two})
    assert row.verdict == expected
    shown = float(np.mean(one)) > 0.05
    assert row.estimate.note.endswith("; the second not shown") == (not shown)
    if shown:
        assert row.estimate.value == pytest.approx(np.mean(two) / np.mean(one))
    else:
        assert (row.estimate.value, row.estimate.low, row.floor, row.needed) == (None, None, None, None)
        assert measured_text(row).startswith("none; gains ")


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
    refuted = ("symmetry", "amplification-2", "amplification-3")
    assert {name: rows[name] for name in refuted} == dict.fromkeys(refuted, "contradicted")
    (symmetry,) = load(study).drawn("symmetry")
    (shipped,) = (row for row in symmetry["wirings"] if row["wiring"] == "shipped")
    assert min(shipped["exchange"], shipped["gauge"], shipped["largest"]) > 1e-8, "no control passes where there is no symmetry"
    assert shipped["scalars"] == 6 * load(study).settings.instruments.layers
    (paths,) = load(study).drawn("paths")
    assert {name: (rows[0]["wiring"], rows[0]["start"]) for name, rows in paths["rows"].items()} == {
        "sequential": ("sequential", "symmetric"),
        "gptj": ("gptj", "symmetric"),
        "shipped": ("shipped", "symmetric"),
        "asymmetric": ("shipped", "asymmetric"),
    }
    for arm in ("shipped", "gptj"):  # of trained models too
        assert all(row["missing"] < 1e-12 for data in load(study).data(arm, "paths") for row in data["rows"])


# Every measured number, by its sentence -------------------------------------------------------------------------------

Get = Callable[[str, str], Any]


def b(g: Get, arm: str, part: str = "bpb") -> float:
    return g(arm, part)["bpb"]


def q(g: Get, arm: str) -> float:
    return b(g, arm, "quantised")


def gap(g: Get, arm: str) -> float:
    return q(g, arm) - b(g, arm)


def lanes_gain(g: Get, suffix: str = "", part: str = "bpb") -> float:
    return b(g, f"gptj{suffix}", part) - b(g, f"shipped{suffix}", part)


def gain(g: Get, arm: str, run: str) -> float:
    costs = g(arm, "ttt")["bpb"]
    return costs["plain"] - costs[run]


def with_hints(g: Get, arm: str) -> float:
    return g(arm, "ttt")["hinted"]["all"]


def at_fork(rows: Sequence[Any]) -> float:
    return float(np.mean([row["direct"] for row in rows if row["layer"] == 4]))


def direct(g: Get, arm: str) -> float:
    return at_fork(g("paths", "paths")["rows"][arm])


def of_draws(g: Get, number: Callable[[Any], float]) -> float:
    return float(np.mean([number(row) for row in g("wide", "growth")["draws"]]))


def clip(g: Get, k: float) -> Any:
    return {point["k"]: point for point in g("shipped", "calibrations")["points"]}[k]


def few_less(g: Get, other: str) -> float:
    content = g("shipped", "calibrations")
    return content["few"] - content[other]


def hints_less(g: Get, other: str) -> float:
    costs = g("shipped", "tapin")["bpb"]
    return costs["new"] - costs[other]


def some_controls(g: Get, run: str) -> float:
    return float(np.mean([gain(g, arm, run) - 0.5 * gain(g, arm, "all") for arm in TTT_ARMS]))


SENTENCES: dict[str, tuple[str, float, Callable[[Get], float]]] = {
    "unigram": ("lower", 0, lambda g: b(g, "shipped") - g("tables", "tables")["unigram"]),
    "bigram": ("lower", 0, lambda g: b(g, "shipped") - g("tables", "tables")["bigram"]),
    "stays": ("lower", 0.1, lambda g: g("shipped", "routing")["apart"]),
    "direct": ("higher", 0.5, lambda g: direct(g, "shipped")),
    "direct-more": ("higher", 0, lambda g: direct(g, "shipped") - direct(g, "gptj")),
    "direct-trained": ("higher", 0, lambda g: at_fork(g("shipped", "paths")["rows"]) - at_fork(g("gptj", "paths")["rows"])),
    "lanes": ("lower", 0, lambda g: b(g, "shipped") - b(g, "gptj")),
    "lanes-quantised": ("lower", 0, lambda g: q(g, "shipped") - q(g, "gptj")),
    "before-quantisation": ("higher", 0, lambda g: lanes_gain(g) - 0.5 * lanes_gain(g, part="quantised")),
    "frozen": ("lower", 0, lambda g: b(g, "frozen") - b(g, "gptj")),
    "length": ("higher", 0, lambda g: lanes_gain(g, "-short") - lanes_gain(g)),
    "learned": ("lower", 0, lambda g: b(g, "shipped") - b(g, "frozen")),
    "persists": ("higher", 0, lambda g: g("asymmetric", "routing")["pattern"]),
    "pattern": ("higher", 0, lambda g: g("shipped", "routing")["pattern"]),
    "asymmetric": ("lower", 0, lambda g: b(g, "asymmetric") - b(g, "shipped")),
    "controls": ("higher", 0, lambda g: some_controls(g, "controls")),
    "controls-shared": ("higher", 0, lambda g: some_controls(g, "shared")),
    "combined": ("lower", 0, lambda g: with_hints(g, "shipped") - g("shipped", "ttt")["bpb"]["plain"]),
    "lanes-combined": ("lower", 0, lambda g: with_hints(g, "shipped") - with_hints(g, "gptj")),
    "contraction": ("lower", 1, lambda g: of_draws(g, lambda row: row["rho"])),
    "contraction-alone": ("lower", 1, lambda g: of_draws(g, lambda row: row["spreads"][0]["passes"][1])),
    "wide": ("lower", 0, lambda g: q(g, "wide") - q(g, "narrow")),
    "wide-gap": ("lower", 0, lambda g: gap(g, "wide") - gap(g, "narrow")),
    "wide-embeddings": ("lower", 0, lambda g: q(g, "wide-embeddings") - q(g, "narrow")),
    "narrow-embeddings": ("lower", 0, lambda g: q(g, "narrow-embeddings") - q(g, "narrow")),
    "embeddings-gap": ("lower", 0, lambda g: gap(g, "wide-embeddings") - gap(g, "wide")),
    "head-bias": ("lower", 0, lambda g: b(g, "wide-head-bias") - b(g, "wide")),
    "momentum": ("lower", 0, lambda g: b(g, "momentum-98") - b(g, "momentum-99")),
    "momentum-95": ("lower", 0, lambda g: b(g, "momentum-98") - b(g, "shipped")),
    "clip-lambda": ("lower", 0, lambda g: few_less(g, "clipped")),
    "batches": ("lower", 0.0006, lambda g: few_less(g, "many")),
    "clip": ("lower", 0, lambda g: clip(g, 13.1)["bytes"] - clip(g, 12.85)["bytes"]),
    "bytes": ("lower", 0.05, lambda g: abs(clip(g, 13.1)["bytes"] - clip(g, 13.1)["by_gaussian"]) / clip(g, 13.1)["by_gaussian"]),
    "gptq": ("lower", 0, lambda g: few_less(g, "nearest")),
    "tapin": ("lower", 0, lambda g: hints_less(g, "plain")),
    "cross": ("lower", 0, lambda g: hints_less(g, "old")),
}
"""Claim -> the side on which it puts the number, its reference, and the number, written out from the sentence."""
RATIOS = {"halves": ("shipped", "gptj")}
"""Claim -> the arms whose gains it divides."""


def drawn(settings: Any, seeds: Sequence[int]) -> LanesStudy:
    """Artifacts of every arm and instrument with a random number in each place."""
    rng = np.random.default_rng(0)

    def some(*names: str) -> dict[str, float]:
        return {name: float(rng.uniform(1, 2)) for name in names}

    def rows() -> list[dict[str, Any]]:
        return [{"layer": layer, **some("direct", "cascade", "missing")} for layer in (4, 4, 5, 5)]

    contents: dict[tuple[str, int, str], Any] = {}
    for seed in seeds:
        for arm in ARMS:
            made: dict[str, Any] = {
                "bpb": some("bpb"),
                "quantised": some("bpb"),
                "calibrations": some("few", "many", "clipped", "nearest")
                | {"points": [{"k": k, **some("bytes", "by_gaussian", "by_entropy")} for k in (13.1, 6.0, 12.85)]},
                "ttt": {key: some("plain", "all", "controls", "shared") for key in ("bpb", "hinted")}
                | {"edges": {"all": False, "controls": True}, "share": 0.01},
                "tapin": {"bpb": some("plain", "within", "old", "new"), "hints": some("offered", "right")},
                "routing": some("pattern", "apart") | {"by_sublayer": some("attn", "mlp")},
                "paths": {"rows": rows()},
                "growth": {"draws": [some("rho") | {"spreads": [{"passes": rng.uniform(1, 2, 3).tolist()}]} for _ in range(3)]},
            }
            made["ttt"]["bpb"]["plain"] += 1  # a share of a gain needs one: of training at test time, and of lanes
            made["quantised"]["bpb"] += arm == "gptj"
            contents |= {(arm, seed, part): made[part] for part in measured(arm)}
        contents["tables", seed, "tables"] = some("unigram", "bigram")
        contents["paths", seed, "paths"] = {"rows": {name: rows() for name in ("sequential", "gptj", "shipped", "asymmetric")}}
    return LanesStudy(settings, contents)


def test_every_number_is_the_one_that_its_sentence_names(settings: Any) -> None:
    """Of every claim that is no identity; seeds in the order of their numbers, in whatever order they were run."""
    seeds = (16, 8, 7)
    found = drawn(settings, seeds)
    assert {claim.id for claim in CLAIMS if claim.rule != "identity"} == {*SENTENCES, *RATIOS}
    for name, (arm, other) in RATIOS.items():
        (claim,) = (claim for claim in CLAIMS if claim.id == name)
        means = [np.mean([gain(lambda a, part, s=s: found.contents[a, s, part], x, "all") for s in seeds]) for x in (arm, other)]
        assert claim.measure(found).note == f"gains {means[0]:.4f} and {means[1]:.4f}"
        assert claim.premise is not None
        assert claim.premise(found).value == pytest.approx(means[1])
    for claim in (claim for claim in CLAIMS if claim.id in SENTENCES):
        rule, reference, number = SENTENCES[claim.id]
        expected = [number(lambda name, part, seed=seed: found.contents[name, seed, part]) for seed in sorted(seeds)]
        estimate = claim.measure(found)
        assert (claim.rule, claim.reference) == (rule, reference), claim.id
        assert estimate.each == pytest.approx(tuple(expected), rel=1e-12, abs=1e-12), claim.id
        assert estimate.value == pytest.approx(np.mean(expected), rel=1e-12, abs=1e-12)
