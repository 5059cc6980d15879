"""The site builds strictly from the committed files, and a browser that reads it asks no other host for anything."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import NamedTuple

import pytest
from browser import chromium

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


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


# How far the page sticks out of the window, how many tables have to be scrolled, which figures did not load
LOOK = """() => ({
    out: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    tables: [...document.querySelectorAll(".md-typeset__scrollwrap")].filter(t => t.scrollWidth > t.clientWidth + 1).length,
    figures: [...document.images].filter(i => !i.naturalWidth).map(i => i.src),
    height: document.documentElement.scrollHeight,
})"""


@pytest.fixture(scope="module")
def answering() -> list[str]:
    """Pages with a figure before the first heading, below the answer."""
    pages = {page.stem: page.read_text(encoding="utf-8").partition("\n## ")[0] for page in (ROOT / "docs").glob("*.md")}
    del pages["index"]  # which says first what the project is
    return [name for name, opening in pages.items() if re.search(r"^!\[.*\]\(results/", opening, re.MULTILINE)]


class Walk(NamedTuple):
    """Read every page once in a browser: return faults, and where first figure and folded text of answering pages end."""

    wrong: dict[str, object]
    bottoms: dict[str, int]
    ends: dict[str, int]


@pytest.fixture(scope="module")
def walk(site: Path, address: str, answering: list[str]) -> Walk:
    walk = Walk({}, {}, {})
    # Each page would read the texts of all pages anew, for a search.
    unsearched = {**json.loads((site / "search/search_index.json").read_text(encoding="utf-8")), "docs": []}
    with chromium() as browser:
        page = browser.new_page(reduced_motion="reduce")
        page.route("**/search_index.json", lambda asked: asked.fulfill(json=unsearched))
        page.on("pageerror", lambda error: walk.wrong.setdefault(page.url, str(error)))
        for path in sorted([*site.glob("index.html"), *site.glob("*/index.html"), *site.glob("results/strong-*/*/index.html")]):
            name = str(path.parent.relative_to(site))
            page.set_viewport_size({"width": 1280, "height": 800})  # before it is drawn: a menu that becomes a column moves there
            page.goto(f"{address}/{name}/")
            if name in answering:
                figure = page.locator("article img").first
                figure.evaluate("image => image.decode()")
                box = figure.bounding_box()
                assert box is not None
                walk.bottoms[name] = round(box["y"] + box["height"])
                walk.ends[name] = page.evaluate("document.querySelector('article').scrollHeight")
            for width in (1280, 420):
                page.set_viewport_size({"width": width, "height": 800})
                page.evaluate("document.querySelectorAll('details').forEach(closed => closed.open = true)")
                seen = page.evaluate(LOOK)
                assert seen["height"] > 100
                if seen["out"] > 1 or seen["figures"] or (width == 1280 and seen["tables"]):
                    walk.wrong[f"{name} at {width}"] = seen
    return walk


def test_pages_fit_a_phone_and_a_laptop(walk: Walk) -> None:
    assert walk.wrong == {}


def test_pages_of_results_answer_on_their_first_screen(walk: Walk, answering: list[str]) -> None:
    """The figure that stands before the first heading is seen whole on a laptop."""
    assert len(answering) >= 15
    assert walk.bottoms.keys() == set(answering)
    assert {name: bottom for name, bottom in walk.bottoms.items() if bottom > 800} == {}


def test_pages_of_results_fit_three_screens_while_nothing_is_opened(walk: Walk, answering: list[str]) -> None:
    """At 1280 x 800; a page that grows over that has a second question, which wants a page of its own."""
    assert walk.ends.keys() == set(answering)
    assert {name: end for name, end in walk.ends.items() if not 800 < end <= 2100} == {}


def test_long_tables_wait_until_somebody_opens_them() -> None:
    """Texts that a page includes from other files, and those that one scrolls by on the way to the next sentence."""
    opened = r"<details markdown=\"1\">\n<summary>[^\n]+</summary>\n\n"
    shown = re.compile(rf"({opened})?<!-- shown: (\S+)\.md -->\n(.*?)<!-- end of \2\.md -->", re.DOTALL)
    pages = {page.name: page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md")}
    found = [(name, match[2], match[1] is None and match[3].count("\n")) for name in pages for match in shown.finditer(pages[name])]
    assert len(found) > 50
    assert [(name, block) for name, block, lines in found if lines > 25] == []


def test_figures_turn_dark_and_open_large(address: str) -> None:
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="dark")
        page.goto(f"{address}/gallery/")
        figure = page.locator("article img").first
        assert "invert" in figure.evaluate("image => getComputedStyle(image).filter")
        narrow = figure.bounding_box()
        figure.click()
        large = page.locator(".glightbox-container .gslide.current img")
        large.wait_for()
        page.wait_for_function("document.querySelector('.gslide.current img').getBoundingClientRect().width > 0")
        assert "invert" in large.evaluate("image => getComputedStyle(image).filter")
        assert narrow is not None
        page.keyboard.press("Escape")
        large.wait_for(state="detached")


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
    assert 'id="mi_route2.specs.MaskSpec"' in reference


def test_the_pattern_for_other_hosts_sees_them() -> None:
    assert RESOURCE.findall('<script src="https://cdn.example/x.js"></script><img alt="" src=//a.example/b.png>')
    assert RESOURCE.findall('<a href="https://example.org">text</a><img src="local.png"><link rel="canonical" href="/">') == []
    assert STYLE_RESOURCE.findall("@import 'https://fonts.example/css'; a { background: url(//b.example/c) }")
