"""Published files of benchmarks, and the pages that print them."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from studies.benchmarks.measurement.paired import PairedRatioResult, Ratio

DOCS = Path(__file__).parents[2] / "docs"
R = TypeVar("R")
Quick = Callable[..., tuple[str, dict[str, Any]]]
"""The fixture of benchmarks: it returns what a run with ``--quick`` printed, and what it wrote."""


def published(name: str) -> dict[str, Any]:
    """Return the file of a benchmark."""
    return json.loads((DOCS / f"results/benchmarks/{name}.json").read_text(encoding="utf-8"))


def results(document: Mapping[str, Any], kind: type[R] = PairedRatioResult) -> list[R]:
    """Return the rows of a file; a value with an interval is a ``Ratio``."""
    return [
        kind(**{name: Ratio(**value) if isinstance(value, dict) else value for name, value in row.items()})
        for row in document["rows"]
    ]


def printed_table(page: str, name: str) -> str:
    """Return the table of a page that stands below ``<!-- table: NAME -->``."""
    found = re.search(rf"<!-- table: {name} -->\n\n((?:\|.*\n)+)", (DOCS / page).read_text(encoding="utf-8"))
    assert found, f"docs/{page} has no table below <!-- table: {name} -->"
    return found[1]


def demand_printed(page: str, name: str, expected: str) -> None:
    """Fail unless a page has this table below ``<!-- table: NAME -->``."""
    assert printed_table(page, name) == expected, f"docs/{page} must have, below <!-- table: {name} -->:\n\n{expected}"


def cells(table: str) -> list[list[str]]:
    """Return the cells of every line of a Markdown table, without the padding."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("|")]
