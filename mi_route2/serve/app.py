"""The application, and the routes beside completions and patching.

    app = create_app(load("micro"))
    uvicorn.run(app, port=8000)

Nothing here touches the engine but ``Owner``, whose thread runs it.
"""

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, PlainTextResponse
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException

from mi_route2.engine import Engine
from mi_route2.runs import RunStore
from mi_route2.runs.store import automatic, available
from mi_route2.serve.api import openai, patch
from mi_route2.serve.api.schema import (
    ClearSteering,
    ScaleIn,
    SetSteering,
    SteeringIn,
    ThresholdIn,
    steering_of,
)
from mi_route2.serve.http import ApiError, BodyRoute, Connection, Front, Json, answer, invalid, log, noted, outline
from mi_route2.serve.models import CLOSED, Readable, Served
from mi_route2.serve.options import ServerLimits
from mi_route2.serve.owner import AnyEngine
from mi_route2.serve.state import Server, TheServer
from mi_route2.steering.specs import looker

PAGE = Path(__file__).parent / "page"
_POLICY = "default-src 'self'; img-src 'self' data: blob:; style-src 'self' 'unsafe-inline'; frame-ancestors 'none'"
_HEADERS = {"Content-Security-Policy": _POLICY, "X-Frame-Options": "DENY"}


def create_app(served: Served, *, token: str | None = None, limits: ServerLimits | None = None, exact: bool = False) -> FastAPI:
    """Return the application that serves a model; its engine starts and ends with it.

    Args:
        served: The model.
        token: Token that clients must send; without one, whoever reaches the server may use it, so bind it to loopback only.
        limits: The limits.
        exact: As in ``Engine``: answers do not depend on other requests, bit for bit.
    """
    limits = limits or ServerLimits()
    store = RunStore(limits.store)
    decoding = Readable(served.tokenizer)
    engine = _engine(served, limits, store, decoding, exact) if served.vllm is None else served.vllm
    server = Server(served, token, limits, engine, store, decoding.tokenizer)

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        server.owner.start()
        yield
        await server.owner.close(drain=0.0)

    app = FastAPI(title="mi-route2", lifespan=life, default_response_class=Json, redoc_url=None)
    app.state.server = server
    for router in (openai.routes, patch.routes, routes):
        app.include_router(router)
    app.mount("/static", StaticFiles(directory=PAGE), name="static")
    app.add_exception_handler(ApiError, lambda request, error: answer(noted(request, error)))  # pyright: ignore[reportArgumentType]
    app.add_exception_handler(RequestValidationError, lambda request, error: answer(noted(request, invalid(error))))  # pyright: ignore
    app.add_exception_handler(HTTPException, _plain)  # pyright: ignore[reportArgumentType]
    app.add_exception_handler(Exception, _failed)
    app.add_middleware(Front, limit=limits.max_body, done=server.metrics.done, token=token)
    return app


def _engine(served: Served, limits: ServerLimits, store: RunStore, tokenizer: Readable, exact: bool) -> Engine:
    slot_bytes = limits.slot_bytes
    if slot_bytes is None and next(served.host.model.parameters()).device.type == "cpu":
        slot_bytes = automatic(available())
    return Engine(
        served.host,
        rows=limits.rows,
        budget=max(2048, 2 * limits.rows),
        queue=limits.queue,
        store=store,
        prefix_bytes=limits.prefix_bytes,
        slot_bytes=slot_bytes,
        tokenizer=tokenizer,
        vectors=served.vectors,
        exact=exact,
    )


