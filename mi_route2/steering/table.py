"""Table of static steering: one row per configuration with two lines (prefill and decode), shared by requests of equal content.

    line = 2 * row + decode        table[line] = global base + global tier + request base + request tier      (summed in float64)

Row 0 acts on requests without vectors of their own: it holds the globals. Rows are reference-counted; a row without references is
free.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mi_route2.sites import Site
from mi_route2.steering.banks import VectorBanks
from mi_route2.steering.specs import TIERS, Clamp, Steer, Steering, Vector, summed, wide

Widths = Callable[[Site], tuple[int, ...]]
Tiers = Mapping[str, Mapping[Site, Tensor]]
PHASES = ("prefill", "decode")


def demand_fit(shape: tuple[int, ...], site: Site, vector: Vector, what: str) -> None:
    """Raise ``ValueError`` unless ``vector`` fits a value of ``shape`` at ``site``."""
    if (has := vector.data.numel()) != (width := math.prod(shape)):
        raise ValueError(f"{what} at {site} has {has} numbers, but the site has {width}")
    if not vector.flat and vector.shape != shape:
        raise ValueError(
            f"{what} at {site} has the shape {list(vector.shape)}, but the site has {list(shape)}: give it so, or flat"
        )


class TableFullError(RuntimeError):
    """Error of a full table: wait until a request has ended."""


@dataclass(frozen=True)
class Band:
    """Compiled clamp: the unit direction on the device, its bounds and its strength."""

    unit: Tensor
    low: float
    high: float
    strength: float


@dataclass
class SharedRow:
    """Row of the table: a configuration, which all requests of equal steering share, and the number of its references."""

    spec: Steering
    key: bytes
    tiers: Tiers
    refs: int = 0
    bands: tuple[Mapping[Site, tuple[Band, ...]], ...] = ({}, {})
    """Clamps of a prefill and of a decode token."""
    fingerprints: dict[tuple[bool, bool], bytes] = field(default_factory=dict)


@dataclass
class SiteTable:
    """Lines of one site, and the indices of those that are not zero."""

    values: Tensor
    acts: set[int] = field(default_factory=set)


class SteeringRows:
    """Rows of the table: at most ``capacity`` configurations in addition to row 0."""

    def __init__(self, capacity: int, widths: Widths, dtype: torch.dtype, device: torch.device, banks: VectorBanks | None = None):
        if capacity < 0:
            raise ValueError(f"rows={capacity} is negative: give the number of steering configurations that may act at a time")
        self.capacity, self.dtype, self.device = capacity, wide(dtype), device
        self.widths, self._banks = widths, banks
        self.tables: dict[Site, SiteTable] = {}
        self.globals: dict[str, dict[Site, Tensor]] = {tier: {} for tier in TIERS}
        self.rows: dict[int, SharedRow] = {0: SharedRow(Steering(), b"", {tier: {} for tier in TIERS}, refs=1)}
        self._by_key: dict[bytes, int] = {b"": 0}
        self._free = list(range(capacity, 0, -1))

    @property
    def used(self) -> int:
        """Number of configurations held."""
        return self.capacity - len(self._free)

    def demand_width(self, site: Site, vector: Vector, what: str) -> None:
        """Raise ``ValueError`` unless ``vector`` fits at ``site``; errors for a site that does not exist propagate."""
        demand_fit(self.widths(site), site, vector, what)

    def check(self, spec: Steering) -> None:
        """Raise ``ValueError`` for a vector or a clamp that does not fit at its site."""
        for tier in TIERS:
            self.demand_widths(spec.vectors(tier))
        for tier in TIERS:  # vectors of one site cannot be added before all of them are known to fit
            self.demand_finite(spec.sums[tier])
        for clamp in spec.clamps:
            self.demand_width(clamp.site, Vector(clamp.vector), "the clamp's direction")

    def check_entries(self, entries: Sequence[Steer]) -> None:
        """Raise ``ValueError`` for a vector that does not fit at its site, or a sum that is not finite in the table's dtype."""
        self.demand_widths(entries)
        self.demand_finite(summed(entries))

    def demand_widths(self, entries: Sequence[Steer]) -> None:
        """Raise ``ValueError`` for a vector that does not fit at its site."""
        for entry in entries:
            self.demand_width(entry.site, Vector(entry.vector), "the vector")

    def demand_finite(self, sums: Mapping[Site, Tensor]) -> None:
        """Raise ``ValueError`` for a sum that is not finite in the table's dtype."""
        for site, values in sums.items():
            if not bool(torch.isfinite(values.to(self.dtype)).all()):
                raise ValueError(f"the vector at {site} is beyond the range of {self.dtype}: scale it down")

    # References to rows

    def demand(self, specs: Sequence[Steering]) -> None:
        """Raise ``TableFullError`` if ``specs`` do not fit now, and ``ValueError`` if they can never fit."""
        needed = {key for spec in specs if (key := row_key(spec))}
        if len(needed) > self.capacity:
            raise ValueError(f"{len(needed)} steering rows are needed but there are {self.capacity}: request fewer, or raise rows")
        if (new := len(needed - self._by_key.keys())) > len(self._free):
            raise TableFullError(
                f"{new} steering rows are needed but {len(self._free)} of {self.capacity} are free: wait for a request to end"
            )

    def acquire(self, spec: Steering) -> int:
        """Return the row that holds ``spec``, to be returned with ``release``; row 0 if ``spec`` is empty."""
        key = row_key(spec)
        if key not in self._by_key:
            row = SharedRow(spec, key, spec.sums, refs=1, bands=tuple(self._bands(spec.clamps, phase) for phase in PHASES))
            index = self._free.pop()
            self.rows[index], self._by_key[key] = row, index
            self._write(index)
            return index
        index = self._by_key[key]
        self.rows[index].refs += 1
        return index

    def release(self, index: int) -> None:
        """Release one reference to a row; the last one frees it."""
        row = self.rows[index]
        row.refs -= 1
        assert row.refs >= 0
        if index and not row.refs:
            del self.rows[index], self._by_key[row.key]
            self._free.append(index)
            for site in list(self.tables):
                self._store(site, index, (None, None))

    def _bands(self, clamps: Sequence[Clamp], phase: str) -> dict[Site, tuple[Band, ...]]:
        by_site: dict[Site, tuple[Band, ...]] = {}
        for clamp in clamps:
            if clamp.phase in ("both", phase):
                unit = clamp.unit().to(self.device, self.dtype)
                band = Band(unit, *clamp.bounds, clamp.strength)
                by_site[clamp.site] = (*by_site.get(clamp.site, ()), band)
        return by_site

    # Content of the table

    def set_global(self, tier: str, entries: Sequence[Steer]) -> None:
        """Replace a global tier, in every line."""
        sites = {*self.globals[tier]}
        self.globals[tier] = summed(entries)
        sites |= {*self.globals[tier]}
        for index, row in self.rows.items():
            row.fingerprints.clear()
            self._write(index, sites)

    def effective(self, row: SharedRow, site: Site, phase: str) -> Tensor | None:
        """Return the vector of a line in float64; ``None`` if no tier has one."""
        tiers = (self.globals["base"], self.globals[phase], row.tiers["base"], row.tiers[phase])
        total = None
        for tier in tiers:  # always in this order, on which the last bit of a sum depends
            if site in tier:
                total = tier[site] if total is None else total + tier[site]
        return total

    def _write(self, index: int, sites: set[Site] | None = None) -> None:
        row = self.rows[index]
        if sites is None:
            sites = {site for tiers in (self.globals, row.tiers) for tier in tiers.values() for site in tier}
        for site in sites:
            self._store(site, index, tuple(self.effective(row, site, phase) for phase in PHASES))

    def _store(self, site: Site, index: int, pair: Sequence[Tensor | None]) -> None:
        table = self.tables.get(site)
        rounded = {id(values): values.to(self.device, self.dtype) for values in pair if values is not None}
        # A line of zeros would act on nobody, but keep the site's table and with it a hook in every forward.
        acting = {key for key, values in rounded.items() if bool(values.any())}
        for line, key in enumerate(map(id, pair), start=2 * index):
            if key in acting:
                values = rounded[key]
                if table is None:
                    table = self.tables[site] = SiteTable(self._lines(site, len(values)))
                table.values[line] = values
                table.acts.add(line)
            elif table is not None and line in table.acts:
                table.values[line] = 0
                table.acts.discard(line)
        if table is not None and not table.acts:
            del self.tables[site]

    @torch.inference_mode(False)  # a table made in inference mode could not be written outside of it
    def _lines(self, site: Site, width: int) -> Tensor:
        """Return the zeros of a new table."""
        if self._banks is not None:
            return self._banks.lines(site, width)
        return torch.zeros(2 * (self.capacity + 1), width, dtype=self.dtype, device=self.device)

    def sites(self) -> set[Site]:
        """Return the sites with a table line or a clamp."""
        return set(self.tables).union(*(bands for row in self.rows.values() if row.spec.clamps for bands in row.bands))

    def fingerprint(self, index: int, decode: bool, scale: float) -> bytes:
        """Return a digest of a row's effect on a token of a phase, with its vectors times ``scale``; ``b""`` if it has none."""
        row = self.rows[index]
        key = (decode, scale != 0)  # a scale of 0 leaves only the clamps; the other scales go into the digest below
        if key not in row.fingerprints:
            row.fingerprints[key] = self._digest(row, index, decode, scale != 0)
        fingerprint = row.fingerprints[key]
        if not fingerprint or scale in (0, 1):
            return fingerprint
        return hashlib.sha256(fingerprint + repr(scale).encode()).digest()

    def _digest(self, row: SharedRow, index: int, decode: bool, vectors: bool) -> bytes:
        hasher, line, some = hashlib.sha256(), 2 * index + decode, False
        for site in sorted(site for site, table in self.tables.items() if line in table.acts) if vectors else ():
            hasher.update(f"vector {site} ".encode() + self.tables[site].values[line].cpu().view(torch.uint8).numpy().tobytes())
            some = True
        for site, bands in sorted(row.bands[decode].items()):
            for band in bands:
                hasher.update(f"clamp {site} {band.low!r} {band.high!r} {band.strength!r} ".encode())
                hasher.update(band.unit.cpu().view(torch.uint8).numpy().tobytes())
                some = True
        return hasher.digest() if some else b""


def row_key(spec: Steering) -> bytes:
    """Return the fingerprint by which a row is shared; ``b""`` if the row would be empty."""
    empty = not (spec.base or spec.prefill or spec.decode or spec.clamps)
    return b"" if empty else spec.rows.fingerprint()
