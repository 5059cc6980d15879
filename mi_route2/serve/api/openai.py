"""Completions and chat completions as OpenAI's clients ask for them, whole or streamed, with interventions in extra fields.

A whole answer and a stream are made of the same events: the same tokens, texts, log-probabilities and readings.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from math import isfinite, isnan
from typing import Any

from fastapi import APIRouter, Request, Response

from mi_route2.engine import Event, Result, Token
from mi_route2.engine import Request as EngineRequest
from mi_route2.engine.text import SPLIT, GrowingText
from mi_route2.serve.api.schema import (
    CHOICES,
    ChatCompletion,
    Completion,
    Generation,
    RunSource,
    request_of,
    sampling_of,
)
from mi_route2.serve.http import CLIENT_CLOSED, ApiError, BodyRoute, Events, Json, dumps, note, noted, outline, refusal
from mi_route2.serve.models import CLOSED
from mi_route2.serve.owner import Stream
from mi_route2.serve.state import Server, TheServer
from mi_route2.tensor_files import pack

routes = APIRouter(route_class=BodyRoute)
DEFAULT_CHAT = 256
"""Tokens of a chat completion that names no number."""


@dataclass
class Choice:
    """One completion while it is made: its request, its stream, and its text so far."""

    index: int
    request: EngineRequest
    stream: Stream
    growing: GrowingText
    tokens: int = 0
    offset: int = 0
    """Characters of the tokens whose log-probabilities were told."""
    held: list[int] = field(default_factory=list)
    """Tokens of a character that is not finished."""
    begun: bool = False
    """True once a chunk of it was made."""

    @property
    def result(self) -> Result:
        """The engine's result, after the last event."""
        assert self.stream.result is not None
        return self.stream.result

    @property
    def finish(self) -> str:
        """The reason of its end in OpenAI's words."""
        return "length" if self.result.finish == "length" else "stop"


@routes.get("/v1/models", tags=["completions"])
async def models(server: TheServer) -> Response:
    """Return the served model."""
    about = {"id": server.served.name, "object": "model", "created": 0, "owned_by": "mi-route2", "max_model_len": server.context}
    return Json({"object": "list", "data": [about]})


def _demand(name: str | None, server: Server) -> None:
    if name not in (None, server.served.name):
        raise ApiError(404, f"there is no model {name!r} here: this server has {server.served.name!r}", code="model_not_found")


@routes.post("/v1/completions", tags=["completions"])
async def completions(body: Completion, server: TheServer, request: Request) -> Response:
    """Continue prompts, with interventions per request."""
    _demand(body.model, server)
    prompts = []
    try:
        for prompt in body.prompts:
            prompts.append(await server.encoded(prompt) if isinstance(prompt, str) else prompt)
            if len(prompts[-1]) > server.context:  # the others are not looked at
                raise ValueError(f"a prompt has {len(prompts[-1])} tokens, but the context has {server.context}")
    except ValueError as error:
        raise ApiError(400, str(error), param="prompt") from error
    if not prompts:
        raise ApiError(400, "there is no prompt: give a text, or token ids", param="prompt")
    # the default number of tokens must fit, one that was asked for is refused if it does not
    most = [body.max_tokens if "max_tokens" in body.model_fields_set else _fitting(server, prompt, 16) for prompt in prompts]
    return await _answered(body, prompts, most, server, request)


@routes.post("/v1/chat/completions", tags=["completions"])
async def chat_completions(body: ChatCompletion, server: TheServer, request: Request) -> Response:
    """Answer a conversation in the model's chat template, with interventions per request."""
    _demand(body.model, server)
    try:
        last = body.continue_final_message
        how = {"add_generation_prompt": not last if body.add_generation_prompt is None else body.add_generation_prompt}
        how |= {"continue_final_message": True} if last else {}
        prompt = await server.chat([message.plain() for message in body.messages], **how)
    except ValueError as error:
        raise ApiError(400, str(error), param="messages") from error
    most = body.max_completion_tokens or body.max_tokens or _fitting(server, prompt, DEFAULT_CHAT)
    return await _answered(body, [prompt], [most], server, request)


def _fitting(server: Server, prompt: Sequence[int], most: int) -> int:
    return max(1, min(most, server.context - len(prompt) + 1))


