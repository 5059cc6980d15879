"""The page as a person sees it: headless Chromium against the real server, with the library in process as the oracle."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from browser import chromium
from playwright.sync_api import Browser, BrowserContext, Page, expect
from served import Running, running, unhurried, until

from mi_route2.patching import Grid, sweep
from mi_route2.serve.auth import Keys
from mi_route2.serve.models import Served
from studies.environments.micro.served import micro

pytestmark = pytest.mark.process

KEY = "a-key-of-the-tests-only"
SITES = ["resid_pre", "attn_out"]
SHARPNESS = 2.0
MINUS = "\N{MINUS SIGN}"
COUNTS = (8, 8, 8, 0, 8, 8, 4, 8, 2, 0)
"""Rollouts of a mode in a step."""


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
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of two arms at two seeds, whose rates are known."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        for arm, top in (("vanilla", 0.8), ("route2-act", 0.1)):
            rows = []
            for step in range(30):
                hack, n = top * step / 29 if seed else top, COUNTS[step % 10]
                shares = {"hack": hack, "solve": 1 - hack, "exploit": hack} if n else {"hack": 0.0, "solve": 0.0, "exploit": 0.0}
                modes = {"sentinel": {"n": n, **shares, "reward": 1.0}}
                rows.append({"step": step, "loss": 0.1, "hack": hack, "solve": 1 - hack, "modes": modes, "flags": None})
            path = folder / f"seed-{seed}" / arm / "metrics.jsonl"
            path.parent.mkdir(parents=True)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            modes = {"sentinel": {"on": {"hack": top}, "deploy": {"hack": top / 4, "solve": 0.9}}}
            (path.parent / "eval.json").write_text(json.dumps({"arm": arm, "seed": seed, "modes": modes}))
    (folder / "seed-1" / "route2-act" / "eval.json").unlink()  # of a run that goes on
    return folder


@pytest.fixture(scope="module")
def server(served: Served, grid: Grid, runs: Path) -> Iterator[Running]:
    """Serve the model on this machine, with a study's runs."""
    with running(served, study_runs=runs) as found:
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


def test_cells_appear_forward_by_forward(seen: Seen) -> None:
    page = opened(seen, sites="resid_pre,mlp_out,attn_out,resid_post,kept_out")
    page.evaluate("""() => {
      window.counts = [];
      new MutationObserver(() => counts.push(document.querySelectorAll('.cell.done').length))
        .observe(document.querySelector('#map'), { subtree: true, childList: true, attributes: true });
    }""")
    press_sweep(page)
    counts = [one for one in page.evaluate("() => counts") if one]
    assert counts == sorted(counts)
    assert len(set(counts)) > 2
    assert counts[-1] == page.locator(".cell").count()


def test_the_keyboard_moves_in_the_grid_and_enter_asks_the_patched_model(seen: Seen, served: Served) -> None:
    page = swept(seen)
    page.locator(".cell[tabindex='0']").focus()
    moves = (("ArrowRight", 1, 1), ("ArrowDown", 0, 1), ("ArrowRight", 0, 2), ("ArrowLeft", 0, 1), ("ArrowRight", 0, 2))
    for key, site, position in moves:
        page.keyboard.press(key)
        expect(cell(page, f"blocks.{site}.resid_pre", position)).to_be_focused()
    expect(page.locator("#tip")).to_contain_text("recovered 1.000")
    page.keyboard.press("Enter")
    # The whole difference is patched in, so the patched model on the corrupt prompt is the clean one
    one = served.examples[0]
    asked = {"prompt": one.clean, "max_tokens": 16, "temperature": 0, "logprobs": 1}
    clean = seen.http.post("/v1/completions", json=asked).json()["choices"][0]
    expect(page.locator(".answered")).to_have_text(clean["text"] or "(nothing)", use_inner_text=False)
    likely = page.locator(".top code").first.text_content()
    assert likely is not None
    assert likely.replace("·", " ").replace("⏎", "\n") == next(iter(clean["logprobs"]["top_logprobs"][0]))


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


def test_an_example_whose_answer_ends_a_line_can_be_swept(seen: Seen, served: Served) -> None:
    page = seen.go(tab="patch")
    example = next(one for one in served.examples if one.answer.endswith("\n"))
    page.get_by_role("button", name=example.title).click()
    with page.expect_request("**/v1/patch_sweep") as asked:
        page.click("#sweep")
    body = asked.value.post_data_json
    assert (body["answer"], body["foil"]) == (example.answer, example.foil)
    expect(page.locator("#peak")).to_contain_text("peak")


