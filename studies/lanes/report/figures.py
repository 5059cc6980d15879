"""The study's figures, each drawn from a folder's artifacts: symmetry, paths, growth, rates, Tap-In."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mi_route2.plots import BLACK, BLUE, GRAY, GREEN, ORANGE, PAGE_WIDTH, PURPLE, SKY, VERMILLION, new_figure
from studies.common.stats import interval, mean
from studies.lanes.gradients.symmetry import TWO_LANES
from studies.lanes.quantization.growth import CLAIMED, CLAIMED_RHO, amplification
from studies.lanes.settings import BEFORE
from studies.lanes.study import Study, tensors
from studies.lanes.text import BOS

WIRING_COLORS: Mapping[str, str] = MappingProxyType(dict(zip(TWO_LANES, (VERMILLION, ORANGE, BLUE, GREEN), strict=True)))
PATH_COLORS: Mapping[str, str] = MappingProxyType({"sequential": GRAY, "gptj": SKY, "shipped": VERMILLION, "asymmetric": PURPLE})
BINS = (1, 16, 64, 128, 256, 512, 1024, 4096, 1 << 30)


def symmetry_figure(folder: Path, study: Study) -> Figure:
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
    for column, kind in enumerate(("lanes", "quarantine")):
        for name, start in dict.fromkeys((t["name"], t["start"]) for t in traces if t["kind"] == kind):
            chosen = [t for t in traces if (t["kind"], t["name"], t["start"]) == (kind, name, start)]
            look = {"color": colors[name], "linestyle": equal[start], "linewidth": widths.get(name, 1.2)}
            look["label"] = name if equal[start] == "-" else f"{name}, {start}"
            for row, key in enumerate(("differences", "partials")):
                axes[row][column].plot(chosen[0]["steps"], np.mean([t[key] for t in chosen], axis=0), **look)
        axes[0][column].set_yscale("symlog", linthresh=1e-4)
        axes[0][column].set(title="two lanes" if kind == "lanes" else "kept adapter and quarantine", ylim=(-2e-5, 2))
        axes[1][column].set(xlabel="step", ylim=(-0.05, 2.4))
        axes[1][column].legend(*axes[0][column].get_legend_handles_labels(), fontsize=6, ncols=2, loc="upper left")
    axes[0][0].set_ylabel("weights apart")
    axes[1][0].set_ylabel("gradients apart, relative")
    return figure


def paths_figure(folder: Path, study: Study) -> Figure:
    """Draw the direct and the cascading gradient of every sublayer behind the fork, as fractions of its total, by wiring."""
    figure = new_figure(PAGE_WIDTH, 3.8)
    axes = figure.subplots(2, 2, sharex=True, sharey="row")
    draws = study.drawn("paths")
    layers = list(dict.fromkeys(row["layer"] for row in draws[0]["rows"]["shipped"]))
    width = 0.8 / len(PATH_COLORS)
    for column, sublayer in enumerate(("attn", "mlp")):
        for row, key in enumerate(("direct", "cascade")):
            for i, (name, color) in enumerate(PATH_COLORS.items()):
                for layer in layers:
                    values = [r[key] for c in draws for r in c["rows"][name] if (r["layer"], r["sublayer"]) == (layer, sublayer)]
                    place = layer + (i - (len(PATH_COLORS) - 1) / 2) * width
                    label = name if layer == layers[0] and not row and not column else None
                    axes[row][column].bar(place, mean(values) or 0.0, width, color=color, label=label)
                    _whisker(axes[row][column], place, values)
        axes[0][column].set_title({"attn": "attention", "mlp": "MLP"}[sublayer])
        axes[1][column].set_xticks(layers, [f"layer {layer}" for layer in layers])
    axes[0][0].set_ylabel("|direct| / |total|")
    axes[1][0].set_ylabel("|cascade| / |total|")
    _legend(figure, axes[0][0])
    return figure


def growth_figure(folder: Path, study: Study) -> Figure:
    """Draw a perturbation at the loop's start, step by step, with the fitted rate; and the accumulated errors of all passes."""
    figure = new_figure(PAGE_WIDTH, 3.0)
    left, right = figure.subplots(1, 2)
    draws = [row for data in study.data("wide", "growth") for row in data["draws"]]
    length = (len(draws[0]["spreads"][0]["steps"]) - 1) // len(draws[0]["spreads"])
    rate = float(np.mean([row["rho_step"] for row in draws]))
    for i, color in zip(range(len(draws[0]["spreads"])), (BLUE, GREEN, ORANGE, PURPLE, SKY), strict=False):
        pushed = np.array([row["spreads"][i]["steps"] for row in draws])
        steps = i * length + np.arange(pushed.shape[1])
        left.plot(steps, pushed.T, color=color, linewidth=0.4, alpha=0.5)
        left.plot(steps, pushed.mean(axis=0), color=color, marker="o", markersize=3, label=f"pushed at pass {i + 1}")
        left.plot(steps, rate ** (steps - steps[0]), color=GRAY, linestyle="--")
    left.plot([], [], color=GRAY, linestyle="--", label=f"one rate, {rate:.2f} a step")
    left.set(xlabel="virtual step of the loop", ylabel="error / push", title="a push, step by step")
    left.legend()
    passes = np.arange(1, len(draws[0]["formula"]) + 1)
    rho = float(np.mean([row["rho"] for row in draws]))
    right.plot(passes, [amplification(rho, int(k)) for k in passes], color=BLACK, label=f"A(k) at the fitted rho {rho:.2f}")
    right.plot(passes, [amplification(CLAIMED_RHO, int(k)) for k in passes], color=GRAY, linestyle="--", label="A(k) at rho .63")
    right.plot(list(CLAIMED), list(CLAIMED.values()), "x", color=VERMILLION, label="claimed for rho .63")
    for (kind, marker), color in zip((("same", "o"), ("fresh", "s"), ("weights", "^")), (BLUE, GREEN, ORANGE), strict=True):
        values = np.array([row["accumulated"][kind] for row in draws])
        right.plot(passes, values.mean(axis=0), marker=marker, markersize=4, linestyle=":", color=color, label=f"measured: {kind}")
    right.set(xticks=passes, xlabel="passes that err", title="errors of k passes")
    right.legend(fontsize=6.5)
    return figure


