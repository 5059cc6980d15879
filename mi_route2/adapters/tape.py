"""Tape of one recorded forward and backward: its layout, its gates and its readers.

A ``Tape`` is made for one forward and backward over a known layout ``[b, s]``. It carries a ``Gate`` for the kept adapter and
one for the quarantine: during the backward, a gate receives each factor's per-rollout gradient and returns the gradient that
the parameter gets. Readers receive the input of every site in the forward, or the pair (input, gradient at the output) in the
backward. The caller states the layout; it is never guessed from a tensor's shape, because ``[b * s, d]`` read as rollouts would
flag tokens. Rows must be in the batch's order: a Linear that gets all tokens in another one (an expert's, gathered; time before
batch, which only shows if there are not as many rollouts as tokens) must have no adapter.

A Linear may run more than once in the forward (weight tying, recurrence): its features are then sums over its calls. Gradient
checkpointing runs it again in the backward, which does not count as a call. A second backward on the same tape is refused, because
flags are decided by then; gradients of several tapes accumulate.
"""

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, ParamSpec, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Bool
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mi_route2.adapters.gradients import Diagonal, FactorGradient, Packed, Packing, Pairs, by_token, exact
from mi_route2.checks import checked

P = ParamSpec("P")
T = TypeVar("T")
Hooks = Callable[[Tensor], Tensor]
"""A site's mask point: takes a mask and returns the mask after the hooks there."""


def demand_penalty(l1: float) -> None:
    """Raise ``ValueError`` if ``l1`` is not a finite number of at least 0."""
    if not 0 <= l1 < math.inf:
        raise ValueError(f"l1 is a penalty and must be finite and at least 0, not {l1}")


@runtime_checkable
class Gate(Protocol):
    """Filter of the gradients that reach the factors of one adapter in one forward and backward."""

    detach: bool
    """True if flagged rollouts or tokens (mask 0) also send no gradient through the adapter to its input."""

    def called(self, site: str, point: Hooks) -> None:
        """Record a call of the site in the forward, after the readers got its input; ``point`` runs the hooks at its mask."""
        ...

    def gradient(self, site: str, factor: str, pair: FactorGradient) -> Tensor | None:
        """Return the gradient of the factor, or ``None`` if it is assigned after the backward."""
        ...

    def mask(self, site: str) -> Tensor:
        """Return ``[b]`` or ``[b, s]``, 0 where flagged at this site; read only if ``detach`` is set, after ``gradient``."""
        ...


class LearnNothing:
    """Gate that passes no gradient: the adapter takes part in the forward and learns nothing.

    If ``like`` is given, rollouts or tokens that this gate flags also send no gradient through the adapter.
    """

    def __init__(self, like: Gate | None = None):
        self.detach, self._like = like is not None, like

    def called(self, site: str, point: Hooks) -> None:
        if self._like is not None:
            self._like.called(site, point)

    def gradient(self, site: str, factor: str, pair: object) -> None:
        return None

    def mask(self, site: str) -> Tensor:
        if self._like is None:
            raise RuntimeError(f"a gate that flags nothing has no mask (asked at {site})")
        return self._like.mask(site)


class Refuse:
    """Gate of a forward without a tape: gradients at the activations pass, a gradient at an adapter is an error."""

    detach = False

    def called(self, site: str, point: Hooks) -> None:
        return None

    def gradient(self, site: str, factor: str, pair: object) -> None:
        raise RuntimeError(
            f"a gradient reached the adapters at {site} from a forward that no tape recorded, so no route decides which adapter "
            "learns from it: call route.backward(policy, batch, loss_fn, context), run forward and backward inside "
            "adapters.recording(tape), or let both adapters learn from everything, with adapters.unrouted()"
        )

    def mask(self, site: str) -> Tensor:
        raise RuntimeError(f"a forward without a tape has no mask (asked at {site})")


@runtime_checkable
class InputReader(Protocol):
    """Reader that receives the detached input ``x [b, s, d_in]`` of every site in the forward."""

    def read(self, site: str, x: Tensor) -> None: ...


@runtime_checkable
class OutputReader(Protocol):
    """Reader that receives the pair (x, dL/dy) at every site in the backward: the full-weight gradient of each rollout.

    ``last`` is True if no call of the site is left to report.
    """

    def read(self, site: str, pair: FactorGradient, last: bool) -> None: ...


