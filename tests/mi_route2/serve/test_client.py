"""Both clients, one table of calls: what the one returns or raises, the other does too."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from served import OTHER, PROMPT, SITE, Running, random_micro, running, unhurried

from mi_route2.serve.client import AsyncPatchStudy, PatchStudy, ServerError

pytestmark = pytest.mark.process

Call = Callable[..., Any]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(random_micro(context=512)) as one:
        yield one


@pytest.fixture(params=["PatchStudy", "AsyncPatchStudy"])
def call(request: pytest.FixtureRequest, server: Running) -> Call:
    """Return a function that calls a method of a client; a stream comes back as the list of its chunks."""

    def plain(method: str, *given: Any, **named: Any) -> Any:
        with PatchStudy(named.pop("url", server.url)) as study:
            found = getattr(study, method)(*given, **named)
            return list(found) if isinstance(found, Iterator) else found

    async def awaited(method: str, *given: Any, **named: Any) -> Any:
        async with AsyncPatchStudy(named.pop("url", server.url)) as study:
            found = getattr(study, method)(*given, **named)
            return [chunk async for chunk in found] if isinstance(found, AsyncIterator) else await found

    return plain if request.param == "PatchStudy" else lambda *given, **named: asyncio.run(awaited(*given, **named))


def test_a_completion_is_its_stream(call: Call) -> None:
    given = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    whole = call("complete", PROMPT, **given)["choices"][0]
    chunks = call("stream", PROMPT, **given)
    assert [one for chunk in chunks for one in chunk["mi_route2"]["token_ids"]] == whole["mi_route2"]["token_ids"]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["text"]


def test_vectors_and_runs_come_and_go(call: Call) -> None:
    assert call("steer", vectors={"mine": torch.ones(16)}, name="held", steering_vectors={SITE: "mine"})["vectors"] == {"mine": 16}
    assert call("unsteer") | {"shared": {}} == {"vectors": {}, "held": {}, "shared": {}}
    call("complete", PROMPT, capture=[{"site": SITE, "part": "prompt"}], run="mine", max_tokens=1)
    assert call("runs") == ["mine"]
    positions, rows = call("values", "mine", SITE)
    assert (positions, rows.shape) == (list(range(len(rows))), (len(random_micro().encode(PROMPT)), 16))
    call("drop", "mine")
    assert call("runs") == []


def test_a_run_is_found_by_its_whole_name(call: Call) -> None:
    call("complete", PROMPT, capture=[SITE], run="mine:1", max_tokens=1)
    for other in ("mine:1?2", "mine:1#2", "mine%3A1", "../runs/mine:1", "./mine:1", "mine:1/", ""):
        for method, given in (("values", (other, SITE)), ("drop", (other,))):
            with pytest.raises(ServerError) as found:
                call(method, *given)
            assert found.value.status in (307, 404, 405), (method, other)
    assert call("runs") == ["mine:1"]
    for name in (".", ".."):
        with pytest.raises(ServerError, match="run: ") as found:
            call("complete", PROMPT, capture=[SITE], run=name, max_tokens=1)
        assert found.value.status == 422
    assert len(call("values", "mine:1", SITE)[0])
    call("drop", "mine:1")


def test_numbers_of_numpy_and_torch_are_numbers_and_what_is_no_real_number_is_refused(call: Call) -> None:
    assert call("cell", PROMPT, OTHER, SITE, 3, alpha=torch.tensor(0.5)) == call("cell", PROMPT, OTHER, SITE, 3, alpha=0.5)
    for vector in (np.ones(16, ">f4"), {"vector": torch.ones(16), "scale": np.array(1.0)}):
        asked = {"temperature": torch.tensor(0.0), "max_tokens": 2, "steering_vectors": {SITE: vector}}
        assert call("complete", range(3, 9), **asked)["choices"]
    for wrong in (torch.ones(16, dtype=torch.complex64), np.ones(16, bool)):
        with pytest.raises(ValueError, match="real numbers"):
            call("complete", PROMPT, steering_vectors={SITE: wrong})
    with pytest.raises(ValueError, match="no header can have"):
        PatchStudy(key="é")


def test_errors_of_the_server_are_the_same_sentence(call: Call) -> None:
    for status, method, given, named in (
        (400, "complete", (PROMPT,), {"steering_vectors": {"nowhere": [1.0]}}),
        (422, "complete", (PROMPT,), {"n": 0}),
        (400, "stream", (PROMPT,), {"steering_vectors": {"nowhere": [1.0]}}),
        (404, "values", ("nothing", SITE), {}),
        (404, "drop", ("nothing",), {}),
        (404, "scale", (10**6, 1.0), {}),
        (404, "threshold", (10**6, "probe", 1.0), {}),
        (404, "unsteer", (), {"name": "nothing"}),
        (400, "sweep", (PROMPT, OTHER, "nonsense"), {}),
        (0, "complete", (PROMPT,), {"url": "http://127.0.0.1:9"}),
    ):
        with pytest.raises(ServerError) as found:
            call(method, *given, **named)
        assert found.value.status == status, (method, str(found.value))
        assert len(str(found.value)) > 20


def test_an_error_in_a_stream_is_raised_where_it_comes(call: Call, server: Running) -> None:
    with unhurried(server), pytest.raises(ServerError, match="deadline") as found:
        call("stream", PROMPT, max_tokens=400, ignore_eos=True, deadline=0.2)
    assert found.value.status == 200


@pytest.mark.parametrize(
    ("method", "head", "body", "told"),
    [
        ("stream", "200 OK", 'data: {"a": 1}\n\ndata: {"b', "the connection ended before the answer did"),
        ("complete", "200 OK", "<html>", "does not send JSON: give the address that the server printed"),
        ("stream", "302 Found\r\nLocation: /login", "", "the server answered 302"),
    ],
)
def test_an_answer_of_another_server_or_one_that_is_cut_off_is_a_sentence(
    call: Call, method: str, head: str, body: str, told: str
) -> None:
    def answer() -> None:
        with listening.accept()[0] as link:
            link.recv(1 << 16)
            link.sendall(f"HTTP/1.1 {head}\r\nConnection: close\r\n\r\n{body}".encode())
            link.shutdown(socket.SHUT_WR)
            while link.recv(1 << 16):  # closed with a part of the request unread, it would reset the connection
                pass

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = Thread(target=answer)
        thread.start()
        with pytest.raises(ServerError, match=told):
            call(method, PROMPT, url=f"http://127.0.0.1:{listening.getsockname()[1]}")
        thread.join()
