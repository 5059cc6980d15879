"""The parent's hold on its servers: start one, hand it a job, read its answer, end it; keep a pool of them."""

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
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from studies.sandbox.limits import Limits, Outcome
from studies.sandbox.wire import JOB, LENGTH, cut, pack, read_reply, read_reply_leniently

SERVER = Path(__file__).with_name("server.py")
BOOT = "import sys; exec(compile(open(sys.argv.pop(1)).read(), '<server>', 'exec'))"
"""Runs the server's text under a name that does not tell where it lies."""
START_SECONDS = 60.0
END_SECONDS = 5.0
ENVIRONMENT = {
    "PYTHONHASHSEED": "0",  # what a program does must not depend on the server that it came to
    "OPENBLAS_NUM_THREADS": "1",  # a fork has one thread
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
CLOSED = "this jail is closed: make another one"
PREFIX = "studies-jail-"
STALE = 60.0
"""Seconds after which a folder that nobody holds is nobody's, and not just being made."""
INHERITED = ("LD_LIBRARY_PATH",)
"""Without it an interpreter with a shared library of its own may not start."""


class ServerDiedError(Exception):
    """A server is gone.

    code     its exit status, or minus the signal that ended it
    started  whether it had read all that it was sent, and so may have started the job
    """

    def __init__(self, code: int, started: bool) -> None:
        super().__init__(f"exit status {code}" if code >= 0 else f"signal {-code}")
        self.code, self.started = code, started


class CrowdedError(OSError):
    """The disk is full, which other jobs may have done: there may be room for this one when they have ended."""


@dataclass(frozen=True)
class Recipe:
    """All that makes one server like another; `search` and `own` are paths beside the standard library's.

    search  where `modules` are found, also by the driver
    own     where the server finds what it needs itself
    """

    driver: Path
    modules: tuple[str, ...]
    search: tuple[str, ...]
    own: tuple[str, ...]
    wanted: frozenset[str]
    programs: Mapping[bool, bytes]

    def config(self, home: Path) -> dict[str, Any]:
        return {
            "library": str(SERVER.parent),
            "driver": str(self.driver),
            "modules": self.modules,
            "search": self.search,
            "own": self.own,
            "wanted": sorted(self.wanted),
            "programs": {str(int(chrooted)): code.hex() for chrooted, code in self.programs.items()},
            "home": str(home),
        }


class Worker:
    """One server, the folder in which its jobs live, and a descriptor for it to hold. Raises OSError where it cannot be started."""

    def __init__(self, recipe: Recipe, home: Path, held: int) -> None:
        self._home, self._serial = home, 0
        self.socket, theirs = socket.socketpair()
        # What -I keeps out is kept out by an environment of our own; -I itself would refuse the hash seed.
        numbers = map(str, (theirs.fileno(), held, os.getpid()))
        command = [sys.executable, "-s", "-S", "-P", "-X", "utf8", "-c", BOOT, str(SERVER), *numbers]
        environment = ENVIRONMENT | {name: os.environ[name] for name in INHERITED if name in os.environ}
        with theirs:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # stderr is ours: a server that fails says so there
                cwd="/",
                env=environment,
                pass_fds=(theirs.fileno(), held),
                start_new_session=True,  # a Ctrl-C is the parent's to handle
            )
        with contextlib.suppress(ConnectionError):  # it died already: `greet` says how
            self.socket.sendall(pack(recipe.config(home)))

    def greet(self) -> tuple[frozenset[str], dict[str, str]]:
        """The protections that its jobs will have, and what is missing, with the reason. Raises OSError where it did not start."""
        self.socket.settimeout(START_SECONDS)
        try:
            hello = self._read_header()
        except (TimeoutError, ServerDiedError) as error:
            raise OSError(f"a server of the jail did not start: {error}") from error
        self.socket.settimeout(None)
        if "error" in hello:
            raise OSError(f"a server of the jail did not start: {hello['error']}")
        return frozenset(hello["protections"]), hello["missing"]

    def send(self, payload: bytes, limits: Limits) -> None:
        """Hands it a job. Raises ServerDiedError."""
        self._serial = secrets.randbits(64)  # a count would tell the job its place
        try:
            self.socket.sendall(JOB.pack(self._serial, len(payload), *astuple(limits)))
            self.socket.sendall(payload)
        except ConnectionError as error:
            raise self._died(started=False) from error

    def receive(self) -> tuple[Outcome, bytes]:
        """Its answer, and the reply as it was written.

        Raises ServerDiedError, OSError for the machine's own trouble, and CrowdedError for a full disk.
        """
        header = self._read_header()
        assert header.pop("serial") == self._serial
        if "trouble" in header:
            raise (CrowdedError if header["crowded"] else OSError)(header["trouble"])
        names, lengths = header.pop("files"), header.pop("lengths")
        sizes = [*lengths, *names.values()]
        stdout, stderr, reply, *contents = cut(self._read(sum(sizes)), sizes)
        files = MappingProxyType(dict(zip(names, contents, strict=True)))
        return Outcome(**header, stdout=stdout, stderr=stderr, files=files), reply[1:]

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """Ends a server that does not answer; its child goes with it, and whoever waits for it learns that it died."""
        self._process.kill()

    def end(self) -> None:
        """Ends the server, its child and its folder; twice is fine."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # closing would not do where a fork of this process holds a copy
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
            except ConnectionError as error:  # Linux resets a socket that is closed with something unread in it
                raise self._died(started=False) from error
            if not got:
                raise self._died(started=True)
            view = view[got:]
        return bytes(received)

    def _died(self, started: bool) -> ServerDiedError:
        self.end()
        return ServerDiedError(self._process.returncode, started)


def with_reply(outcome: Outcome, raw: bytes, limits: Limits, strict: bool) -> Outcome:
    """An outcome completed by its reply: a process that ended well and left one that is acceptable has replied."""
    if outcome.status != "exited" or outcome.exit_code != 0:
        return outcome
    try:
        return replace(outcome, status="replied", reply=read_reply(raw, limits.reply) if strict else read_reply_leniently(raw))
    except ValueError:
        return outcome


class Pool:
    """The servers of one jail and the folder that holds theirs. It knows no `Jail`, so that a forgotten one can be collected."""

    def __init__(self, recipe: Recipe, size: int) -> None:
        self._recipe, self.size = recipe, size
        self._owner = os.getpid()
        self._names = itertools.count()
        self._closed = False
        self._greeting: tuple[frozenset[str], dict[str, str]] | None = None
        self.workers: list[Worker] = []
        sweep()
        self._root = Path(tempfile.mkdtemp(prefix=PREFIX))

    @property
    def mine(self) -> bool:
        """Whether this process started the servers, and is not a fork of the one that did."""
        return os.getpid() == self._owner

    def fill(self) -> tuple[frozenset[str], dict[str, str]]:
        """Starts what servers are lacking; the protections that all have, and what is missing, with the reason.

        Raises OSError where servers do not start, or come up with other protections than the first; ValueError once it is closed.
        """
        if self._closed:
            raise ValueError(CLOSED)
        fresh: list[Worker] = []
        try:
            while len(self.workers) + len(fresh) < self.size:
                with hold(self._root) as held:
                    fresh.append(Worker(self._recipe, self._root / str(next(self._names)), held))
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
        """Ends a server."""
        worker.end()
        self.workers.remove(worker)

    def close(self) -> None:
        """Ends every server; not in a fork of the process that started them."""
        self._closed = True
        if self.mine:
            while self.workers:
                self.drop(self.workers[-1])
            shutil.rmtree(self._root, ignore_errors=True)


@contextlib.contextmanager
def hold(root: Path) -> Iterator[int]:
    """Makes a pool's folder where it is not there. The descriptor keeps `sweep` off for as long as any process has it open."""
    root.mkdir(mode=0o700, exist_ok=True)
    opened = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # some file systems have no locks
            fcntl.flock(opened, fcntl.LOCK_SH)
        yield opened
    finally:
        os.close(opened)


def sweep() -> None:
    """Removes what is left of jails where a killer took the parent and all of its servers at once."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another's, or in use
            opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                status = os.fstat(opened)
                if status.st_uid == os.geteuid() and time.time() - status.st_mtime > STALE:
                    fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if all(name.isdigit() for name in os.listdir(opened)):
                        shutil.rmtree(folder)
            finally:
                os.close(opened)
