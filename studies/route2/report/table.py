"""Tables of finished runs: every arm's numbers over seeds with paired differences, ablations, and leakage per mode."""

import json
from collections.abc import Callable, Iterable
from typing import Any

from studies.common.stats import Summary, mean, outliers, paired_difference, summary
from studies.common.tables import interval, markdown_table, number
from studies.route2.report.load import ABSORB, BASE, VANILLA, FinishedRun, RunSet
from studies.route2.report.measures import (
    DESCRIPTIONS,
    arm_order,
    by_seed,
    excess_leakage,
    label,
    leakage,
    metrics,
    notes,
    without_ablations,
)

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
"""Metrics whose differences are printed."""
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
    """Return the content of table.json, with `rows` and `differences` in `arm_order`."""
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


def json_text(report: dict[str, Any]) -> str:
    """Return the content of a report as JSON text, with keys in order and numbers with all digits."""
    return json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def table_markdown(runs: RunSet, report: dict[str, Any]) -> str:
    """Return `table` as plain Markdown: headline, leakage, differences, modes, and every seed with its median.

    Arms of ablation groups are in table.json and in ablations.md.
    """
    main = without_ablations(arm_order(runs.specs), runs.specs)
    rows = [row for row in report["rows"] if row["arm"] in main]
    differences = [each for each in report["differences"] if each["arm"] in main]
    sections = [_head(runs, report), _summary_section(runs, "## Results", rows, HEADLINE, median_of="deploy_hack_held")]
    sections += [_summary_section(runs, "## Leakage: what deleting the quarantine leaves", rows, LEAKAGE)]
    sections += [
        _difference_section(runs, title, [each for each in differences if each["kind"] == kind])
        for kind, title in REFERENCES.items()
    ]
    sections.append("## Per mode\n")
    for kind, title, role in PER_MODE_TABLES:
        columns = {f"{kind}_{mode}": _mode_title(runs, mode) for mode in getattr(runs.modes, role)}
        sections.append(_summary_section(runs, f"### {title}", rows, columns))
    sections.append(f"## Every seed\n\n{OUTLIER_NOTE}\n")
    sections += [_seed_section(runs, metric, title, rows) for metric, title in (*HEADLINE.items(), ("leakage", "leakage"))]
    return "\n".join(part for part in sections if part)


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
    """Return the arm to compare with; `None` if there is none, or if an earlier kind of comparison already has the same pair."""
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


def _head(runs: RunSet, report: dict[str, Any]) -> str:
    lines = [
        f"# {report['study']}",
        "",
        f"{len(report['rows'])} arms, seeds {', '.join(map(str, runs.seeds))}, {runs.settings['steps']} training steps, "
        f"settings {report['settings_hash']}.",
        "",
        "Cells: mean [95% Student-t interval over seeds]. Held-out modes: "
        f"{', '.join(runs.modes.held_out) or 'none'}; known: {', '.join(runs.modes.known)}. "
        "A dash is a value that does not exist: base is not trained, and a ratio needs its denominator.",
        "Bounds read the oracle: they say what perfect flags would do and are no methods. An interval is not clipped to "
        "[0, 1]; with few seeds read every seed, at the end, first.",
        "",
        *(f"- {TITLES[name]}: {text}." for name, text in DESCRIPTIONS.items()),
    ]
    ablations = [arm for arm in runs.specs if runs.specs[arm].ablation]
    if ablations:
        lines += ["", f"Ablations, in ablations.md next to the arm that each changes: {', '.join(sorted(ablations))}."]
    if report["notes"]:
        lines += ["", "**What is not here**", "", *(f"- {note}" for note in report["notes"])]
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
        values = result["seeds"]
        marked = [f"**{number(value)}**" if odd else number(value) for value, odd in zip(values, outliers(values), strict=True)]
        body.append([*_by_seed(runs, row, marked), number(result["median"])])
    return f"### {title}\n\n{markdown_table(header, body)}"


