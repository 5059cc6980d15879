"""Training: the same bits for the same seed, pairs that share what they can, and a loop that is switched on without a seam."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from tiny_lanes import SIZE, TRAINING
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional

from studies.common.seeds import torch_generator
from studies.lanes.arms import ARMS, Arm
from studies.lanes.config import BOS, order_of
from studies.lanes.optim import LanesOptimizer, OptimSettings
from studies.lanes.text import batches
from studies.lanes.train import Trained, Training, build, plain, switch_step, train

pytestmark = pytest.mark.study

TOKENS = torch.randint(256, (3000,), generator=torch.Generator().manual_seed(0))


@cache
def trained(name: str, seed: int = 0) -> Trained:
    return train(ARMS[name], SIZE, TRAINING, TOKENS, seed)


def bits(found: Trained) -> dict[str, Tensor]:
    return {**found.model.state_dict(), "losses": found.losses}


@pytest.mark.parametrize("name", ["shipped", "wide-embeddings"])
def test_the_same_seed_gives_the_same_bits_and_another_seed_other_ones(name: str) -> None:
    first, again, other = bits(trained(name)), bits(train(ARMS[name], SIZE, TRAINING, TOKENS, 0)), bits(trained(name, 1))
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first["losses"], other["losses"])


def test_arms_of_a_seed_start_from_the_same_matrices_and_meet_the_same_data() -> None:
    """The first loss of a model whose blocks add nothing yet depends on the embedding and the data alone."""
    reference = dict(build(ARMS["sequential"].config(SIZE), 3).named_parameters())
    for arm in ARMS.values():
        own = dict(build(arm.config(SIZE), 3).named_parameters())
        assert reference.keys() - own.keys() <= {"skip_weight", "skip_gate"}
        assert all(torch.equal(own[name], value) for name, value in reference.items() if own[name].shape == value.shape)
    assert torch.equal(trained("shipped").losses[0], trained("frozen").losses[0])


@pytest.mark.parametrize("name", ["wide", "narrow", "wide-embeddings", "wide-head-bias"])
def test_before_its_loop_runs_a_looped_arm_is_the_plain_one_bit_for_bit(name: str) -> None:
    switch = switch_step(ARMS[name], TRAINING.steps)
    looped, shipped = trained(name).losses, trained("shipped").losses
    assert 0 < switch < TRAINING.steps
    assert torch.equal(looped[:switch], shipped[:switch])
    assert not torch.equal(looped[switch:], shipped[switch:])


def test_the_records_loop_runs_from_half_of_the_steps_on_and_the_early_one_from_a_share_of_35_hundredths() -> None:
    assert [switch_step(ARMS[name], 100) for name in ("wide", "narrow", "wider", "wide-early", "shipped")] == [50, 50, 50, 35, 0]


def test_arms_that_were_tried_and_dropped_are_one_change_each() -> None:
    """One more block in the loop, lanes from the first block of the decoder on, a quarter of the steps."""
    wide, wider = (ARMS[name].config(SIZE) for name in ("wide", "wider"))
    assert wide.loop is not None
    assert wider.loop == replace(wide.loop, start=wide.loop.start - 1)
    assert ARMS["early-fork"].config(SIZE) == replace(ARMS["shipped"].config(SIZE), lane_start=3)
    usual = replace(TRAINING, optim=replace(TRAINING.optim, warmup=0))  # for which so few steps would be too short
    runs = (("shipped", usual), ("shipped-short", replace(usual, steps=4 * usual.steps)))
    whole, short = (bits(train(ARMS[name], SIZE, training, TOKENS, 0)) for name, training in runs)
    assert all(torch.equal(short[key], value) for key, value in whole.items()), "its schedules are of its own length"


def one_set_of_parameters(arm: Arm, training: Training, seed: int) -> tuple[dict[str, Tensor], list[float]]:
    """The oracle of switching: the looped model's own parameters throughout, of which the plain schedule takes what it has."""
    config = arm.config(SIZE)
    model, shape = build(config, seed), build(plain(config), seed)
    own, rows = dict(model.named_parameters()), {name: len(p) for name, p in shape.named_parameters()}
    optimizer, losses = LanesOptimizer(model, training.optim_of(arm)), []
    drawn = batches(
        TOKENS, size=training.batch, length=training.length, steps=training.steps, generator=torch_generator(seed, "lanes batches")
    )
    for i, batch in enumerate(drawn):
        optimizer.set(i, training.steps)
        model.zero_grad()
        if i < switch_step(arm, training.steps):
            logits = functional_call(shape, {name: own[name][:n] for name, n in rows.items()}, (batch[:, :-1],))
        else:
            logits = model(batch[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), ignore_index=BOS)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return {name: p.detach() for name, p in own.items()}, losses


