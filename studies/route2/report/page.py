"""The look of the rollout page: styles, the filter script, and the colours of a token. No text of a run passes through here.

A token is coloured by one of three lenses (probe score, kept, quarantine), chosen on the page. Its value falls into one of
nine classes, four steps of the lens's scale either side of none: positive on orange with a solid underline, negative on blue
with a dotted one, so that the sign is there without colour, and the number is in the token's title.
"""

import base64
import hashlib
import math
from collections.abc import Sequence

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
    """A policy under which the page runs this module's script and no other, and loads nothing."""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


def styles() -> str:
    """The style sheet, with the classes of every lens and level."""
    rules = [STYLE.strip()]
    for lens in LENSES:
        rules.append(f".lens-{lens} .legend .scale-{lens} {{ display: block; }}")
        for level in range(1, STEPS + 1):
            for sign, colors, line in (("p", POSITIVE, "solid"), ("n", NEGATIVE, "dotted")):
                rule = f"background: {colors[level - 1]}; border-bottom: 2px {line} #444;"
                rules.append(f".lens-{lens} .{lens}{sign}{level} {{ {rule} }}")
    return "\n".join(rules)


def token_class(lens: str, value: float | None, scale: float) -> str:
    """The class of a value under a lens: `sp3` is the third positive step of the probe's scale, "" is about nothing."""
    if value is None or not math.isfinite(value) or scale <= 0:
        return ""
    level = min(STEPS, round(abs(value) / scale * STEPS))
    return f"{lens}{'p' if value > 0 else 'n'}{level}" if level else ""


def scale_of(values: Sequence[float]) -> float:
    """The value at full colour: the 98th percentile of the sizes, so that one extreme token does not pale all others."""
    sizes = sorted(abs(value) for value in values if math.isfinite(value))
    if not sizes:
        return 0.0
    return sizes[min(len(sizes) - 1, math.ceil(0.98 * len(sizes)) - 1)] or sizes[-1]


def legend_scale(lens: str, scale: float) -> str:
    """The swatches of one lens, each with the value it stands for."""
    if scale <= 0:
        return f'<p class="scale scale-{lens}">{LENSES[lens]}: this run has none.</p>'
    swatches = []
    for step in range(-STEPS, STEPS + 1):
        value = scale * step / STEPS
        text = f"{value:+.3g}" if step else "0"
        bound = "≤ " if step == -STEPS else "≥ " if step == STEPS else ""
        swatches.append(f'<li><span class="{token_class(lens, value, scale)}">&nbsp;{bound}{text}&nbsp;</span></li>')
    return f'<div class="scale scale-{lens}">{LENSES[lens]}<ul>{"".join(swatches)}</ul></div>'
