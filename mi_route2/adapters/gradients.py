"""The gradient of one trainable factor, a rollout at a time, without a second pass.

A factor enters the forward linearly: ``y = h F^T`` (matrix, ``F [d_out, d_in]``) or ``y = f * h`` (diagonal, ``f [r]``).
With ``dy = dL/dy`` the gradient that rollout ``b`` alone contributes is

    G_b = sum_t dy[b,t] h[b,t]^T      (matrix)          g_b = sum_t dy[b,t] * h[b,t]      (diagonal)

It is exact wherever the factor stands, zero included: nothing is divided and nothing is estimated. Norms and inner products
are contracted from the pair (h, dy) where that is cheaper than writing ``G_b`` down:

    <G_b, v> = sum_t dy_t^T v h_t         |G_b|^2 = sum_{t,t'} (dy_t . dy_t') (h_t . h_t')

Floating point leaves about ``eps`` times the magnitudes that went into a sum where the sum is 0. ``magnitude`` says what went in,
``sum_t |dy_t| |h_t|``, so that such a rest can be told from a gradient.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor


@runtime_checkable
class Feature(Protocol):
    """One vector (or matrix) per rollout at one site, from which scores and directions are computed."""

    def values(self) -> Tensor:
        """The vectors themselves, ``[b, ...]``."""
        ...

    def inner(self, v: Tensor) -> Tensor:
        """``<feature_b, v>`` for each rollout, ``[b]``."""
        ...

    def norms(self) -> Tensor:
        """``|feature_b|`` for each rollout, ``[b]``."""
        ...

    def magnitude(self) -> Tensor:
        """The size of what was summed to ``feature_b``, ``[b]``: rounding is relative to it and not to the sum."""
        ...


NOISE = 128
"""A gradient under ``NOISE * eps`` of the largest magnitude in its backward is rounding.

Of one-token rollouts, whose q and k gradients are 0, up to 3 eps is left in models at init and 18 eps with weights three times as
large (nine families, float32 and float64). The smallest real gradient of a run of preset strong is 2000 eps.
"""


def rounding(features: Iterable[Feature]) -> Tensor:
    """The norm, ``[b]``, up to which gradients of one backward are rounding.

    An error that is made at one module reaches those below it, so the largest magnitude counts, whichever module it is at. It is
    taken over the modules of one rollout, never over rollouts: no rollout's score depends on its company.
    """
    largest = torch.stack([feature.magnitude() for feature in features]).amax(dim=0)
    return NOISE * torch.finfo(largest.dtype).eps * largest


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type that sums over tokens are taken in: float32 under half precision, else the type itself."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


@dataclass(frozen=True)
class Written:
    """A feature that is held as its values, ``[b, ...]``."""

    tensor: Float[Tensor, "b ..."]
    summed: Float[Tensor, " b"] | None = None

    def values(self) -> Float[Tensor, "b ..."]:
        return self.tensor

    def inner(self, v: Tensor) -> Float[Tensor, " b"]:
        return self.tensor.flatten(1) @ v.to(self.tensor).flatten()

    def norms(self) -> Float[Tensor, " b"]:
        return self.tensor.flatten(1).norm(dim=1)

    def magnitude(self) -> Float[Tensor, " b"]:
        return self.norms() if self.summed is None else self.summed

    def weighted(self, weights: Float[Tensor, " b"]) -> Tensor:
        """``sum_b weights[b] * feature_b``; a weight of 0 leaves exactly 0 of that rollout."""
        return torch.tensordot(weights.to(self.tensor.dtype), self.tensor, dims=1)


@dataclass(frozen=True)
class Pairs:
    """A matrix factor's gradient held as its two sides, ``h [b s d_in]`` and ``dy [b s d_out]``."""

    h: Float[Tensor, "b s d_in"]
    dy: Float[Tensor, "b s d_out"]

    def values(self) -> Float[Tensor, "b d_out d_in"]:
        return torch.bmm(self.dy.mT, self.h).to(wide(self.h.dtype))

    def inner(self, v: Float[Tensor, "d_out d_in"]) -> Float[Tensor, " b"]:
        v = v.to(self.h)
        d_out, d_in = v.shape
        if d_in <= d_out:  # contract the wider side first: the product that is written down is then the narrower one
            return ((self.dy @ v) * self.h).sum(dim=(1, 2), dtype=wide(v.dtype))
        return ((self.h @ v.mT) * self.dy).sum(dim=(1, 2), dtype=wide(v.dtype))

    def norms(self) -> Float[Tensor, " b"]:
        s, d_in, d_out = self.h.shape[1], self.h.shape[2], self.dy.shape[2]
        if s * (d_in + d_out) < d_in * d_out:
            # The terms cancel, so half precision would be off by tens of per cent, and float16 would overflow.
            h, dy = self.h.to(wide(self.h.dtype)), self.dy.to(wide(self.dy.dtype))
            gram = torch.bmm(dy, dy.mT) * torch.bmm(h, h.mT)
            # The sum is a squared norm; rounding may leave a tiny negative where it should be 0.
            return gram.sum(dim=(1, 2)).clamp_min(0).sqrt()
        return self.values().flatten(1).norm(dim=1)

    def magnitude(self) -> Float[Tensor, " b"]:
        return _magnitude(self.h, self.dy)

    def weighted(self, weights: Float[Tensor, " b"] | Float[Tensor, "b s"]) -> Float[Tensor, "d_out d_in"]:
        """``sum_b weights[b] G_b`` in one matmul; token weights ``[b s]`` are allowed too."""
        per_token = weights if weights.ndim == 2 else weights[:, None]
        per_token = per_token[..., None].to(self.h.dtype)
        if self.h.shape[-1] <= self.dy.shape[-1]:
            return self.dy.flatten(0, 1).mT @ (self.h * per_token).flatten(0, 1)
        return (self.dy * per_token).flatten(0, 1).mT @ self.h.flatten(0, 1)


