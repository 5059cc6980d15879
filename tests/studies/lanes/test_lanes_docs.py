"""What docs/lanes.md says was found is what the published claims and the published benchmark say; new numbers break these tests."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from studies.benchmarks.tapin import Options, Point, Speed, table

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture(scope="module")
def claims() -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in json.loads((DOCS / "results/lanes/claims.json").read_text(encoding="utf-8"))["claims"]}


@pytest.fixture(scope="module")
def page() -> str:
    return " ".join((DOCS / "lanes.md").read_text(encoding="utf-8").split())


def brief(value: float, digits: int) -> str:
    """As the page writes it: a sign where it is a difference (four digits), no zero before the point."""
    return f"{value:{'+' if digits == 4 else ''}.{digits}f}".replace("0.", ".", 1)


@pytest.mark.parametrize(
    ("claim", "digits", "words"),
    [
        ("symmetry", 2, "(by {value} of the larger one, at the most)"),
        ("direct", 2, "It is {value} of the gradient"),
        ("direct-more", 3, "{value} more than in one stream"),
        ("learned", 4, "is {value} [{low}, {high}] bits per byte from the symmetric start"),
        ("learned-asymmetric", 4, "{value} [{low}, {high}] from the asymmetric one"),
        ("lanes", 4, "from one stream: {value} [{low}, {high}]"),
        ("contraction", 2, "shrinks by {value} a pass"),
        ("contraction-alone", 2, "passes of the encoder ({value})"),
    ],
)
def test_numbers_of_the_page_are_those_of_the_claims(
    claims: dict[str, dict[str, Any]], page: str, claim: str, digits: int, words: str
) -> None:
    measured = claims[claim]["measured"]
    numbers = {name: brief(measured[name], digits) for name in ("value", "low", "high") if measured[name] is not None}
    assert words.format(**numbers) in page, words.format(**numbers)


def test_what_the_page_says_in_words_is_what_the_claims_say(claims: dict[str, dict[str, Any]]) -> None:
    verdicts = {name: row["verdict"] for name, row in claims.items()}
    assert {verdicts[name] for name in ("symmetry", "stays", "scalars", "amplification-2", "amplification-3")} == {"contradicted"}
    assert {verdicts[name] for name in ("z2", "z2-exchange", "z2-stays", "gauge", "zero-init", "gptj")} == {"exact"}
    assert claims["scalars"]["measured"]["value"] == 16
    assert {verdicts[name] for name in ("direct-trained", "learned", "learned-asymmetric", "lanes", "halves", "controls")} == {
        "null"
    }
    assert 8 <= claims["learned-asymmetric"]["needed"] <= claims["frozen"]["needed"] <= 100
    assert {verdicts[name] for name in ("controls-shared", "early")} == {"null"}
    assert "0 of 8 tuned rates at an edge" in claims["controls"]["measured"]["note"]
    assert "and -0.0171" in claims["controls"]["measured"]["note"]
    assert {verdicts[name] for name in ("clip", "bytes", "gptq", "tapin")} == {"supported"}
    assert claims["bytes"]["measured"]["value"] < 0.04


def test_the_page_prints_the_growth_that_was_measured() -> None:
    document = json.loads((DOCS / "results/benchmarks/tapin.json").read_text(encoding="utf-8"))
    points = [Point(**(row | {"speed": None if row["speed"] is None else Speed(**row["speed"])})) for row in document["growth"]]
    found = re.search(r"<!-- table: tapin -->\n\n((?:\|.*\n)+)", (DOCS / "lanes.md").read_text(encoding="utf-8"))
    assert found
    assert found[1] == table(points) + "\n"
    assert document["long"]["lo"] > 1e5
    assert document["rounds"] >= 9


def test_the_benchmark_of_the_matcher_runs_every_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Options(quick=True, out=tmp_path / "out.json").run()
    document, printed = json.loads((tmp_path / "out.json").read_text()), capsys.readouterr().out
    assert len(document["sides"]) == 3
    assert all(name in printed for name in document["sides"])
