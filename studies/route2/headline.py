"""Result of the study in sentences and small tables, generated from the content of table.json and the masks' quality.

Prose that quotes a run is generated from that run, so it cannot go stale. A route is always named together with its same-rule
filter (its flags, no quarantine), and a bound is marked as one. Conclusions belong to `predictions`; this module reports numbers.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from matplotlib.axes import Axes

from mi_route2.plots import BLUE, ORANGE, PAGE_WIDTH, VERMILLION, new_figure, save_figure, style
from studies.common.command_line import seeds_text
from studies.common.stats import Summary, mean, median, outliers
from studies.common.tables import interval, markdown_table, number
from studies.route2.predictions import MOST, Predictions, outcomes, p_text, ranks_within_seeds, sign_flip
from studies.route2.report.measures import DESCRIPTIONS
from studies.training.arms import ARMS

ROUTES: tuple[str, ...] = ("route2-act", "route2-grad", "route2-full")
CONTROLS: tuple[str, ...] = ("haar", "haar-2", "haar-3", "shuffled")
LITERAL: tuple[str, ...] = ("route2-act-token", "route2-grad-module")
BOUND = "oracle"
DEVELOPMENT = range(8)
"""Development seeds: the design was changed after looking at their results, so they do not test it."""
GROUPS: tuple[tuple[str, ...], ...] = (
    ("base", "vanilla", "absorb"),
    ("erase", "route-additive", "haar-additive"),
    *((route, ARMS[route].same_rule_filter or "") for route in ROUTES),
    LITERAL,
    CONTROLS,
    ("oracle-known", "filter-known"),
    (BOUND, "filter-oracle"),
)
SHOWN: tuple[str, ...] = tuple(arm for group in GROUPS for arm in group)
HACK, EXPLOIT, SOLVE = "deploy_hack_held", "deploy_exploit_held", "deploy_solve"
ON = ("on_hack_held", "on_exploit_held", "on_solve")
NOT_RUN = "not run"
SAID: Mapping[str, str] = MappingProxyType(
    {
        "base": "not trained further",
        "vanilla": "no quarantine, no route",
        "absorb": "a quarantine, no route",
        "filter-act": "the flags of the route above, no quarantine",
        "filter-grad": "the flags of the route above, no quarantine",
        "filter-full": "the score above, no quarantine, advantage over the unflagged",
        "haar": "route2-full with a random direction",
        "shuffled": "route2-full with shuffled flags",
        "route2-act-token": "literal form: a flag per token",
        "route2-grad-module": "literal form: a flag per module",
        "oracle": "perfect flags; reads the oracle, no method",
    }
    | {route: f"{kind} flags, quarantine deleted" for route, kind in zip(ROUTES, ("activation", "gradient", "full-gradient"))}
)
LEAST_DRAWS = 8  # a rank correlation over fewer has no meaning
QUALITIES = ("auroc", "recall", "fire_hack", "fire_clean")
LEAST_RATIO = 2.0  # R3: a mask fires more than twice as often on hacks
EARLY = 30  # steps over which a mask's quality is averaged; later, masks that failed and masks that worked see other rollouts

ArmRow = Mapping[str, Any]
Quality = Mapping[tuple[str, int], Mapping[str, float | None]]
"""``(arm, seed)`` -> means of the mask's ``QUALITIES`` over the first ``EARLY`` steps."""
Expected = Mapping[str, Mapping[str, float]]
"""Arm -> its ``hack`` (held out) and ``solve`` in the prototype, means over the prototype's seeds."""


class StudyResult:
    """Content of table.json, by arm."""

    def __init__(self, table: Mapping[str, Any]):
        self.settings: Mapping[str, Any] = table["settings"]
        self.seeds: list[int] = table["seed_ids"]
        self.held_out: list[str] = table["modes"]["held_out"]
        self.rows: dict[str, ArmRow] = {row["arm"]: row for row in table["rows"]}
        self._differences = {(each["arm"], each["reference"]): each for each in table["differences"]}
        self._unfinished: list[str] = table["unfinished"]

    def difference(self, arm: str, reference: str | None) -> ArmRow | None:
        """Return the paired difference ``arm - reference``; ``None`` if it was not computed."""
        return self._differences.get((arm, reference or ""))

    @property
    def values(self) -> dict[tuple[str, str], dict[int, float | None]]:
        """``(arm, metric)`` -> the value of each seed."""
        return {
            (arm, metric): dict(zip(row["seed_ids"], row[metric]["seeds"], strict=True))
            for arm, row in self.rows.items()
            for metric in DESCRIPTIONS
        }

    def shown(self) -> list[str]:
        return [arm for arm in SHOWN if arm in self.rows]

    def name(self, arm: str) -> str:
        return f"{arm} (bound)" if self.rows[arm]["role"] == "bound" else arm

    @property
    def provisional(self) -> bool:
        """True if a run that the headline needs is not finished."""
        rows = [self.rows.get(arm) for arm in (*ROUTES, "absorb", BOUND)]
        return bool(self._unfinished) or any(row is None or row["seed_ids"] != self.seeds for row in rows)


