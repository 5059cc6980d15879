"""Figures of finished runs: every arm in every mode, and the training logs step by step."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from mi_route2.plots import BLUE, GRAY, GREEN, ORANGE, PAGE_HEIGHT, PAGE_WIDTH, PURPLE, VERMILLION, new_figure, save_figure, style
from studies.common.command_line import seeds_text
from studies.common.stats import Summary, mean, summary
from studies.route2.report.load import VANILLA, ArmSpec, FinishedRun, RunSet
from studies.route2.report.measures import arm_order, by_seed, label, without_ablations

ARMS_ON_A_PAGE = 28
BELOW = 0.12  # distance of the seeds below their mean, in rows, so that no marker hides a seed
SHADE = "#F1F1F1"


@dataclass(frozen=True)
class Series:
    """One quantity of the figure; `metric` is completed by a mode's name, and `offset` is its position inside the arm's row."""

    metric: str
    name: str
    color: str
    marker: str
    offset: float


SERIES = (
    Series("train_hack", "train hack, last steps", ORANGE, "s", -0.33),
    Series("deploy_hack", "deploy hack (quarantine deleted)", VERMILLION, "o", -0.05),
    Series("deploy_solve", "deploy solve", BLUE, "^", 0.23),
)


def all_arms_figures(runs: RunSet) -> list[Figure]:
    """Return one figure per page; create and save them inside `plots.style()`."""
    order = arm_order(runs.specs)
    values = {arm: by_seed(runs, arm) for arm in order}
    table = {
        (arm, series.metric, mode): summary([each[f"{series.metric}_{mode}"] for each in values[arm].values()])
        for arm in order
        for series in SERIES
        for mode in runs.modes.names
    }
    return [_page(runs, arms, table) for arms in main_pages(order, runs.specs, ARMS_ON_A_PAGE)]


def save_pages(figures: Sequence[Figure], path: Path) -> list[Path]:
    """Save `name.png`, `name-2.png`, ... and return their paths."""
    names = [path if i == 0 else path.with_stem(f"{path.stem}-{i + 1}") for i in range(len(figures))]
    return [save_figure(figure, name) for figure, name in zip(figures, names, strict=True)]


def write_all_arms(runs: RunSet, path: Path) -> list[Path]:
    """Draw the figure and save it at `path` (and its further pages)."""
    with style():
        return save_pages(all_arms_figures(runs), path)


@contextmanager
def panels(
    path: Path,
    count: int,
    height: float,
    x: str,
    y: str,
    *,
    x_is_rate: bool = True,
    legend_inside: bool = False,
    sharex: bool = False,
    sharey: bool = True,
) -> Iterator[list[Axes]]:
    """Context: panels side by side with rates on their axes, to be drawn into; the figure is saved at ``path`` on a clean exit.

    Args:
        path: File of the figure.
        count: Number of panels.
        height: Height in inches.
        x: Label of every horizontal axis.
        y: Label of the first vertical axis.
        x_is_rate: True if the horizontal axis covers rates too; otherwise the data decide.
        legend_inside: True for a legend in the first panel, otherwise the last one's is beside it.
        sharex: True if the panels share their horizontal axis.
        sharey: True if they share their vertical axis, which then has its numbers once.
    """
    with style():
        figure = new_figure(PAGE_WIDTH, height)
        axes = list(np.atleast_1d(figure.subplots(1, count, sharex=sharex, sharey=sharey)))
        for ax in axes:
            ax.set_ylim(-0.03, 1.03)
            if x_is_rate:
                ax.set_xlim(-0.03, 1.03)
            ax.set_xlabel(x)
        axes[0].set_ylabel(y)
        yield axes
        if legend_inside:
            axes[0].legend(loc="center")
        else:
            axes[-1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        save_figure(figure, path)


def draw_means(ax: Axes, x: Sequence[float] | np.ndarray, results: Sequence[Summary], **style: Any) -> None:
    """Draw means over seeds with their intervals."""
    y, lo, hi = np.array([[each[key] for each in results] for key in ("mean", "lo", "hi")], dtype=float)
    ax.errorbar(x, y, yerr=[y - lo, hi - y], **style)


def pages(arms: Sequence[str], size: int) -> list[list[str]]:
    """Split arms into the fewest pages of at most `size`, of even length and in order."""
    count = max(1, -(-len(arms) // size))
    edges = [round(i * len(arms) / count) for i in range(count + 1)]
    return [list(arms[start:end]) for start, end in itertools.pairwise(edges)]


def main_pages(arms: Sequence[str], specs: dict[str, ArmSpec], size: int) -> list[list[str]]:
    """Return `pages`, with the arms of ablation groups on separate pages at the end."""
    main = without_ablations(arms, specs)
    rest = [arm for arm in arms if arm not in main]
    return [page for part in (main, rest) if part for page in pages(part, size)]


def _page(runs: RunSet, arms: Sequence[str], table: dict[tuple[str, str, str], Summary]) -> Figure:
    figure = new_figure(PAGE_WIDTH, min(1.3 + 0.38 * len(arms), PAGE_HEIGHT))
    axes = figure.subplots(1, len(runs.modes.names), sharex=True, sharey=True)
    for ax, mode in zip(axes, runs.modes.names, strict=True):
        _shade_blocks(ax, runs, arms)
        for series in SERIES:
            if mode != runs.modes.honest or series.metric == "deploy_solve":  # without a loophole there is nothing to hack
                _draw_series(ax, series, [table[arm, series.metric, mode] for arm in arms])
        known = mode in runs.modes.known
        kind = "known" if known else "nothing pays" if mode == runs.modes.honest else "held out"
        ax.set_title(f"{mode}\n({kind})", fontweight="bold" if known else "normal")
        ax.set_xlim(-0.04, 1.04)
        ax.set_xticks([0, 0.5, 1], ["0", ".5", "1"])
        ax.grid(axis="y", visible=False)
        ax.tick_params(axis="y", length=0)
    axes[0].set_yticks(range(len(arms)), [label(arm, runs.specs[arm]) for arm in arms])
    axes[0].set_ylim(len(arms) - 0.5, -0.5)
    for tick, arm in zip(axes[0].get_yticklabels(), arms, strict=True):
        role = runs.specs[arm].role
        tick.set_fontweight("bold" if role == "method" else "normal")
        tick.set_fontstyle("italic" if role in ("control", "bound") else "normal")
    figure.supxlabel("rate", fontsize=8)
    _outcome_legend(figure, titled(runs))
    return figure


def _draw_series(ax: Axes, series: Series, results: Sequence[Summary]) -> None:
    dots: list[tuple[float, float]] = []
    for row, result in enumerate(results):
        y = row + series.offset
        dots += [(value, y + BELOW) for value in result["seeds"] if value is not None]
        if result["lo"] is not None and result["hi"] is not None:
            ax.plot([result["lo"], result["hi"]], [y, y], color=series.color, linewidth=1.4, solid_capstyle="butt")
    means = [(result["mean"], row + series.offset) for row, result in enumerate(results) if result["mean"] is not None]
    if dots:
        ax.scatter(*zip(*dots, strict=True), s=5, color=series.color, alpha=0.65, linewidths=0, zorder=3)
        ax.scatter(
            *zip(*means, strict=True),
            s=14,
            color=series.color,
            marker=series.marker,
            edgecolors="white",
            linewidths=0.4,
            zorder=4,
            clip_on=False,
        )


def _shade_blocks(ax: Axes, runs: RunSet, arms: Sequence[str]) -> None:
    """Shade every second block of a method or baseline with its filter and controls."""
    filters = {spec.same_rule_filter for spec in runs.specs.values()}
    block = -1
    for row, arm in enumerate(arms):
        spec = runs.specs[arm]
        attached = arm in filters or (spec.role == "control" and spec.baseline in runs.specs)
        block += not (attached and row > 0)
        if block % 2 == 0:
            ax.axhspan(row - 0.5, row + 0.5, color=SHADE, linewidth=0, zorder=0)


def _outcome_legend(figure: Figure, title: str) -> None:
    handles: list[Line2D | Patch] = [
        Line2D([], [], color=each.color, marker=each.marker, markeredgecolor="white", markersize=5, label=each.name)
        for each in SERIES
    ]
    handles.append(Line2D([], [], color=GRAY, marker=".", linestyle="", markersize=4, label="one seed (below its mean)"))
    handles.append(Line2D([], [], color=GRAY, linewidth=1.4, label="95% t interval of the mean"))
    handles.append(Patch(color=SHADE, label="shading: an arm with its filter and controls"))
    _legend_above(figure, handles, title, columns=3)


def titled(runs: RunSet) -> str:
    """Return the title of a figure of these runs: their preset and seeds."""
    return f"{runs.settings['preset']}, {seeds_text(runs.seeds)}"


def _legend_above(figure: Figure, handles: Sequence[Line2D | Patch], title: str, columns: int) -> None:
    """Draw the legend above the panels, under the figure's title: a suptitle would lie on it, because both go to the upper edge."""
    look = {"weight": "bold", "size": 8.5}
    figure.legend(handles=list(handles), loc="outside upper center", ncols=columns, title=title, title_fontproperties=look)


