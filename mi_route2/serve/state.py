"""State of the server: the served model, the engine's owner, and what clients have left here."""

import asyncio
import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request

from mi_route2.engine import Engine
from mi_route2.runs import RunStore
from mi_route2.serve.api.schema import SteeringIn
from mi_route2.serve.http import ApiError, demand_token, refusal
from mi_route2.serve.metrics import Metrics
from mi_route2.serve.models import Readable, Served
from mi_route2.serve.options import ServerLimits
from mi_route2.serve.owner import AnyEngine, Owner
from mi_route2.sites import Site

T = TypeVar("T")


class Server:
    """State that the routes share: the served model, the engine's owner, and what clients have registered."""

    def __init__(
        self, served: Served, token: str | None, limits: ServerLimits, engine: AnyEngine, store: RunStore, engine_tokenizer: Any
    ):
        self.served, self.token, self.limits = served, token, limits
        self.store = store
        self.readable, self.engine_tokenizer = Readable(served.tokenizer), engine_tokenizer
        """Tokenizers: the one for answers on the server's thread, and that of the engine's thread."""
        self._encoding, self._tokenizer = ThreadPoolExecutor(1, "prompts"), None
        self.vocabulary, self.context = engine.decoder.vocabulary, engine.decoder.context
        self.layers, self.width = engine.decoder.layers, engine.decoder.shape(Site(0, "resid_pre"))[0]
        self.sites = served.host.sites() if isinstance(engine, Engine) else engine.facts.sites()
        self.adapter_sites = engine.decoder.adapters()
        self.owner = Owner(engine, backlog=limits.backlog)
        self.metrics = Metrics(lambda: self.owner.snapshot)
        self.open: set[int] = set()
        """Requests in the engine."""
        self.sweeping = 0
        self.vectors: dict[str, int] = {}
        """Vectors that clients registered, and their lengths."""
        self.configurations: dict[str, SteeringIn] = {}

    async def encoded(self, text: str) -> list[int]:
        """Return the ids of a prompt."""
        return await self.threaded(lambda: self.served.encode(text, self._reading()))

    async def threaded(self, function: Callable[[], T]) -> T:
        """Return what ``function`` returns on the thread that reads long bodies, so that streams go on meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self._encoding, function)

    async def chat(self, messages: list[dict[str, str]], **how: bool) -> list[int]:
        """Return the ids of a conversation in the model's chat template, as ``encoded`` does."""
        return await self.threaded(lambda: self.served.chat(messages, self._reading(), **how))

    def _reading(self) -> Any:
        """Return the tokenizer of the thread that reads prompts; it is copied there, which takes half a second."""
        if self._tokenizer is None:
            self._tokenizer = copy.deepcopy(self.served.tokenizer)
        return self._tokenizer

    def demand_open(self, number: int) -> None:
        """Raise ``ApiError`` 404 if no such request is running."""
        if number not in self.open:
            raise ApiError(404, f"no request {number} is running: it has ended, or was never sent", code="unknown_request")

    def demand_run(self, run: str) -> None:
        """Raise ``ApiError`` 404 if there is no such run, with the reason if there was one."""
        if run and run in self.store:
            return
        raise ApiError(404, self.store.why_gone(run) or f"there is no run {run!r}: see /v1/runs", code="unknown_run")

    async def call(self, function: Callable[[AnyEngine], T]) -> T:
        """Run ``function`` on the engine's thread; its errors become answers."""
        try:
            return await self.owner.call(function)
        except Exception as error:
            raise refusal(error) from error


async def server_of(request: Request) -> Server:  # a dependency that is no coroutine runs in another thread
    """Return the server of a request that has its token; ``ApiError`` 401 for others."""
    server: Server = request.app.state.server
    demand_token(server.token, request.headers.get("authorization"))
    return server


TheServer = Annotated[Server, Depends(server_of)]