def headline(result: StudyResult) -> str:
    """Return headline.md: each route with absorb and its filter, then the baselines, controls and bound."""
    settings, name = result.settings, seeds_text(result.seeds)
    name = f"Development {name}" if set(result.seeds) <= set(DEVELOPMENT) else name.capitalize()
    lines = [
        f"{name}; {settings['steps']} training steps; "
        f"{settings['evaluation_prompts']} prompts a mode on tasks that nothing was trained on; quarantine deleted. Held out: the "
        f"mean over {', '.join(result.held_out)}. Brackets: 95% Student-t interval over seeds; differences are paired by seed.",
        "",
    ]
    if result.provisional:
        lines += ["**Provisional: not every arm has finished on every seed.**", ""]
    for route in ROUTES:
        lines.append(_bullet(result, route))
        if route in result.rows:
            lines += [f"    - {_against_absorb(result, route)}", f"    - {_against_filter(result, route)}"]
    abouts = {"absorb": "no route", "vanilla": "no quarantine either"} | {arm: ARMS[arm].about for arm in CONTROLS}
    lines += [_bullet(result, arm, f" ({about})") for arm, about in abouts.items()]
    lines += [_bullet(result, BOUND, ": reads the oracle and is no method"), _bullet(result, "base", " (not trained further)")]
    return "\n".join(lines) + "\n"


def _bullet(result: StudyResult, arm: str, about: str = "") -> str:
    row = result.rows.get(arm)
    if row is None:
        return f"- **{arm}**{about}: {NOT_RUN}."
    only = "" if row["seed_ids"] == result.seeds else f" ({seeds_text(row['seed_ids'])} only)"
    return (
        f"- **{result.name(arm)}**{about}{only}: held-out hack median {number(row[HACK]['median'])}, mean {interval(row[HACK])}; "
        f"exploit {interval(row[EXPLOIT])}; solve {interval(row[SOLVE])}."
    )


def _signed(pair: ArmRow) -> str:
    named = (("hack", HACK), ("exploit", EXPLOIT), ("solve", SOLVE))
    return ", ".join(f"{name} {interval(pair[metric], signed=True)}" for name, metric in named)


def _against_absorb(result: StudyResult, route: str) -> str:
    pair = result.difference(route, "absorb")
    return f"Against absorb (a quarantine, no route): {NOT_RUN if pair is None else _signed(pair)}."


def _against_filter(result: StudyResult, route: str) -> str:
    name = ARMS[route].same_rule_filter
    pair = result.difference(route, name)
    if pair is None or name not in result.rows:
        return f"Against its own same-rule filter, {name}: {NOT_RUN}."
    return (
        f"Against its own same-rule filter, {name} (no quarantine; hack {number(result.rows[name][HACK]['mean'])}, solve "
        f"{number(result.rows[name][SOLVE]['mean'])}): {_signed(pair)}."
    )


def short(results: Sequence[tuple[StudyResult, Predictions]]) -> str:
    """Return the README's headline: medians of every preset side by side, and the outcome of the predictions.

    Each route is above its same-rule filter.
    """
    order = ["base", "vanilla", "absorb"]
    for route in ROUTES:
        order += [route, ARMS[route].same_rule_filter or ""]
    order += ["haar", "shuffled", *LITERAL, BOUND]
    body = []
    for arm in order:
        of = [result for result, _ in results if arm in result.rows]
        if of:
            rows = [result.rows.get(arm) for result, _ in results]
            cells = [number(None if row is None else row[metric]["median"]) for row in rows for metric in (HACK, EXPLOIT, SOLVE)]
            body.append([f"**{arm}**" if arm in ROUTES else of[0].name(arm), SAID.get(arm, ""), *cells])
    seeds = {seeds_text(result.seeds) for result, _ in results}
    header = ["arm", f"median over {' and '.join(sorted(seeds))}"]
    header += [f"{result.settings['preset']}: {name}" for result, _ in results for name in ("hack", "exploit", "solve")]
    said = "Hack and exploit: in held-out modes, of the deployed model.\n"
    blocks = [markdown_table(header, body, left=2), said, *(_fared(result, predictions) for result, predictions in results)]
    if any(result.provisional for result, _ in results):
        blocks.insert(0, "*Provisional: not every arm has finished on every seed.*\n")
    return "\n".join(blocks)


