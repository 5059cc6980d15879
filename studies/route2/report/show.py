"""Rollout page: its styles, its filter script, and the colors of tokens.

A token is colored by one of three lenses (probe score, kept, quarantine), chosen on the page. Its value falls into one of nine
classes, four steps of the lens's scale on either side of zero: positive on orange with a solid underline, negative on blue with a
dotted one, so that the sign is visible without color, and the number is in the token's title.
"""

import base64
import hashlib
import html
import math
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from mi_route2.files import write_whole

LENSES = {"s": "probe score", "k": "kept adapter (nats)", "q": "quarantine (nats)"}
STEPS = 4
POSITIVE = ("#FFF0D6", "#FBDDA6", "#F3C566", "#E69F00")  # towards Okabe-Ito orange; black text keeps a contrast above 7
NEGATIVE = ("#E3F1FA", "#C2E1F4", "#93CBEC", "#56B4E9")  # towards Okabe-Ito sky blue

STYLE = """
:root { color-scheme: light; font: 15px/1.45 system-ui, sans-serif; }
body { margin: 0 auto; max-width: 70rem; padding: 0 1rem 4rem; color: #111; background: #fff; }
h1 { font-size: 1.4rem; margin: 1rem 0 .3rem; }
form { position: sticky; top: 0; z-index: 1; display: flex; flex-wrap: wrap; gap: .4rem 1rem; padding: .6rem 0;
  background: #fff; border-bottom: 1px solid #999; }
form label { font-size: .85rem; }
form select, form input { font: inherit; font-size: .85rem; }
form input { width: 5rem; }
article { border: 1px solid #bbb; border-radius: 4px; margin: 1rem 0; padding: .5rem .8rem;
  content-visibility: auto; contain-intrinsic-size: auto 18rem; }
article[hidden] { display: none; }
h2 { display: inline; font-size: 1rem; margin-right: .5rem; }
.badge { border: 1px solid #555; border-radius: 3px; padding: 0 .4rem; margin-right: .3rem; font-size: .85rem;
  white-space: nowrap; }
.hack { background: #D55E00; color: #000; font-weight: bold; }
.exploit { background: #F0E442; }
.solved { background: #0072B2; color: #fff; }
.flagged { border: 2px solid #000; font-weight: bold; }
dl.numbers { display: inline; font-size: .85rem; }
dl.numbers div { display: inline-block; margin-right: .8rem; }
dl.numbers dt, dl.numbers dd { display: inline; margin: 0; }
dl.numbers dt::after { content: " "; }
dl.numbers dd { font-variant-numeric: tabular-nums; font-weight: 600; }
pre { margin: .4rem 0; font: 14px/1.6 ui-monospace, "DejaVu Sans Mono", monospace; white-space: pre-wrap;
  overflow-wrap: anywhere; unicode-bidi: isolate; }
pre.prompt { color: #444; border-left: 3px solid #bbb; padding-left: .6rem; }
pre.completion span { box-shadow: inset 1px 0 0 #aaa; }
pre.completion span:hover { outline: 2px solid #000; }
pre i { color: #666; font-style: normal; user-select: none; }
.legend { font-size: .85rem; }
.legend ul { list-style: none; display: flex; flex-wrap: wrap; gap: .2rem .5rem; padding: 0; margin: .3rem 0; }
.legend .scale { display: none; }
@media print { form { position: static; } article { break-inside: avoid; } }
"""

SCRIPT = """
"use strict";
const form = document.querySelector("form");
const rows = Array.from(document.querySelectorAll("article"));
function update() {
  const wanted = new FormData(form);
  const low = parseFloat(wanted.get("from")), high = parseFloat(wanted.get("to"));
  let shown = 0;
  for (const row of rows) {
    const same = name => !wanted.get(name) || row.dataset[name] === wanted.get(name);
    const step = parseFloat(row.dataset.step);
    row.hidden = !(["mode", "flag", "verdict", "author"].every(same) && !(step < low) && !(step > high));
    shown += !row.hidden;
  }
  document.body.className = "lens-" + wanted.get("lens");
  document.querySelector("output").textContent = shown + " of " + rows.length + " rollouts";
}
form.addEventListener("input", update);
form.addEventListener("submit", event => event.preventDefault());
update();
"""


def content_policy() -> str:
    """Return a content security policy under which the page runs only this module's script and loads nothing."""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


def styles() -> str:
    """Return the style sheet, with the classes of every lens and level."""
    rules = [STYLE.strip()]
    for lens in LENSES:
        rules.append(f".lens-{lens} .legend .scale-{lens} {{ display: block; }}")
        for level in range(1, STEPS + 1):
            for sign, colors, line in (("p", POSITIVE, "solid"), ("n", NEGATIVE, "dotted")):
                rule = f"background: {colors[level - 1]}; border-bottom: 2px {line} #444;"
                rules.append(f".lens-{lens} .{lens}{sign}{level} {{ {rule} }}")
    return "\n".join(rules)


