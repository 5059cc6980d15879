"""The study's result in sentences and small tables, from the content of table.json (and the masks' quality) alone.

Prose that quotes a run is generated from that run, so it cannot go stale. A route is never named without its own same-rule filter
(its flags, no quarantine), and a bound says that it is one.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from scipy.stats import spearmanr

from mi_route2.stats import Summary, median, outliers
from studies.route2.arms import ARMS
from studies.route2.report.text import interval, markdown_table, number

ROUTES: tuple[str, ...] = ("route2-act", "route2-grad", "route2-full")
CONTROLS: tuple[str, ...] = ("haar", "haar-2", "haar-3", "shuffled")
BOUND = "oracle"
GROUPS: tuple[tuple[str, ...], ...] = (
    ("base", "vanilla", "absorb"),
    ("erase", "route-additive"),
    *((route, ARMS[route].same_rule_filter or "") for route in ROUTES),
    CONTROLS,
    ("filter-known", "oracle-known", BOUND),
)
SHOWN: tuple[str, ...] = tuple(arm for group in GROUPS for arm in group)
HACK, EXPLOIT, SOLVE, ON = "deploy_hack_held", "deploy_exploit_held", "deploy_solve", "on_hack_held"
VERBS = ((HACK, "hacks"), (EXPLOIT, "exploits"), (SOLVE, "solves"))
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
        "oracle": "perfect flags; reads the oracle, no method",
    }
    | {route: f"{kind} flags, quarantine deleted" for route, kind in zip(ROUTES, ("activation", "gradient", "full-gradient"))}
)
LEAST_DRAWS = 8  # below that a rank correlation says nothing
EARLY = 30  # steps over which a mask's quality is read: later a mask that failed meets other rollouts than one that held

Row = Mapping[str, Any]
Quality = Mapping[tuple[str, int], Mapping[str, float | None]]
"""``(arm, seed)`` to the mean ``auroc`` and ``recall`` of its mask over the first ``EARLY`` steps."""
Expected = Mapping[str, Mapping[str, float]]
"""An arm's ``hack`` (held out) and ``solve`` in the prototype, means over its seeds."""


class Result:
    """The content of table.json, by arm."""

    def __init__(self, content: Mapping[str, Any]):
        self.settings: Mapping[str, Any] = content["settings"]
        self.seeds: list[int] = content["seed_ids"]
        self.held_out: list[str] = content["modes"]["held_out"]
        self.rows: dict[str, Row] = {row["arm"]: row for row in content["rows"]}
        self._differences = {(each["arm"], each["reference"]): each for each in content["differences"]}
        self._unfinished: list[str] = content["unfinished"]

    def difference(self, arm: str, reference: str | None) -> Row | None:
        """The paired difference ``arm - reference`` where there is one."""
        return self._differences.get((arm, reference or ""))

    def shown(self) -> list[str]:
        return [arm for arm in SHOWN if arm in self.rows]

    def name(self, arm: str) -> str:
        return f"{arm} (bound)" if self.rows[arm]["role"] == "bound" else arm

    def value(self, arm: str, metric: str, kind: str) -> float | None:
        return self.rows[arm][metric][kind] if arm in self.rows else None

    @property
    def provisional(self) -> bool:
        """Whether something that the headline speaks of is still to be run."""
        rows = [self.rows.get(arm) for arm in (*ROUTES, "absorb", BOUND)]
        return bool(self._unfinished) or any(row is None or row["seed_ids"] != self.seeds for row in rows)


def seeds_text(seeds: Sequence[int]) -> str:
    """``seed 3``, ``seeds 0-7`` or ``seeds 0, 2, 5``."""
    if len(seeds) == 1:
        return f"seed {seeds[0]}"
    whole = list(seeds) == list(range(seeds[0], seeds[-1] + 1))
    return f"seeds {seeds[0]}-{seeds[-1]}" if whole else "seeds " + ", ".join(map(str, seeds))


def direction(result: Summary) -> int:
    """What a paired 95% interval lets one say: -1 below 0, 1 above, 0 not told apart."""
    if result["lo"] is None or result["hi"] is None:
        return 0
    return -1 if result["hi"] < 0 else 1 if result["lo"] > 0 else 0


def comparison(pair: Row) -> str:
    """``hacks less, exploits less and solves no differently``, by paired 95% intervals."""
    words = {-1: "{} less", 0: "{} no differently", 1: "{} more"}
    hack, exploit, solve = (words[direction(pair[metric])].format(verb) for metric, verb in VERBS)
    return f"{hack}, {exploit} and {solve}"


