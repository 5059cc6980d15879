"""Completions through OpenAI's own client, sync and async: whole and streamed answers are the engine's, with every intervention."""

import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import torch
from served import OTHER, PROMPT, SITE, Running, metrics, random_micro, running, unhurried, until

from mi_route2.engine import Capture, Engine, Request, Sampling
from mi_route2.patching.patches import Patch
from mi_route2.serve.models import Readable
from mi_route2.sites import Site
from mi_route2.steering.specs import Monitor, Steer, Steering
from mi_route2.tensor_files import pack, unpack

pytestmark = pytest.mark.process

VECTOR = torch.randn(16, generator=torch.Generator().manual_seed(5))
MONITOR = {"site": SITE, "probe": "probe", "name": "watch", "gates": []}
CLAMP = {"site": SITE, "vector": "push", "value": 0.5}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(random_micro(context=512), exact=True) as one:
        yield one


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as one:
        yield one


@pytest.fixture(scope="module")
def engine() -> Engine:
    served = random_micro(context=512)
    return Engine(served.host, tokenizer=Readable(served.tokenizer), vectors=served.vectors, exact=True)


def ids() -> tuple[int, ...]:
    return tuple(random_micro().encode(PROMPT))


def test_models_and_health(server: Running, client: openai.OpenAI) -> None:
    assert [one.id for one in client.models.list()] == ["micro"]
    assert server.http.get("/health").json()["status"] == "ok"
    assert "mi_route2_requests_total" in server.http.get("/metrics").text


def test_a_completion_is_the_engines(client: openai.OpenAI, engine: Engine) -> None:
    found = client.completions.create(
        model="micro", prompt=PROMPT, max_tokens=12, temperature=0.8, seed=3, logprobs=2,
        extra_body={"logprob_token_ids": [5, 7], "ignore_eos": True},
    )  # fmt: skip
    sampling = Sampling(max_new=12, temperature=0.8, seed=3, logprobs=2, logprob_token_ids=(5, 7))
    (truth,) = engine.generate([Request(ids(), sampling)])
    choice: Any = found.choices[0]
    assert choice.mi_route2["token_ids"] == truth.ids
    assert choice.text == truth.text
    assert choice.logprobs.token_logprobs == truth.logprobs
    assert choice.mi_route2["requested"] == [list(one.requested) for one in truth.tokens]
    assert choice.mi_route2["seed"] == 3
    assert [len(top) for top in choice.logprobs.top_logprobs] == [2] * 12
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (len(ids()), 12)


BODIES: list[dict[str, Any]] = [
    {},
    {"steering_vectors": {SITE: {"vector": VECTOR.tolist(), "scale": 2.0}}, "monitors": [MONITOR], "readings": True},
    {"decode_steering_vectors": {SITE: "push"}, "norms": [SITE], "stop": "#", "ignore_eos": True},
    {"patch": [{"site": SITE, "position": 3, "source": "zeros"}], "capture": [SITE], "n": 3},
    {"steering_clamps": [CLAMP], "adapters": "deployed", "monitors": [MONITOR], "readings": True},
]


