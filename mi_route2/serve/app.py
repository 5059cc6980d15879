"""The server: what its routes share, and the routes beside completions and studies.

    app = create_app(load("micro"))
    uvicorn.run(app, port=8000)

Nothing here touches the engine but ``Owner``, whose thread runs it.
"""

import asyncio
import importlib.util
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, HTMLResponse, PlainTextResponse
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException

from mi_route2.engine import Engine
from mi_route2.runs import RunStore
from mi_route2.runs.rows import automatic, available
from mi_route2.serve.api import openai, study
from mi_route2.serve.api.reference import reference
from mi_route2.serve.api.schema import (
    PATCHES,
    ClearSteering,
    Names,
    ScaleIn,
    SetSteering,
    SteeringIn,
    ThresholdIn,
    site_of,
    steering_of,
    vector_of,
)
from mi_route2.serve.auth import ApiError, Client, Front, Json, Keys, answer, invalid, log, needs_admin, noted, outline, refusal
from mi_route2.serve.models import CLOSED, Readable, Served
from mi_route2.serve.options import Limits
from mi_route2.serve.state import Server, TheClient, TheServer, called
from mi_route2.sites import Site
from mi_route2.steering.specs import TIERS, ZEROS, Steering, Vector, looker
from mi_route2.tensor_files import pack

PAGE = Path(__file__).parent / "page"
KEPT, KEPT_BYTES = 256, 64 << 20
"""Vectors and configurations of one key, and the bytes of its vectors."""
_POLICY = "default-src 'self'; img-src 'self' data: blob:; style-src 'self' 'unsafe-inline'; frame-ancestors 'none'"
_HEADERS = {"Content-Security-Policy": _POLICY, "X-Frame-Options": "DENY"}


def create_app(
    served: Served,
    *,
    keys: Keys | None = None,
    limits: Limits | None = None,
    study_runs: Path | None = None,
    exact: bool = False,
) -> FastAPI:
    """Return the application that serves a model; its engine starts and ends with it.

    Args:
        served: The model.
        keys: Keys of the clients; without any, whoever reaches the server may use it, so bind it to loopback only.
        limits: The limits.
        study_runs: Folder of studies' runs, for the page.
        exact: As in ``Engine``: answers do not depend on other requests, bit for bit.
    """
    keys, limits = keys or Keys(), limits or Limits()
    store = RunStore(limits.store, owner=lambda run: run.partition("/")[0])
    decoding = Readable(served.tokenizer)
    slot_bytes = limits.slot_bytes
    if slot_bytes is None and next(served.host.model.parameters()).device.type == "cpu":
        slot_bytes = automatic(available())
    engine = Engine(
        served.host,
        rows=limits.rows,
        budget=max(2048, 2 * limits.rows),
        queue=limits.queue,
        patience=limits.patience,
        store=store,
        prefix_bytes=limits.prefix_bytes,
        slot_bytes=slot_bytes,
        patch_slots=PATCHES * limits.rows,  # as many as all may ask for: a request whose key holds them would keep others waiting
        tokenizer=decoding,
        vectors=served.vectors,
        exact=exact,
    )
    server = Server(served, keys, limits, study_runs, engine, store, decoding.tokenizer)

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        server.owner.start()
        yield
        await server.owner.close(drain=0.0)

    app = FastAPI(title="mi-route2", lifespan=life, default_response_class=Json, responses=ERRORS, docs_url=None, redoc_url=None)
    app.state.server = server
    for router in (openai.routes, study.routes, routes):
        app.include_router(router)
    _pages(app)
    app.add_exception_handler(ApiError, lambda request, error: answer(noted(request, error)))  # pyright: ignore[reportArgumentType]
    app.add_exception_handler(RequestValidationError, lambda request, error: answer(noted(request, invalid(error))))  # pyright: ignore
    app.add_exception_handler(HTTPException, _plain)  # pyright: ignore[reportArgumentType]
    app.add_exception_handler(Exception, _failed)
    app.add_middleware(Front, limit=limits.max_body, done=server.metrics.done, keys=keys)
    return app


def _object(**properties: Any) -> dict[str, Any]:
    """Return the JSON schema of an object that has all of these properties."""
    return {"type": "object", "required": list(properties), "properties": properties}


_TEXT, _TEXT_OR_NULL = {"type": "string"}, {"type": ["string", "null"]}
_ERROR = _object(error=_object(message=_TEXT, type=_TEXT, param=_TEXT_OR_NULL, code=_TEXT_OR_NULL))
_REASONS = {
    400: "The request cannot be run; the sentence says what to change.",
    401: "No key, a wrong key, or not the admin's.",
    404: "There is no such thing, or it is another key's.",
    408: "The body did not come in time.",
    409: "It conflicts with what there is.",
    413: "The body is too large.",
    422: "A field is not as described, or the request failed while it ran.",
    429: "Too much at once; send it again after the seconds in Retry-After.",
    503: "The engine has ended, or is about to.",
}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": why, "content": {"application/json": {"schema": _ERROR}}} for status, why in _REASONS.items()
}


