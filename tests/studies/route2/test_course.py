"""A course is the run itself, looked at: its path is that of early stopping, and its end is the run's."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_study import predictions_file, tiny_job
from torch import Tensor

import studies.route2.course as course_module
from mi_route2.adapters import save_adapters
from mi_route2.rollouts import Policy, Rollouts
from studies.common.stats import mean
from studies.environments.protocol import Modes
from studies.route2.course import (
    Course,
    FollowedJob,
    better_after,
    collect,
    follow,
    fronts,
    matched,
    read_course_predictions,
    stops,
    table,
    write_courses,
)
from studies.route2.headline import EXPLOIT, SOLVE
from studies.route2.learning import State, learned
from studies.route2.predictions import Predictions
from studies.training.arms import ARMS, Arm
from studies.training.job import EVAL, FULL, Job, build_policy, finished_policy
from studies.training.manifest import MANIFEST
from studies.training.run import run_job
from studies.training.worlds import base_file

pytestmark = pytest.mark.study
FORGETS = ARMS["sees-known-quarantine-fast-forgets"]


def seen(job: Job) -> dict[str, Any]:
    follow(FollowedJob(job))
    return json.loads(FollowedJob(job).path.read_text())


@pytest.mark.parametrize("arm", ["vanilla", "sees-known-quarantine-fast"])
def test_its_end_is_the_run_and_its_path_the_runs_that_stop_early(tmp_path: Path, cache: Path, arm: str) -> None:
    whole = tiny_job(tmp_path, arm, cache=cache, steps=6, evaluation_prompts=24)
    run_job(whole)
    points = seen(whole)["points"]
    assert points.keys() == {"0", "5", "6"}
    assert points["6"] == json.loads((whole.folder / EVAL).read_text())["modes"]
    early = tiny_job(tmp_path / "early", replace(ARMS[arm], steps=5), cache=cache, steps=6, evaluation_prompts=24)
    run_job(early)
    assert points["5"] == json.loads((early.folder / EVAL).read_text())["modes"]
    assert points["0"] != points["5"]
    base = tiny_job(tmp_path, "base", cache=cache, steps=6, evaluation_prompts=24)
    run_job(base)
    assert {mode: both["deploy"] for mode, both in points["0"].items()} == {
        mode: both["deploy"] for mode, both in json.loads((base.folder / EVAL).read_text())["modes"].items()
    }


def test_what_is_learned_of_all_steps_is_the_change_of_the_whole_run(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one and the same rollouts: the parts of all steps add up to the difference between the end and the beginning."""
    job = tiny_job(tmp_path, "absorb", cache=cache, precision="float64")
    start = build_policy(job, job.cache)
    first: list[Rollouts] = []
    total: list[Tensor] = []
    ends: list[Tensor] = []

    def also(policy: Policy, rollouts: Rollouts, before: State) -> dict[str, Tensor]:
        first[:] = first or [rollouts]
        parts = learned(policy, first[0], before)
        total.append(parts["kept"] + parts["quarantine"])
        ends.append(policy.logprobs(first[0]).sum(dim=1).detach())
        return learned(policy, rollouts, before)

    monkeypatch.setattr(course_module, "learned", also)
    follow(FollowedJob(job))
    change = ends[-1] - start.logprobs(first[0]).sum(dim=1).detach()
    torch.testing.assert_close(torch.stack(total).sum(dim=0), change, rtol=0.0, atol=1e-10)
    assert change.abs().max() > 1e-3


def test_an_arm_with_pairs_is_followed_where_no_run_of_it_is(tmp_path: Path, cache: Path) -> None:
    job = tiny_job(tmp_path, "filter-act", cache=cache)
    follow(FollowedJob(job))
    assert not job.folder.exists()
    assert (job.folder.parent / "pairs-hack.toml").exists()


def test_another_machines_run_is_told(tmp_path: Path, cache: Path) -> None:
    job = tiny_job(tmp_path, "vanilla", cache=cache)
    run_job(job)
    policy = finished_policy(job)[1]
    with torch.no_grad():
        next(iter(policy.adapters.kept_parameters().values())).mul_(1.001)
    (job.folder / FULL).unlink()
    save_adapters(policy.adapters, job.folder / FULL, "full")
    with pytest.raises(ValueError, match="ends with other weights than this machine's repetition"):
        follow(FollowedJob(job))
    assert not FollowedJob(job).path.exists()


