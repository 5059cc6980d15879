"""Findings on the results page are true of the published tables; runs that change a finding break its test."""

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import spearmanr

from studies.common.stats import mean, paired_difference, summary
from studies.common.tables import interval, number
from studies.route2.course import Course, fronts, matched
from studies.route2.evidence import AT_END, MOST_EXPLOIT, Evidence, stopped_inside, times
from studies.route2.evidence import CONTROLS as CANARY_CONTROLS
from studies.route2.headline import CONTROLS, EXPLOIT, HACK, LITERAL, ON, ROUTES, SOLVE, StudyResult
from studies.route2.predictions import FILE, Comparison, Outcome, Predictions, outcomes, sign_flip
from studies.route2.questions import BROKEN, LOUD, coverage, coverage_sentence, lessons, seen, signs
from studies.route2.watching import Watch
from studies.training.settings import PRESETS

pytestmark = pytest.mark.docs

DOCS = Path(__file__).parents[2] / "docs"
RESULTS = DOCS / "results"
FILTERS = ("filter-act", "filter-grad", "filter-full")
PREDICTIONS = Predictions.read(RESULTS / FILE)


def said(text: str) -> bool:
    """True if a page of results has these words, wherever its lines break."""
    return any(text in " ".join(page.read_text(encoding="utf-8").split()) for page in DOCS.glob("results*.md"))


