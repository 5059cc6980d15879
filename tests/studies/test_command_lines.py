"""A mistake on the command line of any study costs one sentence and exit code 2: no traceback, nothing written."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

STUDIES = ("route2", "steering", "tracing", "lanes")
NAMES = {"route2": ["--arms", "vanilla"], "steering": [], "tracing": [], "lanes": ["--text", "TEXT"]}
RUN: dict[str, tuple[list[str], str]] = {
    "no seeds": (["--seeds", "0"], "'0' names no seeds: give a number"),
    "seeds, a word": (["--seeds", "all"], "'all' names no seeds"),
    "no workers": (["--workers", "0"], "workers must be at least 1, not 0"),
    "fewer than no workers": (["--workers", "-1"], "workers must be at least 1, not -1"),
    "a file for a folder": (["--out", "FILE"], "choose another --out"),
    "a place within a file": (["--out", "FILE/below"], "choose another --out"),
    "an unknown preset": (["--preset", "strnog"], "unknown preset 'strnog': did you mean 'strong'?"),
    "a path for a preset": (["--preset", "../strong"], "unknown preset '../strong'"),
    "a setting without a value": (["--override", "steps"], "--override steps has no value: write steps=VALUE (it is 80 now)"),
    "an unknown setting": (["--override", "stpes=3"], "unknown setting 'stpes': did you mean 'steps'?"),
    "no number": (["--override", "kl=nan"], "kl must be a finite number of at least 0, not 'nan'"),
    "a setting twice": (["--override", "kl=1", "steps=3", "kl=2"], "--override gives kl twice: remove one of them"),
    "an option twice": (["--override", "kl=1", "--override", "steps=3"], "--override is given twice: give it once"),
    "digits in groups": (["--override", "kl=1_0"], "kl must be a finite number of at least 0, not '1_0'"),
    "half a step": (["--override", "steps=50.5"], "steps must be a whole number of at least 1, not '50.5'"),
    "a config file that is not there": (["--config", "NONE"], "--config NONE cannot be read (No such file"),
    "a config file of something else": (["--config", "FILE"], "--config FILE is not a TOML file of settings (Expected '='"),
}
PRESETS = ("--preset", "--override", "--config")  # which lanes has not

OTHERS: dict[str, tuple[str, list[str], str]] = {
    "full, no seeds": ("route2", ["full", "--seeds", "0"], "'0' names no seeds"),
    "full, no workers": ("route2", ["full", "--workers", "0"], "workers must be at least 1"),
    "a tiny model in a negative time": ("route2", ["tiny-model", "NONE", "--steps", "-1"], "steps must be at least 0"),
    "show, every 0": ("route2", ["show", "EMPTY", "--every", "0"], "every must be at least 1, not 0"),
    "show, a seed that is none": ("route2", ["show", "DAMAGED"], "is not JSON"),
    "watch, too few": ("route2", ["watch", "EMPTY", "--per-mode", "0"], "per-mode must be at least"),
    "probes, too few": ("route2", ["probes", "EMPTY", "--per-mode", "0"], "per-mode must be at least"),
    "probes, an unknown arm": ("route2", ["probes", "EMPTY", "--arm", "vanila"], "unknown arm 'vanila': did you mean 'vanilla'?"),
    "steering, no tasks": ("steering", ["run", "--tasks", "0"], "tasks must be at least 1, not 0"),
    "steering, too few tasks": ("steering", ["run", "--tasks", "1"], "tasks=1 must be at least 2, the tasks of the bit-exact"),
    "tracing, an unknown arm": ("tracing", ["run", "--arms", "vanila"], "unknown arm 'vanila': did you mean 'vanilla'?"),
    "tracing, blocks of an unknown arm": ("tracing", ["blocks", "NONE", "--arms", "vanila"], "did you mean 'vanilla'?"),
    "tracing, no groups of blocks": ("tracing", ["blocks", "NONE", "--groups", "0"], "groups must be at least 1, not 0"),
    "tracing, blocks of no folder": ("tracing", ["blocks", "NONE"], "NONE"),
    "tracing, an arm twice": ("tracing", ["run", "--arms", "vanilla", "vanilla"], "arms must be given once each"),
    "steering, a partition of none": ("steering", ["run", "--partition", "cpu"], "add --executor slurm"),
    "tracing, no option of sbatch": ("tracing", ["run", "--executor", "slurm", "--slurm", "qos"], "'qos' is no option of sbatch"),
    "lanes, a partition of none": ("lanes", ["run", "--text", "TEXT", "--partition", "cpu"], "add --executor slurm"),
    "lanes, no option of sbatch": (
        "lanes", ["run", "--text", "TEXT", "--executor", "slurm", "--slurm", "qos"], "'qos' is no option of sbatch",
    ),
    "tracing, no draws": ("tracing", ["run", "--draws", "0"], "draws must be at least 1, not 0"),
    "lanes, no steps": ("lanes", ["run", "--quick", "--text", "TEXT", "--dev.steps", "0"], "steps must be at least 1, not 0"),
    "sandbox, no such file": ("sandbox", ["run", "NONE"], "there is no script at NONE"),
    "sandbox, no time": ("sandbox", ["run", "FILE", "--seconds", "nan"], "seconds"),
    "leetcode, no data": ("environments.leetcode", ["report", "--data", "NONE", "--out", "NONE"], "NONE"),
    **{
        f"{command} of {study}, {what}": (study, [command, place], place)
        for study in STUDIES
        for command in (("report", "publish") if study == "route2" else ("report",))
        for what, place in (("no folder", "NONE"), ("an empty folder", "EMPTY"), ("a damaged folder", "DAMAGED"))
    },
}  # fmt: skip


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    """Words that stand for paths, and what is there."""
    for folder in ("empty", "damaged", "text"):
        (tmp_path / folder).mkdir()
    for name in ("settings.json", "run.json", "training.json"):
        (tmp_path / "damaged" / name).write_text("{")
    (tmp_path / "file").write_text("mine")
    for i in range(40):
        (tmp_path / "text" / f"{i}.txt").write_text(f"text number {i}, with a few words that can be read. " * 200)
    return {name.upper(): str(tmp_path / name) for name in ("empty", "damaged", "text", "file", "none")}


def filled(text: str, places: dict[str, str]) -> str:
    for name, path in places.items():
        text = text.replace(name, path)
    return text


def fails(study: str, arguments: list[str], places: dict[str, str], part: str, told: pytest.CaptureFixture[str]) -> None:
    root = Path(places["EMPTY"]).parent
    before = sorted(root.rglob("*"))
    module = importlib.import_module(f"studies.{study}.{'cli' if study in STUDIES else '__main__'}")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root / "empty")  # where a run without --out would write
        patch.setattr(sys, "argv", [study, *(filled(argument, places) for argument in arguments)])
        assert module.main() == 2
    errors = told.readouterr().err
    assert len(errors.splitlines()) == 1
    assert errors.startswith("error: ")
    assert filled(part, places) in errors
    assert sorted(root.rglob("*")) == before


@pytest.mark.parametrize(
    ("study", "what"),
    [(study, what) for what, (arguments, _) in RUN.items() for study in STUDIES if study != "lanes" or arguments[0] not in PRESETS],
)
def test_a_wrong_run_is_one_sentence(study: str, what: str, places: dict[str, str], capfd: pytest.CaptureFixture[str]) -> None:
    arguments, part = RUN[what]
    fails(study, ["run", *NAMES[study], *arguments], places, part, capfd)


HELPS: dict[str, list[str]] = {
    **{f"studies.{study}": ["", *importlib.import_module(f"studies.{study}.cli").COMMANDS] for study in STUDIES},
    "studies.benchmarks": [""],
    "mi_route2.serve": [""],
    "mi_route2.serve.soak": [""],
}
"""Command lines: module -> its subcommands."""
SLOW = ("torch", "transformers", "transformer_lens", "nnsight", "matplotlib", "scipy", "sklearn", "pandas", "numba", "fastapi")
HELP = """
import contextlib, io, runpy, sys
for line in sys.stdin.read().splitlines():
    sys.argv = ["", *line.split()[1:], "--help"]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        runpy.run_module(line.split()[0], run_name="__main__", alter_sys=True)
    print(line, len(said.getvalue()), *(name for name in {SLOW} if name in sys.modules), sep=",")
