"""Cost of HTTP on top of the engine, and the server's memory over many requests.

    python -m studies.benchmarks serve [--quick] [--smollm2] [--rounds 9] [--out FILE.json]
    python -m studies.benchmarks serve --memory [--requests 10000] [--out FILE.json]
    python -m studies.benchmarks serve --cold [--out FILE.json]

The server runs in a process of its own, as users run it; this process has the same engine on the same model, and is the client. The
model is that of ``studies.benchmarks.engine``, 4 layers with d = 128, or SmolLM2-135M with ``--smollm2``. One thread of torch each.

    streams      32 streams at once, greedy, of prompts and completions of different lengths: when one ends, the next begins; in
                 process: the engine's steps, with its events read
    first token  requests that arrive one by one while 24 streams run, until their first token; in process: they are submitted
                 between two steps
    beside       8 streams beside patch sweeps over HTTP, and without them
    processor    32 streams, processor time of the server's process and of the engine's

All but the last are times on the clock, because a client waits by the clock: on two cores, the server's event loop and the client
have what the engine leaves, so run this on a quiet machine. The client reads bytes and parses nothing; its processor time is given.
Sides take turns; a ratio is one of medians over rounds, with a 95% bootstrap interval. Below 1 is faster. A row that has a limit
shows it. Beside these rows: the seconds from the start of a process until ``/health`` answers, with the micro model. ``--cold``
measures these alone, with an empty cache of compiled modules and of models for each start (the system's cache of files stays).

``--memory`` sends requests of all kinds from 16 connections and fits a line through the server's resident memory over the last four
fifths of them. What is sent is drawn from a fixed pool, so that the prefix cache is full after the first fifth.
"""

import json
import os
import random
import re
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import httpx
import numpy as np
import torch
from scipy.stats import linregress
from tqdm import tqdm

from mi_route2.engine.engine import Engine
from mi_route2.engine.request import Request
from mi_route2.engine.sampling import Sampling
from mi_route2.hosts import open_host
from mi_route2.serve.models import Served, load
from mi_route2.serve.process import Process, serving
from studies.benchmarks.engine import LAYERS, VOCABULARY, WIDTH, random_model
from studies.benchmarks.measurement.paired import (
    PairedRatio,
    PairedRatioResult,
    Turn,
    compared,
    machine,
    report,
    side_table,
    take_turns,
)
from studies.benchmarks.options import ServeOptions

STREAMS, LOAD, FEW, PROMPT = 32, 24, 8, 32
"""Streams at once, streams that are the load, streams beside a sweep, and tokens of a prompt."""
STARTS = 3
"""Starts of the server."""
POOL, FLAT = 64, 1.0
"""Different requests of ``--memory``, and the MiB per 1,000 requests by which memory may grow."""
END = b"0\r\n\r\n"
"""Last bytes of a streamed answer."""


@dataclass(frozen=True)
class Amount:
    """Amount of work: tokens of a stream and of the load's, requests that arrive, and seconds between them."""

    new: int
    load: int
    arrivals: int
    gap: float
    few: int


SIZES = {"quick": Amount(8, 40, 2, 0.05, 8), "random": Amount(256, 400, 12, 0.1, 256), "smollm2": Amount(16, 48, 6, 0.5, 16)}


ROWS = (
    PairedRatio("32 streams over HTTP", "in process", 1 / 0.9),
    PairedRatio("first token over HTTP", "first token in process", 1.5),
    PairedRatio("8 streams beside sweeps", "8 streams", 1.3),
    PairedRatio("processor time over HTTP", "processor time in process"),
)


class Numbers:
    """Tokenizer whose texts are numbers: this is about the server and not about tokenizers."""

    eos_token_id = None

    def encode(self, text: str) -> list[int]:
        """Return the ids in a text."""
        return [int(word) for word in text.split()]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of ids."""
        return "".join([f" {one}" for one in ids])


def model() -> Served:
    """Return the benchmark's model."""
    return Served("random", open_host("torch", random_model(0)), Numbers())


