"""Figures: what is drawn is what was measured, pages hold every arm once, and the same folder gives the same bytes."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from synthetic_study import write_study
from titles import saved_titles, untitled

from mi_route2.plots import BLUE, GRAY, ORANGE, VERMILLION, new_figure, style
from studies.route2.headline import StudyResult, write_headline_figure
from studies.route2.report import write_figures, write_report
from studies.route2.report.figures import (
    COS_PANELS,
    TRAINING_PANELS,
    all_arms_figures,
    curve_over_seeds,
    draw_panel,
    pages,
    write_cos_over_time,
    write_training,
)
from studies.route2.report.load import load_runs
from studies.route2.report.table import table

pytestmark = pytest.mark.study

ARMS = ("base", "vanilla", "absorb", "route2-full", "filter-full", "haar-full", "oracle")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_study(tmp_path / "strong-0123abcd", ARMS, seeds=(0, 1), steps=6)


@given(st.lists(st.integers(), unique=True, max_size=60), st.integers(1, 12))
def test_pages_hold_every_arm_once_in_order_and_are_even(numbers: list[int], size: int) -> None:
    arms = [str(each) for each in numbers]
    split = pages(arms, size)
    assert [arm for page in split for arm in page] == arms
    assert max(map(len, split)) <= size
    assert max(map(len, split)) - min(map(len, split)) <= 1
    assert len(split) == max(1, -(-len(arms) // size))


def test_dots_means_and_bars_are_those_of_their_arm_mode_and_color(root: Path) -> None:
    runs = load_runs(root)
    with style():
        (figure,) = all_arms_figures(runs)
    rows = {row["arm"]: row for row in table(runs)["rows"]}
    labels = [label.get_text().removesuffix(" (bound)") for label in figure.axes[0].get_yticklabels()]
    assert sorted(labels) == sorted(ARMS)
    for ax, mode in zip(figure.axes, runs.modes.names, strict=True):
        for metric, color in (("train_hack", ORANGE), ("deploy_hack", VERMILLION), ("deploy_solve", BLUE)):
            measured = [rows[arm][f"{metric}_{mode}"] for arm in labels if mode != "none" or metric == "deploy_solve"]
            faces = [each for each in ax.collections if np.allclose(np.asarray(each.get_facecolor())[0, :3], to_rgba(color)[:3])]
            drawn = sorted((np.asarray(each.get_offsets())[:, 0].tolist() for each in faces), key=len, reverse=True)
            dots = [value for each in measured for value in each["seeds"] if value is not None]
            means = [each["mean"] for each in measured if each["mean"] is not None]
            assert drawn == ([pytest.approx(dots), pytest.approx(means)] if measured else [])
            bars = [list(line.get_xdata()) for line in ax.lines if line.get_color() == color]
            assert bars == [pytest.approx([each["lo"], each["hi"]]) for each in measured if each["lo"] is not None]


def test_training_is_drawn_before_that_of_vanilla(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr("studies.route2.report.figures.save_pages", lambda figures, path: drawn.extend(figures) or [])
    runs = load_runs(root)
    write_training(runs, root / "training.png")
    (axes,) = [ax for ax in drawn[0].axes if ax.get_ylabel() == "route2-full"]
    hack = drawn[0].axes[drawn[0].axes.index(axes) + 1]
    assert drawn[0].axes[1].get_title().startswith("hack")
    means = {
        color: np.mean([[row["hack"] for row in run.metrics] for run in runs.of(arm).values()], axis=0)
        for color, arm in ((GRAY, "vanilla"), (BLUE, "route2-full"))
    }
    assert {line.get_color(): list(line.get_ydata()) for line in hack.lines} == {  # pyright: ignore[reportArgumentType]
        color: pytest.approx(mean) for color, mean in means.items()
    }


def test_a_curve_is_the_mean_between_the_lowest_and_the_highest_seed(root: Path) -> None:
    runs = list(load_runs(root).of("route2-full").values())
    steps, middle, low, high = curve_over_seeds(runs, lambda row: row["reward"])
    raw = np.array([[row["reward"] for row in run.metrics] for run in runs])
    assert steps.tolist() == [1, 2, 3, 4, 5, 6]
    assert middle == pytest.approx(raw.mean(0))
    assert (low.tolist(), high.tolist()) == (raw.min(0).tolist(), raw.max(0).tolist())


def test_every_curve_reads_the_number_of_its_label() -> None:
    row = {"reward": 1, "hack": 2, "solve": 3, "exploit": 4, "groups": 8, "zero_variance_groups": 2, "overlap": 5}
    row |= {"grad_norm": {"kept": 6, "quarantine": 7}, "scores": {"student_hack": 8, "student_clean": 9, "teacher": 10}}
    row |= {"mask": {"fire_hack": 11, "fire_clean": 12, "fire_teacher": 13, "auroc": 14, "recall": 15, "precision": 16}}
    panels = {panel.title.partition("\n")[0]: panel for panel in (*COS_PANELS, *TRAINING_PANELS)}
    read = {title: {curve.name: curve.read(row) for curve in panel.curves} for title, panel in panels.items()}
    assert read == {
        "score against v": {"student, hack": 8, "student, clean": 9, "teacher": 10},
        "fire rate": {"student, hack": 11, "student, clean": 12, "teacher": 13},
        "AUROC of the score": {"AUROC": 14},
        "overlap at refresh": {"overlap": 5},
        "reward": {"rate": 1},
        "hack": {"rate": 2},
        "solve": {"rate": 3},
        "zero-variance": {"rate": 0.25},
        "gradient norm": {"kept": 6, "quarantine": 7},
    }


def test_steps_without_the_quantity_are_left_out(root: Path) -> None:
    runs = list(load_runs(root).of("route2-full").values())
    overlap = COS_PANELS[3].curves[0].read
    assert curve_over_seeds(runs, overlap)[0].tolist() == [5]
    teacher = COS_PANELS[1].curves[2].read
    assert [len(each) for each in curve_over_seeds(runs, teacher)] == [0, 0, 0, 0]


def test_what_was_not_measured_says_so_and_an_overlap_below_the_axis_is_still_on_it(root: Path) -> None:
    runs = list(load_runs(root).of("haar-full").values())
    with style():
        empty, flipped = new_figure(4, 2).subplots(1, 2)
        draw_panel(empty, COS_PANELS[2], [replace(run, metrics=[{"step": 1, "mask": None}]) for run in runs], [])
        draw_panel(flipped, COS_PANELS[3], [replace(run, metrics=[{"step": 5, "overlap": -0.8}]) for run in runs], [])
    assert [text.get_text() for text in empty.texts] == ["not measured"]
    assert flipped.get_ylim()[0] <= -0.8
    assert len(flipped.texts) == 0


def test_arms_without_scores_are_not_in_cos_over_time(root: Path, tmp_path: Path) -> None:
    small = load_runs(write_study(tmp_path / "small", ("base", "vanilla", "absorb"), seeds=(0,), steps=3))
    assert write_cos_over_time(small, tmp_path / "cos_over_time.png") == []
    assert not (tmp_path / "cos_over_time.png").exists()


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path], list[list[str]]]:
    """A folder with its report, the report's files, and the titles of each of its figures."""
    root = write_study(
        tmp_path_factory.mktemp("reported") / "strong-0123abcd", ("base", "vanilla", "route2-full"), seeds=(0, 1), steps=6
    )
    with saved_titles() as seen:
        return root, write_report(root), seen


