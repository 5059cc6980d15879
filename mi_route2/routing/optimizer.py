"""Optimizer and reduction of routed gradients: AdamW with a separate gradient for the second moment, and the sum over processes.

    m = b1 m + (1 - b1) g       v = b2 v + (1 - b2) u^2
    p = (1 - lr decay) p - lr m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)

``g`` is the routed gradient and ``u`` the unrouted one, if given; otherwise ``u = g`` (Loshchilov and Hutter, 2019).
"""

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

Kind = TypeVar("Kind", bound=torch.optim.Optimizer)
_WRAPPED = ("add_param_group", "zero_grad", "state_dict", "load_state_dict", "step")


def uncompiled(kind: type[Kind]) -> type[Kind]:
    """Return a class of torch's optimizers without the wrappers that hide its methods from ``torch.compile``.

    The wrappers import the compiler, which takes each process 1.5 seconds. Every bit of a step stays.
    """
    plain = {name: getattr(method := getattr(kind, name), "__wrapped__", method) for name in _WRAPPED}
    bare = type(kind.__name__, (kind,), plain | {"step": torch.no_grad()(plain["step"])})
    return bare  # pyright: ignore[reportReturnType]


class RoutedAdamW(uncompiled(torch.optim.Optimizer)):
    """AdamW whose second moment may come from the unrouted gradient; ``params`` are torch's parameter groups."""

    def __init__(
        self,
        params: list[dict[str, object]],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch does for each of ``params``; ``ValueError`` if its settings are not valid."""
        lr, betas, eps, decay = ({**self.defaults, **param_group}[name] for name in ("lr", "betas", "eps", "weight_decay"))
        if not (0 <= lr < inf and 0 < eps < inf and 0 <= decay < inf and all(0 <= b < 1 for b in betas)):
            raise ValueError(f"lr={lr}, betas={betas}, eps={eps}, weight_decay={decay} are not valid settings of AdamW")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, unrouted: Mapping[Any, Tensor] | None = None) -> Any:
        """Take a step; return what ``closure`` returns, which is called before it with gradients enabled, as torch's do."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        if unrouted is not None and not all(isinstance(p, nn.Parameter) for p in unrouted):
            raise ValueError("unrouted maps parameters to gradients: use {kept[name]: g for name, g in decision.unrouted.items()}")
        shapes = {p: p.shape for group in self.param_groups for p in group["params"]}
        if wrong := [list(g.shape) for p, g in (unrouted or {}).items() if shapes.get(p) != g.shape]:
            raise ValueError(
                f"unrouted has a gradient of shape {wrong[0]} that fits no parameter of this optimizer: give those of the policy's "
                "own decision"
            )
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state |= {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(p),
                        "exp_avg_sq": torch.zeros_like(p),
                    }
                state["step"] += 1
                t = float(state["step"])
                u = p.grad if unrouted is None else unrouted.get(p, p.grad)
                state["exp_avg"].lerp_(p.grad, 1 - b1)
                state["exp_avg_sq"].mul_(b2).addcmul_(u, u, value=1 - b2)
                denominator = (state["exp_avg_sq"].sqrt() / (1 - b2**t) ** 0.5).add_(group["eps"])
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.addcdiv_(state["exp_avg"], denominator, value=-group["lr"] / (1 - b1**t))
        return loss


def several_ranks() -> bool:
    """Return whether processes train together: each of them then needs as many forwards as the others."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def sum_over_ranks(gradients: Sequence[Tensor]) -> None:
    """Replace each tensor by its sum over all ranks (one all-reduce of a flat buffer); shapes must be equal on every rank."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("sum_over_ranks needs an initialized process group (torch.distributed.init_process_group)")
    flat = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(flat)
    for g, piece in zip(gradients, flat.split([g.numel() for g in gradients])):
        g.copy_(piece.view_as(g))