async def _answered(
    body: Completion | ChatCompletion, prompts: list[list[int]], most: list[int], server: Server, request: Request
) -> Response:
    if len(prompts) * body.n > CHOICES:
        raise ApiError(
            400, f"{len(prompts)} prompts times n = {body.n} is more than {CHOICES} completions: ask for fewer", param="n"
        )
    began = time.monotonic()
    if body.adapters is not None and (why := server.served.refusal(body.adapters)) is not None:
        raise ApiError(400, why, param="adapters", code="mode_not_served")
    refuse_runs(body, len(prompts) * body.n, server)
    # on a thread of their own, because a body may have thousands of patches and vectors of millions of numbers
    choices = await submitted(await server.threaded(partial(_requests, body, prompts, most, server)), server)
    server.metrics.prompted.inc(sum(map(len, prompts)))
    legacy = body if isinstance(body, Completion) else None
    echo, silent = legacy is not None and legacy.echo, legacy is not None and not legacy.max_tokens
    words = Wording(server, legacy is None, body.top is not None, echo=echo, silent=silent)

    def ended() -> None:
        for choice in choices:
            choice.stream.cancel()
        closed(choices, server)
        note(request, tokens=sum(choice.tokens for choice in choices))

    if body.stream:
        return Events(_told(body, request, choices, server, words, began), ended)
    try:
        async with cancelled_with(request, [choice.stream for choice in choices]):
            answers = await asyncio.gather(*(_whole(choice, server, words) for choice in choices))
    finally:
        ended()
    for choice in choices:
        if (error := failure(choice.result, server)) is not None:
            raise error
    return Json({**words.head(), "choices": answers, "usage": _usage(choices, body.n)})


def _requests(body: Completion | ChatCompletion, prompts: list[list[int]], most: list[int], server: Server) -> list[EngineRequest]:
    """Return the engine's request of each choice; ``ApiError`` if one cannot be made."""
    served = server.served
    closing = served.closing(body.adapters, server.width, server.adapter_sites)
    try:
        samples = [(prompt, longest) for prompt, longest in zip(prompts, most, strict=True) for _ in range(body.n)]
        samplings = [sampling_of(body, served, longest, index, body.top) for index, (_, longest) in enumerate(samples)]
        shared = request_of(body, prompts[0], samplings[0], server.configurations, closing)
        return [
            replace(shared, prompt=tuple(prompt), sampling=sampling)
            for (prompt, _), sampling in zip(samples, samplings, strict=True)
        ]
    except Exception as error:
        raise refusal(error) from error


def refuse_runs(body: Generation, count: int, server: Server) -> None:
    """Raise ``ApiError`` for a run that does not exist, or one that is written already."""
    for run in sorted({patch.source.run for patch in body.patch if isinstance(patch.source, RunSource)}):
        server.demand_run(run)
    if body.run is not None and count > 1:
        raise ApiError(400, f"{count} completions cannot write one run: ask for one", param="run")
    if body.run is not None and body.run in server.store:
        message = f"there is a run {body.run!r} already: delete it, or use another name"
        raise ApiError(409, message, param="run", code="run_exists")


async def submitted(made: Sequence[EngineRequest], server: Server) -> list[Choice]:
    """Submit all requests or none; ``ApiError`` if one is refused."""
    choices: list[Choice] = []
    try:
        for index, request in enumerate(made):
            stream = await server.owner.submit(request)
            server.open.add(stream.number)
            growing = GrowingText(server.readable, request.sampling.stop, request.prompt)
            choices.append(Choice(index, request, stream, growing))
    except BaseException as error:
        for choice in choices:
            choice.stream.cancel()
        closed(choices, server)
        if isinstance(error, Exception):
            raise refusal(error) from error
        raise
    return choices


def closed(choices: Iterable[Choice], server: Server) -> None:
    """Forget choices that have ended."""
    server.open.difference_update(choice.stream.number for choice in choices)