def test_an_error_of_the_server_stands_where_its_cause_is(seen: Seen) -> None:
    seen.refused = 1
    page = opened(seen)
    page.fill("#answer", "nowhere")
    page.click("#sweep")
    expect(page.locator("#patch-form .error:visible")).to_contain_text("nowhere")
    page.fill("#answer", " +")
    page.fill("#corrupt", "# task: unknown")
    expect(page.locator("#prompts .error:visible")).to_contain_text("no token matches")
    page.fill("#corrupt", "")
    expect(page.locator("#prompts .error:visible")).to_have_count(0)
    # What a sweep says of prompts that can be aligned stays
    with page.expect_response("**/v1/align") as answered:
        page.fill("#corrupt", page.input_value("#clean") + "\n" * 99)
        page.click("#sweep")
    assert answered.value.ok
    expect(page.locator("#prompts .error:visible")).to_contain_text("but the context has")
    page.click("#tab-stream")
    page.fill("#prompt", "what is this")
    page.click("#go")
    expect(page.locator("#stream-form .error:visible")).to_contain_text("no token matches")
    expect(page.locator("#go")).to_have_text("Go")


def test_a_cell_is_asked_of_the_prompts_of_its_grid_also_after_a_sweep_that_was_refused(seen: Seen, served: Served) -> None:
    seen.refused = 1
    page = swept(seen)
    page.fill("#corrupt", served.examples[1].corrupt)
    page.fill("#answer", "nowhere")
    page.click("#sweep")
    expect(page.locator("#patch-form .error:visible")).to_contain_text("nowhere")
    with page.expect_request("**/v1/patch_cell") as asked:
        cell(page, "blocks.0.resid_pre", 3).click()
    assert asked.value.post_data_json["corrupt"] == served.examples[0].corrupt
    expect(page.locator(".answered")).to_be_visible()
    page.fill("#answer", served.examples[0].answer)
    press_sweep(page)
    expect(page.locator("#cell-head h2")).to_have_text("The cell")  # and not one of the grid before
    expect(page.locator(".answered")).to_have_count(0)


def test_prompts_of_other_lengths_show_what_has_no_partner(seen: Seen, served: Served) -> None:
    one = served.examples[0]
    clean = one.clean.replace(" then", " 2 then")
    page = swept(seen, clean=clean, corrupt=one.corrupt, answer=one.answer, foil=one.foil)
    alone = page.locator(".couple.alone").count()
    assert alone > 0
    assert page.locator(".cell.skipped").count() % len(SITES) == 0
    expect(page.locator("#strip-note")).to_contain_text("no partner")


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
    # It acts on no token of the prompt
    assert not served.monitor.get("prompt")  # pyright: ignore[reportOptionalMemberAccess]
    for place in ("#threshold-note", "#stream-words"):
        expect(page.locator(place)).to_contain_text("at generated tokens only")
    for kind, count in ((".given", 1), (".made", 0)):
        page.locator(f"#tokens {kind}").first.hover()
        expect(page.locator("#token-detail", has_text="not on a prompt")).to_have_count(count)


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


def test_a_probe_of_two_prompts_puts_them_half_a_unit_on_either_side_of_its_threshold(seen: Seen, served: Served) -> None:
    one = served.examples[0]
    page = seen.go(tab="stream", clean=one.clean, corrupt=one.corrupt, **{"s.block": "0"})  # as a link does it
    expect(page.locator("#threshold-note")).to_contain_text("toward clean at blocks.0.resid_post")
    threshold = float(page.input_value("#threshold"))
    last = len(served.encode(one.clean)) - 1
    for prompt, side in ((one.clean, 0.5), (one.corrupt, -0.5)):
        page.fill("#prompt", prompt)
        streamed(page)
        assert numbers(labels(page, "#tokens .token")[last])[0] - threshold == pytest.approx(side, abs=0.01)


def test_a_link_restores_a_threshold_far_from_the_monitors(seen: Seen) -> None:
    page = seen.go(tab="stream", **{"s.threshold": "57.25", "s.lens": "gate", "s.scale": "1.5"})
    expect(page.locator("#threshold")).to_have_value("57.25")
    expect(page.locator("#scale")).to_have_value("1.5")
    expect(page.locator("input[value=gate]")).to_be_checked()
    # A drag is more changes of the address than browsers take: Safari raises an error, Chrome leaves it as it is
    page.evaluate("""() => {
      const write = history.replaceState.bind(history), scale = document.querySelector("#scale");
      let left = 20;
      history.replaceState = (...given) => { if (!left--) throw new Error("too often"); write(...given); };
      for (const value of Array(100).keys()) {
        scale.value = value / 50;
        scale.dispatchEvent(new Event("input", { bubbles: true }));
      }
    }""")
    expect(page.locator("#scale-value")).to_have_text("2.00")
    page.wait_for_url("**s.scale=2&**")


