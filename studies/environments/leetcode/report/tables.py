"""Format rates and write tables as Markdown and JSON files, each file atomically."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scipy.stats import binomtest

from mi_route2.files import write_whole


def rate(k: int, n: int) -> dict[str, Any]:
    """Return ``k`` of ``n`` as a rate with its 95% Wilson interval; rate and interval are None if ``n`` is 0."""
    if not n:
        return {"k": k, "n": n, "rate": None, "low": None, "high": None}
    interval = binomtest(k, n).proportion_ci(method="wilson")
    return {"k": k, "n": n, "rate": k / n, "low": float(interval.low), "high": float(interval.high)}


def percent(found: Mapping[str, Any]) -> str:
    """Format a rate and its interval in percent, for example ``99.7 [99.1, 99.9]``, or ``n/a`` without a rate."""
    if found["rate"] is None:
        return "n/a"
    return f"{100 * found['rate']:.1f} [{100 * found['low']:.1f}, {100 * found['high']:.1f}]"


def write(folder: Path, name: str, data: Mapping[str, Any], text: str) -> None:
    """Write ``name.json`` and ``name.md`` to a folder, each atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in ((f"{name}.json", json.dumps(data, indent=1) + "\n"), (f"{name}.md", text)):
        write_whole(folder / file, content.encode())
