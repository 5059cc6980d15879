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
from studies.lanes.arms import ARMS, LanesArm
from studies.lanes.config import BOS
from studies.lanes.optim import LanesOptimizer
from studies.lanes.text import batches
from studies.lanes.train import LanesTraining, Trained, build, plain, switch_step, train

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
    reference = dict(build(ARMS["gptj"].config(SIZE), 3).named_parameters())
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


def one_set_of_parameters(arm: LanesArm, training: LanesTraining, seed: int) -> tuple[dict[str, Tensor], list[float]]:
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
    for name in ("frozen",):
        start, end = build(ARMS[name].config(SIZE), 0), trained(name).model
        assert torch.equal(end.post, start.post)
        assert torch.equal(end.resid, start.resid)
        assert not torch.equal(end.embed.weight, start.embed.weight)
    assert not torch.equal(trained("shipped").model.post, build(ARMS["shipped"].config(SIZE), 0).post)


def test_refusals_are_one_sentence() -> None:
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        LanesTraining(steps=0)
    hot = replace(TRAINING, optim=replace(TRAINING.optim, embed_rate=1e308))
    with pytest.raises(ValueError, match="is not finite: lower the learning rates"):
        train(ARMS["gptj"], SIZE, hot, TOKENS, 0)
