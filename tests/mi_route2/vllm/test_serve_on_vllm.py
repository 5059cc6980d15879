"""One checkpoint, two servers: what clients send is answered alike by our own engine and by vLLM, or refused with a remedy."""

import importlib.util
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from served import Running, byte_tokenizer, running, unhurried
from transformers import Qwen3Config, Qwen3ForCausalLM

from mi_route2.serve.models import load, load_vllm
from mi_route2.serve.options import ServerLimits
from mi_route2.tensor_files import unpack

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here: make test-vllm runs these tests in an environment of its own", allow_module_level=True)

pytestmark = pytest.mark.process

WIDTH, EARLY, LATE = 64, "blocks.0.resid_mid", "blocks.1.mlp_out"
PUSH, PROBE = (torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed)).tolist() for seed in (0, 1))
PLAIN: dict[str, Any] = {"prompt": "Give the drink to", "max_tokens": 9, "temperature": 0, "logprobs": 3, "ignore_eos": True}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "temperature": 0, "logprobs": True}
STEERED: dict[str, Any] = {
    "steering_vectors": {EARLY: {"vector": PUSH, "scale": 0.5}},
    "decode_steering_vectors": {LATE: {"vector": "push", "scale": 2.0}},
    "steering_clamps": [{"site": LATE, "vector": PROBE, "value": 0.3}],
    "monitors": [{"site": EARLY, "probe": PROBE, "name": "watch", "gates": [LATE], "gate_rows": True}],
    "readings": True,
}
ALIKE: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("/v1/completions", PLAIN),
    "several": ("/v1/completions", {**PLAIN, "prompt": ["one", "another"], "n": 2, "logprob_token_ids": [5, 7]}),
    "steered": ("/v1/completions", {**PLAIN, **STEERED}),
    "held": ("/v1/completions", {**PLAIN, "hold": "kept"}),
    "patched": ("/v1/completions", {**PLAIN, "patch": [{"site": EARLY, "position": 3, "source": PUSH}]}),
    "captured": ("/v1/completions", {**PLAIN, "capture": [EARLY, {"site": LATE, "part": "generated"}]}),
    "chat": ("/v1/chat/completions", {**CHAT, **STEERED}),
    "cell": ("/v1/patch_cell", {"clean": "to the shop", "corrupt": "to the ship", "site": EARLY, "position": 9, "max_tokens": 4}),
}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "sweep": ("/v1/patch_sweep", {"clean": "shop", "corrupt": "ship", "answer": "a", "foil": "b"}, "--engine own"),
    "estimate": ("/v1/patch_sweep", {"clean": "ab", "corrupt": "ac", "answer": "a", "foil": "b", "method": "atp"}, "--engine own"),
    "edges": ("/v1/edges", {"clean": "shop", "corrupt": "ship", "answer": "a", "foil": "b"}, "--engine own"),
    "run": ("/v1/completions", {**PLAIN, "capture": [EARLY], "run": "r"}, "leave run out"),
    "norms": ("/v1/completions", {**PLAIN, "norms": [EARLY]}, "capture the site"),
    "echo": ("/v1/completions", {**PLAIN, "echo": True}, "use this project's own Engine"),
}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Running]]:
    folder, tokenizer = tmp_path_factory.mktemp("bytes"), byte_tokenizer()
    tokenizer.save_pretrained(folder)
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": False}
    config = Qwen3Config(vocab_size=len(tokenizer), hidden_size=WIDTH, intermediate_size=96, num_hidden_layers=2, **heads)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn(p.shape)
    model.save_pretrained(folder)
    settings: dict[str, Any] = {"max_model_len": 256, "block_size": 32}
    theirs = load_vllm(folder, dtype="float32", limits=ServerLimits(rows=8, slot_bytes=1 << 27), **settings)
    with running(load(str(folder))) as one, running(theirs) as other:
        for server in (one, other):
            vectors = {"vectors": {"push": PUSH}, "name": "kept", "prefill_steering_vectors": {EARLY: {"vector": PUSH}}}
            assert server.http.post("/v1/steering/set", json=vectors).json() == {"vectors": {"push": WIDTH}, "held": ["kept"]}
        yield one, other


