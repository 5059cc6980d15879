"""Reading run folders: what is finished is intact, what is not is listed, what is missing is said in one sentence."""

import gzip
import json
from pathlib import Path

import pytest
from synthetic_study import change_eval, write_manifest, write_study

from studies.route2.report.load import load_runs, read_modes, read_rollouts

pytestmark = pytest.mark.study

ARMS = ("base", "vanilla", "absorb", "route2-full")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_study(tmp_path / "strong-0123abcd", ARMS, seeds=(0, 2), steps=4)


def test_every_finished_run_is_read(root: Path) -> None:
    runs = load_runs(root)
    assert set(runs.runs) == {(arm, seed) for arm in ARMS for seed in (0, 2)}
    assert runs.seeds == (0, 2)
    assert runs.unfinished == ()
    run = runs.runs["route2-full", 2]
    raw = json.loads((root / "seed-2/route2-full/eval.json").read_text())
    assert run.modes["sentinel"]["deploy"] == raw["modes"]["sentinel"]["deploy"]
    assert run.steps == 4
    assert run.spec.same_rule_filter == "filter-full"


def test_unfinished_runs_are_listed_and_left_out(root: Path) -> None:
    write_manifest(root / "seed-0/absorb", status="running")
    (root / "seed-2/absorb/manifest.json").unlink()
    runs = load_runs(root)
    assert runs.unfinished == ("seed-0/absorb", "seed-2/absorb")
    assert runs.of("absorb") == {}
    assert "absorb" not in runs.specs


def test_other_files_in_the_folder_are_none_of_its_business(root: Path) -> None:
    (root / "table.md").write_text("an earlier report")
    (root / "seed-0" / ".vanilla.part").mkdir()
    (root / "checkpoints").mkdir()
    assert len(load_runs(root).runs) == 8


@pytest.mark.parametrize("name", ["eval.json", "metrics.jsonl", "rollouts.jsonl.gz"])
def test_a_changed_file_is_refused_by_name(root: Path, name: str) -> None:
    path = root / "seed-0/vanilla" / name
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(ValueError, match=f"seed-0/vanilla/{name} does not match its checksum"):
        load_runs(root)


def test_large_files_may_stay_behind_but_those_that_are_read_may_not(root: Path) -> None:
    (root / "seed-0/vanilla/rollouts.jsonl.gz").unlink()
    assert len(load_runs(root).runs) == 8
    (root / "seed-0/vanilla/eval.json").unlink()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"eval\.json is missing from a finished run: delete .* and run this arm again"):
            load_runs(root)
        (root / "seed-0/vanilla/eval.json").mkdir(exist_ok=True)


def test_without_checksums_a_missing_log_is_still_noticed(root: Path) -> None:
    write_manifest(root / "seed-0/vanilla", checksums={})
    (root / "seed-0/vanilla/metrics.jsonl").unlink()
    with pytest.raises(ValueError, match=r"vanilla/metrics.jsonl is missing"):
        load_runs(root)


def test_base_needs_no_training_log(root: Path) -> None:
    write_manifest(root / "seed-0/base", checksums={})
    (root / "seed-0/base/metrics.jsonl").unlink()
    assert load_runs(root).runs["base", 0].steps == 0


def test_a_folder_without_runs_says_how_to_make_some(tmp_path: Path, root: Path) -> None:
    with pytest.raises(ValueError, match="is not a folder"):
        load_runs(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"settings.json does not hold settings of this study"):
        load_runs(tmp_path)
    for folder in sorted(root.glob("seed-*/*")):
        write_manifest(folder, status="running")
    with pytest.raises(ValueError, match=r"no finished run \(unfinished: seed-0/absorb, .*studies.route2 run"):
        load_runs(root)


def test_runs_of_different_settings_do_not_compare(root: Path) -> None:
    write_manifest(root / "seed-2/vanilla", settings_hash="other")
    with pytest.raises(ValueError, match="different settings"):
        load_runs(root)


