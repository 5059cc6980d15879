"""Soak test of the server: many clients for minutes, with random interventions and every kind of misbehavior.

    python -m mi_route2.serve.soak [--minutes 60] [--clients 32] [--seed 0] [--out FILE.json]

A server in a process of its own runs a small random model, with small limits, so that requests queue and are refused. Clients of
two keys complete, stream and chat with drawn interventions, sweep, capture runs and patch from them, hold steering and move it in
running streams; they also go away in the middle, read slowly, send what is no request, and reach for what is another key's.

At the end every row and slot must be free, no request may have been stuck, no answer may have been 5xx, open files and threads must
be as they were after the first quarter, and, in a soak of ten minutes or more, memory must not grow steadily. A sample of
the answers is asked for once more, one by one, from a new server: every token, log-probability, reading and captured value must be
the same, bit for bit (with ``--batched``: until the first other token, within 1e-3).
"""

import asyncio
import contextlib
import itertools
import json
import math
import os
import random
import socket
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import httpx
import tyro
from tqdm import tqdm

from mi_route2.serve.process import Process, serving
from mi_route2.validation import write_json

WIDTH, LAYERS, CONTEXT, FIRST = 32, 2, 1024, 3
"""Size of the model, and the id of the byte 0."""
MODEL = "mi_route2.serve.soak_model:model"
KEYS = {"alice": "soak-alice-soak-alice", "bob": "soak-bob-soak-bob-soak", "admin": "soak-admin-soak-admin"}
LIMITS = {"rows": 16, "queue": 24, "per-key": 40, "sweeps": 3, "backlog": 64, "max-body": 200_000}
LIMITS |= {"store": 4 << 20, "prefix-bytes": 16 << 20}
RUN_SITE = "blocks.0.resid_pre"
"""Site that each key's own run holds."""
PATIENCE = 300.0
"""Seconds after which a request counts as stuck."""
KEPT = 300
"""Number of answers that are requested again after the soak."""
ENOUGH = 50
"""Failures after which the soak stops."""
GROWTH, SLACK, WARM = 0.05, 12 << 20, 10
"""Growth of the resident memory that is allowed: a share of it, and bytes; and the minutes of a soak from which it is compared."""
WINDOWS = 9
"""Parts of the soak after its first quarter, of equal numbers of answers, whose memory is compared."""
BEGINNINGS = (
    "The quick brown fox ",
    "Once upon a time, in a land far away, ",
    "def solve(x):\n    return ",
    "\u00e9\u4e2d\U0001f600 ",
)


def bearer(who: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[who]}"}


