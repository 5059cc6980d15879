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
        """Context: every forward through this host runs under ``edits``. On a clean exit all must have fired (``RuntimeError``)."""
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


def fitting(site: Site, value: Tensor, new: object) -> Tensor:
    """``new``, an edit's answer; ``ValueError`` where it cannot stand in the place of ``value``."""
    if not isinstance(new, Tensor):
        raise ValueError(f"the edit of {site} returned a {type(new).__name__}: return None to read only, or a tensor to write")
    if new.shape != value.shape:
        raise ValueError(f"the edit of {site} returned a tensor of shape {list(new.shape)}, but the site has {list(value.shape)}")
    return new


def whole_stream(edits: Mapping[Site, Edit]) -> dict[Site, Edit]:
    """Edits with those of ``resid_mid`` made whole: the block adds its MLP to the stream itself, not to what its norm was given.

    The norm is given the very tensor that the block goes on with, so it is overwritten in place, and the stream is then what the
    edit returned to the last bit, in any precision. Adding the difference behind the block would leave rounding, in half precision
    a lot. The edit sees a copy: what it keeps stays as it was.
    """
    return {site: _overwriting(site, edit) if site.point == "resid_mid" else edit for site, edit in edits.items()}


def _overwriting(site: Site, edit: Edit) -> Edit:
    def overwrite(x: Tensor) -> Tensor | None:
        new = edit(x.clone())
        return None if new is None else x.copy_(fitting(site, x, new))

    return overwrite


def reader(into: dict[Site, Tensor], site: Site) -> Edit:
    """An edit that keeps a copy and changes nothing."""

    def keep(value: Tensor) -> None:
        into[site] = value.detach().clone()

    return keep