def rates_figure(folder: Path, study: Study) -> Figure:
    """Draw bits per byte against bytes over clips k, and the predicted bytes. Lines: means; dots: seeds."""
    figure = new_figure(PAGE_WIDTH, 2.9)
    left, right = figure.subplots(1, 2)
    curves = [data["points"] for data in study.data("shipped", "calibrations")]
    plain = [data["bpb"] for data in study.data("shipped", "bpb")]
    clips = [point["k"] for point in curves[0]]
    size = np.array([[point["bytes"] for point in curve] for curve in curves]) / 1000
    loss = np.array([[point["loss"] for point in curve] for curve in curves]) - np.array(plain)[:, None]
    apart = [i for i, k in enumerate(clips) if k != BEFORE]  # two neighboring clips would draw noise as a step
    left.plot(size.T[apart], loss.T[apart], ".", color=GRAY, markersize=3)
    left.plot(size.mean(axis=0)[apart], loss.mean(axis=0)[apart], color=BLUE, marker="o", markersize=4)
    for i in apart:
        place = (size.mean(axis=0)[i], loss.mean(axis=0)[i])
        left.annotate(f"k={clips[i]:g}", place, (5, 4), textcoords="offset points", fontsize=7)
    left.margins(x=0.12)
    left.set(xlabel="kilobytes, packed", ylabel="bits per byte above unquantised")
    right.plot(clips, size.mean(axis=0), color=BLACK, marker="o", markersize=4, label="actual")
    for key, color, label in (("by_gaussian", VERMILLION, "predicted: Gaussian"), ("by_entropy", GREEN, "predicted: own entropy")):
        values = np.array([[point[key] for point in curve] for curve in curves]).mean(axis=0) / 1000
        right.plot(clips, values, color=color, linestyle="--", marker="x", markersize=4, label=label)
    right.set(xlabel="clip k, standard deviations of a row", ylabel="kilobytes")
    right.legend()
    return figure


def tapin_figure(folder: Path, study: Study) -> Figure:
    """Draw the savings from hints by a byte's position in its document, and the bits saved so far along the test text."""
    figure = new_figure(PAGE_WIDTH, 2.9)
    left, right = figure.subplots(1, 2)
    by_seed = {seed: tensors(folder, study, "shipped", seed, "tapin") for seed in study.seeds}
    filled = [bounds for bounds in pairwise(BINS) if any(_saving(costs, "new", *bounds) is not None for costs in by_seed.values())]
    for key, color, shift, label in (("within", SKY, -0.2, "within the window"), ("new", BLUE, 0.2, "and from outside of it")):
        for place, bounds in enumerate(filled):
            values = [_saving(costs, key, *bounds) for costs in by_seed.values()]
            left.bar(place + shift, mean(values) or 0.0, 0.4, color=color, label=label if not place else None)
            _whisker(left, place + shift, values)
        for seed, costs in by_seed.items():
            read = costs["tokens"] != BOS  # a BOS counts neither bits nor a byte, as in the tables
            bits = ((costs["plain"] - costs[key])[read] / math.log(2)).cumsum(0)
            right.plot(
                np.arange(len(bits)) / 1000, bits, color=color, linewidth=0.9, label=label if seed == study.seeds[0] else None
            )
    left.axhline(0, color=BLACK, linewidth=0.5)
    left.set_xticks(range(len(filled)), [f"{low}" for low, _ in filled])
    left.set(xlabel="place of the byte in its document, from", ylabel="bits saved a byte")
    right.axhline(0, color=BLACK, linewidth=0.5)
    right.set(xlabel="thousand bytes of test text (a line a seed)", ylabel="bits saved so far")
    _legend(figure, left)
    return figure


def _saving(costs: Mapping[str, torch.Tensor], key: str, low: int, high: int) -> float | None:
    """Return the bits saved per byte at positions `low` to `high - 1` of their documents; None if there are none."""
    tokens = costs["tokens"]
    index = torch.arange(len(tokens))
    position = index - torch.where(tokens == BOS, index, 0).cummax(0).values
    chosen = (position >= low) & (position < high) & (tokens != BOS)
    return float((costs["plain"] - costs[key])[chosen].mean() / math.log(2)) if bool(chosen.any()) else None


def _whisker(axes: Axes, place: float, values: Sequence[float | None]) -> None:
    low, high = interval(values)
    if low is not None and high is not None:
        axes.plot([place, place], [low, high], color=BLACK, linewidth=0.7)


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)


FIGURES: Mapping[str, Callable[[Path, Study], Figure]] = MappingProxyType(
    {
        "symmetry": symmetry_figure,
        "paths": paths_figure,
        "growth": growth_figure,
        "rates": rates_figure,
        "tapin": tapin_figure,
    }
)
