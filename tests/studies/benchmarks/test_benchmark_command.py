"""The common part of all benchmarks: a child whose allocator keeps memory, errors in one sentence, help from the docstring."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from studies.benchmarks import __main__ as command
from studies.benchmarks.options import BENCHMARKS, HostsOptions

benchmarks = pytest.mark.parametrize("name", [name for name in BENCHMARKS if name not in ("cost", "vllm_sampler")])
"""Those that have rounds, and need nothing that is not here."""


def main(name: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["benchmarks", name, *arguments])
    return command.main()


def test_every_benchmark_is_in_the_table() -> None:
    files = Path(command.__file__).parent.glob("*.py")
    assert {path.stem for path in files if "\ndef run(options: " in path.read_text(encoding="utf-8")} == BENCHMARKS.keys()


@benchmarks
def test_measuring_runs_in_a_child_whose_allocator_keeps_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def run(command: list[str], env: dict[str, str], check: bool) -> SimpleNamespace:
        calls.append((command, env))
        return SimpleNamespace(returncode=7)

    monkeypatch.setattr(command.subprocess, "run", run)
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_", raising=False)
    given = ["--quick", "--device", "cpu"] if name == "device" else ["--quick"]
    assert main(name, monkeypatch, *given) == 7
    ((child, env),) = calls
    assert child[child.index("-m") :] == ["-m", "studies.benchmarks", name, *given]
    assert int(env["MALLOC_MMAP_THRESHOLD_"]) == 2**26 < int(env["MALLOC_TRIM_THRESHOLD_"])
    assert env["OMP_NUM_THREADS"] == "1"


@benchmarks
def test_errors_are_sentences(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    wrong = {
        "at least 3": ("--rounds", "2"),
        "--seed is given twice": ("--seed", "1", "--seed=2"),
        "no folder": ("--out", str(tmp_path / "none" / "x.json")),
    }
    for words, arguments in {**wrong, "is a folder: give a file": ("--out", str(tmp_path))}.items():
        assert main(name, monkeypatch, *arguments) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert words in line


def test_a_missing_extra_is_a_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in command.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delitem(sys.modules, "studies.benchmarks.tapin", raising=False)
    monkeypatch.setitem(sys.modules, "numba", None)
    assert main("tapin", monkeypatch, "--quick") == 2
    assert capsys.readouterr().err == "error: numba is not installed: pip install 'mi-route2[bench,lanes,serve]'\n"


@benchmarks
def test_help_is_the_docstring(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(name, monkeypatch, "--help")
    assert ended.value.code == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert " ".join((BENCHMARKS[name].__doc__ or "").split(":")[0].split()) in printed
    assert f"python -m studies.benchmarks {name}" in printed


@pytest.mark.parametrize(("options", "turns"), [({}, 15), ({"quick": True}, 3), ({"quick": True, "rounds": 4}, 4)])
def test_turns(options: dict[str, int], turns: int) -> None:
    assert HostsOptions(**options).turns == turns  # pyright: ignore[reportArgumentType]
