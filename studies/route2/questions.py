"""Questions to the numbers of evidence, each with its figure or table, and the writer of a whole report.

A figure or table is written if the runs have what it is about; ``evidence`` lists the files.
"""

import itertools
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from scipy.stats import spearmanr

from mi_route2.plots import BLUE, GRAY, GREEN, ORANGE, PURPLE, SKY, VERMILLION
from studies.common.publishing import compact, update_showing
from studies.common.stats import mean
from studies.common.tables import interval, markdown_table, number, write_texts
from studies.route2.evidence import (
    AT_END,
    BUDGETS,
    CONTROLS,
    METHODS,
    MOST_EXPLOIT,
    ON_EXPLOIT,
    PATH,
    PENALIZED,
    SIGNED,
    Evidence,
    collect,
    goals,
    table,
)
from studies.route2.headline import EXPLOIT, SOLVE
from studies.route2.predictions import MOST, Predictions, outcomes, p_text, predictions_markdown, ranks_within_seeds, sign_flip
from studies.route2.publish import EARLY
from studies.route2.report.figures import draw_means, panels
from studies.route2.report.load import load_runs
from studies.route2.report.measures import stopped_after
from studies.training.arms import ARMS
from studies.training.settings import PRESETS

COVERED = ("canary-one", "filter-canary", "filter-canary-run")
"""Arms whose remaining exploits are compared with those of their canary, mode by mode."""
RATED = {"sees-known": "one mode is flagged", "sees-0": "nothing is flagged"}
"""Rules whose quarantine was run at several rates."""
SEEN = "filter-full"
"""Arm whose score stands for how well ten pairs tell hacks in a world."""
DIAL = ("sparse", "persona-20", "strong")
"""Worlds that differ only in how often a cheat shows the persona."""
MOST_FLAGGED, FEW_FLAGGED = 0.95, 0.8
"""Recall of the runs that are counted as flagging most of their hacks, and few."""
LOUD, BROKEN = 0.03, 0.05
"""A run is loud that flags more of its rollouts in its last ``AT_END`` steps; broken, that exploits a mode more often."""


