"""Numbers as Markdown and JSON, written whole or not at all."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scipy.stats import binomtest

from mi_route2.files import write_whole


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


def write(folder: Path, name: str, data: Mapping[str, Any], text: str) -> None:
    """``name.json`` and ``name.md`` in a folder, each whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in ((f"{name}.json", json.dumps(data, indent=1) + "\n"), (f"{name}.md", text)):
        write_whole(folder / file, content.encode())
