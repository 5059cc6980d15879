"""What the pages list is what the code has: legal combinations, arms, main arms, the README's headline, result placeholders.

A table stands below its `<!-- table: name -->`. Where one differs, the failure prints the right one.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from mi_route2.specs import LEGAL, MaskSpec
from studies.common.publishing import filled
from studies.common.tables import interval, markdown_table, number
from studies.route2.evidence import EXPLOIT, SOLVE, Evidence
from studies.route2.headline import short
from studies.route2.publish import SHORT, TEXTS, predicted_results
from studies.training.arms import ARMS, MAIN, Arm
from studies.training.settings import STUDIED

pytestmark = pytest.mark.docs

DOCS = Path(__file__).parents[2] / "docs"
RESULTS = DOCS / "results"


def printed_table(page: str, name: str) -> str:
    """The table below the comment that names it."""
    text = (DOCS / page).read_text(encoding="utf-8")
    found = re.search(rf"<!-- table: {name} -->\n\n((?:\|.*\n)+)", text)
    assert found, f"{page} has no table below <!-- table: {name} -->"
    return found[1]


def legal_table() -> str:
    rows = [
        [score, unit, policy, *("yes" if through in allowed else "refused" for through in ("filter", "detach"))]
        for (score, unit, policy), allowed in LEGAL.items()
    ]
    return markdown_table(["score", "unit", "score policy", "filter", "detach"], rows, left=5)


def arms_table(arms: Iterable[Arm]) -> str:
    rows = [[f"`{a.name}`", a.role, a.about, a.baseline or "", a.same_rule_filter or ""] for a in arms]
    return markdown_table(["arm", "role", "what it is", "compared with", "same-rule filter"], rows, left=5)


def ablations_table(arms: Iterable[Arm]) -> str:
    rows = [[f"`{a.name}`", a.ablation or "", a.about, a.baseline or ""] for a in arms]
    return markdown_table(["arm", "ablation of", "change", "compared with"], rows, left=4)


WORLDS = ("weak", "strong", "sparse")
LESSON, RUN = ("honest", "honest", "lessons-sparse"), ("canary-run", "canary-run", "canary-sparse")
CANARY, RATES = ("canary", "canary", "canary-sparse"), ("rates", "rates", "map")
DEFENCES = (
    ("tasks that nobody can cheat", "[a lesson](docs/taught.md) of them first", "taught-honest", LESSON),
    ("nothing", "[a canary](docs/canary.md): drop what it likes", "filter-canary-run", RUN),
    ("ten pairs of one loophole", "[drop](docs/map.md) what their gradients flag", "filter-full", CANARY),
    ("a detector of one loophole", "drop what it reports", "sees-known", RATES),
    ("a detector of one loophole", "and add [a fast quarantine](docs/misses.md)", "sees-known-quarantine-fast", RATES),
)
"""What one has, what one does, the arm, and its experiment in each of ``WORLDS``."""


def defences_table() -> str:
    rows = []
    for have, do, arm, folders in DEFENCES:
        cells = []
        for world, folder in zip(WORLDS, folders, strict=True):
            evidence = Evidence.read(RESULTS / folder / f"{world}.json")
            plain, solve = (number(evidence.summary("vanilla", metric)["mean"]) for metric in (EXPLOIT, SOLVE))
            left, solved = interval(evidence.summary(arm, EXPLOIT)), number(evidence.summary(arm, SOLVE)["mean"])
            cells.append(f"{plain} → {left}, solve {solve} → {solved}")
        rows.append([have, do, *cells])
    return markdown_table(["you have", "do", *(f"{world}: exploit" for world in WORLDS)], rows, left=5)


TABLES = {
    ("../README.md", "defences"): defences_table(),
    ("routing.md", "legal"): legal_table(),
    ("arms.md", "arms"): arms_table(arm for arm in ARMS.values() if arm.ablation is None),
    ("arms.md", "ablations"): ablations_table(arm for arm in ARMS.values() if arm.ablation is not None),
}


@pytest.mark.parametrize(("page", "name"), TABLES)
def test_a_printed_table_is_the_code(page: str, name: str) -> None:
    expected = TABLES[page, name]
    assert printed_table(page, name) == expected, f"docs/{page} must have, below <!-- table: {name} -->:\n\n{expected}"


def test_the_legal_table_says_yes_exactly_where_a_spec_can_be_made() -> None:
    for line in printed_table("routing.md", "legal").splitlines()[2:]:
        score, unit, policy, *said = (cell.strip() for cell in line.strip("|").split("|"))
        for through, answer in zip(("filter", "detach"), said, strict=True):
            if answer == "yes":
                MaskSpec(score=score, unit=unit, score_policy=policy, through=through)  # pyright: ignore[reportArgumentType]
            else:
                with pytest.raises(ValueError, match="refused"):
                    MaskSpec(score=score, unit=unit, score_policy=policy, through=through)  # pyright: ignore[reportArgumentType]


def test_the_page_of_arms_names_the_main_ones_in_order() -> None:
    text = " ".join((DOCS / "arms.md").read_text(encoding="utf-8").split())
    assert f"`make study` runs {', '.join(f'`{name}`' for name in MAIN)} and the base model." in text


def test_every_preset_has_what_the_pages_include() -> None:
    for preset in STUDIED:
        assert {name for name in TEXTS if not (RESULTS / preset / name).is_file()} == set(), preset


PAGES = [DOCS.parent / "README.md", *DOCS.glob("*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_shows_the_files_that_it_names(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text == filled(page), f"{page.name}: studies.common.publishing.update_pages writes it anew"
    assert re.findall("<!-- shown: (.*) -->", text) == re.findall("<!-- end of (.*[.].*) -->", text)
    assert "--8<--" not in text
    open_fence = ""
    for line in text.splitlines():  # by the rule of CommonMark: a closing fence has no word behind it
        if open_fence:
            open_fence = "" if line.strip() == open_fence else open_fence
        elif line.startswith("```"):
            open_fence = "`" * (len(line) - len(line.lstrip("`")))
        assert not (open_fence and line.startswith("<!-- ")), f"{page.name} has {line} inside of a code block"
    assert not open_fence, f"{page.name} leaves a code block open"


def test_the_headline_of_readme_and_home_page_is_the_published_one() -> None:
    assert (RESULTS / SHORT).read_text(encoding="utf-8").strip() == short(predicted_results(RESULTS)).strip()
    assert {page.name for page in PAGES if f"results/{SHORT} -->" in page.read_text(encoding="utf-8")} == {"README.md", "index.md"}


PUBLISHED = sorted(path.parent.name for path in RESULTS.glob("*/runs.json"))


def test_the_development_seeds_and_the_predicted_ones_are_published() -> None:
    assert {*STUDIED, "strong-300-307", "weak-300-307"} <= set(PUBLISHED)


@pytest.mark.parametrize("folder", PUBLISHED)
def test_published_files_are_those_of_their_provenance(folder: str) -> None:
    """A published number that was edited by hand is found by its checksum."""
    import hashlib

    path = RESULTS / folder / "provenance.json"
    files = json.loads(path.read_text(encoding="utf-8"))["files"]
    found = {each.name: hashlib.sha256(each.read_bytes()).hexdigest() for each in path.parent.iterdir() if each != path}
    assert found == files