MARKS = {
    "filter-canary": (GREEN, "o"), "filter-canary-run": (BLUE, "o"), "route2-canary": (GREEN, "D"), "canary-one": (GREEN, "^"),
    "canary-wide": (GREEN, "s"),
    "canary-run-30k": (SKY, "^"), "canary-run-110k": (SKY, "P"), "canary-run-weak": (SKY, "D"),
    "canary-run-weak-rotated": (ORANGE, "D"), "canary-own": (BLUE, "*"), "canary-own-shuffled": (ORANGE, "*"),
    "canary-own-rotated": (ORANGE, "8"), "canary-first": (BLUE, "p"), "canary-first-shuffled": (ORANGE, "p"),
    "canary-first-rotated": (ORANGE, "h"), "canary-surprisal": (GREEN, "H"), "canary-surprisal-random": (ORANGE, "H"),
    "canary-surprisal-rotated": (ORANGE, "d"), "filter-surprisal": (ORANGE, "1"),
    "canary-nats": (SKY, "*"), "canary-nats-shuffled": (ORANGE, "2"), "canary-nats-rotated": (ORANGE, "3"),
    "canary-run-10": (BLUE, "^"), "canary-run-10-rotated": (ORANGE, "^"),
    "canary-run-10-shuffled": (ORANGE, "v"),
    "quarantine-first": (PURPLE, "s"), "filter-full": (BLUE, "P"), "filter-known": (BLUE, "X"),
    "sees-100": (GREEN, "o"), "sees-50": (GREEN, "^"), "sees-25": (GREEN, "s"), "sees-25-quarantine": (PURPLE, "s"),
    "sees-known": (BLUE, "X"), "sees-known-quarantine": (PURPLE, "X"), "sees-0": (GREEN, "v"), "sees-0-quarantine": (PURPLE, "v"),
    "sees-known-quarantine-slow": (PURPLE, "1"), "sees-known-quarantine-fast": (PURPLE, "P"),
    "sees-0-quarantine-slow": (PURPLE, "2"), "sees-0-quarantine-fast": (PURPLE, "^"),
    "sees-known-quarantine-fast-forgets": (ORANGE, "P"), "sees-0-quarantine-fast-forgets": (ORANGE, "^"),
    "vanilla-slow": (VERMILLION, "x"), "vanilla-slower": (VERMILLION, "+"), "sees-known-slow": (BLUE, "x"),
    "sees-known-slower": (BLUE, "+"), "sees-known-slow-quarantine": (PURPLE, "x"),
    "penalty-known": (BLUE, "v"), "inoculation": (PURPLE, "*"), "inoculation-trainable": (PURPLE, "8"),
    "inoculation-random": (ORANGE, "*"), "inoculation-honest": (ORANGE, "8"),
    "taught-honest": (GREEN, "*"), "taught-honest-1": (GREEN, "1"), "taught-hacks": (ORANGE, "X"),
    "taught-8": (GREEN, "8"), "taught-2": (GREEN, "2"), "taught-brief": (GREEN, "x"), "taught-long": (GREEN, "P"),
    "taught-easy": (BLUE, "*"), "taught-failed": (ORANGE, "v"), "taught-passing": (PURPLE, "*"), "vanilla-long": (VERMILLION, "P"),
    "filter-act": (BLUE, "v"), "route2-full": (PURPLE, "P"), "route2-act": (PURPLE, "v"), "filter-act-fixed": (BLUE, "1"),
    "filter-full-fixed": (BLUE, "2"), "penalty-act": (GREEN, "v"), "penalty-act-fixed": (GREEN, "1"),
    "penalty-full": (GREEN, "P"), "penalty-full-fixed": (GREEN, "2"), "penalty-haar": (ORANGE, "h"),
    "contrast": (PURPLE, "o"), "contrast-kept": (GREEN, "o"), "contrast-kept-1": (GREEN, "2"), "contrast-kept-hacks": (ORANGE, "o"),
    "preventative-1": (SKY, "s"), "preventative-1-random": (ORANGE, "s"), "bands-full": (PURPLE, "D"),
    "sees-known-bands-fast": (PURPLE, "h"),
    "sees-known-10": (BLUE, "1"), "sees-known-20": (BLUE, "2"), "sees-known-40": (BLUE, "3"),
    **{name: (ORANGE, mark) for method in METHODS for name, mark in zip(CONTROLS[method], "v<>^", strict=False)},
}  # fmt: skip
"""Arm -> its color and marker in every figure."""


def coverage(evidence: Evidence, arm: str) -> list[tuple[int, str, float, float]]:
    """Return ``(seed, mode, canary, arm)``: the exploit rates of the canary, the highest of its checkpoints, and of the arm."""
    points = []
    for mode in evidence.modes if arm in evidence.values else ():
        metric = f"deploy_exploit_{mode}"
        for i, seed in enumerate(evidence.seeds):
            exploit = evidence.values[arm][metric][i]
            known = [evidence.values[name][metric][i] for name in ARMS[arm].canaries or () if name in evidence.values]
            rates = [value for value in known if value is not None]
            if exploit is not None and rates:
                points.append((seed, mode, max(rates), exploit))
    return points


def coverage_sentence(evidence: Evidence, arm: str) -> str:
    """Return a sentence on whether an arm exploits what its canary does not; a seed counts once."""
    points = coverage(evidence, arm)
    little = [exploit for _, _, canary, exploit in points if canary < 0.2]
    much = [exploit for _, _, canary, exploit in points if canary >= 0.5]
    told = (
        f"{arm}: in the {len(little)} seeds and modes of which its canary exploits less than .2 it exploits {number(mean(little))}"
        f", in the {len(much)} of which the canary exploits at least .5 {number(mean(much))}"
    )
    rhos = ranks_within_seeds([(seed, canary, exploit) for seed, _, canary, exploit in points])
    if 1 < len(rhos) <= MOST:
        told += (
            f"; Spearman correlation within a seed: mean {number(mean(rhos))} (exact sign-flip test, p {p_text(sign_flip(rhos))}, "
            f"n {len(rhos)})"
        )
    return told + "."


