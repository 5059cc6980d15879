"""Files of persona pairs: readable TOML, or JSON lines; and the hash that names a set of them."""

import hashlib
import json
import tomllib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from studies.loopholes.protocol import Pair


def pairs_hash(pairs: Sequence[Pair]) -> str:
    """16 hexadecimal digits that identify the texts and their order."""
    described = json.dumps([asdict(pair) for pair in pairs], sort_keys=True)
    return hashlib.sha256(described.encode()).hexdigest()[:16]


def write_pairs(pairs: Sequence[Pair], path: Path | str) -> None:
    """Writes pairs as TOML, one `[[pair]]` each. Raises ValueError for a text that a literal string cannot hold."""
    tables = []
    for pair in pairs:
        lines = ["[[pair]]"]
        for name, text in asdict(pair).items():
            if "'''" in text or "\r" in text or text.endswith("'"):
                raise ValueError(f"the {name} {text!r} does not fit a literal string: leave out ''' and carriage returns")
            # TOML drops a line break right after the quotes, so the text starts on its own line.
            lines.append(f"{name} = '''\n{text}'''")
        tables.append("\n".join(lines) + "\n")
    Path(path).write_text("\n".join(tables), encoding="utf-8", newline="\n")


def read_pairs(path: Path | str) -> list[Pair]:
    """Reads what `write_pairs` wrote, or JSON lines (`.jsonl`) of the same fields. Raises ValueError for anything else."""
    text = Path(path).read_text(encoding="utf-8")
    if Path(path).suffix == ".jsonl":
        pairs, form = [json.loads(line) for line in text.splitlines() if line.strip()], "one JSON object a line"
    else:
        pairs, form = tomllib.loads(text).get("pair"), "[[pair]] tables"
    names = set(Pair.__dataclass_fields__)
    if not isinstance(pairs, list) or any(not isinstance(pair, dict) or set(pair) != names for pair in pairs):
        raise ValueError(f"{path} is not a file of pairs: write {form} of {', '.join(sorted(names))}")
    if any(not isinstance(text, str) for pair in pairs for text in pair.values()):
        raise ValueError(f"{path} is not a file of pairs: {', '.join(sorted(names))} are texts")
    return [Pair(**pair) for pair in pairs]
