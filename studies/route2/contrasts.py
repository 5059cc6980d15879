"""Contrasts between arms over seeds, as a TOML file names them, with intervals, Holm's correction and counts of failures.

    difference = mean over common seeds of measure(arm) - measure(minus),  with a 95% Student-t interval
    p          = paired t test, two-sided: the test that belongs to the interval
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
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
from pydantic import BaseModel, ValidationError
from scipy.stats import binomtest, ttest_1samp
from scipy.stats import t as student

from mi_route2.plots import BLUE, GREEN, ORANGE, PAGE_WIDTH, VERMILLION, new_figure, save_figure, style
from mi_route2.validation import unknown_name
from studies.common.tables import markdown_page, markdown_table
from studies.route2.runs import COLUMNS, load_runs

MARGIN = 0.05
LEVEL = 0.95


class Pool(BaseModel, frozen=True, extra="forbid"):
    """Row of the summary: what a user has, what to do, and the arms whose runs are pooled."""

    have: str
    do: str
    arms: tuple[str, ...]


class Contrast(BaseModel, frozen=True, extra="forbid"):
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
    contrast: tuple[Contrast, ...] = ()


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


def mean_interval(values: np.ndarray, rate: bool = True) -> tuple[float, float, float]:
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
    return float(ttest_1samp(differences, 0.0).pvalue) if np.any(differences) else 1.0


def holm(p: np.ndarray) -> np.ndarray:
    """Return Holm's adjusted p-values."""
    order = np.argsort(p)
    steps = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(steps, 1)
    return adjusted


def compare(runs: pd.DataFrame, contrasts: tuple[Contrast, ...]) -> pd.DataFrame:
    """Return one row per contrast: means, difference with interval, p, Holm's p, failures, and whether what was expected holds.

    Raises:
        ValueError: An arm has no run at the seeds of the other.
    """
    rows = []
    for contrast in contrasts:
        table = runs[runs.preset == contrast.preset].pivot_table(contrast.measure, "seed", "arm")
        for arm in (contrast.arm, contrast.minus):
            if arm not in table:
                raise ValueError(f"{contrast.name}: {unknown_name(arm, [str(name) for name in table], 'arm')}")
        pairs = table[[contrast.arm, contrast.minus]].dropna()
        if len(pairs) < 2:
            raise ValueError(
                f"{contrast.name}: {contrast.arm} and {contrast.minus} have {len(pairs)} common seeds: run two at least"
            )
        of = runs[(runs.preset == contrast.preset) & runs.seed.isin(pairs.index)].groupby("arm").failed
        differences = (pairs[contrast.arm] - pairs[contrast.minus]).to_numpy()
        mean, low, high = mean_interval(differences, rate=False)
        rows.append(
            {
                "contrast": contrast.name, "preset": contrast.preset, "measure": contrast.measure, "n": len(pairs),
                "arm": mean_interval(pairs[contrast.arm].to_numpy()), "minus": mean_interval(pairs[contrast.minus].to_numpy()),
                "difference": (mean, low, high), "p": paired_p(differences),
                "fails": failures(of.get_group(contrast.arm).to_numpy()), "expect": contrast.expect,
                "fails_minus": failures(of.get_group(contrast.minus).to_numpy()),
            }
        )  # fmt: skip
    frame = pd.DataFrame(rows)
    if len(frame):
        frame["holm"] = holm(frame.p.to_numpy())
        frame["holds"] = [_holds(row.expect, row.difference, row.holm) for row in frame.itertuples()]
    return frame


def _holds(expect: str, difference: tuple[float, float, float], p: float) -> str:
    mean, low, high = difference
    if expect == "equal":
        return "yes" if low > -MARGIN and high < MARGIN else "no" if low > MARGIN or high < -MARGIN else "not shown"
    sign = mean < 0 if expect == "less" else mean > 0
    return "yes" if sign and p < 1 - LEVEL else "not shown" if sign or p >= 1 - LEVEL else "no"


def _text(value: float, signed: bool = False) -> str:
    text = f"{value:+.3f}" if signed else f"{value:.3f}"
    return text.replace("0.", ".", 1) if abs(value) < 0.9995 else text


def interval_text(triple: tuple[float, float, float], signed: bool = False) -> str:
    """Return ``.053 [.010, .096]``; the mean alone without an interval."""
    mean, low, high = triple
    return _text(mean, signed) + ("" if np.isnan(low) else f" [{_text(low, signed)}, {_text(high, signed)}]")


def contrast_table(frame: pd.DataFrame) -> str:
    """Return the contrasts as a Markdown table."""
    header = [
        "contrast",
        "preset",
        "measure",
        "n",
        "arm",
        "minus",
        "difference",
        "p (Holm)",
        "fails: arm",
        "minus",
        "expected",
        "holds",
    ]
    body = [
        [
            row.contrast, row.preset, row.measure, row.n, interval_text(row.arm), interval_text(row.minus),
            interval_text(row.difference, signed=True), f"{row.holm:.3g}", row.fails, row.fails_minus, row.expect, row.holds,
        ]
        for row in frame.itertuples()
    ]  # fmt: skip
    return markdown_table(header, body, left=3)


