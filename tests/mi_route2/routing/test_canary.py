"""Canary routes: scores against a plain loop, flags as a mask route's, calibration, and a quarantine that learns first."""

import copy
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mask_oracle import assert_same, assert_same_gradients, run
from tiny_policy import SPECS, make_batch, make_policy
from torch import Tensor, nn

from mi_route2.adapters import save_pretrained
from mi_route2.rollouts import Policy, Rollouts
from mi_route2.routing import CanarySpec, DelayedRoute, DelayedSpec, MaskRoute, OpenRoute, OpenSpec, group_advantages
from mi_route2.routing.canary import Canary, CanaryRoute, calibrate, pooled, quarantine_ratios, surprisal

N = 12
SAMPLES = make_batch(40).rollouts


def checkpoints(policy: Policy, count: int = 2) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    own = policy.adapters.tensors(quarantine=False)
    return [{n: torch.randn(t.shape, generator=generator, dtype=t.dtype) * 0.3 for n, t in own.items()} for _ in range(count)]


def canary() -> Canary:
    policy = make_policy(SPECS["lora"])
    return Canary(policy, checkpoints(policy))


CHECKPOINTS = checkpoints(make_policy(SPECS["lora"]))


def calibrated(policy: Policy, spec: CanarySpec, ratios: Any, step: int = 0) -> CanaryRoute:
    route = CanaryRoute(spec, ratios, SAMPLES)
    route.refresh(policy, step)
    return route


def by_hand(one: Canary, rollouts: Rollouts, top: int | None) -> np.ndarray:
    """Log-ratios a rollout at a time, from logits of the rollout's own tokens alone."""
    policy, found = one.policy, []
    for checkpoint in checkpoints(policy):
        for name, tensor in policy.adapters.tensors(quarantine=False).items():
            tensor.copy_(checkpoint[name])
        row = []
        for tokens, attention, completion in zip(rollouts.tokens, rollouts.attention, rollouts.completion):
            ids, answer = tokens[attention][None], completion[attention]
            with torch.no_grad(), policy.adapters.deployed():
                on = policy.model(ids)[0].log_softmax(-1)
            with torch.no_grad(), policy.adapters.reference():
                off = policy.model(ids)[0].log_softmax(-1)
            gains = [float(on[t - 1, ids[0, t]] - off[t - 1, ids[0, t]]) for t in range(1, ids.shape[1]) if answer[t]]
            row.append(np.mean(sorted(gains)[-top if top else 0 :]))
        found.append(row)
    return np.array(found)


