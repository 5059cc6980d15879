"""Steering plan of one forward, made before it runs: its tokens, and for every site the operations and the tokens they act on."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mi_route2.sites import Site
from mi_route2.steering.specs import Monitor, Vector, attenuate, clamp, score, squash, term
from mi_route2.steering.table import Band, SiteTable, SteeringRows


class Piece(NamedTuple):
    """The tokens ``start .. start + count - 1`` of a request whose prompt has ``prompt`` tokens."""

    request: int
    start: int
    count: int
    prompt: int

    def phases(self, first: int) -> tuple[range, range]:
        """Return the indices of its prompt tokens and of its generated ones, if its tokens begin at index ``first``."""
        cut = first + min(max(self.prompt - self.start, 0), self.count)
        return range(first, cut), range(cut, first + self.count)


@dataclass(frozen=True)
class BatchLayout:
    """Layout of one forward over ``b`` pieces of at most ``t`` tokens.

    Padding is at position 0.
    """

    pieces: tuple[Piece, ...]
    positions: Int[Tensor, "b t"]

    @property
    def single(self) -> bool:
        """True if every row is one token, so that nothing is padded."""
        return self.positions.shape[1] == 1

    @cached_property
    def real(self) -> Bool[Tensor, "b t"]:
        """True at tokens that are not padding."""
        device, width = self.positions.device, self.positions.shape[1]
        counts = torch.tensor([piece.count for piece in self.pieces], device=device)
        return torch.arange(width, device=device) < counts[:, None]

    @staticmethod
    def of(pieces: Sequence[Piece], device: torch.device | str = "cpu") -> "BatchLayout":
        """Return the layout of ``pieces``; ``ValueError`` for no piece, two pieces of one request, or impossible numbers."""
        requests, starts, counts, prompts = zip(*pieces, strict=True) if pieces else ((), (), (), ())
        if len(set(requests)) < max(len(pieces), 1):
            raise ValueError("a layout needs at least one piece, and at most one of each request")
        if min(min(requests), min(starts)) < 0 or min(min(counts), min(prompts)) < 1:
            raise ValueError(f"pieces {pieces} are not valid: each needs at least one token, and no number may be negative")
        positions, width = np.array(starts, dtype=np.int64)[:, None], max(counts)  # by numpy, faster than torch for few numbers
        if width > 1:
            steps = np.arange(width)[None]
            positions = np.where(steps < np.array(counts)[:, None], positions + steps, 0)
        return BatchLayout(tuple(pieces), torch.as_tensor(positions, device=device))


@dataclass(frozen=True)
class CompiledMonitor:
    """Compiled monitor: its name in readings, its probe, its own vectors, and the quarantines that it gates."""

    name: str
    monitor: Monitor
    probe: Tensor
    adds: Mapping[Site, Tensor]
    quarantined: frozenset[Site]

    @property
    def sites(self) -> set[Site]:
        """The sites at which the monitor reads and acts."""
        return {self.monitor.site, *self.adds, *self.quarantined}

    @cached_property
    def off(self) -> frozenset[Site]:
        """Adapters that are switched off, at which nothing else may act: its gate is 1 at every token, whatever the model reads."""
        monitor = self.monitor
        if monitor.quarantine != "close" or not monitor.prompt or bool(self.probe.any()):
            return frozenset()
        always = squash(torch.zeros((), dtype=self.probe.dtype, device="cpu"), monitor.threshold, monitor.sharpness) == 1
        return self.quarantined if bool(always) else frozenset()


def gated(monitor: Monitor, adapters: Iterable[Site]) -> frozenset[Site]:
    """Return the quarantines that the monitor reaches, which it gates if it names none."""
    return frozenset(site for site in adapters if site.point == "quarantine_out" and monitor.reaches(site))


def watch_of(monitor: Monitor, name: str, rows: SteeringRows, adapters: tuple[Site, ...]) -> CompiledMonitor:
    """Compile a resolved ``monitor`` on the device of ``rows``; ``ValueError`` if a vector or a quarantine does not fit."""
    probe = Vector(monitor.probe)
    rows.demand_width(monitor.site, probe, "the probe")
    rows.demand_widths(monitor.adds)
    sums = monitor.sums if monitor.adds else {}
    rows.demand_finite(sums)
    if probe.data.dtype != rows.dtype:  # in its own type a vector is finite
        rows.demand_finite({monitor.site: probe.data})
    quarantined = frozenset[Site]()
    if monitor.quarantine is not None:
        there = gated(monitor, adapters)
        quarantined = there if monitor.quarantined is None else frozenset(monitor.quarantined)
        if not quarantined or not quarantined <= {*there, *(site for site in adapters if site.point == "kept_out")}:
            raise ValueError(
                f"the monitor at {monitor.site} shall {monitor.quarantine} a quarantine that does not exist; at its site or later "
                f"there are: {', '.join(map(str, sorted(there))) or 'none'}"
            )
    adds = {site: values.to(rows.device, rows.dtype) for site, values in sums.items()}
    return CompiledMonitor(name, monitor, probe.data.to(rows.device, rows.dtype), adds, quarantined)


def requarantined(watch: CompiledMonitor, adapters: tuple[Site, ...]) -> CompiledMonitor:
    """Return the monitor for the current quarantines; unchanged if it names its own, or if none is left."""
    monitor = watch.monitor
    there = gated(monitor, adapters)
    every = monitor.quarantine is not None and monitor.quarantined is None
    return replace(watch, quarantined=there) if every and there else watch


class Cells:
    """Cells of each piece in the flattened batch ``[b * t]``: its prompt tokens and its generated tokens."""

    def __init__(self, layout: BatchLayout):
        self.device, (rows, width) = layout.positions.device, layout.positions.shape
        self.count = rows * width
        self.phases = [piece.phases(row * width) for row, piece in enumerate(layout.pieces)]
        self._indices: dict[tuple[range, ...], Tensor | None] = {}

    def index(self, ranges: tuple[range, ...]) -> Tensor | None:
        """Return the cells of ``ranges`` in this order; ``None`` if that is every cell of the batch, in order."""
        if ranges not in self._indices:
            cells = list(chain.from_iterable(ranges))
            every = cells == list(range(self.count)) if len(cells) == self.count else False
            self._indices[ranges] = None if every else torch.tensor(cells, device=self.device)
        return self._indices[ranges]

    def each(self, ranges: Sequence[range], values: Sequence[float] | Sequence[int], dtype: torch.dtype) -> Tensor:
        """Expand one value per range to one value per cell; a tensor with a single value if all are equal."""
        if len(set(values)) == 1:
            return torch.tensor([values[0]], dtype=dtype, device=self.device)
        spread = chain.from_iterable([value] * len(cells) for value, cells in zip(values, ranges, strict=True))
        return torch.tensor(list(spread), dtype=dtype, device=self.device)

    def which(self, ranges: Sequence[range], places: Sequence[int]) -> Tensor | None:
        """Expand one index per range to one index per cell; ``None`` if all are equal, or if they number the cells."""
        if len(set(places)) == 1 or (list(places) == list(range(len(ranges))) and all(len(cells) == 1 for cells in ranges)):
            return None
        return self.each(ranges, places, torch.long)


KEPT = 256
"""Up to this number of cells, each has its own copy of its vector. More cells (of prompts) look their vectors up, because the plan
would otherwise be as large as activations."""


class VectorSpread:
    """Vectors over cells: ``which`` of ``vectors [m d]`` each cell has; ``None`` for one per cell in order, or one for all."""

    def __init__(self, vectors: Tensor, which: Tensor | None):
        small = which is not None and len(which) <= KEPT
        self.vectors = vectors.index_select(0, which) if which is not None and small else vectors
        self.which = None if small else which

    @staticmethod
    def of(cells: Cells, ranges: Sequence[range], vectors: Sequence[Tensor]) -> "VectorSpread":
        """Return one vector per range; a vector that is the same object is stored once."""
        distinct = {id(vector): vector for vector in vectors}
        places = {key: i for i, key in enumerate(distinct)}
        return VectorSpread(torch.stack(list(distinct.values())), cells.which(ranges, [places[id(vector)] for vector in vectors]))

    def to(self, dtype: torch.dtype) -> "VectorSpread":
        """Return a copy rounded to ``dtype``."""
        made = VectorSpread(term(self.vectors, dtype=dtype), None)
        made.which = self.which
        return made

    def rows(self) -> Tensor:
        """Return one row per cell, or one row for all cells."""
        return self.vectors if self.which is None else self.vectors.index_select(0, self.which)


class Term:
    """Vectors that are added in some cells."""

    def __init__(self, cells: Tensor | None, values: VectorSpread, gates: tuple[int, ...] = ()):
        self.cells, self.values, self.gates = cells, values, gates
        self._ready: VectorSpread | None = None

    def add(self, x: Tensor, gates: Sequence[Tensor | None]) -> Tensor:
        """Return ``x [cells width]`` with the vectors added, as a new tensor."""
        if self.gates:
            return self._gated(x, gates)
        ready = self._ready
        if ready is None or ready.vectors.dtype != x.dtype:
            ready = self._ready = self.values.to(x.dtype)
        if self.cells is None:
            return x + ready.rows()
        return x.index_copy(0, self.cells, x.index_select(0, self.cells) + ready.rows())

    def _gated(self, x: Tensor, gates: Sequence[Tensor | None]) -> Tensor:
        factor = None
        for slot in self.gates:
            here = _fired(gates[slot])
            here = here if self.cells is None else here.index_select(0, self.cells)
            factor = here if factor is None else factor * here
        assert factor is not None
        old = x if self.cells is None else x.index_select(0, self.cells)
        # A closed gate must not change a bit, but -0.0 + 0.0 would be 0.0.
        new = torch.where((factor == 0)[:, None], old, old + term(self.values.rows(), factor, dtype=x.dtype))
        return new if self.cells is None else x.index_copy(0, self.cells, new)


@dataclass(frozen=True)
class Bound:
    """The k-th clamp of some cells."""

    cells: Tensor | None
    unit: VectorSpread
    low: Tensor
    high: Tensor
    strength: Tensor

    def apply(self, x: Tensor) -> Tensor:
        if self.cells is None:
            return clamp(x, self.unit.rows(), self.low, self.high, self.strength)
        new = clamp(x.index_select(0, self.cells), self.unit.rows(), self.low, self.high, self.strength)
        return x.index_copy(0, self.cells, new)


@dataclass(frozen=True)
class SlotGate:
    """Factors ``offset + slope * g`` of some cells.

    ``source`` are indices into the site's scores, ``cells`` those of the batch (``None``: all). Without an offset the factors are
    ``g``.
    """

    slot: int
    source: Tensor | None
    cells: Tensor | None
    offset: Tensor | None
    slope: Tensor

    def factors(self, g: Tensor, count: int) -> Tensor:
        """Return one factor per cell, 1 for cells that are not gated."""
        factor = g if self.source is None else g.index_select(0, self.source)
        factor = factor if self.offset is None else self.offset + self.slope * factor
        if self.cells is None:
            return factor
        return torch.ones(count, dtype=g.dtype, device=g.device).index_copy(0, self.cells, factor)


@dataclass(frozen=True)
class Watched:
    """All monitors of a site. ``entries`` are piece, monitor and cells of the scores, in their order."""

    site: Site
    entries: tuple[tuple[int, CompiledMonitor, range], ...]
    cells: Tensor | None
    probes: VectorSpread
    threshold: Tensor
    sharpness: Tensor
    gates: tuple[SlotGate, ...]

    def scores(self, x: Tensor) -> Tensor:
        return score(x if self.cells is None else x.index_select(0, self.cells), self.probes.rows())

    def gate(self, scores: Tensor) -> Tensor:
        return squash(scores, self.threshold, self.sharpness)


def _fired(gate: Tensor | None) -> Tensor:
    if gate is None:
        raise RuntimeError("a gated site fired before its monitor: hook every site of sites(), in the model's own forward")
    return gate


@dataclass
class SiteStep:
    """Operations at a site, in the order in which they run: monitors, gates of the quarantine, steering, clamps."""

    watched: Watched | None = None
    quarantine: tuple[int, ...] = ()
    terms: list[Term] = field(default_factory=list)
    bounds: list[Bound] = field(default_factory=list)

    def run(self, h: Tensor, forward: "ForwardState") -> Tensor:
        """Return ``h`` after all operations; ``h`` itself if nothing changes it."""
        if h.shape[:2] != forward.shape:
            raise ValueError(
                f"a value of shape {list(h.shape)} in a forward over {list(forward.shape)} tokens: begin with its layout"
            )
        x = flat = h.reshape(forward.count, -1)
        if self.watched is not None:  # before the steering of this site, which the score may gate
            scores = self.watched.scores(flat)
            forward.scores.append((self.watched, scores))
            if self.watched.gates:
                g = self.watched.gate(scores)
                for gate in self.watched.gates:
                    forward.gates[gate.slot] = gate.factors(g, forward.count)
        for slot in self.quarantine:
            x = attenuate(x, _fired(forward.gates[slot]))
        for summand in self.terms:
            x = summand.add(x, forward.gates)
        for bound in self.bounds:
            x = bound.apply(x)
        return h if x is flat else x.view(h.shape)


class ForwardState:
    """State of one forward: gate factors, monitor scores, and sites that fired."""

    def __init__(self, shape: torch.Size, slots: int):
        self.shape, self.count = shape, shape.numel()
        self.gates: list[Tensor | None] = [None] * slots
        self.scores: list[tuple[Watched, Tensor]] = []
        self.fired: set[Site] = set()


Lines = tuple[Tensor | None, Tensor, Tensor | None, Tensor | None]
"""Lines of a static term: its cells, the distinct lines and their scales (``None``: all 1), and the line of each cell."""
QUARANTINE = {"close": (1.0, -1.0), "open": (0.0, 1.0)}
"""Coefficients ``(a, b)`` of the quarantine's factor ``a + b * g``."""


