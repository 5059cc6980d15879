"""What all benchmarks share: a child whose allocator keeps memory, errors in one sentence, help from the docstring."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from studies.benchmarks import command, hosts, routing, sweeps

BENCHMARKS = {f"studies.benchmarks.{module.__name__.rpartition('.')[2]}": module.Options for module in (routing, hosts, sweeps)}
benchmarks = pytest.mark.parametrize("module", BENCHMARKS)


def main(module: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    return command.main(BENCHMARKS[module], module)


@benchmarks
def test_measuring_runs_in_a_child_whose_allocator_keeps_memory(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def run(command: list[str], env: dict[str, str], check: bool) -> SimpleNamespace:
        calls.append((command, env))
        return SimpleNamespace(returncode=7)

    monkeypatch.setattr(command.subprocess, "run", run)
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_", raising=False)
    assert main(module, monkeypatch, "--quick") == 7
    ((child, env),) = calls
    assert child[-3:] == ["-m", module, "--quick"]
    assert int(env["MALLOC_MMAP_THRESHOLD_"]) == 2**26 < int(env["MALLOC_TRIM_THRESHOLD_"])
    assert env["OMP_NUM_THREADS"] == "1"


@benchmarks
def test_errors_are_sentences(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for arguments, words in ((["--rounds", "2"], "at least 3"), (["--out", str(tmp_path / "none" / "x.json")], "no folder")):
        assert main(module, monkeypatch, *arguments) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert words in line


@benchmarks
def test_help_is_the_docstring(module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(module, monkeypatch, "--help")
    assert ended.value.code == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert " ".join((BENCHMARKS[module].__doc__ or "").split(":")[0].split()) in printed
    assert f"python -m {module}" in printed


@pytest.mark.parametrize(("options", "turns"), [({}, 15), ({"quick": True}, 3), ({"quick": True, "rounds": 4}, 4)])
def test_turns(options: dict[str, int], turns: int) -> None:
    assert hosts.Options(**options).turns == turns  # pyright: ignore[reportArgumentType]
