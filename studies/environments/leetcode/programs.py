"""Programs and their executions: the parent's side of `driver`, which knows inputs and never an expected value.

    LeetCodeProgram (code, calls)  ->  Programs.run  ->  LeetCodeExecution (returns, stdout, files, attributes, exit, run_tests)

Graders and oracle read executions, sometimes the same one (`ExecutionLedger`). Neither this module nor the jail knows modes or
verdicts. The reply of a jail's process was written beside untrusted code, so it is read strictly: a reply that does not have the
driver's form counts as that of a broken program.
"""

import json
import signal
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Literal

from studies.environments.leetcode.values import Opaque, decode
from studies.environments.protocol import TextPrompt
from studies.sandbox import DEFAULT_MODULES, Jail, JailLimits, JailOutcome

DRIVER = Path(__file__).with_name("driver.py")
LIMITS = JailLimits(seconds=30.0, cpu_seconds=10.0, reply=4 << 20)
"""The slowest reference solutions take two to three seconds of processor time for all their tests; a busy machine takes longer."""
LIMITS_MET = frozenset({"timeout", "cpu", "output", "disk", "SIGKILL"})
"""Reasons of a killed program that are limits; SIGKILL is the kernel's, for a machine that is out of memory."""
ERRORS_OF_LIMITS = frozenset({"MemoryError", "OSError"})
"""Exceptions by which a program learns of the limits of memory, and of files and descriptors."""
ATTRIBUTES = ("valid",)
MODULES = (*DEFAULT_MODULES, "__future__")
"""Modules that programs can import."""
LONGEST = 1 << 15
"""Maximum number of characters of a program, because graders and detectors parse a model's text in their own process."""
MARKS = 30
"""Maximum number of combining characters in a row, also of those that normalization makes of other characters: Python normalizes
an identifier each time that it tries to read it, which takes time with the square of such a run."""
DEEPEST = 2000
"""Maximum depth of a syntax tree. Python's own bound (near 3,000) is lower the more functions have called the parser."""
TEXT, TEXTS = 1 << 16, 1 << 18
"""Maximum bytes that are read of one file and of stdout, and of all files."""
NAME = 80
"""Maximum length of an exception's name."""
ATTRIBUTE = 1 << 10
"""Maximum number of characters of an attribute's JSON, because attributes are decoded, and kept, for all programs of a batch."""
LEDGER = 1 << 26
"""Maximum number of characters of answers and executions that are kept for the oracle in addition to the last batch."""

Status = Literal["ok", "syntax", "error", "absent", "exited", "killed"]
RunTests = Literal["absent", "passed", "failed"]


def readable(code: str) -> bool:
    """Return True if a text is short enough, and plain enough, to be parsed outside of the jail."""
    if len(code) > LONGEST:
        return False
    run = 0
    for character in "" if code.isascii() else code:
        for part in unicodedata.normalize("NFKD", character):  # one by one: the whole text would take the time that this prevents
            run = run + 1 if unicodedata.combining(part) else 0
            if run > MARKS:
                return False
    return True


@dataclass(frozen=True)
class LeetCodeProgram:
    """Source code that defines `Solution`, and its calls (texts by `problems.call_text`).

    With ``run_tests`` only its own ``run_tests`` is called. Its limits are ``scale`` times those of `Programs`.
    """

    code: str
    setup: str
    function: str
    calls: tuple[str, ...] = ()
    run_tests: bool = False
    scale: int = 1


@dataclass(frozen=True, eq=False)
class Returned:
    """Result of a call: a value, stored as the received text, or the name of an exception.

    ``overrides`` is True if the value has an ``==`` that holds against anything.
    """

    text: str = ""
    raised: str = ""
    overrides: bool = False

    @property
    def limited(self) -> bool:
        """True if a limit may have kept the program from returning, or its value from being sent."""
        return self.raised in ERRORS_OF_LIMITS or self.text == TOO_LARGE

    @property
    def value(self) -> object:
        """The value, decoded on each access; `Opaque` if it is not plain data.

        It may be fifty times as large in memory as its text, and all executions of a batch are in memory together.
        """
        return _value(self.text) if self.text else Opaque("raised")


