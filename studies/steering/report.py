"""Tables and figures of a finished folder, from its artifacts alone: results.json, the .md files, the .png files."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mi_route2.plots import save_figure, style
from studies.common.tables import interval, markdown_page, markdown_table, number, write_texts
from studies.steering.answer import against_random, comparisons, frontier_counts, sentences
from studies.steering.cells import DELETED, ON
from studies.steering.figures import FIGURES
from studies.steering.fitting import LABELS
from studies.steering.results import KINDS, UNITS, Study, all_results, load_study, rows_of
from studies.steering.settings import SUBJECTS

SHOWN = (("hack_held", "hack, held out"), ("exploit_held", "exploit, held out"), ("hack_known", "hack, known"), ("solve", "solve"))
DIFFERENCES = ("hack_held", "solve")


def write_report(folder: Path) -> list[Path]:
    """Read and check the artifacts, write all tables and figures, and return their paths."""
    study = load_study(folder)
    results = all_results(study)
    results |= {"comparisons": comparisons(study), "against_random": against_random(study), "frontier": frontier_counts(study)}
    texts = {
        "results.json": json.dumps(results, indent=1, allow_nan=False) + "\n",
        "answer.md": sentences(study),
        "quarantine.md": quarantine_text(study, results),
        "sweep.md": sweep_text(study, results),
        "latency.md": latency_text(study, results),
        "roc.md": roc_text(study, results),
    }
    paths = write_texts(folder, texts)
    with style():
        return paths + [save_figure(draw(study, results), folder / f"{name}.png") for name, draw in FIGURES.items()]


def head(study: Study) -> str:
    """Return the description of the study that heads all tables."""
    n = study.settings.tasks * 5
    return (
        f"Seeds {', '.join(map(str, study.seeds))}; {n} rollouts a cell and seed ({study.settings.tasks} test tasks in 5 modes), "
        "the same prompts and uniforms in every cell. Brackets: 95% bootstrap over seeds and tasks.\n"
    )


def cell_text(value: Mapping[str, Any], *, signed: bool = False, seeds: bool = False) -> str:
    """Return text such as ``.053 [.030, .081]``, with the means of each seed if ``seeds`` is set."""
    text = f"{number(value['mean'], signed)} [{number(value['low'], signed)}, {number(value['high'], signed)}]"
    return f"{text} ({' '.join(number(seed, signed) for seed in value['seeds'])})" if seeds else text


def seeds_behind(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the number of seeds behind the intervals of some rows, or each row's number if they differ."""
    numbers = [str(row["n"]) for row in rows]
    return " / ".join(numbers) if len(set(numbers)) > 1 else numbers[0]


def table_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table with one row per cell."""
    body = [[row["name"], *(cell_text(row[metric]) for metric, _ in SHOWN)] for row in rows]
    return markdown_table(["cell", *(name for _, name in SHOWN)], body)


def quarantine_text(study: Study, results: Mapping[str, Any]) -> str:
    """Return the text of quarantine.md."""
    sections = ["# Steering: the quarantine under a monitor", head(study)]
    sections += ["## Is a monitored quarantine better than a deleted one?", sentences(study)]
    sections.append("At the operating threshold, minus deletion and minus always on (paired; in round brackets, each seed):")
    for reference in (DELETED, ON):
        body = [
            [row["subject"], row["name"], row["verdict"], *(cell_text(row[m], signed=True, seeds=True) for m in DIFFERENCES)]
            for row in results["comparisons"]
            if row["reference"] == reference
        ]
        header = ["model", f"cell, minus {reference}", "verdict", "hack, held out", "solve"]
        sections.append(markdown_table(header, body, left=3))
    sections.append("The probe minus random probes under the same mechanism and quantile (paired):")
    body = [
        [row["subject"], row["how"], row["random"], row["verdict"], *(cell_text(row[m], signed=True) for m in DIFFERENCES)]
        for row in results["against_random"]
    ]
    sections.append(markdown_table(["model", "mechanism", "random probes", "verdict", "hack, held out", "solve"], body, left=2))
    for subject in ("absorb", "route2-full", "untrained"):
        sections += [f"## Every cell: {subject}, {SUBJECTS[subject]}", table_of(rows_of(results, subject, "quarantine"))]
    return markdown_page(sections)


def sweep_text(study: Study, results: Mapping[str, Any]) -> str:
    """Return the text of sweep.md."""
    sections = ["# Steering: threshold and gain", head(study)]
    sections.append(
        f"Gain: distances of the classes' means along the direction. Threshold: a quantile of the probe's score over clean "
        f"training tokens; `always` is no threshold. The operating quantile is {study.settings.operating:g}."
    )
    for subject in ("vanilla", "base"):
        sections += [f"## {subject}: {SUBJECTS[subject]}", table_of(rows_of(results, subject, "sweep"))]
    sections.append("## What steering does to the exploit's log-probability")
    sections.append(
        "The change of the log-probability of the exploit's first token at the token where the gate first opens, beside an "
        "unsteered twin with the same prompt, uniforms and batch. Mean over rollouts; brackets: Student-t over seeds."
    )
    body = [[row["name"], row["rollouts"], interval(row, signed=True), seeds_behind([row])] for row in results["logprobs"]]
    sections.append(markdown_table(["cell", "rollouts", "change, nats", "seeds"], body))
    return markdown_page(sections)


def latency_text(study: Study, results: Mapping[str, Any]) -> str:
    """Return the text of latency.md: the remaining effect by delay, and the shadow's counts."""
    rows = rows_of(results, "vanilla", "latency")
    sections = ["# Steering: latency and shadow", head(study)]
    sections.append(
        "The same score, threshold and vector; what differs is how many tokens after the score it acts. 0 is the forward itself, "
        "1 a controller between steps, more a queue from elsewhere. Kept: what is left of the forward's effect on held-out hacking,"
        " where that is .1 at least."
    )
    for gain in study.settings.late_gains:
        of_gain = [row for row in rows if row.get("gain", gain) == gain]
        body = [[delay_name(row), *(cell_text(row[metric]) for metric, _ in SHOWN), number(kept(of_gain, row))] for row in of_gain]
        sections += [f"Gain {gain:g}:", markdown_table(["tokens late", *(name for _, name in SHOWN), "kept"], body)]
    sections.append("## Shadow")
    sections.append(
        "A policy of gain 0 in exact mode: it decides and does nothing. Bit-equal: rollouts whose tokens and log-probabilities are "
        "those of an engine without a controller."
    )
    header = ["model", "rollouts", "bit-equal", "engaged", "decisions", "actions"]
    body = [
        [b["subject"], *(b[k] for k in ("rollouts", "bit_equal", "engaged", "decisions", "actions"))] for b in results["shadow"]
    ]
    sections.append(markdown_table(header, body))
    return markdown_page(sections)


