"""Muon for the blocks' matrices, AdamW for the embedding and the controls, behind one object with a schedule.

Muon (Jordan 2024) for a matrix W with gradient G:

    B <- mu B + (1 - mu) G                              momentum, mu warmed linearly
    U <- mu B + (1 - mu) G                              Nesterov
    X <- U / |U|_F, then 5 times  A = X X^T,  X <- a X + (b A + c A^2) X      (a, b, c) = (3.4445, -4.775, 2.0315)
    W <- (1 - rate * decay) W - rate * sqrt(max(1, rows / cols)) X

The singular values of X end between .68 and 1.21 unless they start under a hundredth of the norm, so the size of G has no say.
``torch.optim.Muon`` iterates one matrix after another, in bfloat16. Here all matrices of one shape are one batch in their own type:
at the study's size a step of it takes 4 ms for torch's 36, of some 70 that a training step took, and X is exact.

The momentum is an average, as torch's is, where the first implementation took a sum. At a constant mu the two differ by a factor,
which the normalisation takes away; while mu warms, the average weighs a gradient by its own step's mu. The decay is decoupled and
follows the rate of the schedule alone, without the factor of the shape.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mi_route2.validation import AtLeastOne, Fraction, Natural, NonNegative, Probability, validated

Kind = Literal["matrix", "embedding", "control"]
COEFFICIENTS = (3.4445, -4.775, 2.0315)
EPS = 1e-7
_MATRIX = re.compile(r"blocks\.[0-9]+\..+\.weight")
_EMBEDDINGS = ("embed.weight", "unembed.weight")


@validated
class OptimSettings:
    """Rates, decays and schedules.

    matrix_rate      of Muon; an update has singular values near 1, so this is the spectral norm of a step
    embed_rate       of AdamW for the embedding
    control_rate     of AdamW for scalars and vectors: gates, scales, mixes, routing, skips
    decay            of the matrices
    embed_decay      of the embedding
    control_decay    of the controls; none by default, for a gate that starts at 1 would be drawn to 0
    momentum         of Muon after its warm-up
    momentum_start   of Muon at the first step
    momentum_warmup  steps from the one to the other
    warmup           steps over which the rates rise from 0
    warmdown         the last part of all steps, over which the rates fall towards 0
    newton_schulz    steps of the orthogonalisation
    betas            of AdamW
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
        """What the rates are multiplied by at ``step`` of ``total``, steps counted from 0.

        (step + 1) / warmup while that is below 1, 1 in the middle, and (total - step) / (warmdown * total) at the end; the lower
        one where warm-up and warm-down overlap. Positive at every step.
        """
        up = (step + 1) / self.warmup if self.warmup else 1.0
        down = (total - step) / (self.warmdown * total) if self.warmdown else 1.0
        return min(1.0, up, down)

    def momentum_at(self, step: int) -> float:
        """Muon's momentum at ``step``, counted from 0: ``momentum_start``, then linear to ``momentum`` at ``momentum_warmup``."""
        done = min(1.0, step / self.momentum_warmup) if self.momentum_warmup else 1.0
        return self.momentum_start + done * (self.momentum - self.momentum_start)


def kind_of(name: str, parameter: Tensor) -> Kind:
    """What a parameter is: a 2-D ``blocks.*.weight`` is a matrix, ``embed.weight`` the embedding, all else a control."""
    if parameter.ndim == 2 and _MATRIX.fullmatch(name):
        return "matrix"
    return "embedding" if name in _EMBEDDINGS else "control"


def orthogonal(u: Float[Tensor, "n rows cols"], steps: int) -> Float[Tensor, "n rows cols"]:
    """Newton-Schulz steps towards the nearest orthogonal matrix of each of n; 0 stays 0."""
    a, b, c = COEFFICIENTS
    x = u.mT if u.shape[1] > u.shape[2] else u
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(EPS)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if u.shape[1] > u.shape[2] else x


class Muon(torch.optim.Optimizer):
    """See the module. One group of matrices; its rate and momentum are set from outside."""

    def __init__(self, matrices: Sequence[nn.Parameter], settings: OptimSettings) -> None:
        own = {"lr": settings.matrix_rate, "momentum": settings.momentum, "decay": settings.decay, "steps": settings.newton_schulz}
        super().__init__([{"params": list(matrices)}], own)

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


