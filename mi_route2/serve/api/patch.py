"""Routes of patching: tokenization, alignment, patch sweeps cell by cell, and one patched answer."""

from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from fastapi import APIRouter, Request, Response

from mi_route2.engine import Capture, Sampling
from mi_route2.engine import Request as EngineRequest
from mi_route2.patching.attribution import STEPS, attribute
from mi_route2.patching.edges import Graph, edges
from mi_route2.patching.grid import Grid
from mi_route2.patching.patches import Patch
from mi_route2.patching.question import Alignment, Span, align, one_token
from mi_route2.patching.sweep import TooManyCellsError
from mi_route2.patching.targets import Target, choose
from mi_route2.runs.record import TokenSelection
from mi_route2.serve.api.openai import cancelled_with, closed, failure, number, submitted
from mi_route2.serve.api.schema import AlignIn, CellIn, EdgesIn, PairIn, SpanIn, SweepIn, TokenizeIn, sentence_of
from mi_route2.serve.http import ApiError, BodyRoute, Events, Json, dumps, note, noted, outline, refusal
from mi_route2.serve.owner import AnyEngine, SweepJob
from mi_route2.serve.state import Server, TheServer

routes = APIRouter(tags=["patching"], route_class=BodyRoute)
TOP = 10
"""Most likely tokens of a patched answer."""


@routes.get("/v1/page", include_in_schema=False)
async def page(request: Request) -> Response:
    """Return the settings of the page, and whether its other requests need a token, which this one does not."""
    server: Server = request.app.state.server
    served = server.served
    points = list(dict.fromkeys(site.point for site in server.sites))
    return Json(
        {
            "model": served.name,
            "layers": server.layers,
            "context": server.context,
            "sites": points,
            "mode": served.mode,
            "modes": served.modes,
            "monitors_example": served.monitor,
            "steering_example": served.steering,
            "examples": [asdict(example) for example in served.examples],
            "prompts": list(served.prompts),
            "token_needed": server.token is not None,
        }
    )


async def _ids(prompt: str | list[int], server: Server, name: str) -> list[int]:
    try:
        ids = await server.encoded(prompt) if isinstance(prompt, str) else prompt
    except ValueError as error:
        raise ApiError(400, f"the {name} prompt: {error}", param=name) from error
    if wrong := [token for token in ids if token >= server.vocabulary]:
        raise ApiError(400, f"the {name} prompt's {wrong[0]} is not a token: the ids are 0..{server.vocabulary - 1}", param=name)
    return ids


async def _aligned(body: AlignIn | CellIn, server: Server) -> tuple[list[int], list[int], Alignment]:
    clean, corrupt = await _ids(body.clean, server, "clean"), await _ids(body.corrupt, server, "corrupt")
    try:
        return clean, corrupt, align(clean, corrupt)
    except ValueError as error:
        raise ApiError(400, str(error)) from error


@routes.post("/v1/tokenize")
async def tokenize(body: TokenizeIn, server: TheServer) -> Response:
    """Return the tokens of a prompt."""
    ids = await _ids(body.text, server, "text")
    return Json({"ids": ids, "tokens": server.served.pieces(ids, [])})


@routes.post("/v1/align")
async def aligned(body: AlignIn, server: TheServer) -> Response:
    """Return the tokens of two prompts, each corrupt position's partner in the clean one, and the positions whose tokens differ."""
    clean, corrupt, alignment = await _aligned(body, server)
    partner = [alignment.source(position) for position in range(len(corrupt))]
    return Json(
        {
            "clean": server.served.pieces(clean, []),
            "corrupt": server.served.pieces(corrupt, []),
            "partner": partner,
            "differs": _differs(clean, corrupt, {i: source for i, source in enumerate(partner) if source is not None}),
            "summary": alignment.summary,
        }
    )


def _differs(clean: Sequence[int] | None, corrupt: Sequence[int], sources: Mapping[int, int]) -> list[int]:
    """Return the positions whose tokens differ: not by their texts, because parts of characters have one in common."""
    return [] if clean is None else [i for i, source in sources.items() if clean[source] != corrupt[i]]


# Sweeps


PAIR = ("clean", "corrupt", "metric", "at")
PLAIN = (*PAIR, "sites", "alpha", "heads", "together")
"""Fields of a body that are arguments of ``patching.edges``, or ``patching.prepare``, as they are."""


@routes.post("/v1/patch_sweep")
async def patch_sweep(body: SweepIn, server: TheServer, request: Request) -> Response:
    """Patch every selected site at every position, and score each; whole, or cell by cell as a stream.

    The stream of an estimate is its summary alone.
    """
    if body.method != "exact":
        grid = await _estimated(body, server)
        note(request, cells=grid.values.size)
        return Events(_summary(grid), lambda: None) if body.stream else Json({"grid": grid.to_json()})
    _refuse_many(server)
    server.sweeping += 1
    places = 1
    try:
        job = await _prepared(body, server)
    except BaseException:
        server.sweeping -= 1
        raise

    def free() -> None:
        nonlocal places
        server.sweeping -= places
        places = 0  # it is given back once

    def ended() -> None:
        job.cancel()
        free()
        note(request, cells=job.sweep.total)

    if body.stream:
        return Events(_streamed(request, job, server, free), ended)
    try:
        async with cancelled_with(request, [job]):
            async for _ in job:
                pass
        return Json(_grid(job, server))
    finally:
        ended()