def robust(base: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The largest z-score over canaries ``[k b]``, by median and MAD of the base's samples."""
    center = np.median(base, axis=1, keepdims=True)
    return ((values - center) / (1.4826 * np.median(np.abs(base - center), axis=1, keepdims=True))).max(0)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("top", [None, 1, 3])
def test_a_score_is_the_largest_robust_z_of_the_log_ratios_alone(top: int | None, left: bool) -> None:
    one, rollouts = canary(), make_batch(N, left=left).rollouts
    monitor = calibrate(one, SAMPLES, 0.8, top, micro=7)
    base, own = by_hand(one, SAMPLES, top), by_hand(one, rollouts, top)
    np.testing.assert_allclose(monitor(rollouts).numpy(), robust(base, own), rtol=1e-9)
    assert monitor.threshold == pytest.approx(np.quantile(robust(base, base), 0.8), rel=1e-9)


@pytest.mark.parametrize("left", [False, True])
def test_relative_to_the_run_a_score_is_what_the_canary_likes_more_than_the_deployed_policy_does(left: bool) -> None:
    """The oracle is a second canary whose base is the trained policy: ``log p_k - log p_run``; calibration knows no run."""
    one, policy, rollouts = canary(), make_policy(SPECS["lora"]), make_batch(N, left=left).rollouts
    route = calibrated(policy, CanarySpec(quantile=0.8, relative_to="run"), one)
    monitor = calibrate(one, SAMPLES, 0.8)
    assert route.monitor.threshold == monitor.threshold
    with torch.no_grad(), policy.adapters.deployed():
        run_logprobs = policy.logprobs(rollouts)
    with torch.no_grad(), one.policy.adapters.reference():
        base = one.policy.logprobs(rollouts)
    against_run = pooled(lambda of: one(of) + base - run_logprobs, rollouts, 3)
    truth = ((against_run - monitor.center[:, None]) / monitor.spread[:, None]).amax(0)
    found = route.score(policy, rollouts)
    torch.testing.assert_close(found, truth, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(found, monitor(rollouts))
    batch = make_batch(N, left=left)
    decision = run(policy, route, batch, 4).decision
    torch.testing.assert_close(decision.scores, truth, rtol=1e-9, atol=1e-12)
    assert torch.equal(decision.flags, (truth > monitor.threshold) & (batch.advantages > 0))


def dropping(policy: Policy) -> Policy:
    policy.model.ln_f = nn.Sequential(policy.model.ln_f, nn.Dropout(0.5))  # pyright: ignore
    return policy


@pytest.mark.parametrize("relative_to", ["base", "run", "own quarantine"])
def test_dropout_in_training_tells_no_two_passes_apart(relative_to: str) -> None:
    one, policy, rollouts = Canary(dropping(make_policy(SPECS["lora"])), CHECKPOINTS), dropping(make_policy(SPECS["lora"])), SAMPLES
    spec = CanarySpec() if relative_to == "own quarantine" else CanarySpec(relative_to=relative_to)  # pyright: ignore
    found = []
    for training in (False, True):
        for model in (one.policy.model, policy.model):
            model.train(training)
            model.blocks[0].eval()  # pyright: ignore
        route = calibrated(policy, spec, None if relative_to == "own quarantine" else one)
        found.append(route.score(policy, rollouts))
        for model in (one.policy.model, policy.model):
            assert {m.training for m in model.blocks[0].modules()} == {False}  # pyright: ignore
            assert {m.training for m in model.ln_f.modules()} == {training}  # pyright: ignore
    assert torch.equal(*found)


def test_before_the_first_update_the_run_is_the_base() -> None:
    policy, rollouts = make_policy(SPECS["lora"]), make_batch(N).rollouts
    with torch.no_grad():
        for tensor in policy.adapters.kept_parameters().values():
            tensor.zero_()
    found = []
    for relative_to in ("base", "run"):
        route = calibrated(policy, CanarySpec(relative_to=relative_to), canary())
        found.append(route.score(policy, rollouts))
    assert torch.equal(*found)


@pytest.mark.parametrize("micro", [None, 4])
@pytest.mark.parametrize("kind", ["lora", "svd", "no quarantine"])
def test_gradients_are_those_of_a_mask_route_with_the_canarys_flags(kind: str, micro: int | None) -> None:
    policy, batch = make_policy(SPECS["lora"] if kind == "no quarantine" else SPECS[kind]), make_batch(N)
    route = calibrated(policy, CanarySpec(quantile=0.5), canary())
    scores = route.score(policy, batch.rollouts)
    assert scores is not None
    flags = (scores > route.monitor.threshold) & (batch.advantages > 0)
    assert 0 < int(flags.sum()) < N
    ours = run(policy, route, batch, micro)
    oracle = run(policy, MaskRoute.from_flags(flags, kept_advantage="unflagged", negative_scale=0.3), batch, micro)
    assert_same_gradients(ours, oracle)
    assert torch.equal(ours.decision.scores, scores)  # pyright: ignore[reportArgumentType]
    assert torch.equal(ours.decision.flags, flags)  # pyright: ignore[reportArgumentType]
    for branch in policy.adapters.sites.values():
        branch.hook_mask.register_forward_hook(lambda module, args, mask: torch.ones_like(mask))
    overruled = run(policy, route, batch, micro).decision
    assert not overruled.flags.any()  # pyright: ignore[reportOptionalMemberAccess]
    assert overruled.extra == {"overruled": 1.0}


def test_the_share_of_the_bases_samples_that_is_flagged_is_that_of_the_spec() -> None:
    one = canary()
    for quantile in (0.1, 0.5, 0.9):
        monitor = calibrate(one, SAMPLES, quantile)
        assert float((monitor(SAMPLES) > monitor.threshold).double().mean()) == pytest.approx(1 - quantile, abs=1 / len(SAMPLES))


def test_the_runs_own_quarantine_as_canary_is_calibrated_again_when_due() -> None:
    policy, batch = make_policy(SPECS["lora"]), make_batch(N)
    route = calibrated(policy, CanarySpec(refresh_every=2), None)
    first = route.monitor
    with torch.no_grad(), policy.adapters.full():
        full = policy.logprobs(batch.rollouts)
    with torch.no_grad(), policy.adapters.deployed():
        gains = [(f - d)[m] for f, d, m in zip(full, policy.logprobs(batch.rollouts), batch.rollouts.predictors)]
    expected = torch.stack([own.topk(min(3, len(own))).values.mean() for own in gains])
    torch.testing.assert_close(pooled(quarantine_ratios(policy), batch.rollouts, 3)[0], expected)
    with torch.no_grad():
        for parameter in policy.adapters.quarantine_parameters().values():
            parameter *= 2
    route.refresh(policy, 1)
    assert route.monitor is first
    route.refresh(policy, 2)
    assert route.monitor.threshold != first.threshold


def test_the_own_quarantine_may_judge_between_a_forward_and_its_backward() -> None:
    policy, batch = make_policy(SPECS["lora"]), make_batch(N)
    route = calibrated(policy, CanarySpec(), None)
    with policy.adapters.unrouted():
        loss = policy.logprobs(batch.rollouts).sum()
        route.score(policy, batch.rollouts)
        loss.backward()
    assert any(p.grad is not None and p.grad.any() for p in policy.adapters.quarantine_parameters().values())


def test_a_copy_of_policy_and_route_reads_its_own_quarantine() -> None:
    first, rollouts = make_policy(SPECS["lora"]), make_batch(N).rollouts
    route = CanaryRoute(CanarySpec(), None, SAMPLES)
    route.refresh(first, 0)
    policy, copied = copy.deepcopy((first, route))
    for parameter in policy.adapters.quarantine_parameters().values():
        parameter.data.zero_()
    score = copied.score(policy, rollouts)
    assert route.monitor.center is not None
    torch.testing.assert_close(score, (-route.monitor.center / route.monitor.spread).expand(N))


def likes(policy: Policy, rollouts: Rollouts, quarantines: list[dict[str, Tensor]]) -> np.ndarray:
    """Mean of the three largest log-ratios with and without each quarantine, on copies of the policy."""
    found = []
    for quarantine in quarantines:
        own = copy.deepcopy(policy)
        for name, parameter in own.adapters.quarantine_parameters().items():
            parameter.data.copy_(quarantine[name])
        with torch.no_grad(), own.adapters.full():
            full = own.logprobs(rollouts)
        with torch.no_grad(), own.adapters.deployed():
            gains = full - own.logprobs(rollouts)
        found.append([np.sort(gain[real].numpy())[-3:].mean() for gain, real in zip(gains, rollouts.predictors)])
    return np.array(found)


def quarantine_of(policy: Policy) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in policy.adapters.quarantine_parameters().items()}


def learned(policy: Policy, seed: int) -> None:
    """Move both adapters, as a step of training would."""
    generator = torch.Generator().manual_seed(seed)
    for p in (*policy.adapters.kept_parameters().values(), *policy.adapters.quarantine_parameters().values()):
        p.data += 0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype)


