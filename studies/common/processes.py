"""Worker processes with their own pipe to the parent, and locks on files and folders.

A worker shares nothing with the parent, so its death affects nothing else and is noticed. A lock ends with the process that holds
it, however that process ends.
"""

import atexit
import contextlib
import errno
import fcntl
import multiprocessing as mp
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, wait
from contextlib import contextmanager
from multiprocessing import forkserver, parent_process, resource_tracker, util
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

Job = TypeVar("Job")
LOOKS = 0.05  # seconds between two attempts to take a lock
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.EBADF)
"""Errors of filesystems without `flock`. EBADF is from network filesystems, which lock files opened for writing but no folders."""


def start(target: Callable[..., None], *args: Any) -> tuple[BaseProcess, Connection]:
    """Run ``target(link, *args)`` in a new process; return the process, and the parent's end of the link.

    The process never gets SIGINT, because Ctrl-C goes to every process of the terminal, and some may still be importing.
    """
    with without_sigint():
        context = _context(target)
        link, far = context.Pipe()
        given = (dict(os.environ), target, far, *args)
        process: BaseProcess = context.Process(target=_run, args=given, daemon=True)  # pyright: ignore[reportAttributeAccessIssue]
        process.start()
        _watch(process)
        far.close()  # the parent's copy would keep the pipe open after the process's death
        return process, link


def _watch(process: BaseProcess) -> None:
    """Take the end of a fork from the fork, not from its server, with which every fork would seem to end."""
    popen: Any = vars(process)["_popen"]
    if popen.method != "forkserver":
        return
    status = popen.sentinel
    try:
        popen.sentinel = os.pidfd_open(popen.pid)
    except OSError:  # it has ended already, or the kernel has no such handles
        return
    util.Finalize(popen, os.close, (popen.sentinel,))

    def poll(flag: int = os.WNOHANG) -> int | None:
        if popen.returncode is None and wait_for([popen.sentinel], 0 if flag == os.WNOHANG else None):
            try:
                popen.returncode = forkserver.read_signed(status)
            except (OSError, EOFError):  # the server was killed
                popen.returncode = 255
        return popen.returncode

    popen.poll = poll


@contextmanager
def without_sigint() -> Iterator[None]:
    """Context: SIGINT waits, for this process and for the processes that are started."""
    resource_tracker.ensure_running()  # otherwise the first start would start it, which unblocks SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _context(target: Callable[..., object]) -> BaseContext:
    """Return a context in which processes that run ``target`` start.

    On Linux they are forks of a server, which imports the module of the first target and does nothing else: no device knows it, and
    it has no threads but those of libraries that are prepared for a fork (jemalloc of pyarrow, in lanes and steering). Elsewhere
    each process imports anew, as libraries of macOS do not survive a fork. The server ends when neither this process nor a fork is
    left.
    """
    if sys.platform != "linux":
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([target.__module__])
    paths = {name: os.environ.get(name) for name in ("PYTHONPATH", "PYTHONSAFEPATH")}
    ours = os.pathsep.join(path for path in sys.path if isinstance(path, str))  # imports skip all else, as a Path
    os.environ.update(PYTHONPATH=ours, PYTHONSAFEPATH="1")  # modules come from where ours come from
    try:
        forkserver.ensure_running()
    except OSError:  # TMPDIR may be too long for the path of a socket
        return mp.get_context("spawn")
    finally:
        for name, value in paths.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return context


def _end_server(parent: int) -> None:
    """End the server at once, without torch's own end; if ``parent`` was killed, its socket and the folder of it go too."""
    address = getattr(forkserver._forkserver, "_forkserver_address", None)
    if address is not None and os.getppid() != parent:
        with contextlib.suppress(OSError):
            os.unlink(address)
            os.rmdir(os.path.dirname(address))
    os._exit(0)


if forkserver.get_inherited_fds() is None and any("multiprocessing.forkserver" in word for word in sys.orig_argv):  # no fork of it
    atexit.register(_end_server, os.getppid())


def _run(environment: Mapping[str, str], target: Callable[..., object], *args: object) -> None:
    _adopt(environment)
    target(*args)