@routes.post("/v1/edges")
async def scored_edges(body: EdgesIn, server: TheServer) -> Response:
    """Return the strongest edges between components as node-link data, and the faithfulness of circuits of ``kept`` edges."""
    asked = {name: getattr(body, name) for name in (*PAIR, "method", "steps")} | await _asked(body, server)

    def run(engine: AnyEngine) -> tuple[Graph, list[float]]:
        graph = edges(engine.host, **asked)
        return graph, graph.faithfulness(body.kept).tolist() if body.kept else []

    graph, shares = await _at_once(run, server)
    return Json({"graph": graph.to_json(body.k), "faithfulness": shares, "total": len(graph)})


def _refuse_many(server: Server) -> None:
    if server.sweeping >= server.limits.sweeps:
        raise ApiError(
            429,
            f"{server.sweeping} sweeps are running, which is the limit: wait for one to end",
            code="too_many_sweeps",
            headers={"Retry-After": "2"},
        )


async def _at_once(function: Callable[[AnyEngine], Any], server: Server) -> Any:
    """Run a function as one sweep, between two steps of the engine."""
    _refuse_many(server)
    server.sweeping += 1
    try:
        with _refusing():
            return await server.owner.call(function)
    finally:
        server.sweeping -= 1


async def _estimated(body: SweepIn, server: Server) -> Grid:
    asked = {name: getattr(body, name) for name in (*PLAIN, "method", "steps")} | await _asked(body, server)
    asked["positions"] = _positions(body)
    length = len(await _ids(body.corrupt, server, "corrupt"))

    def run(engine: AnyEngine) -> Grid:
        cells = len(choose(engine.host, body.sites)) * (length if body.positions is None else len(body.positions))
        if (cost := cells * ((body.steps or STEPS) if body.method == "ig" else 1)) > server.limits.cells:
            raise TooManyCellsError(
                f"{cost} cells (times steps) are more than {server.limits.cells}: name fewer sites or positions"
            )
        return attribute(engine.host, **asked)

    return await _at_once(run, server)


async def _summary(grid: Grid) -> AsyncGenerator[str, None]:
    yield _event("summary", {"grid": grid.to_json()})
    yield "data: [DONE]\n\n"


async def _asked(body: PairIn, server: Server) -> dict[str, Any]:
    """Return the tokens of the answers and the tokenizer; ``ApiError`` for prompts that are too long."""
    for name in ("clean", "corrupt"):
        if (length := len(await _ids(getattr(body, name), server, name))) > server.context:
            raise ApiError(400, f"the {name} prompt has {length} tokens, but the context has {server.context}", param=name)
    return {name: _token(getattr(body, name), server, name) for name in ("answer", "foil")} | {"tokenizer": server.engine_tokenizer}


def _positions(body: SweepIn) -> list[int | str | Span] | None:
    if body.positions is None:
        return None
    return [Span(position.text, position.occurrence) if isinstance(position, SpanIn) else position for position in body.positions]


async def _prepared(body: SweepIn, server: Server) -> SweepJob:
    asked = {name: getattr(body, name) for name in (*PLAIN, "replicas")} | await _asked(body, server)
    if body.steps is not None:
        raise ApiError(400, "an exact sweep takes no steps: leave them out, or set method to ig", param="steps")
    with _refusing():
        return await server.owner.sweep(positions=_positions(body), most=server.limits.cells, **asked)


@contextmanager
def _refusing() -> Iterator[None]:
    """Context: errors of a question are those of the API, with the field that they are about."""
    try:
        yield
    except TooManyCellsError as error:
        raise ApiError(413, str(error)) from error
    except Exception as error:
        refused, places = refusal(error), ("position", "site", "answer", "foil", "clean", "corrupt")
        found = next((name for name in places if name in refused.message[:40]), None)
        refused.param = {"site": "sites", "position": "positions"}.get(found or "", found)
        raise refused from error


def _token(answer: int | str | None, server: Server, name: str) -> int | None:
    try:
        return one_token(answer, server.served.tokenizer, name)
    except Exception as error:  # tokenizers raise errors of their own kinds
        message = sentence_of(error)
        raise ApiError(400, message if message.startswith(f"the {name}") else f"the {name}: {message}", param=name) from error


