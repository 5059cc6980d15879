"""One forward's steering, laid out before it runs: for every site which tokens get what, as tensors that are ready to use.

    out = h + table[r] * scale[r] * row_gate[t] + dvec * token_scale[t]  (+ g[t] * the vectors of a request's own monitors)

``token_scale`` is the tier's gain on generated tokens and 0 on the prompt's; ``row_gate`` is 1, and only monitors change it, on
generated tokens alone. Both are kept apart from the table, as factors ("gates": one number a cell, 1 where nobody watches), so that
what nobody gates is one addition. A *cell* is a token's place in the flattened batch. Nothing is calculated for cells in which
nothing acts: their bits are those of ``h``. A plan is good while the batch holds the same pieces and the state is the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor

from mi_route2.interventions.edits import attenuate, clamp, score, squash, term
from mi_route2.interventions.layout import Layout
from mi_route2.interventions.rows import Rows, summed
from mi_route2.interventions.specs import Monitor, Vector
from mi_route2.sites import Site


@dataclass(frozen=True)
class Watch:
    """A monitor as it is calculated: what it is called in readings, its probe, and the vectors of its own."""

    name: str
    monitor: Monitor
    probe: Tensor
    adds: Mapping[Site, Tensor]
    quarantined: frozenset[Site]

    @property
    def sites(self) -> set[Site]:
        """Where it reads and acts."""
        return {self.monitor.site, *self.adds, *self.quarantined}


def watch_of(monitor: Monitor, name: str, rows: Rows, quarantines: tuple[Site, ...]) -> Watch:
    """``monitor``, resolved, on the device of ``rows``. ``ValueError`` where a vector or a quarantine does not fit."""
    rows.demand_width(monitor.site, Vector(monitor.probe), "the probe")
    rows.check_entries(monitor.adds)
    quarantined = frozenset[Site]()
    if monitor.quarantine is not None:
        there = [site for site in quarantines if monitor.reaches(site)]
        quarantined = frozenset(there if monitor.quarantined is None else monitor.quarantined)
        if not quarantined or not quarantined.issubset(there):
            raise ValueError(
                f"the monitor at {monitor.site} is to {monitor.quarantine} a quarantine that is not there; behind it there are: "
                f"{', '.join(map(str, there)) or 'none'}"
            )
    adds = {site: values.to(rows.device, rows.kind) for site, values in summed(monitor.adds).items()}
    return Watch(name, monitor, Vector(monitor.probe).data.to(rows.device, rows.kind), adds, quarantined)


class Cells:
    """The cells of each piece: its prompt tokens, its generated tokens."""

    def __init__(self, layout: Layout):
        self.device, (rows, width) = layout.positions.device, layout.positions.shape
        self.count = rows * width
        self.phases: list[tuple[range, range]] = []
        for row, piece in enumerate(layout.pieces):
            first, prompt = row * width, min(max(piece.prompt - piece.start, 0), piece.count)
            self.phases.append((range(first, first + prompt), range(first + prompt, first + piece.count)))
        self._indices: dict[tuple[range, ...], Tensor | None] = {}

    def index(self, ranges: tuple[range, ...]) -> Tensor | None:
        """The cells of ``ranges`` in this order; ``None`` where that is every cell of the batch, in order."""
        if ranges not in self._indices:
            cells = list(chain.from_iterable(ranges))
            every = cells == list(range(self.count)) if len(cells) == self.count else False
            self._indices[ranges] = None if every else torch.tensor(cells, device=self.device)
        return self._indices[ranges]

    def each(self, ranges: Sequence[range], values: Sequence[float] | Sequence[int], dtype: torch.dtype) -> Tensor:
        """One value a range, as a tensor of one value a cell; of one value for all where they are equal."""
        if len(set(values)) == 1:
            return torch.tensor([values[0]], dtype=dtype, device=self.device)
        spread = chain.from_iterable([value] * len(cells) for value, cells in zip(values, ranges, strict=True))
        return torch.tensor(list(spread), dtype=dtype, device=self.device)

    def which(self, ranges: Sequence[range], places: Sequence[int]) -> Tensor | None:
        """One number a range as one number a cell; ``None`` where they are all the same, or count the cells."""
        if len(set(places)) == 1 or (list(places) == list(range(len(ranges))) and all(len(cells) == 1 for cells in ranges)):
            return None
        return self.each(ranges, places, torch.long)


KEPT = 256
"""Up to so many cells each has its vector at hand; pieces of prompts look theirs up, or a plan would be as large as activations."""


class Spread:
    """Vectors over cells: ``which`` of ``vectors [m d]`` each cell has; ``None``: one a cell in order, or one for all."""

    def __init__(self, vectors: Tensor, which: Tensor | None):
        small = which is not None and len(which) <= KEPT
        self.vectors = vectors.index_select(0, which) if which is not None and small else vectors
        self.which = None if small else which

    @staticmethod
    def of(cells: Cells, ranges: Sequence[range], vectors: Sequence[Tensor]) -> "Spread":
        """One vector a range; the same object is stored once."""
        distinct = {id(vector): vector for vector in vectors}
        places = {key: i for i, key in enumerate(distinct)}
        return Spread(torch.stack(list(distinct.values())), cells.which(ranges, [places[id(vector)] for vector in vectors]))

    def to(self, dtype: torch.dtype) -> "Spread":
        """Rounded to ``dtype``."""
        made = Spread(term(self.vectors, dtype=dtype), None)
        made.which = self.which
        return made

    def rows(self) -> Tensor:
        """A row a cell, or one for all."""
        return self.vectors if self.which is None else self.vectors.index_select(0, self.which)


class Term:
    """Vectors to be added in some cells."""

    def __init__(self, cells: Tensor | None, values: Spread, gates: tuple[int, ...] = ()):
        self.cells, self.values, self.gates = cells, values, gates
        self._ready: Spread | None = None

    def add(self, x: Tensor, gates: Sequence[Tensor | None]) -> Tensor:
        """``x [cells width]`` with the vectors added; a new tensor."""
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
        # A closed gate leaves the bits: -0.0 + 0.0 would be 0.0.
        new = torch.where((factor == 0)[:, None], old, old + term(self.values.rows(), factor, dtype=x.dtype))
        return new if self.cells is None else x.index_copy(0, self.cells, new)


@dataclass(frozen=True)
class Bound:
    """The k-th clamp of some cells."""

    cells: Tensor | None
    unit: Spread
    low: Tensor
    high: Tensor
    strength: Tensor

    def apply(self, x: Tensor) -> Tensor:
        if self.cells is None:
            return clamp(x, self.unit.rows(), self.low, self.high, self.strength)
        new = clamp(x.index_select(0, self.cells), self.unit.rows(), self.low, self.high, self.strength)
        return x.index_copy(0, self.cells, new)


@dataclass(frozen=True)
class Gate:
    """Factors ``offset + slope * g``: ``source`` among the site's scores, ``cells`` of the batch (``None``: all).

    Without an offset they are ``g``.
    """

    slot: int
    source: Tensor | None
    cells: Tensor | None
    offset: Tensor | None
    slope: Tensor

    def factors(self, g: Tensor, count: int) -> Tensor:
        """One factor a cell, 1 where nothing is gated."""
        factor = g if self.source is None else g.index_select(0, self.source)
        factor = factor if self.offset is None else self.offset + self.slope * factor
        if self.cells is None:
            return factor
        return torch.ones(count, dtype=g.dtype, device=g.device).index_copy(0, self.cells, factor)


@dataclass(frozen=True)
class Watched:
    """All monitors of a site. ``entries`` says which piece and monitor the scores are of, in their order."""

    site: Site
    entries: tuple[tuple[int, Watch, range], ...]
    cells: Tensor | None
    probes: Spread
    threshold: Tensor
    sharpness: Tensor
    gates: tuple[Gate, ...]

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
    """All that happens at a site, in this order: watch, gate the quarantine, steer, clamp."""

    watched: Watched | None = None
    quarantine: tuple[int, ...] = ()
    terms: list[Term] = field(default_factory=list)
    bounds: list[Bound] = field(default_factory=list)

    def run(self, h: Tensor, forward: "Forward") -> Tensor:
        """``h`` itself where nothing is changed."""
        if h.shape[:2] != forward.shape:
            raise ValueError(
                f"a value of shape {list(h.shape)} in a forward over {list(forward.shape)} tokens: begin with its layout"
            )
        x = flat = h.reshape(forward.count, -1)
        if self.watched is not None:
            scores = self.watched.scores(flat)
            forward.scores.append((self.watched, scores))
            if self.watched.gates:
                g = self.watched.gate(scores)
                for gate in self.watched.gates:
                    forward.gates[gate.slot] = gate.factors(g, forward.count)
        for slot in self.quarantine:
            x = attenuate(x, _fired(forward.gates[slot]))
        for one in self.terms:
            x = one.add(x, forward.gates)
        for bound in self.bounds:
            x = bound.apply(x)
        return h if x is flat else x.view(h.shape)


class Forward:
    """What one forward writes down: the gates that are open, the scores that were read, the sites that fired."""

    def __init__(self, shape: torch.Size, slots: int):
        self.shape, self.count = shape, shape.numel()
        self.gates: list[Tensor | None] = [None] * slots
        self.scores: list[tuple[Watched, Tensor]] = []
        self.fired: set[Site] = set()
