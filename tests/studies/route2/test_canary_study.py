"""The canary's experiment: canaries first, stopped runs are the beginnings of whole ones, flags are the canary's."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_study import WARM, tiny_job

from mi_route2.routing import StepContext, group_advantages
from mi_route2.routing.canary import pooled
from mi_route2.tensor_files import read_tensors
from studies.common.seeds import torch_generator
from studies.environments.micro.settings import MicroConfig, WarmStartConfig
from studies.environments.protocol import TeacherPool
from studies.route2.cli import main
from studies.training.arms import ARMS, Arm, Lesson
from studies.training.build import MonitoredRoute, base_samples, build_canary, build_optimizer, build_route, rotate
from studies.training.grpo import gather, train
from studies.training.job import DEPLOYED, EVAL, FULL, Job, build_policy, finished_policy
from studies.training.recorder import METRICS, ROLLOUTS, read_rows
from studies.training.run import run_job, run_jobs
from studies.training.settings import CHAT, get_settings, under
from studies.training.teacher import cached_pool, make_pool, teach
from studies.training.worlds import open_world

pytestmark = pytest.mark.study

FORMER = WarmStartConfig(steps=120, batch=64)
"""The warm start of the runs whose identities are written down here."""


def test_arms_follow_their_canaries_and_no_old_arm_has_another_identity(tmp_path: Path) -> None:
    first, second = ([f"canary-{n}{mark}" for n in (10, 20, 40)] for mark in ("", "-b"))
    for arm, canaries in (("canary-one", first), ("filter-canary", [*first, *second]), ("canary-run-110k", [*first, *second])):
        assert [job.name for job in tiny_job(tmp_path, arm).before] == ["base", *canaries]
    assert tiny_job(tmp_path, "vanilla").before == tiny_job(tmp_path, "base").before == []
    assert tiny_job(tmp_path, "vanilla").spec.keys() == tiny_job(tmp_path, "route2-full").spec.keys()
    assert "steps" not in tiny_job(tmp_path, "vanilla").spec
    assert "relative_to" not in tiny_job(tmp_path, "filter-canary").spec["route"]
    later = {"decoys", "snapshots", "first", "sparing"}
    assert not later & tiny_job(tmp_path, "filter-canary").spec["route"].keys()
    assert later & tiny_job(tmp_path, "canary-own").spec["route"].keys() == {"decoys", "snapshots"}
    assert later & tiny_job(tmp_path, "canary-first", steps=21).spec["route"].keys() == {"decoys", "snapshots", "first", "sparing"}
    assert tiny_job(tmp_path, "filter-canary-run").spec["route"]["relative_to"] == "run"
    assert tiny_job(tmp_path, "vanilla-5").spec["steps"] == 5
    assert tiny_job(tmp_path, "sees-50").spec["recall"] == 0.5
    assert "recall" not in tiny_job(tmp_path, "sees-100").spec
    assert tiny_job(tmp_path, "canary-10").drawn != tiny_job(tmp_path, "vanilla").drawn == 0
    before = "5daa3cb0a0f21b760b499ab544ade54f70a5abfd9001b5ac8a76bbb09fb6d291"  # when arms had no canaries
    assert tiny_job(tmp_path, "vanilla", warm=FORMER).identity == before
    other = replace(ARMS["filter-canary"], canaries=("canary-2",))
    assert tiny_job(tmp_path, other).identity != tiny_job(tmp_path, replace(other, canaries=("canary-10",))).identity


def test_a_control_names_the_arm_that_it_is_compared_with_and_other_words_change_no_identity(tmp_path: Path) -> None:
    for arm in ARMS.values():
        named = arm.about.replace(",", "").replace(";", "").split()[0]
        if arm.role == "control" and named in ARMS:
            assert arm.baseline == named or arm.about.endswith(f"; compared with {arm.baseline}"), arm.name
    tau = ARMS["bands-full"].route.tau, ARMS["filter-full"].route.tau  # pyright: ignore[reportAttributeAccessIssue]
    assert tau == (0.05, 0.0)
    assert "above .05 (the filter: 0) to a fast quarantine, below -.05" in ARMS["bands-full"].about
    before = {  # under which runs were made and published
        "penalty-haar": "329f9f2abfced4f0fc8cf90b76202550dc7d71779801e56f3fa4f06873c99a0b",
        "bands-full": "886236c42bb2028b3018a93359e166f7c8ae7dd882ebff84b1de287dedce94c5",
    }
    assert {arm: tiny_job(tmp_path, arm, warm=FORMER).identity for arm in before} == before
    assert {name for name, arm in ARMS.items() if tiny_job(tmp_path, arm, steps=40).spec["about"] != arm.about} == set(before)


def test_canaries_of_another_preset_are_its_own_runs_beside_these(tmp_path: Path) -> None:
    for arm, preset in (("canary-run-30k", "strong-30k"), ("canary-run-110k", "strong"), ("canary-run-weak", "weak")):
        for own in ("strong", "strong-400k", "sparse"):
            settings = get_settings(own)
            job = Job(tmp_path / settings.folder, tmp_path / "cache", settings, 3, ARMS[arm])
            (there,) = {canary.settings for canary in job.canaries}
            assert there == get_settings(preset)
            names = ["base", *(ARMS["filter-canary-run"].canaries or ())]
            assert [one.folder for one in job.before] == [tmp_path / there.folder / "seed-3" / name for name in names]
    tiny = tiny_job(tmp_path, "canary-run-30k", host="nnsight")
    (there,) = {canary.settings for canary in tiny.canaries}
    assert there == replace(tiny.settings, preset="strong-30k", warm=replace(WARM, lr=6e-3, model=MicroConfig(d=32, mlp=128)))
    assert {canary.root for canary in tiny.canaries} == {tmp_path / f"{there.folder}-nnsight"}
    alike = replace(ARMS["canary-run-30k"], canaries_of=None)
    assert tiny_job(tmp_path, alike).identity != tiny_job(tmp_path, replace(alike, canaries_of="strong-30k")).identity
    with pytest.raises(ValueError, match="canaries of the preset 'weak' judge runs of presets, and this is 'chat'"):
        under(CHAT, "weak")


def test_a_smaller_canary_judges_a_run_as_its_own_ratios_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the command line: its base model and checkpoints are made first, by the same two workers, and made once."""
    few = ("warm.steps=80", "warm.batch=32", "steps=1", "prompts=4", "group=6", "evaluation_prompts=2", "pairs=4", "teachers=0")
    arms, out = ("canary-run-30k", "vanilla"), ("--seeds", "1", "--out", str(tmp_path), "--no-report")
    monkeypatch.setattr(sys, "argv", ["route2", "run", "--arms", *arms, *out, "--override", *few])
    assert main() == 0
    own, there = sorted(tmp_path.glob("strong-*"), key=lambda folder: folder.name.startswith("strong-30k"))
    assert {path.name for path in (own / "seed-0").glob("[!.]*")} == {"base", "vanilla", "canary-run-30k"}
    assert {path.name for path in (there / "seed-0").glob("[!.]*")} == {"base", *(ARMS["canary-run-30k"].canaries or ())}
    before = {path: path.stat().st_mtime_ns for path in there.rglob("seed-0/*/*.json")}
    assert main() == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before
    job = Job.of(own, 0, ARMS["canary-run-30k"])
    canary = build_canary(job)
    assert canary is not None
    assert next(canary.policy.model.parameters()).shape != next(build_policy(job, job.cache).model.parameters()).shape
    with open_world(job.settings) as (world, _):
        rollouts = base_samples(world, build_policy(job, job.cache), 0, 0.25).rollouts.rows(torch.arange(8))
    expected = []
    for checkpoint in job.canaries:
        _, policy = finished_policy(checkpoint)
        with torch.no_grad(), policy.adapters.deployed():
            tuned = policy.logprobs(rollouts)
        with torch.no_grad(), policy.adapters.reference():
            expected.append(tuned - policy.logprobs(rollouts))
    assert torch.equal(canary(rollouts), torch.stack(expected))