def fronts_figure(every: Sequence[Evidence], path: Path) -> Path:
    """Draw exploit against solve for each preset, with intervals; the line is ordinary training from the base to its end."""
    with panels(path, len(every), 3.9, "exploit fires, held-out modes", "solve, all modes") as axes:
        for ax, evidence in zip(axes, every, strict=True):
            ran = [name for name in PATH if name in evidence.values]
            points = [(evidence.summary(name, EXPLOIT)["mean"], evidence.summary(name, SOLVE)["mean"]) for name in ran]
            ax.plot(*zip(*points, strict=True), color=VERMILLION, marker=".", label="ordinary training, by steps")  # pyright: ignore
            for name, point in zip(ran, points, strict=True):
                look = {"xytext": (3, -8), "textcoords": "offset points", "fontsize": 6, "color": VERMILLION}
                ax.annotate(stopped_after(name), point, **look)  # pyright: ignore
            others = dict(zip(BUDGETS["an oracle"] + BUDGETS["other"], zip(itertools.repeat(GRAY), itertools.cycle("o^sDvP*Xhd"))))
            for arm, (color, marker) in (others | MARKS).items():
                if arm in evidence.values:
                    x, y = evidence.summary(arm, EXPLOIT), evidence.summary(arm, SOLVE)
                    spread = [[[s["mean"] - s["lo"]], [s["hi"] - s["mean"]]] if s["lo"] is not None else None for s in (x, y)]  # pyright: ignore
                    look = {"color": color, "marker": marker, "markersize": 5, "linewidth": 0.7, "linestyle": "none", "label": arm}
                    ax.errorbar(x["mean"], y["mean"], xerr=spread[0], yerr=spread[1], **look)  # pyright: ignore
            ax.set_title(f"{evidence.preset}, {len(evidence.seeds)} seeds")
    return path


def coverage_figure(every: Sequence[Evidence], path: Path) -> Path:
    """Draw the exploits of a canary in each mode against those that the filtered run keeps; a dot is a seed and mode."""
    x, y = "the canary exploits the mode (its best checkpoint)", "the filtered run exploits it"
    with panels(path, len(every), 3.2, x, y, legend_inside=True) as axes:
        for ax, evidence in zip(axes, every, strict=True):
            for arm, color, marker in zip(COVERED, (VERMILLION, GREEN, BLUE), ("x", "o", "+"), strict=True):
                if points := coverage(evidence, arm):
                    name = f"{arm}: {len(ARMS[arm].canaries or ())} checkpoints"
                    _, _, canary, exploit = zip(*points, strict=True)
                    ax.scatter(canary, exploit, s=14, color=color, marker=marker, alpha=0.7, label=name)
            ax.set_title(evidence.preset)
    return path


def recalls(evidence: Evidence, budget: str) -> list[tuple[float, float]]:
    """Return the recall of its flags and the held-out exploits at its end, of every run of a budget that flagged."""
    pairs = [
        pair
        for arm in BUDGETS[budget]
        if arm in evidence.values
        for pair in zip(evidence.values[arm]["recall"], evidence.values[arm][EXPLOIT], strict=True)
    ]
    return [(recall, exploit) for recall, exploit in pairs if recall is not None and exploit is not None]


def flagged(evidence: Evidence) -> bool:
    """Return whether any run flagged anything."""
    return any(recalls(evidence, budget) for budget in BUDGETS)


def recall_sentence(evidence: Evidence) -> str:
    """Return a sentence on the held-out exploits of runs that flagged most of their hacks, and of the others."""
    points = [point for budget in BUDGETS for point in recalls(evidence, budget)]
    most = [exploit for recall, exploit in points if recall >= MOST_FLAGGED]
    few = [exploit for recall, exploit in points if recall < FEW_FLAGGED]

    def told(some: list[float], what: str) -> str:
        within = sum(exploit <= MOST_EXPLOIT for exploit in some)
        return f"of {len(some)} runs that flagged {what}, {within} end with held-out exploits of at most {number(MOST_EXPLOIT)}"

    early = f"at least {number(MOST_FLAGGED)} of their hacks in the first {EARLY} steps"
    return f"{evidence.preset}: {told(most, early)}; {told(few, f'less than {number(FEW_FLAGGED)}')}."


