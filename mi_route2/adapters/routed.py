"""A frozen Linear with a kept adapter and a quarantine beside it.

    y = W x + bias + kept(x) + quarantine(x)
    fold:  y = U ((S + dS) * (Vh x)) + bias + quarantine(x)      (full-rank SVD kept adapter: two matmuls in place of three)

With both adapters at init, ``y`` equals the base bit for bit (unfolded); with both switched off it does so always, folded or not.
Where several logical Linears are fused in one module, each has a ``Branch`` on its own rows of the output.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from mi_route2.adapters.factors import L1, ReadOutput, apply_factor
from mi_route2.adapters.kept import Kept, SVDKept
from mi_route2.adapters.quarantine import Quarantine
from mi_route2.adapters.tape import NO_MASK, Lane, Refuse, Tape, requested
from mi_route2.sites import Slot


@dataclass
class Switchboard:
    """What is on, for all routed Linears of one model; owned by ``Adapters``, changed only through its contexts."""

    kept: bool = True
    quarantine: bool = True
    merged: bool = False
    tape: Tape | None = None
    unrouted: bool = False
    sites: int = 0


_REFUSE = Refuse()


def _note(tape: Tape, site: str, _gradient: Tensor) -> None:
    tape.saw_backward(site, "output")


def _refuse_unmasked(site: str, _gradient: Tensor) -> None:
    raise RuntimeError(f"a hook stands at {site}.hook_mask, but this backward runs outside of a route's step: {NO_MASK}")


class Point(nn.Identity):
    """A place where hooks read or write; the value passes through."""


class Branch(nn.Module):
    """The adapters at one logical Linear, and the points at which hooks see them.

    hook_kept_a       the kept adapter's bottleneck, ``Vh x`` or ``A x``, [b s r]
    hook_kept         what the kept adapter adds, [b s d_out] (under ``fold`` it is not computed apart, and does not fire)
    hook_quarantine   what the quarantine adds, [b s d_out]
    hook_mask         1 where the kept adapter learns and 0 where it is flagged, [b] or [b s], in a pass under a mask route: what
                      a hook returns is what happens. It fires in the forward where flags exist by then, else in the backward,
                      and for pooled gradient flags when the step is finished

    Nothing fires while weights are merged.
    """

    S: Tensor

    def __init__(self, slot: Slot, kept: Kept, quarantine: Quarantine | None, board: Switchboard, fold: Tensor | None):
        super().__init__()
        self.site, self.kept, self.quarantine = slot.name, kept, quarantine
        self._slot, self._board = (slot,), board  # a tuple hides the base module: it is not a part of this one
        self.register_buffer("S", fold, persistent=False)
        self.hook_kept_a, self.hook_kept, self.hook_quarantine, self.hook_mask = Point(), Point(), Point(), Point()

    @property
    def weight(self) -> Float[Tensor, "d_out d_in"]:
        """The frozen base weight of this logical Linear."""
        return self._slot[0].weight

    @property
    def folded(self) -> bool:
        """Whether the base matmul is a part of the kept adapter's."""
        return self.S is not None and self._board.kept

    @property
    def fires(self) -> frozenset[str]:
        """Which of the points kept_a, kept_out and quarantine_out hooks see now."""
        board = self._board
        kept = () if not board.kept else ("kept_a",) if self.folded else ("kept_a", "kept_out")
        quarantine = ("quarantine_out",) if board.quarantine and self.quarantine is not None else ()
        return frozenset(() if board.merged else (*kept, *quarantine))

    def forward(self, x: Float[Tensor, "*batch d_in"], y: Float[Tensor, "*batch d_out"] | None) -> Float[Tensor, "*batch d_out"]:
        """``y``, the base's output, with the adapters added (``None``: the base is folded in)."""
        board, tape = self._board, self._board.tape
        if tape is not None:
            self._read(x, tape)
        if y is None:
            y = self._folded_kept(x, tape)
        elif board.kept:
            y = y + self.hook_kept(self.kept(x, tape, self._lane("kept"), self.site, self.hook_kept_a))
        if board.quarantine and self.quarantine is not None:
            y = y + self.hook_quarantine(self._quarantined(x, tape))
        if tape is not None and torch.is_grad_enabled():
            tape.without_quarantine |= self.quarantine is not None and not board.quarantine
            if tape.outputs is not None:
                y = ReadOutput.apply(y, x, tape, self.site)
            elif tape.kept is None and y is not None and y.requires_grad:  # no lane notes the backward
                y.register_hook(partial(_note, tape, self.site))
        elif tape is None and board.kept and torch.is_grad_enabled() and self.mask_requested:
            y.register_hook(partial(_refuse_unmasked, self.site))  # pyright: ignore[reportOptionalMemberAccess]
        return y  # pyright: ignore[reportReturnType]

    @property
    def mask_requested(self) -> bool:
        """Whether a hook asks for the mask. What hooks every point alike (a cache of everything) takes what is there."""
        return requested(self.hook_mask) and not all(map(requested, (self.hook_kept_a, self.hook_kept, self.hook_quarantine)))

    def _lane(self, adapter: Literal["kept", "quarantine"]) -> Lane | None:
        """What this adapter learns by; ``None``: ordinary autograd."""
        tape = self._board.tape
        if tape is None:
            return None if self._board.unrouted else _REFUSE
        return tape.kept if adapter == "kept" else tape.quarantine

    def _read(self, x: Tensor, tape: Tape) -> None:
        rows = tape.rows(x.detach())  # also where nothing reads: a wrong layout is an error, not a matter of luck
        if not tape.saw_forward(self.site, self.hook_mask):
            return  # a replay shows what was seen before
        if tape.inputs is not None:
            tape.inputs.read(self.site, rows)
        if tape.kept is not None and self._board.kept:
            tape.kept.decide(self.site)

    def _folded_kept(self, x: Tensor, tape: Tape | None) -> Tensor:
        kept, lane = self.kept, self._lane("kept")
        assert isinstance(kept, SVDKept)
        a = self.hook_kept_a(kept.bottleneck(x))
        scaled = a * self.S.to(a.dtype) + apply_factor(a, kept.dS, tape, lane, self.site, "dS")
        return functional.linear(scaled, kept.U, self._slot[0].module.bias)  # pyright: ignore[reportArgumentType]

    def _quarantined(self, x: Tensor, tape: Tape | None) -> Tensor:
        assert self.quarantine is not None
        y = self.quarantine(x, tape, self._lane("quarantine"), self.site)
        if tape is not None and tape.l1 > 0 and torch.is_grad_enabled():
            real = None if tape.real is None else tape.real.reshape(y.shape[:-1])
            y = L1.apply(y, tape.l1 / (y.numel() * self._board.sites), real)
        return y  # pyright: ignore[reportReturnType]

    def merged(self, weight: Float[Tensor, "d_out d_in"]) -> Float[Tensor, "d_out d_in"]:
        """``weight`` and the weights of what is switched on."""
        if self._board.kept:
            weight = weight + self.kept.delta().to(weight.dtype)
        if self._board.quarantine and self.quarantine is not None:
            weight = weight + self.quarantine.delta().to(weight.dtype)
        return weight


