"""The site builds strictly from the committed files, and a browser that reads it asks no other host for anything."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parents[2]
RESOURCE = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=[\"']?((?:https?:)?//[^\"'\s>]+)", re.IGNORECASE)
STYLE_RESOURCE = re.compile(r"(?:url\(|@import\s+)[\"']?((?:https?:)?//[^\"')\s]+)", re.IGNORECASE)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if built := os.environ.get("ROUTE2_SITE"):  # continuous integration has just built it, as strictly
        return ROOT / built
    pytest.importorskip("mkdocs", reason="the docs extra is not installed")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out


def test_no_page_and_no_style_asks_another_host(site: Path) -> None:
    pages, styles = sorted(site.rglob("*.html")), sorted(site.rglob("*.css"))
    assert len(pages) > 20
    assert styles
    asked = {path.name: RESOURCE.findall(path.read_text(encoding="utf-8")) for path in pages}
    asked |= {path.name: STYLE_RESOURCE.findall(path.read_text(encoding="utf-8")) for path in styles}
    assert {name: found for name, found in asked.items() if found} == {}


def test_the_pages_hold_what_they_include(site: Path) -> None:
    results = (site / "results_strong/index.html").read_text(encoding="utf-8")
    for arm in ("route2-act", "route2-grad", "route2-full"):
        assert f"<strong>{arm}</strong>" in results
    assert "same-rule filter, filter-full" in results
    reference = (site / "api/routing/index.html").read_text(encoding="utf-8")
    assert 'id="mi_route2.routing.spec.MaskSpec"' in reference


def test_the_pattern_for_other_hosts_sees_them() -> None:
    assert RESOURCE.findall('<script src="https://cdn.example/x.js"></script><img alt="" src=//a.example/b.png>')
    assert RESOURCE.findall('<a href="https://example.org">text</a><img src="local.png"><link rel="canonical" href="/">') == []
    assert STYLE_RESOURCE.findall("@import 'https://fonts.example/css'; a { background: url(//b.example/c) }")
