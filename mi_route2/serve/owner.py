"""The one thread that runs an engine for many asynchronous clients.

An engine belongs to one thread. ``Owner`` is that thread: commands come in through a queue and run between two steps, and what each
step did goes out to the event loops of the clients. A step never waits for a client: one that reads too slowly is cancelled.
Patch sweeps run between steps, one forward at a time, so that streams go on.

    owner = Owner(engine)
    owner.start()
    async with await owner.submit(request) as stream:
        async for event in stream:
            ...
    print(stream.result)
    await owner.close()
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import suppress
from math import inf
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from mi_route2.engine import Engine, Event, Request, Result
from mi_route2.patching.grid import Grid
from mi_route2.patching.sweep import Finished, Sweep, preparing
from mi_route2.vllm.client import VllmEngine

AnyEngine = Engine | VllmEngine
_log = logging.getLogger("mi_route2.serve")

T = TypeVar("T")
S = TypeVar("S", bound="EventSource[Any]")

ENDED = "the engine's thread has ended"
IDLE, FRESH = 0.5, 0.05
"""Seconds after which a snapshot is taken anew by a thread that has nothing to do, and by one that is busy."""
PACE = 0.01
"""Seconds between two deliveries to the clients: a delivery takes as long as several tokens of a small model do."""


class EventSource(Generic[T]):
    """Asynchronous iterator over the items that the thread produces for one client, in order; see ``Stream`` and ``SweepJob``.

    Leaving an ``async with`` block cancels what has not been produced.
    """

    def __init__(self, owner: "Owner", loop: asyncio.AbstractEventLoop):
        self._owner, self._loop, self._backlog = owner, loop, owner.backlog
        self._items: deque[T] = deque()
        self._news = asyncio.Event()
        self._ended = self.slow = False

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def __anext__(self) -> T:
        while not self._items:
            if self._ended:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        return self._items.popleft()

    async def batch(self) -> list[T]:
        """Return all waiting items, at least one; an empty list at the end."""
        while not self._items and not self._ended:
            self._news.clear()
            await self._news.wait()
        items = list(self._items)
        self._items.clear()
        return items

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def cancel(self) -> None:
        """End it at once; no effect if it has ended. Any thread may call this."""
        raise NotImplementedError

    def _put(self, items: list[T], ended: bool) -> None:
        """Append items of the thread to the queue, on the client's loop; cancel a client whose backlog is full."""
        # What comes now is not counted: one delivery may be larger than the backlog, which is no fault of the reader's.
        if len(self._items) > self._backlog and not ended:
            self.slow = True
            self._items.clear()
            self.cancel()
        elif not self.slow:
            self._items.extend(items)
        self._ended |= ended
        self._news.set()


class Stream(EventSource[Event]):
    """Events of one request. ``number`` is the engine's; ``result`` is there when the iteration has ended."""

    def __init__(self, owner: "Owner", loop: asyncio.AbstractEventLoop):
        super().__init__(owner, loop)
        self.number = -1
        self.result: Result | None = None

    def cancel(self) -> None:
        self._owner._post(lambda: self._owner._cancel(self))

    def _put(self, items: list[Event], ended: bool) -> None:
        slow = self.slow
        super()._put(items, ended)
        self._owner.slow += self.slow and not slow
        if ended and self.slow and self.result is not None:
            self.result.finish = "error"
            self.result.error = f"its reader let more than {self._backlog} events wait, so it was cancelled: read faster"


class SweepJob(EventSource[Finished]):
    """Results of a patch sweep, forward by forward. ``error`` is the reason if the iteration ended before the sweep did.

    ``prepared`` gets the planned sweep when the runs of both prompts are done, each of which is a forward of its own too.
    """

    def __init__(self, owner: "Owner", loop: asyncio.AbstractEventLoop, preparing: Generator[None, None, Sweep]):
        super().__init__(owner, loop)
        self._backlog = max(self._backlog, 1 << 20)
        self.error = ""
        self.prepared: Future[Sweep] = Future()
        self.prepared.set_running_or_notify_cancel()  # the loop's future may be cancelled, and this one not under the thread
        self._preparing = preparing
        self._runs: Iterator[Finished] = iter(())
        self._done: list[Finished] = []
        self._seconds = 0.0
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True

    @property
    def sweep(self) -> Sweep:
        """The planned sweep."""
        return self.prepared.result(0)

    def grid(self) -> Grid:
        """Return the finished grid.

        Raises:
            RuntimeError: the sweep failed, was cancelled, or has not ended.
        """
        if self.error or not self._ended:
            raise RuntimeError(self.error or "this sweep has not ended: iterate over it before")
        return self.sweep.collect(self._done, self._seconds)

    def _forward(self) -> bool:
        """Run the next forward; return whether another one follows. Runs on the thread."""
        began = time.perf_counter()
        try:
            if self.cancelled:
                raise RuntimeError("this sweep was cancelled")
            if not self.prepared.done():
                return self._prepare()
            finished = next(self._runs, None)
        except Exception as error:  # isolated: it ends this sweep and nothing else
            self.fail(error)
            return False
        self._seconds += time.perf_counter() - began
        if finished is not None:
            self._done.append(finished)
        self._owner._deliver(self, [] if finished is None else [finished], finished is None)
        return finished is not None

    def _prepare(self) -> bool:
        """Run one of the prompts."""
        try:
            next(self._preparing)
        except StopIteration as end:
            self._runs = end.value.run()
            self.prepared.set_result(end.value)
        return True

    def fail(self, error: Exception) -> None:
        """End the sweep with an error. Runs on the thread."""
        self.error = self.error or " ".join(str(error).split()) or type(error).__name__
        if not self.prepared.done():
            self.prepared.set_exception(error)
        self._owner._deliver(self, [], True)


