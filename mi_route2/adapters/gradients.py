"""Exact per-rollout gradient of one trainable factor, from a single backward pass.

A factor enters the forward linearly: ``y = h F^T`` (matrix, ``F [d_out, d_in]``) or ``y = f * h`` (diagonal, ``f [r]``).
With ``dy = dL/dy`` the gradient that rollout ``b`` contributes is

    G_b = sum_t dy[b,t] h[b,t]^T      (matrix)          g_b = sum_t dy[b,t] * h[b,t]      (diagonal)

This is exact for any value of the factor, zero included: there is no division and no estimate. Norms and inner products are
contracted from the pair (h, dy) if that is cheaper than computing ``G_b``:

    <G_b, v> = sum_t dy_t^T v h_t         |G_b|^2 = sum_{t,t'} (dy_t . dy_t') (h_t . h_t')

In floating point, a sum that is exactly 0 comes out as about ``eps`` times the magnitudes of its terms. ``magnitude`` returns
``sum_t |dy_t| |h_t|``, so that such rounding errors can be told from a gradient.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor


@runtime_checkable
class Feature(Protocol):
    """One vector (or matrix) per rollout at one site, from which scores and directions are computed."""

    def values(self) -> Tensor:
        """Return the vectors, ``[b, ...]``."""
        ...

    def inner(self, v: Tensor) -> Tensor:
        """Return ``<feature_b, v>`` for each rollout, ``[b]``."""
        ...

    def norms(self) -> Tensor:
        """Return ``|feature_b|`` for each rollout, ``[b]``."""
        ...

    def magnitude(self) -> Tensor:
        """Return the magnitude of the terms whose sum is ``feature_b``, ``[b]``; rounding errors are relative to it."""
        ...


NOISE = 128
"""A gradient below ``NOISE * eps`` times the largest magnitude in its backward counts as a rounding error.