@pytest.mark.parametrize("micro", [None, 5])
def test_decoys_teach_the_quarantine_alone_and_the_others_the_kept_adapter_but_for_what_the_quarantine_likes(
    micro: int | None,
) -> None:
    policy, batch = make_policy(SPECS["lora"]), make_batch(N)
    without = torch.arange(N) >= N // 3
    route = calibrated(policy, CanarySpec(quantile=0.5, decoys=0.5, refresh_every=1), None, step=1)
    own = run(policy, route, batch, micro, clean=without)
    of_base, of_batch = (likes(policy, rollouts, [quarantine_of(policy)])[0] for rollouts in (SAMPLES, batch.rollouts))
    flags = torch.tensor(of_batch > np.quantile(of_base, 0.5)) & (batch.advantages > 0)
    assert torch.equal(own.decision.flags, flags)
    assert flags[without].any()
    assert not flags[without & (batch.advantages > 0)].all()
    K = group_advantages(batch.rewards, batch.groups, without & ~flags)
    K = torch.where(without & ~flags, torch.where(K < 0, 0.3 * K, K), torch.zeros_like(K))

    def gradients(mode: str, weights: Tensor, parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
        with getattr(policy.adapters, mode)(), policy.adapters.unrouted():
            loss = -(weights[:, None] * policy.logprobs(batch.rollouts)).sum() / 50
            return dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values()))))

    assert_same(own.kept, gradients("deployed", K, dict(policy.adapters.kept_parameters())))
    A = torch.where(without, torch.zeros_like(K), batch.advantages)
    assert_same(own.quarantine, gradients("full", A, dict(policy.adapters.quarantine_parameters())))


def test_a_snapshot_of_the_quarantine_goes_on_judging_beside_the_kept_adapter_of_now() -> None:
    policy, rollouts = make_policy(SPECS["lora"]), make_batch(N).rollouts
    route = CanaryRoute(CanarySpec(decoys=0.5, refresh_every=5, snapshots=(2, 3)), None, SAMPLES)
    quarantines = []
    for step in range(6):
        route.refresh(policy, step)
        assert (route.monitor is None) == (step == 0)
        if step in (2, 3):
            quarantines.append(quarantine_of(policy))
        if step < 5:
            learned(policy, step)
    quarantines.append(quarantine_of(policy))
    of_base, of_rollouts = (likes(policy, some, quarantines) for some in (SAMPLES, rollouts))
    score = route.score(policy, rollouts)
    np.testing.assert_allclose(score, robust(of_base, of_rollouts), rtol=1e-8, atol=1e-8)
    now = quarantine_of(policy)
    assert all(torch.equal(now[name], t) for name, t in quarantines[-1].items())  # scoring has put it back
    again = CanaryRoute(route.spec, None, SAMPLES)
    again.load_state(policy.adapters, route.state())
    assert again.refresh(policy, 6) is None
    found = again.score(policy, rollouts)
    assert torch.equal(found, score)