@dataclass(frozen=True)
class Acting:
    """Steering of a piece: the row and its scale in each phase, the row's clamps, the request's monitors.

    The vectors of a ``banked`` piece are added by ``VectorBanks``, and are no part of the plan.
    """

    rows: tuple[int, int]
    scales: tuple[float, float]
    bands: tuple[Mapping[Site, tuple[Band, ...]], Mapping[Site, tuple[Band, ...]]]
    watches: tuple[CompiledMonitor, ...]
    banked: bool = False

    @property
    def off(self) -> frozenset[Site]:
        """The adapters at which nothing acts."""
        return frozenset[Site]().union(*(watch.off for watch in self.watches))


@dataclass
class GateSlot:
    """Monitors of different pieces that gate the same sites, so that they share one tensor of factors."""

    number: int
    members: list[tuple[int, CompiledMonitor, range, tuple[float, float]]] = field(default_factory=list)
    """Piece, monitor, the cells that it gates, and the coefficients ``(a, b)`` of its factor."""
    used: bool = False

    @property
    def watch(self) -> CompiledMonitor:
        """The first monitor, as a representative: all gate the same sites."""
        return self.members[0][1]


class Planner:
    """Planner of one forward.

    ``acting`` is the steering of each piece, and ``tier`` the dynamic vectors, already multiplied by their gain.
    """

    def __init__(
        self, layout: BatchLayout, acting: Sequence[Acting], tables: Mapping[Site, SiteTable], tier: Mapping[Site, Tensor]
    ):
        self.cells, self.acting, self.tables, self.tier = Cells(layout), acting, tables, tier
        self.off = [steering.off for steering in acting]
        self.steps: dict[Site, SiteStep] = {}
        self.gating: list[GateSlot] = []
        self.quarantining: list[GateSlot] = []
        self._shared: dict[tuple[tuple[int, int, int, float], ...], Lines] = {}

    def run(self) -> dict[Site, SiteStep]:
        """Return the operations of every site that is steered or monitored in this forward."""
        self._assign()
        for site in self.tables:
            self._static(site)
        for site, values in self.tier.items():
            self._dynamic(site, values)
        for slot in self.gating:
            self._monitor_vectors(slot)
        for slot in self.quarantining:
            slot.used = True
            for site in slot.watch.quarantined:
                self._step(site).quarantine += (slot.number,)
        self._clamps()
        self._watches()
        return self.steps

    @property
    def slots(self) -> int:
        """Number of gates in a forward."""
        return len(self.gating) + len(self.quarantining)

    def _step(self, site: Site) -> SiteStep:
        return self.steps.setdefault(site, SiteStep())

    def _assign(self) -> None:
        """Assign a slot to each way of gating; a second monitor of a piece that gates the same sites gets another slot."""
        gating, quarantining = dict[tuple, list](), dict[tuple, list]()
        for i, acting in enumerate(self.acting):
            prompt, generated = self.cells.phases[i]
            seen: dict[tuple, int] = {}
            for watch in acting.watches:
                monitor = watch.monitor
                reach: tuple = monitor.site, repr(monitor.gates), monitor.gate_rows
                ways = [(gating, reach, generated, monitor.factor)]
                if monitor.quarantine is not None:
                    cells = range(prompt.start, generated.stop) if monitor.prompt else generated
                    reach = monitor.site, repr(sorted(watch.quarantined))
                    ways.append((quarantining, reach, cells, QUARANTINE[monitor.quarantine]))
                for slots, reach, cells, factor in ways:
                    seen[reach] = seen.get(reach, 0) + 1
                    if cells:
                        slots.setdefault((*reach, seen[reach]), []).append((i, watch, cells, factor))
        # by what they gate and not by who comes first: a request's factors are then multiplied in one order in every batch
        ordered = [members for slots in (gating, quarantining) for _, members in sorted(slots.items())]
        numbered = [GateSlot(number, members) for number, members in enumerate(ordered)]
        self.gating, self.quarantining = numbered[: len(gating)], numbered[len(gating) :]

    def _gates(self, site: Site, pieces: Iterable[int], rows: bool) -> tuple[int, ...]:
        """Return the slots that gate, at ``site``, a term of the generated tokens of ``pieces``."""
        numbers, pieces = [], set(pieces)
        for slot in self.gating:
            monitor = slot.watch.monitor
            if monitor.gating(site) and (monitor.gate_rows or not rows) and any(i in pieces for i, *_ in slot.members):
                slot.used = True
                numbers.append(slot.number)
        return tuple(numbers)

    # Terms, in the order of the formula

    def _static(self, site: Site) -> None:
        table, picked = self.tables[site], []
        for i, acting in enumerate(self.acting):
            for decode in () if acting.banked else (0, 1):
                line, scale = 2 * acting.rows[decode] + decode, acting.scales[decode]
                if line in table.acts and scale != 0 and self.cells.phases[i][decode] and site not in self.off[i]:
                    picked.append((i, decode, line, scale))
        if picked:
            cells, lines, scales, which = self._lines(tuple(picked), table.values.dtype)
            values = table.values.index_select(0, lines)
            values = values if scales is None else values * scales[:, None]
            gates = self._gates(site, (i for i, decode, _, _ in picked if decode), rows=True)
            self._step(site).terms.append(Term(cells, VectorSpread(values, which), gates))

    def _lines(self, picked: tuple[tuple[int, int, int, float], ...], dtype: torch.dtype) -> Lines:
        """Return the lines of a static term, computed once for all sites that share them."""
        if picked not in self._shared:
            ranges = tuple(self.cells.phases[i][decode] for i, decode, _, _ in picked)
            places: dict[tuple[int, float], int] = {}
            which = [places.setdefault((line, scale), len(places)) for _, _, line, scale in picked]
            scales = [scale for _, scale in places]
            self._shared[picked] = (
                self.cells.index(ranges),
                torch.tensor([line for line, _ in places], device=self.cells.device),
                None if set(scales) == {1.0} else torch.tensor(scales, dtype=dtype, device=self.cells.device),
                self.cells.which(ranges, which),
            )
        return self._shared[picked]

    def _dynamic(self, site: Site, values: Tensor) -> None:
        planned = (i for i, acting in enumerate(self.acting) if not acting.banked)
        pieces = [i for i in planned if self.cells.phases[i][1] and site not in self.off[i]]
        if pieces:
            cells = self.cells.index(tuple(self.cells.phases[i][1] for i in pieces))
            self._step(site).terms.append(Term(cells, VectorSpread(values[None], None), self._gates(site, pieces, rows=False)))

    def _monitor_vectors(self, slot: GateSlot) -> None:
        """Add the monitors' own vectors of a slot."""
        for site in sorted({site for i, watch, *_ in slot.members for site in watch.adds.keys() - self.off[i]}):
            here = [(cells, watch.adds[site]) for i, watch, cells, _ in slot.members if site in watch.adds.keys() - self.off[i]]
            ranges = tuple(cells for cells, _ in here)
            slot.used = True
            values = VectorSpread.of(self.cells, ranges, [vector for _, vector in here])
            self._step(site).terms.append(Term(self.cells.index(ranges), values, (slot.number,)))

    def _clamps(self) -> None:
        by_site: dict[tuple[Site, int], list[tuple[range, Band]]] = {}
        for i, acting in enumerate(self.acting):
            for cells, bands in zip(self.cells.phases[i], acting.bands, strict=True):
                for site, several in bands.items() if cells else ():
                    if site in self.off[i]:
                        continue
                    # a request's clamps act one after another, so only the k-th ones of all requests run together
                    for k, band in enumerate(several):
                        by_site.setdefault((site, k), []).append((cells, band))
        for (site, _), here in sorted(by_site.items(), key=lambda item: item[0]):
            ranges, bands = tuple(cells for cells, _ in here), [band for _, band in here]
            unit, dtype = VectorSpread.of(self.cells, ranges, [band.unit for band in bands]), bands[0].unit.dtype
            low, high, strength = (
                self.cells.each(ranges, [getattr(band, name) for band in bands], dtype) for name in ("low", "high", "strength")
            )
            self._step(site).bounds.append(Bound(self.cells.index(ranges), unit, low, high, strength))

    # Monitors

    def _watches(self) -> None:
        entries: dict[Site, list[tuple[int, CompiledMonitor, range]]] = {}
        for i, acting in enumerate(self.acting):
            prompt, generated = self.cells.phases[i]
            for watch in acting.watches:
                entries.setdefault(watch.monitor.site, []).append((i, watch, range(prompt.start, generated.stop)))
        for site, here in entries.items():
            self._step(site).watched = self._watched(site, tuple(here))

    def _watched(self, site: Site, entries: tuple[tuple[int, CompiledMonitor, range], ...]) -> Watched:
        ranges = tuple(cells for *_, cells in entries)
        watches = [watch for _, watch, _ in entries]
        # each request compiled a tensor of its own from the same probe; ``VectorSpread`` stores a vector once if it is one object
        dtype, shared = watches[0].probe.dtype, {watch.monitor.probe: watch.probe for watch in watches}
        probes = VectorSpread.of(self.cells, ranges, [shared[watch.monitor.probe] for watch in watches])
        threshold = self.cells.each(ranges, [watch.monitor.threshold for watch in watches], dtype)
        sharpness = self.cells.each(ranges, [watch.monitor.sharpness for watch in watches], dtype)
        start, total = {}, 0
        for i, watch, cells in entries:
            start[i, watch.name] = total - cells.start
            total += len(cells)
        slots = [slot for slot in (*self.gating, *self.quarantining) if slot.used and slot.watch.monitor.site == site]
        gates = tuple(self._gate(slot, start, total, dtype) for slot in slots)
        return Watched(site, entries, self.cells.index(ranges), probes, threshold, sharpness, gates)

    def _gate(self, slot: GateSlot, start: Mapping[tuple[int, str], int], total: int, dtype: torch.dtype) -> SlotGate:
        """Return the gate of a slot; ``start`` maps a cell of a piece to its index among the site's scores."""
        ranges = tuple(cells for _, _, cells, _ in slot.members)
        shift = [start[i, watch.name] for i, watch, *_ in slot.members]
        order = list(chain.from_iterable(range(c.start + s, c.stop + s) for c, s in zip(ranges, shift, strict=True)))
        source = None if order == list(range(total)) else torch.tensor(order, device=self.cells.device)
        offset, slope = (self.cells.each(ranges, [factor[k] for *_, factor in slot.members], dtype) for k in (0, 1))
        plain = all(factor == (0.0, 1.0) for *_, factor in slot.members)
        return SlotGate(slot.number, source, self.cells.index(ranges), None if plain else offset, slope)