def alike(one: Any, other: Any, place: str = "") -> None:
    """Compare two answers: floats up to rounding, captured rows as numbers, not what names a request or counts cached tokens."""
    if isinstance(one, dict) and "dtype" in one and "data" in one:
        assert torch.allclose(unpack(one), unpack(other), atol=1e-4), place
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), place
        for key in one.keys() - {"id", "created", "request", "cached", "prompt_tokens_details", "seed"}:
            alike(one[key], other[key], f"{place}.{key}")
    elif isinstance(one, list):
        assert len(one) == len(other), place
        for i, pair in enumerate(zip(one, other, strict=True)):
            alike(*pair, f"{place}[{i}]")
    else:
        assert one == (pytest.approx(other, abs=1e-4) if isinstance(one, float) else other), place


@pytest.mark.parametrize("what", ALIKE)
def test_an_answer_of_vllm_is_that_of_our_engine(servers: tuple[Running, Running], what: str) -> None:
    path, body = ALIKE[what]
    answers = [server.http.post(path, json=body) for server in servers]
    assert [answer.status_code for answer in answers] == [200, 200], answers[1].text
    alike(*(answer.json() for answer in answers))
    if what == "steered":
        assert answers[1].json()["choices"][0]["text"] != servers[1].http.post(path, json=PLAIN).json()["choices"][0]["text"]


def streamed(server: Running, body: dict[str, Any]) -> list[dict[str, Any]]:
    with server.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("body", [{**PLAIN, **STEERED}, {**PLAIN, "stop": ["z", "e"], "max_tokens": 40}], ids=["steered", "stop"])
def test_a_stream_of_vllm_is_that_of_our_engine(servers: tuple[Running, Running], body: dict[str, Any]) -> None:
    """Cut elsewhere, as steps come, but of the same tokens, text and readings."""
    found = []
    for server in servers:
        chunks = streamed(server, body)
        extra = [chunk["mi_route2"] for chunk in chunks]
        tokens = [token for one in extra for token in one.get("token_ids", ())]
        readings = {at: read for one in extra for at, read in one.get("readings", {}).items()}
        found.append({"text": "".join(chunk["choices"][0]["text"] for chunk in chunks), "ids": tokens, "readings": readings})
        found[-1]["finish"] = chunks[-1]["choices"][0]["finish_reason"]
    assert bool(found[0]["readings"]) == ("readings" in body)
    alike(*found)


def test_a_running_stream_is_tuned(servers: tuple[Running, Running]) -> None:
    """The scale and a threshold act from the next token on; a request that is gone, or was never steered, is refused."""
    one, texts = servers[1], []
    body = {**PLAIN, **STEERED, "max_tokens": 60, "stream": True}
    for scale in (None, 0.0):
        with unhurried(one), one.http.stream("POST", "/v1/completions", json=body) as answer:
            lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: {"))
            chunks = [json.loads(next(lines))]
            number = chunks[0]["mi_route2"]["request"]
            if scale is not None:
                assert one.http.post(f"/v1/streams/{number}/scale", json={"scale": scale}).status_code == 200
                moved = one.http.post(f"/v1/streams/{number}/threshold", json={"monitor": "watch", "threshold": 1e3})
                assert moved.status_code == 200
                assert one.http.get("/v1/steering").json()["requests"][str(number)]["scale"] == scale
            chunks += map(json.loads, lines)
        texts.append([token for chunk in chunks for token in chunk["mi_route2"].get("token_ids", ())])
    assert texts[0] != texts[1]
    assert one.http.post(f"/v1/streams/{number}/scale", json={"scale": 1.0}).status_code == 404


def test_plain_requests_share_prefixes_and_steered_ones_none(servers: tuple[Running, Running]) -> None:
    def cached(fields: dict[str, Any]) -> int:
        answer = servers[1].http.post("/v1/completions", json={**PLAIN, "prompt": "shared " * 14, **fields}).json()
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [cached({}), cached({}), cached(STEERED), cached(STEERED), cached({})] == [0, 96, 0, 0, 96]


@pytest.mark.parametrize("what", REFUSED)
def test_what_vllm_cannot_serve_is_one_sentence_with_a_remedy(servers: tuple[Running, Running], what: str) -> None:
    path, body, remedy = REFUSED[what]
    answer = servers[1].http.post(path, json=body)
    assert answer.status_code == 400
    assert remedy in answer.json()["error"]["message"]
    assert servers[1].http.get("/health").json()["status"] == "ok"