@asynccontextmanager
async def cancelled_with(request: Request, sources: Sequence[Any]) -> AsyncIterator[None]:
    """Cancel ``sources`` if the client goes away, and when the block is left."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        for source in sources:
            source.cancel()

    watching = asyncio.create_task(watch())
    try:
        yield
        if watching.done():
            raise ApiError(CLIENT_CLOSED, "the client went away before its answer was ready", code="client_gone")
    finally:
        watching.cancel()
        for source in sources:
            source.cancel()
        with suppress(asyncio.CancelledError):
            await watching


def failure(result: Result, server: Server) -> ApiError | None:
    """Return the answer to a request that failed while it ran; ``None`` if it did not."""
    if result.finish == "cancelled":
        return ApiError(503, "the server ended this request: it is shutting down", code="cancelled", headers={"Retry-After": "5"})
    if result.finish != "error":
        return None
    if server.owner.failure is not None:
        return ApiError(503, outline(server.owner.failure), code="engine_dead")
    return ApiError(422, result.error or "the request failed", code="request_failed")


def _usage(choices: Sequence[Choice], n: int) -> dict[str, Any]:
    """Return the tokens that were read and written, as OpenAI's clients read it.

    A prompt counts once for all its ``n`` completions, and as cached what none of them read.
    """
    read, written = sum(len(choice.request.prompt) for choice in choices[::n]), sum(choice.tokens for choice in choices)
    cached = [choice.result.cached for choice in choices]
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
        "prompt_tokens_details": {"cached_tokens": sum(min(cached[i : i + n]) for i in range(0, len(cached), n))},
    }


class Wording:
    """Format of an answer: the objects of completions, or those of ``chat`` completions.

    ``wants``: log-probabilities were requested; ``echo``: an answer begins with its prompt; ``silent``: it is nothing else.
    """

    def __init__(self, server: Server, chat: bool, wants: bool, *, echo: bool, silent: bool):
        self.server, self.chat, self.wants, self.echo, self.silent = server, chat, wants, echo, silent
        self.id, self.created = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}", int(time.time())

    def head(self, *, chunk: bool = False) -> dict[str, Any]:
        """Return the fields that all objects of an answer share."""
        object_name = "text_completion" if not self.chat else "chat.completion.chunk" if chunk else "chat.completion"
        return {"id": self.id, "object": object_name, "created": self.created, "model": self.server.served.name}

    def whole(self, index: int, text: str, logprobs: Any, finish: str) -> dict[str, Any]:
        """Return a finished choice."""
        said: dict[str, Any] = {"message": {"role": "assistant", "content": text, "refusal": None}} if self.chat else {"text": text}
        return {"index": index, **said, "logprobs": logprobs, "finish_reason": finish}

    def piece(self, index: int, text: str, logprobs: Any, finish: str | None, first: bool) -> dict[str, Any]:
        """Return a choice of a chunk."""
        role = {"role": "assistant"} if first else {}
        said: dict[str, Any] = {"delta": {**role, "content": text}} if self.chat else {"text": text}
        return {"index": index, **said, "logprobs": logprobs, "finish_reason": finish}

    def logprobs(self, tokens: Sequence[Token], choice: Choice) -> Any:
        """Return the log-probabilities of the next tokens of a choice."""
        if not self.wants:
            return None
        texts = self.server.served.tokens([token.token for token in tokens])
        tops = [list(zip(self.server.served.tokens(list(token.top)), token.top.values(), strict=True)) for token in tokens]
        if not self.chat:
            unseen = getattr(self.server.served.tokenizer, "all_special_ids", ())
            lengths = [0 if token.token in unseen else len(text) for token, text in zip(tokens, texts, strict=True)]
            *offsets, choice.offset = accumulate(lengths, initial=choice.offset)
            return {
                "tokens": texts,
                "token_logprobs": [number(token.logprob) for token in tokens],
                "top_logprobs": [None if isnan(token.logprob) else _by_text(top) for token, top in zip(tokens, tops, strict=True)],
                "text_offset": offsets,
            }
        return {
            "content": [
                {**_worded(text, token.logprob), "top_logprobs": [_worded(other, value) for other, value in top]}
                for text, token, top in zip(texts, tokens, tops, strict=True)
            ],
            "refusal": None,
        }


def _by_text(top: Sequence[tuple[str, float]]) -> dict[str, float | None]:
    """Return log-probabilities by text, the most likely token's if several have one text, as parts of characters have."""
    said: dict[str, float | None] = {}
    for text, value in top:
        said.setdefault(text, number(value))
    return said


def _worded(text: str, logprob: float) -> dict[str, Any]:
    # a part of a character has bytes that nobody knows here
    encoded = None if SPLIT in text else list(text.encode("utf-8", "replace"))
    return {"token": text, "logprob": number(logprob), "bytes": encoded}


def number(value: float) -> float | None:
    """Return a number that JSON has; ``None`` for NaN and infinity."""
    return value if isfinite(value) else None


