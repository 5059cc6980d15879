"""The host waits for a device a number of times per step, and not per module: checks of all modules are made together."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tiny_policy import SPECS, VOCAB, make_batch, make_rollouts
from torch import Tensor

from mi_route2.adapters import attach
from mi_route2.rollouts import Policy
from mi_route2.routing import (
    EraseRoute,
    EraseSpec,
    MaskRoute,
    MaskSpec,
    PairBatch,
    Route,
    StepContext,
    TrainBatch,
)
from studies.environments.micro.model import MicroGPT
from studies.environments.micro.settings import MicroConfig

READS = ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "nonzero", "equal", "cpu", "numpy")
WAITING = [*((Tensor, name) for name in READS), (torch, "equal"), (torch, "nonzero")]
PAIRS = PairBatch(make_rollouts(4, 8), make_rollouts(4, 9), "h")
RULES: dict[str, Any] = {
    "act": MaskSpec(score="act"),
    "act by token": MaskSpec(score="act", unit="token", through="detach"),
    "grad": MaskSpec(score="grad"),
    "grad by module": MaskSpec(score="grad", unit="rollout"),
    "grad before the loss": MaskSpec(score="grad", score_policy="ablated", through="detach"),
    "full": MaskSpec(score="full"),
    "erase": EraseSpec(k=1),
}


@contextmanager
def waits() -> Iterator[list[str]]:
    """Yield the names of calls that read a tensor's values."""
    seen: list[str] = []

    def noting(name: str, call: Any) -> Any:
        return lambda *args, **named: (seen.append(name), call(*args, **named))[1]

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in WAITING:
            patch.setattr(owner, name, noting(name, getattr(owner, name)))
        yield seen


def deep(kind: str, layers: int) -> Policy:
    config = MicroConfig(vocab=VOCAB, d=16, layers=layers, heads=2, mlp=40, context=24)
    model, generator = MicroGPT(config, torch.Generator().manual_seed(0)).double(), torch.Generator().manual_seed(1)
    adapters = attach(model, "blocks.*", spec=SPECS[kind], generator=generator)
    with torch.no_grad():
        for p in (*adapters.kept_parameters().values(), *adapters.quarantine_parameters().values()):
            p += 0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype)
    return Policy(model, adapters)


def loss(logits: Tensor, batch: TrainBatch) -> Tensor:
    return -batch.rollouts.logprobs(logits).sum(1) / 50


def route_of(rule: str) -> Route:
    spec = RULES[rule]
    return EraseRoute.from_pairs(PAIRS, spec) if rule == "erase" else MaskRoute.from_pairs(PAIRS, spec)


@pytest.mark.parametrize(("kind", "hooked"), [("svd", False), ("lora", True)])
@pytest.mark.parametrize("rule", RULES)
def test_neither_a_step_nor_a_fit_waits_per_module(rule: str, kind: str, hooked: bool) -> None:
    batch, steps, fits = make_batch(6), [], []
    for layers in (2, 4):
        policy, route = deep(kind, layers), route_of(rule)
        if hooked:
            for branch in policy.adapters.sites.values():
                branch.hook_mask.register_forward_hook(lambda module, args, keep: 1 - keep)
        for step in range(2):  # of the second one the gradients are not cleared before, as of an accumulated one
            with waits() as fit:
                route.refresh(policy, 5 * step)
            with waits() as own:
                route.backward(policy, batch, loss, StepContext(torch.Generator(), micro=3))
            policy.model.zero_grad(set_to_none=False)
        steps.append(len(own))
        fits.append(len(fit))
    assert steps[0] == steps[1]
    assert fits[0] == fits[1]


def test_the_weights_are_hashed_once_and_again_when_one_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, route = deep("lora", 2), route_of("grad")
    route.refresh(policy, 0)
    route.backward(policy, make_batch(6), loss)
    before = route.directions.provenance.base_hash  # pyright: ignore[reportOptionalMemberAccess]
    with torch.no_grad():
        policy.adapters.sites["blocks.0.attn.q"].weight.mul_(1.01)
    route.refresh(policy, 5)
    assert route.directions.provenance.base_hash == policy.adapters.base_hash != before  # pyright: ignore[reportOptionalMemberAccess]


def test_a_mask_or_score_that_is_none_is_still_said_by_the_step() -> None:
    """With the name of its module, once the step ends."""
    policy, batch = deep("lora", 2), make_batch(6)
    with (
        policy.adapters.sites["blocks.1.mlp.up"].hook_mask.register_forward_hook(lambda module, args, keep: keep * torch.nan),
        pytest.raises(ValueError, match=r"a hook at blocks\.1\.mlp\.up\.hook_mask returned nan"),
    ):
        MaskRoute.from_flags(torch.arange(6) > 2).backward(policy, batch, loss)
    (route := route_of("grad by module")).refresh(policy, 0)
    with pytest.raises(ValueError, match=r"rollouts \[2\] have activations or gradients that are NaN"):
        route.backward(policy, batch, lambda logits, part: loss(logits, part) * torch.tensor([1, 1, torch.nan, 1, 1, 1]))
