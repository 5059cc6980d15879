"""Patching of an adapter: at one Linear, at all Linears of a layer, or everywhere.

kept_a           the kept adapter's bottleneck, A x
kept_out         output of the kept adapter, B A x: patched as a whole, the same as kept_a
quarantine_out   output of the quarantine
both             kept_out and quarantine_out together
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm

from mi_route2.adapters import Adapters
from mi_route2.hosts.base import Edit, Host
from mi_route2.sites import Site
from mi_route2.steering.specs import patch
from studies.tracing.pairs import SIDES, Pairs, others

EVERYWHERE = "all"
POINTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "kept_a": ("kept_a",),
        "kept_out": ("kept_out",),
        "quarantine_out": ("quarantine_out",),
        "both": ("kept_out", "quarantine_out"),
    }
)
OUT = ("kept_out", "quarantine_out")


@dataclass(frozen=True)
class TracedCell:
    """An adapter at a ``place``: at a Linear (``blocks.0.attn.q``), a layer (``blocks.0``), the unembedding, or ``EVERYWHERE``."""

    adapter: str
    place: str
    sites: tuple[Site, ...]

    @property
    def name(self) -> str:
        """Name of the cell: ``<where>:<adapter>``."""
        return f"{self.place}:{self.adapter}"

    @property
    def whole(self) -> bool:
        """True for a layer or more: such cells have controls."""
        return self.place.count(".") < 2


def points_by_adapter(adapters: Adapters) -> dict[str, tuple[str, ...]]:
    """Return the points of each adapter that the model has, and of ``both``."""
    return {adapter: points for adapter, points in POINTS.items() if adapters.has_quarantine or "quarantine_out" not in points}


def cells(adapters: Adapters) -> list[TracedCell]:
    """Return every cell, the widest first.

    The unembedding is its own layer; the adapter ``both`` exists only for whole layers or more.
    """
    places: dict[str, list[str]] = {EVERYWHERE: list(adapters.sites)}
    for linear in adapters.sites:
        places.setdefault(layer_of(linear), []).append(linear)
    places |= {linear: [linear] for linear in adapters.sites}
    return [
        TracedCell(adapter, place, tuple(Site.parse(f"{linear}.{point}") for linear in linears for point in points))
        for place, linears in places.items()
        for adapter, points in points_by_adapter(adapters).items()
        if adapter != "both" or place not in adapters.sites or place == layer_of(place)
    ]


def layer_of(linear: str) -> str:
    """Return the layer of a Linear: ``blocks.0`` of ``blocks.0.attn.q``; the unembedding is its own layer."""
    return ".".join(linear.split(".")[:2])


def sites_at(adapters: Adapters, *points: str) -> list[Site]:
    """Return the sites at these points of every Linear with adapters."""
    return [Site.parse(f"{linear}.{point}") for linear in adapters.sites for point in points]


def every_site(adapters: Adapters) -> list[Site]:
    """Return the sites of all adapters' outputs, at every Linear."""
    return sites_at(adapters, *(OUT if adapters.has_quarantine else OUT[:1]))


QUESTION, DELETION = "other", "zero"
CONTROLS = ("shuffled", "same side", "random", "elsewhere")
Score = Callable[[Float[Tensor, "n v"]], Float[Tensor, " n"]]
Values = Mapping[Site, Tensor]


def opposite(side: str) -> str:
    return SIDES[1 - SIDES.index(side)]


