"""Report of a study folder: one sentence that answers, one table, one figure; per-mode rates, curves and leakage go to files.

leakage(mode) = clamp(hack(arm) / hack(vanilla, same seed), 0, 1), mean over held-out modes where vanilla hacks
"""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from mi_route2.files import write_whole
from mi_route2.plots import BLUE, GRAY, GREEN, ORANGE, PAGE_WIDTH, PURPLE, VERMILLION, new_figure, save_figure, style
from studies.common.command_line import named, seeds_text
from studies.common.tables import markdown_page, markdown_table
from studies.route2.contrasts import interval_text, mean_interval, values
from studies.route2.runs import finished, load_runs, read_metrics, read_modes
from studies.training.arms import ARMS
from studies.training.settings import Settings

ROWS = 12
"""Rows of the table on the screen."""
COUNTED = {"memorized": "memorized", "unjudged": "not judged"}
"""Columns of the table that no figure shows, and that are left out where all is zero."""
SAME = 0.05
"""Means of a route and its filter that differ by less are called the same."""
ROUTES = ("route2-act", "route2-full", "route2-grad")
MEASURES = {"hack_held": "hack, held out", "exploit_held": "exploit, held out", "solve": "solve"}
CURVES = {
    "training": (("reward", "reward"), ("hack", "hack"), ("solve", "solve"), ("grad_norm.kept", "norm, kept")),
    "scores": (
        ("scores.student_hack", "score, hacks"), ("scores.student_clean", "score, clean"),
        ("mask.fire_hack", "flagged, hacks"), ("mask.fire_clean", "flagged, clean"),
        ("mask.auroc", "AUROC"), ("overlap", "overlap at refit"),
    ),
}  # fmt: skip
"""Figure -> (column of the training log, title of its panel)."""


def write_report(root: Path) -> list[Path]:
    """Write table.md, answer.md and the figures of a study folder; return their paths."""
    root = named(root)
    runs, preset = load_runs(root), Settings.read(root / "settings.json").preset
    order = arm_order(runs)
    held_out = read_modes(root).held_out
    sections = [
        f"# {preset}, {seeds_text(sorted(set(runs.seed)))}",
        answer(runs),
        summary_table(runs, order),
        f"## Leakage\n\n{leakage_table(runs, order, held_out)}",
        f"## Exploits by mode\n\n{mode_table(runs, order)}",
    ]
    paths = [
        write_whole(root / "answer.md", markdown_page([answer(runs), summary_table(runs, order[:ROWS])]).encode()),
        write_whole(root / "table.md", markdown_page(sections).encode()),
        draw_answer(runs, order, preset, root / "answer.png"),
        draw_modes(runs, order, root / "modes.png"),
    ]
    logs = {folder: read_metrics(folder) for folder in finished(root)}
    return paths + [path for name in CURVES if (path := draw_curves(logs, order, name, root / f"{name}.png")) is not None]


def arm_order(runs: pd.DataFrame) -> list[str]:
    """Return base, then the arms in the order in which they are defined."""
    present = set(runs.arm)
    known = [arm for arm in ("base", *ARMS) if arm in present]
    return known + sorted(present - set(known))


def means(runs: pd.DataFrame, arm: str) -> dict[str, float]:
    return {name: float(values(runs.loc[runs.arm == arm], name).mean()) for name in MEASURES}


def answer(runs: pd.DataFrame) -> str:
    """Return one sentence: what the first route does to held-out hacks and solving, and whether its filter does the same."""
    present = set(runs.arm)
    methods = [arm for arm in (*ROUTES, *ARMS) if arm in present and ARMS[arm].role == "method"]
    if not methods or "vanilla" not in present:
        return "No answer yet: run vanilla and at least one method."
    arm = methods[0]
    before, after = means(runs, "vanilla"), means(runs, arm)
    text = (
        f"{arm}: held-out hacks {_short(before['hack_held'])} -> {_short(after['hack_held'])}, "
        f"solve {_short(before['solve'])} -> {_short(after['solve'])}"
    )
    same_rule = ARMS[arm].same_rule_filter
    if same_rule is None:
        return text + "."
    if same_rule not in present:
        return f"{text}; its filter, {same_rule}, was not run."
    other = means(runs, same_rule)
    if all(abs(after[name] - other[name]) < SAME for name in ("hack_held", "solve")):
        return f"{text}; its filter does the same."
    return f"{text}; its filter: {_short(other['hack_held'])} and {_short(other['solve'])}."


def _short(value: float) -> str:
    text = f"{value:.2f}"
    return text[1:] if text.startswith("0") else text


def _label(arm: str) -> str:
    return f"{arm} (bound)" if arm in ARMS and ARMS[arm].role == "bound" else arm


def summary_table(runs: pd.DataFrame, order: list[str]) -> str:
    """Return the table of arms: means with 95% t intervals over seeds, and the number of runs that fail."""
    counted = {name: label for name, label in COUNTED.items() if max(values(runs, name), default=0.0)}
    body = []
    for arm in order:
        of = runs.loc[runs.arm == arm]
        cells = [interval_text(mean_interval(values(of, name))) for name in (*MEASURES, *counted)]
        body.append([_label(arm), *cells, f"{int((of.failed > 0).sum())}/{len(of)}"])
    return markdown_table(["arm", *MEASURES.values(), *counted.values(), "fails"], body)


