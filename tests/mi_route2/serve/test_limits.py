"""Every limit of the server: those of ``Limits``, of what a key keeps, and the bounds of every field of every body."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import httpx
import pytest
import torch
from served import (
    ALICE,
    BOB,
    OTHER,
    PROMPT,
    SITE,
    Running,
    bearer,
    metrics,
    random_micro,
    refusal,
    running,
    sent,
    unhurried,
    until,
)  # fmt: skip

from mi_route2.serve import app, auth
from mi_route2.serve.api import openai, schema
from mi_route2.serve.api.schema import patch_of
from mi_route2.serve.auth import Keys
from mi_route2.serve.client import PatchStudy
from mi_route2.serve.options import Limits
from mi_route2.serve.state import QUICK

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(random_micro(context=512), keys=Keys([(ALICE, False), (BOB, False)]), limits=Limits(sweeps=1, rows=1)) as one:
        yield one


# Limits of the command


def test_one_key_sweeps_as_often_as_the_limit_says_and_another_key_still_may(server: Running, alice: PatchStudy) -> None:
    held = threading.Event()
    server.server.owner._post(lambda: held.wait(30))  # the engine's thread is busy, so that the first sweep cannot end
    body = {**PAIR, "answer": " +", "foil": " *"}
    first = threading.Thread(target=partial(alice.sweep, PROMPT, OTHER, " +", " *"))
    first.start()
    until(lambda: server.server.sweeping)
    try:
        response = server.http.post("/v1/patch_sweep", json=body, headers=bearer(ALICE))
    finally:
        held.set()
        first.join(20)
    assert (response.status_code, response.headers["Retry-After"]) == (429, "2")
    error = response.json()["error"]
    assert error["code"] == "too_many_sweeps"
    assert "1 sweeps of yours are running, which is the limit: wait" in error["message"]
    assert alice.sweep(PROMPT, OTHER, " +", " *").values.size
    with PatchStudy(server.url, BOB) as bob:
        assert bob.sweep(PROMPT, OTHER, " +", " *").values.size


@pytest.mark.parametrize("own", [None, 1000.0])
def test_the_servers_deadline_ends_a_completion_whatever_the_request_asks(own: float | None) -> None:
    with (
        running(random_micro(context=512), limits=Limits(deadline=0.2)) as small,
        PatchStudy(small.url) as study,
        unhurried(small, 0.05),
    ):
        given = {} if own is None else {"deadline": own}
        found = refusal(study.complete, PROMPT, max_tokens=400, ignore_eos=True, **given)
    assert found.status == 422
    assert "deadline of 0.2" in str(found), str(found)


@pytest.mark.parametrize(("size", "hits"), [(0, False), (2000, False), (1 << 20, True)])
def test_the_prefix_cache_holds_no_more_than_its_bytes(size: int, hits: bool) -> None:
    with running(random_micro(context=512), limits=Limits(prefix_bytes=size)) as small, PatchStudy(small.url) as study:
        prompt = random_micro().encode(PROMPT) * 5
        found = [study.complete(prompt, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in range(2)]
        assert found[0] == 0
        assert (found[1] > 0) == hits
        assert small.server.owner._engine.prefixes.bytes <= size


# What a key keeps


def test_a_key_keeps_so_many_vectors_and_no_more(alice: PatchStudy) -> None:
    row = [1.0] * 16
    for start in range(0, app.KEPT, 128):
        alice.steer(vectors={f"v{i}": row for i in range(start, start + 128)})
    found = refusal(alice.steer, vectors={"more": row})
    assert (found.status, f"at most {app.KEPT} vectors" in str(found), "/v1/steering/clear" in str(found)) == (400, True, True)
    alice.steer(vectors={"v0": [2.0] * 16})  # one that is replaced is not one more
    alice.unsteer(vectors=["v1"])
    assert len(alice.steer(vectors={"more": row})["vectors"]) == app.KEPT


def test_a_key_keeps_so_many_configurations_and_bytes(alice: PatchStudy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "KEPT", 2)
    for name in ("a", "b"):
        alice.steer(name=name, steering_vectors={SITE: "push"})
    found = refusal(alice.steer, name="c", steering_vectors={SITE: "push"})
    assert (found.status, "and 2 configurations" in str(found)) == (400, True)
    alice.steer(name="b", decode_steering_vectors={SITE: "push"})
    monkeypatch.setattr(app, "KEPT_BYTES", 200)
    found = refusal(alice.steer, vectors={"v": torch.ones(64, dtype=torch.float64)})
    assert (found.status, "of 200 bytes in all" in str(found)) == (400, True)


def test_a_held_configuration_is_read_where_long_bodies_are(alice: PatchStudy, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have millions of numbers, however short the body is that names it."""
    threads, made = list[str](), openai.request_of
    note = lambda *given, **named: (threads.append(threading.current_thread().name), made(*given, **named))[1]  # noqa: E731
    monkeypatch.setattr(openai, "request_of", note)
    alice.steer(name="a", steering_vectors={SITE: "push"})
    for hold in ({}, {"hold": "a"}):
        alice.complete(PROMPT, max_tokens=1, **hold)
    assert [name.startswith("prompts") for name in threads] == [False, True]