class Bytes:
    """Tokenizer whose tokens are bytes, so that characters and their colors are split over tokens."""

    is_fast, eos_token_id, chat_template = True, 0, "role: content, line by line"

    def __call__(self, text: str, return_offsets_mapping: bool = False) -> dict[str, Any]:
        """Return the ids of a text, and the characters of each token."""
        spans = [(i, i + 1) for i, one in enumerate(text) for _ in one.encode()]
        return {"input_ids": self.encode(text), **({"offset_mapping": spans} if return_offsets_mapping else {})}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text."""
        return [FIRST + one for one in text.encode()]

    def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
        """Return the text of ids."""
        return bytes(one - FIRST for one in ids if one >= FIRST).decode("utf-8", "replace")

    def apply_chat_template(self, messages: Any, **_: object) -> str:
        """Return the text of a conversation."""
        return "".join(f"{one['role']}: {one['content']}\n" for one in messages)


# What clients ask


def site(rng: random.Random, *points: str) -> str:
    return f"blocks.{rng.randrange(LAYERS)}.{rng.choice(points or ('resid_pre', 'resid_mid', 'resid_post'))}"


def vector(rng: random.Random) -> Any:
    return rng.choice(["push", "probe", "mine", [round(rng.gauss(0, 1), 3) for _ in range(WIDTH)]])


def prompt(rng: random.Random) -> str | list[int]:
    text = rng.choice(BEGINNINGS) + "".join(rng.choices("abcdefg \u00e4", k=rng.randrange(40)))
    return text if rng.random() < 0.7 else Bytes().encode(text)


def asked(rng: random.Random, chat: bool = False) -> dict[str, Any]:
    """Return a random request whose answer depends only on itself and on vectors that every key has."""
    given = prompt(rng)
    length = len(given) if isinstance(given, list) else len(given.encode())
    body: dict[str, Any] = {"max_tokens": rng.randint(1, 24), "temperature": rng.choice([0, 0.7, 1.5])}
    body |= {"messages": [{"role": "user", "content": str(given)}]} if chat else {"prompt": given}
    body |= {"seed": rng.randrange(1000), "ignore_eos": rng.random() < 0.8}
    some: list[tuple[float, Callable[[], dict[str, Any]]]] = [
        (0.3, lambda: {"top_p": round(rng.uniform(0.3, 1), 2)}),
        (0.2, lambda: {"top_k": rng.randint(1, 50)}),
        (0.2, lambda: {"stop": rng.choice(["a", "\u00e9", ["xyz", " "]])}),
        (0.2, lambda: {"n": rng.randint(2, 3)}),
        (0.5, lambda: {"logprobs": True, "top_logprobs": rng.randint(0, 5)} if chat else {"logprobs": rng.randint(0, 5)}),
        (0.2, lambda: {"logprob_token_ids": rng.sample(range(FIRST, 250), 3)}),
        (0.3, lambda: {"patch": _patches(rng, min(length, 5))}),
        (0.3, lambda: {"steering_vectors": {site(rng): {"vector": vector(rng), "scale": round(rng.uniform(-3, 3), 2)}}}),
        (0.2, lambda: {"decode_steering_vectors": {site(rng): vector(rng)}}),
        (0.2, lambda: {"steering_clamps": [{"site": site(rng), "vector": vector(rng), "low": -1.0, "high": 1.0}]}),
        (0.3, lambda: {"monitors": [_monitor(rng)], "readings": rng.random() < 0.7}),
        (0.2, lambda: {"adapters": rng.choice(["full", "deployed", "reference"])}),
        (0.2, lambda: {"capture": [_capture(rng)]}),
        (0.2, lambda: {"norms": [site(rng)]}),
        (0.2, lambda: {"steering": [_rule(rng)]}),
        (0.2, lambda: {"hold": "held"}),
        (0.2, lambda: {"priority": -rng.randrange(3)}),
    ]
    for chance, make in some:
        if rng.random() < chance:
            body |= make()
    if chat:
        body.pop("patch", None)  # the template decides about positions
    return body


def _patches(rng: random.Random, length: int) -> list[dict[str, Any]]:
    places = {(site(rng), rng.randrange(length)) for _ in range(rng.randint(1, 3))}
    return [
        {"site": at, "position": position, "source": rng.choice(["zeros", vector(rng)]), "alpha": rng.choice([0.5, 1.0])}
        for at, position in sorted(places)
    ]


def _capture(rng: random.Random) -> dict[str, Any]:
    return {"site": site(rng, "resid_pre", "z", "mlp.down.kept_out"), "part": rng.choice(["prompt", "all"])}


def _monitor(rng: random.Random) -> dict[str, Any]:
    act: dict[str, Any] = rng.choice([{"gates": []}, {"gates": [], "quarantine": "close"}, {"gates": [], "quarantine": "open"}])
    return {"site": "blocks.0.resid_pre", "probe": vector(rng), "threshold": rng.choice([-1.0, 0.0, 1.0]), "name": "probe", **act}


def _rule(rng: random.Random) -> dict[str, Any]:
    probe = {"probe": {"site": "blocks.0.resid_pre", "vector": "probe", "threshold": 0.0}}
    add = {"add": [{"site": site(rng), "vector": "push", "scale": 1.0}]}
    return {"when": probe, "scope": rng.choice(["this_token", "next_step", "rest_of_request"]), "apply": add} | (
        {"scope": "this_token", "apply": {"add": [{"site": "blocks.1.resid_post", "vector": "push"}]}} if rng.random() < 0.5 else {}
    )


def substance(answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the choices of an answer without the fields that depend on other requests: request numbers and cached tokens."""
    choices = []
    for choice in sorted(answer["choices"], key=lambda one: one["index"]):
        extra = {name: value for name, value in choice["mi_route2"].items() if name not in ("request", "cached")}
        choices.append({**choice, "mi_route2": extra})
    return choices


