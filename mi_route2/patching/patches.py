"""Patches of a request: a value, the site and position at which it replaces the activation, and its share.

    h' = (1 - alpha) * h + alpha * source          alpha = 1 replaces bit for bit, alpha = 0 changes nothing

    Patch(Site(3, "resid_pre"), 17, FromRun("clean", 17))          a captured run's value
    Patch(Site(3, "kept_a", "mlp.down"), 17, "zeros")              or a tensor, or a named vector

A patch fires in a forward over the tokens ``start .. start + count - 1`` of its request if and only if its position is among them,
at that token's row. Positions may be those of tokens that are not generated yet.
"""

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from pydantic import Field, PlainValidator
from torch import Tensor

from mi_route2.sites import Site, nearest
from mi_route2.steering.specs import ZEROS, At, Number, Plain, wide
from mi_route2.validation import Natural, validated

Position = Annotated[Natural, Plain, Field(description="a whole number: positions count from 0 at the prompt's first token")]


@validated
class FromRun:
    """Value of a captured run at ``position``, at ``site`` or (``None``) at the patch's own site."""

    run: str
    position: Position
    site: At | None = None


def _source(value: object) -> FromRun | Tensor | str:
    if not isinstance(value, FromRun | Tensor | str):
        raise ValueError(
            f"the source of a patch is a tensor, FromRun(run, position), a vector's name or {ZEROS!r}, not a {type(value).__name__}"
        )
    if not isinstance(value, Tensor):
        return value
    if value.dtype == torch.bool or value.is_complex():
        raise ValueError(f"the source of a patch is a tensor of real numbers, not of {value.dtype}")
    if not bool(torch.isfinite(value).all()):
        raise ValueError("the source of a patch holds NaN or infinity: give finite numbers")
    return value.detach().clone()


def _share(value: object) -> float | Tensor:
    if not isinstance(value, Tensor) and (isinstance(value, bool) or not isinstance(value, float | int | np.number)):
        raise ValueError(f"the alpha of a patch is a number, or a tensor with one number per dimension, not {value!r:.60}")
    share = value if isinstance(value, Tensor) else torch.as_tensor(value, device="cpu")
    if not bool(torch.isfinite(share).all()):
        raise ValueError("the alpha of a patch holds NaN or infinity: 1 replaces a value, 0 leaves it")
    return value.detach().clone() if isinstance(value, Tensor) else float(value)


@validated
class Patch:
    """Replacement of the activation at ``(site, position)`` by ``source``.

    Tensors are copied, so that later writes to them do not change a request. An ``alpha`` of 1 and of 1.0 are equal, also in the
    keys of the prefix cache.

    Attributes:
        site: The site.
        position: Logical position, counted from 0 at the prompt's first token.
        source: A tensor, ``FromRun``, or the name of a vector (``"zeros"`` is built in).
        alpha: Share of the source: a number, or one number per dimension of the site's value (in its shape or flat).

    Raises:
        ValueError: The position, the alpha or the source is not valid.
    """

    site: At
    position: Position
    source: Annotated[FromRun | Tensor | str, PlainValidator(_source)]
    alpha: Annotated[Number | Tensor, PlainValidator(_share)] = 1.0

    __eq__, __hash__ = object.__eq__, object.__hash__  # tensors have no single truth


@dataclass(frozen=True, eq=False)
class Resolved:
    """Patch with its source as a tensor in the shape of the site's value at one token."""

    site: Site
    position: int
    source: Float[Tensor, "..."]
    alpha: float | Float[Tensor, "..."]
    digest: bytes


@runtime_checkable
class Runs(Protocol):
    """Protocol of a store of captured runs."""

    def rows(self, run: str, site: Site, positions: Sequence[int], /) -> Tensor: ...


def resolve(
    patches: Iterable[Patch],
    shape: Callable[[Site], tuple[int, ...]],
    *,
    runs: Runs | None = None,
    vectors: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> tuple[Resolved, ...]:
    """Return every patch with its source as a tensor, in order of position.

    Raises:
        ValueError: Two patches at one place, a source or alpha of another shape, or a source beyond the range of ``dtype``.
        KeyError: A missing source.
    """
    resolved: dict[tuple[Site, int], Resolved] = {}
    for patch in patches:
        place = (patch.site, patch.position)
        if place in resolved:
            raise ValueError(f"two patches are at {patch.site} at position {patch.position}: give one patch for each place")
        size = shape(patch.site)
        source = _fit(_source_value(patch, size, runs, vectors or {}), size, patch, "source").to(device, dtype)
        if not isinstance(patch.source, FromRun) and not bool(torch.isfinite(source).all()):
            raise ValueError(f"the source of the patch at {patch.site} is beyond the range of {dtype}: scale it down")
        alpha = patch.alpha
        if isinstance(alpha, Tensor):  # in the dtype in which ``steering.specs.patch`` computes
            alpha = float(alpha) if alpha.ndim == 0 else _fit(alpha, size, patch, "alpha").to(device, wide(dtype))
        resolved[place] = Resolved(*place, source, alpha, _digest(patch, source, alpha))
    return tuple(sorted(resolved.values(), key=lambda patch: patch.position))


def firing(patches: Sequence[Resolved], start: int, count: int) -> list[tuple[int, Resolved]]:
    """Return those of the sorted ``patches`` at positions ``start`` to ``start + count - 1``, each with the index of its token."""
    first, end = (bisect_left(patches, place, key=lambda patch: patch.position) for place in (start, start + count))
    return [(patch.position - start, patch) for patch in patches[first:end]]


def _source_value(patch: Patch, size: tuple[int, ...], runs: Runs | None, vectors: Mapping[str, Tensor]) -> Tensor:
    match patch.source:
        case Tensor() as inline:
            return inline
        case FromRun(run, position, site):
            if runs is None:
                raise KeyError(f"the patch at {patch.site} reads run {run!r}, but there is no run store: give the engine one")
            return runs.rows(run, patch.site if site is None else site, [position])[0]
        case str(name):
            if name == ZEROS:
                return torch.zeros(size, device="cpu")
            if name not in vectors:
                raise KeyError(f"no vector {name!r}: the nearest are {nearest(name, [*vectors, ZEROS])}")
            return vectors[name]


def _fit(value: Tensor, size: tuple[int, ...], patch: Patch, what: str) -> Tensor:
    if value.shape == size:
        return value
    if value.ndim == 1 and value.numel() == torch.Size(size).numel():
        return value.reshape(size)
    raise ValueError(
        f"the {what} of the patch at {patch.site} has shape {list(value.shape)}, but the site has {list(size)} per token"
    )


def _digest(patch: Patch, source: Tensor, alpha: float | Tensor) -> bytes:
    """Return a digest of the patch's effect, which does not depend on the name of its source."""
    # Of values and not of names: the prefix cache compares digests, and a name may stand for another vector later.
    data = hashlib.sha256(f"{patch.site}|{alpha if isinstance(alpha, float) else 'masked'}|".encode())
    for tensor in (source, *([alpha] if isinstance(alpha, Tensor) else [])):
        data.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return data.digest()
