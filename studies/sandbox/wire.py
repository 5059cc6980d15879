"""The two languages of the jail: frames between a parent and its servers, which trust each other, and replies, which nobody trusts.

A frame is the length of a JSON header, the header, and a body of raw bytes whose parts the header measures. A reply is one line of
JSON, written by a process in which a candidate may have done anything.
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
"""What a server is told of a job: its number, the bytes of its payload, and its limits in the order of `Limits`."""

CONFINED = b"+"
"""The first byte in the reply pipe, written by trusted code once the child is confined."""
FAILED = b"-"
"""The first byte where confinement failed; what follows says why."""

DEPTH = 64
"""Levels of nesting in a reply."""
DIGITS = 4300
"""Digits of an integer in a reply: Python's own limit."""

# Both look at a byte once. A string without an end is the rest of the text, also where that ends in a lone backslash: were it no
# match, every quote in it would be tried anew. A long number is looked for where digits begin, not at each of them.
STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
LONG_NUMBER = re.compile(rb"(?<!\d)\d{%d}" % (DIGITS + 1))
ONE_KIND = bytes.maketrans(b"{}", b"[]")
NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def write_all(descriptor: int, *parts: bytes | bytearray | memoryview) -> None:
    """Writes every byte of the parts, without a copy of them."""
    for part in parts:
        view = memoryview(part)
        while view:
            view = view[os.write(descriptor, view) :]


def pack(header: dict[str, Any]) -> bytes:
    """The beginning of a frame."""
    text = json.dumps(header).encode()
    return LENGTH.pack(len(text)) + text


def too_deep(text: bytes) -> bool:
    """Whether brackets outside strings are nested more than `DEPTH` levels, or do not pair; linear in the text."""
    brackets = text.translate(ONE_KIND, NOT_BRACKETS)
    for _ in range(DEPTH):  # each round takes the innermost level away
        if not brackets:
            return False
        brackets = brackets.replace(b"[]", b"")
    return bool(brackets)


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _number(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse(text)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    return found if len(found) == len(pairs) else _refuse("a repeated name")


_DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=_number, object_pairs_hook=_object)


def read_reply(raw: bytes, limit: int) -> Any:
    """The data of a reply. Raises ValueError unless it is exactly one line of plain, finite, bounded JSON.

    One line and nothing after it, of at most `limit` bytes without its end; UTF-8 without lone surrogates; no NaN or Infinity,
    also not by overflow; no name twice in an object; at most `DEPTH` levels and `DIGITS` digits.
    """
    if not raw.endswith(b"\n") or raw.count(b"\n") != 1:
        raise ValueError("a reply is one line")
    line = raw[:-1]
    if len(line) > limit:
        raise ValueError(f"the reply is longer than {limit} bytes")
    outside = STRING.sub(b"", line)
    if LONG_NUMBER.search(outside):
        raise ValueError(f"the reply has a number of more than {DIGITS} digits")
    if too_deep(outside):
        raise ValueError(f"the reply is nested more than {DEPTH} levels deep, or not at all well")
    data = _DECODER.decode(line.decode("utf-8"))
    if b"\\u" in line:  # the only way to a surrogate, as UTF-8 has none
        for text in _strings(data):
            text.encode("utf-8")  # UnicodeEncodeError is a ValueError
    return data


def read_reply_leniently(raw: bytes) -> Any:
    """The control for `read_reply`: the first JSON value, as Python's own reader has it, whatever comes after."""
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
    """A body's parts."""
    parts, start = [], 0
    for length in lengths:
        parts.append(body[start : start + length])
        start += length
    return parts