def test_an_arm_is_the_same_on_every_seed(root: Path) -> None:
    same = {"role": "baseline", "baseline": None, "same_rule_filter": None, "ablation": None, "route": {}}
    write_manifest(root / "seed-2/vanilla", arm_spec={**same, "about": "in other words"})
    assert len(load_runs(root).of("vanilla")) == 2
    for changed in ({**same, "route": {"tau": 0.1}}, {**same, "role": "control", "baseline": "base"}):
        write_manifest(root / "seed-2/vanilla", arm_spec=changed)
        with pytest.raises(ValueError, match="vanilla is defined differently on seed 2"):
            load_runs(root)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"arm": "absorb"}, "manifest of another run"),
        ({"seed": 7}, "manifest of another run"),
        ({"arm_spec": {"role": "hero"}}, "one of method, baseline, control, bound, not 'hero'"),
    ],
)
def test_a_wrong_manifest_is_refused(root: Path, changes: dict, sentence: str) -> None:
    write_manifest(root / "seed-0/vanilla", **changes)
    with pytest.raises(ValueError, match=sentence):
        load_runs(root)


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("eval.json", "{", "eval.json is damaged .this is not JSON"),
        ("eval.json", "[]", "this is not a JSON object but"),
        ("eval.json", '{"modes": {}}', "has no mode run_tests, sentinel, stdout_marker, file_marker, none"),
        (
            "metrics.jsonl",
            '{"step": 1}\n{"step": NaN}\n',
            "metrics.jsonl, line 2: this JSON holds NaN.*: delete .*run this arm again",
        ),
    ],
)
def test_a_malformed_file_is_refused(root: Path, name: str, text: str, sentence: str) -> None:
    (root / "seed-0/vanilla" / name).write_text(text)
    write_manifest(root / "seed-0/vanilla")
    with pytest.raises(ValueError, match=sentence):
        load_runs(root)


@pytest.mark.parametrize("value", [-0.1, 1.2, None, True, "0.5"])
def test_what_is_no_rate_is_refused(root: Path, value: object) -> None:
    change_eval(root, "vanilla", 0, {"sentinel": value})
    with pytest.raises(ValueError, match=r"sentinel.deploy.hack must be a rate in \[0, 1\]"):
        load_runs(root)


def test_rollouts_come_back_in_order_and_a_cut_file_is_named(root: Path) -> None:
    folder = root / "seed-0/vanilla"
    assert [row["step"] for row in read_rollouts(folder)] == [1, 2, 3, 4, 5, 6]
    path = folder / "rollouts.jsonl.gz"
    whole = path.read_bytes()
    path.write_bytes(gzip.compress(gzip.decompress(whole).replace(b'"step": 1,', b'"step": 7,')))
    with pytest.raises(ValueError, match=r"rollouts.jsonl.gz does not match its checksum in manifest.json"):
        read_rollouts(folder)
    manifest = (folder / "manifest.json").read_bytes()
    (folder / "manifest.json").unlink()  # as in an unfinished run, whose rollouts can be shown too
    assert [row["step"] for row in read_rollouts(folder)] == [7, 2, 3, 4, 5, 6]
    path.write_bytes(whole[:-20])
    with pytest.raises(ValueError, match=r"cannot read .*rollouts.jsonl.gz .*: run the command again that began it"):
        read_rollouts(folder)
    path.unlink()
    (folder / "manifest.json").write_bytes(manifest)
    with pytest.raises(ValueError, match="show needs the rollouts"):
        read_rollouts(folder)


@pytest.mark.parametrize(
    ("known", "held_out", "said"),
    [
        (["a"], [1], r"held_out\.0 must be text, not 1"),
        (["a"], "bc", "held_out must be a tuple, each entry text, not 'bc'"),  # and no modes b and c
        (["a"], {"b": ["c"]}, "held_out must be a tuple"),
        (["a"], ["b", "a"], "modes must have different names, not a, b, a, none"),
        ([], ["a"], "a problem needs at least one known mode"),
    ],
)
def test_modes_are_lists_of_different_names(tmp_path: Path, known: object, held_out: object, said: str) -> None:
    with pytest.raises(ValueError, match=r"modes\.json is missing; run the command again"):
        read_modes(tmp_path)
    (tmp_path / "modes.json").write_text(json.dumps({"known": known, "held_out": held_out, "honest": "none"}))
    with pytest.raises(
        ValueError, match=rf"modes\.json has no valid modes \({said}.*\): run the command again that made this folder"
    ):
        read_modes(tmp_path)


def test_the_micro_worlds_modes_are_not_read_from_a_file(root: Path) -> None:
    """Or an edited file would decide of which modes every number is the mean."""
    modes = {"known": ["sentinel"], "held_out": ["run_tests", "stdout_marker", "file_marker"], "honest": "none"}
    for each in (modes, modes | {"held_out": []}):
        (root / "modes.json").write_text(json.dumps(each))
        with pytest.raises(ValueError, match=r"modes\.json is not of this study: .* so delete it"):
            load_runs(root)