def _plain(request: Request, error: HTTPException) -> Json:
    message = {
        404: "there is no such address: see /docs for those that there are",
        405: "this address takes another method: see /docs",
    }
    text, code = message.get(error.status_code, str(error.detail)), None
    if error.status_code == 400 and (cause := error.__cause__) is not None:  # no text, too deep, or a number of too many digits
        text, code = f"the body is not JSON that can be read: {cause}", "invalid_json"
    return answer(noted(request, ApiError(error.status_code, text, code=code, headers=error.headers)))


def _failed(request: Request, error: Exception) -> Json:
    log.error("a request failed with %s", type(error).__name__, exc_info=error)
    told = f"the server failed with {type(error).__name__}: this is a fault of the server, please report it"
    return answer(noted(request, ApiError(500, told)))


routes = APIRouter()


# Health


@routes.get("/health", tags=["server"])
async def health(server: TheServer, request: Request) -> Response:
    """Return whether the engine runs, and to an admin why the last request failed: 503 if the engine's thread has ended."""
    owner, said = server.owner, {"status": "ok", "model": server.served.name, "mode": server.served.mode}
    if not owner.alive:
        raise ApiError(503, outline(owner.failure or "the engine's thread does not run"), code="engine_dead")
    with suppress(ApiError):  # whether the engine runs takes no key
        if server.keys.client(request.headers.get("authorization")).admin:
            last = owner.snapshot["last_error"]
            said["last_error"] = last and outline(last)
    return Json(said)


@routes.get("/metrics", tags=["server"], response_class=PlainTextResponse)
async def metrics(server: TheServer, client: TheClient) -> Response:
    """Return the metrics in Prometheus's text format (admin)."""
    if not client.admin:  # hits of the prefix cache, for example, are those of all keys
        raise ApiError(401, "the metrics are of all clients and take the admin key: ask with that one", code="admin_only")
    return Response(server.metrics.text(), media_type="text/plain; version=0.0.4")


# Steering that outlives a request


@routes.post("/v1/steering/set", tags=["steering"])
async def set_steering(body: SetSteering, server: TheServer, client: TheClient) -> Response:
    """Register vectors, hold a configuration under a name, or steer every request (admin); all of it or nothing."""
    if body.scope == "global":
        needs_admin(client)
        return await _set_global(body, server, client)
    names = server.names(client)
    given = {name: Vector(_numbers(one, names, name)) for name, one in body.vectors.items()}
    if body.name is None and any(getattr(body, field) for field in SteeringIn.model_fields):
        raise ApiError(400, "steering needs a name under which it is held: give name, or scope 'global' to steer every request")
    async with names.changing:
        return await _set_own(body, given, names, server, client)


async def _set_own(body: SetSteering, given: dict[str, Vector], names: Names, server: Server, client: Client) -> Response:
    vectors = {**names.vectors, **given}
    configurations = {**names.configurations, **({} if body.name is None else {body.name: body})}
    trial = replace(names, vectors=vectors, configurations=configurations)
    if len(vectors) > KEPT or len(configurations) > KEPT or trial.nbytes > KEPT_BYTES:
        raise ApiError(
            400,
            f"a key keeps at most {KEPT} vectors and {KEPT} configurations of {KEPT_BYTES} bytes in all: clear some by "
            "/v1/steering/clear",
        )

    def change(engine: Engine) -> None:
        added = {trial.inside(name): vector for name, vector in given.items()}
        if body.name is not None:  # before anything is registered
            engine.steering.check(steering_of(body, trial).resolved(looker(engine.steering.vectors | added)))
        for name, vector in added.items():
            engine.steering.register(name, vector)

    await called(server, client, change)
    names.vectors, names.configurations = vectors, configurations
    return Json(_registered(names))


def _numbers(given: Any, names: Names, name: str) -> Any:
    if name == ZEROS:
        raise ApiError(400, f"the name {ZEROS!r} stands for zeros in a patch: register this vector under another", param="vectors")
    if isinstance(given, str):
        raise ApiError(400, f"the vector {name!r} is registered by its numbers, not by another name", param=f"vectors.{name}")
    try:
        return vector_of(given, names)
    except ValueError as error:
        raise ApiError(400, f"the vector {name!r}: {error}", param=f"vectors.{name}") from error


