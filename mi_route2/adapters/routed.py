"""A frozen Linear with a kept adapter and a quarantine beside it.

    y = W x + bias + kept(x) + quarantine(x)
    fold:  y = U ((S + dS) * (Vh x)) + bias + quarantine(x)      (full-rank SVD kept adapter: two matmuls in place of three)

With both adapters at init, ``y`` equals the base bit for bit (unfolded); with both switched off it does so always, folded or not.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from mi_route2.adapters.factors import L1, ReadOutput, apply_factor
from mi_route2.adapters.kept import Kept, SVDKept
from mi_route2.adapters.quarantine import Quarantine
from mi_route2.adapters.tape import Tape


@dataclass
class Switchboard:
    """What is on, for all routed Linears of one model; owned by ``Adapters``, changed only through its contexts."""

    kept: bool = True
    quarantine: bool = True
    merged: bool = False
    tape: Tape | None = None
    sites: int = 0


class RoutedLinear(nn.Module):
    """Wraps ``base`` (frozen) with a kept adapter and, optionally, a quarantine."""

    S: Tensor
    merged_weight: Tensor

    def __init__(
        self,
        base: nn.Linear,
        site: str,
        kept: Kept,
        quarantine: Quarantine | None,
        board: Switchboard,
        fold: Tensor | None,
    ):
        super().__init__()
        self.base, self.site, self.kept, self.quarantine = base, site, kept, quarantine
        self._board = board
        self.register_buffer("S", fold, persistent=False)
        self.register_buffer("merged_weight", None, persistent=False)

    @property
    def weight(self) -> Tensor:
        """The frozen base weight."""
        return self.base.weight

    @property
    def bias(self) -> Tensor | None:
        """The frozen base bias."""
        return self.base.bias

    @property
    def in_features(self) -> int:
        return self.base.in_features

    @property
    def out_features(self) -> int:
        return self.base.out_features

    def forward(self, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_out"]:
        board = self._board
        if board.merged:
            return functional.linear(x, self.merged_weight, self.base.bias)
        tape = board.tape
        if tape is not None:
            tape.saw_forward(self.site)
            rows = tape.rows(x.detach())  # also where nothing reads: a wrong layout is an error, not a matter of luck
            if tape.inputs is not None:
                tape.inputs.read(self.site, rows)
        y = self._base_and_kept(x, tape) if board.kept else self.base(x)
        if board.quarantine and self.quarantine is not None:
            y = y + self._quarantined(x, tape)
        if tape is not None and tape.outputs is not None and torch.is_grad_enabled():
            y = ReadOutput.apply(y, x, tape, self.site)
        return y  # pyright: ignore[reportReturnType]

    def _base_and_kept(self, x: Tensor, tape: Tape | None) -> Tensor:
        lane = None if tape is None else tape.kept
        if self.S is None:
            return self.base(x) + self.kept(x, tape, lane, self.site)
        kept = self.kept
        assert isinstance(kept, SVDKept)
        a = kept.bottleneck(x)
        scaled = a * self.S.to(a.dtype) + apply_factor(a, kept.dS, tape, lane, self.site, "dS")
        return functional.linear(scaled, kept.U, self.base.bias)

    def _quarantined(self, x: Tensor, tape: Tape | None) -> Tensor:
        assert self.quarantine is not None
        y = self.quarantine(x, tape, None if tape is None else tape.quarantine, self.site)
        if tape is not None and tape.l1 > 0 and torch.is_grad_enabled():
            real = None if tape.real is None else tape.real.reshape(y.shape[:-1])
            y = L1.apply(y, tape.l1 / (y.numel() * self._board.sites), real)
        return y  # pyright: ignore[reportReturnType]

    @torch.no_grad()
    def merge(self) -> None:
        """Write ``W`` plus what is switched on into one weight, for fast generation without gradients."""
        total = self.base.weight.detach().to(torch.float64)
        if self._board.kept:
            total = total + self.kept.delta().to(torch.float64)
        if self._board.quarantine and self.quarantine is not None:
            total = total + self.quarantine.delta().to(torch.float64)
        self.merged_weight = total.to(self.base.weight.dtype)

    def unmerge(self) -> None:
        self.register_buffer("merged_weight", None, persistent=False)
