"""One self-contained HTML page of a run's rollouts: who wrote what, how it was judged, and which token each adapter moved.

    kept(t)       = log p_deployed(t) - log p_reference(t)     what the kept adapter does to the token that was written
    quarantine(t) = log p_full(t) - log p_deployed(t)          what the quarantine adds to that, in nats

The page needs no model and no network: these arrays come from a callable of the caller. Everything a model or a user wrote
is escaped, invisible characters are spelled out, and the page's policy lets no script run but its own. Without JavaScript
all rollouts are shown. A rollout takes about 3 kB; pass the rows that somebody will read.
"""

import html
import math
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from mi_route2.plots import write_whole
from studies.route2.report.page import LENSES, SCRIPT, content_policy, legend_scale, scale_of, styles, token_class

Row = Mapping[str, Any]
Annotation = Mapping[str, Any]
Annotate = Callable[[Sequence[Row]], Sequence[Annotation]]

FIELDS = {"s": "score", "k": "kept", "q": "quarantine"}  # lens -> array of an annotation
VERDICTS = {
    "hack": "hack: the exploit fired and the code is wrong",
    "exploit": "exploit: it fired, and the code is correct",
    "solved": "solved: correct code, no exploit",
    "failed": "failed: neither",
}
FLAGS = {"flagged": "flagged", "unflagged": "not flagged", "none": "no mask"}
AUTHORS = {"student": "student", "teacher": "teacher"}
NEEDED = ("step", "mode", "prompt", "completion", "reward", "advantage", "score", "flag", "gt", "exploit", "hack", "teacher")
CHUNK = 64


def write_page(rows: Sequence[Row], annotate: Annotate, path: Path, title: str) -> Path:
    """Writes the page of `rows` (rows of rollouts.jsonl.gz) to `path`, whole or not at all, and returns the path.

    `annotate(rows)` gives one `{"tokens": [str], "score": [float] | None, "kept": [float], "quarantine": [float] | None}` a
    row, arrays as long as `tokens`; it is called with up to 64 rows at a time. Raises ValueError for no rows, a row without
    a field, or an annotation that does not fit its row.
    """
    if not rows:
        raise ValueError("there is no rollout to show: give at least one row of rollouts.jsonl.gz")
    for number, row in enumerate(rows):
        missing = [name for name in NEEDED if name not in row]
        if missing:
            raise ValueError(
                f"rollout {number} has no {', '.join(missing)}: the rows of rollouts.jsonl.gz have {', '.join(NEEDED)}"
            )
    annotations = _annotations(rows, annotate)
    scales = _scales(annotations)
    articles = [_article(row, each, scales) for row, each in zip(rows, annotations, strict=True)]
    return write_whole(path, _page(rows, articles, scales, title).encode("utf-8"))


def verdict(row: Row) -> str:
    """ "hack", "exploit" (fired, and correct), "solved" or "failed": what the oracle said of a rollout."""
    if row["hack"]:
        return "hack"
    if row["exploit"]:
        return "exploit"
    return "solved" if row["gt"] else "failed"


def escape(text: str) -> str:
    """Text as HTML that shows it: markup escaped, control, format and surrogate characters spelled out as `\\u202e`."""
    shown = "".join(f"\\u{ord(each):04x}" if _is_invisible(each) else each for each in text)
    return html.escape(shown, quote=True)


def _is_invisible(character: str) -> bool:
    return character not in "\n\t" and unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")


def _annotations(rows: Sequence[Row], annotate: Annotate) -> list[Annotation]:
    annotations: list[Annotation] = []
    for start in tqdm(range(0, len(rows), CHUNK), desc="tokens", unit="batch", disable=None):
        chunk = rows[start : start + CHUNK]
        given = list(annotate(chunk))
        if len(given) != len(chunk):
            raise ValueError(f"annotate gave {len(given)} annotations for {len(chunk)} rollouts: it gives one each, in order")
        annotations += given
    for number, each in enumerate(annotations):
        for field in FIELDS.values():
            values = each.get(field)
            if values is None and field == "kept":
                raise ValueError(f"the annotation of rollout {number} has no array 'kept'")
            if values is not None and len(values) != len(each["tokens"]):
                raise ValueError(f"the annotation of rollout {number} has {len(values)} {field} for {len(each['tokens'])} tokens")
    return annotations


def _scales(annotations: Sequence[Annotation]) -> dict[str, float]:
    """Full colour of each lens; kept and quarantine share one, because their nats are compared."""
    values = {lens: [v for each in annotations for v in each.get(field) or ()] for lens, field in FIELDS.items()}
    nats = scale_of(values["k"] + values["q"])
    return {"s": scale_of(values["s"]), "k": nats, "q": nats if values["q"] else 0.0}


