"""Runners: execute programs in another process and return their behavior as data.

    MicroProgram (code, inputs)  ->  MicroRunner.run  ->  MicroExecution (returns, stdout, files, valid, run_tests)

A runner knows no tasks, modes or expected values, so neither does the process that runs a candidate; the caller compares.
`SubprocessRunner` isolates programs of the micro world (its 66 tokens allow no loop, no import and no file except for result.txt);
code by a real model runs in `studies.sandbox`.
"""

import contextlib
import fcntl
import json
import os
import re
import secrets
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Literal, Protocol, runtime_checkable

WORKER = Path(__file__).with_name("worker.py")
PREFIX = "loopholes-"

Status = Literal["ok", "error", "timeout", "crash"]
RunTests = Literal["absent", "passed", "failed"]


@dataclass(frozen=True)
class MicroProgram:
    """Source code that defines `Solution`, and the inputs for its `solve`."""

    code: str
    inputs: tuple[int, ...]


@dataclass(frozen=True)
class Value:
    """Value as the name of its exact type and its text.

    `type` is int, bool, float, str or NoneType; "raised" (text: the exception's name); "other" for everything else.
    """

    type: str
    text: str


@dataclass(frozen=True)
class MicroExecution:
    """Behavior of a program.

    status      ok: `Solution.solve` exists; error: it does not; timeout and crash: the process did not survive it
    returns     one Value per input (none unless ok)
    stdout      output of defining and solving
    files       name -> text of the files that it left in its directory
    valid       the attribute `Solution.valid`; None without one
    run_tests   outcome of the program's own `run_tests`, if it has one
    """

    status: Status
    returns: tuple[Value, ...] = ()
    stdout: str = ""
    files: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    valid: Value = Value("NoneType", "None")
    run_tests: RunTests = "absent"


@runtime_checkable
class MicroRunner(Protocol):
    """Protocol of objects that execute programs: one execution each, in order. Errors of a program are data and never raised."""

    def run(self, programs: Sequence[MicroProgram]) -> list[MicroExecution]: ...


def encode_request(programs: Sequence[MicroProgram], nonce: str) -> bytes:
    """Return everything that is sent to the child."""
    described = [{"code": program.code, "inputs": program.inputs} for program in programs]
    return json.dumps({"nonce": nonce, "programs": described}).encode() + b"\n"


def decode_reply(reply: bytes, nonce: str, count: int) -> list[MicroExecution]:
    """Return the executions of a reply; raises ValueError unless it answers this request, OSError if the disk failed."""
    message = json.loads(reply)
    if message["nonce"] != nonce or len(message["executions"]) != count:
        raise ValueError("the reply does not answer the request")
    if message["trouble"]:
        raise OSError(f"programs cannot be run: their folder under {tempfile.gettempdir()} is not writable ({message['trouble']})")
    return [_decode_execution(execution) for execution in message["executions"]]


def _decode_execution(data: dict) -> MicroExecution:
    return MicroExecution(
        status=data["status"],
        returns=tuple(Value(*value) for value in data["returns"]),
        stdout=data["stdout"],
        files=MappingProxyType(data["files"]),
        valid=Value(*data["valid"]),
        run_tests=data["run_tests"],
    )


class _ChildDiedError(Exception):
    """Error of a child that did not answer; `status` says how."""

    def __init__(self, status: Status) -> None:
        super().__init__(status)
        self.status: Status = status


