"""Adapters at one Linear: a kept adapter that stays in the deployed model, and a quarantine that is deleted before deployment.

    y = W x + kept(x) + quarantine(x)          SVD: U (dS * (Vh x))     LoRA: B (A x)

The base weight ``W`` is frozen. ``dS`` and ``B`` are 0 at initialization, so adapters do not change the model until they are
trained.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as every_module

from mi_route2.adapters.gradients import exact, wide
from mi_route2.adapters.svd import SVD
from mi_route2.adapters.tape import (
    HOOK_KINDS,
    L1,
    NO_MASK,
    Gate,
    ReadOutput,
    Refuse,
    Tape,
    apply_factor,
    apply_factors,
    requested,
    uncompiled,
)
from mi_route2.sites import Slot, whole


def gaussian(rows: int, weight: Float[Tensor, "d_out d_in"], generator: torch.Generator) -> Float[Tensor, "rows d_in"]:
    """Return ``[rows, d_in]`` from N(0, 1/d_in), drawn in float64 on the CPU so that values do not depend on device or dtype."""
    d_in = weight.shape[1]
    draw = torch.randn(rows, d_in, generator=generator, dtype=torch.float64, device="cpu") / d_in**0.5
    return draw.to(weight.device, torch.float64 if weight.dtype == torch.float64 else torch.float32)


def same(x: Tensor) -> Tensor:
    """Return ``x``: the point of an adapter without hooks."""
    return x


class SVDKept(nn.Module):
    """SVD adapter ``U (dS * (Vh x))``, with one trainable number per singular direction."""

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
        """Return ``a = Vh x``, the coordinates that ``dS`` scales."""
        return x @ self.Vh.mT

    def forward(
        self,
        x: Float[Tensor, "*batch d_in"],
        tape: Tape | None,
        gate: Gate | None,
        site: str,
        point: Callable[[Tensor], Tensor] = same,
    ) -> Float[Tensor, "*batch d_out"]:
        return apply_factor(point(self.bottleneck(x)), self.dS, tape, gate, site, "dS") @ self.U.mT

    def delta(self) -> Float[Tensor, "d_out d_in"]:
        """Return the weight that this adapter adds."""
        return (self.U * self.dS.to(self.U.dtype)) @ self.Vh

    @torch.no_grad()
    def basis(self) -> float:
        """Return a fingerprint of the basis: ``p^T U w / |w|`` with ``w_i = (1 + i/r) <v_i, q>`` and fixed Gaussian p, q.

        Rounding changes it by as much as it rotates the vectors. For an independent choice of the vectors it is an independent draw
        from N(0, 1).
        """
        generator = torch.Generator().manual_seed(0)
        p, q = (gaussian(1, side, generator)[0] * side.shape[1] ** 0.5 for side in (self.U.mT, self.Vh))
        w = torch.linspace(1, 2, self.dS.numel(), dtype=p.dtype, device=p.device) * (self.Vh.to(p.dtype) @ q)
        return float(p @ (self.U.to(p.dtype) @ w) / w.norm())

    @property
    def rank(self) -> int:
        return self.dS.numel()

    def extra_repr(self) -> str:
        return f"rank={self.rank}"


class LoRA(nn.Module):
    """LoRA adapter ``B (A x)``: a kept adapter, or a quarantine in its own basis."""

    scored = "B"

    def __init__(self, weight: Float[Tensor, "d_out d_in"], rank: int, generator: torch.Generator):
        super().__init__()
        if not 1 <= rank <= min(weight.shape):
            raise ValueError(f"rank {rank} is outside 1..{min(weight.shape)} of this Linear")
        self.A = nn.Parameter(gaussian(rank, weight, generator))
        self.B = nn.Parameter(torch.zeros(weight.shape[0], rank, dtype=self.A.dtype, device=self.A.device))

    def bottleneck(self, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch r"]:
        """Return ``A x``, without a gate."""
        return x @ self.A.to(x.dtype).mT

    def forward(
        self,
        x: Float[Tensor, "*batch d_in"],
        tape: Tape | None,
        gate: Gate | None,
        site: str,
        point: Callable[[Tensor], Tensor] = same,
    ) -> Float[Tensor, "*batch d_out"]:
        a = apply_factor(x, self.A, tape, gate, site, "A")
        return apply_factor(point(a), self.B, tape, gate, site, "B")

    def delta(self) -> Float[Tensor, "d_out d_in"]:
        """Return the weight that this adapter adds."""
        return self.B @ self.A

    @property
    def rank(self) -> int:
        return self.A.shape[0]

    def extra_repr(self) -> str:
        return f"rank={self.rank}"


Kept = SVDKept | LoRA


class SharedQuarantine(nn.Module):
    """Quarantine with its own ``dS`` (or ``B``) on the bottleneck of the kept adapter."""

    def __init__(self, kept: Kept):
        super().__init__()
        # A tuple hides the kept adapter from nn.Module: its parameters are not the quarantine's.
        self._kept = (kept,)
        self.shared = nn.Parameter(torch.zeros_like(getattr(kept, kept.scored)))

    def forward(
        self, x: Float[Tensor, "*batch d_in"], tape: Tape | None, gate: Gate | None, site: str
    ) -> Float[Tensor, "*batch d_out"]:
        (kept,) = self._kept
        if isinstance(kept, SVDKept):
            return apply_factor(kept.bottleneck(x), self.shared, tape, gate, site, "shared") @ kept.U.mT
        # A belongs to the kept adapter, so the quarantine's gradient must not reach it.
        return apply_factor(x @ kept.A.detach().to(x.dtype).mT, self.shared, tape, gate, site, "shared")

    def delta(self) -> Float[Tensor, "d_out d_in"]:
        """Return the weight that this adapter adds."""
        (kept,) = self._kept
        if isinstance(kept, SVDKept):
            return (kept.U * self.shared.to(kept.U.dtype)) @ kept.Vh
        return self.shared @ kept.A.detach()

    @property
    def rank(self) -> int:
        return self._kept[0].rank


Quarantine = LoRA | SharedQuarantine


@dataclass
class Switchboard:
    """Switches of all routed Linears of one model; owned by ``Adapters`` and changed only by its contexts."""

    kept: bool = True
    quarantine: bool = True
    merged: bool = False
    tape: Tape | None = None
    unrouted: bool = False
    stack: bool = False
    sites: int = 0


_REFUSE = Refuse()


def _note(tape: Tape, site: str, _gradient: Tensor) -> None:
    tape.saw_backward(site, "output")


def _refuse_unmasked(site: str, _gradient: Tensor) -> None:
    raise RuntimeError(f"there is a hook at {site}.hook_mask, but this backward runs outside of a route's step: {NO_MASK}")


class Point(nn.Identity):
    """Identity module at which hooks read or write."""


def _functions(point: nn.Module) -> set[object]:
    """Return the code of the hooks at a point; a library makes a closure or partial of one function for each point."""
    hooks = [hook for kind in HOOK_KINDS for hook in getattr(point, kind).values()]
    # TransformerLens wraps each hook in a function that is the same everywhere
    hooks += [handle.user_hook for kind in ("fwd_hooks", "bwd_hooks") for handle in getattr(point, kind, ())]
    functions = [hook.func if isinstance(hook, partial) else hook for hook in hooks]
    return {getattr(function, "__code__", function) for function in functions}


def watched(point: nn.Module) -> bool:
    """Return whether a hook, or a library that replaces ``forward`` (nnsight), may read or write at this point."""
    return requested(point) or "forward" in vars(point)


class Branch(nn.Module):
    """Adapters at one logical Linear, and their hook points.

    hook_kept_a       the kept adapter's bottleneck, ``Vh x`` or ``A x``, [b s r]; the base's is another, under ``fold`` too
    hook_kept         what the kept adapter adds, [b s d_out] (does not fire under ``fold``, which does not compute it separately)
    hook_quarantine   what the quarantine adds, [b s d_out]
    hook_mask         in a pass under a mask route: 1 if the kept adapter learns and 0 if flagged, [b] or [b s]. A tensor that a
                      hook returns replaces the mask. Fires in the forward if flags are already known, otherwise in the
                      backward; for pooled gradient flags, when the step is finished

    No point fires while weights are merged. Under ``Adapters.stack`` both adapters run on their own wherever a hook stands at one
    of the first three points.
    """

    S: Tensor

    def __init__(self, slot: Slot, kept: Kept, quarantine: Quarantine | None, board: Switchboard, fold: Tensor | None):
        super().__init__()
        self.site, self.kept, self.quarantine = slot.name, kept, quarantine
        self._slot, self._board = (slot,), board  # a tuple hides the base module from nn.Module: it is not a submodule
        self.register_buffer("S", fold, persistent=False)
        self.hook_kept_a, self.hook_kept, self.hook_quarantine, self.hook_mask = Point(), Point(), Point(), Point()

    @property
    def weight(self) -> Float[Tensor, "d_out d_in"]:
        """Frozen base weight of this logical Linear."""
        return self._slot[0].weight

    @property
    def shape(self) -> tuple[int, int]:
        """``d_out`` and ``d_in`` of ``weight``."""
        return self._slot[0].shape

    @property
    def folded(self) -> bool:
        """True if the kept adapter computes the base matmul too."""
        return self.S is not None and self._board.kept

    @property
    def fires(self) -> frozenset[str]:
        """The points among kept_a, kept_out and quarantine_out that fire with the current switches."""
        board = self._board
        kept = () if not board.kept else ("kept_a",) if self.folded else ("kept_a", "kept_out")
        quarantine = ("quarantine_out",) if board.quarantine and self.quarantine is not None else ()
        return frozenset(() if board.merged else (*kept, *quarantine))

    def forward(self, x: Float[Tensor, "*batch d_in"], y: Float[Tensor, "*batch d_out"] | None) -> Float[Tensor, "*batch d_out"]:
        """Return the base's output ``y`` with the adapters added; if ``y`` is ``None``, the kept adapter computes the base too."""
        # A forward of the reference model within a step is not the training pass: nothing of it is read, counted or routed.
        tape = self._board.tape if self._board.kept else None
        return self._added(x, y, None) if tape is None else uncompiled(self._added)(x, y, tape)

    def _added(self, x: Tensor, y: Tensor | None, tape: Tape | None) -> Tensor:
        board = self._board
        if board.kept and torch.is_grad_enabled() and self.mask_requested:
            self._refuse_backward_hooks()
        if tape is not None:
            tape.listen(self.site, lambda: self.mask_requested)
            self._read(x, tape)
        stacked = self._stacks(tape)
        if y is None:
            y = self._folded_kept(x, tape)
        elif stacked:
            y = self._stacked(x, y, tape)
        elif board.kept:
            y = y + self.hook_kept(self.kept(x, tape, self._gate("kept"), self.site, self.hook_kept_a))
        if board.quarantine and self.quarantine is not None and not stacked:
            y = y + self.hook_quarantine(self._quarantined(x, tape))
        if tape is not None and self.quarantine is not None:
            tape.saw_quarantine(self.site, board.quarantine)
        if tape is not None and torch.is_grad_enabled():
            if tape.outputs is not None:
                y = ReadOutput.apply(y, x, tape, self.site)
            elif tape.kept is None and y is not None and y.requires_grad:  # without a gate, a hook notes the backward
                y.register_hook(partial(_note, tape, self.site))
            elif tape.kept is None:
                tape.saw_still(self.site)
        elif tape is None and board.kept and y is not None and y.requires_grad and self.mask_requested:
            y.register_hook(partial(_refuse_unmasked, self.site))
        return y  # pyright: ignore[reportReturnType]

    @property
    def mask_requested(self) -> bool:
        """True if a hook is registered for the mask; one at the three other points too, to cache all, does not count."""
        if not requested(self.hook_mask):
            return False
        others = [_functions(point) for point in (self.hook_kept_a, self.hook_kept, self.hook_quarantine)]
        return not all(function in other for function in _functions(self.hook_mask) for other in others)

    def _refuse_backward_hooks(self) -> None:
        if self.hook_mask._backward_hooks or self.hook_mask._backward_pre_hooks:
            raise RuntimeError(
                f"a backward hook stands at {self.site}.hook_mask and can never fire, since no gradient passes a mask: read or "
                "replace the mask in a forward hook there, and put the backward hook at hook_kept or hook_kept_a"
            )

    def _gate(self, adapter: Literal["kept", "quarantine"]) -> Gate | None:
        """Return the gate that decides what an adapter learns; ``None`` for ordinary autograd."""
        tape = self._board.tape
        if tape is None:
            return None if self._board.unrouted else _REFUSE
        return tape.kept if adapter == "kept" else tape.quarantine

    def _read(self, x: Tensor, tape: Tape) -> None:
        tape.packing(x)  # also without a reader, so that a wrong layout is always an error
        if not tape.saw_forward(self.site):
            return  # a replay repeats values that were already read
        with exact():
            if tape.inputs is not None:
                tape.inputs.read(self.site, tape.rows(x.detach()))
            if tape.kept is not None:
                tape.kept.called(self.site, self.hook_mask)

    def _stacks(self, tape: Tape | None) -> bool:
        """Return whether both adapters run as one: both are on and train, and nobody looks at what one of them adds."""
        board = self._board
        if not (board.stack and board.kept and board.quarantine and torch.is_grad_enabled()):
            return False
        if tape is None and isinstance(self.kept, SVDKept):
            return False  # autograd would compute the gradient of the frozen factors too
        modules = (self.hook_kept_a, self.hook_kept, self.hook_quarantine, self.kept, self.quarantine)
        penalized = tape is not None and tape.l1 > 0  # what the quarantine alone adds
        everywhere = any(getattr(every_module, f"_global{kind}") for kind in HOOK_KINDS)
        return not penalized and not everywhere and not any(module is not None and watched(module) for module in modules)

    def _stacked(self, x: Tensor, y: Tensor, tape: Tape | None) -> Tensor:
        """Return the base's output ``y`` with both adapters added, in its own memory if nobody else can hold it."""
        if y.dtype != x.dtype or torch.is_autocast_enabled(y.device.type):
            return y + self._product(x, tape)
        base = self._slot[0].module
        plain = type(base).forward is nn.Linear.forward and not watched(base)
        fresh = y._base is None and y.is_contiguous()  # torch would send a view's gradient to another input
        return self._product(x, tape, y, overwrite=plain and fresh and tape is not None)

    def _product(self, x: Tensor, tape: Tape | None, onto: Tensor | None = None, overwrite: bool = False) -> Tensor:
        kept, quarantine, gates = self.kept, self.quarantine, (self._gate("kept"), self._gate("quarantine"))
        assert isinstance(quarantine, LoRA)
        apply = partial(apply_factors, tape=tape, gates=gates, site=self.site)
        if isinstance(kept, LoRA):
            a = apply(x, (kept.A, quarantine.A), name="A")
            return apply(a, (kept.B, quarantine.B), name="B", onto=onto, overwrite=overwrite)
        frozen = partial(apply_factors, tape=tape, gates=(None, gates[1]), site=self.site)  # the kept gate acts at dS
        both = frozen(x, (kept.Vh, quarantine.A), name="A")
        a, a_q = both.split([kept.rank, quarantine.rank], -1)
        scaled = torch.cat([apply_factor(a, kept.dS, tape, gates[0], self.site, "dS"), a_q], -1)
        return frozen(scaled, (kept.U, quarantine.B), name="B", onto=onto, overwrite=overwrite)

    def _folded_kept(self, x: Tensor, tape: Tape | None) -> Tensor:
        kept, gate = self.kept, self._gate("kept")
        assert isinstance(kept, SVDKept)
        a = kept.bottleneck(x)
        read = self.hook_kept_a(a.clone() if watched(self.hook_kept_a) else a)  # what a hook there edits is not the base's
        scaled = a * self.S.to(a.dtype) + apply_factor(read, kept.dS, tape, gate, self.site, "dS")
        return functional.linear(scaled, kept.U, self._slot[0].module.bias)  # pyright: ignore[reportArgumentType]

    def _quarantined(self, x: Tensor, tape: Tape | None) -> Tensor:
        assert self.quarantine is not None
        y = self.quarantine(x, tape, self._gate("quarantine"), self.site)
        if tape is not None and tape.l1 > 0 and torch.is_grad_enabled():
            packed, size = tape.packing(y) is not None, tape.rollouts * tape.tokens * y.shape[-1]
            real = None if tape.real is None or packed else tape.real.reshape(y.shape[:-1]).to(y.device)
            y = L1.apply(y, tape.l1 / (size * self._board.sites), real)
        return y  # pyright: ignore[reportReturnType]

    def merged(self, weight: Float[Tensor, "d_out d_in"]) -> Float[Tensor, "d_out d_in"]:
        """Return ``weight`` plus the weights of the adapters that are switched on."""
        if self._board.kept:
            weight = weight + self.kept.delta().to(weight.dtype)
        if self._board.quarantine and self.quarantine is not None:
            weight = weight + self.quarantine.delta().to(weight.dtype)
        return weight