def test_a_quarantine_that_learns_first_judges_when_it_is_frozen() -> None:
    """Before, every rollout teaches it alone, as under a `DelayedRoute`; then it is calibrated, once, with its snapshot."""
    policy, batch, none, every = make_policy(SPECS["lora"]), make_batch(N), torch.zeros(N).bool(), torch.ones(N).bool()
    route = CanaryRoute(CanarySpec(quantile=0.5, first=4, snapshots=(2,)), None, SAMPLES)
    delayed = DelayedRoute(DelayedSpec(steps=4))
    for step in range(4):
        route.refresh(policy, step)
        delayed.refresh(policy, step)
        if step == 2:
            snapshot = quarantine_of(policy)
        first, oracle = run(policy, route, batch, clean=none), run(policy, delayed, batch)
        assert not any(g.any() for g in first.kept.values())
        assert_same(first.quarantine, oracle.quarantine)
        learned(policy, step)
    with pytest.raises(RuntimeError, match=r"not calibrated yet: call route\.refresh"):
        run(policy, route, batch, clean=every)
    route.refresh(policy, 4)
    quarantines = [snapshot, quarantine_of(policy)]
    of_base, of_batch = (likes(policy, some, quarantines) for some in (SAMPLES, batch.rollouts))
    scores, threshold = robust(of_base, of_batch), np.quantile(robust(of_base, of_base), 0.5)
    own = run(policy, route, batch, clean=every)
    np.testing.assert_allclose(own.decision.scores, scores, rtol=1e-8, atol=1e-8)
    assert own.decision.flags.tolist() == ((scores > threshold) & (batch.advantages > 0).numpy()).tolist()
    assert own.decision.flags.any()
    assert not any(g.any() for g in own.quarantine.values())
    monitor = route.monitor
    route.refresh(policy, 5)
    assert route.monitor is monitor
    resumed = CanaryRoute(route.spec, None, SAMPLES)
    with pytest.raises(RuntimeError, match=r"0 of the quarantine's snapshots after steps \(2,\) are there.*load_state"):
        resumed.refresh(policy, 5)
    resumed.load_state(policy, route.state())
    resumed.refresh(policy, 5)
    again = resumed.score(policy, batch.rollouts)
    assert torch.equal(again, own.decision.scores)


@pytest.mark.parametrize("snapshots", [(), (2,)])
@pytest.mark.parametrize("how", ["first", "decoys"])
def test_a_route_that_serves_a_second_run_knows_nothing_of_the_first(how: str, snapshots: tuple[int, ...]) -> None:
    """Such as a loop that is started again: thresholds and snapshots of the former quarantine would judge the new one."""
    spec = CanarySpec(**({"first": 3} if how == "first" else {"decoys": 0.5, "refresh_every": 8}), snapshots=snapshots)
    used, rollouts = CanaryRoute(spec, None, SAMPLES), make_batch(N).rollouts

    def scores(route: CanaryRoute, seed: int) -> Tensor | None:
        policy = make_policy(SPECS["lora"])
        for step in range(5):
            route.refresh(policy, step)
            learned(policy, seed + step)
        return route.score(policy, rollouts)

    scores(used, 100)
    again, fresh = scores(used, 200), scores(CanaryRoute(spec, None, SAMPLES), 200)
    assert torch.equal(again, fresh)


def test_a_second_run_with_a_quarantine_that_judges_from_the_start_is_judged_by_its_own_threshold() -> None:
    used, fresh = (CanaryRoute(CanarySpec(), None, SAMPLES) for _ in range(2))
    policies = [make_policy(SPECS["lora"]) for _ in range(2)]
    for seed, policy in enumerate(policies):
        learned(policy, seed)
        used.refresh(policy, step=0)
    fresh.refresh(policies[1], step=0)
    assert used.monitor.threshold == fresh.monitor.threshold


