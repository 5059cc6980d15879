"""Lays out one forward's steering: from what acts on each piece of a layout to the tensors of every site.

What is summed or multiplied in several steps is ordered by what it is, never by where it stands in the batch: the bits of a request
do not depend on its neighbours.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor

from mi_route2.interventions.buffers import Bound, Cells, Gate, SiteStep, Spread, Term, Watch, Watched
from mi_route2.interventions.layout import Layout
from mi_route2.interventions.rows import Band, Table
from mi_route2.sites import Site

Lines = tuple[Tensor | None, Tensor, Tensor | None, Tensor | None]
"""Of a static term: its cells, different lines and their scales (``None``: all 1), and which of these each cell has."""
QUARANTINE = {"close": (1.0, -1.0), "open": (0.0, 1.0)}
"""``(a, b)`` of the quarantine's factor ``a + b * g``."""


@dataclass(frozen=True)
class Acting:
    """What acts on a piece: the row and its scale in each phase, the row's clamps, the request's monitors."""

    rows: tuple[int, int]
    scales: tuple[float, float]
    bands: tuple[Mapping[Site, tuple[Band, ...]], Mapping[Site, tuple[Band, ...]]]
    watches: tuple[Watch, ...]


@dataclass
class Slot:
    """Monitors of different pieces that gate the same, so that they share one factor a cell."""

    number: int
    members: list[tuple[int, Watch, range, tuple[float, float]]] = field(default_factory=list)
    """Piece, monitor, the cells that it gates, ``(a, b)`` of its factor."""
    used: bool = False

    @property
    def watch(self) -> Watch:
        """One of them: they gate the same."""
        return self.members[0][1]