class Owner:
    """The thread of an engine; see the module.

    ``snapshot`` is plain data about the engine, replaced while it runs, which any thread may read. ``failure`` is the reason why
    the thread has ended, if it has. ``slow`` counts the streams that were cancelled because their readers were too slow.

    Args:
        engine: the engine; after ``start`` nothing else may touch it or its model.
        backlog: events that may wait for one reader.
        tokens: tokens of one forward of a sweep, so that streams go on between them.
        share: time that sweeps may take while requests run, as a share of the time of the requests' own steps.

    Examples:
        >>> owner = Owner(engine)
        >>> owner.start()
        >>> stream = await owner.submit(Request((3, 4, 5)))
    """

    def __init__(self, engine: AnyEngine, *, backlog: int = 1024, tokens: int = 512, share: float = 0.2):
        self._engine, self.backlog, self._tokens, self._share = engine, backlog, tokens, share
        self._credit = 0.0
        self._commands: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._streams: dict[int, Stream] = {}
        self._jobs: deque[SweepJob] = deque()
        self._thread = threading.Thread(target=self._live, name="engine", daemon=True)
        self._closing = self._stop = self._buried = False
        self._lock = threading.Lock()
        self._events: dict[Stream, list[Event]] = {}
        """Events that were not delivered yet."""
        self._due = 0.0
        self.failure: str | None = None
        self.slow = 0
        self.snapshot: dict[str, Any] = {}
        self._published = -inf
        self._publish()

    @property
    def alive(self) -> bool:
        """True if the thread runs."""
        return self._thread.is_alive() and self.failure is None

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    async def call(self, function: Callable[[AnyEngine], T]) -> T:
        """Run ``function`` on the thread between two steps, and return what it returns.

        It may use ``generate`` but not ``step``, which returns results that streams wait for.

        Raises:
            RuntimeError: the thread has ended.
            Exception: whatever ``function`` raises.
        """
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                if self.failure is not None:
                    raise RuntimeError(self.failure)
                future.set_result(function(self._engine))
            except BaseException as error:  # handed to the caller
                future.set_exception(error)

        if not self._thread.is_alive() or not self._post(run):
            raise RuntimeError(self.failure or ENDED)
        return await asyncio.wrap_future(future)

    async def submit(self, request: Request) -> Stream:
        """Submit a request and return its stream.

        Raises:
            ValueError, KeyError: the request cannot be run.
            QueueFullError: too many requests wait.
            RuntimeError: the thread has ended, or is about to.
        """
        stream = Stream(self, asyncio.get_running_loop())

        def admit(engine: AnyEngine) -> Stream:
            self._open()
            # on the thread, between two steps: no event of the request can come before its stream is known
            stream.number = engine.submit(request)
            self._streams[stream.number] = stream
            return stream

        return await self._admitted(admit)

    async def sweep(self, **question: Any) -> SweepJob:
        """Prepare a patch sweep and return it.

        ``question`` are the arguments of ``patching.prepare`` without the host.

        Raises:
            ValueError, KeyError, TypeError: the sweep cannot be run.
            RuntimeError: the thread has ended, or is about to.
        """
        loop = asyncio.get_running_loop()

        def admit(engine: AnyEngine) -> SweepJob:
            self._open()
            steps = preparing(engine.host, **{"tokens": self._tokens, **question})
            next(steps)  # which finds what is wrong with it, before it waits for its turn
            self._jobs.append(job := SweepJob(self, loop, steps))
            return job

        job = await self._admitted(admit)
        try:
            await asyncio.wrap_future(job.prepared)
        except BaseException:
            job.cancel()
            raise
        return job

    async def close(self, drain: float = 10.0) -> None:
        """Refuse new work, let requests and sweeps end for at most ``drain`` seconds, cancel the rest, and end the thread."""
        self._closing = True
        until = time.monotonic() + drain
        while self._thread.is_alive() and (self._streams or self._jobs) and time.monotonic() < until:
            await asyncio.sleep(0.02)
        self._post(self._end)
        while self._thread.is_alive():
            await asyncio.sleep(0.01)

    async def _admitted(self, admit: Callable[[AnyEngine], S]) -> S:
        """Return the stream or job that ``admit`` begins; it is cancelled if the caller is cancelled meanwhile."""
        begun: list[S] = []
        try:
            await self.call(lambda engine: begun.append(admit(engine)))
        except asyncio.CancelledError:
            self._post(lambda: [stream.cancel() for stream in begun])
            raise
        return begun[0]

    def _open(self) -> None:
        if self._closing:
            raise RuntimeError("the server is shutting down: send this again to another one, or later")

    def _post(self, command: Callable[[], object]) -> bool:
        """Queue a command; return False if the thread looks for none any more."""
        with self._lock:
            if not self._buried:
                self._commands.put(command)
            return not self._buried

    def _cancel(self, stream: Stream) -> None:
        if stream.number in self._streams:
            with suppress(KeyError):  # it has ended, and the next step says so
                self._engine.cancel(stream.number)

    def _end(self) -> None:
        self._engine.close()
        for job in self._jobs:
            job.cancel()
        self._stop = True

    # What follows runs on the thread.

    def _live(self) -> None:
        try:
            while not self._stop:
                self._obey()
                self._step()
                self._sweep()
                self._publish()
            self._step()
        except BaseException as error:
            self.failure = f"the engine's thread failed with {type(error).__name__}: {' '.join(str(error).split()):.400}"
            _log.critical("the engine's thread failed", exc_info=error)  # clients are not told what the failed code said
        finally:
            self._bury()

    def _obey(self) -> None:
        """Run the commands that wait, and none that come meanwhile; if there is nothing else to do, wait for one."""
        if not (self._engine.busy or self._jobs):
            with suppress(Empty):
                self._commands.get(timeout=IDLE)()
        for _ in range(self._commands.qsize()):
            self._commands.get_nowait()()

    def _step(self) -> None:
        if not self._engine.busy:
            return
        began = time.perf_counter()
        results = self._engine.step()
        now = time.perf_counter()
        self._credit = min(self._credit + self._share * (now - began), 0.0)
        for event in self._engine.events:
            if (stream := self._streams.get(event.request)) is not None:
                self._events.setdefault(stream, []).append(event)
        for result in results:
            if (stream := self._streams.pop(result.request, None)) is not None:
                stream.result = result
                self._deliver(stream, self._events.pop(stream, []), True)
        if now >= self._due or not self._engine.busy:
            self._deliver_events()
            self._due = now + PACE

    def _deliver_events(self) -> None:
        for stream, events in self._events.items():
            self._deliver(stream, events, False)
        self._events.clear()

    @staticmethod
    def _deliver(source: EventSource[Any], items: list[Any], ended: bool) -> None:
        try:
            source._loop.call_soon_threadsafe(source._put, items, ended)
        except RuntimeError:  # the loop is closed
            source.cancel()

    def _sweep(self) -> None:
        """Run one forward of the sweep whose turn it is, unless running requests have to come first."""
        if not self._jobs or (self._engine.busy and self._credit < 0):
            return
        self._deliver_events()  # a forward may take as long as many tokens
        job, began = self._jobs.popleft(), time.perf_counter()
        if job._forward():
            self._jobs.append(job)
        self._credit = self._credit - (time.perf_counter() - began) if self._engine.busy else 0.0

    def _publish(self) -> None:
        engine, now = self._engine, time.monotonic()
        if now - self._published < FRESH and engine.busy:
            return
        self._published = now
        self.snapshot = {**engine.counts, "sweeps": len(self._jobs), "slow_readers": self.slow}

    def _bury(self) -> None:
        """End every stream and sweep that is left, and refuse the commands that come."""
        self.failure = reason = self.failure or ENDED
        with self._lock:
            self._buried = True
        for stream in self._streams.values():
            stream.result = Result(stream.number, finish="error", error=reason)
            self._deliver(stream, self._events.pop(stream, []), True)
        for job in self._jobs:
            job.fail(RuntimeError(reason))
        self._streams.clear()
        self._jobs.clear()
        while True:
            try:
                self._commands.get_nowait()()
            except Empty:
                return
            except Exception:  # the command of a client that is gone
                continue
