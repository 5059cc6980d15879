"""Formats of the jail: frames between a parent and its servers, which trust each other, and replies, which are not trusted.

A frame is the length of a JSON header, the header, and a body of raw bytes; the header has the lengths of the body's parts. A reply
is one line of JSON, written by a process in which a candidate may have done anything.
"""

import json
import os
import re
import struct
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

# Reads each byte once: an unterminated string matches to the end of the text, even if that is a lone backslash. Otherwise every
# quote in it would be tried again.
STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
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


def read_reply(raw: bytes, limit: int) -> Any:
    """Return the data of a reply, which must be exactly one line of plain, finite and bounded JSON.

    Allowed are at most ``limit`` bytes without the line feed; UTF-8 without lone surrogates; no NaN or Infinity, not even by
    overflow; at most `DEPTH` levels, and integers of as many digits as Python reads.

    Raises:
        ValueError: The reply has another form.
    """
    if not raw.endswith(b"\n") or raw.count(b"\n") != 1:
        raise ValueError("a reply must be one line")
    line = raw[:-1]
    if len(line) > limit:
        raise ValueError(f"the reply is longer than {limit} bytes")
    if too_deep(STRING.sub(b"", line)):
        raise ValueError(f"the reply is nested more than {DEPTH} levels deep, or its brackets are unbalanced")
    data = json.loads(line.decode("utf-8"))
    json.dumps(data, allow_nan=False, ensure_ascii=False).encode()  # ValueError for NaN, infinite numbers and lone surrogates
    return data
