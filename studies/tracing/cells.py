"""What is patched at once: a lane at one Linear, at all Linears of a layer, or everywhere.

kept_a           the kept adapter's bottleneck, A x
kept_out         what the kept adapter adds, B A x: patched whole, the same as kept_a
quarantine_out   what the quarantine adds
both             kept_out and quarantine_out together
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from mi_route2.adapters import Adapters
from mi_route2.sites import Site

EVERYWHERE = "all"
LANES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "kept_a": ("kept_a",),
        "kept_out": ("kept_out",),
        "quarantine_out": ("quarantine_out",),
        "both": ("kept_out", "quarantine_out"),
    }
)
OUT = ("kept_out", "quarantine_out")


@dataclass(frozen=True)
class Cell:
    """A lane ``where``: at a Linear (``blocks.0.attn.q``), a layer (``blocks.0``), the unembedding, or ``EVERYWHERE``."""

    lane: str
    where: str
    sites: tuple[Site, ...]

    @property
    def name(self) -> str:
        """``<where>:<lane>``."""
        return f"{self.where}:{self.lane}"

    @property
    def whole(self) -> bool:
        """Whether this is a layer or more: these have controls."""
        return self.where.count(".") < 2


def lanes(adapters: Adapters) -> dict[str, tuple[str, ...]]:
    """The lanes that these adapters have, and the points of each."""
    return {lane: points for lane, points in LANES.items() if adapters.has_quarantine or "quarantine_out" not in points}


def cells(adapters: Adapters) -> list[Cell]:
    """Every cell, the widest first. The unembedding is a layer of its own; lanes are taken together in whole layers alone."""
    places: dict[str, list[str]] = {EVERYWHERE: list(adapters.sites)}
    for linear in adapters.sites:
        places.setdefault(layer_of(linear), []).append(linear)
    places |= {linear: [linear] for linear in adapters.sites}
    return [
        Cell(lane, where, tuple(Site.parse(f"{linear}.{point}") for linear in linears for point in points))
        for where, linears in places.items()
        for lane, points in lanes(adapters).items()
        if lane != "both" or where not in adapters.sites or where == layer_of(where)
    ]


def layer_of(linear: str) -> str:
    """``blocks.0`` of ``blocks.0.attn.q``; the unembedding is its own."""
    return ".".join(linear.split(".")[:2])


def every_site(adapters: Adapters) -> list[Site]:
    """What all adapters add, at every Linear."""
    points = lanes(adapters)["both" if adapters.has_quarantine else "kept_out"]
    return [Site.parse(f"{linear}.{point}") for linear in adapters.sites for point in points]