def malformed(rng: random.Random) -> tuple[str, Any]:
    """Return a path and a body that must be refused."""
    good = {"prompt": "abc", "max_tokens": 4}
    return rng.choice(
        [
            ("/v1/completions", b"{" * rng.randint(1, 100)),
            ("/v1/completions", b"\xff\xfe\x00"),
            ("/v1/completions", json.dumps([1, 2]).encode()),
            ("/v1/completions", {**good, "max_tokens": rng.choice([0, -1, 10**9, "many", 1.5, CONTEXT + 1])}),
            ("/v1/completions", {**good, "patch": [{"site": "nowhere", "position": 0, "source": "zeros"}]}),
            ("/v1/completions", {**good, "patch": [{"site": "blocks.0.resid_pre", "position": 999, "source": "zeros"}]}),
            ("/v1/completions", {**good, "steering_vectors": {"blocks.0.resid_pre": [1.0]}}),
            ("/v1/completions", {**good, "steering_vectors": {"blocks.0.resid_pre": "missing"}}),
            ("/v1/completions", {**good, "capture": ["blocks.77.z"], "run": f"r{rng.randrange(10**9)}"}),  # two at once may clash
            ("/v1/completions", {**good, "unknown": 1}),
            ("/v1/completions", {**good, "prompt": []}),
            ("/v1/completions", {**good, "prompt": [10**6]}),
            ("/v1/completions", {**good, "prompt": "x" * 250_000}),
            ("/v1/completions", {**good, "hold": "missing"}),
            ("/v1/completions", {**good, "adapters": "base"}),
            ("/v1/completions", {**good, "steering": [{"when": "never"}]}),
            ("/v1/chat/completions", {"messages": []}),
            ("/v1/chat/completions", {"messages": [{"role": "user"}]}),
            ("/v1/patch_sweep", {"clean": "abc", "corrupt": "abd", "answer": "nonsense", "foil": "b"}),
            ("/v1/patch_sweep", {"clean": "", "corrupt": "abd", "answer": "a", "foil": "b"}),
            ("/v1/patch_cell", {"clean": "abc", "corrupt": "abd", "site": "blocks.0.z[99]", "position": 1}),
            ("/v1/steering/set", {"vectors": {"bad": [1.0, 2.0]}, "name": "x", "steering_vectors": {"blocks.0.z": "bad"}}),
            ("/v1/steering/set", {"scope": "global", "steering_vectors": {"blocks.0.resid_pre": "push"}}),
            ("/v1/streams/999999999/scale", {"scale": 1.0}),
            ("/v1/nothing", {}),
        ]
    )


class FailedError(Exception):
    """Failure of the server: a wrong status, answer or state."""


