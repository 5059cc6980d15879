"""HTTP: errors in OpenAI's shape, and what stands in front of every route: the token, the body, timeouts, the log."""

import asyncio
import hmac
import json
import logging
import re
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from mi_route2.engine import QueueFullError
from mi_route2.serve.api.schema import sentence_of

HEADER_SECONDS, BODY_SECONDS = 30.0, 60.0
"""Seconds in which a request's headers must come, and its body."""
BODIES = 8
"""Bodies of the largest size that all connections together may have in flight."""
CLIENT_CLOSED = 499
"""Status in the log and the metrics for a client that went away, as nginx has it: nobody gets this answer."""
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
        error_type = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": error_type, "param": self.param, "code": self.code}}


class Json(JSONResponse):
    """JSON in ASCII, so that no text can fail to be encoded."""

    def render(self, content: Any) -> bytes:
        return dumps(content).encode()


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


def refusal(error: Exception) -> ApiError:
    """Return the answer to an error of the engine."""
    if isinstance(error, ApiError):
        return error
    message = sentence_of(error)
    if message.startswith(("no vector is registered as", "no vector '", "no configuration is held as")):
        return ApiError(404, message, code="unknown_name")
    if isinstance(error, QueueFullError):
        return ApiError(429, message, code="queue_full", headers={"Retry-After": "1"})
    if isinstance(error, ValueError | KeyError | TypeError):
        return ApiError(400, message)
    if isinstance(error, RuntimeError):
        return ApiError(503, outline(message), code="unavailable", headers={"Retry-After": "5"})
    raise error


def outline(reason: str) -> str:
    """Return the reason of a failure without what the failed code said, a prompt perhaps."""
    what, failed, quoted = reason.partition(" failed with ")
    return what + failed + quoted.partition(":")[0]


_FIELD = re.compile(r"(?!(?:str|int|float|bool|dict|list)$)[a-z_][a-z0-9_]*")
"""Parts of a place that are fields; the others are the names of a union's alternatives."""


def invalid(error: RequestValidationError) -> ApiError:
    """Return the answer to a request that is not as the schema says, with the most specific fault."""
    faults = error.errors()
    first = max(faults, key=lambda fault: (fault["type"] == "extra_forbidden", len(fault["loc"]), fault["type"] == "value_error"))
    place = ".".join(str(part) for part in first["loc"][1:] if isinstance(part, int) or _FIELD.fullmatch(part))
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        place = ".".join(filter(None, (place, first["ctx"]["field"])))
        message = "this field is unknown: leave it out, or see /docs for the fields"
    if first["type"] in ("model_attributes_type", "missing") and not place:
        message = "the body is a JSON object: send one, with the header 'Content-Type: application/json'"
    return ApiError(422, f"{place}: {message}" if place else message, param=place or None, code="invalid_field")


def parsed(model: type[BaseModel], raw: bytes) -> BaseModel:
    """Return a body as its model; ``ApiError`` 400 if it is no JSON, ``RequestValidationError`` if it is not as the schema says."""
    try:
        return model.model_validate(json.loads(raw))
    except ValidationError as error:
        faults = error.errors(include_url=False, include_input=False)
        raise RequestValidationError([{**fault, "loc": ("body", *fault["loc"])} for fault in faults]) from None
    except (ValueError, RecursionError) as error:  # no text, too deep, or a number of too many digits
        raise ApiError(400, f"the body is not JSON that can be read: {error}", code="invalid_json") from error