async def _set_global(body: SetSteering, server: Server, client: Client) -> Response:
    if body.name is not None or body.vectors or body.steering_clamps:
        raise ApiError(400, "scope 'global' takes steering vectors and monitors: leave name, vectors and steering_clamps out")
    names = server.names(client)

    def change(engine: Engine) -> Steering:
        steering = steering_of(body, names)
        engine.steering.check(steering)
        if any(one.prompt for one in steering.monitors):
            raise ValueError("a monitor of all requests cannot act on prompts: leave prompt out")
        for tier in TIERS:
            if getattr(steering, tier):
                engine.steering.set_global(tier, getattr(steering, tier))
        for one in steering.monitors:
            engine.steering.set_monitor(one)
        return steering

    steering: Steering = await called(server, client, change)
    acting = {tier: {str(entry.site) for entry in getattr(steering, tier)} for tier in TIERS}
    acting["monitors"] = {*server.globals.get("monitors", ()), *(one.name for one in steering.monitors)}
    server.globals |= {what: sorted(named) for what, named in acting.items() if named}
    return Json({"global": server.globals})


@routes.post("/v1/steering/clear", tags=["steering"])
async def clear_steering(body: ClearSteering, server: TheServer, client: TheClient) -> Response:
    """Remove named vectors, a held configuration, everything of the key (neither named), or what steers every request (admin)."""
    names = server.names(client)
    if body.scope == "global":
        needs_admin(client)
        monitors = server.globals.get("monitors", ())

        def clear(engine: Engine) -> None:
            for tier in TIERS:
                engine.steering.clear_global(tier)
            for name in monitors:
                engine.steering.clear_monitor(name)

        await called(server, client, clear)
        server.globals = {}
        return Json({"global": {}})
    _demand("configuration is held", () if body.name is None else (body.name,), names.configurations)
    _demand("vector of yours is registered", body.vectors, names.vectors)
    every = body.name is None and not body.vectors
    async with names.changing:
        dropped = list(names.vectors) if every else body.vectors

        def forget(engine: Engine) -> None:
            for name in dropped:
                engine.steering.unregister(names.inside(name))

        # before the engine forgets them, so that no request of the key is accepted and then finds them missing
        names.vectors = {name: one for name, one in names.vectors.items() if name not in dropped}
        names.configurations = {} if every else {name: one for name, one in names.configurations.items() if name != body.name}
        await called(server, client, forget)
    return Json(_registered(names))


def _demand(what: str, wanted: Iterable[str], known: Collection[str]) -> None:
    for name in wanted:
        if name not in known:
            there = ", ".join(sorted(known)) or "none"
            raise ApiError(404, f"no {what} as {name!r}; there are: {there}", code="unknown_name")


def _registered(names: Names) -> dict[str, Any]:
    """Return the vectors and configurations of a key, without their numbers."""
    configurations = {
        name: {
            "steering_vectors": sorted(one.steering_vectors),
            "prefill_steering_vectors": sorted(one.prefill_steering_vectors),
            "decode_steering_vectors": sorted(one.decode_steering_vectors),
            "steering_clamps": [clamp.site for clamp in one.steering_clamps],
            "monitors": [monitor.name or monitor.site for monitor in one.monitors],
        }
        for name, one in names.configurations.items()
    }
    sizes = {name: len(vector.data) for name, vector in names.vectors.items()}
    return {"vectors": sizes, "shared": {name: len(vector) for name, vector in names.shared.items()}, "held": configurations}


@routes.get("/v1/steering", tags=["steering"])
async def get_steering(server: TheServer, client: TheClient) -> Response:
    """Return the key's vectors and configurations, and what steers every request."""
    return Json({**_registered(server.names(client)), "global": server.globals})


@routes.get("/v1/steering/dynamic", tags=["steering"])
async def dynamic(server: TheServer, client: TheClient) -> Response:
    """Return the current state of steering: queue, rows, counts of actions, times, and the key's requests (an admin sees all)."""
    state: dict[str, Any] = await called(server, client, lambda engine: engine.steering.snapshot())
    snapshot: dict[str, Any] = server.owner.snapshot
    mine = {number for number, owner in server.open.items() if client.admin or owner == client.owner}
    requests = {number: one for number, one in state["requests"].items() if number in mine}
    rows = dict(state["rows"])
    queue = {name: snapshot.get(name, 0) for name in ("running", "waiting", "sweeps", "steps", "tokens")}
    if not client.admin:  # what all keys do would tell what another one does; requests that steer alike share a row
        rows["used"] = len({row for one in requests.values() for row in one["rows"]})
        running = sum(one["running"] for one in requests.values())
        queue = {"running": running, "waiting": len(mine) - running}
    return Json(
        {
            "queue": queue,
            "rows": rows,
            "tier": state["tier"],
            "monitors": state["monitors"] if client.admin else {},
            "requests": {str(number): _seen(one) for number, one in requests.items()},
            "controllers": snapshot.get("steering", {}) if client.admin else {},
        }
    )


