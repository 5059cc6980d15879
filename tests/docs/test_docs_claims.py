"""What the results page says was found is true of the published tables; runs that change a finding break its test."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from studies.route2.headline import CONTROLS, EXPLOIT, HACK, ON, ROUTES, SOLVE, Result, direction

DOCS = Path(__file__).parents[2] / "docs"
FILTERS = ("filter-act", "filter-grad", "filter-full")


class Published:
    """table.json of a preset: ``[arm, metric]`` is a summary, ``minus(a, b)`` the paired differences."""

    def __init__(self, preset: str):
        path = DOCS / "results" / preset / "table.json"
        if not path.exists():
            pytest.skip(f"{preset} is not published yet")
        self.result = Result(json.loads(path.read_text(encoding="utf-8")))
        self.tables = (path.parent / "tables.md").read_text(encoding="utf-8")

    def __getitem__(self, key: tuple[str, str]) -> Any:
        arm, metric = key
        return self.result.rows[arm][metric]

    def mean(self, arm: str, metric: str) -> float:
        return self[arm, metric]["mean"]

    def directions(self, arm: str, reference: str) -> tuple[int, int, int]:
        """Of hack, exploit and solve: what the paired intervals tell."""
        pair = self.result.difference(arm, reference)
        assert pair is not None
        return direction(pair[HACK]), direction(pair[EXPLOIT]), direction(pair[SOLVE])

    def seed(self, arm: str, metric: str, seed: int) -> float:
        row = self.result.rows[arm]
        return row[metric]["seeds"][row["seed_ids"].index(seed)]

    def outliers(self) -> dict[tuple[str, int], list[str]]:
        """The cells of the table of seeds that stand out."""
        lines = self.tables.partition("Seeds that stand out")[2].partition("Means beside")[0].splitlines()
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")][2:]
        return {(row[0], int(row[1])): row for row in rows}


@pytest.fixture(scope="module")
def strong() -> Published:
    return Published("strong")


@pytest.fixture(scope="module")
def weak() -> Published:
    return Published("weak")


@pytest.fixture(scope="module")
def delta_s() -> Published:
    return Published("delta_s")


def test_every_route_hacks_less_and_solves_more_than_what_has_no_signal(strong: Published) -> None:
    for route in ROUTES:
        for other in ("vanilla", "absorb", *CONTROLS):
            assert strong.mean(route, HACK) < strong.mean(other, HACK) - 0.1
            assert strong.mean(route, SOLVE) > strong.mean(other, SOLVE)


def test_the_flags_do_the_work(strong: Published) -> None:
    assert strong.directions("route2-full", "filter-full") == (0, 0, 0)
    assert strong.directions("route2-grad", "filter-grad") == (0, 0, 0)
    hack, _, solve = strong.directions("route2-act", "filter-act")
    assert (hack, solve) == (-1, -1)
    pair = strong.result.difference("route2-act", "filter-act")
    assert pair is not None
    assert max(abs(pair[HACK]["mean"]), abs(pair[SOLVE]["mean"])) < 0.05  # "a little"


def test_where_the_flags_of_route2_grad_failed_deleting_the_quarantine_took_more_than_a_third_of_the_hacking(
    strong: Published,
) -> None:
    failed = [seed for arm, seed in strong.outliers() if arm == "route2-grad"]
    assert len(failed) == 2
    for seed in failed:
        *_, auroc, others, _, _ = strong.outliers()["route2-grad", seed]
        assert float(auroc) < float(others)
        assert strong.seed("route2-grad", HACK, seed) < 2 / 3 * strong.seed("route2-grad", ON, seed)
    assert strong.mean("absorb", HACK) > 5 / 6 * strong.mean("absorb", ON)


def test_one_seed_of_filter_grad_failed_with_an_ordinary_early_mask(strong: Published) -> None:
    rows = [row for (arm, _), row in strong.outliers().items() if arm == "filter-grad"]
    assert sum(float(row[-4]) >= float(row[-3]) - 0.02 for row in rows) == 1


def test_a_random_direction_is_not_harmless_and_solves_less(strong: Published) -> None:
    for control in ("haar", "haar-2", "haar-3"):
        assert strong.mean(control, HACK) < strong.mean("absorb", HACK) - 0.2
        assert strong.mean(control, SOLVE) < min(strong.mean(route, SOLVE) for route in ROUTES)


def test_the_older_arms(strong: Published) -> None:
    assert strong.directions("erase", "vanilla")[0] == 0
    assert strong.mean("route-additive", HACK) < 0.2
    assert strong.mean("route-additive", SOLVE) < strong.mean("base", SOLVE)
    assert strong.mean("filter-known", HACK) > 0.9 * strong.mean("vanilla", HACK)


def test_on_weak_the_plain_rules_fail_and_hack_alone_flatters(weak: Published) -> None:
    for arm in ("route2-act", "filter-act", "route2-grad", "filter-grad"):
        assert weak.mean(arm, HACK) > weak.mean("oracle", HACK) + 0.2
    assert weak.mean("route2-act", HACK) < weak.mean("absorb", HACK) - 0.2
    assert weak.directions("route2-act", "absorb")[1] == 0


def test_on_weak_the_full_rule_holds_and_beats_the_bound(weak: Published) -> None:
    for arm in ("route2-full", "filter-full"):
        assert weak.mean(arm, HACK) < weak.mean("base", HACK)
        assert weak.mean(arm, SOLVE) > 2 * weak.mean("base", SOLVE)
        assert weak.mean(arm, HACK) < weak.mean("oracle", HACK)
        assert weak.mean(arm, SOLVE) > weak.mean("oracle", SOLVE)
    assert weak.directions("route2-full", "filter-full")[2] == -1


def test_on_delta_s_absorb_absorbs_and_no_route_solves_more_than_its_filter(delta_s: Published) -> None:
    assert delta_s.mean("absorb", HACK) < 0.5 * delta_s.mean("vanilla", HACK)
    for route, name in zip(ROUTES, FILTERS, strict=True):
        if delta_s.result.difference(route, name) is not None:
            assert delta_s.directions(route, name)[2] <= 0


@pytest.mark.parametrize("preset", ["strong", "weak"])
def test_what_differs_from_the_prototype(preset: str, request: pytest.FixtureRequest) -> None:
    """Full rules hack as little; solve rates are lower; training tasks are solved no better than unseen ones."""
    published: Published = request.getfixturevalue(preset)
    lines = published.tables.partition("prototype:\n")[2].splitlines()
    rows = {cells[0]: cells for line in lines if (cells := [cell.strip() for cell in line.strip("|").split("|")])}

    def first(text: str) -> float:
        found = re.match(r"-?\.?\d*\.?\d+", text)
        assert found, text
        return float(found[0])

    for arm in ("route2-full", "filter-full"):
        assert first(rows[arm][2]) < first(rows[arm][1]) + 0.03
    for arm in (*ROUTES, "filter-grad", "filter-full"):
        assert first(rows[arm][4]) < first(rows[arm][3])
    for arm in ("filter-grad", "filter-full"):
        assert abs(first(rows[arm][5]) - first(rows[arm][4])) < 0.05
    assert abs(first(rows["base"][4]) - first(rows["base"][3])) < 0.05
    if preset == "weak":
        assert first(rows["route2-act"][2]) > first(rows["route2-act"][1]) + 0.2
        assert first(rows["route2-grad"][2]) > first(rows["route2-grad"][1]) + 0.2
    else:
        assert first(rows["absorb"][2]) > first(rows["absorb"][1]) + 0.1