"""


@pytest.mark.process
def test_no_help_waits_for_a_slow_library() -> None:
    """The modules that build a parser import none of them. ``import torch`` alone takes longer than all of a help may."""
    lines = [f"{module} {command}".strip() for module, commands in HELPS.items() for command in commands]
    code = HELP.replace("{SLOW}", repr(SLOW))
    done = subprocess.run([sys.executable, "-c", code], input="\n".join(lines), capture_output=True, text=True, check=True)
    told = [line.split(",") for line in done.stdout.splitlines()]
    assert [(line, slow) for line, _, *slow in told] == [(line, []) for line in lines], done.stderr
    assert all(int(length) > 100 for _, length, *_ in told)


def test_every_command_line_is_among_them() -> None:
    """Every package that runs."""
    root = Path(__file__).parents[2]
    files = [path for name in ("mi_route2", "studies", "tests") for path in (root / name).rglob("__main__.py")]
    assert {".".join(path.parent.relative_to(root).parts) for path in files} < HELPS.keys()


@pytest.mark.parametrize("what", OTHERS)
def test_every_other_command_is_as_clear(what: str, places: dict[str, str], capfd: pytest.CaptureFixture[str]) -> None:
    study, arguments, part = OTHERS[what]
    fails(study, arguments, places, part, capfd)