class Planner:
    """One forward. ``acting`` has what acts on each piece, ``tier`` the dynamic vectors, already times their gain."""

    def __init__(self, layout: Layout, acting: Sequence[Acting], tables: Mapping[Site, Table], tier: Mapping[Site, Tensor]):
        self.cells, self.acting, self.tables, self.tier = Cells(layout), acting, tables, tier
        self.steps: dict[Site, SiteStep] = {}
        self.gating: list[Slot] = []
        self.quarantining: list[Slot] = []
        self._shared: dict[tuple[tuple[int, int, int, float], ...], Lines] = {}

    def run(self) -> dict[Site, SiteStep]:
        """Every site at which something acts or is watched in this forward."""
        self._assign()
        for site in self.tables:
            self._static(site)
        for site, values in self.tier.items():
            self._dynamic(site, values)
        for slot in self.gating:
            self._own(slot)
        for slot in self.quarantining:
            slot.used = True
            for site in slot.watch.quarantined:
                self._step(site).quarantine += (slot.number,)
        self._clamps()
        self._watches()
        return self.steps

    @property
    def slots(self) -> int:
        """How many gates a forward has."""
        return len(self.gating) + len(self.quarantining)

    def _step(self, site: Site) -> SiteStep:
        return self.steps.setdefault(site, SiteStep())

    def _assign(self) -> None:
        """A slot for each way to gate. The second monitor of a piece that gates alike has another one."""
        gating: dict[tuple[object, ...], list] = {}
        quarantining: dict[tuple[object, ...], list] = {}
        for i, acting in enumerate(self.acting):
            prompt, generated = self.cells.phases[i]
            for slots in (gating, quarantining):
                seen: dict[tuple[object, ...], int] = {}
                for watch in acting.watches:
                    monitor = watch.monitor
                    if slots is gating:
                        reach = (monitor.site, repr(monitor.gates), monitor.gate_rows)
                        cells, factor = generated, monitor.factor
                    elif monitor.quarantine is not None:
                        reach = (monitor.site, repr(sorted(watch.quarantined)))
                        cells = range(prompt.start, generated.stop) if monitor.prompt else generated
                        factor = QUARANTINE[monitor.quarantine]
                    else:
                        continue
                    seen[reach] = seen.get(reach, 0) + 1
                    if cells:
                        slots.setdefault((*reach, seen[reach]), []).append((i, watch, cells, factor))
        number = 0
        for slots, into in ((gating, self.gating), (quarantining, self.quarantining)):
            for _, members in sorted(slots.items()):
                into.append(Slot(number, members))
                number += 1

    def _gates(self, site: Site, pieces: Iterable[int], rows: bool) -> tuple[int, ...]:
        """The slots that gate, at ``site``, a term of the generated tokens of ``pieces``."""
        found, pieces = [], set(pieces)
        for slot in self.gating:
            monitor = slot.watch.monitor
            if monitor.gating(site) and (monitor.gate_rows or not rows) and any(i in pieces for i, *_ in slot.members):
                slot.used = True
                found.append(slot.number)
        return tuple(found)

    # Terms, in the order of the formula

    def _static(self, site: Site) -> None:
        table, picked = self.tables[site], []
        for i, acting in enumerate(self.acting):
            for decode in (0, 1):
                line, scale = 2 * acting.rows[decode] + decode, acting.scales[decode]
                if line in table.acts and scale != 0 and self.cells.phases[i][decode]:
                    picked.append((i, decode, line, scale))
        if picked:
            cells, lines, scales, which = self._lines(tuple(picked), table.values.dtype)
            values = table.values.index_select(0, lines)
            values = values if scales is None else values * scales[:, None]
            gates = self._gates(site, (i for i, decode, _, _ in picked if decode), rows=True)
            self._step(site).terms.append(Term(cells, Spread(values, which), gates))

    def _lines(self, picked: tuple[tuple[int, int, int, float], ...], kind: torch.dtype) -> Lines:
        """Most sites have the same."""
        if picked not in self._shared:
            ranges = tuple(self.cells.phases[i][decode] for i, decode, _, _ in picked)
            places: dict[tuple[int, float], int] = {}
            which = [places.setdefault((line, scale), len(places)) for _, _, line, scale in picked]
            scales = [scale for _, scale in places]
            self._shared[picked] = (
                self.cells.index(ranges),
                torch.tensor([line for line, _ in places], device=self.cells.device),
                None if set(scales) == {1.0} else torch.tensor(scales, dtype=kind, device=self.cells.device),
                self.cells.which(ranges, which),
            )
        return self._shared[picked]

    def _dynamic(self, site: Site, values: Tensor) -> None:
        pieces = [i for i, (_, generated) in enumerate(self.cells.phases) if generated]
        if pieces:
            cells = self.cells.index(tuple(self.cells.phases[i][1] for i in pieces))
            self._step(site).terms.append(Term(cells, Spread(values[None], None), self._gates(site, pieces, rows=False)))

    def _own(self, slot: Slot) -> None:
        """The vectors that the monitors of a slot bring."""
        for site in sorted({site for _, watch, *_ in slot.members for site in watch.adds}):
            here = [(cells, watch.adds[site]) for _, watch, cells, _ in slot.members if site in watch.adds]
            ranges = tuple(cells for cells, _ in here)
            slot.used = True
            values = Spread.of(self.cells, ranges, [vector for _, vector in here])
            self._step(site).terms.append(Term(self.cells.index(ranges), values, (slot.number,)))

    def _clamps(self) -> None:
        found: dict[tuple[Site, int], list[tuple[range, Band]]] = {}
        for i, acting in enumerate(self.acting):
            for cells, bands in zip(self.cells.phases[i], acting.bands, strict=True):
                for site, several in bands.items() if cells else ():
                    for k, band in enumerate(several):
                        found.setdefault((site, k), []).append((cells, band))
        for (site, _), here in sorted(found.items(), key=lambda item: item[0]):
            ranges, bands = tuple(cells for cells, _ in here), [band for _, band in here]
            unit, kind = Spread.of(self.cells, ranges, [band.unit for band in bands]), bands[0].unit.dtype
            low, high, strength = (
                self.cells.each(ranges, [getattr(band, name) for band in bands], kind) for name in ("low", "high", "strength")
            )
            self._step(site).bounds.append(Bound(self.cells.index(ranges), unit, low, high, strength))

    # Monitors

    def _watches(self) -> None:
        entries: dict[Site, list[tuple[int, Watch, range]]] = {}
        for i, acting in enumerate(self.acting):
            prompt, generated = self.cells.phases[i]
            for watch in acting.watches:
                entries.setdefault(watch.monitor.site, []).append((i, watch, range(prompt.start, generated.stop)))
        for site, here in entries.items():
            self._step(site).watched = self._watched(site, tuple(here))

    def _watched(self, site: Site, entries: tuple[tuple[int, Watch, range], ...]) -> Watched:
        ranges = tuple(cells for *_, cells in entries)
        watches = [watch for _, watch, _ in entries]
        kind, shared = watches[0].probe.dtype, {watch.monitor.probe: watch.probe for watch in watches}
        probes = Spread.of(self.cells, ranges, [shared[watch.monitor.probe] for watch in watches])
        threshold = self.cells.each(ranges, [watch.monitor.threshold for watch in watches], kind)
        sharpness = self.cells.each(ranges, [watch.monitor.sharpness for watch in watches], kind)
        start, total = {}, 0
        for i, watch, cells in entries:
            start[i, watch.name] = total - cells.start
            total += len(cells)
        slots = [slot for slot in (*self.gating, *self.quarantining) if slot.used and slot.watch.monitor.site == site]
        gates = tuple(self._gate(slot, start, total, kind) for slot in slots)
        return Watched(site, entries, self.cells.index(ranges), probes, threshold, sharpness, gates)

    def _gate(self, slot: Slot, start: Mapping[tuple[int, str], int], total: int, kind: torch.dtype) -> Gate:
        """``start`` brings a cell of a piece to its place among the site's scores."""
        ranges = tuple(cells for _, _, cells, _ in slot.members)
        shift = [start[i, watch.name] for i, watch, *_ in slot.members]
        order = list(chain.from_iterable(range(c.start + s, c.stop + s) for c, s in zip(ranges, shift, strict=True)))
        source = None if order == list(range(total)) else torch.tensor(order, device=self.cells.device)
        offset, slope = (self.cells.each(ranges, [factor[k] for *_, factor in slot.members], kind) for k in (0, 1))
        plain = all(factor == (0.0, 1.0) for *_, factor in slot.members)
        return Gate(slot.number, source, self.cells.index(ranges), None if plain else offset, slope)
