"""What a job leaves: files to count, bring back and remove, and (where no filter forbids fork) processes to end."""

import contextlib
import os
import signal
import stat
import time

from studies.sandbox.limits import Limits

CHUNK = 1 << 20


def named(folder: int) -> list[int]:
    """The sizes of what is in an open folder."""
    return [status.st_size for _, status in _entries(folder)]


def nameless(pid: int) -> list[int]:
    """The sizes of files that a process holds open and that have no name any more."""
    sizes = []
    with contextlib.suppress(OSError):  # a kernel may not let us look: then the number of descriptors bounds them
        for name in os.listdir(f"/proc/{pid}/fd"):
            status = os.stat(f"/proc/{pid}/fd/{name}")
            if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
                sizes.append(status.st_size)
    return sizes


def _entries(folder: int) -> list[tuple[str, os.stat_result]]:
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # removed since
                try:
                    status = entry.stat(follow_symlinks=False)
                except PermissionError:  # a control run took the folder's permissions away
                    os.fchmod(folder, 0o700)
                    status = entry.stat(follow_symlinks=False)
                found.append((entry.name, status))
    return found


def collect(folder: int, limits: Limits) -> dict[str, bytearray]:
    """Name -> content of the ordinary files of an open folder, by name, as far as they are within the limits.

    Ordinary is a regular file with no other name, and with one in printable UTF-8.
    """
    found: dict[str, bytearray] = {}
    room = limits.disk
    for name, status in sorted(_entries(folder)):
        if len(found) == limits.files:
            break
        size = min(status.st_size, limits.file_size)
        if name.isprintable() and _ordinary(status) and size <= room:
            with contextlib.suppress(PermissionError):
                found[name] = _read(folder, name, size)
                room -= size
    return found


def _ordinary(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 1


def _read(folder: int, name: str, size: int) -> bytearray:
    content, done = bytearray(size), 0
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    try:
        while done < size and (got := os.readv(descriptor, [memoryview(content)[done : done + CHUNK]])):
            done += got
    finally:
        os.close(descriptor)
    del content[done:]
    return content


def clear(folder: str) -> None:
    """Empties a folder, following no links, however deep it is: folders inside of folders are moved up first. Raises OSError."""
    while entries := list(os.scandir(folder)):
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
                continue
            os.chmod(entry.path, 0o700)
            for inner in list(os.scandir(entry.path)):
                if inner.is_dir(follow_symlinks=False):
                    os.chmod(inner.path, 0o700)
                    os.rename(inner.path, os.path.join(folder, os.urandom(8).hex()))
                else:
                    os.unlink(inner.path)
            os.rmdir(entry.path)


def reap() -> bool:
    """Collects ended children of this process; whether any are left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def end_descendants() -> None:
    """Ends all that descends from this process, which must be a subreaper, so that nothing gets away by losing its parent."""
    while reap():
        known: set[int] = set()
        while not (found := descendants(os.getpid())) <= known:  # what is stopped cannot fork any more
            known |= found
            _send(found, signal.SIGSTOP)
        _send(found, signal.SIGKILL)
        time.sleep(0.001)


def _send(pids: set[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def descendants(root: int) -> set[int]:
    """Every process below `root`, by /proc, except those that have ended and were not collected."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            state, parent = file.read().rpartition(b")")[2].split()[:2]
            if state != b"Z":
                children.setdefault(int(parent), []).append(int(name))
    found: set[int] = set()
    todo = [root]
    while todo:
        new = [pid for pid in children.get(todo.pop(), ()) if pid not in found]
        found.update(new)
        todo += new
    return found