@pytest.mark.parametrize("body", BODIES)
def test_a_stream_is_the_whole_answer_in_pieces(client: openai.OpenAI, body: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"model": "micro", "prompt": [PROMPT, OTHER], "max_tokens": 24, "seed": 11, "logprobs": 1}
    whole = client.completions.create(**asked, extra_body=body)
    pieces = defaultdict[int, list[Any]](list)
    usage = None
    for chunk in client.completions.create(**asked, extra_body=body, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            pieces[choice.index].append((choice, chunk.model_extra["mi_route2"]))
    assert len(whole.choices) == 2 * body.get("n", 1) == len(pieces)
    for choice in whole.choices:
        extra = choice.model_extra["mi_route2"]
        told, extras = zip(*pieces[choice.index], strict=True)
        assert "".join(one.text for one in told) == choice.text
        assert "#" not in choice.text or body.get("stop") != "#"
        assert [one.finish_reason for one in told if one.finish_reason] == [choice.finish_reason]
        assert [token for one in extras for token in one["token_ids"]] == extra["token_ids"]
        assert [value for one in told if one.logprobs for value in one.logprobs.token_logprobs] == choice.logprobs.token_logprobs
        for name in ("readings", "norms"):
            assert {at: value for one in extras for at, value in one[name].items()} == extra[name]
        for name in ("prompt_token_ids", "prompt_tokens", "seed"):
            assert extras[0][name] == extra[name]
        for name in ("finish", "unfired", "captured"):
            assert extras[-1][name] == extra[name]
        assert bool(extra["readings"]) == body.get("readings", False)
        assert all(set(one) == {"watch"} for one in extra["readings"].values())
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.completion_tokens == sum(len(choice.model_extra["mi_route2"]["token_ids"]) for choice in whole.choices)


def test_interventions_are_those_of_the_engine(client: openai.OpenAI, engine: Engine) -> None:
    site, values = Site.parse(SITE), torch.randn(16, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    found: Any = client.completions.create(
        model="micro", prompt=PROMPT, max_tokens=6, temperature=0, extra_body={
            "patch": [{"site": SITE, "position": 2, "source": pack(values), "alpha": 0.5}],
            "prefill_steering_vectors": {SITE: {"vector": "push", "scale": -1.0}},
            "monitors": [{"site": SITE, "probe": VECTOR.tolist(), "threshold": 0.5, "quarantine": "close", "name": "m"}],
            "capture": [{"site": "blocks.1.z", "positions": [4, 6]}], "readings": True, "norms": [SITE], "ignore_eos": True,
        },
    ).choices[0]  # fmt: skip
    monitor = Monitor(site, VECTOR.double(), threshold=0.5, quarantine="close", name="m")
    steering = Steering(prefill=(Steer(site, "push", -1.0),), monitors=(monitor,))
    z = Site(1, "z")
    (truth,) = engine.generate([
        Request(ids(), Sampling(max_new=6), patch=(Patch(site, 2, values, 0.5),), steering=steering, readings=True, norms=(site,),
                capture=(Capture(z, type(Capture(z).selection)("all", (4, 6))),))
    ])  # fmt: skip
    extra = found.mi_route2
    assert extra["token_ids"] == truth.ids
    assert extra["readings"] == {str(i): {"m": one["m"]._asdict()} for i, one in truth.readings.items()}
    assert extra["norms"] == {str(i): {SITE: one[site]} for i, one in truth.norms.items()}
    captured = extra["captured"]["blocks.1.z"]
    assert captured["positions"] == [4, 6]
    assert torch.equal(unpack(captured["rows"]), truth.captured[z].rows)


def test_chat_whole_and_streamed(client: openai.OpenAI, engine: Engine) -> None:
    asked: dict[str, Any] = {
        "model": "micro", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 5, "temperature": 0,
        "logprobs": True, "top_logprobs": 2,
    }  # fmt: skip
    whole: Any = client.chat.completions.create(**asked, extra_body={"ignore_eos": True}).choices[0]
    (truth,) = engine.generate([Request(ids(), Sampling(max_new=5, logprobs=2))])
    assert whole.message.content == truth.text
    assert [one.logprob for one in whole.logprobs.content] == truth.logprobs
    assert [len(one.top_logprobs) for one in whole.logprobs.content] == [2] * 5
    pieces: list[Any] = list(client.chat.completions.create(**asked, extra_body={"ignore_eos": True}, stream=True))
    assert "".join(one.choices[0].delta.content for one in pieces) == truth.text
    assert pieces[0].choices[0].delta.role == "assistant"
    assert pieces[-1].choices[0].finish_reason == whole.finish_reason == "length"


@pytest.mark.parametrize("new", [0, 1, 3])
def test_an_echo_has_the_prompts_log_probabilities(client: openai.OpenAI, engine: Engine, new: int) -> None:
    """As lm-eval-harness asks for the log-likelihood of a continuation; a text and token ids, twice, so that a prefix is known."""
    assert client.completions.create(model="micro", prompt=PROMPT, max_tokens=0, echo=True).choices[0].text == PROMPT
    with pytest.raises(openai.UnprocessableEntityError, match="echo is for whole answers"):
        client.completions.create(model="micro", prompt=PROMPT, echo=True, stream=True)
    (plain,) = engine.generate([Request(ids(), Sampling(max_new=max(new, 1)))])
    whole = [*ids(), *plain.ids[:new]]
    with torch.no_grad():
        truth = engine.host.logits(torch.tensor([whole])).log_softmax(-1)[0]
    for prompt in (PROMPT, [list(ids())]):
        found: Any = client.completions.create(
            model="micro", prompt=prompt, max_tokens=new, echo=True, logprobs=2, temperature=0, extra_body={"ignore_eos": True}
        )
        choice, logprobs = found.choices[0], found.choices[0].logprobs
        assert choice.text == PROMPT + (plain.text if new else "")
        assert (found.usage.completion_tokens, choice.finish_reason) == (new, "length")
        assert len(logprobs.tokens) == len(logprobs.text_offset) == len(whole)
        assert (logprobs.tokens[0], logprobs.token_logprobs[0], logprobs.top_logprobs[0]) == ("<bos>", None, None)
        expected = truth[range(len(whole) - 1), whole[1:]]
        torch.testing.assert_close(torch.tensor(logprobs.token_logprobs[1:]), expected, rtol=0, atol=1e-4)
        best = truth[:-1].topk(2).values
        torch.testing.assert_close(torch.tensor([[*top.values()] for top in logprobs.top_logprobs[1:]]), best, rtol=0, atol=1e-4)
        for token, at in zip(logprobs.tokens[1:], logprobs.text_offset[1:], strict=True):
            assert choice.text[at : at + len(token)] == token


# Errors


def test_a_chat_that_the_micro_model_cannot_read_is_refused_in_words_of_http(server: Running) -> None:
    answer = server.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hello"}]})
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400
    assert "its own small language only: see /v1/page" in message
    assert "Vocabulary" not in message


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        ({"prompt": []}, 400, "there is no prompt"),
        ({"prompt": "no such text"}, 400, "no token matches"),
        ({"prompt": [1, 99]}, 400, "token 99 is outside the vocabulary"),
        ({"prompt": [True, 5]}, 422, "Input should be a valid integer"),
        ({"prompt": PROMPT, "steering_vectors": {SITE: [True] * 16}}, 422, "a vector is a tensor"),
        ({"prompt": PROMPT, "patch": [{"site": SITE, "position": True, "source": "zeros"}]}, 422, "position: Input should be"),
        ({"prompt": PROMPT, "max_tokens": 600}, 400, "but the context has 512"),
        ({"prompt": PROMPT, "max_tokens": 0}, 422, "max_tokens=0 generates nothing"),
        ({"prompt": PROMPT, "promt": 1}, 422, "promt: this field is unknown"),
        ({"prompt": PROMPT, "temperature": float("inf")}, 422, "temperature"),
        ({"prompt": PROMPT, "model": "other"}, 404, "there is no model 'other' here"),
        ({"prompt": PROMPT, "patch": [{"site": "blocks.9.resid_pre", "position": 0, "source": "zeros"}]}, 400, "blocks.9"),
        ({"prompt": PROMPT, "patch": [{"site": "nowhere", "position": 0, "source": "zeros"}]}, 400, "nowhere"),
        ({"prompt": PROMPT, "patch": [{"site": SITE, "position": 0, "source": "missing"}]}, 404, "no vector 'missing'"),
        ({"prompt": PROMPT, "patch": [{"site": SITE, "position": 0, "source": {"run": "r", "position": 0}}]}, 404, "no run 'r'"),
        ({"prompt": PROMPT, "steering_vectors": {SITE: [1.0, 2.0]}}, 400, "2"),
        ({"prompt": PROMPT, "steering_vectors": {SITE: {"dtype": "float32", "shape": [2], "data": "AAAA"}}}, 422, "3 bytes"),
        ({"prompt": PROMPT, "monitors": [{**MONITOR, "name": "adapters: deployed"}]}, 400, "the server's own monitor"),
        ({"prompt": PROMPT, "hold": "none"}, 404, "no configuration is held as 'none'"),
        ({"prompt": PROMPT, "n": 65}, 422, "n: "),
        ({"prompt": [PROMPT] * 33, "n": 2}, 400, "is more than 64 completions"),
        ({"prompt": PROMPT, "n": 2, "run": "one", "capture": [SITE]}, 400, "2 completions cannot write one run"),
        ({"prompt": PROMPT, "steering_vectors": {SITE: [[1.0] * 8, [1.0] * 7]}}, 422, "a vector is"),
        ({"prompt": PROMPT, "stop": "\ud800"}, 422, "stop: "),
        ({"prompt": "\ud800"}, 422, "prompt: "),
        ({"prompt": PROMPT, "decode_steering_vectors": {SITE: [3e38] * 16}}, 422, "not finite"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_errors_come_before_the_first_byte_in_openais_shape(
    server: Running, body: dict[str, Any], status: int, sentence: str, stream: bool
) -> None:
    content = json.dumps({"max_tokens": 8, **body, "stream": stream})
    response = server.http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    if sentence == "not finite" and stream:  # known only when the forward has run
        error = json.loads(response.text.split("data: ")[-2])["error"]
        assert response.text.endswith("data: [DONE]\n\n")
    else:
        assert response.status_code == status, response.text
        error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert sentence in error["message"], error["message"]
    assert "\n" not in error["message"]


def test_what_is_no_json_and_what_has_no_address(server: Running) -> None:
    long = b'{"seed": ' + b"9" * 5000 + b"}"
    said = {
        b"{": "Expecting",
        b"[" * 100_000: "decoding a JSON array",
        b'{"prompt": "\xff"}': "utf-8",
        long: "4300 digits",
        b"": "a JSON object",
    }
    for content, why in said.items():
        response = server.http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == ((400, "invalid_json") if content else (422, "invalid_field"))
        assert why in error["message"]
    assert server.http.get("/v1/nothing").json()["error"]["code"] is None
    assert server.http.get("/v1/completions").status_code == 405


# Clients that go


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_cancels_its_requests(server: Running, stream: bool) -> None:
    tokens = server.server.owner.snapshot["tokens"]
    body = {"prompt": PROMPT, "max_tokens": 500, "n": 4, "stream": stream, "ignore_eos": True}
    with unhurried(server):
        if stream:
            with server.http.stream("POST", "/v1/completions", json=body) as response:
                next(response.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                server.http.post("/v1/completions", json=body, timeout=httpx.Timeout(5.0, read=0.1))
        until(lambda: not server.server.owner._streams and not server.server.open)
    assert server.server.owner.snapshot["tokens"] - tokens < 1500
    assert server.server.owner.alive
    if not stream:  # that a client goes is no error of the server
        until(lambda: 'requests_total{path="/v1/completions",status="499"}' in metrics(server))


OFF = "blocks.1.mlp.down.quarantine_out"


def test_what_acts_on_an_adapter_that_is_off_in_the_requests_mode_is_refused(server: Running) -> None:
    """A patch there would be lost, and a vector would act although the adapter is off."""
    mode, site, vector = "deployed", OFF, [1.0] * 16
    add = {"site": site, "vector": vector}
    acts: list[dict[str, Any]] = [
        {"patch": [{"site": site, "position": 0, "source": "zeros"}]},
        {"steering_vectors": {site: vector}},
        {"decode_steering_vectors": {site: vector}},
        {"steering_clamps": [{"site": site, "vector": vector, "value": 0.0}]},
        {"monitors": [{"site": "blocks.0.resid_pre", "probe": "probe", "adds": [add]}]},
    ]
    for one in acts:
        answer = server.http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 2, "adapters": mode, **one})
        assert (answer.status_code, "off in the mode of this request" in answer.text) == (400, True), answer.text
        assert server.http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 2, **one}).status_code == 200
    seen = {"prompt": PROMPT, "max_tokens": 2, "adapters": mode, "capture": [site], "norms": [site]}
    assert server.http.post("/v1/completions", json=seen).status_code == 200


