"""Keys and values of running requests: slots ``[row, position]``, a row a request, position its token's logical place.

Rows ``0 .. n - 1`` are in use, always: where one is freed the last takes its place, so that a batch of all rows is a view and no
copy. A freed row is zeroed, because what is masked is still multiplied: a NaN left there would reach whoever comes next.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mi_route2.interventions.layout import Layout


@dataclass(frozen=True)
class Saved:
    """One request's keys and values out of their row, ``[layer, 2, h, length, dh]``."""

    data: Float[Tensor, "l 2 h n dh"]


class Slots:
    """Room for ``rows`` requests; grows with the longest."""

    def __init__(
        self,
        layers: int,
        rows: int,
        heads: int,
        width: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        start: int = 16,
    ):
        self.rows, self.used = rows, 0
        self._data = torch.zeros(layers, 2, rows, heads, start, width, dtype=dtype, device=device)

    @property
    def capacity(self) -> int:
        """Positions that there is room for now."""
        return self._data.shape[4]

    def reserve(self, length: int) -> None:
        """Makes room for positions up to ``length``."""
        if length <= self.capacity:
            return
        size = list(self._data.shape)
        size[4] = max(length, 2 * self.capacity)
        grown = self._data.new_zeros(size)
        grown[:, :, : self.used, :, : self.capacity] = self._data[:, :, : self.used]  # the others are zeros
        self._data = grown

    def take(self) -> int:
        """The next free row."""
        if self.used == self.rows:
            raise RuntimeError(f"all {self.rows} rows are in use")
        self.used += 1
        return self.used - 1

    def free(self, row: int) -> int | None:
        """Frees ``row``; the row that moved into its place, if one did."""
        last = self.used - 1
        if not 0 <= row <= last:
            raise RuntimeError(f"row {row} is not in use")
        if row != last:
            self._data[:, :, row] = self._data[:, :, last]
        self._data[:, :, last] = 0
        self.used = last
        return last if row != last else None

    def save(self, row: int, length: int, start: int = 0) -> Saved:
        """A copy of the row's positions ``start .. length - 1``."""
        return Saved(self._data[:, :, row, :, start:length].clone())

    def load(self, row: int, saved: Saved, start: int = 0) -> None:
        """Puts a copy back, from position ``start`` on."""
        length = start + saved.data.shape[3]
        self.reserve(length)
        self._data[:, :, row, :, start:length] = saved.data

    def view(self, layout: Layout, rows: Sequence[int], *, aligned: bool = False) -> "View":
        """The cache of one forward over ``layout``, whose pieces stand in ``rows``. ``aligned`` copies what is read, so that the
        bits of a product cannot depend on where in memory a row happens to be."""
        starts = [piece.start for piece in layout.pieces]
        self.reserve(max(starts) + layout.positions.shape[1])
        return View(self._data, layout, rows, starts, aligned)


class View:
    """``KeyValues`` of one forward, and what its queries are allowed to read."""

    def __init__(self, data: Tensor, layout: Layout, rows: Sequence[int], starts: list[int], aligned: bool):
        self._data, self._aligned, self._rows, self._starts = data, aligned, list(rows), starts
        first, count, columns = self._rows[0], len(self._rows), layout.positions.shape[1]
        self._span = slice(first, first + count) if self._rows == list(range(first, first + count)) else None
        self._start = self._starts[0] if self._starts.count(self._starts[0]) == count else None
        self._fresh = self._start == 0
        self._length = columns if self._fresh else max(piece.start + piece.count for piece in layout.pieces)
        self._place: tuple[Tensor, Tensor] | None = None
        self._positions = layout.positions

    @property
    def whole(self) -> bool:
        """Whether every query may read every key: single tokens, all at one position."""
        return self._start is not None and self._positions.shape[1] == 1

    @property
    def allowed(self) -> Bool[Tensor, "b 1 t S"]:
        """Which key each query may read. A padding token is at position 0 and reads the first: without any it would be NaN."""
        keys = torch.arange(self._length, device=self._data.device)
        return (keys <= self._positions[..., None])[:, None]

    def update(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        self._write(self._data[layer, 0], key)
        self._write(self._data[layer, 1], value)
        if self._fresh:
            return key, value
        return self._read(self._data[layer, 0]), self._read(self._data[layer, 1])

    def _write(self, into: Tensor, new: Tensor) -> None:
        if self._start is not None and self._span is not None:
            into[self._span, :, self._start : self._start + new.shape[2]] = new
            return
        rows, columns = self._index(new.shape[2])
        into[rows[:, None], :, columns] = new.transpose(1, 2)

    def _read(self, held: Tensor) -> Tensor:
        found = held[self._span, :, : self._length] if self._span is not None else held[self._index(1)[0], :, : self._length]
        return found.clone(memory_format=torch.contiguous_format) if self._aligned else found

    def _index(self, columns: int) -> tuple[Tensor, Tensor]:
        """Rows, and the positions that each of them writes."""
        if self._place is None:
            device = self._data.device
            starts = torch.tensor(self._starts, device=device)[:, None]
            self._place = torch.tensor(self._rows, device=device), starts + torch.arange(columns, device=device)
        return self._place