def pooled(runs: pd.DataFrame, spec: Contrasts) -> pd.DataFrame:
    """Return the summary: a row per pool and preset, with exploits, solving and failures over its runs."""
    rows = []
    for pool in spec.pool:
        for preset in spec.presets:
            cell = runs[(runs.preset == preset) & runs.arm.isin(pool.arms)]
            if len(cell):
                rows.append(
                    {
                        "have": pool.have, "do": pool.do, "preset": preset, "n": len(cell), "solve": float(cell.solve.mean()),
                        "exploit": mean_interval(cell.exploit_held.to_numpy()),
                        "fails": f"{int((cell.failed > 0).sum())}/{len(cell)}",
                    }
                )  # fmt: skip
    return pd.DataFrame(rows)


def pooled_table(frame: pd.DataFrame, presets: tuple[str, ...]) -> str:
    """Return the summary as a Markdown table with a column per preset."""
    body = []
    for (have, do), rows in frame.groupby(["have", "do"], sort=False):
        cells = {
            row.preset: f"{interval_text(row.exploit)}, solve {_text(row.solve)}, fails {row.fails}" for row in rows.itertuples()
        }
        body.append([have, do, *(cells.get(preset, "not run") for preset in presets)])
    return markdown_table(["you have", "do", *presets], body, left=2)


def draw_pooled(frame: pd.DataFrame, presets: tuple[str, ...], path: Path) -> Path:
    """Draw the summary: exploits that are left and solving, a panel per preset."""
    labels = [f"{have}: {do}" for have, do in frame.groupby(["have", "do"], sort=False).groups]
    with style():
        figure = new_figure(PAGE_WIDTH, 1.0 + 0.34 * len(labels))
        axes = np.atleast_1d(figure.subplots(1, len(presets), sharex=True, sharey=True))
        for ax, preset in zip(axes, presets):
            for row in frame[frame.preset == preset].itertuples():
                y, (mean, low, high) = labels.index(f"{row.have}: {row.do}"), row.exploit
                ax.plot([low, high], [y, y], color=VERMILLION, linewidth=2)
                ax.plot(mean, y, "o", color=VERMILLION, markersize=5, label="held-out exploits, 95% interval", clip_on=False)
                ax.plot(row.solve, y, "^", color=BLUE, markersize=4.5, label="solve", clip_on=False)
            ax.set(title=preset, xlim=(0, 1), xticks=(0, 0.5, 1))
        axes[0].set_yticks(range(len(labels)), labels)
        axes[0].set_ylim(len(labels) - 0.5, -0.5)
        handles, names = axes[0].get_legend_handles_labels()
        unique = dict(zip(names, handles))
        figure.legend(unique.values(), unique.keys(), loc="outside lower center", ncols=2)
        return save_figure(figure, path)


def draw_contrasts(frame: pd.DataFrame, path: Path) -> Path:
    """Draw the difference of every contrast with its interval."""
    colors = {"exploit_held": VERMILLION, "hack_held": ORANGE, "solve": GREEN}
    with style():
        figure = new_figure(PAGE_WIDTH, 0.8 + 0.22 * len(frame))
        ax = figure.subplots()
        ax.axvline(0, color="black", linewidth=0.8)
        for y, row in enumerate(frame.itertuples()):
            mean, low, high = row.difference
            ax.plot([low, high], [y, y], color=colors[row.measure], linewidth=2)
            ax.plot(mean, y, "o", color=colors[row.measure], markersize=5)
        ax.set_yticks(range(len(frame)), [f"{row.contrast} ({row.preset}, n {row.n})" for row in frame.itertuples()])
        ax.set_ylim(len(frame) - 0.5, -0.5)
        ax.set_xlabel("paired difference of held-out exploits (red) or hacks (orange), 95% interval")
        return save_figure(figure, path)


def write_contrasts(path: Path, tables: tuple[Path, ...]) -> tuple[str, list[Path]]:
    """Return the summary and the contrasts of a file as text, and the paths of two figures drawn beside it.

    Raises:
        ValueError: Those of ``read_contrasts``, ``read_evidence`` and ``compare``.
    """
    spec = read_contrasts(path)
    runs = read_evidence(tables)
    runs = runs[runs.seed >= spec.fresh_from]
    sections, paths = [], []
    if spec.pool:
        summary = pooled(runs, spec)
        sections.append(pooled_table(summary, spec.presets))
        paths.append(draw_pooled(summary, spec.presets, path.with_name("pooled.png")))
    if spec.contrast:
        frame = compare(runs, spec.contrast)
        sections.append(contrast_table(frame))
        paths.append(draw_contrasts(frame, path.with_name("contrasts.png")))
    return markdown_page(sections), paths
