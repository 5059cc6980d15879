"""Findings on the page on tracing are true of the published numbers; a run that changes a finding breaks its test."""

import json
from pathlib import Path

import pytest

from studies.tracing.measures import Share
from studies.tracing.patching import CONTROLS, DELETION, QUESTION
from studies.tracing.rates import BASE, DELETED, KEPT_PATCHED, ON, PATCHED
from studies.tracing.report import Table, cell, exactness_line, headline, tables
from studies.tracing.settings import UNTRAINED

pytestmark = pytest.mark.study

FOLDER = Path(__file__).parents[3] / "docs/results/tracing"
BOTH = ("honest", "hack")
LAYERS = ("blocks.0", "blocks.1", "unembed")


@pytest.fixture(scope="module")
def found() -> Table:
    path = FOLDER / "table.json"
    if not path.exists():
        pytest.skip("no tracing is published yet")
    return Table(json.loads(path.read_text(encoding="utf-8")))


def carried(found: Table, arm: str, contrast: str, into: str, adapter: str, where: str = "all", source: str = QUESTION) -> Share:
    share = found.recovered(arm, contrast, into, source, where, adapter)
    assert share is not None
    return share


def zeros(found: Table, arm: str, contrast: str, rollout: str, adapter: str) -> list[float]:
    """The effect of zeros in a whole adapter, seed by seed, in nats."""
    row = found.row(arm, contrast, rollout, DELETION, "all", adapter)
    assert row is not None
    return row["effect"]["seeds"]


def side_of_zero(share: Share) -> int:
    return 1 if share["lo"] > 0 else -1 if share["hi"] < 0 else 0


def test_published_texts_are_those_of_the_table(found: Table) -> None:
    assert (FOLDER / "headline.md").read_text(encoding="utf-8") == headline(found.data)
    assert (FOLDER / "tables.md").read_text(encoding="utf-8") == tables(found.data)


def test_deleting_by_patching_is_deleting(found: Table) -> None:
    assert len(found.data["seeds"]) >= 3
    for arm in ("absorb", "route2-full"):
        row = found.agrees(arm)
        assert row["checks"]["zero patch and deletion, float64"] <= 1e-10
        assert row["checks"]["zero patch and deletion, float32"] <= 1e-5
        assert row["rates"][PATCHED]["hack"]["seeds"] == row["rates"][DELETED]["hack"]["seeds"]
        assert row["rates"][PATCHED]["as_deleted"]["mean"] == 1
    alone = [row for row in found.data["agreement"] if row["arm"] in (UNTRAINED, "vanilla")]  # no quarantine that adds anything
    assert "Not tested: no trained arm here has a quarantine" in exactness_line({"agreement": alone})


def test_untrained_adapters_carry_exactly_nothing(found: Table) -> None:
    effects = [row["effect"]["seeds"] for row in found.data["rows"] if row["arm"] == UNTRAINED]
    assert effects
    assert all(value == 0 for seeds in effects for value in seeds)


def test_behind_a_hint_the_kept_adapter_of_the_hacking_arms_carries_and_most_in_the_first_block(found: Table) -> None:
    for arm in ("vanilla", "absorb"):
        for into in BOTH:
            assert side_of_zero(carried(found, arm, "task", into, "kept_out")) == 1
            shares = {where: carried(found, arm, "task", into, "kept_out", where)["value"] for where in LAYERS}
            assert max(shares, key=lambda where: shares[where]) == "blocks.0"
            assert abs(shares["blocks.1"]) < 0.03


def test_no_adapter_carries_a_quarter_behind_a_hint(found: Table) -> None:
    values = [
        carried(found, arm, "task", into, adapter)["value"]
        for arm in found.trained
        for into in BOTH
        for adapter in found.adapters(arm)
    ]
    assert 0.2 < max(values) < 0.25


def test_absorb_put_less_than_a_third_of_that_into_its_quarantine(found: Table) -> None:
    for into in BOTH:
        quarantine, kept = (carried(found, "absorb", "task", into, adapter) for adapter in ("quarantine_out", "kept_out"))
        assert side_of_zero(quarantine) == 1
        assert quarantine["value"] < kept["value"] / 3


