"""Files and processes that a job leaves: count, collect and remove files; end processes where no filter forbids fork."""

import contextlib
import os
import signal
import stat
import time

from studies.sandbox.limits import JailLimits

CHUNK = 1 << 20


def named(folder: int) -> list[int]:
    """Return the sizes of all entries of an open folder."""
    return [status.st_size for _, status in _entries(folder)]


def nameless(pid: int) -> list[int]:
    """Return the sizes of files that a process holds open and whose name was removed."""
    sizes = []
    with contextlib.suppress(OSError):  # if the kernel refuses access, the limit of descriptors bounds these files
        for name in os.listdir(f"/proc/{pid}/fd"):
            status = os.stat(f"/proc/{pid}/fd/{name}")
            if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
                sizes.append(status.st_size)
    return sizes


def _entries(folder: int) -> list[tuple[str, os.stat_result]]:
    named = []
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # removed after the scan
                try:
                    status = entry.stat(follow_symlinks=False)
                except PermissionError:  # a control run took the folder's permissions away
                    os.fchmod(folder, 0o700)
                    status = entry.stat(follow_symlinks=False)
                named.append((entry.name, status))
    return named


def collect(folder: int, limits: JailLimits) -> dict[str, bytearray]:
    """Return ``{name: content}`` of the regular files of an open folder, sorted by name, up to the limits.

    Files with a second hard link, or whose name is not printable UTF-8, are left out.
    """
    files: dict[str, bytearray] = {}
    room = limits.disk
    for name, status in sorted(_entries(folder)):
        if len(files) == limits.files:
            break
        size = min(status.st_size, limits.file_size)
        ordinary = stat.S_ISREG(status.st_mode) and status.st_nlink == 1
        if name.isprintable() and ordinary and size <= room:
            with contextlib.suppress(PermissionError):
                files[name] = _read(folder, name, size)
                room -= size
    return files


def _read(folder: int, name: str, size: int) -> bytearray:
    data, done = bytearray(size), 0
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    try:
        while done < size and (got := os.readv(descriptor, [memoryview(data)[done : done + CHUNK]])):
            done += got
    finally:
        os.close(descriptor)
    del data[done:]
    return data


def clear(folder: str) -> None:
    """Empty a folder of any depth without following links: inner folders are moved up before they are emptied.

    Raises:
        OSError: An entry cannot be removed.
    """
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
    """Collect ended children of this process; return whether any children are left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def end_descendants() -> None:
    """End all descendants of this process, which must be a subreaper, so that orphans become its children."""
    while reap():
        known: set[int] = set()
        while not (running := descendants(os.getpid())) <= known:  # a stopped process cannot fork
            known |= running
            _send(running, signal.SIGSTOP)
        _send(running, signal.SIGKILL)
        time.sleep(0.001)


def _send(pids: set[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def descendants(root: int) -> set[int]:
    """Return the ids of all processes below ``root`` in /proc, except for zombies."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            state, parent = file.read().rpartition(b")")[2].split()[:2]
            if state != b"Z":
                children.setdefault(int(parent), []).append(int(name))
    result: set[int] = set()
    todo = [root]
    while todo:
        new = [pid for pid in children.get(todo.pop(), ()) if pid not in result]
        result.update(new)
        todo += new
    return result
