"""Shared matplotlib style of all figures: colors for color-blind readers, print sizes, the same bytes on every run.

Colors: Okabe and Ito, "Color Universal Design" (2008). Every color comes with its own marker and line style, so that a figure can
also be read in gray. `new_figure` makes figures without pyplot, so there is no global list of open figures and no display.
"""

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.rcsetup import cycler

from mi_route2.files import write_whole

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILLION, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
GRAY = "#8A8A8A"
OKABE_ITO = (BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, VERMILLION, PURPLE)

DPI = 200
PAGE_WIDTH = 8.3  # inches: A4 upright
PAGE_HEIGHT = 11.2

STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # ships with matplotlib: the same picture on every machine
    "font.size": 8.0,
    "axes.titlesize": 8.5,
    "axes.labelsize": 8.0,
    "axes.titleweight": "bold",
    "figure.titlesize": 8.5,
    "figure.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.prop_cycle": cycler(color=[BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY, BLACK]),
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.5,
    "xtick.labelsize": 7.0,
    "ytick.labelsize": 7.0,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "legend.fontsize": 7.5,
    "legend.frameon": False,
    "lines.linewidth": 1.2,
    "figure.dpi": DPI,
    "savefig.dpi": DPI,
    "svg.hashsalt": "mi_route2",
}


@contextlib.contextmanager
def style() -> Iterator[None]:
    """Context: apply the project's matplotlib style; the caller's settings are restored on exit."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # a user's matplotlibrc must not change a study's figures
        matplotlib.rcParams.update(STYLE)
        yield


def new_figure(width: float | int = PAGE_WIDTH, height: float | int = 4.0) -> Figure:
    """Return an empty figure of `width` x `height` inches with an Agg canvas; create and save it inside `style()`."""
    figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(h_pad=0.03, w_pad=0.03, hspace=0.015, wspace=0.015))
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, path: Path, dpi: int = DPI) -> Path:
    """Write the figure in the format of the suffix (png, svg or pdf) and return the path.

    The file is drawn in memory and written by `write_whole`, so that it is complete or absent. No date is stored, so that the same
    figure gives the same bytes.

    Raises:
        ValueError: Another suffix, or a folder that is missing or not writable.
    """
    suffix = path.suffix.lstrip(".")
    metadata: dict[str, Any] = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
    if suffix not in metadata:
        raise ValueError(f"a figure is saved as .png, .svg or .pdf, not as {path.name!r}")
    buffer = io.BytesIO()
    figure.savefig(buffer, format=suffix, dpi=dpi, metadata=metadata[suffix])
    return write_whole(path, buffer.getvalue())
