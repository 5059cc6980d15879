"""Formats of the jail: frames between a parent and its servers, which trust each other, and replies, which are not trusted.

A frame is the length of a JSON header, the header, and a body of raw bytes; the header has the lengths of the body's parts. A reply
is one line of JSON, written by a process in which a candidate may have done anything.
"""

import json
import math
import os
import re
import struct
from collections.abc import Iterator, Sequence
from typing import Any

LENGTH = struct.Struct("<Q")
JOB = struct.Struct("<QQdd6Q")
"""Header of a job for a server: its number, the length of its payload in bytes, and its limits in the order of `Limits`."""

CONFINED = b"+"
"""First byte in the reply pipe, written by trusted code after the child is confined."""
FAILED = b"-"
"""First byte in the reply pipe if confinement failed; the reason follows."""

DEPTH = 64
"""Maximum levels of nesting in a reply."""
DIGITS = 4300
"""Maximum digits of an integer in a reply, which is Python's own limit."""

# Both patterns read each byte once. An unterminated string matches to the end of the text, even if that is a lone backslash:
# otherwise every quote in it would be tried again. A long number is searched from the first of its digits only.
STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
LONG_NUMBER = re.compile(rb"(?<!\d)\d{%d}" % (DIGITS + 1))
ONE_KIND = bytes.maketrans(b"{}", b"[]")
NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def write_all(descriptor: int, *buffers: bytes | bytearray | memoryview) -> None:
    """Write all bytes of the buffers to a descriptor, without copying them."""
    for buffer in buffers:
        view = memoryview(buffer)
        while view:
            view = view[os.write(descriptor, view) :]


def pack(header: dict[str, Any]) -> bytes:
    """Return the beginning of a frame: the header's length and the header."""
    text = json.dumps(header).encode()
    return LENGTH.pack(len(text)) + text


def too_deep(text: bytes) -> bool:
    """Return True if brackets outside of strings are nested more than `DEPTH` levels or are unbalanced, in linear time."""
    brackets = text.translate(ONE_KIND, NOT_BRACKETS)
    for _ in range(DEPTH):  # each round removes the innermost level
        if not brackets:
            return False
        brackets = brackets.replace(b"[]", b"")
    return bool(brackets)


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _number(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse(text)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    return entries if len(entries) == len(pairs) else _refuse("a repeated name")


_DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=_number, object_pairs_hook=_object)


def read_reply(raw: bytes, limit: int) -> Any:
    """Return the data of a reply, which must be exactly one line of plain, finite and bounded JSON.

    Allowed are at most ``limit`` bytes without the line feed; UTF-8 without lone surrogates; no NaN or Infinity, not even by
    overflow; no repeated name in an object; at most `DEPTH` levels and `DIGITS` digits.

    Raises:
        ValueError: The reply has another form.
    """
    if not raw.endswith(b"\n") or raw.count(b"\n") != 1:
        raise ValueError("a reply must be one line")
    line = raw[:-1]
    if len(line) > limit:
        raise ValueError(f"the reply is longer than {limit} bytes")
    outside = STRING.sub(b"", line)
    if LONG_NUMBER.search(outside):
        raise ValueError(f"the reply has a number of more than {DIGITS} digits")
    if too_deep(outside):
        raise ValueError(f"the reply is nested more than {DEPTH} levels deep, or its brackets are unbalanced")
    data = _DECODER.decode(line.decode("utf-8"))
    if b"\\u" in line:  # only an escape can produce a surrogate, because UTF-8 has none
        for text in _strings(data):
            text.encode("utf-8")  # UnicodeEncodeError is a ValueError
    return data


def read_reply_leniently(raw: bytes) -> Any:
    """Return the first JSON value of a reply as Python's own reader parses it, ignoring the rest; the control for `read_reply`."""
    try:
        return json.JSONDecoder().raw_decode(raw.decode("utf-8", "replace").lstrip())[0]
    except RecursionError as error:
        raise ValueError("the reply is nested too deep to be read") from error


def _strings(data: Any) -> Iterator[str]:
    stack = [data]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            stack.extend(item)
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)


def cut(body: bytes, lengths: Sequence[int]) -> list[bytes]:
    """Split a body into consecutive parts of the given lengths."""
    pieces, start = [], 0
    for length in lengths:
        pieces.append(body[start : start + length])
        start += length
    return pieces