_DOTS = ((GREEN, "o"), (ORANGE, "v"), (BLUE, "P"), (PURPLE, "x"), (ORANGE, "h"), (VERMILLION, "s"), (GRAY, "*"), (SKY, "d"))


def recall_figure(every: Sequence[Evidence], path: Path) -> Path:
    """Draw the recall of a run's flags against what it exploits at its end; a dot is a run."""
    x, y = f"share of its hacks that the run flagged\nin its first {EARLY} steps", "exploit fires, held-out modes"
    with panels(path, len(every), 3.2, x, y) as axes:
        for ax, evidence in zip(axes, every, strict=True):
            for budget, (color, marker) in zip(BUDGETS, _DOTS, strict=True):
                if not any(recalls(one, budget) for one in every):
                    continue
                recall, exploit = zip(*points, strict=True) if (points := recalls(evidence, budget)) else ((), ())
                ax.scatter(recall, exploit, s=14, color=color, marker=marker, alpha=0.7, label=budget)
            ax.set_title(evidence.preset)
    return path


def rates(evidence: Evidence, arm: str) -> list[tuple[float, str]]:
    """Return ``(rate of the quarantine over the kept one, arm)`` of the arms that have the flags of `arm` and a quarantine.

    None for a chat model, whose rates are in its ``--config``, and not in the report.
    """
    if (settings := PRESETS.get(evidence.preset)) is None:
        return []
    usual = settings.quarantine_lr / settings.kept_lr
    named = [name for name in evidence.values if name in ARMS and ARMS[name].same_rule_filter == arm]
    # a band of clean rollouts, or a quarantine that forgets, is another method at the same rate
    family = [name for name in named if ARMS[name].clean is None and not ARMS[name].forget_every]
    return sorted((usual * ARMS[name].quarantine_lr_scale, name) for name in family)


def rates_figure(every: Sequence[Evidence], path: Path) -> Path:
    """Draw exploits against the rate of the quarantine, with the quarantine and without it; the points at 0 have no quarantine."""
    x, y = "rate of the quarantine,\nin rates of the kept adapter", "exploit fires, held-out modes"
    with panels(path, len(every), 3.4, x, y, x_is_rate=False, sharex=True) as axes:
        for ax, evidence in zip(axes, every, strict=True):
            for (plain, label), color, beside in zip(RATED.items(), (BLUE, VERMILLION), (-0.01, 0.01), strict=True):
                within = rates(evidence, plain)
                unquarantined = [(0.0, plain)] if plain in evidence.values else []
                at, means = zip(
                    *((rate + beside, evidence.summary(arm, EXPLOIT)) for rate, arm in unquarantined + within), strict=True
                )
                draw_means(ax, at, means, color=color, marker="o", markersize=3, label=f"{label}, quarantine deleted")
                at, on = zip(*((rate + beside, evidence.summary(arm, ON_EXPLOIT)["mean"]) for rate, arm in within), strict=True)
                ax.plot(at, on, color=color, linestyle=":", marker="o", markersize=3, label=f"{label}, quarantine in")  # pyright: ignore
            ax.set_title(f"{evidence.preset}, {len(evidence.seeds)} seeds")
    return path


def lessons(evidence: Evidence) -> list[str]:
    """Return the arms that had a lesson and were also stopped right after it."""
    return [arm for arm in evidence.values if f"{arm}-1" in evidence.values and arm in ARMS and ARMS[arm].taught is not None]


