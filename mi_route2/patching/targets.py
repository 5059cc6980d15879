"""What is patched: a site, or one head of a site by head; and how sites are chosen by name.

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

_TARGET = re.compile(r"(.+?)(?:\[([0-9]+)\])?")
_READ_BY_OTHERS = ("resid_pre", "attn_in", "k", "v")
"""Points of a block that tell later positions something through its attention; so do the adapters at k and v."""


@checked
@dataclass(frozen=True)
class Target:
    """A site, or its ``head``. ``ValueError`` for a head of a point that is not by head."""

    site: Site
    head: int | None = None

    def __post_init__(self) -> None:
        if self.head is not None and (self.site.point not in HEADED or self.head < 0):
            raise ValueError(f"{self.site} has no head {self.head}: the points by head are {', '.join(sorted(HEADED))}")

    def __str__(self) -> str:
        return f"{self.site}" if self.head is None else f"{self.site}[{self.head}]"

    @staticmethod
    @checked
    def parse(text: str) -> "Target":
        """The target that ``str`` wrote; ``ValueError`` for a text of another form."""
        found = _TARGET.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r} is no target: write blocks.3.resid_pre or blocks.3.z[2]")
        return Target(Site.parse(found[1]), None if found[2] is None else int(found[2]))


Choice = Site | Target | str | Iterable[Site | Target | str]
"""Sites as a caller names them: one or several, each itself, a name or glob (TransformerLens's too), or a point of all layers."""


def choose(host: Host, sites: Choice) -> tuple[Target, ...]:
    """The chosen targets in order, each once. ``KeyError`` for a name that matches nothing, with the nearest names."""
    given = [sites] if isinstance(sites, Site | Target | str) else list(sites)
    if not given:
        raise ValueError("no sites: name at least one, as 'resid_pre', 'blocks.*.z' or Site(3, 'mlp_out')")
    known = host.sites()
    return tuple(dict.fromkeys(target for one in given for target in _meant(host, one, known)))


def _meant(host: Host, one: Site | Target | str, known: list[Site]) -> list[Target]:
    if isinstance(one, str):
        return _named(host, one, known)
    target = Target(one) if isinstance(one, Site) else one
    host.address(target.site)  # raises its own sentence where there is no such site
    return [target]


def _named(host: Host, name: str, known: list[Site]) -> list[Target]:
    plain, head = (name, None) if not (found := _TARGET.fullmatch(name)) else (found[1], found[2])
    return [Target(site, None if head is None else int(head)) for site in host.find(plain, known)]


def split(targets: Iterable[Target], counts: dict[Site, int]) -> tuple[Target, ...]:
    """Every target of a site by head as its heads. ``ValueError`` where there are none."""
    found = tuple(
        head
        for target in targets
        for head in (
            [Target(target.site, i) for i in range(counts[target.site])]
            if target.head is None and target.site.point in HEADED
            else [target]
        )
    )
    if all(target.head is None for target in found):
        raise ValueError(f"heads=True, but none of the sites is by head: choose among {', '.join(sorted(HEADED))}")
    return found


def seen_by(site: Site, layers: int) -> bool:
    """Whether a value at one position of ``site`` can reach another position's logits: not behind the last block's attention."""
    if site.layer is None or site.layer < layers - 1:
        return site.layer is not None
    return site.point in _READ_BY_OTHERS or site.linear in ("attn.k", "attn.v")