def _seen(request: Mapping[str, Any]) -> dict[str, Any]:
    shown = {name: value for name, value in request.items() if name != "rows"}
    return {**shown, "monitors": [name for name in request["monitors"] if name != CLOSED]}


@routes.post("/v1/streams/{number}/scale", tags=["steering"])
async def scale(number: int, body: ScaleIn, server: TheServer, client: TheClient) -> Response:
    """Scale the steering vectors of a running request, from its next token on."""
    server.demand_open(number, client)

    await _tuned(server, client, number, lambda engine: engine.steering.set_scale(body.scale, request=number))
    return Json({"request": number, "scale": body.scale})


@routes.post("/v1/streams/{number}/threshold", tags=["steering"])
async def threshold(number: int, body: ThresholdIn, server: TheServer, client: TheClient) -> Response:
    """Move the threshold of a running request's monitor, from its next token on."""
    server.demand_open(number, client)
    if body.monitor == CLOSED:
        raise ApiError(404, f"request {number} has no monitor {CLOSED!r}: name one that it was sent with", code="unknown_name")
    await _tuned(server, client, number, lambda engine: engine.steering.set_threshold(number, body.monitor, body.threshold))
    return Json({"request": number, "monitor": body.monitor, "threshold": body.threshold})


async def _tuned(server: Server, client: Client, number: int, function: Any) -> None:
    def change(engine: Engine) -> None:
        if number not in engine.steering:
            raise ApiError(409, f"request {number} is not running now: it still waits, or has just ended", code="not_running")
        function(engine)

    await called(server, client, change)


# Runs


@routes.get("/v1/runs", tags=["runs"])
async def list_runs(server: TheServer, client: TheClient) -> Response:
    """Return the names of the key's captured runs."""
    return Json({"runs": server.runs(client)})


@routes.get("/v1/runs/{run}", tags=["runs"])
async def get_run(
    run: str, server: TheServer, client: TheClient, site: Annotated[str | None, Query(max_length=128)] = None
) -> Response:
    """Return the description of a run, and the values of one site if it is named."""
    name = server.demand_run(run, client)
    try:
        about = await asyncio.to_thread(_told, server, name, None if site is None else site_of(site))
    except (KeyError, ValueError) as error:
        raise ApiError(404, refusal(error, server.names(client).prefix).message, code="unknown_run") from error
    return Json({"run": run, **about})


def _told(server: Server, run: str, site: Site | None) -> dict[str, Any]:
    """Return the description of a run, and the values of ``site``."""
    with server.store.unchanged():  # another run of this name may be written at any time
        info = server.store.info(run)
        about: dict[str, Any] = {
            "tokens": list(info.tokens),
            "prompt_length": info.prompt_length,
            "bytes": info.nbytes,
            "sites": [str(one) for one in info.sites],
        }
        if site is None:
            return about
        kind, limit = info.sites.get(site), server.limits.capture_bytes
        if kind is not None and kind.nbytes > limit:
            raise ApiError(
                413,
                f"run {run.partition('/')[2]!r} has {kind.nbytes:,} bytes at {site}, of {limit:,} that an answer may have: capture "
                "fewer positions into a run, or raise the server's --capture-bytes",
                param="site",
                code="too_large",
            )
        positions = server.store.positions(run, site)
        rows = server.store.rows(run, site, positions)
    return {**about, "values": {"site": str(site), "positions": positions, "rows": pack(rows)}}


@routes.delete("/v1/runs/{run}", tags=["runs"])
async def delete_run(run: str, server: TheServer, client: TheClient) -> Response:
    """Drop a run."""
    name = server.demand_run(run, client)
    try:
        server.store.drop(name)
    except KeyError as error:  # evicted since
        raise ApiError(404, refusal(error, server.names(client).prefix).message, code="unknown_run") from error
    return Json({"run": run, "dropped": True})


# The page


def _pages(app: FastAPI) -> None:
    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        if not (PAGE / "index.html").is_file():
            raise ApiError(404, "this installation has no page: see /docs for the interface")
        return FileResponse(PAGE / "index.html", headers=_HEADERS)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return HTMLResponse(reference(app.openapi()), headers=_HEADERS)

    @app.get("/plotly.min.js", include_in_schema=False)
    async def plotly() -> Response:
        spec = importlib.util.find_spec("plotly")  # not imported, which takes a second
        path = Path(str(spec and spec.origin)).parent / "package_data" / "plotly.min.js"
        if not path.is_file():
            raise ApiError(404, "plotly is not installed: pip install 'mi-route2[plotly]'")
        return FileResponse(path, media_type="text/javascript")

    if PAGE.is_dir():
        app.mount("/static", StaticFiles(directory=PAGE), name="static")
