"""The server as a command: its log, its signals, its models."""

import hmac
import json
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from families import make_family
from served import PROMPT, random_micro
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from mi_route2 import AdapterSpec, attach
from mi_route2.adapters import save_pretrained
from mi_route2.engine import Engine, Request, Sampling
from mi_route2.serve.app import create_app
from mi_route2.serve.auth import ApiError, Keys
from mi_route2.serve.client import PatchStudy, ServerError
from mi_route2.serve.models import load
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
def test_ctrl_c_lets_a_stream_end_and_each_line_of_the_log_is_json_with_the_prompts_if_asked(tmp_path: Path) -> None:
    with serving(MODEL, tmp_path / "log", "--log-prompts", MI_ROUTE2_KEY=KEY) as server, PatchStudy(server.url, KEY) as study:
        study.complete(PROMPT, max_tokens=3, ignore_eos=True)
        chunks = study.stream(PROMPT, max_tokens=20, ignore_eos=True)
        first = next(chunks)
        server.process.send_signal(signal.SIGINT)
        rest = list(chunks)
        assert sum(len(one["mi_route2"]["token_ids"]) for one in (first, *rest)) == 20
        assert server.process.wait(20) == 130
    text = (tmp_path / "log").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    line, _ = (line for line in lines if line.get("path") == "/v1/completions")
    assert line["status"] == 200
    assert line["tokens"] == 3
    assert line["time"]
    assert line["prompt"] == PROMPT
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


@pytest.mark.process
def test_a_checkpoint_with_its_adapters_is_served_deployed(tmp_path: Path) -> None:
    model = make_family("Qwen3")
    model.save_pretrained(tmp_path / "model")
    letters = {letter: i for i, letter in enumerate(["<unk>", *"abcdefghij "])}
    tokenizer = Tokenizer(WordLevel(letters, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(tmp_path / "model")
    draw = torch.Generator().manual_seed(0)
    adapters = attach(model, "blocks.*", spec=AdapterSpec("lora", rank=2), generator=draw)
    with torch.no_grad():
        for p in (*adapters.kept_parameters().values(), *adapters.quarantine_parameters().values()):
            p.add_(0.3 * torch.randn(p.shape, generator=draw, dtype=p.dtype))
    save_pretrained(adapters, tmp_path / "adapters", "full")
    asked: dict[str, Any] = {"max_tokens": 3, "temperature": 0, "logprobs": 0, "ignore_eos": True}
    options = ("--adapters", str(tmp_path / "adapters"), "--mode", "deployed")
    with serving(str(tmp_path / "model"), tmp_path / "log", *options) as server, PatchStudy(server.url) as study:
        found = study.complete("abc", **asked)["choices"][0]["logprobs"]["token_logprobs"]
        with pytest.raises(ServerError, match="--mode full"):
            study.complete("abc", adapters="full")
    expected = {}
    for mode in ("full", "deployed", "reference"):
        served = load(str(tmp_path / "model"), adapters=tmp_path / "adapters", mode=mode)
        (result,) = Engine(served.host).generate([Request(tuple(served.encode("abc")), Sampling(max_new=3, logprobs=0))])
        expected[mode] = result.logprobs
        served.opened.close()
    assert found == pytest.approx(expected["deployed"], abs=1e-4)
    assert all(found != pytest.approx(expected[mode], abs=1e-3) for mode in ("full", "reference"))
