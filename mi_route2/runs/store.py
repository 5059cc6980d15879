"""Store of captured runs: a memory tier with eviction, and optionally a folder with one file for each run."""

import fcntl
import hashlib
import json
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
import torch
from jaxtyping import Float, Shaped
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mi_route2.checks import checked
from mi_route2.files import parse_json
from mi_route2.sites import Site, demand_site, nearest
from mi_route2.tensor_files import HEADER, read_tensors, write_tensors

BEHIND = "changed behind the last captured value"
"""Note of a run whose logits do not follow from its values: a capture is of a value before its steering or patch."""

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)}
LONGEST_NAME, A_RUN, REMEMBERED = 256, 1024, 4096
"""Characters of an id, bytes that count for a run without rows, and the number of removed runs whose reason is known."""
POSITIONS = "/positions"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SiteRows:
    """Number, dtype and shape of the rows of one site."""

    rows: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.rows * prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class RunInfo:
    """Description of a run. ``tiers`` says where its rows are: ``memory``, ``disk`` or both."""

    run: str
    weights: str
    tokens: tuple[int, ...]
    prompt_length: int
    meta: Mapping[str, Any] = field(default_factory=dict)
    sites: Mapping[Site, SiteRows] = field(default_factory=dict)
    tiers: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the rows of all sites."""
        return sum(each.nbytes for each in self.sites.values())

    def header(self) -> dict[str, str]:
        """Return the metadata of the run's file."""
        sites = {str(site): [each.rows, str(each.dtype).removeprefix("torch."), each.shape] for site, each in self.sites.items()}
        about = [self.run, self.weights, self.tokens, self.prompt_length, self.meta, sites]
        return {"run": json.dumps(about)}

    @staticmethod
    def of_header(header: Mapping[str, str]) -> "RunInfo":
        """Read the output of ``header``."""
        run, weights, tokens, prompt_length, meta, sites = json.loads(header["run"])
        shapes = {Site.parse(site): SiteRows(rows, DTYPES[dtype], tuple(shape)) for site, (rows, dtype, shape) in sites.items()}
        return RunInfo(run, weights, tuple(tokens), prompt_length, meta, shapes)


@dataclass(frozen=True)
class Stats:
    """Current size of the store, in bytes and runs. ``evictions`` counts from when it was opened."""

    budget: int
    memory_bytes: int
    memory_runs: int
    disk_bytes: int
    disk_runs: int
    writing: int
    evictions: int


Values = Mapping[Site, tuple[Tensor, Tensor]]
"""By site, positions in order and their rows."""


def demand_name(run: object) -> None:
    """Raise ``ValueError`` if ``run`` cannot be the id of a run."""
    if not isinstance(run, str) or not 0 < len(run) <= LONGEST_NAME or not run.isprintable():
        raise ValueError(f"{run!r:.40} cannot name a run: use 1 to {LONGEST_NAME} printable characters")


def invalid(run: str, old: str, new: str) -> str:
    """Return the error message for a run of other weights than the model's."""
    return f"run {run!r} is invalid: it was captured with weights {old[:12]}, and the model now has {new[:12]}; capture it again"


