"""Contrasts between arms over seeds, as a TOML file names them, with intervals, Holm's correction and counts of failures.

    difference = mean over common seeds of measure(arm) - measure(minus),  with a 95% Student-t interval
    p          = paired t test, two-sided: the test that belongs to the interval
    detectable = the smallest difference that as many seeds of this spread show four times in five
    Holm       = p_(i) * (m - i), made monotone, over the m contrasts of the file (Holm 1979)
    fails k/n  = runs that use some held-out loophole in more than .2 of its prompts, with Clopper-Pearson's 95% interval

A file has tables ``[[pool]]`` (what a row of the summary pools) and ``[[contrast]]``:

    [[contrast]]
    name = "full: route - filter"
    preset = "strong"
    arm = "route2-full"
    minus = "filter-full"
    measure = "hack_held"
    expect = "equal"      # less, greater, or equal: the interval lies within the margin, .05
"""

import tomllib
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from pydantic import BaseModel, ValidationError
from scipy.stats import binomtest, ttest_1samp
from scipy.stats import t as student

from mi_route2.plots import BLUE, GREEN, ORANGE, PAGE_WIDTH, VERMILLION, new_figure, save_figure, style
from mi_route2.validation import unknown_name
from studies.common.stats import LEVEL, detectable
from studies.common.tables import markdown_page, markdown_table
from studies.route2.runs import COLUMNS, load_runs

MARGIN = 0.05


class Pool(BaseModel, frozen=True, extra="forbid"):
    """Row of the summary: what a user has, what to do, and the arms whose runs are pooled."""

    have: str
    do: str
    arms: tuple[str, ...]


class ArmContrast(BaseModel, frozen=True, extra="forbid"):
    """One paired contrast; ``expect`` is the claim that is tested."""

    name: str
    preset: str
    arm: str
    minus: str
    measure: Literal["exploit_held", "hack_held", "solve"] = "exploit_held"
    expect: Literal["less", "greater", "equal"] = "less"


class Contrasts(BaseModel, frozen=True, extra="forbid"):
    """Content of a file: presets and first fresh seed, rows of the summary, and contrasts."""

    presets: tuple[str, ...] = ("strong",)
    fresh_from: int = 0
    pool: tuple[Pool, ...] = ()
    contrast: tuple[ArmContrast, ...] = ()


def read_contrasts(path: Path) -> Contrasts:
    """Read a file of contrasts.

    Raises:
        ValueError: It is not TOML, or has an unknown or a wrong field.
    """
    try:
        return Contrasts.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read contrasts from {path}: {error}") from error


def read_evidence(paths: tuple[Path, ...]) -> pd.DataFrame:
    """Return the runs of CSV files and of run folders in one table.

    Raises:
        ValueError: A run (preset, arm, seed) is there twice, or a file lacks a column.
    """
    tables = [pd.read_csv(path) if path.suffix == ".csv" else load_runs(path) for path in paths]
    for path, table in zip(paths, tables):
        if missing := [name for name in COLUMNS if name not in table]:
            raise ValueError(f"{path} has no column {missing[0]}: a table of runs has {', '.join(COLUMNS)}")
    runs = pd.concat(tables, ignore_index=True)
    twice = runs[runs.duplicated(["preset", "arm", "seed"])]
    if len(twice):
        preset, arm, seed = twice.iloc[0][["preset", "arm", "seed"]]
        raise ValueError(f"{arm} at seed {seed} of {preset} is in two of the tables: give each run once")
    return runs


Interval = tuple[float, float, float]
"""Mean, lower and upper bound; NaN for both bounds of a single value."""


def values(runs: pd.DataFrame, column: str) -> np.ndarray:
    """Return a column as an array of float64."""
    return np.asarray(runs[column], dtype=float)


def mean_interval(values: np.ndarray, rate: bool = True) -> Interval:
    """Return mean and 95% Student-t interval, of a rate clipped to [0, 1]; both bounds are NaN for one value."""
    mean, n = float(np.mean(values)), len(values)
    if n < 2:
        return mean, float("nan"), float("nan")
    half = float(student.ppf((1 + LEVEL) / 2, n - 1)) * float(np.std(values, ddof=1)) / n**0.5
    low, high = mean - half, mean + half
    return (mean, max(low, 0.0), min(high, 1.0)) if rate else (mean, low, high)


def failures(failed: np.ndarray) -> str:
    """Return ``k/n [low, high]`` of runs that fail, with Clopper-Pearson's interval."""
    k, n = int((failed > 0).sum()), len(failed)
    exact = binomtest(k, n).proportion_ci(LEVEL, "exact")
    return f"{k}/{n} [{_text(exact.low)}, {_text(exact.high)}]"


