"""What stands in front of the routes: bodies are validated beside the loop, up to their first fault, and have limits."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from pydantic import BaseModel
from served import PROMPT, Running, metrics, random_micro, running, sent, until

from mi_route2.serve import http
from mi_route2.serve.api import schema
from mi_route2.serve.options import ServerLimits

pytestmark = pytest.mark.process

JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(random_micro(), limits=ServerLimits(max_body=8_000_000)) as one:
        yield one


MANY = 100_000
FAULTY: dict[str, Any] = {
    "unknown fields": {f"f{i}": 1 for i in range(MANY)},
    "parts of a message": {"messages": [{"role": "user", "content": [1] * MANY}]},
    "fields of a part": {"messages": [{"role": "user", "content": [dict.fromkeys(map(str, range(MANY)), 1)]}]},
    "vectors": {"prompt": PROMPT, "steering_vectors": {str(i): {"vector": [1.0], "x": 1} for i in range(MANY)}},
}


@pytest.mark.parametrize("what", FAULTY)
def test_a_body_of_many_faults_ends_at_the_first(server: Running, what: str) -> None:
    model = schema.ChatCompletion if "messages" in FAULTY[what] else schema.Completion
    path = "/v1/chat/completions" if "messages" in FAULTY[what] else "/v1/completions"
    raw = json.dumps(FAULTY[what]).encode()
    with pytest.raises(http.RequestValidationError) as refused:
        http.parsed(model, raw)
    assert len(refused.value.errors()) < 12
    answer = server.http.post(path, content=raw, headers=JSON)
    assert answer.status_code == 422
    assert len(answer.json()["error"]["message"]) < 300


def lists(core: Any) -> Iterator[dict[str, Any]]:
    """Every list and dict of a pydantic-core schema."""
    if isinstance(core, dict):
        if core.get("type") in ("list", "dict"):
            yield core
        core = list(core.values())
    for part in core if isinstance(core, list | tuple) else ():
        yield from lists(part)


def test_every_list_of_every_body_fails_fast() -> None:
    bodies = [model for model in vars(schema).values() if isinstance(model, type) and issubclass(model, BaseModel)]
    found = [one for model in bodies for one in lists(model.__pydantic_core_schema__) if one["type"] == "list"]
    assert len(found) > 20
    assert all(one.get("fail_fast") and "max_length" in one for one in found)


def test_a_body_is_validated_beside_the_loop(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    known = schema.Completion.model_validate

    def noting(value: Any) -> Any:
        names.append(threading.current_thread().name)
        return known(value)

    monkeypatch.setattr(schema.Completion, "model_validate", noting)
    assert server.http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 1}).status_code == 200
    assert [name.startswith("prompts") for name in names] == [True]


def test_bodies_of_all_connections_have_one_budget() -> None:
    with running(random_micro(), limits=ServerLimits(max_body=10_000)) as small, ExitStack() as connections:
        for _ in range(http.BODIES):
            connections.enter_context(sent(small, b" " * 9_900, "Content-Length: 10000"))
        answers = []

        def refused() -> bool:  # once the bytes of the others have come
            answers.append(small.http.post("/v1/tokenize", content=b" " * 9_000, headers=JSON))
            return answers[-1].status_code == 503

        until(refused)
        assert answers[-1].json()["error"]["code"] == "too_many_bodies"
        assert answers[-1].headers["Retry-After"] == "2"
        connections.close()
        until(lambda: small.http.post("/v1/tokenize", json={"text": PROMPT, "x": "y" * 9_000}).status_code == 422)


@pytest.mark.parametrize("length", ["Content-Length: 1000", "Transfer-Encoding: chunked"])
@pytest.mark.parametrize(("what", "body"), [("clear", b"{}"), ("set", b'{"vectors": {"mine": [1.0]}}')])
def test_a_request_that_was_cut_off_is_not_executed(server: Running, what: str, body: bytes, length: str) -> None:
    assert server.http.post("/v1/steering/set", json={"vectors": {"mine": [1.0] * 16}}).status_code == 200

    def ended() -> float:
        return sum(count for name, count in metrics(server).items() if "requests_total" in name and "/metrics" not in name)

    before = ended()
    body = b"%x\r\n%s\r\n" % (len(body), body) if "chunked" in length else body
    with sent(server, body, length, what=f"POST /v1/steering/{what}"):
        pass
    until(lambda: ended() > before)
    assert server.http.get("/v1/steering").json()["vectors"]["mine"] == 16


def test_headers_have_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "HEADER_SECONDS", 0.1)
    with running(random_micro()) as one:
        host, port = one.url.removeprefix("http://").split(":")
        whole = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        for before, begun in ((b"", b""), (b"", whole[:30]), (whole, whole[:30])):
            with socket.create_connection((host, int(port)), timeout=3) as connection:
                connection.sendall(before)
                assert not before or connection.recv(4096)
                connection.sendall(begun)
                assert connection.recv(4096) == b""


def test_two_hosts_are_refused(server: Running) -> None:
    port = server.url.rpartition(":")[2]
    for other in ("evil.example", f"127.0.0.1:{port}"):
        with sent(server, b"", f"Host: {other}", what="GET /health") as connection:
            assert connection.recv(4096).startswith(b"HTTP/1.1 400")
