"""The protocol of a host, and what all hosts share.

    host.attach("blocks.*.attn.*", spec=spec, generator=g)      the same adapters, parameters and file on every host
    host.capture([Site(0, "resid_mid")], tokens)                {site: tensor}, in one shape on every host
    with host.hooks({Site(1, "q"): edit}): host.logits(tokens)  read (return None) or write (return a tensor)

Values have the shapes that ``architectures.POINTS`` states: queries, keys, values and ``z`` by head, ``[b s h dh]``. A hook that
was asked for and did not fire is an error that names its site.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from mi_route2.adapters import Adapters, AdapterSpec
from mi_route2.architectures import ARCHITECTURES, HEADED, Architecture, architecture_of
from mi_route2.rollouts import Policy
from mi_route2.sites import Site

Edit = Callable[[Tensor], Tensor | None]
"""Reads a site's value and returns ``None``, or returns what the model goes on with."""


@runtime_checkable
class Host(Protocol):
    """A model whose sites can be hooked."""

    name: str
    model: nn.Module
    architecture: Architecture

    def attach(
        self,
        *patterns: str,
        spec: AdapterSpec | None = None,
        generator: torch.Generator,
        expect: int | None = None,
        cache_dir: Path | None = None,
    ) -> Adapters:
        """Adapters at the logical Linears that ``patterns`` select; as ``mi_route2.attach``."""
        ...

    def policy(self, adapters: Adapters) -> Policy:
        """The model with its adapters, called through this host."""
        ...

    def logits(self, tokens: Int[Tensor, "b s"], attention: Bool[Tensor, "b s"] | None = None) -> Float[Tensor, "b s v"]:
        """Next-token logits; padding on either side, positions counted over real tokens."""
        ...

    def address(self, site: Site) -> str:
        """The site's name in this host's own language. ``ValueError`` says why, where the host or architecture lacks it."""
        ...

    def capture(
        self, sites: Iterable[Site], tokens: Int[Tensor, "b s"], attention: Bool[Tensor, "b s"] | None = None
    ) -> dict[Site, Tensor]:
        """Detached values at ``sites`` in one forward."""
        ...

    def hooks(self, edits: Mapping[Site, Edit]) -> AbstractContextManager[None]:
        """Context: every forward through this host runs under ``edits``. On a clean exit each must have fired (``RuntimeError``)."""
        ...


def known_architecture(model: nn.Module) -> Architecture:
    """The model's row; ``ValueError`` with the known ones."""
    row = architecture_of(model)
    if row is None:
        classes = ", ".join(name for row in ARCHITECTURES.values() for name in row.classes)
        raise ValueError(
            f"{type(model).__name__} is no known architecture: choose among {classes}, or add a row to architectures.py"
        )
    return row


def positions(attention: Bool[Tensor, "b s"]) -> Int[Tensor, "b s"]:
    """Each real token's place among the real ones; 0 on padding."""
    return (attention.long().cumsum(1) - 1).clamp_min(0)


def split_heads(site: Site, value: Tensor, count: int) -> Tensor:
    """``[b s h*dh]`` as ``[b s h dh]`` at a point by head."""
    return value.unflatten(-1, (count, -1)) if site.point in HEADED and value.ndim == 3 else value


class Fired:
    """Which of the requested sites were seen."""

    def __init__(self, sites: Iterable[Site]):
        self._silent = dict.fromkeys(sites)

    def saw(self, site: Site) -> None:
        self._silent.pop(site, None)

    def demand(self, address: Callable[[Site], str]) -> None:
        """``RuntimeError`` naming each site whose hook did not fire."""
        if self._silent:
            names = ", ".join(f"{site} ({address(site)})" for site in self._silent)
            raise RuntimeError(
                f"these hooks did not fire: {names}; run the forward inside the context, through the host's own model"
            )


def whole_stream(edits: Mapping[Site, Edit]) -> dict[Site, Edit]:
    """Edits of ``resid_mid`` made whole: a block adds its MLP to the stream that it kept, not to what its norm was given.

        x' = f(x) at the norm,  out' = out + (x' - x) at the block's output

    An edit of the same block's ``resid_post`` comes after.
    """
    whole = dict(edits)
    for site in [site for site in edits if site.point == "resid_mid"]:
        whole[site], after = _carried(edits[site])
        post = Site(site.layer, "resid_post")
        own = edits.get(post)
        whole[post] = after if own is None else _then(after, own)
    return whole


def _carried(edit: Edit) -> tuple[Edit, Edit]:
    change: list[Tensor] = []

    def at_norm(x: Tensor) -> Tensor | None:
        new = edit(x)
        if new is not None:
            change.append(new - x)
        return new

    def at_output(x: Tensor) -> Tensor | None:
        return x + change.pop() if change else None

    return at_norm, at_output


def _then(first: Edit, second: Edit) -> Edit:
    def both(x: Tensor) -> Tensor | None:
        changed = first(x)
        again = second(x if changed is None else changed)
        return changed if again is None else again

    return both


def reader(into: dict[Site, Tensor], site: Site) -> Edit:
    """An edit that keeps a copy and changes nothing."""

    def keep(value: Tensor) -> None:
        into[site] = value.detach().clone()

    return keep
