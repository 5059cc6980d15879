"""Key-value caches: slots of running requests, one row each, and content-addressed blocks of computed prefixes."""

import hashlib
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from mi_route2.steering.plan import BatchLayout


@dataclass(frozen=True)
class Saved:
    """A copy of one request's keys and values, ``[layer, 2, h, length, dh]``; of a private decoder, its cache of transformers."""

    data: Any


SHELF = 1 << 20
"""Numbers of the rows of one shelf: a row is ``shelf * SHELF + place``."""


class Slots:
    """Key-value storage of running requests: a row each, on shelves for lengths that grow by a factor of four.

    A shelf has as many rows as are in use, up to a factor of four, and none when it is empty; the rows in use are its first ones.
    So memory follows the tokens in use, and one long request does not lengthen the rows of others. The rows of one forward must be
    on one shelf.

    Args:
        layers: number of blocks.
        rows: number of rows in use at most.
        heads: key-value heads.
        width: features of a head; keys or values with fewer leave the rest unused.
        most: the longest row that can be asked for.
        start: positions in a row of the first shelf.
    """

    def __init__(
        self,
        layers: int,
        rows: int,
        heads: int,
        width: int,
        *,
        most: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        start: int = 256,
    ):
        self.rows, self.used, self._start = rows, 0, start
        self.sizes = [min(start, most)]
        while self.sizes[-1] < most:
            self.sizes.append(min(4 * self.sizes[-1], most))
        with torch.inference_mode(False):  # as in _resize
            self._shelves = [torch.zeros(layers, 2, 0, heads, size, width, dtype=dtype, device=device) for size in self.sizes]
        self._used, self._written = [0] * len(self.sizes), [0] * len(self.sizes)
        self._position = layers * 2 * heads * width * dtype.itemsize

    @property
    def bytes(self) -> int:
        """Bytes that are allocated."""
        return sum(data.nbytes for data in self._shelves)

    def fit(self, longest: int, count: int) -> None:
        """Prepare the first shelf, of which no row may be in use, for ``count`` requests of up to this length.

        Its rows are as short as that allows: memory that is touched for the first time costs time, and a page of it may hold the
        beginnings of many rows.
        """
        if self.used or len(self.sizes) == 1:
            return
        layers, two, _, heads, _, width = self._shelves[0].shape
        self.sizes[0] = min(self._start, -(-longest // 16) * 16)
        with torch.inference_mode(False):  # as in _resize
            self._shelves[0] = _zeros([layers, two, min(count, self.rows), heads, self.sizes[0], width], self._shelves[0])
        self._written[0] = 0

    def cost(self, length: int) -> int:
        """Return the bytes of a row for this length."""
        return self.sizes[bisect_left(self.sizes, length)] * self._position

    def capacity(self, row: int) -> int:
        """Return the number of positions of ``row``."""
        return self.sizes[row // SHELF]

    def take(self, length: int) -> int:
        """Allocate and return a row for this length."""
        shelf = bisect_left(self.sizes, length)
        if shelf == len(self.sizes):
            raise RuntimeError(f"a row of {length} positions is longer than any: the longest has {self.sizes[-1]}")
        place = self._used[shelf]
        if place == self._shelves[shelf].shape[2]:
            self._resize(shelf, min(max(place + 1, 2 * place), self.rows + 1))
        if place < self._written[shelf]:
            self._shelves[shelf][:, :, place] = 0
        self._used[shelf] += 1
        self._written[shelf] = max(self._written[shelf], place + 1)
        self.used += 1
        return shelf * SHELF + place

    def free(self, *rows: int) -> dict[int, int]:
        """Free ``rows``; return the rows that were moved into their places, old to new, in the order in which they were moved."""
        moved: dict[int, int] = {}
        for row in sorted(rows, reverse=True):  # the last ones first, so that few are moved
            shelf, place, data, last = self._at(row)
            if place != last:
                data[:, :, place] = data[:, :, last]
                moved[shelf * SHELF + last] = row
            self._used[shelf] = last
            self.used -= 1
        for shelf in {row // SHELF for row in rows}:
            if self._used[shelf] * 4 <= self._shelves[shelf].shape[2]:
                self._resize(shelf, 2 * self._used[shelf])
        return moved

    def move(self, row: int, length: int, keep: int) -> int:
        """Return a new row for this length with the first ``keep`` positions of ``row``, which is still to be freed."""
        _, place, data, _ = self._at(row)
        new = self.take(length)
        self._shelves[new // SHELF][:, :, new % SHELF, :, :keep] = data[:, :, place, :, :keep]
        return new

    def save(self, row: int, length: int, start: int = 0) -> Saved:
        """Return a copy of the row's positions ``start .. length - 1``."""
        _, place, data, _ = self._at(row)
        return Saved(data[:, :, place, :, start:length].clone())

    def load(self, row: int, saved: Saved, start: int = 0) -> None:
        """Write a saved copy into ``row``, from position ``start`` on."""
        _, place, data, _ = self._at(row)
        data[:, :, place, :, start : start + saved.data.shape[3]] = saved.data

    def view(self, layout: BatchLayout, rows: Sequence[int], *, aligned: bool = False) -> "View":
        """Return the cache of one forward over ``layout`` whose pieces use ``rows``, which are on one shelf.

        ``aligned`` copies the keys and values that are read, so that the bits of a product cannot depend on a row's place in
        memory.
        """
        shelf, _, data, _ = self._at(rows[0])
        assert all(row // SHELF == shelf for row in rows), rows
        starts = [piece.start for piece in layout.pieces]
        return View(data, layout, [row % SHELF for row in rows], starts, aligned)

    def _at(self, row: int) -> tuple[int, int, Tensor, int]:
        """Return shelf, place, data and the last place in use of a row."""
        shelf, place = divmod(row, SHELF)
        assert place < self._used[shelf], f"row {row} is not in use"
        return shelf, place, self._shelves[shelf], self._used[shelf] - 1

    def _resize(self, shelf: int, rows: int) -> None:
        old, size = self._shelves[shelf], list(self._shelves[shelf].shape)
        size[2] = rows
        with torch.inference_mode(False):  # a shelf made in inference mode could not be written outside of it
            new = _zeros(size, old)
        new[:, :, : self._used[shelf]] = old[:, :, : self._used[shelf]]
        self._shelves[shelf], self._written[shelf] = new, self._used[shelf]


class PrivateSlots:
    """Slots of a decoder whose requests each have a cache of transformers: a row is a number, and fits any length.

    Args:
        begin: makes an empty cache.
        most: the longest length that can be asked for.
        position: bytes of a position at most.
    """

    def __init__(self, begin: Callable[[], Any], *, most: int, position: int):
        self._begin, self._most, self._position = begin, most, position
        self._states: dict[int, Any] = {}
        self._rows = 0

    @property
    def used(self) -> int:
        return len(self._states)

    @property
    def bytes(self) -> int:
        """Bytes that are allocated."""
        layers = (vars(layer).values() for states in self._states.values() for layer in states.layers)
        return sum(value.nbytes for values in layers for value in values if isinstance(value, Tensor))

    def cost(self, length: int) -> int:
        return length * self._position

    def fit(self, _longest: int, _count: int) -> None:
        """Do nothing: a cache of transformers grows by itself."""

    def capacity(self, _row: int) -> int:
        return self._most

    def take(self, _length: int) -> int:
        self._rows += 1
        self._states[self._rows] = self._begin()
        return self._rows

    def free(self, *rows: int) -> dict[int, int]:
        for row in rows:
            del self._states[row]
        return {}

    def save(self, row: int, _length: int, _start: int = 0) -> Saved:
        return Saved(self._states[row])

    def load(self, row: int, saved: Saved, _start: int = 0) -> None:
        self._states[row] = saved.data

    def view(self, _layout: BatchLayout, rows: Sequence[int], *, aligned: bool = False) -> Any:
        """Return the cache of the one request of a forward."""
        (row,) = rows
        return self._states[row]


def _zeros(size: list[int], like: Tensor) -> Tensor:
    """Return zeros; on a CPU they are the operating system's, which have no memory until they are written, nor take time."""
    if like.device.type != "cpu" or not prod(size):
        return like.new_zeros(size)
    try:
        buffer = np.zeros(prod(size) * like.dtype.itemsize, dtype=np.uint8)
    except MemoryError as error:
        raise RuntimeError(str(error)) from error  # as torch's own allocators do
    return torch.from_numpy(buffer).view(like.dtype).view(size)


class View:
    """The ``KeyValues`` of one forward, with the attention mask of its queries."""

    def __init__(self, data: Tensor, layout: BatchLayout, rows: Sequence[int], starts: list[int], aligned: bool):
        self._data, self._aligned, self._rows, self._starts = data, aligned, list(rows), starts
        first, count, columns = self._rows[0], len(self._rows), layout.positions.shape[1]
        self._span = slice(first, first + count) if self._rows == list(range(first, first + count)) else None
        self._start = self._starts[0] if self._starts.count(self._starts[0]) == count else None
        self._fresh = self._start == 0
        self._length = columns if self._fresh else max(piece.start + piece.count for piece in layout.pieces)
        self._place: tuple[Tensor, Tensor] | None = None
        self._positions = layout.positions
        # Padding is written behind a shorter piece, where its next tokens will be, unless that is behind the end of the row.
        self._real = layout.real if max(starts) + columns > data.shape[4] else None

    @property
    def causal(self) -> bool:
        """True if no mask is needed: single tokens, all at one position, or pieces that all begin with their sequences.

        A padded query then attends to keys of its own row before it, of which nothing is read.
        """
        return self._fresh or (self._start is not None and self._positions.shape[1] == 1)

    @property
    def allowed(self) -> Bool[Tensor, "b 1 t S"]:
        """Attention mask: the keys that each query may attend to.

        Padding is at position 0 and attends to the first key, because a query without any key would be NaN.
        """
        keys = torch.arange(self._length, device=self._data.device)
        return (keys <= self._positions[..., None])[:, None]

    def update(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        keys, values = self._data[layer]
        if not key.shape[3] == value.shape[3] == keys.shape[3]:
            keys, values = keys[..., : key.shape[3]], values[..., : value.shape[3]]
        self._write(keys, key)
        self._write(values, value)
        if self._fresh:
            return key, value
        return self._read(keys), self._read(values)

    def _write(self, into: Tensor, new: Tensor) -> None:
        if self._real is not None:
            rows, columns = self._index(new.shape[2])
            into[rows[:, None].expand_as(columns)[self._real], :, columns[self._real]] = new.transpose(1, 2)[self._real]
            return
        if self._start is not None and self._span is not None:
            into[self._span, :, self._start : self._start + new.shape[2]] = new
            return
        rows, columns = self._index(new.shape[2])
        into[rows[:, None], :, columns] = new.transpose(1, 2)

    def _read(self, stored: Tensor) -> Tensor:
        values = stored[self._span, :, : self._length] if self._span is not None else stored[self._index(1)[0], :, : self._length]
        return values.clone(memory_format=torch.contiguous_format) if self._aligned else values

    def _index(self, columns: int) -> tuple[Tensor, Tensor]:
        """Return the rows and the positions that each of them writes."""
        if self._place is None:
            device = self._data.device
            starts = torch.tensor(self._starts, device=device)[:, None]
            self._place = torch.tensor(self._rows, device=device), starts + torch.arange(columns, device=device)
        return self._place


@dataclass
class Acts:
    """The interventions that acted on a sequence, by position: steering from a position on, and patches at single positions.

    Both are in order of position.
    """

    starts: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    patches: list[tuple[int, bytes]] = field(default_factory=list)

    def steered(self, start: int, digest: bytes) -> None:
        """Record that steering has content ``digest`` from position ``start`` on (``b""``: none); starts must be ascending."""
        if (self.digests[-1] if self.digests else b"") != digest:
            self.starts.append(start)
            self.digests.append(digest)

    def fingerprint(self, start: int, stop: int) -> bytes:
        """Return the interventions on positions ``start .. stop - 1`` as bytes; ``b""`` if there were none."""
        fragments: list[bytes] = []
        first = max(bisect_right(self.starts, start) - 1, 0)
        for i in range(first, len(self.starts)):
            if self.starts[i] >= stop:
                break
            ends = self.starts[i + 1] if i + 1 < len(self.starts) else stop
            if self.digests[i] and ends > start:
                fragments.append(
                    b"s%d:" % (max(self.starts[i], start) - start) + b"%d:" % (min(ends, stop) - start) + self.digests[i]
                )
        few = self.patches[bisect_left(self.patches, (start,)) : bisect_left(self.patches, (stop,))]
        fragments += [b"p%d:" % (position - start) + digest for position, digest in few]
        return b"|".join(fragments)


class Prefixes:
    """Prefix cache: blocks of ``block`` tokens within ``budget`` bytes. ``hits`` and ``misses`` count blocks.

    The least recently used block is evicted first, and the end of a chain before its beginning: a block is useless without those
    before it.
    """

    def __init__(self, block: int, budget: int):
        self.block, self.budget = block, budget
        self.bytes = self.hits = self.misses = 0
        self._blocks: OrderedDict[bytes, Saved] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def extend(self, keys: list[bytes], tokens: Sequence[int], acts: Acts, blocks: int, prompt: int | None = None) -> None:
        """Append to ``keys`` until it names the sequence's first ``blocks`` blocks.

        With ``prompt``, the prompt's length, blocks computed with different cuts (prompts in blocks, generated tokens one by one)
        get different keys: their values may differ in the last bit.
        """
        for i in range(len(keys), blocks):
            start, stop = i * self.block, (i + 1) * self.block
            data = hashlib.sha256(keys[-1] if keys else b"")
            data.update(array("q", tokens[start:stop]).tobytes())
            data.update(acts.fingerprint(start, stop))
            if prompt is not None:
                data.update(b"%d" % max(min(prompt - start, self.block), 0))
            keys.append(data.digest())

    def find(self, keys: Sequence[bytes]) -> list[Saved]:
        """Return the longest cached chain of blocks from the first."""
        count = next((i for i, key in enumerate(keys) if key not in self._blocks), len(keys))
        for key in reversed(keys[:count]):
            self._blocks.move_to_end(key)
        self.hits += count
        self.misses += len(keys) - count
        return [self._blocks[key] for key in keys[:count]]

    def keep(self, keys: Sequence[bytes], copy: Callable[[int], Saved]) -> None:
        """Store the chain of blocks named by ``keys``, as far as it fits; ``copy(i)`` is called for blocks that are not cached."""
        for i in reversed(range(len(keys))):
            if keys[i] in self._blocks:
                self._blocks.move_to_end(keys[i])
                continue
            self._blocks[keys[i]] = block = copy(i)
            self.bytes += block.data.nbytes
            while self.bytes > self.budget:
                self.bytes -= self._blocks.popitem(last=False)[1].data.nbytes

    def clear(self) -> None:
        self._blocks.clear()
        self.bytes = 0