def test_the_scales_slider_acts_on_the_running_stream_and_stop_ends_it(seen: Seen, server: Running) -> None:
    page = seen.go(tab="stream")
    expect(page.locator("#prompt")).not_to_have_value("")
    with unhurried(server, 0.2):
        stream(page)
        expect(page.locator("#tokens .made").first).to_be_visible()
        with page.expect_response(re.compile("/scale$")) as answered:
            page.locator("#scale").press("End")
        assert answered.value.ok
        request = answered.value.json()["request"]
        now = seen.http.get("/v1/steering/dynamic").json()["requests"][str(request)]
        assert now["scale"] == pytest.approx(4e6)  # 4 times, of a vector that was sent at a millionth: it started at 0
        page.click("#stop")
        expect(page.locator("#stream-status")).to_contain_text("stopped")
    until(lambda: seen.http.get("/v1/steering/dynamic").json()["requests"] == {})  # the server has noticed


def test_the_study_shows_the_last_steps_of_each_arm_and_follows_its_files(seen: Seen, runs: Path) -> None:
    seen.refused = 1
    page = opened(seen)
    page.route("**/v1/study_runs", lambda route: route.fulfill(status=503, json={"error": {"message": "busy"}}))
    page.click("#tab-study")
    expect(page.locator("#study-error")).to_have_text("busy")
    page.unroute("**/v1/study_runs")
    page.click("#tab-patch")
    page.click("#tab-study")  # looks again
    expect(page.locator("#study-error")).to_be_hidden()
    row = page.locator(".rates tbody tr", has_text="vanilla")
    last = sum(n * 0.8 * (20 + i) / 29 for i, n in enumerate(COUNTS)) / sum(COUNTS)  # of all rollouts, as in the study's tables
    expect(row.locator(".rate").first).to_have_text(f"{(0.8 + last) / 2:.2f}".lstrip("0"))
    assert page.locator(".small-multiples figure").count() == 2
    page.get_by_text("quarantine deleted").click()
    expect(row.locator(".rate").first).to_have_text(".20")
    assert page.locator(".rates .n").all_inner_texts() == ["1 of 2", "2"]  # of which the means are
    page.get_by_text("training", exact=True).click()
    expect(page.locator(".live")).to_have_text("4 runs so far, 0 finished; read again every 3 s")
    path = runs / "seed-1" / "vanilla" / "metrics.jsonl"
    before = path.read_text()
    with path.open("a") as file:
        for step in range(30, 40):
            file.write(json.dumps({"step": step, "hack": 0.0, "solve": 1.0, "modes": {"sentinel": {"hack": 0.0}}}) + "\n")
    try:
        expect(row.locator(".rate").first).to_have_text(".40", timeout=8000)  # nobody reloaded
        expect(row.locator(".progress")).to_contain_text("29 to 39")
    finally:
        path.write_text(before)


def test_the_study_shows_what_there_is_until_a_side_is_chosen_and_so_does_a_link(seen: Seen) -> None:
    rates = {"sentinel": {side: {"hack": hack, "solve": 0.5, "exploit": 0.5} for side, hack in (("on", 0.3), ("deploy", 0.1))}}
    row = {"step": 19, "hack": 0.7, "solve": 0.5, "modes": {"sentinel": {"n": 4, "hack": 0.7, "solve": 0.5, "exploit": 0.5}}}
    base = {"arm": "base", "finished": True, "step": None, "steps": 80, "rates": rates, "curve": []}
    begun = {**base, "arm": "canary-40", "finished": False, "rates": None}
    going = {**begun, "step": 19, "curve": [row]}
    told: dict[str, Any] = {"path": "weak", "modes": {"held_out": ["sentinel"]}, "left_out": 0}
    page = seen.page
    page.route("**/v1/study_runs", lambda route: route.fulfill(json=told))
    shown = page.locator("#study-body input[name=side]:checked")
    cells = page.locator(".rates .rate")
    told["runs"] = [base, begun]
    seen.go(tab="study")
    expect(shown).to_have_value("deploy")  # while the first rows are still to be written
    expect(cells).to_have_text([".10", "\N{EN DASH}"])
    expect(page.locator("#study-body")).not_to_contain_text("not known")
    for runs, left, side, value in (
        ([base, going], 0, "train", ".70"),
        ([base, {**going, "finished": True, "rates": rates}], 7, "deploy", ".10"),
    ):
        told.update(runs=runs, left_out=left)
        page.click("#tab-patch")
        page.click("#tab-study")
        expect(shown).to_have_value(side)
        expect(cells.last).to_have_text(value)
        expect(page.locator(".progress").last).to_have_text("19" if left else "19 (settings: 80)")
    expect(page.locator(".study-head")).to_contain_text("2 runs so far, all finished; read again every 15 s; 7 more")
    assert "side=" not in page.url  # another window shows the same without it
    told["runs"] = [going]
    seen.go(tab="study", side="deploy")
    expect(cells).to_have_text([".70"])
    told["runs"] = [base, going]
    page.click("#tab-patch")
    page.click("#tab-study")
    expect(shown).to_have_value("deploy")  # as the link says