def test_two_reports_of_one_folder_are_the_same_bytes(reported: tuple[Path, list[Path], list[list[str]]]) -> None:
    root, paths, _ = reported
    before = {path.name: path.read_bytes() for path in paths}
    tables = {f"{name}.{kind}" for name in ("table", "ablations", "leakage") for kind in ("json", "md")}
    assert set(before) == {*tables, "all_arms_per_mode.png", "cos_over_time.png", "training.png"}
    assert {path.name: path.read_bytes() for path in write_report(root)} == before
    assert all(path.parent == root and not path.name.startswith(".") for path in root.iterdir() if path.is_file())


def test_what_an_earlier_report_had_goes_and_tables_come_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_study(tmp_path / "strong-0123abcd", ("base",), seeds=(0,), steps=1)
    stale = ("leakage.md", "leakage.json", "training.png", "cos_over_time.png", "all_arms_per_mode-2.png", "training-3.png")
    for name in (*stale, "training-mine.png"):
        (root / name).write_text("of more arms")
    with monkeypatch.context() as patch:
        patch.setattr("studies.route2.report.write_all_arms", lambda runs, path: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            write_report(root)
    assert not (root / "table.json").exists()  # by which a report is known as that of its runs
    write_report(root)
    assert [name for name in stale if (root / name).exists()] == []
    assert (root / "training-mine.png").exists()


def test_every_figure_says_of_which_preset_it_is(reported: tuple[Path, list[Path], list[list[str]]], tmp_path: Path) -> None:
    root, _, of_report = reported
    with saved_titles() as seen:
        write_headline_figure(StudyResult(json.loads((root / "table.json").read_text())), tmp_path / "headline.png")
    assert [len(of_report), len(seen)] == [3, 1]
    assert untitled([*of_report, *seen], "strong") == []


def test_one_arm_on_one_seed_is_enough_for_a_figure(tmp_path: Path) -> None:
    root = write_study(tmp_path / "small", ("base",), seeds=(0,), steps=1)
    assert [path.name for path in write_figures(load_runs(root))] == ["all_arms_per_mode.png"]
    assert "Arm vanilla was not run" in next(path for path in write_report(root) if path.name == "table.md").read_text()


def test_nothing_is_written_when_a_run_is_corrupt(root: Path) -> None:
    path = root / "seed-1/oracle/eval.json"
    path.write_text(path.read_text() + "\n")
    before = sorted(root.iterdir())
    with pytest.raises(ValueError, match=r"seed-1/oracle/eval\.json does not match its checksum"):
        write_report(root)
    assert sorted(root.iterdir()) == before
