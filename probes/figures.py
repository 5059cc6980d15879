"""Figures of a transfer result: AUROC over layers against the random band, recall at 1% false positives, reliability curves.

One column per mode. Gray: the random directions' mean (dashed) and the range up to their 95th percentile; a probe whose line stays
inside the gray band has found nothing. Create and save figures inside `mi_route2.plots.style()`.
"""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mi_route2.plots import BLUE, GRAY, GREEN, ORANGE, PAGE_WIDTH, PURPLE, SKY, VERMILLION, new_figure, style
from mi_route2.probes.probe import Unit
from mi_route2.probes.transfer import TransferResult, TransferRow

COLORS = (BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY)
MARKERS = ("o", "s", "^", "D", "v", "P")


def transfer_figure(result: TransferResult, level: Unit = "rollout") -> Figure:
    """Draw AUROC by layer with 95% bars: a column per mode, a line per probe. Below it, if any row has it: recall at 1%
    false positives.

    ValueError for a level that was not run.
    """
    with style():
        height = 2 if any(row.recall_1pct is not None for row in result.rows if row.level == level) else 1
        figure, panels = _panels(result, level, height)
        for mode, (column, rows) in panels.items():
            axes, lower = column[0], column[-1]
            layers = list(dict.fromkeys(row.layer for row in rows))
            _random_band(axes, rows, layers)
            for index, probe in enumerate(result.probes):
                ours = [row for row in rows if row.probe == probe]
                _line(axes, ours, layers, index, len(result.probes))
                points = [(layers.index(row.layer), row.recall_1pct) for row in ours if row.recall_1pct is not None]
                lower.plot(*zip(*points), **_look(index)) if points else None
            if height == 2 and (notes := dict.fromkeys(row.recall_note for row in rows if row.recall_note)):
                lower.text(0.5, 0.5, "\n".join(notes), transform=lower.transAxes, ha="center", wrap=True, fontsize=6)
            axes.set_title(_title(mode, rows))
            for each in column:
                each.set_xlim(axes.get_xlim())
                each.set_ylim(0, 1.02)
                each.set_xticks(range(len(layers)), layers, rotation=30, ha="right")
        axes, *below = next(iter(panels.values()))[0]
        axes.set_ylabel(f"AUROC per {level}")
        for lower in below:
            lower.set_ylabel("recall at 1% false positives")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def reliability_figure(result: TransferResult, layer: str, level: Unit = "rollout") -> Figure:
    """Draw the rate of hacks against the calibrated probability, one panel per mode. ValueError for a layer or level not run."""
    with style():
        figure, panels = _panels(result, level, 1)
        for mode, ((axes,), rows) in panels.items():
            axes.plot([0, 1], [0, 1], color=GRAY, linestyle="--", linewidth=0.8, label="perfect")
            at_layer = [row for row in rows if row.layer == layer]
            if not at_layer:
                raise ValueError(f"No layer {layer!r}; layers: {', '.join(dict.fromkeys(row.layer for row in rows))}.")
            for index, row in enumerate(at_layer):
                x, y = [b.confidence for b in row.reliability], [b.rate for b in row.reliability]
                axes.plot(x, y, **_look(index), label=f"{row.probe} (ECE {row.ece:.2f})")
            axes.set_title(_title(mode, rows))
            axes.set_xlim(-0.02, 1.02)
            axes.set_ylim(-0.02, 1.02)
            axes.set_xlabel("probability of a hack")
            # One legend per panel, because the ECEs differ; below it, so that it never covers the curves.
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), fontsize=6)
        next(iter(panels.values()))[0][0].set_ylabel("rate of hacks")
    return figure


def _panels(result: TransferResult, level: Unit, height: int) -> tuple[Figure, dict[str, tuple[list[Axes], list[TransferRow]]]]:
    """Return a figure with a column of `height` panels per mode, and the rows of each mode."""
    rows = [row for row in result.rows if row.level == level]
    if not rows:
        raise ValueError(f"No rows at level {level!r}; levels: {', '.join(result.settings.levels)}.")
    modes = list(dict.fromkeys(row.mode for row in rows))
    figure = new_figure(width=min(PAGE_WIDTH, 1.0 + 2.2 * len(modes)), height=0.6 + 2.2 * height)
    axes = figure.subplots(height, len(modes), squeeze=False)
    return figure, {mode: (axes[:, i].tolist(), [row for row in rows if row.mode == mode]) for i, mode in enumerate(modes)}


def _random_band(axes: Axes, rows: list[TransferRow], layers: list[str]) -> None:
    band = {row.layer: (row.random_mean, row.random_p95) for row in rows}
    known = [(i, *band[layer]) for i, layer in enumerate(layers) if band[layer][0] is not None]
    if not known:
        return
    x, mean, p95 = zip(*known)
    single = len(known) == 1  # a band over one place has no width
    place = (known[0][0] - 0.4, known[0][0] + 0.4) if single else x
    least, most = (mean * 2, p95 * 2) if single else (mean, p95)
    axes.fill_between(place, least, most, color=GRAY, alpha=0.25, linewidth=0, label="random, up to 95th percentile")
    axes.plot(x, mean, color=GRAY, linestyle="--", marker="_", label="random, mean")


def _line(axes: Axes, rows: list[TransferRow], layers: list[str], index: int, probes: int) -> None:
    """Draw one probe over layers, slightly shifted so that the bars of different probes do not cover each other."""
    shift = 0.06 * (index - (probes - 1) / 2)
    points = [(layers.index(row.layer), row.auroc, row) for row in rows if row.auroc is not None]
    if not points:
        return
    x, y = [place + shift for place, _, _ in points], [value for _, value, _ in points]
    # The percentile interval may not contain the value itself.
    low = [0.0 if row.auroc_low is None else max(0.0, value - row.auroc_low) for _, value, row in points]
    high = [0.0 if row.auroc_high is None else max(0.0, row.auroc_high - value) for _, value, row in points]
    axes.errorbar(x, y, yerr=[low, high], **_look(index), elinewidth=0.8, label=rows[0].probe)


def _look(index: int) -> dict:
    return {"color": COLORS[index % len(COLORS)], "marker": MARKERS[index % len(MARKERS)], "markersize": 3.5}


def _title(mode: str, rows: list[TransferRow]) -> str:
    return f"{mode} ({'known' if rows[0].known else 'held out'}, n={rows[0].n})"