def digest(acting: Acting, rows: SteeringRows, tier: Mapping[Site, Tensor], gain: float, decode: bool) -> bytes:
    """Return a digest of all steering of a prompt token, or a generated one; ``b""`` if nothing acts.

    It includes a row's scale, the tier's gain and the monitors that gate something, but not monitors that only watch.
    """
    row, scale = acting.rows[decode], acting.scales[decode]
    effects = [rows.fingerprint(row, decode, scale)]
    dynamic = tier if decode and gain else {}
    for site, values in sorted(dynamic.items()):
        effects.append(f"tier {site} {gain!r} ".encode() + values.cpu().view(torch.uint8).numpy().tobytes())
    line = 2 * row + decode
    static = {site for site, table in rows.tables.items() if line in table.acts} if scale else set()
    for watch in acting.watches:
        monitor = watch.monitor
        gated = {*dynamic, *(static if monitor.gate_rows else ())}
        steers = decode and (monitor.adds or any(monitor.gating(site) for site in gated))
        if steers or (monitor.quarantine is not None and (decode or monitor.prompt)):
            quarantined = " ".join(sorted(map(str, watch.quarantined)))
            effects.append(b"monitor " + monitor.fingerprint() + quarantined.encode())
    # hashed one by one, because different effects could join to the same bytes
    acts = [hashlib.sha256(effect).digest() for effect in effects if effect]
    return hashlib.sha256(b"".join(acts)).digest() if acts else b""


