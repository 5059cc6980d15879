"""Contrasts against scipy and by hand; the published table is what the command prints from the evidence."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from studies.route2.contrasts import Contrast, compare, failures, holm, mean_interval, read_contrasts, write_contrasts

RESULTS = Path(__file__).parents[3] / "docs/results"


def runs(arms: dict[str, list[float]]) -> pd.DataFrame:
    rows = [
        {
            "preset": "strong",
            "arm": arm,
            "seed": seed,
            "exploit_held": value,
            "hack_held": value,
            "solve": 0.5,
            "failed": value > 0.2,
        }
        for arm, values in arms.items()
        for seed, value in enumerate(values)
    ]
    return pd.DataFrame(rows)


def test_a_contrast_is_the_paired_t_test_of_scipy_over_common_seeds() -> None:
    a, b = [0.1, 0.3, 0.2, 0.0], [0.5, 0.4, 0.9, 0.6, 0.7]
    row = compare(runs({"a": a, "b": b}), (Contrast(name="x", preset="strong", arm="a", minus="b"),)).iloc[0]
    test = stats.ttest_rel(a, b[:4])
    interval = test.confidence_interval(0.95)
    assert row.n == 4
    assert row.difference == pytest.approx((np.mean(a) - np.mean(b[:4]), interval.low, interval.high))
    assert (row.p, row.holm) == pytest.approx((test.pvalue, test.pvalue))
    assert (row.fails, row.fails_minus) == (failures(np.array([0, 1, 0, 0])), failures(np.ones(4)))
    assert row.holds == "yes"


def test_intervals_of_rates_stay_in_the_unit_interval_and_counts_have_exact_ones() -> None:
    assert mean_interval(np.array([0.0, 0.02, 0.9])) == pytest.approx((0.92 / 3, 0.0, 1.0))
    assert failures(np.array([0, 0, 2, 1])) == "2/4 [.068, .932]"  # beta quantiles: B(.025; 2, 3), B(.975; 3, 2)
    assert stats.beta.ppf([0.025, 0.975], [2, 3], [3, 2]) == pytest.approx([0.068, 0.932], abs=5e-4)


def test_holm_is_its_definition() -> None:
    assert holm(np.array([0.04, 0.01, 0.03])) == pytest.approx([0.06, 0.03, 0.06])


@pytest.mark.parametrize(
    ("text", "said"),
    [("[[contrast]]\nname = 'x'", "Field required"), ("presets = 3", "presets"), ("[[", "cannot read contrasts")],
)
def test_a_wrong_file_is_one_line(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=said):
        read_contrasts(path)


def test_an_arm_that_was_not_run_is_named() -> None:
    with pytest.raises(ValueError, match="unknown arm 'c'"):
        compare(runs({"a": [0.0, 0.1], "b": [0.0, 0.2]}), (Contrast(name="x", preset="strong", arm="a", minus="c"),))


def test_the_evidence_gives_its_tables_and_figures(tmp_path: Path) -> None:
    for name in ("contrasts.toml", "evidence.csv"):
        (tmp_path / name).write_bytes((RESULTS / name).read_bytes())
    text, paths = write_contrasts(tmp_path / "contrasts.toml", (tmp_path / "evidence.csv",))
    assert [path.name for path in paths] == ["pooled.png", "contrasts.png"]
    assert all(path.stat().st_size > 10_000 for path in paths)
    assert "fails 208/208" in text