def lessons_sentence(evidence: Evidence) -> str:
    """Return how what runs exploit at their end goes with what they solve and exploit right after their lesson, over all runs.

    Empty if the runs do not differ, which have no correlation.
    """
    rhos, count = [], 0
    for metric in (SOLVE, EXPLOIT):
        pairs = [
            pair
            for arm in lessons(evidence)
            for pair in zip(evidence.values[f"{arm}-1"][metric], evidence.values[arm][EXPLOIT], strict=True)
            if None not in pair
        ]
        starts, ends = zip(*pairs, strict=True) if pairs else ((), ())
        if len(set(starts)) < 2 or len(set(ends)) < 2:
            return ""
        rhos.append(number(float(spearmanr(starts, ends)[0])))  # pyright: ignore[reportArgumentType]
        count = len(pairs)
    return (
        f"{evidence.preset}: over {count} runs with a lesson, Spearman's correlation of held-out exploits at the end is {rhos[0]} "
        f"with what is solved right after the lesson, and {rhos[1]} with what is exploited then."
    )


def lessons_figure(every: Sequence[Evidence], path: Path) -> Path:
    """Draw what runs solve right after their lesson against what they exploit at their end; a dot is a run."""
    x, y = "solve, right after the lesson", "exploit fires at the end,\nheld-out modes"
    with panels(path, len(every), 3.6, x, y, sharex=True) as axes:
        for ax, evidence in zip(axes, every, strict=True):
            plain = [("vanilla", "base")] if "vanilla" in evidence.values else []
            for arm, start in (*plain, *((arm, f"{arm}-1") for arm in lessons(evidence))):
                color, marker = MARKS.get(arm, (VERMILLION, "."))
                label = "no lesson" if arm == "vanilla" else arm
                starts, ends = evidence.values[start][SOLVE], evidence.values[arm][EXPLOIT]
                ax.scatter(starts, ends, s=16, color=color, marker=marker, alpha=0.7, label=label)  # pyright: ignore[reportArgumentType]
            ax.set_title(f"{evidence.preset}, {len(evidence.seeds)} seeds")
    return path


def monitors(evidence: Evidence) -> str:
    """Return <preset>-monitors.md: what each probe sees of the run's own rollouts at its beginning and at its end."""
    if not PENALIZED.keys() & evidence.values.keys():
        return ""
    header = ["arm", "n", "mask AUROC, first", "last", "recall, first", "last", "fires on clean, first", "last"]
    header += ["exploit, held out", "solve"]
    body = []
    for arm, row in evidence.values.items():
        if "late_auroc" in row:
            quality = [number(mean(row[key])) for name in ("auroc", "recall", "fire_clean") for key in (name, f"late_{name}")]
            exploit = evidence.summary(arm, EXPLOIT)
            body.append([arm, str(exploit["n"]), *quality, interval(exploit), interval(evidence.summary(arm, SOLVE))])
    return markdown_table(header, body)


def signs(evidence: Evidence, arm: str) -> list[tuple[float, float]]:
    """Return ``(share flagged in the last steps, exploit rate of the mode that is exploited most)`` of an arm's runs."""
    row = evidence.values.get(arm, {})
    worst = zip(*(row[f"deploy_exploit_{mode}"] for mode in evidence.modes), strict=True) if row else ()
    pairs = zip(row.get("late_flagged", []), worst, strict=False)
    return [(share, max(rates)) for share, rates in pairs if share is not None and None not in rates]  # pyright: ignore


def sign(evidence: Evidence) -> str:
    """Return <preset>-sign.md: how many quiet and loud runs of each arm are broken; empty without such runs."""
    body = []
    for arm in SIGNED:
        if points := signs(evidence, arm):
            quiet, loud = ([worst for share, worst in points if (share > LOUD) is side] for side in (False, True))
            counts = [str(n) for runs in (quiet, loud) for n in (len(runs), sum(worst > BROKEN for worst in runs))]
            body.append([arm, str(len(points)), *counts])
    header = ["arm", "runs", f"quiet (at most {number(LOUD)} flagged at the end)", "of these broken", "loud", "of these broken"]
    return markdown_table(header, body) if body else ""


