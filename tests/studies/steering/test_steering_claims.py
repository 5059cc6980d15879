"""Findings in docs/steering_study.md are true of the published numbers; runs that change a finding break its test."""

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.study

PUBLISHED = Path(__file__).parents[3] / "docs" / "results" / "steering" / "results.json"
MECHANISMS = ("forward", "early", "next token", "latch")


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    if not PUBLISHED.exists():
        pytest.skip("the study is not published yet")
    return json.loads(PUBLISHED.read_text(encoding="utf-8"))


class Cells:
    def __init__(self, results: dict[str, Any], subject: str, part: str):
        self.rows = {row["name"]: row for row in results["cells"] if (row["subject"], row["part"]) == (subject, part)}

    def mean(self, name: str, metric: str = "hack_held") -> float:
        return self.rows[name][metric]["mean"]


def compared(results: dict[str, Any], subject: str, reference: str) -> dict[str, dict[str, Any]]:
    found = [row for row in results["comparisons"] if (row["subject"], row["reference"]) == (subject, reference)]
    return {row["name"]: row for row in found}


def test_no_monitored_quarantine_is_better_than_a_deleted_one(results: dict[str, Any]) -> None:
    assert sum(each["tried"] for each in results["frontier"].values()) == 32
    assert all(each["better_by_intervals"] == 0 for each in results["frontier"].values())
    assert results["frontier"]["absorb"]["better_by_means"] == 0
    for subject in ("absorb", "route2-full"):
        for row in compared(results, subject, "deleted").values():
            if row.get("probe") == "probe" and row["how"] in MECHANISMS:
                assert row["verdict"] != "better"


def test_in_absorb_the_quarantine_does_harm_and_closing_most_is_best(results: dict[str, Any]) -> None:
    beside = compared(results, "absorb", "deleted")
    assert beside["on"]["verdict"] == "worse"
    assert beside["closed behind the probe"]["hack_held"]["mean"] > 0
    own = {row["how"]: row["hack_held"]["mean"] for row in beside.values() if row.get("probe") == "probe" and row["how"] != "open"}
    assert min(own, key=lambda how: own[how]) == "latch"
    cells = Cells(results, "absorb", "quarantine")
    later = [cells.mean(f"next token probe {q}") - cells.mean(f"forward probe {q}") for q in ("q0.5", "q0.8", "q0.95", "q0.99")]
    assert [round(each, 3) for each in later] == [-0.042, -0.017, 0.003, -0.007]
    assert abs(beside["closed"]["hack_held"]["mean"]) < 0.03


def test_the_probes_gate_cannot_be_told_from_a_random_ones(results: dict[str, Any]) -> None:
    assert len(results["against_random"]) == 6
    assert all(row["verdict"] == "no difference" for row in results["against_random"])
    for row in results["against_random"]:
        assert row["subject"] != "absorb" or (row["hack_held"]["mean"] < 0 < row["solve"]["mean"])


def test_in_route2_full_nothing_is_left_to_gate(results: dict[str, Any]) -> None:
    cells = Cells(results, "route2-full", "quarantine")
    assert {round(row["hack_held"]["mean"], 3) for row in cells.rows.values()} == {round(cells.mean("deleted"), 3)}
    assert cells.mean("deleted") < 0.01
    beside = compared(results, "route2-full", "deleted")
    assert all(row["verdict"] == "no difference" for row in beside.values())
    assert 0 < beside["on"]["solve"]["mean"] < 0.02


def test_an_untrained_quarantine_adds_nothing(results: dict[str, Any]) -> None:
    rows = list(Cells(results, "untrained", "quarantine").rows.values())
    assert len(rows) == 4
    for metric in ("hack_held", "exploit_held", "solve"):
        assert len({row[metric]["mean"] for row in rows}) == 1


def test_a_gain_of_four_behind_the_gate_and_without_it(results: dict[str, Any]) -> None:
    cells = Cells(results, "vanilla", "sweep")
    gated, always = "steer probe q0.95 away x4", "steer probe always away x4"
    assert cells.mean("on") > 0.85
    assert cells.mean(gated) < 0.1
    assert abs(cells.mean(gated, "solve") - cells.mean("on", "solve")) < 0.03
    assert cells.mean(always) < 0.01
    assert cells.mean(always, "solve") < 0.5 * cells.mean("on", "solve")
    assert cells.mean("on") - cells.mean("steer probe q0.95 away x1") < 0.1


def test_part_of_it_is_damage(results: dict[str, Any]) -> None:
    cells = Cells(results, "vanilla", "sweep")
    for i in (1, 2, 3):
        assert 0.4 < cells.mean(f"steer probe q0.95 random-{i} x4") < 0.65
        assert cells.mean(f"steer haar-{i} q0.95 away x4") > 0.6
    assert cells.mean("on") - cells.mean("steer pairs q0.95 away x4") < 0.15
    assert cells.mean("on", "hack_known") - cells.mean("steer pairs q0.95 away x4", "hack_known") > 0.1
    assert cells.mean("clamp q0.95 x2") > cells.mean("on") - 0.02
    assert cells.mean("clamp q0.5 x2") < 0.3
    base = Cells(results, "base", "sweep")
    assert base.mean("steer probe q0.95 away x4", "solve") < base.mean("on", "solve") - 0.05


def test_steering_lowers_the_exploits_log_probability_and_random_directions_do_not(results: dict[str, Any]) -> None:
    for row in results["logprobs"]:
        assert (row["mean"] < -0.2) if row["direction"] == "away" else (row["mean"] > -0.1)


def test_latency(results: dict[str, Any]) -> None:
    cells = Cells(results, "vanilla", "latency")
    never = cells.mean("on")
    assert never - cells.mean("steer probe q0.95 away x1") < 0.1
    assert never - cells.mean("steer probe q0.95 away x4") > 0.7
    effect = never - cells.mean("steer probe q0.95 away x4")
    kept = {delay: (never - cells.mean(f"delay {delay} x4")) / effect for delay in (1, 2, 3, 5, 8)}
    assert sorted(kept.values(), reverse=True) == list(kept.values())
    assert abs(kept[1] - 12 / 13) < 0.02
    assert abs(kept[3] - 5 / 6) < 0.02
    assert abs(kept[5] - 2 / 3) < 0.02
    assert abs(kept[8]) < 0.02
    assert cells.mean("delay 8 x4", "solve") < cells.mean("on", "solve") - 0.03


def test_the_shadow_changed_no_bit(results: dict[str, Any]) -> None:
    assert [row["subject"] for row in results["shadow"]] == ["vanilla", "absorb", "route2-full"]
    for row in results["shadow"]:
        assert row["bit_equal"] == row["rollouts"] > 0
        assert row["actions"] == 0 < row["engaged"]


def test_the_probe_ranks_rollouts_and_is_a_poor_gate(results: dict[str, Any]) -> None:
    site = results["settings"]["site"]
    areas = {
        (row["subject"], row["probe"]): row["mean"]
        for row in results["roc"]
        if (row["site"], row["modes"], row["unit"]) == (site, "held", "rollout mean")
    }
    for subject in ("vanilla", "absorb"):
        assert areas[subject, "probe"] > 0.8
        assert areas[subject, "probe"] > max(areas[subject, f"haar-{i}"] for i in (1, 2, 3)) + 0.1
    for row in results["lead"]:
        if row["subject"] in ("vanilla", "absorb"):
            assert row["opened_on_hacks"] > 0.95
            assert row["in_time"] > 0.5
            assert row["opened_on_others"] > 0.5