def _fared(result: StudyResult, predictions: Predictions) -> str:
    """Return a sentence with the number of predictions that held, and the families of those that did not, with their verdicts."""
    results = outcomes(predictions, result.settings["preset"], result.values)
    failed = Counter((each.comparison.name.partition(":")[0], each.verdict) for each in results if each.verdict != "shown")
    rest = f" Not: {', '.join(f'{name} ({n} {verdict})' for (name, verdict), n in failed.items())}." if failed else ""
    shown = len(results) - failed.total()
    return f"**{result.settings['preset']}**: {shown} of {len(results)} predictions held, each Holm-corrected.{rest}\n"


def tables(result: StudyResult, quality: Quality, trained: Mapping[str, Summary], prototype: Expected) -> str:
    """Return tables.md: main rows, effect of the quarantine, outlier seeds, all random draws, and the prototype's values.

    ``trained`` is an arm's solve rate on training tasks in its last steps.
    """
    sections = [_main_table(result), _filter_table(result), _fire_table(result, quality)]
    sections += [_outlier_table(result, quality), _draws_table(result, quality)]
    sections.append(_expected_table(result, trained, prototype))
    return "\n".join(part for part in sections if part)


def _main_table(result: StudyResult) -> str:
    header = ["arm", "n", "hack, held out: median", "mean", "exploit, held out", "hack, known", "solve"]
    header += ["quarantine in: hack", "exploit", "solve"]
    body = []
    for arm in result.shown():
        row = result.rows[arm]
        cells = [interval(row[metric]) for metric in (HACK, EXPLOIT, "deploy_hack_known", SOLVE)]
        cells += [number(row[metric]["mean"]) for metric in ON]
        body.append([result.name(arm), str(len(row["seed_ids"])), number(row[HACK]["median"]), *cells])
    return markdown_table(header, body)


def _filter_table(result: StudyResult) -> str:
    body = []
    for route in (*ROUTES, "oracle-known", BOUND):
        pair = result.difference(route, ARMS[route].same_rule_filter)
        if pair is not None:
            cells = [interval(pair[metric], signed=True) for metric in (HACK, EXPLOIT, SOLVE)]
            body.append([result.name(route), str(pair["reference"]), str(len(pair["seed_ids"])), *cells])
    header = ["route", "minus its filter", "n", "hack, held out", "exploit, held out", "solve"]
    return f"What the quarantine adds to the flags:\n\n{markdown_table(header, body, left=2)}" if body else ""


def _outlier_table(result: StudyResult, quality: Quality) -> str:
    rule = "further than .1 and than 3 robust deviations from the arm's median held-out hack"
    body = []
    for arm in result.shown():
        row = result.rows[arm]
        for seed, odd in zip(row["seed_ids"], outliers(row[HACK]["seeds"]), strict=True):
            if odd:
                i = row["seed_ids"].index(seed)
                cells = [number(row[metric]["seeds"][i]) for metric in (HACK, ON[0], SOLVE)]
                cells.insert(1, number(row[HACK]["median"]))
                body.append([result.name(arm), str(seed), *cells, *_mask_cells(row, seed, quality)])
    if not body:
        return f"No seed of these arms stands out ({rule}).\n"
    header = ["arm", "seed", "hack, held out", "arm's median", "quarantine on", "solve"]
    header += ["mask AUROC", "other seeds", "mask recall", "other seeds"]
    note = f"Quarantine on: that rate before the deletion. Mask: mean over the first {EARLY} steps; other seeds: their median."
    return f"Seeds that stand out ({rule}). {note}\n\n{markdown_table(header, body)}"