def _grid(job: SweepJob, server: Server) -> dict[str, Any]:
    """Return the grid of a job that has ended; ``ApiError`` if it failed."""
    try:
        grid = job.grid()
    except Exception as error:
        if server.owner.failure is not None:
            raise ApiError(503, outline(server.owner.failure), code="engine_dead") from error
        raise ApiError(422, str(error), code="sweep_failed") from error
    server.metrics.cells.inc(job.sweep.total)  # the grid has places of positions without a partner too
    return {"grid": grid.to_json()}


def _event(name: str, data: Any) -> str:
    return f"event: {name}\ndata: {dumps(data)}\n\n"


async def _streamed(request: Request, job: SweepJob, server: Server, free: Callable[[], None]) -> AsyncGenerator[str, None]:
    """Yield the events of a sweep: start, cells as they come, the summary, before which the client may begin the next one."""
    sweep = job.sweep
    question = sweep.pair.question
    rows = {target: i for i, target in enumerate(sweep.targets)}
    places = [None] if question.together else list(question.positions)
    columns: dict[int | None, int] = {position: i for i, position in enumerate(places)}
    clean, corrupt = sweep.pair.scores
    yield _event(
        "start",
        {
            "rows": [str(target) for target in sweep.targets],
            "columns": ["all"] if question.together else [question.corrupt.labels[i] for i in question.positions],
            "positions": places,
            "skipped": [column.position for column in question.skipped],
            "differs": _differs(question.clean.tokens, question.corrupt.tokens, question.sources),
            "clean": number(clean),
            "corrupt": number(corrupt),
            "total": sweep.total,
        },
    )
    async for finished in job:
        cells = [[rows[cell.target], columns[cell.position], number(cell.value)] for cell in finished.cells]
        if cells:
            yield _event("cell", {"cells": cells})
    free()  # whoever has read the summary may ask again, before this response has ended
    try:
        yield _event("summary", _grid(job, server))
    except ApiError as error:
        yield _event("error", noted(request, error).body())
    yield "data: [DONE]\n\n"


@routes.post("/v1/patch_cell")
async def patch_cell(body: CellIn, server: TheServer, request: Request) -> Response:
    """Return the completion of the corrupt prompt with one clean value patched in, and its most likely first tokens."""
    clean, corrupt, alignment = await _aligned(body, server)
    try:
        target = Target.parse(body.site)
        wanted = range(len(corrupt)) if body.position is None else [body.position]
        sources = {position: alignment.source(position) for position in wanted}
        pairs = {position: source for position, source in sources.items() if source is not None}
        if not pairs:
            raise ValueError(f"position {body.position} has no partner in the clean prompt ({alignment.summary}): choose another")
        shape = await server.owner.call(lambda engine: engine.decoder.shape(target.site))
        alpha = _share(target, shape, body.alpha)
    except Exception as error:
        raise refusal(error) from error

    async def run(prompt: Sequence[int], sampling: Sampling, **options: Any) -> Any:
        try:
            probe = EngineRequest(tuple(prompt), sampling, **options)
        except Exception as error:
            raise refusal(error) from error
        (choice,) = await submitted([probe], server)
        server.metrics.prompted.inc(len(prompt))
        try:
            async with cancelled_with(request, [choice.stream]):
                async for _ in choice.stream:
                    pass
        finally:
            closed([choice], server)
        if (error := failure(choice.result, server)) is not None:
            raise error
        return choice.result

    places = sorted(set(pairs.values()))
    captured = await run(clean, Sampling(max_new=1), capture=(Capture(target.site, TokenSelection(positions=places)),))
    at_site = captured.captured[target.site]
    value = dict(zip(at_site.positions, at_site.rows, strict=True))

    def made() -> tuple[Patch, ...]:  # one for each of what may be thousands of positions
        return tuple(Patch(target.site, position, value[source], alpha) for position, source in pairs.items())

    try:
        patches = await server.threaded(made)
    except ValueError as error:  # an alpha that is no number of the model's type
        raise refusal(error) from error
    most = max(1, min(body.max_tokens, server.context - len(corrupt) + 1))
    top = min(TOP, server.vocabulary)
    sampling = Sampling(max_new=most, logprobs=top, stop_tokens=server.served.stop_tokens)
    result = await run(corrupt, sampling, patch=patches)
    best = result.tokens[0].top
    texts = server.served.tokens(list(best))
    return Json(
        {
            "text": result.text,
            "token_ids": result.ids,
            "top": [{"token": text, "id": token, "logprob": number(best[token])} for text, token in zip(texts, best, strict=True)],
        }
    )


def _share(target: Target, shape: tuple[int, ...], alpha: float) -> float | torch.Tensor:
    """Return the alpha of a patch of one head: 0 at the others."""
    if target.head is None:
        return alpha
    if target.head >= shape[0]:
        raise ValueError(f"{target} is outside the model: {target.site} has the heads 0..{shape[0] - 1}")
    share = torch.zeros(shape, dtype=torch.float64)
    share[target.head] = alpha
    return share
