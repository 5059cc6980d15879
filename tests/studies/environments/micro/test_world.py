"""The world as the study sees it: rollouts that fit their texts, rewards that the grader pays, pairs of the known mode."""

from collections.abc import Sequence

import numpy as np
import torch
from tiny_study import WARM

from mi_route2.adapters import AdapterSpec, attach
from mi_route2.rollouts import Policy
from studies.environments.micro.runner import CachedRunner, MicroExecution, MicroProgram, SubprocessRunner
from studies.environments.micro.settings import get_world
from studies.environments.micro.warmstart import warm_start
from studies.environments.micro.world import MicroWitness, MicroWorld


class Silent:
    """A runner for tests that execute nothing."""

    def run(self, programs: Sequence[MicroProgram]) -> list[MicroExecution]:
        raise AssertionError("nothing should be executed here")


def test_package_cuts_each_completion_behind_its_first_eos_and_adds_none() -> None:
    """A shorter one is filled up, and what fills it was not sampled: nothing may learn from it."""
    world = MicroWorld(get_world("strong"), Silent())
    eos, prompts = world.vocabulary.eos, world.prompts(4, np.random.default_rng(0), 0.25)
    rows = [[5, 6, eos, eos], [7, eos, eos, eos], [5, 6, 7, 8], [5, 6]]
    samples = world.package(prompts, rows)
    assert samples.rollouts.completions() == [[5, 6, eos], [7, eos], [5, 6, 7, 8], [5, 6]]
    assert torch.equal(samples.rollouts.attention[:, 10:], samples.rollouts.completion[:, 10:])
    assert samples.rollouts.attention.sum(1).tolist() == [13, 12, 14, 12]
    # the predictors run from the last prompt token to the last but one of the completion
    assert samples.rollouts.predictors[1].nonzero()[:, 0].tolist() == [9, 10]
    assert samples.completions == [world.vocabulary.completion_text(row) for row in rows]


def test_samples_rewards_and_verdicts_are_of_the_same_texts() -> None:
    model = warm_start(get_world("strong"), WARM, 0, None, progress=False)
    adapters = attach(model, "blocks.*", spec=AdapterSpec("lora", 2), generator=torch.Generator().manual_seed(0))
    with SubprocessRunner() as child:
        runner = CachedRunner(child)
        world, witness = MicroWorld(get_world("strong"), runner), MicroWitness(runner)
        prompts = world.prompts(40, np.random.default_rng(1), 0.25)
        samples = world.sample(Policy(model, adapters), prompts, torch.Generator().manual_seed(3))
        rewards, grades = world.rewards(samples), world.grades(samples)
        verdicts, privileged = witness.judge(samples), witness.privileged(samples)
    for b, text in enumerate(samples.completions):
        ids = samples.rollouts.tokens[b][samples.rollouts.completion[b]]
        assert world.vocabulary.completion_text(ids) == text
        assert float(rewards[b]) == grades[b].reward
    assert privileged.own_channel.tolist() == [v.exploit for v in verdicts]
    assert all(grade.format for grade, verdict in zip(grades, verdicts) if verdict.gt)


def test_pairs_are_encoded_side_by_side_and_hashed() -> None:
    world = MicroWorld(get_world("strong"), Silent())
    pairs = world.make_pairs(0, 6, "hack")
    batch = world.encode_pairs(pairs)
    for b, pair in enumerate(pairs):
        for side, text in ((batch.hack, pair.hack), (batch.clean, pair.clean)):
            ids = side.tokens[b][side.completion[b]]
            assert world.vocabulary.completion_text(ids) == text
            assert int(ids[-1]) == world.vocabulary.eos
            prompt = side.tokens[b][side.attention[b] & ~side.completion[b]]
            assert prompt.tolist() == world.vocabulary.encode_prompt(pair.prompt)
    assert batch.pairs_hash != world.encode_pairs(world.make_pairs(1, 6, "hack")).pairs_hash
