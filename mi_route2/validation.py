"""Frozen records that check every field, files that hold them, and error messages of one sentence.

    @validated
    class Schedule:
        steps: AtLeastOne = 80
        rate: Positive = 3e-3

    Schedule(steps=50.5)                      ValueError: steps must be a whole number of at least 1, not 50.5
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
import types
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, cast, dataclass_transform, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from mi_route2.files import parse_json, shown, write_whole

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

_BOUNDS = (("ge", "at least"), ("gt", "above"), ("le", "at most"), ("lt", "below"))
_OUT_OF_BOUNDS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")
_UNKNOWN = ("unexpected_keyword_argument", "unexpected_positional_argument")


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
        raise ValueError(f"this is not a JSON object but {shown(value)}")
    return value


def read_lines(file: Path, read: Callable[[int, Any], T], left_out: list[str] | None = None) -> list[T]:
    """Return ``read(index, value)`` for every non-blank line of a JSON Lines file, in order.

    Only a line feed ends a line: texts may contain the other characters that Python treats as line boundaries.

    Args:
        file: The file.
        read: Converts the value of a line; ``index`` counts all lines from 0.
        left_out: If a list is given, lines with an error are skipped and their error messages are appended to the list.

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
                if left_out is None:
                    raise ValueError(f"{file}, line {index + 1}: {error}") from error
                left_out.append(f"{file}, line {index + 1}: {error}")
    return rows


def read_object(path: Path, remedy: str) -> dict[str, Any]:
    """Return the object in a JSON file; ``ValueError`` names the file, the error and the remedy."""
    try:
        return parse_object(path.read_bytes())
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing; {remedy}") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({getattr(error, 'strerror', None) or error}); {remedy}") from error


def read_record(kind: type[T], data: str | bytes | Mapping[str, Any], *, optional: Sequence[str] = ()) -> T:
    """Read a record of type ``kind`` from JSON, or from a mapping with the content of JSON; ``ValueError`` in one sentence.

    Every field must be given, at every level, except for ``optional`` ones: a truncated file must not be completed with defaults.
    """
    raw = parse_object(data) if isinstance(data, str | bytes) else data
    try:
        record = TypeAdapter(kind).validate_json(json.dumps(raw))
    except ValidationError as error:
        raise ValueError(sentence(error, kind)) from None
    except KeyError as error:
        raise ValueError(error.args[0]) from error
    if missing := [name for name in _missing(record, raw) if name not in optional]:
        raise ValueError(f"{missing[0]} is missing")
    return record


def _missing(record: Any, raw: Any, before: str = "") -> list[str]:
    if not dataclasses.is_dataclass(record) or not isinstance(raw, Mapping):
        return []
    field_names = [field.name for field in dataclasses.fields(record)]
    missing = [before + name for name in field_names if name not in raw]
    return missing + [
        each for name in field_names if name in raw for each in _missing(getattr(record, name), raw[name], f"{before}{name}.")
    ]


def read_settings(kind: type[T], path: Path, remedy: str, *, optional: Sequence[str] = (), **more: Any) -> T:
    """Read a study's settings from the JSON file at ``path``, combined with the fields in ``more``.

    Every field except for the ``optional`` ones must be given. ``ValueError`` names the file and the remedy if the content does not
    fit.
    """
    try:
        return read_record(kind, {**parse_object(path.read_bytes()), **more}, optional=optional)
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
        changed = TypeAdapter(type(record)).validate_python(raw, strict=False)
    except ValidationError as error:
        raise ValueError(sentence(error, type(record))) from None
    for name, value in changes.items():
        read = functools.reduce(getattr, name.split("."), changed)
        numbers = [type(entry) in (int, float) for entry in (read if isinstance(read, tuple) else (read,))]
        if any(numbers) and "_" in str(value):  # Python reads 1_0 as 10
            raise ValueError(f"{name} must be {_wanted(_at(type(record), tuple(name.split('.')))[1])}, not {value!r}")
    return changed


def demand_device(name: str) -> None:
    """Raise ``ValueError`` that lists torch's devices of this machine if ``name`` is none of them."""
    import torch  # it takes seconds, for which a --help would wait

    here = ["cpu"]
    if torch.accelerator.is_available() and (kind := torch.accelerator.current_accelerator()) is not None:
        here += [f"{kind.type}:{number}" for number in range(torch.accelerator.device_count())]
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type != "cpu" and f"{device.type}:{device.index or 0}" not in here:
        raise ValueError(f"the device {name!r} cannot be used here: choose from {', '.join(here)}")


