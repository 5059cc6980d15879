"""Adapters at one Linear: a kept adapter that stays in the deployed model, and a quarantine that is deleted before deployment.

    y = W x + kept(x) + quarantine(x)          SVD: U (dS * (Vh x))     LoRA: B (A x)

The base weight ``W`` is frozen. ``dS`` and ``B`` are 0 at initialization, so adapters do not change the model until they are
trained.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import get_ident
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from mi_route2.adapters.gradients import exact, wide
from mi_route2.adapters.svd import SVD, decompose
from mi_route2.adapters.tape import L1, Gate, ReadOutput, Refuse, Tape, apply_factor, requested, uncompiled
from mi_route2.sites import Slot, whole


def gaussian(rows: int, weight: Float[Tensor, "d_out d_in"], generator: torch.Generator) -> Float[Tensor, "rows d_in"]:
    """Return ``[rows, d_in]`` from N(0, 1/d_in), drawn in float64 on the CPU so that values do not depend on device or dtype."""
    d_in = weight.shape[1]
    draw = torch.randn(rows, d_in, generator=generator, dtype=torch.float64, device="cpu") / d_in**0.5
    return draw.to(weight.device, torch.float64 if weight.dtype == torch.float64 else torch.float32)


def same(x: Tensor) -> Tensor:
    """Return ``x``: the point of an adapter without hooks."""
    return x


class Adapter(nn.Module):
    """Module whose parameters keep the type that ``attach`` gives them, ``wide`` of the base's, when the model is cast."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Adapter":
        buffers = {id(t) for t in self.buffers(recurse=False)}

        def moved(t: Tensor) -> Tensor:
            new = fn(t)
            return new if id(t) in buffers or new.dtype == wide(new.dtype) else t.to(new.device, wide(new.dtype))

        return super()._apply(moved, recurse)


class SVDKept(Adapter):
    """SVD adapter ``U (dS * (Vh x))``, with one trainable number per singular direction."""

    U: Tensor
    Vh: Tensor
    scored = "dS"

    def __init__(self, weight: Float[Tensor, "d_out d_in"], svd: SVD):
        super().__init__()
        dtype = weight.dtype
        self.span(svd, dtype)
        self.dS = nn.Parameter(torch.zeros(svd.S.numel(), dtype=wide(dtype), device=weight.device))

    def span(self, svd: SVD, dtype: torch.dtype) -> None:
        """Set the vectors ``U`` and ``Vh``."""
        self.register_buffer("U", svd.U.to(dtype), persistent=False)
        self.register_buffer("Vh", svd.Vh.to(dtype), persistent=False)

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


class LoRA(Adapter):
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


class SharedQuarantine(Adapter):
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


@dataclass(frozen=True, eq=False)
class Switch:
    """Changes of a context of ``Adapters`` that a thread has entered."""

    thread: int
    changes: dict[str, Any]


@dataclass
class Switchboard:
    """Switches of all routed Linears of one model; owned by ``Adapters`` and changed only by its contexts."""

    kept: bool = True
    quarantine: bool = True
    merged: bool = False
    tape: Tape | None = None
    unrouted: bool = False
    sites: int = 0
    entered: list[Switch] = field(default_factory=list)

    @contextmanager
    def switched(self, changes: dict[str, Any]) -> Iterator[None]:
        """Context: ``changes`` hold, unless a context that was entered later has others; in whatever order they are left."""
        switch = Switch(get_ident(), changes)
        if self.entered and self.entered[-1].thread != switch.thread:
            raise RuntimeError(
                "another thread has switched the adapters of this model, for every thread: wait until it leaves its context, or "
                "give each thread a model of its own, copy.deepcopy(policy)"
            )
        self.entered.append(switch)
        self._settle(changes)
        try:
            yield
        finally:
            self.entered = [other for other in self.entered if other is not switch]
            self._settle(changes)

    def _settle(self, names: Iterable[str]) -> None:
        for name in names:
            values = [switch.changes[name] for switch in self.entered if name in switch.changes]
            setattr(self, name, values[-1] if values else getattr(Switchboard, name))


_REFUSE = Refuse()


def _note(tape: Tape, site: str, _gradient: Tensor) -> None:
    tape.saw_backward(site, "output")


class HookedPoint(nn.Identity):
    """Identity module at which hooks read or write."""


def watched(point: nn.Module) -> bool:
    """Return whether a hook, or a library that replaces ``forward`` (nnsight), may read or write at this point."""
    return requested(point) or "forward" in vars(point)