@dataclass
class Tally:
    """Record of a soak: answers by action and status, failures, samples of the process, and kept requests with their answers."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    samples: list[dict[str, float]] = field(default_factory=list)
    kept: list[tuple[str, str, dict[str, Any], Any]] = field(default_factory=list)
    eligible: int = 0
    compared: int = 0
    longest: float = 0.0

    def fail(self, why: str) -> None:
        self.counts["failures"] += 1
        if len(self.failures) < ENOUGH:
            self.failures.append(why)
            tqdm.write(why)

    def keep(self, rng: random.Random, one: tuple[str, str, dict[str, Any], Any]) -> None:
        """Keep a uniform sample of the answers."""
        self.eligible += 1
        if len(self.kept) < KEPT:
            self.kept.append(one)
        elif (place := rng.randrange(self.eligible)) < KEPT:
            self.kept[place] = one


class Caller:
    """Client that draws one action after another and checks the answers."""

    def __init__(self, url: str, who: str, rng: random.Random, tally: Tally):
        self.url, self.who, self.rng, self.tally = url, who, rng, tally
        self.http = httpx.AsyncClient(base_url=url, headers=bearer(who), timeout=httpx.Timeout(PATIENCE))
        self.last: Any = None
        """Body of the last request, for the message of a failure."""
        self.until = math.inf
        """Time after which no action begins, and no slow reader goes on waiting."""
        self.actions: dict[Callable[[], Awaitable[None]], int] = {
            self.complete: 30,
            self.stream: 30,
            self.chat: 8,
            self.leave: 12,
            self.abandon: 6,
            self.slow: 3,
            self.malformed: 20,
            self.noise: 4,
            self.sweep: 3,
            self.cell: 4,
            self.run: 6,
            self.steer: 6,
            self.move: 6,
            self.late: 3,
            self.intrude: 6,
            self.look: 8,
        }

    async def live(self, until: float) -> None:
        """Run random actions until the deadline."""
        self.until = until
        async with self.http:
            while time.monotonic() < until and len(self.tally.failures) < ENOUGH:
                (action,) = self.rng.choices(list(self.actions), list(self.actions.values()))
                began = time.monotonic()
                try:
                    await asyncio.wait_for(action(), PATIENCE)
                except TimeoutError:
                    self.tally.fail(f"{action.__name__} was stuck for {PATIENCE:g} s with {str(self.last)[:400]}")
                except FailedError as error:
                    self.tally.fail(f"{action.__name__}: {error}")
                except Exception as error:  # of the connection, for example
                    self.tally.fail(f"{action.__name__} failed with {type(error).__name__}: {error}"[:500])
                self.tally.longest = max(self.tally.longest, time.monotonic() - began)
                self.tally.counts[action.__name__] += 1

    async def _post(self, path: str, body: Any, *allowed: int, **given: Any) -> httpx.Response:
        """Post a body; ``FailedError`` for a status that is not allowed, or a refusal without a sentence."""
        self.last = body
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **given}
        response = await self.http.post(path, content=data, headers=headers)
        return self._judged(response, path, body, allowed)

    def _judged(self, response: httpx.Response, path: str, body: Any, allowed: tuple[int, ...]) -> httpx.Response:
        status = response.status_code
        self.tally.counts[f"status {status}"] += 1
        if status not in allowed:
            raise FailedError(f"{status} for {path} {str(body)[:400]}: {response.text[:300]}")
        if status >= 400 and not response.json()["error"]["message"]:
            raise FailedError(f"{status} without a sentence for {path}")
        if status == 429 and "Retry-After" not in response.headers:
            raise FailedError("429 without Retry-After")
        return response

    async def _streamed(self, path: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        self.last = body
        async with self.http.stream("POST", path, json={**body, "stream": True}) as response:
            if response.is_error:
                await response.aread()
            self._judged(response, path, body, (200, 429))
            if response.is_error:
                return
            ended = False
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    ended = True
                elif line.startswith("data: "):
                    yield json.loads(line[6:])
            if not ended:
                raise FailedError(f"a stream broke off for {str(body)[:400]}")

    # What is right

    async def complete(self, path: str = "/v1/completions", chat: bool = False) -> None:
        body = asked(self.rng, chat)
        response = await self._post(path, body, 200, 429)
        if response.status_code == 200:
            self.tally.keep(self.rng, (self.who, path, body, substance(response.json())))
        else:
            await asyncio.sleep(self.rng.random())

    async def chat(self) -> None:
        await self.complete("/v1/chat/completions", True)

    async def stream(self) -> None:
        """Read a stream, and keep its tokens and text for a comparison with the answer as a whole."""
        body = asked(self.rng)
        ends, ids, words = Counter[int](), defaultdict[int, list[int]](list), defaultdict[int, str](str)
        async for chunk in self._streamed("/v1/completions", body):
            if "error" in chunk:
                raise FailedError(f"a stream failed: {chunk['error']['message']} for {str(body)[:400]}")
            for choice in chunk["choices"]:
                index = choice["index"]
                words[index] += choice["text"]
                ids[index] += chunk["mi_route2"]["token_ids"]
                ends[index] += choice["finish_reason"] is not None
        if words:
            if any(ends[index] != 1 for index in range(body.get("n", 1))):
                raise FailedError(f"a stream has not ended every choice once for {str(body)[:400]}")
            told = [{"text": words[index], "token_ids": ids[index]} for index in sorted(words)]
            self.tally.keep(self.rng, (self.who, "stream", body, told))

    async def sweep(self) -> None:
        word = "".join(self.rng.choices("abcd", k=self.rng.randint(4, 24)))
        other = "".join(self.rng.choices("abcd", k=len(word)))
        given: dict[str, Any] = {"clean": word, "corrupt": other, "metric": "logit_diff", "answer": "a", "foil": "b"}
        left = 2 if self.rng.random() < 0.5 else math.inf
        stream = self._streamed("/v1/patch_sweep", {**given, "sites": self.rng.choice(["resid_pre", "z", "mlp_out"])})
        async with contextlib.aclosing(stream):
            async for event in stream:
                if "error" in event:
                    raise FailedError(f"a sweep failed: {event['error']['message']}")
                left -= 1
                if not left:
                    return

    async def cell(self) -> None:
        place = {"site": site(self.rng), "position": self.rng.choice([2, None])}
        await self._post("/v1/patch_cell", {"clean": "abcabc", "corrupt": "abdabd", "max_tokens": 4, **place}, 200, 429)

    async def run(self) -> None:
        """Capture a run, patch from it, drop it."""
        name, captured = f"r{self.rng.randrange(6)}", site(self.rng, "resid_pre")
        allowed = (200, 400, 404, 409, 422, 429)
        body = {"prompt": prompt(self.rng), "capture": [captured], "run": name, "max_tokens": 4}
        await self._post("/v1/completions", body, *allowed)
        patch = [{"site": captured, "position": 1, "source": {"run": name, "position": 2}}]
        await self._post("/v1/completions", {"prompt": "abcdef", "patch": patch, "max_tokens": 4}, *allowed)
        response = await self.http.get(f"/v1/runs/{name}", params={"site": captured})
        self._judged(response, "/v1/runs", name, (200, 404))
        if self.rng.random() < 0.7:
            response = await self.http.delete(f"/v1/runs/{name}")
            self._judged(response, "DELETE /v1/runs", name, (200, 404, 409))

    async def steer(self) -> None:
        """Register a vector and a configuration, use them, and clear them."""
        name = f"s{self.rng.randrange(4)}"
        vectors = {name: [self.rng.gauss(0, 1) for _ in range(WIDTH)]}
        body = {"vectors": vectors, "name": name, "steering_vectors": {site(self.rng): name}}
        await self._post("/v1/steering/set", body, 200)
        await self._post("/v1/completions", {"prompt": "abc", "hold": name, "max_tokens": 6}, 200, 404, 429)
        await self._post("/v1/steering/clear", {"name": name, "vectors": [name]}, 200, 404)

    async def move(self) -> None:
        """Move the steering and the threshold of a running stream."""
        probe = {"site": "blocks.0.resid_pre", "probe": "probe", "gates": [], "name": "probe", "quarantine": "close"}
        steering = {"decode_steering_vectors": {site(self.rng): "push"}, "monitors": [probe]}
        async for chunk in self._streamed("/v1/completions", {"prompt": "abc", "max_tokens": 60, "ignore_eos": True, **steering}):
            if "error" in chunk:
                raise FailedError(f"a stream failed: {chunk['error']['message']}")
            if self.rng.random() < 0.05 and chunk["choices"]:
                number = chunk["mi_route2"]["request"]
                await self._post(f"/v1/streams/{number}/scale", {"scale": self.rng.uniform(0, 3)}, 200, 404, 409)
                threshold = {"monitor": "probe", "threshold": self.rng.uniform(-2, 2)}
                await self._post(f"/v1/streams/{number}/threshold", threshold, 200, 404, 409)

    async def look(self) -> None:
        for path in ("/health", "/metrics", "/v1/models", "/v1/steering", "/v1/steering/dynamic", "/v1/runs", "/v1/study"):
            self._judged(await self.http.get(path), path, None, (200, 401) if path == "/metrics" else (200,))

    # What is wrong

    async def leave(self) -> None:
        """Disconnect after a few chunks of a long stream."""
        body = {**asked(self.rng), "max_tokens": 400, "ignore_eos": True}
        left = self.rng.randint(0, 8)
        stream = self._streamed("/v1/completions", body)
        async with contextlib.aclosing(stream):
            async for _ in stream:
                left -= 1
                if left <= 0:
                    return

    async def abandon(self) -> None:
        """Disconnect before an answer arrives."""
        body = {**asked(self.rng), "max_tokens": 400, "ignore_eos": True}
        with contextlib.suppress(httpx.TimeoutException):
            await self.http.post("/v1/completions", json=body, timeout=self.rng.uniform(0.02, 0.5))

    async def slow(self) -> None:
        """Request a long answer and read nothing for a while; then disconnect, or read the rest."""
        ids = [*range(FIRST, FIRST + 256)] * 4  # of 20,000 bytes for each token, so that the system's buffers are full soon
        body = {"prompt": "abc", "n": 4, "max_tokens": 400, "ignore_eos": True, "logprob_token_ids": ids, "stream": True}
        async with self._raw("/v1/completions", json.dumps(body).encode()) as reader:
            status = int((await reader.readline()).split()[1])
            self.tally.counts[f"status {status}"] += 1
            if status not in (200, 429):  # a request that is refused would test no reader
                raise FailedError(f"{status} for a slow reader: {(await reader.read()).decode()[-400:]}")
            await asyncio.sleep(min(self.rng.uniform(1, 30), self.until - time.monotonic()))
            while self.rng.random() < 0.98 and await reader.read(1 << 16):
                pass

    async def malformed(self) -> None:
        path, body = malformed(self.rng)
        await self._post(path, body, 400, 401, 404, 413, 422, 429)  # a key at its limit is told so before its request is read

    async def noise(self) -> None:
        """Send bytes that are not HTTP, half a request, or headers without their body."""
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEYS[self.who]}\r\n"
        said = self.rng.choice([b"\x00\xff" * 50 + b"\r\n\r\n", head.encode(), f"{head}Content-Length: 100\r\n\r\n{{".encode()])
        host, port = self._address
        _, writer = await asyncio.open_connection(host, port)
        writer.write(said)
        await writer.drain()
        await asyncio.sleep(self.rng.uniform(0, 0.3))
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    async def late(self) -> None:
        """Request more tokens than the deadline allows."""
        await self._post("/v1/completions", {**asked(self.rng), "max_tokens": 400, "deadline": 0.05}, 200, 422, 429)

    async def intrude(self) -> None:
        """Request resources of another key, without a key or with a wrong one."""
        other = {"alice": "bob", "bob": "alice"}[self.who]
        await self._post("/v1/completions", {"prompt": "abc", "hold": f"of-{other}"}, 404)
        for who, status in ((other, 404), (self.who, 200)):  # one's own is there, so the other's could be
            response = await self.http.get(f"/v1/runs/of-{who}", params={"site": RUN_SITE})
            self._judged(response, "/v1/runs", who, (status,))
        wrong = self.rng.choice(["Bearer wrong", f"Bearer {KEYS[self.who]}x", "Basic " + KEYS[self.who]])
        await self._post("/v1/completions", {"prompt": "abc"}, 401, Authorization=wrong)

    @property
    def _address(self) -> tuple[str, int]:
        host, _, port = self.url.partition("://")[2].rpartition(":")
        return host, int(port)

    @asynccontextmanager
    async def _raw(self, path: str, body: bytes) -> AsyncIterator[asyncio.StreamReader]:
        """Send a request on a connection with small buffers."""
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, self._address)
        reader, writer = await asyncio.open_connection(sock=connection, limit=4096)
        try:
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEYS[self.who]}\r\n"
            writer.write(f"{head}Connection: close\r\nContent-Type: application/json\r\n".encode())
            writer.write(f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
            await writer.drain()
            yield reader
        finally:
            writer.transport.abort()


# The soak


def prepare(url: str) -> None:
    """Register the names that random requests use for both keys, and one resource per key that the other must not reach."""
    for number, who in enumerate(("alice", "bob")):
        rng = random.Random(number)
        mine = [rng.gauss(0, 1) for _ in range(WIDTH)]
        steering = {"decode_steering_vectors": {"blocks.1.resid_pre": "mine"}}
        with httpx.Client(base_url=url, headers=bearer(who), timeout=PATIENCE) as http:
            for name in ("held", f"of-{who}"):
                http.post("/v1/steering/set", json={"vectors": {"mine": mine}, "name": name, **steering}).raise_for_status()
            run = {"prompt": "abc", "capture": [RUN_SITE], "run": f"of-{who}", "max_tokens": 1}
            http.post("/v1/completions", json=run).raise_for_status()


async def _watched(server: Process, tally: Tally, until: float, every: float) -> None:
    """Sample the server's process until the deadline, with a progress bar."""
    began = time.monotonic()
    with tqdm(total=round(until - began), unit="s", desc="soak") as bar:
        while (now := time.monotonic()) < until and len(tally.failures) < ENOUGH:
            counted = sum(count for name, count in tally.counts.items() if name.startswith("status"))
            tally.samples.append({"second": round(now - began, 1), "answers": counted, **server.seen()})
            bar.set_postfix(answers=counted, failures=tally.counts["failures"], rss=f"{tally.samples[-1]['rss'] / 2**20:.0f} MiB")
            await asyncio.sleep(min(every, until - now))
            bar.update(round(time.monotonic() - began) - bar.n)


