"""Which cells run in one forward: a pure function of where they enter the model and of what a forward costs.

A cell that is patched at position p and enters at block L needs the blocks from L on, over the columns p .. S-1. The cells of a
group start from the lowest of their positions and come in one by one, each at its own block, so that a block is called once for
all that are in by then. n neighbours waste some n^2 / 2 columns; a group more costs the overhead of its blocks' calls. Groups are
cut, in order of position, where the sum over groups of

    sum over cells of flops(columns, entry)  +  overhead * (blocks that run)

is least, by a dynamic programme.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Costs:
    """What a forward over sequences of ``length`` tokens costs, in FLOPs.

    ``column`` is a block's for one token, of which ``mlp`` the MLP's (only the scored column goes through the last one); ``pair``
    is that of a query and a key in one block; ``unembed`` of one token; ``overhead`` is a block's call, as the FLOPs of its time.
    ``most`` limits the tokens of a group, and a quarter of the keys, which are copied for each of its cells.
    """

    layers: int
    length: int
    column: float
    mlp: float
    pair: float
    unembed: float
    overhead: float
    most: int

    def flops(self, columns: int, entry: int) -> float:
        """Of one cell that enters at block ``entry`` with so many columns."""
        return columns * self.slope(entry) + self.mlp + self.unembed

    def slope(self, entry: int) -> float:
        """What a column more costs a cell."""
        return (self.column + self.pair * self.length) * (self.layers - entry) - self.mlp

    @property
    def whole(self) -> float:
        """Of a forward over the whole sequence, unembedded at each token: what a cell costs where nothing is shared."""
        return self.length * (self.layers * (self.column + self.pair * self.length) + self.unembed)

    def rows(self, columns: int) -> int:
        """How many cells a group may have."""
        return max(1, min(self.most // columns, 4 * self.most // self.length))


@dataclass(frozen=True)
class Group:
    """Cells (by number, in the order in which they enter) that run together over the columns from ``start`` on."""

    start: int
    cells: tuple[int, ...]


def plan(places: Sequence[tuple[int, int]], costs: Costs, batch: int | None = None) -> list[Group]:
    """Groups of the cells whose ``(entry, position)`` are ``places``; ``batch`` is the most cells of a group."""
    if batch is not None and batch < 1:
        raise ValueError(f"a batch of {batch} cells cannot be: choose at least 1, or leave it out")
    cells = sorted(range(len(places)), key=lambda cell: places[cell][::-1])
    cuts = cut([places[cell] for cell in cells], costs, batch)
    return [
        Group(places[cells[low]][1], tuple(sorted(cells[low:high], key=lambda cell: places[cell][0])))
        for low, high in zip(cuts, [*cuts[1:], len(cells)])
    ]


def cut(places: Sequence[tuple[int, int]], costs: Costs, batch: int | None) -> list[int]:
    """Where to cut cells in order of position: the first cell of every group. The sum of costs is the least there is."""
    entries, columns = np.array([entry for entry, _ in places]), costs.length - np.array([position for _, position in places])
    slopes = np.concatenate(([0.0], np.cumsum([costs.slope(int(entry)) for entry in entries])))
    limits = np.minimum([costs.rows(int(t)) for t in columns], batch or len(columns))  # which grow with the position
    best, before = np.zeros(len(columns) + 1), np.zeros(len(columns) + 1, dtype=int)
    for high in range(1, len(columns) + 1):
        low = np.arange(max(0, high - limits[high - 1]), high)
        low = low[high - low <= limits[low]]
        first = np.minimum.accumulate(entries[low[0] : high][::-1])[::-1]
        total = best[low] + columns[low] * (slopes[high] - slopes[low]) + costs.overhead * (costs.layers - first)
        before[high] = low[total.argmin()]
        best[high] = total.min()
    cuts, high = [], len(columns)
    while high:
        high = int(before[high])
        cuts.append(high)
    return cuts[::-1]


def spent(groups: Sequence[Group], places: Sequence[tuple[int, int]], costs: Costs) -> float:
    """FLOPs of the groups' forwards."""
    return float(sum(costs.flops(costs.length - group.start, places[cell][0]) for group in groups for cell in group.cells))


def needed(places: Sequence[tuple[int, int]], costs: Costs) -> float:
    """FLOPs of the cells one by one, each from its own position: the floor of ``spent``."""
    return float(sum(costs.flops(costs.length - position, entry) for entry, position in places))
