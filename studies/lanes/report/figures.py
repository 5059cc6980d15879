"""The study's figures, each drawn from a folder's artifacts."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
from matplotlib.figure import Figure

from mi_route2.plots import BLUE, GREEN, ORANGE, PAGE_WIDTH, SKY, VERMILLION, new_figure
from studies.lanes.gradients.symmetry import TWO_LANES
from studies.lanes.study import LanesStudy

WIRING_COLORS: Mapping[str, str] = MappingProxyType(dict(zip(TWO_LANES, (VERMILLION, ORANGE, BLUE, GREEN), strict=True)))


def symmetry_figure(folder: Path, study: LanesStudy) -> Figure:
    """Draw the distance of two routes' weights, and of their gradients, over training, for lanes and for quarantines.

    Lines are means over seeds.
    """
    figure = new_figure(PAGE_WIDTH, 4.4)
    axes = figure.subplots(2, 2)
    traces = [trace for data in study.drawn("traces") for trace in data["traces"]]
    quarantines = list(dict.fromkeys(trace["name"] for trace in traces if trace["kind"] == "quarantine"))
    colors = {**WIRING_COLORS, **dict(zip(quarantines, (BLUE, SKY, VERMILLION, ORANGE), strict=False))}
    widths = {"shipped": 2.6, "gauge": 2.6, quarantines[0]: 2.6}  # wider lines stay visible below those that lie on them
    equal = {"symmetric": "-", "asymmetric": "--", "equal": "-", "unequal": "--"}
    for column, family in enumerate(("lanes", "quarantine")):
        for name, start in dict.fromkeys((t["name"], t["start"]) for t in traces if t["kind"] == family):
            chosen = [t for t in traces if (t["kind"], t["name"], t["start"]) == (family, name, start)]
            look = {"color": colors[name], "linestyle": equal[start], "linewidth": widths.get(name, 1.2)}
            look["label"] = name if equal[start] == "-" else f"{name}, {start}"
            for row, key in enumerate(("differences", "partials")):
                axes[row][column].plot(chosen[0]["steps"], np.mean([t[key] for t in chosen], axis=0), **look)
        axes[0][column].set_yscale("symlog", linthresh=1e-4)
        axes[0][column].set(title="two lanes" if family == "lanes" else "kept adapter and quarantine", ylim=(-2e-5, 2))
        axes[1][column].set(xlabel="step", ylim=(-0.05, 2.4))
        axes[1][column].legend(*axes[0][column].get_legend_handles_labels(), fontsize=6, ncols=2, loc="upper left")
    axes[0][0].set_ylabel("weights apart")
    axes[1][0].set_ylabel("gradients apart, relative")
    return figure


FIGURES: Mapping[str, Callable[[Path, LanesStudy], Figure]] = MappingProxyType(
    {
        "symmetry": symmetry_figure,
    }
)