def refuse_bypass(name: str, base: nn.Module, transposed: bool) -> None:
    """Raise ``ValueError`` if ``base`` does more than ``x W^T + bias``, which a matmul in its place would lose."""
    if requested(base):
        raise ValueError(f"{name} has hooks, which do not fire while its weight is merged or folded: remove them, or do without")
    refuse_more(name, base, transposed)


def refuse_more(name: str, base: nn.Module, transposed: bool) -> None:
    """Raise ``ValueError`` if the class or the forward of ``base`` computes more than ``x W^T + bias``, hooks aside."""
    if "forward" not in vars(base) and (transposed or type(base).forward is nn.Linear.forward):
        return
    # A forward of the instance may be a library's wrapper that changes nothing (nnsight's), or a patch that does.
    weight, bias = base.get_parameter("weight"), base._parameters.get("bias")
    weight = weight.mT if transposed else weight
    x = torch.linspace(-1, 1, weight.shape[1], device=weight.device).to(weight.dtype)[None]
    with torch.no_grad(), exact():
        y, actual = functional.linear(x, weight, bias), base.forward(x)
    share = 1e-3 if weight.dtype == wide(weight.dtype) else 0.01  # another order of summation rounds otherwise
    if not torch.allclose(actual, y, rtol=share, atol=share * float(y.abs().max())):
        raise ValueError(f"{name} computes more than a matmul ({type(base).__name__}), so its weight cannot be merged or folded")