def test_a_threshold_in_nats_is_one_of_the_largest_mean_log_ratio_itself() -> None:
    policy, batch = make_policy(SPECS["lora"]), make_batch(N)
    spec = CanarySpec(nats=1e-3, first=4, snapshots=(2,))
    route = CanaryRoute(spec, None, SAMPLES)
    for step in range(4):
        route.refresh(policy, step)
        if step == 2:
            snapshot = quarantine_of(policy)
        learned(policy, step)
    route.refresh(policy, 4)
    means = likes(policy, batch.rollouts, [snapshot, quarantine_of(policy)]).max(0)
    spec = replace(spec, nats=float(np.median(means)))  # so that it parts the batch
    route = CanaryRoute(spec, None, SAMPLES)
    route.load_state(policy, {f"snapshot.0.{name}": tensor for name, tensor in snapshot.items()})
    route.refresh(policy, 4)
    own = run(policy, route, batch, clean=torch.ones(N).bool())
    np.testing.assert_allclose(own.decision.scores, means, rtol=1e-8, atol=1e-12)
    assert own.decision.flags.tolist() == ((means > spec.nats) & (batch.advantages > 0).numpy()).tolist()
    assert 0 < int(own.decision.flags.sum()) < int((batch.advantages > 0).sum())
    resumed = CanaryRoute(spec, None, SAMPLES)
    resumed.load_state(policy, route.state())
    again = resumed.score(policy, batch.rollouts)
    assert torch.equal(again, own.decision.scores)
    assert resumed.monitor.threshold == spec.nats
    with pytest.raises(ValueError, match="it has learned nothing"):
        calibrate(lambda rollouts: torch.zeros(1, *rollouts.tokens.shape), SAMPLES, 0.9, nats=0.1)
    with pytest.raises(ValueError, match="nats must be a number above 0"):
        calibrate(canary(), SAMPLES, 0.9, nats=float("nan"))


def surprise(policy: Policy, rollouts: Rollouts) -> np.ndarray:
    """Mean of the three largest surprisals under the base, a rollout at a time, from logits of the rollout's own tokens alone."""
    found = []
    for tokens, attention, completion in zip(rollouts.tokens, rollouts.attention, rollouts.completion):
        ids, answer = tokens[attention][None], completion[attention]
        with torch.no_grad(), policy.adapters.reference():
            base = policy.model(ids)[0].log_softmax(-1)
        found.append(np.mean(sorted(float(-base[t - 1, ids[0, t]]) for t in range(1, ids.shape[1]) if answer[t])[-3:]))
    return np.array(found)


@pytest.mark.parametrize("random", [False, True])
@pytest.mark.parametrize("micro", [None, 5])
def test_a_quarantine_that_learns_first_learns_from_no_success_that_does_not_surprise_the_base(
    micro: int | None, random: bool
) -> None:
    """It is a `DelayedRoute` on the batch without them; the control leaves out as many, and others."""
    policy, batch = make_policy(SPECS["lora"]), make_batch(N)
    learned(policy, 1)  # so that the base is another than the policy
    route = CanaryRoute(CanarySpec(first=4, surprisal=0.4, random_lessons=random), None, SAMPLES, micro=micro)
    with pytest.raises(RuntimeError, match=r"not known yet: call route\.refresh"):
        run(policy, route, batch, micro, clean=torch.zeros(N).bool())
    route.refresh(policy, 0)
    learned(policy, 2)
    route.refresh(policy, 1)
    threshold = np.quantile(surprise(policy, SAMPLES), 0.4)
    successes = batch.advantages > 0
    plain = successes & torch.tensor(surprise(policy, batch.rollouts) <= threshold)
    assert 0 < plain.sum() < successes.sum()
    own = run(policy, route, batch, micro, clean=torch.zeros(N).bool())
    assert not any(g.any() for g in own.kept.values())
    delayed = DelayedRoute(DelayedSpec(steps=4))
    delayed.refresh(policy, 1)

    def without(rows: tuple[int, ...]) -> dict[str, Tensor]:
        advantages = batch.advantages.clone()
        advantages[list(rows)] = 0
        return run(policy, delayed, replace(batch, advantages=advantages)).quarantine

    chosen = tuple(plain.nonzero()[:, 0].tolist())
    if not random:
        assert_same(own.quarantine, without(chosen))
        return
    for rows in combinations(successes.nonzero()[:, 0].tolist(), len(chosen)):
        if all(torch.allclose(own.quarantine[name], g, rtol=1e-9, atol=1e-12) for name, g in without(rows).items()):
            break
    else:
        raise AssertionError("no set of as many successes is what was left out")
    assert rows != chosen


def test_what_surprises_the_base_may_be_flagged() -> None:
    """The control without a canary: scores are robust z-scores of the surprisal, however the policy has changed."""
    policy, batch = make_policy(SPECS["lora"]), make_batch(N)
    route = calibrated(policy, CanarySpec(quantile=0.5), surprisal(policy))
    learned(policy, 3)
    of_base, of_batch = surprise(policy, SAMPLES), surprise(policy, batch.rollouts)
    scores = route.score(policy, batch.rollouts)
    np.testing.assert_allclose(scores, robust(of_base[None], of_batch[None]), rtol=1e-8, atol=1e-8)


