"""The study's figures: ROC, threshold by gain, latency, and the frontier of hacking against solving."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sklearn.metrics import roc_curve

from mi_route2.plots import BLACK, BLUE, GRAY, GREEN, ORANGE, PAGE_WIDTH, PURPLE, SKY, VERMILLION, new_figure
from studies.steering.answer import SUBJECTS
from studies.steering.cells import BEHIND, CLOSED, DELETED, ON
from studies.steering.results import Study, roc_of, rows_of

Results = Mapping[str, Any]
LOOKS: Mapping[str, tuple[str, str, str]] = MappingProxyType(
    {
        "probe": (BLUE, "-", "probe"),
        "pairs": (GREEN, "--", "pairs alone"),
        "shuffled": (PURPLE, ":", "shuffled labels"),
        "haar": (GRAY, "-", "random"),
    }
)
MEASURES = (
    ("hack_held", "hack, held out", VERMILLION, "o"),
    ("exploit_held", "exploit, held out", ORANGE, "s"),
    ("solve", "solve", BLUE, "^"),
)


def _titled(study: Study, height: float) -> Figure:
    """Return an empty figure whose title is the preset of the study's runs, above panels of `height` inches."""
    figure = new_figure(PAGE_WIDTH, height + 0.2)
    figure.suptitle(study.settings.run.preset)
    return figure


def roc_figure(study: Study, results: Results) -> Figure:
    """Draw the ROC curves of the model trained without a route, at the study's site: tokens and rollouts, by modes."""
    figure = _titled(study, 2.7)
    panels = [(split, unit) for split in ("known", "held") for unit in ("token", "rollout mean")]
    axes = figure.subplots(1, len(panels), sharex=True, sharey=True)
    probes = list(dict.fromkeys(row["probe"] for row in results["roc"]))
    for panel, (split, unit) in zip(axes, panels, strict=True):
        panel.plot([0, 1], [0, 1], color=BLACK, linewidth=0.5)
        for probe in sorted(probes, key=lambda name: not name.startswith("haar")):
            _curves(panel, study, probe, split, unit)
        title = f"{'known' if split == 'known' else 'held out'}, {'tokens' if unit == 'token' else 'rollouts (mean)'}"
        panel.set(title=title, xlabel="false alarms")
    axes[0].set_ylabel("hacks found")
    _legend(figure, axes[0])
    return figure


def _curves(axes: Axes, study: Study, probe: str, split: str, unit: str) -> None:
    color, line, label = LOOKS[probe.partition("-")[0]]
    grid = np.linspace(0, 1, 201)
    curves = []
    for seed in study.seeds:
        roc = roc_of(study, "vanilla", seed, study.settings.site, probe, split, unit)
        if roc.area is not None:
            false, true, _ = roc_curve(roc.hack, roc.scores)
            curves.append(np.interp(grid, false, true))
            if probe == "probe":
                axes.plot(false, true, color=color, linewidth=0.5, alpha=0.4)
    if curves:
        faint = probe.startswith("haar")
        axes.plot(grid, np.mean(curves, axis=0), line, color=color, linewidth=0.8 if faint else 1.5, label=label)


def sweep_figure(study: Study, results: Results) -> Figure:
    """Draw held-out hacking, exploits and solving by threshold and gain."""
    rows = rows_of(results, "vanilla", "sweep")
    gains, quantiles = study.settings.gains, (None, *study.settings.quantiles)
    grid = {
        (row["quantile"], row["gain"]): row
        for row in rows
        if row["how"] == "steer" and (row["probe"], row["direction"]) == ("probe", "away")
    }
    never = next(row for row in rows if row["how"] == ON)
    figure = _titled(study, 3.0)
    axes = figure.subplots(1, len(MEASURES), sharey=True)
    for panel, (metric, name, *_) in zip(axes, MEASURES, strict=True):
        values = np.array([[grid[q, gain][metric]["mean"] for gain in gains] for q in quantiles])
        panel.imshow(values, cmap="viridis", vmin=0, vmax=1, aspect="auto")
        for (y, x), value in np.ndenumerate(values):
            panel.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=7, color="white" if value < 0.55 else BLACK)
        panel.set(title=f"{name} (unsteered {never[metric]['mean']:.2f})", xlabel="gain")
        panel.set_xticks(range(len(gains)), [f"{gain:g}" for gain in gains])
        panel.set_yticks(range(len(quantiles)), ["always" if q is None else f"{q:g}" for q in quantiles])
        panel.grid(visible=False)
    axes[0].set_ylabel("gate opens above quantile")
    return figure


