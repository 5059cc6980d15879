"""The jail as its user sees it: a pool of warm servers that are handed one job at a time."""

import contextlib
import importlib.util
import json
import selectors
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, overload

from studies.sandbox import filters
from studies.sandbox.limits import DEFAULT_MODULES, KERNEL_PROTECTIONS, PROTECTIONS, JailUnavailableError, Limits, Outcome
from studies.sandbox.pool import CLOSED, CrowdedError, Pool, Recipe, ServerDiedError, Worker, with_reply

T = TypeVar("T")

NEEDS = {
    "rlimits": "resource limits that it may lower",
    "privileges": "the right to give up privileges (as root: chown, setuid, setgid and chroot)",
    "landlock": "Landlock (Linux 5.13 or newer with landlock among its security modules)",
    "seccomp": "seccomp filters (libseccomp 2.5 or newer, and a kernel with CONFIG_SECCOMP_FILTER)",
}
"""What a missing protection needs of the machine."""
PATIENCE = 30.0
"""Seconds beyond a job's limit after which its server itself is taken for dead."""
ATTEMPTS = 2
"""Servers that a job may lose before it is reported."""
UNREAD = 2
"""Replies for each server that may wait to be read, before no more jobs are handed out."""
PAUSE = 0.05
"""Seconds between two looks whether a full disk has room again, where no job of this jail holds it."""