def test_a_request_that_waits_cannot_be_tuned_yet(server: Running, alice: PatchStudy) -> None:
    with unhurried(server):
        first = alice.stream(PROMPT, max_tokens=400, ignore_eos=True)
        next(first)
        with PatchStudy(server.url, ALICE) as other:
            second = threading.Thread(target=partial(other.complete, PROMPT, max_tokens=1, decode_steering_vectors={SITE: "push"}))
            second.start()
            until(lambda: len(server.server.open) == 2)
            found = refusal(alice.scale, max(server.server.open), 2.0)
            first.close()
            second.join(20)
    assert (found.status, found.code, "it still waits, or has just ended" in str(found)) == (409, "not_running", True)


# Bounds of fields


def sample(schema: Any, refs: Any) -> Any:
    """Return a small value that the schema allows."""
    if "$ref" in schema:
        schema = refs[schema["$ref"].rpartition("/")[2]]
    for key in ("const", "enum", "anyOf", "oneOf"):
        if key in schema:
            return schema[key] if key == "const" else schema[key][0] if key == "enum" else sample(schema[key][0], refs)
    match schema.get("type"):
        case "object":
            return {name: sample(schema["properties"][name], refs) for name in schema.get("required", ())}
        case "array":
            return [sample(schema["items"], refs)] * schema.get("minItems", 0)
        case "string":
            return "a"
        case "boolean":
            return False
        case "null":
            return None
        case _:
            return 1


HUGE = 100_000
"""Bounds above it are tested once for each type, and not in each field of the type: the bodies are megabytes."""


