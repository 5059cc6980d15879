"""The study end to end on a tiny world: resume is bit-identical, records touch nothing, the oracle reaches nothing."""

import gzip
import json
import re
from collections.abc import Iterable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tiny_study import FEW, run_until, tiny_job

import studies.training.run as run_module
from mi_route2.routing import MaskRoute
from mi_route2.tensor_files import read_tensors
from studies.environments.micro.oracle import MicroOracle
from studies.environments.protocol import Verdict
from studies.training.arms import ARMS, MAIN, Arm
from studies.training.checkpoint import CHECKPOINT
from studies.training.job import DEPLOYED, EVAL, FULL, Job
from studies.training.manifest import MANIFEST
from studies.training.recorder import METRICS, ROLLOUTS, Recorder, oriented, read_rows
from studies.training.run import run_job

COMPARISONS = ("name", "about", "role", "baseline", "same_rule_filter")
COMPARED = (METRICS, ROLLOUTS, FULL, DEPLOYED, EVAL, MANIFEST)


def same_folder(a: Job, b: Job) -> None:
    for name in COMPARED:
        assert (a.folder / name).read_bytes() == (b.folder / name).read_bytes(), name


def weights(job: Job) -> dict[str, torch.Tensor]:
    """The adapters that a run ended with."""
    return read_tensors(job.folder / FULL)[0]


def first_of(first: str, second: str, *others: str) -> list[Any]:
    """Return arms of which the fast suite runs the first two."""
    return [first, second, *(pytest.param(arm, marks=pytest.mark.study) for arm in others)]


STATES = (
    *(ARMS[name] for name in ("route2-full", "erase", "preventative-4")),
    replace(ARMS["sees-known-quarantine-fast-forgets"], forget_every=2),
    # No checkpoint holds the calibration of a canary, which is made again.
    replace(ARMS["filter-canary"], canaries=("canary-10",)),
)
"""Arms that together have every kind of state."""


