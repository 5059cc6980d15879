"""Fingerprints are the written-out projections of each rollout's gradient; batches, padding and packing change nothing."""

from dataclasses import replace

import pytest
import torch
from families import make_batch, make_policy
from torch import Tensor, nn

from mi_route2.adapters import AdapterSpec
from mi_route2.probes.fingerprint import Fingerprint
from mi_route2.rollouts import Policy, call_with_mask

EXACT = {"rtol": 0.0, "atol": 1e-12}
LORA = AdapterSpec("lora", rank=3, quarantine_rank=2)


def drawn(policy: Policy, width: int = 5) -> Fingerprint:
    return Fingerprint.draw(policy.adapters, width, torch.Generator().manual_seed(3))


def written_out(policy: Policy, fingerprint: Fingerprint, row: int) -> Tensor:
    """The projections of one rollout's gradient of every base weight, from autograd."""
    rollouts = make_batch().rollouts.rows(torch.tensor([row]))
    weights = {site: policy.adapters.sites[site].weight.requires_grad_(True) for site in fingerprint.left}
    gradients = torch.autograd.grad(-policy.logprobs(rollouts).sum(), list(weights.values()))
    for weight in weights.values():
        weight.requires_grad_(False)
    norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
    sides = {site: zip(fingerprint.left[site].T, fingerprint.right[site].T, strict=True) for site in weights}
    each = [
        torch.stack([(g * torch.outer(*side)).sum() for side in sides[site]]) for site, g in zip(weights, gradients, strict=True)
    ]
    z, k = torch.stack(each).sum(dim=0), len(each[0])
    return z / (norm * k**0.5)


@pytest.mark.parametrize("state", ["full", "deployed"])
@pytest.mark.parametrize("name", ["Qwen3", "MicroGPT"])
def test_a_fingerprint_is_the_projection_of_the_gradient_of_every_weight(name: str, state: str) -> None:
    policy, rollouts = make_policy(name, LORA)[1], make_batch().rollouts
    fingerprint = drawn(policy)
    before = [p.grad for p in policy.model.parameters()]
    with getattr(policy.adapters, state)():
        z = fingerprint(policy, rollouts)
        expected = torch.stack([written_out(policy, fingerprint, row) for row in range(len(rollouts))])
    assert z.abs().min() > 0
    torch.testing.assert_close(z, expected, **EXACT)
    assert [p.grad for p in policy.model.parameters()] == before


def test_batches_change_nothing() -> None:
    policy, rollouts = make_policy("Qwen3", LORA)[1], make_batch().rollouts
    fingerprint = drawn(policy)
    whole = fingerprint(policy, rollouts)
    parts = [fingerprint(policy, rollouts.rows(torch.tensor([row]))) for row in range(len(rollouts))]
    torch.testing.assert_close(torch.cat(parts), whole, **EXACT)
    with torch.inference_mode():
        assert torch.equal(fingerprint(policy, make_batch().rollouts), whole)


def test_inner_products_of_fingerprints_are_cosines_of_gradients_in_expectation() -> None:
    policy, rollouts = make_policy("MicroGPT", LORA)[1], make_batch().rollouts
    z = drawn(policy, 20_000)(policy, rollouts)
    gram = z @ z.mT
    assert (gram.diagonal() - 1).abs().max() < 0.1
    assert torch.equal(drawn(policy)(policy, rollouts), drawn(policy)(policy, rollouts))


def test_a_width_of_nothing_and_a_policy_are_refused() -> None:
    policy = make_policy("MicroGPT", LORA)[1]
    with pytest.raises(ValueError, match="at least 1, not 0"):
        Fingerprint.draw(policy.adapters, 0)
    with pytest.raises(TypeError, match="adapters must be Adapters, not Policy"):
        Fingerprint.draw(policy)  # pyright: ignore[reportArgumentType]


def test_a_gradient_that_is_nan_has_no_fingerprint() -> None:
    policy, rollouts = make_policy("MicroGPT", LORA)[1], make_batch().rollouts
    token = int(rollouts.tokens[1, 0])
    others = rollouts.tokens.where(rollouts.tokens != token, (token + 1) % 5)
    others[1, 0] = token
    policy.model.embed.weight.data[token] = torch.nan  # pyright: ignore
    with pytest.raises(ValueError, match=r"rollouts \[1\] have gradients at .* that are NaN or infinite"):
        drawn(policy)(policy, replace(rollouts, tokens=others))


def test_under_autocast_a_fingerprint_is_that_of_float32_up_to_half_precision() -> None:
    policy, rollouts = make_policy("MicroGPT", LORA)[1], make_batch().rollouts
    policy.model.float()

    def autocast(model: nn.Module, tokens: Tensor, attention: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return call_with_mask(model, tokens, attention)

    z = drawn(policy)(replace(policy, forward=autocast), rollouts)
    assert z.dtype == torch.float32
    torch.testing.assert_close(z, drawn(policy)(policy, rollouts), rtol=0, atol=0.05)


def test_adapters_that_are_off_get_no_fingerprint() -> None:
    policy = make_policy("MicroGPT", LORA)[1]
    with policy.adapters.reference(), pytest.raises(ValueError, match=r"both adapters are off.*leave adapters.reference\(\)"):
        drawn(policy)(policy, make_batch().rollouts)
