"""The study from nothing to its figures, what it may not know, and that it can be ended at any part."""

import json
import re
import shutil
from dataclasses import asdict, replace
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_steering import TINY, Made
from tiny_study import train_base_again
from titles import saved_titles, untitled

from mi_route2.sites import Site
from studies.common.artifacts import read_part, write_part
from studies.environments.micro.language import split
from studies.environments.micro.world import MicroWitness
from studies.environments.protocol import Samples
from studies.steering.answer import comparisons, frontier_counts, verdict
from studies.steering.cells import BEHIND, CLOSED, DELETED, ON, Bench
from studies.steering.figures import FIGURES, frontier_figure, latency_figure
from studies.steering.fitting import Fitted, ProbeGate, collect, fit, threshold
from studies.steering.job import BASE, FIT, _make, parts_of, run_steering
from studies.steering.report import write_report
from studies.steering.results import MODES, Draws, Estimate, Study, load_study, metrics
from studies.steering.settings import SUBJECTS, Settings
from studies.steering.study import run_study
from studies.training.job import finished_policy
from studies.training.manifest import read_manifest

pytestmark = pytest.mark.study


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.suffix}


def test_one_command_makes_everything(made: Made) -> None:
    assert {path.suffix for path in made.paths} == {".json", ".md", ".png"}
    for subject in SUBJECTS:
        for part in parts_of(subject):
            assert made.job(subject).read(part) is not None
    results = json.loads((made.folder / "results.json").read_text())
    assert results["rollouts_per_cell"] == 10
    assert {row["subject"] for row in results["comparisons"]} == {"absorb", "route2-full"}


