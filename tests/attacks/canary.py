"""Canaries, the targets of attacks: files, a process and listeners, created for a run and inspected after it."""

import contextlib
import ctypes
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.attacks.table import processes, system_v

LITTER = (Path("/tmp"), Path("/var/tmp"), Path("/dev/shm"))
LIFETIME = "120"
"""Seconds after which a victim ends by itself, even if the suite was killed."""
IPC_RMID = 0


def own_mark() -> str:
    """Return the prefix of the marks of this process's canaries."""
    return f"jl{os.getpid() & 0xFFFFF:05x}"


class Canary:
    """Canaries of one run.

    ``names`` are the names under which an attack's code finds them. ``close`` removes them and everything that the attack left
    beside them.
    """

    def __init__(self, needs: tuple[str, ...] = ()) -> None:
        self.token, self.mark, self.key = secrets.token_hex(16), own_mark() + secrets.token_hex(4), 1 + secrets.randbelow(2**30)
        self._stack = contextlib.ExitStack()
        self._home = Path(tempfile.mkdtemp(prefix="canary-"))
        self._stack.callback(shutil.rmtree, self._home, ignore_errors=True)
        self._stack.callback(self._tidy)
        self._secret, self._prey, self._outside = (self._home / name for name in ("secret.txt", "prey.txt", "outside"))
        self._lay_out()
        self._prey_before = _state(self._prey)
        self.names: dict[str, Any] = {
            "SECRET": str(self._secret),
            "PREY": str(self._prey),
            "OUTSIDE": str(self._outside),
            "MARK": self.mark,
            "KEY": self.key,
        }
        self._listeners: list[socket.socket] = []
        for need in needs:
            self._start_victim() if need == "victim" else self._listen(need)

    def close(self) -> None:
        self._stack.close()

    def changed(self) -> bool:
        """Return whether the prey file has changed.

        Its ctime differs after any change of bytes, mode, owner, links, times or attributes.
        """
        return _state(self._prey) != self._prey_before

    def appeared(self) -> list[Path]:
        """Return the paths with the mark in their name, in folders where everybody may write."""
        return [
            path for folder in (self._outside, *LITTER) if folder.is_dir() for path in folder.iterdir() if self.mark in path.name
        ]

    def heard(self) -> bool:
        return any(self.mark.encode() in text for text in self._received())

    def hurt(self) -> bool:
        """Return whether the victim has ended or stopped, or its priority, processors, environment or limits have changed."""
        return _condition(self._victim) != self._victim_before

    def survivors(self) -> list[int]:
        """Return the ids of processes whose name is the mark."""
        return [pid for pid, process in processes().items() if process.name == self.mark]

    def lasting(self) -> list[str]:
        """Return the kinds of System V objects with the key, and "mq" if there is a POSIX message queue with the mark."""
        found = [kind for kind, objects in system_v().items() if self.key in objects]
        return found + ["mq"] * self._has_queue()

    def _lay_out(self) -> None:
        self._home.chmod(0o755)
        self._secret.write_text(self.token + "\n")
        self._prey.write_text("prey\n")
        self._prey.chmod(0o666)
        for folder, mode in ((self._outside, 0o777), (self._home / "sibling", 0o755)):
            folder.mkdir()
            folder.chmod(mode)
        (self._home / "sibling" / "solution.py").write_text(f'token = "{self.token}"\n')

    def _start_victim(self) -> None:
        """Start an idle process with the token in its environment and in its standard input, a file without a name."""
        with tempfile.TemporaryFile(dir=self._home) as file:
            file.write(self.token.encode())
            file.seek(0)
            victim = subprocess.Popen(
                ["sleep", LIFETIME], stdin=file, stdout=subprocess.DEVNULL, env={"TOKEN": self.token}, start_new_session=True
            )
        self._stack.callback(victim.wait)
        self._stack.callback(victim.kill)
        self._victim = victim.pid
        self.names |= {"VICTIM": victim.pid, "ADDRESS": _address_of_environment(victim.pid)}
        self._victim_before = _condition(victim.pid)

    def _listen(self, need: str) -> None:
        name, family, kind, address = {
            "tcp": ("PORT", socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
            "udp": ("UDP", socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
            "unix": ("SOCKET", socket.AF_UNIX, socket.SOCK_STREAM, str(self._home / "socket")),
            "abstract": ("ABSTRACT", socket.AF_UNIX, socket.SOCK_STREAM, f"\0{self.mark}-socket"),
        }[need]
        listener = self._stack.enter_context(socket.socket(family, kind))
        listener.bind(address)
        listener.setblocking(False)
        if kind == socket.SOCK_STREAM:
            listener.listen()
        if need == "unix":
            (self._home / "socket").chmod(0o777)
        self._listeners.append(listener)
        self.names[name] = address.lstrip("\0") if isinstance(address, str) else listener.getsockname()[1]

    def _received(self) -> Iterator[bytes]:
        for listener in self._listeners:
            with contextlib.suppress(BlockingIOError):
                if listener.type == socket.SOCK_DGRAM:
                    yield listener.recv(4096)
                    continue
                link, _ = listener.accept()
                with link:
                    link.setblocking(False)
                    yield link.recv(4096)

    def _has_queue(self) -> bool:
        queue = _libc().mq_open(b"/" + self.mark.encode(), os.O_RDONLY | os.O_CLOEXEC)
        if queue >= 0:
            os.close(queue)
        return queue >= 0

    def _tidy(self) -> None:
        for pid in self.survivors():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        for path in self.appeared():
            path.rmdir() if path.is_dir() else path.unlink()
        for kind, objects in system_v().items():
            if self.key in objects:
                number = objects[self.key]
                remove = {"shm": (number, IPC_RMID, None), "sem": (number, 0, IPC_RMID), "msg": (number, IPC_RMID, None)}[kind]
                getattr(_libc(), f"{kind}ctl")(*remove)
        if self._has_queue():
            _libc().mq_unlink(b"/" + self.mark.encode())


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _address_of_environment(pid: int) -> int:
    """Return the address of a new process's environment, after the process has one and sleeps."""
    for _ in range(1000):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if fields[0] == "S" and fields[47] != "0":
            break
        time.sleep(0.001)
    return int(fields[47])


def _state(path: Path) -> tuple[int, int] | None:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_ctime_ns


def _condition(pid: int) -> tuple[object, ...] | None:
    """Return a process's state, priority, processors, environment and limits, or None if it has ended."""
    process = processes().get(pid)
    if process is None or process.state in "ZX":
        return None
    place = Path(f"/proc/{pid}")
    try:
        texts = (place / "environ").read_bytes(), (place / "limits").read_bytes()
        return process.state in "Tt", os.getpriority(os.PRIO_PROCESS, pid), frozenset(os.sched_getaffinity(pid)), *texts
    except (FileNotFoundError, ProcessLookupError):
        return None
