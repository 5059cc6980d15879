"""One job as its server sees it: fork a child into an empty folder, watch and end the child, collect its data, clean up."""

import contextlib
import errno
import os
import select
import signal
import time
from dataclasses import dataclass
from typing import Any

import landlockpy

from studies.sandbox import child
from studies.sandbox.child import Confinement, Driver, JailTask, address_space, make_bounds, make_rules
from studies.sandbox.leavings import clear, collect, end_descendants, named, nameless, reap
from studies.sandbox.limits import FLOOD, MIB, JailLimits
from studies.sandbox.wire import FAILED

TICK = 0.02
"""Seconds between two checks of a child's folder and clock."""
BACKSTOP = 10.0
"""Seconds beyond its time limit after which a child is killed if the watchdog is off."""
CHUNK = 1 << 16
FULL = (errno.ENOSPC, errno.EDQUOT)
CPU_SIGNALS = (signal.SIGKILL, signal.SIGXCPU)
"""Signals by which the kernel ends a job at RLIMIT_CPU, the backstop of the watch on a job's exact time."""


class ParentGoneError(Exception):
    """The parent process has ended, so that nobody waits for the job."""


class MachineError(Exception):
    """The machine failed, not the job.

    Attributes:
        crowded: Whether the disk is full, and may have space again after other jobs have ended.
    """

    def __init__(self, sentence: str, crowded: bool = False) -> None:
        super().__init__(sentence)
        self.crowded = crowded


class Vessel:
    """Buffer of up to ``room`` bytes for the content of a pipe.

    ``wipe`` clears the memory, because the next child inherits a copy of it.
    """

    def __init__(self) -> None:
        self._memory, self._spare = bytearray(CHUNK), bytearray(CHUNK)
        self.room = self.kept = self.seen = 0

    @property
    def view(self) -> memoryview:
        return memoryview(self._memory)[: self.kept]

    @property
    def cut(self) -> bool:
        return self.seen > self.kept

    def fill(self, descriptor: int) -> bool | None:
        """Read once from a descriptor: True if bytes came, False at its end, None if no bytes are available yet."""
        want = min(CHUNK, self.room - self.kept)
        if len(self._memory) < self.kept + want:
            self._grow()
        try:
            target = memoryview(self._memory)[self.kept : self.kept + want] if want else memoryview(self._spare)
            got = os.readv(descriptor, [target])
        except BlockingIOError:
            return None
        self.seen += got
        self.kept += got if want else 0
        return got > 0

    def read(self, descriptor: int, size: int) -> bool:
        """Read exactly ``size`` bytes from a blocking descriptor; return False if it ends before."""
        self.room = size
        while self.kept < size:
            if not self.fill(descriptor):
                return False
        return True

    def wipe(self, room: int = 0) -> None:
        """Clear the buffer and accept up to ``room`` bytes.

        A large memory is released, because its size would reveal the size of the job that needed it.
        """
        self._memory[: self.kept] = bytes(self.kept)
        if len(self._memory) > CHUNK:
            self._memory = bytearray(CHUNK)
        if self.cut:
            self._spare[:] = bytes(CHUNK)
        self.room, self.kept, self.seen = room, 0, 0

    def _grow(self) -> None:
        larger = bytearray(2 * len(self._memory))
        memoryview(larger)[: self.kept] = self.view  # a plain slice would copy through temporary memory that is never wiped
        self._memory[:] = bytes(len(self._memory))
        self._memory = larger


@dataclass(frozen=True)
class JobFolder:
    """Folder of a job: its path, its open descriptor, and Landlock's rules if they are on."""

    path: str
    folder: int
    rules: landlockpy.Ruleset | None


