"""Writer of one captured run."""

import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import TracebackType

import numpy as np
from jaxtyping import Shaped
from torch import Tensor

from mi_route2.runs.disk import Disk, Stored
from mi_route2.runs.rows import A_RUN, DTYPES, About, Chunk, FinishedRun, GrowingRows, in_memory, is_position, token_ids
from mi_route2.sites import Site, demand_site


@dataclass(frozen=True)
class Home:
    """Callbacks from a writer to its store. ``grown`` and ``finish`` raise ``RuntimeError`` if the store has ended the run.

    Attributes:
        disk: The disk tier, if any.
        grown: ``grown(writer, nbytes, waiting)`` reports the writer's memory, and the bytes of rows in it; returns how many bytes
            may wait for the disk, and whether rows that are on disk may stay in memory too.
        finish: ``finish(writer, finished, stored)`` publishes the run.
        forget: ``forget(writer, shards)`` gives the run up and deletes shards that belong to no run.
    """

    disk: Disk | None
    grown: Callable[["Writer", int, int], tuple[int, bool]]
    finish: Callable[["Writer", FinishedRun | None, Sequence[Stored]], None]
    forget: Callable[["Writer", Iterable[int]], None]


class Writer:
    """Writer that appends rows to a run, which can be read after ``close``. As a context it closes, or aborts on an error.

    Many writers may be open at once, each used by one thread.
    """

    def __init__(self, run: str, about: About, home: Home):
        self.run, self.about = run, about
        self._home, self._disk, self._lock = home, home.disk, threading.RLock()
        self._over: str | None = None
        self._sites: dict[Site, GrowingRows] = {}
        self._bytes, self._waiting = 0, 0  # bytes of the sites' buffers, and of rows that wait for the disk
        self._limit = 0
        self._stored: list[Stored] = []
        self._copy: dict[Site, list[Chunk]] | None = {}  # memory copy of stored rows; None after the store refused it
        self._copy_bytes = 0

    def append(self, site: Site, positions: Sequence[int], rows: Shaped[Tensor, "..."]) -> None:
        """Append ``rows [n, ...]``, the values of ``site`` at ``n`` logical positions in any order; they are copied.

        Raises:
            ValueError: a position that this run already has, or a negative one; a number of positions that is not the number of
                rows; a dtype or shape that differs from earlier rows of the site; a dtype other than bfloat16, float16, float32 and
                float64. The run is unchanged then.
            RuntimeError: the run was closed, aborted, or ended by the store. After this and any other error nothing of it is kept.
            OSError: no space on the disk; the message names the file.
        """
        with self._lock:
            places = self._checked(site, positions, rows)
            if not places:
                return
            with self._or_nothing():
                values = rows.detach().cpu()
                if site not in self._sites:
                    self._sites[site] = GrowingRows(values.dtype, tuple(values.shape[1:]))
                growing = self._sites[site]
                step = len(places) if self._disk is None else self._at_once(growing)
                for start in range(0, len(places), step):
                    self._add(growing, places[start : start + step], values[start : start + step])

    def add_tokens(self, tokens: Sequence[int]) -> None:
        """Add tokens that were generated since the run was opened to its description; ``ValueError`` if one is no token id."""
        with self._lock:
            self._demand_open()
            self.about = replace(self.about, tokens=(*self.about.tokens, *token_ids(self.run, tokens)))

    def note(self, name: str, value: bool) -> None:
        """Add a note to the run's meta."""
        with self._lock:
            self._demand_open()
            self.about = replace(self.about, meta={**self.about.meta, name: value})

    def close(self) -> None:
        """Finish the run, which can be read from now on; ``RuntimeError`` and ``OSError`` as in ``append``."""
        with self._lock:
            self._demand_open()
            with self._or_nothing():
                if self._disk is not None:
                    self._spill(self._disk)
                else:
                    self._copy = {site: growing.chunks() for site, growing in self._sites.items()}
                self._home.finish(self, self._finished_run(), self._stored)
                self._end("was closed")

    def abort(self, why: str = "was aborted") -> None:
        """Abandon the run and keep nothing of it; no effect after it was closed or aborted."""
        with self._lock:
            if self._over is None:
                self._home.forget(self, {stored.shard for stored in self._stored})
                self._end(why)

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    @contextmanager
    def _or_nothing(self) -> Iterator[None]:
        try:
            yield
        except BaseException:  # a run that lacks rows would read as one that was captured without them
            self.abort()
            raise

    def _end(self, why: str) -> None:
        self._over = why
        self._sites, self._stored, self._copy = {}, [], None

    def _demand_open(self) -> None:
        if self._over is not None:
            raise RuntimeError(f"run {self.run!r} {self._over}: open a new one to write more")

    def _checked(self, site: Site, positions: Sequence[int], rows: Tensor) -> Sequence[int]:
        """Return the positions; ``ValueError`` if they or the rows do not fit."""
        self._demand_open()
        demand_site(site, f"run {self.run!r}")
        given = positions.tolist() if isinstance(positions, Tensor | np.ndarray) else positions
        for one in given:
            if not is_position(one):
                raise self._wrong(site, f"position {one!r:.40}: positions are whole numbers below 2**63")
        places = array("q", given)
        if rows.ndim == 0 or len(rows) != len(places):
            raise self._wrong(site, f"{len(places)} positions for rows of shape {list(rows.shape)}: give one for each row")
        if rows.dtype not in DTYPES:
            raise self._wrong(site, f"rows of {rows.dtype}: use one of {', '.join(map(str, DTYPES))}")
        growing = self._sites.get(site)
        if growing and (growing.dtype, growing.shape) != (rows.dtype, rows.shape[1:]):
            before = f"{growing.dtype} and shape {list(growing.shape)}"
            raise self._wrong(site, f"rows of {rows.dtype} and shape {list(rows.shape[1:])}, but earlier rows had {before}")
        ordered = sorted(places)
        if ordered and ordered[0] < 0:
            raise self._wrong(site, f"position {ordered[0]}: positions count from 0")
        twice = (growing or GrowingRows(rows.dtype, ())).repeated(ordered) if ordered else None
        if twice is not None:
            raise self._wrong(site, f"position {twice} twice: give each position once")
        return places

    def _wrong(self, site: Site, what: str) -> ValueError:
        return ValueError(f"run {self.run!r} at {site} was given {what}")

    def _at_once(self, growing: GrowingRows) -> int:
        """Return the maximum number of rows per tensor on disk: a read loads the whole tensor."""
        return max(1, (self._limit or self._grown()) // max(1, growing.row_bytes))

    def _add(self, growing: GrowingRows, places: Sequence[int], values: Shaped[Tensor, " n *row"]) -> None:
        taken, room = growing.nbytes, growing.room
        growing.append(places, values)
        self._bytes += growing.nbytes - taken
        self._waiting += values.nbytes
        if growing.room != room:  # not at every row: a report waits for the store's lock
            self._grown()
        if self._disk is not None and self._waiting >= self._limit:
            self._spill(self._disk)

    def _grown(self) -> int:
        """Report this writer's memory to the store; return how many bytes may wait for the disk."""
        self._limit, keep = self._home.grown(self, self._bytes + self._copy_bytes, self._waiting)
        if not keep and self._copy is not None:
            self._copy, self._copy_bytes = None, 0
            # the store has counted the copy, and would evict other runs for it
            self._home.grown(self, self._bytes, self._waiting)
        return self._limit

    def _spill(self, disk: Disk) -> None:
        """Write all waiting rows into a shard."""
        taken = {site: growing.take() for site, growing in self._sites.items() if growing.fresh}
        if not taken:
            return
        self._stored += disk.write(self.run, taken)
        self._waiting, self._bytes = 0, sum(growing.nbytes for growing in self._sites.values())
        if self._copy is not None:
            for site, (places, rows) in taken.items():
                self._copy.setdefault(site, []).append(in_memory(places, rows))
                self._copy_bytes += rows.nbytes
        self._grown()

    def _finished_run(self) -> FinishedRun | None:
        """Return the run for the memory tier; ``None`` if not all of it is in memory."""
        if self._copy is None:
            return None
        sites = {site: (self._sites[site].kind, tuple(chunks)) for site, chunks in self._copy.items()}
        nbytes = sum(kind.nbytes + 8 * kind.rows for kind, _ in sites.values()) + len(self.about.text()) + A_RUN
        return FinishedRun(self.about, sites, nbytes)