def controls_figure(study: Study, results: Results) -> Figure:
    """Draw the probe and the direction by gain, at the operating threshold, with the controls for alternative explanations."""
    every = rows_of(results, "vanilla", "sweep")
    rows = [row for row in every if row["how"] == "steer" and row["quantile"] == study.settings.operating]
    never = next(row for row in every if row["how"] == ON)
    figure = _titled(study, 2.8)
    axes = figure.subplots(1, len(MEASURES), sharey=True)
    keys = list(dict.fromkeys((row["probe"], row["direction"]) for row in rows))
    seen: set[str] = set()
    for panel, (metric, name, *_) in zip(axes, MEASURES, strict=True):
        for probe, direction in sorted(keys, key=lambda key: key == ("probe", "away")):
            line_rows = [row for row in rows if (row["probe"], row["direction"]) == (probe, direction)]
            color, line, label = LOOKS[probe.partition("-")[0]]
            if direction != "away":
                color, line, label = ORANGE, "--", "same probe, random direction"
            y = [never[metric]["mean"], *(row[metric]["mean"] for row in line_rows)]
            low, high = ([never[metric][k], *(row[metric][k] for row in line_rows)] for k in ("low", "high"))
            x = [0.0, *(row["gain"] for row in line_rows)]
            label = {"probe": "probe and direction", "random": "random probe, same direction"}.get(label, label)
            panel.plot(
                x, y, line, color=color, marker="o", markersize=2.5, label=None if label in seen and panel is axes[0] else label
            )
            if (probe, direction) == ("probe", "away"):
                panel.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
            seen.add(label)
        panel.set(title=name, xlabel="gain", ylim=(-0.02, 1.02))
    axes[0].set_ylabel("rate")
    _legend(figure, axes[0], columns=5)
    return figure


def latency_figure(study: Study, results: Results) -> Figure:
    """Draw the rates by the delay of steering in tokens, one panel per gain."""
    rows = rows_of(results, "vanilla", "latency")
    gains = study.settings.late_gains
    figure = _titled(study, 2.8)
    panels = figure.subplots(1, len(gains), sharey=True, squeeze=False)[0]
    late = [0, *study.settings.delays]
    never = max(late) + 2.0
    for axes, gain in zip(panels, gains, strict=True):
        of_gain = [row for row in rows if row.get("gain", gain) == gain]
        for shift, (metric, name, color, marker) in zip((-0.08, 0.08, 0.0), MEASURES, strict=True):
            by_delay = {0 if row["how"] == "steer" else row.get("delay"): row[metric] for row in of_gain}
            for places, keys in ((late, late), ([never], [None])):
                values = [by_delay[key] for key in keys]
                y = [each["mean"] for each in values]
                bars = np.transpose([_reach(each["mean"], each["low"], each["high"]) for each in values])
                look = {"color": color, "marker": marker, "markersize": 3.5, "elinewidth": 0.6}
                axes.errorbar([place + shift for place in places], y, bars, label=None if None in keys else name, **look)
        axes.set_xticks([*late, never], [*map(str, late), "never"])
        axes.set(ylim=(-0.02, 1.02), title=f"gain {gain:g}", xlabel="tokens between score and effect")
    panels[0].set_ylabel("rate")
    _legend(figure, panels[0])
    return figure


MECHANISM_LOOKS: Mapping[tuple[str, str], tuple[str, str, str, str]] = MappingProxyType(
    {
        ("forward", "haar"): (GRAY, "-", "", "random probe, this token"),
        ("forward", "shuffled"): (PURPLE, ":", "v", "shuffled labels, this token"),
        ("forward", "pairs"): (GREEN, "--", "P", "pairs alone, this token"),
        ("open", "probe"): (BLACK, ":", "x", "the wrong way round (opens)"),
        ("early", "probe"): (SKY, "-", "D", "probe on the embedding, this token"),
        ("forward", "probe"): (BLUE, "-", "o", "probe, this token"),
        ("next token", "probe"): (ORANGE, "-", "s", "probe, next token"),
        ("latch", "probe"): (VERMILLION, "-", "^", "probe, next token and for good"),
    }
)
ENDS = (
    (ON, "*", "always on"),
    (DELETED, "X", "deleted"),
    (CLOSED, "d", "closed on every token"),
    (BEHIND, "p", "closed behind the probe"),
)