def test_sliders_act_on_the_running_stream(server: Running, client: openai.OpenAI) -> None:
    """From the next token on: a scale of 0 gives the plain model, a threshold far away closes or opens the gate."""
    body = {"decode_steering_vectors": {SITE: {"vector": "push", "scale": 0.5}}, "monitors": [MONITOR], "readings": True}
    asked: dict[str, Any] = {"model": "micro", "prompt": PROMPT, "max_tokens": 100, "temperature": 0, "stream": True}
    gates: list[float] = []
    number = None
    with unhurried(server):
        for chunk in client.completions.create(**asked, extra_body={**body, "ignore_eos": True}):
            extra = chunk.model_extra["mi_route2"]
            gates += [one["watch"]["gate"] for one in extra.get("readings", {}).values()]
            if number is None:
                number = extra["request"]
                url = f"/v1/streams/{number}"
                assert server.http.post(f"{url}/threshold", json={"monitor": "watch", "threshold": 1e6}).status_code == 200
                assert server.http.post(f"{url}/scale", json={"scale": 0.0}).status_code == 200
                answer = server.http.post(f"{url}/threshold", json={"monitor": "other", "threshold": 1.0})
                assert answer.status_code == 400
                assert "no monitor 'other'" in answer.json()["error"]["message"]
                dynamic = server.http.get("/v1/steering").json()
                assert dynamic["requests"][str(number)]["scale"] == 0.0
    assert gates[0] > 0
    assert set(gates[-20:]) == {0.0}
    assert server.http.post(f"/v1/streams/{number}/scale", json={"scale": 1.0}).status_code == 404


def test_numbers_travel_without_loss() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        value = torch.randn(3, 4, generator=torch.Generator().manual_seed(1)).to(dtype)
        assert torch.equal(unpack(pack(value)), value)
