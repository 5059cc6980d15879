"""The page as in ``test_page``: mouse and keys, heads, and the sweep of a circuit that was planted."""

import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Semaphore, Thread
from typing import Any
from urllib.parse import parse_qs

import pytest
import torch
from playwright.sync_api import Browser, expect
from served import OTHER, PROMPT, Running, random_micro, running, unhurried

import mi_route2.serve
from mi_route2.serve.models import Served
from mi_route2.serve.owner import SweepJob
from tests.mi_route2.serve.test_page import (
    Seen,
    browser,
    cell,
    grid,
    labels,
    numbers,
    opened,
    press_sweep,
    runs,
    seen,
    served,
    server,
    stream,
    streamed,
    swept,
)

pytestmark = pytest.mark.process
__all__ = ["browser", "grid", "runs", "seen", "served", "server"]  # fixtures


def test_the_mouse_shows_a_cells_numbers_and_leaves_with_them(seen: Seen) -> None:
    page = swept(seen)
    target = cell(page, "blocks.1.resid_pre", 1)
    target.hover()
    expect(page.locator("#tip")).to_be_visible()
    shown = f"{numbers(target.get_attribute('aria-label'))[0]:.3f}".replace("-", "\N{MINUS SIGN}")
    expect(page.locator("#tip")).to_contain_text(shown)
    page.mouse.move(1, 1)
    expect(page.locator("#tip")).to_be_hidden()