class _Draining(uvicorn.Server):
    """Server that lets requests end before it shuts down; ``startup`` prints the address once it listens."""

    def __init__(self, config: uvicorn.Config, server: Server, drain: float):
        super().__init__(config)
        self._server, self._drain = server, drain

    async def startup(self, sockets: list | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            name = f"[{host}]" if ":" in host else host
            print(f"{self._server.served.name} is served at http://{name}:{port}", flush=True)

    async def shutdown(self, sockets: list | None = None) -> None:
        # at once, so that the streams end with a reason before their connections are closed
        await asyncio.gather(self._server.owner.close(self._drain), super().shutdown(sockets))


def run(
    served: Served,
    *,
    host: str,
    port: int,
    token: str | None,
    limits: ServerLimits,
    exact: bool = False,
    drain: float = 10.0,
) -> None:
    """Serve a model until a signal ends the process."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    gc.collect()
    gc.freeze()  # what lives as long as the server is not looked through again at every full collection
    app = create_app(served, token=token, limits=limits, exact=exact)
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        http=Connection,
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        # longer than clients and proxies keep theirs (5 and 60 seconds): who closes first cuts a request that is on its way
        timeout_keep_alive=75,
        timeout_graceful_shutdown=int(drain) + 5,
    )
    _Draining(config, app.state.server, drain).run()


def _plain(request: Request, error: HTTPException) -> Json:
    text = f"{error.detail}: see /docs for the addresses and their methods"
    return answer(noted(request, ApiError(error.status_code, text, headers=error.headers)))


def _failed(request: Request, error: Exception) -> Json:
    log.error("a request failed with %s", type(error).__name__, exc_info=error)
    message = f"the server failed with {type(error).__name__}: this is a fault of the server, please report it"
    return answer(noted(request, ApiError(500, message)))


routes = APIRouter(route_class=BodyRoute)


# Health


@routes.get("/health", tags=["server"])
async def health(request: Request) -> Response:
    """Return whether the engine runs, which takes no token: 503 if the engine's thread has ended."""
    server: Server = request.app.state.server
    if not server.owner.alive:
        raise ApiError(503, outline(server.owner.failure or "the engine's thread does not run"), code="engine_dead")
    return Json({"status": "ok", "model": server.served.name, "mode": server.served.mode})


@routes.get("/metrics", tags=["server"], response_class=PlainTextResponse)
async def metrics(server: TheServer) -> Response:
    """Return the metrics in Prometheus's text format."""
    return Response(server.metrics.text(), media_type="text/plain; version=0.0.4")


# Steering that outlives a request


@routes.post("/v1/steering/set", tags=["steering"])
async def set_steering(body: SetSteering, server: TheServer) -> Response:
    """Register vectors, or hold a configuration under a name; all of it or nothing."""
    if body.name is None and any(getattr(body, field) for field in SteeringIn.model_fields):
        raise ApiError(400, "steering needs a name under which it is held: give name", param="name")

    def change(engine: AnyEngine) -> None:
        if body.name is not None:  # before anything is registered
            engine.steering.check(steering_of(body).resolved(looker(engine.steering.vectors | body.vectors)))
        for name, vector in body.vectors.items():
            engine.steering.register(name, vector)

    await server.call(change)
    server.vectors |= {name: len(vector.data) for name, vector in body.vectors.items()}
    if body.name is not None:
        server.configurations[body.name] = body
    return Json(_registered(server))


@routes.post("/v1/steering/clear", tags=["steering"])
async def clear_steering(body: ClearSteering, server: TheServer) -> Response:
    """Remove named vectors, a held configuration, or all of both if neither is named."""
    every = body.name is None and not body.vectors
    names = list(server.configurations) if every else [] if body.name is None else [body.name]
    dropped = list(server.vectors) if every else body.vectors
    for name, known in (*((label, server.configurations) for label in names), *((label, server.vectors) for label in dropped)):
        if name not in known:
            raise ApiError(404, f"nothing is called {name!r}; there are: {', '.join(sorted(known)) or 'none'}", code="unknown_name")

    def forget(engine: AnyEngine) -> None:
        for name in dropped:
            engine.steering.unregister(name)

    await server.call(forget)
    for name in names:
        server.configurations.pop(name, None)
    for name in dropped:
        server.vectors.pop(name, None)
    return Json(_registered(server))


def _registered(server: Server) -> dict[str, Any]:
    """Return the names of vectors, with their lengths, and of configurations."""
    shared = {name: len(vector) for name, vector in server.served.vectors.items()}
    return {"vectors": shared | server.vectors, "held": sorted(server.configurations)}


@routes.get("/v1/steering", tags=["steering"])
async def get_steering(server: TheServer) -> Response:
    """Return the vectors and configurations, and the steering of the running requests."""
    state: Mapping[str, Any] = await server.call(lambda engine: engine.steering.snapshot())
    requests = {
        str(number): {**req, "monitors": [name for name in req["monitors"] if name != CLOSED]}
        for number, req in state["requests"].items()
    }
    return Json({**_registered(server), "rows": state["rows"], "requests": requests})


@routes.post("/v1/streams/{number}/scale", tags=["steering"])
async def scale(number: int, body: ScaleIn, server: TheServer) -> Response:
    """Scale the steering vectors of a running request, from its next token on."""
    await _tuned(server, number, lambda engine: engine.steering.set_scale(body.scale, request=number))
    return Json({"request": number, "scale": body.scale})


@routes.post("/v1/streams/{number}/threshold", tags=["steering"])
async def threshold(number: int, body: ThresholdIn, server: TheServer) -> Response:
    """Move the threshold of a running request's monitor, from its next token on."""
    if body.monitor == CLOSED:
        raise ApiError(404, f"request {number} has no monitor {CLOSED!r}: name one that it was sent with", code="unknown_name")
    await _tuned(server, number, lambda engine: engine.steering.set_threshold(number, body.monitor, body.threshold))
    return Json({"request": number, "monitor": body.monitor, "threshold": body.threshold})


async def _tuned(server: Server, number: int, function: Any) -> None:
    server.demand_open(number)

    def change(engine: AnyEngine) -> None:
        if number not in engine.steering:
            raise ApiError(409, f"request {number} is not running now: it still waits, or has just ended", code="not_running")
        function(engine)

    await server.call(change)


# Runs


@routes.get("/v1/runs", tags=["runs"])
async def list_runs(server: TheServer) -> Response:
    """Return the names of the captured runs."""
    return Json({"runs": sorted(server.store.runs())})


@routes.delete("/v1/runs/{run}", tags=["runs"])
async def delete_run(run: str, server: TheServer) -> Response:
    """Drop a run."""
    server.demand_run(run)
    server.store.drop(run)
    return Json({"run": run, "dropped": True})


# The page


@routes.get("/", include_in_schema=False)
async def index() -> Response:
    return FileResponse(PAGE / "index.html", headers=_HEADERS)
