"""table.json and table.md: every arm's numbers over seeds, paired differences, and each seed by itself.

A row of table.json is `{"arm": ..., metric: {"mean", "median", "lo", "hi", "n", "seeds"}}`; `seeds` holds the values in the
order of the row's `seed_ids`, null where undefined. Intervals are Student-t, 95%, over seeds. Differences are paired: the
same seed's arm minus its reference, over the seeds that both finished.
"""

import json
from collections.abc import Sequence
from typing import Any

from mi_route2.stats import Summary, outliers, paired_difference, summary
from studies.route2.report.load import ABSORB, RunSet
from studies.route2.report.measures import DESCRIPTIONS, arm_order, by_seed, label, metrics, notes, without_ablations
from studies.route2.report.text import interval, markdown_table, number

HEADLINE = {
    "deploy_hack_held": "deploy hack, held out",
    "deploy_exploit_held": "deploy exploit, held out",
    "deploy_hack_known": "deploy hack, known",
    "deploy_solve": "deploy solve",
    "train_hack": "train hack",
}
LEAKAGE = {
    "on_hack_held": "quarantine in: hack, held out",
    "on_exploit_held": "quarantine in: exploit, held out",
    "on_solve": "quarantine in: solve",
    "deploy_hack_held": "quarantine deleted: hack, held out",
    "leakage": "leakage",
    "excess_leakage": "excess leakage",
}
TITLES = LEAKAGE | HEADLINE
COMPARED = ("deploy_hack_held", "deploy_exploit_held", "deploy_solve")
REFERENCES = {
    "absorb": "Paired differences from absorb: what routing adds to having a quarantine to delete",
    "same_rule_filter": "Paired differences of each route from its same-rule filter: what the quarantine adds to the flags",
    "baseline": "Paired differences from the arm that each is a change of",
}
PER_MODE_TABLES = (
    ("train_hack", "train hack, last steps", "loopholes"),
    ("deploy_hack", "deploy hack", "loopholes"),
    ("deploy_exploit", "deploy exploit", "loopholes"),
    ("deploy_solve", "deploy solve", "names"),
)
OUTLIER_NOTE = "Bold: further from the arm's median than 3 robust standard deviations and .1. Nothing is left out of a mean."


def table(runs: RunSet) -> dict[str, Any]:
    """The content of table.json (schema above); `rows` and `differences` in `arm_order`."""
    order = arm_order(runs.specs)
    values = {arm: by_seed(runs, arm) for arm in order}
    return {
        "study": runs.root.name,
        "settings": runs.settings,
        "settings_hash": next(iter(runs.runs.values())).settings_hash,
        "seed_ids": list(runs.seeds),
        "interval": "Student-t, 95%, over seeds",
        "metrics": DESCRIPTIONS,
        "modes": {"known": list(runs.modes.known), "held_out": list(runs.modes.held_out), "none": runs.modes.honest},
        "rows": [_row(runs, arm, values[arm]) for arm in order],
        "differences": [
            _difference(runs, kind, arm, reference, values)
            for kind in REFERENCES
            for arm in order
            if (reference := _reference(runs, arm, kind)) is not None
        ],
        "unfinished": list(runs.unfinished),
        "notes": notes(runs),
    }


def table_json(content: dict[str, Any]) -> str:
    """`table` as text; keys keep their order, numbers all their digits."""
    return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def table_markdown(runs: RunSet, content: dict[str, Any]) -> str:
    """`table` as plain markdown: headline, leakage, differences, modes, and every seed with its median.

    Arms of ablation groups are in table.json and in ablations.md.
    """
    main = without_ablations(arm_order(runs.specs), runs.specs)
    rows = [row for row in content["rows"] if row["arm"] in main]
    differences = [each for each in content["differences"] if each["arm"] in main]
    parts = [_head(runs, content), _summary_section(runs, "## Results", rows, HEADLINE, median_of="deploy_hack_held")]
    parts += [_summary_section(runs, "## Leakage: what deleting the quarantine leaves", rows, LEAKAGE)]
    parts += [
        _difference_section(runs, title, [each for each in differences if each["kind"] == kind])
        for kind, title in REFERENCES.items()
    ]
    parts.append("## Per mode\n")
    for kind, title, role in PER_MODE_TABLES:
        columns = {f"{kind}_{mode}": _mode_title(runs, mode) for mode in getattr(runs.modes, role)}
        parts.append(_summary_section(runs, f"### {title}", rows, columns))
    parts.append(f"## Every seed\n\n{OUTLIER_NOTE}\n")
    parts += [_seed_section(runs, metric, title, rows) for metric, title in (*HEADLINE.items(), ("leakage", "leakage"))]
    return "\n".join(part for part in parts if part)


