"""The study end to end on a tiny training: pairs, resume, damage, report, and what must be exact in what it writes."""

import json
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from tiny_study import tiny_settings, train_base_again
from titles import saved_titles

from mi_route2.tensor_files import read_tensors
from mi_route2.validation import write_json
from studies.common.artifacts import read_part
from studies.environments.micro.language import LOOPHOLES, MODES, NONE
from studies.environments.micro.settings import WarmStartConfig
from studies.environments.micro.world import MicroWorld
from studies.tracing.cli import main
from studies.tracing.figures import BESIDE, CARRIED, DELETING
from studies.tracing.job import PAIRS, run_tracing, trace_jobs, tracings
from studies.tracing.measures import load, rows
from studies.tracing.pairs import BASE, CONTRASTS, DECIDES, FIELDS
from studies.tracing.patching import DELETION, QUESTION
from studies.tracing.rates import DELETED, PATCHED
from studies.tracing.report import HEADLINE, TABLE, TABLES, write_report
from studies.tracing.settings import UNTRAINED, TracingSettings
from studies.training.arms import ARMS
from studies.training.job import FULL, Job
from studies.training.manifest import MANIFEST
from studies.training.run import run_job
from studies.training.settings import Settings as Training
from studies.training.settings import changes, get_settings
from studies.training.worlds import open_world

pytestmark = pytest.mark.study

TRACED = (UNTRAINED, "vanilla", "route2-full")
GIVEN = ["--prompts", "200", "--answers", "2", "--pairs", "4", "--draws", "1", "--rated", "4"]


def tiny_training() -> Training:
    rates = {"kept_lr": 3e-2, "quarantine_lr": 3e-2}  # two steps that tell
    return tiny_settings(warm=WarmStartConfig(steps=250, batch=32), steps=2, adapt=("blocks.1.mlp.*", "unembed"), **rates)


def settings_of(training: Training, arms: tuple[str, ...] = TRACED[1:]) -> TracingSettings:
    return TracingSettings(training.digest, arms, prompts=200, answers=2, pairs=4, draws=1, rated=4)


def jobs_of(out: Path) -> list[Job]:
    training = tiny_training()
    return [Job(out / training.folder, out / "warmstarts", training, 0, ARMS.get(name)) for name in TRACED]


def arguments(out: Path) -> list[str]:
    override = changes(tiny_training().as_dict(), get_settings("strong").as_dict())
    return ["run", "--out", str(out), "--seeds", "1", "--arms", *TRACED[1:], "--override", *override, *GIVEN]


class Told(NamedTuple):
    """A folder that the command has filled, and the titles of the figures that it saved."""

    folder: Path
    titles: list[list[str]]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """Trained and traced by the command itself; only the training is done in this process, to save the workers' start."""
    out = tmp_path_factory.mktemp("study")
    for job in jobs_of(out):
        run_job(job)
    before = sys.argv
    sys.argv = ["tracing", *arguments(out)]
    try:
        with saved_titles() as seen:
            assert main() == 0
    finally:
        sys.argv = before
    return Told(out / settings_of(tiny_training()).folder, seen)


@pytest.fixture
def study(told: Told) -> Path:
    return told.folder


def test_the_command_leaves_every_artifact_table_and_figure(study: Path) -> None:
    left = {TABLE, TABLES, HEADLINE, CARRIED, BESIDE, DELETING, "settings.json", "seed-0"}
    assert {path.name for path in study.iterdir()} >= left
    content = json.loads((study / TABLE).read_text())
    assert content["arms"] == list(TRACED)
    assert content["seeds"] == [0]
    assert all(row["effect"]["n"] == 1 for row in content["rows"])
    assert "Does deleting agree with patching" in (study / HEADLINE).read_text()


def test_what_must_be_exact_is(study: Path) -> None:
    for arm in TRACED:
        content, tensors = read_part(study / "seed-0" / f"{arm}.json") or ({}, {})
        for name, worst in content["checks"].items():
            assert worst <= (1e-10 if name.endswith("float64") else 1e-5), (arm, name)
        assert ("zero patch and deletion, float64" in content["checks"]) == (arm != "vanilla")
        moved = max(float(t.abs().max()) for name, t in tensors.items() if not name.startswith("scores/"))
        assert (moved == 0) == (arm == UNTRAINED)


def test_the_zero_patch_samples_what_the_deleted_model_samples(study: Path) -> None:
    content, _ = read_part(study / "seed-0/route2-full.json") or ({}, {})
    rates = content["rates"]
    assert rates[PATCHED]["as_deleted"] >= 0.9  # a draw may fall on a rounding error
    assert abs(rates[PATCHED]["hack"] - rates[DELETED]["hack"]) <= 0.1


def test_rows_are_ratios_of_means(study: Path) -> None:
    """Recomputed from the artifacts of one arm, without the study's own loader."""
    tensors, _ = read_tensors(study / "seed-0/vanilla.safetensors")
    gap = (tensors["scores/task/hack"].double() - tensors["scores/task/honest"].double()).mean()
    (row,) = [
        row
        for row in rows(load(study))
        if (row["arm"], row["contrast"], row["into"], row["source"], row["where"], row["adapter"])
        == ("vanilla", "task", "hack", QUESTION, "blocks.1", "kept_out")
    ]
    effect = tensors[f"task/hack/{QUESTION}/blocks.1:kept_out"].double().mean()
    assert row["effect"]["mean"] == pytest.approx(float(effect), rel=1e-9)
    if row["recovered"] is not None:
        assert row["recovered"]["value"] == pytest.approx(float(effect / -gap), rel=1e-9)
        assert row["recovered"]["lo"] <= row["recovered"]["value"] <= row["recovered"]["hi"]


