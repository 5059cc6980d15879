"""Uses of ten pairs besides flags: initial adapters, and a push during training; and three bands of rollouts."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_study import tiny_job, tiny_settings
from torch import Tensor

from mi_route2.rollouts import Policy, Rollouts
from mi_route2.routing import MaskRoute
from mi_route2.sites import Site
from studies.common.seeds import numpy_generator, torch_generator
from studies.training.arms import ARMS
from studies.training.build import build_optimizer, build_route, clean_rollouts, learn_lessons, steered
from studies.training.grpo import train
from studies.training.job import EVAL, Job, build_hosted, build_pairs, build_policy, finished_policy
from studies.training.recorder import ROLLOUTS, read_rows
from studies.training.run import evaluate, run_job
from studies.training.settings import ChatModel
from studies.training.worlds import open_world

pytestmark = pytest.mark.study


def started(tmp_path: Path, name: str, cache: Path) -> Job:
    job = tiny_job(tmp_path, name, cache=cache)
    job.folder.mkdir(parents=True)
    return job


def written_out(policy: Policy, learning: Iterable[Tensor], rollouts: Rollouts, rate: float, steps: int) -> None:
    """Adam on these parameters and ordinary autograd; the others stay."""
    optimizer = torch.optim.Adam(learning, rate)
    for _ in range(steps):
        policy.model.zero_grad(set_to_none=True)
        with policy.adapters.unrouted():
            (-policy.logprobs(rollouts).sum() / rollouts.predictors.sum()).backward()
        optimizer.step()
    policy.model.zero_grad(set_to_none=True)


def test_the_adapters_start_from_the_two_sides_of_the_pairs(tmp_path: Path, cache: Path) -> None:
    """Oracle: first the kept adapter alone on the clean sides, then the quarantine alone on the hacks, by plain torch."""
    arm = replace(ARMS["contrast"], lesson_steps=3)
    job = tiny_job(tmp_path, arm, cache=cache, precision="float64")  # Adam makes much of float32's rounding
    job.folder.mkdir(parents=True)
    own, oracle = (build_policy(job, job.cache) for _ in range(2))
    with open_world(job.settings) as (world, _):
        learn_lessons(job, world, own, None)
        pairs = build_pairs(job, world, "hack")
    kept, quarantine = oracle.adapters.kept_parameters().values(), oracle.adapters.quarantine_parameters().values()
    written_out(oracle, kept, pairs.clean, job.settings.quarantine_lr, 3)
    written_out(oracle, quarantine, pairs.hack, job.settings.quarantine_lr, 3)
    fresh = build_policy(job, job.cache).adapters.tensors()
    for name, tensor in own.adapters.tensors().items():
        torch.testing.assert_close(tensor, oracle.adapters.tensors()[name], rtol=0, atol=1e-6)
    assert all(p.grad is None for p in own.model.parameters())
    moved = {name.split(".")[0] for name, tensor in own.adapters.tensors().items() if not torch.equal(tensor, fresh[name])}
    assert moved == {"kept", "quarantine"}


def test_the_push_is_in_samples_and_losses_and_not_in_the_deployed_model(tmp_path: Path, cache: Path) -> None:
    """Oracle: a plain torch hook behind the middle block, with the pairs' mean difference by hand."""
    job = started(tmp_path, "preventative-2", cache)
    run_job(job)
    with open_world(job.settings) as (world, witness):
        policy, pairs = build_policy(job, job.cache), build_pairs(job, world, "hack")
        block, means = policy.model.blocks[1], {}  # of two, the one behind which half of the blocks lie  # pyright: ignore
        for side in ("hack", "clean"):
            rollouts, kept = getattr(pairs, side), []
            handle = block.register_forward_hook(lambda module, args, out, kept=kept: kept.append(out.detach()))
            with torch.no_grad(), policy.adapters.reference():
                policy.logits(rollouts)
            handle.remove()
            means[side] = torch.stack([h[m].mean(0) for h, m in zip(kept[0], rollouts.predictors, strict=True)])
        push = 2 * (means["hack"] - means["clean"]).mean(0)
        prompts = world.prompts(job.settings.prompts, numpy_generator(job.drawn, "prompts", 0), job.settings.none_fraction)
        asked = [prompt for prompt in prompts for _ in range(job.settings.group)]
        handle = block.register_forward_hook(lambda module, args, out: out + push)
        with policy.adapters.full():
            samples = world.sample(policy, asked, torch_generator(job.drawn, "sample", 0), job.settings.temperature)
        handle.remove()
        host, fresh = build_hosted(job, job.cache)
        with steered(job, world, host, fresh), torch.no_grad():
            inside = fresh.logits(samples.rollouts)
        handle = block.register_forward_hook(lambda module, args, out: out + push)
        with torch.no_grad():
            expected = policy.logits(samples.rollouts)
        handle.remove()
        torch.testing.assert_close(inside, expected, rtol=0, atol=1e-4)
        with torch.no_grad():
            assert not torch.allclose(policy.logits(samples.rollouts), expected, atol=1e-2)
        again = evaluate(world, witness, finished_policy(job)[1], job.settings, job.seed)
    assert [row["completion"] for row in read_rows(job.folder / ROLLOUTS)[: len(asked)]] == samples.completions
    assert json.loads((job.folder / EVAL).read_text())["modes"] == again