def unknown_name(name: str, known: Sequence[str], what: str) -> str:
    """Return the error message for a name that is not among ``known``, with the closest name and all valid ones."""
    close = get_close_matches(name, known, 1)
    return f"unknown {what} {name!r}: {f'did you mean {close[0]!r}? ' if close else ''}choose from {', '.join(known)}"


def sentence(error: ValidationError, kind: type) -> str:
    """Return pydantic's first error as one sentence (field, requirement, value), with the number of further errors."""
    first, *others = dict.fromkeys(_worded(kind, problem["loc"], problem) for problem in error.errors(include_url=False))
    return first + (f" (and {len(others)} more)" if others else "")


def _worded(kind: type, loc: tuple[int | str, ...], problem: Mapping[str, Any]) -> str:
    if problem["type"] == "value_error":
        return str(problem["ctx"]["error"])
    if problem["type"] == "json_invalid":
        return f"this is not JSON ({problem['ctx']['error']})"
    if problem["type"] in _UNKNOWN:
        _, record = _at(kind, loc[:-1])
        field_names = [field.name for field in dataclasses.fields(_record(record) or kind)]
        if problem["type"] == "unexpected_positional_argument":
            return f"{kind.__name__} takes at most {len(field_names)} values: {', '.join(field_names)}"
        return unknown_name(str(loc[-1]), field_names, "setting")
    name, annotation = _at(kind, loc)
    if problem["type"] in ("missing", "missing_argument"):
        return f"{name} is missing"
    if annotation is None:
        return f"{name or kind.__name__}: {problem['msg']}"
    given = shown(problem["input"])
    if problem["type"] in _OUT_OF_BOUNDS and (bounds := _bounds(annotation)):
        return f"{name} must be {bounds}, not {given}"
    return f"{name or kind.__name__} must be {_wanted(annotation)}, not {given}"


def _record(annotation: Any) -> Any:
    """Return the record among the alternatives of an annotation; ``None`` if there is none."""
    return next((each for each in (annotation, *get_args(annotation)) if dataclasses.is_dataclass(each)), None)


def _at(kind: type, loc: tuple[int | str, ...]) -> tuple[str, Any]:
    """Return the dotted field name and the annotation at ``loc`` within ``kind``."""
    names: list[str] = []
    annotation: Any = kind
    for place, part in enumerate(loc):
        if member := [each for each in get_args(annotation) if getattr(each, "__name__", None) == part]:  # of a union
            annotation = annotation if place == len(loc) - 1 else member[0]
            continue
        annotation = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
        record = _record(annotation)
        if record is not None:
            field_names = [field.name for field in dataclasses.fields(record) if field.init]
            names.append(field_names[part] if isinstance(part, int) and part < len(field_names) else str(part))
            annotation = get_type_hints(record, include_extras=True).get(names[-1])
        else:
            names.append(str(part))
            entries = [each for each in get_args(annotation) if each is not Ellipsis]
            annotation = entries[min(int(part), len(entries) - 1)] if entries and isinstance(part, int) else None
    return ".".join(names), annotation


def _bounds(annotation: Any) -> str:
    """Return the bounds of a number in words, for example ``at least 1``; empty if it has none."""
    for each in get_args(annotation):
        if get_origin(annotation) in (Union, types.UnionType) and (inner := _bounds(each)):
            return inner
    limits = {}
    for note in get_args(annotation)[1:] if get_origin(annotation) is Annotated else ():
        for each in getattr(note, "metadata", [note]):
            limits |= {key: getattr(each, key) for key, _ in _BOUNDS if hasattr(each, key)}
    if {"ge", "le"} <= limits.keys():
        return f"between {limits['ge']} and {limits['le']}"
    return " and ".join(f"{words} {limits[key]}" for key, words in _BOUNDS if key in limits)


def _wanted(annotation: Any) -> str:
    """Return the requirement of a field in words."""
    origin, entries = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        if described := [note.description for note in entries[1:] if getattr(note, "description", None)]:
            return described[0]
        bounds, plain = _bounds(annotation), _wanted(entries[0])
        return f"{plain}{' of ' if bounds.startswith('at ') else ' '}{bounds}" if bounds else plain
    if origin is Literal:
        return f"one of {', '.join(map(str, entries))}"
    if origin in (Union, types.UnionType):
        return " or ".join(map(_wanted, entries))
    if origin is tuple:
        return f"a tuple{'' if entries[-1] is Ellipsis else f' of {len(entries)}'}, each entry {_wanted(entries[0])}"
    words = {int: "a whole number", float: "a finite number", bool: "true or false", str: "text", type(None): "none"}
    return words.get(annotation) or f"of type {getattr(annotation, '__name__', annotation)}"
