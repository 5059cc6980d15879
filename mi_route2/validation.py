"""Frozen records that check every field, files that hold them, and error messages of one sentence.

    @validated
    class Schedule:
        steps: AtLeastOne = 80
        rate: Positive = 3e-3

    Schedule(steps=0)                         ValueError: steps must be greater than or equal to 1, not 0
    read_record(Schedule, path.read_bytes())  the same for a file, and: unknown setting 'step': did you mean 'steps'?

Pydantic checks every record under one strict configuration: a value has exactly its field's type (an ``int`` may stand for a
``float``), a float is finite, an unknown field is refused. ``dataclasses.replace`` checks again. Conditions between fields are
checked in ``__post_init__``, which raises ``ValueError`` or ``KeyError``.
"""

import codecs
import dataclasses
import functools
import json
import operator
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast, dataclass_transform

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from mi_route2.files import parse_json, shortened, write_whole

T = TypeVar("T")

STRICT = ConfigDict(strict=True, allow_inf_nan=False, extra="forbid", arbitrary_types_allowed=True)

AtLeastOne = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
_Unsigned = AfterValidator(lambda number: number + 0.0)
"""Makes -0.0 to 0.0, so that equal settings have equal hashes; other numbers keep every bit."""
NonNegative = Annotated[float, Field(ge=0), _Unsigned]
Probability = Annotated[float, Field(ge=0, le=1), _Unsigned]
Fraction = Annotated[float, Field(ge=0, lt=1), _Unsigned]
Name = Annotated[str, Field(pattern=r"^\w[\w.-]*$", description="a word of letters, digits, '_', '-' and '.'")]
Words = Annotated[
    tuple[Annotated[str, Field(min_length=1, description="text that is not empty")], ...],
    Field(min_length=1, description="a tuple of one or more texts"),
]


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field, Field))
def validated(cls: type[T]) -> type[T]:
    """Decorate a class as a frozen dataclass that raises ``ValueError`` in one sentence for a value that does not fit its field."""
    made: Any = dataclass(frozen=True, config=STRICT)(cls)
    checked = made.__init__

    @functools.wraps(checked)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        try:
            checked(self, *args, **kwargs)
        except ValidationError as error:
            raise ValueError(sentence(error, made)) from None

    made.__init__ = __init__
    return made


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Parse a JSON text that holds an object; errors as in ``parse_json``, and ``ValueError`` for any other value."""
    value = parse_json(text)
    if not isinstance(value, dict):
        raise ValueError(f"this is not a JSON object but {shortened(value)}")
    return value


def read_lines(file: Path, read: Callable[[int, Any], T]) -> list[T]:
    """Return ``read(index, value)`` for every non-blank line of a JSON Lines file, in order.

    Only a line feed ends a line: texts may contain the other characters that Python treats as line boundaries.

    Args:
        file: The file.
        read: Converts the value of a line; ``index`` counts all lines from 0.

    Raises:
        OSError: There is no such file.
        ValueError: ``read`` or ``parse_json`` refused a line; the message names file and line.
    """
    rows: list[T] = []
    with file.open("rb") as stream:
        for index, line in enumerate(stream):
            try:
                text = line.removeprefix(codecs.BOM_UTF8) if index == 0 else line
                if text.strip():
                    rows.append(read(index, parse_json(text)))
            except ValueError as error:
                raise ValueError(f"{file}, line {index + 1}: {error}") from error
    return rows


def read_object(path: Path, remedy: str) -> dict[str, Any]:
    """Return the object in a JSON file; ``ValueError`` names the file, the error and the remedy."""
    try:
        return parse_object(path.read_bytes())
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing; {remedy}") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({getattr(error, 'strerror', None) or error}); {remedy}") from error


def read_record(record: type[T], data: str | bytes | Mapping[str, Any]) -> T:
    """Read a ``record`` (its type) from JSON, or from a mapping with the content of JSON; ``ValueError`` in one sentence."""
    raw = parse_object(data) if isinstance(data, str | bytes) else data
    try:
        return TypeAdapter(record).validate_json(json.dumps(raw))
    except ValidationError as error:
        raise ValueError(sentence(error, record)) from None
    except KeyError as error:
        raise ValueError(error.args[0]) from error


def read_settings(record: type[T], path: Path, remedy: str, **more: Any) -> T:
    """Read a study's settings from the JSON file at ``path``, combined with the fields in ``more``.

    ``ValueError`` names the file and the remedy if the content does not fit.
    """
    try:
        return read_record(record, {**parse_object(path.read_bytes()), **more})
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{path} does not hold settings of this study ({reason}); {remedy}") from error


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file atomically; ``OSError`` in one sentence if the disk is full."""
    write_whole(path, (json.dumps(value, indent=2) + "\n").encode())


