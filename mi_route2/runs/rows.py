"""Rows of captured runs: run descriptions, buffers that grow while a run is written, and the memory tier."""

import json
import os
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from mi_route2.sites import Site
from mi_route2.validation import parse_object

_LONGEST_NAME = 256


@dataclass(frozen=True)
class About:
    """Description of a run: the hash of the weights, the tokens, the prompt length, and free notes."""

    weights: str
    tokens: tuple[int, ...] = ()
    prompt_length: int = 0
    meta: Mapping[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        """Return JSON that ``parse`` reads back."""
        fields = {"weights": self.weights, "tokens": self.tokens, "prompt_length": self.prompt_length, "meta": self.meta}
        return json.dumps(fields, sort_keys=True)

    @staticmethod
    def parse(text: str) -> "About":
        """Parse the output of ``text``."""
        raw = json.loads(text)
        return About(raw["weights"], tuple(raw["tokens"]), raw["prompt_length"], raw["meta"])


@dataclass(frozen=True)
class Kind:
    """Count, dtype and row shape of the rows of one site of a run."""

    rows: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.rows * prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class RunInfo:
    """Description of a finished run.

    ``tiers`` says where its rows are stored: ``memory``, ``disk`` or both. ``nbytes`` counts the rows only.
    """

    run: str
    weights: str
    tokens: tuple[int, ...]
    prompt_length: int
    meta: Mapping[str, Any]
    sites: Mapping[Site, Kind]
    nbytes: int
    tiers: tuple[str, ...]


@dataclass(frozen=True)
class Stats:
    """Current size of the store, in bytes and runs. ``bytes_read`` and ``evictions`` count from when it was opened."""

    budget: int
    memory_bytes: int
    memory_runs: int
    disk_bytes: int
    disk_runs: int
    writing: int
    leases: int
    evictions: int
    bytes_read: int


def demand_name(run: object) -> None:
    """Raise ``ValueError`` if ``run`` cannot be the id of a run."""
    if not isinstance(run, str) or not 0 < len(run) <= _LONGEST_NAME or not run.isprintable():
        raise ValueError(f"{run!r:.40} cannot name a run: use 1 to {_LONGEST_NAME} printable characters")


BEHIND = "changed behind the last captured value"
"""Note of a run whose logits do not follow from its values: a capture is of a value before its steering or patch."""


def described(run: str, weights: str, tokens: Sequence[int], prompt_length: int | None, meta: Mapping[str, Any] | None) -> About:
    """Return the description of a new run; ``ValueError`` if it is inconsistent or cannot be stored as JSON."""
    demand_name(run)
    if not isinstance(weights, str) or not weights:
        raise ValueError(
            f"run {run!r} needs a hash of the weights that it was captured with, because it is not valid for others, and not "
            f"{weights!r:.40}: give host.weights_hash()"
        )
    length = len(tokens) if prompt_length is None else prompt_length
    if isinstance(length, bool) or not isinstance(length, int | np.integer) or not 0 <= length <= len(tokens):
        raise ValueError(f"run {run!r} has a prompt of {length} tokens but {len(tokens)} tokens in all")
    try:
        notes = parse_object(json.dumps(dict(meta or {}), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"the meta of run {run!r} cannot be stored as JSON ({error}): give text, finite numbers, lists and dicts"
        ) from error
    return About(weights, token_ids(run, tokens), int(length), notes)


def token_ids(run: str, tokens: Sequence[int]) -> tuple[int, ...]:
    """Return ``tokens`` as a tuple; ``ValueError`` for anything that is not a token id, which would be stored as one."""
    given = tokens.tolist() if isinstance(tokens, Tensor | np.ndarray) else list(tokens)
    for token in given:
        if isinstance(token, bool) or not isinstance(token, int | np.integer) or token < 0:
            raise ValueError(f"run {run!r} was given the token {token!r:.60}: give token ids, whole numbers from 0 on, as (5, 17)")
    return tuple(map(int, given))


def is_position(given: object) -> bool:
    """Return whether this is a whole number of 64 bits, as which positions are stored."""
    return not isinstance(given, bool) and isinstance(given, int | np.integer) and -(2**63) <= int(given) < 2**63


DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
FIRST_ROWS, LARGEST_BLOCK = 8, 4 << 20


@dataclass(frozen=True)
class Chunk:
    """Rows ``load() [n, ...]`` at ``positions [n]``."""

    positions: Int[Tensor, " n"]
    load: Callable[[], Tensor]


def in_memory(positions: Int[Tensor, " n"], rows: Shaped[Tensor, " n *row"]) -> Chunk:
    """Return a chunk in memory."""
    return Chunk(positions, lambda: rows)


class GrowingRows:
    """Buffer of rows of one dtype and shape, appended a few at a time; its blocks double up to 4 MiB, so no row is copied twice."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...]):
        self.dtype, self.shape = dtype, shape
        self.row_bytes = torch.Size(shape).numel() * dtype.itemsize
        self.room = 0
        """Bytes of the blocks, including unused rows at the end."""
        self._largest = max(FIRST_ROWS, LARGEST_BLOCK // max(1, self.row_bytes))
        self._positions, self._last = array("q"), -1
        self._blocks: list[Tensor] = []
        self._used = 0  # rows of the last block
        self.fresh = 0
        """Number of rows in all blocks; they belong to the last positions."""

    @property
    def kind(self) -> Kind:
        """Count, dtype and shape of all rows, removed ones included."""
        return Kind(len(self._positions), self.dtype, self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in use. Positions are kept until the end, to detect repetitions."""
        return self.room + len(self._positions) * self._positions.itemsize

    def repeated(self, ordered: Sequence[int]) -> int | None:
        """Return a position that appears twice in ``ordered`` (sorted), or was appended before; ``None`` if there is none."""
        if twice := [one for one, other in pairwise(ordered) if one == other]:
            return twice[0]
        if ordered[0] > self._last:  # the usual case, positions in order, which costs no look at the earlier ones
            return None
        new = torch.tensor(ordered, dtype=torch.int64, device="cpu")
        seen = new[torch.isin(new, _tensor(self._positions))]
        return int(seen[0]) if len(seen) else None

    def append(self, positions: Sequence[int], rows: Shaped[Tensor, " n *row"]) -> None:
        """Copy rows into the buffer."""
        self._positions.extend(positions)
        self._last = max(self._last, *positions)
        self.fresh += len(positions)
        done = 0
        while done < len(positions):
            if not self._blocks or self._used == len(self._blocks[-1]):
                self._add(len(positions) - done)
            block = self._blocks[-1]
            count = min(len(positions) - done, len(block) - self._used)
            block[self._used : self._used + count] = rows[done : done + count]
            self._used, done = self._used + count, done + count

    def _add(self, wanted: int) -> None:
        last = len(self._blocks[-1]) if self._blocks else FIRST_ROWS // 2
        count = max(wanted, min(2 * last, self._largest))
        with torch.inference_mode(False):  # a block made in inference mode could not be written outside of it
            self._blocks.append(torch.empty((count, *self.shape), dtype=self.dtype, device="cpu"))
        self._used = 0
        self.room += count * self.row_bytes

    def take(self) -> tuple[Tensor, Tensor]:
        """Return positions ``[n]`` and rows ``[n, ...]`` since the last call, as one tensor each, and free their memory."""
        rows = torch.cat(self._filled()) if self._blocks else torch.empty((0, *self.shape), dtype=self.dtype, device="cpu")
        positions = _tensor(self._positions[len(self._positions) - self.fresh :])
        self._blocks, self._used, self.fresh, self.room = [], 0, 0, 0
        return positions, rows

    def chunks(self) -> list[Chunk]:
        """Return all rows since the last ``take``, by block and without unused rows."""
        filled = self._filled()
        positions = _tensor(self._positions[len(self._positions) - self.fresh :]).split([len(block) for block in filled])
        # a view of a block that is not full would keep the unused rows in memory, which nobody counts
        full = [rows if len(rows) == len(block) else rows.clone() for rows, block in zip(filled, self._blocks, strict=True)]
        return [in_memory(places, rows) for places, rows in zip(positions, full, strict=True)]

    def _filled(self) -> list[Tensor]:
        return [*self._blocks[:-1], *(block[: self._used] for block in self._blocks[-1:])]


def _tensor(numbers: "array[int]") -> Int[Tensor, " n"]:
    if not numbers:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    # of a copy, because an array cannot grow while a tensor shares its buffer
    return torch.frombuffer(bytearray(numbers.tobytes()), dtype=torch.int64)


class SiteRows:
    """All rows of one site of a finished run, for reading; errors call them ``name``."""

    def __init__(self, name: str, kind: Kind, chunks: Iterable[Chunk]):
        self._name, self._kind, self._chunks = name, kind, tuple(chunks)
        every = torch.cat([chunk.positions for chunk in self._chunks])
        self._sorted, self._order = every.sort()
        self._ends = torch.tensor([len(chunk.positions) for chunk in self._chunks], device="cpu").cumsum(0)

    def positions(self) -> list[int]:
        """Return every position, in order."""
        return self._sorted.tolist()

    def at(self, positions: Sequence[int]) -> Tensor:
        """Return the rows ``[n, ...]`` at ``positions``, in the order given; ``KeyError`` names a missing one and the nearest."""
        given = positions.tolist() if isinstance(positions, Tensor | np.ndarray) else list(positions)
        if wrong := [one for one in given if not is_position(one)]:
            raise ValueError(f"{wrong[0]!r:.60} is not a position of {self._name}: give whole numbers below 2**63, as [4, 0]")
        wanted = torch.tensor(given, dtype=torch.int64, device="cpu")
        rank = torch.searchsorted(self._sorted, wanted).clamp_max(len(self._sorted) - 1)
        if len(absent := wanted[self._sorted[rank] != wanted]):
            close = self._sorted[(self._sorted - absent[0]).abs().argsort(stable=True)[:5]].sort().values
            raise KeyError(f"position {int(absent[0])} of {self._name} was not captured: the nearest are {_listed(close)}")
        return self._read(self._order[rank])

    def between(self, start: int, stop: int) -> Tensor:
        """Return rows ``start .. stop - 1`` in the order of their positions."""
        return self._read(self._order[start:stop])

    def _read(self, flat: Tensor) -> Tensor:
        """Return rows by their index in the order of the chunks."""
        out = torch.empty((len(flat), *self._kind.shape), dtype=self._kind.dtype, device="cpu")
        which = torch.searchsorted(self._ends, flat, right=True)
        for i in which.unique().tolist():
            chunk, here = self._chunks[i], (which == i).nonzero()[:, 0]
            first = int(self._ends[i]) - len(chunk.positions)
            out[here] = chunk.load()[flat[here] - first]
        return out


def _listed(numbers: Tensor) -> str:
    return ", ".join(map(str, numbers.tolist()))


LEAST, MOST, SHARE = 256 << 20, 8 << 30, 8
A_RUN = 1024
"""Bytes counted for a run without rows, so that the number of such runs is limited too."""


@dataclass(frozen=True)
class FinishedRun:
    """A run in memory after its last write: by site, the kind of its rows and the rows."""

    about: About
    sites: Mapping[Site, tuple[Kind, tuple[Chunk, ...]]]
    nbytes: int


class Memory:
    """Memory tier: finished runs, and the bytes of runs that are being written, by name. ``budget=0`` holds no finished run."""

    def __init__(self, budget: int | None, owner: Callable[[str], str] = lambda run: ""):
        if budget is not None and budget < 0:
            raise ValueError(f"budget={budget} is negative: give bytes, 0 for no memory tier, or None for a share of free memory")
        self.budget = automatic(available()) if budget is None else budget
        self.nbytes, self._owner = 0, owner
        """Bytes in use, and whose a run is."""
        self._runs: OrderedDict[str, FinishedRun] = OrderedDict()
        self._writing: dict[object, tuple[str, int]] = {}

    def __len__(self) -> int:
        return len(self._runs)

    def __contains__(self, run: str) -> bool:
        return run in self._runs

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._runs))

    def take(self, writer: object, run: str, nbytes: int) -> None:
        """Set the bytes that the ``writer`` of a run has in memory; 0 when it is done."""
        self.nbytes += nbytes - self._writing.pop(writer, (run, 0))[1]
        if nbytes:
            self._writing[writer] = run, nbytes

    def put(self, run: str, finished: FinishedRun) -> None:
        """Store a finished run."""
        self._runs[run] = finished
        self.nbytes += finished.nbytes

    def get(self, run: str) -> FinishedRun | None:
        """Return the run and mark it as most recently used."""
        if run in self._runs:
            self._runs.move_to_end(run)
        return self._runs.get(run)

    def pop(self, run: str) -> FinishedRun | None:
        """Remove a run and return it."""
        finished = self._runs.pop(run, None)
        self.nbytes -= finished.nbytes if finished else 0
        return finished

    def by_owner(self) -> dict[str, int]:
        """Return the bytes of finished runs by owner."""
        taken: Counter[str] = Counter()
        for run, finished in self._runs.items():
            taken[self._owner(run)] += finished.nbytes
        return dict(taken)

    def evict(self, leased: Callable[[str], bool]) -> dict[str, int]:
        """Evict unleased runs until the budget is met; return the evicted runs with their bytes.

        Each time, the least recently used run of the owner that has most bytes goes, runs that are being written included. Nobody
        loses what is within an equal share.
        """
        went: dict[str, int] = {}
        if self.nbytes <= self.budget:
            return went
        queues: dict[str, list[str]] = {}
        taken = Counter(self.by_owner())
        for run, nbytes in self._writing.values():
            taken[self._owner(run)] += nbytes
        share = self.budget // max(1, len(taken))
        for run in reversed(self._runs):
            if not leased(run):
                queues.setdefault(self._owner(run), []).append(run)
        while queues and self.nbytes > self.budget:
            most = max(queues, key=lambda owner: taken[owner])
            if taken[most] <= share:
                break
            run = queues[most].pop()
            if finished := self.pop(run):
                went[run] = finished.nbytes
                taken[most] -= finished.nbytes
            if not queues[most]:
                del queues[most]
        return went


def automatic(free: int) -> int:
    """Return the default budget: an eighth of the free memory, but at least 256 MiB and at most 8 GiB."""
    return min(max(free // SHARE, LEAST), MOST)


def available() -> int:
    """Return the bytes of available memory, or a container's limit if that is less.

    If the system does not report available memory, all memory of the machine counts.
    """
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) << 10
    except (OSError, StopIteration):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # no such file, or "max"
            free = min(free, int(Path("/sys/fs/cgroup", limit).read_text(encoding="ascii")))
    return free
