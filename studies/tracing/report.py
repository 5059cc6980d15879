"""Report of a tracing folder, from its artifacts alone: table.json, table.md, headline.md, tables.md and the figures."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from studies.common.tables import UNDEFINED, interval, markdown_table, number, write_texts
from studies.tracing.figures import ADAPTER_NAMES, write_figures
from studies.tracing.measures import Share, Traces, agreement, levels, load, rows
from studies.tracing.pairs import CONTRASTS
from studies.tracing.patching import CONTROLS, DELETION, EVERYWHERE, QUESTION
from studies.tracing.rates import DELETED, KEPT_PATCHED, ON, PATCHED
from studies.tracing.settings import UNTRAINED

TABLE, TABLES, HEADLINE, WHOLE = "table.json", "tables.md", "headline.md", "table.md"
ABOUT = {
    "prompt": "one prompt, a hacking and an honest answer",
    "task": "one task, the honest answer under the mode without a loophole",
}


def write_report(root: Path) -> list[Path]:
    """Write the whole report of a folder and return the paths."""
    traces = load(root)
    data = table(traces)
    texts = {HEADLINE: headline(data), TABLES: tables(data)}
    texts[WHOLE] = f"# Tracing\n\n{texts[HEADLINE]}\n{texts[TABLES]}"
    texts[TABLE] = json.dumps(data, indent=1, allow_nan=False) + "\n"
    return [*write_texts(root, texts), *write_figures(traces, root)]


def table(traces: Traces) -> dict[str, Any]:
    """Return all numbers, as JSON objects."""
    seeds = traces.seeds(traces.arms[0])
    return {
        "settings": traces.settings.as_dict(),
        "preset": traces.training["preset"],
        "training_hash": traces.settings.training,
        "seeds": seeds,
        "arms": traces.arms,
        "interval": "95% percentile bootstrap over seeds and pairs; of summaries 95% Student-t over seeds",
        "pairs": {contrast: [traces.contents[traces.arms[0], seed]["pairs"][contrast] for seed in seeds] for contrast in CONTRASTS},
        "counts": [traces.contents[traces.arms[0], seed]["counts"] for seed in seeds],
        "rows": rows(traces),
        "levels": levels(traces),
        "agreement": agreement(traces),
    }


class Table:
    """The content of table.json, with access by key."""

    def __init__(self, data: dict[str, Any]):
        self.data = data
        self._rows = {tuple(row[k] for k in ("arm", "contrast", "into", "source", "where", "adapter")): row for row in data["rows"]}
        self._levels = {(row["arm"], row["contrast"], row["rollout"]): row for row in data["levels"]}
        self._agreement = {row["arm"]: row for row in data["agreement"]}

    @property
    def trained(self) -> list[str]:
        return [arm for arm in self.data["arms"] if arm != UNTRAINED]

    def row(self, arm: str, contrast: str, into: str, source: str, place: str, adapter: str) -> dict[str, Any] | None:
        """Return one row of ``rows``; ``None`` if there is none."""
        return self._rows.get((arm, contrast, into, source, place, adapter))

    def recovered(self, arm: str, contrast: str, into: str, source: str, place: str, adapter: str) -> Share | None:
        """Return ``recovered``; ``None`` if it is not defined."""
        row = self.row(arm, contrast, into, source, place, adapter)
        return None if row is None else row["recovered"]

    def level(self, arm: str, contrast: str, rollout: str) -> dict[str, Any]:
        """Return the log-odds by state."""
        return self._levels[arm, contrast, rollout]

    def agrees(self, arm: str) -> dict[str, Any]:
        """Return checks, rates and rank correlations."""
        return self._agreement[arm]

    def adapters(self, arm: str) -> list[str]:
        """Return the adapters of an arm that tables print: ``kept_a`` is left out, because it equals ``kept_out``."""
        return list(dict.fromkeys(row["adapter"] for row in self.data["rows"] if row["arm"] == arm and row["adapter"] != "kept_a"))

    def layers(self, arm: str) -> list[str]:
        """Return ``EVERYWHERE``, then each layer."""
        places = dict.fromkeys(row["where"] for row in self.data["rows"] if row["arm"] == arm and row["where"].count(".") < 2)
        return [EVERYWHERE, *(place for place in places if place != EVERYWHERE)]

    def linears(self, arm: str) -> list[str]:
        """Return every Linear with adapters."""
        places = dict.fromkeys(row["where"] for row in self.data["rows"] if row["arm"] == arm)
        return [place for place in places if place == "unembed" or place.count(".") >= 2]


def cell(share: Share | None) -> str:
    """Return the text ``value [lo, hi]``."""
    return UNDEFINED if share is None else f"{number(share['value'])} [{number(share['lo'])}, {number(share['hi'])}]"


def headline(data: dict[str, Any]) -> str:
    """Return the text of headline.md: what each adapter carries and the effect of deleting it, by arm."""
    numbers = Table(data)
    pairs = {contrast: sum(data["pairs"][contrast]) for contrast in CONTRASTS}
    lines = [
        f"Preset {data['preset']}, seeds {', '.join(map(str, data['seeds']))}; {pairs['prompt']} pairs of one prompt and "
        f"{pairs['task']} of one task, from the base model's own rollouts. A share is of the gap in log-odds between the two "
        "rollouts of a pair; brackets are 95% bootstrap intervals over seeds and pairs.",
        "",
    ]
    for arm in numbers.trained:
        lines.append(f"- **{arm}**")
        for contrast in CONTRASTS:
            gap = [numbers.level(model, contrast, side)["on"]["mean"] for model in (arm, UNTRAINED) for side in ("hack", "honest")]
            carried = "; ".join(
                _carried_said(numbers, arm, contrast, adapter) for adapter in numbers.adapters(arm) if adapter != "both"
            )
            lines.append(
                f"    - contrast {contrast}: the gap is {number(gap[0] - gap[1])} nats (untrained {number(gap[2] - gap[3])}). "
                f"Carried: {carried}."
            )
        lines.append(f"    - {_rates_said(numbers, arm)}")
    return "\n".join(lines) + "\n\n" + exactness_line(data) + "\n"


def _carried_said(numbers: Table, arm: str, contrast: str, adapter: str) -> str:
    honest, hack = (cell(numbers.recovered(arm, contrast, into, QUESTION, EVERYWHERE, adapter)) for into in ("honest", "hack"))
    return f"{ADAPTER_NAMES[adapter]} {honest} into the honest rollout, {hack} into the hacking one"


def _rates_said(numbers: Table, arm: str) -> str:
    rates = numbers.agrees(arm)["rates"]
    said = [f"sampled hack rate {interval(rates[ON]['hack'])} with everything in"]
    if PATCHED in rates:
        deleted, patched = (interval(rates[state]["hack"]) for state in (DELETED, PATCHED))
        said.append(f"{deleted} with the quarantine deleted and {patched} with it patched to 0")
    said.append(f"{interval(rates[KEPT_PATCHED]['hack'])} with the kept adapter patched to 0 (Student-t over seeds)")
    return ", ".join(said) + "."


def exactness_line(data: dict[str, Any]) -> str:
    """Return the sentence on whether deleting agrees with patching: the largest differences of logits and of sampled hack rates.

    They are of trained arms: at initialization a quarantine adds nothing, so nothing could differ.
    """
    rows = [row for row in data["agreement"] if row["arm"] != UNTRAINED and PATCHED in row["rates"]]
    if not rows:
        return "**Does deleting agree with patching?** Not tested: no trained arm here has a quarantine."
    apart = [
        abs(a - b)
        for row in rows
        for a, b in zip(row["rates"][PATCHED]["hack"]["seeds"], row["rates"][DELETED]["hack"]["seeds"], strict=True)
    ]
    exact, single = (f"{max(row['checks'][name] for row in rows):.1e}" for name in _differences())
    return (
        "**Does deleting agree with patching?** Zeros at every `quarantine_out` against `adapters.deployed()`: logits differ by at "
        f"most {exact} in float64 and {single} in float32; sampled hack rates of a seed differ by at most "
        f"{number(max(apart))}."
    )


def tables(data: dict[str, Any]) -> str:
    """Return the text of tables.md: shares carried, beside their controls; log-odds; agreement; single Linears."""
    numbers = Table(data)
    sections = [_carried(numbers, contrast) for contrast in CONTRASTS]
    sections += [_controls(numbers, contrast, into) for contrast in CONTRASTS for into in ("honest", "hack")]
    sections += [_levels(numbers), _agreement(numbers), *(_linears(numbers, contrast) for contrast in CONTRASTS)]
    return "\n".join(sections)


def _carried(numbers: Table, contrast: str) -> str:
    body = [
        [
            arm,
            ADAPTER_NAMES[adapter],
            place,
            cell(numbers.recovered(arm, contrast, "honest", QUESTION, place, adapter)),
            cell(numbers.recovered(arm, contrast, "hack", QUESTION, place, adapter)),
            _effect(numbers.row(arm, contrast, "hack", DELETION, place, adapter)),
        ]
        for arm in numbers.data["arms"]
        for adapter in numbers.adapters(arm)
        for place in numbers.layers(arm)
    ]
    header = ["arm", "adapter", "where", "share carried into the honest rollout", "into the hacking rollout"]
    header.append("zeros in the hacking rollout, nats")
    pairs = " + ".join(map(str, numbers.data["pairs"][contrast]))
    title = f"### Carried, contrast {contrast}\n\n{ABOUT[contrast].capitalize()}; {pairs} pairs.\n\n"
    return title + markdown_table(header, body, left=3)


def _effect(row: dict[str, Any] | None) -> str:
    return UNDEFINED if row is None else interval(row["effect"], signed=True)


def _controls(numbers: Table, contrast: str, into: str) -> str:
    sources = (QUESTION, *CONTROLS)
    body = [
        [
            arm,
            ADAPTER_NAMES[adapter],
            place,
            *(cell(numbers.recovered(arm, contrast, into, source, place, adapter)) for source in sources),
        ]
        for arm in numbers.trained
        for adapter in numbers.adapters(arm)
        for place in numbers.layers(arm)
    ]
    title = f"### Beside its controls, contrast {contrast}, into the {'honest' if into == 'honest' else 'hacking'} rollout\n\n"
    return title + markdown_table(["arm", "adapter", "where", *sources], body, left=3)


def _levels(numbers: Table) -> str:
    states = ("on", "deleted", "base")
    body = [
        [row["arm"], row["contrast"], row["rollout"], *(interval(row[state]) if state in row else UNDEFINED for state in states)]
        for row in numbers.data["levels"]
    ]
    header = ["arm", "contrast", "rollout", "log-odds of the hack, nats", "quarantine deleted", "both deleted"]
    return "### Log-odds at the decision\n\n" + markdown_table(header, body, left=3)


def _agreement(numbers: Table) -> str:
    body = []
    for arm in numbers.data["arms"]:
        row = numbers.agrees(arm)
        rates, checks = row["rates"], row["checks"]
        exact = [f"{checks[name]:.1e}" if name in checks else UNDEFINED for name in _differences()]
        states = [interval(rates[state]["hack"]) if state in rates else UNDEFINED for state in (ON, DELETED, PATCHED, KEPT_PATCHED)]
        same = number(rates[PATCHED]["as_deleted"]["mean"]) if PATCHED in rates else UNDEFINED
        body.append([arm, *exact, *states, same, *(interval(row["spearman"][contrast]) for contrast in CONTRASTS)])
    header = ["arm", "float64", "float32", "hack: on", DELETED, PATCHED, KEPT_PATCHED, "same answers"]
    header += [f"Spearman, {contrast}" for contrast in CONTRASTS]
    note = (
        "float64, float32: the largest difference of logits between the zero patch and the deletion. Same answers: those that are, "
        "token by token, the deleted model's under the zero patch. Spearman: over single Linears and adapters, the effect of zeros "
        "against that of the honest rollout's values, both in the hacking rollout."
    )
    return f"### Does deleting agree with patching?\n\n{note}\n\n{markdown_table(header, body)}"


def _differences() -> tuple[str, str]:
    return "zero patch and deletion, float64", "zero patch and deletion, float32"


def _linears(numbers: Table, contrast: str) -> str:
    columns = [(arm, adapter) for arm in numbers.trained for adapter in numbers.adapters(arm) if adapter != "both"]
    places: Sequence[str] = numbers.linears(numbers.trained[0]) if numbers.trained else ()
    body = [
        [place, *(cell(numbers.recovered(arm, contrast, "honest", QUESTION, place, adapter)) for arm, adapter in columns)]
        for place in places
    ]
    header = ["Linear", *(f"{arm}: {ADAPTER_NAMES[adapter]}" for arm, adapter in columns)]
    return f"### Single Linears, contrast {contrast}, into the honest rollout\n\n" + markdown_table(header, body)