FAINT = """() => {
  const canvas = Object.assign(document.createElement("canvas"), { width: 1, height: 1 });
  const ctx = canvas.getContext("2d", { willReadFrequently: true });
  const paint = color => { ctx.fillStyle = color; ctx.fillRect(0, 0, 1, 1); };
  const linear = v => (v /= 255) <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const light = () => {
    const [r, g, b] = [...ctx.getImageData(0, 0, 1, 1).data].map(linear);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const found = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = walker.nextNode());) {
    const of = node.parentElement, style = getComputedStyle(of);
    const left = of.closest(":disabled, .visually-hidden, script, style, svg");
    if (!node.data.trim() || left || !of.checkVisibility({ visibilityProperty: true })) continue;
    const chain = [];
    for (let up = of; up; up = up.parentElement) chain.unshift(getComputedStyle(up).backgroundColor);
    chain.forEach(paint);
    const under = light();
    paint(style.color);
    const over = light(), size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
    const contrast = (Math.max(over, under) + .05) / (Math.min(over, under) + .05);
    const enough = contrast >= (large ? 3 : 4.5);
    found.push({ text: node.data.trim().slice(0, 40), at: `${of.tagName}.${of.className}`, contrast, enough });
  }
  return found;
}"""
"""The texts that are shown, with the contrast of their color to what is painted below them (WCAG 2.2, relative luminance)."""


@pytest.mark.parametrize("width", [420, 1280])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_nothing_is_wider_than_the_window_and_every_text_has_the_contrast_of_wcag_aa(seen: Seen, width: int, theme: Any) -> None:
    """On a phone and a laptop."""
    seen.page.emulate_media(color_scheme=theme)
    seen.page.set_viewport_size({"width": width, "height": 800})
    page = swept(seen)
    for tab in ("study", "stream", "patch"):
        page.click(f"#tab-{tab}")
        expect(page.locator(f"#{tab}")).to_be_visible()
        assert page.evaluate("() => document.documentElement.scrollWidth") <= width
        texts = page.evaluate(FAINT)
        assert len(texts) > 20
        assert [one for one in texts if not one["enough"]] == [], tab


def test_a_key_is_asked_for_and_stays_in_the_tab(browser: Browser, served: Served) -> None:
    with running(served, keys=Keys([(KEY, False)])) as found:
        context = browser.new_context()
        seen = Seen(context, found)
        seen.refused = 1
        page = seen.go(tab="patch")
        expect(page.locator("#key")).to_be_visible()
        expect(page.locator("#patch")).to_be_hidden()  # a browser would send its forms by itself
        for key, told in (("another-key-than-it-has", "key"), (f"{KEY}\N{ZERO WIDTH SPACE}", "characters that no header can have")):
            page.get_by_label("This server needs a key").fill(key)
            page.click("#key button")
            expect(page.locator("#banner")).to_contain_text(told)
        page.get_by_label("This server needs a key").fill(KEY)
        page.click("#key button")
        expect(page.locator("#strip .couple").first).to_be_visible()
        expect(page.locator("#key")).to_be_hidden()
        stored = page.evaluate("() => [Object.values(sessionStorage), localStorage.length, document.cookie]")
        assert stored == [[KEY], 0, ""]
        assert KEY not in page.url
        page.click("#tab-study")
        expect(page.locator("#study-body")).to_contain_text("--study-runs")
        context.close()
        assert seen.wrong == []
