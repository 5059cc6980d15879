"""What a sweep asks of whoever runs the model: two runs that are recorded, and forwards with values put in."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mi_route2.hosts.base import Edit
from mi_route2.interventions.sweeps.plan import Costs, Group
from mi_route2.interventions.sweeps.targets import Target
from mi_route2.sites import Site


@dataclass(frozen=True, eq=False)
class Row:
    """One sequence of a forward: the corrupt run with ``values`` [p ...] put in at ``target`` and ``positions``, or as it is.

    ``place`` is the block where it enters, and its first column; a row without a target stands for any cell there.
    """

    place: tuple[int, int]
    target: Target | None = None
    positions: tuple[int, ...] = ()
    values: Tensor | None = None

    @property
    def head(self) -> int | None:
        """The target's."""
        return None if self.target is None else self.target.head


@dataclass(frozen=True, eq=False)
class Record:
    """A run: ``values`` of sites at the positions that were asked for, and the logits behind its last token."""

    values: Mapping[Site, Tensor]
    logits: Float[Tensor, " v"]


@runtime_checkable
class Forwards(Protocol):
    """How a sweep runs the model."""

    name: str

    def record(self, tokens: Sequence[int], sites: Sequence[Site], places: Sequence[int]) -> Record:
        """The values of ``sites`` at ``places`` in a run over ``tokens``."""
        ...

    def start(self, tokens: Sequence[int], sites: Sequence[Site], places: Sequence[int]) -> Record:
        """As ``record``, of the run that ``run`` goes on from."""
        ...

    def place(self, target: Target, position: int) -> tuple[int, int]:
        """The block where a cell enters, and its first column."""
        ...

    def costs(self) -> Costs:
        """What a group of cells costs, and how large it may be."""
        ...

    def run(self, group: Group, rows: Sequence[Row]) -> Float[Tensor, "n v"]:
        """The logits behind the last token of each row."""
        ...


def selecting(into: dict[Site, Tensor], site: Site, index: Tensor) -> Edit:
    """An edit that keeps the first sequence's values at the positions ``index``."""
    return partial(_keep, into, site, index)


def _keep(into: dict[Site, Tensor], site: Site, index: Tensor, value: Tensor) -> None:
    into[site] = value.detach()[0].index_select(0, index)


def writing(rows: Sequence[Row], start: int, columns: int, apart: Callable[[Row], bool] = lambda _row: False) -> dict[Site, Edit]:
    """Edits that put the rows' values in, but those of rows ``apart``, in a forward over ``columns`` columns from ``start`` on."""
    by_site: dict[Site, list[int]] = defaultdict(list)
    for i, row in enumerate(rows):
        if row.target is not None and not apart(row):
            by_site[row.target.site].append(i)
    return {site: partial(_write, rows, numbers, start, columns) for site, numbers in by_site.items()}


def _write(rows: Sequence[Row], numbers: Sequence[int], start: int, columns: int, value: Tensor) -> Tensor:
    new = value.clone()
    lacking = columns - value.shape[1]  # behind the last block's attention there may be the last column alone
    for by_head in (False, True):
        some = [i for i in numbers if (rows[i].head is not None) == by_head]
        if some:
            put(new, rows, some, start + lacking)
    return new


def put(into: Tensor, rows: Sequence[Row], numbers: Sequence[int], start: int) -> None:
    """Writes the values of the rows ``numbers``, all by head or none, at their columns; the first column is position ``start``."""
    places = [(i, position - start, rows[i].head) for i in numbers for position in rows[i].positions]
    axes = list(zip(*places)) if places[0][2] is not None else list(zip(*places))[:2]
    values = [rows[i].values for i in numbers]
    new = torch.cat([value for value in values if value is not None])
    into[tuple(torch.tensor(axis, device=into.device) for axis in axes)] = new.to(into)


def with_idle(rows: list[Row], count: int, otherwise: tuple[int, int]) -> list[Row]:
    """``rows`` with ``count`` rows of the corrupt run as it is, each beside a cell and in its place, here and there."""
    if not rows:
        return [Row(otherwise)] * count
    found = sorted(rows, key=lambda row: row.place[::-1])  # groups are cut in order of position
    for i in np.linspace(0, len(rows) - 1, count).round().astype(int)[::-1]:
        found.insert(int(i), Row(found[i].place))
    return found
