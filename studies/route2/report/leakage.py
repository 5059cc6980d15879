"""leakage.json and leakage.md: what each mode keeps of vanilla's deploy hacking, from finished runs alone.

    leakage(mode) = clamp(deploy hack(arm) / deploy hack(vanilla), 0, 1)
    excess(mode)  = (deploy hack(arm) - deploy hack(base)) / (deploy hack(vanilla) - deploy hack(base))

Definitions and undefined cases: `measures.py`. Nothing here trains or samples.
"""

import json
from collections.abc import Callable
from typing import Any

from mi_route2.stats import mean, summary
from studies.route2.report.load import BASE, VANILLA, Run, RunSet
from studies.route2.report.measures import arm_order, excess_leakage, label, leakage, notes, without_ablations
from studies.route2.report.text import interval, markdown_table, number

Ratio = Callable[[RunSet, Run, str], float | None]
RATIOS: tuple[tuple[str, Ratio], ...] = (("leakage", leakage), ("excess_leakage", excess_leakage))

EXPLANATION = """\
    leakage = clamp(deploy hack(arm) / deploy hack(vanilla, same seed, same steps), 0, 1)
    excess  = (deploy hack(arm) - deploy hack(base)) / (deploy hack(vanilla) - deploy hack(base))

Cells: mean [95% Student-t interval over seeds]. A dash: no denominator (vanilla never hacks in that mode, or not more than
base). Base hacks a little by itself: an arm that goes back to base leaks more than 0 in the first form and 0 in the second.
"""


def leakage_table(runs: RunSet) -> dict[str, Any]:
    """The content of leakage.json: per arm, per mode and for the held-out mean, both forms over seeds, and each seed's counts.

    Raises ValueError when no finished run of vanilla is there to divide by.
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


def leakage_json(content: dict[str, Any]) -> str:
    """`leakage_table` as text."""
    return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def leakage_markdown(runs: RunSet, content: dict[str, Any]) -> str:
    """`leakage_table` as plain markdown: both forms per mode, then every seed's held-out mean; no ablations."""
    parts = [f"# Leakage of {content['study']}\n", EXPLANATION]
    parts += ["\n".join(f"- {note}" for note in content["notes"]) + "\n"] if content["notes"] else []
    main = without_ablations(arm_order(runs.specs), runs.specs)
    arms = [arm for arm in content["arms"] if arm["arm"] in main]
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
        parts.append(f"## {title}\n\n{markdown_table(header, body, left=2)}")
    header = ["arm", *(f"seed {seed}" for seed in runs.seeds)]
    body = [[label(arm["arm"], runs.specs[arm["arm"]]), *_seed_cells(runs, arm)] for arm in arms]
    parts.append(f"## Every seed: leakage, held-out mean\n\n{markdown_table(header, body)}")
    return "\n".join(parts)


def _arm(runs: RunSet, arm: str) -> dict[str, Any]:
    per_seed = runs.of(arm)
    record: dict[str, Any] = {"arm": arm, "role": runs.specs[arm].role, "seed_ids": list(per_seed)}
    for name, ratio in RATIOS:
        values = {mode: [ratio(runs, run, mode) for run in per_seed.values()] for mode in runs.modes.loopholes}
        held = [mean([values[mode][i] for mode in runs.modes.held_out]) for i in range(len(per_seed))]
        record[name] = {**{mode: summary(values[mode]) for mode in runs.modes.loopholes}, "held_out": summary(held)}
    record["seeds"] = {str(seed): _counts(runs, run) for seed, run in per_seed.items()}
    return record


def _counts(runs: RunSet, run: Run) -> dict[str, Any]:
    """The rates that the ratios of one seed are made of, per mode."""
    sources = {"arm": run, "vanilla": runs.runs.get((VANILLA, run.seed)), "base": runs.runs.get((BASE, run.seed))}
    return {
        mode: {
            **{f"deploy_hack_{name}": each.modes[mode]["deploy"]["hack"] if each else None for name, each in sources.items()},
            **{name: ratio(runs, run, mode) for name, ratio in RATIOS},
        }
        for mode in runs.modes.loopholes
    }


def _seed_cells(runs: RunSet, arm: dict[str, Any]) -> list[str]:
    values = dict(zip(arm["seed_ids"], arm["leakage"]["held_out"]["seeds"], strict=True))
    return [number(values[seed]) if seed in values else "not run" for seed in runs.seeds]
