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
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, ParamSpec, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Bool
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mi_route2.adapters.gradients import DiagonalGrad, FactorGradient, MatrixGrad, exact
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
        assert self._like is not None
        return self._like.mask(site)


class Refuse(LearnNothing):
    """Gate of a forward without a tape: gradients at the activations pass, a gradient at an adapter is an error."""

    def gradient(self, site: str, factor: str, pair: object) -> None:
        raise RuntimeError(
            f"a gradient reached the adapters at {site} from a forward that no tape recorded, so no route decides which adapter "
            "learns from it: call route.backward(policy, batch, loss_fn, context), run forward and backward inside "
            "adapters.recording(tape), or let both adapters learn from everything, with adapters.unrouted()"
        )


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
        l1: Adds ``l1 * mean |quarantine output|``, averaged over sites, to the loss, by its exact gradient in the factors of each
            quarantine for the input that it got; it reaches no other adapter and no score.
        real: Mask of real tokens; padding counts as 0 in the mean of ``l1``.

    Raises:
        ValueError: A size below 1, or an ``l1`` that is negative, NaN or infinite, or beside a gate of the quarantine.

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
    ):
        if rollouts < 1 or tokens < 1:
            raise ValueError(f"a tape needs at least one rollout and one token, not [{rollouts}, {tokens}]")
        demand_penalty(l1)
        if l1 and quarantine is not None:
            raise ValueError("l1 is the quarantine's own penalty, which no gate would filter: leave out quarantine=, or l1")
        self.rollouts, self.tokens = rollouts, tokens
        self.kept, self.quarantine = kept, quarantine
        self.inputs, self.outputs, self.l1, self.real = inputs, outputs, l1, real
        self._backward: set[str] = set()
        self._calls: Counter[str] = Counter()
        self._reports: Counter[tuple[str, str]] = Counter()

    def rows(self, t: Tensor) -> Tensor:
        """Return ``t`` as ``[b, s, d]``; ``ValueError`` for another layout than ``[b, s, d]`` or ``[b * s, d]``."""
        if t.shape[:-1] not in ((self.rollouts, self.tokens), (self.rollouts * self.tokens,)):
            raise ValueError(
                f"this tape was made for {self.rollouts} rollouts of {self.tokens} tokens, but a Linear saw {tuple(t.shape)}; give "
                "the tape the layout of the batch that the model runs"
            )
        return t.view(self.rollouts, self.tokens, t.shape[-1])

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

    def saw_backward(self, site: str, what: str, again: bool = False) -> None:
        """Record that ``site`` reported the gradient of ``what``.

        Raises:
            RuntimeError: A call reports twice: ``again`` from the same graph, or from more replays than there were calls.
        """
        self._backward.add(site)
        self._reports[site, what] += 1
        if again or self._reports[site, what] > self._calls[site]:
            raise RuntimeError(f"{site} reported twice to one tape: {_ONE_BACKWARD}")

    def reported(self, site: str, what: str) -> bool:
        """Return whether every call of ``site`` has reported the gradient of ``what``."""
        return self._reports[site, what] >= self._calls[site]

    def assert_fired(self, sites: Iterable[str], *, backward: bool) -> None:
        """Raise ``RuntimeError`` naming each site that did not run in the forward (or report in the backward)."""
        fired = self._backward if backward else self._calls
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


HOOK_KINDS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def requested(point: nn.Module) -> bool:
    """Return whether any torch hook is registered at this point."""
    return any(getattr(point, hooks) for hooks in HOOK_KINDS)


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


class RoutedFactor(torch.autograd.Function):
    """``multiply`` with the gate's answer as the gradient of the factor."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, factor: Tensor, tape: Tape, gate: Gate, site: str, name: str) -> Tensor:
        ctx.save_for_backward(h, factor)
        ctx.routing, ctx.reported = (tape, gate, site, name), False
        return multiply(h, factor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        h, factor = ctx.saved_tensors
        # Detached, because a gate that stores h would store the graph, whose node refers to the gate: a cycle that is never freed.
        h = h.detach().to(dy.dtype)  # under autocast the forward cast h itself
        tape, gate, site, name = ctx.routing
        tape.saw_backward(site, f"{'kept' if gate is tape.kept else 'quarantine'}.{name}", again=ctx.reported)
        ctx.reported = True
        pair = (DiagonalGrad if factor.ndim == 1 else MatrixGrad)(tape.rows(h), tape.rows(dy))
        with exact():  # a backward may run within autocast too
            answer = gate.gradient(site, name, pair)
        dh = None
        if ctx.needs_input_grad[0]:
            cast = factor.to(dy.dtype)
            dh = dy * cast if factor.ndim == 1 else dy @ cast
            if gate.detach:
                stops = gate.mask(site) == 0
                stops = stops if stops.ndim == 2 else stops[:, None].expand(-1, tape.tokens)
                dh = dh.masked_fill(stops.reshape(*dh.shape[:-1], 1), 0.0)  # 0 times NaN would be NaN
        return dh, None if answer is None else answer.to(factor.dtype), None, None, None, None


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
        tape, site, x = ctx.tape, ctx.site, ctx.saved_tensors[0].detach().to(dy.dtype)
        tape.saw_backward(site, "output", again=ctx.reported)
        ctx.reported = True
        with exact():
            tape.outputs.read(site, MatrixGrad(tape.rows(x), tape.rows(dy.detach())), tape.reported(site, "output"))
        return dy, None, None, None


class L1(torch.autograd.Function):
    """Identity on ``y`` whose backward gives ``penalized`` the gradient of ``weight * sum |penalized|``, whatever the loss is.

    ``real`` (of the shape of ``y`` without its last axis) excludes padding.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, penalized: Tensor, weight: float, real: Tensor | None) -> Tensor:
        sign = penalized.sign()
        ctx.save_for_backward(sign if real is None else torch.where(real[..., None], sign, torch.zeros_like(sign)))
        ctx.weight = weight
        return y.clone()  # into a view that a Function returns, a hook may not write

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (sign,) = ctx.saved_tensors
        return grads[0], ctx.weight * sign, None, None


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


def apply_factor(h: Tensor, factor: Tensor, tape: Tape | None, gate: Gate | None, site: str, name: str) -> Tensor:
    """Apply ``multiply`` under the gate of the open tape; without a tape, the gate refuses gradients. Plain if there is no gate."""
    if gate is None or not torch.is_grad_enabled():
        return multiply(h, factor)
    if tape is None:
        return multiply(h, _asking(factor, gate, site, name))
    out = RoutedFactor.apply(h, factor, tape, gate, site, name)
    assert isinstance(out, Tensor)
    return out
