"""Files of JSON lines, read strictly: what cannot be read is an error that names the file and the line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

Row = TypeVar("Row")


def read_lines(file: Path, read: Callable[[int, Any], Row], left_out: list[str] | None = None) -> list[Row]:
    """``read(index, value)`` of every line that is not blank, in order; ``index`` counts lines from 0.

    A line ends with a line feed and nowhere else: texts may hold the other characters that Python takes for the end of a line.
    Raises OSError where there is no such file, and ValueError naming file and line where `read` does, or where a line is no JSON
    in UTF-8. With a list ``left_out`` such lines are passed over and their sentences are put there.
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
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"this is no JSON ({error.msg}, character {error.pos + 1})") from error
    except RecursionError as error:
        raise ValueError("this is JSON in too many brackets") from error