def past(schema: Any, refs: Any, seen: set[str]) -> Iterator[tuple[tuple[str, ...], str, Any]]:
    """Yield the names of the fields on the way, the bound, and a value one past it, for every bound in a schema."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        if name in seen:
            return
        seen.add(name)
        schema = refs[name]
    for one in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from past(one, refs, seen)
    number = int if schema.get("type") == "integer" else float
    for bound, away in (("minimum", -1), ("maximum", 1), ("exclusiveMinimum", 0), ("exclusiveMaximum", 0)):
        if bound in schema:
            yield (), bound, number(int(schema[bound]) + away)
    if max(schema.get("maxLength", 0), schema.get("maxItems", 0)) > HUGE:
        if (told := json.dumps(schema)) in seen:
            return
        seen.add(told)
    if "maxLength" in schema:
        yield (), "maxLength", "a" * (schema["maxLength"] + 1)
    if schema.get("minLength"):
        yield (), "minLength", "a" * (schema["minLength"] - 1)
    if "maxItems" in schema:
        yield (), "maxItems", [sample(schema["items"], refs)] * (schema["maxItems"] + 1)
    if schema.get("minItems"):
        yield (), "minItems", [sample(schema["items"], refs)] * (schema["minItems"] - 1)
    if "items" in schema:
        most = max(1, schema.get("minItems", 1))
        yield from ((way, bound, [value] * most) for way, bound, value in past(schema["items"], refs, seen))
    values = schema.get("additionalProperties") or next(iter(schema.get("patternProperties", {}).values()), None)
    inner = sample(values, refs) if isinstance(values, dict) else 1
    if "maxProperties" in schema:
        yield (), "maxProperties", {f"a{i}": inner for i in range(schema["maxProperties"] + 1)}
    if isinstance(values, dict):
        yield from ((way, bound, {"a": value}) for way, bound, value in past(values, refs, seen))
    if "propertyNames" in schema:
        yield from ((way, bound, {key: inner}) for way, bound, key in past(schema["propertyNames"], refs, seen))
    for name, field in schema.get("properties", {}).items():
        for way, bound, value in past(field, refs, seen):
            yield (name, *way), bound, {**sample(schema, refs), name: value}


def test_every_bound_of_every_field_is_kept_and_the_sentence_names_the_field(server: Running) -> None:
    """The bounds are those of the published schema, so that a new field is tested as soon as it is there."""
    found: set[tuple[str, str]] = set()
    seen: set[str] = set()
    schema = server.http.get("/openapi.json").json()
    with httpx.Client(base_url=server.url, headers=bearer(ALICE), timeout=60) as http:
        for path, methods in schema["paths"].items():
            if "requestBody" not in methods.get("post", {}):
                continue
            body = methods["post"]["requestBody"]["content"]["application/json"]["schema"]
            for way, bound, value in past(body, schema["components"]["schemas"], seen):
                response = http.post(path.replace("{number}", "0"), json=value)
                error = response.json()["error"]
                told = (path, way, bound, response.status_code, error["message"][:200])
                assert (response.status_code, error["code"]) == (422, "invalid_field"), told
                assert error["param"].partition(".")[0] == way[0], told
                assert error["message"].startswith(f"{error['param']}: "), told
                found.add((way[-1], bound))
        assert http.get("/v1/runs/mine", params={"site": "a" * 129}).status_code == 422
    some = {("top_p", "exclusiveMinimum"), ("seed", "exclusiveMaximum"), ("data", "maxLength"), ("metadata", "maxProperties")}
    some |= {("messages", "minItems"), ("max_tokens", "maximum"), ("replicas", "minimum"), ("name", "minLength")}
    assert some <= found


# What would take long or much before it is refused


def test_requests_that_come_together_are_counted_together() -> None:
    limits = Limits(per_key=4, rows=1, queue=60)

    async def at_once(url: str) -> list[int]:
        body = {"prompt": PROMPT, "max_tokens": 200, "ignore_eos": True}
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            return [one.status_code for one in await asyncio.gather(*(http.post("/v1/completions", json=body) for _ in range(24)))]

    with running(random_micro(context=512), limits=limits) as server:
        with unhurried(server, 0.005):
            statuses = asyncio.run(at_once(server.url))
        assert not server.server.entering.total()
        four, five = (server.http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 1, "n": n}) for n in (4, 5))
        assert (four.status_code, five.status_code) == (200, 400)  # and not 429, after which clients come again
        assert "5 completions are more than the 4 requests" in five.json()["error"]["message"]
    assert 1 <= statuses.count(200) <= 8  # four at a time; who comes when one has ended may enter
    assert statuses.count(429) >= 16


def test_one_wrong_number_in_each_of_many_vectors_is_one_fault(server: Running) -> None:
    row = [*range(2000), "x"]
    body = {"prompt": [1], "patch": [{"site": SITE, "position": 0, "source": row}] * 200}
    began = time.perf_counter()
    response = server.http.post("/v1/completions", json=body, headers=bearer(ALICE))
    assert response.status_code == 422
    assert response.json()["error"]["param"] == "patch.0.source.2000"
    assert time.perf_counter() - began < 5


PAIR, LARGE = {"clean": PROMPT, "corrupt": OTHER}, {"prompt": PROMPT, "max_tokens": 40, "n": 16}


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("patch_sweep", {**PAIR, "positions": [f"t{i}" for i in range(65)]}, 422, "positions name 65 texts"),
        ("patch_sweep", {**PAIR, "sites": [f"x{i}" for i in range(513)]}, 422, "at most 512"),
        (
            "completions",
            {**LARGE, "logprob_token_ids": [5] * 3200},
            413,
            "the log-probabilities, readings and norms of this request",
        ),
        ("completions", {"prompt": [PROMPT * 100, PROMPT * 3000], "max_tokens": 1}, 400, "tokens, but the context has 512"),
        ("steering/set", {"name": "n", "steering_vectors": {SITE: 5}}, 422, "a list of numbers, or {dtype, shape, data}"),
    ],
)
def test_what_is_too_much_is_refused_before_it_is_made(server: Running, path: str, body: Any, status: int, said: str) -> None:
    response = server.http.post(f"/v1/{path}", json=body, headers=bearer(ALICE))
    assert response.status_code == status
    assert said in response.json()["error"]["message"]


def test_readings_and_norms_that_would_make_a_large_answer_are_refused_before_they_run() -> None:
    length = len(random_micro().encode(PROMPT)) + 8
    monitor = {"site": SITE, "probe": "probe", "name": "watch", "gates": []}
    rule = {"when": {"probe": {"site": SITE, "vector": "probe"}}, "scope": "next_step", "apply": {"attenuate": 0.5}}
    with running(random_micro(context=512), limits=Limits(capture_bytes=100 * length)) as small, PatchStudy(small.url) as study:
        study.steer(name="watched", monitors=[monitor])
        for one in ({"monitors": [monitor]}, {"hold": "watched"}, {"steering": [rule]}):
            assert study.complete(PROMPT, max_tokens=8, readings=True, **one)["choices"]
            large = refusal(study.complete, PROMPT, max_tokens=8, readings=True, n=2, **one)
            assert (large.status, large.code, large.param) == (413, "too_large", "readings")
        assert study.complete(PROMPT, max_tokens=8, norms=[SITE, SITE])["choices"]
        large = refusal(study.complete, PROMPT, max_tokens=8, norms=[SITE, "blocks.0.resid_pre", "blocks.0.resid_post"])
        assert (large.status, large.param, "norms of this request may take" in str(large)) == (413, "norms", True)
        study.steer(scope="global", monitors=[{**monitor, "name": "of all"}])
        assert refusal(study.complete, PROMPT, max_tokens=8, readings=True, monitors=[monitor]).status == 413


def test_interventions_are_made_once_for_all_choices_and_those_of_a_long_body_on_another_thread(
    server: Running, alice: PatchStudy, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = list[str]()

    def noted(*given: Any) -> Any:
        threads.append(threading.current_thread().name)
        return patch_of(*given)

    monkeypatch.setattr(schema, "patch_of", noted)
    prompt = random_micro().encode(PROMPT)
    few = [{"site": SITE, "position": i, "source": "push"} for i in range(4)]
    many = [{"site": SITE, "position": i, "source": [0.123456789] * 16} for i in range(400)]
    for patches, long in ((few, False), (many, True)):
        prompts = [prompt, prompt[::-1]] if not long else [(prompt * 60)[:450]]
        threads.clear()
        body = {"prompt": prompts, "max_tokens": 3, "n": 2, "patch": patches, "seed": 5, "logprobs": 0}
        together = alice._call("POST", "/v1/completions", body)["choices"]
        assert len(threads) == len(patches)
        assert {name.startswith("prompts") for name in threads} == {long}
        for i, one in enumerate(prompts):
            alone = alice.complete(one, max_tokens=3, patch=patches, seed=5 + 2 * i, logprobs=0)["choices"][0]
            assert together[2 * i]["mi_route2"]["token_ids"] == alone["mi_route2"]["token_ids"]
            given = together[2 * i]["logprobs"]["token_logprobs"]
            assert given == pytest.approx(alone["logprobs"]["token_logprobs"], abs=1e-5)


def test_values_of_a_run_that_would_make_a_large_answer_are_refused() -> None:
    with running(random_micro(context=512), limits=Limits(capture_bytes=16 * 4 * 40)) as small, PatchStudy(small.url) as study:
        length = len(random_micro().encode(PROMPT))
        for run, more in (("fits", 0), ("large", 1)):
            study.complete(PROMPT, max_tokens=41 - length + more, capture=[SITE], run=run, ignore_eos=True)
        assert study.values("fits", SITE)[1].shape == (40, 16)
        large = refusal(study.values, "large", SITE)
        assert (large.status, large.code, large.param) == (413, "too_large", "site")
        assert "has 2,624 bytes at blocks.1.resid_pre, of 2,560 that an answer may have" in str(large)
        assert study._call("GET", "/v1/runs/large")["bytes"] == 2624


def test_runs_that_a_key_writes_at_once_take_no_more_than_the_store(server: Running) -> None:
    length = len(random_micro().encode(PROMPT))
    body = {"prompt": PROMPT, "max_tokens": 300, "ignore_eos": True, "capture": [SITE], "stream": True}
    each = (length + 299) * 16 * 4
    keys, limits = Keys([(ALICE, False), (BOB, False)]), Limits(store=2 * each)
    with running(random_micro(context=512), keys=keys, limits=limits) as small, unhurried(small):
        with httpx.Client(base_url=small.url, timeout=60) as http, ExitStack() as streams:
            for key, run, status in ((ALICE, "a", 200), (ALICE, "a", 409), (ALICE, "b", 200), (ALICE, "c", 429), (BOB, "a", 200)):
                given = http.stream("POST", "/v1/completions", json={**body, "run": run}, headers=bearer(key))
                response = streams.enter_context(given)
                assert response.status_code == status, (key, run)
                if status == 429:
                    assert response.headers["Retry-After"] == "1"
                    told = json.loads(response.read())["error"]["message"]
                    assert f"this run may take {each:,} bytes, and those of yours that are being written {2 * each:,}" in told
        until(lambda: not small.server.writing)  # who goes away gives them back


def test_a_sweep_that_would_hold_many_bytes_is_refused_before_it_runs() -> None:
    length, kinds = len(random_micro().encode(PROMPT)), ["resid_pre", "z"]
    # of two layers: keys and values, the streams before them, and the values of two sites in both runs and as they are patched in;
    # of z in the first one: the streams with which its cells enter the second, twice
    need = 4 * length * 16 * (2 * (2 + 1 + 3 * 2) + 2)
    for limit, status in ((need, 200), (need - 1, 413)):
        with running(random_micro(context=512), limits=Limits(sweep_bytes=limit)) as small:
            body = {**PAIR, "answer": " +", "foil": " *", "sites": kinds}
            response = small.http.post("/v1/patch_sweep", json=body)
            assert response.status_code == status
            if status == 413:
                told = response.json()["error"]
                assert told["message"].startswith(f"this sweep may hold {need:,} bytes")
                assert told["code"] == "too_large"
            assert small.http.post("/v1/patch_sweep", json={**body, "positions": [3], "sites": ["z"]}).status_code == 200
            assert not small.server.sweeping


def test_a_sweep_from_a_stored_run_counts_all_that_is_read_of_it() -> None:
    """Whichever positions are patched, the clean run's values are held at its whole prompt."""
    length, capture = len(random_micro().encode(PROMPT)), ["blocks.0.resid_pre", "blocks.1.resid_pre", "blocks.1.resid_post"]
    # of two layers: keys and values, the streams before them, the stored values, and those of one position
    need = 4 * 2 * 16 * (length * (2 + 1 + 1) + 3)
    for limit, status in ((need, 200), (need - 1, 413)):
        with running(random_micro(context=512), limits=Limits(sweep_bytes=limit)) as small:
            given = {"prompt": PROMPT, "max_tokens": 1, "capture": capture, "run": "clean"}
            assert small.http.post("/v1/completions", json=given).status_code == 200
            body = {"clean": {"run": "clean"}, "corrupt": OTHER, "answer": " +", "foil": " *", "positions": [3]}
            assert small.http.post("/v1/patch_sweep", json=body).status_code == status