def paired_p(differences: np.ndarray) -> float:
    """Return the two-sided p of a paired t test; 1 if no pair differs."""
    if not np.any(differences):
        return 1.0
    result: Any = ttest_1samp(differences, 0.0)
    return float(result.pvalue)


def holm(p: np.ndarray) -> np.ndarray:
    """Return Holm's adjusted p-values."""
    order = np.argsort(p)
    steps = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(steps, 1)
    return adjusted


@dataclass(frozen=True)
class ContrastResult:
    """Result of one contrast."""

    contrast: ArmContrast
    n: int
    arm: Interval
    minus: Interval
    difference: Interval
    detectable: float
    p: float
    fails: str
    fails_minus: str
    holm: float = 1.0
    holds: str = ""


def compare(runs: pd.DataFrame, contrasts: tuple[ArmContrast, ...]) -> list[ContrastResult]:
    """Return the result of every contrast, with Holm's p over all of them.

    Raises:
        ValueError: An arm has no run at the seeds of the other.
    """
    rows = [_compared(runs.loc[runs.preset == contrast.preset], contrast) for contrast in contrasts]
    adjusted = holm(np.array([row.p for row in rows]))
    return [
        replace(row, holm=float(p), holds=_holds(row.contrast.expect, row.difference, float(p))) for row, p in zip(rows, adjusted)
    ]


def waiting(runs: pd.DataFrame, contrasts: tuple[ArmContrast, ...], known: Collection[str]) -> list[ArmContrast]:
    """Return the contrasts of which an arm has no run in its preset yet; ``known`` are the arms that have runs anywhere."""
    here = set(zip(runs.preset, runs.arm))
    return [
        contrast
        for contrast in contrasts
        if {contrast.arm, contrast.minus} <= set(known)
        and not {(contrast.preset, contrast.arm), (contrast.preset, contrast.minus)} <= here
    ]


def _compared(runs: pd.DataFrame, contrast: ArmContrast) -> ContrastResult:
    by_arm = {str(arm): rows.set_index("seed") for arm, rows in runs.groupby("arm")}
    for name in (contrast.arm, contrast.minus):
        if name not in by_arm:
            raise ValueError(f"{contrast.name}: {unknown_name(name, list(by_arm), 'arm')}")
    arm, minus = by_arm[contrast.arm], by_arm[contrast.minus]
    seeds = sorted(set(arm.index) & set(minus.index))
    if len(seeds) < 2:
        raise ValueError(f"{contrast.name}: {contrast.arm} and {contrast.minus} have {len(seeds)} common seeds: run two at least")
    arm, minus = arm.loc[seeds], minus.loc[seeds]
    a, b = values(arm, contrast.measure), values(minus, contrast.measure)
    return ContrastResult(
        contrast, len(seeds), mean_interval(a), mean_interval(b), mean_interval(a - b, rate=False),
        detectable(len(seeds), float(np.std(a - b, ddof=1))), paired_p(a - b),
        failures(values(arm, "failed")), failures(values(minus, "failed")),
    )  # fmt: skip


def _holds(expect: str, difference: Interval, p: float) -> str:
    mean, low, high = difference
    if expect == "equal":
        return "yes" if low > -MARGIN and high < MARGIN else "no" if low > MARGIN or high < -MARGIN else "not shown"
    sign = mean < 0 if expect == "less" else mean > 0
    return "yes" if sign and p < 1 - LEVEL else "not shown" if sign or p >= 1 - LEVEL else "no"


def _text(value: float, signed: bool = False) -> str:
    text = f"{value:+.3f}" if signed else f"{value:.3f}"
    return text.replace("0.", ".", 1) if abs(value) < 0.9995 else text


def interval_text(triple: Interval, signed: bool = False) -> str:
    """Return ``.053 [.010, .096]``; the mean alone without an interval."""
    mean, low, high = triple
    return _text(mean, signed) + ("" if np.isnan(low) else f" [{_text(low, signed)}, {_text(high, signed)}]")


def contrast_table(rows: list[ContrastResult]) -> str:
    """Return the contrasts as a Markdown table."""
    header = [
        "contrast", "preset", "measure", "n", "arm", "minus", "difference", "detectable", "p (Holm)", "fails", "minus", "expected",
        "holds",
    ]  # fmt: skip
    body = [
        [
            row.contrast.name, row.contrast.preset, row.contrast.measure, row.n, interval_text(row.arm), interval_text(row.minus),
            interval_text(row.difference, signed=True), _text(row.detectable), f"{row.holm:.3g}", row.fails, row.fails_minus,
            row.contrast.expect, row.holds,
        ]
        for row in rows
    ]  # fmt: skip
    return markdown_table(header, body, left=3)


@dataclass(frozen=True)
class PooledCell:
    """One cell of the summary: what is left of exploits, solving and failures, over all runs of a pool in a preset."""

    n: int
    exploit: Interval
    solve: float
    failed: int