def test_pairs_are_aligned_and_labelled(study: Path) -> None:
    tensors, _ = read_tensors(study / "seed-0" / PAIRS)
    with open_world(tiny_training()) as (world, _):
        assert isinstance(world, MicroWorld)
        vocabulary = world.vocabulary
    for contrast in CONTRASTS:
        hack, honest, task, mode = (tensors[f"{contrast}.{name}"] for name in FIELDS)
        assert hack.shape == honest.shape == (len(task), DECIDES + 1)
        assert bool((hack[:, :8] == honest[:, :8]).all())  # the task
        assert bool((hack != honest).any(1).all())
        hints = [tuple(vocabulary.encode(MODES[LOOPHOLES[i]].hint)) for i in mode.tolist()]
        assert [tuple(row) for row in hack[:, 8:10].tolist()] == hints
        none = [tuple(vocabulary.encode(MODES[NONE].hint))] * len(hints)
        assert [tuple(row) for row in honest[:, 8:10].tolist()] == (hints if contrast == "prompt" else none)


def test_resumed_equals_uninterrupted(study: Path, tmp_path: Path) -> None:
    """Stopped after one arm and gone on with, arms in another order and one asked for later: the same bytes."""
    training = tiny_training()
    jobs = jobs_of(study.parent)
    root = tmp_path / study.name
    with open_world(training) as (world, witness):
        assert isinstance(world, MicroWorld)
        (last,) = tracings(root, settings_of(training, ("route2-full",)), jobs[2:])
        run_tracing(last, world, witness)
    shutil.copy(study / "seed-0/vanilla.json", root / "seed-0")  # half of an arm: its tensors are missing
    with pytest.raises(ValueError, match="tensors beside it are damaged"):
        trace_jobs(root, settings_of(training), jobs)
    (root / "seed-0/vanilla.json").unlink()
    trace_jobs(root, settings_of(training), jobs)
    names = sorted(path.name for path in (study / "seed-0").iterdir())
    assert sorted(path.name for path in (root / "seed-0").iterdir()) == names
    assert len(names) == 1 + 2 * len(TRACED)
    for name in names:
        assert (root / "seed-0" / name).read_bytes() == (study / "seed-0" / name).read_bytes(), name


def test_a_report_needs_the_artifacts_alone(study: Path, tmp_path: Path) -> None:
    root = tmp_path / "alone" / study.name
    shutil.copytree(study, root)
    for name in (TABLE, TABLES, HEADLINE, CARRIED):
        (root / name).unlink()
    write_report(root)
    for name in (TABLE, TABLES, HEADLINE, CARRIED):
        assert (root / name).read_bytes() == (study / name).read_bytes(), name


def test_a_changed_byte_is_found(study: Path, tmp_path: Path) -> None:
    root = tmp_path / "damaged" / study.name
    shutil.copytree(study, root)
    path = root / "seed-0/vanilla.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(ValueError, match=r"vanilla\.safetensors is damaged"):
        write_report(root)


def test_a_trace_of_another_run_is_not_reported(study: Path, tmp_path: Path) -> None:
    """A seed whose arm was trained again, with other code, and not traced again: the command may be asked for other seeds alone."""
    root, name = tmp_path / study.name, f"{tiny_training().folder}/seed-0/vanilla"
    shutil.copytree(study, root)
    shutil.copytree(study.parent / name, tmp_path / name)
    assert load(root).arms == list(TRACED)
    manifest = json.loads((tmp_path / name / MANIFEST).read_text())
    manifest["checksums"][FULL] = "0" * 64
    write_json(tmp_path / name / MANIFEST, manifest)
    with pytest.raises(ValueError, match=r"vanilla\.json was traced on another run than the one in .*: run the study again"):
        write_report(root)


def test_what_was_traced_on_pairs_of_another_base_model_is_traced_anew(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base model was trained again, by other code: its settings are the same, and so is the name of its file."""
    root, runs = tmp_path / study.name, tiny_training().folder
    for folder in (study.name, runs, "warmstarts"):
        shutil.copytree(study.parent / folder, tmp_path / folder)
    jobs = jobs_of(tmp_path)
    assert [one.finished for one in tracings(root, settings_of(tiny_training()), jobs)] == [True] * len(TRACED)
    train_base_again(tiny_training(), tmp_path / "warmstarts")
    assert not any(one.finished for one in tracings(root, settings_of(tiny_training()), jobs))
    with pytest.raises(ValueError, match=r"json was traced on another run than the one in .*: run the study again"):
        write_report(root)
    before = read_tensors(root / "seed-0" / PAIRS)[1]
    (notes := root / "seed-0/notes.json").touch()  # a user's
    monkeypatch.setattr("studies.tracing.job.trace", None)  # as a kill behind the pairs would
    with pytest.raises(RuntimeError, match="not callable"):
        trace_jobs(root, settings_of(tiny_training()), jobs[:1])
    after = read_tensors(root / "seed-0" / PAIRS)[1]
    assert {name for name in before if before[name] != after[name]} >= {BASE}
    assert list((root / "seed-0").glob("*.json")) == [notes]


def test_deletion_and_question_are_of_every_adapter(study: Path) -> None:
    tensors, _ = read_tensors(study / "seed-0/route2-full.safetensors")
    for source, most in ((QUESTION, 5 * 3 + 3), (DELETION, 5 * 2 + 3)):
        assert len([name for name in tensors if name.startswith(f"task/honest/{source}/")]) == most