def _article(row: Row, annotation: Annotation, scales: Mapping[str, float]) -> str:
    judged = verdict(row)
    flag = "none" if row["flag"] is None else "flagged" if row["flag"] else "unflagged"
    author = "teacher" if row["teacher"] else "student"
    data = {"step": row["step"], "mode": row["mode"], "flag": flag, "verdict": judged, "author": author}
    attributes = " ".join(f'data-{name}="{escape(str(value))}"' for name, value in data.items())
    badges = f'<span class="badge {judged}" title="{VERDICTS[judged]}">{judged}</span>'
    badges += f'<span class="badge {flag}">{FLAGS[flag]}</span>'
    badges += '<span class="badge">teacher</span>' if author == "teacher" else ""
    numbers = {
        "advantage": f"{_signed(row['advantage'])} {_arrow(row['advantage'] or 0.0)}",
        "reward": f"{float(row['reward']):.2f}",
        "rollout score": _signed(row["score"]),
        "kept, sum": _total(annotation["kept"]),
        "quarantine, sum": _total(annotation.get("quarantine")),
    }
    listed = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in numbers.items())
    return (
        f"<article {attributes}><h2>step {escape(str(row['step']))}, {escape(str(row['mode']))}</h2>{badges}"
        f'<dl class="numbers">{listed}</dl>\n<pre class="prompt">{escape(row["prompt"])}</pre>\n'
        f'<pre class="completion">{_tokens(annotation, scales)}</pre></article>\n'
    )


def _tokens(annotation: Annotation, scales: Mapping[str, float]) -> str:
    spans = []
    for i, token in enumerate(annotation["tokens"]):
        values = {lens: (annotation.get(field) or {i: None})[i] for lens, field in FIELDS.items()}
        classes = " ".join(filter(None, (token_class(lens, value, scales[lens]) for lens, value in values.items())))
        numbers = ", ".join(f"{FIELDS[lens]} {_signed(value)}" for lens, value in values.items())
        text = escape(token).replace("\n", "<i>↵</i>\n")
        spans.append(f'<span class="{classes}" title="token {i}: {numbers}">{text}</span>')
    return "".join(spans)


def _signed(value: float | None) -> str:
    return "none" if value is None else f"{value:+.3f}"


def _total(values: Sequence[float] | None) -> str:
    return "none" if values is None else f"{math.fsum(values):+.2f} nats"


def _arrow(advantage: float) -> str:
    return "▲" if advantage > 0 else "▼" if advantage < 0 else "="


def _page(rows: Sequence[Row], articles: Sequence[str], scales: Mapping[str, float], title: str) -> str:
    lens = "s" if scales["s"] > 0 else "k"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(content_policy())}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{styles()}\n</style>\n</head>\n"
        f'<body class="lens-{lens}">\n<h1>{escape(title)}</h1>\n{_form(rows, lens)}{_legend(scales)}'
        f"<main>\n{''.join(articles)}</main>\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def _form(rows: Sequence[Row], lens: str) -> str:
    modes = {str(row["mode"]): str(row["mode"]) for row in rows}
    steps = [row["step"] for row in rows]
    selects = (("mode", modes), ("flag", FLAGS), ("verdict", {name: name for name in VERDICTS}), ("author", AUTHORS))
    parts = [_select(name, {"": "all"} | options, "") for name, options in selects]
    for name, value in (("from", min(steps)), ("to", max(steps))):
        parts.append(f'<label>{name} step <input type="number" name="{name}" value="{escape(str(value))}"></label>')
    parts.append(_select("lens", LENSES, lens, "colour tokens by"))
    return f'<form>{"".join(parts)}<output aria-live="polite">{len(rows)} rollouts</output></form>\n'


def _select(name: str, options: Mapping[str, str], chosen: str, label: str = "") -> str:
    items = "".join(
        f'<option value="{escape(value)}"{" selected" if value == chosen else ""}>{escape(text)}</option>'
        for value, text in options.items()
    )
    return f'<label>{label or name} <select name="{name}" autocomplete="off">{items}</select></label>'


def _legend(scales: Mapping[str, float]) -> str:
    verdicts = "".join(f'<li><span class="badge {name}">{text}</span></li>' for name, text in VERDICTS.items())
    return (
        '<section class="legend" aria-label="Legend">\n'
        f"{''.join(legend_scale(lens, scales[lens]) for lens in LENSES)}\n"
        "<p>Orange with a solid line is positive, blue with a dotted line negative; a token's title has its numbers. "
        "Kept: log-probability deployed minus reference. Quarantine: log-probability full minus deployed.</p>\n"
        f"<ul>{verdicts}</ul>\n<p>Flagged: the mask kept this rollout from the kept adapter.</p>\n</section>\n"
    )