def test_numbers_of_what_was_made_again_are_not_kept(tmp_path: Path, cache: Path) -> None:
    """The base model, a canary, and the run itself may have other weights under the same settings: from another machine."""
    there = shutil.copytree(cache, tmp_path / "cache")
    job = tiny_job(tmp_path, "canary-run-early", cache=there, steps=2, evaluation_prompts=8)
    for canary in job.canaries:
        run_job(canary)
    first = seen(job)
    run_job(job)
    assert FollowedJob(job).numbers == first
    base, own = base_file(job.settings, job.seed, job.cache), job.folder / FULL
    canary = job.canaries[0].folder
    for path, changed in (
        (base, base.read_bytes()[:-1]),
        (canary / MANIFEST, re.sub(rb'("deployed.safetensors": ")\w+', rb"\1other", (canary / MANIFEST).read_bytes())),
        (own, (canary / FULL).read_bytes()),
    ):
        former = path.read_bytes()
        path.write_bytes(changed)
        assert FollowedJob(job).numbers is None
        path.write_bytes(former)
    del first["origins"]
    FollowedJob(job).path.write_text(json.dumps(first))
    assert FollowedJob(job).numbers == first  # of an earlier version, which names nothing


def test_a_steered_arm_is_refused(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(ValueError, match="preventative-2 is steered while it trains"):
        follow(FollowedJob(tiny_job(tmp_path, "preventative-2", cache=cache)))


def test_a_quarantine_that_forgets_adds_nothing_at_first(tmp_path: Path, cache: Path) -> None:
    """It was last set back after the fourth step, so of the fifth alone, one step of Adam from nothing, is anything left."""
    job = tiny_job(tmp_path, replace(FORGETS, forget_every=2), cache=cache, steps=5, group=8)
    run_job(job)
    last = finished_policy(job)[1].adapters.quarantine_parameters()
    assert all(bool(p.any()) for name, p in last.items() if name.endswith(".B"))
    rate = job.settings.quarantine_lr * FORGETS.quarantine_lr_scale
    moved = max(float(p.detach().abs().max()) for name, p in last.items() if name.endswith(".B"))
    assert moved <= rate * 1.001


def test_a_quarantine_that_never_forgets_is_the_arm_that_it_controls(tmp_path: Path, cache: Path) -> None:
    plain, control = (tiny_job(tmp_path / n, a, cache=cache) for n, a in (("a", ARMS[str(FORGETS.baseline)]), ("b", FORGETS)))
    run_job(plain)
    run_job(control)  # of four steps, and it would forget after ten
    assert (plain.folder / FULL).read_bytes() == (control.folder / FULL).read_bytes()


def made(tmp_path: Path, cache: Path, arms: tuple[Arm, ...]) -> list[Job]:
    return [tiny_job(tmp_path, arm, seed, cache) for seed in (0, 1) for arm in arms]


def test_the_report_counts_what_was_seen(tmp_path: Path, cache: Path) -> None:
    arms = ("vanilla", "sees-known", "sees-known-quarantine-fast")
    jobs = made(tmp_path, cache, tuple(ARMS[name] for name in arms))
    presets = {"strong": jobs[0].settings.digest}
    file = predictions_file(tmp_path, presets, "sees-known-quarantine-fast", "sees-known", "kept_missed", arms=[*arms])
    (report := tmp_path / "fronts.png").touch()
    with pytest.raises(ValueError, match="has a report of `evidence`, and a course would replace its outcomes"):
        write_courses(jobs, 1, tmp_path, Predictions.read(file))
    report.unlink()
    paths = write_courses(jobs, 1, tmp_path / "out", Predictions.read(file))
    names = {"strong-course.json", "strong-course.md", "strong-stops.md", "strong-tests.md", "course.png", "paths.png"}
    assert {path.name for path in paths} == names
    course = Course.read(tmp_path / "out" / "strong-course.json")
    assert course == collect([FollowedJob(job) for job in jobs])
    for seed in (0, 1):
        own = json.loads(FollowedJob(jobs[3 * seed + 2]).path.read_text())
        modes = Modes(**{role: tuple(n) if isinstance(n, list) else n for role, n in own["modes"].items()})
        held = mean([own["points"]["4"][mode]["deploy"]["exploit"] for mode in modes.held_out])
        assert course.values["sees-known-quarantine-fast"]["deploy_exploit_held"]["4"][seed] == held
        nats = [row["missed"]["kept"] for row in own["steps"] if row["missed"]["n"]]
        total = course.seeded()["sees-known-quarantine-fast", "kept_missed"][seed]
        assert total == (pytest.approx(sum(nats), abs=1e-12) if nats else None)
    assert "sees-known-quarantine-fast" in table(course)
    assert "| sees-known |" in " ".join(stops(course).split())
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / jobs[0].settings.folder / "course").iterdir()}
    write_courses(jobs, 1, tmp_path / "again", Predictions.read(file))
    assert {path: path.stat().st_mtime_ns for path in before} == before  # what was followed is not followed again
    assert (tmp_path / "again" / "strong-course.json").read_bytes() == (tmp_path / "out" / "strong-course.json").read_bytes()
    assert not (jobs[0].folder / MANIFEST).exists()
    write_courses(jobs, 1, tmp_path / "again", Predictions.read(file).model_copy(update={"seeds": (0, 2)}))
    assert {path.name for path in (tmp_path / "again").iterdir()} == names - {"strong-tests.md"}  # they were of other seeds