class LanesOptimiser:
    """What ``build_optimizer`` returns. Its rates are the settings' own until ``set`` is called."""

    def __init__(self, parameters: Mapping[Kind, Mapping[str, nn.Parameter]], settings: OptimSettings) -> None:
        self.settings = settings
        self._named = {name: p for group in parameters.values() for name, p in group.items()}
        self._kinds: dict[str, Kind] = {name: kind for kind, group in parameters.items() for name in group}
        self._muon = Muon(list(parameters["matrix"].values()), settings)
        groups = [
            {"params": list(parameters["embedding"].values()), "lr": settings.embed_rate, "weight_decay": settings.embed_decay},
            {"params": list(parameters["control"].values()), "lr": settings.control_rate, "weight_decay": settings.control_decay},
        ]
        self._adamw = torch.optim.AdamW(groups, betas=settings.betas, fused=True)
        self._rates = [(group, group["lr"]) for one in (self._muon, self._adamw) for group in one.param_groups]

    @property
    def kinds(self) -> dict[str, Kind]:
        """Parameter name -> what it is, for all that are trained."""
        return dict(self._kinds)

    def set(self, step: int, total: int) -> None:
        """Rates and momentum for ``step`` of ``total``, counted from 0. ``ValueError`` for a step that is not among them."""
        if not 0 <= step < total:
            raise ValueError(f"step {step} is not one of {total}: steps count from 0 to total - 1")
        factor = self.settings.rate_factor(step, total)
        for group, rate in self._rates:
            group["lr"] = rate * factor
        self._muon.param_groups[0]["momentum"] = self.settings.momentum_at(step)

    def rates(self) -> dict[str, float]:
        """The rates and the momentum that the next step is taken with."""
        muon, (embed, control) = self._muon.param_groups[0], self._adamw.param_groups
        return {"matrix": muon["lr"], "embedding": embed["lr"], "control": control["lr"], "momentum": muon["momentum"]}

    def step(self) -> None:
        """One step of both; a parameter without a gradient stays as it is, undecayed."""
        self._muon.step()
        self._adamw.step()

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for p in self._named.values():
            p.grad = None

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of all moments as flat tensors, ``exp_avg/embed.weight``, that safetensors can hold.

        Rates and momentum are no part of it: they follow from the step, through ``set``.
        """
        return {
            f"{key}/{name}": value.detach().clone()
            for name, p in self._named.items()
            for key, value in self._of(name).state.get(p, {}).items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Put back what ``state_dict`` gave, bit for bit. ``ValueError``, changing nothing, for what does not fit."""
        found: dict[str, dict[str, Tensor]] = {}
        for entry, value in state.items():
            key, _, name = entry.partition("/")
            if name not in self._named or key not in self._moments(name):
                raise ValueError(f"the state's {entry!r} belongs to no parameter here; trained are: {', '.join(self._named)}")
            shape = torch.Size() if key == "step" else self._named[name].shape
            if value.shape != shape:
                raise ValueError(f"the state's {entry!r} has shape {tuple(value.shape)}, not {tuple(shape)}")
            found.setdefault(name, {})[key] = value.to(self._named[name].device, copy=True)
        for name, entries in found.items():
            if missing := set(self._moments(name)) - entries.keys():
                raise ValueError(f"the state has no {' and no '.join(sorted(missing))} of {name!r}: it is not whole")
        for name, p in self._named.items():
            self._of(name).state.pop(p, None)
            if name in found:
                self._of(name).state[p] = found[name]

    def _of(self, name: str) -> torch.optim.Optimizer:
        return self._muon if self._kinds[name] == "matrix" else self._adamw

    def _moments(self, name: str) -> tuple[str, ...]:
        return ("momentum_buffer",) if self._kinds[name] == "matrix" else ("step", "exp_avg", "exp_avg_sq")


def build_optimizer(named_parameters: Iterable[tuple[str, nn.Parameter]], settings: OptimSettings) -> LanesOptimiser:
    """Muon for the matrices of ``blocks``, AdamW for the rest of what requires a gradient; see ``kind_of``.

    ``ValueError`` where nothing requires a gradient, or one tensor comes under two names (it would be stepped twice).
    """
    groups: dict[Kind, dict[str, nn.Parameter]] = {"matrix": {}, "embedding": {}, "control": {}}
    first: dict[int, str] = {}
    for name, p in named_parameters:
        if id(p) in first:
            raise ValueError(f"{name!r} and {first[id(p)]!r} are one tensor: pass model.named_parameters(), which names each once")
        first[id(p)] = name
        if p.requires_grad:
            groups[kind_of(name, p)][name] = p
    if not any(groups.values()):
        raise ValueError("no parameter requires a gradient: there is nothing to optimise")
    return LanesOptimiser(groups, settings)
