"""Every limit of the server: those of ``Limits``, of what a key keeps, and the bounds of every field of every body."""

import json
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import pytest
import torch

from mi_route2.serve import app
from mi_route2.serve.auth import Keys
from mi_route2.serve.client import PatchStudy, ServerError
from mi_route2.serve.options import Limits
from tests.support.served import OTHER, PROMPT, Running, random_micro, running, unhurried

pytestmark = pytest.mark.process

ALICE, BOB = "alice-alice-alice", "bob-bob-bob-bob-bob"
SITE = "blocks.1.resid_pre"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(random_micro(context=512), keys=Keys([(ALICE, False), (BOB, False)]), limits=Limits(sweeps=1, rows=1)) as one:
        yield one


@pytest.fixture
def alice(server: Running) -> Iterator[PatchStudy]:
    with PatchStudy(server.url, ALICE) as one:
        yield one
        one.unsteer()


def refusal(function: Any, *given: Any, **named: Any) -> ServerError:
    with pytest.raises(ServerError) as found:
        function(*given, **named)
    return found.value


# Limits of the command


def test_one_key_sweeps_as_often_as_the_limit_says_and_another_key_still_may(server: Running, alice: PatchStudy) -> None:
    held = threading.Event()
    server.server.owner._post(lambda: held.wait(30))  # the engine's thread is busy, so that the first sweep cannot end
    body = {"clean": PROMPT, "corrupt": OTHER, "answer": " +", "foil": " *"}
    headers = {"Authorization": f"Bearer {ALICE}"}
    first = threading.Thread(target=partial(alice.sweep, PROMPT, OTHER, " +", " *"))
    first.start()
    until = time.monotonic() + 10
    while not server.server.sweeping:
        assert time.monotonic() < until
        time.sleep(0.01)
    try:
        response = server.http.post("/v1/patch_sweep", json=body, headers=headers)
    finally:
        held.set()
        first.join(20)
    assert (response.status_code, response.headers["Retry-After"]) == (429, "2")
    error = response.json()["error"]
    assert (error["code"], "1 sweeps of yours are running, which is the limit: wait" in error["message"]) == (
        "too_many_sweeps",
        True,
    )
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
    assert "0.2" in str(found), str(found)
    assert "deadline" in str(found), str(found)


def test_the_store_keeps_the_newest_runs_within_its_bytes_and_says_what_became_of_the_others() -> None:
    with running(random_micro(), limits=Limits(store=2000)) as small, PatchStudy(small.url) as study:
        for i in range(5):
            study.complete(PROMPT, capture=[SITE], run=f"r{i}", max_tokens=1)
        kept = study.runs()
        assert kept == [f"r{i}" for i in range(5 - len(kept), 5)] != []
        assert sum(study._call("GET", f"/v1/runs/{run}")["bytes"] for run in kept) <= 2000
        found = refusal(study.values, "r0", SITE)
        assert (found.status, "was evicted" in str(found)) == (404, True)


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
    assert (found.status, "vectors of 200 bytes" in str(found)) == (400, True)


def test_a_request_that_waits_cannot_be_tuned_yet(server: Running, alice: PatchStudy) -> None:
    with unhurried(server):
        first = alice.stream(PROMPT, max_tokens=400, ignore_eos=True)
        next(first)
        with PatchStudy(server.url, ALICE) as other:
            second = threading.Thread(target=partial(other.complete, PROMPT, max_tokens=1, decode_steering_vectors={SITE: "push"}))
            second.start()
            until = time.monotonic() + 10
            while len(server.server.open) < 2:
                assert time.monotonic() < until
                time.sleep(0.01)
            found = refusal(alice.scale, max(server.server.open), 2.0)
            first.close()
            second.join(20)
    assert (found.status, found.code, "it still waits, or has just ended" in str(found)) == (409, "not_running", True)


# Bounds of fields


def sample(schema: Any, refs: Any) -> Any:
    """Return a small value that the schema allows."""
    if "$ref" in schema:
        schema = refs[schema["$ref"].rpartition("/")[2]]
    for key in ("const", "enum", "anyOf"):
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
    for one in schema.get("anyOf", ()):
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
    with httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {ALICE}"}, timeout=60) as http:
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
