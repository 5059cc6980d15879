"""The tokens of a request, by the book: one whole forward over all of its tokens for each new one, by the host alone.

No cache, no batch, no plan: patches and static steering are written into the activations by ``host.hooks``, position by position.
It is the oracle of the engine's tests.
"""

from collections import defaultdict
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mi_route2.engine.request import Request
from mi_route2.hosts.base import Host
from mi_route2.sites import Site
from mi_route2.steering.specs import Vector


@dataclass
class Alone:
    """Generated tokens, their logits ``[n v]``, and the sites' values at every position that was read ``[s ...]``."""

    ids: list[int] = field(default_factory=list)
    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    values: dict[Site, Tensor] = field(default_factory=dict)


def edited(request: Request, sites: tuple[Site, ...], seen: dict[Site, Tensor], prompt: int):
    """``{site: edit}`` over a forward on all tokens ``[1 s ...]``: keep what is there, patch, then steer."""
    steering = request.steering
    adds: dict[Site, list[tuple[str, Tensor]]] = defaultdict(list)
    for tier in ("base", "prefill", "decode") if steering is not None else ():
        for one in steering.vectors(tier):
            adds[one.site].append((tier, Vector(one.vector).data * one.scale))
    patches = defaultdict(list)
    for patch in request.patch:
        patches[patch.site].append(patch)

    def edit(site: Site):
        def change(h: Tensor) -> Tensor:
            seen[site] = h[0].detach().clone()
            new = h.clone()
            for patch in patches[site]:
                if patch.position < h.shape[1]:
                    source = patch.source.to(h.dtype).reshape(h.shape[2:])
                    alpha = patch.alpha if isinstance(patch.alpha, float) else patch.alpha.reshape(h.shape[2:]).to(h.dtype)
                    new[0, patch.position] = (1 - alpha) * h[0, patch.position] + alpha * source
            for tier, vector in adds[site]:
                first, last = {"base": (0, None), "prefill": (0, prompt), "decode": (prompt, None)}[tier]
                new[0, first:last] += vector.to(h.dtype).reshape(h.shape[2:])
            return new

        return change

    return {site: edit(site) for site in {*sites, *patches, *adds}}


@torch.no_grad()
def alone(host: Host, request: Request, *sites: Site) -> Alone:
    """``request`` run greedily, and the values at ``sites``."""
    tokens, logits, found = list(request.prompt), [], Alone()
    for _ in range(request.sampling.max_new):
        edits = edited(request, sites, found.values, len(request.prompt))
        with host.hooks(edits) if edits else nullcontext():
            logits.append(host.logits(torch.tensor([tokens]))[0, -1])
        tokens.append(int(logits[-1].argmax()))
    found.ids, found.logits = tokens[len(request.prompt) :], torch.stack(logits)
    return found