TAUGHT = ("inoculation", "inoculation-trainable", "inoculation-random", "inoculation-honest")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> dict[str, Job]:
    """A canary of two steps, the runs that it filters, and ordinary training stopped on the way, by two workers."""
    arms = [ARMS["canary-2"], replace(ARMS["vanilla-5"], steps=2), ARMS["vanilla"], ARMS["quarantine-first"]]
    route = replace(ARMS["filter-canary"].route, quantile=0.5)  # pyright: ignore[reportCallIssue]
    for name in ("filter-canary", "route2-canary", "canary-rotated", "canary-shuffled"):
        arms.append(replace(ARMS[name], canaries=("canary-2",), route=replace(route, shuffle=name == "canary-shuffled")))
    root = tmp_path_factory.mktemp("canary")
    jobs = [tiny_job(root, arm, cache=cache) for arm in (None, *reversed(arms))]
    jobs += [tiny_job(root, name, cache=cache) for name in (*TAUGHT, "taught-honest", "penalty-known", "penalty-full")]
    assert run_jobs(jobs, 2, quiet=True) == []
    return {job.name: job for job in jobs}


def rows(job: Job) -> list[dict[str, Any]]:
    return read_rows(job.folder / ROLLOUTS)


def test_a_stopped_run_is_the_beginning_of_the_whole_one(finished: dict[str, Job]) -> None:
    stopped, whole = finished["vanilla-5"], finished["vanilla"]
    short, long = ((job.folder / METRICS).read_text().splitlines() for job in (stopped, whole))
    assert (len(short), len(long)) == (2, 4)
    assert long[:2] == short
    assert rows(whole)[: len(rows(stopped))] == rows(stopped)