async def _load(server: Process, tally: Tally, clients: int, seconds: float, seed: int) -> None:
    until = time.monotonic() + seconds
    callers = [Caller(server.url, ("alice", "bob")[i % 2], random.Random(f"{seed} {i}"), tally) for i in range(clients)]
    await asyncio.gather(_watched(server, tally, until, min(10.0, seconds / 8)), *(one.live(until) for one in callers))


DRAINED = ("running", "waiting", "sweeps", "slots", "slot_bytes", "patch_slots", "steering_rows")


def drained(server: Process, tally: Tally, patience: float = 30.0) -> dict[str, float]:
    """Wait until no request runs; return the bytes and counts that are still in use, which must be 0."""
    until = time.monotonic() + patience
    while True:
        lines = httpx.get(f"{server.url}/metrics", headers=bearer("admin"), timeout=PATIENCE).text.splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        left = {name: float(values[f"mi_route2_{name}"]) for name in DRAINED}
        tally.counts["slow readers cancelled"] = int(float(values["mi_route2_slow_readers_total"]))
        if not any(left.values()):
            return left
        if time.monotonic() > until:
            tally.fail(f"{patience:g} s after the last client something is held: {left}")
            return left
        time.sleep(0.2)


def growth(samples: Sequence[Mapping[str, int | float]]) -> tuple[float, float]:
    """Return the resident bytes after the first quarter of the answers, and how much they grew from there to the end, if steadily.

    What is resident is a high-water mark: it steps up when the load is higher than ever before, as on a machine that is not equally
    fast all the time, and falls back slowly. A leak grows with every answer. So the answers after the first quarter are cut into
    ``WINDOWS`` of equal numbers, and growth is the median step from one window to the next, times the number of steps.
    """
    last = samples[-1]["answers"]
    levels = [
        float(median(inside))
        for i in range(WINDOWS)
        if (inside := [one["rss"] for one in samples if last * _share(i) <= one["answers"] <= last * _share(i + 1)])
    ]
    steps = [b - a for a, b in itertools.pairwise(levels)]
    return levels[0], median(steps) * len(steps) if steps else 0.0


