"""Numbers and tables as plain markdown: readable in a terminal before anything renders it."""

from mi_route2.stats import Summary
from studies.markdown import markdown_table

__all__ = ["UNDEFINED", "interval", "markdown_table", "number"]

UNDEFINED = "–"  # noqa: RUF001 - an en dash, as in printed tables


def number(value: float | None, signed: bool = False) -> str:
    """Three decimals, without the leading zero of a rate: .053, 1.000, -.120; with `signed`, +.053."""
    if value is None:
        return UNDEFINED
    text = f"{value:+.3f}" if signed else f"{value:.3f}"
    if float(text) == 0:
        text = text.lstrip("+-")  # no signed zero: the same number must not print in two ways
    return text.replace("0.", ".", 1) if abs(float(text)) < 1 else text


def interval(summary: Summary, signed: bool = False) -> str:
    """`mean [lo, hi]`; the mean alone where one seed gives no interval."""
    centre = number(summary["mean"], signed)
    if summary["lo"] is None:
        return centre
    return f"{centre} [{number(summary['lo'], signed)}, {number(summary['hi'], signed)}]"