@dataclass(frozen=True, eq=False)
class Patching:
    """Pairs on a host, with each side's score without a patch, and its own values at ``sites``."""

    host: Host
    pairs: Pairs
    score: Score
    values: Mapping[str, Values]
    scores: Mapping[str, Float[Tensor, " n"]]

    @staticmethod
    def of(host: Host, pairs: Pairs, score: Score, sites: Iterable[Site]) -> "Patching":
        """Return the patching of pairs, from one unpatched run of both sides."""
        sites = list(sites)
        values = {side: host.capture(sites, pairs.side(side)) for side in SIDES}
        return Patching(host, pairs, score, values, {side: score(_last(host, pairs.side(side), {})) for side in SIDES})

    def run(self, side: str, source: Values) -> Float[Tensor, " n"]:
        """Return the scores of ``side``'s rollouts with ``source`` patched at its sites, at every position."""
        return self.score(_last(self.host, self.pairs.side(side), {site: _put(value) for site, value in source.items()}))

    def effect(self, side: str, source: Values) -> Float[Tensor, " n"]:
        """Return the change of the score by the patch, in nats."""
        return self.run(side, source) - self.scores[side]

    def other(self, side: str, sites: Iterable[Site], rows: Int[Tensor, " n"] | None = None) -> dict[Site, Tensor]:
        """Return values of the other side, of these rows (``None``: each pair's own)."""
        values = self.values[opposite(side)]
        return {site: values[site] if rows is None else values[site][rows] for site in sites}

    def zero(self, side: str, sites: Iterable[Site]) -> dict[Site, Tensor]:
        """Return zeros."""
        return {site: torch.zeros_like(self.values[side][site]) for site in sites}

    def random(self, side: str, sites: Iterable[Site], generator: torch.Generator) -> dict[Site, Tensor]:
        """Return the run's own values, displaced in a uniformly random direction.

        At each position they are displaced as far as ``other`` displaces them.
        """
        moved = {}
        for site in sites:
            value, other = self.values[side][site], self.values[opposite(side)][site]
            # drawn in float64, so that the direction does not depend on the model's type
            direction = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value)
            direction = direction / direction.norm(dim=-1, keepdim=True)
            moved[site] = value + (other - value).norm(dim=-1, keepdim=True) * direction
        return moved


def trace(
    patching: Patching, cells: list[TracedCell], draws: int, generator: torch.Generator, rng: np.random.Generator
) -> dict[tuple[str, str, str], Float[Tensor, " n"]]:
    """Return ``{(side, source, cell's name): effect}``; a control's effect is the mean over ``draws``.

    Only cells of whole layers or more have controls. ``elsewhere`` is left out if there are too few other sites; ``kept_a`` has no
    controls, because they are those of ``kept_out``.
    """
    effects: dict[tuple[str, str, str], Tensor] = {}
    for side, cell in tqdm(list(product(SIDES, cells)), desc="patching", unit="cell", leave=False, disable=None):
        effects[side, QUESTION, cell.name] = patching.effect(side, patching.other(side, cell.sites))
        if cell.adapter == "kept_a":
            continue
        effects[side, DELETION, cell.name] = patching.effect(side, patching.zero(side, cell.sites))
        if cell.whole:
            for name, effect in _controls(patching, side, cell, draws, generator, rng).items():
                effects[side, name, cell.name] = effect
    return effects


def _controls(
    patching: Patching, side: str, cell: TracedCell, draws: int, generator: torch.Generator, rng: np.random.Generator
) -> dict[str, Tensor]:
    drawn: dict[str, list[Tensor]] = {name: [] for name in CONTROLS}
    outside = [site for site in patching.values[side] if site.point in OUT and site not in cell.sites]
    for _ in range(draws):
        rows = others(patching.pairs, rng)
        sources = {
            "shuffled": patching.other(side, cell.sites, rows),
            "same side": patching.other(opposite(side), cell.sites, rows),
            "random": patching.random(side, cell.sites, generator),
        }
        if len(outside) >= len(cell.sites):  # as many sites, because patching more of them moves the score more
            chosen = rng.choice(len(outside), size=len(cell.sites), replace=False)
            sources["elsewhere"] = patching.other(side, [outside[i] for i in sorted(chosen)])
        for name, source in sources.items():
            drawn[name].append(patching.effect(side, source))
    return {name: torch.stack(effects).mean(0) for name, effects in drawn.items() if effects}


@torch.no_grad()
def _last(host: Host, tokens: Int[Tensor, "n s"], edits: Mapping[Site, Edit]) -> Float[Tensor, "n v"]:
    """Return the logits after the last token, under ``edits``."""
    if not edits:
        return host.logits(tokens)[:, -1]
    with host.hooks(edits):
        return host.logits(tokens)[:, -1]


def _put(source: Tensor) -> Edit:
    return lambda value: patch(value, source, 1.0)