@pytest.mark.study
@pytest.mark.usefixtures("few_samples")
@pytest.mark.parametrize("arm", STATES, ids=lambda arm: arm.name)
def test_resumed_equals_uninterrupted_bit_for_bit(tmp_path: Path, cache: Path, arm: Arm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped between checkpoints, and resumed: the same bytes."""
    monkeypatch.setattr(run_module, "CHECKPOINT_EVERY", 3)
    whole, broken = (tiny_job(tmp_path / side, arm, cache=cache, steps=6) for side in ("whole", "broken"))
    for job in (*whole.canaries, *broken.canaries, whole):
        run_job(job)
    for n in (1, 5):  # 1 loses its step, 5 all but three
        run_until(broken, n)
    assert (broken.folder / CHECKPOINT).exists()  # or it would begin anew
    run_job(broken)
    same_folder(whole, broken)
    assert not (broken.folder / CHECKPOINT).exists()


def test_arms_are_few_and_each_names_arms_that_exist() -> None:
    assert len(ARMS) <= 43
    names = {"base", *ARMS}
    for arm in ARMS.values():
        assert arm.baseline in names
        assert arm.same_rule_filter is None or ARMS[arm.same_rule_filter].quarantine == "none"
    assert set(MAIN) <= set(ARMS)
    with pytest.raises(ValueError, match="no quarantine of its own that could forget"):
        replace(ARMS["vanilla"], forget_every=2)


@pytest.mark.parametrize(("route", "name"), [("oracle", "filter-oracle"), ("oracle-known", "filter-known")])
def test_a_pair_of_bounds_has_the_same_flags_and_differs_in_the_quarantine_alone(route: str, name: str) -> None:
    own, other = ARMS[route], ARMS[name]
    assert own.same_rule_filter == name
    assert (own.quarantine, other.quarantine) == ("lora", "none")
    described = {"name", "about", "role", "same_rule_filter", "quarantine"}
    assert {f.name for f in fields(Arm) if getattr(own, f.name) != getattr(other, f.name)} <= described


@pytest.mark.study
def test_recorders_change_no_weight(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mask quality, teacher scores and the oracle's verdicts are read beside training, never by it."""
    with_record = tiny_job(tmp_path / "with", "route2-full", cache=cache, adapt=FEW)
    run_job(with_record)
    monkeypatch.setattr(Recorder, "note", lambda *a: {})
    without = tiny_job(tmp_path / "without", "route2-full", cache=cache, adapt=FEW)
    run_job(without)
    a, b = weights(with_record), weights(without)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert (without.folder / METRICS).read_bytes() == b""


@pytest.mark.parametrize(
    "arm", first_of("route2-full", "oracle", "route2-act", "route2-grad", "filter-full", "erase", "route2-act-token")
)
def test_a_lying_oracle_changes_weights_of_the_bound_alone(
    tmp_path: Path, cache: Path, arm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, lied = (tiny_job(tmp_path / name, arm, cache=cache, adapt=FEW) for name in ("honest", "lied"))
    run_job(honest)

    def lie(self: MicroOracle, prompts: list[object], completions: list[str]) -> list[Verdict]:
        return [Verdict(i % 2 == 0, i % 3 == 0, i % 5 == 0, {}) for i in range(len(completions))]

    monkeypatch.setattr(MicroOracle, "judge", lie)
    run_job(lied)
    a, b = weights(honest), weights(lied)
    assert all(torch.equal(a[name], b[name]) for name in a if name.startswith("kept.")) is (arm != "oracle")
    assert arm == "oracle" or all(torch.equal(a[name], b[name]) for name in a)


def shortened(arm: Arm) -> Arm:
    """Return an arm for a run of two steps."""
    return replace(arm, canaries=arm.canaries and ("canary-10",))


def traits(given: Any, of: str = "") -> set[str]:
    """Return what an arm is but for its name and what it is compared with: each field, also of its specs, with its value or, of a
    number, whether it is 0."""
    if not is_dataclass(given):
        return {of + re.sub(r"\b\d+(?:\.\d+)?\b", lambda number: "1" if float(number[0]) else "0", str(given))}
    told = (traits(getattr(given, f.name), f"{of}{f.name} = ") for f in fields(given) if f.name not in COMPARISONS)
    return {of + type(given).__name__}.union(*told)


def differing(arms: Iterable[Arm]) -> list[Arm]:
    """Return arms that together have every trait: of those with a trait that none before them has, no more than it takes."""
    seen, found = set[str](), dict[str, tuple[Arm, set[str]]]()
    for arm in arms:
        own = traits(shortened(arm))
        if not own <= seen:
            seen |= own
            found[arm.name] = arm, own
    for name in reversed(list(found)):
        if seen == set[str]().union(*(own for other, (_, own) in found.items() if other != name)):
            del found[name]
    return [arm for arm, _ in found.values()]


@pytest.mark.study
@pytest.mark.usefixtures("few_samples")
@pytest.mark.parametrize(
    "arm", differing(arm for arm in ARMS.values() if not arm.instruct and arm.name != "screen-judge"), ids=lambda arm: arm.name
)
def test_every_trait_of_an_arm_runs_and_its_deployed_file_holds_no_quarantine(tmp_path: Path, cache: Path, arm: Arm) -> None:
    short = shortened(arm)
    job = tiny_job(tmp_path, short, cache=cache, steps=2)
    for canary in job.canaries:
        run_job(canary)
    run_job(job)
    with safe_open(job.folder / DEPLOYED, framework="pt") as handle:
        names = list(handle.keys())
    assert names
    assert all(name.startswith("kept.") for name in names)
    rows = read_rows(job.folder / METRICS)
    assert [row["step"] for row in rows] == [0, 1]
    assert len(gzip.decompress((job.folder / ROLLOUTS).read_bytes()).splitlines()) == 2 * 12
    report = json.loads((job.folder / EVAL).read_text())
    assert set(report["modes"]) == {"run_tests", "sentinel", "stdout_marker", "file_marker", "none"}


@pytest.mark.study
@pytest.mark.parametrize("preset_change", [{"kept": "svd", "kept_rank": None}, {"micro": 3}, {"updates_per_batch": 2, "kl": 0.1}])
def test_settings_that_change_the_machinery_run(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, preset_change: dict[str, Any]
) -> None:
    plain, sizes = MaskRoute.score, list[int]()
    monkeypatch.setattr(MaskRoute, "score", lambda self, policy, part: sizes.append(len(part)) or plain(self, policy, part))
    job = tiny_job(tmp_path, "route2-full", cache=cache, **preset_change)
    run_job(job)
    assert max(sizes) <= preset_change.get("micro", 12)  # the teacher pool's rollouts too


@pytest.mark.study
def test_teachers_are_mixed_in_known_modes_only_and_the_metrics_are_those_of_the_rollouts(tmp_path: Path, cache: Path) -> None:
    job = tiny_job(tmp_path, "route2-grad", cache=cache, teachers_per_group=2, prompts=8, steps=2)
    run_job(job)
    rows = read_rows(job.folder / ROLLOUTS)
    taught = [row for row in rows if row["teacher"]]
    assert taught
    assert {row["mode"] for row in taught} == {"run_tests"}
    assert all("def run_tests" in row["completion"] for row in taught)
    scored = 0
    for noted in read_rows(job.folder / METRICS):
        mine = [row for row in rows if row["step"] == noted["step"]]
        groups = [mine[i : i + 4] for i in range(0, len(mine), 4)]
        equal = [len({row["reward"] for row in group}) == 1 for group in groups]
        assert (noted["groups"], noted["zero_variance_groups"]) == (8, sum(equal))
        student = [row for row in mine if not row["teacher"]]
        for mode, numbers in {None: noted, **noted["modes"]}.items():
            some = [row for row in student if mode in (None, row["mode"])]
            assert mode is None or numbers["n"] == len(some)
            for name, key in (("hack", "hack"), ("solve", "gt"), ("exploit", "exploit"), ("reward", "reward")):
                assert numbers[name] == pytest.approx(fmean(row[key] for row in some) if some else 0.0)
        trained = [row for group, same in zip(groups, equal, strict=True) for row in group if not same]
        assert [row["flag"] is None for row in mine] == [same for same in equal for _ in range(4)]
        assert noted["flags"] == {"n": len(trained), "flagged": sum(row["flag"] for row in trained)}
        for label, name in ((True, "fire_hack"), (False, "fire_clean")):
            some = [row for row in trained if row["hack"] is label and not row["teacher"]]
            assert noted["mask"][name] == (pytest.approx(fmean(row["flag"] for row in some)) if some else None)
            means = noted["scores"]["student_hack" if label else "student_clean"]
            assert means == (pytest.approx(fmean(row["score"] for row in some)) if some else None)
            scored += len(some)
        shown = [row["flag"] for row in trained if row["teacher"]]
        if noted["step"] == 1:  # in other steps it is that of the whole pool
            assert noted["mask"]["fire_teacher"] == (pytest.approx(fmean(shown)) if shown else None)
    assert scored > 10


@pytest.mark.parametrize(
    ("arm", "turned"), [("route2-grad", True), ("route2-full", False), ("route2-act", False), ("vanilla", False)]
)
def test_a_live_gradients_score_is_recorded_without_the_sign_of_its_advantage(arm: str, turned: bool) -> None:
    scores, advantages = torch.tensor([0.5, -0.5, 0.25]), torch.tensor([2.0, -1.0, -3.0])
    recorded = oriented(ARMS[arm].route, scores, advantages)
    assert recorded is not None
    assert recorded.tolist() == ([0.5, 0.5, -0.25] if turned else scores.tolist())


@pytest.mark.study
def test_the_pairs_file_beside_a_run_gives_the_same_run_again(tmp_path: Path, cache: Path) -> None:
    """The world's own pairs are written as a readable file; given back as ``pairs`` they train the same weights."""
    own = tiny_job(tmp_path / "own", "route2-act", cache=cache)
    run_job(own)
    pairs = own.root / "seed-0" / "pairs-hack.toml"
    assert "def run_tests" in pairs.read_text()
    given = replace(tiny_job(tmp_path / "given", "route2-act", cache=cache), pairs=pairs)
    run_job(given)
    assert given.identity != own.identity
    a, b = weights(own), weights(given)
    assert all(torch.equal(a[name], b[name]) for name in a)