class Jail:
    """Runs untrusted Python in confined children of warm servers, and brings back data.

    driver   a trusted Python file that defines ``execute(payload)``, called in the confined child; it returns the reply, JSON-able
    limits   what a job may use unless `run` says otherwise
    workers  servers, and so jobs at a time
    modules  what candidates can import; everything else is a ModuleNotFoundError
    unsafe   run also where this machine lacks a protection; those in use are in `protections`
    without  protections to leave off, to see what they are good for; needs ``unsafe``

    A context manager; it also closes when it is collected or Python exits. Several jails may live in one process. Threads may share
    one: their calls of `run` take turns. Raises ValueError for what cannot be asked for, JailUnavailableError where the machine
    lacks a protection, and OSError where a server cannot be started, which includes a driver that cannot be loaded.
    """

    def __init__(
        self,
        driver: Path,
        *,
        limits: Limits | None = None,
        workers: int = 2,
        modules: Iterable[str] = DEFAULT_MODULES,
        unsafe: bool = False,
        without: Iterable[str] = frozenset(),
    ) -> None:
        without, modules = frozenset(without), tuple(modules)
        unknown = sorted(without - set(PROTECTIONS))
        if unknown:
            raise ValueError(f"there is no protection {unknown[0]!r}: choose among {', '.join(PROTECTIONS)}")
        if without and not unsafe:
            raise ValueError(f"leaving off {', '.join(sorted(without))} is for control runs: say unsafe=True as well")
        if workers < 1:
            raise ValueError(f"workers = {workers} can do no job: choose at least 1")
        if not Path(driver).is_file():
            raise ValueError(f"there is no driver {driver}: name a Python file that defines execute(payload)")
        if sys.platform != "linux":
            raise JailUnavailableError(f"the jail needs Linux, and this is {sys.platform}")
        if importlib.util.find_spec("landlockpy") is None:
            raise JailUnavailableError("the jail needs the package landlockpy, which is not installed")
        self.limits = limits or Limits()
        wanted = frozenset(PROTECTIONS) - without
        programs, reason = _programs(wanted)
        recipe = Recipe(Path(driver).resolve(), modules, search_paths(modules), search_paths(["landlockpy"]), wanted, programs)
        self._lock = threading.RLock()
        self._pool = Pool(recipe, workers)
        self._finalizer = weakref.finalize(self, self._pool.close)
        try:
            self.protections, missing = self._pool.fill()
            if missing and not unsafe:
                raise JailUnavailableError(_what_is_missing(missing | ({"seccomp": reason} if reason else {})))
        except BaseException:
            self.close()
            raise

    @overload
    def run(self, payloads: Sequence[Any], *, limits: Limits | None = None, progress: str | None = None) -> list[Outcome]: ...

    @overload
    def run(
        self,
        payloads: Sequence[Any],
        *,
        limits: Limits | None = None,
        progress: str | None = None,
        read: Callable[[Any, Outcome], T],
    ) -> list[T]: ...

    def run(
        self,
        payloads: Sequence[Any],
        *,
        limits: Limits | None = None,
        progress: str | None = None,
        read: Callable[[Any, Outcome], Any] = lambda payload, outcome: outcome,
    ) -> list[Any]:
        """One Outcome a payload (JSON-able data), in order, with a progress bar if it is named.

        With ``read`` it is instead what that makes of each payload and its outcome, as soon as it is there: a reply may be many
        times as large in memory as it was written, and is dropped when it is read. Replies are parsed and read in a thread of
        their own, one after the other, so that no job waits for the reply of another.

        Jobs go one at a time to whichever server is free. A job whose server dies of it is repeated once. Raises TypeError and
        ValueError for payloads that are not JSON, ValueError when the jail is closed or was inherited through a fork, OSError for
        the machine's own trouble, such as a full disk, and what ``read`` raises; never for what a candidate does.
        """
        texts = [json.dumps(payload, allow_nan=False).encode() for payload in payloads]
        if not self._pool.mine:
            raise ValueError("this jail belongs to the process that this one was forked from: make another one here")
        with self._lock:
            if not self._finalizer.alive:
                raise ValueError(CLOSED)
            with progress_bar(progress, len(texts)) as tick:
                chosen, strict = limits or self.limits, "reply" in self.protections

                def complete(index: int, outcome: Outcome, raw: bytes) -> Any:
                    return read(payloads[index], with_reply(outcome, raw, chosen, strict))

                return _Batch(self._pool, texts, chosen, complete, tick).run()

    def close(self) -> None:
        """Ends the servers and removes every folder, after the call of `run` that another thread may be in; twice is fine."""
        if self._pool.mine:
            with self._lock:
                self._finalizer()

    def __enter__(self) -> "Jail":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class _Batch:
    """One call of `run`."""

    def __init__(
        self,
        pool: Pool,
        texts: list[bytes],
        limits: Limits,
        complete: Callable[[int, Outcome, bytes], Any],
        tick: Callable[[], object],
    ) -> None:
        self._pool, self._texts, self._limits, self._complete, self._tick = pool, texts, limits, complete, tick
        self._reader = ThreadPoolExecutor(1, "jail-reader")
        self._waiting = deque(range(len(texts)))
        self._attempts = [0] * len(texts)
        self._refusals = [0] * len(texts)
        self._results: dict[int, Future[Any]] = {}
        self._unread: deque[Future[Any]] = deque()
        self._busy: dict[Worker, tuple[int, float]] = {}
        """Worker -> its job, and when it is taken for dead."""
        self._crowded = False
        """Whether a job found the disk full, and none has run alone since."""
        self._full_since: float | None = None
        """When the disk was first found full while no job of this jail was running."""

    def run(self) -> list[Any]:
        try:
            while len(self._results) < len(self._texts):
                self._hand_out()
                for worker in self._ready():
                    self._take_in(worker)
            return [self._results[index].result() for index in range(len(self._texts))]
        finally:
            for worker in list(self._busy):  # interrupted: what they still do is nobody's
                self._pool.drop(worker)
            self._reader.shutdown(cancel_futures=True)

    def _hand_out(self) -> None:
        """A job to every free server, also to those that take a dead one's place."""
        self._pool.fill()
        for worker in [worker for worker in self._pool.workers if worker not in self._busy]:
            if not self._waiting or (self._busy and self._crowded):
                break
            index = self._waiting.popleft()
            self._busy[worker] = (index, time.monotonic() + self._limits.seconds + PATIENCE)
            try:
                worker.send(self._texts[index], self._limits)
            except ServerDiedError as death:
                self._bury(worker, death)

    def _ready(self) -> list[Worker]:
        """The busy workers that have something to say; waits for one. Who says nothing for too long is killed."""
        if not self._busy:
            return []
        with selectors.DefaultSelector() as selector:
            for worker in self._busy:
                selector.register(worker.socket, selectors.EVENT_READ, worker)
            first = min(deadline for _, deadline in self._busy.values())
            ready = [key.data for key, _ in selector.select(max(0.0, first - time.monotonic()))]
        if not ready:
            next(worker for worker, (_, deadline) in self._busy.items() if deadline == first).kill()
        return ready

    def _take_in(self, worker: Worker) -> None:
        index, _ = self._busy[worker]
        try:
            outcome, raw = worker.receive()
        except ServerDiedError as death:
            self._bury(worker, death)
        except CrowdedError as full:
            del self._busy[worker]
            self._waiting.appendleft(index)
            self._wait_for_room(full)
        else:
            del self._busy[worker]
            if not self._busy:
                self._crowded, self._full_since = False, None
            self._finish(index, outcome, raw)

    def _wait_for_room(self, full: CrowdedError) -> None:
        """After a job found the disk full. Those that may have filled it end, one runs alone, and then the others go on.

        A job of another jail may hold the room too, for no longer than its limit, which is taken to be like this one's. Raises
        `full` if the disk stays so.
        """
        self._crowded = True
        if not self._busy:
            now = time.monotonic()
            self._full_since = self._full_since or now
            if now > self._full_since + self._limits.seconds:
                raise full
            time.sleep(PAUSE)

    def _bury(self, worker: Worker, death: ServerDiedError) -> None:
        """A job whose server died comes first again, unless it is the second that died of it.

        A server that died before it read the job did not die of it: so may all that were idle, but not one after another.
        """
        index, _ = self._busy[worker]
        self._pool.drop(worker)
        del self._busy[worker]
        counts = self._attempts if death.started or self._refusals[index] >= self._pool.size else self._refusals
        counts[index] += 1
        if self._attempts[index] < ATTEMPTS:
            self._waiting.appendleft(index)
        else:
            code = death.code
            self._finish(index, Outcome("signalled", signal=-code) if code < 0 else Outcome("exited", exit_code=code), b"")

    def _finish(self, index: int, outcome: Outcome, raw: bytes) -> None:
        """A job has ended; its reply is read beside the jobs that go on, but not left to pile up."""
        self._results[index] = self._reader.submit(self._complete, index, outcome, raw)
        self._unread.append(self._results[index])
        while len(self._unread) > UNREAD * self._pool.size:
            self._unread.popleft().exception()
        self._tick()


