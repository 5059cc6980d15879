"""Draw the pictures of docs/page.md from a real server and a real browser: ``python docs/examples/serve_screenshots.py``.

The Study tab is drawn if a study's runs are given: ``--study-runs runs/strong-88e860b8``.
"""

import argparse
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from playwright.sync_api import Browser, Page, expect, sync_playwright

from mi_route2.serve.process import serving

ASSETS = Path(__file__).parents[1] / "assets"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WIDTH, NARROW = 1280, 420


def window(browser: Browser, address: str, height: int, narrow: bool = False, **state: str) -> Page:
    """Return the page in this state; ``narrow`` is a phone with a dark theme."""
    look: Any = {
        "viewport": {"width": NARROW if narrow else WIDTH, "height": height},
        "color_scheme": "dark" if narrow else "light",
    }
    page = browser.new_page(**look, reduced_motion="reduce")
    page.goto(f"{address}/#{urlencode(state)}")
    return page


def patch(browser: Browser, address: str, narrow: bool = False) -> Page:
    """Sweep the first example, and ask the patched model at the best cell."""
    page = window(browser, address, 1020, narrow, tab="patch", sites="resid_pre,z,quarantine_out")
    expect(page.locator(".couple").first).to_be_visible()
    page.get_by_role("button", name="Whether it will cheat").click()
    page.wait_for_timeout(800)  # the alignment of what was typed
    page.click("#sweep")
    expect(page.locator("#peak")).to_contain_text("peak", timeout=60_000)
    page.locator('.cell[aria-label^="blocks.0.z[1], position 11 "]').click()
    expect(page.locator(".tops")).to_be_visible()
    page.mouse.move(0, 0)
    return page


def stream(browser: Browser, address: str, narrow: bool = False) -> Page:
    """Stream a completion that is steered toward cheating."""
    page = window(browser, address, 740, narrow, tab="stream", **{"s.scale": "2.5", "s.seed": "3", "s.temperature": "0.7"})
    page.click("#go")
    expect(page.locator("#stream-status")).to_contain_text("done", timeout=60_000)
    page.locator("#tokens .made").nth(6).hover()
    return page


def study(browser: Browser, address: str) -> Page:
    """Show a study's runs."""
    page = window(browser, address, 560, tab="study")
    expect(page.locator(".rates")).to_be_visible()
    return page


def main() -> None:
    """Draw them all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--study-runs", help="folder of a study's runs")
    runs = parser.parse_args().study_runs
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        sys.exit("no Chromium on this machine: install the system's package 'chromium'")
    ASSETS.mkdir(exist_ok=True)
    options = ["--study-runs", runs] if runs else []
    with (
        tempfile.TemporaryDirectory() as folder,
        serving("micro", Path(folder) / "log", *options) as server,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        small = {"patch-phone": partial(patch, narrow=True), "stream-phone": partial(stream, narrow=True)}
        cards = {"patch-phone": "#map-card", "stream-phone": "#stream-card"}
        for name, draw in {"patch": patch, "stream": stream, **small, **({"study": study} if runs else {})}.items():
            page = draw(browser, server.url)
            what = page.locator(cards[name]) if name in small else page  # a phone shows one card at a time
            what.screenshot(path=ASSETS / f"serve-{name}.png", animations="disabled")
            page.close()
        browser.close()


if __name__ == "__main__":
    main()