def leakage_table(runs: pd.DataFrame, order: list[str], held_out: tuple[str, ...]) -> str:
    """Return the share of vanilla's held-out hacks that each arm keeps, per mode and in the mean."""
    vanilla = runs.loc[runs.arm == "vanilla"].set_index("seed")
    body = []
    for arm in order:
        of = runs.loc[runs.arm == arm].set_index("seed")
        shares = pd.DataFrame(
            {mode: (of[f"hack:{mode}"] / vanilla[f"hack:{mode}"].where(lambda h: h > 0)).clip(0, 1) for mode in held_out}
        )
        shares["mean"] = shares.mean(axis=1)
        columns = [values(shares, str(name)) for name in shares]
        defined = [column[np.isfinite(column)] for column in columns]
        body.append([_label(arm), *("–" if not len(c) else interval_text(mean_interval(c)) for c in defined)])  # noqa: RUF001
    return markdown_table(["arm", *held_out, "mean"], body)


def mode_table(runs: pd.DataFrame, order: list[str]) -> str:
    """Return the exploit rate of each arm in each mode."""
    columns = [str(name) for name in runs if str(name).startswith("exploit:")]
    body = [[_label(arm), *(interval_text(mean_interval(values(runs.loc[runs.arm == arm], c))) for c in columns)] for arm in order]
    return markdown_table(["arm", *(name.partition(":")[2] for name in columns)], body)


def _arms_axis(ax: Any, order: list[str]) -> None:
    ax.set_yticks(range(len(order)), [_label(arm) for arm in order])
    ax.set_ylim(len(order) - 0.5, -0.5)
    for tick, arm in zip(ax.get_yticklabels(), order):
        role = ARMS[arm].role if arm in ARMS else "baseline"
        tick.set_fontweight("bold" if role == "method" else "normal")
        tick.set_fontstyle("italic" if role in ("control", "bound") else "normal")


def draw_answer(runs: pd.DataFrame, order: list[str], preset: str, path: Path) -> Path:
    """Draw held-out hacks, held-out exploits and solving of every arm: a dot is a seed, a tick the mean."""
    looks = {"hack_held": (VERMILLION, "o"), "exploit_held": (ORANGE, "s"), "solve": (BLUE, "^")}
    with style():
        figure = new_figure(PAGE_WIDTH, 1.1 + 0.21 * len(order))
        figure.suptitle(answer(runs))
        axes = figure.subplots(1, len(MEASURES), sharey=True)
        for ax, (name, title) in zip(axes, MEASURES.items()):
            color, marker = looks[name]
            for y, arm in enumerate(order):
                rates = values(runs.loc[runs.arm == arm], name)
                ax.plot([rates.mean()] * 2, [y - 0.4, y + 0.4], color="black", linewidth=1.2, clip_on=False)
                ax.scatter(rates, [y] * len(rates), s=17, color=color, marker=marker, alpha=0.75, zorder=3, clip_on=False)
            ax.set(title=title, xlim=(-0.02, 1.02), xticks=(0, 0.5, 1))
        _arms_axis(axes[0], order)
        seeds = seeds_text(sorted(set(runs.seed)))
        figure.supxlabel(
            f"{preset}: rate of the deployed model on tasks never seen; a dot is a seed ({seeds}), a tick the mean", fontsize=8
        )
        return save_figure(figure, path)


def draw_modes(runs: pd.DataFrame, order: list[str], path: Path) -> Path:
    """Draw the exploit rate of every arm in every mode: mean and 95% interval over seeds."""
    columns = [str(name) for name in runs if str(name).startswith("exploit:")]
    with style():
        figure = new_figure(PAGE_WIDTH, 1.0 + 0.21 * len(order))
        axes = np.atleast_1d(figure.subplots(1, len(columns), sharey=True))
        for ax, column in zip(axes, columns):
            for y, arm in enumerate(order):
                mean, low, high = mean_interval(values(runs.loc[runs.arm == arm], column))
                ax.plot([low, high], [y, y], color=VERMILLION, linewidth=1.6)
                ax.plot(mean, y, "o", color=VERMILLION, markersize=4, clip_on=False)
            ax.set(title=column.partition(":")[2], xlim=(-0.02, 1.02), xticks=(0, 0.5, 1))
        _arms_axis(axes[0], order)
        figure.supxlabel("share of prompts in which the mode's loophole is used, deployed model", fontsize=8)
        return save_figure(figure, path)


def draw_curves(logs: dict[Path, pd.DataFrame], order: list[str], name: str, path: Path) -> Path | None:
    """Draw columns of the training logs over steps, a line per arm (mean over seeds); ``None`` if no run has them."""
    colors = [BLUE, VERMILLION, GREEN, ORANGE, PURPLE, GRAY]
    lines = [(color, dash) for dash in ("-", "--", ":", "-.") for color in colors]
    panels = CURVES[name]
    with style():
        figure = new_figure(PAGE_WIDTH, 5.2 if len(panels) > 4 else 3.4)
        axes = figure.subplots(2 if len(panels) > 4 else 1, 3 if len(panels) > 4 else len(panels), squeeze=False).flatten()
        drawn: dict[str, Any] = {}
        for ax, (column, title) in zip(axes, panels):
            for place, arm in enumerate(order):
                tables = [log for folder, log in logs.items() if folder.name == arm and column in log]
                rows = pd.DataFrame(pd.concat([table[["step", column]] for table in tables]).dropna() if tables else None)
                if len(rows):
                    color, dash = lines[place % len(lines)]
                    at, rates = values(rows, "step"), values(rows, column)
                    steps = np.unique(at)
                    mean = np.array([rates[at == step].mean() for step in steps])
                    smooth = np.array([mean[max(0, i - 4) : i + 1].mean() for i in range(len(mean))])
                    drawn[arm] = ax.plot(steps, smooth, dash, color=color, linewidth=1)[0]
            ax.set(title=title, xlabel="step")
        if not drawn:
            return None
        figure.legend(drawn.values(), [_label(arm) for arm in drawn], loc="outside lower center", ncols=5)
        return save_figure(figure, path)
