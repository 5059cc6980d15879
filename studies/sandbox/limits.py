"""Limits and outcome of a job: plain data that both sides of the jail share."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

PROTECTIONS = ("rlimits", "privileges", "landlock", "seccomp", "watchdog")
"""Names of all protections, in the order in which they are applied."""

KERNEL_PROTECTIONS = PROTECTIONS[:4]
"""Protections that the kernel provides to a child, or may lack; the server applies the watchdog from outside."""

Status = Literal["replied", "exited", "signalled", "timeout", "cpu", "output", "disk"]

MIB = 1 << 20

LONGEST = 1_000_000
"""Maximum seconds of a job: eleven days, and as milliseconds within what a poll takes."""

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
"""Modules that a candidate can import by default: those that solutions to exercises use."""


class JailUnavailableError(OSError):
    """This machine lacks a protection, and ``unsafe=True`` was not given."""


@dataclass(frozen=True)
class JailLimits:
    """Resources that one job may use.

    Attributes:
        seconds: Wall-clock time in seconds.
        cpu_seconds: Processor time in seconds, user and system.
        memory: Bytes of address space above an idle child's, at least 16 MiB.
        file_size: Bytes of one file.
        disk: Bytes of all files of the folder together.
        files: Number of files in the folder, and of open descriptors if it is above 64.
        output: Bytes kept of stdout, and of stderr; the rest is cut, and `FLOOD` times as many bytes end the job.
        reply: Bytes of the reply's JSON.

    Raises:
        ValueError: A limit is not valid.
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
        least = {"seconds": 1e-3, "cpu_seconds": 1e-3, "memory": 16 * MIB, "reply": 1}
        for name, value in vars(self).items():
            low, high = least.get(name, 0), _highest(name)
            if not low <= value <= high:
                raise ValueError(f"{name} = {value} is out of range: choose from [{low}, {high}]")

    def scaled(self, factor: int) -> "JailLimits":
        """Return limits for ``factor`` times as many inputs: all but memory, which is a peak and the machine's, not a sum."""
        sums: dict[str, Any] = {name: min(factor * value, _highest(name)) for name, value in vars(self).items() if name != "memory"}
        return replace(self, **sums)


def _highest(name: str) -> int:
    return LONGEST if "seconds" in name else 1 << 48


FLOOD = 64
"""Factor on `JailLimits.output` after which a job that writes more is ended."""


@dataclass(frozen=True)
class JailOutcome:
    """Result of a job.

    Attributes:
        status: One of

            - replied: the job ended by itself, with exit status 0 and one valid reply
            - exited: it ended by itself in any other way; see ``exit_code``, which is 0 if only the reply was not valid
            - signalled: ``signal`` killed it
            - timeout, cpu, output, disk: it exceeded that limit and was killed
        reply: The driver's data, or data that the candidate forged; None unless the status is replied.
        exit_code: Exit status; 0 if the job replied.
        signal: Number of the signal that killed the job.
        stdout: First `JailLimits.output` bytes written to descriptor 1.
        stderr: First `JailLimits.output` bytes written to descriptor 2.
        truncated: Whether stdout or stderr was cut.
        files: ``{name: bytes}`` of the regular files that the job left, up to the limits.
        seconds: Wall-clock time from fork to end.
        cpu_seconds: Processor time.
        peak_memory: Largest resident set in bytes, including the idle interpreter.
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