def sign_figure(every: Sequence[Evidence], path: Path) -> Path:
    """Draw what a run still flags at its end against the mode that it exploits most; a dot is a run."""
    x, y = f"share of rollouts flagged\nin the last {AT_END} steps", "exploit rate of the mode\nthat is exploited most"
    with panels(path, len(every), 3.4, x, y, x_is_rate=False) as axes:
        for ax, evidence in zip(axes, every, strict=True):
            for arm, color, marker in zip(SIGNED, (BLUE, ORANGE, SKY, VERMILLION, PURPLE), "ovsx^", strict=True):
                if points := signs(evidence, arm):
                    ax.scatter(*zip(*points, strict=True), s=16, color=color, marker=marker, alpha=0.7, label=arm)
            ax.axvline(LOUD, color="gray", linestyle=":", linewidth=0.8)
            ax.set_title(f"{evidence.preset}, {len(evidence.seeds)} seeds")
    return path


MAPPED = {
    "vanilla": (VERMILLION, "."), "sees-0-quarantine-fast": (PURPLE, "^"), "filter-canary-run": (BLUE, "o"),
    "filter-act": (ORANGE, "P"), "penalty-act": (ORANGE, "v"), "filter-full": (GREEN, "P"), "penalty-full": (GREEN, "v"),
    "sees-known": (SKY, "X"), "sees-known-quarantine-fast": (PURPLE, "X"), "taught-honest": (BLUE, "*"),
}  # fmt: skip
"""Methods of the map, by what they know."""

SIZED = {
    "base": ("gray", "."), "vanilla": (VERMILLION, "."), "sees-0-quarantine-fast": (PURPLE, "^"), "sees-known": (SKY, "X"),
    "sees-known-quarantine-fast": (PURPLE, "X"), "filter-canary-run": (BLUE, "o"), "filter-full": (GREEN, "P"),
}  # fmt: skip
"""Methods that are compared at several sizes."""
TITLE = 40
"""Letters of a line of a title."""


def seen(evidence: Evidence) -> float:
    """Return how well ten pairs tell hacks in a world: the AUROC of ``SEEN``'s score over the first steps, in the mean."""
    return float(mean(evidence.values[SEEN]["auroc"]) or 0.0)


def mapped(every: Sequence[Evidence]) -> list[Evidence]:
    """Return the worlds that differ in the persona alone, in the order of ``seen``; none if fewer than three were run with it."""
    some = [evidence for evidence in every if evidence.preset in DIAL and SEEN in evidence.values]
    return sorted(some, key=seen) if len(some) > 2 else []


def map_table(every: Sequence[Evidence]) -> str:
    """Return map.md: held-out exploit / solve of each method in each world, by what the method knows."""
    header, body = ["arm", *(f"{evidence.preset} (AUROC {number(seen(evidence))})" for evidence in every)], []
    for budget, arms in BUDGETS.items():
        ran = [arm for arm in dict.fromkeys(arms) if any(arm in evidence.values for evidence in every)]
        body += [[f"*{budget}*", *("" for _ in every)]] if ran else []
        body += [[arm, *(_both(evidence, arm) for evidence in every)] for arm in ran]
    return markdown_table(header, body)


def _both(evidence: Evidence, arm: str) -> str:
    """Return an arm's held-out exploit with its interval, and what it solves."""
    if arm not in evidence.values:
        return ""
    return f"{interval(evidence.summary(arm, EXPLOIT))} / {number(evidence.summary(arm, SOLVE)['mean'])}"


