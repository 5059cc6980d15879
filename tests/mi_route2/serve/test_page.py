"""The page as a person sees it: headless Chromium against the real server, with the library in process as the oracle."""

import json
import math
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

import pytest
import torch
from browser import chromium
from playwright.sync_api import Browser, BrowserContext, Page, expect
from served import OTHER, PROMPT, TOKEN, Running, running, unhurried

from mi_route2.hosts import open_host
from mi_route2.patching import Grid, sweep
from mi_route2.serve.models import Example, Served
from studies.environments.micro.model import MicroGPT
from studies.environments.micro.served import MicroTokenizer, micro
from studies.environments.micro.settings import MicroConfig

pytestmark = pytest.mark.process

SITES = ["resid_pre", "attn_out"]
SHARPNESS = 2.0
MINUS = "\N{MINUS SIGN}"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """Return a micro model of a few steps: the page is tested, and not what the model knows."""
    found = micro(steps=40, adapted=2, cache=tmp_path_factory.mktemp("micro"))
    found.monitor = {**(found.monitor or {}), "sharpness": SHARPNESS}
    return found


@pytest.fixture(scope="module")
def grid(served: Served) -> Grid:
    """Return the sweep of the first example, by the library and before the server owns the model."""
    one = served.examples[0]
    given: dict[str, Any] = {"clean": one.clean, "corrupt": one.corrupt, "answer": one.answer, "foil": one.foil}
    return sweep(served.host, sites=SITES, tokenizer=served.tokenizer, progress=False, **given)


@pytest.fixture(scope="module")
def server(served: Served, grid: Grid) -> Iterator[Running]:
    """Serve the model on this machine."""
    with running(served) as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


class Seen:
    """A window on the page, and everything that went wrong in it."""

    def __init__(self, context: BrowserContext, server: Running):
        self.page: Page = context.new_page()
        self.address, self.http, self.wrong, self.refused = server.url, server.http, [], 0
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("console", lambda message: self._said(message.type, message.text))
        self.page.on("request", lambda request: self._asked(request.url))

    def _said(self, kind: str, text: str) -> None:
        # Chromium itself writes a line for each answer of 4xx, which is no error of the page
        if kind in ("error", "warning") and not (self.refused and text.startswith("Failed to load resource")):
            self.wrong.append(text)

    def _asked(self, url: str) -> None:
        if not url.startswith((self.address, "data:")):
            self.wrong.append(f"a request left the host: {url}")

    def go(self, **state: str) -> Page:
        """Open the page with this state behind the #."""
        self.page.goto("about:blank")
        self.page.goto(f"{self.address}/#{urlencode(state)}")
        return self.page


