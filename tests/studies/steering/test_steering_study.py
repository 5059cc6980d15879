"""The study from nothing to its figures, what it may not know, and that it can be ended at any part."""

import json
import re
import shutil
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_steering import Made
from tiny_study import train_base_again
from titles import saved_titles, untitled

from studies.common.artifacts import read_part, write_part
from studies.environments.micro.language import split
from studies.environments.micro.world import MicroWitness
from studies.environments.protocol import Samples
from studies.steering.cells import ON, Bench
from studies.steering.figures import FIGURES
from studies.steering.fitting import collect, fit
from studies.steering.job import BASE, parts_of, run_steering
from studies.steering.report import write_report
from studies.steering.results import Draws, load_study, metrics
from studies.steering.settings import SUBJECTS
from studies.steering.study import run_study
from studies.training.job import finished_policy

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


# cells and numbers


def test_an_untrained_quarantine_is_no_quarantine(made: Made) -> None:
    found = made.job("untrained").read("quarantine")
    assert found is not None
    _, tensors = found
    for name, outcomes in tensors.items():
        assert torch.equal(outcomes, tensors[ON]), name


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
