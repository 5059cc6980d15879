"""Ablations: an arm belongs to the group of its manifest and is compared with the arm that it changes."""

import json
from pathlib import Path
from statistics import fmean

import pytest
from synthetic_study import write_study

from studies.route2.report.load import load_runs
from studies.route2.report.table import ablation_groups, ablations_markdown

pytestmark = pytest.mark.study

ARMS = ("base", "vanilla", "route2-grad", "shared-basis", "route2-grad-module")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_study(tmp_path / "strong-0123abcd", ARMS, seeds=(0, 1, 2), steps=3)


def _held(root: Path, arm: str, seed: int) -> float:
    modes = json.loads((root / f"seed-{seed}/{arm}/eval.json").read_text())["modes"]
    return fmean(modes[mode]["deploy"]["hack"] for mode in ("sentinel", "stdout_marker", "file_marker"))


def test_groups_hold_their_arms_below_the_reference(root: Path) -> None:
    groups = {each["group"]: [arm["arm"] for arm in each["arms"]] for each in ablation_groups(load_runs(root))}
    assert groups == {"basis": ["route2-grad", "shared-basis"], "unit": ["route2-grad", "route2-grad-module"]}


def test_the_difference_is_paired_by_seed(root: Path) -> None:
    group = ablation_groups(load_runs(root))[0]
    head, arm = group["arms"]
    assert head["deploy_hack_held"]["difference"] is None
    expected = [_held(root, "shared-basis", seed) - _held(root, "route2-grad", seed) for seed in (0, 1, 2)]
    assert arm["deploy_hack_held"]["difference"]["seeds"] == pytest.approx(expected, abs=1e-12)
    assert arm["difference_seed_ids"] == [0, 1, 2]


def test_a_reference_that_was_not_run_is_said(tmp_path: Path) -> None:
    runs = load_runs(write_study(tmp_path / "small", ("base", "shared-basis"), seeds=(0, 1), steps=2))
    text = ablations_markdown(runs, ablation_groups(runs))
    assert "route2-grad (not run)" in text
    record = ablation_groups(runs)[0]["arms"][0]
    assert record["deploy_solve"]["difference"] is None
    assert record["deploy_solve"]["value"]["n"] == 2


def test_a_study_without_ablations_says_so(tmp_path: Path) -> None:
    runs = load_runs(write_study(tmp_path / "small", ("base", "vanilla"), seeds=(0,), steps=2))
    assert "No arm of this folder is an ablation" in ablations_markdown(runs, ablation_groups(runs))
    assert ablation_groups(runs) == []
