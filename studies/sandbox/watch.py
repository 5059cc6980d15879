"""One job as its server sees it: fork a child into an empty folder, watch and end the child, collect its data, clean up."""

import contextlib
import errno
import os
import select
import shutil
import signal
import time
from dataclasses import dataclass
from typing import Any

from studies.sandbox import child
from studies.sandbox.child import Confinement, Driver, JailTask, address_space, make_bounds, make_rules
from studies.sandbox.leavings import collect, end_descendants, named, nameless, reap
from studies.sandbox.limits import FLOOD, MIB, JailLimits
from studies.sandbox.wire import FAILED

TICK = 0.02
"""Seconds between two checks of a child's folder and clock."""
BACKSTOP = 10.0
"""Seconds beyond its time limit after which a child is killed if the watchdog is off."""
CHUNK = 1 << 16
CPU_SIGNALS = (signal.SIGKILL, signal.SIGXCPU)
"""Signals by which the kernel ends a job at RLIMIT_CPU, the backstop of the watch on a job's exact time."""


class ParentGoneError(Exception):
    """The parent process has ended, so that nobody waits for the job."""


class MachineError(Exception):
    """The machine failed, not the job."""


class PipeBuffer:
    """First ``room`` bytes that come out of a pipe, and the number of all bytes that came."""

    def __init__(self, room: int) -> None:
        self.data, self._room, self.seen = bytearray(), room, 0

    @property
    def cut(self) -> bool:
        return self.seen > self._room

    def fill(self, descriptor: int) -> bool | None:
        """Read once from a descriptor: True if bytes came, False at its end, None if no bytes are available yet."""
        try:
            chunk = os.read(descriptor, CHUNK)
        except BlockingIOError:
            return None
        self.seen += len(chunk)
        self.data += chunk[: self._room - len(self.data)]
        return bool(chunk)


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
        self._idle = address_space()

    def run(self, payload: bytes, limits: JailLimits) -> tuple[dict[str, Any], list[bytearray]]:
        """Run one job and clean up after it in any case; return fields of its `JailOutcome`, and its stdout, stderr and reply.

        Raises:
            MachineError: The machine failed.
            ParentGoneError: The parent has ended.
        """
        self.stdout, self.stderr, self.reply = self._buffers = [
            PipeBuffer(room) for room in (limits.output, limits.output, limits.reply + 2)
        ]
        try:
            with contextlib.ExitStack() as stack:
                job = self._start(payload, limits, stack)
                try:
                    self._watch(job)
                except BaseException:
                    job.kill("parent")
                    raise
                return self._report(job), [buffer.data for buffer in self._buffers]
        except OSError as error:
            raise MachineError(f"a job cannot be run: {error}") from error

    def _make_folder(self, limits: JailLimits, stack: contextlib.ExitStack) -> tuple[str, int]:
        """Return the path and a descriptor of an empty folder, which ``stack`` removes.

        Raises:
            OSError: The disk has less free space than the job may use.
        """
        path = os.path.join(self._home, "job")
        os.mkdir(path, 0o700)
        stack.callback(shutil.rmtree, path, ignore_errors=True)
        if self._how.identity is not None and "privileges" in self._how.on:
            os.chown(path, self._how.identity, self._how.identity)
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        stack.callback(os.close, folder)
        disk = os.statvfs(folder)
        if disk.f_blocks and disk.f_bavail * disk.f_frsize < limits.disk:  # some file systems do not count, and report 0
            raise OSError(errno.ENOSPC, f"the disk has less room than the {limits.disk} bytes that a job may use", self._home)
        return path, folder

    def _start(self, payload: bytes, limits: JailLimits, stack: contextlib.ExitStack) -> WatchedJob:
        """Fork the child. The callbacks on ``stack`` end and collect it, close its descriptors and remove its folder."""
        path, folder = self._make_folder(limits, stack)
        rules = None
        if "landlock" in self._how.on:
            rules = make_rules(path)
            stack.callback(rules.close)
        with contextlib.ExitStack() as childs:
            reads, writes = zip(*(os.pipe() for _ in self._buffers), strict=True)
            for read, write in zip(reads, writes, strict=True):
                stack.callback(os.close, read)
                childs.callback(os.close, write)
                os.set_blocking(read, False)
            task = JailTask(path, writes, make_bounds(self._how, limits, self._idle), rules, payload)
            started = time.monotonic()
            pid = os.fork()
            if pid == 0:
                for callbacks in (stack, childs):
                    callbacks.pop_all()  # only the server ends a job, and the child must not find its callbacks
                child.live(self._how, task, self._driver)
        stack.callback(end_descendants if self._guarded else reap)
        pidfd = os.pidfd_open(pid)
        stack.callback(os.close, pidfd)
        return WatchedJob(pid, pidfd, reads, folder, limits, started)

    def _watch(self, job: WatchedJob) -> None:
        """Wait until the child has ended, reading its output and enforcing its limits.

        Raises:
            ParentGoneError: The parent has ended.
        """
        deadline = job.started + job.limits.seconds + (0.0 if self._guarded else BACKSTOP)
        look = job.started + TICK
        buffers = dict(zip(job.pipes, self._buffers, strict=True))
        poll = select.poll()
        for descriptor in (job.pidfd, *job.pipes, *self._parent):
            poll.register(descriptor, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poll.poll(max(0.0, 1000 * (min(look, deadline) - time.monotonic())))}
            for descriptor in ready & buffers.keys():
                if buffers[descriptor].fill(descriptor) is False:
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
        for descriptor, buffer in buffers.items():
            for _ in range(4):  # enough for a pipe's content; a descendant may write forever
                if not buffer.fill(descriptor):
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
        if self.reply.data[:1] == FAILED:
            raise MachineError("a child cannot be confined: " + self.reply.data[1:].decode("utf-8", "replace"))
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