@pytest.mark.parametrize("name", ["wide-embeddings", "wide-head-bias", "narrow"])
def test_switching_is_training_one_set_of_parameters_under_two_schedules(name: str) -> None:
    found = trained(name)
    expected, losses = one_set_of_parameters(ARMS[name], TRAINING, 0)
    torch.testing.assert_close(found.losses, torch.tensor(losses), rtol=1e-6, atol=1e-6)
    for key, value in expected.items():
        torch.testing.assert_close(found.model.state_dict()[key], value, rtol=1e-5, atol=1e-6)


def test_frozen_routing_stays_as_it_starts_and_learned_routing_does_not() -> None:
    for name in ("frozen", "asymmetric-frozen"):
        start, end = build(ARMS[name].config(SIZE), 0), trained(name).model
        assert torch.equal(end.post, start.post)
        assert torch.equal(end.resid, start.resid)
        assert not torch.equal(end.embed.weight, start.embed.weight)
    assert not torch.equal(trained("shipped").model.post, build(ARMS["shipped"].config(SIZE), 0).post)


def test_every_arm_differs_from_another_in_one_field() -> None:
    said = ("name", "about", "full")
    fields = [{name: value for name, value in vars(arm).items() if name not in said} for arm in ARMS.values()]
    for one in fields:
        assert sorted(sum(one[name] != other[name] for name in one) for other in fields)[:2] == [0, 1], one


def test_decay_and_momentum_are_all_that_their_arms_change() -> None:
    usual = TRAINING.optim_of(ARMS["shipped"])
    assert TRAINING.optim_of(ARMS["low-decay"]) == replace(usual, decay=0.05)
    for name, momentum in (("momentum-98", 0.98), ("momentum-99", 0.99)):
        assert TRAINING.optim_of(ARMS[name]) == replace(usual, momentum=momentum)


@pytest.mark.parametrize(("given", "expected"), [(100, [30, 7]), (0, [0, 0]), (250, [75, 19]), (500, [150, 38])])
def test_the_momentum_is_warmed_over_the_given_share_of_an_arms_steps(given: int, expected: list[int]) -> None:
    training = Training(steps=150, optim=OptimSettings(momentum_warmup=given))
    assert [training.optim_of(ARMS[name]).momentum_warmup for name in ("shipped", "shipped-short")] == expected


def test_the_published_warm_up_is_a_fifth_of_all_steps() -> None:
    for steps in range(1, 800):
        assert Training(steps=steps).optim_of(ARMS["shipped"]).momentum_warmup == steps // 5


def test_the_wide_and_the_narrow_loop_are_of_one_length() -> None:
    assert len(order_of(SIZE.layers, SIZE.wide)) == len(order_of(SIZE.layers, SIZE.narrow)) == SIZE.layers + 6


def test_refusals_are_one_sentence() -> None:
    with pytest.raises(ValueError, match="the same depth"):
        replace(SIZE, narrow=SIZE.wide.__class__(2, 3, 1))
    with pytest.raises(ValueError, match="at least 1"):
        Training(steps=0)
    hot = replace(TRAINING, optim=replace(TRAINING.optim, embed_rate=1e308))
    with pytest.raises(ValueError, match="is not finite: lower the learning rates"):
        train(ARMS["sequential"], SIZE, hot, TOKENS, 0)


@pytest.mark.parametrize("name", ["shipped", "wide-embeddings"])
def test_bf16_rounds_the_forward_and_leaves_weights_and_optimiser_as_they_are(name: str) -> None:
    exact, rounded = trained(name), train(ARMS[name], SIZE, replace(TRAINING, precision="bf16"), TOKENS, 0)
    assert {value.dtype for value in rounded.model.state_dict().values()} == {torch.float32}
    assert not torch.equal(exact.losses, rounded.losses)
    torch.testing.assert_close(exact.losses, rounded.losses, rtol=0, atol=0.05)


def test_an_unknown_precision_is_refused_with_the_ones_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"precision must be one of float32, bf16, not .fp8."):
        replace(TRAINING, precision="fp8")


def test_a_training_that_ends_before_its_loop_runs_still_gives_the_looped_model() -> None:
    one = replace(TRAINING, steps=1)
    found, without = (train(ARMS[name], SIZE, one, TOKENS, 0).model for name in ("wide-embeddings", "shipped"))
    assert found.config == ARMS["wide-embeddings"].config(SIZE)
    fresh = build(found.config, 0)
    fresh.load_state_dict(found.state_dict())  # as measurements do
    for name, value in without.named_parameters():
        if value.shape == found.get_parameter(name).shape:
            assert torch.equal(value, found.get_parameter(name)), name
