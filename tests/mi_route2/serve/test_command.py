"""The server as a command: its log, its signals, its models."""

import hmac
import json
import signal
import time
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

import httpx
import pytest
from served import PROMPT, random_micro

from mi_route2.serve.app import create_app
from mi_route2.serve.auth import ApiError, Keys
from mi_route2.serve.client import PatchStudy, ServerError
from mi_route2.serve.options import Limits, Options
from mi_route2.serve.process import serving
from mi_route2.serve.run import serve

KEY, MODEL = "key-of-alice-for-these-tests", "tests.support.served:random_micro"
SLOW = """
import time
from tests.support.served import random_micro


def slow():
    served = random_micro()
    served.host.model.register_forward_pre_hook(lambda *_: time.sleep(0.4))
    return served
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("end", "status", "options", "idle"),
    [(signal.SIGTERM, 0, (), 1.1 * (httpx.Limits().keepalive_expiry or 0.0)), (signal.SIGINT, 130, ("--log-prompts",), 0.0)],
)
def test_a_signal_lets_a_stream_end_and_each_line_of_the_log_is_json_with_the_prompts_only_if_asked(
    tmp_path: Path, end: int, status: int, options: tuple[str, ...], idle: float
) -> None:
    with serving(MODEL, tmp_path / "log", *options, MI_ROUTE2_KEY=KEY) as server, PatchStudy(server.url, KEY) as study:
        assert server.url.startswith("http://127.0.0.1:")
        # a client forgets an idle connection after 5 seconds: a server that closed it at that moment would cut off a request
        with closing(HTTPConnection(server.url.removeprefix("http://"))) as connection:
            for pause in (idle, 0.0):
                connection.request("GET", "/health")
                assert connection.getresponse().read()
                time.sleep(pause)
        study.complete(PROMPT, max_tokens=3, ignore_eos=True)
        chunks = study.stream(PROMPT, max_tokens=20, ignore_eos=True)
        first = next(chunks)
        server.process.send_signal(end)
        rest = list(chunks)
        assert sum(len(one["mi_route2"]["token_ids"]) for one in (first, *rest)) == 20
        assert server.process.wait(20) == status
    text = (tmp_path / "log").read_text()
    line, _ = (line for line in map(json.loads, text.splitlines()) if line.get("path") == "/v1/completions")
    assert (line["status"], line["tokens"], line.get("prompt")) == (200, 3, PROMPT if options else None)
    assert line["time"]
    assert ("task" in text) == bool(options)
    assert KEY not in text


@pytest.mark.parametrize("drain", [-1.0, float("inf"), float("nan")])
def test_a_drain_that_is_no_time_is_refused_before_the_model_is_there(drain: float) -> None:
    with pytest.raises(ValueError, match=r"--drain .* is no time that one waits"):
        serve(Options("no:model", drain=drain))


def test_a_server_has_as_many_rows_as_it_is_told_to_have() -> None:
    """More than a step's usual budget of tokens, of which each row needs one."""
    app = create_app(random_micro(), limits=Limits(rows=5000))
    assert app.state.server.owner._engine.scheduler.rows == 5000


def test_every_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = Keys([(f"{i}-a-key-that-is-long", False) for i in range(3)])
    calls: list[bool] = []
    compare = hmac.compare_digest

    def counted(a: bytes, b: bytes) -> bool:
        calls.append(compare(a, b))
        return calls[-1]

    monkeypatch.setattr(hmac, "compare_digest", counted)
    assert keys.client("Bearer 0-a-key-that-is-long")
    assert calls == [True, False, False]
    calls.clear()
    with pytest.raises(ApiError):
        keys.client("Bearer nobodys")
    assert calls == [False, False, False]


@pytest.mark.process
def test_a_stream_longer_than_the_drain_ends_with_its_reason_and_newcomers_are_refused(tmp_path: Path) -> None:
    """The model's steps wait, so that the stream outlives the drain on any machine."""
    (tmp_path / "slow_model.py").write_text(SLOW)
    given = {"MI_ROUTE2_KEY": KEY, "PYTHONPATH": str(tmp_path)}
    with serving("slow_model:slow", tmp_path / "log", "--drain", "2", **given) as server, PatchStudy(server.url, KEY) as study:
        with httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=60) as other:
            assert other.get("/v1/models").status_code == 200  # its connection stays open
            chunks = study.stream(PROMPT, max_tokens=20, ignore_eos=True)
            next(chunks)
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.5)
            try:
                status = other.post("/v1/completions", json={"model": "micro", "prompt": PROMPT}).status_code
            except httpx.TransportError:
                status = None  # uvicorn listens no longer and has closed what is idle
            assert status in (503, None)
            with pytest.raises(ServerError, match="shut"):
                list(chunks)
        assert server.process.wait(20) == 0