def read_assignments(words: Sequence[str], option: str) -> dict[str, str | None]:
    """Return the values in words ``name=value`` that were given to an option of a command line, by name and in order.

    A value is all that follows the first ``=``; it is ``None`` if the word has none.

    Raises:
        ValueError: If a name is given twice.
    """
    values: dict[str, str | None] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if name in values:
            raise ValueError(f"{option} gives {name} twice: remove one of them")
        values[name] = value if equals else None
    return values


def replace_fields(record: T, changes: Mapping[str, Any]) -> T:
    """Return ``record`` with other values of the named fields: ``{"steps": "100", "warm.lr": 1e-3}``.

    Values are words of a command line or values of a TOML file. The word ``none`` means no value, and commas separate the entries
    of a tuple. ``ValueError`` in one sentence.
    """
    raw = dataclasses.asdict(cast("Any", record))
    for name, value in changes.items():
        *path, field = name.split(".")
        fields = functools.reduce(operator.getitem, path, raw)
        if value == "none":
            fields[field] = None
        elif isinstance(value, str) and isinstance(fields[field], tuple):
            fields[field] = value.split(",")
        else:
            fields[field] = str(value).lower() if isinstance(value, bool) else value  # as a word, true is no number
    try:
        return TypeAdapter(type(record)).validate_python(raw, strict=False)
    except ValidationError as error:
        raise ValueError(sentence(error, type(record))) from None


def demand_device(name: str) -> None:
    """Raise ``ValueError`` if torch cannot use the device ``name`` on this machine."""
    import torch  # it takes seconds, for which a --help would wait

    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        here = [f"{torch.accelerator.current_accelerator()}"] if torch.accelerator.is_available() else []
        raise ValueError(f"the device {name!r} cannot be used here: choose from {', '.join(['cpu', *here])}") from error


def unknown_name(name: str, known: Sequence[str], what: str) -> str:
    """Return the error message for a name that is not among ``known``, with the closest name and all valid ones."""
    close = get_close_matches(name, known, 1)
    return f"unknown {what} {name!r}: {f'did you mean {close[0]!r}? ' if close else ''}choose from {', '.join(known)}"


def sentence(error: ValidationError, record: type) -> str:
    """Return pydantic's first error as one sentence (field, requirement, value), with the number of further errors."""
    first, *others = error.errors(include_url=False)
    more = f" (and {len(others)} more)" if others else ""
    if first["type"] == "value_error":
        return f"{first.get('ctx', {})['error']}{more}"
    loc = first["loc"]
    if loc and isinstance(loc[0], int) and dataclasses.is_dataclass(record):  # a positional argument
        loc = ([field.name for field in dataclasses.fields(record)] + ["argument"] * 9)[loc[0]], *loc[1:]
    name, words = ".".join(map(str, loc)) or record.__name__, first["msg"]
    if first["type"] == "unexpected_keyword_argument":
        return unknown_name(name, [field.name for field in dataclasses.fields(record)], "setting") + more
    if words.startswith("Input should "):
        words = words.removeprefix("Input should ").replace("be ", "must be ", 1)
        return f"{name} {words}, not {shortened(first['input'])}{more}"
    return f"{name}: {words}{more}"