class Writer:
    """Writer that appends rows to a run, which can be read after ``close``. As a context it closes, or aborts on an error.

    Many writers may be open at once, each used by one thread.
    """

    def __init__(self, info: RunInfo, store: "RunStore"):
        self.run, self.info = info.run, info
        self.nbytes = A_RUN
        """Bytes in memory."""
        self._store, self._over = store, ""
        self._chunks: dict[Site, list[tuple[Sequence[int], Tensor]]] = {}
        self._positions: dict[Site, set[int]] = {}

    def append(self, site: Site, positions: Sequence[int], rows: Shaped[Tensor, "..."]) -> None:
        """Append ``rows [n, ...]``, the values of ``site`` at ``n`` logical positions in any order; they are copied.

        Raises:
            ValueError: a position that this run already has, or that is no whole number from 0; a number of positions that is not
                the number of rows; a dtype or shape that differs from earlier rows of the site. The run is unchanged then.
            RuntimeError: the run was closed, aborted, or ended by the store. After this and any other error nothing of it is kept.
        """
        with self._store.unchanged():
            self._demand_open()
            positions = self._checked(site, positions, rows)
            if not positions:
                return
            try:
                with torch.inference_mode(False), torch.no_grad():
                    copy = torch.empty(rows.shape, dtype=rows.dtype, device="cpu").copy_(rows)
                self._chunks.setdefault(site, []).append((positions, copy))
                self._positions.setdefault(site, set()).update(positions)
                self.nbytes += copy.nbytes + 8 * len(positions)
                self._store._demand_room(self)
            except BaseException:  # a run that lacks rows would read as one that was captured without them
                self.abort()
                raise

    def add_tokens(self, tokens: Sequence[int]) -> None:
        """Add tokens that were generated since the run was opened to its description."""
        with self._store.unchanged():
            self._demand_open()
            self.info = replace(self.info, tokens=(*self.info.tokens, *_token_ids(self.run, tokens)))

    def note(self, name: str, value: bool) -> None:
        """Add a note to the run's meta."""
        with self._store.unchanged():
            self._demand_open()
            self.info = replace(self.info, meta={**self.info.meta, name: value})

    def close(self) -> None:
        """Finish the run, which can be read from now on; ``OSError`` if it cannot be written to the folder."""
        with self._store.unchanged():
            self._demand_open()
            try:
                values = {site: _ordered(chunks) for site, chunks in self._chunks.items()}
                shapes = {site: SiteRows(len(rows), rows.dtype, tuple(rows.shape[1:])) for site, (_, rows) in values.items()}
                self._store._finish(self, replace(self.info, sites=shapes), values)
            except BaseException:
                self.abort()
                raise
            self._end("was closed")

    def abort(self, why: str = "was aborted") -> None:
        """Abandon the run and keep nothing of it; no effect after it was closed or aborted."""
        with self._store.unchanged():
            if not self._over:
                self._store._forget(self)
                self._end(why)

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error_type is None:
            self.close()
        else:
            self.abort()

    def _end(self, why: str) -> None:
        self._over, self._chunks, self._positions = why, {}, {}

    def _demand_open(self) -> None:
        if self._over:
            raise RuntimeError(f"run {self.run!r} {self._over}: open a new one to write more")

    def _checked(self, site: Site, positions: Sequence[int], rows: Tensor) -> list[int]:
        """Return the positions; ``ValueError`` if they or the rows do not fit."""
        demand_site(site, f"run {self.run!r}")
        numbers = _whole_numbers(f"run {self.run!r} at {site}: position", positions)
        reason = ""
        if rows.ndim == 0 or len(rows) != len(numbers):
            reason = f"{len(numbers)} positions for rows of shape {list(rows.shape)}: give one for each row"
        elif rows.dtype not in DTYPES.values():
            reason = f"rows of {rows.dtype}: use one of {', '.join(DTYPES)}"
        elif site in self._chunks and (rows.dtype, rows.shape[1:]) != ((first := self._chunks[site][0][1]).dtype, first.shape[1:]):
            shapes = f"{list(rows.shape[1:])}, but earlier rows had {first.dtype} and {list(first.shape[1:])}"
            reason = f"rows of {rows.dtype} and shape {shapes}"
        elif len(set(numbers)) < len(numbers) or not self._positions.get(site, set()).isdisjoint(numbers):
            reason = f"a position twice: give each of {numbers!r:.60} once"
        if reason:
            raise ValueError(f"run {self.run!r} at {site} was given {reason}")
        return numbers


