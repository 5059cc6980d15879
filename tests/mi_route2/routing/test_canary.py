"""Canary routes: scores against a plain loop, flags as a mask route's, calibration, and a quarantine that learns first."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mask_oracle import assert_same_gradients, run
from tiny_policy import SPECS, make_batch, make_policy
from torch import Tensor, nn

from mi_route2.adapters import save_pretrained
from mi_route2.rollouts import Policy, Rollouts
from mi_route2.routing import CanarySpec, MaskRoute
from mi_route2.routing.canary import Canary, CanaryRoute, calibrate

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


def dropping(policy: Policy) -> Policy:
    policy.model.ln_f = nn.Sequential(policy.model.ln_f, nn.Dropout(0.5))  # pyright: ignore
    return policy


def test_dropout_in_training_tells_no_two_passes_apart() -> None:
    one, found = Canary(dropping(make_policy(SPECS["lora"])), CHECKPOINTS), []
    for training in (False, True):
        one.policy.model.train(training)
        found.append(calibrated(make_policy(SPECS["lora"]), CanarySpec(), one).score(make_policy(SPECS["lora"]), SAMPLES))
        assert {m.training for m in one.policy.model.ln_f.modules()} == {training}  # pyright: ignore
    assert torch.equal(*found)


def test_a_threshold_in_nats_is_one_of_the_largest_mean_log_ratio_itself() -> None:
    policy, batch = make_policy(SPECS["lora"]), make_batch(N)
    means = by_hand(canary(), batch.rollouts, 3).max(0)
    nats = float(np.median(means[(batch.advantages > 0).numpy()]))
    own = run(policy, calibrated(policy, CanarySpec(nats=nats), canary()), batch)
    np.testing.assert_allclose(own.decision.scores, means, rtol=1e-8, atol=1e-12)  # pyright: ignore
    assert own.decision.flags.tolist() == ((means > nats) & (batch.advantages > 0).numpy()).tolist()  # pyright: ignore
    assert 0 < int(own.decision.flags.sum()) < int((batch.advantages > 0).sum())  # pyright: ignore
    with pytest.raises(ValueError, match="it has learned nothing"):
        calibrate(lambda rollouts: torch.zeros(1, *rollouts.tokens.shape), SAMPLES, 0.9, nats=0.1)


def test_shuffled_flags_are_as_many() -> None:
    policy, batch = make_policy(SPECS["lora"]), make_batch(N)
    specs = [CanarySpec(quantile=0.5, shuffle=shuffle) for shuffle in (False, True)]
    flags = [run(policy, calibrated(policy, spec, canary()), batch).decision.flags for spec in specs]
    assert int(flags[0].sum()) == int(flags[1].sum()) > 0  # pyright: ignore
    assert not torch.equal(*flags)  # pyright: ignore


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
    with pytest.raises(FileNotFoundError, match="so save_pretrained did not write it"):
        Canary.from_pretrained(again.policy.adapters.detach(), [tmp_path / "2"])
    with pytest.raises(ValueError, match="give its folder"):
        Canary.from_pretrained(again.policy.adapters.detach(), [])


def test_bad_canaries_get_a_sentence() -> None:
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
    with pytest.raises(ValueError, match="return log-ratios"):
        calibrate(lambda rollouts: torch.zeros(1, len(rollouts), 1), SAMPLES, 0.9)
    with pytest.raises(ValueError, match="NaN or infinity"):
        calibrate(lambda rollouts: torch.full((1, *rollouts.tokens.shape), torch.nan), SAMPLES, 0.9)
    with pytest.raises(RuntimeError, match="not calibrated yet"):
        run(policy, CanaryRoute(CanarySpec(), canary(), SAMPLES), batch)
