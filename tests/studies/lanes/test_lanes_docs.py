"""Findings in docs/lanes.md are those of the published claims and benchmark; new numbers break these tests."""

import json
from typing import Any

import pytest
from measured import DOCS, demand_printed, published

from studies.benchmarks.measurement.paired import Ratio
from studies.benchmarks.tapin import Point, table
from studies.lanes.report.claims import CLAIMS, JudgedClaim, floor, needed, verdict
from studies.lanes.report.estimates import Estimate


@pytest.fixture(scope="module")
def claims() -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in json.loads((DOCS / "results/lanes/claims.json").read_text(encoding="utf-8"))["claims"]}


MOOT = {"length": "; no gain shown", "halves": "; the second not shown"}
"""Claim -> what its row says because what it takes for granted is not shown."""


@pytest.fixture(scope="module")
def page() -> str:
    return " ".join((DOCS / "lanes.md").read_text(encoding="utf-8").split())


def brief(value: float, digits: int) -> str:
    """As the page writes it: a sign where it is a difference (four digits), no zero before the point."""
    return f"{value:{'+' if digits == 4 else ''}.{digits}f}".replace("0.", ".", 1)


@pytest.mark.parametrize(
    ("claim", "digits", "words"),
    [
        ("bigram", 2, "{value} [{low}, {high}] bits per byte from it"),
        ("symmetry", 2, "(by {value} of the larger one, at the most)"),
        ("stays", 2, "apart by {value} [{low}, {high}] of the way that they went"),
        ("asymmetric", 4, "worse than the equal one, {value} [{low}, {high}]"),
        ("persists", 2, "{value} [{low}, {high}] of it is left"),
        ("pattern", 2, "leans the other way ({value} [{low}, {high}])"),
        ("direct", 2, "It is {value} of the gradient"),
        ("direct-more", 3, "{value} more than in the record's baseline"),
        ("lanes", 4, "from the baseline: {value} [{low}, {high}]"),
        ("learned", 4, "is {value} [{low}, {high}] bits per byte"),
        ("length", 4, "moves by {value} [{low}, {high}] with four times the training"),
        ("contraction", 2, "Of a push on the trained loop {value} is left"),
        ("contraction-alone", 2, "after the first pass {value} is"),
        ("tapin", 2, "Hints save {value} [{low}, {high}]"),
    ],
)
def test_numbers_of_the_page_are_those_of_the_claims(
    claims: dict[str, dict[str, Any]], page: str, claim: str, digits: int, words: str
) -> None:
    measured = claims[claim]["measured"]
    numbers = {name: brief(measured[name], digits) for name in ("value", "low", "high") if measured[name] is not None}
    assert words.format(**numbers) in page, words.format(**numbers)


def test_published_verdicts_are_those_of_the_published_values_under_the_rules_of_today(claims: dict[str, dict[str, Any]]) -> None:
    """Rule, reference, size and power of every row: what is written beside a number was computed from it."""
    assert list(claims) == [claim.id for claim in CLAIMS if not claim.full]
    for claim in (claim for claim in CLAIMS if not claim.full):
        row = claims[claim.id]
        estimate = Estimate(**row["measured"] | {"each": tuple(row["measured"]["each"])})
        if claim.rule != "identity" and claim.id != "halves":  # a ratio, of which nothing is shown
            assert estimate == Estimate.of(estimate.each, estimate.unit, estimate.note)
        outcome = verdict(claim.rule, estimate, claim.reference, claim.size)
        if claim.id in MOOT:
            assert claim.premise is not None
            assert estimate.note.endswith(MOOT[claim.id])
            outcome = "not testable here"
        judged = JudgedClaim(claim, estimate, outcome, floor(estimate), needed(estimate, claim.size)).as_dict()
        assert json.loads(json.dumps(judged)) == row | {"floor": pytest.approx(row["floor"])}, claim.id
        assert row["underpowered"] == (row["needed"] is not None and row["needed"] > estimate.n)


def test_no_gain_is_published_that_could_narrow_or_be_halved(claims: dict[str, dict[str, Any]], page: str) -> None:
    lanes, moved = (claims[name]["measured"]["each"] for name in ("lanes", "length"))
    short = Estimate.of([b - a for a, b in zip(lanes, moved, strict=True)], "BPB")  # what they gain at a quarter of the steps
    assert verdict("higher", short) == "null"
    assert (claims["halves"]["measured"]["value"], claims["halves"]["measured"]["low"]) == (None, None)
    assert "at a quarter of the steps no gain is shown that could narrow" in page
    assert "no gain of the baseline's is shown that two lanes could halve" in page


def test_what_the_page_says_in_words_is_what_the_claims_say(claims: dict[str, dict[str, Any]], page: str) -> None:
    verdicts = {name: row["verdict"] for name, row in claims.items()}
    expected = {
        "exact": ("z2", "z2-exchange", "z2-stays", "gauge", "zero-init", "gptj", "scalars-z2"),
        "contradicted": ("symmetry", "stays", "scalars", "amplification-2", "amplification-3", "asymmetric", "momentum-95"),
        "supported": ("bigram", "direct", "direct-more", "persists", "momentum", "clip", "bytes", "gptq", "tapin"),
        "claimed size excluded": ("contraction", "embeddings-gap", "head-bias"),
        "not testable here": ("lanes", "learned", "length", "wide", "wide-embeddings", "halves"),
        "null": ("direct-trained", "pattern", "contraction-alone", "controls"),
    }
    assert {name: verdicts[name] for names in expected.values() for name in names} == {
        name: verdict for verdict, names in expected.items() for name in names
    }
    assert f"would take {claims['lanes']['needed']} and {claims['learned']['needed']} seeds" in page
    assert claims["bytes"]["measured"]["value"] < 0.05
    assert "gains -0.0006 and 0.0076" in claims["controls"]["measured"]["note"]
    assert "4 of 18 tuned rates at an edge" in claims["controls"]["measured"]["note"]
    assert claims["scalars"]["measured"]["note"].startswith("5 of the 18")
    assert claims["scalars-z2"]["measured"]["note"].startswith("9 of the 18")


def test_the_page_prints_the_growth_that_was_measured() -> None:
    document = published("tapin")
    points = [Point(**(row | {"speed": None if row["speed"] is None else Ratio(**row["speed"])})) for row in document["growth"]]
    demand_printed("lanes.md", "tapin", table(points))
    assert document["long"]["lo"] > 1e5
    assert document["rounds"] >= 9