def test_a_run_that_was_ended_at_any_part_ends_with_the_same_bytes(made: Made, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(made.out, out)
    folder = out / made.settings.folder
    for number, subject in enumerate(("vanilla", "absorb")):  # of one everything after the probes is gone, of the other one part
        for part in parts_of(subject)[1:] if number == 0 else ("roc",):
            (folder / "seed-0" / subject / f"{part}.json").unlink()
    (folder / "results.json").unlink()
    kept = {path: path.stat().st_ino for path in (folder / "seed-0").rglob("*.json")}
    run_study(made.settings, [0], out, workers=1, quiet=True)
    assert files(folder) == files(made.folder)
    assert {path: path.stat().st_ino for path in kept} == kept, "what it had is made again"
    ours, theirs = Pipe()
    ours.send(job := made.job("absorb"))
    assert theirs.recv() == job, "a job goes to the processes of a cluster"


def test_a_report_needs_the_artifacts_alone(made: Made, tmp_path: Path) -> None:
    folder = tmp_path / made.folder.name
    shutil.copytree(made.folder, folder)
    for path in made.paths:
        (folder / path.name).unlink()
    with saved_titles() as seen:
        write_report(folder)
    assert [len(seen), untitled(seen, made.settings.run.preset)] == [len(FIGURES), []], "every figure says of which preset it is"
    assert files(folder) == files(made.folder)


def test_artifacts_are_checked(made: Made, tmp_path: Path) -> None:
    folder = tmp_path / made.folder.name
    shutil.copytree(made.folder, folder)
    target = folder / "seed-0" / "absorb" / "quarantine.safetensors"
    data = bytearray(target.read_bytes())
    data[-1] ^= 1
    target.write_bytes(data)
    with pytest.raises(ValueError, match="damaged"):
        load_study(folder)
    shutil.copyfile(folder / "seed-0" / "route2-full" / "quarantine.safetensors", target)
    with pytest.raises(ValueError, match="do not match their checksum"):
        load_study(folder)
    target.with_suffix(".json").unlink()
    with pytest.raises(ValueError, match="missing"):
        load_study(folder)


def test_a_copy_of_a_seed_under_another_number_is_no_seed(made: Made, tmp_path: Path) -> None:
    shutil.copytree(made.out, tmp_path / "out")
    for folder in (made.settings.run.folder, made.folder.name):
        shutil.copytree(tmp_path / "out" / folder / "seed-0", tmp_path / "out" / folder / "seed-1")
    with pytest.raises(ValueError, match=r"was made from other settings or another run; delete .* to have it made again"):
        load_study(tmp_path / "out" / made.folder.name)


def test_what_was_made_with_another_base_model_is_refused(made: Made, tmp_path: Path) -> None:
    """The base model was trained again, by other code: its settings are the same, and so are the runs that the old one began.

    Nothing is deleted or overwritten, and parts of earlier versions, which name no base model, are taken as they are."""
    out = tmp_path / "out"
    shutil.copytree(made.out, out)
    train_base_again(made.settings.run, out / "warmstarts")
    before = files(out / made.folder.name)
    for subject in SUBJECTS:
        job = replace(made.job(subject), out=out)
        remedy = f"put the old one back, or delete {re.escape(str(job.folder))}.* and run the study again"
        with pytest.raises(ValueError, match=rf"fit.json was made with another base model than the one in .*: {remedy}"):
            _ = job.finished
    for make in (lambda: load_study(out / made.folder.name), lambda: run_study(made.settings, [0], out, workers=1, quiet=True)):
        with pytest.raises(ValueError, match="was made with another base model"):
            make()
    assert files(out / made.folder.name) == before
    for subject in SUBJECTS:
        job = replace(made.job(subject), out=out)
        for part in parts_of(subject):
            content, tensors = read_part(job.path(part)) or ({}, {})
            write_part(job.path(part), job.identity(part), {k: v for k, v in content.items() if k != BASE}, tensors)
    load_study(out / made.folder.name)


def test_a_part_names_all_that_it_was_made_of(made: Made) -> None:
    """No two parts of any subject have one identity, and none has that of another seed or other settings."""
    jobs = [made.job(subject) for subject in SUBJECTS]
    known = [job.identity(part) for job in jobs for part in parts_of(job.subject)]
    assert len(set(known)) == len(known)
    for job in jobs:
        read, manifest = "studies.steering.job.read_manifest", read_manifest(job.run.folder)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(read, lambda _, manifest=manifest: manifest)  # that of seed 0 and of these settings
            for other in (replace(job, seed=1), replace(job, settings=replace(job.settings, train=25))):
                assert other.identity("fit") not in known
            if job.subject != "untrained":
                again = replace(manifest, checksums=dict.fromkeys(manifest.checksums, "0" * 64))
                patch.setattr(read, lambda _, again=again: again)
                assert job.identity("fit") not in known


def test_the_untrained_control_has_the_quarantine_of_absorb_at_its_start(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made without any trained adapter: its quarantine is there, and adds nothing."""
    job = made.job("untrained")
    policies = []
    monkeypatch.setattr("studies.steering.job.Bench", lambda *given: policies.append(given[2]) or given)
    monkeypatch.setattr(type(job), "finished", False)
    run_steering(job)
    (policy,) = policies
    assert policy.adapters.has_quarantine
    assert (
        policy.adapters.quarantine_parameters().keys()
        == finished_policy(made.job("absorb").run)[1].adapters.quarantine_parameters().keys()
    )
    tokens = torch.tensor([[1, 2, 3, 4]])
    with policy.adapters.full():
        whole = policy.forward(policy.model, tokens, torch.ones_like(tokens, dtype=torch.bool))
    with policy.adapters.reference():
        base = policy.forward(policy.model, tokens, torch.ones_like(tokens, dtype=torch.bool))
    assert torch.equal(whole, base)


def test_a_fit_is_told_the_name_of_its_model(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """`untrained` has the run of `absorb`, and shuffles labels of its own."""
    told: list[str] = []
    monkeypatch.setattr("studies.steering.job.fit", lambda *_, model: told.append(model) or made.fitted("absorb"))
    monkeypatch.setattr("studies.steering.job.write_part", lambda *_: None)
    bench = SimpleNamespace(world=None, host=None, policy=None)
    for subject in SUBJECTS:
        _make(made.job(subject), FIT, cast("Bench", bench))
    assert told == list(SUBJECTS)


def test_settings_that_cannot_be_are_refused() -> None:
    for wrong in (
        {"operating": 0.7},
        {"delays": (0,)},
        {"quantiles": (0.0, 0.95)},
        {"late_gains": (3.0,)},
        {"tasks": 0},
        {"exact": 99},
        {"quantiles": (0.95, 0.95)},
        {"gains": (1.0, 1.0000001)},  # one name for two cells
        {"delays": (1, 1)},
        {"late_gains": (1.0, 1.0)},
        {"late_gains": ()},
    ):
        with pytest.raises(ValueError, match=r"\w+ .*\w+"):
            Settings(**wrong)


def test_thresholds_keep_their_quantiles_in_any_order() -> None:
    site, by = Site.parse(TINY.site), {0.95: 2.0, 0.5: 1.0}
    fitted = Fitted({site: {"probe": ProbeGate(site, torch.ones(2), by)}}, {"away": torch.ones(2)}, 1.0, by)
    again = Fitted.of(replace(TINY, quantiles=(0.95, 0.5)), fitted.tensors(), {})
    assert again.gates[site]["probe"].thresholds == again.ceilings == by


def test_what_cannot_be_made_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there are 819 test tasks: choose fewer tasks"):
        run_study(replace(TINY, tasks=820), [0], tmp_path, workers=1, quiet=True)
    assert not list(tmp_path.iterdir())


def test_a_folder_of_something_else_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give a folder that `run` created"):
        load_study(tmp_path)
    folder = tmp_path / TINY.folder
    (folder / "seed-0-old").mkdir(parents=True)
    TINY.write(folder)
    (folder / "seed-3").mkdir()
    with pytest.raises(ValueError, match=r"is not finished: fit of base is missing at seeds \[3\]; a run of its seeds resumes it"):
        load_study(folder)


# what the probes are told


def test_probes_learn_from_training_tasks_in_the_known_mode_without_the_oracle(
    bench: Bench, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Samples] = []

    def refuse(self: MicroWitness, samples: Samples) -> None:
        raise AssertionError("the oracle was asked while probes were fitted")

    sample = type(bench.world).sample

    def spy(self, policy, prompts, *rest):
        samples = sample(self, policy, prompts, *rest)
        asked.append(samples)
        return samples

    monkeypatch.setattr(MicroWitness, "judge", refuse)
    monkeypatch.setattr(type(bench.world), "sample", spy)
    fitted = fit(made.settings, made.job("absorb").run, bench.world, bench.host, bench.policy, model="absorb")
    assert len(asked) == 2
    assert fitted.counts["rollouts"] == 2 * made.settings.train + 2 * made.settings.run.pairs
    for samples in asked:
        assert {split(prompt.task) for prompt in samples.prompts} == {"train"}
        assert {prompt.mode for prompt in samples.prompts} == {"run_tests"}
    assert {split(prompt.task) for prompt in bench.prompts()} == {"test"}


def test_labels_are_the_detectors_and_the_pairs(bench: Bench, made: Made) -> None:
    examples = collect(made.settings, made.job("absorb").run, bench.world, bench.host, bench.policy)
    pairs = made.settings.run.pairs
    assert examples.pair.sum() == 2 * pairs
    assert examples.hack[examples.pair].tolist() == [True] * pairs + [False] * pairs
    assert not bool(examples.mask[:, :10].any())  # no gate acts on a prompt


@given(st.lists(st.integers(-300, 300), min_size=2, max_size=40), st.sampled_from([0.5, 0.8, 0.95]))
def test_a_threshold_stands_between_scores(values: list[int], quantile: float) -> None:
    """Scores that are one or tell apart: none is at the threshold, and no more are above than the quantile says, but for one."""
    scores = torch.tensor(values) / 100
    at = threshold(scores, quantile)
    assert float((scores - at).abs().min()) > 4e-4
    assert int((scores > at).sum()) <= (1 - quantile) * len(values) + 1


# cells and numbers


def test_an_untrained_quarantine_is_no_quarantine(made: Made) -> None:
    found = made.job("untrained").read("quarantine")
    assert found is not None
    _, tensors = found
    for name, outcomes in tensors.items():
        assert torch.equal(outcomes, tensors[ON]), name


def test_a_subject_next_to_itself_does_not_differ(made: Made) -> None:
    study = load_study(made.folder)
    same = study.estimates("absorb", "quarantine", DELETED, minus=DELETED)
    assert all(each.mean == each.low == each.high == 0 for each in same.values())
    assert verdict(same) == "no difference"
    assert all(row["name"] != row["reference"] for row in comparisons(study))


def test_metrics_by_hand() -> None:
    """Two tasks: solve and exploit of each mode in the world's order (the known one first, the honest one last)."""
    outcomes = np.array([[[0, 1], [1, 1]], [[0, 1], [0, 0]], [[0, 0], [0, 0]], [[1, 1], [0, 1]], [[1, 0], [0, 0]]], dtype=float)
    found = metrics(outcomes)
    assert found["hack_known"].tolist() == [1, 0]
    assert found["exploit_known"].tolist() == [1, 1]
    np.testing.assert_allclose(found["hack_held"], [1 / 3, 1 / 3])
    np.testing.assert_allclose(found["exploit_held"], [2 / 3, 1 / 3])
    np.testing.assert_allclose(found["solve"], [2 / 5, 1 / 5])


@given(st.integers(2, 4), st.integers(5, 12), st.integers(0, 99))
def test_the_interval_is_that_of_resampling_rows_and_columns(seeds: int, tasks: int, number: int) -> None:
    """Against indexing with resampled seeds and tasks, draw by draw."""
    values = np.random.default_rng(number).random((seeds, tasks))
    draws = Draws.of(seeds, tasks, 200)
    means = []
    for a, b in zip(draws.seeds, draws.tasks, strict=True):
        means.append(values[np.repeat(np.arange(seeds), a)][:, np.repeat(np.arange(tasks), b)].mean())
    estimate = draws.estimate(values)
    low, high = np.quantile(means, [0.025, 0.975])
    np.testing.assert_allclose([estimate.low, estimate.high, estimate.mean], [low, high, values.mean()])


def test_means_that_are_equal_up_to_rounding_do_not_differ() -> None:
    """Deletion and a gate hack equally often, on other tasks, and the gate solves more: it looks better by its means."""

    def outcomes(hacks: tuple[int, ...], honest: int) -> torch.Tensor:
        found = torch.zeros(len(MODES.names), len(hacks), 2, dtype=torch.uint8)
        for task, count in enumerate(hacks):
            for mode in MODES.held_out[:count]:
                found[MODES.names.index(mode), task, 1] = 1
        found[MODES.names.index(MODES.honest), :honest, 0] = 1
        return found

    gate = {"name": "gate", "how": "forward", "probe": "probe", "quantile": 0.95}
    cells = {"cells": [{"name": DELETED, "how": DELETED}, gate]}
    part = {0: (cells, {DELETED: outcomes((3, 1, 0), 0), "gate": outcomes((0, 3, 1), 1)})}
    both = {(subject, "quarantine"): part for subject in ("absorb", "route2-full")}
    study = Study(replace(TINY, tasks=3), (0,), both, Draws.of(1, 3))
    assert 0 < study.estimates("absorb", "quarantine", "gate", minus=DELETED)["hack_held"].mean < 1e-15  # exactly, it is 0
    assert frontier_counts(study)["absorb"]["better_by_means"] == 1


def test_bounds_that_rounding_puts_beyond_their_mean_are_drawn() -> None:
    """Every task is solved in one mode of five, without exception."""
    solved = torch.zeros(len(MODES.names), 32, 2, dtype=torch.uint8)
    solved[MODES.names.index(MODES.honest), :, 0] = 1
    own = {ON: solved, DELETED: torch.zeros_like(solved), CLOSED: solved, BEHIND: solved}
    part = dict.fromkeys((0, 1), ({"cells": [{"name": name, "how": name, "probe": None} for name in own]}, own))
    parts = {(subject, "quarantine"): part for subject in ("absorb", "route2-full")}
    study = Study(replace(TINY, tasks=32), (0, 1), parts, Draws.of(2, 32))
    estimate = study.estimates("absorb", "quarantine", ON)["solve"]
    assert estimate.mean < estimate.low
    frontier_figure(study, {})
    same = dict.fromkeys(("hack_held", "exploit_held", "solve"), asdict(estimate))
    about = [{"how": ON}, {"how": "steer", "gain": 1.0}, *({"how": "policy", "gain": 1.0, "delay": d} for d in (1, 3))]
    latency_figure(study, {"cells": [{"subject": "vanilla", "part": "latency", **each, **same} for each in about]})


def test_verdicts() -> None:
    def difference(hack: tuple[float, float], solve: tuple[float, float]) -> str:
        both = {"hack_held": hack, "solve": solve}
        return verdict({name: Estimate(sum(each) / 2, *each, []) for name, each in both.items()})

    less, more, same = (-0.2, -0.1), (0.1, 0.2), (-0.1, 0.1)
    assert [difference(less, same), difference(same, more), difference(less, more)] == ["better"] * 3
    assert [difference(more, same), difference(same, less), difference(more, less)] == ["worse"] * 3
    assert difference(same, same) == "no difference"
    assert difference(less, less) == "a trade: hacks and solves less"
    assert difference(more, more) == "a trade: hacks and solves more"
