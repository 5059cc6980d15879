"""Cost of HTTP: completions of a server in a process of its own, against the same engine in this process.

Times are on the clock, because a client waits by the clock: run this on a quiet machine.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import httpx
import torch

from mi_route2.engine.engine import Engine
from mi_route2.engine.request import Request
from mi_route2.engine.sampling import Sampling
from mi_route2.hosts import open_host
from mi_route2.serve.command import serving
from mi_route2.serve.models import Served, load
from studies.benchmarks.engine import PROMPT, VOCABULARY, random_model
from studies.benchmarks.paired import Benchmark, BenchmarkOptions, Side

HTTP, IN_PROCESS, HTTP_ONE, ONE = "HTTP, at once", "engine, at once", "HTTP, one request", "engine, one request"


class NumberTokenizer:
    """Tokenizer whose texts are numbers: this measures the server and not a tokenizer."""

    eos_token_id = None

    def encode(self, text: str) -> list[int]:
        """Return the ids in a text."""
        return [int(word) for word in text.split()]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of ids."""
        return "".join([f" {i}" for i in ids])


def model() -> Served:
    """Return the served random model."""
    return Served("random", open_host("torch", random_model(0)), NumberTokenizer())


def build(options: BenchmarkOptions, stack: ExitStack) -> Benchmark:
    """Return completions over HTTP and in process: all at once, and a single one."""
    folder = Path(stack.enter_context(TemporaryDirectory(prefix="serve-")))
    server = stack.enter_context(serving("smollm2" if options.smollm2 else "studies.benchmarks.serve:model", folder / "log"))
    served = load("smollm2") if options.smollm2 else model()
    count, new = (4, 8) if options.quick else (8, 16) if options.smollm2 else (32, 64)
    threads = stack.enter_context(ThreadPoolExecutor(count))
    client = stack.enter_context(httpx.Client(base_url=server.url, timeout=300.0, trust_env=False))
    engine = Engine(served.host, tokenizer=served.tokenizer)
    generator = torch.Generator().manual_seed(options.seed)

    def prompts(n: int) -> list[list[int]]:  # new ones in every turn, so that no prefix is cached
        return torch.randint(3, VOCABULARY, (n, PROMPT), generator=generator).tolist()

    def complete(prompt: list[int]) -> int:
        body = {"prompt": prompt, "max_tokens": new, "temperature": 0, "ignore_eos": True}
        return client.post("/v1/completions", json=body).raise_for_status().json()["usage"]["completion_tokens"]

    def over_http(n: int) -> float:
        given, began = prompts(n), perf_counter()
        tokens = sum(threads.map(complete, given))
        seconds = perf_counter() - began
        assert tokens == n * new, (tokens, n, new)
        return seconds

    def in_process(n: int) -> float:
        given, began, tokens = prompts(n), perf_counter(), 0
        for prompt in given:
            engine.submit(Request(tuple(prompt), Sampling(max_new=new)))
        while engine.busy:
            engine.step()
            tokens += sum(event.token is not None for event in engine.events)
        assert tokens == n * new
        return perf_counter() - began

    sides: dict[str, Side] = {
        HTTP: lambda: over_http(count),
        IN_PROCESS: lambda: in_process(count),
        HTTP_ONE: lambda: over_http(1),
        ONE: lambda: in_process(1),
    }
    return Benchmark(f"{count} completions of {new} tokens, seconds on the clock", sides, [(HTTP, IN_PROCESS), (HTTP_ONE, ONE)])