class MonitorReading(NamedTuple):
    """Reading of a monitor at one token: ``score = h.probe`` and ``gate = sigmoid(sharpness * (score - threshold))``.

    At a prompt token that a steering monitor leaves alone, ``gate`` is the one that changes nothing: 1 for ``quarantine="open"``,
    else 0.
    """

    score: float
    gate: float


@dataclass(frozen=True)
class Track:
    """Readings of a monitor over the tokens of a piece, one score and one gate per token."""

    scores: Float[Tensor, " n"]
    gates: Float[Tensor, " n"]


@dataclass(frozen=True)
class Readings:
    """Readings of one forward, computed on request, so that a monitor that nobody reads costs its scores only."""

    layout: BatchLayout | None = None
    scores: Sequence[tuple[Watched, Tensor]] = field(default=())

    def __bool__(self) -> bool:
        return bool(self.scores)

    def _entries(self) -> Iterator[tuple[Watched, Tensor, int, str, int, int]]:
        for watched, scores in self.scores:
            start = 0
            for piece, watch, cells in watched.entries:
                yield watched, scores, piece, watch.name, start, start + len(cells)
                start += len(cells)

    def _gates(self, watched: Watched, scores: Tensor) -> Tensor:
        """Return the gates that acted, one per score."""
        gates, start = watched.gate(scores), 0
        for piece, watch, cells in watched.entries:
            assert self.layout is not None
            chunk, monitor = self.layout.pieces[piece], watch.monitor
            if monitor.steers and not monitor.prompt and chunk.start < chunk.prompt:
                gates[start : start + min(chunk.prompt - chunk.start, chunk.count)] = float(monitor.quarantine == "open")
            start += len(cells)
        return gates

    def of(self, request: int) -> dict[str, Track]:
        """Return monitor -> scores and gates of the request's tokens in this forward, in their order."""
        tracks: dict[str, Track] = {}
        for watched, scores, piece, name, start, stop in self._entries():
            if self.layout is not None and self.layout.pieces[piece].request == request:
                tracks[name] = Track(scores[start:stop], self._gates(watched, scores)[start:stop])
        return tracks

    def each(self) -> Iterator[tuple[int, str, int, Track]]:
        """Yield request, monitor, and the position of the first token that the track is about."""
        gates = {id(watched): self._gates(watched, scores) for watched, scores in self.scores}
        for watched, scores, piece, name, start, stop in self._entries():
            assert self.layout is not None
            chunk = self.layout.pieces[piece]
            yield chunk.request, name, chunk.start, Track(scores[start:stop], gates[id(watched)][start:stop])

    def last(self) -> Mapping[int, Mapping[str, MonitorReading]]:
        """Return request -> monitor -> its reading at the last token of the request in this forward."""
        readings: dict[int, dict[str, MonitorReading]] = {}
        numbers = {id(scores): (scores.tolist(), self._gates(watched, scores).tolist()) for watched, scores in self.scores}
        for _, scores, piece, name, _, stop in self._entries():
            assert self.layout is not None
            values, gates = numbers[id(scores)]
            readings.setdefault(self.layout.pieces[piece].request, {})[name] = MonitorReading(values[stop - 1], gates[stop - 1])
        return readings
