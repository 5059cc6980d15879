"""Replies are strict bounded JSON and nothing else, frames carry bytes, vessels keep what they have room for and forget it."""

import contextlib
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from timing import at_most

from studies.sandbox import JailLimits
from studies.sandbox.wire import DEPTH, read_reply

DIGITS = 4300  # Python's own limit
TEXT = st.text(st.characters(codec="utf-8"))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


def depth(data: Any) -> int:
    """By recursion over the data, where `too_deep` works on the text."""
    if isinstance(data, dict):
        return 1 + max(map(depth, data.values()), default=0)
    return 1 + max(map(depth, data), default=0) if isinstance(data, list) else 0


@given(JSON, st.booleans())
def test_every_json_value_is_read_as_it_was_written(data: Any, ascii_only: bool) -> None:
    raw = json.dumps(data, ensure_ascii=ascii_only).encode() + b"\n"
    reply = read_reply(raw, len(raw) - 1)
    assert reply == data
    assert json.dumps(reply) == json.dumps(data)  # also the types
    with pytest.raises(ValueError, match="longer than"):
        read_reply(raw, len(raw) - 2)


@given(st.binary(max_size=40) | st.text('[]{}",:\\ u0123456789aefdNI-+.\n').map(str.encode))
def test_whatever_is_written_is_data_or_a_value_error(raw: bytes) -> None:
    """The reader accepts what Python's own reader accepts, and its writer gives it back."""
    try:
        data = read_reply(raw, 100)
    except ValueError:
        return
    assert raw.endswith(b"\n")
    assert data == json.loads(raw)
    assert json.loads(json.dumps(data, allow_nan=False)) == data


NOT_FINITE = ["NaN", "Infinity", "-Infinity", "[NaN]", "1e999", "-1e999", '{"a": 1e400}']
TOO_LONG = ["1" * (DIGITS + 1), "[-" + "1" * (DIGITS + 1) + "]"]
SURROGATES = ['"\\ud800"', '{"\\udfff": 1}', '["\\ud83d"]']
TOO_DEEP = ["[" * (DEPTH + 1) + "]" * (DEPTH + 1), '{"a":' * (DEPTH + 1) + "1" + "}" * (DEPTH + 1), "[" * 200_000, "[]" * 100_000]
PYTHON = ["'a'", "[1,]", "{1: 2}", "0x10", "01", "+1", ".5", "True", "None"]
BROKEN = ["", " ", "1 2", "1,", "tru", '"a', '"\x01"', "\ufeff1", "//\n1"]


@pytest.mark.parametrize("line", NOT_FINITE + TOO_LONG + SURROGATES + TOO_DEEP + PYTHON + BROKEN)
def test_what_is_no_strict_json_is_refused(line: str) -> None:
    with pytest.raises(ValueError):
        read_reply(line.encode() + b"\n", 10**6)


@pytest.mark.parametrize(
    "raw", [b"", b"1", b"\n1\n", b"1\n\n", b"1\n2\n", b"1\n2", b"1\n\x00", b"\xff\n", b'"\xed\xa0\x80"\n', b"\x001\n", b"1\r\n2\n"]
)
def test_a_reply_is_one_line_of_utf_8(raw: bytes) -> None:
    with pytest.raises(ValueError):
        read_reply(raw, 100)


def test_what_looks_deep_or_long_but_is_not_is_read() -> None:
    for data in ("[" * 1000, '"\\' * 500 + "{[", [[0] * 50] * 50, "1" * (2 * DIGITS), ["\U0001f600 \\ud800"], 10**DIGITS // 10):
        assert read_reply(json.dumps(data).encode() + b"\n", 10**6) == data
    nested: Any = 1
    for _ in range(DEPTH):
        nested = [nested]
    assert read_reply(json.dumps(nested).encode() + b"\n", 10**6) == nested


@given(JSON)
def test_depth_is_told_from_the_text(data: Any) -> None:
    wrapped = data
    for _ in range(DEPTH - depth(data)):
        wrapped = {"k": wrapped}
    assert read_reply(json.dumps(wrapped).encode() + b"\n", 10**6) == wrapped
    with pytest.raises(ValueError, match="nested more than"):
        read_reply(json.dumps([wrapped]).encode() + b"\n", 10**6)


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 10**6,
        b"[]" * (10**6 // 2),
        b"]" * 10**6,
        b'"\\' * (10**6 // 2),
        b'"' * 10**6,
        b'{"' * (10**6 // 2),
        b"[{" * 20 + b"}]" * 20,
        b"[" + b",".join([b"9" * DIGITS] * 230),
        b"[" + b",".join([b"0." + b"1" * DIGITS] * 230),
    ],
)
@pytest.mark.parametrize("end", [b"", b"x", b'"', b"\\", b'\\"', b"]"])
def test_a_hostile_reply_costs_little_to_read(text: bytes, end: bytes) -> None:
    """A megabyte that is made to be slow, whatever comes last: quadratic reading takes minutes in the parent, and all jobs wait."""
    with at_most(2):
        with contextlib.suppress(ValueError):
            read_reply(text + end + b"\n", 1 << 20)


@pytest.mark.parametrize(
    "changes", [{"seconds": 0.0}, {"cpu_seconds": math.nan}, {"memory": 1000}, {"files": -1}, {"disk": 1 << 49}]
)
def test_limits_out_of_range_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="is out of range: choose from"):
        JailLimits(**changes)
