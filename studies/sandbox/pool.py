"""Servers as their parent process sees them: start a server, send it jobs, receive answers, end it; and a pool of servers."""

import contextlib
import fcntl
import itertools
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import astuple, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from studies.sandbox.limits import JailLimits, JailOutcome
from studies.sandbox.wire import JOB, LENGTH, cut, pack, read_reply, read_reply_leniently

SERVER = Path(__file__).with_name("server.py")
BOOT = "import sys; exec(compile(open(sys.argv.pop(1)).read(), '<server>', 'exec'))"
"""Program that runs the server's text under a name that does not reveal its path."""
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
STALE = 60.0
"""Age in seconds from which a folder without a lock counts as abandoned, not as just being created."""
INHERITED = ("LD_LIBRARY_PATH",)
"""Environment variables that servers inherit: an interpreter with a shared library may not start without them."""


class ServerDiedError(Exception):
    """A server has ended unexpectedly.

    Attributes:
        code: Exit status of the server, or minus the signal that ended it.
        started: Whether the server had read all that it was sent, and so may have started the job.
    """

    def __init__(self, code: int, started: bool) -> None:
        super().__init__(f"exit status {code}" if code >= 0 else f"signal {-code}")
        self.code, self.started = code, started


class CrowdedError(OSError):
    """The disk is full, perhaps because of other jobs, after whose end this job may have enough space."""


class Worker:
    """One server process, its socket, and the folder of its jobs.

    Args:
        config: Configuration of the server, which `server.prepare` and `serve.serve` read.
        home: Folder of its jobs; the server creates it.
        lock: Descriptor that the server inherits and keeps open, so that the pool's folder stays locked.

    Raises:
        OSError: The server cannot be started.
    """

    def __init__(self, config: Mapping[str, Any], home: Path, lock: int) -> None:
        self._home, self._serial = home, 0
        self.socket, theirs = socket.socketpair()
        # Our own environment isolates the interpreter as -I would; -I itself would ignore the hash seed.
        numbers = map(str, (theirs.fileno(), lock, os.getpid()))
        command = [sys.executable, "-s", "-S", "-P", "-X", "utf8", "-c", BOOT, str(SERVER), *numbers]
        environment = ENVIRONMENT | {name: os.environ[name] for name in INHERITED if name in os.environ}
        with theirs:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # stderr is inherited, so that a failing server can report there
                cwd="/",
                env=environment,
                pass_fds=(theirs.fileno(), lock),
                start_new_session=True,  # only the parent handles a Ctrl-C
            )
        with contextlib.suppress(ConnectionError):  # the server died already: `greet` reports how
            self.socket.sendall(pack({**config, "home": str(home)}))

    def greet(self) -> tuple[frozenset[str], dict[str, str]]:
        """Wait for the server's start; return the protections that its jobs have, and ``{missing protection: reason}``.

        Raises:
            OSError: The server did not start.
        """
        self.socket.settimeout(START_SECONDS)
        try:
            hello = self._read_header()
        except (TimeoutError, ServerDiedError) as error:
            raise OSError(f"a server of the jail did not start: {error}") from error
        self.socket.settimeout(None)
        if "error" in hello:
            raise OSError(f"a server of the jail did not start: {hello['error']}")
        return frozenset(hello["protections"]), hello["missing"]

    def send(self, payload: bytes, limits: JailLimits) -> None:
        """Send a job to the server.

        Raises:
            ServerDiedError: The server has ended.
        """
        self._serial = secrets.randbits(64)  # a count would reveal the job's place in the sequence
        try:
            self.socket.sendall(JOB.pack(self._serial, len(payload), *astuple(limits)))
            self.socket.sendall(payload)
        except ConnectionError as error:
            raise self._died(started=False) from error

    def receive(self) -> tuple[JailOutcome, bytes]:
        """Wait for the server's answer; return the outcome, and the reply's bytes.

        Raises:
            ServerDiedError: The server has ended.
            CrowdedError: The disk is full.
            OSError: The machine failed in another way.
        """
        header = self._read_header()
        assert header.pop("serial") == self._serial
        if "trouble" in header:
            raise (CrowdedError if header["crowded"] else OSError)(header["trouble"])
        names, lengths = header.pop("files"), header.pop("lengths")
        sizes = [*lengths, *names.values()]
        stdout, stderr, reply, *contents = cut(self._read(sum(sizes)), sizes)
        files = MappingProxyType(dict(zip(names, contents, strict=True)))
        return JailOutcome(**header, stdout=stdout, stderr=stderr, files=files), reply[1:]

    @property
    def pid(self) -> int:
        return self._process.pid

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
                raise self._died(started=False) from error
            if not got:
                raise self._died(started=True)
            view = view[got:]
        return bytes(received)

    def _died(self, started: bool) -> ServerDiedError:
        self.end()
        return ServerDiedError(self._process.returncode, started)


def with_reply(outcome: JailOutcome, raw: bytes, limits: JailLimits, strict: bool) -> JailOutcome:
    """Return the outcome with its parsed reply and the status ``replied``, if the process exited with 0 and its reply is valid."""
    if outcome.status != "exited" or outcome.exit_code != 0:
        return outcome
    try:
        return replace(outcome, status="replied", reply=read_reply(raw, limits.reply) if strict else read_reply_leniently(raw))
    except ValueError:
        return outcome


class Pool:
    """Servers of one jail and the folder that contains theirs; without a reference to the `Jail`, which can thus be collected."""

    def __init__(self, config: Mapping[str, Any], size: int) -> None:
        self._config, self.size = config, size
        self._owner = os.getpid()
        self._names = itertools.count()
        self._closed = False
        self._greeting: tuple[frozenset[str], dict[str, str]] | None = None
        self.workers: list[Worker] = []
        sweep()
        self._root = Path(tempfile.mkdtemp(prefix=PREFIX))

    @property
    def mine(self) -> bool:
        """True if this process started the servers; False in a fork of that process."""
        return os.getpid() == self._owner

    def fill(self) -> tuple[frozenset[str], dict[str, str]]:
        """Start the missing servers; return the protections that all servers have, and ``{missing protection: reason}``.

        Raises:
            OSError: A server does not start, or has other protections than the first one.
            ValueError: The pool is closed.
        """
        if self._closed:
            raise ValueError(CLOSED)
        fresh: list[Worker] = []
        try:
            while len(self.workers) + len(fresh) < self.size:
                with hold(self._root) as lock:
                    fresh.append(Worker(self._config, self._root / str(next(self._names)), lock))
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

    def drop(self, worker: Worker) -> None:
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


@contextlib.contextmanager
def hold(root: Path) -> Iterator[int]:
    """Create a pool's folder if it does not exist, and lock it.

    The lock keeps `sweep` from removing the folder while any process has the yielded descriptor open.
    """
    root.mkdir(mode=0o700, exist_ok=True)
    opened = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # some file systems do not support locks
            fcntl.flock(opened, fcntl.LOCK_SH)
        yield opened
    finally:
        os.close(opened)


def sweep() -> None:
    """Remove folders of jails whose parent and servers were all killed at once."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # of another user, or in use
            opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                status = os.fstat(opened)
                if status.st_uid == os.geteuid() and time.time() - status.st_mtime > STALE:
                    fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if all(name.isdigit() for name in os.listdir(opened)):
                        shutil.rmtree(folder)
            finally:
                os.close(opened)
