"""Cost of HTTP: completions of a server in a process of its own, against the same engine in this process.

Times are on the clock, because a client waits by the clock: run this on a quiet machine.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import httpx
import torch

from mi_route2.engine.engine import Engine
from mi_route2.engine.request import Request
from mi_route2.engine.sampling import Sampling
from mi_route2.hosts import open_host
from mi_route2.serve.models import Served, load
from studies.benchmarks.engine import PROMPT, VOCABULARY, random_model
from studies.benchmarks.paired import Benchmark, BenchmarkOptions, Side

HTTP, IN_PROCESS, HTTP_ONE, ONE = "HTTP, at once", "engine, at once", "HTTP, one request", "engine, one request"


@dataclass
class ServerProcess:
    """A server in a process of its own."""

    process: subprocess.Popen[str]
    log: Path

    @cached_property
    def url(self) -> str:
        """The address that it prints once it listens; ``RuntimeError`` if it did not start."""
        assert self.process.stdout is not None
        _, listens, url = self.process.stdout.readline().strip().rpartition(" is served at ")
        if not listens:
            raise RuntimeError(f"the server did not start: {self.log.read_text()[-2000:]}")
        return url


@contextmanager
def serving(model: str, log: Path, *options: str, **environment: str) -> Iterator[ServerProcess]:
    """Run ``python -m mi_route2.serve`` with these options on a free port until the block is left; its log goes to a file.

    Raises:
        RuntimeError: It did not start, or did not end well by SIGTERM.
    """
    command = [sys.executable, "-m", "mi_route2.serve", "--model", model, "--port", "0", "--threads", "1", *options]
    with log.open("w") as stream:
        process = subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=stream, text=True)
    try:
        yield (server := ServerProcess(process, log))
        if process.returncode is None:
            assert server.url  # a signal that comes before would find no handler
            process.send_signal(signal.SIGTERM)
            if (status := process.wait(60)) != 0:
                raise RuntimeError(f"the server ended with status {status}")
    finally:
        process.kill()
        process.wait()


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
    return Served("random", open_host("torch", random_model(0, layers=4, d=128)), NumberTokenizer())


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
        texts, began = prompts(n), perf_counter()
        tokens = sum(threads.map(complete, texts))
        seconds = perf_counter() - began
        assert tokens == n * new, (tokens, n, new)
        return seconds

    def in_process(n: int) -> float:
        texts, began, tokens = prompts(n), perf_counter(), 0
        for prompt in texts:
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