class BodyRoute(APIRoute):
    """Route whose body is parsed and validated on the thread for prompts, so that the event loop goes on meanwhile."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler, field = super().get_route_handler(), self.body_field
        if field is None:
            return handler
        model: Any = field.field_info.annotation

        async def handle(request: Request) -> Response:
            if (raw := await request.body()) and "json" in request.headers.get("content-type", "json"):
                # the attribute in which Starlette keeps a parsed body: FastAPI takes it from there
                request._json = await request.app.state.server.threaded(partial(parsed, model, raw))
            return await handler(request)

        return handle


class Connection(AutoHTTPProtocol):
    """uvicorn's protocol, which closes a connection whose headers do not come within ``HEADER_SECONDS``."""

    loop: Any
    transport: Any
    cycle: Any
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Start the clock if headers are due, unless it runs; stop it once they are complete."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop()
        elif self._timer is None:
            self._timer = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Front:
    """ASGI middleware in front of every route.

    It refuses a body above ``limit`` bytes, bodies of all connections above ``BODIES`` times as many, a body that was cut off, a
    request other than GET without the ``token``, a page of another origin, and on a server without a token a host name that is not
    this machine's (which a page of any site could point here). Every answer has a number of this process, by which the page knows a
    server that was started again. It writes one line of JSON per request into the log, without what was sent.
    """

    def __init__(self, app: ASGIApp, *, limit: int, done: Callable[[str, int, float, str | None], None], token: str | None):
        self._app, self._limit, self._done, self._token = app, limit, done, token
        self._number = secrets.token_hex(8).encode()
        self._held = 0
        """Bytes of the bodies in flight."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        began, status, notes, body = time.monotonic(), 500, {}, b""
        scope["mi_route2"] = notes

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), (b"mi-route2-server", self._number)]}
            await send(message)

        try:
            headers = Headers(scope=scope)
            self._check(headers)
            if scope["method"] not in ("GET", "HEAD", "OPTIONS"):
                demand_token(self._token, headers.get("authorization"))  # before the body is read
                body = await self._body(headers, receive)
        except ApiError as error:
            notes["error"] = error.reason
            await answer(error)(scope, receive, sending)
        else:
            read = [{"type": "http.request", "body": body, "more_body": False}]

            async def again() -> Message:
                return read.pop() if read else await receive()

            await self._app(scope, again, sending)
        finally:
            self._held -= len(body)
            # the route's own path, so that a log and the metrics have no names of clients
            path = getattr(scope.get("route"), "path", "other")
            seconds = time.monotonic() - began
            self._done(path, status, seconds, notes.get("error"))
            line = {"method": scope["method"], "path": path, "status": status, "ms": round(1e3 * seconds, 1), **notes}
            log.info("%s", json.dumps(line))

    def _check(self, headers: Headers) -> None:
        if len(headers.getlist("host")) > 1:
            raise ApiError(400, "the request has two Host headers: send one", code="wrong_host")
        host = headers.get("host", "")
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        if self._token is None and name.strip("[]").lower() not in LOOPBACK:
            raise ApiError(
                400, "a server without a token answers to the names of this machine only: use localhost", code="wrong_host"
            )
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
                    if message["type"] == "http.disconnect":
                        raise ApiError(CLIENT_CLOSED, "the client went away before its body was complete", code="client_gone")
                    body += message.get("body", b"")
                    self._held += len(message.get("body", b""))
                    if len(body) > self._limit:
                        raise large
                    if self._held > BODIES * self._limit:
                        busy = "other requests' bodies take all the memory that this server has for them: send this one again later"
                        raise ApiError(503, busy, code="too_many_bodies", headers={"Retry-After": "2"})
                    more = message.get("more_body", False)
        except BaseException as error:
            self._held -= len(body)
            if not isinstance(error, TimeoutError):
                raise
            raise ApiError(408, f"the body did not come within {BODY_SECONDS:g} s: send it at once", code="timeout") from error
        return bytes(body)


def demand_token(token: str | None, authorization: str | None) -> None:
    """Raise ``ApiError`` 401 unless the header ``Authorization`` has the token, if the server has one."""
    scheme, _, bearer = (authorization or "").partition(" ")
    right = token is None or (scheme.lower() == "bearer" and hmac.compare_digest(bearer.strip().encode(), token.encode()))
    if not right:
        raise ApiError(
            401,
            "this server needs its token: send the header 'Authorization: Bearer TOKEN' (api_key of OpenAI's client)",
            code="invalid_token",
            headers={"WWW-Authenticate": "Bearer"},
        )


def noted(request: Request, error: ApiError) -> ApiError:
    """Return ``error``, after a note of its reason for the log and the metrics."""
    note(request, error=error.reason)
    return error


def note(request: Request, **notes: Any) -> None:
    """Add to the line of the log about this request."""
    request.scope["mi_route2"].update(notes)