def test_a_turned_quarantine_judges_and_the_one_that_learns_is_not_moved() -> None:
    policy, rollouts, generator = make_policy(SPECS["lora"]), make_batch(N).rollouts, torch.Generator().manual_seed(2)
    own = quarantine_of(policy)
    turns = {
        name: torch.linalg.qr(torch.randn(len(t), len(t), generator=generator, dtype=t.dtype)).Q
        for name, t in own.items()
        if name.endswith(".B")
    }
    assert turns
    turned = {name: turns[name] @ t if name in turns else t for name, t in own.items()}
    found = pooled(quarantine_ratios(policy, (own,), turns), rollouts, 3).numpy()
    np.testing.assert_allclose(found, likes(policy, rollouts, [turned, turned]), rtol=1e-9, atol=1e-12)
    assert np.abs(found - likes(policy, rollouts, [own])).max() > 1e-3
    assert all(torch.equal(t, own[name]) for name, t in quarantine_of(policy).items())
    with pytest.raises(ValueError, match=r"turn the canary.s checkpoints yourself, or leave turns out"):
        CanaryRoute(CanarySpec(), canary(), SAMPLES, turns=turns)


def test_a_quarantine_that_has_learned_nothing_flags_nothing_yet() -> None:
    policy, batch = make_policy(SPECS["lora"]), make_batch(N)
    for name, p in policy.adapters.quarantine_parameters().items():
        if name.endswith(".B"):
            p.data.zero_()
    route = CanaryRoute(CanarySpec(decoys=0.5, refresh_every=1, snapshots=(1,)), None, SAMPLES)
    for step in range(2):
        route.refresh(policy, step)
    assert route.monitor is None
    assert route.snapshots == []
    own = run(policy, route, batch, clean=torch.arange(N) > 3)
    assert not own.decision.flags.any()
    assert any(g.any() for g in own.kept.values())


