"""Replies are strict bounded JSON and nothing else, frames carry bytes, vessels keep what they have room for and forget it."""

import contextlib
import json
import math
import os
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from timing import at_most

from studies.sandbox import JailLimits
from studies.sandbox.watch import CHUNK, Vessel
from studies.sandbox.wire import DEPTH, DIGITS, LENGTH, cut, pack, read_reply, read_reply_leniently, too_deep, write_all

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
    assert read_reply_leniently(raw) == data
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
TWICE = ['{"a": 1, "a": 2}', '[{"b": {"a": 1, "\\u0061": 2}}]']
SURROGATES = ['"\\ud800"', '{"\\udfff": 1}', '["\\ud83d"]']
TOO_DEEP = ["[" * (DEPTH + 1) + "]" * (DEPTH + 1), '{"a":' * (DEPTH + 1) + "1" + "}" * (DEPTH + 1), "[" * 200_000, "[]" * 100_000]
PYTHON = ["'a'", "[1,]", "{1: 2}", "0x10", "01", "+1", ".5", "True", "None"]
BROKEN = ["", " ", "1 2", "1,", "tru", '"a', '"\x01"', "\ufeff1", "//\n1"]


@pytest.mark.parametrize("line", NOT_FINITE + TOO_LONG + TWICE + SURROGATES + TOO_DEEP + PYTHON + BROKEN)
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


def test_brackets_pair_or_are_too_deep() -> None:
    assert not too_deep(b"[{}, {}] 1")
    assert too_deep(b"][")
    assert too_deep(b"]")


def test_the_control_reads_what_the_strict_reader_refuses() -> None:
    assert math.isnan(read_reply_leniently(b"NaN\n"))
    assert read_reply_leniently(b"1 garbage\n2\n") == 1
    assert read_reply_leniently(b'{"a": 1, "a": 2}') == {"a": 2}
    for raw in (b"", b"[" * 100_000):
        with pytest.raises(ValueError):
            read_reply_leniently(raw)


@given(st.lists(st.binary(max_size=20), max_size=5))
def test_a_body_is_cut_into_its_parts(parts: list[bytes]) -> None:
    assert cut(b"".join(parts), [len(part) for part in parts]) == parts


def test_a_frame_begins_with_the_length_of_its_header() -> None:
    frame = pack({"a": 1})
    assert LENGTH.unpack(frame[: LENGTH.size])[0] == len(frame) - LENGTH.size
    assert json.loads(frame[LENGTH.size :]) == {"a": 1}


@pytest.mark.parametrize(
    ("room", "size"), [(0, 0), (0, 10), (10, 10), (10, 11), (5 * CHUNK, 3 * CHUNK + 7), (CHUNK + 1, 4 * CHUNK)]
)
def test_a_vessel_keeps_what_it_has_room_for_and_forgets_it(room: int, size: int) -> None:
    content = bytes(range(1, 251)) * (size // 250 + 1)
    vessel = Vessel()
    vessel.wipe(room)
    read, write = os.pipe()
    sender = threading.Thread(target=lambda: (write_all(write, content[:size]), os.close(write)))
    sender.start()
    while vessel.fill(read):
        pass
    sender.join()
    os.close(read)
    assert (bytes(vessel.view), vessel.seen, vessel.cut) == (content[: min(room, size)], size, size > room)
    view = vessel.view
    vessel.wipe(1)
    assert not any(view)
    assert (len(vessel.view), vessel.seen, vessel.room) == (0, 0, 1)


def test_a_vessel_tells_nothing_yet_from_the_end() -> None:
    vessel = Vessel()
    vessel.wipe(10)
    read, write = os.pipe()
    os.set_blocking(read, False)
    assert vessel.fill(read) is None
    write_all(write, b"abc", memoryview(b"de"))
    assert vessel.fill(read) is True
    os.close(write)
    assert vessel.fill(read) is False
    assert bytes(vessel.view) == b"abcde"
    os.close(read)
    read, write = os.pipe()
    write_all(write, b"abc")
    os.close(write)
    assert not Vessel().read(read, 5)
    os.close(read)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seconds": 0.0}, "seconds = 0.0 is not a time: choose a number of seconds above 0 and up to 1000000"),
        ({"seconds": math.inf}, "seconds = inf is not a time"),
        ({"seconds": 3e6}, "seconds = 3000000.0 is not a time"),  # more milliseconds than a poll takes
        ({"cpu_seconds": 1e19}, r"cpu_seconds = 1e\+19 is not a time"),
        ({"cpu_seconds": math.nan}, "cpu_seconds = nan is not a time"),
        ({"cpu_seconds": -1.0}, "cpu_seconds = -1.0 is not a time"),
        ({"files": True}, "files = True is not a whole number"),
        ({"file_size": -1}, "file_size = -1 is negative: choose 0 or more"),
        ({"disk": -1}, "disk = -1 is negative"),
        ({"files": -1}, "files = -1 is negative"),
        ({"output": -1}, "output = -1 is negative"),
        ({"memory": 1000}, "memory = 1000 is too little for any program: choose at least 16777216 bytes, 16 MiB"),
        ({"reply": 0}, "reply = 0 leaves no room for a reply: choose at least 1 byte"),
        ({"disk": 1 << 48}, r"disk = 281474976710656 is beyond any machine: choose less than 2\*\*48"),
    ],
)
def test_limits_make_sense(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        JailLimits(**changes)
