"""Figures of a tracing folder: what each adapter and layer carries, the same beside its controls, and deleting against patching."""

from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Patch

from mi_route2.plots import BLUE, GRAY, GREEN, ORANGE, PAGE_WIDTH, PURPLE, SKY, VERMILLION, new_figure, save_figure, style
from studies.tracing.measures import Share, Traces, points, share
from studies.tracing.pairs import CONTRASTS
from studies.tracing.patching import CONTROLS, EVERYWHERE, QUESTION
from studies.tracing.settings import UNTRAINED

REACH = 0.5  # range of the colors, in shares; a cell beyond it has the last color, and its number
CARRIED, BESIDE, DELETING = "carried.png", "controls.png", "deleting.png"
ADAPTER_NAMES = {"kept_out": "kept", "quarantine_out": "quarantine", "both": "both"}
INTO = {"honest": "into the honest", "hack": "into the hacking"}
LOOKS = {QUESTION: BLUE, "shuffled": SKY, "same side": GRAY, "random": ORANGE, "elsewhere": PURPLE}
SAID = {
    QUESTION: "the pair's other rollout",
    "shuffled": "another task's, other side",
    "same side": "another task's, same side",
    "random": "random direction, same norm",
    "elsewhere": "as many other sites",
}


def write_figures(traces: Traces, folder: Path) -> list[Path]:
    """Draw all three figures and return their paths; nothing if only the untrained arm was traced."""
    if not _trained(traces):
        return []
    with style():
        return [_carried(traces, folder / CARRIED), _beside(traces, folder / BESIDE), _deleting(traces, folder / DELETING)]


def _trained(traces: Traces) -> list[str]:
    return [arm for arm in traces.arms if arm != UNTRAINED]


def _adapters(traces: Traces, arm: str) -> list[str]:
    present = {cell["adapter"] for cell in traces.cells(arm)}
    return [adapter for adapter in ADAPTER_NAMES if adapter in present]


def _layers(traces: Traces, arm: str) -> list[str]:
    present = list(dict.fromkeys(cell["where"] for cell in traces.cells(arm) if cell["where"].count(".") < 2))
    return [*(place for place in present if place != EVERYWHERE), EVERYWHERE]


def _panels(traces: Traces, lines: list[str], height: float) -> tuple[Figure, list[tuple[Axes, str, str]]]:
    """Return a figure with a column per trained arm and a row per line, its label, and each panel with its arm and line."""
    arms = _trained(traces)
    figure = new_figure(max(PAGE_WIDTH, 2.7 * len(arms)), height)
    grid = figure.subplots(len(lines), len(arms), squeeze=False)  # shares differ too much between arms for a common axis
    for ax, arm in zip(grid[0], arms, strict=True):
        ax.set_title(f"{traces.training['preset']}: {arm}")
    for row, line in zip(grid, lines, strict=True):
        row[0].set_ylabel(line, fontsize=7)
    return figure, [(ax, arm, line) for row, line in zip(grid, lines, strict=True) for ax, arm in zip(row, arms, strict=True)]


def _carried(traces: Traces, path: Path) -> Path:
    """Draw adapter by layer, one column per arm; rows are contrasts and directions."""
    lines = {f"{contrast}:\n{into}": (contrast, side) for contrast in CONTRASTS for side, into in INTO.items()}
    figure, grid = _panels(traces, list(lines), 1.15 * len(lines) + 0.9)
    images = [_heat(ax, traces, arm, *lines[line]) for ax, arm, line in grid]
    for ax, _, line in grid:
        if line != list(lines)[-1]:
            ax.set_xticklabels([])
    figure.colorbar(images[-1], ax=figure.axes, label="share of the gap carried", shrink=0.6, extend="both", pad=0.01)
    return save_figure(figure, path)


def _heat(ax: Axes, traces: Traces, arm: str, contrast: str, into: str) -> AxesImage:
    rows = list(ADAPTER_NAMES)  # all adapters in every panel: an arm without a quarantine shows that it has none
    layers = _layers(traces, arm)
    shares = [[share(traces, arm, contrast, into, QUESTION, f"{place}:{adapter}") for place in layers] for adapter in rows]
    values = np.array([[np.nan if cell is None else cell["value"] for cell in line] for line in shares])
    colors = matplotlib.colormaps["RdBu_r"].with_extremes(bad="#EEEEEE")
    image = ax.imshow(values, aspect="auto", cmap=colors, vmin=-REACH, vmax=REACH, interpolation="nearest")
    for i, line in enumerate(shares):
        for j, cell in enumerate(line):
            if cell is not None:
                dark = abs(cell["value"]) > 0.6 * REACH
                ax.text(j, i, _short(cell), ha="center", va="center", fontsize=5.2, color="white" if dark else "black")
    if "both" not in _adapters(traces, arm):
        ax.text((len(layers) - 1) / 2, 1.5, "no quarantine", ha="center", va="center", fontsize=6, color="#666666")
    ax.grid(visible=False)
    ax.set_xticks(range(len(layers)), layers)
    ax.set_yticks(range(len(rows)), [ADAPTER_NAMES[adapter] for adapter in rows])
    ax.tick_params(length=0, labelsize=6.5)
    return image