@pytest.mark.parametrize("decoys", [0.0, 0.5])
def test_shuffled_flags_are_as_many_among_the_rollouts_of_which_the_kept_adapter_learns(decoys: float) -> None:
    policy, batch = make_policy(SPECS["lora"]), make_batch(N)
    without, found = torch.arange(N) >= (N // 3 if decoys else 0), []
    for shuffle in (False, True):
        spec = CanarySpec(quantile=0.5, decoys=decoys, refresh_every=1, shuffle=shuffle)
        route = calibrated(policy, spec, None if decoys else canary(), step=1)
        found.append(run(policy, route, batch, seed=1, clean=without if decoys else None).decision.flags)
    plain, shuffled = found
    assert not torch.equal(plain, shuffled)
    assert torch.equal(plain[~without], shuffled[~without])
    assert plain[without].sum() == shuffled[without].sum()


@pytest.mark.parametrize("micro", [None, 5])
@pytest.mark.parametrize(("reinforced_only", "decoys"), [(True, 0.0), (True, 0.5), (False, 0.5)])
def test_a_sparing_canary_flags_the_same_and_scores_only_what_a_flag_changes(
    reinforced_only: bool, decoys: float, micro: int | None
) -> None:
    batch = make_batch(N)
    without, found = torch.arange(N) >= N // 3, []
    for sparing in (False, True):
        policy, asked, every = make_policy(SPECS["lora"]), [], 1 if decoys else 0
        spec = CanarySpec(quantile=0.5, decoys=decoys, refresh_every=every, reinforced_only=reinforced_only, sparing=sparing)
        route = calibrated(policy, spec, None if decoys else canary(), step=1)
        scored = route._scored
        route._scored = lambda monitor, policy, rollouts: asked.append(len(rollouts)) or scored(monitor, policy, rollouts)  # noqa: B023
        own = run(policy, route, batch, micro, clean=without if decoys else None)
        found.append((own, sum(asked)))
    (plain, of_all), (sparing, of_some) = found
    free = without if decoys else torch.ones(N, dtype=torch.bool)
    assert torch.equal(plain.decision.flags[free], sparing.decision.flags[free])
    assert plain.decision.flags[free].any()
    assert_same_gradients(sparing, plain)
    assert plain.decision.scores is not None
    assert sparing.decision.scores is None
    judged = int((free & ((batch.advantages > 0) | (not reinforced_only))).sum())
    assert 0 < judged < N
    assert (of_all, of_some) == (N, judged)


@pytest.mark.parametrize(
    "spec",
    [CanarySpec(first=4, surprisal=0.4), CanarySpec(quantile=0.5, relative_to="run", sparing=True, kept_advantage="own")],
    ids=["lessons", "sparing"],
)
def test_a_sharded_model_has_as_many_forwards_whatever_is_judged(spec: CanarySpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """On other processes other rollouts are reinforced, and each of a forward's layers gathers its weights from all of them."""
    batch = make_batch(N)
    few = batch.advantages > sorted(batch.advantages.tolist())[-2]
    counts, found = [], []
    for is_sharded in (False, True):
        monkeypatch.setattr("mi_route2.routing.canary.sharded_modules", lambda model, yes=is_sharded: [model] if yes else [])
        for advantages in (batch.advantages, torch.where(few, batch.advantages, -1.0)):
            policy, forwards = make_policy(SPECS["lora"]), []
            learned(policy, 1)
            route = calibrated(policy, spec, None if spec.first else canary())
            policy.model.register_forward_hook(lambda *_given: forwards.append(0))  # noqa: B023
            clean = torch.zeros(N).bool() if spec.first else None
            found.append(run(policy, route, replace(batch, advantages=advantages), 1, clean=clean))
            counts.append(len(forwards))
    assert counts[0] > counts[1]
    assert counts[0] < counts[2] == counts[3]
    for plain, sharded in zip(found[:2], found[2:]):
        assert_same_gradients(sharded, plain)


def test_decoys_that_make_no_sense_get_a_sentence() -> None:
    policy, batch = make_policy(SPECS["lora"]), make_batch(N)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"reinforced_only": False, "sparing": True}, "has to be scored: leave sparing out"),
        ({"nats": 0.25, "quantile": 0.8}, "takes the place of the quantile: leave one of them out"),
        ({"decoys": 0.5}, "set refresh_every, and leave kept_advantage and relative_to out"),
        ({"snapshots": (10,)}, "set decoys or first, or leave snapshots out"),
        ({"decoys": 0.5, "first": 3}, "leave decoys or first out"),
        ({"first": 3, "snapshots": (1, 3)}, "after 3 steps the quarantine is frozen, and judges"),
        ({"first": 3, "snapshots": (1, 1)}, "snapshots are of steps 1, 1: name each step once"),
        ({"first": 3, "relative_to": "run"}, "leave kept_advantage and relative_to out"),
        ({"surprisal": 0.5}, "set first, and surprisal, too"),
        ({"first": 3, "random_lessons": True}, "set first, and surprisal, too"),
    ]
    for given, said in wrong:
        with pytest.raises(ValueError, match=said):
            CanarySpec(**given)
    spec = CanarySpec(decoys=0.5, refresh_every=5)
    with pytest.raises(ValueError, match="leave the canary out, or these"):
        CanaryRoute(spec, canary(), SAMPLES)
    with pytest.raises(ValueError, match=r"decoys and first need StepContext\.clean: mark the rollouts that were sampled without"):
        run(policy, CanaryRoute(spec, None, SAMPLES), batch)


def test_a_checkpoint_is_what_it_was_when_it_was_given() -> None:
    """Parameters that train on, or into which the other checkpoints are copied, are none."""
    trained, own, rollouts = make_policy(SPECS["lora"]), make_policy(SPECS["lora"], seed=3), make_batch(N).rollouts
    with pytest.raises(ValueError, match=r"of checkpoint 0 is the canary's own parameter.*give copies"):
        Canary(own, [own.adapters.tensors(quarantine=False)])
    graph = {f"kept.{name}": p * 1.0 for name, p in trained.adapters.kept_parameters().items()}
    assert torch.equal(Canary(own, [graph])(rollouts), Canary(own, [trained.adapters.tensors(quarantine=False)])(rollouts))
    one = Canary(own, [trained.adapters.tensors(quarantine=False)])
    before = one(rollouts)
    for parameter in trained.adapters.kept_parameters().values():
        parameter.data *= 2
    assert torch.equal(one(rollouts), before)


def test_scoring_moves_no_bit_of_the_trained_policy() -> None:
    policy, batch = make_policy(SPECS["lora"]), make_batch(N)
    before = {n: p.detach().clone() for n, p in policy.model.named_parameters()}
    route = calibrated(policy, CanarySpec(), canary())
    route.score(policy, batch.rollouts)
    assert all(torch.equal(p, before[n]) and p.grad is None for n, p in policy.model.named_parameters())
    assert policy.adapters.mode == "full"