def test_a_canary_has_prompts_and_samples_of_its_own(finished: dict[str, Job]) -> None:
    canary, run = (rows(finished[name])[:12] for name in ("canary-2", "vanilla"))
    assert [row["prompt"] for row in canary] != [row["prompt"] for row in run]


def test_weights_of_another_run_are_not_taken_for_a_runs_own(finished: dict[str, Job], tmp_path: Path) -> None:
    root = shutil.copytree(finished["vanilla"].root, tmp_path / "copied")
    plain, canary, filtered = (replace(finished[name], root=root) for name in ("vanilla", "canary-2", "filter-canary"))
    shutil.copyfile(finished["vanilla-5"].folder / FULL, plain.folder / FULL)
    with pytest.raises(ValueError, match=r"vanilla/adapters.safetensors does not match its checksum in manifest.json"):
        finished_policy(plain)
    (plain.folder / FULL).unlink()
    with pytest.raises(ValueError, match=r"adapters.safetensors is missing from a finished run: delete .*vanilla and run this arm"):
        finished_policy(plain)
    shutil.copyfile(finished["vanilla"].folder / DEPLOYED, canary.folder / DEPLOYED)
    with pytest.raises(ValueError, match=r"canary-2/deployed.safetensors does not match its checksum in manifest.json"):
        build_canary(filtered)


def test_flags_are_the_canarys_above_the_median_of_the_bases_samples(finished: dict[str, Job]) -> None:
    job = finished["filter-canary"]
    canary = build_canary(job)
    assert canary is not None
    with open_world(job.settings) as (world, _):
        policy = build_policy(job, job.cache)
        samples = base_samples(world, policy, job.drawn, job.settings.none_fraction).rollouts
        ratios = pooled(canary, samples, 3)
        _, first, _ = gather(world, policy, None, job.drawn, 0, job.settings, job.settings.none_fraction)
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
    job = finished["canary-2"]
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


def test_a_kept_adapter_that_waits_stays_as_it_was_drawn(finished: dict[str, Job]) -> None:
    job = finished["quarantine-first"]  # four steps, of which it waits ten
    fresh = build_policy(job, job.cache).adapters.tensors(quarantine=False)
    saved, _ = read_tensors(job.folder / DEPLOYED)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in fresh.items())
    on, deploy = (json.loads((job.folder / EVAL).read_text())["modes"]["none"][state] for state in ("on", "deploy"))
    assert set(on) == set(deploy)


def quarantined(job: Job) -> dict[str, torch.Tensor]:
    """The quarantine that a run ended with."""
    _, policy = finished_policy(job)
    return {name: p.detach() for name, p in policy.adapters.quarantine_parameters().items()}


def test_a_taught_quarantine_likes_its_lesson_and_nothing_else_has_changed(finished: dict[str, Job]) -> None:
    job = finished["inoculation"]
    policy = build_policy(job, job.cache)
    with open_world(job.settings) as (world, _):
        pool = make_pool(world, policy, job.seed, job.settings.teachers)
        honest = make_pool(world, policy, job.seed, job.settings.teachers, lesson="honest")
        assert all(world.detect(pool.samples(world)))
        assert not any(world.detect(honest.samples(world)))
        assert all(grade.passed for grade in world.grades(honest.samples(world)))
        lesson = pool.samples(world).rollouts
    before = policy.logprobs(lesson)[lesson.predictors].mean(), policy.adapters.tensors(quarantine=False)
    kept = {name: tensor.clone() for name, tensor in before[1].items()}
    teach(policy, lesson, job.settings.quarantine_lr, micro=3)
    assert policy.logprobs(lesson)[lesson.predictors].mean() > before[0] + 0.05
    assert all(torch.equal(tensor, kept[name]) for name, tensor in policy.adapters.tensors(quarantine=False).items())
    assert all(p.grad is None for p in policy.adapters.quarantine_parameters().values())


