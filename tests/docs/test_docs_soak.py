"""The page on serving says what the files of the soak and of the fuzzing say."""

import json
from pathlib import Path

import pytest

from tests import fuzz
from tests.fuzz import counted, sentence

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_says_what_was_drawn_from_the_schema() -> None:
    fuzz = json.loads((DOCS / "results/benchmarks/fuzz.json").read_text(encoding="utf-8"))
    assert sum(sum(one.values()) for one in fuzz["counts"].values()) >= 10_000
    page = " ".join((DOCS / "serve.md").read_text(encoding="utf-8").split())
    assert sentence(fuzz) in page, f"docs/serve.md must say:\n\n{sentence(fuzz)}"


def test_answers_are_counted_by_operation_and_class_of_status(tmp_path: Path) -> None:
    requests = [("GET", "/a", 200), ("POST", "/a", 422), ("POST", "/a", 401), ("PUT", "/a", 405), ("GET", "other", 404)]
    lines = [{"message": "loaded"}, *({"method": method, "path": path, "status": one} for method, path, one in requests)]
    (tmp_path / "log").write_text("".join(json.dumps(line) + "\n" for line in lines))
    schema = {"paths": {"/a": {"get": {}, "post": {}}, "/b": {"get": {}}}}
    assert counted(tmp_path / "log", schema) == {"GET /a": {"2xx": 1}, "GET /b": {}, "POST /a": {"4xx": 2}}


def test_a_fuzz_whose_file_could_not_be_written_does_not_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for out in (tmp_path, tmp_path / "none" / "fuzz.json"):
        monkeypatch.setattr("sys.argv", ["", "--out", str(out)])
        with pytest.raises(SystemExit):
            fuzz.main()
        assert "is no file in a folder that is there" in capsys.readouterr().err


def test_the_page_says_what_the_hour_of_soak_left() -> None:
    soak = json.loads((DOCS / "results/benchmarks/soak.json").read_text(encoding="utf-8"))
    page = " ".join((DOCS / "serve.md").read_text(encoding="utf-8").split())
    samples = soak["samples"]
    memory = {round(one["second"]): round(one["rss"] / 2**20) for one in samples}
    answers = sum(n for name, n in soak["counts"].items() if name.startswith("status "))
    assert soak["minutes"] == 60
    assert not any(soak["left"].values())
    assert f"with seed {soak['seed']} " in page
    assert f"{min(soak['load']):.1f} to {max(soak['load']):.1f} on two cores" in page
    assert f"{answers:,} answers, {soak['compared']} compared and all equal, {len(soak['failures'])} failures" in page
    assert f"memory was {memory[20]} MiB after 20 seconds" in page
    assert f"{round(soak['idle']['rss'] / 2**20)} MiB at the end and {max(memory.values())} MiB at most" in page
    late = [one["rss"] for one in samples if one["second"] > 2400]
    assert late[-1] <= late[0]