class Connection:
    """A connection that stays open, and times of its last request: when it was sent and when the first token or cell came."""

    def __init__(self, address: tuple[str, int]):
        self.socket = socket.create_connection(address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sent = self.first = 0.0
        self._last = b""

    def send(self, path: str, body: dict[str, Any]) -> None:
        """Send a request for a stream."""
        data = json.dumps({**body, "stream": True}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        self.first, self._last, self.sent = 0.0, b"", perf_counter()
        self.socket.sendall(head.encode() + data)

    def read(self) -> bool:
        """Read the available bytes; return True if the answer has ended. ``RuntimeError`` for another answer than a stream."""
        data = self._last + self.socket.recv(1 << 18)
        if not self.first and (b'"token_ids":[' in data or b"event: cell" in data):
            self.first = perf_counter()
        if not data.startswith(b"HTTP/1.1 200") and not self.first:
            raise RuntimeError(f"the server answered {data[:1000]!r}")
        self._last = data[-64:] if self.first else data
        return data.endswith(END)

    def close(self) -> None:
        """Close it, which cancels what runs."""
        self.socket.close()


def asked(prompt: Sequence[int], new: int) -> dict[str, Any]:
    """Return the body of a greedy completion of this length."""
    return {"prompt": list(prompt), "max_tokens": new, "temperature": 0, "ignore_eos": True}


class ServerSides:
    """Both sides: the engine of this process, and a server."""

    def __init__(self, served: Served, server: Process, size: Amount, seed: int):
        self.served, self.server, self.size = served, server, size
        host, _, port = server.url.partition("://")[2].rpartition(":")
        self.address = host, int(port)
        self.engine = Engine(served.host, tokenizer=served.tokenizer)
        self._draw = torch.Generator().manual_seed(seed)
        self.client = 0.0
        """Processor seconds of the client while it was measured."""

    def prompts(self, count: int) -> list[list[int]]:
        """Return prompts that no side has seen, so that no prefix is cached."""
        return torch.randint(3, VOCABULARY, (count, PROMPT), generator=self._draw).tolist()

    def jobs(self) -> list[tuple[list[int], int]]:
        """Return prompts and how many tokens each is to be continued by: the same lengths at each call, for both sides."""
        draw = torch.Generator().manual_seed(0)
        least, most = self.size.new // 2, self.size.new + self.size.new // 2
        prompts = torch.randint(PROMPT // 2, PROMPT + 1, (2 * STREAMS,), generator=draw).tolist()
        lengths = torch.randint(least, most + 1, (2 * STREAMS,), generator=draw).tolist()
        return [(one[:some], new) for one, some, new in zip(self.prompts(2 * STREAMS), prompts, lengths, strict=True)]

    def streams_in_process(self) -> tuple[float, float]:
        """Return the seconds of all streams on the clock and of the processor."""
        jobs, engine = self.jobs(), self.engine
        left, expected, seen = iter(jobs), sum(new for _, new in jobs), 0
        began, work = perf_counter(), process_time()

        def submit(count: int) -> None:
            for prompt, new in islice(left, count):
                engine.submit(Request(tuple(prompt), Sampling(max_new=new)))

        submit(STREAMS)
        while engine.busy:
            ended = engine.step()
            seen += sum(event.token is not None for event in engine.events)
            submit(len(ended))
        assert seen == expected
        return perf_counter() - began, process_time() - work

    def streams(self, jobs: Sequence[tuple[list[int], int]], count: int) -> tuple[float, float]:
        """Return the seconds of jobs over HTTP on the clock, ``count`` at a time, and of the server's processor."""
        told = self._generated()
        left, work, before, began = iter(jobs), self.server.seconds, process_time(), perf_counter()
        with selectors.DefaultSelector() as waiting:
            for prompt, new in islice(left, count):
                self._stream(waiting, prompt, new)
            while waiting.get_map():
                for key, _ in waiting.select():
                    if not key.data.read():
                        continue
                    if (job := next(left, None)) is not None:
                        key.data.send("/v1/completions", asked(*job))
                    else:
                        waiting.unregister(key.fileobj)
                        key.data.close()
        seconds = perf_counter() - began
        self.client += process_time() - before
        worked = self.server.seconds - work
        self._drain()
        assert self._generated() - told == sum(new for _, new in jobs)
        return seconds, worked

    def first_in_process(self) -> list[float]:
        """Return the seconds from each arrival until its first token, while the load runs."""
        engine, (load, others) = self.engine, (self.prompts(LOAD), self.prompts(self.size.arrivals))
        for prompt in load:
            engine.submit(Request(tuple(prompt), Sampling(max_new=self.size.load)))
        began, delays = perf_counter(), []
        arrivals = [began + (i + 2) * self.size.gap for i in range(self.size.arrivals)]
        pending: dict[int, float] = {}
        while len(delays) < len(arrivals):
            while len(delays) + len(pending) < len(arrivals) and perf_counter() >= (at := arrivals[len(delays) + len(pending)]):
                pending[engine.submit(Request(tuple(others[len(delays) + len(pending)]), Sampling(max_new=1)))] = at
            engine.step()
            now = perf_counter()
            delays += [now - pending.pop(event.request) for event in engine.events if event.request in pending]
            if not engine.busy:
                time.sleep(0.001)
        engine.close()
        engine.step()
        return delays

    def first_over_http(self) -> list[float]:
        """Return the same, for requests on a connection that is open."""
        load, others, delays = self.prompts(LOAD), self.prompts(self.size.arrivals), []
        with selectors.DefaultSelector() as waiting:
            streams = [self._stream(waiting, prompt, self.size.load) for prompt in load]
            probe, busy, began = Connection(self.address), False, perf_counter()
            waiting.register(probe.socket, selectors.EVENT_READ, probe)
            while len(delays) < len(others):
                at = began + (len(delays) + 2) * self.size.gap
                if not busy and perf_counter() >= at:
                    probe.send("/v1/completions", asked(others[len(delays)], 1))
                    busy = True
                for key, _ in waiting.select(None if busy else max(0.0, at - perf_counter())):
                    if key.data.read():
                        if key.data is probe:
                            delays.append(probe.first - probe.sent)
                            busy = False
                        else:
                            waiting.unregister(key.fileobj)
            for connection in (*streams, probe):
                connection.close()
        self._drain()
        return delays

    def beside_sweeps(self) -> float:
        """Return the seconds of a few streams while one patch sweep after another runs."""
        clean, corrupt = self.prompts(2)
        given = {"clean": clean, "corrupt": corrupt, "answer": 3, "foil": 4, "sites": ["resid_pre", "z", "mlp_out"]}
        sweep = Connection(self.address)
        sweep.send("/v1/patch_sweep", given)
        left = FEW
        with selectors.DefaultSelector() as waiting:
            waiting.register(sweep.socket, selectors.EVENT_READ, sweep)
            while not sweep.first:
                sweep.read()
            began = perf_counter()
            for prompt in self.prompts(FEW):
                self._stream(waiting, prompt, self.size.few)
            while left:
                for key, _ in waiting.select():
                    if not key.data.read():
                        continue
                    if key.data is sweep:
                        sweep.send("/v1/patch_sweep", given)
                    else:
                        waiting.unregister(key.fileobj)
                        key.data.close()
                        left -= 1
            seconds = perf_counter() - began
        sweep.close()
        self._drain()
        return seconds

    def _stream(self, waiting: selectors.BaseSelector, prompt: Sequence[int], new: int) -> Connection:
        """Open a stream on a connection of its own, on which ``waiting`` waits."""
        connection = Connection(self.address)
        waiting.register(connection.socket, selectors.EVENT_READ, connection)
        connection.send("/v1/completions", asked(prompt, new))
        return connection

    def _generated(self) -> int:
        """Return how many tokens the server has generated so far."""
        (count,) = re.findall(r"^mi_route2_tokens_total (\S+)$", httpx.get(f"{self.server.url}/metrics").text, re.MULTILINE)
        return round(float(count))

    def _drain(self) -> None:
        """Wait until the server has noticed that its clients are gone."""
        busy = ("running", "waiting", "sweeps")
        while any(httpx.get(f"{self.server.url}/v1/steering/dynamic").json()["queue"][name] for name in busy):
            time.sleep(0.05)

    def turns(self) -> dict[str, Turn]:
        """Return calls by name; each measures one turn and returns the seconds of one or more sides."""

        def in_process() -> dict[str, float]:
            return dict(zip(("in process", "processor time in process"), self.streams_in_process(), strict=True))

        def over_http() -> dict[str, float]:
            seconds = self.streams(self.jobs(), STREAMS)
            return dict(zip(("32 streams over HTTP", "processor time over HTTP"), seconds, strict=True))

        return {
            "in process": in_process,
            "over HTTP": over_http,
            "first in process": lambda: {"first token in process": median(self.first_in_process())},
            "first over HTTP": lambda: {"first token over HTTP": median(self.first_over_http())},
            "few": lambda: {"8 streams": self.streams([(one, self.size.few) for one in self.prompts(FEW)], FEW)[0]},
            "few beside sweeps": lambda: {"8 streams beside sweeps": self.beside_sweeps()},
        }


def starts(count: int, folder: Path, cold: bool = False) -> list[dict[str, float]]:
    """Return the seconds from the start of a process until its model is loaded, until ``/health`` answers, and of the processor.

    The model is the micro one, which an earlier start has trained; a ``cold`` one trains it, and compiles all modules.
    """
    if not cold:
        with serving("micro", folder / "first.log"):
            pass
    times = []
    for i in range(count):
        caches = {name: str(folder / f"{name}-{i}") for name in ("XDG_CACHE_HOME", "PYTHONPYCACHEPREFIX") if cold}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        began, log = perf_counter(), folder / f"{i}.log"
        with log.open("w") as stream:
            command = [sys.executable, "-m", "mi_route2.serve", "--port", str(port)]
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stream, env=os.environ | caches, text=True)
        try:
            loaded = 0.0
            while True:
                assert process.poll() is None, log.read_text()
                if not loaded and "micro is loaded" in log.read_text():
                    loaded = perf_counter() - began
                try:
                    if httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).status_code == 200:
                        break
                except httpx.TransportError:
                    time.sleep(0.01)
            healthy = perf_counter() - began
            times.append({"loaded": loaded, "healthy": healthy, "processor": Process(process, log).seconds})
        finally:
            process.terminate()
            process.wait()
    return times


def table(results: list[PairedRatioResult], seconds: dict[str, list[float]]) -> str:
    """Return a Markdown table: the median of both sides, and the ratio of times."""

    def shown(name: str) -> str:
        one = median(seconds[name])
        return f"{1e3 * one:,.1f} ms" if one < 0.1 else f"{one:.2f} s"

    return side_table(results, shown, ("what", "", "against", "", "ratio", "95%", "at most"))


# Memory


def pool(rng: random.Random) -> list[tuple[str, dict[str, Any]]]:
    """Return requests of all kinds: plain, steered, patched, monitored, captured, with choices; streams, and a few sweeps."""
    site, some = f"blocks.{LAYERS // 2}.resid_pre", [rng.gauss(0, 1) for _ in range(WIDTH)]
    kinds: list[dict[str, Any]] = [
        {},
        {"steering_vectors": {site: {"vector": some, "scale": 0.1}}},
        {"patch": [{"site": site, "position": 3, "source": "zeros"}]},
        {"monitors": [{"site": site, "probe": some, "gates": []}], "readings": True},
        {"capture": [{"site": site, "part": "prompt"}]},
        {"n": 2, "logprobs": 3},
        {"stream": True},
        {"stream": True, "norms": [site]},
    ]
    requests = []
    for i in range(POOL):
        ids = [rng.randrange(3, VOCABULARY) for _ in range(PROMPT)]
        if i % 32 == 31:
            body = {"clean": ids[:8], "corrupt": ids[8:16], "answer": ids[0], "foil": ids[8]}
            requests.append(("/v1/patch_sweep", body))
        else:
            requests.append(("/v1/completions", {**asked(ids, 1 + i % 6), **kinds[i % len(kinds)]}))
    return requests


def memory(server: Process, requests: int, seed: int) -> list[tuple[int, int]]:
    """Send requests from 16 connections; return how many have been answered and the server's resident bytes, now and then."""
    rng = random.Random(seed)
    drawn, samples, answered = pool(rng), [], 0
    with ThreadPoolExecutor(16) as threads, httpx.Client(base_url=server.url, timeout=300.0) as http:

        def send(_: int) -> None:
            path, body = drawn[rng.randrange(POOL)]
            while (answer := http.post(path, json=body)).status_code == 429:  # sweeps queue up behind each other
                time.sleep(float(answer.headers["retry-after"]))
            answer.raise_for_status()

        with tqdm(total=requests, unit="request", desc="memory") as bar:
            while answered < requests:
                step = min(max(16, requests // 100), requests - answered)
                list(threads.map(send, range(step)))
                answered += step
                samples.append((answered, server.seen()["rss"]))
                bar.update(step)
                bar.set_postfix(rss=f"{samples[-1][1] / 2**20:.1f} MiB")
    return samples


def slope(samples: list[tuple[int, int]]) -> tuple[float, float]:
    """Return the growth in MiB per 1,000 requests after the first fifth, and its standard error."""
    kept = samples[len(samples) // 5 :]
    fit: Any = linregress([count / 1000 for count, _ in kept], [rss / 2**20 for _, rss in kept])
    return float(fit.slope), float(fit.stderr)


def run(options: ServeOptions) -> None:
    """Measure, print the table, and write ``options.out``."""
    with tempfile.TemporaryDirectory(prefix="serve-") as scratch:
        folder = Path(scratch)
        name = "smollm2" if options.smollm2 else "studies.benchmarks.serve:model"
        before = os.getloadavg()
        if options.cold:
            return _cold(options, folder)
        with serving(name, folder / "server.log") as server:
            if options.memory:
                return _memory(options, server)
            served = load("smollm2") if options.smollm2 else model()
            size = SIZES["quick" if options.quick else "smollm2" if options.smollm2 else "random"]
            sides = ServerSides(served, server, size, options.seed)
            began = perf_counter()
            seconds = take_turns(sides.turns(), options.turns, np.random.default_rng(options.seed))
            busy = sides.client / (perf_counter() - began)
        started = starts(1 if options.quick else STARTS, folder)
    rng = np.random.default_rng(options.seed)
    results = compared(ROWS, seconds, rng)
    head = f"{options.turns} rounds, load of the machine before {before[0]:.1f}, one thread of torch in each process"
    document = {"load": before, "size": size, "client": busy, "rows": results, "seconds": seconds, "starts": started}
    report(options, head, f"{table(results, seconds)}\n{start_line(started)}\n", document)


def _memory(options: ServeOptions, server: Process) -> None:
    before = os.getloadavg()
    samples = memory(server, 500 if options.quick else options.requests, options.seed)
    grown, error = slope(samples)
    print(f"\n{memory_line(samples)}; load of the machine before {before[0]:.1f}")
    options.write({"machine": machine(), "load": before, "samples": samples, "slope": grown, "error": error, "limit": FLAT})


def _cold(options: ServeOptions, folder: Path) -> None:
    before, started = os.getloadavg(), starts(1 if options.quick else STARTS, folder, cold=True)
    print(f"\n{cold_line(started, before[0])}")
    options.write({"machine": machine(), "load": before, "starts": started})


def cold_line(started: list[dict[str, float]], load: float) -> str:
    """Return a sentence about the starts with empty caches."""
    processor, healthy = (median(one[name] for one in started) for name in ("processor", "healthy"))
    after = median(one["healthy"] - one["loaded"] for one in started)
    return (
        f"With empty caches, so that the modules of all packages are compiled and the micro model is trained, it takes "
        f"{processor:.0f} s of processor time until `/health` answers (median of {len(started)}); at a load average of {load:.1f} "
        f"before, that was {healthy:.0f} s on the clock, of which {after:.1f} s after the model was there."
    )


def start_line(started: list[dict[str, float]]) -> str:
    """Return a sentence about the starts."""
    healthy, after = median(one["healthy"] for one in started), median(one["healthy"] - one["loaded"] for one in started)
    return (
        f"From the start of the process to an answer of `/health`, with the micro model: {healthy:.1f} s (median of "
        f"{len(started)}), of which {after:.1f} s after the model is loaded."
    )


def memory_line(samples: list[tuple[int, int]]) -> str:
    """Return a sentence about the growth of memory."""
    grown, error = slope(samples)
    return (
        f"{samples[-1][0]:,} requests: {samples[-1][1] / 2**20:.0f} MiB at the end, growth of {grown:.2f} MiB per 1,000 requests "
        f"(standard error {error:.2f}; at most {FLAT:g})"
    )