@checked
class Tape:
    """State of one forward and backward: layout, gates and readers.

    Args:
        rollouts: Number of rollouts in the batch.
        tokens: Number of tokens per rollout, padding included.
        kept: Gate of the kept adapter; ``None`` for ordinary autograd.
        quarantine: Gate of the quarantine; ``None`` for ordinary autograd.
        inputs: Reader of inputs.
        outputs: Reader of inputs and output gradients.
        l1: Adds ``l1 * mean |quarantine output|``, averaged over sites, to the loss, by its exact gradient.
        real: Mask of real tokens; padding counts as 0 in the mean of ``l1``. With it, the model may also run all real tokens, in
            this order, as one row of a packed batch.
        without_quarantine: Keep the quarantine out of the forward while this tape records.

    Raises:
        ValueError: A size below 1, or an ``l1`` that is negative, NaN or infinite.

    Examples:
        >>> with adapters.unrouted(), adapters.recording(Tape(rollouts=2, tokens=7)):
        ...     host.logits(tokens).sum().backward()
    """

    def __init__(
        self,
        rollouts: int,
        tokens: int,
        *,
        kept: Gate | None = None,
        quarantine: Gate | None = None,
        inputs: InputReader | None = None,
        outputs: OutputReader | None = None,
        l1: float = 0.0,
        real: Bool[Tensor, "b s"] | None = None,
        without_quarantine: bool = False,
    ):
        if rollouts < 1 or tokens < 1:
            raise ValueError(f"a tape needs at least one rollout and one token, not [{rollouts}, {tokens}]")
        demand_penalty(l1)
        self.rollouts, self.tokens = rollouts, tokens
        self.kept, self.quarantine = kept, quarantine
        self.inputs, self.outputs, self.l1, self.real = inputs, outputs, l1, real
        self._packing: Packing | None = None
        self._packed: bool | None = None
        self.without_quarantine, self.lost_quarantine = without_quarantine, False
        """``lost_quarantine``: a forward with gradients ran without the quarantine, and this tape did not ask for that."""
        self._quarantined: set[str] = set()
        self.anchor = torch.zeros(0, requires_grad=True)
        """Operand that needs a gradient, for products without another one: autograd then asks the kept gate there too."""
        self.asked: set[str] = set()
        """Sites at whose mask a hook stood in the forward or the backward."""
        self._requested: dict[str, Callable[[], bool]] = {}
        self._still: set[str] = set()
        self._backward: set[str] = set()
        self._calls: Counter[str] = Counter()
        self._reports: Counter[tuple[str, str]] = Counter()

    def packing(self, t: Tensor) -> Packing | None:
        """Return the places of rollouts in ``t`` if it is one row of all real tokens, ``[1, n, d]`` or ``[n, d]``; else ``None``.

        Raises:
            ValueError: ``t`` has another layout than ``[b, s, d]``, ``[b * s, d]`` or such a row, or than other calls had.
        """
        packing = None
        if t.shape[:-1] not in ((self.rollouts, self.tokens), (self.rollouts * self.tokens,)):
            if self._packing is None and self.real is not None:
                self._packing = Packing(self.real.to(t.device))
            packing = self._packing
            if packing is None or t.shape[:-1] not in ((1, packing.tokens), (packing.tokens,)):
                packed = "" if packing is None else f" (or {packing.tokens} real tokens in one row)"
                raise ValueError(
                    f"this tape was made for {self.rollouts} rollouts of {self.tokens} tokens{packed}, but a Linear saw "
                    f"{tuple(t.shape)}; give the tape the layout of the batch that the model runs"
                )
        whole = self._packing is not None and self._packing.tokens == self.rollouts * self.tokens  # then the layouts are one
        if self._packed not in (None, packing is not None) and not whole:
            # some tokens that happen to be as many as the real ones would be taken for all of them
            layout = "packed" if self._packed else "padded"
            raise ValueError(
                f"a Linear saw {tuple(t.shape)}, and others the {layout} layout: leave it out of the patterns of attach if it gets "
                "some tokens only"
            )
        self._packed = packing is not None
        return packing

    def rows(self, t: Tensor) -> Tensor:
        """Return ``t`` as ``[b, s, d]``, 0 on the padding of a packed batch; ``ValueError`` for any other layout."""
        packing = self.packing(t)
        return t.view(self.rollouts, self.tokens, t.shape[-1]) if packing is None else packing.padded(t.reshape(-1, t.shape[-1]))

    def pair(self, h: Tensor, dy: Tensor, kind: type[Pairs] | type[Diagonal] = Pairs) -> FactorGradient:
        """Return the gradient of a factor from its input and the gradient at its output."""
        packing = self.packing(h)
        if packing is None:
            return kind(self.rows(h), self.rows(dy))
        return Packed(h.reshape(-1, h.shape[-1]), dy.reshape(-1, dy.shape[-1]), packing, kind)

    def listen(self, site: str, requested: Callable[[], bool]) -> None:
        """Record ``site`` in ``asked`` if a hook stands at its mask now, or when it reports in the backward."""
        self._requested[site] = requested
        self._ask(site)

    def _ask(self, site: str) -> None:
        if site in self._requested and self._requested[site]():
            self.asked.add(site)

    def saw_forward(self, site: str) -> bool:
        """Record a forward of ``site``; return True for a call, and False for a replay under gradient checkpointing.

        Raises:
            RuntimeError: A forward after the backward.
        """
        if in_backward():
            return False
        if self._backward:
            raise RuntimeError(f"{site} runs again after the backward of its tape: {_ONE_BACKWARD}")
        self._calls[site] += 1
        return True

    def saw_quarantine(self, site: str, on: bool) -> None:
        """Record whether the quarantine of ``site`` takes part in a forward."""
        if on and not in_backward():
            self._quarantined.add(site)
        lost = not on or site not in self._quarantined  # in a replay it may be on where it was off in the forward
        self.lost_quarantine |= lost and torch.is_grad_enabled() and not self.without_quarantine

    def saw_backward(self, site: str, what: str, again: bool = False) -> None:
        """Record that ``site`` reported the gradient of ``what``.

        Raises:
            RuntimeError: A call reports twice: ``again`` from the same graph, or from more replays than there were calls.
        """
        self._backward.add(site)
        self._ask(site)
        self._reports[site, what] += 1
        if again or self._reports[site, what] > self._calls[site]:
            raise RuntimeError(f"{site} reported twice to one tape: {_ONE_BACKWARD}")

    def saw_still(self, site: str) -> None:
        """Record that ``site`` has nothing to report: all of it is frozen, its input needs no gradient, and no gate scores it."""
        self._still.add(site)

    def reported(self, site: str, what: str) -> bool:
        """Return whether every call of ``site`` has reported the gradient of ``what``."""
        return self._reports[site, what] >= self._calls[site]

    def assert_fired(self, sites: Iterable[str], *, backward: bool) -> None:
        """Raise ``RuntimeError`` naming each site that did not run in the forward (or report in the backward)."""
        fired = self._backward | self._still if backward else self._calls
        missing = [site for site in sites if site not in fired]
        if missing:
            what = "report a gradient" if backward else "run"
            raise RuntimeError(
                f"these adapters did not {what} while the tape was open: {', '.join(missing)}; run forward and backward "
                "inside the context (under checkpointing the backward runs the forward again)"
                + (_NNSIGHT if backward and "nnsight" in sys.modules else "")
            )

    def assert_read_once(self) -> None:
        """Raise ``RuntimeError`` if inputs were read of more forwards than the one whose gradients were reported."""
        most = dict.fromkeys(self._calls, 0)
        for (site, _), count in self._reports.items():
            most[site] = max(most.get(site, 0), count)
        if self.inputs is not None and (more := [site for site, count in self._calls.items() if count > most[site]]):
            raise RuntimeError(
                f"{more[0]} ran {self._calls[more[0]]} times in this step's forward and reported {most[more[0]]} gradients, so its "
                "score is not that of the training pass alone: run other forwards before the step, or under adapters.reference()"
            )


