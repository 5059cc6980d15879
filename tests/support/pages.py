"""Blocks of the pages, run as a notebook runs its cells."""

import linecache
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(path: Path) -> list[tuple[int, str]]:
    """The fenced Python blocks of a file, each with the line that it begins on."""
    text = path.read_text(encoding="utf-8")
    return [(text.count("\n", 0, match.start(1)), match[1]) for match in FENCE.finditer(text)]


def run_block(page: str, line: int, code: str, namespace: dict[str, object]) -> None:
    """Run a block whose source can be read back (nnsight compiles traces from it); tracebacks name the page's line."""
    source, name = "\n" * line + code, f"{ROOT / page}:{line}"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), namespace)