@checked
class RunStore:
    """Store of captured runs. Any thread may write and read; only one process at a time may use ``folder``.

    A run is written as one file when its writer closes. The memory tier then holds a copy, as long as it has room.

    Args:
        budget: bytes of the memory tier. ``None`` takes an eighth of the free memory, but at least 256 MiB and at most 8 GiB; 0 has
            no memory tier, which needs a folder. The least recently used runs are evicted first; runs that are being written stay,
            even over the budget, with a warning in the log.
        folder: the disk tier, on a local disk; created if it does not exist.

    Raises:
        ValueError: no tier at all, or a folder with a damaged file.
        RuntimeError: another store uses the folder.
        OSError: a folder that cannot be written.

    Examples:
        >>> store = RunStore()  # in memory
        >>> _ = record(host, [site], tokens, store=store, runs=["clean", "corrupt"])
        >>> store.rows("clean", site, [6, 0]).shape
        torch.Size([2, 16])
    """

    def __init__(self, budget: int | None = None, folder: Path | str | None = None):
        if budget == 0 and folder is None:
            raise ValueError("a budget of 0 without a folder keeps nothing: give a budget, a folder or both")
        if budget is not None and budget < 0:
            raise ValueError(f"budget={budget} is negative: give bytes, 0 for no memory tier, or None for a share of free memory")
        self._budget = automatic(available()) if budget is None else budget
        self._lock = threading.RLock()
        self._infos: dict[str, RunInfo] = {}
        self._memory: OrderedDict[str, Values] = OrderedDict()
        self._memory_bytes = 0
        """Bytes of finished runs in memory."""
        self._writers: dict[str, Writer] = {}
        self._removed: dict[str, str] = {}
        """Why a run no longer exists, oldest first."""
        self._evictions, self._warned, self._closed = 0, False, False
        self._folder = None if folder is None else Path(folder).absolute()
        self._exclusive = None if self._folder is None else _only_here(self._folder)
        if self._folder:
            for path in self._folder.glob(".*.safetensors.*.tmp"):  # of a killed process
                path.unlink()
            infos = [
                _read_info(path) for path in sorted(self._folder.glob("*.safetensors"), key=lambda path: path.stat().st_mtime_ns)
            ]
            self._infos = {info.run: info for info in infos}

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
        demand_name(run)
        if not weights:
            raise ValueError(f"run {run!r} needs a hash of the weights that it was captured with: give host.weights_hash()")
        length = len(tokens) if prompt_length is None else prompt_length
        if not 0 <= length <= len(tokens):
            raise ValueError(f"run {run!r} has a prompt of {length} tokens but {len(tokens)} tokens in all")
        try:
            notes = parse_json(json.dumps(dict(meta or {}), allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"the meta of run {run!r} cannot be stored as JSON ({error}): give text, numbers, lists, dicts"
            ) from error
        info = RunInfo(run, weights, _token_ids(run, tokens), int(length), notes)
        with self._lock:
            self._demand_open()
            if run in self._writers or run in self._infos:
                raise ValueError(f"there is already a run {run!r}: drop it first, or use another name")
            self._removed.pop(run, None)
            self._writers[run] = writer = Writer(info, self)
            return writer

    # ---- reading

    def rows(self, run: str, site: Site, positions: Sequence[int]) -> Float[Tensor, " n *row"]:
        """Return the rows at logical ``positions``, in the order given, on the CPU and in the captured dtype.

        Raises:
            KeyError: With the reason: an unknown run, one that was dropped, evicted or invalidated by a change of the weights, or a
                site or position that was not captured.
            ValueError: A damaged file, a position that is not a whole number, or a name in place of a ``Site``.
        """
        numbers, rows = self._values(run, site)
        wanted = torch.tensor(_whole_numbers(f"run {run!r} at {site}: position", positions), dtype=torch.int64, device="cpu")
        rank = torch.searchsorted(numbers, wanted).clamp_max(len(numbers) - 1)
        if len(absent := wanted[numbers[rank] != wanted]):
            close = numbers[(numbers - absent[0]).abs().argsort(stable=True)[:5]].sort().values.tolist()
            raise KeyError(
                f"position {int(absent[0])} of run {run!r} at {site} was not captured: the nearest are {', '.join(map(str, close))}"
            )
        return rows[rank]

    def positions(self, run: str, site: Site) -> list[int]:
        """Return the positions that were captured at a site, in order; ``KeyError`` as in ``rows``."""
        return self._values(run, site)[0].tolist()

    def info(self, run: str) -> RunInfo:
        """Return the description of a finished run; ``KeyError`` with the reason if there is none."""
        with self._lock:
            info = self._demand(run)
            tiers = ("memory",) * (run in self._memory) + ("disk",) * (self._folder is not None)
        return replace(info, meta=deepcopy(info.meta), tiers=tiers)  # a reader that writes to it must not change the store

    def runs(self) -> list[str]:
        """Return the ids of all finished runs, oldest first."""
        with self._lock:
            self._demand_open()
            return list(self._infos)

    def __contains__(self, run: str) -> bool:
        """Return whether a finished run has this id."""
        with self._lock:
            self._demand_open()
            return run in self._infos

    def stats(self) -> Stats:
        """Return sizes and counts."""
        with self._lock:
            self._demand_open()
            sizes = [path.stat().st_size for path in self._folder.glob("*.safetensors")] if self._folder else []
            return Stats(
                self._budget, self._nbytes(), len(self._memory), sum(sizes), len(sizes), len(self._writers), self._evictions
            )

    def unchanged(self) -> AbstractContextManager[object]:
        """Context: what this thread reads belongs together, because no other thread can finish, drop or evict a run."""
        return self._lock

    # ---- removal

    def drop(self, run: str) -> None:
        """Delete a run; ``KeyError`` with the reason if it does not exist, ``ValueError`` while it is written."""
        with self._lock:
            if run in self._writers:
                raise ValueError(f"run {run!r} is being written: close or abort its writer first")
            self._demand(run)
            self._remove(run, f"run {run!r} was dropped")

    def invalidate(self, weights: str) -> list[str]:
        """Delete every run of other weights than ``weights``, after the model has changed; return their ids.

        A writer of such a run is ended: its next call raises ``RuntimeError``.
        """
        with self._lock:
            self._demand_open()
            ended = [info for info in self._infos.values() if info.weights != weights]
            writers = [writer for writer in self._writers.values() if writer.info.weights != weights]
            for info in ended:
                self._remove(info.run, invalid(info.run, info.weights, weights))
            for writer in writers:
                reason = invalid(writer.run, writer.info.weights, weights)
                writer.abort(reason.removeprefix(f"run {writer.run!r} "))
                self._remember(writer.run, reason)
            return [*(info.run for info in ended), *(writer.run for writer in writers)]

    def why_gone(self, run: str) -> str | None:
        """Return the reason for which a run was removed (dropped, evicted or invalidated); ``None`` if it exists or never did."""
        with self._lock:
            return self._removed.get(run)

    def close(self) -> None:
        """Abort all open writers and release the folder. Runs on disk stay."""
        with self._lock:
            for writer in list(self._writers.values()):
                writer.abort("was aborted, since its store was closed")
            self._closed = True
            if self._exclusive:
                self._exclusive.close()

    def __enter__(self) -> "RunStore":
        return self

    def __exit__(self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # ---- what writers call

    def _finish(self, writer: Writer, info: RunInfo, values: Values) -> None:
        if self._folder:
            tensors = {str(site): rows for site, (_, rows) in values.items()}
            positions = {f"{site}{POSITIONS}": numbers for site, (numbers, _) in values.items()}
            write_tensors(self._path(info.run), tensors | positions, info.header())
        del self._writers[info.run]
        self._infos[info.run] = info
        self._hold(info.run, values)

    def _forget(self, writer: Writer) -> None:
        self._writers.pop(writer.run, None)

    def _demand_room(self, writer: Writer) -> None:
        """Refuse a run that could not be kept, before it evicts the others."""
        if self._folder is None and writer.nbytes > self._budget:
            raise RuntimeError(
                f"run {writer.run!r} needs {writer.nbytes:,} bytes or more, and the store holds {self._budget:,}: capture fewer "
                "sites or positions, raise the budget, or give the store a folder"
            )
        self._evict()

    # ---- helpers, called with the lock

    def _demand_open(self) -> None:
        if self._closed:
            raise RuntimeError("this run store is closed: open a new one on its folder")

    def _demand(self, run: str) -> RunInfo:
        """Return the description of a run; ``KeyError`` with the reason if it does not exist."""
        self._demand_open()
        if run in self._infos:
            return self._infos[run]
        if run in self._writers:
            raise KeyError(f"run {run!r} is still being written: it can be read once its writer is closed")
        known = list(self._infos)[-1000:]
        raise KeyError(self._removed.get(run) or f"no run {run!r} was captured here: the nearest are {nearest(run, known)}")

    def _values(self, run: str, site: Site) -> tuple[Tensor, Tensor]:
        """Return positions and rows of a site; this use of the run counts for eviction."""
        with self._lock:
            info = self._demand(run)
            demand_site(site, f"run {run!r}")
            if site not in info.sites:
                close = nearest(str(site), [str(known) for known in info.sites])
                raise KeyError(f"run {run!r} has no rows at {site}: the nearest sites that were captured are {close}")
            if run in self._memory:
                self._memory.move_to_end(run)
                return self._memory[run][site]
            values = self._load(run)
            self._hold(run, values)
            return values[site]

    def _hold(self, run: str, values: Values) -> None:
        """Put a run into the memory tier, as the most recently used; with a folder, only if it fits."""
        if self._folder is None or _nbytes(values) <= self._budget:
            self._memory[run] = values
            self._memory_bytes += _nbytes(values)
            self._evict()

    def _evict(self) -> None:
        """Evict the least recently used runs until memory is within the budget."""
        excess = self._nbytes() - self._budget
        for run in list(self._memory) if excess > 0 else ():
            if excess > 0:
                nbytes = self._release_memory(run)
                excess -= nbytes
                self._evictions += 1
                if self._folder is None:
                    reason = f"the least recently used of a memory of {self._budget} bytes"
                    self._remove(
                        run, f"run {run!r} of {nbytes} bytes was evicted, {reason}: raise the budget, or give the store a folder"
                    )
        if excess > 0 and self._budget and not self._warned:
            _log.warning("runs take %d bytes of memory over the budget: they are being written", excess)
        self._warned = excess > 0

    def _nbytes(self) -> int:
        return self._memory_bytes + sum(writer.nbytes for writer in self._writers.values())

    def _release_memory(self, run: str) -> int:
        """Remove a run from the memory tier; return its bytes."""
        nbytes = _nbytes(self._memory.pop(run)) if run in self._memory else 0
        self._memory_bytes -= nbytes
        return nbytes

    def _remove(self, run: str, reason: str) -> None:
        if self._folder:
            self._path(run).unlink(missing_ok=True)
        self._release_memory(run)
        del self._infos[run]
        self._remember(run, reason)

    def _remember(self, run: str, reason: str) -> None:
        self._removed[run] = reason
        if len(self._removed) > REMEMBERED:
            del self._removed[next(iter(self._removed))]

    def _path(self, run: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{hashlib.sha256(run.encode()).hexdigest()[:32]}.safetensors"

    def _load(self, run: str) -> Values:
        """Read a run's file; ``ValueError`` if it is damaged."""
        path = self._path(run)
        try:
            tensors, header = read_tensors(path)
            if header != self._infos[run].header():
                raise ValueError(f"{path} holds another run")
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} is damaged ({error}): drop run {run!r} and capture it again") from error
        return {site: (tensors[f"{site}{POSITIONS}"], tensors[str(site)]) for site in self._infos[run].sites}


def _nbytes(values: Values) -> int:
    return A_RUN + sum(numbers.nbytes + rows.nbytes for numbers, rows in values.values())


def _ordered(chunks: Sequence[tuple[Sequence[int], Tensor]]) -> tuple[Tensor, Tensor]:
    """Return positions in order, and their rows."""
    numbers = torch.tensor([number for some, _ in chunks for number in some], dtype=torch.int64, device="cpu")
    ordered, order = numbers.sort()
    return ordered, torch.cat([rows for _, rows in chunks])[order]


def _whole_numbers(name: str, numbers: Sequence[int]) -> list[int]:
    """Return whole numbers from 0 as a list; ``ValueError`` for anything else."""
    entries = numbers.tolist() if isinstance(numbers, Tensor | np.ndarray) else list(numbers)
    for entry in entries:
        if isinstance(entry, bool) or not isinstance(entry, int | np.integer) or not 0 <= entry < 2**63:
            raise ValueError(f"{name} {entry!r:.40} is not valid: give whole numbers from 0 on")
    return list(map(int, entries))


def _token_ids(run: str, tokens: Sequence[int]) -> tuple[int, ...]:
    return tuple(_whole_numbers(f"run {run!r}: token", tokens))


def _read_info(path: Path) -> RunInfo:
    """Read the description in a run's file; ``ValueError`` if it is damaged."""
    try:
        with safe_open(path, framework="pt") as handle:
            return RunInfo.of_header(json.loads((handle.metadata() or {})[HEADER]))
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not the file of a run ({error}): delete it, or choose another folder") from error


def _only_here(folder: Path) -> IO[str]:
    """Create and lock a folder; ``RuntimeError`` if another process holds the lock."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = (folder / "lock").open("a")
    except OSError as error:
        raise OSError(f"cannot keep runs in {folder} ({error.strerror}): choose another folder") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        handle.close()
        raise RuntimeError(f"{folder} is open in another run store: close that one, or give this one its own folder") from error
    return handle


def automatic(free: int) -> int:
    """Return the default budget: an eighth of the free memory, but at least 256 MiB and at most 8 GiB."""
    return min(max(free // 8, 256 << 20), 8 << 30)


def available() -> int:
    """Return the bytes of available memory, or a container's limit if that is less."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) << 10
    except (OSError, StopIteration):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # no such file, or "max"
            free = min(free, int(Path("/sys/fs/cgroup", limit).read_text(encoding="ascii")))
    return free