_ONE_BACKWARD = (
    "run one forward and one backward per tape (add losses before the backward; each micro-batch is a part with its own tape)"
)
_NNSIGHT = (
    ". nnsight is imported: it takes a backward() on the line of a `with` for its trace and does not run it, so put "
    "loss.backward() on its own line"
)
NO_MASK = (
    "no flag is decided here, so the kept adapter would learn from everything. Route by your own flags with "
    "MaskRoute.from_flags(flags), or run the backward in a step of a MaskRoute"
)


HOOK_KINDS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def requested(point: nn.Module) -> bool:
    """Return whether any torch hook is registered at this point."""
    return any(getattr(point, kind) for kind in HOOK_KINDS)


def uncompiled(call: Callable[P, T]) -> Callable[P, T]:
    """Return ``call`` so that ``torch.compile`` runs it as it is: a graph of one module would serve another with other hooks."""
    disable = getattr(sys.modules.get("torch._dynamo"), "disable", None)  # none while another thread imports it
    return call if disable is None else disable(call)


def in_backward() -> bool:
    """Return whether this code runs in a backward, for example in a forward that checkpointing replays."""
    return torch._C._current_graph_task_id() != -1


def multiply(h: Tensor, factor: Tensor) -> Tensor:
    """Return ``h F^T`` or ``f * h``, in the dtype of ``h``."""
    factor = factor.to(h.dtype)
    return h * factor if factor.ndim == 1 else h @ factor.mT