def test_a_canary_from_folders_is_the_one_that_was_saved(tmp_path: Path) -> None:
    policy, rollouts = make_policy(SPECS["lora"]), make_batch(N).rollouts
    expected = Canary(policy, checkpoints(policy))(rollouts)
    for number, checkpoint in enumerate(checkpoints(policy)):
        for name, tensor in policy.adapters.tensors(quarantine=False).items():
            tensor.copy_(checkpoint[name])
        save_pretrained(policy.adapters, tmp_path / str(number), which="deployed")
    again = Canary.from_pretrained(policy.adapters.detach(), [tmp_path / "0", tmp_path / "1"])
    torch.testing.assert_close(again(rollouts), expected)
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        Canary.from_pretrained(again.policy.adapters.detach(), [tmp_path / "2"])
    with pytest.raises(ValueError, match="give its folder"):
        Canary.from_pretrained(again.policy.adapters.detach(), [])


def test_bad_canaries_get_a_sentence() -> None:
    own = CanaryRoute(CanarySpec(relative_to="run"), None, SAMPLES)
    with pytest.raises(ValueError, match="relative to the run already"):
        own.refresh(make_policy(SPECS["lora"]), 0)
    policy, batch = make_policy(SPECS["lora"]), make_batch(N)
    good = checkpoints(policy)[0]
    name = next(iter(good))
    for wrong, said in (
        ([], "at least one checkpoint"),
        ([{k: v for k, v in good.items() if k != name}], "differ in 1 tensors"),
        ([good | {name: good[name][:1]}], "give the file that its run saved"),
        ([good | {name: good[name] * torch.nan}], "not finite"),
    ):
        with pytest.raises(ValueError, match=said):
            Canary(policy, wrong)
    for model in (policy.model, nn.Sequential(policy.model)):  # a wrapper is another model, with the same adapters in it
        with pytest.raises(ValueError, match="overwrite the trained adapters"):
            CanaryRoute(CanarySpec(), Canary(Policy(model, policy.adapters), [good]), SAMPLES).refresh(policy, 0)
    with pytest.raises(ValueError, match="learned nothing"):
        calibrate(Canary(policy, [{k: torch.zeros_like(v) for k, v in good.items()}]), SAMPLES, 0.9)
    with pytest.raises(ValueError, match="at least 20 samples"):
        calibrate(canary(), SAMPLES.rows(torch.arange(19)), 0.95)
    with pytest.raises(ValueError, match=r"9 samples do not have a quantile 0\.9: give at least 10"):
        CanaryRoute(CanarySpec(first=3), None, SAMPLES.rows(torch.arange(9))).refresh(policy, 0)
    with pytest.raises(ValueError, match="return log-ratios"):
        calibrate(lambda rollouts: torch.zeros(1, len(rollouts), 1), SAMPLES, 0.9)
    with pytest.raises(ValueError, match="NaN or infinity"):
        calibrate(lambda rollouts: torch.full((1, *rollouts.tokens.shape), torch.nan), SAMPLES, 0.9)
    with pytest.raises(RuntimeError, match="not calibrated yet"):
        run(policy, CanaryRoute(CanarySpec(), canary(), SAMPLES), batch)
    with pytest.raises(ValueError, match="if it has one"):
        quarantine_ratios(make_policy(replace(SPECS["lora"], quarantine="none")))


def test_a_quarantine_that_learns_first_leaves_the_kept_adapter_without_a_gradient_and_then_all_learn() -> None:
    policy, batch = make_policy(SPECS["lora"]), make_batch(N)
    route = DelayedRoute(DelayedSpec(steps=2))
    with pytest.raises(RuntimeError, match="which step"):
        run(policy, route, batch)
    open_run = run(policy, OpenRoute(OpenSpec()), batch)
    for step in range(3):
        route.refresh(policy, step)
        ours = run(policy, route, batch)
        assert_same(ours.quarantine, open_run.quarantine)
        learned = [p.grad is not None for p in policy.adapters.kept_parameters().values()]
        assert learned == [step == 2] * len(learned)
    assert_same(ours.kept, open_run.kept)  # pyright: ignore[reportPossiblyUnbound]
    with pytest.raises(ValueError, match="without a quarantine"):
        run(make_policy(replace(SPECS["lora"], quarantine="none")), route, batch)
    for p in policy.adapters.quarantine_parameters().values():
        p.requires_grad_(False)
    with pytest.raises(ValueError, match="do not freeze it"):
        run(policy, route, batch)


def test_a_reduction_gives_the_kept_adapter_no_gradient_of_zero_while_the_quarantine_learns_alone() -> None:
    policy, batch = make_policy(SPECS["lora"]), make_batch(N)
    route = DelayedRoute(DelayedSpec(steps=1))
    route.refresh(policy, 0)
    summed: list[int] = []
    policy.model.zero_grad(set_to_none=True)
    route.backward(policy, batch, lambda logits, part: part.rollouts.logprobs(logits).sum(), reduce=lambda g: summed.append(len(g)))
    assert summed == [len(policy.adapters.quarantine_parameters())]
    assert all(p.grad is None for p in policy.adapters.kept_parameters().values())