@contextlib.contextmanager
def progress_bar(label: str | None, total: int) -> Iterator[Callable[[], object]]:
    """What to call after every job; shows a bar if it has a label."""
    if label is None:
        yield lambda: None
        return
    from tqdm import tqdm

    with tqdm(total=total, desc=label, unit="job", leave=False) as bar:
        yield bar.update


def _programs(wanted: frozenset[str]) -> tuple[dict[bool, bytes], str]:
    """The seccomp programs, for children with and without a root of their own; empty, and why, where they cannot be made."""
    if "seccomp" not in wanted:
        return {}, ""
    try:
        return {chrooted: filters.program(chrooted) for chrooted in (False, True)}, ""
    except OSError as error:
        return {}, str(error)


def search_paths(modules: Sequence[str]) -> tuple[str, ...]:
    """Where servers find what the standard library lacks. Raises ValueError for a module that is not installed."""
    paths = []
    for name in dict.fromkeys(module.partition(".")[0] for module in modules):
        if name in sys.stdlib_module_names:
            continue
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise ValueError(f"the module {name} is not installed: leave it out of modules, or install it")
        paths.append(str(Path(spec.origin).parents[1 if spec.submodule_search_locations else 0]))
    return tuple(dict.fromkeys(paths))


def _what_is_missing(missing: dict[str, str]) -> str:
    names = [name for name in KERNEL_PROTECTIONS if name in missing]
    needs = "; ".join(f"{NEEDS[name]} [{name}: {missing[name]}]" for name in names)
    return f"untrusted code cannot be confined on this machine, which lacks {needs}; unsafe=True runs it all the same"