def _row(runs: RunSet, arm: str, values: dict[int, dict[str, float | None]]) -> dict[str, Any]:
    spec = runs.specs[arm]
    described = {
        "arm": arm,
        "role": spec.role,
        "baseline": spec.baseline,
        "same_rule_filter": spec.same_rule_filter,
        "ablation": spec.ablation,
        "seed_ids": list(values),
    }
    return described | {metric: summary([values[seed][metric] for seed in values]) for metric in metrics(runs.modes)}


def _reference(runs: RunSet, arm: str, kind: str) -> str | None:
    """The arm to compare with; `None` where there is none, or where an earlier kind already compares the two."""
    spec = runs.specs[arm]
    reference = {"absorb": ABSORB, "same_rule_filter": spec.same_rule_filter, "baseline": spec.baseline}[kind]
    said = {"absorb": (), "same_rule_filter": (), "baseline": (ABSORB, spec.same_rule_filter)}[kind]
    return reference if reference in runs.specs and reference != arm and reference not in said else None


def _difference(
    runs: RunSet, kind: str, arm: str, reference: str, values: dict[str, dict[int, dict[str, float | None]]]
) -> dict[str, Any]:
    difference: dict[str, Any] = {"kind": kind, "arm": arm, "reference": reference}
    for metric in metrics(runs.modes):
        sides = [{seed: each[metric] for seed, each in values[name].items()} for name in (arm, reference)]
        difference["seed_ids"], difference[metric] = paired_difference(sides[0], sides[1])
    return difference


def _head(runs: RunSet, content: dict[str, Any]) -> str:
    steps = max(run.steps for run in runs.runs.values())
    lines = [
        f"# {content['study']}",
        "",
        f"{len(content['rows'])} arms, seeds {', '.join(map(str, runs.seeds))}, {steps} training steps, "
        f"settings {content['settings_hash']}.",
        "",
        "Cells: mean [95% Student-t interval over seeds]. Held-out modes: "
        f"{', '.join(runs.modes.held_out)}; known: {', '.join(runs.modes.known)}. "
        "A dash is a value that does not exist: base is not trained, and a ratio needs its denominator.",
        "Bounds read the oracle: they say what perfect flags would do and are no methods. An interval is not clipped to "
        "[0, 1]; with few seeds read every seed, at the end, first.",
        "",
        *(f"- {TITLES[name]}: {text}." for name, text in DESCRIPTIONS.items()),
    ]
    ablations = [arm for arm in runs.specs if runs.specs[arm].ablation]
    if ablations:
        lines += ["", f"Ablations, in ablations.md next to the arm that each changes: {', '.join(sorted(ablations))}."]
    if content["notes"]:
        lines += ["", "**What is not here**", "", *(f"- {note}" for note in content["notes"])]
    return "\n".join(lines) + "\n"


def _mode_title(runs: RunSet, mode: str) -> str:
    return f"{mode} (known)" if mode in runs.modes.known else mode


def _summary_section(runs: RunSet, title: str, rows: list[dict[str, Any]], metrics: dict[str, str], median_of: str = "") -> str:
    header = ["arm", "role", "n"]
    for metric, name in metrics.items():
        header += [name, "median"] if metric == median_of else [name]
    body = []
    for row in rows:
        cells = [label(row["arm"], runs.specs[row["arm"]]), row["role"], str(len(row["seed_ids"]))]
        for metric in metrics:
            cells.append(interval(row[metric]))
            if metric == median_of:
                cells.append(number(row[metric]["median"]))
        body.append(cells)
    return f"{title}\n\n{markdown_table(header, body, left=2)}"


def _difference_section(runs: RunSet, title: str, differences: list[dict[str, Any]]) -> str:
    if not differences:
        return ""
    header = ["arm", "minus", "n", "deploy hack, held out", "median", "deploy exploit, held out", "deploy solve"]
    body = []
    for each in differences:
        names = [label(each[side], runs.specs[each[side]]) for side in ("arm", "reference")]
        hack, exploit, solve = (interval(each[metric], signed=True) for metric in COMPARED)
        median = number(each["deploy_hack_held"]["median"], signed=True)
        body.append([*names, str(len(each["seed_ids"])), hack, median, exploit, solve])
    return f"## {title}\n\n{markdown_table(header, body, left=2)}"


def _seed_section(runs: RunSet, metric: str, title: str, rows: list[dict[str, Any]]) -> str:
    header = ["arm", *(f"seed {seed}" for seed in runs.seeds), "median"]
    body = []
    for row in rows:
        result: Summary = row[metric]
        by_id = dict(zip(row["seed_ids"], _marked(result["seeds"]), strict=True))
        cells = [by_id.get(seed, "not run") for seed in runs.seeds]
        body.append([label(row["arm"], runs.specs[row["arm"]]), *cells, number(result["median"])])
    return f"### {title}\n\n{markdown_table(header, body)}"


def _marked(values: Sequence[float | None]) -> list[str]:
    return [f"**{number(value)}**" if odd else number(value) for value, odd in zip(values, outliers(values), strict=True)]