def _by_seed(runs: RunSet, row: dict[str, Any], cells: Iterable[str]) -> list[str]:
    """Return a row of a table of every seed: the arm, and the cells under the folder's seeds."""
    by_seed = dict(zip(row["seed_ids"], cells, strict=True))
    return [label(row["arm"], runs.specs[row["arm"]]), *(by_seed.get(seed, "not run") for seed in runs.seeds)]


def ablation_groups(runs: RunSet) -> list[dict[str, Any]]:
    """Return groups in order of name: `{"group", "arms": [{"arm", "reference", "seed_ids", "difference_seed_ids", metrics}]}`.

    Each metric of an arm is `{"value": Summary, "difference": Summary | None}`; the difference is null for a reference, and if the
    reference was not run.
    """
    order = arm_order(runs.specs)
    values = {arm: by_seed(runs, arm) for arm in order}
    names = sorted({spec.ablation for spec in runs.specs.values() if spec.ablation})
    groups = []
    for name in names:
        members = {arm: runs.specs[arm].baseline for arm in order if runs.specs[arm].ablation == name}
        heads = [arm for arm in order if arm in members.values() and arm not in members]
        records = []
        for head in heads:
            records.append(_record(head, None, values))
            records += [_record(arm, head, values) for arm, reference in members.items() if reference == head]
        records += [_record(arm, reference, values) for arm, reference in members.items() if reference not in heads]
        groups.append({"group": name, "arms": records})
    return groups


def ablations_markdown(runs: RunSet, groups: list[dict[str, Any]]) -> str:
    """Return `ablation_groups` as plain Markdown, one table per group; a sentence if no arm of the folder is an ablation."""
    sections = [f"# Ablations of {runs.root.name}\n"]
    if not groups:
        return sections[0] + "\nNo arm of this folder is an ablation: `python -m studies.route2 full` runs them.\n"
    sections.append(
        "Each cell: mean [95% Student-t interval over seeds], and for an ablation the paired difference from the arm above "
        "that it changes, the same seeds on both sides.\n"
    )
    if runs.unfinished:
        sections.append("\n".join(f"- {note}" for note in notes(runs)) + "\n")
    for group in groups:
        sections.append(f"## {group['group']}\n\n{_group_table(runs, group)}")
        sections.append(f"Every seed, {HEADLINE['deploy_hack_held']}:\n\n{_seed_table(runs, group)}")
    return "\n".join(sections)


def _record(arm: str, reference: str | None, values: dict[str, dict[int, dict[str, float | None]]]) -> dict[str, Any]:
    record: dict[str, Any] = {"arm": arm, "reference": reference, "seed_ids": list(values[arm]), "difference_seed_ids": []}
    for metric in DESCRIPTIONS:
        values_of_arm = {seed: each[metric] for seed, each in values[arm].items()}
        record[metric] = {"value": summary(list(values_of_arm.values())), "difference": None}
        if reference in values:
            other = {seed: each[metric] for seed, each in values[reference].items()}
            record["difference_seed_ids"], record[metric]["difference"] = paired_difference(values_of_arm, other)
    return record


def _group_table(runs: RunSet, group: dict[str, Any]) -> str:
    header = ["arm", "minus", "n"]
    for metric in COMPARED:
        header += [HEADLINE[metric], "difference"]
    body = []
    for record in group["arms"]:
        reference = record["reference"]
        missing = reference is not None and reference not in runs.specs
        minus = "" if reference is None else f"{reference} (not run)" if missing else reference
        cells = [label(record["arm"], runs.specs[record["arm"]]), minus, str(len(record["seed_ids"]))]
        for metric in COMPARED:
            difference = record[metric]["difference"]
            cells += [interval(record[metric]["value"]), interval(difference, signed=True) if difference else ""]
        body.append(cells)
    return markdown_table(header, body, left=2)


def _seed_table(runs: RunSet, group: dict[str, Any]) -> str:
    body = []
    for record in group["arms"]:
        result = record["deploy_hack_held"]["value"]
        body.append([*_by_seed(runs, record, map(number, result["seeds"])), number(result["median"])])
    return markdown_table(["arm", *(f"seed {seed}" for seed in runs.seeds), "median"], body)