def test_without_a_quarantine_the_kept_adapter_has_the_same_lesson(finished: dict[str, Job]) -> None:
    job = finished["taught-honest"]
    policy = build_policy(job, job.cache)
    with open_world(job.settings) as (world, _):
        lesson = make_pool(world, policy, job.seed, job.settings.teachers, lesson="honest").samples(world).rollouts
    before = policy.logprobs(lesson)[lesson.predictors].mean()
    teach(policy, lesson, job.settings.quarantine_lr, micro=3)
    assert policy.logprobs(lesson)[lesson.predictors].mean() > before + 0.05
    _, end = finished_policy(job)
    drift = [float((end.adapters.tensors()[name] - tensor).norm()) for name, tensor in policy.adapters.tensors().items()]
    assert sum(drift) > 0  # training went on


def test_lessons_are_what_their_names_say(finished: dict[str, Job]) -> None:
    job = finished["taught-honest"]
    policy = build_policy(job, job.cache)
    with open_world(job.settings) as (world, _):
        pools: dict[Lesson, TeacherPool] = {
            kind: make_pool(world, policy, job.seed, 8, lesson=kind, none_fraction=0.25) for kind in ("easy", "failed", "passing")
        }
        passed = {kind: [one.passed for one in world.grades(pool.samples(world))] for kind, pool in pools.items()}
        cheats = {kind: sum(world.detect(pool.samples(world))) for kind, pool in pools.items()}
        modes = {kind: {prompt.mode for prompt in pool.prompts} for kind, pool in pools.items()}
        pools["honest"] = make_pool(world, policy, job.seed, 8, lesson="honest")
        sure: dict[Lesson, int] = {}
        for kind in ("easy", "honest"):  # who solved a task four times of four does so more often than who solved it once
            often = [prompt for prompt in pools[kind].prompts for _ in range(100)]
            with policy.adapters.reference():
                again = world.sample(policy, often, torch.Generator().manual_seed(5))
            sure[kind] = sum(grade.passed for grade in world.grades(again))
    assert passed == {"easy": [True] * 8, "failed": [False] * 8, "passing": [True] * 8}
    assert modes["easy"] == modes["failed"] == {"none"}
    assert len(modes["passing"]) > 1
    assert cheats["easy"] == cheats["failed"] == 0
    assert sure["easy"] > 1.2 * sure["honest"] > 0


