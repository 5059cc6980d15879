"""Muon for the blocks' matrices and AdamW for the embedding and the controls, in one object with a schedule.

Muon (Jordan 2024) for a matrix W with gradient G:

    B <- mu B + (1 - mu) G                              momentum, mu warmed linearly
    U <- mu B + (1 - mu) G                              Nesterov
    X <- U / |U|_F, then 5 times  A = X X^T,  X <- a X + (b A + c A^2) X      (a, b, c) = (3.4445, -4.775, 2.0315)
    W <- (1 - rate * decay) W - rate * sqrt(max(1, rows / cols)) X

The singular values of X end between .68 and 1.21 unless they start below a hundredth of the norm, so the scale of G has no effect.
``torch.optim.Muon`` iterates over one matrix after another, in bfloat16. Here all matrices of one shape are one batch in their own
type: at the study's size a step takes 4 ms instead of torch's 36, of about 70 that a training step took, and X is not rounded to
bfloat16.

The momentum is an average, as in torch; the first implementation used a sum. At a constant mu the two differ by a factor, which the
normalization removes; while mu warms up, the average weights a gradient by its own step's mu. The decay is decoupled and follows
the scheduled rate alone, without the factor of the shape.
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mi_route2.validation import AtLeastOne, Fraction, Natural, NonNegative, Probability, validated
from studies.lanes.model import kinds_of

COEFFICIENTS = (3.4445, -4.775, 2.0315)
EPS = 1e-7


@validated
class OptimSettings:
    """Rates, decays and schedules.

    Attributes:
        matrix_rate: Rate of Muon; an update has singular values near 1, so this is the spectral norm of a step.
        embed_rate: Rate of AdamW for the embedding.
        control_rate: Rate of AdamW for scalars and vectors: gates, scales, mixes, routing, skips.
        decay: Weight decay of the matrices.
        embed_decay: Weight decay of the embedding.
        control_decay: Weight decay of the controls; 0 by default, because it would pull a gate that starts at 1 towards 0.
        momentum: Momentum of Muon after its warm-up.
        momentum_start: Momentum of Muon at the first step.
        momentum_warmup: Steps over which the momentum rises.
        warmup: Steps over which the rates rise from 0.
        warmdown: The last fraction of all steps, over which the rates fall towards 0.
        newton_schulz: Steps of the orthogonalization.
        betas: Betas of AdamW.
    """

    matrix_rate: NonNegative = 0.04
    embed_rate: NonNegative = 0.03
    control_rate: NonNegative = 0.01
    decay: NonNegative = 0.12
    embed_decay: NonNegative = 0.0
    control_decay: NonNegative = 0.0
    momentum: Probability = 0.95
    momentum_start: Probability = 0.85
    momentum_warmup: Natural = 100
    warmup: Natural = 10
    warmdown: Probability = 0.6
    newton_schulz: AtLeastOne = 5
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)

    def rate_factor(self, step: int, total: int) -> float:
        """Return the factor of the rates at ``step`` of ``total``, counted from 0.

        It is (step + 1) / warmup while that is below 1, 1 in the middle, and (total - step) / (warmdown * total) at the end; the
        lower one if warm-up and warm-down overlap. It is positive at every step.
        """
        up = (step + 1) / self.warmup if self.warmup else 1.0
        down = (total - step) / (self.warmdown * total) if self.warmdown else 1.0
        return min(1.0, up, down)

    def momentum_at(self, step: int) -> float:
        """Return Muon's momentum at ``step``, counted from 0.

        It rises linearly from ``momentum_start`` to ``momentum`` at ``momentum_warmup``.
        """
        done = min(1.0, step / self.momentum_warmup) if self.momentum_warmup else 1.0
        return self.momentum_start + done * (self.momentum - self.momentum_start)


def orthogonal(u: Float[Tensor, "n rows cols"], steps: int) -> Float[Tensor, "n rows cols"]:
    """Apply Newton-Schulz steps towards the nearest orthogonal matrix to each of n matrices; 0 stays 0."""
    a, b, c = COEFFICIENTS
    x = u.mT if u.shape[1] > u.shape[2] else u
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(EPS)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if u.shape[1] > u.shape[2] else x


class Muon(torch.optim.Optimizer):
    """Muon over one group of matrices, whose rate and momentum the caller sets; equations: see the module."""

    def __init__(self, matrices: Sequence[nn.Parameter], settings: OptimSettings) -> None:
        rates = {"lr": settings.matrix_rate, "momentum": settings.momentum, "decay": settings.decay}
        super().__init__([{"params": list(matrices)}], {**rates, "steps": settings.newton_schulz})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        (group,) = self.param_groups
        rate, mu = group["lr"], group["momentum"]
        by_shape: dict[torch.Size, list[nn.Parameter]] = {}
        for p in group["params"]:
            if p.grad is not None:
                by_shape.setdefault(p.shape, []).append(p)
        for shape, same in by_shape.items():
            updates = []
            for p in same:
                assert p.grad is not None
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - mu)
                updates.append(torch.lerp(p.grad, buffer, mu))
            scale = rate * math.sqrt(max(1.0, shape[0] / shape[1]))
            for p, x in zip(same, orthogonal(torch.stack(updates), group["steps"]), strict=True):
                p.mul_(1 - rate * group["decay"]).add_(x, alpha=-scale)


class LanesOptimizer:
    """Muon for a model's matrices and AdamW for its embedding and controls; frozen parameters have no part in it.

    Rates are the settings' until ``set`` is called. A parameter without a gradient is neither changed nor decayed.
    """

    def __init__(self, model: nn.Module, settings: OptimSettings) -> None:
        kinds = kinds_of(model)
        self.settings = settings
        self.named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        matrices, embeddings, controls = (
            [p for name, p in self.named.items() if kinds[name] == role] for role in ("matrix", "embedding", "control")
        )
        self.muon = Muon(matrices, settings)
        groups = [
            {"params": embeddings, "lr": settings.embed_rate, "weight_decay": settings.embed_decay},
            {"params": controls, "lr": settings.control_rate, "weight_decay": settings.control_decay},
        ]
        self.adamw = torch.optim.AdamW(groups, betas=settings.betas, fused=True)
        self._rates = [(group, group["lr"]) for optimizer in (self.muon, self.adamw) for group in optimizer.param_groups]

    def set(self, step: int, total: int) -> None:
        """Set the rates and the momentum for ``step`` of ``total``, counted from 0.

        Raises:
            ValueError: If ``step`` is not from 0 to ``total - 1``.
        """
        if not 0 <= step < total:
            raise ValueError(f"step {step} of {total} does not exist: steps count from 0 to total - 1")
        factor = self.settings.rate_factor(step, total)
        for group, rate in self._rates:
            group["lr"] = rate * factor
        self.muon.param_groups[0]["momentum"] = self.settings.momentum_at(step)

    def step(self) -> None:
        self.muon.step()
        self.adamw.step()

    def adopt(self, other: "LanesOptimizer") -> None:
        """Copy the moments of all parameters that ``other`` has too; rows that only this model has start at 0 (see ``widened``)."""
        for mine, its in ((self.muon, other.muon), (self.adamw, other.adamw)):
            for name, old in other.named.items():
                if old in its.state:
                    p = self.named[name]
                    mine.state[p] = {
                        key: widened(value, torch.zeros_like(p)) if value.ndim else value.clone()  # without an axis: the step count
                        for key, value in its.state[old].items()
                    }


def widened(value: Tensor, like: Tensor) -> Tensor:
    """Return a copy of ``like`` with ``value`` in its first rows: skips are numbered from the innermost on, in every schedule."""
    return torch.cat((value, like[len(value) :])) if value.ndim else value.clone()
