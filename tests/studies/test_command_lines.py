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
    "no workers": (["--workers", "0"], "workers must be at least 1, not 0"),
    "a place within a file": (["--out", "FILE/below"], "choose another --out"),
    "an option twice": (["--workers", "1", "--workers", "2"], "--workers is given twice: give it once"),
    "an option of a cluster": (["--partition", "cpu"], "add --executor slurm"),
    "no option of sbatch": (["--executor", "slurm", "--slurm", "qos"], "'qos' is no option of sbatch"),
    "an unknown preset": (["--preset", "strnog"], "unknown preset 'strnog': did you mean 'strong'?"),
    "an unknown setting": (["--override", "stpes=3"], "unknown setting 'stpes': did you mean 'steps'?"),
    "no number": (["--override", "kl=nan"], "kl must be a finite number, not 'nan'"),
    "a config file that is not there": (["--config", "NONE"], "--config NONE cannot be read (No such file"),
}
PRESETS = ("--preset", "--override", "--config")  # which lanes has not

OTHERS: dict[str, tuple[str, list[str], str]] = {
    "steering, too few tasks": ("steering", ["run", "--tasks", "1"], "tasks=1 must be at least 2, the tasks of the bit-exact"),
    "tracing, an unknown arm": ("tracing", ["run", "--arms", "vanila"], "unknown arm 'vanila': did you mean 'vanilla'?"),
    "tracing, blocks of no folder": ("tracing", ["blocks", "NONE"], "NONE"),
    **{
        f"report of {study}, {what}": (study, ["report", place], place)
        for study in STUDIES
        for what, place in (("no folder", "NONE"), ("a damaged folder", "DAMAGED"))
    },
}


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
    assert {".".join(path.parent.relative_to(root).parts) for path in files} <= HELPS.keys()


@pytest.mark.parametrize("what", OTHERS)
def test_every_other_command_is_as_clear(what: str, places: dict[str, str], capfd: pytest.CaptureFixture[str]) -> None:
    study, arguments, part = OTHERS[what]
    fails(study, arguments, places, part, capfd)
