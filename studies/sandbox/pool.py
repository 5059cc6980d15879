"""Servers as their parent process sees them: start a server, send it jobs, receive answers, end it; and a pool of servers."""

import contextlib
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import astuple, replace
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, cast

from studies.sandbox.limits import JailLimits, JailOutcome
from studies.sandbox.wire import JOB, LENGTH, read_reply

SERVER = Path(__file__).with_name("server.py")
START_SECONDS = 60.0
END_SECONDS = 5.0
ENVIRONMENT = {
    "PYTHONHASHSEED": "0",  # the behavior of a program must not depend on the server that runs it
    "OPENBLAS_NUM_THREADS": "1",  # a fork has one thread
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
CLOSED = "this jail is closed: make another one"
PREFIX = "studies-jail-"
INHERITED = ("LD_LIBRARY_PATH",)
"""Environment variables that servers inherit: an interpreter with a shared library may not start without them."""


class ServerDiedError(Exception):
    """A server has ended unexpectedly; ``code`` is its exit status, or minus the signal that ended it."""

    def __init__(self, code: int) -> None:
        super().__init__(f"it ended with exit status {code}" if code >= 0 else f"signal {-code} ended it")
        self.code = code


class JailWorker:
    """One server process, its socket, and the folder of its jobs.

    Args:
        config: Configuration of the server, which `server.prepare` and `serve.serve` read.
        home: Folder of its jobs; the server creates it.

    Raises:
        OSError: The server cannot be started.
    """

    def __init__(self, config: Mapping[str, Any], home: Path) -> None:
        self._home, self._serial = home, 0
        self.socket, theirs = socket.socketpair()
        # Our own environment isolates the interpreter as -I would; -I itself would ignore the hash seed.
        numbers = map(str, (theirs.fileno(), os.getpid()))
        command = [sys.executable, "-s", "-S", "-P", "-X", "utf8", str(SERVER), *numbers]
        environment = ENVIRONMENT | {name: os.environ[name] for name in INHERITED if name in os.environ}
        with theirs:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,  # stderr is inherited, so that a failing server can report there
                cwd="/",
                env=environment,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # only the parent handles a Ctrl-C
            )
        with contextlib.suppress(BrokenPipeError):  # the server died already: `greet` reports how
            with cast("IO[bytes]", self._process.stdin) as pipe:
                pipe.write(json.dumps({**config, "home": str(home)}).encode())

    def greet(self) -> tuple[frozenset[str], dict[str, str]]:
        """Wait for the server's start; return the protections that its jobs have, and ``{missing protection: reason}``.

        Raises:
            OSError: The server did not start.
        """
        self.socket.settimeout(START_SECONDS)
        try:
            hello = self._read_header()
        except (TimeoutError, ServerDiedError) as error:
            raise OSError(f"a server of the jail did not start: {error}; free memory, or choose fewer workers") from error
        self.socket.settimeout(None)
        if "error" in hello:
            raise OSError(f"a server of the jail did not start: {hello['error']}")
        return frozenset(hello["protections"]), hello["missing"]

    def send(self, payload: bytes, limits: JailLimits) -> None:
        """Send a job to the server.

        Raises:
            ServerDiedError: The server has ended.
        """
        self._serial += 1
        try:
            self.socket.sendall(JOB.pack(self._serial, len(payload), *astuple(limits)))
            self.socket.sendall(payload)
        except ConnectionError as error:
            raise self._died() from error

    def receive(self) -> tuple[JailOutcome, bytes]:
        """Wait for the server's answer; return the outcome, and the reply's bytes.

        Raises:
            ServerDiedError: The server has ended.
            OSError: The machine failed.
        """
        header = self._read_header()
        assert header.pop("serial") == self._serial
        if "trouble" in header:
            raise OSError(header["trouble"])
        names, lengths = header.pop("files"), header.pop("lengths")
        sizes = [*lengths, *names.values()]
        stdout, stderr, reply, *contents = map(self._read, sizes)
        files = MappingProxyType(dict(zip(names, contents, strict=True)))
        return JailOutcome(**header, stdout=stdout, stderr=stderr, files=files), reply[1:]

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        """Kill a server that does not answer; its child dies with it, and `receive` raises ServerDiedError."""
        self._process.kill()

    def end(self) -> None:
        """End the server and its child and remove its folder; no effect if already ended."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # closing is not enough if a fork of this process holds a copy
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.socket.close()
        shutil.rmtree(self._home, ignore_errors=True)

    def _read_header(self) -> dict[str, Any]:
        return json.loads(self._read(LENGTH.unpack(self._read(LENGTH.size))[0]))

    def _read(self, size: int) -> bytes:
        received = bytearray(size)
        view = memoryview(received)
        while view:
            try:
                got = self.socket.recv_into(view)
            except ConnectionError as error:  # Linux resets a socket that is closed with unread data
                raise self._died() from error
            if not got:
                raise self._died()
            view = view[got:]
        return bytes(received)

    def _died(self) -> ServerDiedError:
        self.end()
        return ServerDiedError(self._process.returncode)


def with_reply(outcome: JailOutcome, raw: bytes, limits: JailLimits) -> JailOutcome:
    """Return the outcome with its parsed reply and the status ``replied``, if the process exited with 0 and its reply is valid."""
    if outcome.status != "exited" or outcome.exit_code != 0:
        return outcome
    try:
        return replace(outcome, status="replied", reply=read_reply(raw, limits.reply))
    except ValueError:
        return outcome


class JailPool:
    """Servers of one jail and the folder that contains theirs; without a reference to the `Jail`, which can thus be collected."""

    def __init__(self, config: Mapping[str, Any], size: int) -> None:
        self._config, self.size = config, size
        self._owner = os.getpid()
        self._names = itertools.count()
        self._closed = False
        self._greeting: tuple[frozenset[str], dict[str, str]] | None = None
        self.workers: list[JailWorker] = []
        self._root = Path(tempfile.mkdtemp(prefix=PREFIX))

    @property
    def mine(self) -> bool:
        """True if this process started the servers; False in a fork of that process."""
        return os.getpid() == self._owner

    def fill(self) -> tuple[frozenset[str], dict[str, str]]:
        """Start missing servers; return the protections that all servers have, and ``{missing protection: reason}``.

        Raises:
            OSError: A server does not start, or has other protections than the first one.
            ValueError: The pool is closed.
        """
        if self._closed:
            raise ValueError(CLOSED)
        fresh: list[JailWorker] = []
        try:
            while len(self.workers) + len(fresh) < self.size:
                self._root.mkdir(mode=0o700, exist_ok=True)
                fresh.append(JailWorker(self._config, self._root / str(next(self._names))))
            for worker in fresh:
                greeting = worker.greet()
                self._greeting = self._greeting or greeting
                if greeting[0] != self._greeting[0]:
                    lost = ", ".join(sorted(self._greeting[0] ^ greeting[0]))
                    raise OSError(f"servers of the jail differ in their protections ({lost}): {greeting[1]}")
        except BaseException:
            for worker in fresh:
                worker.end()
            raise
        self.workers += fresh
        assert self._greeting is not None
        return self._greeting

    def drop(self, worker: JailWorker) -> None:
        """End a server and remove it from the pool."""
        worker.end()
        self.workers.remove(worker)

    def close(self) -> None:
        """End every server; a fork of the process that started them only marks its copy as closed."""
        self._closed = True
        if self.mine:
            while self.workers:
                self.drop(self.workers[-1])
            shutil.rmtree(self._root, ignore_errors=True)
