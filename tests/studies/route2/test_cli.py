"""A mistake on the command line costs one sentence and exit code 2: no traceback, no training, nothing written."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import studies.route2.cli as cli
from studies.common.workers import exclusive
from studies.environments.micro.pairs import make_pairs
from studies.environments.micro.settings import get_world
from studies.environments.protocol import write_pairs
from studies.training.arms import ARMS
from studies.training.cost import Gpu, cost_table, hours
from studies.training.job import Job
from studies.training.manifest import MANIFEST
from studies.training.settings import CHAT_PRESETS, PRESETS, ChatModel, Settings, override, read_config
from studies.training.worlds import MemoryPlan

ROOT = Path(__file__).parents[3]
Main = Callable[..., tuple[int, str, str]]


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Main:
    """The command line, in this process: exit code, stdout, stderr. It must not come to training."""

    def trained(*_: object, **__: object) -> list[str]:
        raise AssertionError("the command went on to training")

    def call(*arguments: object, run_training: Callable[..., list[str]] = trained) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["route2", *map(str, arguments)])
        monkeypatch.setattr("studies.training.run.run_jobs", run_training)
        capfd.readouterr()
        code = cli.main()
        output, errors = capfd.readouterr()
        return code, output, errors

    return call


def one_sentence(result: tuple[int, str, str], *parts: str) -> None:
    code, _, errors = result
    assert code == 2
    assert len(errors.splitlines()) == 1
    assert errors.startswith("error: ")
    for part in parts:
        assert part in errors


BAD = {
    "an unknown arm": (
        ["--arms", "vanilla", "vanila"],
        "unknown arm 'vanila': did you mean 'vanilla'? choose from vanilla, absorb",
    ),
    "seeds, a word": (
        ["--seeds", "three"],
        "'three' names no seeds: give a number (3 means 0, 1, 2), a range (0-7) or a list (4,9)",
    ),
    "seeds, too many": (["--seeds", "99999999999"], "'99999999999' names more than 10000 seeds"),
    "no workers": (["--workers", "0"], "workers must be at least 1, not 0"),
    "an unknown setting": (
        ["--override", "stpes=3"],
        "unknown setting 'stpes': did you mean 'steps'? choose from world, adapt, kept",
    ),
    "a word for a number": (["--override", "steps=many"], "steps must be a valid integer, unable to parse"),
    "a LoRA without a rank": (["--override", "kept_rank=none"], "a LoRA kept adapter needs a rank"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_argument_is_one_sentence(tmp_path: Path, main: Main, what: str) -> None:
    arguments, part = BAD[what]
    one_sentence(main("run", "--out", tmp_path / "runs", *arguments), part)
    assert list(tmp_path.iterdir()) == []


def test_a_preset_of_chat_models_brings_its_sizes_and_one_of_the_micro_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    settings = cli.RunArms(model=tmp_path, preset="qwen3-4b").settings()
    assert settings.chat is not None
    assert (settings.preset, settings.world) == ("qwen3-4b", "leetcode")
    assert (settings.prompts * settings.group, settings.chat.max_new) == (256, 1536)
    assert cli.RunArms(model=tmp_path).settings().preset == "chat"
    assert cli.RunArms().settings() == PRESETS["strong"]
    with pytest.raises(ValueError, match="--preset weak is of the micro model: with --model give one of chat, smollm2, qwen3-4b"):
        cli.RunArms(model=tmp_path, preset="weak").settings()
    with pytest.raises(ValueError, match="--preset qwen3-4b needs --model"):
        cli.RunArms(preset="qwen3-4b").settings()


def test_the_page_has_the_predicted_costs() -> None:
    """Operations by hand for one cell: a step of 256 rollouts of 1300 tokens at 6 P each, their prompts at 2 P, and 4 decodings."""
    assert cost_table() in Path("docs/scale.md").read_text()
    settings, how = CHAT_PRESETS["qwen3-4b"]
    memory = MemoryPlan({"weights": 8_000_000_000, "vLLM": 8_000_000_000 + 3584 * 1000}, None)
    operations = 256 * 4e9 * (1300 * 6 + 600 * 2) / (0.4 * 990e12)
    decoding = 4 * 1536 * (8e9 + 950 * 1000) / 3.35e12
    found = hours(settings, ChatModel("", "", **how), memory, 0, Gpu())
    assert found == pytest.approx(200 * (operations + decoding) / 3600)


def test_a_config_file_says_what_overrides_say(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('steps = 5\nkept_lr = 2e-3\nkl = 0\nadapt = ["blocks.*.mlp.*", "unembed"]\nmicro = "none"\n[warm]\nsteps = 7\n')
    words = ("steps=5", "kept_lr=2e-3", "kl=0", "adapt=blocks.*.mlp.*,unembed", "micro=none", "warm.steps=7")
    settings = PRESETS["weak"]
    assert override(settings, (), path) == override(settings, words) != settings
    assert override(settings, ("steps=6",), path).steps == 6


WRONG_CONFIG = {
    "too many brackets": (f"steps = {'[' * 5000}1{']' * 5000}", "is nested too deeply: write lines as steps = 100"),
    "too many tables": (f"[{'.'.join('a' * 5000)}]\nx = 1", "unknown setting 'a.a': choose from world, adapt, kept"),
    "a list of lists": ("betas = [[0.9, 0.99]]", "betas.0 must be a valid number, not [0.9, 0.99]"),
    "a list of tables": ("[[warm]]\nsteps = 3", "unknown setting 'warm': did you mean 'warm.lr'? choose from world, adapt, kept"),
    "true for a number": ("steps = true", "steps must be a valid integer, unable to parse string as an integer, not 'true'"),
    "a name in two ways": ('"warm.steps" = 4\n[warm]\nsteps = 3', "gives warm.steps twice: remove one of them"),
    "a comma in an entry": ('adapt = ["blocks.*,unembed", "c"]', "'blocks.*,unembed'"),
    "a name with an equals sign": ('"adapt=unembed" = "x"', "unknown setting 'adapt=unembed'"),
    "a number of 5000 digits": (f"steps = {'9' * 5000}", "is not a TOML file of settings"),
}


@pytest.mark.parametrize("what", WRONG_CONFIG)
def test_a_wrong_config_file_is_one_sentence(tmp_path: Path, main: Main, what: str) -> None:
    text, part = WRONG_CONFIG[what]
    path = tmp_path / "mine.toml"
    path.write_text(text)
    one_sentence(main("run", "--out", tmp_path / "runs", "--config", path), part)
    assert list(tmp_path.iterdir()) == [path]


def test_a_config_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("steps = 5", encoding="utf-8-sig")
    assert read_config(path) == {"steps": 5}


def test_a_value_of_another_type_is_refused_by_the_parser(tmp_path: Path, main: Main, capfd: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--workers", "two"], ["--wrokers", "2"], ["--report", "--nothing"]):
        with pytest.raises(SystemExit) as stopped:
            main("run", "--out", tmp_path / "runs", *arguments)
        assert stopped.value.code == 2
        assert "Traceback" not in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (b"[[pair]\n", "cannot read persona pairs from"),
        (b"\xff\xfe", "cannot read persona pairs from"),
        (b"", "is not a file of pairs: write [[pair]] tables of clean, hack, prompt"),
        (b"pair = []\n", "has no pair: write at least one"),
        (b"[[pair]]\nprompt = ' add'\nhack = 'no such token'\nclean = '```'\n", "no token matches 'no such token'"),
        (b"[[pair]]\nprompt = '" + b" add" * 40 + b"'\nhack = '```'\nclean = '``````'\n", "longer than 32 tokens"),
    ],
)
def test_a_pairs_file_that_cannot_be_read_is_refused_before_any_work(tmp_path: Path, main: Main, text: bytes, part: str) -> None:
    pairs = tmp_path / "pairs.toml"
    pairs.write_bytes(text)
    one_sentence(main("run", "--out", tmp_path / "runs", "--pairs", pairs), part, "pairs.toml")
    assert list(tmp_path.iterdir()) == [pairs]


def test_a_missing_pairs_file_is_refused_and_a_good_one_is_not(tmp_path: Path, main: Main) -> None:
    one_sentence(main("run", "--out", tmp_path / "runs", "--pairs", tmp_path / "none.toml"), "there is no pairs file at")
    one_sentence(main("run", "--out", tmp_path / "runs", "--pairs", tmp_path), "there is no pairs file at")
    assert list(tmp_path.iterdir()) == []
    write_pairs(make_pairs(get_world("strong"), 3), tmp_path / "good.toml")
    seen: list[Path | None] = []

    def look(jobs, *_, **__):
        seen.extend({job.pairs for job in jobs})
        return []

    arguments = ("run", "--out", tmp_path / "runs", "--pairs", tmp_path / "good.toml", "--no-report")
    assert main(*arguments, run_training=look)[0] == 0
    assert seen == [tmp_path / "good.toml"]
    write_pairs(make_pairs(get_world("strong"), 4), tmp_path / "other.toml")
    job = Job(tmp_path, tmp_path, Settings(), 0, ARMS["vanilla"], tmp_path / "good.toml")
    assert job.identity != Job(tmp_path, tmp_path, Settings(), 0, ARMS["vanilla"], tmp_path / "other.toml").identity


def test_an_out_folder_that_cannot_be_written_is_refused(tmp_path: Path, main: Main) -> None:
    (tmp_path / "file").write_text("mine")
    one_sentence(main("run", "--out", tmp_path / "file"), "cannot write to", "choose another --out")
    one_sentence(main("run", "--out", tmp_path / "file" / "below"), "cannot write to", "(Not a directory)")
    one_sentence(main("run", "--out", "/proc/runs"), "cannot write to", "choose another --out")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_a_second_command_on_one_folder_is_refused(tmp_path: Path, main: Main) -> None:
    with exclusive(tmp_path / PRESETS["strong"].folder):
        before = sorted(tmp_path.rglob("*"))
        one_sentence(main("run", "--out", tmp_path), "another process is writing to", "wait for it, or choose another --out")
        assert sorted(tmp_path.rglob("*")) == before


MANIFEST_OF_ANOTHER: dict[str, object] = {
    "arm": "vanilla", "seed": 0, "status": "finished", "identity": "0", "settings_hash": "0", "arm_spec": {},
    "versions": {}, "platform": {}, "checksums": {},
}  # fmt: skip


def test_a_folder_of_another_run_and_a_damaged_manifest_are_refused(tmp_path: Path, main: Main) -> None:
    place = tmp_path / PRESETS["strong"].folder / "seed-0" / "vanilla" / MANIFEST
    place.parent.mkdir(parents=True)
    for text, part in (
        (json.dumps(MANIFEST_OF_ANOTHER), "under other settings; choose another --out"),
        (json.dumps(MANIFEST_OF_ANOTHER | {"seed": "0"}), "seed must be a valid integer, not '0'"),
        (json.dumps({"status": "finished", "identity": "0"}), "arm: Field required"),
        ("[1]", "is damaged"),
        ("[" * 100_000, "nested too deeply"),
        ('{"seed": 0, "seed": 1}', "has the key 'seed' twice"),
    ):
        place.write_text(text)
        one_sentence(main("run", "--out", tmp_path, "--arms", "vanilla"), part)
        assert place.read_text() == text
        assert not (place.parents[2] / "settings.json").exists()


def test_failures_are_told_in_one_sentence_and_ctrl_c_in_another(
    tmp_path: Path, main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> list[str]:
        raise KeyboardInterrupt

    told = main("run", "--out", tmp_path, run_training=lambda *_, **__: ["a failed: x", "b failed: y"])
    one_sentence(told, "a failed: x; b failed: y")
    code, _, errors = main("run", "--out", tmp_path, run_training=interrupted)
    assert code == 130
    assert errors.strip() == "stopped; the same command goes on from the last checkpoints"
    monkeypatch.setattr("studies.environments.chat.make_tiny_model", interrupted)  # which keeps no checkpoint
    code, _, errors = main("tiny-model", tmp_path / "model", "--world", "functions")
    assert code == 130
    assert errors.strip() == "stopped; the same command begins anew"


def test_commands_that_read_runs_name_what_is_missing(tmp_path: Path, main: Main) -> None:
    one_sentence(main("report", tmp_path / "none"), "none is not a folder: give the run folder")
    one_sentence(main("report", tmp_path), "holds no finished run")
    one_sentence(main("contrasts", tmp_path / "none.toml"), "cannot read contrasts from")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.process
def test_the_real_command_says_it_on_stderr_and_exits_with_2(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "studies.route2", "run", "--out", str(tmp_path / "runs"), "--override", "kept=lroa"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    one_sentence((result.returncode, result.stdout, result.stderr), "kept must be 'svd' or 'lora', not 'lroa'")
    assert result.stdout == ""
    assert list(tmp_path.iterdir()) == []
