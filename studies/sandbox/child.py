"""The child's side: put the protections on, run the driver, write one reply, and never come back.

Runs in a fork of a warm server, before and around a candidate. Until `confine` is through, everything here is trusted code; from
then on nothing that happens in this process is.
"""

import contextlib
import ctypes
import gc
import json
import math
import os
import resource
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

import landlockpy
from landlockpy import AccessFS, Scope

from studies.sandbox.limits import MIB, Limits
from studies.sandbox.wire import CONFINED, FAILED, write_all

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 22, 36, 38
SECCOMP_MODE_FILTER = 2
SIGKILL = 9
CLONE_NEWUSER = 0x10000000
CAPABILITY_VERSION_3 = 0x20080522
CAP_CHOWN, CAP_SETGID, CAP_SETUID, CAP_SYS_CHROOT = 0, 6, 7, 18

REPLY = 3
"""The descriptor of the reply pipe; 0 is empty, 1 and 2 are pipes."""
DESCRIPTORS = 64
SERVER_DESCRIPTORS = 256
PAGE = os.sysconf("SC_PAGE_SIZE")
STACK = 64 * MIB
CONTROL_PROCESSES = 512
"""Where a control run leaves fork to the candidate, it still cannot fill the machine with processes."""

IN_FOLDER = (
    AccessFS.READ_FILE | AccessFS.WRITE_FILE | AccessFS.TRUNCATE | AccessFS.READ_DIR | AccessFS.REMOVE_FILE | AccessFS.MAKE_REG
)
"""What Landlock lets a child do in its folder: regular files, and nothing else, come and go there."""

_libc = ctypes.CDLL(None, use_errno=True)


