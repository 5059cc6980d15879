"""A grid as a heatmap: sites upwards by layer, tokens along, the scored position marked; grey where nothing could be patched."""

from pathlib import Path

import matplotlib
import numpy as np

from mi_route2.interventions.sweeps.grid import Grid
from mi_route2.plots import GREY, PAGE_WIDTH, new_figure, save_figure, style

_CELL, _MARGIN, _TALLEST, _WIDEST = 0.17, 1.3, 40.0, 40.0
"""Inches: a cell, what titles and labels take, and the limits of a figure."""


def draw(grid: Grid, path: Path) -> Path:
    """Writes the heatmap; ``ValueError`` for a suffix or folder that ``save_figure`` does not take."""
    shown = grid.recovered if grid.defined else grid.effect
    what = "recovered" if grid.defined else f"change of {grid.metric}"
    rows, columns = shown.shape
    height, width = min(_TALLEST, _MARGIN + _CELL * rows), min(_WIDEST, max(PAGE_WIDTH, _MARGIN + _CELL * columns))
    with style():
        figure = new_figure(width, height)
        axes = figure.add_subplot()
        reach = float(np.nanmax(np.abs(shown))) or 1.0
        colours = matplotlib.colormaps["RdBu"].with_extremes(bad=GREY)  # white is no effect
        image = axes.imshow(shown, aspect="auto", origin="lower", cmap=colours, vmin=-reach, vmax=reach, interpolation="nearest")
        axes.grid(visible=False)
        ticks = ["all"] if grid.together else [_tick(p, label) for p, label in zip(grid.positions, grid.labels)]
        axes.set_xticks(range(columns), ticks, rotation=90)
        axes.set_yticks(range(rows), [str(target) for target in grid.sites])
        if grid.at in grid.columns:
            axes.get_xticklabels()[grid.positions.index(grid.at)].set_fontweight("bold")
        axes.set_xlabel("token of the corrupt prompt")
        axes.set_title(f"{grid.metric}: clean {grid.clean:.3g}, corrupt {grid.corrupt:.3g}, noise {grid.noise_floor:.1g}")
        figure.colorbar(image, ax=axes, label=what, shrink=min(1.0, 3 / height))
        return save_figure(figure, path)


def _tick(position: int, label: str) -> str:
    """A token as text that a figure can have: no line breaks, no markup."""
    return f"{label!r}"[1:-1].replace("$", r"\$") + f"  {position}"