@dataclass(frozen=True, eq=False)
class LeetCodeExecution:
    """Behavior of a program.

    status      ok; syntax: it does not compile; error: its definition raised (`reason`: the exception); absent: it has no such
                method; exited: it ended its process; killed: it exceeded a limit or died of a signal (`reason`: which)
    returns     one per call; fewer if the program ended before
    stdout      its output, or the beginning of it
    files       name -> text of the files that it left, small ones first up to a limit
    attributes  those of its instance that graders read
    exit_code   the status with which it ended itself, by ``sys.exit`` or directly; None if it did not
    run_tests   the outcome of its own ``run_tests``
    seconds     processor time that it took
    """

    status: Status
    reason: str = ""
    returns: tuple[Returned, ...] = ()
    stdout: str = ""
    files: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    attributes: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    exit_code: int | None = None
    run_tests: RunTests = "absent"
    seconds: float = 0.0

    @property
    def limited(self) -> bool:
        """True if a limit of its process ended it, or one of its calls."""
        return self.reason in LIMITS_MET or any(returned.limited for returned in self.returns)


class ExecutionLedger:
    """Raw executions for which answers were graded, so that the oracle can read them with its own code.

    A program may behave differently when it is run again, so a second run is no evidence of what was graded. Executions of the last
    batch are always kept; older ones as long as all together, with prompts and answers, have no more than ``room`` characters. The
    latest of an answer that is graded again is kept.
    """

    def __init__(self, room: int = LEDGER) -> None:
        self._room, self._total = room, 0
        self._kept: dict[tuple[TextPrompt, str], tuple[tuple[LeetCodeExecution, ...], int]] = {}

    def keep(self, graded: Sequence[tuple[TextPrompt, str, Sequence[LeetCodeExecution]]]) -> None:
        """Store a batch: the executions of each prompt and completion; none for an answer without a program."""
        batch = {(prompt, completion): tuple(executions) for prompt, completion, executions in graded}
        for key, executions in batch.items():
            self._drop(key)  # a new entry counts as the latest
            self._kept[key] = executions, len(key[0].text) + len(key[1]) + sum(map(_weight, executions))
            self._total += self._kept[key][1]
        for key in list(self._kept)[: len(self._kept) - len(batch)]:
            if self._total <= self._room:
                break
            self._drop(key)

    def find(self, prompt: TextPrompt, completion: str) -> tuple[LeetCodeExecution, ...] | None:
        """Return the executions for which a completion was graded; None if no grade is recorded."""
        return self._kept.get((prompt, completion), (None, 0))[0]

    def _drop(self, key: tuple[TextPrompt, str]) -> None:
        self._total -= self._kept.pop(key, ((), 0))[1]


def _weight(execution: LeetCodeExecution) -> int:
    """Return the approximate number of characters in an execution."""
    return len(execution.stdout) + sum(map(len, execution.files.values())) + len(repr((execution.returns, execution.attributes)))