@pytest.fixture
def seen(browser: Browser, server: Running) -> Iterator[Seen]:
    """Return a window; at the end, nothing was written to the console and no request has left the host."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    window = Seen(context, server)
    yield window
    # Or a handler that still fetches an answer raises when its window closes, in a test that has passed
    window.page.unroute_all(behavior="ignoreErrors")
    context.close()
    assert window.wrong == []


def opened(seen: Seen, **state: str) -> Page:
    """Open the Patch tab and return the page when its prompts are aligned."""
    page = seen.go(tab="patch", **state)
    expect(page.locator("#strip .couple").first).to_be_visible()
    return page


def press_sweep(page: Page) -> None:
    """Sweep, and wait for the summary."""
    page.click("#sweep")
    expect(page.locator("#peak")).to_contain_text("peak")


def swept(seen: Seen, **state: str) -> Page:
    """Sweep and return the page when the summary is there."""
    page = opened(seen, sites=",".join(SITES), **state)
    press_sweep(page)
    return page


def cell(page: Page, site: str, position: int) -> Any:
    return page.locator(f'.cell[aria-label^="{site}, position {position} "]')


def labels(page: Page, selector: str) -> list[str]:
    return page.locator(selector).evaluate_all("nodes => nodes.map(node => node.getAttribute('aria-label'))")


def numbers(text: str) -> list[float]:
    """Return the numbers of a label, after its token."""
    return [float(one.replace(MINUS, "-")) for one in re.findall(rf"(?:recovered|score|gate) ([{MINUS}\d.e-]+)", text)]


def test_the_heatmap_is_the_librarys_grid_and_peaks_at_the_known_cell(seen: Seen, grid: Grid) -> None:
    page = swept(seen)
    shown = {label.split(" ", 1)[0].rstrip(","): {} for label in labels(page, ".cell")}
    for label in labels(page, ".cell"):
        site, position = re.match(r"(\S+), position (\d+)", label).groups()  # pyright: ignore[reportOptionalMemberAccess]
        shown[site][int(position)] = numbers(label)[0]
    assert list(shown) != []
    assert {str(site) for site in grid.sites} == set(shown)
    for i, site in enumerate(grid.sites):
        for j, position in enumerate(grid.positions):
            assert shown[str(site)][position] == pytest.approx(grid.recovered[i, j], abs=6e-4)
    # Only one token differs. Before the first block the whole difference is there, whatever the model does with it.
    kinds = page.locator(".couple").evaluate_all("nodes => nodes.map(node => node.className)")
    differs = next(i for i, kind in enumerate(kinds) if "differs" in kind)
    first = shown["blocks.0.resid_pre"]
    assert first.pop(differs) == 1.0
    assert set(first.values()) == {0.0}
    peak = grid.argabs
    expect(page.locator("#peak")).to_contain_text(f"at {peak.target}, {peak.position} ")


def test_estimates_and_edges_are_methods_of_the_page(seen: Seen, served: Served) -> None:
    page = swept(seen)
    exact = labels(page, ".cell")
    page.select_option("#method", "atp*")
    with page.expect_response("**/v1/patch_sweep"):
        page.click("#sweep")
    expect(page.locator("#sweep-cancel")).to_be_hidden()
    assert len(labels(page, ".cell")) == len(exact)
    assert labels(page, ".cell") != exact
    page.select_option("#method", "edges")
    with page.expect_response("**/v1/edges") as asked:
        page.click("#sweep")
    found = asked.value.json()
    best = found["graph"]["edges"][0]
    expect(page.locator("#cell-answer tr")).to_have_count(20)
    expect(page.locator("#cell-answer tr").first).to_contain_text(f"{best['source']} → {best['target']}")
    expect(page.locator("#cell-head h2")).to_have_text(f"20 strongest of {found['total']} edges")


def test_a_link_restores_prompts_sites_and_the_answer_of_a_cell(seen: Seen) -> None:
    page = swept(seen)
    page.fill("#foil", " -")
    with page.expect_response("**/v1/patch_sweep"):
        page.click("#sweep")
    expect(page.locator("#sweep-cancel")).to_be_hidden()
    cell(page, "blocks.0.attn_out", 3).click()
    expect(page.locator(".answered")).to_be_visible()
    before = [page.input_value(f"#{name}") for name in ("clean", "corrupt", "answer", "foil", "metric")], labels(page, ".cell")
    page.wait_for_url("**cell=**")
    link, answered = page.url, page.inner_text("#cell-answer")
    page.goto("about:blank")
    page.goto(link)
    expect(page.locator("#cell-answer .tops")).to_be_visible()
    after = [page.input_value(f"#{name}") for name in ("clean", "corrupt", "answer", "foil", "metric")], labels(page, ".cell")
    assert after == before
    assert page.inner_text("#cell-answer") == answered
    expect(page.locator("#cell-head h2")).to_have_text("blocks.0.attn_out")
    # One prompt that is empty does not bring the first example back
    page.fill("#clean", "")
    page.wait_for_url(re.compile("^((?!clean=).)*$"))
    page.reload()
    expect(page.locator("#foil")).to_have_value(" -")
    expect(page.locator("#clean")).to_have_value("")
    assert page.input_value("#corrupt") == before[0][1]


def stream(page: Page, **fields: str) -> None:
    for name, value in {"seed": "5", "temperature": "1", "max_tokens": "16", **fields}.items():
        page.fill(f"#{name}", value)
    page.click("#go")


def streamed(page: Page, **fields: str) -> None:
    """Stream to the end."""
    stream(page, **fields)
    expect(page.locator("#stream-status")).to_contain_text("done")


def test_each_token_has_the_color_and_the_readings_of_its_position(seen: Seen, served: Served) -> None:
    page = seen.go(tab="stream")
    expect(page.locator("#prompt")).not_to_have_value("")
    streamed(page)
    asked = {"prompt": page.input_value("#prompt"), "max_tokens": 16, "seed": 5, "readings": True, "monitors": [served.monitor]}
    whole = seen.http.post("/v1/completions", json=asked).json()["choices"][0]["mi_route2"]
    told = labels(page, "#tokens .token")
    assert len(told) == len(whole["prompt_tokens"]) + len(whole["tokens"])
    threshold, name = served.monitor["threshold"], served.monitor["name"]  # pyright: ignore[reportOptionalSubscript]
    for i, (label, text) in enumerate(zip(told, whole["prompt_tokens"] + whole["tokens"], strict=True)):
        assert label.startswith(json.dumps(text))
        if str(i) not in whole["readings"]:
            assert label.endswith("not read")
            assert i == len(told) - 1
            continue
        reading = whole["readings"][str(i)][name]
        assert numbers(label) == pytest.approx([reading["score"], reading["gate"]], abs=6e-4)
        kind = page.locator("#tokens .token").nth(i).get_attribute("class") or ""
        assert ("above" if reading["score"] >= threshold else "below") in kind
    colors = page.locator("#tokens .token:not(:last-child)").evaluate_all(
        "nodes => nodes.map(node => getComputedStyle(node).backgroundColor)"
    )
    assert len(set(colors)) > 3
    page.get_by_text("gate", exact=True).first.click()
    assert page.locator("#tokens .below").count() == 0  # a gate is never negative
    for place in ("#threshold-note", "#stream-words"):  # a quarantine is closed on the prompt too
        expect(page.locator(place)).to_contain_text("in the prompt too")


def test_the_thresholds_slider_moves_the_gates_of_the_running_stream(seen: Seen, server: Running, served: Served) -> None:
    page = seen.go(tab="stream")
    expect(page.locator("#prompt")).not_to_have_value("")
    before = float(page.input_value("#threshold"))
    with unhurried(server, 0.2):
        stream(page)
        expect(page.locator("#tokens .made").nth(2)).to_be_visible()
        with page.expect_response(re.compile("/threshold$")):
            page.locator("#threshold").press("End")
        after = float(page.input_value("#threshold"))
        expect(page.locator("#tokens .made").nth(7)).to_be_visible()
    expect(page.locator("#stream-status")).to_contain_text("done")
    assert after > before + 0.5
    used = []
    for score, gate in (numbers(label) for label in labels(page, "#tokens .token") if not label.endswith("not read")):
        # the threshold that explains the gate, of the two: sigmoid(sharpness * (score - threshold))
        errors = {at: abs(gate - 1 / (1 + math.exp(-SHARPNESS * (score - at)))) for at in (before, after)}
        assert min(errors.values()) < 2e-3
        used.append(min(errors, key=errors.__getitem__))
    assert used[0] == before
    assert used[-1] == after
    assert used == sorted(used)


@pytest.fixture(scope="module")
def tall() -> Iterator[Running]:
    """Serve a random model of 30 layers without a monitor."""
    draw = torch.Generator().manual_seed(0)
    model = MicroGPT(MicroConfig(d=16, heads=2, mlp=32, layers=30), draw).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.15 * torch.randn(p.shape, generator=draw))
    examples = (Example("operators", PROMPT, OTHER, " +", " *"),)
    with running(Served("tall", open_host("torch", model), MicroTokenizer(), examples=examples, prompts=(PROMPT,))) as found:
        yield found


def inside(page: Page, *selectors: str) -> bool:
    """True if all of these are within the window."""
    size = page.viewport_size
    boxes = [page.locator(selector).bounding_box() for selector in selectors]
    return size is not None and all(box and box["y"] >= 0 and box["y"] + box["height"] <= size["height"] for box in boxes)


def test_a_sweep_of_thirty_layers_stays_in_the_window(browser: Browser, tall: Running) -> None:
    context = browser.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    seen = Seen(context, tall)
    page = opened(seen, sites="resid_pre,z")
    named = page.locator("#sites button").all_text_contents()
    assert sorted(named) == sorted(tall.http.get("/v1/page").json()["sites"])  # one name for each thing
    assert page.locator("label[for=alpha]").text_content() == "alpha"
    press_sweep(page)
    page.locator("#map-card").evaluate("node => node.scrollIntoView()")
    assert inside(page, "#map-card")
    rows = page.locator(".name").all_text_contents()
    assert (rows[1], rows[30], rows[31], rows[-1]) == ("L29", "L0", "L29H1", "L0H0")
    page.locator("#zoom").press("End")
    assert page.locator(".cell").first.bounding_box()["height"] == 40  # pyright: ignore[reportOptionalSubscript]
    for row in (0, 89):
        chosen = page.locator(".row:not(.axis)").nth(row).locator(".cell").nth(9)
        chosen.click()
        expect(page.locator(".answered")).to_be_visible()
        assert inside(page, ".axis", "#legend", "#peak", ".cell.open", "#cell-head")
    weak = page.locator(".cell.done").evaluate_all(
        "nodes => nodes.map(node => [node.getAttribute('aria-label'), parseFloat(node.style.getPropertyValue('--t'))])"
    )
    reach = max(abs(numbers(label)[0]) for label, _ in weak)
    for label, strength in weak:
        assert strength == pytest.approx(100 * math.sqrt(abs(numbers(label)[0]) / reach), abs=3)
    page.click("#tab-stream")
    expect(page.locator("#no-monitor")).to_be_visible()
    assert page.locator("#stream input[type=range]:visible, #lens:visible").count() == 0
    page.click("#probe")
    expect(page.locator("#threshold")).to_be_visible()
    context.close()
    assert seen.wrong == []


@pytest.mark.parametrize("width", [420, 1280])
def test_nothing_is_wider_than_a_phone_or_a_laptop(seen: Seen, width: int) -> None:
    seen.page.set_viewport_size({"width": width, "height": 800})
    page = swept(seen)
    for tab in ("stream", "patch"):
        page.click(f"#tab-{tab}")
        expect(page.locator(f"#{tab}")).to_be_visible()
        assert page.evaluate("() => document.documentElement.scrollWidth") <= width


def test_a_token_is_asked_for_and_stays_in_the_tab(browser: Browser, served: Served) -> None:
    with running(served, token=TOKEN) as found:
        context = browser.new_context()
        seen = Seen(context, found)
        seen.refused = 1
        page = seen.go(tab="patch")
        for token in ("another-token-than-it-has", TOKEN):
            expect(page.locator("#token")).to_be_visible()
            expect(page.locator("#patch")).to_be_hidden()  # a browser would send its forms by itself
            page.get_by_label("This server needs a token").fill(token)
            page.click("#token button")
        expect(page.locator("#strip .couple").first).to_be_visible()
        expect(page.locator("#token")).to_be_hidden()
        stored = page.evaluate("() => [Object.values(sessionStorage), localStorage.length, document.cookie]")
        assert stored == [[TOKEN], 0, ""]
        context.close()
        assert seen.wrong == []
