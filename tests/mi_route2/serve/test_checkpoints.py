"""A checkpoint of transformers with its own tokenizer and chat template, and adapters from a folder, behind the server."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from served import Running, byte_tokenizer, refusal, running
from transformers import LlamaConfig, LlamaForCausalLM

from mi_route2.adapters import AdapterSpec
from mi_route2.adapters.io import save_pretrained
from mi_route2.engine import Engine, Request, Sampling
from mi_route2.hosts.load import load as load_host
from mi_route2.serve.client import PatchStudy
from mi_route2.serve.models import Readable, load
from mi_route2.sites import Site
from studies.benchmarks.serve import serving

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a random Llama whose tokens are bytes, so that what it writes is mostly no text, and adapters for it."""
    folder = tmp_path_factory.mktemp("bytes")
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder / "base")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=256, num_key_value_heads=2, eos_token_id=256, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder / "base")
    host = load_host(folder / "base")
    draw = torch.Generator().manual_seed(1)
    adapters = host.attach("blocks.*", spec=AdapterSpec("lora", rank=2, quarantine_rank=2), generator=draw)
    with torch.no_grad():
        for p in (*adapters.kept_parameters().values(), *adapters.quarantine_parameters().values()):
            p.add_(0.5 * torch.randn(p.shape, generator=draw))
    save_pretrained(adapters, folder / "adapters", "full")
    return folder


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Running]:
    with running(load(str(checkpoint / "base"), adapters=checkpoint / "adapters"), exact=True) as one:
        yield one


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as one:
        yield one


@pytest.mark.parametrize("mode", ["full", "deployed"])
def test_the_chat_template_and_each_mode(checkpoint: Path, client: openai.OpenAI, mode: Any) -> None:
    """The mode of one request is that of switched adapters bit for bit, also of the prompt's values, beside other modes."""
    served = load(str(checkpoint / "base"), adapters=checkpoint / "adapters", mode=mode)
    text = "<|system|>Be short.<|end|><|user|>Grüße<|end|><|assistant|>"
    ids = tuple(served.tokenizer.encode(text))
    engine = Engine(served.host, exact=True, tokenizer=Readable(served.tokenizer))
    (truth,) = engine.generate([Request(ids, Sampling(max_new=8, logprobs=0, stop_tokens=(256,)))])
    served.opened.close()
    messages: Any = [{"role": "system", "content": "Be short."}, {"role": "user", "content": [{"type": "text", "text": "Grüße"}]}]
    asked: dict[str, Any] = {"model": "base", "messages": messages, "max_tokens": 8, "temperature": 0, "logprobs": True}
    for one in 2 * ("full", "deployed"):
        choice: Any = client.chat.completions.create(**asked, extra_body={"adapters": one}).choices[0]
        assert choice.mi_route2["prompt_token_ids"] == list(ids)
        assert ([token.logprob for token in choice.logprobs.content] == truth.logprobs) == (one == mode)
        assert one != mode or choice.message.content == truth.text


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"continue_final_message": True}, "<|user|>Hi<|end|><|assistant|>Good mor"),
        ({"continue_final_message": True, "add_generation_prompt": False}, "<|user|>Hi<|end|><|assistant|>Good mor"),
        ({"add_generation_prompt": False}, "<|user|>Hi<|end|><|assistant|>Good mor<|end|>"),
    ],
)
def test_a_last_message_is_continued(server: Running, client: openai.OpenAI, how: dict[str, bool], text: str) -> None:
    messages: Any = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Good mor"}]
    asked: dict[str, Any] = {"model": "base", "messages": messages, "max_tokens": 1}
    choice: Any = client.chat.completions.create(**asked, extra_body=how).choices[0]
    assert choice.mi_route2["prompt_token_ids"] == server.server.served.encode(text)
    with pytest.raises(openai.UnprocessableEntityError, match="set one of them to true"):
        client.chat.completions.create(**asked, extra_body={"continue_final_message": True, "add_generation_prompt": True})


def test_a_character_of_several_tokens_is_shown_once_it_is_whole(server: Running, client: openai.OpenAI) -> None:
    served, text = server.server.served, "Grüße, 世界\U0001f600!"
    ids = served.encode(text)
    assert len(ids) > len(text)
    whole = served.pieces(ids, [])
    assert ("".join(whole), len(whole)) == (text, len(ids))
    for cut in range(len(ids)):
        held: list[int] = []
        assert served.pieces(ids[:cut], held) + served.pieces(ids[cut:], held) == whole
    assert "".join(served.pieces([*ids[:3], *ids], [])).endswith(text[3:])  # bytes that are no character hold nothing back for long
    chunk: Any = next(iter(client.completions.create(model="base", prompt=text, max_tokens=1, stream=True)))
    assert chunk.mi_route2["prompt_tokens"] == whole


def test_the_command_serves_a_checkpoint_with_its_adapters_deployed(checkpoint: Path, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"max_tokens": 3, "temperature": 0, "logprobs": 0, "ignore_eos": True}
    options = ("--adapters", str(checkpoint / "adapters"), "--mode", "deployed")
    with serving(str(checkpoint / "base"), tmp_path / "log", *options) as server, PatchStudy(server.url) as study:
        found = study.complete("abc", **asked)["choices"][0]["logprobs"]["token_logprobs"]
        refused = refusal(study.complete, "abc", adapters="full")
        assert (refused.status, "start a server with --mode full" in str(refused)) == (400, True)
    for mode, close in (("full", 1e-3), ("deployed", 1e-4), ("reference", 1e-3)):
        served = load(str(checkpoint / "base"), adapters=checkpoint / "adapters", mode=mode)  # pyright: ignore[reportArgumentType]
        (result,) = Engine(served.host).generate([Request(tuple(served.encode("abc")), Sampling(max_new=3, logprobs=0))])
        assert (found == pytest.approx(result.logprobs, abs=close)) == (mode == "deployed")
        served.opened.close()


def test_the_modes_of_a_server_are_those_it_can_run(checkpoint: Path) -> None:
    modes = {"full": (True, True, False), "deployed": (False, True, False), "reference": (False, False, True)}
    for mode, served_modes in modes.items():
        served = load(str(checkpoint / "base"), adapters=checkpoint / "adapters", mode=mode)  # pyright: ignore[reportArgumentType]
        assert tuple(served.modes.values()) == served_modes
        outputs = [site for site in served.host.sites() if site.point in ("kept_out", "quarantine_out")]
        fires = any(site.point == "quarantine_out" for site in outputs)
        assert (served.closing("deployed", 16, outputs) is None) == (mode != "full")
        assert fires or mode != "full"
        served.opened.close()
    plain = load(str(checkpoint / "base"))
    assert all(plain.modes.values())
    with pytest.raises(ValueError, match="no adapters"):
        load(str(checkpoint / "base"), mode="deployed")
    assert plain.host.capture([Site(0, "resid_pre")], torch.zeros((1, 1), dtype=torch.long))
