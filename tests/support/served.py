"""A real server on a loopback port, in a thread, and models to serve that take a second to make."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import torch
import uvicorn
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from mi_route2.adapters import AdapterSpec
from mi_route2.hosts import open_host
from mi_route2.serve.app import create_app
from mi_route2.serve.client import ServerError
from mi_route2.serve.http import Connection
from mi_route2.serve.models import Served
from mi_route2.serve.state import Server
from studies.environments.micro.model import MicroGPT
from studies.environments.micro.served import MicroTokenizer
from studies.environments.micro.settings import MicroConfig

PROMPT = "# task: add 3 then sub 4\n# grader: calls run_tests()"
OTHER = "# task: scale 3 then sub 4\n# grader: calls run_tests()"
SITE = "blocks.1.resid_pre"
TOKEN = "token-token-token"

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose 257 tokens are the bytes and, last, the end of a text, with a chat template."""
    inner = Tokenizer(BPE({word: i for i, word in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), "<eos>"])}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", chat_template=TEMPLATE)


def random_micro(context: int = 32, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Served:
    """Return an untrained micro model whose adapters both have weights that matter."""
    draw = torch.Generator().manual_seed(0)
    model = MicroGPT(MicroConfig(d=16, heads=2, mlp=32, context=context), draw).to(dtype).eval()
    host = open_host("torch", model)
    adapters = host.attach("blocks.*", spec=AdapterSpec("lora", rank=2, quarantine_rank=2), generator=draw)
    with torch.no_grad():
        for p in (*model.parameters(), *adapters.kept_parameters().values(), *adapters.quarantine_parameters().values()):
            p.add_(0.3 * torch.randn(p.shape, generator=draw, dtype=p.dtype))
    model.to(device)
    vectors = {"probe": torch.randn(16, generator=draw), "push": torch.randn(16, generator=draw)}
    served = Served("micro", host, MicroTokenizer(), adapters, vectors=vectors)
    served.switch("full")
    return served


@dataclass
class Running:
    """A server that runs: its address, a client of it, and its state for looking at."""

    url: str
    http: httpx.Client
    server: Server
    uvicorn: uvicorn.Server


@contextmanager
def running(served: Served, **given: Any) -> Iterator[Running]:
    """Serve a model on a free port until the block is left."""
    app = create_app(served, **given)
    config = uvicorn.Config(app, port=0, http=Connection, log_level="warning", access_log=False, timeout_graceful_shutdown=2)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until = time.monotonic() + 20
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        assert time.monotonic() < until
        time.sleep(0.01)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    # httpx's own five seconds are too few for some answers while the machine is full
    once = httpx.Limits(max_keepalive_connections=0)
    try:
        with httpx.Client(base_url=url, timeout=60, limits=once) as http:
            yield Running(url, http, app.state.server, server)
    finally:
        server.should_exit = True
        thread.join(20)
        served.opened.close()


@contextmanager
def unhurried(one: Running, seconds: float = 0.02) -> Iterator[None]:
    """Let each step of the engine wait ``seconds`` until the block is left, so that a busy client finds its stream running."""
    engine, left = one.server.owner._engine, threading.Event()
    step = engine.step

    def waiting() -> Any:
        left.wait(seconds)
        return step()

    engine.step = waiting
    try:
        yield
    finally:
        left.set()
        engine.step = step


def bearer(token: str) -> dict[str, str]:
    """Return the header of a token."""
    return {"Authorization": f"Bearer {token}"}


def until(true: Callable[[], object], seconds: float = 10.0) -> None:
    """Wait until ``true`` returns something that is."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def refusal(function: Callable[..., Any], *given: Any, **named: Any) -> ServerError:
    """Return the error with which a method of a client is refused."""
    try:
        function(*given, **named)
    except ServerError as error:
        return error
    raise AssertionError("it was not refused")


def metrics(one: Running, token: str = "none") -> dict[str, float]:
    """Return the numbers that the server counts, by name and labels."""
    text = one.http.get("/metrics", headers=bearer(token)).text
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name.removeprefix("mi_route2_"): float(value) for name, _, value in lines}


@contextmanager
def sent(
    one: Running, body: bytes, *fields: str, what: str = "POST /v1/completions", buffer: int = 4096
) -> Iterator[socket.socket]:
    """Send a request on a connection of its own, whose answer waits in a small ``buffer`` until the block reads it.

    ``fields`` are its headers, as ``Content-Length: 1000`` for a body that does not come to its end.
    """
    host, port = one.url.removeprefix("http://").split(":")
    whole = (
        ()
        if any(field.startswith(("Content-Length", "Transfer-Encoding")) for field in fields)
        else (f"Content-Length: {len(body)}",)
    )
    head = (f"{what} HTTP/1.1", f"Host: {host}:{port}", "Content-Type: application/json", *whole, *fields, "", "")
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        connection.settimeout(60)
        connection.connect((host, int(port)))
        connection.sendall("\r\n".join(head).encode() + body)
        yield connection
