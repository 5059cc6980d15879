"""Files of JSON lines, read strictly: what cannot be read is an error that names the file and the line."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

Row = TypeVar("Row")
_HALF = re.compile(r"\\u[dD][89a-fA-F]")


def read_lines(file: Path, read: Callable[[int, Any], Row], left_out: list[str] | None = None) -> list[Row]:
    """``read(index, value)`` of every line that is not blank, in order; ``index`` counts lines from 0.

    A line ends with a line feed and nowhere else: texts may hold the other characters that Python takes for the end of a line.
    Raises OSError where there is no such file, and ValueError naming file and line where `read` does, or where a line is no JSON
    in UTF-8, has a name twice in one object, or the escape of half a character. With a list ``left_out`` such lines are passed over
    and their sentences are put there.
    """
    rows: list[Row] = []
    with file.open("rb") as stream:
        for index, line in enumerate(stream):
            try:
                text = line.decode("utf-8-sig" if index == 0 else "utf-8")
                if text.strip():
                    rows.append(read(index, _parsed(text)))
            except ValueError as error:
                sentence = f"{file}, line {index + 1}: {error}"
                if left_out is None:
                    raise ValueError(sentence) from error
                left_out.append(sentence)
    return rows


def _parsed(text: str) -> Any:
    try:
        value = json.loads(text, object_pairs_hook=_unique)
        if _HALF.search(text):  # the escape of one half of a pair, or of both
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        return value
    except json.JSONDecodeError as error:
        raise ValueError(f"this is no JSON ({error.msg}, character {error.pos + 1})") from error
    except RecursionError as error:
        raise ValueError("this is JSON in too many brackets: write it flatter") from error
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ValueError(f"a text holds half a character (\\u{ord(half):04x}): write the whole pair of escapes") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object, whose last of two equal names would win in silence."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the name {name!r} is there twice in one object: leave one of them out")
        found[name] = value
    return found
