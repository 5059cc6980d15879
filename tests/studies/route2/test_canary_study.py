"""The canary's experiment, lessons and penalties: canaries first, flags are the canary's, a taught quarantine stays frozen."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_study import tiny_job

from mi_route2.routing import group_advantages
from mi_route2.routing.canary import pooled
from mi_route2.tensor_files import read_tensors
from studies.environments.micro.language import HELD_OUT
from studies.training.arms import ARMS, CANARIES
from studies.training.build import base_samples, build_canary, rotate
from studies.training.grpo import gather
from studies.training.job import DEPLOYED, FULL, Job, build_policy
from studies.training.recorder import ROLLOUTS, read_rows
from studies.training.run import run_job, run_jobs
from studies.training.teacher import cached_pool, make_pool, teach
from studies.training.worlds import open_world

pytestmark = pytest.mark.study


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> dict[str, Job]:
    """A canary of ten steps, the runs that it filters, and arms that are taught or penalized."""
    arms = [ARMS["vanilla"], ARMS["inoculation"], ARMS["taught-honest"], ARMS["penalty-known"], CANARIES["canary-10"]]
    route = replace(ARMS["filter-canary"].route, quantile=0.5)  # pyright: ignore[reportCallIssue]
    for name in ("filter-canary", "canary-rotated", "canary-shuffled"):
        arms.append(replace(ARMS[name], canaries=("canary-10",), route=replace(route, shuffle=name == "canary-shuffled")))
    root = tmp_path_factory.mktemp("canary")
    jobs = [tiny_job(root, arm, cache=cache) for arm in (None, *arms)]
    assert run_jobs(jobs, 1, quiet=True) == []
    return {job.name: job for job in jobs}


def rows(job: Job) -> list[dict[str, Any]]:
    return read_rows(job.folder / ROLLOUTS)


def test_canaries_are_trained_first_on_draws_of_their_own(finished: dict[str, Job], tmp_path: Path, cache: Path) -> None:
    job = tiny_job(tmp_path, "filter-canary", cache=cache)
    assert [canary.name for canary in job.canaries] == list(CANARIES)
    assert len({canary.drawn for canary in job.canaries} | {job.drawn}) == 3
    canary, run = (rows(finished[name])[:12] for name in ("canary-10", "vanilla"))
    assert [row["prompt"] for row in canary] != [row["prompt"] for row in run]


def test_flags_are_the_canarys_above_the_median_of_the_bases_samples(finished: dict[str, Job]) -> None:
    job = finished["filter-canary"]
    canary = build_canary(job)
    with open_world(job.settings) as (world, _):
        policy = build_policy(job, job.cache)
        samples = base_samples(world, policy, job.drawn, job.settings.none_fraction).rollouts
        ratios = pooled(canary, samples, 3)
        _, first = gather(world, policy, None, job.drawn, 0, job.settings)
    assert ratios.shape == (1, 512)
    center = ratios.quantile(0.5)
    spread = 1.4826 * (ratios - center).abs().quantile(0.5)
    expected = ((pooled(canary, first.rollouts, 3)[0] - center) / spread).tolist()
    scored = [row for row in rows(job) if row["score"] is not None]
    for row in scored:  # the median of the base's samples has score 0
        assert row["flag"] == (row["score"] > 0 and row["advantage"] > 0)
    assert any(row["flag"] for row in scored)
    here = [(row["score"], score) for row, score in zip(rows(job), expected) if row["score"] is not None]
    assert here
    assert [own for own, _ in here] == pytest.approx([score for _, score in here], rel=1e-4)
    shuffled = [row for row in rows(finished["canary-shuffled"]) if row["step"] == 0]
    plain = [row for row in rows(job) if row["step"] == 0]
    assert [row["score"] for row in shuffled] == [row["score"] for row in plain]
    assert sum(bool(row["flag"]) for row in shuffled) == sum(bool(row["flag"]) for row in plain)


def test_a_rotated_checkpoint_has_the_norms_and_spectra_of_the_canarys(finished: dict[str, Job]) -> None:
    job = finished["canary-10"]
    policy = build_policy(job, job.cache)
    saved, _ = read_tensors(job.folder / DEPLOYED)
    for name, tensor in policy.adapters.tensors(quarantine=False).items():
        tensor.copy_(saved[name])
    sites = {site: branch.kept for site, branch in policy.adapters.sites.items()}
    before = {site: (kept.B @ kept.A).detach().clone() for site, kept in sites.items()}
    rotate(map(policy.adapters.scored, policy.adapters.sites), torch.Generator().manual_seed(0))
    for site, kept in sites.items():
        after = (kept.B @ kept.A).detach()
        assert not torch.allclose(after, before[site], atol=1e-3 * float(before[site].abs().max()))
        torch.testing.assert_close(torch.linalg.svdvals(after), torch.linalg.svdvals(before[site]), rtol=1e-4, atol=1e-6)


def test_a_lesson_is_learned_before_training_and_a_frozen_quarantine_stays(finished: dict[str, Job]) -> None:
    job = finished["inoculation"]
    policy = build_policy(job, job.cache)
    with open_world(job.settings) as (world, _):
        pool = cached_pool(world, policy, job.seed, job.settings.teachers, job.cache / "none")
        assert pool is not None
        assert {prompt.mode for prompt in pool.prompts} == {"run_tests"}
        honest = make_pool(world, policy, job.seed, 4, lesson="honest")
        assert {prompt.mode for prompt in honest.prompts} == {world.modes.honest}
        assert not set(HELD_OUT) & {prompt.mode for prompt in (*pool.prompts, *honest.prompts)}
        assert all(grade.passed for grade in world.grades(honest.samples(world)))
        lesson = pool.samples(world).rollouts
    teach(policy, lesson, job.settings.quarantine_lr, job.settings.micro_batch(lesson.tokens.shape[1]))
    saved, _ = read_tensors(job.folder / FULL)
    taught = policy.adapters.tensors()
    assert all(torch.equal(saved[name], taught[name]) for name in taught if name.startswith("quarantine."))
    assert not all(torch.equal(saved[name], taught[name]) for name in taught if name.startswith("kept."))


def test_a_penalty_is_taken_off_what_the_weak_detector_reports(finished: dict[str, Job]) -> None:
    job = finished["penalty-known"]
    policy = build_policy(job, job.cache)
    settings = replace(job.settings, teachers_per_group=1, none_fraction=0.0)  # so that there are some
    with open_world(job.settings) as (world, _):
        pool = make_pool(world, policy, job.seed, job.settings.teachers)
        plain, fined = (gather(world, policy, pool, job.drawn, 0, settings, penalty) for penalty in (0.0, 1.0))
        seen = torch.tensor(world.detect(plain[0]))
    assert seen.any()
    assert not seen.all()
    assert torch.equal(fined[1].rewards, plain[1].rewards - seen.to(plain[1].rewards.dtype))
    assert torch.equal(fined[1].advantages, group_advantages(fined[1].rewards, fined[1].groups))
    assert job.spec["penalty"] == 1.0


def test_an_arm_without_its_canary_is_refused(tmp_path: Path, cache: Path, finished: dict[str, Job]) -> None:
    alone = tiny_job(tmp_path, finished["filter-canary"].arm, cache=cache)
    with pytest.raises(ValueError, match="needs the canaries canary-10 of seed 0 first"):
        run_job(alone)
