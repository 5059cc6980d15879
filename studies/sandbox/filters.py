"""System calls that a child may make: an allow-list as data, and the BPF program that libseccomp compiles from it.

Every call that is not listed here fails with EPERM: processes and threads, sockets, signals to others, ptrace, most of ioctl,
namespaces, mounts, keys, shared memory, links, folders, permissions and limits. A call of another architecture kills the process.
"""

import errno
import functools
import os
import tempfile
from dataclasses import dataclass
from typing import Any

SIGN = 0x80000000
"""Sign bit of a 32-bit int."""
PROT_EXEC = 0x4
MAP_ANONYMOUS = 0x20
O_PATH = 0x200000
O_TMPFILE = 0x400000
SYNCHRONOUS = os.O_SYNC | os.O_DSYNC | os.O_DIRECT
AT_EMPTY_PATH = 0x1000
AT_REMOVEDIR = 0x200
RENAME_WHITEOUT = 4
F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC = 0, 1, 2, 3, 1030
MADV_NORMAL, MADV_DONTNEED, MADV_FREE, MADV_HUGEPAGE = 0, 4, 8, 14
FIONCLEX, FIOCLEX = 0x5450, 0x5451
FUTEX_WAIT, FUTEX_WAKE, FUTEX_WAIT_BITSET, FUTEX_WAKE_BITSET = 0, 1, 9, 10
FUTEX_PRIVATE = 128
FUTEX_COMMAND = ~256 & 0xFFFFFFFF
"""Mask of an operation without its flag CLOCK_REALTIME."""


@dataclass(frozen=True)
class Bits:
    """Condition that argument number ``argument``, masked with ``mask``, equals ``value``."""

    argument: int
    mask: int
    value: int


def equals(argument: int, value: int) -> Bits:
    """Return the condition that argument number ``argument`` equals ``value``."""
    return Bits(argument, (1 << 64) - 1, value)


PLAIN = {
    "its memory": "brk munmap mremap",
    "time": "gettimeofday nanosleep time times sched_yield",
    "signals to itself": "rt_sigaction rt_sigprocmask rt_sigreturn sigaltstack restart_syscall alarm setitimer getitimer pause",
    "chance and the end": "getrandom exit exit_group",
    "descriptors that it has": "read write readv writev pread64 pwrite64 preadv pwritev lseek close fstat dup dup2 dup3 pipe pipe2 "
    "poll ppoll select pselect6 ftruncate sendfile getdents64",
    "names in its folder, which Landlock bounds": "unlink rename renameat",
    "who and where it is": "getpid gettid getpgrp getppid getuid geteuid getgid getegid getresuid getresgid "
    "getgroups getcwd umask uname",
    "what it has": "getrusage getrlimit",
}
"""``{purpose: system calls}`` of the calls that are allowed with any arguments."""

CONDITIONAL: dict[str, tuple[tuple[Bits, ...], ...]] = {
    # Executable memory could hold the candidate's own system calls; a mapped file outlives its name and its size limit.
    "mmap": ((Bits(2, PROT_EXEC, 0), Bits(3, MAP_ANONYMOUS, MAP_ANONYMOUS)),),
    "mprotect": ((Bits(2, PROT_EXEC, 0),),),
    "madvise": tuple((equals(2, advice),) for advice in (MADV_NORMAL, MADV_DONTNEED, MADV_FREE, MADV_HUGEPAGE)),
    # Operations with an owner (PI) take the number of any process and tell whether it exists. Those without PRIVATE wait for and
    # wake any process that has mapped the same page of a file, such as the C library's.
    "futex": tuple(
        (Bits(1, FUTEX_COMMAND, command | FUTEX_PRIVATE),)
        for command in (FUTEX_WAIT, FUTEX_WAKE, FUTEX_WAIT_BITSET, FUTEX_WAKE_BITSET)
    ),
    # Landlock does not check O_PATH; files without a name cannot be counted; the disk is shared, as with fsync.
    "openat": ((Bits(2, O_PATH | O_TMPFILE | SYNCHRONOUS, 0),),),
    "unlinkat": ((Bits(2, AT_REMOVEDIR, 0),),),
    # Landlock treats this as a rename, but it leaves a device file.
    "renameat2": ((Bits(4, RENAME_WHITEOUT, 0),),),
    # F_SETOWN and F_SETSIG send signals.
    "fcntl": tuple((equals(1, command),) for command in (F_DUPFD, F_DUPFD_CLOEXEC, F_GETFD, F_SETFD, F_GETFL)),
    # Python sets and clears close-on-exec by these.
    "ioctl": tuple((equals(1, request),) for request in (FIONCLEX, FIOCLEX)),
    # Only the child's own limits, and only reading.
    "prlimit64": ((equals(0, 0), equals(2, 0)),),
    # Only the child's own processors and clocks: negative clock ids are those of other processes, whose activity they would reveal.
    "sched_getaffinity": ((equals(0, 0),),),
    "clock_gettime": ((Bits(0, SIGN, 0),),),
    "clock_getres": ((Bits(0, SIGN, 0),),),
    "clock_nanosleep": ((Bits(0, SIGN, 0),),),
    "newfstatat": ((Bits(3, AT_EMPTY_PATH, AT_EMPTY_PATH),),),
}
"""``{system call: alternatives}`` of the calls that are allowed if all conditions of one alternative hold."""

LOOKUPS = ("stat", "lstat", "newfstatat", "access", "faccessat", "faccessat2", "readlink", "readlinkat")
"""Queries of a path, which Landlock does not restrict: allowed only if the child's root is its folder."""


@functools.cache
def program(chrooted: bool) -> bytes:
    """Return the filter as an array of ``struct sock_filter``.

    Raises:
        OSError: libseccomp is not installed or too old.
    """
    try:
        import pyseccomp
    except (ImportError, RuntimeError, AttributeError) as error:
        raise OSError(errno.ENOSYS, f"libseccomp cannot be used ({error})") from error
    rules = pyseccomp.SyscallFilter(pyseccomp.ERRNO(errno.EPERM))
    rules.set_attr(pyseccomp.Attr.ACT_BADARCH, pyseccomp.KILL_PROCESS)
    plain = [*(name for names in PLAIN.values() for name in names.split()), *(LOOKUPS if chrooted else ())]
    for name in plain:
        _add(rules, pyseccomp.ALLOW, name)
    for name, alternatives in CONDITIONAL.items():
        for conditions in alternatives if name not in plain else ():
            _add(rules, pyseccomp.ALLOW, name, *conditions)
    with tempfile.TemporaryFile(prefix="jail-filter-") as file:
        rules.export_bpf(file)
        size = os.fstat(file.fileno()).st_size
        return os.pread(file.fileno(), size, 0)


def _add(rules: Any, action: int, name: str, *conditions: Bits) -> None:
    import pyseccomp

    number = pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, name)
    if number >= 0:  # negative: this architecture has no such call
        checks = (pyseccomp.Arg(each.argument, pyseccomp.MASKED_EQ, each.mask, each.value) for each in conditions)
        rules.add_rule(action, number, *checks)
