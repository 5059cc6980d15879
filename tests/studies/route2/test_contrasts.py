"""Contrasts between arms: statistics against scipy's own and by hand, and the evidence page against its table of runs."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from studies.common.stats import detectable
from studies.route2.contrasts import (
    ArmContrast,
    compare,
    failures,
    holm,
    mean_interval,
    pooled,
    pooled_table,
    read_contrasts,
    read_evidence,
    waiting,
)
from studies.route2.report import summary_table
from studies.route2.runs import COLUMNS
from studies.training.arms import ARMS

DOCS = Path(__file__).parents[3] / "docs"


def runs_of(**arms: list[float]) -> pd.DataFrame:
    """Return runs of one preset whose rates are all one number, with seeds from 0."""
    rows = [["p", arm, seed, *[rate] * 6, int(rate > 0.2)] for arm, rates in arms.items() for seed, rate in enumerate(rates)]
    return pd.DataFrame(rows, columns=COLUMNS)


def contrast(expect: str = "less") -> ArmContrast:
    return ArmContrast.model_validate({"name": "c", "preset": "p", "arm": "a", "minus": "b", "expect": expect})


def test_memorized_and_unjudged_answers_have_columns_of_their_own() -> None:
    runs = runs_of(vanilla=[0.5, 0.5]).assign(memorized=0.25, unjudged=0.125)
    header, _, row = ([cell.strip() for cell in line.split("|")] for line in summary_table(runs, ["vanilla"]).splitlines())
    assert [row[header.index(name)][:4] for name in ("memorized", "not judged", "solve")] == [".250", ".125", ".500"]


def test_an_interval_is_scipys_and_a_rate_is_clipped() -> None:
    values = np.array([0.0, 0.1, 0.5, 0.9])
    expected = stats.t.interval(0.95, 3, loc=values.mean(), scale=stats.sem(values))
    assert mean_interval(values, rate=False) == pytest.approx((values.mean(), *expected))
    assert mean_interval(values)[1:] == (0.0, pytest.approx(min(expected[1], 1.0)))
    assert np.isnan(mean_interval(values[:1])[1:]).all()


def test_failures_have_clopper_pearsons_interval() -> None:
    low, high = stats.beta.ppf(0.025, 2, 7), stats.beta.ppf(0.975, 3, 6)  # of 2 in 8
    assert failures(np.array([1, 3, 0, 0, 0, 0, 0, 0])) == f"2/8 [{low:.3f}, {high:.3f}]".replace("0.", ".")


def test_holm_by_hand() -> None:
    # sorted .01 .02 .03 .5, times 4 3 2 1: .04 .06 .06 .5
    assert holm(np.array([0.02, 0.5, 0.01, 0.03])) == pytest.approx([0.06, 0.5, 0.04, 0.06])


def test_a_contrast_is_paired_by_seed() -> None:
    runs = runs_of(a=[0.1, 0.2, 0.3, 0.1, 0.9], b=[0.5, 0.7, 0.6, 0.6])  # the fifth seed has no partner
    row = compare(runs, (contrast(),))[0]
    test = stats.ttest_rel([0.1, 0.2, 0.3, 0.1], [0.5, 0.7, 0.6, 0.6])
    assert (row.n, row.p, row.holds) == (4, pytest.approx(test.pvalue), "yes")
    assert row.difference == pytest.approx((-0.425, *test.confidence_interval(0.95)))
    assert row.detectable == pytest.approx(detectable(4, np.std([0.4, 0.5, 0.3, 0.5], ddof=1)))
    assert (row.fails[:3], row.fails_minus[:3]) == ("1/4", "4/4")


@pytest.mark.parametrize(
    ("b", "expect", "holds"),
    [
        ([0.41, 0.39, 0.4, 0.4], "equal", "yes"),
        ([0.9, 0.1, 0.2, 0.5], "equal", "not shown"),
        ([0.8, 0.79, 0.81, 0.8], "equal", "no"),
        ([0.8, 0.79, 0.81, 0.8], "less", "yes"),
        ([0.8, 0.79, 0.81, 0.8], "greater", "no"),
    ],
)
def test_what_holds(b: list[float], expect: str, holds: str) -> None:
    assert compare(runs_of(a=[0.4, 0.4, 0.4, 0.4], b=b), (contrast(expect),))[0].holds == holds


def test_an_unknown_arm_and_a_run_given_twice_are_refused(tmp_path: Path) -> None:
    runs = runs_of(a=[0.1, 0.2])
    with pytest.raises(ValueError, match="'b'"):
        compare(runs, (contrast(),))
    runs.to_csv(tmp_path / "runs.csv", index=False)
    with pytest.raises(ValueError, match="a at seed 0 of p is in two"):
        read_evidence((tmp_path / "runs.csv", tmp_path / "runs.csv"))


def test_a_prediction_waits_for_its_runs_and_a_misspelled_one_does_not() -> None:
    runs = runs_of(a=[0.1, 0.2], b=[0.3, 0.4])
    late, wrong = contrast().model_copy(update={"preset": "later"}), contrast().model_copy(update={"arm": "aa"})
    assert waiting(runs, (contrast(), late, wrong), set(runs.arm)) == [late]


def test_the_evidence_page_prints_its_table() -> None:
    spec = read_contrasts(DOCS / "results/contrasts.toml")
    runs = read_evidence((DOCS / "results/evidence.csv",))
    table = pooled_table(pooled(runs[runs.seed >= spec.fresh_from], spec), spec.presets)
    page = (DOCS / "results.md").read_text(encoding="utf-8")
    assert table.strip() in page
    predicted = read_contrasts(DOCS / "results/predicted.toml")
    cells = pooled(runs[runs.seed >= predicted.fresh_from], predicted)
    pretrained = {pool: of for pool, of in cells.items() if "smollm2" in of}
    assert pooled_table(pretrained, ("smollm2",)).strip() in page
    named = {arm for row in spec.pool for arm in row.arms} | {arm for c in spec.contrast for arm in (c.arm, c.minus)}
    assert named <= ARMS.keys()
    assert named <= set(runs.arm)