def _share(window: int) -> float:
    return 0.25 + 0.75 * window / WINDOWS


def judge(tally: Tally, idle: Mapping[str, int], minutes: float) -> None:
    """Compare the process's memory over the soak, and files and threads of ``idle`` with those of the first quarter.

    In a shorter soak than ``WARM`` minutes memory is not compared, because it still fills with what is imported and cached.
    """
    before, more = growth(tally.samples)
    if minutes >= WARM and more > GROWTH * before + SLACK:
        tally.fail(f"memory grew steadily, from {before / 2**20:.0f} by {more / 2**20:.0f} MiB")
    quarter = max(1, len(tally.samples) // 4)
    threads = max(one["threads"] for one in tally.samples[:quarter])
    if idle["threads"] > threads + (os.cpu_count() or 1) + 4:  # the pool of asyncio.to_thread may grow once
        tally.fail(f"{idle['threads']} threads are left, {threads:g} at most ran in the first quarter")
    first = tally.samples[0]["files"]
    if idle["files"] > first + 4:
        tally.fail(f"{idle['files']} files are open at the end, {first:g} at the beginning")


def compare(server: Process, tally: Tally, exact: bool) -> None:
    """Request the kept answers again, one by one, and compare them."""
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as http:
        for who, path, body, answer in tqdm(tally.kept, desc="solo runs", unit="answer"):
            response = http.post("/v1/completions" if path == "stream" else path, json=body, headers=bearer(who))
            solo = substance(response.json()) if response.status_code == 200 else response.text
            if path == "stream" and isinstance(solo, list):
                solo = [{"text": one["text"], "token_ids": one["mi_route2"]["token_ids"]} for one in solo]
            tally.compared += 1
            same = solo == answer if exact or path == "stream" or isinstance(solo, str) else _near(solo, answer)
            if not same and (exact or path != "stream"):
                tally.fail(f"an answer is another alone, for {who} {path} {json.dumps(body)[:600]}: {_first(answer, solo)}")


def _near(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    """Return whether log-probabilities agree within float noise, up to the first other token."""
    for a, b in zip(one, other, strict=True):
        ids, others = a["mi_route2"]["token_ids"], b["mi_route2"]["token_ids"]
        same = next((i for i, (x, y) in enumerate(zip(ids, others, strict=False)) if x != y), min(len(ids), len(others)))
        left, right = (one["logprobs"] or {} for one in (a, b))
        pairs = zip(left.get("token_logprobs", [])[:same], right.get("token_logprobs", [])[:same], strict=True)
        if any(abs(x - y) > 1e-3 for x, y in pairs):
            return False
    return True


def _first(one: Any, other: Any, place: str = "") -> str:
    """Return the first place at which two answers differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = [key for key in {**one, **other} if one.get(key) != other.get(key)]
        return _first(one.get(keys[0]), other.get(keys[0]), f"{place}.{keys[0]}") if keys else place
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        index = next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), 0)
        return _first(one[index], other[index], f"{place}[{index}]") if one else place
    return f"{place}: {str(one)[:100]} and {str(other)[:100]}"


@dataclass(frozen=True)
class Soak:
    """Drive a server with many misbehaving clients for minutes, and check that no resource is left in use."""

    minutes: float = 60.0
    clients: int = 32
    seed: Annotated[int, tyro.conf.arg(help="seed of what each client does; when is up to the clock")] = 0
    batched: Annotated[bool, tyro.conf.arg(help="the engine's ordinary mode; answers are then compared within float noise")] = False
    out: Annotated[Path | None, tyro.conf.arg(help="write counts, samples and failures to this JSON file")] = None

    def __call__(self) -> int:
        if self.minutes <= 0 or self.clients < 2:
            print(f"error: minutes = {self.minutes} must be above 0 and clients = {self.clients} at least 2", file=sys.stderr)
            return 2
        if self.out is not None and (self.out.is_dir() or not self.out.parent.is_dir()):
            print(f"error: --out {self.out} is no file in a folder that is there: give another", file=sys.stderr)
            return 2
        if not Path("/proc/self/status").is_file():
            print("error: memory, files and threads are read from /proc: run the soak on Linux", file=sys.stderr)
            return 2
        began, tally = time.monotonic(), Tally()
        try:
            left, idle = self._run(tally)
        except KeyboardInterrupt:
            print("\nsoak stopped before its end", file=sys.stderr)
            return 130
        counts = dict(sorted(tally.counts.items()))
        answers = sum(count for name, count in counts.items() if name.startswith("status"))
        verdict = f"soak {'failed' if tally.failures else 'passed'}: {answers} answers in {self.minutes:g} minutes, "
        verdict += f"{tally.compared} of them compared with solo runs, {tally.counts['failures']} failures"
        print(verdict)
        if self.out is not None:
            document = {"minutes": self.minutes, "clients": self.clients, "seed": self.seed, "batched": self.batched}
            document |= {"seconds": time.monotonic() - began, "load": os.getloadavg(), "counts": counts, "compared": tally.compared}
            document |= {"longest": tally.longest, "left": left, "idle": idle, "failures": tally.failures, "samples": tally.samples}
            write_json(self.out, document)
        return 1 if tally.failures else 0

    def _run(self, tally: Tally) -> tuple[dict[str, float], dict[str, int]]:
        with tempfile.TemporaryDirectory(prefix="soak-") as scratch:
            keys = Path(scratch) / "keys"
            keys.write_text("".join(f"{'admin ' if who == 'admin' else ''}{key}\n" for who, key in KEYS.items()))
            limits = [word for limit, value in LIMITS.items() for word in (f"--{limit}", str(value))]
            options = ("--keys", str(keys), *limits, *(() if self.batched else ("--exact",)))
            with (
                serving(MODEL, Path(scratch) / "loaded.log", *options) as server,
                serving(MODEL, Path(scratch) / "alone.log", *options) as solo,
            ):
                for one in (server, solo):
                    prepare(one.url)
                asyncio.run(_load(server, tally, self.clients, 60 * self.minutes, self.seed))
                left, idle = drained(server, tally), server.seen()
                judge(tally, idle, self.minutes)
                compare(solo, tally, not self.batched)
            log = server.log.read_text()
            if "Traceback" in log:
                tally.fail(f"the server's log has a traceback: {log[log.index('Traceback') :][:2000]}")
        return left, idle


if __name__ == "__main__":
    sys.exit(tyro.cli(Soak)())
