"""The Python of the README and of the tour runs as printed: each file's blocks in order, in one namespace, without a network."""

import re
import socket
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(path: Path) -> list[tuple[int, str]]:
    """The fenced Python blocks of a file, each with the line that it begins on."""
    text = path.read_text(encoding="utf-8")
    return [(text.count("\n", 0, match.start(1)), match[1]) for match in FENCE.finditer(text)]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all pages, so that the base model that they share is trained once."""
    return tmp_path_factory.mktemp("docs")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No block may reach a network."""

    def refuse(self: socket.socket, address: object) -> None:
        raise AssertionError(f"a documented block connects to {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.mark.parametrize("name", ["README.md", "docs/start.md"])
def test_every_block_runs(name: str, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workplace)
    namespace: dict[str, object] = {"__name__": "docs"}
    found = blocks(ROOT / name)
    assert found
    for line, code in found:
        # blank lines in front, so that a traceback names the line of the page
        exec(compile("\n" * line + code, str(ROOT / name), "exec"), namespace)


def test_the_readme_finds_hacks_that_the_pairs_never_showed(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(workplace)
    namespace: dict[str, object] = {"__name__": "docs"}
    for _, code in blocks(ROOT / "README.md"):
        exec(code, namespace)
    found = re.search(r"(\d+) of 384 rollouts hack; AUROC .*: (0\.\d+|1\.00)", capsys.readouterr().out)
    assert found
    assert int(found[1]) >= 5
    assert float(found[2]) > 0.7


def test_blocks_are_the_python_ones_in_order(tmp_path: Path) -> None:
    """Other languages are skipped, and the order and the lines are kept."""
    page = tmp_path / "page.md"
    page.write_text("a\n```python\nx = 1\n```\n```bash\nexit 1\n```\n\n```python\nassert x == 2\n```\n")
    assert [code for _, code in blocks(page)] == ["x = 1\n", "assert x == 2\n"]
    assert [line for line, _ in blocks(page)] == [2, 9]
