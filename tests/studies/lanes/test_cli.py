"""The command line: everything from nothing, and one sentence for everything that cannot be."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from studies.lanes import cli
from studies.lanes.arms import ARMS
from studies.lanes.claims import CLAIMS
from studies.lanes.report import publish
from studies.lanes.scale import Scale, timings
from studies.lanes.settings import Settings, large

pytestmark = pytest.mark.study


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["lanes", *arguments])
    return cli.main()


def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert call(monkeypatch, *arguments) == 2
    text = capsys.readouterr().err
    assert text.startswith("error: ")
    assert text.count("\n") == 1
    assert "Traceback" not in text
    return text


def test_the_report_is_that_of_the_artifacts(
    study: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "report", str(study)) == 0
    printed = capsys.readouterr().out
    content = json.loads((study / "claims.json").read_text())
    made = [claim for claim in CLAIMS if not claim.full]
    assert [row["id"] for row in content["claims"]] == [claim.id for claim in made]
    assert all(claim.words in printed for claim in made)
    arms = (study / "arms.md").read_text()
    assert [name for name in ARMS if f"| {name} " in arms] == [name for name in ARMS if not ARMS[name].full]
    assert all(f"| ({name}) " in arms for name in ("unigram", "bigram"))


def test_what_cannot_be_is_refused_in_one_sentence(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ("run", "--quick", "--out", str(tmp_path / "runs"))
    assert "point at a folder that `run` made" in refusal(monkeypatch, capsys, "report", str(tmp_path))
    assert "there is no folder" in refusal(monkeypatch, capsys, *run, "--text", str(tmp_path / "none"))
    assert "workers must be at least 1" in refusal(monkeypatch, capsys, *run, "--text", str(texts), "--workers", "0")
    assert "seeds" in refusal(monkeypatch, capsys, *run, "--seeds", "none")
    assert "must be at least 1" in refusal(monkeypatch, capsys, *run, "--text", str(texts), "--dev.steps", "0")
    assert "6 or more" in refusal(monkeypatch, capsys, "scale", "--device", "cpu", "--layers", "3")
    assert "cannot be used here" in refusal(monkeypatch, capsys, "scale", "--device", "abacus")


def test_arms_are_listed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "arms") == 0
    assert "wide-head-bias" in capsys.readouterr().out


def test_help_teaches(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        call(monkeypatch, "--help")
    assert ended.value.code == 0
    assert "run --quick" in capsys.readouterr().out


def test_publishing_copies_a_whole_study_and_refuses_a_trial(study: Path, tiny: Settings, tmp_path: Path) -> None:
    trial = tmp_path / "trial"
    trial.mkdir()
    replace(tiny, profile="quick").write(trial)
    with pytest.raises(ValueError, match="is a trial of the profile 'quick'"):
        publish(trial, tmp_path / "results")
    assert not (tmp_path / "results").exists()
    place = publish(study, tmp_path / "results")
    listed = json.loads((place / "provenance.json").read_text())["files"]
    assert listed.keys() == {path.name for path in place.iterdir()} - {"provenance.json"}
    assert {"headline.md", "tables.md", "claims.json", "arms.png", "symmetry.png"} <= listed.keys()
    assert (place / "headline.md").read_text().startswith("6 blocks of 8 features")


@pytest.mark.parametrize("two", [("--quick", "--large"), ("--quick", "--full"), ("--full", "--large")])
def test_a_study_has_one_profile(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], two: tuple[str, str]) -> None:
    assert f"give one of {' and '.join(two)}" in refusal(monkeypatch, capsys, "run", *two)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is an accelerator here")
def test_the_large_study_without_an_accelerator_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], texts: Path, tmp_path: Path
) -> None:
    said = refusal(monkeypatch, capsys, "run", "--large", "--text", str(texts), "--out", str(tmp_path / "runs"))
    assert "there is no accelerator here" in said
    assert not (tmp_path / "runs").exists()


def test_the_large_study_is_the_same_one_at_another_size(tmp_path: Path) -> None:
    """Its settings are whole and come back from their file; its model is the one of 12 blocks of 512 features."""
    settings = large("0" * 64)
    settings.write(tmp_path)
    assert Settings.read(tmp_path) == settings
    assert settings.folder.startswith("lanes-large-")
    config = ARMS["shipped"].config(settings.size)
    assert (config.layers, config.d_model, config.lane_start) == (12, 512, 8)
    assert (settings.training.device, settings.training.precision, settings.training.compile) == ("cuda", "bf16", True)


TINY = Scale(
    layers=6,
    d_model=8,
    heads=2,
    batch=2,
    length=16,
    rounds=2,
    steps=1,
    warmup=1,
    precision="float32",
    device="cpu",
    arms=("shipped",),
)


def test_scale_times_an_arm_beside_one_stream(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replace(TINY, text=texts, out=tmp_path / "scale.json")()
    (row,) = json.loads((tmp_path / "scale.json").read_text())["timings"]
    assert row["arm"] == "shipped"
    assert row["low"] <= row["ratio"] <= row["high"]
    assert "tokens/s" in capsys.readouterr().out


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_scale_trains_both_models_on_the_same_batches(texts: Path, precision: str) -> None:
    """An arm that is timed beside itself has the same losses: what differs between two arms is the arm."""
    one = replace(TINY, text=texts, precision=precision, steps=4, arms=("gptj", "frozen"))  # pyright: ignore[reportArgumentType]
    rows, again = timings(one), timings(one)
    assert [row.losses for row in rows] == [row.losses for row in again]
    assert rows[0].losses[1] == rows[1].losses[1]
    assert len({*rows[0].losses, *rows[1].losses}) == 3 or precision == "bf16"  # in which few steps leave few bits apart


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is an accelerator here")
def test_scale_without_an_accelerator_says_what_to_do(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert "pass --device cpu" in refusal(monkeypatch, capsys, "scale")
