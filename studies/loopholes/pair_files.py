"""Files of persona pairs: readable TOML, or JSON lines; and the hash that names a set of them."""

import hashlib
import json
import re
import tomllib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mi_route2.validation import read_lines
from studies.loopholes.protocol import Pair

_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
"""What no literal string of TOML may hold: control characters but for the tab and the line feed."""


def pairs_hash(pairs: Sequence[Pair]) -> str:
    """16 hexadecimal digits that identify the texts and their order."""
    described = json.dumps([asdict(pair) for pair in pairs], sort_keys=True)
    return hashlib.sha256(described.encode()).hexdigest()[:16]


def write_pairs(pairs: Sequence[Pair], path: Path | str) -> None:
    """Writes pairs as TOML, one `[[pair]]` each, their texts as they are where TOML has room for that."""
    tables = ["\n".join(["[[pair]]", *(f"{name} = {_quoted(text)}" for name, text in asdict(pair).items())]) for pair in pairs]
    Path(path).write_text("\n".join(f"{table}\n" for table in tables), encoding="utf-8", newline="\n")


def _quoted(text: str) -> str:
    if "'''" in text or text.endswith("'") or _UNPRINTABLE.search(text):
        # JSON's escapes are TOML's too, but JSON writes DEL as it is
        return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
    # TOML drops a line break right after the quotes, so the text starts on its own line.
    return f"'''\n{text}'''"


def read_pairs(path: Path | str) -> list[Pair]:
    """Reads what `write_pairs` wrote, or JSON lines (`.jsonl`) of the same fields.

    Raises ValueError for anything else, naming the line or the pair, and for a pair whose two sides are the same text.
    """
    path = Path(path)
    if path.suffix.lower() == ".jsonl":
        return read_lines(path, lambda _index, row: _read(row))
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8-sig")).get("pair")
    except RecursionError as error:
        raise ValueError(f"{path} is TOML in too many brackets: a file of pairs has [[pair]] tables and nothing in them") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error.reason}, byte {error.start + 1}): save it as UTF-8") from error
    except ValueError as error:
        raise ValueError(f"{path} is no TOML: {error} (JSON lines are read from a file whose name ends in .jsonl)") from error
    if not isinstance(tables, list):
        raise ValueError(f"{path} is not a file of pairs: write [[pair]] tables of {', '.join(FIELDS)}")
    pairs = []
    for number, table in enumerate(tables, 1):
        try:
            pairs.append(_read(table))
        except ValueError as error:
            raise ValueError(f"{path}, pair {number}: {error}") from error
    return pairs


FIELDS = tuple(sorted(Pair.__dataclass_fields__))


def _read(row: Any) -> Pair:
    if not isinstance(row, dict) or set(row) != set(FIELDS):
        raise ValueError(f"a pair has the fields {', '.join(FIELDS)} and no others")
    if not all(isinstance(text, str) for text in row.values()):
        raise ValueError(f"{', '.join(FIELDS)} are texts")
    if row["hack"] == row["clean"]:
        raise ValueError("hack and clean are the same text, so there is no contrast in the pair")
    return Pair(**row)
