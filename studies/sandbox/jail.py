"""Public interface of the jail: a pool of warm servers, each of which runs one job at a time."""

import importlib.util
import json
import selectors
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from studies.sandbox import filters
from studies.sandbox.limits import DEFAULT_MODULES, PROTECTIONS, JailLimits, JailOutcome, JailUnavailableError
from studies.sandbox.pool import CLOSED, SERVER, JailPool, JailWorker, ServerDiedError, with_reply

PATIENCE = 30.0
"""Seconds after a job's time limit until its server is considered dead."""
ATTEMPTS = 2
"""Number of servers that may die during a job before the job is reported as ended."""
SCRIPT_DRIVER = Path(__file__).with_name("script.py")
"""Driver that runs ``{"code": text}`` as a script and replies with its ``result``."""


class Jail:
    """Pool of warm servers that run untrusted Python in confined child processes and return its data.

    The jail is a context manager; it also closes when it is garbage-collected or Python exits. Several jails may exist in one
    process.
    Threads may share one jail: their calls of `run` take turns.

    Args:
        driver: Trusted Python file that defines ``execute(payload)``, which is called in the confined child and returns the reply,
            data that JSON can express.
        limits: Limits of a job unless `run` gives others.
        workers: Number of servers, and thus of jobs at a time.
        modules: Modules that candidates can import; any other import is a ModuleNotFoundError.
        unsafe: Run even if this machine lacks a protection; ``protections`` has those in use.
        without: Protections to leave off, to test what each is needed for; requires ``unsafe``.

    Raises:
        ValueError: An argument is not valid.
        JailUnavailableError: The machine lacks a protection.
        OSError: A server cannot be started, for example because the driver cannot be loaded.
    """

    def __init__(
        self,
        driver: Path,
        *,
        limits: JailLimits | None = None,
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
        self.limits = limits or JailLimits()
        wanted = frozenset(PROTECTIONS) - without
        programs, reason = _programs(wanted)
        config = {
            "library": str(SERVER.parent),
            "driver": str(Path(driver).resolve()),
            "modules": modules,
            "search": search_paths(modules),
            "server_search": search_paths(["landlockpy"]),  # for the server alone; drivers may use what `search` has
            "wanted": sorted(wanted),
            "programs": {str(int(chrooted)): code.hex() for chrooted, code in programs.items()},
        }
        self._lock = threading.RLock()
        self._pool = JailPool(config, workers)
        self._finalizer = weakref.finalize(self, self._pool.close)
        try:
            self.protections, missing = self._pool.fill()
            if missing and not unsafe:
                reasons = "; ".join(f"{name}: {why}" for name, why in (missing | reason).items())
                raise JailUnavailableError(f"this machine cannot confine untrusted code ({reasons}): unsafe=True runs it anyway")
        except BaseException:
            self.close()
            raise

    def run(
        self,
        payloads: Sequence[Any],
        *,
        limits: JailLimits | None = None,
        read: Callable[[Any, JailOutcome], Any] = lambda payload, outcome: outcome,
    ) -> list[Any]:
        """Run one job per payload and return their outcomes in order.

        Each job goes to the next free server. A job is repeated once if its server dies during it.

        Args:
            payloads: Data that JSON can express, one per job.
            limits: Limits of these jobs; default the jail's.
            read: Function of a payload and its outcome, called as soon as the job has ended; its results are returned instead of
                the outcomes. A reply may take many times more memory than its text, and is dropped after ``read``.

        Raises:
            TypeError, ValueError: A payload is not JSON.
            ValueError: The jail is closed, or was inherited through a fork.
            OSError: The machine failed, for example because its disk is full. Nothing that a candidate does raises this.
            Exception: Any exception of ``read``.
        """
        texts = [json.dumps(payload, allow_nan=False).encode() for payload in payloads]
        if not self._pool.mine:
            raise ValueError("this jail belongs to the process that this one was forked from: make another one here")
        with self._lock:
            if not self._finalizer.alive:
                raise ValueError(CLOSED)
            chosen = limits or self.limits

            def complete(index: int, outcome: JailOutcome, raw: bytes) -> Any:
                return read(payloads[index], with_reply(outcome, raw, chosen))

            return _JobQueue(self._pool, texts, chosen, complete).run()

    def close(self) -> None:
        """End the servers and remove every folder, after any call of `run` has ended; no effect if already closed."""
        if self._pool.mine:
            with self._lock:
                self._finalizer()

    def __enter__(self) -> "Jail":
        return self

    def __exit__(self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class _JobQueue:
    """Jobs of one call of `run`."""

    def __init__(
        self, pool: JailPool, texts: list[bytes], limits: JailLimits, complete: Callable[[int, JailOutcome, bytes], Any]
    ) -> None:
        self._pool, self._texts, self._limits, self._complete = pool, texts, limits, complete
        self._waiting = deque(range(len(texts)))
        self._attempts = [0] * len(texts)
        self._results: dict[int, Any] = {}
        self._busy: dict[JailWorker, tuple[int, float]] = {}
        """``{worker: (its job, time after which it is considered dead)}``."""

    def run(self) -> list[Any]:
        try:
            while len(self._results) < len(self._texts):
                self._hand_out()
                for worker in self._ready():
                    self._take_in(worker)
            return [self._results[index] for index in range(len(self._texts))]
        finally:
            for worker in list(self._busy):  # only after an interruption: nobody waits for these jobs
                self._pool.drop(worker)

    def _hand_out(self) -> None:
        """Send a job to every free server, including servers that replace dead ones."""
        for worker in [worker for worker in self._pool.workers if worker not in self._busy and worker.ended]:
            self._pool.drop(worker)
        self._pool.fill()
        for worker in [worker for worker in self._pool.workers if worker not in self._busy]:
            if not self._waiting:
                break
            index = self._waiting.popleft()
            self._busy[worker] = (index, time.monotonic() + self._limits.seconds + PATIENCE)
            try:
                worker.send(self._texts[index], self._limits)
            except ServerDiedError as death:
                self._bury(worker, death)

    def _ready(self) -> list[JailWorker]:
        """Wait for an answer and return the workers that have one; kill a worker whose deadline has passed."""
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

    def _take_in(self, worker: JailWorker) -> None:
        index, _ = self._busy[worker]
        try:
            outcome, raw = worker.receive()
        except ServerDiedError as death:
            self._bury(worker, death)
        else:
            del self._busy[worker]
            self._results[index] = self._complete(index, outcome, raw)

    def _bury(self, worker: JailWorker, death: ServerDiedError) -> None:
        """Drop a dead server and put its job first in the queue, or report the job if it is the second server that died of it."""
        index, _ = self._busy.pop(worker)
        self._pool.drop(worker)
        self._attempts[index] += 1
        if self._attempts[index] < ATTEMPTS:
            self._waiting.appendleft(index)
        else:
            warnings.warn(
                f"two servers of the jail ended during one job ({death}), which counts as ended itself: free memory",
                RuntimeWarning,
                2,
            )
            code = death.code
            outcome = JailOutcome("signalled", signal=-code) if code < 0 else JailOutcome("exited", exit_code=code)
            self._results[index] = self._complete(index, outcome, b"")


def _programs(wanted: frozenset[str]) -> tuple[dict[bool, bytes], dict[str, str]]:
    """Return the seccomp programs for children with and without their own root; none, and the reason, if they cannot be made."""
    if "seccomp" not in wanted:
        return {}, {}
    try:
        return {chrooted: filters.program(chrooted) for chrooted in (False, True)}, {}
    except OSError as error:
        return {}, {"seccomp": str(error)}


def search_paths(modules: Sequence[str]) -> tuple[str, ...]:
    """Return the folders in which servers find modules outside of the standard library.

    Raises:
        ValueError: A module is not installed.
    """
    paths = []
    for name in dict.fromkeys(module.partition(".")[0] for module in modules):
        if name in sys.stdlib_module_names:
            continue
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise ValueError(f"the module {name} is not installed: leave it out of modules, or install it")
        paths.append(str(Path(spec.origin).parents[1 if spec.submodule_search_locations else 0]))
    return tuple(dict.fromkeys(paths))