Read = Callable[[dict[str, Any]], float | int | None]


@dataclass(frozen=True)
class Curve:
    """One line of a panel; `read` returns a number from a row of metrics.jsonl, or None if the row lacks it."""

    name: str
    read: Read
    color: str
    line: Literal["-", "--", ":"] = "-"
    marker: str = ""


@dataclass(frozen=True)
class Panel:
    """One column of a grid.

    Its axis covers `bounds`, and more if the data need it; without bounds, each arm has its own axis.
    """

    title: str
    curves: tuple[Curve, ...]
    bounds: tuple[float, float] | None = None
    level: float | None = None  # value of a dashed line, explained by the title


def _key(*path: str) -> Read:
    def read(row: dict[str, Any]) -> float | int | None:
        value: Any = row
        for name in path:
            value = value.get(name) if value is not None else None
        return value

    return read


def _zero_variance(row: dict[str, Any]) -> float | None:
    return row["zero_variance_groups"] / row["groups"] if row.get("groups") else None


COS_PANELS = (
    Panel(
        "score against v\n(dashed: 0)",
        (
            Curve("student, hack", _key("scores", "student_hack"), VERMILLION, "-"),
            Curve("student, clean", _key("scores", "student_clean"), BLUE, "--"),
            Curve("teacher", _key("scores", "teacher"), GREEN, ":"),
        ),
        level=0.0,
    ),
    Panel(
        "fire rate\n(share flagged)",
        (
            Curve("student, hack", _key("mask", "fire_hack"), VERMILLION, "-"),
            Curve("student, clean", _key("mask", "fire_clean"), BLUE, "--"),
            Curve("teacher", _key("mask", "fire_teacher"), GREEN, ":"),
        ),
        bounds=(0.0, 1.0),
    ),
    Panel("AUROC of the score\n(dashed: chance)", (Curve("AUROC", _key("mask", "auroc"), PURPLE),), bounds=(0.0, 1.0), level=0.5),
    Panel(
        "overlap at refresh\n(dashed: .2, rotated off)",
        (Curve("overlap", _key("overlap"), ORANGE, "-", "o"),),
        bounds=(-0.2, 1.0),
        level=0.2,
    ),
)
TRAINING_PANELS = (
    Panel("reward\n(mean)", (Curve("rate", _key("reward"), BLUE),), bounds=(0.0, 1.25)),
    Panel("hack\n(share)", (Curve("rate", _key("hack"), BLUE),), bounds=(0.0, 1.0)),
    Panel("solve\n(share)", (Curve("rate", _key("solve"), BLUE),), bounds=(0.0, 1.0)),
    Panel("zero-variance\ngroups (share)", (Curve("rate", _zero_variance, BLUE),), bounds=(0.0, 1.0)),
    Panel(
        "gradient norm\n(own scale)",
        (Curve("kept", _key("grad_norm", "kept"), BLUE), Curve("quarantine", _key("grad_norm", "quarantine"), VERMILLION, "--")),
    ),
)


