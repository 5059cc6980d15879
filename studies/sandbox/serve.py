"""Server after its start: determine which protections this machine provides, then run jobs until the parent ends."""

import contextlib
import errno
import fcntl
import os
import select
import shutil
from collections.abc import Callable, Iterator
from typing import Any

from studies.sandbox.child import (
    CAP_CHOWN,
    CAP_SETGID,
    CAP_SETUID,
    CAP_SYS_CHROOT,
    PR_SET_CHILD_SUBREAPER,
    REPLY,
    Confinement,
    Driver,
    JailTask,
    address_space,
    confine,
    make_bounds,
    make_program,
    make_rules,
    prctl,
)
from studies.sandbox.leavings import end_descendants
from studies.sandbox.limits import KERNEL_PROTECTIONS, PROTECTIONS, JailLimits
from studies.sandbox.watch import JobWatch, MachineError, ParentGoneError
from studies.sandbox.wire import JOB, pack, write_all

FIRST_IDENTITY, IDENTITIES = 0x70000000, 0x0FFFFFFF
"""Range of ids above those that systems assign; each server draws one, so that its children cannot touch those of another."""
NEEDED = (CAP_CHOWN, CAP_SETGID, CAP_SETUID, CAP_SYS_CHROOT)


def isolations() -> Iterator[tuple[int | None, bool]]:
    """Yield ``identity`` and ``chroot`` of `Confinement` as far as this server's privileges permit, the most isolating first."""
    with open("/proc/self/status", encoding="ascii") as file:
        effective = next(int(line.split()[1], 16) for line in file if line.startswith("CapEff:"))
    if all(effective >> capability & 1 for capability in NEEDED):
        yield FIRST_IDENTITY + int.from_bytes(os.urandom(4)) % IDENTITIES, True
    if os.geteuid() != 0:
        yield None, True
        yield None, False


def attempt(action: Callable[[], None]) -> str | None:
    """Try an irreversible action in a fork; return the error's text, or None if the action succeeded."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.dup2(write, REPLY)
            action()
            os._exit(0)
        except BaseException as error:
            write_all(REPLY, (str(error) or type(error).__name__).encode("utf-8", "replace"))
        finally:
            os._exit(1)
    os.close(write)
    with open(read, "rb") as file:
        text = file.read().decode("utf-8", "replace")
    _, status = os.waitpid(pid, 0)
    return None if status == 0 else text or f"ended with status {status}"


def find_confinement(wanted: frozenset[str], programs: dict[bool, bytes], home: str) -> tuple[Confinement, dict[str, str]]:
    """Return the strictest confinement that works on this machine, and ``{missing protection: reason}``.

    Each wanted protection is tried in a fork.
    """
    compiled = {chrooted: make_program(code) for chrooted, code in programs.items()}

    def confinement(on: frozenset[str], identity: int | None = None, chroot: bool = False) -> Confinement:
        return Confinement(on, compiled, identity, chroot, os.getpid())

    def trial(name: str, identity: int | None = None, chroot: bool = False) -> str | None:
        how = confinement(frozenset({name}), identity, chroot)

        def action() -> None:
            if identity is not None:
                os.chown(home, identity, identity)
                os.chown(home, os.geteuid(), os.getegid())
            rules = make_rules(home) if name == "landlock" else None
            confine(how, JailTask(home, (), make_bounds(how, JailLimits(), address_space()), rules, b""))
            if name == "landlock":
                with contextlib.suppress(PermissionError):
                    os.listdir("/")
                    raise OSError("it does not keep a process out of /")

        return attempt(action)

    missing: dict[str, str] = {}
    chosen: tuple[int | None, bool] = (None, False)
    if "privileges" in wanted:
        missing["privileges"] = "a server that runs as root needs the capabilities chown, setgid, setuid and sys_chroot"
        for chosen in isolations():
            if (wrong := trial("privileges", *chosen)) is None:
                del missing["privileges"]
                break
            missing["privileges"] = wrong
        else:
            chosen = (None, False)
    for name in KERNEL_PROTECTIONS:
        if name in wanted and name != "privileges":
            wrong = trial(name) if name != "seccomp" or programs else "libseccomp cannot be used"
            if wrong is not None:
                missing[name] = wrong
    return confinement(wanted - missing.keys(), *chosen), missing


def serve(inherited: int, parent: int, config: dict[str, Any], execute: Callable[[Any], Any], private: set[str]) -> None:
    """Report the protections of this server's children, then run jobs until the parent ends."""
    # Children close the descriptors above REPLY and reuse those below, so the channel moves to a low number above it.
    channel, home = fcntl.fcntl(inherited, fcntl.F_DUPFD_CLOEXEC, REPLY + 1), config["home"]
    os.dup2(0, REPLY, inheritable=False)
    if inherited != REPLY:
        os.close(inherited)
    try:
        if len(os.listdir("/proc/self/task")) > 1:
            raise OSError("the modules or the driver have started threads, and a fork has only one")
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        pidfd = open_pidfd(parent)
        os.mkdir(home, 0o700)
    except OSError as error:
        greet(channel, {"error": str(error)})
        return
    try:
        programs = {bool(int(name)): bytes.fromhex(code) for name, code in config["programs"].items()}
        how, missing = find_confinement(frozenset(config["wanted"]), programs, home)
        greet(channel, {"protections": sorted(how.on, key=PROTECTIONS.index), "missing": missing})
        if os.getppid() == parent:
            with contextlib.suppress(ParentGoneError, BrokenPipeError, ConnectionError):
                do_jobs(channel, pidfd, JobWatch(how, Driver(execute, frozenset(private)), home, (channel, pidfd)))
    finally:
        end_descendants()
        shutil.rmtree(home, ignore_errors=True)
        with contextlib.suppress(OSError):  # only the last server finds it empty
            os.rmdir(os.path.dirname(home))


def open_pidfd(pid: int) -> int:
    """Return a descriptor of a process; ``OSError`` in one sentence if the system has none, as gVisor."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError) as error:
        if getattr(error, "errno", errno.ENOSYS) not in (errno.ENOSYS, errno.EPERM):
            raise
        text = "this system has no pidfd_open, by which the jail watches processes (gVisor has none): use Linux 5.3 or later"
        raise OSError(text) from error


def greet(channel: int, hello: dict[str, Any]) -> None:
    """Send the parent what came of the start, unless it gave up waiting because another server failed."""
    with contextlib.suppress(ConnectionError):
        write_all(channel, pack(hello))


def do_jobs(channel: int, pidfd: int, watch: JobWatch) -> None:
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    poll.register(pidfd, select.POLLIN)
    while True:
        if any(descriptor == pidfd for descriptor, _ in poll.poll()):
            raise ParentGoneError
        serial, size, *numbers = JOB.unpack(read_exactly(channel, JOB.size))
        payload = read_exactly(channel, size)
        try:
            report, streams = watch.run(payload, JailLimits(*numbers))
        except MachineError as error:
            write_all(channel, pack({"serial": serial, "trouble": str(error)}))
            continue
        files = report.pop("files")
        header = report | {"serial": serial, "files": {name: len(data) for name, data in files.items()}}
        header["lengths"] = [len(data) for data in streams]
        write_all(channel, pack(header), *streams, *files.values())


def read_exactly(channel: int, size: int) -> bytes:
    """Return ``size`` bytes from the parent; raises ParentGoneError if it ends before."""
    received = bytearray()
    while len(received) < size:
        chunk = os.read(channel, size - len(received))
        if not chunk:
            raise ParentGoneError
        received += chunk
    return bytes(received)
