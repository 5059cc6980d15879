"""One forward over pieces of many requests, with each request's own interventions at each site.

The order at a site is: capture (what the model itself computed), patch, steer and clamp. A site where nothing is to be done for any
token of this forward gives back the very tensor that it was given, and rows that nobody asked to change keep their bits.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mi_route2.engine.slots import View
from mi_route2.hosts.base import Edit, Host
from mi_route2.hosts.decoder import Decoder
from mi_route2.interventions.edits import patch, wide
from mi_route2.interventions.layout import Layout
from mi_route2.interventions.patches import Resolved
from mi_route2.interventions.steering import Readings, SteeringState
from mi_route2.sites import Site

Sink = Callable[[Tensor], None]
"""Takes the captured rows ``[n, ...]`` of one request at one site."""


@dataclass
class Work:
    """What is to be done at one site in one forward, by place ``(row, column)``."""

    captures: list[tuple[Sink, list[tuple[int, int]]]] = field(default_factory=list)
    patches: list[tuple[int, int, Resolved]] = field(default_factory=list)

    def take(self, h: Tensor) -> list[tuple[Sink, Tensor]]:
        """What is captured, copied, and who gets it."""
        places = [place for _, some in self.captures for place in some]
        found = h[_index(places, 0, h), _index(places, 1, h)]
        return list(zip((sink for sink, _ in self.captures), found.split([len(some) for _, some in self.captures]), strict=True))

    def put(self, h: Tensor) -> Tensor:
        """``h`` with the patches in, its other tokens as they are."""
        rows, columns = _index(self.patches, 0, h), _index(self.patches, 1, h)
        there = h[rows, columns]
        source = torch.stack([one.source.flatten() for *_, one in self.patches])
        alpha = torch.stack([_alpha(one, h) for *_, one in self.patches])
        new = patch(there.flatten(1), source, alpha).reshape(there.shape)
        return h.index_put((rows, columns), new)


def _index(places: Sequence[tuple], which: int, like: Tensor) -> Tensor:
    return torch.tensor([place[which] for place in places], device=like.device)


def _alpha(one: Resolved, like: Tensor) -> Tensor:
    if isinstance(one.alpha, Tensor):
        return one.alpha.flatten()
    return torch.full((one.source.numel(),), one.alpha, device=like.device, dtype=wide(one.source.dtype))


class Forward:
    """Runs layouts on a decoder. Hooks stay where they are from forward to forward; they come off with ``close``.

    Every hook must have fired in every forward: ``RuntimeError`` names the sites that did not. Of a forward that fails nothing is
    captured, so that it can be run again.
    """

    def __init__(self, decoder: Decoder, steering: SteeringState):
        self._decoder, self._steering = decoder, steering
        self._host: Host = decoder.host
        self._hooks: AbstractContextManager[None] | None = None
        self._sites: frozenset[Site] = frozenset()
        self._fired: set[Site] = set()
        self._work: dict[Site, Work] = {}
        self._taken: list[tuple[Sink, Tensor]] = []
        self._steered = False

    def run(
        self, layout: Layout, tokens: Tensor, cache: View, work: dict[Site, Work], keep: Tensor | None
    ) -> tuple[Tensor, Readings | None]:
        """Logits ``[b n v]`` at the columns ``keep``, and what monitors read."""
        self._steered = self._steering.begin(layout)
        self._need(work.keys() | self._steering.sites() if self._steered else work.keys())
        self._work = work
        self._fired.clear()
        self._taken.clear()
        try:
            allowed = None if cache.whole and self._decoder.unmasked else cache.allowed
            logits = self._decoder(tokens, layout.positions, allowed, cache, keep=keep)
            if silent := self._sites - self._fired:
                raise RuntimeError(f"these hooks did not fire in a forward of the engine: {', '.join(map(str, sorted(silent)))}")
            read = self._steering.end() if self._steered else None
        finally:
            self._work, self._steered = {}, False
        for sink, rows in self._taken:
            sink(rows)
        self._taken.clear()
        return logits, read

    def close(self) -> None:
        """Take the hooks off."""
        hooks, self._hooks, self._sites = self._hooks, None, frozenset()
        if hooks is not None:
            # Fired was checked forward by forward; a context whose block ends by an exception does not look again.
            hooks.__exit__(_ClosedError, _ClosedError(), None)

    def _need(self, sites: Iterable[Site]) -> None:
        missing = frozenset(sites) - self._sites
        if not missing:
            return
        wanted = self._sites | missing
        self.close()
        hooks = self._host.hooks({site: self._edit(site) for site in sorted(wanted)})
        hooks.__enter__()
        self._hooks, self._sites = hooks, wanted

    def _edit(self, site: Site) -> Edit:
        def edit(h: Tensor) -> Tensor | None:
            self._fired.add(site)
            new = h
            if (work := self._work.get(site)) is not None:
                if work.captures:
                    self._taken += work.take(h)
                if work.patches:
                    new = work.put(h)
            if self._steered:
                new = self._steering.at(site, new)
            return None if new is h else new

        return edit


class _ClosedError(Exception):
    """Ends a context of hooks."""