Summary = dict[Pool, dict[str, PooledCell]]
"""Pool -> preset -> cell."""


def pooled(runs: pd.DataFrame, spec: Contrasts) -> Summary:
    """Return the summary of the runs."""
    summary: Summary = {}
    for pool in spec.pool:
        summary[pool] = {}
        for preset in spec.presets:
            cell = runs.loc[(runs.preset == preset) & runs.arm.isin(pool.arms)]
            if len(cell):
                exploit, failed = values(cell, "exploit_held"), values(cell, "failed")
                solve = float(values(cell, "solve").mean())
                summary[pool][preset] = PooledCell(len(cell), mean_interval(exploit), solve, int((failed > 0).sum()))
    return summary


def pooled_table(summary: Summary, presets: tuple[str, ...]) -> str:
    """Return the summary as a Markdown table with a column per preset."""

    def text(cell: PooledCell | None) -> str:
        if cell is None:
            return "not run"
        return f"{interval_text(cell.exploit)}, solve {_text(cell.solve)}, fails {cell.failed}/{cell.n}"

    body = [[pool.have, pool.do, *(text(cells.get(preset)) for preset in presets)] for pool, cells in summary.items()]
    return markdown_table(["you have", "do", *presets], body, left=2)


def draw_pooled(summary: Summary, presets: tuple[str, ...], path: Path) -> Path:
    """Draw the summary: exploits that are left and solving, a panel per preset."""
    with style():
        figure = new_figure(PAGE_WIDTH, 1.0 + 0.34 * len(summary))
        axes = np.atleast_1d(figure.subplots(1, len(presets), sharex=True, sharey=True))
        for ax, preset in zip(axes, presets):
            for y, cells in enumerate(summary.values()):
                if (cell := cells.get(preset)) is not None:
                    mean, low, high = cell.exploit
                    ax.plot([low, high], [y, y], color=VERMILLION, linewidth=2)
                    ax.plot(mean, y, "o", color=VERMILLION, markersize=5, label="held-out exploits, 95% interval", clip_on=False)
                    ax.plot(cell.solve, y, "^", color=BLUE, markersize=4.5, label="solve", clip_on=False)
            ax.set(title=preset, xlim=(0, 1), xticks=(0, 0.5, 1))
        axes[0].set_yticks(range(len(summary)), [f"{pool.have}: {pool.do}" for pool in summary])
        axes[0].set_ylim(len(summary) - 0.5, -0.5)
        handles, names = axes[0].get_legend_handles_labels()
        unique = dict(zip(names, handles))
        figure.legend(unique.values(), unique.keys(), loc="outside lower center", ncols=2)
        return save_figure(figure, path)


def draw_contrasts(rows: list[ContrastResult], path: Path) -> Path:
    """Draw the difference of every contrast with its interval."""
    colors = {"exploit_held": VERMILLION, "hack_held": ORANGE, "solve": GREEN}
    with style():
        figure = new_figure(PAGE_WIDTH, 0.8 + 0.22 * len(rows))
        ax = figure.subplots()
        ax.axvline(0, color="black", linewidth=0.8)
        for y, row in enumerate(rows):
            (mean, low, high), color = row.difference, colors[row.contrast.measure]
            ax.plot([low, high], [y, y], color=color, linewidth=2)
            ax.plot(mean, y, "o", color=color, markersize=5)
        ax.set_yticks(range(len(rows)), [f"{row.contrast.name} ({row.contrast.preset}, n {row.n})" for row in rows])
        ax.set_ylim(len(rows) - 0.5, -0.5)
        ax.set_xlabel("paired difference of held-out exploits (red) or hacks (orange), 95% interval")
        return save_figure(figure, path)


def write_contrasts(path: Path, tables: tuple[Path, ...]) -> tuple[str, list[Path]]:
    """Return the summary and the contrasts of a file as text, and the paths of two figures drawn beside it.

    Raises:
        ValueError: Those of ``read_contrasts``, ``read_evidence`` and ``compare``.
    """
    spec = read_contrasts(path)
    runs = read_evidence(tables)
    known = set(runs.arm)
    runs = runs.loc[runs.seed >= spec.fresh_from]
    sections, paths = [], []
    if spec.pool:
        summary = pooled(runs, spec)
        sections.append(pooled_table(summary, spec.presets))
        paths.append(draw_pooled(summary, spec.presets, path.with_name(f"{path.stem}-pooled.png")))
    to_run = waiting(runs, spec.contrast, known)
    if ready := tuple(each for each in spec.contrast if each not in to_run):
        rows = compare(runs, ready)
        sections.append(contrast_table(rows))
        paths.append(draw_contrasts(rows, path.with_suffix(".png")))
    if to_run:
        sections.append(f"Still to run: {'; '.join(f'{each.name} ({each.preset})' for each in to_run)}.")
    return markdown_page(sections), paths