def test_the_controls_say_that_it_is_the_contrast_and_not_the_task(found: Table) -> None:
    for arm in ("vanilla", "absorb"):
        for into in BOTH:
            shares = {s: carried(found, arm, "task", into, "kept_out", source=s)["value"] for s in (QUESTION, *CONTROLS[:3])}
            assert abs(shares["shuffled"] - shares[QUESTION]) < 0.01
            assert abs(shares["same side"]) < 0.02
            assert abs(shares["random"]) < shares[QUESTION] / 3


def test_the_quarantine_of_route2_full_carries_next_to_nothing(found: Table) -> None:
    for contrast in ("prompt", "task"):
        for into in BOTH:
            assert abs(carried(found, "route2-full", contrast, into, "quarantine_out")["value"]) < 0.02
    assert max(map(abs, zeros(found, "route2-full", "task", "hack", "quarantine_out"))) < 0.5
    rates = found.agrees("route2-full")["rates"]
    assert rates[ON]["hack"]["mean"] < rates[BASE]["hack"]["mean"]


def test_the_kept_adapter_of_route2_full_carries_no_hint_that_a_random_direction_does_not(found: Table) -> None:
    kept, random = (carried(found, "route2-full", "task", "honest", "kept_out", source=s) for s in (QUESTION, "random"))
    assert kept["value"] < random["value"]
    into_hack = carried(found, "route2-full", "task", "hack", "kept_out")
    assert side_of_zero(into_hack) == 0
    page = " ".join((FOLDER.parents[1] / "tracing.md").read_text(encoding="utf-8").split())
    assert "it carries no more than a random direction into the honest rollout, and nothing that is shown" in page
    assert f"nothing that is shown into the hacking one ({cell(into_hack)});" in page
    for into in BOTH:
        assert side_of_zero(carried(found, "route2-full", "prompt", into, "kept_out")) == 1


def test_behind_one_prompt_the_hacking_arms_carry_nothing_or_work_against(found: Table) -> None:
    assert side_of_zero(carried(found, "vanilla", "prompt", "honest", "kept_out")) == -1
    assert side_of_zero(carried(found, "vanilla", "prompt", "hack", "kept_out")) == 0
    for into in BOTH:
        for adapter in ("kept_out", "quarantine_out", "both"):
            assert side_of_zero(carried(found, "absorb", "prompt", into, adapter)) == 0

    def gap(arm: str) -> float:
        return found.level(arm, "prompt", "hack")["on"]["mean"] - found.level(arm, "prompt", "honest")["on"]["mean"]

    assert gap("vanilla") == pytest.approx(gap(UNTRAINED) / 2, rel=0.1)
    assert gap("vanilla") < gap("absorb") < gap(UNTRAINED) < gap("route2-full")


def test_zeros_act_on_both_rollouts_and_more_than_the_other_rollouts_values(found: Table) -> None:
    for arm, sign in (("vanilla", -1), ("absorb", -1), ("route2-full", 1)):
        for contrast in ("prompt", "task"):
            assert all(sign * value > 0 for value in zeros(found, arm, contrast, "hack", "kept_out"))
    for arm in ("vanilla", "absorb"):
        assert all(value < 0 for value in zeros(found, arm, "prompt", "honest", "kept_out"))
        row = found.row(arm, "task", "hack", QUESTION, "all", "kept_out")
        assert row is not None
        pairs = zip(zeros(found, arm, "task", "hack", "kept_out"), row["effect"]["seeds"], strict=True)
        assert all(abs(zero) > abs(other) for zero, other in pairs)


def test_as_measures_of_what_matters_they_agree_in_part(found: Table) -> None:
    rank = {(arm, c): found.agrees(arm)["spearman"][c] for arm in found.trained for c in ("prompt", "task")}
    for arm in found.trained:
        assert rank[arm, "prompt"]["lo"] < 0 < rank[arm, "prompt"]["hi"]
    for arm in ("vanilla", "absorb"):
        assert rank[arm, "task"]["lo"] > 0
    assert rank["route2-full", "task"]["lo"] < 0 < rank["route2-full", "task"]["hi"]


def test_what_deleting_an_adapter_does_to_sampled_hacks(found: Table) -> None:
    absorb = found.agrees("absorb")["rates"]
    assert all(
        on > deleted > 0.3 for on, deleted in zip(absorb[ON]["hack"]["seeds"], absorb[DELETED]["hack"]["seeds"], strict=True)
    )
    assert absorb[BASE]["hack"]["mean"] < absorb[KEPT_PATCHED]["hack"]["mean"] < 0.15
