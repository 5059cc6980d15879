"""Python blocks of Markdown pages, run in order in one namespace."""

import linecache
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(path: Path) -> list[tuple[int, str]]:
    """Return each ```python block with its line number."""
    text = path.read_text(encoding="utf-8")
    return [(text.count("\n", 0, match.start(1)), match[1]) for match in FENCE.finditer(text)]


def run_page(path: Path) -> dict[str, object]:
    """Run the blocks and return their namespace. nnsight reads a block's source back; tracebacks have the page's lines."""
    namespace: dict[str, object] = {"__name__": "docs"}
    for line, code in blocks(path):
        source, name = "\n" * line + code, f"{path}:{line}"
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        exec(compile(source, name, "exec"), namespace)
    return namespace