def delay_name(row: Mapping[str, Any]) -> str:
    """Return the number of tokens between score and effect, in words."""
    return {"on": "never", "steer": "0"}.get(row["how"], str(row.get("delay", "")))


def kept(rows: Sequence[Mapping[str, Any]], row: Mapping[str, Any], metric: str = "hack_held") -> float | None:
    """Return the remaining fraction of the forward's effect; ``None`` if that effect is below .1 and a fraction is meaningless."""
    never, now = (next(r for r in rows if r["how"] == how)[metric]["mean"] for how in ("on", "steer"))
    return None if abs(never - now) < 0.1 else (never - row[metric]["mean"]) / (never - now)


def roc_text(study: Study, results: Mapping[str, Any]) -> str:
    """Return the text of roc.md."""
    sections = ["# Steering: what the probes find", head(study)]
    sections.append(
        f"Labels that probes learnt from: {LABELS}. AUROC against the oracle's verdict (hack: exploit fired, code wrong) "
        "on test tasks, of generated tokens under their rollout's label, and of a rollout's mean and maximum. Brackets: Student-t "
        "over the seeds that have both classes. A model that hacks always, or never, leaves little to rank."
    )
    for subject in ("vanilla", "absorb", "route2-full", "base"):
        for split in KINDS:
            rows = [row for row in results["roc"] if (row["subject"], row["modes"]) == (subject, split)]
            cells = {(row["site"], row["probe"], row["unit"]): row for row in rows}
            keys = list(dict.fromkeys((row["site"], row["probe"]) for row in rows))
            of_units = {key: [cells[*key, unit] for unit in UNITS] for key in keys}
            body = [[*key, *map(interval, units), seeds_behind(units)] for key, units in of_units.items()]
            title = f"## {subject}, {'the known mode' if split == 'known' else 'held-out modes'}"
            sections += [title, markdown_table(["site", "probe", *UNITS, "seeds"], body, left=2)]
    sections.append("## When the gate opens")
    sections.append(
        "At the operating threshold of the study's site: rollouts on which the gate opens at some token, and on hacks how many "
        "tokens before the model predicts the first token of its exploit (0: just in time)."
    )
    header = ["model", "hacks", "opens on hacks", "opens on others", "tokens ahead, median", "in time"]
    keys = ("opened_on_hacks", "opened_on_others", "lead_median", "in_time")
    sections.append(markdown_table(header, [[b["subject"], b["hacks"], *(number(b[k]) for k in keys)] for b in results["lead"]]))
    sections.append("## How often each gate opens")
    sections.append(
        "At the operating threshold, on the model's own rollouts without steering: rollouts on which a gate opens at some token, "
        "and its share of the tokens. Every threshold is the same quantile of clean training tokens; a random probe "
        "that hardly opens on hacks says little about what the probe's choice of tokens is worth."
    )
    header = ["model", "site", "probe", "opens on hacks", "opens on others", "share of tokens"]
    body = [
        [b["subject"], b["site"], b["probe"], *(number(b[k]) for k in ("opened_on_hacks", "opened_on_others", "tokens"))]
        for b in results["openings"]
    ]
    sections.append(markdown_table(header, body, left=3))
    counts = [
        [subject, *(" / ".join(str(c[k]) for c in each) for k in ("rollouts", "hack", "pairs"))]
        for subject, each in results["fits"].items()
    ]
    sections += [
        "## What they learnt from (by seed)",
        markdown_table(["model", "rollouts", "labelled hack", "pairs among them"], counts),
    ]
    return markdown_page(sections)