def _adopt(environment: Mapping[str, str]) -> None:
    """Take over the parent's environment: a fork has that of the server, which may be older."""
    os.environ.clear()
    os.environ.update(environment)


@contextmanager
def locked(path: Path, refusal: str, patience: float = 0.0) -> Iterator[None]:
    """Context: hold a lock on the file ``path``, which is created if it is missing.

    On a filesystem without locks nothing is locked, and a warning says so.

    Args:
        path: The file.
        refusal: Text of the error if another process holds the lock.
        patience: Seconds to wait for the lock.

    Raises:
        ValueError: Another process still holds the lock after ``patience`` seconds.
        OSError: The path cannot be opened or locked.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    deadline = time.monotonic() + patience
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() >= deadline:
                    raise ValueError(refusal) from error
                time.sleep(LOOKS)
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
                warnings.warn(
                    f"the filesystem of {path} has no locks ({error.strerror}): another process could write there at the same "
                    "time; start one at a time, or choose a folder on a local disk",
                    stacklevel=3,
                )
                break
        yield
    finally:
        os.close(handle)


@contextmanager
def exclusive(root: Path) -> Iterator[None]:
    """Context: hold the lock of the run folder; ``ValueError`` if another process holds it, or the folder cannot be written."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        (root / ".lock").touch()
    except OSError as error:
        raise ValueError(f"cannot write to {root} ({error.strerror}): choose another --out") from error
    with locked(root / ".lock", f"another process is writing to {root}; wait for it, or choose another --out"):
        yield


@contextmanager
def job_lock(folder: Path, patience: float = 60.0) -> Iterator[None]:
    """Context: hold the lock of a job's folder, which is created if it is missing; temporary files left by a kill are deleted.

    A worker that outlives its killed parent may still be at its last step there, so the context waits ``patience`` seconds for it
    before it raises ``ValueError``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = folder.with_name(f".{folder.name}.lock")  # a file, as network filesystems lock no folders
    with locked(lock, f"another process is still writing to {folder}; wait for it, or end it", patience):
        for left in (*folder.glob(".*.tmp"), *folder.glob(".tmp*")):  # ours, and those of safetensors
            left.unlink(missing_ok=True)
        yield


def run_pool(
    work: Callable[[Job], object], jobs: Sequence[Job], workers: int, files: Sequence[Path], what: str, *, quiet: bool
) -> None:
    """Call ``work`` on every job, in order, over a few processes; with one worker in this process.

    Args:
        work: What a worker does with a job; both are named by modules, so that a new process can import them.
        jobs: What is still to be done, the longest first, so that none of them is left for the end.
        workers: Processes.
        files: Files that the jobs leave; the bar counts those that are there.
        what: Named by the bar.
        quiet: Show no bar.

    Raises:
        RuntimeError: A worker was killed. What a job raises passes through.
    """
    with tqdm(total=len(files), desc=what, unit="part", leave=False, disable=True if quiet else None) as bar:

        def look() -> None:
            bar.update(sum(path.exists() for path in files) - bar.n)

        look()
        if workers == 1 or len(jobs) < 2:
            for job in jobs:
                work(job)
                look()
            return
        with without_sigint():
            context = _context(work)
        given = (dict(os.environ),)
        with ProcessPoolExecutor(min(workers, len(jobs)), context, initializer=_end_silently, initargs=given) as pool:
            left = {pool.submit(work, job) for job in jobs}
            try:
                while left:
                    done, left = wait(left, timeout=0.5)
                    look()
                    for one in done:
                        one.result()
            except BrokenExecutor as error:
                raise RuntimeError("a worker was killed, for its memory perhaps; the same command goes on where it was") from error
            finally:
                pool.shutdown(cancel_futures=True)


def _end_silently(environment: Mapping[str, str]) -> None:
    """Make a worker of an executor end at once and without a traceback, at Ctrl-C or when its parent is gone.

    Ctrl-C reaches every process of a terminal; the end of the parent is not visible in an executor's queues.
    """
    _adopt(environment)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # a fork has the server's mask
    tqdm.set_lock(threading.RLock())  # tqdm's own lock is a semaphore that a killed worker would leave in the system
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