def _short(share: Share) -> str:
    value, lo, hi = (_hundredths(share[name]) for name in ("value", "lo", "hi"))
    return f"{value}\n{lo} … {hi}"


def _hundredths(value: float) -> str:
    """Return ``.05``, ``-1.08``, or ``0`` for numbers that round to it: a cell has little room."""
    text = f"{value:.2f}"
    return "0" if float(text) == 0 else text.replace("0.", ".", 1) if abs(float(text)) < 1 else text


def _beside(traces: Traces, path: Path) -> Path:
    """Draw bars of the whole adapter's share, beside those of every control."""
    lines = {f"{contrast}:\n{into}\nshare of the gap": (contrast, side) for contrast in CONTRASTS for side, into in INTO.items()}
    figure, grid = _panels(traces, list(lines), 1.5 * len(lines) + 0.7)
    for ax, arm, line in grid:
        _bars(ax, traces, arm, *lines[line])
    handles = [Patch(color=LOOKS[source], label=SAID[source]) for source in LOOKS]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=len(handles), fontsize=6.5, columnspacing=1.2, handlelength=1.2
    )
    return save_figure(figure, path)


def _bars(ax: Axes, traces: Traces, arm: str, contrast: str, into: str) -> None:
    width = 0.16
    for i, adapter in enumerate(ADAPTER_NAMES):
        for j, source in enumerate((QUESTION, *CONTROLS)):
            cell = share(traces, arm, contrast, into, source, f"{EVERYWHERE}:{adapter}")
            if cell is not None:
                place, value = i + (j - 2) * width, cell["value"]
                ax.bar(place, value, width * 0.92, color=LOOKS[source])
                ax.errorbar(
                    place, value, [[max(0.0, value - cell["lo"])], [max(0.0, cell["hi"] - value)]], color="black", linewidth=0.7
                )
    ax.axhline(0, color="black", linewidth=0.6)
    ax.set_xticks(range(len(ADAPTER_NAMES)), list(ADAPTER_NAMES.values()))
    ax.set_xlim(-0.6, len(ADAPTER_NAMES) - 0.4)
    ax.grid(axis="x", visible=False)
    if "both" not in _adapters(traces, arm):
        ax.text(1.5, 0.5, "no quarantine", transform=ax.get_xaxis_transform(), ha="center", fontsize=6.5, color="#666666")


def _deleting(traces: Traces, path: Path) -> Path:
    """Draw one point per Linear, adapter and seed: the effect of zeros on the hacking rollout against that of the honest values."""
    lines = {f"{contrast}:\nthe honest rollout's values, nats": contrast for contrast in CONTRASTS}
    figure, grid = _panels(traces, list(lines), 2.3 * len(lines) + 0.6)
    for ax, arm, line in grid:
        _scatter(ax, traces, arm, lines[line])
    figure.supxlabel("zeros (deleting) in the hacking rollout, change of its log-odds in nats; dashed: the two agree", fontsize=7.5)
    handles = {label: handle for ax, *_ in grid for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend(list(handles.values()), list(handles), loc="outside upper right", ncols=2, fontsize=7)
    return save_figure(figure, path)


def _scatter(ax: Axes, traces: Traces, arm: str, contrast: str) -> None:
    for adapter, color, marker in (("kept_out", BLUE, "o"), ("quarantine_out", VERMILLION, "^")):
        dots = [p for seed in traces.seeds(arm) for p in points(traces, arm, seed, contrast) if p[1] == adapter]
        if dots:
            look = {"s": 13, "color": color, "marker": marker, "alpha": 0.75, "edgecolors": "white", "linewidths": 0.3, "zorder": 3}
            ax.scatter([p[2] for p in dots], [p[3] for p in dots], label=ADAPTER_NAMES[adapter], **look)
    for line in (ax.axhline, ax.axvline):
        line(0, color="black", linewidth=0.5, zorder=1)
    ax.set_autoscale_on(False)  # keeps the limits that the points set
    ax.axline((0, 0), slope=1, color=GREEN, linewidth=0.8, linestyle="--", zorder=2)
