"""all_arms_per_mode.png: train hack, deploy hack and deploy solve of every arm in every mode, each seed a dot.

Arms are rows and modes are columns, in the order of the tables: a route's same-rule filter and controls lie in one shaded
block with it, bounds say that they are. A large marker is the mean, a bar its 95% Student-t interval over seeds, and the
seeds lie right below it; what is drawn is computed in `measures.py`. More arms than fit a page, and arms
of ablation groups, go to further pages (`all_arms_per_mode-2.png`).
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from mi_route2.plots import BLUE, GREY, ORANGE, PAGE_HEIGHT, PAGE_WIDTH, VERMILLION, new_figure, save_figure, style
from mi_route2.stats import Summary, summary
from studies.route2.report.load import ArmSpec, RunSet
from studies.route2.report.measures import arm_order, by_seed, label, without_ablations

ARMS_ON_A_PAGE = 28
BELOW = 0.12  # seeds under their mean, in rows, so that no marker hides a seed
SHADE = "#F1F1F1"


@dataclass(frozen=True)
class Series:
    """One quantity of the figure: `metric` is completed by a mode's name; `offset` is its place inside the arm's row."""

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
    """One figure a page; make and save them inside `plots.style()`."""
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
    """Saves `name.png`, `name-2.png`, ... and returns their paths."""
    names = [path if i == 0 else path.with_stem(f"{path.stem}-{i + 1}") for i in range(len(figures))]
    return [save_figure(figure, name) for figure, name in zip(figures, names, strict=True)]


def write_all_arms(runs: RunSet, path: Path) -> list[Path]:
    """Draws and saves the figure at `path` (and its further pages)."""
    with style():
        return save_pages(all_arms_figures(runs), path)


def pages(arms: Sequence[str], size: int) -> list[list[str]]:
    """Splits arms into the fewest pages of at most `size`, of even length and in order."""
    count = max(1, -(-len(arms) // size))
    edges = [round(i * len(arms) / count) for i in range(count + 1)]
    return [list(arms[start:end]) for start, end in itertools.pairwise(edges)]


def main_pages(arms: Sequence[str], specs: dict[str, ArmSpec], size: int) -> list[list[str]]:
    """`pages`, with the arms of ablation groups on pages of their own behind the others."""
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
    _outcome_legend(figure)
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
    """Every second block of a head arm with what stands next to it (its filter, its controls)."""
    filters = {spec.same_rule_filter for spec in runs.specs.values()}
    block = -1
    for row, arm in enumerate(arms):
        spec = runs.specs[arm]
        attached = arm in filters or (spec.role == "control" and spec.baseline in runs.specs)
        block += not (attached and row > 0)
        if block % 2 == 0:
            ax.axhspan(row - 0.5, row + 0.5, color=SHADE, linewidth=0, zorder=0)


def _outcome_legend(figure: Figure) -> None:
    handles: list[Line2D | Patch] = [
        Line2D([], [], color=each.color, marker=each.marker, markeredgecolor="white", markersize=5, label=each.name)
        for each in SERIES
    ]
    handles.append(Line2D([], [], color=GREY, marker=".", linestyle="", markersize=4, label="one seed (below its mean)"))
    handles.append(Line2D([], [], color=GREY, linewidth=1.4, label="95% t interval of the mean"))
    handles.append(Patch(color=SHADE, label="shading: an arm with its filter and controls"))
    figure.legend(handles=handles, loc="outside upper center", ncols=3)