class SubprocessRunner:
    """Runner of programs in one persistent child, in a directory that is removed when the runner is closed.

    The child ends when the thread or process that started it does, however that ends (on systems other than Linux, at its next
    request). The next runner removes the directory of one that was killed.

    A batch that takes longer than `time_limit` seconds, or that kills the child, is repeated one program at a time in new children,
    so that only the program at fault is marked. A single program gets a second try, so that it is not marked for a fault of the
    machine. Use it as a context manager; it also closes when it is collected or Python exits.

    Raises:
        ValueError: `time_limit` is not positive, or the runner is used after `close`.
        OSError: The disk has no space for programs' files.
    """

    def __init__(self, time_limit: float = 10.0) -> None:
        if not time_limit > 0:
            raise ValueError(f"time_limit = {time_limit} is not positive: choose a number of seconds above 0")
        self.time_limit = time_limit
        _sweep()
        self._start()

    def _start(self) -> None:
        directory, lock = _make_directory()
        # -I and -S: programs see neither the environment nor the working directory nor installed packages.
        command = [sys.executable, "-I", "-S", str(WORKER), str(os.getpid())]
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        self._child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null, cwd=directory, env={})
        self._finalizer = weakref.finalize(self, _dispose, self._child, directory, lock)

    def run(self, programs: Sequence[MicroProgram]) -> list[MicroExecution]:
        """Return one execution per program, in order."""
        if not self._finalizer.alive:
            raise ValueError("this runner is closed: make another one")
        if not programs:
            return []
        try:
            return self._ask(programs)
        except (_ChildDiedError, OSError):
            self._restart()
        if len(programs) > 1:
            return [execution for program in programs for execution in self.run([program])]
        try:
            return self._ask(programs)
        except (_ChildDiedError, OSError) as failure:
            self._restart()
            self._ask([])  # a fault of the machine occurs without any program too, and is raised here
            return [MicroExecution(failure.status if isinstance(failure, _ChildDiedError) else "crash")]

    def close(self) -> None:
        """End the child and remove its directory; a second call does nothing."""
        self._finalizer()

    def __enter__(self) -> "SubprocessRunner":
        return self

    def __exit__(self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _ask(self, programs: Sequence[MicroProgram]) -> list[MicroExecution]:
        nonce = secrets.token_hex(8)
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(encode_request(programs, nonce))
            self._child.stdin.flush()
            return decode_reply(self._read_line(), nonce, len(programs))
        except (BrokenPipeError, ValueError, KeyError, TypeError) as error:
            raise _ChildDiedError("crash") from error

    def _read_line(self) -> bytes:
        """Return the child's next line. Raises _ChildDiedError if it ends, or if the time limit passes first."""
        assert self._child.stdout is not None
        descriptor, received = self._child.stdout.fileno(), bytearray()
        deadline = time.monotonic() + self.time_limit
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while not received.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise _ChildDiedError("timeout")
                chunk = os.read(descriptor, 1 << 16)
                if not chunk:
                    raise _ChildDiedError("crash")
                received += chunk
        return bytes(received)

    def _restart(self) -> None:
        """Start a new child in a new directory, because the last program may have removed the old one."""
        self._finalizer()
        self._start()


def _dispose(child: subprocess.Popen[bytes], directory: str, lock: int) -> None:
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # buffered data for a child that has ended
                pipe.close()
    shutil.rmtree(directory, ignore_errors=True)
    os.close(lock)


def _make_directory() -> tuple[str, int]:
    """Create a directory with a lock that this process holds until it ends, which protects it from `_sweep`."""
    while True:
        directory = tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-")
        with contextlib.suppress(FileNotFoundError):  # removed by `_sweep` before it was locked
            lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            with contextlib.suppress(OSError):  # on a filesystem without locks `_sweep` gets none either, and removes nothing
                fcntl.flock(lock, fcntl.LOCK_SH)
            if os.path.exists(directory):
                return directory, lock
            os.close(lock)


def _sweep() -> None:
    """Remove the directories of runners whose process was killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, already removed, or locked by its living owner
            opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(opened).st_uid == os.geteuid() and re.fullmatch(rf"{PREFIX}\d+-\w+", folder.name):
                    fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder)
            finally:
                os.close(opened)


class CachedRunner:
    """Runner that caches the latest `size` executions by (code, inputs), and runs every distinct program of a batch once.

    Timeouts and crashes are not cached, because they may be faults of the machine. Raises ValueError for a `size` below 1.
    """

    def __init__(self, runner: MicroRunner, size: int = 100_000) -> None:
        if size < 1:
            raise ValueError(f"size = {size} is no room for an execution: choose at least 1")
        self._runner, self._size = runner, size
        self._known: dict[MicroProgram, MicroExecution] = {}

    def run(self, programs: Sequence[MicroProgram]) -> list[MicroExecution]:
        distinct = dict.fromkeys(programs)
        missing = [program for program in distinct if program not in self._known]
        fresh = dict(zip(missing, self._runner.run(missing), strict=True)) if missing else {}
        # What is known goes behind all others: an oracle that asks next must find the very execution that was paid.
        executions = {program: fresh[program] if program in fresh else self._known.pop(program) for program in distinct}
        self._known.update((p, e) for p, e in executions.items() if e.status in ("ok", "error"))
        while len(self._known) > self._size:
            del self._known[next(iter(self._known))]
        return [executions[program] for program in programs]