def _readings(of: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    by_position = {
        str(position): {
            name: {"score": number(reading.score), "gate": number(reading.gate)} for name, reading in each.items() if name != CLOSED
        }
        for position, each in of.items()
    }
    return {position: each for position, each in by_position.items() if each}


def _norms(of: Mapping[int, Mapping[Any, float]]) -> dict[str, Any]:
    return {str(position): {str(site): number(value) for site, value in each.items()} for position, each in of.items()}


def _first(choice: Choice, server: Server) -> dict[str, Any]:
    """Return the fields of a choice that a stream sends once, with its first event."""
    request = choice.request
    return {
        "prompt_token_ids": request.prompt,
        "prompt_tokens": server.served.pieces(request.prompt, []),
        "seed": request.sampling.seed,
    }


def _last(choice: Choice) -> dict[str, Any]:
    """Return the fields of a choice that are known at its end."""
    result = choice.result
    captured = {
        str(site): {"positions": list(capture.positions), "rows": pack(capture.rows)} for site, capture in result.captured.items()
    }
    return {"finish": result.finish, "cached": result.cached, "unfired": result.unfired, "captured": captured}


def _extra(choice: Choice, server: Server, tokens: Sequence[Token]) -> dict[str, Any]:
    """Return the tokens of a choice with the log-probabilities that were asked for by id."""
    ids = [token.token for token in tokens]
    requested = choice.request.sampling.logprob_token_ids
    logprobs = (
        {"logprob_token_ids": list(requested), "requested": [[number(v) for v in token.requested] for token in tokens]}
        if requested
        else {}
    )
    return {"request": choice.stream.number, "token_ids": ids, "tokens": server.served.pieces(ids, choice.held), **logprobs}


async def _whole(choice: Choice, server: Server, words: Wording) -> dict[str, Any]:
    """Read a choice to its end and return it."""
    while events := await choice.stream.batch():
        choice.tokens += sum(event.token is not None for event in events)
    result, prompt = choice.result, choice.request.prompt
    tokens, text, finish = ([], "", "length") if words.silent else (result.tokens, result.text or "", choice.finish)
    choice.tokens = len(tokens)
    told = tokens
    if words.echo:
        told, text = [Token(prompt[0]), *result.prompt_logprobs, *tokens], server.readable.decode(prompt) + text
    extra = {
        **_first(choice, server),
        **_extra(choice, server, tokens),
        "readings": _readings(result.readings),
        "norms": _norms(result.norms),
        **_last(choice),
    }
    said = words.whole(choice.index, text, words.logprobs(told, choice), finish)
    return {**said, "mi_route2": extra}


async def _told(
    body: Generation, request: Request, choices: list[Choice], server: Server, words: Wording, began: float
) -> AsyncGenerator[str, None]:
    """Yield the chunks of all choices as they come, each as one event of a stream."""
    counted = body.stream_options is not None and body.stream_options.include_usage
    empty: dict[str, Any] = {"usage": None} if counted else {}
    head = words.head(chunk=True)
    async with _batches(choices) as batches:
        left = len(choices)
        while left:
            choice, events = await batches()
            first, choice.begun = not choice.begun, True
            if events:
                if choice.tokens == 0 and any(event.token is not None for event in events):
                    server.metrics.first.observe(time.monotonic() - began)
                said, extra = _going(choice, events, server, words, first)
            elif (error := failure(choice.result, server)) is None:
                left -= 1
                said, extra = _ending(choice, server, words, first)
            else:
                yield f"data: {dumps(noted(request, error).body())}\n\n"
                break
            yield f"data: {dumps({**head, 'choices': [said], **empty, 'mi_route2': extra})}\n\n"
        else:
            if counted:
                yield f"data: {dumps({**head, 'choices': [], 'usage': _usage(choices, body.n)})}\n\n"
        yield "data: [DONE]\n\n"


@asynccontextmanager
async def _batches(choices: list[Choice]) -> AsyncIterator[Callable[[], Awaitable[tuple[Choice, list[Event]]]]]:
    """Context: a function that waits for the next events of any choice; none at its end."""
    # of one entry, so that the streams notice a client that does not read
    chunks: asyncio.Queue[tuple[Choice, list[Event]]] = asyncio.Queue(1)

    async def read(choice: Choice) -> None:
        while events := await choice.stream.batch():
            await chunks.put((choice, events))
        await chunks.put((choice, []))

    readers = [asyncio.create_task(read(choice)) for choice in choices]
    try:
        yield chunks.get
    finally:
        for reader in readers:
            reader.cancel()


def _going(
    choice: Choice, events: Sequence[Event], server: Server, words: Wording, first: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return choice and extras of a chunk for some events."""
    tokens = [event.token for event in events if event.token is not None]
    text = choice.growing.extend([token.token for token in tokens])
    choice.tokens += len(tokens)
    extra = {
        **(_first(choice, server) if first else {}),
        **_extra(choice, server, tokens),
        "readings": _readings({at: reading for event in events for at, reading in event.readings.items()}),
        "norms": _norms({at: norm for event in events for at, norm in event.norms.items()}),
    }
    logprobs = words.logprobs(tokens, choice) if tokens else None
    return words.piece(choice.index, text, logprobs, None, first), extra


def _ending(choice: Choice, server: Server, words: Wording, first: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return choice and extras of the last chunk: the text that was held back, and how it ended."""
    begins = _first(choice, server) if first else {}
    # readings and norms as in every chunk, so that a client may ask each of them
    extra = {**begins, **_extra(choice, server, ()), "readings": {}, "norms": {}, **_last(choice)}
    return words.piece(choice.index, choice.growing.end(), None, choice.finish, first), extra