The exact q and k gradients of one-token rollouts are 0; their computed values reach 3 eps in models at initialization and 18 eps
with weights three times as large (nine families, float32 and float64). The smallest real gradient of a run of preset strong is
2000 eps.
"""


def rounding(magnitudes: Iterable[Tensor]) -> Tensor:
    """Return the norm, ``[b]``, up to which gradients of one backward may be rounding errors.

    A rounding error at one module propagates to the modules below it, so the largest magnitude of all modules counts. The maximum
    is taken over the modules of one rollout and never over rollouts, so that no rollout's score depends on the rest of the batch.
    """
    largest = torch.stack(list(magnitudes)).amax(dim=0)
    return NOISE * torch.finfo(largest.dtype).eps * largest


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums over tokens: float32 for half precision, otherwise ``dtype``."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


_CASTING = ("cpu", "cuda", "mps", "xpu")
"""Devices that autocast knows."""


_PRODUCTS = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # pyright: ignore[reportAttributeAccessIssue]
"""Settings of products of float32 numbers, which `torch.set_float32_matmul_precision` may make those of TF32 or bfloat16."""


@contextmanager
def exact() -> Iterator[None]:
    """Context, or decorator: outside of autocast and TF32, which would round the products of float32 numbers to fewer bits."""
    casting = [device for device in _CASTING if torch.is_autocast_enabled(device)]
    rounded = [(backend, now) for backend in _PRODUCTS if (now := backend.fp32_precision) not in ("none", "ieee")]
    if not casting and not rounded:
        yield
        return
    with ExitStack() as off:
        for device in casting:
            off.enter_context(torch.autocast(device, enabled=False))
        for backend, now in rounded:
            backend.fp32_precision = "ieee"
            off.callback(setattr, backend, "fp32_precision", now)
        yield


def _learned(t: Tensor, weights: Float[Tensor, " b"] | Float[Tensor, "b s"]) -> Tensor:
    """Return ``t``, 0 where its weight is 0, because 0 times NaN is NaN."""
    return t.masked_fill((weights == 0).view(*weights.shape, *[1] * (t.ndim - weights.ndim)), 0.0)


@dataclass(frozen=True)
class DenseGrad:
    """Feature stored as its values, ``[b, ...]``."""

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
        """Return ``sum_b weights[b] * feature_b``; a rollout of weight 0 contributes exactly 0."""
        return torch.tensordot(weights.to(self.tensor.dtype), _learned(self.tensor, weights), dims=1)


_CANCELS = 1e-2
"""Norm, as a share of the magnitude that was summed, below which a Gram matrix has lost digits."""


@dataclass(frozen=True)
class MatrixGrad:
    """Gradient of a matrix factor, stored as its two sides ``h [b s d_in]`` and ``dy [b s d_out]``."""

    h: Float[Tensor, "b s d_in"]
    dy: Float[Tensor, "b s d_out"]

    def values(self) -> Float[Tensor, "b d_out d_in"]:
        return torch.bmm(self.dy.mT, self.h).to(wide(self.h.dtype))

    def inner(self, v: Float[Tensor, "d_out d_in"]) -> Float[Tensor, " b"]:
        v = v.to(self.h)
        d_out, d_in = v.shape
        if d_in <= d_out:  # contract the wider side first, so that the intermediate product is the narrower one
            return ((self.dy @ v) * self.h).sum(dim=(1, 2), dtype=wide(v.dtype))
        return ((self.h @ v.mT) * self.dy).sum(dim=(1, 2), dtype=wide(v.dtype))

    def norms(self) -> Float[Tensor, " b"]:
        s, d_in, d_out = self.h.shape[1], self.h.shape[2], self.dy.shape[2]
        if s * (d_in + d_out) < d_in * d_out:
            # The terms cancel, so half precision would be off by tens of percent, and float16 would overflow. On a GPU they are of
            # float64, so that the host needs not wait to see which of them nearly cancel.
            exactly = self.h.is_cuda and self.h.dtype != torch.float64
            dtype = torch.float64 if exactly else wide(self.h.dtype)
            h, dy = self.h.to(dtype), self.dy.to(dtype)
            gram = torch.bmm(dy, dy.mT) * torch.bmm(h, h.mT)
            # The sum is a squared norm; rounding may make it slightly negative if it should be 0.
            norms = gram.sum(dim=(1, 2)).clamp_min(0).sqrt().to(wide(self.h.dtype))
            # Rounding of the square is rounding of half its digits in the norm, so what nearly cancels is computed the long way.
            near = [] if exactly else (norms <= _CANCELS * _magnitude(self.h, self.dy)).nonzero()[:, 0].tolist()
            for i in near:
                norms[i] = (dy[i].mT @ h[i]).norm()
            return norms
        return self.values().flatten(1).norm(dim=1)

    def magnitude(self) -> Float[Tensor, " b"]:
        return _magnitude(self.h, self.dy)

    def weighted(self, weights: Float[Tensor, " b"] | Float[Tensor, "b s"]) -> Float[Tensor, "d_out d_in"]:
        """Return ``sum_b weights[b] G_b`` in one matmul; token weights ``[b s]`` are allowed too."""
        per_token = (weights if weights.ndim == 2 else weights[:, None])[..., None].to(self.h.dtype)
        h, dy = _learned(self.h, weights), _learned(self.dy, weights)
        if h.shape[-1] <= dy.shape[-1]:
            return dy.flatten(0, 1).mT @ (h * per_token).flatten(0, 1)
        return (dy * per_token).flatten(0, 1).mT @ h.flatten(0, 1)


@dataclass(frozen=True)
class DiagonalGrad:
    """Gradient of a diagonal factor, stored as ``h`` and ``dy``, both ``[b s r]``."""

    h: Float[Tensor, "b s r"]
    dy: Float[Tensor, "b s r"]

    @property
    def _product(self) -> Float[Tensor, "b s r"]:
        return self.h.to(wide(self.h.dtype)) * self.dy  # the terms may cancel, and what half precision rounds does not

    def values(self) -> Float[Tensor, "b r"]:
        return self._product.sum(dim=1)

    def inner(self, v: Float[Tensor, " r"]) -> Float[Tensor, " b"]:
        values = self.values()
        return values @ v.to(values)

    def norms(self) -> Float[Tensor, " b"]:
        return self.values().norm(dim=1)

    def magnitude(self) -> Float[Tensor, " b"]:
        return _magnitude(self.h, self.dy)

    def weighted(self, weights: Float[Tensor, " b"] | Float[Tensor, "b s"]) -> Float[Tensor, " r"]:
        if weights.ndim == 2:
            return torch.einsum("bs,bsr->r", weights.to(wide(self.h.dtype)), _learned(self._product, weights))
        values = _learned(self.values(), weights)
        return weights.to(values.dtype) @ values


def _magnitude(h: Tensor, dy: Tensor) -> Tensor:
    """Return ``sum_t |dy_t| |h_t|``, ``[b]``."""
    # A bound may be off by half a percent, so norms in bfloat16 will do, at a third of the time. Those in float16 would overflow.
    sizes = [
        torch.linalg.vector_norm(t, dim=2, dtype=None if t.dtype == torch.bfloat16 else wide(t.dtype)).to(wide(t.dtype))
        for t in (h, dy)
    ]
    return (sizes[0] * sizes[1]).sum(dim=1)


FactorGradient = MatrixGrad | DiagonalGrad


def compact(gradient: FactorGradient, *, scored: bool = False) -> FactorGradient | DenseGrad:
    """Return the smaller representation of a gradient: the pair ``(h, dy)``, or ``G_b`` itself.

    It is held until all modules have reported. If ``scored``, ``G_b`` keeps its magnitude.
    """
    h, dy = gradient.h, gradient.dy
    if isinstance(gradient, MatrixGrad) and len(h) * h.shape[-1] * dy.shape[-1] >= h.numel() + dy.numel():
        return gradient
    return DenseGrad(gradient.values(), gradient.magnitude() if scored else None)


def added(first: FactorGradient | DenseGrad | None, second: FactorGradient | DenseGrad) -> FactorGradient | DenseGrad:
    """Return the sum of two gradients of a factor that the forward used more than once."""
    if first is None:
        return second
    if isinstance(first, MatrixGrad) and isinstance(second, MatrixGrad):  # a gradient is a sum over tokens, so concatenation adds
        return MatrixGrad(torch.cat([first.h, second.h], dim=1), torch.cat([first.dy, second.dy], dim=1))
    summed = None if isinstance(first, DenseGrad) and first.summed is None else first.magnitude() + second.magnitude()
    return DenseGrad(first.values() + second.values(), summed)
