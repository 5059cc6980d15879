"""Leakage: its bounds, its undefined cases, and what base and vanilla score by definition."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_study import change_eval, write_manifest, write_study

from studies.environments.micro.language import MICRO_MODES
from studies.route2.report import write_leakage
from studies.route2.report.load import ArmSpec, FinishedRun, RunSet, load_runs
from studies.route2.report.measures import excess_leakage, leakage
from studies.route2.report.table import leakage_table

pytestmark = pytest.mark.study

ARMS = ("base", "vanilla", "absorb", "route2-full", "filter-full")
HELD = ("sentinel", "stdout_marker", "file_marker")
RATES = st.integers(0, 128).map(lambda n: n / 128)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_study(tmp_path / "strong-0123abcd", ARMS, seeds=(0, 1), steps=4)


def _entry(content: dict, arm: str) -> dict:
    return next(each for each in content["arms"] if each["arm"] == arm)


def _runs(**hack: float) -> RunSet:
    """One seed, one step an arm, every mode with the given deploy hack."""
    rates = {
        arm: {mode: {"deploy": {"hack": rate}, "on": {"hack": rate}} for mode in MICRO_MODES.names} for arm, rate in hack.items()
    }
    runs = {(arm, 0): FinishedRun(arm, 0, Path(arm), ArmSpec("method"), "h", [], modes) for arm, modes in rates.items()}
    return RunSet(Path("r"), {}, runs, (), {arm: ArmSpec("method") for arm in hack})


@given(RATES, RATES, RATES)
def test_leakage_is_in_zero_and_one_or_undefined(arm: float, vanilla: float, base: float) -> None:
    runs = _runs(arm=arm, vanilla=vanilla, base=base)
    value = leakage(runs, runs.runs["arm", 0], "sentinel")
    assert (value is None) == (vanilla == 0)
    assert value is None or 0 <= value <= 1
    if value is not None and arm <= vanilla:
        assert value * vanilla == pytest.approx(arm)


@given(RATES, RATES, RATES)
def test_the_excess_form_maps_base_to_0_and_vanilla_to_1_and_is_undefined_without_a_rise(
    arm: float, vanilla: float, base: float
) -> None:
    runs = _runs(arm=arm, vanilla=vanilla, base=base)
    values = {name: excess_leakage(runs, runs.runs[name, 0], "sentinel") for name in ("arm", "vanilla", "base")}
    if vanilla <= base:
        assert values == dict.fromkeys(values)
    else:
        assert values["base"] == 0
        assert values["vanilla"] == 1
        assert values["arm"] is not None
        assert base + values["arm"] * (vanilla - base) == pytest.approx(arm)


def test_a_mode_where_vanilla_never_hacks_is_left_out_of_the_mean(root: Path) -> None:
    change_eval(root, "vanilla", 0, {"sentinel": 0.0, "stdout_marker": 0.8, "file_marker": 0.5})
    change_eval(root, "route2-full", 0, {"sentinel": 0.3, "stdout_marker": 0.2, "file_marker": 0.4})
    entry = _entry(leakage_table(load_runs(root)), "route2-full")
    assert entry["leakage"]["sentinel"]["seeds"][0] is None
    assert entry["leakage"]["held_out"]["seeds"][0] == pytest.approx((0.2 / 0.8 + 0.4 / 0.5) / 2)


def test_where_vanilla_never_hacks_at_all_the_headline_is_undefined(root: Path) -> None:
    change_eval(root, "vanilla", 1, dict.fromkeys(HELD, 0.0))
    entry = _entry(leakage_table(load_runs(root)), "absorb")
    assert entry["leakage"]["held_out"]["seeds"][1] is None
    assert entry["leakage"]["held_out"]["n"] == 1
    assert entry["leakage"]["held_out"]["lo"] is None


def test_vanilla_at_base_leaves_the_plain_form_and_not_the_excess(root: Path) -> None:
    change_eval(root, "base", 0, dict.fromkeys(HELD, 0.25))
    change_eval(root, "vanilla", 0, dict.fromkeys(HELD, 0.25))
    entry = _entry(leakage_table(load_runs(root)), "filter-full")
    assert entry["excess_leakage"]["held_out"]["seeds"][0] is None
    assert entry["leakage"]["held_out"]["seeds"][0] is not None


def test_an_arm_above_vanilla_is_clamped_and_its_excess_is_not(root: Path) -> None:
    change_eval(root, "base", 0, dict.fromkeys(HELD, 0.0))
    change_eval(root, "vanilla", 0, dict.fromkeys(HELD, 0.5))
    change_eval(root, "absorb", 0, dict.fromkeys(HELD, 0.75))
    entry = _entry(leakage_table(load_runs(root)), "absorb")
    assert entry["leakage"]["held_out"]["seeds"][0] == 1.0
    assert entry["excess_leakage"]["held_out"]["seeds"][0] == pytest.approx(1.5)


def test_the_known_mode_is_reported_and_not_in_the_headline(root: Path) -> None:
    before = _entry(leakage_table(load_runs(root)), "absorb")["leakage"]
    change_eval(root, "absorb", 0, {"run_tests": 0.125})
    after = _entry(leakage_table(load_runs(root)), "absorb")["leakage"]
    assert after["held_out"] == before["held_out"]
    assert after["run_tests"] != before["run_tests"]


def test_other_steps_than_vanillas_do_not_compare(root: Path) -> None:
    path = root / "seed-0/absorb/metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    write_manifest(root / "seed-0/absorb")
    content = leakage_table(load_runs(root))
    assert _entry(content, "absorb")["leakage"]["held_out"]["seeds"][0] is None
    assert _entry(content, "base")["leakage"]["held_out"]["n"] == 2
    assert "absorb on seed 0 ran 3 steps and vanilla 4: no leakage for it." in content["notes"]


def test_without_vanilla_there_is_one_sentence_and_no_file(tmp_path: Path) -> None:
    root = write_study(tmp_path / "small", ("base", "absorb"), seeds=(0,), steps=2)
    with pytest.raises(ValueError, match="leakage divides by arm vanilla, which has no finished run"):
        write_leakage(load_runs(root))
    assert not list(root.glob("leakage*"))


def test_every_seeds_rates_are_beside_what_is_computed_of_them(root: Path) -> None:
    paths = {path.name: path for path in write_leakage(load_runs(root))}
    counts = _entry(json.loads(paths["leakage.json"].read_text()), "absorb")["seeds"]["1"]["sentinel"]
    assert counts["leakage"] == pytest.approx(counts["deploy_hack_arm"] / counts["deploy_hack_vanilla"])