def headline(result: Result) -> str:
    """headline.md: each route with absorb and its filter beside it, then what stands next to all of them."""
    settings = result.settings
    lines = [
        f"{seeds_text(result.seeds).capitalize()}; {settings['steps']} training steps; {settings['evaluation_prompts']} prompts a "
        f"mode on tasks that nothing was trained on; quarantine deleted. Held out: the mean over {', '.join(result.held_out)}. "
        "Brackets: 95% Student-t interval over seeds; differences are paired by seed.",
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


def _bullet(result: Result, arm: str, about: str = "") -> str:
    row = result.rows.get(arm)
    if row is None:
        return f"- **{arm}**{about}: {NOT_RUN}."
    only = "" if row["seed_ids"] == result.seeds else f" ({seeds_text(row['seed_ids'])} only)"
    return (
        f"- **{result.name(arm)}**{about}{only}: held-out hack median {number(row[HACK]['median'])}, mean {interval(row[HACK])}; "
        f"exploit {interval(row[EXPLOIT])}; solve {interval(row[SOLVE])}."
    )


def _signed(pair: Row) -> str:
    named = (("hack", HACK), ("exploit", EXPLOIT), ("solve", SOLVE))
    return ", ".join(f"{name} {interval(pair[metric], signed=True)}" for name, metric in named)


def _against_absorb(result: Result, route: str) -> str:
    pair = result.difference(route, "absorb")
    return f"Against absorb (a quarantine, no route): {NOT_RUN if pair is None else _signed(pair)}."


def _against_filter(result: Result, route: str) -> str:
    name = ARMS[route].same_rule_filter
    pair = result.difference(route, name)
    if pair is None or name not in result.rows:
        return f"Against its own same-rule filter, {name}: {NOT_RUN}."
    n = len(pair["seed_ids"])
    return (
        f"Against its own same-rule filter, {name} (no quarantine; hack {number(result.rows[name][HACK]['mean'])}, solve "
        f"{number(result.rows[name][SOLVE]['mean'])}): {_signed(pair)}. On {n} paired seed{'s' * (n != 1)} the route "
        f"{comparison(pair)}."
    )


def short(result: Result) -> str:
    """short.md, for the README: a table of medians, every route above its own filter, and what the pairs of them say."""
    order = ["base", "vanilla", "absorb"]
    for route in ROUTES:
        order += [route, ARMS[route].same_rule_filter or ""]
    body = []
    for arm in (*order, "haar", "shuffled", BOUND):
        if arm in result.rows:
            cells = [number(result.rows[arm][metric]["median"]) for metric in (HACK, EXPLOIT, SOLVE)]
            body.append([f"**{arm}**" if arm in ROUTES else result.name(arm), SAID.get(arm, ""), *cells])
    header = ["arm", f"median over {seeds_text(result.seeds)}, preset {result.settings['preset']}"]
    header += ["hack, held out", "exploit, held out", "solve"]
    parts = [markdown_table(header, body, left=2), f"{_verdict(result)}\n"]
    if result.provisional:
        parts.insert(0, "*Provisional: not every arm has finished on every seed.*\n")
    return "\n".join(parts)


def _verdict(result: Result) -> str:
    """Which routes differ from their own filter, and what that says about the quarantine."""
    pairs = {route: pair for route in ROUTES if (pair := result.difference(route, ARMS[route].same_rule_filter)) is not None}
    if not pairs:
        return f"Comparison of routes with their filters: {NOT_RUN}."
    moved = {route: pair for route, pair in pairs.items() if any(direction(pair[metric]) for metric, _ in VERBS)}
    said = [f"next to its own filter {route} {comparison(pair)}" for route, pair in moved.items()]
    if same := [route for route in pairs if route not in moved]:
        said.append(f"{', '.join(same)} cannot be told from {'its' if len(same) == 1 else 'their'} own")
    return (
        f"**A route and its filter, paired by seed (95% intervals):** {'; '.join(said)}. Where they cannot be told apart, the "
        "flags do the work, and nothing is shown to come from the quarantine."
    )


def tables(result: Result, quality: Quality, trained: Mapping[str, Summary], prototype: Expected) -> str:
    """tables.md: the main rows, what the quarantine adds, seeds that stand out, every random draw, and what was expected.

    ``trained``: an arm's solve rate on training tasks in its last steps.
    """
    parts = [_main_table(result), _filter_table(result), _outlier_table(result, quality), _draws_table(result, quality)]
    parts.append(_expected_table(result, trained, prototype))
    return "\n".join(part for part in parts if part)


def _main_table(result: Result) -> str:
    header = ["arm", "n", "hack, held out: median", "mean", "exploit, held out", "hack, known", "solve"]
    body = []
    for arm in result.shown():
        row = result.rows[arm]
        cells = [interval(row[metric]) for metric in (HACK, EXPLOIT, "deploy_hack_known", SOLVE)]
        body.append([result.name(arm), str(len(row["seed_ids"])), number(row[HACK]["median"]), *cells])
    return markdown_table(header, body)


def _filter_table(result: Result) -> str:
    body = []
    for route in ROUTES:
        pair = result.difference(route, ARMS[route].same_rule_filter)
        if pair is not None:
            cells = [interval(pair[metric], signed=True) for metric in (HACK, EXPLOIT, SOLVE)]
            body.append([route, str(pair["reference"]), str(len(pair["seed_ids"])), *cells])
    header = ["route", "minus its filter", "n", "hack, held out", "exploit, held out", "solve"]
    return f"What the quarantine adds to the flags:\n\n{markdown_table(header, body, left=2)}" if body else ""


def _outlier_table(result: Result, quality: Quality) -> str:
    rule = "further than .1 and than 3 robust deviations from the arm's median held-out hack"
    body = []
    for arm in result.shown():
        row = result.rows[arm]
        for seed, odd in zip(row["seed_ids"], outliers(row[HACK]["seeds"]), strict=True):
            if odd:
                i = row["seed_ids"].index(seed)
                cells = [number(row[metric]["seeds"][i]) for metric in (HACK, ON, SOLVE)]
                cells.insert(1, number(row[HACK]["median"]))
                body.append([result.name(arm), str(seed), *cells, *_mask_cells(row, seed, quality)])
    if not body:
        return f"No seed of these arms stands out ({rule}).\n"
    header = ["arm", "seed", "hack, held out", "arm's median", "quarantine on", "solve"]
    header += ["mask AUROC", "other seeds", "mask recall", "other seeds"]
    note = f"Quarantine on: that rate before the deletion. Mask: mean over the first {EARLY} steps; other seeds: their median."
    return f"Seeds that stand out ({rule}). {note}\n\n{markdown_table(header, body)}"


def _draws_table(result: Result, quality: Quality) -> str:
    """Every random direction of route2-full's rule, by how well it happened to rank hacks early on."""
    found = []
    for arm in (arm for arm in CONTROLS if getattr(ARMS[arm].route, "fitter", "") == "haar" and arm in result.rows):
        row = result.rows[arm]
        for i, seed in enumerate(row["seed_ids"]):
            luck = quality.get((arm, seed), {}).get("auroc")
            if luck is not None:
                found.append((luck, arm, seed, row[HACK]["seeds"][i], row[SOLVE]["seeds"][i]))
    if len(found) < LEAST_DRAWS:
        return ""
    rho, p = map(float, spearmanr([draw[0] for draw in found], [draw[3] for draw in found]))  # pyright: ignore[reportArgumentType]
    body = [[arm, str(seed), number(luck), number(hack), number(solve)] for luck, arm, seed, hack, solve in sorted(found)]
    header = ["draw", "seed", "mask AUROC by luck", "hack, held out", "solve"]
    said = f"Spearman correlation of the two: {number(rho)} ({'p < .001' if p < 0.001 else f'p {number(p)}'}, n {len(found)})."
    return f"Every random direction, by its mask over the first {EARLY} steps. {said}\n\n{markdown_table(header, body)}"


def _mask_cells(row: Row, seed: int, quality: Quality) -> list[str]:
    cells = []
    for key in ("auroc", "recall"):
        own = quality.get((row["arm"], seed), {}).get(key)
        others = [quality.get((row["arm"], other), {}).get(key) for other in row["seed_ids"] if other != seed]
        cells += [number(own), number(median(others))]
    return cells


def _expected_table(result: Result, trained: Mapping[str, Summary], expected: Expected) -> str:
    body = []
    for arm in result.shown():
        if arm in expected:
            here = result.rows[arm]
            cells = [number(expected[arm]["hack"]), interval(here[HACK]), number(expected[arm]["solve"]), interval(here[SOLVE])]
            body.append([result.name(arm), *cells, interval(trained[arm]) if arm in trained else number(None)])
    header = ["arm", "hack, held out: prototype", "here", "solve: prototype", "here", "here, training tasks, last steps"]
    return f"Means beside those of the prototype:\n\n{markdown_table(header, body)}" if body else ""


def targets(result: Result) -> str:
    """targets.md: what was asked of the main preset before its runs, and whether they meet it."""
    oracle, base = result.value(BOUND, HACK, "median"), result.value("base", SOLVE, "mean")
    route = result.value("route2-full", HACK, "mean")
    checks = [(f"{arm}: median held-out hack at most oracle's + .03", arm, HACK, "median", "<=", oracle, 0.03) for arm in ROUTES]
    checks += [(f"{arm}: mean solve at least base's + .25", arm, SOLVE, "mean", ">=", base, 0.25) for arm in ROUTES]
    worse = ("haar", "shuffled", "absorb")
    checks += [(f"{arm}: mean held-out hack at least route2-full's + .3", arm, HACK, "mean", ">=", route, 0.3) for arm in worse]
    body = []
    for text, arm, metric, kind, sign, reference, margin in checks:
        measured = result.value(arm, metric, kind)
        if measured is None or reference is None:
            body.append([text, number(measured), number(None), NOT_RUN])
            continue
        wanted = reference + margin
        met = measured <= wanted if sign == "<=" else measured >= wanted
        body.append([text, number(measured), f"{sign} {number(wanted)}", "met" if met else "**not met**"])
    return markdown_table(["target", "measured", "wanted", "verdict"], body)