class RoutedLinear(nn.Module):
    """Wraps ``base`` (frozen) with the branches of its logical Linears: ``route``, or ``route_q`` and so on where it is fused."""

    merged_weight: Tensor

    def __init__(self, slots: Sequence[Slot], branches: Sequence[Branch], board: Switchboard):
        super().__init__()
        self.base, self.transposed, self.board = slots[0].module, slots[0].transposed, board
        self._names: list[str] = []
        for slot, branch in zip(slots, branches, strict=True):
            self._names.append("route" if slot.rows is None else f"route_{slot.name.rpartition('.')[2]}")
            self.add_module(self._names[-1], branch)
            self.register_buffer(f"{self._names[-1]}_rows", slot.rows, persistent=False)
        self.register_buffer("merged_weight", None, persistent=False)
        self.train(self.base.training)  # a model that was in eval() has no module in training afterwards

    @property
    def branches(self) -> list[tuple[Branch, Tensor | None]]:
        """Every branch with its rows of the output (``None``: all)."""
        return [(getattr(self, name), getattr(self, f"{name}_rows")) for name in self._names]

    @property
    def weight(self) -> Tensor:
        """The frozen base weight, as the base stores it."""
        return self.base.get_parameter("weight")

    @property
    def bias(self) -> Tensor | None:
        """The frozen base bias."""
        return self.base.bias  # pyright: ignore[reportReturnType]

    @property
    def in_features(self) -> int:
        return self.weight.shape[0 if self.transposed else 1]

    @property
    def out_features(self) -> int:
        return self.weight.shape[1 if self.transposed else 0]

    def forward(self, x: Float[Tensor, "*batch d_in"], *args: Any, **kwargs: Any) -> Float[Tensor, "*batch d_out"]:
        if self.board.merged:
            return functional.linear(x, self.merged_weight, self.bias)
        branches = self.branches
        if branches[0][0].folded:
            return branches[0][0](x, None)
        y = self.base(x, *args, **kwargs)
        for branch, rows in branches:
            y = branch(x, y) if rows is None else y.index_copy(-1, rows, branch(x, y[..., rows]))
        return y

    @torch.no_grad()
    def merge(self) -> None:
        """Write ``W`` plus what is switched on into one weight, for fast generation without gradients."""
        weight = self.weight.detach()
        total = (weight.mT if self.transposed else weight).to(torch.float64)
        for branch, rows in self.branches:
            total = branch.merged(total) if rows is None else total.index_copy(0, rows, branch.merged(total[rows]))
        self.merged_weight = total.to(weight.dtype)

    def unmerge(self) -> None:
        self.register_buffer("merged_weight", None, persistent=False)