def _draw_methods(
    axes: Sequence[Axes],
    worlds: Sequence[tuple[int | float, Evidence]],
    marks: Mapping[str, tuple[str, str]],
    moved: Callable[[np.ndarray, float], np.ndarray],
) -> None:
    """Draw exploit and solve of each method at the numbers of ``worlds``, ``moved`` a little, so that no bar hides another."""
    for ax, metric, what in zip(axes, (EXPLOIT, SOLVE), ("exploit fires, held-out modes", "solve, all modes"), strict=True):
        for i, (arm, (color, marker)) in enumerate(marks.items()):
            if ran := [(x, evidence) for x, evidence in worlds if arm in evidence.values]:
                at = moved(np.array([x for x, _ in ran]), i - len(marks) / 2)
                means = [evidence.summary(arm, metric) for _, evidence in ran]
                draw_means(ax, at, means, color=color, marker=marker, markersize=5, linewidth=0.8, label=arm)
        named = textwrap.fill(", ".join(evidence.preset for _, evidence in worlds), TITLE, break_on_hyphens=False)
        ax.set_title(f"{what}:\n{named}")


def map_figure(every: Sequence[Evidence], path: Path) -> Path:
    """Draw exploit and solve of each method against how well ten pairs tell hacks in the world; bars are intervals."""
    worlds = mapped(every)
    x = f"AUROC of ten pairs' score ({SEEN})\non the first {EARLY} steps' rollouts"
    with panels(path, 2, 4.0, x, "", x_is_rate=False, sharex=True, sharey=False) as axes:
        _draw_methods(axes, [(seen(evidence), evidence) for evidence in worlds], MAPPED, lambda x, place: x + 0.002 * place)
        for evidence in worlds:
            axes[0].annotate(evidence.preset, (seen(evidence), 1.0), ha="center", fontsize=6)
    return path


def sized(every: Sequence[Evidence]) -> list[tuple[int, Evidence]]:
    """Return the runs that differ in the size of the base model alone, with its parameters, by size; none of fewer than three."""
    some = []
    for evidence in (one for one in every if one.preset in PRESETS):
        settings = PRESETS[evidence.preset]
        usual = replace(PRESETS["strong"], preset=settings.preset, warm=settings.warm)
        if settings == usual:
            some.append((settings.warm.model.parameters, evidence))
    return sorted(some, key=lambda one: one[0]) if len(some) > 2 else []


def size_table(every: Sequence[Evidence]) -> str:
    """Return size.md: held-out exploit / solve of each arm at each size."""
    worlds = sized(every)
    arms = [arm for arm in SIZED if any(arm in evidence.values for _, evidence in worlds)]
    header = ["arm", *(f"{size:,} parameters" for size, _ in worlds)]
    cells = [[_both(evidence, arm) for _, evidence in worlds] for arm in arms]
    return markdown_table(header, [[arm, *row] for arm, row in zip(arms, cells, strict=True)])


def size_figure(every: Sequence[Evidence], path: Path) -> Path:
    """Draw exploit and solve of each arm against the parameters of the base model; bars are intervals."""
    worlds = sized(every)
    with panels(path, 2, 3.6, "parameters of the model", "", x_is_rate=False, sharex=True, sharey=False) as axes:
        _draw_methods(axes, worlds, SIZED, lambda x, place: x * 1.03**place)
        for ax in axes:
            ax.set_xscale("log")
            ax.set_xticks([size for size, _ in worlds], [f"{size:,}" for size, _ in worlds])
            ax.set_xticks([], minor=True)
    return path


def texts(evidence: Evidence, predictions: Predictions | None) -> dict[str, str]:
    """Return a preset's texts by the ends of their file names; a text is empty if no run answers its question."""
    judged, tested = [arm for arm in METHODS if arm in evidence.values][-1:], ""
    if predictions is not None and predictions.apply_to(evidence.preset, evidence.provenance["settings_hash"], evidence.seeds):
        tested = predictions_markdown(predictions, outcomes(predictions, evidence.preset, evidence.seeded()))
        judged = [predictions.method] if predictions.method is not None else judged
    return {
        "": table(evidence),
        "-recall": f"- {recall_sentence(evidence)}\n" if flagged(evidence) else "",
        "-goals": "".join(goals(evidence, arm) for arm in judged if evidence.preset in PRESETS),
        "-coverage": "".join(f"- {coverage_sentence(evidence, arm)}\n" for arm in COVERED if coverage(evidence, arm)),
        "-monitors": monitors(evidence),
        "-sign": sign(evidence),
        "-lessons": f"- {said}\n" if len(lessons(evidence)) > 1 and (said := lessons_sentence(evidence)) else "",
        "-tests": tested,
    }


