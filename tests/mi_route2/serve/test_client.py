"""The client: completions, vectors and runs, and every refusal as one sentence."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from served import OTHER, PROMPT, SITE, Running, random_micro, running

from mi_route2.serve.client import PatchStudy, ServerError

pytestmark = pytest.mark.process

Call = Callable[..., Any]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(random_micro(context=512)) as one:
        yield one


@pytest.fixture
def call(server: Running) -> Call:
    """Return a function that calls a method of the client; a stream comes back as the list of its chunks."""

    def plain(method: str, *given: Any, **named: Any) -> Any:
        with PatchStudy(named.pop("url", server.url)) as study:
            found = getattr(study, method)(*given, **named)
            return list(found) if isinstance(found, Iterator) else found

    return plain


def test_a_completion_is_its_stream(call: Call) -> None:
    given = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    whole = call("complete", PROMPT, **given)["choices"][0]
    chunks = call("stream", PROMPT, **given)
    assert [one for chunk in chunks for one in chunk["mi_route2"]["token_ids"]] == whole["mi_route2"]["token_ids"]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["text"]


def test_vectors_and_runs_come_and_go(call: Call) -> None:
    assert call("steer", vectors={"mine": torch.ones(16)}, name="held", steering_vectors={SITE: "mine"})["vectors"]["mine"] == 16
    assert call("unsteer") == {"vectors": {"probe": 16, "push": 16}, "held": []}
    call("complete", PROMPT, capture=[{"site": SITE, "part": "prompt"}], run="mine", max_tokens=1)
    assert call("runs") == ["mine"]
    call("drop", "mine")
    assert call("runs") == []


def test_numbers_of_numpy_and_torch_are_numbers_and_what_is_no_real_number_is_refused(call: Call) -> None:
    assert call("cell", PROMPT, OTHER, SITE, 3, alpha=torch.tensor(0.5)) == call("cell", PROMPT, OTHER, SITE, 3, alpha=0.5)
    for vector in (np.ones(16, ">f4"), {"vector": torch.ones(16), "scale": np.array(1.0)}):
        asked = {"temperature": torch.tensor(0.0), "max_tokens": 2, "steering_vectors": {SITE: vector}}
        assert call("complete", range(3, 9), **asked)["choices"]
    for wrong in (torch.ones(16, dtype=torch.complex64), np.ones(16, bool)):
        with pytest.raises(ValueError, match="real numbers"):
            call("complete", PROMPT, steering_vectors={SITE: wrong})


def test_errors_of_the_server_are_the_same_sentence(call: Call) -> None:
    for status, method, given, named in (
        (400, "complete", (PROMPT,), {"steering_vectors": {"nowhere": [1.0]}}),
        (422, "complete", (PROMPT,), {"n": 0}),
        (400, "stream", (PROMPT,), {"steering_vectors": {"nowhere": [1.0]}}),
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


def test_an_error_in_a_stream_is_raised_where_it_comes(call: Call) -> None:
    with pytest.raises(ServerError, match="not finite") as found:
        call("stream", PROMPT, max_tokens=4, decode_steering_vectors={SITE: [3e38] * 16})
    assert found.value.status == 200