class Programs:
    """Runner of programs in its own jail, which ends with it. Use it as a context manager; it also closes when it is collected.

    ``ledger`` stores the executions that a grader was shown.

    Raises:
        JailUnavailableError: An OSError, if the machine cannot confine programs, unless ``unsafe``.
    """

    def __init__(self, workers: int = 2, limits: JailLimits | None = None, unsafe: bool = False) -> None:
        self.limits = limits or LIMITS
        self.ledger = ExecutionLedger()
        self._jail = Jail(DRIVER, limits=self.limits, workers=workers, modules=MODULES, unsafe=unsafe)

    def run(self, programs: Sequence[LeetCodeProgram]) -> list[LeetCodeExecution]:
        """Return one execution per program, in order; equal programs run once. Errors of a program are never raised."""
        distinct = list(dict.fromkeys(programs))
        done: dict[LeetCodeProgram, LeetCodeExecution] = {}
        for scale in sorted({program.scale for program in distinct}):
            some, limits = [program for program in distinct if program.scale == scale], self.limits.scaled(scale)
            payloads = [payload(program, limits.reply // 2) for program in some]
            done |= zip(some, self._jail.run(payloads, limits=limits, read=_read_to), strict=True)
        return [done[program] for program in programs]

    def close(self) -> None:
        """End the jail; a second call does nothing."""
        self._jail.close()

    def __enter__(self) -> "Programs":
        return self

    def __exit__(self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def payload(program: LeetCodeProgram, room: int) -> dict[str, Any]:
    """Return the payload that is sent to a program's process."""
    order: dict[str, Any] = {"setup": program.setup, "code": program.code, "function": program.function}
    if program.run_tests:
        return order | {"run_tests": True}
    return order | {"calls": list(program.calls), "attributes": list(ATTRIBUTES), "room": room}


def _read_to(order: Mapping[str, Any], outcome: JailOutcome) -> LeetCodeExecution:
    return read(outcome, len(order.get("calls", ())), order.get("room", 0))


def read(outcome: JailOutcome, calls: int = 1, room: int = LIMITS.reply // 2) -> LeetCodeExecution:
    """Return the execution of an outcome, for this number of calls and this limit on the bytes of their values' JSON."""
    stdout = outcome.stdout[:TEXT].decode("utf-8", "replace")
    reason = "SIGKILL" if outcome.signal == signal.SIGKILL else outcome.status
    seen = LeetCodeExecution("killed", reason=reason, stdout=stdout, files=_texts(outcome.files), seconds=outcome.cpu_seconds)
    if outcome.status == "exited":
        return replace(seen, status="exited", reason="", exit_code=outcome.exit_code)
    if outcome.status != "replied":
        return seen
    try:
        return _read_reply(outcome.reply, seen, calls, room)
    except (ValueError, LookupError, TypeError, AttributeError):
        return replace(seen, status="error", reason="forged reply")


def _texts(files: Mapping[str, bytes]) -> Mapping[str, str]:
    texts, left = {}, TEXTS
    for name, data in sorted(files.items(), key=lambda item: len(item[1])):
        left -= len(data[:TEXT])
        if left >= 0:
            texts[name] = data[:TEXT].decode("utf-8", "replace")
    return MappingProxyType(texts)


def _read_reply(reply: Any, seen: LeetCodeExecution, calls: int, room: int) -> LeetCodeExecution:
    status, code, raised = reply["status"], reply["exit"], reply["raised"]
    if status not in ("ok", "syntax", "error", "absent") or reply["run_tests"] not in ("absent", "passed", "failed"):
        raise ValueError("unknown status")
    if code is not None and type(code) is not int:
        raise ValueError("malformed exit")
    if (
        type(raised) is not str
        or len(raised) > NAME
        or not {*reply["attributes"]} <= {*ATTRIBUTES}
        or len(reply["returns"]) > calls
    ):
        raise ValueError("more than was asked for")
    left, small = DecodeBudget(room), DecodeBudget(ATTRIBUTE)
    returns = tuple(_returned(item, left) for item in reply["returns"])
    return replace(
        seen,
        status="exited" if code is not None else status,
        reason=raised,
        returns=returns,
        attributes=MappingProxyType({name: _value(small.text(data)) for name, data in reply["attributes"].items()}),
        exit_code=code,
        run_tests=reply["run_tests"],
    )


class DecodeBudget:
    """Remaining bytes for a program's values; checked here again, because a forged reply may exceed the driver's limit."""

    def __init__(self, left: int) -> None:
        self._left = left

    def text(self, data: object) -> str:
        """Return a value's JSON, or an opaque value if it exceeds the limit."""
        text = json.dumps(data)
        self._left -= len(text)
        return text if self._left >= 0 else TOO_LARGE


TOO_LARGE = json.dumps({"opaque": "too large"})


def _returned(item: Any, left: DecodeBudget) -> Returned:
    if item[0] == "raised":
        if type(item[1]) is not str or len(item[1]) > NAME:
            raise ValueError("malformed exception")
        return Returned(raised=item[1])
    return Returned(left.text(item[1]), overrides=item[2] is True)


def _value(text: str) -> object:
    """Return a value of a reply; a malformed one, which the program's process may have forged, is opaque."""
    try:
        return decode(json.loads(text))
    except ValueError:
        return Opaque("malformed")
