"""headline.png: held-out hack, held-out exploit and solve of the deployed model for the main arms, every seed a dot.

A route stands in one shaded block with its own same-rule filter; a tick marks the median. Drawn from table.json alone.
"""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes

from mi_route2.plots import BLUE, ORANGE, PAGE_WIDTH, VERMILLION, new_figure, save_figure, style
from mi_route2.stats import Summary
from studies.route2.headline import EXPLOIT, GROUPS, HACK, ROUTES, SOLVE, Result, seeds_text

PANELS = (
    (HACK, "hack, held-out modes", VERMILLION, "o"),
    (EXPLOIT, "exploit fires, held-out modes", ORANGE, "s"),
    (SOLVE, "solve, all modes", BLUE, "^"),
)


def write_headline_figure(result: Result, path: Path) -> Path:
    """Draws and saves the figure at ``path``."""
    arms = result.shown()
    with style():
        figure = new_figure(PAGE_WIDTH, 0.9 + 0.21 * len(arms))
        axes = figure.subplots(1, len(PANELS), sharey=True)
        for ax, (metric, title, color, marker) in zip(axes, PANELS, strict=True):
            _shade(ax, arms)
            _dots(ax, [result.rows[arm][metric] for arm in arms], color, marker)
            ax.set_title(title)
        axes[0].set_yticks(range(len(arms)), [result.name(arm) for arm in arms])
        axes[0].set_ylim(len(arms) - 0.5, -0.5)
        for tick, arm in zip(axes[0].get_yticklabels(), arms, strict=True):
            tick.set_fontweight("bold" if arm in ROUTES else "normal")
            tick.set_fontstyle("italic" if result.rows[arm]["role"] in ("control", "bound") else "normal")
        text = f"rate of the deployed model on tasks never seen; a dot is a seed ({seeds_text(result.seeds)}), a tick the median"
        figure.supxlabel(text, fontsize=8)
        return save_figure(figure, path)


def _shade(ax: Axes, arms: Sequence[str]) -> None:
    """Every second group of arms that belong together."""
    groups = [[arm for arm in group if arm in arms] for group in GROUPS]
    for i, group in enumerate(group for group in groups if group):
        if i % 2 == 0:
            ax.axhspan(arms.index(group[0]) - 0.5, arms.index(group[-1]) + 0.5, color="#F1F1F1", linewidth=0, zorder=0)


def _dots(ax: Axes, results: Sequence[Summary], color: str, marker: str) -> None:
    for row, result in enumerate(results):
        values = [value for value in result["seeds"] if value is not None]
        if result["median"] is not None:
            ax.plot([result["median"]] * 2, [row - 0.42, row + 0.42], color="black", linewidth=1.2, zorder=2, clip_on=False)
        ax.scatter(values, [row] * len(values), s=17, color=color, marker=marker, alpha=0.75, edgecolors="white",
                   linewidths=0.4, zorder=3, clip_on=False)  # fmt: skip
    ax.set_xlim(-0.02, 1.02)
    ax.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", ".25", ".5", ".75", "1"])
    ax.grid(axis="y", visible=False)
    ax.tick_params(axis="y", length=0)
