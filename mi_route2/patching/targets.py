"""Targets of a patch, a site or one head of it, and how a caller selects them by name.

choose(host, "resid_pre")                           that point of every layer
choose(host, ["blocks.*.attn.q.kept_a", Site(3, "z")])
Target(Site(3, "z"), head=2)                        written blocks.3.z[2]
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from mi_route2.architectures import HEADED
from mi_route2.checks import checked
from mi_route2.hosts.base import Host
from mi_route2.sites import Site

_TARGET = re.compile(r"(.+?)(?:\[(0|[1-9][0-9]*)\])?")
_READ_BY_OTHERS = ("resid_pre", "attn_in", "k", "v")
"""Points of a block that later positions read through its attention; so are the adapters at k and v."""


@checked
@dataclass(frozen=True)
class Target:
    """A site, or one head of it; ``ValueError`` for a head of a point without a head axis."""

    site: Site
    head: int | None = None

    def __post_init__(self) -> None:
        if self.head is not None and (self.site.point not in HEADED or isinstance(self.head, bool) or self.head < 0):
            raise ValueError(f"{self.site} has no head {self.head}: the points with heads are {', '.join(sorted(HEADED))}")

    def __str__(self) -> str:
        return f"{self.site}" if self.head is None else f"{self.site}[{self.head}]"

    @staticmethod
    @checked
    def parse(text: str) -> "Target":
        """Return the target whose ``str`` is ``text``; ``ValueError`` for a text of another form."""
        match = _TARGET.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not a target: write blocks.3.resid_pre or blocks.3.z[2]")
        return Target(Site.parse(match[1]), None if match[2] is None else int(match[2]))


Choice = Site | Target | str | Iterable[Site | Target | str]
"""Selection of targets: one or several of a site, a target, a name or glob (also TransformerLens's), or a point of all layers."""


def choose(host: Host, sites: Choice) -> tuple[Target, ...]:
    """Return the selected targets in order, without repetition; ``KeyError`` with the nearest names for a name without a match."""
    items = [sites] if isinstance(sites, Site | Target | str) else list(sites)
    if not items:
        raise ValueError("no sites: name at least one, as 'resid_pre', 'blocks.*.z' or Site(3, 'mlp_out')")
    if wrong := [item for item in items if not isinstance(item, Site | Target | str)]:
        raise ValueError(f"{wrong[0]!r:.60} is not a site: write 'resid_pre', 'blocks.*.z' or Site(3, 'mlp_out')")
    known = host.sites()
    return tuple(dict.fromkeys(target for item in dict.fromkeys(items) for target in _meant(host, item, known)))


def _meant(host: Host, item: Site | Target | str, known: list[Site]) -> list[Target]:
    if isinstance(item, str):
        name, head = match.groups() if (match := _TARGET.fullmatch(item)) else (item, None)
        return [Target(site, None if head is None else int(head)) for site in host.find(name, known)]
    target = Target(item) if isinstance(item, Site) else item
    host.address(target.site)  # raises an error if the host has no such site
    return [target]


def split(targets: Iterable[Target], counts: dict[Site, int]) -> tuple[Target, ...]:
    """Replace every target whose site has heads by its heads, without repetition; ``ValueError`` if no site has heads."""
    expanded: dict[Target, None] = {}
    for target in targets:
        whole = target.head is None and target.site.point in HEADED
        expanded |= dict.fromkeys([Target(target.site, i) for i in range(counts[target.site])] if whole else [target])
    if all(target.head is None for target in expanded):
        raise ValueError(f"heads=True, but none of the sites has heads: choose among {', '.join(sorted(HEADED))}")
    return tuple(expanded)


def read_by_others(site: Site) -> bool:
    """Return whether other positions read a value at one position of ``site`` in its own block, through the attention."""
    return site.point in _READ_BY_OTHERS or site.linear in ("attn.k", "attn.v")


def seen_by(site: Site, layers: int) -> bool:
    """Return whether a value at one position of ``site`` can reach another position's logits, through a later attention."""
    return site.layer is not None and (site.layer < layers - 1 or read_by_others(site))


def entries(site: Site, layers: int) -> tuple[int, int]:
    """Return the blocks where a cell may enter a corrupt run: its site's, and the first one in which others read the change."""
    if site.layer is None:
        return layers - 1, layers - 1
    return site.layer, min(site.layer + (not read_by_others(site)), layers - 1)
