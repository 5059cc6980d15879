"""The quarantine adapter at one Linear: it learns what the kept adapter must not, and is deleted before deployment.

    LoRA (own basis):  quar(x) = B_q (A_q x)      A_q [k d_in] ~ N(0, 1/d_in), B_q [d_out k] zero at init
    shared basis:      quar(x) = U (dS_q * (Vh x))   or   B_q (A x) with the kept adapter's frozen-here A

The shared basis is an ablation: with one shared coordinate both adapters receive identical gradients, and only a mask can
tell them apart.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mi_route2.adapters.factors import apply_factor
from mi_route2.adapters.kept import Kept, LoRA, SVDKept
from mi_route2.adapters.tape import Lane, Tape


class SharedQuarantine(nn.Module):
    """A second ``dS`` (or a second ``B``) behind the kept adapter's own bottleneck."""

    def __init__(self, kept: Kept):
        super().__init__()
        # A tuple hides the kept adapter from nn.Module: its parameters are not the quarantine's.
        self._kept = (kept,)
        self.shared = nn.Parameter(torch.zeros_like(getattr(kept, kept.scored)))

    def forward(
        self, x: Float[Tensor, "*batch d_in"], tape: Tape | None, lane: Lane | None, site: str
    ) -> Float[Tensor, "*batch d_out"]:
        (kept,) = self._kept
        if isinstance(kept, SVDKept):
            return apply_factor(kept.bottleneck(x), self.shared, tape, lane, site, "shared") @ kept.U.mT
        # A belongs to the kept adapter: what the quarantine learns must not reach it.
        return apply_factor(x @ kept.A.detach().to(x.dtype).mT, self.shared, tape, lane, site, "shared")

    def delta(self) -> Float[Tensor, "d_out d_in"]:
        """The weight that this adapter adds."""
        (kept,) = self._kept
        if isinstance(kept, SVDKept):
            return (kept.U * self.shared.to(kept.U.dtype)) @ kept.Vh
        return self.shared @ kept.A.detach()


Quarantine = LoRA | SharedQuarantine
