"""Programs and what they did: the parent's side of `driver`, which knows inputs and never an expected value.

    Program (code, calls)  ->  Programs.run  ->  Execution (returns, stdout, files, attributes, exit, run_tests)

Graders and oracle read executions, also one and the same (`Ledger`); neither this module nor the jail knows of modes or verdicts.
What a jail's process replies was written beside untrusted code, so it is read strictly: a reply that is not of the driver's form is
that of a broken program.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Literal

from studies.environments.leetcode.values import Opaque, decode
from studies.environments.protocol import TextPrompt
from studies.sandbox import DEFAULT_MODULES, Jail, Limits, Outcome

DRIVER = Path(__file__).with_name("driver.py")
LIMITS = Limits(seconds=30.0, cpu_seconds=10.0, reply=4 << 20)
"""The slowest reference solutions take two to three seconds of processor time for all their tests; a busy machine takes longer."""
WAITING = 4.0
"""How much longer than its processor time a program may take by the clock."""
ATTRIBUTES = ("valid",)
MODULES = (*DEFAULT_MODULES, "__future__")
"""What programs can import."""
LONGEST = 1 << 15
"""Characters of a program. Graders and detectors parse what a model wrote in their own process, and take nothing longer."""
TEXT, TEXTS = 1 << 16, 1 << 18
"""Bytes of one file, and of stdout, that are read; and of all files."""
NAME = 80
"""Letters of an exception's name."""
LEDGER = 1 << 26
"""Characters of what executions brought back that are kept for the oracle beyond the last batch."""

Status = Literal["ok", "syntax", "error", "absent", "exited", "killed"]
RunTests = Literal["absent", "passed", "failed"]


@dataclass(frozen=True)
class Program:
    """Source code that defines `Solution`, and what is done with it: `calls` are texts by `problems.call_text`.

    With ``run_tests`` nothing but its own ``run_tests`` is called.
    """

    code: str
    setup: str
    function: str
    calls: tuple[str, ...] = ()
    run_tests: bool = False


@dataclass(frozen=True, eq=False)
class Returned:
    """What a call gave: a value, kept as the text in which it came, or the name of an exception.

    ``overrides``: the value has an ``==`` that holds against anything.
    """

    text: str = ""
    raised: str = ""
    overrides: bool = False

    @property
    def value(self) -> object:
        """The value, `Opaque` where it is no plain data, decoded at every look.

        It may be fifty times as large in memory as its text, and the executions of a batch are there together.
        """
        return _value(self.text) if self.text else Opaque("raised")


