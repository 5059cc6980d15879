"""The GRPO objective against its definition, written out rollout by rollout."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from tiny_policy import SPECS, make_batch, make_policy, make_rollouts
from tiny_study import tiny_settings
from torch import Tensor

from mi_route2.routing import MaskRoute, OpenRoute, OpenSpec, StepContext, TrainBatch, group_advantages
from studies.environments.micro.language import COMPLETION_LENGTH
from studies.environments.protocol import Samples, Witness, World
from studies.training.grpo import clip_gradients, objective, train, update, with_anchors


def brute(logprobs: Tensor, old: Tensor, ref: Tensor | None, batch: TrainBatch, clip: float, beta: float, scale: float) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    mask = batch.rollouts.predictors
    for b in range(len(batch.rollouts)):
        for t in range(mask.shape[1]):
            if mask[b, t]:
                rho = (logprobs[b, t] - old[b, t]).exp()
                a = batch.advantages[b]
                total = total - torch.minimum(rho * a, rho.clamp(1 - clip, 1 + clip) * a)
                if ref is not None:
                    gap = ref[b, t] - logprobs[b, t]
                    total = total + beta * (gap.exp() - gap - 1)
    return total / scale


@pytest.mark.parametrize("kl", [0.0, 0.3])
def test_objective_is_its_definition_away_from_the_sampling_policy(kl: float) -> None:
    policy, batch = make_policy(SPECS["lora"]), make_batch()
    settings, rows = tiny_settings(kl=kl, updates_per_batch=2, micro=2), list[int]()

    def forward(model: torch.nn.Module, tokens: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
        rows.append(len(tokens))
        return policy.forward(model, tokens, attention)

    anchored = with_anchors(replace(policy, forward=forward), batch, settings)
    assert max(rows) == 2  # no more at one time than a micro-batch has
    with torch.no_grad():
        for p in policy.adapters.kept_parameters().values():
            p += 0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(5), dtype=p.dtype)
    assert anchored.old_logprobs is not None
    drawn = torch.randn(anchored.old_logprobs.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    anchored = replace(anchored, old_logprobs=anchored.old_logprobs + 0.5 * drawn)  # ratios beyond both bounds
    loss, reported = objective(policy.logits(anchored.rollouts), anchored, settings, COMPLETION_LENGTH)
    scale = settings.prompts * settings.group * COMPLETION_LENGTH
    assert anchored.old_logprobs is not None
    given = policy.logprobs(batch.rollouts), anchored.old_logprobs
    own, plain = (brute(*given, ref, batch, settings.clip, kl, scale) for ref in (anchored.reference_logprobs, None))
    assert torch.allclose(loss, own, rtol=0, atol=1e-12)
    assert torch.allclose(kl * reported, own - plain, rtol=0, atol=1e-12)


def test_the_clip_acts_on_stale_logprobs_and_never_on_fresh_ones() -> None:
    policy, batch = make_policy(SPECS["lora"]), make_batch()
    settings = tiny_settings(updates_per_batch=2)
    fresh, _ = objective(policy.logits(batch.rollouts), batch, replace(settings, clip=1e-6), COMPLETION_LENGTH)
    plain, _ = objective(policy.logits(batch.rollouts), batch, replace(settings, clip=100.0), COMPLETION_LENGTH)
    assert torch.equal(fresh, plain)
    stale = replace(batch, old_logprobs=policy.logprobs(batch.rollouts).detach() - 0.5)
    tight, _ = objective(policy.logits(stale.rollouts), stale, settings, COMPLETION_LENGTH)
    loose, _ = objective(policy.logits(stale.rollouts), stale, replace(settings, clip=100.0), COMPLETION_LENGTH)
    assert not torch.allclose(tight, loose)
    # every ratio is e^.5 > 1 + clip: reinforced rollouts are clipped and pass no gradient, punished ones pass theirs whole
    grads = {}
    for name, rows in (("reinforced", batch.advantages > 0), ("punished", batch.advantages < 0)):
        piece = stale.rows(rows.nonzero()[:, 0])
        loss, _ = objective(policy.logits(piece.rollouts), piece, settings, COMPLETION_LENGTH)
        parameters = list(policy.adapters.kept_parameters().values())
        grads[name] = sum(float(g.abs().sum()) for g in torch.autograd.grad(loss, parameters))
    assert grads["reinforced"] == 0 < grads["punished"]


def test_kl_is_zero_with_adapters_at_init_and_positive_off_it() -> None:
    settings = tiny_settings(kl=0.1)
    for scale, expected in ((0.0, True), (0.2, False)):
        policy = make_policy(SPECS["lora"], scale=scale)
        batch = with_anchors(policy, make_batch(), settings)
        _, kl = objective(policy.logits(batch.rollouts), batch, settings, COMPLETION_LENGTH)
        assert (float(kl) == 0) is expected
        assert float(kl) >= 0


@pytest.mark.parametrize("micro", [None, 2])
def test_the_divergence_counts_every_rollout_once_though_each_adapter_has_a_loss(micro: int | None) -> None:
    """The brute-force K3 of the batch, and a loss that keeps the terms of both losses."""
    policy, settings = make_policy(SPECS["lora"]), tiny_settings(kl=0.3, micro=micro)
    batch = with_anchors(policy, make_batch(), settings)
    flags = torch.tensor([True, False, False, False, True, False])
    with torch.no_grad():
        logprobs = policy.logprobs(batch.rollouts)
    scale = settings.prompts * settings.group * COMPLETION_LENGTH
    assert batch.reference_logprobs is not None
    gap = (batch.reference_logprobs - logprobs) * batch.rollouts.predictors
    k3 = (gap.exp() - gap - 1).sum(1) / scale
    kept = torch.where(flags, 0.0, group_advantages(batch.rewards, batch.groups, ~flags))
    surrogate = ((batch.advantages + kept) * batch.rollouts.predictors.sum(1)).sum() / scale
    penalty = 2 * k3.sum()

    route = MaskRoute.from_flags(flags, kept_advantage="unflagged")
    trained = [{"params": list(p.values())} for p in (policy.adapters.kept_parameters(), policy.adapters.quarantine_parameters())]
    context = StepContext(torch.Generator(), micro)
    result = update(policy, route, torch.optim.AdamW(trained, lr=1e-3), batch, context, settings, COMPLETION_LENGTH)
    assert result.kl == pytest.approx(float(k3.sum()), abs=1e-12)
    assert result.loss == pytest.approx(float(0.3 * penalty - surrogate), abs=1e-12)


@pytest.mark.parametrize("kl", [0.0, 0.5])
def test_groups_of_equal_rewards_are_held_to_the_reference_too(kl: float) -> None:
    """The loss sums K3 over every rollout of the step; a group without it has no gradient and is skipped."""
    policy, rollouts, settings = make_policy(SPECS["lora"]), make_rollouts(6), tiny_settings(kl=kl, steps=1, prompts=2, group=3)
    world, witness = mock.MagicMock(spec=World, max_new=COMPLETION_LENGTH), mock.MagicMock(spec=Witness)
    world.prompts.return_value = ["task"] * 2
    world.sample.return_value = Samples(["task"] * 6, rollouts, [""] * 6)
    world.rewards.return_value = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    with torch.no_grad():
        logprobs = policy.logprobs(rollouts)
        with policy.adapters.reference():
            gap = (policy.logprobs(rollouts) - logprobs) * rollouts.predictors
    k3 = (gap.exp() - gap - 1).sum(1) / (6 * COMPLETION_LENGTH)
    optimizer = torch.optim.AdamW([{"params": list(policy.adapters.kept_parameters().values())}], lr=1e-3)
    [record] = train(world, witness, policy, OpenRoute(OpenSpec()), optimizer, settings, seed=0)
    assert record.trained.tolist() == [True] * 3 + [kl > 0] * 3
    assert record.kl == (pytest.approx(float(k3.sum()), abs=1e-12) if kl else None)


def test_kept_and_quarantine_are_clipped_apart() -> None:
    policy = make_policy(SPECS["lora"])
    for p in policy.adapters.kept_parameters().values():
        p.grad = torch.full_like(p, 1e-4)
    for p in policy.adapters.quarantine_parameters().values():
        p.grad = torch.full_like(p, 1e3)
    before = {n: p.grad.clone() for n, p in policy.adapters.kept_parameters().items()}  # pyright: ignore
    norms = clip_gradients(policy, 1.0)
    assert norms["quarantine"] is not None
    assert norms["quarantine"] > 1
    assert all(torch.equal(p.grad, before[n]) for n, p in policy.adapters.kept_parameters().items())  # pyright: ignore
    total = sum(float(p.grad.square().sum()) for p in policy.adapters.quarantine_parameters().values()) ** 0.5  # pyright: ignore
    assert total == pytest.approx(1.0, rel=1e-5)
