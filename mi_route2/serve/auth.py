"""Keys of clients, errors in OpenAI's shape, and what stands in front of every route: limits, origin checks, the log.

Everything that a client leaves in the server belongs to its key: vectors, held configurations, runs, conversations, and the prefix
cache, whose salt is derived from the key by HMAC with a secret of this process.
"""

import asyncio
import hashlib
import hmac
import json
import logging
import re
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mi_route2.engine import QueueFullError
from mi_route2.serve.api.schema import UnknownNameError

LONGEST, SHORTEST = 512, 16
"""Characters of a key."""
LOCAL = "local"
"""Owner of everything on a server without keys."""
BODY_SECONDS, PIECE = 60.0, 1 << 18
"""Seconds in which a request's body must come, and in which a piece of an answer of so many bytes must be read."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")

log = logging.getLogger("mi_route2.serve")


@dataclass(eq=False)
class ApiError(Exception):
    """An answer other than success: a status, and one sentence that says what to change."""

    status: int
    message: str
    _: KW_ONLY
    code: str | None = None
    param: str | None = None
    headers: Mapping[str, str] | None = None

    def __str__(self) -> str:
        return self.message

    @property
    def reason(self) -> str:
        """Code of the error, or its HTTP status if it has no code."""
        return self.code or str(self.status)

    def body(self) -> dict[str, Any]:
        """Return the error as OpenAI's clients read it."""
        kinds = {401: "authentication_error", 404: "not_found_error", 409: "conflict_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class Json(JSONResponse):
    """JSON in ASCII, so that no text can fail to be encoded."""

    def render(self, content: Any) -> bytes:
        return dumps(content).encode()


EITHER: dict[int | str, dict[str, Any]] = {200: {"content": {"application/json": {}, "text/event-stream": {}}}}
"""Responses in the schema of a route that answers with one object or with a stream."""


class Events(StreamingResponse):
    """Stream of events. ``ended`` is called once it is over, also if the client went away before the first one."""

    def __init__(self, events: AsyncGenerator[str, None], ended: Callable[[], object]):
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        self._events, self._ended = events, ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._ended()
            await self._events.aclose()


_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode  # made once: json.dumps makes one at each call


def dumps(data: Any) -> str:
    """Return compact JSON in ASCII; ``ValueError`` for NaN and infinity."""
    return _encode(data)


def answer(error: ApiError) -> Json:
    """Return the response of an error."""
    return Json(error.body(), error.status, error.headers)


def sentence(error: BaseException) -> str:
    """Return an error's message as one line."""
    text = error.args[0] if isinstance(error, KeyError) and error.args else error
    return " ".join(str(text).split()) or type(error).__name__


_OTHERS = re.compile(r"'?\b[0-9a-f]{16}/[\w.:-]+'?(?:, )?")
"""Names that belong to other keys, which the engine lists in its errors."""


def refusal(error: Exception, prefix: str = "") -> ApiError:
    """Return the answer to an error of the engine, without its ``prefix`` of the client's names, and without names of others."""
    if isinstance(error, ApiError):
        return error
    message = _OTHERS.sub("", sentence(error).replace(prefix, ""))
    if isinstance(error, UnknownNameError) or message.startswith(("no vector is registered as", "no vector '")):
        return ApiError(404, message, code="unknown_name")
    if isinstance(error, QueueFullError):
        return ApiError(429, message, code="queue_full", headers={"Retry-After": "1"})
    if isinstance(error, ValueError | KeyError | TypeError):
        return ApiError(400, message)
    if isinstance(error, RuntimeError):
        return ApiError(503, outline(message), code="unavailable", headers={"Retry-After": "5"})
    raise error


def outline(reason: str) -> str:
    """Return the reason of a failure for others: without keys' names, and without what the failed code said (a prompt, perhaps)."""
    what, failed, quoted = _OTHERS.sub("", reason).partition(" failed with ")
    return what + failed + quoted.partition(":")[0]


_FIELD = re.compile(r"(?!(?:str|int|float|bool|dict|list)$)[a-z_][a-z0-9_]*")
"""Parts of a place that are fields; the others are the names of a union's alternatives."""


def _alternative(part: object) -> bool:
    """Return whether a part of a fault's place is the name of a union's alternative, and no field or number."""
    return isinstance(part, str) and not _FIELD.fullmatch(part)


def invalid(error: RequestValidationError) -> ApiError:
    """Return the answer to a body that is not as the schema says: 400 if it is no JSON, else 422, with the first fault."""
    faults = error.errors()
    # Of the alternatives of a union, the one is meant that is of this kind at all, lacks fewest fields and has fewest to spare, and
    # then the one that got furthest; of its faults, an unknown field says most.
    meant: dict[tuple[str, ...], list[Any]] = {}
    for one in faults:
        meant.setdefault(tuple(part for part in one["loc"] if _alternative(part)), []).append(one)

    def strange(some: list[Any]) -> tuple[bool, bool, int, int]:
        fields = sum(one["type"] in ("missing", "extra_forbidden") for one in some)
        whole = _alternative(some[0]["loc"][-1])
        return whole and some[0]["type"].endswith("_type"), whole, fields, -max(len(one["loc"]) for one in some)

    first = max(
        min(meant.values(), key=strange),
        key=lambda one: (one["type"] == "extra_forbidden", len(one["loc"]), one["type"] == "value_error"),
    )
    place = ".".join(str(part) for part in first["loc"][1:] if isinstance(part, int) or _FIELD.fullmatch(part))
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}", code="invalid_json")
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = "this field is unknown: leave it out, or see /docs for the fields that there are"
    if first["type"] in ("model_attributes_type", "missing") and not place:
        message = "the body is a JSON object: send one, with the header 'Content-Type: application/json'"
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return ApiError(422, f"{place}: {message}{more}" if place else message + more, param=place or None, code="invalid_field")