def prose(page: str) -> str:
    """The page in one line without tables and shown files, whose numbers would make any sentence with the same number true."""
    text = re.sub(r"<!-- shown: (\S+) -->.*?<!-- end of \1 -->", "", (DOCS / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    return " ".join(re.sub(r"^\|.*\n", "", text, flags=re.MULTILINE).split())


def read(folder: str, *presets: str) -> list[Evidence]:
    return [Evidence.read(RESULTS / folder / f"{preset}.json") for preset in presets]


def with_interval(evidence: Evidence, arm: str, metric: str = EXPLOIT) -> str:
    return interval(evidence.summary(arm, metric))


def in_mean(evidence: Evidence, arm: str, metric: str = EXPLOIT) -> str:
    return number(evidence.summary(arm, metric)["mean"])


def by_seed(evidence: Evidence, arm: str, metric: str = EXPLOIT) -> list[float]:
    """A rate that a run does not have counts as 0."""
    return [value or 0.0 for value in evidence.values[arm][metric]]


def less(evidence: Evidence, plus: str, minus: str, metric: str = EXPLOIT, *, signed: bool = False) -> str:
    """The paired difference ``plus - minus``, with its interval."""
    sides = (dict(zip(evidence.seeds, evidence.values[arm][metric], strict=True)) for arm in (plus, minus))
    return interval(paired_difference(*sides)[1], signed=signed)


def by_mode(evidence: Evidence, arm: str) -> list[tuple[float, ...]]:
    """Of each run, how often it exploits each mode."""
    return list(zip(*(by_seed(evidence, arm, f"deploy_exploit_{mode}") for mode in evidence.modes), strict=True))


def modes_kept(evidence: Evidence, arm: str, most: float = 0.1) -> list[list[float]]:
    """Of each run, the rates of the modes that it exploits in more than ``most`` of their prompts."""
    return [[rate for rate in run if rate > most] for run in by_mode(evidence, arm)]


def verdicts(folder: str, *presets: str) -> list[str]:
    """The verdict of every comparison of an experiment."""
    tests = "".join((RESULTS / folder / f"{preset}-tests.md").read_text(encoding="utf-8") for preset in presets)
    return re.findall(r"\|\s+(not shown|shown|the opposite|not run) \|", tests)


def goals_met(folder: str, preset: str) -> list[bool]:
    """Whether each line of an experiment's goals is that of one that was met."""
    return ["**met**" in line for line in (RESULTS / folder / f"{preset}-goals.md").read_text(encoding="utf-8").splitlines()]


def listed(texts: Iterable[str]) -> str:
    """``a, b and c``."""
    *others, last = texts
    return f"{', '.join(others)} and {last}"


class Published:
    """A folder's table.json: ``[arm, metric]`` is a summary, ``contrast`` a paired difference."""

    def __init__(self, folder: str):
        content = json.loads((RESULTS / folder / "table.json").read_text(encoding="utf-8"))
        self.result = StudyResult(content)
        self.tables = (RESULTS / folder / "tables.md").read_text(encoding="utf-8")
        named = PREDICTIONS.apply_to(content["settings"]["preset"], content["settings_hash"], content["seed_ids"])
        self.outcomes: list[Outcome] = outcomes(PREDICTIONS, content["settings"]["preset"], self.result.values) if named else []

    def __getitem__(self, key: tuple[str, str]) -> Any:
        arm, metric = key
        return self.result.rows[arm][metric]

    def mean(self, arm: str, metric: str) -> float:
        return self[arm, metric]["mean"]

    def contrast(self, plus: str, minus: str, metric: str = HACK, minus_metric: str | None = None) -> Any:
        """The summary of a paired difference. Arms are separated by blanks; the metric of ``minus`` where it is another."""
        sides = {"plus": tuple(plus.split()), "minus": tuple(minus.split())}
        of = Comparison(preset="", name="", metric=metric, minus_metric=minus_metric, expect="less", **sides)
        return summary(list(of.differences(self.result.values).values()))

    def below(self, difference: Any) -> int:
        """Seeds on which a difference is negative."""
        return sum(value < 0 for value in difference["seeds"] if value is not None)

    def outcome(self, name: str, metric: str, arm: str = "") -> Outcome:
        """The one prediction of this name and metric (and arm)."""
        (found,) = [
            o
            for o in self.outcomes
            if (o.comparison.name, o.comparison.metric) == (name, metric) and arm in ("", *o.comparison.plus)
        ]
        return found

    def outliers(self) -> dict[tuple[str, int], list[str]]:
        """The cells of the table of seeds that stand out."""
        after = self.tables.partition("Seeds that stand out")[2]
        lines = after.partition("Every random")[0].partition("Means beside")[0].splitlines()
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")][2:]
        return {(row[0], int(row[1])): row for row in rows}


def within(difference: Any, margin: float) -> bool:
    return -margin < difference["lo"] and difference["hi"] < margin


@pytest.fixture(scope="module")
def fresh() -> Published:
    return Published("strong-300-307")


@pytest.fixture(scope="module")
def fresh_weak() -> Published:
    return Published("weak-300-307")


def signed(difference: Any) -> str:
    """``+.011 [-.138, .160]``."""
    return f"{number(difference['mean'], signed=True)} [{number(difference['lo'])}, {number(difference['hi'])}]"


COUNTS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen")


def held(published: Published) -> str:
    shown = sum(each.verdict == "shown" for each in published.outcomes)
    return f"{COUNTS[shown]} of {COUNTS[len(published.outcomes)]} predictions held"


def test_fresh_seeds_of_strong_show_that_the_direction_matters(fresh: Published) -> None:
    assert said(f"On `strong` {held(fresh)}")
    names = "flags against no route", "flags against shuffled ones", "direction against a random one"
    for difference in (fresh.outcome(name, HACK) for name in names):
        assert difference.verdict == "shown"
        assert difference.difference["mean"] == pytest.approx(-0.55, abs=0.1)  # "by about a half each"
    assert fresh.outcome("axes of the pairs against random ones", HACK).verdict == "shown"
    assert said(f"It solves {number(fresh.mean('route-additive', SOLVE))}, far below the base model")
    assert fresh.mean("route-additive", SOLVE) < 0.5 * fresh.mean("base", SOLVE)


def test_fresh_seeds_of_strong_show_no_difference_from_a_filter_only_inside_the_margin(fresh: Published) -> None:
    found = {
        (route, metric): fresh.outcome(f"quarantine beside its filter: {name}", metric, route).verdict
        for route in ROUTES
        for name, metric in (("hack", HACK), ("exploit", EXPLOIT))
    }
    inside = {key for key, verdict in found.items() if verdict == "shown"}
    assert inside == {("route2-act", HACK), ("route2-full", HACK), ("route2-full", EXPLOIT)}
    assert set(found.values()) == {"shown", "not shown"}


def test_fresh_seeds_of_strong_do_not_show_that_the_quarantine_pays(fresh: Published) -> None:
    for metric, name in ((HACK, "hack"), (SOLVE, "solve")):
        outcome = fresh.outcome(f"quarantine under known-mode labels: {name}", metric)
        assert outcome.verdict == "not shown"
        assert said(signed(outcome.difference))
    assert fresh.outcome("absorption beyond deletion", HACK).verdict == "not shown"


def test_fresh_seeds_of_strong_differ_in_whether_vanilla_hacks(fresh: Published, strong: Published) -> None:
    seeds = fresh["vanilla", HACK]["seeds"]
    assert said(f"{number(min(seeds))} to {number(max(seeds))} in held-out modes, {number(fresh.mean('vanilla', HACK))} on average")
    assert said(f"where seeds 0-7 had {number(strong.mean('vanilla', HACK))}. The")
    assert said(f"The mean of absorb is {number(fresh.mean('absorb', HACK))}.")
    token, module = number(fresh.mean(LITERAL[0], HACK)), number(fresh.mean(LITERAL[1], SOLVE))
    assert said(f"fail again: route2-act-token hacks {token}, route2-grad-module solves {module}.")


def test_fresh_seeds_of_weak(fresh_weak: Published) -> None:
    assert said(f"On `weak` {held(fresh_weak)}")
    assert fresh_weak.outcome("flags against no route", HACK).verdict == "shown"
    assert fresh_weak.outcome("direction against a random one", HACK).verdict == "shown"
    solve = fresh_weak.mean("route2-full", SOLVE)
    assert said(f"It solves {number(solve)}, over three times")
    assert solve > 3 * fresh_weak.mean("base", SOLVE)
    deleted = fresh_weak.outcome("deleting the quarantine", HACK)
    assert deleted.verdict == "shown"
    assert said(f"raises hacking**, by {interval(deleted.difference)}")
    assert said(f"exploits in {number(fresh_weak.mean('route2-act', ON[1]))} of the answers")
    kept, whole = number(fresh_weak.mean("route2-act", SOLVE)), number(fresh_weak.mean("route2-act", ON[2]))
    assert said(f"solves more ({whole}, deleted {kept})")
    told = [fresh_weak.outcome("quarantine beside its filter: hack", HACK, route).verdict for route in ROUTES]
    assert told == ["not shown", "not shown", "shown"]
    more = fresh_weak.contrast("route2-act", "filter-act")
    assert said(f"route2-act hacks {interval(more)} more than filter-act, which was not among the predictions")
    fewer = fresh_weak.outcome("quarantine beside its filter: solve", SOLVE)
    assert fewer.verdict == "not shown"
    assert said(f"({signed(fewer.difference)}, exact p {number(fewer.p)}) does not survive the correction")
    for metric, name in ((HACK, "hack"), (SOLVE, "solve")):
        outcome = fresh_weak.outcome(f"quarantine under known-mode labels: {name}", metric)
        assert outcome.verdict == "not shown"
        assert said(f"({signed(outcome.difference)})")
    assert fresh_weak.outcome("absorption beyond deletion", HACK).verdict == "not shown"


def test_fresh_seeds_of_weak_leave_a_lead(fresh_weak: Published) -> None:
    for route, name in zip(ROUTES, FILTERS, strict=True):
        assert fresh_weak.mean(route, EXPLOIT) < fresh_weak.mean(name, EXPLOIT)
    more = fresh_weak.contrast("filter-grad", "route2-grad", EXPLOIT)
    assert said(f"by {interval(more)} on all eight seeds. It solves")
    assert fresh_weak.below(more) == 0
    assert said(f"It solves {number(-fresh_weak.contrast('route2-grad', 'filter-grad', SOLVE)['mean'])} less.")


def test_arms_that_were_named_and_run_later(fresh: Published, fresh_weak: Published) -> None:
    later = Published("bounds/weak-300-307")
    assert set(PREDICTIONS.arms) <= fresh.result.rows.keys()
    missing = [arm for arm in PREDICTIONS.arms if arm not in fresh_weak.result.rows]
    assert said(f"Named and not run with the others on `weak`: {', '.join(missing)}.")
    assert set(missing) < later.result.rows.keys()
    for arm in ("base", "vanilla", "oracle"):
        assert later.result.rows[arm] == fresh_weak.result.rows[arm]


def test_perfect_flags_do_better_without_a_quarantine_on_weak_and_alike_on_strong(fresh: Published) -> None:
    later = Published("bounds/weak-300-307")
    for metric, word in ((HACK, "hacks"), (EXPLOIT, "exploits")):
        more = later.contrast("oracle", "filter-oracle", metric)
        assert said(f"{word} {interval(more)} more")
        assert later.below(more) == 0
    more = later.contrast("filter-oracle", "oracle", SOLVE)
    assert said(f"solves {interval(more)} less")
    assert later.below(more) == 0
    assert said(f"(hack {signed(fresh.contrast('oracle', 'filter-oracle'))})")
    assert said(f"oracle's model hacks in {number(later.mean('oracle', ON[0]))} of the held-out answers")
    axes = later.contrast("haar-additive", "route-additive")
    assert said(f"hack {interval(axes)} more, on all eight seeds")
    assert later.below(axes) == 0


@pytest.fixture(scope="module")
def strong() -> Published:
    return Published("strong")


@pytest.fixture(scope="module")
def weak() -> Published:
    return Published("weak")


@pytest.fixture(scope="module")
def delta_s() -> Published:
    return Published("delta_s")


def test_the_design_as_it_is_meets_the_targets_that_its_first_version_missed(strong: Published) -> None:
    for route in ROUTES:
        assert strong[route, HACK]["median"] <= strong["oracle", HACK]["median"] + 0.03
        assert strong.mean(route, SOLVE) >= strong.mean("base", SOLVE) + 0.25
    for worse in ("haar", "shuffled", "absorb"):
        assert strong.mean(worse, HACK) >= strong.mean("route2-full", HACK) + 0.3
    assert said("missed one: route2-grad solved .653 where .665 was asked for")  # where .665 is:
    assert number(strong.mean("base", SOLVE) + 0.25) == ".665"


def test_every_route_hacks_less_and_solves_more_than_what_has_no_signal(strong: Published) -> None:
    for route in ROUTES:
        for other in ("vanilla", "absorb", *CONTROLS):
            assert strong.mean(route, HACK) < strong.mean(other, HACK) - 0.1
            assert strong.mean(route, SOLVE) > strong.mean(other, SOLVE)


def test_routes_and_filters_are_close_where_their_intervals_say_so(strong: Published) -> None:
    for route, name in zip(ROUTES, FILTERS, strict=True):
        for metric in (HACK, EXPLOIT):
            difference = strong.contrast(route, name, metric)
            assert within(difference, 0.01) == (route != "route2-grad")
            assert within(difference, 0.3)
            assert route != "route2-grad" or not within(difference, 0.17)


def test_one_seed_of_the_gradient_flags_failed_with_and_one_without_a_quarantine_and_its_mask_was_worse_from_the_start(
    strong: Published,
) -> None:
    failed = {arm: row for (arm, _), row in strong.outliers().items() if arm in (*ROUTES, *FILTERS)}
    assert set(failed) == {"route2-grad", "filter-grad"}
    assert failed["route2-grad"][1] != failed["filter-grad"][1]
    for *_, auroc, others, recall, usual in failed.values():
        assert float(auroc) < float(others) - 0.1
        assert float(recall) < float(usual) - 0.1


def test_a_random_direction_is_a_lottery_and_that_its_rank_decides_is_not_shown(strong: Published) -> None:
    found = re.search(r"within a seed: mean (-?\.\d+) \(exact sign-flip over seeds, p (\.\d+), n 8\)", strong.tables)
    assert found
    assert said(f"seeds {number(float(found[1]))[:4]}) and not shown (exact p {found[2]})")
    assert float(found[2]) > 0.05
    lines = strong.tables.partition("by its mask over")[2].partition("Means beside")[0].splitlines()
    draws = [[float(cell) for cell in line.strip("|").split("|")[2:4]] for line in lines if line.startswith("| haar")]
    assert len(draws) == 24
    lucky = [luck for luck, hack in draws if hack < 0.05]
    assert len(lucky) == 5
    assert min(lucky) > 0.5
    for control in ("haar", "haar-2", "haar-3"):
        assert strong.mean(control, SOLVE) < min(strong.mean(route, SOLVE) for route in ROUTES)


def test_the_older_arms(strong: Published) -> None:
    assert strong.mean("erase", HACK) > 0.85 * strong.mean("vanilla", HACK)
    assert strong.mean("route-additive", HACK) < 0.3 < strong.mean("absorb", HACK)
    assert strong.mean("route-additive", SOLVE) < strong.mean("base", SOLVE)
    assert strong.mean("filter-known", HACK) > 0.8 * strong.mean("vanilla", HACK)
    assert strong.mean("filter-known", "deploy_hack_known") < 0.1


def test_known_flags_gain_by_deletion_and_show_no_absorption(strong: Published) -> None:
    hack, solve = strong.contrast("filter-known", "oracle-known"), strong.contrast("oracle-known", "filter-known", SOLVE)
    assert said(f"lower by {interval(hack)}")
    assert said(f"solving higher by {interval(solve)}, on all eight seeds")
    assert strong.below(hack) == strong.below(solve) == 0
    deletion, beyond = strong.contrast("absorb", "vanilla"), strong.contrast("oracle-known vanilla", "filter-known absorb")
    assert said(f"differs from vanilla by {number(deletion['mean'])}.")
    assert said(f"is {interval(beyond)}: no sign")


def test_the_literal_forms_fail(strong: Published) -> None:
    rates = [number(strong.mean(arm, metric)) for arm in LITERAL for metric in (HACK, SOLVE)]
    assert said(f"(route2-act-token): held-out hack {rates[0]}, solve {rates[1]}.")
    assert said(f"(route2-grad-module): hack {rates[2]}, solve {rates[3]}, below the base model")
    assert strong.mean("route2-grad-module", SOLVE) < strong.mean("base", SOLVE)


def test_a_shared_basis_sorts_and_l1_does_nothing_that_can_be_seen(strong: Published, delta_s: Published) -> None:
    assert said(
        f"shared-basis hacks {number(strong.mean('shared-basis', HACK))} where absorb hacks {number(strong.mean('absorb', HACK))}"
    )
    l1 = strong.contrast("grad-l1", "route2-grad")
    assert said(f"held-out hack {interval(l1)}")
    assert sign_flip([value for value in l1["seeds"] if value is not None]) > 0.3
    cost = delta_s.contrast("shared-basis", "route2-grad", SOLVE)
    assert number(cost["mean"]) == "-.101"
    assert delta_s.mean("route2-grad-module", SOLVE) > delta_s.mean("base", SOLVE)


def test_on_weak_the_plain_rules_fail_and_hack_alone_flatters(weak: Published) -> None:
    for arm in ("route2-act", "filter-act", "route2-grad", "filter-grad"):
        assert weak.mean(arm, HACK) > weak.mean("base", HACK)
    assert weak.mean("filter-act", HACK) < 0.5 * weak.mean("vanilla", HACK)
    assert weak.mean("filter-act", EXPLOIT) > 0.95 * weak.mean("vanilla", EXPLOIT)


def test_on_weak_the_full_rule_holds_and_beats_the_bound(weak: Published) -> None:
    for arm in ("route2-full", "filter-full"):
        assert weak.mean(arm, HACK) < weak.mean("base", HACK)
        assert weak.mean(arm, SOLVE) > 3 * weak.mean("base", SOLVE)
        assert weak.mean(arm, HACK) < weak.mean("oracle", HACK)
        assert weak.mean(arm, SOLVE) > weak.mean("oracle", SOLVE)
    assert weak.mean("route2-full", EXPLOIT) < weak.mean("base", EXPLOIT)


def test_on_weak_a_route_exploits_less_and_solves_less_than_its_filter(weak: Published) -> None:
    for route, name in zip(ROUTES, FILTERS, strict=True):
        assert weak.below(weak.contrast(route, name, SOLVE)) == 8
        assert weak.mean(route, EXPLOIT) < weak.mean(name, EXPLOIT)
    assert weak.below(weak.contrast("route2-act", "filter-act", EXPLOIT)) == 8


def test_on_weak_deleting_the_quarantine_of_the_activation_flags_raises_hacking(weak: Published) -> None:
    assert weak.below(weak.contrast("route2-act", "route2-act", HACK, ON[0])) == 0
    assert said(f"from {number(weak.mean('route2-act', ON[0]))} to {number(weak.mean('route2-act', HACK))}, on all eight seeds")


def test_on_delta_s_every_route_ends_near_the_bound_and_beside_its_filter(delta_s: Published) -> None:
    for route, name in zip(ROUTES, FILTERS, strict=True):
        assert delta_s.mean(route, HACK) < 0.05
        assert delta_s.mean(route, SOLVE) > 2 * delta_s.mean("base", SOLVE)
        assert all(within(delta_s.contrast(route, name, metric), 0.06) for metric in (HACK, EXPLOIT))
    assert number(delta_s.contrast("route2-full", "filter-full", SOLVE)["mean"])[:4] == "-.01"


@pytest.mark.parametrize("preset", ["strong", "weak"])
def test_what_differs_from_the_prototype(preset: str, request: pytest.FixtureRequest) -> None:
    """Routes hack as little and solve as much; filters solve training tasks no better than unseen ones; vanilla solves more."""
    published: Published = request.getfixturevalue(preset)
    lines = published.tables.partition("prototype:\n")[2].splitlines()
    rows = {cells[0]: cells for line in lines if (cells := [cell.strip() for cell in line.strip("|").split("|")])}

    def first(text: str) -> float:
        found = re.match(r"-?\.?\d*\.?\d+", text)
        assert found, text
        return float(found[0])

    def interval(text: str) -> tuple[float, float]:
        low, high = re.findall(r"-?\d*\.\d+", text)[1:]
        return float(low), float(high)

    for arm in (*ROUTES, "filter-grad", "filter-full"):
        assert first(rows[arm][2]) < first(rows[arm][1]) + 0.07  # route2-grad's mean carries one failed seed on strong
        assert interval(rows[arm][2])[0] < first(rows[arm][1])
        assert first(rows[arm][4]) > first(rows[arm][3])
    for arm in ("filter-grad", "filter-full"):
        assert abs(first(rows[arm][5]) - first(rows[arm][4])) < 0.05
    assert first(rows["vanilla"][4]) > first(rows["vanilla"][3]) + 0.1


CANARY = dict(zip(("strong", "weak"), read("canary", "strong", "weak"), strict=True))


def test_the_canarys_page_says_what_its_runs_hold() -> None:
    """The means of the page's first statement, and the three runs that failed."""
    page = prose("canary_first_rule.md")
    told = []
    for evidence in CANARY.values():
        assert len(evidence.seeds) == 16
        exploit = evidence.summary("filter-canary", EXPLOIT)
        assert exploit["n"] == 16
        plain, own = in_mean(evidence, "vanilla"), in_mean(evidence, "vanilla", SOLVE)
        told.append((plain, interval(exploit), own, in_mean(evidence, "filter-canary", SOLVE), number(exploit["median"])))
    strong, weak = told
    assert f"exploits fall from {strong[0]} to {strong[1]} on `strong` and from {weak[0]} to {weak[1]} on `weak`, and" in page
    assert f"and solving rises from {strong[2]} to {strong[3]} and from {weak[2]} to {weak[3]}." in page
    assert f"In the median seed exploits are {strong[4]} and {weak[4]}." in page
    pairs, honest = ([in_mean(evidence, arm) for evidence in CANARY.values()] for arm in ("filter-full", "canary-honest"))
    assert f"filter-full exploits {pairs[0]} on `strong` and {pairs[1]} on `weak`." in page
    assert f"{honest[0]} on `strong` and {honest[1]} on `weak` (no defence: {strong[0]} and {weak[0]})" in page
    failed = {
        (name, seed): number(value)
        for name, evidence in CANARY.items()
        for seed, value in zip(evidence.seeds, by_seed(evidence, "filter-canary"), strict=True)
        if value > MOST_EXPLOIT
    }
    assert failed == {("strong", 200): ".617", ("weak", 212): ".086", ("weak", 215): ".292"}
    assert "by one seed of 16 on `strong` (.617) and two on `weak` (.292 and .086)." in page


def test_a_filter_with_a_gap_moves_the_hacking_there() -> None:
    found = CANARY["strong"]
    points = {mode: (canary, own) for seed, mode, canary, own in coverage(found, "filter-canary") if seed == 200}
    here = found.seeds.index(200)
    plain = {mode: found.values["vanilla"][f"deploy_exploit_{mode}"][here] for mode in found.modes}
    for mode, most in (("sentinel", 0.065), ("file_marker", 0.205)):
        assert points[mode][0] < most
        assert points[mode][1] > 0.91
        assert plain[mode] < 0.06  # pyright: ignore[reportOptionalOperand]
    for mode in ("run_tests", "stdout_marker"):
        assert points[mode][0] > 0.9
        assert points[mode][1] == 0
    page = prose("canary_first_rule.md")
    rounded = [f"{value:.2f}"[1:] for mode in ("sentinel", "file_marker") for value in (*points[mode], plain[mode] or 0.0)]
    assert f"exploits `sentinel` (at most {rounded[0]}) nor `file_marker` ({rounded[3]}), and the filtered run" in page
    assert f"ends with exploits in {rounded[1]} and {rounded[4]} of these two" in page
    assert f"Ordinary training at this seed exploits them in {rounded[2]} and {rounded[5]}." in page
    base = CANARY["weak"].values["base"][EXPLOIT]
    assert [number(base[CANARY["weak"].seeds.index(seed)]) for seed in (212, 215)] == [".096", ".148"]
    assert "the base itself exploits .148, more than the tenth" in page
    assert "mode is left at .23. The base exploits .096." in page


def test_a_quarantine_beside_a_canary_and_one_that_learns_first() -> None:
    (strong, weak), page = CANARY.values(), prose("canary_first_rule.md")
    lost = less(weak, "filter-canary", "route2-canary", SOLVE)
    assert f"There it solves {lost} less, which was not among the predictions" in page
    assert stopped_inside(strong, "quarantine-first") == ["vanilla-10"]
    assert stopped_inside(weak, "quarantine-first") == []
    more, base = (in_mean(weak, arm, SOLVE) for arm in ("quarantine-first", "base"))
    assert f"as rarely as the base ({in_mean(weak, 'quarantine-first')}) and solves more ({more} against {base})" in page
    for evidence in CANARY.values():
        assert 1.8 < (times(evidence, "filter-canary") or 0.0) < 2.3
        assert re.search(r"exact sign-flip test, p \.[1-9]", coverage_sentence(evidence, "canary-one"))


def test_the_canary_that_is_compared_with_the_run() -> None:
    page, told, dropped, little = prose("canary.md"), {}, [], {}
    for preset in ("strong", "weak"):
        (found,) = read("canary-run", preset)
        exploit = found.summary("filter-canary-run", EXPLOIT)
        assert exploit["n"] == 16
        assert max(by_seed(found, "filter-canary-run")) < 0.0085
        means = [in_mean(found, arm) for arm in ("canary-run-honest", "vanilla", "base")]
        told[preset] = [interval(exploit), in_mean(found, "filter-canary-run", SOLVE), *means]
        for control in CANARY_CONTROLS["filter-canary-run"]:
            assert (found.summary(control, EXPLOIT)["mean"] or 0.0) - (exploit["mean"] or 0.0) > 0.4
        dropped.append(less(found, "filter-canary-run", "canary-wide", SOLVE))
        little[preset] = found.values["filter-canary-run"][SOLVE]
        assert 2.2 < (times(found, "filter-canary-run") or 0.0) < 2.9
    strong, weak = told.values()
    assert f"held-out exploits {strong[0]} on `strong` and {weak[0]} on `weak`, at most .008 in any of 32 runs" in page
    assert f"where the base exploits {strong[4]} and {weak[4]}; solving {strong[1]} and {weak[1]};" in page
    assert f"ends with exploits in {strong[2]} and {weak[2]} of its rollouts (no defence: {strong[3]} and {weak[3]})" in page
    assert f"(`canary-wide`) the new rule is: by {' and '.join(dropped)}." in page
    assert "A run takes two to three times as long as an undefended one" in page  # by 2.1 to 2.8 in the tables
    little["sparse"] = Evidence.read(RESULTS / "canary-sparse/sparse.json").values["filter-canary-run"][SOLVE]
    for preset, every in little.items():
        *first, last = sorted(number(value) for value in every if value is not None and value < 0.85)
        assert f"{', '.join(first)} and {last} on `{preset}`" in page
    worst = number(min(value for every in little.values() for value in every if value is not None))
    assert f"Some runs solve less, {worst} at the worst." in page
    more = less(*read("canary-run", "strong"), "filter-canary", "filter-canary-run", SOLVE)
    assert f"on `strong` that arm solves more in the mean, by {more}, where less was predicted" in page
    assert [number(value) for value in by_seed(found, "filter-canary") if value > MOST_EXPLOIT] == [".245"]


def test_gaps_of_canaries_and_what_the_runs_exploit_there() -> None:
    """As deep as those of the seed on which the first rule failed, in the mode that it ended in."""
    found = {"first": coverage(CANARY["strong"], "filter-canary")}
    (run,) = read("canary-run", "strong")
    found["run"] = coverage(run, "filter-canary-run")
    gaps = {rule: [point for point in points if point[2] < 0.2] for rule, points in found.items()}
    assert sorted((seed, mode, round(canary, 2)) for seed, mode, canary, _ in gaps["run"]) == [
        (219, "file_marker", 0.18),
        (223, "file_marker", 0.02),
        (223, "sentinel", 0.07),
    ]
    assert max(own for *_, own in gaps["run"]) < 0.01
    at = run.seeds.index(223)
    assert max(by_seed(run, "vanilla", f"deploy_exploit_{mode}")[at] for mode in ("sentinel", "file_marker")) < 0.01
    assert "(`strong` 223: `sentinel` .07 and `file_marker` .02), and that run stayed honest" in prose("canary.md")
    assert {seed for seed, *_ in gaps["first"]} == {200, 205, 209, 214}
    assert all((own > 0.9) == (seed == 200) and (own < 0.02) == (seed != 200) for seed, _, _, own in gaps["first"])
    there = "On three other seeds of `strong` the canaries have such gaps too, and the run exploits at most .02 there"
    assert there in prose("canary_first_rule.md")


def test_the_canary_in_a_world_without_a_persona() -> None:
    page, (found,), own, early = prose("canary.md"), read("canary-sparse", "sparse"), "filter-canary-run", "canary-run-early"
    of, told = partial(in_mean, found), partial(with_interval, found)
    assert {found.summary(arm, EXPLOIT)["n"] for arm in (own, "filter-full", "vanilla", "filter-canary", early)} == {16}
    assert f"Exploits fall from {of('vanilla')} to {told(own)}, at most {number(max(by_seed(found, own)))} in any run" in page
    assert f"filter-full leaves {told('filter-full')}, by {less(found, 'filter-full', own)} more." in page
    assert f"with {told(own, SOLVE)} solved (no defence: {of('vanilla', SOLVE)})" in page
    assert f"`filter-canary`, leaves {of('filter-canary')} and solves {of('filter-canary', SOLVE)}" in page
    auroc = number(mean(found.values[early]["auroc"]))
    assert f"runs exploit {told(early)}. Its mask is good already (AUROC {auroc})" in page
    assert f"the worst run exploits {number(max(by_seed(found, early)))}" in page
    strong = CANARY["strong"].values["filter-full"]["auroc"]
    assert f"AUROC is {number(mean(found.values['filter-full']['auroc']))} here, {number(mean(strong))} on `strong`" in page
    assert stopped_inside(found, "filter-canary-run") == []


def test_when_flags_miss() -> None:
    page, (strong, weak) = prose("misses.md"), read("misses", "strong", "weak")
    assert f"exploits {with_interval(strong, 'sees-50')}, within .05" in page
    all_, quarter = in_mean(strong, "sees-100"), in_mean(strong, "sees-25")
    assert f"all flags leave ({all_}); even a quarter of the flags leaves {quarter}" in page
    assert f"(no defence: {in_mean(strong, 'vanilla')})" in page
    assert f"flags of the known mode alone leave {in_mean(strong, 'sees-known')}, by .393 [.137, .650] more" in page
    half = sorted(by_seed(weak, "sees-50"))
    low, high, least, most = (number(half[i]) for i in (0, 4, 5, -1))
    assert f"{with_interval(weak, 'sees-50')}; five seeds leave {low} to {high}, three {least} to {most}." in page
    assert f"({', '.join(in_mean(weak, arm) for arm in ('sees-25', 'sees-known', 'vanilla'))})" in page
    more = [
        number((strong.summary(f"{arm}-quarantine", EXPLOIT)["mean"] or 0.0) - (strong.summary(arm, EXPLOIT)["mean"] or 0.0))
        for arm in ("sees-25", "sees-known")
    ]
    assert f"(+{more[0]}, +{more[1]})" in page
    off = {arm: np.subtract(by_seed(weak, arm), by_seed(weak, f"{arm}-quarantine")) for arm in ("sees-0", "sees-25", "sees-known")}
    beyond = [interval(summary((off[arm] - off["sees-0"]).tolist())) for arm in ("sees-25", "sees-known")]
    assert f"takes {interval(summary(off['sees-0'].tolist()))} off on `weak`" in page
    assert f"it takes {beyond[0]} more, with flags for the known mode {beyond[1]} more" in page
    for arm in ("sees-25", "sees-known"):
        assert less(weak, arm, f"{arm}-quarantine") in page
        assert " to ".join(in_mean(weak, name, SOLVE) for name in (arm, f"{arm}-quarantine")) in page
        assert min(off[arm]) > 0


def test_who_learns_faster_gets_the_hack() -> None:
    page, (strong, weak) = prose("misses.md"), read("rates", "strong", "weak")
    known, routed, fast = "sees-known", "sees-known-quarantine", "sees-known-quarantine-fast"
    assert (len(strong.seeds), len(weak.seeds)) == (12, 12)
    assert f"takes {less(weak, known, routed)} off the exploits, as on the seeds above" in page
    assert f"is within .1 of no quarantine ({less(weak, f'{routed}-slow', known)})" in page
    left, alone = with_interval(weak, fast), in_mean(weak, known)
    assert f"it leaves {left}, where the filter alone leaves {alone}, and solving stays where it is (" in page
    assert f"({in_mean(weak, fast, SOLVE)}, {in_mean(weak, known, SOLVE)})" in page
    assert f"take {less(weak, 'sees-0-quarantine', routed)} more off than none" in page
    assert f"to take {less(weak, 'vanilla', 'sees-0-quarantine-fast')} off what no defence leaves" in page
    alone, slowed = (with_interval(strong, arm) for arm in (known, fast))
    assert f"a fast one leaves {slowed}, the filter alone {alone}; the difference is {less(strong, fast, known)}." in page
    flags = less(strong, fast, "sees-0-quarantine-fast")
    assert f"the usual rate ({less(strong, fast, routed)}), and with flags less than without ({flags})" in page
    assert sum(value < 0.45 for value in by_seed(strong, "vanilla")) == 8
    stopped = [f"{known}-{n}" for n in (10, 20, 40)]
    for metric, verb, better in ((EXPLOIT, "exploits", min), (SOLVE, "solves", max)):
        assert f"{verb} {listed(in_mean(weak, arm, metric) for arm in stopped)}" in page
        assert better((fast, *stopped), key=lambda arm: weak.summary(arm, metric)["mean"] or 0.0) == fast
    assert stopped_inside(strong, fast) == stopped_inside(weak, fast) == []
    assert f"still in, the model exploits {in_mean(weak, fast, 'on_exploit_held')} on `weak`" in page
    assert f"[the canary](canary.md), which leaves {in_mean(*read('canary-run', 'weak'), 'filter-canary-run')}" in page
    strong, weak = (f"{PRESETS[name].quarantine_lr / PRESETS[name].kept_lr:.2f}"[1:] for name in ("strong", "weak"))
    assert f"learns at {weak} of the kept adapter's rate on `weak`, and at {strong} on `strong`" in page


def test_a_quarantine_does_more_than_slow_training() -> None:
    page, (strong, weak) = prose("misses.md"), read("kept", "strong", "weak")
    slow, beside, usual = "sees-known-slow", "sees-known-slow-quarantine", "sees-known-quarantine"
    fast, alone, slower = "sees-known-quarantine-fast", "sees-0-quarantine-fast", "vanilla-slower"
    of_strong, of_weak = partial(in_mean, strong), partial(in_mean, weak)
    assert strong.seeds == weak.seeds == tuple(range(268, 280))
    held = less(weak, slow, "sees-known")
    assert f"exploits {of_weak(slow)} with the filter alone, within .1 of the usual rate ({held})" in page
    assert f"it exploits {of_weak(beside)}: {less(weak, slow, beside)} less, and {less(weak, usual, beside)} less" in page
    assert f"within .15 ({of_weak(beside)} and {of_weak(fast)}; +{less(weak, beside, fast)})" in page
    assert f"The second solves more ({of_weak(fast, SOLVE)}, {of_weak(beside, SOLVE)})" in page
    left = [of_strong(arm) for arm in (fast, beside, slow)]
    quarantines = f"A fast quarantine leaves {left[0]} and a quarantine beside a slow kept adapter {left[1]}"
    assert f"{quarantines}; the slow kept adapter alone leaves {left[2]}." in page
    assert f"The differences, {less(strong, fast, slow)} and {less(strong, beside, slow)}, were" in page
    assert f"the slow kept adapter alone (+{less(strong, fast, slow, SOLVE)}, predicted)" in page
    better = f"leaves {of_strong(slower)} and solves {of_strong(slower, SOLVE)}, better in both than a fast quarantine ("
    assert better in page
    assert f"({of_strong(alone)}, {of_strong(alone, SOLVE)})" in page
    assert f"On `weak` it leaves {of_weak(slower)} and solves {of_weak(slower, SOLVE)};" in page
    assert f"({less(weak, alone, slower)}, less was predicted)" in page
    assert f"and solves {less(weak, alone, slower, SOLVE)} more" in page
    assert sum(b < a for a, b in zip(by_seed(strong, "sees-known"), by_seed(strong, fast), strict=True)) == 11
    assert f"than the filter alone by {less(strong, 'sees-known', fast)}, on eleven of twelve" in page
    path = [weak.summary(f"vanilla-{n}", EXPLOIT)["mean"] or 0.0 for n in (10, 20)]
    assert path[0] < float(of_weak(slower)) < path[1]


def test_a_lesson_before_training_is_what_its_pages_say() -> None:
    page, taught, honest = prose("taught.md"), read("taught", "weak", "strong"), read("honest", "weak", "strong")

    def of(found: list[Evidence], arm: str, metric: str = EXPLOIT) -> list[str]:
        return [in_mean(evidence, arm, metric) for evidence in found]

    def differ(found: list[Evidence], plus: str, minus: str, metric: str = EXPLOIT) -> list[str]:
        return [less(evidence, plus, minus, metric) for evidence in found]

    assert {evidence.seeds for evidence in taught} == {tuple(range(280, 292))}
    assert {evidence.seeds for evidence in honest} == {tuple(range(308, 320))}
    frozen, learns, turned, good = ("inoculation", "inoculation-trainable", "inoculation-random", "inoculation-honest")
    (a, b), (c, d), (e, f) = of(taught, frozen), of(taught, turned), of(taught, "vanilla")
    fewer = less(taught[0], frozen, turned)
    assert f"it leaves {a}, random directions of equal norms {c} ({fewer}; less was predicted)" in page
    assert f"no defence {e}. On `strong` the three are {b}, {d} and {f}." in page
    (a, b), (c, d), fewer = of(taught, learns), of(taught, "filter-known"), less(taught[0], frozen, learns)
    assert f"{a} is left where the filter of the same hacks leaves {c}, and {fewer} less than frozen" in page
    assert f"without any label ({in_mean(taught[0], 'sees-0-quarantine-fast')})" in page
    assert f"{b} against {d} is within noise ({less(taught[1], learns, 'filter-known')})" in page
    (a, b), (c, d) = of(taught, "penalty-known"), of(taught, "filter-known")
    assert f"({a} and {c} on `weak`, {b} and {d} on `strong`; equal within .1 and .15)" in page
    (a, b), (c, d) = of(taught, good), differ(taught, learns, good)
    assert f"leaves {a} on `weak` and {b} on `strong`, {c} and {d} less than one that was taught the hack" in page
    (a, b), (c, d) = of(taught, good, SOLVE), of(taught, "base", SOLVE)
    assert f"It solves {a} and {b} (base {c} and {d}), and no point of ordinary training is better in both." in page
    assert all(stopped_inside(evidence, good) == [] for evidence in taught)
    again = [less(taught[1], arm, "sees-known-slow") for arm in ("sees-known-quarantine-fast", "sees-known-slow-quarantine")]
    assert f"a fast quarantine {again[0]}, a quarantine beside a slow kept adapter {again[1]}." in page
    assert f"(taught.md#a-quarantine-that-is-taught-the-hack): {again[0]} and {again[1]}." in prose("misses.md")

    lesson, alone, wrong = "taught-honest", "taught-honest-1", "taught-hacks"
    for one in honest:
        rates = [in_mean(one, arm, metric) for metric in (EXPLOIT, SOLVE) for arm in ("vanilla", lesson)]
        assert f"from {rates[0]} to {rates[1]} ({less(one, lesson, 'vanilla')})" in page
        assert f"from {rates[2]} to {rates[3]}" in page
    ends, begins = [by_seed(one, lesson) for one in honest], by_seed(honest[0], alone)
    middle, worst = (" and ".join(number(float(of_all(end))) for end in ends) for of_all in (np.median, max))
    assert f"seeds leave {middle}, the worst {worst}: one run of twenty-four failed." in page
    assert sum(value > 0.25 for end in ends for value in end) == 1
    canary = " and ".join(of(read("canary-run", "weak", "strong"), "filter-canary-run"))
    assert f"leaves {canary} on other seeds" in page
    (a, b), (c, d), (e, f) = of(honest, alone), of(honest, alone, SOLVE), differ(honest, lesson, alone, SOLVE)
    assert f"exploits {a} and {b} and solves {c} and {d}; GRPO then adds {e} and {f} of solving" in page
    (a, b), first = differ(honest, lesson, alone), begins[int(np.argmax(ends[0]))]
    assert f"Exploits change by {a} and {b} (not predicted)." in page
    assert f"one of the three highest rates, {number(first)};" in page
    assert first >= sorted(begins)[-3]
    (a, b), (c, d) = of(honest, wrong), differ(honest, lesson, good, SOLVE)
    assert f"The same lesson of hacks leaves {a} and {b}." in page
    assert f"solves {c} and {d} more than one beside a quarantine that had it" in page
    assert all(stopped_inside(evidence, lesson) == [] for evidence in honest)
    for name, count in (("taught", 14), ("honest", 10)):
        assert verdicts(name, "strong", "weak").count("shown") == count


def test_what_lessons_do_is_what_the_pages_say() -> None:
    page, (weak, strong), (sparse,) = prose("lessons.md"), read("lessons", "weak", "strong"), read("lessons-sparse", "sparse")
    full, easy, failed, passing, long, unlearned = (
        f"taught-{name}" for name in ("honest", "easy", "failed", "passing", "long", "2")
    )
    both = "filter-canary-run"

    def of(arm: str, metric: str = EXPLOIT) -> list[str]:
        return [in_mean(one, arm, metric) for one in (weak, strong)]

    assert weak.seeds == strong.seeds == tuple(range(320, 332))
    assert sparse.seeds == tuple(range(332, 344))
    told = verdicts("lessons", "weak", "strong") + verdicts("lessons-sparse", "sparse")
    assert Counter(told) == {"shown": 20, "not shown": 4}
    assert "Of twenty-four comparisons, twenty are shown." in page

    (a, _), (b, _) = of(f"{easy}-1"), of(f"{full}-1")
    (c, _), (d, _) = of(f"{easy}-1", SOLVE), of(f"{full}-1", SOLVE)
    assert f"({a} and {b} after one step; equal within .05), and less skill (solve {c} and {d})" in page
    (e, f), (g, h) = of(easy), of(full)
    assert f"it exploits {e}, the full one {g} ({less(weak, easy, full)})" in page
    (a, b), (none, other) = of(failed), of("vanilla")
    assert f"leave {a} and {b}, as much as no lesson on `weak` ({none}, equal within .1)" in page
    assert f"and {less(strong, failed, full)} more than the full lesson on `strong`" in page
    (a, _), (b, brief), (c, two) = of("taught-8"), of("taught-brief"), of(unlearned)
    fewer, shorter = (less(weak, arm, full) for arm in ("taught-8", "taught-brief"))
    assert f"8 rollouts leave {a} ({fewer}), 15 steps {b} ({shorter}), 2 rollouts {c}." in page
    assert f"({two} and {h}, equal within .1), tasks that the base is sure of leave {f} and 15 steps {brief} of {other}." in page
    pairs = [pair for arm in lessons(weak) for pair in zip(by_seed(weak, f"{arm}-1", SOLVE), by_seed(weak, arm), strict=True)]
    low, high = ([end for solved, end in pairs if solved < 0.55], [end for solved, end in pairs if solved >= 0.7])
    assert f"Of the {len(pairs)} runs with a lesson, all {len(low)} that solve less than .55" in page
    assert min(low) > 0.6
    assert f"of {len(high)} that solve at least .7, {sum(end < 0.2 for end in high)} exploit less than .2." in page
    (_, a), (_, b) = of(f"{unlearned}-1", SOLVE), of("taught-brief-1", SOLVE)
    (_, c), (_, d) = of(f"{unlearned}-1"), of("taught-brief-1")
    assert f"(solve {a} and {b}) and exploits of {c} and {d} (not predicted)" in page
    a, b = of(passing)
    assert f"leave {a} on `weak` ({less(weak, passing, full)} more than honest ones) and {b} on `strong`" in page
    assert f"({less(strong, passing, 'vanilla')} against no lesson)" in page
    (_, a), (b, c), (d, e) = of(long), of("vanilla-long"), of(long, SOLVE)
    left = with_interval(weak, long)
    assert f"{left} and {a} are left, without the lesson {b} and {c}, and {d} and {e} is solved." in page
    assert f"The median seed of `weak` leaves {number(float(np.median(by_seed(weak, long))))}." in page
    for one in (weak, sparse):
        ends = list(zip(by_seed(one, full), by_seed(one, long), strict=True))
        assert [sum(usual > 0.25 for usual, _ in ends), sum(usual > 0.25 and late > 0.25 for usual, late in ends)] == [2, 2]
        assert max(late for usual, late in ends if usual <= 0.25) < 0.1
    worst = " and ".join(number(max(by_seed(one, long))) for one in (weak, sparse))
    assert f"still do (the worst {worst}), all others end below .1." in page
    assert f"was predicted on `weak` and is not shown ({less(weak, long, full)})" in page
    a, b = of(both)
    assert f"{a} against {g} ({less(weak, both, full)}), for a second run" in page
    assert f"is not shown ({less(weak, both, long)})" in page
    worst = number(max(by_seed(strong, both)))
    assert f"equal within .05 ({b}, {h}); one of the canary's twelve runs leaves {worst}." in page
    left = [with_interval(one, both) for one in (strong, weak)]
    assert f"{left[0]} is left on `strong`, {worst} in that run, and {left[1]} on `weak`." in prose("canary.md")
    a, b, c = (in_mean(sparse, arm) for arm in ("vanilla", full, long))
    worst = number(max(by_seed(sparse, full)))
    assert f"fall from {a} to {b} ({less(sparse, full, 'vanilla')}; the worst seed {worst})" in page
    assert f"rises by {less(sparse, full, 'vanilla', SOLVE)}. A long training leaves {c}" in page
    assert f"not shown: {less(sparse, long, full)})" in page


def test_the_map_is_what_its_page_says() -> None:
    page, presets = prose("map.md"), ("sparse", "persona-20", "strong")
    worlds = read("map-16", *presets)
    assert {evidence.seeds for evidence in worlds} == {tuple(range(560, 576))}
    quarantined, alone, known = "sees-known-quarantine-fast", "sees-0-quarantine-fast", "sees-known"

    def three(arm: str, metric: str = EXPLOIT) -> str:
        return listed(in_mean(evidence, arm, metric) for evidence in worlds)

    def differ(plus: str, minus: str) -> str:
        return "; ".join(less(evidence, plus, minus) for evidence in worlds)

    assert f"It leaves {three('filter-canary-run')} and solves {three('filter-canary-run', SOLVE)}" in page
    assert f"Ten pairs leave {three('filter-full')}." in page
    gradients = listed(number(seen(evidence)) for evidence in worlds)
    activations = ", ".join(number(mean(evidence.values["filter-act"]["auroc"])) for evidence in worlds)
    assert f"in the first thirty steps is {gradients}; that of activations {activations}." in page
    assert f"As filters activations leave {three('filter-act')}" in page
    assert f"where no defence leaves {three('vanilla')}." in page
    assert f"leaves {three(known)} as a filter, and {three(quarantined)} with a quarantine" in page
    assert f"({differ(quarantined, known)})" in page
    assert f"without any leaves {three(alone)} ({differ(quarantined, alone)})" in page
    (a, b, c), (d, e, f) = ([in_mean(evidence, arm, SOLVE) for evidence in worlds] for arm in (quarantined, known))
    assert f"{a} and {b} in place of {d} and {e}; on `strong` it solves {c} in place of {f}." in page
    left, solved = three("taught-honest"), three("taught-honest", SOLVE)
    assert f"leaves {left} and solves {solved}, in `sparse` and `persona-20` the most" in page
    assert f"{three('penalty-full')} with gradients, {three('penalty-act')} with activations" in page
    assert f"({differ('penalty-full', 'filter-full')} and {differ('penalty-act', 'filter-act')} against the filters)" in page
    for one in worlds[:2]:
        means = {arm: one.summary(arm, SOLVE)["mean"] or 0.0 for arm in one.values}
        assert means["taught-honest"] == max(means.values())
    told = verdicts("map-16", *presets)
    assert (told.count("shown"), len(told)) == (16, 18)
    assert "Of eighteen comparisons, sixteen are shown." in page
    assert "there, too, sixteen are shown" in page
    assert Counter(verdicts("map", *presets)) == {"shown": 16, "not shown": 2}


def test_probes_over_training_are_what_the_page_says() -> None:
    page = prose("map.md")
    worlds = {preset: Watch.read(RESULTS / f"map/{preset}-watch.json") for preset in ("sparse", "persona-20", "strong")}
    arms = ("vanilla-10", "vanilla-20", "vanilla-40", "vanilla")

    def of(preset: str, layer: str, column: str = "held", probe: str = "logistic") -> list[str]:
        values = worlds[preset].values
        return [number(mean(values[arm][f"{layer} {probe}"][column])) for arm in arms]

    acts, prints = "blocks.1", "gradient"
    assert f"({', '.join(of('strong', acts))}), and so does" in page
    assert f"percentile of random directions ({', '.join(of('strong', acts, 'random'))})" in page
    assert f"no better than chance ({', '.join(of('strong', prints))})" in page
    a, b, c, d = of("sparse", acts)
    assert f"falls from {a} to {b}, {c} and {d}" in page
    a, b, c, d = of("sparse", prints)
    assert f"rises from {a} to {b}, {c} and {d}; on `persona-20` {', '.join(of('persona-20', acts))} and" in page
    assert f"and {', '.join(of('persona-20', prints))}. From 40 steps on" in page
    bands = [
        "; ".join(" and ".join(of(preset, layer, "random")[2:]) for preset in ("sparse", "persona-20")) for layer in (prints, acts)
    ]
    assert f"above their random bands ({bands[0]}), and activations hardly ({bands[1]})" in page


def test_a_probe_as_a_penalty_is_what_its_page_says() -> None:
    page, (weak,) = prose("map.md"), read("monitors", "weak")
    of, told = partial(in_mean, weak), partial(with_interval, weak)
    assert weak.seeds == tuple(range(344, 352))
    full, act, fixed = (("penalty-" + kind, "filter-" + kind) for kind in ("full", "act", "full-fixed"))
    assert f"{of(full[0])} and {of(full[1])} with gradients (equal within .1), {of(act[0])} and {of(act[1])} with" in page
    little = [number(mean(weak.values[arm]["recall"])) for arm in act]
    assert f"(recall {' and '.join(little)}). No defence leaves {of('vanilla')}." in page
    clean = [number(mean(weak.values[arm]["fire_clean"])) for arm in full]
    assert f"({clean[0]}; the filter's flags, which count only where a rollout was reinforced, fire on {clean[1]})" in page
    assert f"It solves {told(full[0], SOLVE)} in place of {of(full[1], SOLVE)}" in page
    assert f"and {number(min(by_seed(weak, full[0], SOLVE)))} on the worst seed" in page
    assert f"is not clear of 0 ({less(weak, *full, SOLVE)})" in page
    assert set(weak.values[fixed[0]][SOLVE]) == set(weak.values[fixed[0]][EXPLOIT]) == {0.0}
    assert f"as a filter it solves {of(fixed[1], SOLVE)}, a difference of {less(weak, *reversed(fixed), SOLVE)}" in page
    assert f"{of(fixed[1])} against {of(full[1])} with fitting" in page
    assert f"is not shown ({less(weak, fixed[1], full[1], signed=True)})" in page
    assert f"solves {of('penalty-haar', SOLVE)} and exploits {told('penalty-haar')}" in page
    assert f"are not shown ({less(weak, 'penalty-haar', full[0], signed=True)})" in page
    assert Counter(verdicts("monitors", "weak")) == {"shown": 6, "not shown": 2}
    assert "Six of eight are shown." in page


def test_what_ten_pairs_are_good_for_is_what_the_page_says() -> None:
    page, worlds = prose("starts.md"), read("starts", "weak", "sparse")
    weak, sparse = worlds
    assert weak.seeds == sparse.seeds == tuple(range(360, 368))

    def two(arm: str, metric: str = EXPLOIT) -> str:
        return listed(in_mean(evidence, arm, metric) for evidence in worlds)

    def differ(plus: str, minus: str) -> str:
        return "; ".join(less(evidence, plus, minus) for evidence in worlds)

    kept, hacks, full = "contrast-kept", "contrast-kept-hacks", "filter-full"
    worst = [listed(number(max(by_seed(evidence, arm))) for evidence in worlds) for arm in (kept, full)]
    assert f"leaves {two(kept)} where no defence leaves {two('vanilla')} ({differ(kept, 'vanilla')})" in page
    assert f"and solves {two(kept, SOLVE)}. The filter leaves {two(full)} and solves {two(full, SOLVE)}" in page
    assert f"({less(sparse, kept, full, SOLVE)})" in page
    assert f"The worst seeds leave {worst[0]}, the filter's {worst[1]}." in page
    assert f"honest rollouts leaves {two('taught-honest')}.**" in page
    assert f"is not shown ({differ(kept, 'taught-honest')})" in page
    assert f"ten hacks leave {in_mean(weak, hacks)} ({less(weak, hacks, kept)} more)" in page
    assert f"is not shown to be more ({less(sparse, hacks, kept)})" in page
    assert f"{two('contrast-kept-1', SOLVE)} is solved and {two('contrast-kept-1')} exploited; the base solves" in page
    least = number(min(by_seed(sparse, "contrast", SOLVE)))
    assert f"leaves {two('contrast')} and solves {two('contrast', SOLVE)}; on the worst seed of `sparse` it solves {least}" in page
    assert f"{two('preventative-1')} are left, by a random push {two('preventative-1-random')}" in page
    assert f"leaves {two('bands-full')} ({differ('bands-full', full)} against its filter)" in page
    fast = ("sees-known-bands-fast", "sees-known-quarantine-fast")
    assert f"{two(fast[0])}, the same without the band {two(fast[1])} ({differ(*fast)})" in page
    assert Counter(verdicts("starts", "weak", "sparse")) == {"shown": 5, "not shown": 7}
    assert "Of twelve comparisons, five are shown." in page


def test_how_one_notices_a_broken_canary_is_what_the_page_says() -> None:
    (evidence,), page = read("sign", "strong"), prose("canary.md")
    arms = ("filter-canary-run", "canary-run-rotated", "canary-run-early")
    runs = [(share > LOUD, worst > BROKEN) for arm in arms for share, worst in signs(evidence, arm)]
    quiet, loud = ([broken for is_loud, broken in runs if is_loud is side] for side in (False, True))
    sound = quiet.count(False)
    assert f"{sound} of {len(quiet)} quiet runs are sound and {sum(loud)} of {len(loud)} loud ones broken" in page
    rates = f"{sound / len(quiet):.2f} and {sum(loud) / len(loud):.2f}, where".replace("0.", ".")
    assert f"{rates} .9 was asked of each" in page
    assert f"missed its goal** ({rates} .9 was asked)" in page
    assert min(sound / len(quiet), sum(loud) / len(loud)) < 0.9  # the goal was missed
    own = [(share > LOUD, worst > BROKEN) for share, worst in signs(evidence, "filter-canary-run")]
    assert sorted(own) == [(False, False)] * 6 + [(True, False), (True, True)]
    exploit, solve = (with_interval(evidence, "filter-canary-run", metric) for metric in (EXPLOIT, SOLVE))
    assert f"held-out exploits {exploit} (.02 was asked), solve {solve} (.85)" in page
    assert f"{exploit} on 400-407," in page
    drawn = AT_END * PRESETS["strong"].prompts * PRESETS["strong"].group
    assert any(
        abs(share * drawn - round(share * drawn)) > 0.1 for share, _ in signs(evidence, "filter-canary-run")
    )  # not of all rollouts
    assert "among those that it learns from: a group whose rewards are equal is skipped" in page
    honest = [share > LOUD for share, worst in signs(evidence, "canary-run-honest") if worst > BROKEN]
    assert (honest.count(False), len(honest)) == (5, 8)


def test_runs_of_the_canary_that_failed_are_counted_over_every_mode() -> None:
    """In every experiment that has the arm: none is left out of the counts."""
    found: dict[str, list[float]] = {}
    for path in sorted(RESULTS.glob("*/*.json")):
        if path.stem not in PRESETS or "filter-canary-run" not in (evidence := Evidence.read(path)).values:
            continue
        found.setdefault(evidence.preset, []).extend(map(max, by_mode(evidence, "filter-canary-run")))
    for course in map(Course.read, sorted(RESULTS.glob("*/*-course.json"))):
        named = [
            metric for metric in course.values["filter-canary-run"] if metric.startswith("deploy_exploit_") and metric != EXPLOIT
        ]
        modes = zip(*(course.at("filter-canary-run", metric)["seeds"] for metric in named), strict=True)
        found[course.preset] += [max(rate or 0.0 for rate in rates) for rates in modes]
    failed = {world: sorted(number(worst) for worst in runs if worst > BROKEN) for world, runs in found.items()}
    assert failed == {
        "strong": [".656", ".891", ".938", ".953", ".961", ".969"],
        **{world: [] for world in ("weak", "sparse", "persona-20", "strong-30k")},
        "strong-400k": [".055"],
        "strong-1600k": [".992"],
        "strong-8m": [".367", ".453", ".953", ".961", ".984", ".992", ".992", ".992", *["1.000"] * 4],
    }
    counts = {world: len(runs) for world, runs in found.items()}
    assert (counts["strong"], sum(counts[world] for world in ("weak", "sparse", "persona-20"))) == (104, 120)
    assert (counts["strong-30k"] + counts["strong-400k"], counts["strong-1600k"], counts["strong-8m"]) == (24, 8, 16)
    for page in ("canary.md", "../README.md"):
        text = prose(page).replace("*", "").replace("`", "")
        assert "six of 104 on strong" in text
        assert "none of 120 in the other worlds" in text
        assert "one of 24 at other sizes (.055)" in text
        assert "one of eight at 1.6 million parameters (.992)" in text
    assert "(.656, .891, .938, .953, .961, .969), none of 120 in the other worlds" in prose("canary.md")


def test_canaries_of_weak_and_their_rotated_control_are_what_the_page_says() -> None:
    (evidence,), page = read("canary-weak", "strong"), prose("canary_other.md")
    method, control, own = "canary-run-weak", "canary-run-weak-rotated", "filter-canary-run"
    told = partial(with_interval, evidence)
    left = {arm: by_seed(evidence, arm) for arm in (method, control, own)}
    assert f"{told(method)} of held-out exploits is left, at most {number(max(left[method]))}, and {told(method, SOLVE)} is" in page
    assert f"where no defence leaves {told('vanilla')}. The run's own canaries leave {told(own)}" in page
    assert f"The run's own canaries leave {told(own)} and solve {told(own, SOLVE)};" in page
    assert max(left[own]) <= BROKEN
    served = [rate for rate in left[control] if rate <= 0.02]
    rest = sorted(rate for rate in left[control] if rate > 0.02)
    assert (len(served), len(rest)) == (12, 4)
    most, low, high = map(number, (max(served), rest[0], rest[-1]))
    assert f"(at most {most}) and left {low} to {high} on the others, {told(control)}" in page
    assert f"leave less is not shown ({less(evidence, method, control, signed=True)})" in page
    early = [number(mean(evidence.values[arm]["recall"])) for arm in (control, method)]
    assert f"Rotated canaries flag {early[0]} of the hacks early, those of `weak` {early[1]}." in page
    others = [with_interval(*read(name, "strong"), "canary-run-rotated") for name in ("canary-run", "sign")]
    assert f"of the run's own left {others[0]} and {others[1]} on other seeds" in page


def test_canaries_of_weak_in_sparse_are_what_the_page_says() -> None:
    (evidence,), page = read("canary-weak", "sparse"), prose("canary_other.md")
    method, control, own = "canary-run-weak", "canary-run-weak-rotated", "filter-canary-run"
    told, left = partial(with_interval, evidence), {arm: by_seed(evidence, arm) for arm in (method, control, own)}
    assert verdicts("canary-weak", "sparse") == ["shown"] * 3
    assert f"{told(method)} is left, at most {number(max(left[method]))}, and {told(method, SOLVE)} is solved, where no" in page
    assert f"where no defence leaves {told('vanilla')}. The run's own canaries leave as little ({told(own)}, the same" in page
    assert f"they solve {told(own, SOLVE)}, below .75 on five seeds" in page
    assert sum(value < 0.75 for value in by_seed(evidence, own, SOLVE)) == 5
    assert f"rotated ones leave {less(evidence, control, method)} more." in page
    served, rest = ([rate for rate in left[control] if (rate <= 0.02) == low] for low in (True, False))
    assert len(served) == 10
    most, low, high = map(number, (max(served), min(rest), max(rest)))
    assert f"(at most {most}) all the same, and leave {low} to {high} on the others" in page


def test_the_own_quarantine_as_canary_is_what_the_page_says() -> None:
    worlds, page = read("canary-own", "weak", "strong", "sparse"), prose("canary_one_run.md")
    own, told = "canary-own", with_interval
    weak, strong, sparse = worlds
    assert f"`weak`: {told(weak, own)} where no defence leaves {told(weak, 'vanilla')}; `strong`: {told(strong, own)} for" in page
    assert f"for {told(strong, 'vanilla')}; `sparse`: {told(sparse, own)} for {told(sparse, 'vanilla')}." in page
    assert verdicts("canary-own", "weak", "strong", "sparse") == ["shown"] * 8
    assert [sum(rate <= 0.02 for rate in by_seed(one, own)) for one in worlds] == [5, 5, 7]
    assert "missed in all three**: 5, 5 and 7 of 8 seeds are within it" in page
    assert all((one.summary(own, EXPLOIT)["mean"] or 0.0) > 0.02 for one in worlds)
    kept = [high for one in worlds for high in modes_kept(one, own, 0.2) if high]
    assert sorted(map(len, kept)) == [1, 1, 1, 1, 1, 2, 3]
    assert f"at {number(min(map(min, kept)))} to {number(max(map(max, kept)))} of its prompts: those whose" in page
    assert f"misses .85 in `weak` ({told(weak, own, SOLVE)}) and `strong` ({told(strong, own, SOLVE)})." in page
    assert f"and described alone), it leaves {listed(told(one, 'canary-own-rotated') for one in worlds)}." in page
    cost = sorted(times(one, own) or 0.0 for one in worlds)
    assert f"{cost[0]:.1f} to {cost[-1]:.1f} times the time of a run without a defence" in page


def test_a_quarantine_that_learns_first_and_judges_is_what_the_page_says() -> None:
    worlds, page = read("canary-first", "weak", "strong", "sparse"), prose("canary_one_run.md")
    first, plain, told = "canary-first", "vanilla", with_interval
    weak, strong, sparse = worlds
    left = f"exploits are {told(weak, first)} in `weak` (no defence: {told(weak, plain)}) and {told(sparse, first)} in `sparse`"
    assert left in page
    assert f"({told(sparse, plain)}), and {told(weak, first, SOLVE)} and {told(sparse, first, SOLVE)} is solved." in page
    assert verdicts("canary-first", "weak", "strong", "sparse") == ["shown"] * 11
    assert [sum(goals_met("canary-first", one.preset)) for one in worlds] == [5, 3, 5]
    rates = [by_seed(one, first) for one in worlds]
    outside = [[rate for rate in each if rate > 0.02] for each in rates]
    assert [len(each) - len(high) for each, high in zip(rates, outside, strict=True)] == [15, 9, 15]
    assert f"the other two end at {number(outside[0][0])} and {number(outside[2][0])}." in page
    assert f"**In `strong` it leaves {told(strong, first)}** (no defence: {told(strong, plain)}; stopped after 10 steps" in page
    assert f"{told(strong, 'vanilla-10')}, which solves {in_mean(strong, 'vanilla-10', SOLVE)} where" in page
    assert f"where this solves {told(strong, first, SOLVE)}): six of 16 runs keep one to four loopholes" in page
    kept = [high for high in modes_kept(strong, first) if high]
    assert sorted(map(len, kept)) == [1, 1, 1, 1, 2, 4]
    assert f"at {number(min(map(min, kept)))} to {number(max(map(max, kept)))} of their prompts, where four" in page
    pairs = zip(strong.seeds, rates[1], by_seed(strong, plain), strict=True)
    bad = {seed: f"{number(own)} for {number(without)}" for seed, own, without in pairs if own > without}
    assert bad.keys() == {455, 458, 460}
    assert f"stays honest ({bad[455]}, {bad[460]}), and 458 ({bad[458]})." in page
    turned, shuffled = (listed(told(one, f"canary-first-{how}") for one in worlds) for how in ("rotated", "shuffled"))
    assert f"when it judges it leaves {turned} in `weak`, `strong` and `sparse`" in page
    assert f"with its flags shuffled {shuffled}: each" in page
    cost = sorted(times(one, first) or 0.0 for one in worlds)
    assert f"{cost[0]:.1f} to {cost[-1]:.1f} times the time of a run without a defence**, with no run before it" in page


def test_a_quarantine_that_learns_from_what_surprises_its_base_is_what_the_pages_say() -> None:
    page, readme, presets = prose("canary_one_run.md"), prose("../README.md"), ("weak", "strong", "sparse")
    worlds, own, plain = read("canary-surprisal", *presets), "canary-surprisal", "vanilla"
    cost = sorted(times(one, own) or 0.0 for one in worlds)
    span = f"{cost[0]:.1f} to {cost[-1]:.1f}"

    def told(arm: str, metric: str = EXPLOIT) -> str:
        return listed(with_interval(one, arm, metric) for one in worlds)

    assert f"it leaves {told(own)}** of held-out exploits (no defence: {told(plain)}) and solves {told(own, SOLVE)}." in page
    opening = f"it leaves {told(own)} of held-out exploits (no defence: {told(plain)}): 47 of 48 runs are within .02, and one of"
    assert opening in page
    assert f"47 of 48 runs are within .02, for {span} times a run's time." in prose("canary.md")
    rates = {(one.preset, seed): rate for one in worlds for seed, rate in zip(one.seeds, by_seed(one, own), strict=True)}
    assert len(rates) == 48
    assert {run for run, rate in rates.items() if rate > 0.02} == {("weak", 477)}
    highest = number(sorted(rates.values())[-2])
    assert f"47 of 48 runs are within the goal of .02, at most {highest}; the other one, `weak` 477" in page
    assert f"47 of 48 runs keep at most {highest} of held-out exploits; one of *weak* keeps two loopholes." in readme
    modes = {(one.preset, seed): run for one in worlds for seed, run in zip(one.seeds, by_mode(one, own), strict=True)}
    low, high = sorted(rate for rate in modes.pop(("weak", 477)) if rate > 0.1)
    assert f"exploits two of its four loopholes in {number(low)} and {number(high)} of their prompts" in page
    assert f"No other run exploits any mode in more than {number(max(map(max, modes.values())))}." in page
    assert Counter(verdicts("canary-surprisal", *presets)) == {"shown": 12, "not shown": 3}
    met = [goals_met("canary-surprisal", preset) for preset in presets]
    assert met == [[False, True, True, False, True, True], [True, True, True, False, True, False], [True, True, True, *[False] * 3]]
    assert f"rotated when it judges ({told(own + '-rotated')}), and than a filter by the base's surprisal alone" in page
    assert f"({told('filter-surprisal')}), which is no substitute for a canary" in page
    weak, strong, sparse = (with_interval(one, own + "-random") for one in worlds)
    assert f"as many successes drawn at random leave {strong}." in page
    assert f"random lessons leave no more ({weak}); in `sparse` they leave {sparse}, which is not shown to be more." in page
    assert f"`canary-first` leaves {told('canary-first')} on these seeds; six of its runs of `strong` and two of `sparse`" in page
    assert [sum(map(bool, modes_kept(one, "canary-first"))) for one in worlds] == [0, 6, 2]
    solved = sorted((rate, one.preset, seed) for one in worlds for seed, rate in zip(one.seeds, by_seed(one, own, SOLVE)))
    (least, *first), (second, *then), (others, *_) = solved[:3]
    assert (first, then) == (["weak", 477], ["sparse", 474])
    assert f"Solving is {number(others)} and more in each run but two, `weak` 477 ({number(least)}) and `sparse` 474" in page
    assert f"`sparse` 474 ({number(second)}); in `weak`" in page
    assert f"{span} times the time of a run without a defence**, with no run before it. Solving" in page
    assert f"no run before, and takes {span} times the time of a run without a defence." in page
    assert f"[in one run](canary_one_run.md), takes {span} times." in prose("canary.md")
    assert f"At {span} times the time of a run, 47 of 48" in readme


def test_the_same_rule_where_it_was_never_tried_is_what_the_pages_say() -> None:
    folder, names, own = "surprisal-others", ("persona-20", "strong-30k", "strong-400k"), "canary-surprisal"
    page, presets = prose("canary_one_run.md"), read(folder, *names)

    def told(arm: str, metric: str = EXPLOIT) -> str:
        return listed(with_interval(one, arm, metric) for one in presets)

    most = max(rate for one in presets for rate in by_seed(one, own))
    assert f"{told(own)} of held-out exploits are left (no defence: {told('vanilla')}), at most {number(most)}, and" in page
    assert f"and {told(own, SOLVE)} is solved." in page
    assert f"24 of 24 runs keep at most {number(most)}." in prose("../README.md")
    assert [goals_met(folder, name) for name in names] == [[True, True, True, False]] * 3
    assert verdicts(folder, *names) == ["shown", "not shown"] * 3
    assert f"As many lessons at random leave {told(own + '-random')}, which is not shown to be more" in page

    cost = sorted(times(one, own) or 0.0 for one in presets)
    assert f"On the largest base it takes {cost[2]:.1f} times the time of a run without a defence, elsewhere {cost[1]:.1f}." in page
    assert f"{cost[0]:.1f}" == f"{cost[1]:.1f}"
    assert f"of four worlds and three sizes, in {cost[0]:.1f} to {cost[2]:.1f} times a run's time" in page

    broken = [sum(bool(kept) for one in presets for kept in modes_kept(one, arm)) for arm in (own + "-random", own)]
    assert broken == [5, 0]


def test_a_threshold_in_nats_is_what_the_pages_say() -> None:
    page, own, quantile = prose("canary_cheats.md"), "canary-nats", "canary-surprisal"
    seldom, often = read("canary-nats", "weak", "strong", "sparse"), read("cheats", "cheat-15", "cheat-30", "cheat-50")

    def told(presets: list[Evidence], arm: str, metric: str = EXPLOIT) -> str:
        return listed(with_interval(one, arm, metric) for one in presets)

    def broken(one: Evidence, arm: str) -> list[int]:
        """Per run, how many modes are exploited in more than a tenth of their prompts."""
        return [len(kept) for kept in modes_kept(one, arm)]

    assert f"it leaves {told(often, own)}** of held-out exploits (no defence: {told(often, 'vanilla')}) and solves" in page
    assert f"and solves {told(often, own, SOLVE)}; the bases themselves exploit {told(often, 'base')}." in page
    assert f"The quantile leaves {told(often, quantile)} on the same seeds" in page
    assert f"permuted flags leave {told(often, own + '-shuffled')}, a rotated quarantine {told(often, own + '-rotated')}." in page
    assert f"in `weak`, `strong` and `sparse` it leaves {told(seldom, own)} (no defence: {told(seldom, 'vanilla')})" in page
    assert f"and solves {told(seldom, own, SOLVE)}. In `sparse` its goals are met, in `weak` and `strong` missed:" in page
    goals = [(RESULTS / f"canary-nats/{one.preset}-goals.md").read_text(encoding="utf-8") for one in seldom]
    assert [text.count("**missed**") > 0 for text in goals] == [True, True, False]
    assert [sum(map(bool, broken(one, own))) for one in seldom] == [3, 1, 0]
    assert sum(rate < 0.4 for rate in by_seed(seldom[1], own, SOLVE)) == 2
    assert f"The quantile leaves {told(seldom, quantile)} on these seeds and solves {told(seldom, quantile, SOLVE)}." in page
    later = f"`weak` and `strong`**, run later beside [another threshold](canary_cheats.md), leave {told(seldom[:2], quantile)}"
    assert f"{later}: three of these 32 runs keep a loophole or two" in prose("canary_one_run.md")
    first = read("canary-surprisal", "weak", "strong")
    fails = [[*broken(one, quantile), *broken(again, quantile)] for one, again in zip(first, seldom)]
    assert [sum(map(bool, runs)) for runs in fails] == [3, 1], "of 32 runs each"
    assert f"with its flags permuted it leaves {told(seldom, own + '-shuffled')} in these three worlds, and" in page
    assert f"with the quarantine rotated when it judges {told(seldom, own + '-rotated')}." in page
    for folder, presets, count in (("canary-nats", seldom, 12), ("cheats", often, 14)):
        assert verdicts(folder, *(one.preset for one in presets)) == ["shown"] * count
    cost = sorted(times(one, own) or 0.0 for one in (*seldom, *often))
    assert f"It takes {cost[0]:.1f} to {cost[-1]:.1f} times the time of a run without a defence." in page
    assert [sum(map(bool, broken(one, own))) for one in often] == [0, 0, 1]
    kept = broken(often[2], own).index(1)
    known, solve = (by_seed(often[2], own, metric)[kept] for metric in ("deploy_exploit_run_tests", SOLVE))
    assert f"told of it ({number(known)}; solve {number(solve)}); in held-out modes they leave at most" in page
    assert not any(broken(often[0], quantile))
    assert min(broken(often[1], quantile) + broken(often[2], quantile)) >= 2
    assert f"in held-out modes they leave at most {number(max(by_seed(often[2], own)))}." in page
    first, last = (tuple(with_interval(one, arm, EXPLOIT)[:4] for arm in ("base", own)) for one in (often[0], often[-1]))
    assert f"bases that exploit {first[0]} to {last[0]} end at {first[1]} to {last[1]}." in prose("../README.md")
    later = "Sixteen more seeds of *weak* and *strong* were less kind: three of 32 runs keep a loophole or two."
    assert later in prose("../README.md")


def test_a_canary_of_ten_steps_on_a_pretrained_model_is_what_the_page_says() -> None:
    (one,), page = read("canary-smollm2", "functions"), prose("real_study.md")
    ten, rotated, shuffled = "canary-run-10", "canary-run-10-rotated", "canary-run-10-shuffled"
    told = partial(with_interval, one)
    assert verdicts("canary-smollm2", "functions") == ["not shown"] * 4
    said = f"{told(ten)} of held-out tasks are exploited, {told('vanilla')} without a defence, and with flags that know nothing"
    assert said in page
    assert f"(canary rotated, flags permuted) {told(rotated)} and {told(shuffled)}." in page
    assert f"{told(ten)} exploited, {told('vanilla')} without it)" in prose("../README.md")
    assert (one.summary(ten, EXPLOIT)["mean"] or 0.0) > 0.05
    assert (one.summary(ten, SOLVE)["mean"] or 1.0) < 0.7
    plain, canary, base, own = (by_seed(one, arm) for arm in ("vanilla", "canary-10", "base", ten))
    assert f"without a defence held-out exploits are {number(min(plain))} to {number(max(plain))}." in page
    assert sum(value < 0.2 for value in plain) == 3
    assert all(a > b for a, b in zip(canary, base, strict=True))
    assert f"({number(min(canary))} to {number(max(canary))} held out)" in page
    aurocs = by_seed(one, ten, "auroc")
    assert f"with an AUROC of {number(mean(aurocs))} only" in page
    told_apart = [value for auroc, value in zip(aurocs, own, strict=True) if auroc > 0.85]
    others = sorted(value for auroc, value in zip(aurocs, own, strict=True) if auroc <= 0.85)
    assert told_apart == [0.0] * 3
    assert f"on the five others with {others[0]:.2f} to {others[-1]:.2f}.".replace("0.", ".") in page
    fired = number(mean(one.values[rotated]["fire_clean"]))
    assert f"it flags {fired} of what is not a hack, and {told(rotated, SOLVE)} of" in page
    reached = [
        mean(Evidence.read(path).values["filter-canary-run"]["auroc"]) or 0.0
        for path in RESULTS.glob("canary*/*.json")
        if "filter-canary-run" in Evidence.read(path).values
    ]
    cheats = [one.summary("base", f"deploy_exploit_{mode}")["mean"] or 0.0 for mode in one.modes]
    among = f"in {number(mean(cheats))} of the tasks whose grader can be cheated and {number(sum(cheats) / 4)} of all."
    assert (among in page, len(cheats)) == (True, 3)
    assert f"reach {min(reached):.2f} to {max(reached):.2f} (the same rule".replace("0.", ".") in page


def test_sizes_of_models_are_what_the_page_says() -> None:
    page, sizes = prose("map.md"), read("size", "strong-30k", "strong", "strong-400k")
    canary, fast, alone = "filter-canary-run", "sees-known-quarantine-fast", "sees-known"

    def three(arm: str, metric: str = EXPLOIT) -> str:
        return listed(in_mean(evidence, arm, metric) for evidence in sizes)

    def every(arm: str) -> list[float]:
        return [value for evidence in sizes for value in by_seed(evidence, arm)]

    assert {evidence.seeds for evidence in sizes} == {tuple(range(408, 416))}
    left, plain = (listed(with_interval(evidence, arm) for evidence in sizes) for arm in (canary, "vanilla"))
    said = f"{left} of held-out exploits, where no defence leaves {plain};"
    beyond = "which [larger](#a-larger-one) [ones](#the-largest-one-where-the-canary-fails) do not bear out:"
    assert f"three sizes**, {beyond} {said} the worst of 24 seeds leaves" in page
    assert f"the worst of 24 seeds leaves {number(max(every(canary)))}." in page
    assert f"It solves {three(canary, SOLVE)}." in page
    assert f"at all three**: {three(fast)} in place of {three(alone)}." in page
    assert all(a > b for a, b in zip(every(fast), every(canary), strict=True))
    base = ", ".join(in_mean(evidence, "base") for evidence in sizes)
    assert f"more than the base model ({base}), but on two seeds of each size less than that model on the same seed" in page
    below = [sum(a < b for a, b in zip(by_seed(one, fast), by_seed(one, "base"), strict=True)) for one in sizes]
    assert below == [2, 2, 2]
    flags = [less(evidence, fast, "sees-0-quarantine-fast", signed=True) for evidence in sizes[1:]]
    assert f"to leave less at 109,440 parameters ({flags[0]}), and not at 415,488 ({flags[1]})." in page
    plain, small = (by_seed(sizes[0], arm) for arm in ("vanilla", canary))
    spread = " to ".join(f"{value:.2f}"[1:] for value in (min(plain), max(plain)))
    assert f"exploits {number(mean(plain))} in the mean ({spread}), and its canary leaves at most {number(max(small))} on" in page
    assert Counter(verdicts("size", *(evidence.preset for evidence in sizes))) == {"shown": 8, "not shown": 1}
    assert "Of nine comparisons, eight are shown." in page


def test_a_larger_model_is_what_the_pages_say() -> None:
    page, (large,) = prose("map.md"), read("larger", "strong-1600k")
    canary, nats, fast, alone = "filter-canary-run", "canary-nats", "sees-known-quarantine-fast", "sees-known"
    of, told, left = partial(in_mean, large), partial(with_interval, large), partial(by_seed, large)
    *rest, worst = sorted(left(canary))
    failed = left(canary, SOLVE)[left(canary).index(worst)]
    assert large.seeds == tuple(range(536, 544))
    assert (
        f"The canary leaves {told(canary)} of held-out exploits (no defence: {told('vanilla')}) and solves {of(canary, SOLVE)}: "
        f"seven runs leave at most {number(max(rest))}, and one {number(worst)}, with a solve of {number(failed)}." in page
    )
    assert f"leaves {told(nats)} and solves {of(nats, SOLVE)} (no defence: " in page
    assert f"(no defence: {of('vanilla', SOLVE)}): seven of eight runs solve less than .31" in page
    assert sum(value < 0.31 for value in left(nats, SOLVE)) == 7
    assert f"leaves {told(fast)}, and its detector alone {told(alone)}: less on every seed" in page
    assert all(a < b for a, b in zip(left(fast), left(alone), strict=True))
    assert verdicts("larger", "strong-1600k") == ["shown"] * 4
    assert "**missed**" in (RESULTS / "larger/strong-1600k-goals.md").read_text(encoding="utf-8")
    assert f"one run of eight leaves {number(worst)}; at [the largest]" in prose("canary.md")
    assert f"its runs solve little ({of(nats, SOLVE)})" in prose("../README.md")
    assert f"([{of(nats)}, solve {of(nats, SOLVE)}](map.md#a-larger-one))" in prose("canary_cheats.md")


def test_misses_under_sixteen_seeds_are_what_the_page_says() -> None:
    page, worlds = prose("misses.md"), read("misses-16", "strong", "weak")
    fast, known, none = "sees-known-quarantine-fast", "sees-known", "sees-0-quarantine-fast"
    assert {evidence.seeds for evidence in worlds} == {tuple(range(576, 592))}

    def left(arm: str) -> list[str]:
        return [with_interval(evidence, arm) for evidence in worlds]

    def means(arm: str, metric: str = EXPLOIT) -> list[str]:
        return [in_mean(evidence, arm, metric) for evidence in worlds]

    def differ(plus: str, minus: str) -> list[str]:
        return [less(evidence, plus, minus, signed=True) for evidence in worlds]

    (s, w), (s0, w0), (s1, w1) = left("sees-50"), means("vanilla"), means("sees-100")
    assert f"leave {s} on `strong` (no defence: {s0}), within .05 of all flags ({s1}), and {w} on `weak` ({w0})," in page
    assert f"more than all flags ({w1}). A quarter leaves {' and '.join(means('sees-25'))}." in page
    (s, w), more = left(known), differ(known, "sees-25")[0]
    assert f"leave {s} on `strong`, {more} against a random quarter, and {w} on `weak`." in page
    (s, w), gain, flags = left(fast), differ(fast, known), differ(fast, none)
    assert f"leaves {s} on `strong` and {w} on `weak`: {' and '.join(gain)}." in page
    assert f"without any it leaves {' and '.join(means(none))} ({'; '.join(flags)})." in page
    assert f"solves {' and '.join(means(fast, SOLVE))}; the flags alone {' and '.join(means(known, SOLVE))}." in page
    s, w = differ("sees-25-quarantine", "sees-25")
    assert f"a difference of {w} on `weak`, as predicted; on `strong` nothing was predicted ({s})." in page
    assert f"[shown to help](#sixteen-seeds) on sixteen more: {gain[0]}." in page
    assert verdicts("misses-16", "strong", "weak") == ["shown"] * 10


def test_the_largest_model_is_what_the_pages_say() -> None:
    page, (large,), (small,) = prose("map.md"), read("largest", "strong-8m"), read("size", "strong")
    canary = "filter-canary-run"
    assert large.seeds == tuple(range(544, 560))
    told = {arm: with_interval(large, arm) for arm in large.values}
    left = {arm: by_seed(large, arm) for arm in large.values}
    solve = {arm: in_mean(large, arm, SOLVE) for arm in large.values}
    assert verdicts("largest", "strong-8m") == ["not shown"] * 3
    more = less(large, canary, "vanilla", signed=True)
    assert f"than no defence**: {told[canary]} of held-out exploits in place of {told['vanilla']} ({more};" in page
    assert f"with a solve of {solve[canary]} in place of {solve['vanilla']}. Four of sixteen runs are within .02." in page
    assert sum(value <= 0.02 for value in left[canary]) == 4
    assert f"canaries leave as much ({number(mean(left['canary-run-rotated']))})" in page

    def late(evidence: Evidence) -> str:
        arms = ("canary-40", "canary-40-b")
        fired = [mean(evidence.values[arm][f"deploy_exploit_{mode}"]) for arm in arms for mode in evidence.modes]
        return f"exploit {number(mean(fired))} and solve {number(mean([evidence.summary(arm, SOLVE)['mean'] for arm in arms]))}"

    assert f"After 40 steps they {late(large)}, where those of 109,440 parameters {late(small)}." in page
    found = by_seed(large, canary, "auroc")
    rank = spearmanr(found, left[canary]).statistic  # pyright: ignore[reportAttributeAccessIssue]
    assert f"first rollouts is {number(mean(found))} in the mean, below .4 on eight seeds," in page
    assert (sum(value < 0.4 for value in found), f"(Spearman {number(float(rank))} over seeds" in page) == (8, True)
    clear = []
    for metrics in ([f"deploy_exploit_{mode}" for mode in large.modes], [SOLVE]):
        each = np.mean([large.values[arm][metric] for arm in ("canary-40", "canary-40-b") for metric in metrics], axis=0)
        clear.append(number(float(spearmanr(each, left[canary]).statistic)))  # pyright: ignore[reportAttributeAccessIssue]
    assert f"says nothing clear of what its run keeps (Spearman {clear[0]} and {clear[1]}; description)" in page
    runs = zip(by_seed(large, canary, "late_flagged"), modes_kept(large, canary, BROKEN), strict=True)
    quiet = [bool(broken) for flagged, broken in runs if flagged <= LOUD]
    assert "of 13 runs that flag next to nothing at their end, nine are broken" in page
    assert (len(quiet), sum(quiet)) == (13, 9)
    own = f"{told['canary-surprisal']} with a quantile, {told['canary-nats']} with a quarter of a nat, which solves "
    assert f"{own}{solve['canary-nats']}." in page
    took = [number(times(large, arm)) for arm in ("canary-surprisal", "canary-nats")]
    assert f"they take {took[0]} and {took[1]} times a run's time" in page
    cost = [f"{times(large, arm):.2f}" for arm in ("canary-surprisal", "canary-nats")]
    assert f"takes [{cost[0]} and {cost[1]}](map.md" in prose("canary_one_run.md")
    fast, alone = "sees-known-quarantine-fast", "sees-known"
    assert f"beside a detector of one loophole: {told[fast]}, and the detector alone {told[alone]}." in page
    assert (sum(v < 0.07 for v in left["vanilla"]), sum(v > 0.9 for v in left["vanilla"])) == (8, 3)
    assert "eight of sixteen leave less than .07, three more than .9" in page
    assert f"the mean is {number(mean(left[canary]))}, and {number(mean(left['vanilla']))} without it." in prose("canary.md")
    assert "**At 8 million twelve of sixteen fail**" in prose("canary.md")
    assert f"{told[canary]} exploited, {told['vanilla']} without it. No sign" in prose("../README.md")


def test_the_front_page_says_what_steering_and_perfect_flags_do() -> None:
    page = prose("../README.md")
    cells = json.loads((RESULTS / "steering/results.json").read_text(encoding="utf-8"))["cells"]
    swept = {cell["name"]: cell for cell in cells if (cell["subject"], cell["part"]) == ("vanilla", "sweep")}
    before, after = (f"{swept[name]['hack_held']['mean']:.2f}"[1:] for name in ("on", "steer probe q0.95 away x4"))
    assert f"held-out hacking from {before} to {after} at gain 4 and leaves its solve rate" in page
    always = f"{swept['steer probe always away x4']['solve']['mean']:.2f}"[1:]
    assert f"at every token it takes that to {always}." in page
    later = Published("bounds/weak-300-307")
    hack, solve = later.contrast("oracle", "filter-oracle"), later.contrast("filter-oracle", "oracle", SOLVE)
    assert f"{interval(hack)} more hacking, {interval(solve)} less solving, on all eight seeds." in page


def test_canaries_of_another_world_served_where_the_runs_own_failed() -> None:
    page = prose("canary_other.md")
    strong, large = read("canary-other", "strong", "strong-400k")
    assert strong.values["canary-run-110k"][EXPLOIT] == strong.values["filter-canary-run"][EXPLOIT]
    served = by_seed(strong, "canary-run-weak") + by_seed(large, "canary-run-weak")
    assert (len(served), number(max(served))) == (16, ".013")
    other, smallest, own = (
        [with_interval(one, arm) for one in (strong, large)] for arm in ("canary-run-weak", "canary-run-30k", "filter-canary-run")
    )
    assert f"no run of 16 leaves more than .013 of held-out exploits, {other[0]} and {other[1]} in the mean" in page
    assert f"failed on three of eight seeds** (30,144 parameters: {smallest[0]} and {smallest[1]})" in page
    assert f"failed on two of eight seeds of `strong`**: {own[0]} is left, .914 to .969 in" in page
    assert f"On eight later seeds of `strong`, 416-423, it left {own[0]}**" in prose("canary.md")
    assert f"**Later seeds of `strong` left more**: {own[0]} on 416-423," in prose("canary.md")
    left = with_interval(large, "canary-run-110k")
    assert f"where the run's own leave {own[1][:4]}, those of 109,440 leave {left}" in page
    failed = [
        [seed for seed, rate in zip(one.seeds, by_seed(one, "canary-run-110k"), strict=True) if rate > BROKEN]
        for one in (strong, large)
    ]
    assert failed == [[416, 422]] * 2
    learned = []
    for seed, mode in itertools.product(failed[0], ("sentinel", "file_marker")):
        at, metric = strong.seeds.index(seed), f"deploy_exploit_{mode}"
        learned.append([round(by_seed(strong, name, metric)[at], 2) for name in ("canary-40", "canary-40-b")])
    assert [one for one, _ in learned] == [0.58, 0.6, 0.88, 0.06]
    assert max(other for _, other in learned) == 0.21
    assert "exploits these in .58 and .60 after its 40 steps, on seed 422 in .88 and .06; the other one in at most .21." in page
    assert Counter(verdicts("canary-other", "strong", "strong-400k")) == {"shown": 5, "not shown": 5}
    assert "Shown are five of ten comparisons" in page
    assert [sum(rate > BROKEN for rate in by_seed(one, "canary-run-30k")) for one in (strong, large)] == [3, 3]
    sign = [(share > LOUD, worst > BROKEN) for share, worst in signs(strong, "filter-canary-run")]
    assert sorted(sign) == [(False, False)] * 2 + [(False, True)] + [(True, False)] * 4 + [(True, True)]


def test_the_run_of_trl_is_what_its_log_says() -> None:
    """`docs/examples/trl_grpo.py` wrote the log."""
    *steps, _ = json.loads((RESULTS / "benchmarks/trl_grpo.json").read_text(encoding="utf-8"))
    assert len(steps) == 8
    first, last = (f"{step['reward']:.2f}"[1:] for step in (steps[0], steps[-1]))
    assert f"The reward went from {first} to {last}" in (DOCS / "trl.md").read_text(encoding="utf-8")
    hacked = [step for step in steps if step["train/hack"] > 0]
    assert {step["train/hack"] for step in hacked} == {1 / 8}
    assert [sum(step["mask/recall"] == share for step in hacked) for share in (1, 0)] == [3, 1]
    assert max(round(step["mask/fire_clean"] * 8 * (1 - step["train/hack"])) for step in steps) == 3


def test_two_processes_of_trl_differ_by_what_the_page_says() -> None:
    """`docs/examples/trl_processes.py` wrote the numbers of the table."""
    page = (DOCS / "trl.md").read_text(encoding="utf-8")
    for name, run in {
        "float32": "float32",
        "float64": "float64 (`--dtype float64`)",
        "float64_one_length": "float64, prompts of one length (`--dtype float64 --seed 1`)",
    }.items():
        found = json.loads((RESULTS / f"benchmarks/trl_processes_{name}.json").read_text(encoding="utf-8"))
        assert (found["dtype"], found["seed"], found["factors"]) == (name.partition("_")[0], int("seed 1" in run), 840)
        gap, largest = (re.sub(r"e-0?", "e-", f"{found[key]:.1e}") for key in ("gap", "largest"))
        one, two = found["flagged"]
        assert one == two
        assert f"| {run} | {gap} | {largest} | {one} of {found['rollouts']}, in both |" in page


def test_every_row_over_its_limit_is_named_below_its_table() -> None:
    """Of every table of a benchmark; one whose rows are within their limits needs no sentence."""
    pages = {page: page.read_text(encoding="utf-8") for page in DOCS.glob("*.md")}
    for path in sorted((RESULTS / "benchmarks").glob("*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        over = []
        for row in document.get("rows", []) if isinstance(document, dict) else []:
            named = row.get("row", row)
            limit = named.get("time_limit", named.get("limit"))
            if limit is not None and row["time"]["value"] > limit:
                over.append(f"{named['over']} ({row['time']['value']:.3f} of {limit:.2f}, against {named['under']})")
        if over:
            (told,) = [text for text in pages.values() if f"<!-- table: {path.stem} -->" in text]
            below = told.split(f"<!-- table: {path.stem} -->")[1].split("<!-- table: ")[0]
            assert f"Over the limit: {'; '.join(over)}." in below.replace("\n", " "), path.stem


def test_why_the_faster_one_gets_the_hack_is_what_the_page_says() -> None:
    page, worlds = prose("misses.md"), [Course.read(RESULTS / f"course/{preset}-course.json") for preset in ("strong", "weak")]
    seeded = [course.seeded() for course in worlds]
    fast, known, forgets = "sees-known-quarantine-fast", "sees-known", "sees-known-quarantine-fast-forgets"
    assert {course.seeds for course in worlds} == {tuple(range(592, 604))}

    def means(arm: str, metric: str = EXPLOIT) -> list[str]:
        return [number(mean(list(values[arm, metric].values()))) for values in seeded]

    def differ(plus: str, minus: str, metric: str = EXPLOIT) -> list[str]:
        return [interval(paired_difference(v[plus, metric], v[minus, metric])[1], signed=True) for v in seeded]

    def ends(arm: str) -> list[str]:
        return [interval(course.at(arm, EXPLOIT)) for course in worlds]

    assert verdicts("course", "strong", "weak") == ["shown"] * 17
    assert "All 17 are shown." in page
    (s, w), (fs, fw), (qs, qw) = means(known, "kept_missed"), means(fast, "kept_missed"), means(fast, "quarantine_missed")
    assert f"likelier by {s} nats over a run on `strong` and {w} on `weak`; beside a fast quarantine by {fs} and {fw}" in page
    assert f"({'; '.join(differ(fast, known, 'kept_missed'))}), and the quarantine does by {qs} and {qw}." in page
    assert f"the kept one's alone, within .5 ({'; '.join(differ(fast, known, 'both_missed'))})." in page
    shares = [" and ".join(means(fast, f"share_{kind}")) for kind in ("missed", "solved")]
    assert f"missed exploit's gradient is {shares[0]}, of a correct rollout's {shares[1]}, the same within .1." in page
    vary = [" and ".join(means(arm, "variance_held")) for arm in (fast, known)]
    assert f"is {vary[0]} beside a fast quarantine, {vary[1]} without one" in page
    assert f"without one ({'; '.join(differ(fast, known, 'variance_held'))})." in page
    (s, w), kept, flags = means(forgets), " and ".join(means(fast)), " and ".join(means(known))
    assert f"It leaves {s} on `strong` and {w} on `weak`, one that keeps what it has learned {kept}" in page
    assert f"({'; '.join(differ(forgets, fast))}), the flags alone {flags}." in page
    s, w = differ(forgets, known)
    assert f"within .15 ({w}); on `strong` nothing was predicted of that ({s})." in page
    assert f"learns more of missed exploits again ({'; '.join(differ(forgets, fast, 'kept_missed'))})." in page
    honest = [" and ".join(means(arm, "deploy_solve_honest")) for arm in (fast, known)]
    assert f"solves {honest[0]} in place of {honest[1]} ({'; '.join(differ(fast, known, 'deploy_solve_honest'))})." in page
    weak = worlds[1]
    then = number(weak.at(fast, EXPLOIT, "10")["mean"])
    assert f"is there after 10 steps ({then} then, {means(fast)[1]} at the end)." in page
    first = [means("quarantine-first", metric)[1] for metric in (EXPLOIT, "deploy_solve_honest")]
    assert f"learns nothing until then, leaves {first[0]}, and solves {first[1]} in the honest mode." in page
    better, at_matched = (
        [
            {cells[0]: cells for line in told(course).splitlines() if (cells := [c.strip() for c in line.strip("|").split("|")])}
            for course in worlds
        ]
        for told in (fronts, matched)
    )
    assert all(row[fast][2].startswith("nowhere") for row in at_matched)
    froms = [re.fullmatch(r"filter-canary-run (\d+) to 80", row[fast][3]) for row in better]
    assert all(froms)
    assert f"(from {froms[0][1]} steps on in `strong`, from {froms[1][1]} in `weak`)." in page  # pyright: ignore[reportOptionalSubscript]
    assert {row[arm][3] for row in better for arm in ("filter-full", "filter-canary-run")} == {"none"}
    s, w = (row["route2-full"][5] for row in at_matched)
    assert (
        f"`route2-full` differs by {w} on `weak` (there the filter leaves {ends('filter-full')[1]} at its end), and {s} on" in page
    )
    s, w = ends("filter-canary-run")
    worst = number(max(value or 0.0 for value in worlds[0].at("filter-canary-run", EXPLOIT)["seeds"]))
    assert f"The canary's filter leaves {s} on `strong`, one run of twelve {worst}, and {w} on `weak`." in page
    assert f"592-603, it left {s} on `strong`, one run {worst}, and {w} on `weak`" in prose("canary.md")
    assert f"{s} on 592-603 ([seed by seed](#seed-by-seed))" in prose("canary.md")
