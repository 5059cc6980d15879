"""Child process of a job: apply the protections, run the driver, write one reply and exit.

The child is a fork of a warm server. Code here is trusted until `confine` returns; afterwards nothing that happens in the process
is.
"""

import contextlib
import ctypes
import json
import math
import os
import resource
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import landlockpy
from landlockpy import AccessFS, Scope

from studies.sandbox.limits import MIB, JailLimits
from studies.sandbox.wire import CONFINED, FAILED, write_all

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 22, 36, 38
SECCOMP_MODE_FILTER = 2
SIGKILL = 9
CLONE_NEWUSER = 0x10000000
CAPABILITY_VERSION_3 = 0x20080522
CAP_CHOWN, CAP_SETGID, CAP_SETUID, CAP_SYS_CHROOT = 0, 6, 7, 18

REPLY = 3
"""Descriptor of the reply pipe; 0 is empty, 1 and 2 are pipes."""
DESCRIPTORS = 64
SERVER_DESCRIPTORS = 256
PAGE = os.sysconf("SC_PAGE_SIZE")
STACK = 64 * MIB
CONTROL_PROCESSES = 512
"""Limit of processes if a control run permits fork, so that a candidate cannot fill the machine with them."""

IN_FOLDER = (
    AccessFS.READ_FILE | AccessFS.WRITE_FILE | AccessFS.TRUNCATE | AccessFS.READ_DIR | AccessFS.REMOVE_FILE | AccessFS.MAKE_REG
)
"""Rights that Landlock gives a child in its folder: create, read, write and remove regular files only."""

_libc = ctypes.CDLL(None, use_errno=True)