def test_one_keys_many_patches_keep_nobody_waiting() -> None:
    keys = Keys([(ALICE, False), (BOB, False)])
    body = {"max_tokens": 60, "ignore_eos": True, "temperature": 0}
    many = [{"site": SITE, "position": i, "source": "push"} for i in range(1024)]
    with running(random_micro(context=1100), keys=keys) as server, unhurried(server):
        given = {**body, "prompt": [5] * 1030, "patch": many, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=given, headers=bearer(ALICE)) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            given = {**body, "prompt": PROMPT, "max_tokens": 1, "patch": many[:1]}
            assert server.http.post("/v1/completions", json=given, headers=bearer(BOB)).status_code == 200
            (running_on,) = server.server.owner._streams.values()
            assert running_on.result is None


def test_a_sweep_of_all_positions_together_counts_their_values() -> None:
    with running(random_micro(context=512), limits=Limits(cells=60)) as small, PatchStudy(small.url) as study:
        length = len(random_micro().encode(PROMPT))
        assert study.sweep(PROMPT, OTHER, " +", " *", sites=["resid_pre"], together=True).values.shape == (2, 1)
        large = refusal(study.sweep, PROMPT, OTHER, " +", " *", sites=["resid_pre", "z", "q", "k", "v", "mlp_in"], together=True)
        assert (large.status, f"{12 * length} cells" in str(large)) == (413, True)