def test_the_tip_of_a_cell_tells_its_value_as_soon_as_it_is_there(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    ready, cells = Semaphore(0), SweepJob._cells
    monkeypatch.setattr(SweepJob, "_cells", lambda job: ready.acquire(timeout=20) and cells(job))
    page = opened(seen, sites="resid_pre,attn_out,mlp_out")
    page.click("#sweep")
    cell(page, "blocks.0.resid_pre", 5).focus()
    expect(page.locator("#tip")).to_contain_text("not done yet")
    ready.release()
    expect(page.locator("#tip")).to_contain_text("recovered")
    expect(page.locator("#sweep-cancel")).to_be_visible()
    ready.release(99)
    expect(page.locator("#peak")).to_contain_text("peak")


def test_a_grid_is_of_its_sites_in_any_order_and_of_what_was_changed_and_changed_back(seen: Seen) -> None:
    page = swept(seen)
    stale = page.locator("#map-note", has_text="not of what stands above")
    kept, lost = "**swept=1*", re.compile("^((?!swept=1).)*$")  # by a link
    for count, link in ((1, lost), (0, kept)):
        page.locator("#sites button", has_text="residual").first.click()
        expect(stale).to_have_count(count)
        page.wait_for_url(link)
    held: list[Any] = []
    page.route("**/v1/patch_sweep", lambda route: held.append(route))
    for value, count, link in (("0.5", 1, lost), ("1.0", 0, kept), ("0.5", 1, lost)):
        page.fill("#alpha", value)
        expect(stale).to_have_count(count)
        page.wait_for_url(link)
        if not held:  # also before its first answer
            with page.expect_request("**/v1/patch_sweep"):
                page.click("#sweep")
    held.pop().continue_()
    expect(stale).to_have_count(0)
    page.wait_for_url(kept)


def test_chips_choose_the_sites_and_control_enter_sweeps_them_head_by_head(seen: Seen, served: Served) -> None:
    page = opened(seen, sites="resid_pre")
    chip = page.locator("#sites button[title='z, head by head']")
    chip.click()
    expect(chip).to_have_attribute("aria-pressed", "true")
    page.locator("#sites button[aria-pressed='true']").first.click()
    expect(page.locator("#sites button[aria-pressed='true']")).to_have_count(1)
    page.locator("#corrupt").press("Control+Enter")
    expect(page.locator("#peak")).to_contain_text("peak")
    rows = {label.split(",", 1)[0] for label in labels(page, ".cell")}
    heads = served.host.model.config.heads  # pyright: ignore[reportAttributeAccessIssue]
    layers = len(served.host.model.blocks)  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
    assert rows == {f"blocks.{layer}.z[{head}]" for layer in range(layers) for head in range(heads)}


def test_a_sweep_at_once_after_typing_marks_the_columns_in_which_these_prompts_differ(seen: Seen, served: Served) -> None:
    one = served.examples[0]
    page = swept(seen)
    typed = one.corrupt.replace("3", "5") if "3" in one.corrupt else one.corrupt.replace("4", "6")
    page.route("**/v1/align", lambda _: None)  # which has not answered yet
    page.fill("#corrupt", typed)
    page.click("#sweep")
    expect(page.locator("#map .tick.differs")).to_have_count(2)
    page.unroute("**/v1/align")
    page.fill("#corrupt", one.corrupt)
    page.fill("#corrupt", typed)
    expect(page.locator(".couple.differs")).to_have_count(2)


def test_a_number_that_is_left_empty_or_is_none_is_no_zero(seen: Seen) -> None:
    seen.refused = 1
    page = opened(seen)
    page.fill("#alpha", "")
    page.click("#sweep")
    expect(page.locator("#patch-form [data-field=alpha] .error")).to_contain_text("alpha: ")
    # Nor does the browser refuse one between the steps of its arrows
    for tab, button, name, value in (("patch", "sweep", "alpha", 0.25), ("stream", "go", "temperature", 0.75)):
        page.click(f"#tab-{tab}")
        page.fill(f"#{name}", str(value))
        with page.expect_request(lambda one, name=name: name in (one.post_data or "")) as asked:
            page.click(f"#{button}")
        assert asked.value.post_data_json[name] == value
    for name, value in (("temperature", ""), ("max_tokens", ""), ("seed", "one")):
        stream(page, **{name: value})
        expect(page.locator(f"#stream-form [data-field={name}] .error")).to_contain_text(f"{name}: ")


def test_home_end_and_pages_move_to_the_ends_of_the_grid(seen: Seen) -> None:
    page = swept(seen)
    last = max(int(label.split("position ")[1].split()[0]) for label in labels(page, ".cell"))
    page.locator(".cell[tabindex='0']").focus()
    for key, position in (("PageDown", None), ("End", last), ("Home", 0), ("PageUp", 0)):
        page.keyboard.press(key)
        label = page.evaluate("() => document.activeElement.getAttribute('aria-label')")
        assert position is None or f"position {position} " in label, (key, label)
    rows = page.locator(".cell[aria-label*='position 0 ']")
    page.keyboard.press("Control+Home")
    top = page.evaluate("() => document.activeElement.getBoundingClientRect().top")
    assert top == min(one["y"] for one in (rows.nth(i).bounding_box() for i in range(rows.count())) if one)


def test_arrows_walk_over_the_tabs_and_over_the_tokens(seen: Seen) -> None:
    page = seen.go(tab="patch")
    page.locator("#tab-patch").focus()
    for key, tab in (
        ("ArrowRight", "stream"),
        ("ArrowRight", "study"),
        ("ArrowRight", "patch"),
        ("ArrowLeft", "study"),
        ("ArrowLeft", "stream"),
    ):
        page.keyboard.press(key)
        expect(page.locator(f"#tab-{tab}")).to_be_focused()
        expect(page.locator(f"#{tab}")).to_be_visible()
    expect(page.locator("#prompt")).not_to_have_value("")
    streamed(page)
    tokens = page.locator("#tokens .token")
    tokens.first.focus()
    for key, place in (("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("ArrowLeft", 0), ("ArrowLeft", 0)):
        page.keyboard.press(key)
        expect(tokens.nth(place)).to_be_focused()
        assert page.locator("#tokens .token[tabindex='0']").count() == 1


def test_a_chip_chooses_what_the_quarantine_adds(seen: Seen) -> None:
    page = opened(seen, sites="resid_pre")
    page.locator("#sites button[aria-pressed='true']").click()
    page.locator("#sites button[title='quarantine_out']").click()
    press_sweep(page)
    assert {label.split(",", 1)[0].rpartition(".")[2] for label in labels(page, ".cell")} == {"quarantine_out"}


def test_cancel_ends_a_sweep_on_the_page_and_in_the_server(seen: Seen, server: Running) -> None:
    page = opened(seen, sites="resid_pre")
    owner = server.server.owner
    sweep = owner._sweep
    owner._sweep = lambda: None  # no forward, so that the sweep lasts until it is cancelled
    try:
        page.click("#sweep")
        expect(page.locator("#sweep-cancel")).to_be_visible()
        page.click("#sweep-cancel")
        expect(page.locator("#sweep-cancel")).to_be_hidden()
    finally:
        owner._sweep = sweep
    press_sweep(page)
    assert not server.server.sweeping


def test_the_sweep_of_a_planted_circuit_peaks_at_its_cell(browser: Browser) -> None:
    """Only head 1 of the second block writes to the stream: at the last position it carries the whole difference, or nothing."""
    made = random_micro(context=64)
    assert made.adapters is not None
    net: Any = made.host.model
    with torch.no_grad():
        for p in (*made.adapters.kept_parameters().values(), *made.adapters.quarantine_parameters().values()):
            p.zero_()
        for layer, block in enumerate(net.blocks):
            block.mlp.down.weight.zero_()
            width = block.attn.o.weight.shape[1] // 2
            block.attn.o.weight[:, : width if layer else None] = 0.0
    with running(made) as found:
        context = browser.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
        window = Seen(context, found)
        page = opened(window, sites="z", clean=PROMPT, corrupt=OTHER, answer=" +", foil=" *")
        page.click("#sweep")
        last = len(made.encode(OTHER)) - 1
        expect(page.locator("#peak")).to_contain_text(f"at blocks.1.z[1], {last} ")
        for label in labels(page, ".cell"):
            planted = label.startswith(f"blocks.1.z[1], position {last} ")
            assert numbers(label)[0] == pytest.approx(float(planted), abs=1e-3), label
        context.close()
        assert window.wrong == []


class Breaking(BaseHTTPRequestHandler):
    """Answers with the page's module, and a POST with one event of an answer that is longer."""

    def do_GET(self) -> None:
        code = (Path(mi_route2.serve.__file__).parent / "page" / "net.js").read_bytes() if self.path == "/net.js" else b""
        self._answer("text/javascript" if code else "text/html", code, len(code))

    def do_POST(self) -> None:
        self._answer("text/event-stream", b'data: {"n": 1}\n\n', 100)

    def _answer(self, kind: str, body: bytes, length: int) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Write no line for a request."""


def test_an_answer_that_breaks_off_is_told_in_a_sentence(browser: Browser) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Breaking) as breaking:
        Thread(target=breaking.serve_forever, daemon=True).start()
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{breaking.server_port}/")
        told = page.evaluate("""async () => {
          const { events } = await import("/net.js");
          try { for await (const one of events("/events", {})) ; }
          catch (error) { return error.message; }
        }""")
        page.close()
        breaking.shutdown()
    assert told == "the connection ended before the answer did: press the button again"


def test_a_slider_that_is_moved_before_the_first_token_acts_on_the_stream_that_waits_for_it(seen: Seen, server: Running) -> None:
    def unnamed(route: Any) -> None:
        answer = route.fetch().json()
        route.fulfill(json=answer | {"monitors_example": {**answer["monitors_example"], "name": ""}})

    seen.page.route("**/v1/study", unnamed)
    page = seen.go(tab="stream")
    expect(page.locator("#threshold-note")).to_contain_text("Monitor")
    sent: dict[str, Any] = {}
    page.on(
        "request", lambda one: sent.update({one.url.rpartition("/")[2]: one.post_data_json}) if "/streams/" in one.url else None
    )
    with unhurried(server, 0.2):
        stream(page)
        for name in ("scale", "threshold"):
            page.locator(f"#{name}").press("End")
        expect(page.locator("#tokens .made").nth(2)).to_be_visible()
        held: list[Any] = []
        page.route("**/threshold", lambda route: route.continue_() if held else held.append(route))
        values = []
        for key in ("Home", "End"):
            page.locator("#threshold").press(key)
            values.append(float(page.input_value("#threshold")))
            page.wait_for_timeout(200)
        assert sent["threshold"]["threshold"] == values[0]  # the second waits, or it might be overtaken
        with page.expect_response(lambda one: one.url.endswith("threshold") and one.request != held[0].request):
            held[0].continue_()
        # A change that was refused is told until that slider is moved again, or the next stream has its value
        seen.refused = 1
        page.unroute("**/threshold")
        page.route("**/threshold", lambda route: route.fulfill(status=409, json={"error": {"message": "it still waits"}}))
        page.locator("#threshold").press("Home")
        expect(page.locator("#act-error")).to_have_text("it still waits")
        with page.expect_response("**/scale"):
            page.locator("#scale").press("ArrowLeft")
        page.wait_for_timeout(100)
        expect(page.locator("#act-error")).to_be_visible()
        page.unroute("**/threshold")
        page.locator("#threshold").press("End")
        expect(page.locator("#act-error")).to_be_hidden()
        page.click("#stop")
    assert sent["scale"] == {"scale": pytest.approx(3.95e6)}  # of a vector that was sent at a millionth
    site = seen.http.get("/v1/study").json()["monitors_example"]["site"]
    assert sent["threshold"] == {"monitor": site, "threshold": float(page.input_value("#threshold"))}  # its name, if it has none


def test_what_was_read_for_another_stream_or_probe_does_not_stay(seen: Seen, server: Running, served: Served) -> None:
    page = seen.go(tab="stream")
    expect(page.locator("#threshold-note")).to_contain_text("Monitor")
    # Nor does trace or legend stay beside a stream that is stopped before its first token, or one that is sent anew
    sent: list[Any] = []
    page.check("#again")
    page.route("**/v1/completions", lambda route: None if sent else (sent.append(route), route.continue_()))
    stream(page)
    for button in ("#stop", "#go"):
        expect(page.locator("#trace svg")).to_have_count(1)
        expect(page.locator("#stream-status")).to_have_text("waiting for the first token")
        page.click(button)
        for gone in ("#trace svg", "#stream-legend:visible"):
            expect(page.locator(gone)).to_have_count(0)
        sent.clear()
        page.click("#go")
    page.uncheck("#again")
    page.unroute("**/v1/completions")
    streamed(page)
    page.locator("#tokens .token").nth(2).hover()
    expect(page.locator("#token-detail .facts")).to_be_visible()
    page.locator("#probe").dispatch_event("click")  # with the mouse on the token
    expect(page.locator("#threshold-note")).to_contain_text("toward clean")
    assert all(label.endswith(", not read") for label in labels(page, "#tokens .token"))
    for gone in ("#tip:visible", "#tokens .above, #tokens .below", "#token-detail .facts", "#trace svg", "#stream-legend:visible"):
        expect(page.locator(gone)).to_have_count(0)
    with unhurried(server, 0.2):
        stream(page)
        expect(page.locator("#tokens .made").nth(1)).to_be_visible()
        page.locator("#tokens .token").nth(2).hover()
        expect(page.locator("#token-detail .facts")).to_be_visible()
        page.click("#go")
        expect(page.locator("#go")).to_have_text("Start again")
        expect(page.locator("#token-detail .facts")).to_have_count(0)
        expect(page.locator("#stream-status")).to_have_text("waiting for the first token")
        expect(page.locator("#scale-note")).to_contain_text("the next stream")
        expect(page.locator("#tokens .made").nth(1)).to_be_visible()
        first = page.evaluate("""() => {
          [...document.querySelectorAll("#tokens .made")].at(-1).dispatchEvent(new PointerEvent("pointerover", { bubbles: true }));
          return document.querySelector("#token-detail").textContent;
        }""")
        assert "the last token is never an input" in first
        expect(page.locator("#token-detail")).to_contain_text("score")  # as soon as it was one
        page.select_option("#adapters", "deployed")  # for the next stream
        page.click("#stop")
        expect(page.locator("#stream-status")).to_have_text(re.compile("(stopped|done).*, adapters full$"))
        page.check("#again")
        seen.refused = 1
        prompt = page.input_value("#prompt")
        stream(page, prompt="what is this")
        expect(page.locator("#stream-status")).to_contain_text("ended by an error")
        for gone in ("#trace svg", "#stream-legend:visible"):
            expect(page.locator(gone)).to_have_count(0)
        page.uncheck("#again")
        page.fill("#prompt", prompt)
    held: list[Any] = []
    page.route("**/v1/completions", lambda one: held.append(one) if "capture" in one.request.post_data else one.continue_())
    before = float(page.input_value("#threshold"))
    page.fill("#block", "0")
    page.click("#probe")
    page.fill("#seed", "6")  # must not keep the threshold of the monitor before
    page.click("#go")
    expect(page.locator("#go")).to_have_text("Start again")
    with page.expect_request(lambda one: '"monitors"' in (one.post_data or "")) as asked:
        for one in held:
            one.continue_()
    (monitor,) = asked.value.post_data_json["monitors"]
    assert monitor["site"] == "blocks.0.resid_post"
    assert monitor["threshold"] != before
    expect(page.locator("#stream-status")).to_contain_text("done")
    # A link has the prompts of its probe, also if the Patch tab has others by now
    page.unroute("**/v1/completions")
    page.click("#tab-patch")
    page.fill("#clean", "")
    page.fill("#corrupt", served.examples[1].corrupt)
    page.wait_for_url(lambda url: parse_qs(url).get("corrupt") == [served.examples[1].corrupt])
    link = page.url.replace("tab=patch", "tab=stream")
    page.goto("about:blank")
    page.goto(link)
    expect(page.locator("#threshold-note")).to_contain_text("toward clean")
    assert float(page.input_value("#threshold")) == monitor["threshold"]
    with page.expect_request(lambda one: '"monitors"' in (one.post_data or "")) as asked:
        stream(page)
    assert asked.value.post_data_json["monitors"] == [monitor]
    expect(page.locator("#stream-status")).to_contain_text("done")
    with page.expect_request(lambda one: '"capture"' in (one.post_data or "")) as asked:
        page.click("#probe")
    assert asked.value.post_data_json["prompt"] in ("", served.examples[1].corrupt)
    expect(page.locator("#probe")).to_be_enabled()
    # If it cannot be made, its threshold is not another monitor's
    page.goto("about:blank")
    page.goto(link.replace("s.block=0", "s.block=9"))
    expect(page.locator("#act-error")).to_contain_text("blocks.9")
    assert float(page.input_value("#threshold")) == seen.http.get("/v1/study").json()["monitors_example"]["threshold"]
    page.locator("#threshold").press("End")  # nor is the other's the link's
    page.wait_for_url(re.compile("^((?!s.block).)*$"))


def test_marks_and_errors_are_of_the_prompts_beside_which_they_stand(seen: Seen, served: Served) -> None:
    seen.refused = 1
    page, one = seen.go(tab="patch", sites="resid_pre"), served.examples[0]
    expect(page.locator("#strip .couple.differs")).to_have_count(1)
    held: list[Any] = []
    page.route("**/v1/patch_sweep", lambda route: held.append(route))
    with page.expect_request("**/v1/patch_sweep"):
        page.click("#sweep")
    page.fill("#clean", one.corrupt)  # equal to the corrupt prompt, so that nothing differs
    expect(page.locator("#strip .couple.differs")).to_have_count(0)
    held.pop().continue_()
    expect(page.locator("#peak")).to_contain_text("peak")
    expect(page.locator("#map .tick.differs")).to_have_count(1)
    page.route("**/v1/align", lambda route: held.append(route) if "unknown" in route.request.post_data else route.continue_())
    with page.expect_request("**/v1/align"):
        page.fill("#clean", "# task: unknown")
    with page.expect_response("**/v1/align"):
        page.fill("#clean", one.clean)
    expect(page.locator("#strip .couple.differs")).to_have_count(1)
    with page.expect_response("**/v1/align"):
        held.pop().continue_()
    expect(page.locator("#patch-form .error:visible")).to_have_count(0)
    expect(page.locator("#strip .couple.differs")).to_have_count(1)
    # The grid says when it is of other prompts or settings than stand above, whose tokens it then does not mark
    page.unroute("**/v1/align")
    stale = page.locator("#map-note", has_text="not of what stands above")
    for name, value, other in (("foil", " -", False), ("corrupt", served.examples[1].corrupt, True)):
        before = page.input_value(f"#{name}")
        expect(stale).to_have_count(0)
        cell(page, "blocks.0.resid_pre", 2).hover()
        expect(page.locator("#strip .here")).to_have_count(1)
        for text, count in ((value, 1), (before, 0)):
            if other:
                with page.expect_response("**/v1/align"):
                    page.fill(f"#{name}", text)
            else:  # the same prompts are not aligned again, and their tokens stay marked
                page.fill(f"#{name}", text)
            expect(stale).to_have_count(count)
            if count:
                cell(page, "blocks.0.resid_pre", 3).hover()
                expect(page.locator("#strip .here")).to_have_count(0 if other else 1)
        expect(page.locator("#strip .couple.differs")).to_have_count(1)
    # What a sweep says at its end, or why it was refused, is not of prompts that were typed since
    page.fill("#corrupt", one.clean)
    with page.expect_request("**/v1/patch_sweep"):
        page.click("#sweep")
    page.fill("#corrupt", one.corrupt)
    expect(page.locator("#strip .couple.differs")).to_have_count(1)
    held.pop().continue_()
    expect(page.locator("#map-note")).to_contain_text("same score within the noise")
    expect(page.locator(".legend-words").first).to_contain_text("higher score")
    expect(page.locator(".legend-words").first).not_to_contain_text("clean")
    expect(page.locator("#strip-note")).to_contain_text("equal lengths")
    page.fill("#answer", "nowhere")
    with page.expect_request("**/v1/patch_sweep"):
        page.click("#sweep")
    page.fill("#answer", one.answer)
    held.pop().continue_()
    expect(page.locator("#patch-error")).to_contain_text("the sweep before: ")
    expect(page.locator("[data-field=answer] .error")).to_have_count(0)


def test_a_page_of_a_server_that_was_started_again_says_so(seen: Seen, served: Served) -> None:
    page = swept(seen)

    def another(route: Any) -> None:
        answer = route.fetch()
        route.fulfill(response=answer, headers=answer.headers | {"mi-route2-server": "of another model"})

    page.route("**/v1/patch_cell", another)
    cell(page, "blocks.0.resid_pre", 3).click()
    expect(page.locator("#cell-answer")).to_contain_text("reload")


def test_tokens_that_differ_are_marked_although_they_have_one_text_as_parts_of_characters_do(seen: Seen) -> None:
    page = seen.page

    def alike(route: Any) -> None:
        answer = route.fetch().json()
        route.fulfill(json=answer | {side: ["\N{REPLACEMENT CHARACTER}"] * len(answer[side]) for side in ("clean", "corrupt")})

    page.route("**/v1/align", alike)
    seen.go(tab="patch", sites="resid_pre")
    expect(page.locator("#strip .couple.differs")).to_have_count(1)
    press_sweep(page)
    expect(page.locator("#map .tick.differs")).to_have_count(1)