@dataclass(frozen=True)
class Diagonal:
    """A diagonal factor's gradient held as ``h`` and ``dy``, both ``[b s r]``."""

    h: Float[Tensor, "b s r"]
    dy: Float[Tensor, "b s r"]

    def values(self) -> Float[Tensor, "b r"]:
        return (self.h * self.dy).sum(dim=1, dtype=wide(self.h.dtype))

    def inner(self, v: Float[Tensor, " r"]) -> Float[Tensor, " b"]:
        values = self.values()
        return values @ v.to(values)

    def norms(self) -> Float[Tensor, " b"]:
        return self.values().norm(dim=1)

    def magnitude(self) -> Float[Tensor, " b"]:
        return _magnitude(self.h, self.dy)

    def weighted(self, weights: Float[Tensor, " b"] | Float[Tensor, "b s"]) -> Float[Tensor, " r"]:
        if weights.ndim == 2:
            product = (self.h * self.dy).to(wide(self.h.dtype))
            return torch.einsum("bs,bsr->r", weights.to(product.dtype), product)
        values = self.values()
        return weights.to(values.dtype) @ values


def _magnitude(h: Tensor, dy: Tensor) -> Tensor:
    """``sum_t |dy_t| |h_t|``."""
    sizes = [torch.linalg.vector_norm(t, dim=2, dtype=wide(t.dtype)) for t in (h, dy)]
    return (sizes[0] * sizes[1]).sum(dim=1)


FactorGradient = Pairs | Diagonal


def compact(gradient: FactorGradient, *, scored: bool = False) -> FactorGradient | Written:
    """The smaller of the two ways to hold a gradient until all modules have reported: the pair, or ``G_b`` itself.

    What is ``scored`` keeps its magnitude.
    """
    if isinstance(gradient, Pairs):
        (s, d_in), d_out = gradient.h.shape[1:], gradient.dy.shape[2]
        if d_in * d_out >= s * (d_in + d_out):
            return gradient
    return Written(gradient.values(), gradient.magnitude() if scored else None)


def added(first: FactorGradient | Written | None, second: FactorGradient | Written) -> FactorGradient | Written:
    """The gradient of a factor that the forward used more than once: the sum over its uses."""
    if first is None:
        return second
    if isinstance(first, Pairs) and isinstance(second, Pairs):  # a sum over the tokens of both
        return Pairs(torch.cat([first.h, second.h], dim=1), torch.cat([first.dy, second.dy], dim=1))
    summed = None if isinstance(first, Written) and first.summed is None else first.magnitude() + second.magnitude()
    return Written(first.values() + second.values(), summed)
