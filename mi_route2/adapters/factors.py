"""A trainable factor whose gradient passes through a lane, exactly, inside the ordinary backward.

    y = h F^T  (matrix factor)   or   y = f * h  (diagonal factor)

``RoutedFactor`` is that product with one change: its backward hands the pair (h, dL/dy) to the tape's lane and returns what
the lane answers as the factor's gradient. No gate enters the forward, nothing is divided, there is no second pass, and what
leaves the backward is already filtered: right under accumulation, checkpointing and data parallelism.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mi_route2.adapters.gradients import Diagonal, Pairs
from mi_route2.adapters.tape import Lane, Tape


def multiply(h: Tensor, factor: Tensor) -> Tensor:
    """``h F^T`` or ``f * h``, in the type of ``h``."""
    factor = factor.to(h.dtype)
    return h * factor if factor.ndim == 1 else h @ factor.mT


def report(ctx: Any, tape: Tape, site: str, what: str) -> None:
    """Tell ``tape`` of a gradient; a graph that is kept (``retain_graph``) would report it again to a second backward."""
    tape.saw_backward(site, what, again=ctx.reported)
    ctx.reported = True


class RoutedFactor(torch.autograd.Function):
    """``multiply`` whose factor gradient is the lane's answer."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, factor: Tensor, tape: Tape, lane: Lane, site: str, name: str) -> Tensor:
        ctx.save_for_backward(h, factor)
        ctx.routing, ctx.reported = (tape, lane, site, name), False
        return multiply(h, factor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        h, factor = ctx.saved_tensors
        # Detached: a lane that holds h would otherwise hold the graph, whose node holds the lane, and none would ever be freed.
        h = h.detach().to(dy.dtype)  # under autocast the forward cast h itself
        tape, lane, site, name = ctx.routing
        report(ctx, tape, site, f"{'kept' if lane is tape.kept else 'quarantine'}.{name}")
        pair_type = Diagonal if factor.ndim == 1 else Pairs
        answer = lane.gradient(site, name, pair_type(tape.rows(h), tape.rows(dy)))
        dh = None
        if ctx.needs_input_grad[0]:
            cast = factor.to(dy.dtype)
            dh = dy * cast if factor.ndim == 1 else dy @ cast
            if lane.detach:
                keep = (lane.weights(site) != 0).to(dh.dtype)
                keep = keep if keep.ndim == 2 else keep[:, None].expand(-1, tape.tokens)
                dh = dh * keep.reshape(*dh.shape[:-1], 1)
        return dh, None if answer is None else answer.to(factor.dtype), None, None, None, None


class ReadOutput(torch.autograd.Function):
    """The identity on a site's output ``y``; its backward shows the pair (x, dL/dy) to the tape's output reader."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, tape: Tape, site: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.tape, ctx.site, ctx.reported = tape, site, False
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        x = ctx.saved_tensors[0].detach().to(dy.dtype)
        report(ctx, ctx.tape, ctx.site, "output")
        ctx.tape.outputs.read(ctx.site, Pairs(ctx.tape.rows(x), ctx.tape.rows(dy)))
        return dy, None, None, None


class L1(torch.autograd.Function):
    """The identity whose backward adds ``weight * sign(y)``: the gradient of ``weight * sum |y|``, wherever the loss is.

    ``real`` (of the shape of ``y`` but for its last axis) leaves padding out.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, weight: float, real: Tensor | None) -> Tensor:
        sign = y.sign()
        ctx.save_for_backward(sign if real is None else torch.where(real[..., None], sign, torch.zeros_like(sign)))
        ctx.weight = weight
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (sign,) = ctx.saved_tensors
        return grads[0] + ctx.weight * sign, None, None


def _ask(lane: Lane, site: str, name: str, leaf: Any, gradient: Tensor) -> None:
    """Tell ``lane`` of a gradient that this backward adds to a ``.grad``: ``torch.autograd.grad`` reads and trains nothing."""
    try:
        stored = torch._C._will_engine_execute_node(leaf)  # pyright: ignore[reportAttributeAccessIssue]
    except RuntimeError:  # torch's answer for a leaf under autograd.grad
        return
    if stored:
        lane.gradient(site, name, gradient)  # pyright: ignore[reportArgumentType]


def apply_factor(h: Tensor, factor: Tensor, tape: Tape | None, lane: Lane | None, site: str, name: str) -> Tensor:
    """``multiply`` under the lane of the open tape, or plain where there is none; without a tape a lane refuses gradients."""
    if lane is None or not torch.is_grad_enabled():
        return multiply(h, factor)
    if tape is None:
        if factor.requires_grad and not torch.compiler.is_compiling():
            factor = factor.view_as(factor)  # a hook at the parameter itself would stay there
            if factor.grad_fn is not None:  # a transform of torch.func returns gradients and stores none
                factor.register_hook(partial(_ask, lane, site, name, factor.grad_fn.next_functions[0][0]))
        return multiply(h, factor)
    out = RoutedFactor.apply(h, factor, tape, lane, site, name)
    assert isinstance(out, Tensor)
    return out