class SockFilter(ctypes.Structure):
    _fields_ = (("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint32))


class SockProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filters", ctypes.POINTER(SockFilter)))


class CapabilityHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


def check(result: int, what: str) -> None:
    """Raises OSError, naming the call, where libc says that it failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def prctl(option: int, value: int, pointer: Any = None) -> None:
    check(_libc.prctl(option, ctypes.c_ulong(value), pointer, None, None), f"prctl({option})")


def make_program(code: bytes) -> SockProgram:
    """A BPF program in the kernel's form; built once in the server, loaded in every child."""
    count = len(code) // ctypes.sizeof(SockFilter)
    return SockProgram(count, (SockFilter * count).from_buffer_copy(code))


@dataclass(frozen=True)
class Confinement:
    """How children of one server are confined.

    on        the protections to put on
    programs  the seccomp program for a child whose root is its folder (True), and for one whose root is the machine's (False)
    identity  uid and gid of children, where the server may choose (as root); else None
    chroot    whether a child's root becomes its folder
    server    the server's process id
    """

    on: frozenset[str]
    programs: dict[bool, SockProgram]
    identity: int | None
    chroot: bool
    server: int


@dataclass(frozen=True)
class Task:
    """One job as its child gets it, made by the server: what is made before the fork costs a child no copied memory.

    pipes    the write ends for stdout, stderr and the reply
    bounds   resource -> soft and hard limit
    rules    Landlock's rule for the folder; None where that is off
    """

    folder: str
    pipes: tuple[int, ...]
    bounds: dict[int, tuple[int, int]]
    rules: landlockpy.Ruleset | None
    payload: memoryview


def address_space() -> int:
    """Bytes of address space that this process has."""
    with open("/proc/self/statm", "rb", buffering=0) as file:
        return int(file.read().split()[0]) * PAGE


def make_bounds(how: Confinement, limits: Limits, idle: int) -> dict[int, tuple[int, int]]:
    """The resource limits of a job, none above what the server has itself; `idle` is the address space of an idle child.

    A job can read them, so that `idle` should not depend on what earlier jobs made the server take.
    """
    wanted = {
        resource.RLIMIT_AS: idle + limits.memory,
        resource.RLIMIT_CPU: max(1, math.ceil(limits.cpu_seconds)),
        resource.RLIMIT_FSIZE: limits.file_size,
        resource.RLIMIT_NOFILE: DESCRIPTORS,
        resource.RLIMIT_NPROC: 0 if "seccomp" in how.on else CONTROL_PROCESSES,
        resource.RLIMIT_CORE: 1,  # 0 would still feed a core to a handler that reads it from a pipe
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
    """Landlock: nothing but the folder; no TCP, and no abstract sockets and signals out of it where the kernel knows these."""
    rules = landlockpy.Ruleset(scoped=Scope.ABSTRACT_UNIX_SOCKET | Scope.SIGNAL)
    rules.allow_path(folder, IN_FOLDER)
    return rules


def limit_resources(how: Confinement, task: Task) -> None:
    for which, bound in task.bounds.items():
        resource.setrlimit(which, bound)


def drop_privileges(how: Confinement, task: Task) -> None:
    """Root becomes nobody, in a root of its own; others keep their id, and get a root of their own where the kernel lets them."""
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


def die_with_the_server(how: Confinement, task: Task) -> None:
    """After `drop_privileges`, as a change of ids clears the wish; before `filter_calls`, which refuses prctl."""
    prctl(PR_SET_PDEATHSIG, SIGKILL)
    if os.getppid() != how.server:
        os._exit(1)


def restrict_files(how: Confinement, task: Task) -> None:
    assert task.rules is not None
    task.rules.restrict()


def close_descriptors(how: Confinement, task: Task) -> None:
    """All but 0, 1, 2 and `REPLY`; after `restrict_files`, which uses one more."""
    os.closerange(REPLY + 1, SERVER_DESCRIPTORS)


def filter_calls(how: Confinement, task: Task) -> None:
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(how.programs["privileges" in how.on and how.chroot]))


STEPS: tuple[tuple[str | None, Callable[[Confinement, Task], None]], ...] = (
    ("rlimits", limit_resources),
    ("privileges", drop_privileges),
    (None, die_with_the_server),
    ("landlock", restrict_files),
    (None, close_descriptors),
    ("seccomp", filter_calls),
)
"""In this order; those without a name are no protection that a control run could leave off."""


def confine(how: Confinement, task: Task) -> None:
    """Confines this process to the task's folder. Raises OSError where the kernel refuses."""
    for source, target in zip(task.pipes, (1, 2, REPLY), strict=False):
        os.dup2(source, target)
    os.chdir(task.folder)
    for name, step in STEPS:
        if name in how.on or name is None:
            step(how, task)


@dataclass(frozen=True)
class Driver:
    """What a child runs, and the modules that are its server's, which it shall not find by name."""

    execute: Callable[[Any], Any]
    private: frozenset[str]


def live(how: Confinement, task: Task, driver: Driver) -> NoReturn:
    """A child's whole life."""
    leave = os._exit  # a candidate may replace what the modules hold
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
        execute, payload = driver.execute, bytes(task.payload)
        forget(sys._getframe(1))
        del how, task, driver
        level()
        leave(work(execute, payload))
    finally:
        leave(1)


def forget(frame: FrameType | None) -> None:
    """Empties the variables of a frame and of those that called it: what a server keeps there is not for a candidate to look up.

    The number of the main thread, which is the server's, goes too.
    """
    while frame is not None and frame.f_code.co_name != "<module>":
        names = frame.f_locals
        names.update(dict.fromkeys(names))
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), 0)  # does nothing from Python 3.13 on, nor need it
        frame = frame.f_back
    if "threading" in sys.modules:
        vars(sys.modules["threading"].main_thread())["_native_id"] = 0


def level() -> None:
    """Brings the collector's and the allocator's counts to where every child begins.

    A server lets go of a few objects a job that Python keeps to use again, and their number would tell a job its place.
    """
    gc.collect()
    gc.enable()


def volunteer_for_the_oom_killer() -> None:
    """A machine that runs out of memory takes candidates first."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "wb", buffering=0) as file:
        file.write(b"1000")


def work(execute: Callable[[Any], Any], payload: bytes) -> int:
    """Runs the driver and writes its reply; the exit status. What the driver raises ends like an uncaught exception of Python."""
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
    """The exit status of ``SystemExit(code)``."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    write_all(2, f"{code}\n".encode("utf-8", "backslashreplace"))
    return 1


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):  # whatever a candidate put there
            stream.flush()
