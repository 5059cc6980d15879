"""The command line: everything from nothing, and one sentence for everything that cannot be."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from studies.lanes import cli
from studies.lanes.arms import ARMS
from studies.lanes.measures import Subject, routing
from studies.lanes.report import command, publish
from studies.lanes.report.claims import CLAIMS
from studies.lanes.report.estimates import Estimate
from studies.lanes.settings import Settings, open_text, settings_of
from studies.lanes.study import load
from studies.lanes.train import build

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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ("run", "--quick", "--out", str(tmp_path / "runs"))
    assert "give a folder that `run` created" in refusal(monkeypatch, capsys, "report", str(tmp_path))
    assert "there is no folder" in refusal(monkeypatch, capsys, *run, "--text", str(tmp_path / "none"))


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
    with pytest.raises(ValueError, match=r"is a trial \(profile 'quick'\)"):
        publish(trial, tmp_path / "results")
    assert not (tmp_path / "results").exists()
    place = publish(study, tmp_path / "results")
    listed = json.loads((place / "provenance.json").read_text())["files"]
    assert listed.keys() == {path.name for path in place.iterdir()} - {"provenance.json"}
    assert {"headline.md", "tables.md", "claims.json", "growth.png", "symmetry.png"} <= listed.keys()
    assert (place / "headline.md").read_text().startswith("6 blocks of 8 features")


def test_the_published_command_makes_the_study(texts: Path) -> None:
    own, usual = open_text(texts).sha256, open_text(None).sha256
    assert command(settings_of("full", usual, {}), [0, 1]) == "python -m studies.lanes run --full --seeds 0-1"
    assert command(settings_of("default", own, {}), [3]) == "python -m studies.lanes run --seeds 3-3 --text FOLDER"
    changed = replace(settings_of("default", own, {}), train_bytes=7)
    assert command(changed, [3]) == "studies.lanes.study.run_study, with the settings in settings.json"


def test_a_folder_that_is_no_seed_is_not_read(tiny: Settings, tmp_path: Path) -> None:
    folder = tmp_path / tiny.folder
    (folder / "arms" / "gptj" / "seed-0-old").mkdir(parents=True)
    tiny.write(folder)
    with pytest.raises(ValueError, match="contains no finished study"):
        load(folder)
    with pytest.raises(ValueError, match=f"are those of {tiny.folder}: do not rename"):
        load(folder.rename(tmp_path / "mine"))


def test_routing_that_never_moved_is_nowhere_apart(tiny: Settings, texts: Path) -> None:
    model = build(ARMS["shipped"].config(tiny.size), 0)
    content, _ = routing(Subject(tiny, open_text(texts), ARMS["shipped"], 0, model))
    assert (content["apart"], content["pattern"]) == (None, 0.0)
    assert Estimate.of([content["apart"]], "weight").value is None


def test_a_study_has_one_profile(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--quick and --full exclude each other" in refusal(monkeypatch, capsys, "run", "--quick", "--full")


def test_a_device_that_is_not_here_is_refused_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], texts: Path, tmp_path: Path
) -> None:
    given = ("run", "--quick", "--text", str(texts), "--out", str(tmp_path / "runs"), "--dev.device")
    for device in ("abacus", "tpu", "meta", "cuda:99"):
        assert f"the device '{device}' cannot be used here: choose from cpu" in refusal(monkeypatch, capsys, *given, device)
    assert not (tmp_path / "runs").exists()


def test_too_little_text_is_refused_before_anything_is_trained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], texts: Path, tmp_path: Path
) -> None:
    given = ("run", "--quick", "--text", str(texts), "--out", str(tmp_path / "runs"))
    assert re.search(
        r"the split 'test' has \d+ tokens, but its pieces need 6144: give more text", refusal(monkeypatch, capsys, *given)
    )
    assert not (tmp_path / "runs").exists()
