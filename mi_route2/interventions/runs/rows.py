"""The rows of one site of one run: chunks that grow while it is written, and reading some of them back.

A ``Chunk`` is some rows and their positions; it knows how to load its rows, from memory or from a file. Reading loads only chunks
that hold a row which is asked for, and copies that row once. Nothing here depends on the order in which positions came.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from mi_route2.interventions.runs.info import Kind

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
FIRST_ROWS, LARGEST_BLOCK = 8, 4 << 20


@dataclass(frozen=True)
class Chunk:
    """Rows ``load() [n, ...]`` at ``positions [n]``."""

    positions: Int[Tensor, " n"]
    load: Callable[[], Tensor]


def held(positions: Int[Tensor, " n"], rows: Shaped[Tensor, " n *row"]) -> Chunk:
    """A chunk in memory."""
    return Chunk(positions, lambda: rows)


class Growing:
    """Rows of one type and shape, appended a few at a time. Blocks double up to 4 MiB, so that no row is copied twice."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...]):
        self.dtype, self.shape = dtype, shape
        self.row_bytes = torch.Size(shape).numel() * dtype.itemsize
        self.room = 0
        """Bytes of the blocks, the spare ones at the end included."""
        self._largest = max(FIRST_ROWS, LARGEST_BLOCK // max(1, self.row_bytes))
        self._positions, self._last = array("q"), -1
        self._blocks: list[Tensor] = []
        self._used = 0  # rows of the last block
        self.fresh = 0
        """Rows of all blocks: those at the end of the positions."""

    @property
    def kind(self) -> Kind:
        """What the rows are, those that were taken out included."""
        return Kind(len(self._positions), self.dtype, self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes that are taken. Positions stay until the end, to know one that comes again."""
        return self.room + len(self._positions) * self._positions.itemsize

    def repeated(self, ordered: Sequence[int]) -> int | None:
        """A position, of some in order, that stands there twice or came before."""
        if twice := [one for one, other in pairwise(ordered) if one == other]:
            return twice[0]
        if ordered[0] > self._last:
            return None
        new = torch.tensor(ordered, dtype=torch.int64)
        seen = new[torch.isin(new, _tensor(self._positions))]
        return int(seen[0]) if len(seen) else None

    def append(self, positions: Sequence[int], rows: Shaped[Tensor, " n *row"]) -> None:
        """Copy rows in."""
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
        """Positions ``[n]`` and rows ``[n, ...]`` since the last time, as one tensor each; the room is given back."""
        rows = torch.cat(self._filled()) if self._blocks else torch.empty((0, *self.shape), dtype=self.dtype, device="cpu")
        positions = _tensor(self._positions[len(self._positions) - self.fresh :])
        self._blocks, self._used, self.fresh, self.room = [], 0, 0, 0
        return positions, rows

    def chunks(self) -> list[Chunk]:
        """All rows since the last time, by block and without spare room."""
        filled = self._filled()
        positions = _tensor(self._positions[len(self._positions) - self.fresh :]).split([len(block) for block in filled])
        full = [rows if len(rows) == len(block) else rows.clone() for rows, block in zip(filled, self._blocks, strict=True)]
        return [held(places, rows) for places, rows in zip(positions, full, strict=True)]

    def _filled(self) -> list[Tensor]:
        return [*self._blocks[:-1], *(block[: self._used] for block in self._blocks[-1:])]


def _tensor(numbers: "array[int]") -> Int[Tensor, " n"]:
    return torch.frombuffer(bytearray(numbers.tobytes()), dtype=torch.int64) if numbers else torch.empty(0, dtype=torch.int64)


class SiteRows:
    """All rows of one site of a finished run, for reading; ``name`` is what errors call them."""

    def __init__(self, name: str, kind: Kind, chunks: Iterable[Chunk]):
        self._name, self._kind, self._chunks = name, kind, tuple(chunks)
        every = torch.cat([chunk.positions for chunk in self._chunks])
        self._sorted, self._order = every.sort()
        self._ends = torch.tensor([len(chunk.positions) for chunk in self._chunks]).cumsum(0)

    def positions(self) -> list[int]:
        """Every position, in order."""
        return self._sorted.tolist()

    def at(self, positions: Sequence[int]) -> Tensor:
        """The rows ``[n, ...]`` at ``positions``, in the order asked; ``KeyError`` names one that is not there and the nearest."""
        given = positions.tolist() if isinstance(positions, Tensor | np.ndarray) else list(positions)
        if wrong := [one for one in given if isinstance(one, bool) or not isinstance(one, int | np.integer)]:
            raise ValueError(f"{wrong[0]!r:.60} is no position of {self._name}: positions are whole numbers, as [4, 0]")
        wanted = torch.tensor(given, dtype=torch.int64)
        rank = torch.searchsorted(self._sorted, wanted).clamp_max(len(self._sorted) - 1)
        if len(absent := wanted[self._sorted[rank] != wanted]):
            close = self._sorted[(self._sorted - absent[0]).abs().argsort(stable=True)[:5]].sort().values
            raise KeyError(f"position {int(absent[0])} of {self._name} was not captured: the nearest are {_listed(close)}")
        return self._read(self._order[rank])

    def between(self, start: int, stop: int) -> Tensor:
        """Rows ``start .. stop - 1`` in the order of their positions."""
        return self._read(self._order[start:stop])

    def _read(self, flat: Tensor) -> Tensor:
        """Rows by their number in the order of the chunks."""
        out = torch.empty((len(flat), *self._kind.shape), dtype=self._kind.dtype, device="cpu")
        which = torch.searchsorted(self._ends, flat, right=True)
        for i in which.unique().tolist():
            chunk, here = self._chunks[i], (which == i).nonzero()[:, 0]
            first = int(self._ends[i]) - len(chunk.positions)
            out[here] = chunk.load()[flat[here] - first]
        return out


def _listed(numbers: Tensor) -> str:
    return ", ".join(map(str, numbers.tolist()))
