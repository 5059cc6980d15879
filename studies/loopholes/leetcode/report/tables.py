"""Numbers as Markdown and JSON, written whole or not at all."""

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scipy.stats import binomtest


def rate(k: int, n: int) -> dict[str, Any]:
    """``k`` of ``n`` with the Wilson interval at 95%; no share and no interval of nothing."""
    if not n:
        return {"k": k, "n": n, "rate": None, "low": None, "high": None}
    interval = binomtest(k, n).proportion_ci(method="wilson")
    return {"k": k, "n": n, "rate": k / n, "low": float(interval.low), "high": float(interval.high)}


def percent(found: Mapping[str, Any]) -> str:
    """A rate as text: 99.7 [99.1, 99.9]."""
    if found["rate"] is None:
        return "n/a"
    return f"{100 * found['rate']:.1f} [{100 * found['low']:.1f}, {100 * found['high']:.1f}]"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[object]], left: int = 1) -> str:
    """A padded pipe table; the first ``left`` columns are aligned left, the others right. Ends with a newline."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(3, *(len(row[column]) for row in cells)) for column in range(len(header))]

    def line(row: Sequence[str]) -> str:
        padded = [cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))]
        return "| " + " | ".join(padded) + " |"

    rule = "| " + " | ".join("-" * w if i < left else "-" * (w - 1) + ":" for i, w in enumerate(widths)) + " |"
    return "\n".join([line(cells[0]), rule, *(line(row) for row in cells[1:])]) + "\n"


def write(folder: Path, name: str, data: Mapping[str, Any], text: str) -> None:
    """``name.json`` and ``name.md`` in a folder, each through a temporary file beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in ((f"{name}.json", json.dumps(data, indent=1) + "\n"), (f"{name}.md", text)):
        descriptor, partial = tempfile.mkstemp(dir=folder, prefix=f".{file}.")
        try:
            with open(descriptor, "w", encoding="utf-8", newline="\n") as stream:
                stream.write(content)
            os.chmod(partial, 0o644)
            os.replace(partial, folder / file)
        except BaseException:
            os.unlink(partial)
            raise