class SockFilter(ctypes.Structure):
    _fields_ = (("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint32))


class SockProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filters", ctypes.POINTER(SockFilter)))


class CapabilityHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


def check(result: int, what: str) -> None:
    """Raise an ``OSError`` that names the call ``what`` if libc returned an error."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def prctl(option: int, value: int, pointer: Any = None) -> None:
    check(_libc.prctl(option, ctypes.c_ulong(value), pointer, None, None), f"prctl({option})")


def make_program(code: bytes) -> SockProgram:
    """Return a BPF program in the kernel's form, built once in the server and loaded in every child."""
    count = len(code) // ctypes.sizeof(SockFilter)
    return SockProgram(count, (SockFilter * count).from_buffer_copy(code))


@dataclass(frozen=True)
class Confinement:
    """Confinement that all children of one server get.

    Attributes:
        on: Protections to apply.
        programs: Seccomp program for a child whose root is its folder (True), and for one whose root is the machine's (False).
        identity: Uid and gid of children if the server may choose them (as root), else None.
        chroot: Whether a child's root becomes its folder.
        server: Process id of the server.
    """

    on: frozenset[str]
    programs: dict[bool, SockProgram]
    identity: int | None
    chroot: bool
    server: int


@dataclass(frozen=True)
class JailTask:
    """Input of one job's child, made by the server before the fork.

    Attributes:
        folder: Folder of the job.
        pipes: Write ends for stdout, stderr and the reply.
        bounds: ``{resource: (soft limit, hard limit)}``.
        rules: Landlock rules of the folder; None if Landlock is off.
        payload: JSON text of the payload.
    """

    folder: str
    pipes: tuple[int, ...]
    bounds: dict[int, tuple[int, int]]
    rules: landlockpy.Ruleset | None
    payload: bytes


def address_space() -> int:
    """Return the size of this process's address space in bytes."""
    with open("/proc/self/statm", "rb", buffering=0) as file:
        return int(file.read().split()[0]) * PAGE


def make_bounds(how: Confinement, limits: JailLimits, idle: int) -> dict[int, tuple[int, int]]:
    """Return the resource limits of a job, none above the server's own; ``idle`` is the address space of an idle child."""
    wanted = {
        resource.RLIMIT_AS: idle + limits.memory,
        resource.RLIMIT_CPU: 1 + math.ceil(2 * limits.cpu_seconds),  # the kernel charges whole ticks: up to twice what a job used
        resource.RLIMIT_FSIZE: limits.file_size,
        resource.RLIMIT_NOFILE: max(DESCRIPTORS, limits.files),
        resource.RLIMIT_NPROC: 0 if "seccomp" in how.on else CONTROL_PROCESSES,
        resource.RLIMIT_CORE: 1,  # with 0 the kernel would still pipe a core dump to a handler
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 64,
        resource.RLIMIT_RTPRIO: 0,
        resource.RLIMIT_NICE: 0,
        resource.RLIMIT_STACK: STACK,
    }
    bounds = {}
    for which, bound in wanted.items():
        hard = resource.getrlimit(which)[1]
        bound = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
        bounds[which] = (bound, bound)
    return bounds


def make_rules(folder: str) -> landlockpy.Ruleset:
    """Return Landlock rules: access to the folder only, no TCP, and no abstract sockets or signals to processes outside.

    Kernels that do not know a rule skip it.
    """
    rules = landlockpy.Ruleset(scoped=Scope.ABSTRACT_UNIX_SOCKET | Scope.SIGNAL)
    rules.allow_path(folder, IN_FOLDER)
    return rules


def limit_resources(how: Confinement, task: JailTask) -> None:
    for which, bound in task.bounds.items():
        resource.setrlimit(which, bound)


def drop_privileges(how: Confinement, task: JailTask) -> None:
    """Give up all privileges, and make the job's folder the root directory if possible.

    As root, the child changes to an unprivileged identity. Without root, it keeps its identity and uses a user namespace to change
    the root directory if the kernel allows that.
    """
    if how.identity is not None:
        os.chroot(".")
        os.setgroups([])
        os.setresgid(how.identity, how.identity, how.identity)
        os.setresuid(how.identity, how.identity, how.identity)
    elif how.chroot:
        check(_libc.unshare(CLONE_NEWUSER), "unshare")
        os.chroot(".")
    header, nothing = CapabilityHeader(CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    check(_libc.capset(ctypes.byref(header), nothing), "capset")
    prctl(PR_SET_NO_NEW_PRIVS, 1)


def die_with_the_server(how: Confinement, task: JailTask) -> None:
    """Ask the kernel to kill this process when the server ends.

    Must run after `drop_privileges`, because a change of ids clears the setting, and before `filter_calls`, which refuses prctl.
    """
    prctl(PR_SET_PDEATHSIG, SIGKILL)
    if os.getppid() != how.server:
        os._exit(1)


def restrict_files(how: Confinement, task: JailTask) -> None:
    assert task.rules is not None
    task.rules.restrict()


def close_descriptors(how: Confinement, task: JailTask) -> None:
    """Close all descriptors except for 0, 1, 2 and `REPLY`.

    Must run after `restrict_files`, which uses one more.
    """
    os.closerange(REPLY + 1, SERVER_DESCRIPTORS)


def filter_calls(how: Confinement, task: JailTask) -> None:
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(how.programs["privileges" in how.on and how.chroot]))


STEPS: tuple[tuple[str | None, Callable[[Confinement, JailTask], None]], ...] = (
    ("rlimits", limit_resources),
    ("privileges", drop_privileges),
    (None, die_with_the_server),
    ("landlock", restrict_files),
    (None, close_descriptors),
    ("seccomp", filter_calls),
)
"""Steps of the confinement in order; a control run cannot leave off steps without a name."""


def confine(how: Confinement, task: JailTask) -> None:
    """Confine this process to the task's folder.

    Raises:
        OSError: The kernel refuses a step.
    """
    for source, target in zip(task.pipes, (1, 2, REPLY), strict=False):
        os.dup2(source, target)
    os.chdir(task.folder)
    for name, step in STEPS:
        if name in how.on or name is None:
            step(how, task)


@dataclass(frozen=True)
class Driver:
    """Function that a child runs, and names of the server's modules, which are removed from ``sys.modules`` in the child."""

    execute: Callable[[Any], Any]
    private: frozenset[str]


def live(how: Confinement, task: JailTask, driver: Driver) -> NoReturn:
    """Run a child from its fork to its exit."""
    leave = os._exit  # a candidate may replace attributes of modules
    try:
        try:
            os.setsid()
            volunteer_for_the_oom_killer()
            for name in driver.private:
                del sys.modules[name]
            confine(how, task)
            write_all(REPLY, CONFINED)
        except BaseException as error:
            write_all(REPLY, FAILED, str(error).encode("utf-8", "replace"))
            leave(1)
        leave(work(driver.execute, task.payload))
    finally:
        leave(1)


def volunteer_for_the_oom_killer() -> None:
    """Make the kernel kill this process first if the machine runs out of memory."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "wb", buffering=0) as file:
        file.write(b"1000")


def work(execute: Callable[[Any], Any], payload: bytes) -> int:
    """Run the driver and write its reply; return the exit status.

    An exception of the driver ends the process like an uncaught exception of Python.
    """
    dumps, write = json.dumps, write_all
    try:
        text = dumps(execute(json.loads(payload)), allow_nan=False).encode()
    except SystemExit as error:
        flush()
        return exit_status(error.code)
    except BaseException:
        flush()
        write(2, traceback.format_exc().encode("utf-8", "backslashreplace"))
        return 1
    flush()
    write(REPLY, text, b"\n")
    return 0


def exit_status(code: object) -> int:
    """Return the exit status of ``SystemExit(code)``; print any ``code`` that is neither a number nor None to stderr."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    write_all(2, f"{code}\n".encode("utf-8", "backslashreplace"))
    return 1


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):  # a candidate may have replaced the stream
            stream.flush()
