"""The effect of a step on each adapter: both parts add up to the whole change, and gradient shares are those of autograd."""

import pytest
import torch
from families import make_batch, make_policy
from torch import Tensor

from mi_route2.adapters import AdapterSpec
from mi_route2.rollouts import Policy
from studies.route2.learning import State, learned, shares

EXACT = {"rtol": 0.0, "atol": 1e-12}
LORA = AdapterSpec("lora", rank=3, quarantine_rank=2)


def move(parameters: dict[str, torch.nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in parameters.values():
            p.add_(0.05 * torch.randn(p.shape, generator=generator, dtype=torch.float64))


@torch.no_grad()
def nats(policy: Policy) -> Tensor:
    return policy.logprobs(make_batch().rollouts).sum(dim=1)


@pytest.mark.parametrize("moved", ["kept", "quarantine", "both"])
def test_the_two_parts_are_fair_and_add_up(moved: str) -> None:
    policy, rollouts = make_policy("MicroGPT", LORA)[1], make_batch().rollouts
    adapters = policy.adapters
    before, start = State.of(adapters), nats(policy)
    with adapters.deployed():
        deployed = nats(policy)
    if moved != "quarantine":
        move(adapters.kept_parameters(), 1)
    if moved != "kept":
        move(adapters.quarantine_parameters(), 2)
    after = {name: t.clone() for name, t in adapters.tensors().items()}
    seen, end = learned(policy, rollouts, before), nats(policy)
    torch.testing.assert_close(seen["kept"] + seen["quarantine"], end - start, **EXACT)
    assert all(torch.equal(t, after[name]) for name, t in adapters.tensors().items())
    with adapters.deployed():
        torch.testing.assert_close(seen["deployed"], nats(policy) - deployed, **EXACT)
    assert (end - start).abs().min() > 1e-6
    if moved != "both":  # an adapter that stays has no part
        still = "quarantine" if moved == "kept" else "kept"
        torch.testing.assert_close(seen[still], torch.zeros_like(end), **EXACT)
    else:  # Shapley's symmetry: what each order of the two moves gives, halved
        with torch.no_grad():
            for name, p in adapters.quarantine_parameters().items():
                p.copy_(before.quarantine[name])
        first = nats(policy) - start
        with torch.no_grad():
            for name, p in adapters.kept_parameters().items():
                p.copy_(before.kept[name])
            for name, p in adapters.quarantine_parameters().items():
                p.copy_(after[f"quarantine.{name}"])
        second = end - nats(policy)
        torch.testing.assert_close(seen["kept"], (first + second) / 2, **EXACT)
        assert (first - second).abs().max() > 1e-9


def test_without_a_quarantine_the_kept_adapter_learns_all() -> None:
    policy, rollouts = make_policy("MicroGPT", AdapterSpec("lora", rank=3, quarantine="none"))[1], make_batch().rollouts
    before, start = State.of(policy.adapters), nats(policy)
    move(policy.adapters.kept_parameters(), 1)
    seen = learned(policy, rollouts, before)
    assert seen.keys() == {"kept", "deployed"}
    torch.testing.assert_close(seen["kept"], nats(policy) - start, **EXACT)


@pytest.mark.parametrize("family", ["MicroGPT", "Qwen3"])
def test_shares_are_those_of_autograd_one_rollout_at_a_time(family: str) -> None:
    policy, rollouts = make_policy(family, LORA)[1], make_batch().rollouts
    grads = [p.grad for p in policy.model.parameters()]
    found = shares(policy, rollouts)
    assert [p.grad for p in policy.model.parameters()] == grads
    sides = [list(each.values()) for each in (policy.adapters.kept_parameters(), policy.adapters.quarantine_parameters())]
    for row in range(len(rollouts)):
        with policy.adapters.unrouted():
            loss = policy.logprobs(rollouts.rows(torch.tensor([row]))).sum()
            gradients = [torch.autograd.grad(loss, side, retain_graph=True) for side in sides]
        kept, quarantine = (torch.cat([g.flatten() for g in each]).norm() for each in gradients)
        assert 0.05 < quarantine / (kept + quarantine) < 0.95
        torch.testing.assert_close(found[row], quarantine / (kept + quarantine), **EXACT)