def test_numbers_in_configurations_count_and_sets_that_come_together_too(
    server: Running, alice: PatchStudy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "KEPT_BYTES", 40_000)
    alice.steer(name="small", steering_vectors={SITE: [0.5] * 16})
    large = {f"blocks.{layer}.{point}": [[0.5] * 16] * 60 for layer in (0, 1) for point in ("resid_pre", "z")}
    told = refusal(alice.steer, name="large", steering_vectors=large)
    assert "of 40000 bytes in all" in str(told)
    alice.unsteer()
    monkeypatch.setattr(app, "KEPT_BYTES", 1 << 20)
    monkeypatch.setattr(app, "KEPT", 6)

    async def at_once() -> list[int]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60, headers=bearer(ALICE)) as http:
            sets = [http.post("/v1/steering/set", json={"vectors": {f"v{i}": [1.0] * 16}}) for i in range(12)]
            return [one.status_code for one in await asyncio.gather(*sets)]

    assert sorted(asyncio.run(at_once())) == [200] * 6 + [400] * 6


def test_a_body_is_read_for_a_known_key_alone(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def first_line(key: str, what: str = "POST /v1/completions") -> bytes:
        fields = (f"Authorization: Bearer {key}", "Content-Length: 1000")  # of which one byte comes
        with sent(server, b"{", *fields, what=what) as connection:
            return connection.recv(100).split(b"\r\n")[0]

    assert b" 401 " in first_line("somebody-without-a-key")
    monkeypatch.setattr(auth, "BODY_SECONDS", 0.2)
    assert b" 408 " in first_line(ALICE)
    assert b" 200 " in first_line("somebody-without-a-key", "GET /health")  # its body is not waited for


NOT_READ = 'errors_total{path="/v1/completions",reason="not_read"}'


def test_an_answer_that_is_not_read_is_given_up_and_one_that_is_read_late_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "BODY_SECONDS", 1.5)
    sites = [
        f"blocks.{layer}.{point}" for layer in (0, 1) for point in ("resid_pre", "attn_in", "resid_mid", "mlp_in", "resid_post")
    ]
    body = json.dumps({"prompt": [1] * 500, "n": 32, "max_tokens": 1, "temperature": 0, "capture": sites}).encode()

    def answered(served: Running, seconds: float) -> tuple[int, int]:
        """Return the bytes that were announced and those that came, if nothing is read in the first ``seconds``."""
        with sent(served, body, "Connection: close", buffer=1 << 16) as connection:
            begin = connection.recv(4096, socket.MSG_PEEK)
            time.sleep(seconds)
            whole = bytearray()
            while piece := connection.recv(1 << 20):
                whole += piece
        head, _, rest = bytes(whole).partition(b"\r\n\r\n")
        assert begin[:15] == head[:15] == b"HTTP/1.1 200 OK"
        return int(head.lower().partition(b"content-length: ")[2].split()[0]), len(rest)

    with running(random_micro(context=512)) as small:
        announced, came = answered(small, 0)
        assert came == announced > 10_000_000
        announced, came = answered(small, 4)
        assert came < announced
        assert metrics(small)[NOT_READ] == 1


def test_a_stream_that_is_not_read_is_given_up_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its chunks are small, and wait in the system's buffers until these are full; the last ones then wait for the reader."""
    monkeypatch.setattr(auth, "BODY_SECONDS", 0.5)
    asked = {"prompt": [1] * 8, "n": 64, "max_tokens": 400, "ignore_eos": True, "stream": True, "logprobs": 20}
    body = json.dumps(asked).encode()
    with running(random_micro(context=512), limits=Limits(backlog=1 << 20)) as small, sent(small, body) as connection:
        assert connection.recv(64, socket.MSG_PEEK).startswith(b"HTTP/1.1 200")
        until(lambda: not small.server.open, 60)
        until(lambda: metrics(small).get(NOT_READ) == 1, 60)


def test_a_long_text_is_encoded_elsewhere_and_alike(server: Running) -> None:
    text = PROMPT * 200
    assert len(text) > QUICK
    assert asyncio.run(server.server.encoded(text)) == server.server.served.encode(text)
