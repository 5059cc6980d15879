"""Tables and figures of a finished study folder, from its artifacts alone: claims.md, claims.json, arms.md, the .png files."""

import json
from collections.abc import Sequence
from pathlib import Path

from mi_route2.plots import save_figure, style
from studies.common.tables import markdown_page, markdown_table, write_texts
from studies.lanes.arms import ARMS
from studies.lanes.report.claims import CLAIMS, VERDICTS, JudgedClaim, judge
from studies.lanes.report.estimates import ClaimEstimate, read
from studies.lanes.report.figures import FIGURES
from studies.lanes.study import LanesStudy, load

TABLE, ARMS_TABLE, JSON = "claims.md", "arms.md", "claims.json"


def write_report(folder: Path) -> list[Path]:
    """Read and check the artifacts, write all tables and figures, and return their paths."""
    study = load(folder)
    rows = judge(study, CLAIMS)
    data = {"settings": study.settings.digest, "seeds": list(study.seeds), "claims": [row.as_dict() for row in rows]}
    texts = {
        TABLE: claims_text(study, rows),
        ARMS_TABLE: arms_text(study),
        JSON: json.dumps(data, indent=1, allow_nan=False) + "\n",
    }
    paths = write_texts(folder, texts)
    with style():
        return paths + [save_figure(draw(folder, study), folder / f"{name}.png") for name, draw in FIGURES.items()]


def head(study: LanesStudy) -> str:
    """Return the description of the study that heads all tables."""
    size, training = study.settings.size, study.settings.training
    return (
        f"{size.layers} blocks of {size.d_model} features, {training.steps} steps of {training.batch} x {training.length} bytes, "
        f"Muon's momentum {training.optim.momentum:g}; "
        f"seeds {', '.join(map(str, study.seeds))}; float64 instruments drawn {study.settings.instruments.draws} times. "
        "Brackets: 95% Student-t; differences are paired by seed, which draws weights, data and test text."
    )


def claims_text(study: LanesStudy, rows: Sequence[JudgedClaim]) -> str:
    """Return the text of claims.md."""
    sections = ["# Lanes: the record's claims", head(study), counts_text(rows)]
    header = ["claim", "record", "verdict", "measured", "floor", "n", "n needed"]
    for group in dict.fromkeys(row.claim.group for row in rows):
        body = [
            [
                row.claim.words,
                row.claim.record or "(ours)",
                row.verdict,
                measured_text(row),
                "" if row.floor is None else number(row.floor),
                row.estimate.n,
                "" if row.needed is None else f"{row.needed}" + " (underpowered)" * row.underpowered,
            ]
            for row in rows
            if row.claim.group == group
        ]
        sections += [f"## {group[0].upper()}{group[1:]}", markdown_table(header, body, left=4)]
    sections.append(
        "*floor*: the effect that this many seeds (of instruments, draws) would find in four studies of five, with the spread that "
        "was seen. *n needed*: how many put the floor at the claimed size; a row with fewer is underpowered, and its verdict weak."
    )
    return markdown_page(sections)


def counts_text(rows: Sequence[JudgedClaim]) -> str:
    """Return the verdict counts of the record's claims, and of our own."""
    lines = []
    for whose, group in (
        ("The record's", [row for row in rows if row.claim.record]),
        ("Ours and controls", [row for row in rows if not row.claim.record]),
    ):
        counts = ", ".join(f"{sum(row.verdict == verdict for row in group)} {verdict}" for verdict in VERDICTS)
        lines.append(f"{whose}, {len(group)} rows: {counts}.")
    return " ".join(lines)


def measured_text(row: JudgedClaim) -> str:
    """Return the estimate with its interval, unit, reference and note."""
    estimate, claim = row.estimate, row.claim
    text = estimate_text(estimate) if estimate.value is None else f"{estimate_text(estimate)} {estimate.unit}"
    if claim.reference and estimate.value is not None:
        text += f" against {claim.reference:g}"
    return f"{text}; {estimate.note}" if estimate.note else text


def estimate_text(estimate: ClaimEstimate) -> str:
    """Return text such as ``-.0012 [-.0100, .0076]``; of an identity the number alone."""
    if estimate.low is None:
        return number(estimate.value)
    return f"{number(estimate.value)} [{number(estimate.low)}, {number(estimate.high)}]"


def number(value: float | None) -> str:
    """Return a number with four decimals: two digits if it is below 1e-4, no fraction from 100 on."""
    if value is None:
        return "none"
    if value == int(value) or abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.2g}" if abs(value) < 1e-4 else f"{value:.4f}"


def arms_text(study: LanesStudy) -> str:
    """Return the text of arms.md: bits per byte of count tables and of every arm, and their differences from the baseline."""
    tables = {"unigram": "a table of single bytes", "bigram": "a table of pairs of bytes"}
    rows = [
        (f"({name})", f"{about}, counted on all of the training text", read(study, "tables", "tables", name))
        for name, about in tables.items()
    ]
    rows += [(name, ARMS[name].about, read(study, name, "bpb", "bpb")) for name in study.measured("bpb")]
    reference = read(study, "gptj", "bpb", "bpb")
    body = [
        [
            name,
            about,
            number(ClaimEstimate.of(values, "BPB").value),
            "" if name == "gptj" else estimate_text(ClaimEstimate.of(values - reference, "BPB")),
        ]
        for name, about, values in rows
    ]
    header = ["arm", "what it is", "BPB", "minus gptj"]
    return f"# Lanes: every arm\n\n{head(study)}\n\n{markdown_table(header, body, left=2)}"