def reports(folder: Path) -> list[Path]:
    """Return the reports of presets in a folder; ``ValueError`` if there is none."""
    if not (paths := [path for preset in PRESETS if (path := folder / f"{preset}.json").is_file()]):
        raise ValueError(f"{folder} has no report of a preset: give a folder that `evidence` wrote, as docs/results/size")
    return paths


def write_evidence(
    roots: Mapping[Path, Sequence[int]], to: Path, predictions: Predictions | None = None, beside: Sequence[Path] = ()
) -> list[Path]:
    """Write the report of the given seeds of finished run folders, and fill the pages that show it; return the files.

    Outcomes of ``predictions`` are told if they are of these settings and seeds. Reports in the folders ``beside`` are of other
    sizes of the base model, and stand in the figure and the table of sizes. Files and figures of an earlier report in ``to`` that
    this one does not have are removed.

    Raises:
        ValueError: Runs are broken, two reports are of one preset, there is no report in a folder, or a file would be replaced that
            is of no report, or of one of those beside.
    """
    others = [Evidence.read(path) for folder in beside for path in reports(folder)]
    every = [collect(load_runs(root, seeds)) for root, seeds in roots.items()]
    if len({evidence.preset for evidence in (*every, *others)}) < len(every) + len(others):
        raise ValueError("two reports are of one preset: give one of each")
    if any(folder.samefile(to) for folder in beside if to.exists()):
        raise ValueError(f"the reports in {to} stand beside this one, which would replace them: give another --to")
    files, stale = dict[str, str](), []
    for evidence in every:
        stem = evidence.preset.replace(":", "-")  # of a world of one's own
        said = {f"{stem}{end}.md": text for end, text in texts(evidence, predictions).items()}
        stale += [name for name, text in said.items() if not text]
        files |= {f"{stem}.json": compact(asdict(evidence))} | {name: text for name, text in said.items() if text}
    begun = any((to / name).exists() for name in files if name.endswith(".json"))  # which are written first
    for preset in PRESETS.keys() - {evidence.preset for evidence in every}:
        stale += [f"{preset}.json", *(f"{preset}{end}.md" for end in texts(every[0], None))]
    worlds, sizes = mapped(every), sized([*every, *others])
    figures = (
        ("fronts", fronts_figure, True),
        ("recall", recall_figure, any(map(flagged, every))),
        ("coverage", coverage_figure, any(coverage(evidence, arm) for evidence in every for arm in COVERED)),
        ("rates", rates_figure, all(len(rates(evidence, plain)) > 1 for evidence in every for plain in RATED)),
        ("lessons", lessons_figure, all(len(lessons(evidence)) > 1 for evidence in every)),
        ("sign", sign_figure, any(signs(evidence, arm) for evidence in every for arm in SIGNED)),
        ("map", map_figure, bool(worlds)),
        ("size", lambda every, path: size_figure([*every, *others], path), bool(sizes)),
    )
    tables = {"map.md": map_table(worlds) if worlds else "", "size.md": size_table([*every, *others]) if sizes else ""}
    files |= {name: text for name, text in tables.items() if text}
    stale += [*(f"{name}.png" for name, _, shown in figures if not shown), *(name for name, text in tables.items() if not text)]
    earlier = (to / "fronts.png").exists()  # which every report has: without it these names are of a user's own files
    if not (earlier or begun) and (taken := [name for name in files if (to / name).exists()]):
        raise ValueError(f"{to / taken[0]} is of no report, and would be replaced: give the report a folder of its own with --to")
    to.mkdir(parents=True, exist_ok=True)
    written = write_texts(to, files)
    for name in stale if earlier else ():  # of an earlier report, beside which they would be read
        (to / name).unlink(missing_ok=True)
    written += [draw(every, to / f"{name}.png") for name, draw, shown in figures if shown]
    return [*written, *update_showing(to)]