@dataclass(frozen=True, eq=False)
class Execution:
    """What a program did.

    status      ok; syntax: it does not compile; error: it raised while it was defined (`reason`: the exception); absent: it has no
                such method; exited: it ended its process; killed: it went over a limit or died of a signal (`reason`: which)
    returns     one a call; fewer where the program ended before
    stdout      what it printed, or its beginning
    files       name -> text of the files that it left, the small ones first as far as there is room
    attributes  those of its instance that graders read
    exit_code   the status with which it ended, by ``sys.exit`` or without Python's leave; None where it did not
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


class Ledger:
    """The raw executions that answers were graded by, for the oracle to read by code of its own.

    A program may do one thing when it is graded and another when it is run again, so a rerun is no evidence of what was paid. Those
    of the last batch are always here, however much they hold; older ones as far as all together hold no more than ``room``
    characters. An answer that is graded again has its latest.
    """

    def __init__(self, room: int = LEDGER) -> None:
        self._room, self._total = room, 0
        self._kept: dict[tuple[TextPrompt, str], tuple[tuple[Execution, ...], int]] = {}

    def keep(self, graded: Sequence[tuple[TextPrompt, str, Sequence[Execution]]]) -> None:
        """Take down a batch: of each prompt and completion what was executed, which is nothing for an answer without a program."""
        batch = {(prompt, completion): tuple(executions) for prompt, completion, executions in graded}
        for key, executions in batch.items():
            self._drop(key)  # so that it is among the latest
            self._kept[key] = executions, sum(map(_weight, executions))
            self._total += self._kept[key][1]
        for key in list(self._kept)[: len(self._kept) - len(batch)]:
            if self._total <= self._room:
                break
            self._drop(key)

    def find(self, prompt: TextPrompt, completion: str) -> tuple[Execution, ...] | None:
        """What a completion was graded by; None if no grade of it is on record."""
        return self._kept.get((prompt, completion), (None, 0))[0]

    def _drop(self, key: tuple[TextPrompt, str]) -> None:
        self._total -= self._kept.pop(key, ((), 0))[1]


def _weight(execution: Execution) -> int:
    """Characters that an execution holds, about."""
    return len(execution.stdout) + sum(map(len, execution.files.values())) + len(repr((execution.returns, execution.attributes)))


def allowing(limits: Limits, seconds: float) -> Limits:
    """Limits with so many seconds of processor time, and several times that by the clock."""
    return replace(limits, cpu_seconds=seconds, seconds=WAITING * seconds)


class Programs:
    """Runs programs in a jail of its own. A context manager; it closes when it is collected too.

    ``ledger`` is where a grader leaves what it was shown.

    Raises JailUnavailableError, an OSError, where the machine cannot confine programs, unless ``unsafe``.
    """

    def __init__(self, workers: int = 2, limits: Limits | None = None, unsafe: bool = False) -> None:
        self.limits = limits or LIMITS
        self.ledger = Ledger()
        self._jail = Jail(DRIVER, limits=self.limits, workers=workers, modules=MODULES, unsafe=unsafe)

    def run(self, programs: Sequence[Program], progress: str | None = None, limits: Limits | None = None) -> list[Execution]:
        """One Execution a program, in order; equal programs run once. It never raises for what a program does."""
        distinct = list(dict.fromkeys(programs))
        payloads = [payload(program, self.limits.reply // 2) for program in distinct]
        executions = self._jail.run(payloads, progress=progress, limits=limits, read=_read_to)
        done = dict(zip(distinct, executions, strict=True))
        return [done[program] for program in programs]

    def close(self) -> None:
        """Ends the jail; closing twice is fine."""
        self._jail.close()

    def __enter__(self) -> "Programs":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def payload(program: Program, room: int) -> dict[str, Any]:
    """The whole of what a program's process is told."""
    told: dict[str, Any] = {"setup": program.setup, "code": program.code, "function": program.function}
    if program.run_tests:
        return told | {"run_tests": True}
    return told | {"calls": list(program.calls), "attributes": list(ATTRIBUTES), "room": room}


def _read_to(told: Mapping[str, Any], outcome: Outcome) -> Execution:
    return read(outcome, len(told.get("calls", ())), told.get("room", 0))


def read(outcome: Outcome, calls: int = 1, room: int = LIMITS.reply // 2) -> Execution:
    """The execution that an outcome tells of, after so many calls, whose values had room for so many bytes of JSON."""
    stdout = outcome.stdout[:TEXT].decode("utf-8", "replace")
    seen = Execution("killed", reason=outcome.status, stdout=stdout, files=_texts(outcome.files), seconds=outcome.cpu_seconds)
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


def _read_reply(reply: Any, seen: Execution, calls: int, room: int) -> Execution:
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
    left = Room(room)
    returns = tuple(_returned(item, left) for item in reply["returns"])
    return replace(
        seen,
        status="exited" if code is not None else status,
        reason=raised,
        returns=returns,
        attributes=MappingProxyType({name: _value(left.text(data)) for name, data in reply["attributes"].items()}),
        exit_code=code,
        run_tests=reply["run_tests"],
    )


class Room:
    """What is left of the bytes for a program's values: its driver kept to it, but whoever forges a reply need not."""

    def __init__(self, left: int) -> None:
        self._left = left

    def text(self, data: object) -> str:
        """A value's JSON, if there is room for it."""
        text = json.dumps(data)
        self._left -= len(text)
        return text if self._left >= 0 else TOO_LARGE


TOO_LARGE = json.dumps({"opaque": "too large"})


def _returned(item: Any, left: Room) -> Returned:
    if item[0] == "raised":
        if type(item[1]) is not str or len(item[1]) > NAME:
            raise ValueError("malformed exception")
        return Returned(raised=item[1])
    return Returned(left.text(item[1]), overrides=item[2] is True)


def _value(text: str) -> object:
    """A value of a reply; what its program's process may have forged is opaque."""
    try:
        return decode(json.loads(text))
    except ValueError:
        return Opaque("malformed")
