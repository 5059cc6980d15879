"""The adapters at one Linear; the kept one is what stays in the deployed model.

    SVD:   kept(x) = U (dS * (Vh x))          dS [r], zero at init; U, Vh the weight's own singular vectors, frozen
    LoRA:  kept(x) = B (A x)                  A [r d_in] ~ N(0, 1/d_in), B [d_out r] zero at init

Both are exactly 0 at init. The factor that per-rollout gradients are scored on is ``dS``, or ``B`` (at B = 0 the gradient of A
is exactly 0); a flagged rollout leaves nothing in either.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mi_route2.adapters.factors import apply_factor
from mi_route2.adapters.gradients import wide
from mi_route2.adapters.svd import SVD
from mi_route2.adapters.tape import Lane, Tape


def gaussian(rows: int, weight: Float[Tensor, "d_out d_in"], generator: torch.Generator) -> Float[Tensor, "rows d_in"]:
    """``[rows, d_in]`` from N(0, 1/d_in), drawn in float64 on the CPU so that every device and type starts alike."""
    d_in = weight.shape[1]
    draw = torch.randn(rows, d_in, generator=generator, dtype=torch.float64) / d_in**0.5
    return draw.to(weight.device, torch.float64 if weight.dtype == torch.float64 else torch.float32)


def same(x: Tensor) -> Tensor:
    """The point where nobody listens."""
    return x


class SVDKept(nn.Module):
    """``U (dS * (Vh x))``: one trainable number a singular direction."""

    U: Tensor
    Vh: Tensor
    scored = "dS"

    def __init__(self, weight: Float[Tensor, "d_out d_in"], svd: SVD):
        super().__init__()
        dtype = weight.dtype
        self.register_buffer("U", svd.U.to(dtype), persistent=False)
        self.register_buffer("Vh", svd.Vh.to(dtype), persistent=False)
        self.dS = nn.Parameter(torch.zeros(svd.S.numel(), dtype=wide(dtype), device=weight.device))

    def bottleneck(self, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch r"]:
        """``a = Vh x``: the coordinates that ``dS`` scales."""
        return x @ self.Vh.mT

    def forward(
        self, x: Float[Tensor, "*batch d_in"], tape: Tape | None, lane: Lane | None, site: str, point: Callable[[Tensor], Tensor] = same
    ) -> Float[Tensor, "*batch d_out"]:
        return apply_factor(point(self.bottleneck(x)), self.dS, tape, lane, site, "dS") @ self.U.mT

    def delta(self) -> Float[Tensor, "d_out d_in"]:
        """The weight that this adapter adds."""
        return (self.U * self.dS.to(self.U.dtype)) @ self.Vh

    @torch.no_grad()
    def basis(self) -> float:
        """A number by which another basis is told: ``p^T U w / |w|`` with ``w_i = (1 + i/r) <v_i, q>`` and fixed Gaussian p, q.

        Rounding moves it by as much as it turns the vectors. An independent choice of them draws it anew from N(0, 1).
        """
        generator = torch.Generator().manual_seed(0)
        p, q = (gaussian(1, side, generator)[0] * side.shape[1] ** 0.5 for side in (self.U.mT, self.Vh))
        w = torch.linspace(1, 2, self.dS.numel(), dtype=p.dtype, device=p.device) * (self.Vh.to(p.dtype) @ q)
        return float(p @ (self.U.to(p.dtype) @ w) / w.norm())

    def extra_repr(self) -> str:
        return f"rank={self.dS.numel()}"


class LoRA(nn.Module):
    """``B (A x)``: a kept adapter, or a quarantine in a basis of its own."""

    scored = "B"

    def __init__(self, weight: Float[Tensor, "d_out d_in"], rank: int, generator: torch.Generator):
        super().__init__()
        if not 1 <= rank <= min(weight.shape):
            raise ValueError(f"rank {rank} is outside 1..{min(weight.shape)} of this Linear")
        self.A = nn.Parameter(gaussian(rank, weight, generator))
        self.B = nn.Parameter(torch.zeros(weight.shape[0], rank, dtype=self.A.dtype, device=self.A.device))

    def bottleneck(self, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch r"]:
        """``A x``, without a lane."""
        return x @ self.A.to(x.dtype).mT

    def forward(
        self, x: Float[Tensor, "*batch d_in"], tape: Tape | None, lane: Lane | None, site: str, point: Callable[[Tensor], Tensor] = same
    ) -> Float[Tensor, "*batch d_out"]:
        a = apply_factor(x, self.A, tape, lane, site, "A")
        return apply_factor(point(a), self.B, tape, lane, site, "B")

    def delta(self) -> Float[Tensor, "d_out d_in"]:
        """The weight that this adapter adds."""
        return self.B @ self.A

    def extra_repr(self) -> str:
        return f"rank={self.A.shape[0]}"


Kept = SVDKept | LoRA