@dataclass
class WatchedJob:
    """A running child; ``folder`` is the descriptor of its folder."""

    pid: int
    pidfd: int
    pipes: tuple[int, ...]
    folder: int
    limits: JailLimits
    started: float
    killed: str | None = None

    def kill(self, reason: str) -> None:
        """Kill the child and its process group; the first reason is kept."""
        self.killed = self.killed or reason
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def processor_seconds(self) -> float:
        """Return the child's processor time, from its own clock (CPUCLOCK_SCHED in Linux's posix-timers.h)."""
        return time.clock_gettime(~self.pid << 3 | 2)

    def over(self, ended: bool = False) -> bool:
        """Return True if the job's files exceed their limits in number or size.

        For a job that has ended only the files in its folder count; for a running one also files that it holds open without a name.
        """
        sizes = named(self.folder) + ([] if ended else nameless(self.pid))
        return len(sizes) > self.limits.files or sum(sizes) > self.limits.disk


class JobWatch:
    """Run one job after another in a folder in ``home``; the descriptors ``parent`` become readable when the parent has ended."""

    def __init__(self, how: Confinement, driver: Driver, home: str, parent: tuple[int, ...]) -> None:
        self._how, self._driver, self._home, self._parent = how, driver, home, parent
        self._guarded, self._metered = "watchdog" in how.on, "rlimits" in how.on
        self.stdout, self.stderr, self.reply = self.vessels = (Vessel(), Vessel(), Vessel())
        self._place: JobFolder | None = None
        self._idle = address_space()

    def run(self, payload: memoryview, limits: JailLimits) -> dict[str, Any]:
        """Run one job, clean up after it in any case, and return fields of its `JailOutcome`; its output is in ``vessels``.

        Raises:
            MachineError: The machine failed.
            ParentGoneError: The parent has ended.
        """
        for vessel, room in zip(self.vessels, (limits.output, limits.output, limits.reply + 2), strict=True):
            vessel.wipe(room)
        try:
            with contextlib.ExitStack() as stack:
                stack.callback(self._tidy)
                job = self._start(payload, limits, stack)
                try:
                    self._watch(job)
                except BaseException:
                    job.kill("parent")
                    raise
                return self._report(job)
        except OSError as error:
            raise MachineError(f"a job cannot be run: {error}", error.errno in FULL) from error

    def _make_place(self, limits: JailLimits) -> JobFolder:
        """Return the folder for the next job.

        Raises:
            OSError: The disk has less free space than the job may use (errno in `FULL`), or is smaller than that.
        """
        if self._place is None:
            path = os.path.join(self._home, "job")
            os.mkdir(path, 0o700)
            if self._how.identity is not None and "privileges" in self._how.on:
                os.chown(path, self._how.identity, self._how.identity)
            rules = make_rules(path) if "landlock" in self._how.on else None
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            self._place = JobFolder(path, folder, rules)
        os.utime(self._place.folder, (0, 0))  # for `_tidy`; and no job can see when the folder was made
        disk = os.statvfs(self._place.folder)
        for what, size, free, wanted in (
            ("bytes", disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize, limits.disk),
            ("files", disk.f_files, disk.f_favail, limits.files),
        ):
            if size and free < wanted:  # some file systems do not count, and report 0
                number = errno.EFBIG if size < wanted else errno.ENOSPC
                raise OSError(number, f"the disk has less room than the {wanted} {what} that a job may use", self._home)
        return self._place

    def _tidy(self) -> None:
        """Keep the job's folder if no entry of it was made or removed; otherwise remove it.

        An emptied folder tells the next job how full it was: ext4 by its size, tmpfs by the offsets of new entries.
        """
        place = self._place
        if place is not None and {"landlock", "seccomp"} <= self._how.on and os.fstat(place.folder).st_mtime_ns == 0:
            return
        self._place = None
        if place is not None:
            os.close(place.folder)
            if place.rules is not None:
                place.rules.close()
        clear(self._home)

    def _start(self, payload: memoryview, limits: JailLimits, stack: contextlib.ExitStack) -> WatchedJob:
        """Fork the child. The callbacks on ``stack`` end and collect it and close its descriptors."""
        place = self._make_place(limits)
        with contextlib.ExitStack() as childs:
            reads, writes = zip(*(os.pipe() for _ in self.vessels), strict=True)
            for read, write in zip(reads, writes, strict=True):
                stack.callback(os.close, read)
                childs.callback(os.close, write)
                os.set_blocking(read, False)
            task = JailTask(place.path, writes, make_bounds(self._how, limits, self._idle), place.rules, payload)
            started = time.monotonic()
            pid = os.fork()
            if pid == 0:
                for callbacks in (stack, childs):
                    callbacks.pop_all()  # only the server ends a job, and the child must not find its callbacks
                child.live(self._how, task, self._driver)
        stack.callback(end_descendants if self._guarded else reap)
        pidfd = os.pidfd_open(pid)
        stack.callback(os.close, pidfd)
        return WatchedJob(pid, pidfd, reads, place.folder, limits, started)

    def _watch(self, job: WatchedJob) -> None:
        """Wait until the child has ended, reading its output and enforcing its limits.

        Raises:
            ParentGoneError: The parent has ended.
        """
        deadline = job.started + job.limits.seconds + (0.0 if self._guarded else BACKSTOP)
        look = job.started + TICK
        vessels = dict(zip(job.pipes, self.vessels, strict=True))
        poll = select.poll()
        for descriptor in (job.pidfd, *job.pipes, *self._parent):
            poll.register(descriptor, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poll.poll(max(0.0, 1000 * (min(look, deadline) - time.monotonic())))}
            for descriptor in ready & vessels.keys():
                if vessels[descriptor].fill(descriptor) is False:
                    poll.unregister(descriptor)
            if job.pidfd in ready:
                break
            if not ready.isdisjoint(self._parent):
                raise ParentGoneError
            now = time.monotonic()
            if self._flooded(job):
                job.kill("output")
            elif now >= deadline:
                job.kill("timeout")
                deadline = now + BACKSTOP
            elif now >= look:
                look = now + TICK
                self._look(job)
        for descriptor, vessel in vessels.items():
            for _ in range(4):  # enough for a pipe's content; a descendant may write forever
                if not vessel.fill(descriptor):
                    break

    def _look(self, job: WatchedJob) -> None:
        if self._metered and job.processor_seconds() > job.limits.cpu_seconds:
            job.kill("cpu")
        elif self._guarded and job.over():
            job.kill("disk")

    def _flooded(self, job: WatchedJob) -> bool:
        most = max(FLOOD * job.limits.output, MIB)
        return self._guarded and (self.stdout.seen > most or self.stderr.seen > most or self.reply.cut)

    def _report(self, job: WatchedJob) -> dict[str, Any]:
        _, waited, used = os.wait4(job.pid, 0)
        seconds, spent = time.monotonic() - job.started, used.ru_utime + used.ru_stime
        if self._guarded:
            end_descendants()
        if bytes(self.reply.view[:1]) == FAILED:
            raise MachineError("a child cannot be confined: " + bytes(self.reply.view[1:]).decode("utf-8", "replace"))
        code = os.waitstatus_to_exitcode(waited)
        status = job.killed or ("exited" if code >= 0 else "signalled")
        if status == "signalled" and self._metered and -code in CPU_SIGNALS and spent > job.limits.cpu_seconds / 2:
            status = "cpu"
        if status in ("exited", "signalled") and self._guarded:
            status = "output" if self._flooded(job) else "disk" if job.over(ended=True) else status
        return {
            "status": status,
            "exit_code": code if status == "exited" else None,
            "signal": -code if status == "signalled" else None,
            "truncated": self.stdout.cut or self.stderr.cut,
            "seconds": seconds,
            "cpu_seconds": spent,
            "peak_memory": 1024 * used.ru_maxrss,
            "files": collect(job.folder, job.limits),
        }