def test_a_random_push_has_the_same_norm_and_another_direction(tmp_path: Path, cache: Path) -> None:
    pushes: list[Tensor] = []
    for name in ("preventative-4", "preventative-4-random"):
        job = started(tmp_path / name, name, cache)
        host, policy = build_hosted(job, job.cache)
        site, zeros = Site(1, "resid_post"), torch.zeros(1, 3, dtype=torch.long)
        with open_world(job.settings) as (world, _), torch.no_grad():
            before = host.capture([site], zeros)[site]
            with steered(job, world, host, policy):
                pushes.append((host.capture([site], zeros)[site] - before)[0, 0])
    persona, random = pushes
    torch.testing.assert_close(persona.norm(), random.norm(), rtol=1e-4, atol=0)
    assert persona.norm() > 0.1
    assert abs(float(torch.cosine_similarity(persona, random, dim=0))) < 0.7


@pytest.mark.parametrize("arm", ["sees-known-bands-fast", "bands-full"])
def test_clean_rollouts_are_those_of_the_honest_mode_or_of_low_scores(tmp_path: Path, cache: Path, arm: str) -> None:
    low = replace(ARMS[arm], route=replace(ARMS[arm].route, tau=0.001))  # pyright: ignore[reportCallIssue] # few rollouts, all close to 0
    job = tiny_job(tmp_path, low if arm == "bands-full" else ARMS[arm], cache=cache)
    job.folder.mkdir(parents=True)
    policy = build_policy(job, job.cache)
    settings, seen = replace(job.settings, steps=1, prompts=8, none_fraction=0.5), []
    with open_world(job.settings) as (world, witness):
        route = build_route(job, world, policy)
        given = clean_rollouts(job, world, route)
        assert given is not None

        def noted(policy: Policy, samples):
            seen.append((given(policy, samples), samples, route.score(policy, samples.rollouts)))
            return seen[-1][0]

        train_ = train(world, witness, policy, route, build_optimizer(job, policy), settings, seed=4, clean=noted)
        (record,) = list(train_)
        # Updates that change nothing have the loss of one: what is learned without the quarantine is compared with itself.
        losses, still = [], build_optimizer(job, policy)
        for group in still.param_groups:
            group["lr"] = 0.0
        for p in policy.adapters.quarantine_parameters().values():
            p.data.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
        for updates in (1, 2):
            again = replace(settings, updates_per_batch=updates)
            losses += [each.loss for each in train(world, witness, policy, route, still, again, seed=4, clean=given)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-5, abs=1e-7)
    ((clean, samples, scores),) = seen
    if arm == "bands-full":
        assert isinstance(route, MaskRoute)
        assert torch.equal(clean, scores < -0.001)
        assert record.decision.scores is not None  # in the batch's order
        torch.testing.assert_close(record.decision.scores.float(), scores[record.trained], rtol=1e-4, atol=1e-5)
    else:
        assert clean.tolist() == [prompt.mode == "none" for prompt in samples.prompts]
    assert clean.any()
    assert not clean.all()


def test_a_sampler_that_knows_no_steering_is_refused(tmp_path: Path) -> None:
    settings = tiny_settings(world="leetcode", chat=ChatModel("nowhere", "0"))
    with pytest.raises(ValueError, match=r"without the steering of 'preventative-1': leave out this arm or --sampler"):
        Job(tmp_path, tmp_path, settings, 0, ARMS["preventative-1"], sampler="vllm")


def test_no_push_is_in_the_pool_that_all_arms_of_a_seed_read(tmp_path: Path, cache: Path) -> None:
    """Whichever arm comes first makes the file."""
    first, second = (tiny_job(tmp_path / name, name, cache=cache) for name in ("vanilla", "preventative-4"))
    first.pool.unlink(missing_ok=True)
    run_job(first)
    usual = first.pool.read_bytes()
    first.pool.unlink()
    run_job(second)
    assert second.pool.read_bytes() == usual