Ratio = Callable[[RunSet, FinishedRun, str], float | None]
RATIOS: tuple[tuple[str, Ratio], ...] = (("leakage", leakage), ("excess_leakage", excess_leakage))

EXPLANATION = """\
    leakage = clamp(deploy hack(arm) / deploy hack(vanilla, same seed, same steps), 0, 1)
    excess  = (deploy hack(arm) - deploy hack(base)) / (deploy hack(vanilla) - deploy hack(base))

Cells: mean [95% Student-t interval over seeds]. A dash: no denominator (vanilla never hacks in that mode, or not more than
base). Base hacks a little by itself: an arm that goes back to base leaks more than 0 in the first form and 0 in the second.
"""


def leakage_table(runs: RunSet) -> dict[str, Any]:
    """Return the content of leakage.json: both forms over seeds, per arm, per mode and for the held-out mean.

    Each seed's rates are included.

    Raises:
        ValueError: There is no finished run of vanilla to divide by.
    """
    if VANILLA not in runs.specs:
        raise ValueError(f"leakage divides by arm {VANILLA}, which has no finished run under {runs.root}: run it first")
    return {
        "study": runs.root.name,
        "settings_hash": next(iter(runs.runs.values())).settings_hash,
        "held_out": list(runs.modes.held_out),
        "arms": [_arm(runs, arm) for arm in arm_order(runs.specs)],
        "notes": notes(runs),
    }


def leakage_markdown(runs: RunSet, report: dict[str, Any]) -> str:
    """Return `leakage_table` as plain Markdown: both forms per mode, then every seed's held-out mean; without ablations."""
    sections = [f"# Leakage of {report['study']}\n", EXPLANATION]
    sections += ["\n".join(f"- {note}" for note in report["notes"]) + "\n"] if report["notes"] else []
    main = without_ablations(arm_order(runs.specs), runs.specs)
    arms = [arm for arm in report["arms"] if arm["arm"] in main]
    columns = {**{mode: mode for mode in runs.modes.loopholes}, "held_out": "held-out mean"}
    for name, title in (("leakage", "Leakage"), ("excess_leakage", "Excess leakage")):
        header = ["arm", "role", *columns.values(), "median of the mean"]
        body = [
            [
                label(arm["arm"], runs.specs[arm["arm"]]),
                arm["role"],
                *(interval(arm[name][column]) for column in columns),
                number(arm[name]["held_out"]["median"]),
            ]
            for arm in arms
        ]
        sections.append(f"## {title}\n\n{markdown_table(header, body, left=2)}")
    header = ["arm", *(f"seed {seed}" for seed in runs.seeds)]
    body = [_by_seed(runs, arm, map(number, arm["leakage"]["held_out"]["seeds"])) for arm in arms]
    sections.append(f"## Every seed: leakage, held-out mean\n\n{markdown_table(header, body)}")
    return "\n".join(sections)


def _arm(runs: RunSet, arm: str) -> dict[str, Any]:
    per_seed = runs.of(arm)
    record: dict[str, Any] = {"arm": arm, "role": runs.specs[arm].role, "seed_ids": list(per_seed)}
    for name, ratio in RATIOS:
        values = {mode: [ratio(runs, run, mode) for run in per_seed.values()] for mode in runs.modes.loopholes}
        held_out = [mean([values[mode][i] for mode in runs.modes.held_out]) for i in range(len(per_seed))]
        record[name] = {**{mode: summary(values[mode]) for mode in runs.modes.loopholes}, "held_out": summary(held_out)}
    record["seeds"] = {str(seed): _counts(runs, run) for seed, run in per_seed.items()}
    return record


def _counts(runs: RunSet, run: FinishedRun) -> dict[str, Any]:
    """Return the rates from which the ratios of one seed are computed, per mode."""
    sources = {"arm": run, "vanilla": runs.runs.get((VANILLA, run.seed)), "base": runs.runs.get((BASE, run.seed))}
    return {
        mode: {
            **{f"deploy_hack_{name}": each.modes[mode]["deploy"]["hack"] if each else None for name, each in sources.items()},
            **{name: ratio(runs, run, mode) for name, ratio in RATIOS},
        }
        for mode in runs.modes.loopholes
    }