class Branch(nn.Module):
    """Adapters at one logical Linear, and their hook points.

    hook_kept_a       the kept adapter's bottleneck, ``Vh x`` or ``A x``, [b s r]
    hook_kept         what the kept adapter adds, [b s d_out]
    hook_quarantine   what the quarantine adds, [b s d_out]
    hook_mask         only in a step of a mask route: 1 if the kept adapter learns and 0 if flagged, [b] or [b s]. A tensor that a
                      hook returns replaces the mask. Fires in the forward if flags are already known, otherwise in the
                      backward; for pooled gradient flags, when the step is finished

    No point fires while weights are merged.
    """

    def __init__(self, slot: Slot, kept: Kept, quarantine: Quarantine | None, board: Switchboard):
        super().__init__()
        self.site, self.kept, self.quarantine = slot.name, kept, quarantine
        self._slot, self._board = (slot,), board  # a tuple hides the base module from nn.Module: it is not a submodule
        self.hook_kept_a, self.hook_kept = HookedPoint(), HookedPoint()
        self.hook_quarantine, self.hook_mask = HookedPoint(), HookedPoint()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Branch":
        kept = self.kept
        dtype = kept.Vh.dtype if isinstance(kept, SVDKept) else None
        super()._apply(fn, recurse)
        if (
            isinstance(kept, SVDKept)
            and kept.Vh.dtype != dtype
            and not any(bool(p.any()) for p in self.parameters() if p.ndim == 1)
        ):
            # nothing was trained yet, so take the vectors of the weight in its new type, as a load will
            kept.span(decompose(self.weight, rank=kept.rank), kept.Vh.dtype)
        return self

    @property
    def weight(self) -> Float[Tensor, "d_out d_in"]:
        """Frozen base weight of this logical Linear."""
        return self._slot[0].weight

    @property
    def shape(self) -> tuple[int, int]:
        """``d_out`` and ``d_in`` of ``weight``."""
        return self._slot[0].shape

    @property
    def fires(self) -> frozenset[str]:
        """The points among kept_a, kept_out and quarantine_out that fire with the current switches."""
        board = self._board
        kept = ("kept_a", "kept_out") if board.kept else ()
        quarantine = ("quarantine_out",) if board.quarantine and self.quarantine is not None else ()
        return frozenset(() if board.merged else (*kept, *quarantine))

    def forward(self, x: Float[Tensor, "*batch d_in"], y: Float[Tensor, "*batch d_out"]) -> Float[Tensor, "*batch d_out"]:
        """Return the base's output ``y`` with the adapters added."""
        # A forward of the reference model within a step is not the training pass: nothing of it is read, counted or routed.
        tape = self._board.tape if self._board.kept else None
        return self._added(x, y, None) if tape is None else uncompiled(self._added)(x, y, tape)

    def _added(self, x: Tensor, y: Tensor, tape: Tape | None) -> Tensor:
        board = self._board
        if tape is not None:
            self._read(x, tape)
        refuses = None if board.unrouted else _REFUSE
        if board.kept:
            y = y + self.hook_kept(self.kept(x, tape, tape.kept if tape else refuses, self.site, self.hook_kept_a))
        if board.quarantine and self.quarantine is not None:
            added = self.quarantine(x, tape, tape.quarantine if tape else refuses, self.site)
            if tape is not None and tape.l1 > 0 and torch.is_grad_enabled():
                real = None if tape.real is None else tape.real.reshape(added.shape[:-1]).to(added.device)
                # In a graph of its own, which ends at x: the gradients below, and their scores, are those of the loss alone.
                penalized = self.quarantine(x.detach(), None, None, self.site)
                added = L1.apply(added, penalized, tape.l1 / (added.numel() * board.sites), real)
            y = y + self.hook_quarantine(added)
        if tape is not None and torch.is_grad_enabled():
            if tape.outputs is not None:
                y = ReadOutput.apply(y, x, tape, self.site)
            elif tape.kept is None and y.requires_grad:  # without a gate, a hook notes the backward
                y.register_hook(partial(_note, tape, self.site))
        return y  # pyright: ignore[reportReturnType]

    def _read(self, x: Tensor, tape: Tape) -> None:
        rows = tape.rows(x.detach())  # also without a reader, so that a wrong layout is always an error
        if not tape.saw_forward(self.site):
            return  # a replay repeats values that were already read
        with exact():
            if tape.inputs is not None:
                tape.inputs.read(self.site, rows)
            if tape.kept is not None:
                tape.kept.called(self.site, self.hook_mask)

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
        raise ValueError(f"{name} has hooks, which do not fire while its weight is merged: remove them, or do without")
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
        raise ValueError(f"{name} computes more than a matmul ({type(base).__name__}), so its weight cannot be merged")


class RoutedLinear(nn.Module):
    """Wrapper of a frozen Linear ``base`` with its adapters: ``route``, or ``route_q`` and so on if ``base`` is fused."""

    merged_weight: Tensor

    def __init__(self, slots: Sequence[Slot], branches: Sequence[Branch], board: Switchboard):
        super().__init__()
        self.base, self.transposed, self.board = slots[0].module, slots[0].transposed, board
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
        x, branches = input, self.branches  # ``input`` is the argument's name in ``nn.Linear``, by which a model may pass it
        if self.board.merged:
            if args or kwargs:
                raise ValueError(f"{branches[0][0].site} is called with more than its input, which a merged weight would lose")
            return functional.linear(x, self.merged_weight, self.bias)
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

    def unmerge(self) -> None:
        self.register_buffer("merged_weight", None, persistent=False)