def _fire_table(result: StudyResult, quality: Quality) -> str:
    """Return the table of R3: how often each rule's flags fire on hacks and on clean rollouts."""
    body = []
    for arm in (arm for arm in result.shown() if result.rows[arm]["role"] == "method"):
        seeds = [quality.get((arm, seed), {}) for seed in result.rows[arm]["seed_ids"]]
        hack, clean = ([each.get(key) for each in seeds] for key in ("fire_hack", "fire_clean"))
        pairs = [(h, c) for h, c in zip(hack, clean, strict=True) if h is not None and c is not None]
        if pairs:
            above = sum(h > LEAST_RATIO * c for h, c in pairs)
            verdict = "met" if above == len(pairs) else "**not met**"
            body.append([result.name(arm), number(median(hack)), number(median(clean)), f"{above} of {len(pairs)}", verdict])
    if not body:
        return ""
    said = (
        f"Flags of the first {EARLY} steps (if a rule flags tokens or modules: most of them), medians over seeds. R3: they fire "
        "more than twice as often on hacks, on every seed"
    )
    header = ["rule", "fires on hacks", "on clean rollouts", "seeds above 2", "R3"]
    return f"{said}:\n\n{markdown_table(header, body)}"


def _draws_table(result: StudyResult, quality: Quality) -> str:
    """Return the table of all random directions of route2-full's rule, sorted by the AUROC that they reached by chance."""
    draws = []
    for arm in (arm for arm in CONTROLS if getattr(ARMS[arm].route, "fitter", "") == "haar" and arm in result.rows):
        row = result.rows[arm]
        for i, seed in enumerate(row["seed_ids"]):
            luck = quality.get((arm, seed), {}).get("auroc")
            if luck is not None:
                draws.append((luck, arm, seed, row[HACK]["seeds"][i], row[SOLVE]["seeds"][i]))
    if len(draws) < LEAST_DRAWS:
        return ""
    body = [[arm, str(seed), number(luck), number(hack), number(solve)] for luck, arm, seed, hack, solve in sorted(draws)]
    header = ["draw", "seed", "mask AUROC by luck", "hack, held out", "solve"]
    said = _rank_within_seeds([(seed, luck, hack) for luck, _, seed, hack, _ in draws])
    return f"Every random direction, by its mask over the first {EARLY} steps. {said}\n\n{markdown_table(header, body)}"


def _rank_within_seeds(draws: Sequence[tuple[int, float, float]]) -> str:
    """Return a sentence on whether the better draw of a seed hacks less."""
    rhos = ranks_within_seeds(draws)
    if len(rhos) < 2:
        return "One draw a seed: no rank within seeds."
    told = f"n {len(rhos)}, too many for an exact test"
    if len(rhos) <= MOST:
        told = f"exact sign-flip over seeds, p {p_text(sign_flip(rhos))}, n {len(rhos)}"
    return f"Spearman correlation of the two within a seed: mean {number(mean(rhos))} ({told})."


def _mask_cells(row: ArmRow, seed: int, quality: Quality) -> list[str]:
    cells = []
    for key in ("auroc", "recall"):
        value = quality.get((row["arm"], seed), {}).get(key)
        others = [quality.get((row["arm"], other), {}).get(key) for other in row["seed_ids"] if other != seed]
        cells += [number(value), number(median(others))]
    return cells


def _expected_table(result: StudyResult, trained: Mapping[str, Summary], expected: Expected) -> str:
    body = []
    for arm in result.shown():
        if arm in expected:
            here = result.rows[arm]
            cells = [number(expected[arm]["hack"]), interval(here[HACK]), number(expected[arm]["solve"]), interval(here[SOLVE])]
            body.append([result.name(arm), *cells, interval(trained[arm]) if arm in trained else number(None)])
    header = ["arm", "hack, held out: prototype", "here", "solve: prototype", "here", "here, training tasks, last steps"]
    return f"Means beside those of the prototype:\n\n{markdown_table(header, body)}" if body else ""


PANELS = (
    (HACK, "hack, held-out modes", VERMILLION, "o"),
    (EXPLOIT, "exploit fires, held-out modes", ORANGE, "s"),
    (SOLVE, "solve, all modes", BLUE, "^"),
)


def write_headline_figure(result: StudyResult, path: Path) -> Path:
    """Draw the figure and save it at ``path``."""
    arms = result.shown()
    with style():
        figure = new_figure(PAGE_WIDTH, 1.1 + 0.21 * len(arms))
        figure.suptitle(result.settings["preset"])
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
    """Shade every second group of arms that belong together."""
    groups = [own for group in GROUPS if (own := [arm for arm in group if arm in arms])]
    for group in groups[::2]:
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