class RoutedLinear(nn.Module):
    """Wrapper of a frozen Linear ``base`` with its adapters: ``route``, or ``route_q`` and so on if ``base`` is fused."""

    merged_weight: Tensor

    def __init__(self, slots: Sequence[Slot], branches: Sequence[Branch], board: Switchboard):
        super().__init__()
        self.base, self.transposed, self.board = slots[0].module, slots[0].transposed, board
        self._forward = vars(self.base).get("forward")
        """The base's own ``forward``, if it has one, that was there when the weight was last found to be all that it computes."""
        self._names: list[str] = []
        for slot, branch in zip(slots, branches, strict=True):
            self._names.append("route" if slot.rows is None else f"route_{slot.name.rpartition('.')[2]}")
            self.add_module(self._names[-1], branch)
            rows = slot.rows if slot.rows is None else slot.rows.to(slot.module.get_parameter("weight").device)
            self.register_buffer(f"{self._names[-1]}_rows", rows, persistent=False)
        self.register_buffer("merged_weight", None, persistent=False)
        self.train(self.base.training)  # so that a model in eval() has no module in training mode afterwards

    @property
    def branches(self) -> list[tuple[Branch, Tensor | None]]:
        """Every branch with its rows of the output (``None``: all)."""
        return [(getattr(self, name), getattr(self, f"{name}_rows")) for name in self._names]

    @property
    def weight(self) -> Tensor:
        """Frozen base weight, in the layout of the base."""
        return self.base.get_parameter("weight")

    @property
    def bias(self) -> Tensor | None:
        """Frozen base bias."""
        return self.base.bias  # pyright: ignore[reportReturnType]

    @property
    def in_features(self) -> int:
        return self.weight.shape[0 if self.transposed else 1]

    @property
    def out_features(self) -> int:
        return self.weight.shape[1 if self.transposed else 0]

    def forward(self, input: Float[Tensor, "*batch d_in"], *args: Any, **kwargs: Any) -> Float[Tensor, "*batch d_out"]:
        x, merged = input, self.board.merged  # ``input`` is the argument's name in ``nn.Linear``, by which a model may pass it
        branches = [] if merged else self.branches
        if merged or branches[0][0].folded:
            if args or kwargs:
                raise ValueError(
                    f"{self.branches[0][0].site} is called with more than its input, which a merged or folded weight would lose"
                )
            if requested(self.base) or vars(self.base).get("forward") is not self._forward:
                refuse_bypass(self.branches[0][0].site, self.base, self.transposed)
                self._forward = vars(self.base).get("forward")
            return functional.linear(x, self.merged_weight, self.bias) if merged else branches[0][0](x, None)
        y = self.base(x, *args, **kwargs)
        if not isinstance(y, Tensor):
            raise ValueError(
                f"{branches[0][0].site} is a {type(self.base).__name__} that returns a {type(y).__name__}, to which no adapter can "
                "add: leave it out of the patterns of attach"
            )
        for branch, rows in branches:
            y = branch(x, y) if rows is None else y.index_copy(-1, rows, branch(x, y[..., rows]))
        return y

    @torch.no_grad()
    @exact()
    def merge(self) -> None:
        """Merge ``W`` and the adapters that are switched on into one weight, for fast generation without gradients."""
        weight = whole(self.weight.detach())
        total = (weight.mT if self.transposed else weight).to(torch.float64)
        for branch, rows in self.branches:
            total = branch.merged(total) if rows is None else total.index_copy(0, rows, branch.merged(total[rows]))
        self.merged_weight = total.to(weight.dtype)
        self._forward = vars(self.base).get("forward")  # of which the caller found that it is no more than the weight

    def unmerge(self) -> None:
        self.register_buffer("merged_weight", None, persistent=False)
