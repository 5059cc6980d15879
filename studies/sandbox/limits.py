"""What a job may use and what comes back of it: plain data, shared by both sides of the jail."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, Literal

PROTECTIONS = ("rlimits", "privileges", "landlock", "seccomp", "watchdog", "reply")
"""Every layer by name, in the order in which they are put on."""

KERNEL_PROTECTIONS = PROTECTIONS[:4]
"""Those that a child asks of the kernel, which may lack them; the others work from outside."""

Status = Literal["replied", "exited", "signalled", "timeout", "cpu", "output", "disk"]

MIB = 1 << 20

_MODULES = {
    "data": "array bisect collections collections.abc copy copyreg csv dataclasses enum graphlib heapq json queue struct weakref",
    "numbers": "cmath decimal fractions math numbers random secrets statistics",
    "text": "ast base64 difflib hashlib html keyword pprint re reprlib string textwrap unicodedata zlib",
    "time": "calendar datetime locale sched time timeit",
    "functions and types": "abc builtins contextlib functools inspect itertools operator types typing",
    "the system": "errno gc io logging os os.path pathlib shutil signal sys tempfile threading warnings",
    "errors and tests": "linecache traceback unittest",
    "imported lazily by these": "_strptime encodings.ascii encodings.base64_codec encodings.cp1252 encodings.hex_codec "
    "encodings.idna encodings.latin_1 encodings.punycode encodings.raw_unicode_escape encodings.rot_13 encodings.unicode_escape "
    "encodings.utf_16 encodings.utf_16_be encodings.utf_16_le encodings.utf_32 encodings.utf_8_sig",
}
DEFAULT_MODULES = tuple(name for names in _MODULES.values() for name in names.split())
"""What a candidate can import unless it is told otherwise: what solutions to exercises use."""


KINDS: Mapping[Any, tuple[type, str]] = MappingProxyType({int: (Integral, "a whole number"), float: (Real, "a number")})
"""Type of a limit -> what is taken for it, and how that is called."""


class JailUnavailableError(OSError):
    """This machine lacks a protection, and nobody said that it may be done without."""


@dataclass(frozen=True)
class Limits:
    """What one job may use. Raises ValueError where a number makes no sense.

    seconds      wall clock
    cpu_seconds  processor time, user and system
    memory       bytes of address space above the idle child's, at least 16 MiB
    file_size    bytes in one file
    disk         bytes in all files of the folder together
    files        files in the folder
    output       bytes kept of stdout, and of stderr; more is cut, `FLOOD` times as many end the job
    reply        bytes of the reply's JSON
    """

    seconds: float = 5.0
    cpu_seconds: float = 5.0
    memory: int = 512 * MIB
    file_size: int = 1 * MIB
    disk: int = 4 * MIB
    files: int = 64
    output: int = 64 << 10
    reply: int = 1 * MIB

    def __post_init__(self) -> None:
        for f in fields(self):
            value, (kind, wanted) = getattr(self, f.name), KINDS[f.type]
            if not isinstance(value, kind) or isinstance(value, bool):
                raise ValueError(f"{f.name} = {value!r} is not {wanted}: choose one")
        for name in ("seconds", "cpu_seconds"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} = {value} is not a time: choose a finite number of seconds above 0")
        for name in ("file_size", "disk", "files", "output"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)} is negative: choose 0 or more")
        if self.memory < 16 * MIB:
            raise ValueError(f"memory = {self.memory} is too little for any program: choose at least {16 * MIB} bytes")
        if self.reply < 1:
            raise ValueError(f"reply = {self.reply} leaves no room for a reply: choose at least 1 byte")
        large = [f.name for f in fields(self) if f.type is int and getattr(self, f.name) >= 1 << 48]
        if large:
            raise ValueError(f"{large[0]} = {getattr(self, large[0])} is beyond any machine: choose less than 2**48")


FLOOD = 64
"""A job that writes this many times what is kept of its output is ended."""


@dataclass(frozen=True)
class Outcome:
    """What a job did.

    status       replied: it ended by itself, with exit status 0 and one acceptable reply;
                 exited: it ended by itself in any other way (`exit_code`; 0 where only the reply was not acceptable);
                 signalled: it died of `signal`; timeout, cpu, output, disk: it went over that limit and was killed
    reply        the driver's data, or whatever the candidate forged: data in either case; None unless replied
    exit_code    0 where it replied
    stdout       what went to descriptor 1, the first `Limits.output` bytes of it; stderr likewise
    truncated    whether either was cut
    files        name -> bytes of the regular files that it left, as far as they are within the limits
    seconds      wall clock from fork to end
    cpu_seconds  processor time
    peak_memory  largest resident set in bytes, the idle interpreter's included
    """

    status: Status
    reply: Any = None
    exit_code: int | None = None
    signal: int | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    truncated: bool = False
    files: Mapping[str, bytes] = field(default_factory=lambda: MappingProxyType({}))
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_memory: int = 0