def write_cos_over_time(runs: RunSet, path: Path) -> list[Path]:
    """Draw student and teacher scores, fire rates, AUROC and refresh overlap of every arm that scores its rollouts.

    Returns no path if no arm does. Routes (arms with a same-rule filter) come first.
    """
    scored = [arm for arm in arm_order(runs.specs) if _has_scores(runs, arm)]
    arms = sorted(scored, key=lambda arm: runs.specs[arm].same_rule_filter is None)
    return _write_grids(runs, arms, COS_PANELS, path, rows=8, behind=None)


def write_training(runs: RunSet, path: Path) -> list[Path]:
    """Draw reward, hack, solve, zero-variance groups and gradient norms of every trained arm, with vanilla in gray behind each."""
    arms = [arm for arm in arm_order(runs.specs) if any(run.steps for run in runs.of(arm).values())]
    return _write_grids(runs, arms, TRAINING_PANELS, path, rows=12, behind=VANILLA)


def _has_scores(runs: RunSet, arm: str) -> bool:
    curves = [curve for panel in COS_PANELS for curve in panel.curves]
    return any(curve.read(row) is not None for run in runs.of(arm).values() for row in run.metrics for curve in curves)


def curve_over_seeds(runs: Sequence[FinishedRun], read: Read) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return steps, mean, lowest and highest seed, as four arrays over the steps at which any seed has the quantity."""
    by_step: dict[int, list[float]] = {}
    for run in runs:
        for row in run.metrics:
            value = read(row)
            if value is not None:
                by_step.setdefault(row["step"], []).append(float(value))
    steps = sorted(by_step)
    columns = [[mean(by_step[step]), min(by_step[step]), max(by_step[step])] for step in steps]
    middle, low, high = np.array(columns, dtype=float).reshape(-1, 3).T
    return np.array(steps, dtype=float), middle, low, high


def _write_grids(
    runs: RunSet, arms: Sequence[str], panels: Sequence[Panel], path: Path, rows: int, behind: str | None
) -> list[Path]:
    if not arms:
        return []
    with style():
        return save_pages([_grid(runs, page, panels, rows, behind) for page in main_pages(arms, runs.specs, rows)], path)


def _grid(runs: RunSet, arms: Sequence[str], panels: Sequence[Panel], rows: int, behind: str | None) -> Figure:
    row_height = (PAGE_HEIGHT - 1.1) / rows
    figure = new_figure(PAGE_WIDTH, 1.1 + row_height * len(arms) + 0.3 * (len(arms) == 1))
    axes = figure.subplots(len(arms), len(panels), sharex=True, squeeze=False)
    reference = list(runs.of(behind).values()) if behind else []
    for row, arm in enumerate(arms):
        runs_of_arm = list(runs.of(arm).values())
        for ax, panel in zip(axes[row], panels, strict=True):
            draw_panel(ax, panel, runs_of_arm, reference if arm != behind else [])
        axes[row][0].set_ylabel(
            _two_lines(label(arm, runs.specs[arm]), width=int(row_height / 0.07)), fontweight="bold", fontsize=7
        )
    for ax, panel in zip(axes[0], panels, strict=True):
        ax.set_title(panel.title)
    figure.supxlabel("training step", fontsize=8)
    _legend(figure, titled(runs), panels, behind if reference else None, seeds=max(len(runs.of(arm)) for arm in arms))
    return figure


def _two_lines(name: str, width: int) -> str:
    """Break a name of more than `width` letters after the hyphen or before the blank nearest its middle."""
    breaks = [i + (sign == "-") for i, sign in enumerate(name) if sign in "- "]
    if len(name) <= width or not breaks:
        return name
    middle = min(breaks, key=lambda i: abs(i - len(name) / 2))
    return f"{name[:middle]}\n{name[middle:].strip()}"


def draw_panel(ax: Axes, panel: Panel, runs: Sequence[FinishedRun], reference: Sequence[FinishedRun]) -> None:
    """Draw one arm's runs into one panel, with `reference` in gray behind; "not measured" if no run has the quantity."""
    if panel.bounds:  # on an axis without bounds, another arm's line could flatten the arm's own
        for curve in panel.curves:
            steps, middle, _, _ = curve_over_seeds(reference, curve.read)
            ax.plot(steps, middle, color=GRAY, linewidth=0.8)
    measured = False
    for curve in panel.curves:
        steps, middle, low, high = curve_over_seeds(runs, curve.read)
        if len(steps):
            measured = True
            ax.fill_between(steps, low, high, color=curve.color, alpha=0.22, linewidth=0)
            ax.plot(steps, middle, color=curve.color, linestyle=curve.line, marker=curve.marker, markersize=2.2)
    if not measured:
        ax.text(0.5, 0.5, "not measured", transform=ax.transAxes, ha="center", va="center", color=GRAY, fontsize=7)
        ax.set_yticks([])
        return
    if panel.level is not None:
        ax.axhline(panel.level, color="black", linewidth=0.6, linestyle=(0, (2, 2)))
    if panel.bounds:
        low, high = ax.dataLim.intervaly
        ax.set_ylim(min(panel.bounds[0], low), max(panel.bounds[1], high))
        ax.set_yticks([0, 0.5, 1], ["0", ".5", "1"])
    else:
        ax.locator_params(axis="y", nbins=3)


def _legend(figure: Figure, title: str, panels: Sequence[Panel], behind: str | None, seeds: int) -> None:
    """Draw a legend for panels with several lines; a panel with one line explains it in its title."""
    curves = {curve.name: curve for panel in panels if len(panel.curves) > 1 for curve in panel.curves}
    handles: list[Line2D | Patch] = [
        Line2D([], [], color=each.color, linestyle=each.line, label=each.name) for each in curves.values()
    ]
    if behind:
        handles.append(Line2D([], [], color=GRAY, linewidth=0.8, label=f"{behind}, for comparison"))
    if seeds > 1:
        handles.append(Line2D([], [], color=GRAY, alpha=0.3, linewidth=5, label=f"lowest to highest of {seeds} seeds"))
    _legend_above(figure, handles, title, columns=len(handles))