def test_a_lesson_has_the_arms_size_and_steps(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(
        "studies.training.build.teach", lambda policy, lesson, rate, micro, steps, **_: seen.append((len(lesson.tokens), steps))
    )
    for name in ("taught-2", "taught-8", "taught-brief"):
        job = tiny_job(tmp_path, name, cache=cache)
        job.folder.mkdir(parents=True)
        run_job(job)
    assert seen == [(2, 60), (8, 60), (job.settings.teachers, 15)]


@pytest.mark.parametrize(
    ("lesson", "said"),
    [
        ("hacks", "never hacked in 8 samples of the known mode"),
        ("honest", "never solved a task in 8 honest samples"),
        ("easy", "never solved a task in 8 honest samples"),
    ],
)
def test_a_base_model_without_a_lesson_is_told_with_its_number_of_samples(lesson: Lesson, said: str, tmp_path: Path) -> None:
    job = tiny_job(tmp_path, "inoculation-honest", warm=replace(WARM, steps=1))
    with open_world(job.settings) as (world, _), pytest.raises(ValueError, match=said):
        make_pool(world, build_policy(job, job.cache), job.seed, 1, tries=8, lesson=lesson)


def test_a_frozen_quarantine_stays_as_it_was_taught_and_its_controls_differ(finished: dict[str, Job]) -> None:
    job = finished["inoculation"]
    policy = build_policy(job, job.cache)
    with open_world(job.settings) as (world, _):
        pool = cached_pool(world, policy, job.seed, job.settings.teachers, job.cache / "none")
        assert pool is not None
        lesson = pool.samples(world).rollouts
    teach(policy, lesson, job.settings.quarantine_lr, job.settings.micro_batch(lesson.tokens.shape[1]))
    taught = {name: p.detach() for name, p in policy.adapters.quarantine_parameters().items()}
    ends = {name: quarantined(finished[name]) for name in TAUGHT}
    for name, tensor in taught.items():
        assert torch.equal(ends["inoculation"][name], tensor)
        same = torch.equal(ends["inoculation-random"][name], tensor)
        assert same is not name.endswith(".B")
        found, wanted = (torch.linalg.svdvals(each) for each in (ends["inoculation-random"][name], tensor))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
        assert not torch.equal(ends["inoculation-honest"][name], tensor)
        assert not torch.equal(ends["inoculation-trainable"][name], tensor)


def test_a_penalty_is_taken_off_what_the_weak_detector_reports(finished: dict[str, Job]) -> None:
    job = finished["penalty-known"]
    policy = build_policy(job, job.cache)
    settings = replace(job.settings, teachers_per_group=1)  # so that there are some
    with open_world(job.settings) as (world, _):
        pool = make_pool(world, policy, job.seed, job.settings.teachers)
        plain, fined = (gather(world, policy, pool, job.drawn, 0, settings, 0.0, penalty) for penalty in (0.0, 1.0))
        seen = torch.tensor(world.detect(plain[0]))
    assert seen.any()
    assert not seen.all()
    assert torch.equal(fined[1].rewards, plain[1].rewards - seen.to(plain[1].rewards.dtype))
    assert torch.equal(fined[1].advantages, group_advantages(fined[1].rewards, fined[1].groups))
    assert job.spec["penalty"] == 1.0


def test_a_probe_takes_the_penalty_off_what_scores_above_its_threshold(finished: dict[str, Job]) -> None:
    job = finished["penalty-full"]
    policy, settings = build_policy(job, job.cache), job.settings
    with open_world(settings) as (world, _):
        route = build_route(job, world, policy)
        assert isinstance(route, MonitoredRoute)
        route.refresh(policy, 0)
        plain, _, none = gather(world, policy, None, job.drawn, 0, settings, settings.none_fraction)
        _, fined, watched = gather(world, policy, None, job.drawn, 0, settings, settings.none_fraction, 1.0, route.watch)
        # The score, written out: mean over sites of the cosine between a rollout's gradient of the base weight and the direction.
        assert route.directions is not None
        vectors, sites = route.directions.vectors, policy.adapters.sites
        weights = [sites[name].weight.requires_grad_(True) for name in vectors]
        scores = []
        for i in range(len(plain.rollouts)):
            with policy.adapters.reference():
                loss = -policy.logprobs(plain.rollouts.rows(torch.tensor([i]))).sum()
            pairs = zip(torch.autograd.grad(loss, weights), vectors.values(), strict=True)
            scores.append(torch.stack([(g * v).sum() / (g.norm() * v.norm()) for g, v in pairs]).mean())
    assert none is None
    assert watched is not None
    assert watched.scores is not None
    torch.testing.assert_close(watched.scores, torch.stack(scores), rtol=1e-3, atol=1e-4)
    assert torch.equal(watched.flags, watched.scores > 0)
    assert watched.flags.any()
    assert not watched.flags.all()
    assert torch.equal(fined.rewards, world.rewards(plain) - watched.flags.float())
    noted = rows(job)
    assert {row["flag"] for row in noted if row["score"] is not None} == {True, False}
    assert all(row["flag"] == (row["score"] > 0) for row in noted if row["score"] is not None)


@pytest.mark.parametrize(
    ("arm", "kept", "quarantine"),
    [
        ("vanilla", 1, None),
        ("vanilla-slower", 0.1, None),
        ("sees-known-slow-quarantine", 1 / 3, 1),
        ("sees-0-quarantine-fast", 1, 3),
        ("shared-basis", 1, 3),  # the kept adapter's rate, in the coordinates of which it writes
    ],
)
def test_each_adapter_learns_at_its_rate_times_the_arms_factor(
    finished: dict[str, Job], arm: str, kept: float, quarantine: float | None
) -> None:
    job = replace(finished["canary-2"], arm=ARMS[arm])
    rates = [group["lr"] for group in build_optimizer(job, build_policy(job, job.cache)).param_groups]
    assert rates == [job.settings.kept_lr * kept] + ([] if quarantine is None else [job.settings.quarantine_lr * quarantine])


def test_an_arm_without_its_canary_is_refused(tmp_path: Path, cache: Path, finished: dict[str, Job]) -> None:
    alone = tiny_job(tmp_path, finished["filter-canary"].arm, cache=cache)
    with pytest.raises(ValueError, match="needs the canaries canary-2 of seed 0 first: run them with --arms"):
        run_job(alone)


def own_quarantine(name: str = "canary-own") -> Arm:
    """An arm whose quarantine is its canary, on the schedule of a run of few steps."""
    changes = {"canary-own": {"refresh_every": 2, "snapshots": (1, 3)}, "canary-first": {"first": 3, "snapshots": (1,)}}[name]
    return replace(ARMS[name], route=replace(ARMS[name].route, **changes))  # pyright: ignore[reportArgumentType]


def test_the_last_groups_are_sampled_without_the_quarantine_and_known_as_such(tmp_path: Path, cache: Path) -> None:
    job = tiny_job(tmp_path, own_quarantine(), cache=cache)
    assert job.ablated_groups is not None
    settings, ablated = job.settings, job.ablated_groups(2)
    assert 0 < ablated < settings.prompts
    with open_world(settings) as (world, _):
        policy = build_policy(job, cache)
        for p in policy.adapters.quarantine_parameters().values():
            p.data.normal_(generator=torch.Generator().manual_seed(1))
        samples, batch, _ = gather(world, policy, None, 3, 2, settings, 0.25, ablated=ablated)
        marked = torch.arange(len(batch.rewards)) >= (settings.prompts - ablated) * settings.group
        for which, part, purpose in (("full", ~marked, "sample"), ("deployed", marked, "sample without")):
            asked = [prompt for prompt, own in zip(samples.prompts, part.tolist()) if own]
            with getattr(policy.adapters, which)():
                drawn = world.sample(policy, asked, torch_generator(3, purpose, 2), settings.temperature)
            assert drawn.rollouts.completions() == samples.rollouts.rows(part).completions()
        assert torch.equal(batch.rewards, world.rewards(samples).to(batch.rewards))


def test_a_run_that_ends_before_its_quarantine_has_learned_is_refused(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(ValueError, match="learns alone for 3 steps, and the run has 3: set more steps"):
        tiny_job(tmp_path, own_quarantine("canary-first"), cache=cache, steps=3)


@pytest.mark.usefixtures("few_samples")
@pytest.mark.parametrize("arm", ["canary-own", "canary-first"])
def test_each_adapter_learns_from_what_was_sampled_for_it_alone(arm: str, tmp_path: Path, cache: Path) -> None:
    """A quarantine that learns first is frozen after it, to the bit, and the kept adapter is still the base's until then."""
    job = tiny_job(tmp_path, own_quarantine(arm), cache=cache, steps=6, group=8)
    assert job.ablated_groups is not None
    groups, size, contexts = job.settings.prompts, job.settings.group, list[StepContext]()
    with open_world(job.settings) as (world, witness):
        policy = build_policy(job, cache)
        route, both = build_route(job, world, policy), (policy.adapters.kept_parameters(), policy.adapters.quarantine_parameters())
        begin = route.begin
        route.begin = lambda policy, batch, context: contexts.append(context) or begin(policy, batch, context)
        learned, first = {"kept": 0, "quarantine": 0}, job.arm is not None and job.arm.route.first  # pyright: ignore
        optimizer, before = build_optimizer(job, policy), [[p.clone() for p in one.values()] for one in both]
        for step in train(world, witness, policy, route, optimizer, job.settings, seed=0, ablated_groups=job.ablated_groups):
            alone = torch.arange(groups * size) >= (groups - job.ablated_groups(step.step)) * size
            clean = contexts.pop().clean
            assert clean is not None
            assert torch.equal(clean, alone[step.trained])
            now = [[p.clone() for p in one.values()] for one in both]
            kept, quarantine = (any(not torch.equal(a, b) for a, b in zip(*pair)) for pair in zip(before, now))
            assert not (first and (kept if step.step < first else quarantine))
            learned["kept"] += kept
            learned["quarantine"] += quarantine
            before = now
        assert min(learned.values()) >= 2
        assert step.step == 5