def _operands(h: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the operands of ``addmm``: ``h`` as a matrix of rows, and ``F^T`` in its dtype."""
    return h.reshape(-1, h.shape[-1]), factor.to(h.dtype).mT


def report(ctx: Any, tape: Tape, site: str, what: str) -> None:
    """Report a gradient to ``tape``, marked as repeated if it comes from a second backward of a retained graph."""
    tape.saw_backward(site, what, again=ctx.reported)
    ctx.reported = True


@exact()  # a backward may run within autocast too
def _answer(
    ctx: Any, adapter: str, gate: Gate, factor: Tensor, h: Tensor, dy: Tensor, **shared: Callable[..., Tensor]
) -> Tensor | None:
    """Return the gate's answer to the pair (h, dy) of a factor; ``shared`` are the functions of ``Pairs`` for a larger product."""
    tape, site, name = ctx.routing
    tape.saw_backward(site, f"{adapter}.{name}", again=ctx.reported)
    pair = tape.pair(h, dy, Diagonal if factor.ndim == 1 else Pairs)
    answer = gate.gradient(site, name, replace(pair, **shared) if isinstance(pair, Pairs) else pair)
    return None if answer is None else answer.to(factor.dtype)


def _passed(gate: Gate, tape: Tape, site: str, dh: Tensor) -> Tensor:
    """Return the gradient at an adapter's input, 0 where the gate detaches."""
    if not gate.detach:
        return dh
    keep, packing = (gate.mask(site) != 0).to(dh.dtype), tape.packing(dh)
    if packing is not None:
        keep = packing.of_tokens(keep)
    elif keep.ndim == 1:
        keep = keep[:, None].expand(-1, tape.tokens)
    return dh * keep.reshape(*dh.shape[:-1], 1)


class RoutedFactor(torch.autograd.Function):
    """``multiply`` with the gate's answer as the gradient of the factor."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, factor: Tensor, anchor: Tensor | None, tape: Tape, gate: Gate, site: str, name: str) -> Tensor:
        ctx.save_for_backward(h, factor)
        ctx.routing, ctx.gate, ctx.reported = (tape, site, name), gate, False
        return multiply(h, factor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        h, factor = ctx.saved_tensors
        # Detached, because a gate that stores h would store the graph, whose node refers to the gate: a cycle that is never freed.
        h = h.detach().to(dy.dtype)  # under autocast the forward cast h itself
        tape, site, _ = ctx.routing
        answer = _answer(ctx, "kept" if ctx.gate is tape.kept else "quarantine", ctx.gate, factor, h, dy)
        ctx.reported = True
        dh = None
        if ctx.needs_input_grad[0]:
            cast = factor.to(dy.dtype)
            dh = _passed(ctx.gate, tape, site, dy * cast if factor.ndim == 1 else dy @ cast)
        return dh, answer, None, None, None, None, None


class _Whole:
    """Gradients of the factors of both adapters, as one product over tokens: per rollout, or summed with weights."""

    def __init__(self, tape: Tape, h: Tensor, dy: Tensor, ranks: list[int], axis: int):
        self._pair, self._ranks, self._axis = tape.pair(h, dy), ranks, axis
        self._sums: tuple[Tensor, ...] | None = None

    @cached_property
    def _values(self) -> Tensor:
        return self._pair.values()

    def part(self, i: int) -> Tensor:
        """Return one adapter's part: a copy, because a view would hold the other's until the step ends."""
        return self._values.split(self._ranks, self._axis + 1)[i].contiguous()

    def weighted(self, i: int, weights: Tensor) -> Tensor:
        """Return the sum over rollouts of one adapter's part, with weights; the other's counts all rollouts."""
        h, dy = self._pair.h, self._pair.dy
        pieces = list((h if self._axis else dy).split(self._ranks, -1))
        pieces[i] = pieces[i] * by_token(weights, h.dtype)
        both = torch.cat(pieces, -1)
        h, dy = (both, dy) if self._axis else (h, both)
        self._sums = (dy.flatten(0, 1).mT @ h.flatten(0, 1)).split(self._ranks, self._axis)
        return self._sums[i].contiguous()

    def plain(self, i: int) -> Tensor | None:
        """Return the sum over rollouts of the part of an adapter without a gate, if a product has given it."""
        if "_values" in self.__dict__:
            return self.part(i).sum(dim=0)
        return None if self._sums is None else self._sums[i].contiguous()


class StackedFactors(torch.autograd.Function):
    """The factors of both adapters in one matmul, each with its own gate's answer as its gradient (``None``: ordinary autograd).

    ``A`` and ``A_q`` read one input and are stacked over their outputs; ``B`` and ``B_q`` add to one output and are stacked over
    their inputs. An SVD adapter's ``Vh`` and ``U`` take the places of ``A`` and ``B``, without a gate: its own acts at ``dS``.

    The product may be added ``onto`` the base's output, in its own memory with ``overwrite``: two passes over it less.
    """

    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        kept: Tensor,
        quarantine: Tensor,
        onto: Tensor | None,
        anchor: Tensor | None,
        overwrite: bool,
        tape: Tape,
        gates: tuple[Gate | None, Gate | None],
        site: str,
        name: str,
    ) -> Tensor:
        ctx.save_for_backward(h, kept, quarantine)
        ctx.routing, ctx.gates, ctx.reported = (tape, site, name), gates, False
        factor = stack((kept, quarantine), name)
        if onto is None:
            return multiply(h, factor)
        if overwrite:
            ctx.mark_dirty(onto)
        else:  # not ``addmm(...).view``, because nobody may write into a view that a Function returns
            onto = onto.clone(memory_format=torch.contiguous_format)
        rows = onto.view(-1, onto.shape[-1])
        torch.addmm(rows, *_operands(h, factor), out=rows)  # torch's counters of FLOPs do not see ``addmm_``
        return onto

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        h, *factors = ctx.saved_tensors
        h = h.detach().to(dy.dtype)
        tape, site, name = ctx.routing
        learn, axis = ctx.needs_input_grad[1:3], _STACKED[name]
        ranks = [factor.shape[axis] for factor in factors]
        gates = ctx.gates  # also those of frozen factors, which are scored and detached as others are
        hs, dys = ((h, h), dy.split(ranks, -1)) if name == "A" else (h.split(ranks, -1), (dy, dy))
        # A narrow product takes hardly less time than one of twice its width, so that of one adapter gives the other's too.
        whole = _Whole(tape, h, dy, ranks, axis) if tape.packing(h) is None else None
        answers: list[Tensor | None] = [None, None]
        for i in sorted(range(2), key=lambda i: gates[i] is None):  # a gate first: it may need the product per rollout
            gate, factor = gates[i], factors[i]
            if gate is not None:
                shared = {} if whole is None else {"product": partial(whole.part, i)}
                if whole is not None and gates[1 - i] is None and learn[1 - i]:
                    shared["combined"] = partial(whole.weighted, i)
                answer = _answer(ctx, ("kept", "quarantine")[i], gate, factor, hs[i], dys[i], **shared)
                answers[i] = answer if learn[i] else None
            elif learn[i]:
                plain = None if whole is None else whole.plain(i)
                answers[i] = (dys[i].flatten(0, -2).mT @ hs[i].flatten(0, -2) if plain is None else plain).to(factor.dtype)
        ctx.reported = True
        dh = None
        if ctx.needs_input_grad[0]:
            # What a gate detaches is taken out at the narrow side, of as many columns as the adapter's rank.
            cast, detaches = stack(factors, name).to(dy.dtype), any(gate is not None and gate.detach for gate in gates)

            def passed(narrow: Tensor) -> Tensor:
                pieces = zip(gates, narrow.split(ranks, -1), strict=True)
                return torch.cat([one if gate is None else _passed(gate, tape, site, one) for gate, one in pieces], -1)

            dh = (passed(dy) if detaches and name == "A" else dy) @ cast
            dh = passed(dh) if detaches and name == "B" else dh
        return dh, *answers, dy if ctx.needs_input_grad[3] else None, None, None, None, None, None, None


class ReadOutput(torch.autograd.Function):
    """Identity on a site's output ``y``, whose backward passes the pair (x, dL/dy) to the tape's output reader."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, tape: Tape, site: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.tape, ctx.site, ctx.reported = tape, site, False
        return y.clone()  # into a view that a Function returns, a model may not write

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        x = ctx.saved_tensors[0].detach().to(dy.dtype)
        report(ctx, ctx.tape, ctx.site, "output")
        with exact():
            ctx.tape.outputs.read(ctx.site, ctx.tape.pair(x, dy.detach()), ctx.tape.reported(ctx.site, "output"))
        return dy, None, None, None


class L1(torch.autograd.Function):
    """Identity whose backward adds ``weight * sign(y)``, the gradient of ``weight * sum |y|``, whatever the loss is.

    ``real`` (of the shape of ``y`` without its last axis) excludes padding.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, weight: float, real: Tensor | None) -> Tensor:
        sign = y.sign()
        ctx.save_for_backward(sign if real is None else torch.where(real[..., None], sign, torch.zeros_like(sign)))
        ctx.weight = weight
        return y.clone()  # into a view that a Function returns, a hook may not write

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (sign,) = ctx.saved_tensors
        return grads[0] + ctx.weight * sign, None, None


def _ask(gate: Gate, site: str, name: str, leaf: Any, gradient: Tensor) -> None:
    """Pass ``gate`` a gradient that this backward adds to a ``.grad``; ``torch.autograd.grad`` only reads and is allowed."""
    try:
        stored = torch._C._will_engine_execute_node(leaf)  # pyright: ignore[reportAttributeAccessIssue]
    except RuntimeError:  # torch's answer for a leaf under autograd.grad
        return
    if stored:
        gate.gradient(site, name, gradient)  # pyright: ignore[reportArgumentType]


def _asking(factor: Tensor, gate: Gate, site: str, name: str) -> Tensor:
    """Return ``factor`` such that ``gate`` is told if a backward adds to its ``.grad``."""
    if factor.requires_grad:
        factor = factor.view_as(factor)  # a hook on the parameter itself would stay after this forward
        if factor.grad_fn is not None:  # transforms of torch.func return gradients and store none
            factor.register_hook(partial(_ask, gate, site, name, factor.grad_fn.next_functions[0][0]))
    return factor


def _anchor(tape: Tape, gate: Gate | None, *operands: Tensor) -> Tensor | None:
    """Return the anchor of ``tape`` if no operand needs a gradient, so that autograd would not ask the kept ``gate``."""
    asked = gate is not None and gate is tape.kept
    return tape.anchor if asked and not any(operand.requires_grad for operand in operands) else None


def apply_factor(h: Tensor, factor: Tensor, tape: Tape | None, gate: Gate | None, site: str, name: str) -> Tensor:
    """Apply ``multiply`` under the gate of the open tape; without a tape, the gate refuses gradients. Plain if there is no gate."""
    if gate is None or not torch.is_grad_enabled():
        return multiply(h, factor)
    if tape is None:
        return multiply(h, _asking(factor, gate, site, name))
    out = RoutedFactor.apply(h, factor, _anchor(tape, gate, h, factor), tape, gate, site, name)
    assert isinstance(out, Tensor)
    return out


_STACKED = {"A": 0, "B": 1}
"""Axis along which the factors of both adapters are stacked."""


def stack(factors: Sequence[Tensor], name: str) -> Tensor:
    """Return ``[A; A_q]`` or ``[B, B_q]``."""
    return torch.cat(tuple(factors), _STACKED[name])


def apply_factors(
    h: Tensor,
    factors: tuple[Tensor, Tensor],
    tape: Tape | None,
    gates: tuple[Gate | None, Gate | None],
    site: str,
    name: str,
    onto: Tensor | None = None,
    overwrite: bool = False,
) -> Tensor:
    """Apply the factors ``A`` or ``B`` of both adapters in one matmul, each as ``apply_factor`` would, added ``onto`` a tensor."""
    if torch.is_grad_enabled() and (gates != (None, None) or not all(factor.requires_grad for factor in factors)):
        if tape is not None:
            anchor = _anchor(tape, gates[0], h, *factors)
            out = StackedFactors.apply(h, *factors, onto, anchor, overwrite, tape, gates, site, name)
            assert isinstance(out, Tensor)
            return out
        kept, quarantine = (f if gate is None else _asking(f, gate, site, name) for f, gate in zip(factors, gates, strict=True))
        factors = kept, quarantine
    if onto is None:
        return multiply(h, stack(factors, name))
    # One BLAS call as with a tape, so that a pass which is recorded has the bits of one that is not.
    return torch.addmm(onto.reshape(-1, onto.shape[-1]), *_operands(h, stack(factors, name))).view(onto.shape)