@dataclass(frozen=True)
class Client:
    """Identity of a client: the owner of what it leaves, the salt of its prefix cache, and whether it is an admin."""

    owner: str
    salt: str
    admin: bool


class Keys:
    """Keys of the clients; without any, every client is the local admin.

    Args:
        keys: Each key, and whether it is an admin's.

    Raises:
        ValueError: A key that is too short or too long, or given twice.
    """

    def __init__(self, keys: Iterable[tuple[str, bool]] = ()):
        self._secret = secrets.token_bytes(32)
        self._clients: list[tuple[bytes, Client]] = []
        for key, admin in keys:
            if not SHORTEST <= len(key) <= LONGEST or not key.isascii() or not key.isprintable() or " " in key:
                raise ValueError(
                    f"a key has {len(key)} characters: give {SHORTEST} to {LONGEST} printable ASCII characters without spaces, as "
                    "of python -c 'import secrets; print(secrets.token_urlsafe(24))'"
                )
            # without this process's secret, so that a key still owns its runs on disk after a restart
            owner = hmac.new(key.encode(), b"mi-route2 owner", hashlib.sha256).hexdigest()[:16]
            if any(client.owner == owner for _, client in self._clients):
                raise ValueError("a key is given twice: give each client its own")
            self._clients.append((self._digest(key), Client(owner, self._digest(f"salt {key}").hex(), admin)))

    def __len__(self) -> int:
        return len(self._clients)

    @staticmethod
    def read(path: Path) -> "Keys":
        """Return the keys in a file: one per line, an admin's after the word ``admin``; ``#`` begins a comment, if not in a key."""
        if path.is_dir():
            raise ValueError(f"{path} is a folder: give a file of keys, one per line")
        keys = []
        for line in path.read_text(encoding="utf-8").splitlines():
            words = re.split(r"(?:^|\s)#", line, maxsplit=1)[0].split()  # a key may have one, as in the environment
            if not words:
                continue
            if len(words) > 2 or (len(words) == 2 and words[0] != "admin"):
                raise ValueError(f"{path} has a line of {len(words)} words: write a key, or admin and a key")
            keys.append((words[-1], len(words) == 2))
        if not keys:
            raise ValueError(f"{path} holds no key: write one per line")
        return Keys(keys)

    def client(self, authorization: str | None) -> Client:
        """Return the client of the header ``Authorization``; ``ApiError`` 401 for an unknown key."""
        if not self._clients:
            return Client(LOCAL, "", True)
        kind, _, key = (authorization or "").partition(" ")
        # digests have one length, without which a comparison takes a time that depends on it; a long header is cut
        given = self._digest(key.strip()[: LONGEST + 1])
        senders = [client for digest, client in self._clients if hmac.compare_digest(digest, given)]  # all, or the time would tell
        if not senders or kind.lower() != "bearer":
            raise ApiError(
                401,
                "this server needs a key: send the header 'Authorization: Bearer KEY' (api_key of OpenAI's client)",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return senders[0]

    def _digest(self, key: str) -> bytes:
        return hmac.new(self._secret, key.encode("utf-8", "replace"), hashlib.sha256).digest()


def needs_admin(client: Client) -> None:
    """Raise ``ApiError`` 401 unless the client is an admin."""
    if not client.admin:
        raise ApiError(401, "this concerns all clients and takes the admin key: leave scope out for your own", code="admin_only")


class JsonLines(logging.Formatter):
    """Formatter that writes each record as one line of JSON: a request's with its fields, any other with its message."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        fields = getattr(record, "request", None) or {"logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            fields = {**fields, "error": self.formatException(record.exc_info)}
        return json.dumps({"time": self.formatTime(record), "level": record.levelname, **fields})


def _prompts(body: bytes) -> dict[str, Any]:
    """Return the fields of a body that hold a client's text; none if it is no object of JSON."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    texts = ("prompt", "messages", "clean", "corrupt", "text")
    return {key: given[key] for key in texts if key in given} if isinstance(given, dict) else {}


class _UnreadError(Exception):
    """A client does not read its answer, which takes memory as long as it waits."""


class Front:
    """ASGI middleware in front of every route.

    It refuses a body above ``limit`` bytes, one of a client without a key, one that does not come, a page of another origin, and on
    a server without keys a host name that is not this machine's (which a page of any site could point here). An answer that is not
    read is not sent to its end. Every answer has a number of this process, by which the page knows a server that was started again.
    It writes one line of the log per request, without what was sent unless the app's state says ``log_prompts``.
    """

    def __init__(self, app: ASGIApp, *, limit: int, done: Callable[[str, int, float, str | None], None], keys: Keys):
        self._app, self._limit, self._done, self._keys = app, limit, done, keys
        self._number = secrets.token_hex(8).encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        began, status, notes = time.monotonic(), 500, {}
        scope["mi_route2"] = notes

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), (b"mi-route2-server", self._number)]}
            body, more = message.get("body", b""), message.get("more_body", False)
            for start in range(0, len(body) or 1, PIECE):  # in pieces, as the server waits for a reader between two messages only
                part = {"body": body[start : start + PIECE], "more_body": more or start + PIECE < len(body)} if body else {}
                try:
                    async with asyncio.timeout(BODY_SECONDS):
                        await send({**message, **part})
                except TimeoutError as error:
                    raise _UnreadError from error

        try:
            headers = Headers(scope=scope)
            self._check(headers)
            body = b""
            if scope["method"] not in ("GET", "HEAD", "OPTIONS"):  # these need no key, and what they bring is not read
                self._keys.client(headers.get("authorization"))
                body = await self._body(headers, receive)
        except ApiError as error:
            notes["error"] = error.reason
            await answer(error)(scope, receive, sending)
        else:
            if getattr(scope["app"].state, "log_prompts", False):
                notes.update(_prompts(body))
            read = [{"type": "http.request", "body": body, "more_body": False}]

            async def again() -> Message:
                return read.pop() if read else await receive()

            try:
                await self._app(scope, again, sending)
            except _UnreadError:
                notes["error"] = "not_read"
        finally:
            # the route's own path, so that a log and the metrics have no names of clients
            path = getattr(scope.get("route"), "path", "other")
            seconds = time.monotonic() - began
            self._done(path, status, seconds, notes.get("error"))
            line = {"method": scope["method"], "path": path, "status": status, "ms": round(1e3 * seconds, 1), **notes}
            log.info("%s", json.dumps(line), extra={"request": line})

    def _check(self, headers: Headers) -> None:
        host = headers.get("host", "")
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        if not self._keys and name.strip("[]").lower() not in LOOPBACK:
            raise ApiError(400, "a server without keys answers to the names of this machine only: use localhost", code="wrong_host")
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            raise ApiError(
                400, "a page of another origin may not use this server: open the page that it serves", code="wrong_origin"
            )

    async def _body(self, headers: Headers, receive: Receive) -> bytes:
        large = ApiError(
            413, f"the body is larger than {self._limit} bytes: send less, or raise the server's --max-body", code="too_large"
        )
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > self._limit:
            raise large
        body, more = bytearray(), True  # counted too, because the header may be missing or wrong
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while more:
                    message = await receive()
                    body += message.get("body", b"")
                    if len(body) > self._limit:
                        raise large
                    more = message.get("more_body", False)  # not given by a disconnect
        except TimeoutError as error:
            raise ApiError(408, f"the body did not come within {BODY_SECONDS:g} s: send it at once", code="timeout") from error
        return bytes(body)


def noted(request: Request, error: ApiError) -> ApiError:
    """Return ``error``, after a note of its reason for the log and the metrics."""
    note(request, error=error.reason)
    return error


def note(request: Request, **notes: Any) -> None:
    """Add to the line of the log about this request."""
    request.scope["mi_route2"].update(notes)
