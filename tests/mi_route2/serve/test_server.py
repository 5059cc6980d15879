"""The server beside completions: the token, limits, sweeps, runs, metrics, and its end."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from served import OTHER, PROMPT, SITE, TOKEN, Running, bearer, metrics, random_micro, refusal, running, unhurried, until

from mi_route2 import sweep
from mi_route2.engine import Capture, Engine, Request, Sampling
from mi_route2.patching import attribute, edges
from mi_route2.patching.patches import Patch
from mi_route2.runs.record import TokenSelection
from mi_route2.serve.client import PatchStudy, ServerError
from mi_route2.serve.command import serve
from mi_route2.serve.models import load
from mi_route2.serve.options import ServerLimits
from mi_route2.sites import Site

pytestmark = pytest.mark.process

MODEL = "tests.support.served:random_micro"
PATCH = {"site": SITE, "position": 3, "source": {"run": "mine", "position": 3}}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(random_micro(context=512), token=TOKEN, limits=ServerLimits(sweeps=1, cells=200, max_body=100_000)) as one:
        yield one


@pytest.fixture
def client(server: Running) -> Iterator[PatchStudy]:
    with PatchStudy(server.url, TOKEN) as one:
        yield one
        one.unsteer()


# The token


@pytest.mark.parametrize("header", [None, "Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN}x", TOKEN, "Bearer \xe9\xe9\xe9"])
def test_nobody_gets_in_without_the_token(server: Running, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header.encode("latin-1")}
    for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/v1/runs"), ("GET", "/metrics")):
        body = {"prompt": PROMPT} if method == "POST" else None
        response = server.http.request(method, path, headers=headers, json=body)
        assert response.status_code == 401, path
        assert "Authorization: Bearer TOKEN" in response.json()["error"]["message"]
    assert server.http.get("/health").status_code == 200
    assert server.http.get("/v1/page").json()["token_needed"] is True


def test_what_is_refused_leaves_nothing_behind(client: PatchStudy) -> None:
    for given in (
        {"vectors": {"a": [1.0] * 16, "b": [1.0, 2.0]}, "name": "x", "steering_vectors": {SITE: "b"}},
        {"vectors": {"a": [1.0] * 16}, "name": "x", "steering_vectors": {SITE: "missing"}},
        {"vectors": {"a": [1.0] * 16}, "steering_vectors": {SITE: "a"}},
    ):
        refusal(client.steer, **given)
        found = client.steer()
        assert (set(found["vectors"]), found["held"]) == ({"probe", "push"}, [])
    assert refusal(client.unsteer, name="x").status == 404


# Limits


def test_limits_answer_with_a_sentence(server: Running, client: PatchStudy) -> None:
    large = refusal(client.complete, [1] * 60_000)
    assert (large.status, large.code) == (413, "too_large")
    assert "--max-body" in str(large)
    many = refusal(client.sweep, [5] * 400, [6] * 400, answer=5, foil=6)
    assert (many.status, "800 cells" in str(many)) == (413, True)


def test_a_full_queue_answers_429() -> None:
    with (
        running(random_micro(context=512), limits=ServerLimits(rows=1, queue=1)) as small,
        PatchStudy(small.url) as study,
        unhurried(small),
    ):
        streams = []
        for _ in range(2):
            streams.append(study.stream(PROMPT, max_tokens=480, ignore_eos=True))
            if len(streams) == 1:
                next(streams[0])
        body = {"prompt": PROMPT, "n": 2, "max_tokens": 1}
        found = small.http.post("/v1/completions", json=body)
        assert (found.status_code, found.json()["error"]["code"], found.headers["Retry-After"]) == (429, "queue_full", "1")
        streams[0].close()


def test_metrics_count_what_runs_what_was_generated_and_what_the_prefix_cache_found() -> None:
    with running(random_micro(context=512)) as small, PatchStudy(small.url) as study:
        prompt = list(range(3, 40))
        for _ in range(2):
            study.complete(prompt, max_tokens=5, ignore_eos=True)
        found = metrics(small)
        assert (found["tokens_total"], found["running"], found["waiting"]) == (10, 0, 0)
        assert found["prefix_hits_total"] >= 2
        longer = PROMPT.replace("add 3", "add 3 then add 3")  # whose new tokens have no partner
        grid = study.sweep(PROMPT, longer, " +", " *")
        assert metrics(small)["cells_total"] == 2 * (len(grid.columns) - len(grid.skipped)) < grid.values.size
        with unhurried(small):
            stream = study.stream(PROMPT, max_tokens=400, ignore_eos=True)
            next(stream)
            until(lambda: metrics(small)["running"] == 1)
            assert metrics(small)["slots"] == 1
            stream.close()


def test_pages_of_other_hosts_are_refused() -> None:
    with running(random_micro()) as local:
        port = local.url.rpartition(":")[2]
        for headers, status in (
            ({"Host": f"localhost:{port}"}, 200),
            ({"Host": f"evil.example:{port}"}, 400),
            ({"Origin": "http://evil.example"}, 400),
            ({"Origin": local.url}, 200),
        ):
            assert local.http.get("/health", headers=headers).status_code == status, headers


# Sweeps


EVENT = re.compile(r"^event: (\w+)\ndata: (.*)$", re.M)


def test_a_sweep_over_http_is_the_sweep_of_the_process(server: Running, client: PatchStudy) -> None:
    served = random_micro(context=512)
    given: dict[str, Any] = {"answer": " +", "foil": " *", "sites": ["resid_pre", "z"], "heads": True}
    truth = sweep(served.host, clean=PROMPT, corrupt=OTHER, tokenizer=served.tokenizer, **given)
    cells, totals = [], set()

    def progress(some: list[Any], total: int) -> None:
        cells.extend(some)
        totals.add(total)

    found = client.sweep(PROMPT, OTHER, progress=progress, **given)
    np.testing.assert_allclose(found.values, truth.values, rtol=0, atol=1e-5)
    assert (found.sites, found.positions, found.labels, found.grader) == (truth.sites, truth.positions, truth.labels, truth.grader)
    assert totals == {found.values.size} == {len(cells)}
    at = {(str(cell.target), cell.position): cell.value for cell in cells}
    assert all(at[str(site), p] == found.values[i, j] for i, site in enumerate(found.sites) for j, p in enumerate(found.positions))
    whole = client._call("POST", "/v1/patch_sweep", {"clean": PROMPT, "corrupt": OTHER, **given})
    assert whole["grid"]["values"] == found.values.tolist()
    body = {"clean": PROMPT, "corrupt": OTHER, "stream": True, **given}
    streamed = server.http.post("/v1/patch_sweep", json=body, headers=bearer(TOKEN))
    (summary,) = [json.loads(data) for event, data in EVENT.findall(streamed.text) if event == "summary"]
    for one in (whole, summary):
        assert min(one["grid"].pop("seconds").values()) > 0
    assert summary == whole
    for positions in ([2, " sub"], torch.tensor([2, 5]), np.array([5, 2])):
        assert client.sweep(PROMPT, OTHER, " +", " *", positions=positions).positions == (2, 5)
    assert client.sweep(PROMPT, OTHER, " +", " *", sites=truth.sites[:2]).sites == truth.sites[:2]


@pytest.mark.parametrize(
    ("given", "status", "param", "sentence"),
    [
        ({"answer": " + 3"}, 400, "answer", "is 2 tokens"),
        ({"answer": "nonsense"}, 400, "answer", "no token matches"),
        ({"sites": "nowhere"}, 400, "sites", "nowhere"),
        ({"corrupt": "nonsense"}, 400, "corrupt", "no token matches"),
        ({"positions": [99]}, 400, "positions", "position 99 is outside"),
        ({"metric": "kl"}, 400, "answer", "takes no answer"),
        ({"metric": "logprob"}, 400, "foil", "takes no foil"),
        ({"foil": None}, 400, "foil", "needs foil"),
        ({"foil": 10**6}, 400, "foil", "is not a token"),
        ({"metric": "other"}, 422, "metric", "metric"),
        ({"foil": " +"}, 400, "answer", "same token"),
        ({"steps": 3}, 400, "steps", "an exact sweep takes no steps"),
        ({"method": "atp", "steps": 3}, 400, None, "no other method any"),
        ({"method": "ig", "steps": 100}, 413, None, "are more than 200: name fewer sites or positions"),
    ],
)
def test_a_sweep_is_refused_before_it_starts(client: PatchStudy, given: Any, status: int, param: str | None, sentence: str) -> None:
    found = refusal(client.sweep, **{"clean": PROMPT, "corrupt": OTHER, "answer": " +", "foil": " *", **given})
    assert (found.status, sentence in str(found)) == (status, True), str(found)
    assert found.param == param


@pytest.mark.parametrize("given", [{"method": "atp"}, {"method": "atp*", "together": True}, {"method": "ig", "steps": 2}])
def test_an_estimate_over_http_is_the_librarys(client: PatchStudy, given: Any) -> None:
    served = random_micro(context=512)
    asked: dict[str, Any] = {"answer": " +", "foil": " *", "sites": ["z", "q"], "heads": True, "positions": [2, " sub"], **given}
    truth = attribute(served.host, clean=PROMPT, corrupt=OTHER, tokenizer=served.tokenizer, **asked)
    found = client.sweep(PROMPT, OTHER, **asked)
    np.testing.assert_allclose(found.values, truth.values, rtol=0, atol=1e-5)
    assert (found.kind, found.sites, found.columns) == (truth.kind, truth.sites, truth.columns)
    whole = client._call("POST", "/v1/patch_sweep", {"clean": PROMPT, "corrupt": OTHER, **asked})
    assert whole["grid"]["values"] == found.values.tolist()


def test_edges_over_http_are_the_librarys(client: PatchStudy) -> None:
    served = random_micro(context=512)
    truth = edges(served.host, clean=PROMPT, corrupt=OTHER, answer=" +", foil=" *", tokenizer=served.tokenizer)
    found = client.edges(PROMPT, OTHER, answer=" +", foil=" *", k=5, kept=[0, 5, len(truth)])
    assert found["faithfulness"] == pytest.approx(truth.faithfulness([0, 5, len(truth)]).tolist(), abs=1e-4)
    expected = {(edge.sender, edge.receiver): edge.score for edge in truth.top(5)}
    assert {(edge["source"], edge["target"]): edge["weight"] for edge in found["graph"]["edges"]} == pytest.approx(
        expected, abs=1e-5
    )
    assert found["total"] == len(truth)
    for wrong, status in (({"steps": 3}, 400), ({"foil": " +"}, 400), ({"kept": [-1]}, 422), ({"method": "atp"}, 422)):
        assert refusal(client.edges, PROMPT, OTHER, **{"answer": " +", "foil": " *", **wrong}).status == status


def test_a_cell_is_what_the_patched_model_answers(client: PatchStudy) -> None:
    served = random_micro(context=512)
    engine, site = Engine(served.host), Site(1, "z")
    clean, corrupt = (tuple(served.encode(text)) for text in (PROMPT, OTHER))
    (run,) = engine.generate([Request(clean, Sampling(max_new=1), capture=(Capture(site, TokenSelection(positions=(2,))),))])
    share = torch.tensor([[0.0], [1.0]]).expand(2, 8)
    patch = Patch(site, 2, run.captured[site].rows[0], share.clone())
    (truth,) = engine.generate([Request(corrupt, Sampling(max_new=4, logprobs=10, stop_tokens=(0,)), patch=(patch,))])
    found = client.cell(PROMPT, OTHER, "blocks.1.z[1]", 2, max_tokens=4)
    assert found["token_ids"] == truth.ids
    torch.testing.assert_close([one["logprob"] for one in found["top"]], list(truth.tokens[0].top.values()), rtol=0, atol=1e-5)
    assert refusal(client.cell, PROMPT, OTHER, "blocks.1.z[7]", 2).status == 400
    assert refusal(client.cell, PROMPT, OTHER, SITE, 400).status == 400
    refused = refusal(client.cell, PROMPT, OTHER, SITE, 2, alpha=1e39)  # a number, and infinity in float32
    assert refused.status == 400
    assert "alpha" in str(refused)


# Runs and studies


def test_a_captured_run_is_read_patched_from_and_dropped(client: PatchStudy) -> None:
    client.complete(PROMPT, capture=[{"site": SITE, "part": "prompt"}], run="mine", max_tokens=1)
    assert refusal(client.complete, PROMPT, capture=[SITE], run="mine").status == 409
    served = random_micro(context=512)
    ids = served.encode(PROMPT)
    rows = served.host.capture([Site.parse(SITE)], torch.tensor([ids]))[Site.parse(SITE)][0]
    asked: dict[str, Any] = {"max_tokens": 3, "temperature": 0, "logprobs": 0, "ignore_eos": True}
    one = client.complete(OTHER, patch=[PATCH], **asked)["choices"][0]["logprobs"]
    other = client.complete(OTHER, patch=[{**PATCH, "source": rows[3]}], **asked)["choices"][0]["logprobs"]
    assert one["token_logprobs"] == pytest.approx(other["token_logprobs"], abs=1e-5)
    client.drop("mine")
    assert refusal(client.drop, "mine").status == 404


def test_tokens_and_alignment(client: PatchStudy) -> None:
    found = client._call("POST", "/v1/tokenize", {"text": PROMPT})
    assert (found["tokens"][:3], found["ids"]) == (["<bos>", "# task:", " add"], random_micro().encode(PROMPT))
    found = client._call("POST", "/v1/align", {"clean": PROMPT, "corrupt": PROMPT + "\n```python\n" + "class Solution:\n"})
    assert (found["partner"], found["differs"]) == ([*range(10), None, None], [])
    assert client._call("POST", "/v1/align", {"clean": PROMPT, "corrupt": OTHER})["differs"] == [2]
    assert "12 corrupt tokens on 10 clean ones" in found["summary"]


def test_the_page_and_its_parts_are_served(server: Running) -> None:
    page = server.http.get("/")
    assert page.status_code == 200
    assert "default-src 'self'" in page.headers["Content-Security-Policy"]
    for name in re.findall(r'(?:src|href)="(/[^"]+)"', page.text):
        assert server.http.get(name).status_code == 200, name
    assert "/v1/completions" in server.http.get("/openapi.json").json()["paths"]


# What ends


def test_a_dead_engine_ends_every_stream_with_a_reason_and_health_says_so() -> None:
    with running(random_micro(context=512)) as doomed, PatchStudy(doomed.url) as study, unhurried(doomed):
        chunks = study.stream(PROMPT, max_tokens=480, ignore_eos=True)
        next(chunks)

        def die() -> None:
            raise SystemExit("out of memory, for example")

        doomed.server.owner._post(die)
        with pytest.raises(ServerError, match=r"thread failed with SystemExit$"):
            list(chunks)
        response = doomed.http.get("/health")
        assert response.status_code == 503
        assert response.json()["error"]["message"] == "the engine's thread failed with SystemExit"
        found = refusal(study.complete, PROMPT)
        assert found.status == 503
        assert str(found).endswith("thread failed with SystemExit")


def test_another_address_needs_a_token() -> None:
    with pytest.raises(ValueError, match="needs a token: --token "):
        serve(host="0.0.0.0")


def test_models_are_found_by_name_and_refused_with_what_there_is(tmp_path: Path) -> None:
    assert load(MODEL).name == "micro"
    with pytest.raises(ValueError, match="choose micro, smollm2"):
        load("no.such.module:function")
    with pytest.raises(ValueError, match="return a mi_route2"):
        load("builtins:dict")
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        load(str(tmp_path / "nothing"))
    assert refusal(PatchStudy("http://127.0.0.1:9").complete, PROMPT).code == "unreachable"