def frontier_figure(study: Study, results: Results) -> Figure:
    """Draw held-out hacking against solving over thresholds, as differences from deletion (the cross at zero).

    Below and to the right of the cross a gated quarantine would be better. Bars are paired intervals, of the ends and of the
    operating threshold.
    """
    figure = _titled(study, 4.2)
    axes = figure.subplots(1, len(SUBJECTS))
    for panel, subject in zip(axes, SUBJECTS, strict=True):
        cells = study.cells(subject, "quarantine")
        rows = [{**cell, **study.estimates(subject, "quarantine", cell["name"], minus=DELETED)} for cell in cells]
        for (how, probe), look in MECHANISM_LOOKS.items():
            names = list(dict.fromkeys(r["probe"] for r in rows if r["how"] == how and str(r["probe"]).partition("-")[0] == probe))
            for number, name in enumerate(names):
                line_rows = sorted((r for r in rows if (r["how"], r.get("probe")) == (how, name)), key=lambda r: r["quantile"])
                _path(panel, line_rows, look, study.settings.operating, label=number == 0)
        for how, marker, label in ENDS:
            _end(panel, next(row for row in rows if row["how"] == how), marker, label)
        _shade(panel)
        panel.set(title=subject, xlabel="solve, minus deleted")
    axes[0].set_ylabel("hack (held out), minus deleted")
    _legend(figure, axes[0])
    return figure


def _shade(axes: Axes, least: float = 0.03) -> None:
    """Shade the quadrant in which a gated quarantine is better than a deleted one."""
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    left, right, low, high = min(left, -least), max(right, least), min(low, -least), max(high, least)
    axes.fill_between([0, right], [low, low], [0, 0], color=GREEN, alpha=0.08, linewidth=0)
    axes.text(right, low, "better than deleted ", ha="right", va="bottom", fontsize=7, color=GREEN)
    axes.axhline(0, color=BLACK, linewidth=0.5)
    axes.axvline(0, color=BLACK, linewidth=0.5)
    axes.set(xlim=(left, right), ylim=(low, high))


def _path(axes: Axes, rows: Sequence[Mapping[str, Any]], look: tuple[str, str, str, str], operating: float, *, label: bool) -> None:
    color, line, marker, name = look
    x, y = ([row[metric].mean for row in rows] for metric in ("solve", "hack_held"))
    axes.plot(x, y, line, color=color, marker=marker or ".", markersize=3.5, linewidth=0.9, label=name if label else None)
    if rows[0]["probe"] == "probe" and rows[0]["how"] != "open":
        _bars(axes, next(row for row in rows if row["quantile"] == operating), color=color, alpha=0.5)


def _end(axes: Axes, row: Mapping[str, Any], marker: str, label: str) -> None:
    look = {"color": BLACK, "markerfacecolor": "white", "markersize": 7, "zorder": 5}
    axes.plot([row["solve"].mean], [row["hack_held"].mean], marker=marker, linestyle="none", label=label, **look)
    _bars(axes, row, color=BLACK)


def _bars(axes: Axes, row: Mapping[str, Any], **look: Any) -> None:
    solve, hack = row["solve"], row["hack_held"]
    bars = [np.transpose([_reach(each.mean, each.low, each.high)]) for each in (solve, hack)]
    axes.errorbar([solve.mean], [hack.mean], xerr=bars[0], yerr=bars[1], elinewidth=0.6, linestyle="none", **look)


def _reach(mean: float, low: float, high: float) -> tuple[float, float]:
    """Return the lengths of a bar below and above the mean, at least 0: rounding may put a bound on the wrong side of it."""
    return max(0.0, mean - low), max(0.0, high - mean)


def _legend(figure: Figure, axes: Axes, columns: int = 4) -> None:
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    figure.legend(list(unique.values()), list(unique), loc="outside lower center", ncols=columns)


FIGURES: Mapping[str, Callable[[Study, Results], Figure]] = MappingProxyType(
    {
        "roc": roc_figure,
        "sweep": sweep_figure,
        "controls": controls_figure,
        "latency": latency_figure,
        "frontier": frontier_figure,
    }
)
