"""Run store: tiers, leases and eviction of captured runs."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from pathlib import Path
from types import TracebackType
from typing import Any

from jaxtyping import Float
from torch import Tensor

from mi_route2.checks import checked
from mi_route2.runs.disk import Disk, Removals, Stored, dropped, evicted, invalid
from mi_route2.runs.rows import About, Chunk, FinishedRun, Kind, Memory, RunInfo, SiteRows, Stats, described
from mi_route2.runs.writer import Home, Writer
from mi_route2.sites import Site, demand_site, nearest


class Leases:
    """Leases by run and owner, which expire after ``seconds``, so that an owner that disappears loses its leases.

    Taking a lease again renews it if more than half of its time has passed; before that, it costs only a look-up.
    """

    def __init__(self, seconds: float, clock: Callable[[], float]):
        if not seconds > 0:
            raise ValueError(f"lease_seconds={seconds} is not positive: give the seconds after which a lease ends")
        self._seconds, self._clock = seconds, clock
        self._ends: dict[str, dict[str, float]] = {}
        self._swept = clock()

    def take(self, run: str, owner: str) -> None:
        """Add a lease of ``run`` for ``owner``, or renew it."""
        now = self._clock()
        owners = self._ends.setdefault(run, {})
        if owners.get(owner, now) - now <= self._seconds / 2:
            owners[owner] = now + self._seconds
        if now - self._swept > self._seconds / 2:
            self._sweep(now)

    def release(self, owner: str) -> None:
        """End every lease of ``owner``."""
        for owners in self._ends.values():
            owners.pop(owner, None)
        self._sweep(self._clock())

    def forget(self, run: str) -> None:
        """End every lease of ``run``."""
        self._ends.pop(run, None)

    def holds(self, run: str) -> bool:
        """Return whether an owner has a lease of ``run`` now."""
        now = self._clock()
        return any(end > now for end in self._ends.get(run, {}).values())

    def __len__(self) -> int:
        """Return the number of leases that have not ended."""
        self._sweep(self._clock())
        return sum(map(len, self._ends.values()))

    def _sweep(self, now: float) -> None:
        kept = {run: {owner: end for owner, end in owners.items() if end > now} for run, owners in self._ends.items()}
        self._ends, self._swept = {run: owners for run, owners in kept.items() if owners}, now


SHARD, WAITING = 8 << 20, 8
"""Bytes of a shard, and the number of shards that may wait in memory, over all writers."""

_log = logging.getLogger(__name__)


@checked
class RunStore:
    """Store of captured runs. Any thread may write and read; only one process at a time may use ``folder``.

    Args:
        budget: bytes of the memory tier. ``None`` takes an eighth of the free memory, but at least 256 MiB and at most 8 GiB; 0 has
            no memory tier, which needs a folder. The least recently used runs are evicted first; leased runs and runs that are
            being written stay, even over the budget, with a warning in the log.
        folder: the disk tier, on a local disk; created if it does not exist.
        lease_seconds: time after which a lease ends by itself.
        clock: monotonic time in seconds.
        shard_bytes: approximate size of a file of the disk tier, and so the bytes that are read for a single row.
        owner: whose a run is, by its name; runs of the owner with most bytes are evicted first.

    Raises:
        ValueError: no tier at all, or a folder that is damaged or not one of runs.
        RuntimeError: another store uses the folder.
        OSError: a folder that cannot be written.

    Examples:
        >>> store = RunStore()  # in memory
        >>> _ = record(host, [site], tokens, store=store, runs=["clean", "corrupt"])
        >>> store.rows("clean", site, [6, 0]).shape
        torch.Size([2, 16])
    """

    def __init__(
        self,
        budget: int | None = None,
        folder: Path | str | None = None,
        *,
        lease_seconds: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
        shard_bytes: int = SHARD,
        owner: Callable[[str], str] = lambda run: "",
    ):
        if budget == 0 and folder is None:
            raise ValueError("a budget of 0 without a folder keeps nothing: give a budget, a folder or both")
        if shard_bytes < 1:
            raise ValueError(f"shard_bytes={shard_bytes} is not positive: a shard has at least one byte")
        self._lock = threading.RLock()
        self._memory, self._leases = Memory(budget, owner), Leases(lease_seconds, clock)
        self._writing: dict[str, Writer] = {}
        self._ending: set[Writer] = set()
        """Writers of runs that were invalidated, which may still be within a write."""
        self._shard_bytes = shard_bytes
        self._evictions = self._bytes_read = 0
        self._warned = self._closed = False
        self._disk = None if folder is None else Disk(Path(folder))
        self._removals = Removals(self._disk.removals() if self._disk else {})

    # ---- writing

    def writing(
        self,
        run: str,
        *,
        weights: str,
        tokens: Sequence[int] = (),
        prompt_length: int | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> Writer:
        """Open a writer of a new run: use it as a context, or call ``append`` and ``close``. The run can be read after ``close``.

        Args:
            run: its id. The id of a run that no longer exists can be used again.
            weights: a hash of the weights that the activations come from; see ``invalidate``.
            tokens: tokens of the sequence, as far as they are known; ``Writer.add_tokens`` adds the rest.
            prompt_length: how many of ``tokens`` are the prompt; all if not given.
            meta: notes that can be stored as JSON.

        Raises:
            ValueError: a run of this id exists or is being written, or an argument is not valid.
        """
        about = described(run, weights, tokens, prompt_length, meta)
        with self._lock:
            self._demand_open()
            if run in self._writing or self._about(run):
                raise ValueError(f"there is already a run {run!r}: drop it first, or use another name")
            self._removals.forget(run)
            writer = Writer(run, about, Home(self._disk, self._grown, self._finish, self._forget))
            self._writing[run] = writer
            return writer

    # ---- reading

    def rows(self, run: str, site: Site, positions: Sequence[int]) -> Float[Tensor, " n *row"]:
        """Return the rows at logical ``positions``, in the order given, on the CPU and in the captured dtype.

        Raises:
            KeyError: With the reason: an unknown run, one that was dropped, evicted or invalidated by a change of the weights, or a
                site or position that was not captured.
            ValueError: A damaged file, a position that is not a whole number, or a name in place of a ``Site``.
        """
        return self._read(run, site, lambda site_rows: site_rows.at(positions))

    def slice(self, run: str, site: Site, start: int, stop: int) -> Float[Tensor, " n *row"]:
        """Return rows ``start .. stop - 1`` of those that were captured at a site, in the order of their positions.

        No other rows are read. Fewer rows are returned if there are no more. Errors as in ``rows``, and ``ValueError`` for a
        negative number.
        """
        if start < 0 or stop < start:
            raise ValueError(f"rows {start} to {stop} are not valid: they count from 0, and start comes before stop")
        return self._read(run, site, lambda site_rows: site_rows.between(start, stop))

    def positions(self, run: str, site: Site) -> list[int]:
        """Return the positions that were captured at a site, in order; ``KeyError`` as in ``rows``."""
        return self._site_rows(run, site).positions()

    def info(self, run: str) -> RunInfo:
        """Return the description of a finished run; ``KeyError`` with the reason if there is none."""
        with self._lock:
            about = self._demand(run)
            tiers = tuple(
                name for name, here in (("memory", run in self._memory), ("disk", self._disk and self._disk.about(run))) if here
            )
            kinds = self._kinds(run)
        nbytes = sum(kind.nbytes for kind in kinds.values())
        meta = deepcopy(about.meta)  # a reader that writes to it must not change the store
        return RunInfo(run, about.weights, about.tokens, about.prompt_length, meta, kinds, nbytes, tiers)

    def runs(self) -> list[str]:
        """Return the ids of all finished runs."""
        with self._lock:
            self._demand_open()
            return list(self._disk.runs() if self._disk else self._memory)

    def __contains__(self, run: str) -> bool:
        """Return whether a finished run has this id, without a list of all."""
        with self._lock:
            self._demand_open()
            return run in self._memory or (self._disk is not None and self._disk.keeps(run))

    def stats(self) -> Stats:
        """Return sizes and counts."""
        with self._lock:
            self._demand_open()
            disk_bytes, disk_runs = self._disk.size() if self._disk else (0, 0)
            return Stats(
                budget=self._memory.budget,
                memory_bytes=self._memory.nbytes,
                memory_runs=len(self._memory),
                disk_bytes=disk_bytes,
                disk_runs=disk_runs,
                writing=len(self._writing),
                leases=len(self._leases),
                evictions=self._evictions,
                bytes_read=self._bytes_read,
            )

    def bytes_by_owner(self) -> dict[str, int]:
        """Return the bytes of finished runs in memory, by owner."""
        with self._lock:
            return self._memory.by_owner()

    def unchanged(self) -> AbstractContextManager[object]:
        """Context: what this thread reads belongs together, because no other thread can finish, drop or evict a run."""
        return self._lock

    # ---- leases and removal

    def lease(self, run: str, owner: str) -> None:
        """Protect a run from eviction until ``release(owner)``, or until the lease expires; it may still be being written.

        Another call renews the lease if more than half of its time has passed, and is cheap before that. ``KeyError`` with the
        reason if the run does not exist.
        """
        with self._lock:
            if run not in self._writing:
                self._demand(run)
            self._leases.take(run, owner)

    def release(self, owner: str) -> None:
        """End every lease of ``owner``; no effect if there is none."""
        with self._lock:
            self._leases.release(owner)
            self._evict()

    def drop(self, run: str) -> None:
        """Delete a run, leased or not; ``KeyError`` with the reason if it does not exist, ``ValueError`` while it is written."""
        with self._lock:
            if run in self._writing:
                raise ValueError(f"run {run!r} is being written: close or abort its writer first")
            if run not in self:  # one whose description is damaged can be dropped
                self._demand(run)
            self._remove({run: dropped(run)})

    def invalidate(self, weights: str) -> list[str]:
        """Delete every run of other weights than ``weights``, after the model has changed; return their ids.

        A writer of such a run is ended: its next call raises ``RuntimeError``.
        """
        with self._lock:
            self._demand_open()
            known = self._disk.runs() if self._disk else {run: self._demand(run).weights for run in self._memory}
            ended = {run: writer for run, writer in self._writing.items() if writer.about.weights != weights}
            others = {run: old for run, old in known.items() if old != weights}
            others |= {run: writer.about.weights for run, writer in ended.items()}
            self._remove({run: invalid(run, old, weights) for run, old in others.items()})
            for run in ended:
                self._ending.add(self._writing.pop(run))
        for writer in ended.values():  # without the lock, because the writer may be working and need it
            writer.abort(f"is invalid: it was begun with weights {writer.about.weights[:12]}, and the model now has {weights[:12]}")
        with self._lock:
            self._ending.difference_update(ended.values())
        return list(others)

    def close(self) -> None:
        """Abort all open writers, wait for their writes, and release the folder. Runs on disk stay."""
        with self._lock:
            writers, self._closed = [*self._writing.values(), *self._ending], True
            self._writing.clear()
        for writer in writers:
            writer.abort("was aborted, since its store was closed")
        with self._lock:
            if self._disk:
                self._disk.close()

    def __enter__(self) -> "RunStore":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # ---- what writers call

    def _grown(self, writer: Writer, nbytes: int, waiting: int) -> tuple[int, bool]:
        with self._lock:
            self._demand_written(writer)
            self._demand_room(writer, waiting)
            self._memory.take(writer, writer.run, nbytes)
            if self._disk is None:
                self._evict()
                return self._limit(), True
            # Memory copies of stored rows are optional, and are given up if eviction cannot make room for them.
            return self._limit(), nbytes <= self._memory.budget and self._evict(quiet=True)

    def _limit(self) -> int:
        """Return the maximum number of bytes of one writer that wait for the disk."""
        fair = WAITING * self._shard_bytes // max(1, len(self._writing))
        return max(min(self._shard_bytes, fair), self._shard_bytes // 16, 1)

    def _finish(self, writer: Writer, finished: FinishedRun | None, stored: Sequence[Stored]) -> None:
        with self._lock:
            self._demand_written(writer)
            self._demand_room(writer, finished.nbytes if finished else 0)
            if self._disk:  # first: if it fails, memory must not serve a run that is not in the index
                self._disk.commit(writer.run, writer.about, stored)
            self._through(writer)
            if finished and (self._disk is None or finished.nbytes <= self._memory.budget):
                self._memory.put(writer.run, finished)
            self._evict()

    def _forget(self, writer: Writer, shards: Iterable[int]) -> None:
        with self._lock:
            if self._writing.get(writer.run) is writer:  # otherwise the id may be that of a new run by now, whose leases stay
                self._leases.forget(writer.run)
            self._through(writer)
            if self._disk:
                # an interrupt after the commit aborts the writer too, when its shards are already those of a run
                self._disk.discard([shard for shard in shards if not self._disk.has(shard)])

    def _through(self, writer: Writer) -> None:
        if self._writing.get(writer.run) is writer:
            del self._writing[writer.run]
        self._memory.take(writer, writer.run, 0)

    def _demand_written(self, writer: Writer) -> None:
        if self._writing.get(writer.run) is not writer:
            reason = self._removals.why(writer.run) or "the store was closed"
            raise RuntimeError(f"the store has ended run {writer.run!r}: {reason}")

    def _demand_room(self, writer: Writer, nbytes: int) -> None:
        """Refuse a run that could not be kept, before it evicts the others."""
        budget = self._memory.budget
        if self._disk is None and nbytes > budget and not self._leases.holds(writer.run):
            raise RuntimeError(
                f"run {writer.run!r} needs {nbytes:,} bytes or more, and the store holds {budget:,}: capture fewer sites or "
                "positions, raise the budget, or give the store a folder"
            )

    # ---- shared helpers, called with the lock

    def _demand_open(self) -> None:
        if self._closed:
            raise RuntimeError("this run store is closed: open a new one on its folder")

    def _about(self, run: str) -> About | None:
        finished = self._memory.get(run)
        return finished.about if finished else self._disk.about(run) if self._disk else None

    def _demand(self, run: str) -> About:
        """Return the description of a run; ``KeyError`` with the reason if it does not exist."""
        self._demand_open()
        if about := self._about(run):
            return about
        if run in self._writing:
            raise KeyError(f"run {run!r} is still being written: it can be read once its writer is closed")
        known = list(self._disk.runs() if self._disk else self._memory)[-1000:]
        raise KeyError(self._removals.why(run) or f"no run {run!r} was captured here: the nearest are {nearest(run, known)}")

    def why_gone(self, run: str) -> str | None:
        """Return the reason for which a run was removed (dropped, evicted or invalidated); ``None`` if it exists or never did."""
        with self._lock:
            return self._removals.why(run)

    def _kinds(self, run: str) -> dict[Site, Kind]:
        if finished := self._memory.get(run):
            return {site: kind for site, (kind, _) in finished.sites.items()}
        return self._disk.kinds(run) if self._disk else {}

    def _evict(self, *, quiet: bool = False) -> bool:
        """Evict runs until memory is within the budget; return True if it is."""
        went = self._memory.evict(self._leases.holds)
        self._evictions += len(went)
        budget = self._memory.budget
        if not self._disk:  # with a disk the run still exists there
            self._removals.put({run: evicted(run, nbytes, budget) for run, nbytes in went.items()})
        fits = self._memory.nbytes <= budget
        if fits:
            self._warned = False
        elif budget and not quiet and not self._warned:
            self._warned = True
            _log.warning(
                "runs take %d bytes of memory, over the budget of %d: the rest is leased or being written",
                self._memory.nbytes,
                budget,
            )
        return fits

    def _remove(self, reasons: Mapping[str, str]) -> None:
        if self._disk and reasons:
            self._disk.remove(reasons)
        for run in reasons:
            self._memory.pop(run)
            self._leases.forget(run)
        self._removals.put(reasons)

    # ---- helpers of reading, which take the lock themselves

    def _read(self, run: str, site: Site, read: Callable[[SiteRows], Tensor]) -> Tensor:
        while True:
            try:
                return read(self._site_rows(run, site))
            except FileNotFoundError:  # dropped during the read; the next look-up raises the reason
                continue

    def _site_rows(self, run: str, site: Site) -> SiteRows:
        with self._lock:
            self._demand(run)
            kinds = self._kinds(run)
            demand_site(site, f"run {run!r}")
            if site not in kinds:
                close = nearest(str(site), [str(known) for known in kinds])
                raise KeyError(f"run {run!r} has no rows at {site}: the nearest sites that were captured are {close}")
            finished = self._memory.get(run)
            stored = [] if finished or not self._disk else self._disk.stored(run, site)
        # Rows on disk are read later, without the lock, so that a slow disk does not hold up writers.
        chunks = (
            finished.sites[site][1] if finished else [Chunk(each.positions, lambda each=each: self._load(each)) for each in stored]
        )
        return SiteRows(f"run {run!r} at {site}", kinds[site], chunks)

    def _load(self, stored: Stored) -> Tensor:
        """Return rows from disk; ``FileNotFoundError`` if the run was dropped meanwhile."""
        disk = self._disk
        assert disk is not None
        try:
            rows = disk.load(stored)
        except FileNotFoundError:
            with self._lock:
                self._demand_open()
                if disk.has(stored.shard):
                    raise disk.lost(stored) from None
            raise
        with self._lock:
            self._bytes_read += rows.nbytes
        return rows