def test_a_damaged_file_is_told(tmp_path: Path, cache: Path) -> None:
    job = tiny_job(tmp_path, "vanilla", cache=cache)
    content = seen(job)
    del content["points"]["4"]["none"]
    FollowedJob(job).path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="lacks 'none': delete it, and run"):
        collect([FollowedJob(job)])


def test_stops_of_a_filter_are_told_in_spans() -> None:
    """By hand: a filter that is better after 5, 10 and 30 steps, and at its end only as good as a method that stands still."""
    rates = {"0": (0.4, 0.1), "5": (0.1, 0.5), "10": (0.1, 0.5), "20": (0.3, 0.5), "30": (0.2, 0.5), "40": (0.2, 0.4)}
    path = {EXPLOIT: {n: [e, e] for n, (e, _) in rates.items()}, SOLVE: {n: [s, s] for n, (_, s) in rates.items()}}
    eager = path | {SOLVE: {n: [0.9, 0.9] for n in rates}}
    still = {metric: {n: [value, value] for n in rates} for metric, value in ((EXPLOIT, 0.2), (SOLVE, 0.4))}
    course = Course("strong", "", (0, 1), {"sees-known": path, "sees-known-quarantine": still, "sees-known-quarantine-fast": eager})
    ends = [course.at("sees-known-quarantine", metric) for metric in (EXPLOIT, SOLVE)]
    assert better_after(course, "sees-known", *ends) == "sees-known 5 to 10, 30 to 40"
    assert "| sees-known 5 to 10, 30 to 40 |" in " ".join(fronts(course).split())
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in matched(course).splitlines()[2:]]
    # The first stop that solves as much as the one is after 5 steps, and exploits less; the other solves more than any.
    assert rows[0][2:] == ["after 5 steps", ".100 [.100, .100]", ".500", "+.100 [+.100, +.100]"]
    assert rows[1][2:] == ["nowhere, so after 40 steps", ".200 [.200, .200]", ".400", ".000 [.000, .000]"]


def test_what_no_course_can_follow_or_judge_is_told_before_anything_is_trained(tmp_path: Path) -> None:
    for other, metric, name, said in (
        ("preventative-2", "kept_missed", "predictions.toml", "preventative-2 is steered while it trains"),
        ("canary-run-weak", "kept_missed", "predictions.toml", "the canaries of canary-run-weak are of another preset"),
        ("absorb", "leakage", "predictions.toml", "a report has no leakage; choose from deploy_exploit_held, "),
        ("absorb", "kept_missed", "other.toml", "rename it"),
    ):
        with pytest.raises(ValueError, match=said):
            read_course_predictions(predictions_file(tmp_path, {"strong": ""}, "vanilla", other, metric, file=name))
