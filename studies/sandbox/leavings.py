"""Files and processes that a job leaves: count and collect files; end processes where no filter forbids fork."""

import contextlib
import os
import signal
import stat
import time

from studies.sandbox.limits import JailLimits


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
                named.append((entry.name, entry.stat(follow_symlinks=False)))
    return named


def collect(folder: int, limits: JailLimits) -> dict[str, bytes]:
    """Return ``{name: content}`` of the regular files of an open folder, sorted by name, up to the limits.

    Files with a second hard link, or whose name is not printable UTF-8, are left out.
    """
    files: dict[str, bytes] = {}
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


def _read(folder: int, name: str, size: int) -> bytes:
    with open(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder), "rb") as file:
        return file.read(size)


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
        for pid in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)


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