def token_class(lens: str, value: float | None, scale: float) -> str:
    """Return the CSS class of a value under a lens: `sp3` is the third positive step of the probe's scale, "" is about zero."""
    if value is None or not math.isfinite(value) or scale <= 0:
        return ""
    level = min(STEPS, round(abs(value) / scale * STEPS))
    return f"{lens}{'p' if value > 0 else 'n'}{level}" if level else ""


def scale_of(values: Sequence[float]) -> float:
    """Return the value of full color: the 98th percentile of the magnitudes, so that an outlier does not make all others pale."""
    sizes = sorted(abs(value) for value in values if math.isfinite(value))
    if not sizes:
        return 0.0
    return sizes[min(len(sizes) - 1, math.ceil(0.98 * len(sizes)) - 1)] or sizes[-1]


def legend_scale(lens: str, scale: float) -> str:
    """Return the legend of one lens, with the value of each color."""
    if scale <= 0:
        return f'<p class="scale scale-{lens}">{LENSES[lens]}: this run has none.</p>'
    swatches = []
    for step in range(-STEPS, STEPS + 1):
        value = scale * step / STEPS
        text = f"{value:+.3g}" if step else "0"
        bound = "≤ " if step == -STEPS else "≥ " if step == STEPS else ""
        swatches.append(f'<li><span class="{token_class(lens, value, scale)}">&nbsp;{bound}{text}&nbsp;</span></li>')
    return f'<div class="scale scale-{lens}">{LENSES[lens]}<ul>{"".join(swatches)}</ul></div>'


RolloutRow = Mapping[str, Any]
Annotation = Mapping[str, Any]
Annotate = Callable[[Sequence[RolloutRow]], Sequence[Annotation]]

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


def write_page(rows: Sequence[RolloutRow], annotate: Annotate, path: Path, title: str) -> Path:
    """Write the page of `rows` (rows of rollouts.jsonl.gz) to `path` atomically, and return the path.

    `annotate(rows)` returns one `{"tokens": [str], "score": [float] | None, "kept": [float], "quarantine": [float] | None}` per
    row, with arrays as long as `tokens`; it is called with up to 64 rows at a time.

    Raises:
        ValueError: No rows, a row without a field, or an annotation that does not fit its row.
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


def verdict(row: RolloutRow) -> str:
    """Return the oracle's verdict on a rollout: "hack", "exploit" (fired, and correct), "solved" or "failed"."""
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


def _annotations(rows: Sequence[RolloutRow], annotate: Annotate) -> list[Annotation]:
    annotations: list[Annotation] = []
    for start in tqdm(range(0, len(rows), CHUNK), desc="tokens", unit="batch", disable=None):
        chunk = rows[start : start + CHUNK]
        given = list(annotate(chunk))
        if len(given) != len(chunk):
            raise ValueError(f"annotate gave {len(given)} annotations for {len(chunk)} rollouts: it must give one each, in order")
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
    """Return the value of full color of each lens; kept and quarantine share one, because their nats are compared."""
    values = {lens: [v for each in annotations for v in each.get(field) or ()] for lens, field in FIELDS.items()}
    nats = scale_of(values["k"] + values["q"])
    return {"s": scale_of(values["s"]), "k": nats, "q": nats if values["q"] else 0.0}


def _article(row: RolloutRow, annotation: Annotation, scales: Mapping[str, float]) -> str:
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


def _page(rows: Sequence[RolloutRow], articles: Sequence[str], scales: Mapping[str, float], title: str) -> str:
    lens = "s" if scales["s"] > 0 else "k"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(content_policy())}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{styles()}\n</style>\n</head>\n"
        f'<body class="lens-{lens}">\n<h1>{escape(title)}</h1>\n{_form(rows, lens)}{_legend(scales)}'
        f"<main>\n{''.join(articles)}</main>\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def _form(rows: Sequence[RolloutRow], lens: str) -> str:
    modes = {str(row["mode"]): str(row["mode"]) for row in rows}
    steps = [row["step"] for row in rows]
    selects = (("mode", modes), ("flag", FLAGS), ("verdict", {name: name for name in VERDICTS}), ("author", AUTHORS))
    controls = [_select(name, {"": "all"} | options, "") for name, options in selects]
    for name, value in (("from", min(steps)), ("to", max(steps))):
        controls.append(f'<label>{name} step <input type="number" name="{name}" value="{escape(str(value))}"></label>')
    controls.append(_select("lens", LENSES, lens, "colour tokens by"))
    return f'<form>{"".join(controls)}<output aria-live="polite">{len(rows)} rollouts</output></form>\n'


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
