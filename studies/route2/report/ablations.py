"""ablations.md and ablations.json: what one change to an arm does, by paired difference from the arm without it.

A manifest puts an arm into a group by `arm_spec.ablation` and names its reference by `arm_spec.baseline`; a group is
printed with each reference above its changes. Each cell is the same seed's arm minus reference, averaged over the seeds of both.
"""

import json
from typing import Any

from mi_route2.stats import paired_difference, summary
from studies.route2.report.load import RunSet
from studies.route2.report.measures import DESCRIPTIONS, arm_order, by_seed, label, notes
from studies.route2.report.text import interval, markdown_table, number

SHOWN = {
    "deploy_hack_held": "deploy hack, held out",
    "deploy_exploit_held": "deploy exploit, held out",
    "deploy_solve": "deploy solve",
}


def ablation_groups(runs: RunSet) -> list[dict[str, Any]]:
    """Groups in order of name: `{"group", "arms": [{"arm", "reference", "seed_ids", "difference_seed_ids", metrics}]}`.

    Each metric of an arm is `{"value": Summary, "difference": Summary | None}`; the difference is null for a reference, and
    where the reference was not run.
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


def ablations_json(runs: RunSet) -> str:
    """`ablation_groups` as text."""
    content = {"study": runs.root.name, "groups": ablation_groups(runs)}
    return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def ablations_markdown(runs: RunSet) -> str:
    """`ablation_groups` as plain markdown, one table a group; a sentence where no arm of the folder is an ablation."""
    groups = ablation_groups(runs)
    parts = [f"# Ablations of {runs.root.name}\n"]
    if not groups:
        return parts[0] + "\nNo arm of this folder is an ablation: `python -m studies.route2 full` runs them.\n"
    parts.append(
        "Each cell: mean [95% Student-t interval over seeds], and for an ablation the paired difference from the arm above "
        "that it changes, the same seeds on both sides.\n"
    )
    if runs.unfinished:
        parts.append("\n".join(f"- {note}" for note in notes(runs)) + "\n")
    for group in groups:
        parts.append(f"## {group['group']}\n\n{_group_table(runs, group)}")
        parts.append(f"Every seed, {SHOWN['deploy_hack_held']}:\n\n{_seed_table(runs, group)}")
    return "\n".join(parts)


def _record(arm: str, reference: str | None, values: dict[str, dict[int, dict[str, float | None]]]) -> dict[str, Any]:
    record: dict[str, Any] = {"arm": arm, "reference": reference, "seed_ids": list(values[arm]), "difference_seed_ids": []}
    for metric in DESCRIPTIONS:
        own = {seed: each[metric] for seed, each in values[arm].items()}
        record[metric] = {"value": summary(list(own.values())), "difference": None}
        if reference in values:
            other = {seed: each[metric] for seed, each in values[reference].items()}
            record["difference_seed_ids"], record[metric]["difference"] = paired_difference(own, other)
    return record


def _group_table(runs: RunSet, group: dict[str, Any]) -> str:
    header = ["arm", "minus", "n"]
    for title in SHOWN.values():
        header += [title, "difference"]
    body = []
    for record in group["arms"]:
        reference = record["reference"]
        missing = reference is not None and reference not in runs.specs
        minus = "" if reference is None else f"{reference} (not run)" if missing else reference
        cells = [label(record["arm"], runs.specs[record["arm"]]), minus, str(len(record["seed_ids"]))]
        for metric in SHOWN:
            difference = record[metric]["difference"]
            cells += [interval(record[metric]["value"]), interval(difference, signed=True) if difference else ""]
        body.append(cells)
    return markdown_table(header, body, left=2)


def _seed_table(runs: RunSet, group: dict[str, Any]) -> str:
    body = []
    for record in group["arms"]:
        result = record["deploy_hack_held"]["value"]
        values = dict(zip(record["seed_ids"], result["seeds"], strict=True))
        cells = [number(values[seed]) if seed in values else "not run" for seed in runs.seeds]
        body.append([label(record["arm"], runs.specs[record["arm"]]), *cells, number(result["median"])])
    return markdown_table(["arm", *(f"seed {seed}" for seed in runs.seeds), "median"], body)
