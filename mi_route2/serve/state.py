"""State of the server: the served model, the engine's owner, and what each key has left here."""

import asyncio
import copy
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request

from mi_route2.engine import Engine
from mi_route2.runs import RunStore
from mi_route2.serve.api.schema import Names
from mi_route2.serve.auth import ApiError, Client, Keys, note, refusal
from mi_route2.serve.metrics import Metrics
from mi_route2.serve.models import Readable, Served
from mi_route2.serve.options import Limits
from mi_route2.serve.owner import Owner
from mi_route2.sites import Site

T = TypeVar("T")
QUICK, TOLD = 4096, 20
"""Characters of a text that is encoded at once; a longer one on a thread of its own. Names of runs in an error."""


class Server:
    """State that the routes share: the served model, the engine's owner, and what each key has registered."""

    def __init__(
        self, served: Served, keys: Keys, limits: Limits, study_runs: Path | None, engine: Engine, store: RunStore, threaded: Any
    ):
        self.served, self.keys, self.limits, self.study_runs = served, keys, limits, study_runs
        self.store = store
        self.readable, self.threaded = Readable(served.tokenizer), threaded
        """Tokenizers: the one for answers on the server's thread, and that of the engine's thread."""
        self._encoding, self._tokenizer = ThreadPoolExecutor(1, "prompts"), None
        self.vocabulary, self.context = engine.decoder.vocabulary, engine.decoder.context
        self.heads = engine.decoder.shape(Site(0, "z"))[0]  # query heads: those that a patch can name
        self.layers, self.width = engine.decoder.layers, engine.decoder.shape(Site(0, "resid_pre"))[0]
        self.sites = served.host.sites()
        self.adapter_sites = engine.decoder.adapters()
        self.owner = Owner(engine, backlog=limits.backlog)
        self.metrics = Metrics(lambda: self.owner.snapshot, self.stored_bytes)
        self.open: dict[int, str] = {}
        """Requests in the engine, and the owner of each."""
        self.writing: dict[str, int] = {}
        """Runs that are being written, and the bytes that they may take."""
        self.sweeping = Counter[str]()
        self.entering = Counter[str]()
        """Requests of each key that are being submitted."""
        self._names: dict[str, Names] = {}
        self.globals: dict[str, list[str]] = {}
        """Sites and monitors that concern all clients, for display."""

    @property
    def per_key(self) -> int:
        """Requests of one key in the server at once: of several keys, at most an equal share of what runs and waits."""
        share = (self.limits.rows + self.limits.queue) // max(1, len(self.keys))
        return min(self.limits.per_key, max(1, share)) if len(self.keys) > 1 else self.limits.per_key

    async def encoded(self, text: str) -> list[int]:
        """Return the ids of a prompt. A long text is read on a thread of its own, so that streams go on meanwhile."""
        if len(text) <= QUICK:
            return self.served.encode(text)
        return await self.elsewhere(lambda: self.served.encode(text, self._reading()))

    async def elsewhere(self, function: Callable[[], T]) -> T:
        """Return what ``function`` returns on the thread that reads long bodies, so that streams go on meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self._encoding, function)

    async def chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Return the ids of a conversation in the model's chat template, as ``encoded`` does."""
        if sum(len(message["content"]) for message in messages) <= QUICK:
            return self.served.chat(messages)
        return await self.elsewhere(lambda: self.served.chat(messages, self._reading()))

    def _reading(self) -> Any:
        """Return the tokenizer of the thread that reads prompts; it is copied there, which takes half a second."""
        if self._tokenizer is None:
            self._tokenizer = copy.deepcopy(self.served.tokenizer)
        return self._tokenizer

    def names(self, client: Client) -> Names:
        """Return the registered names of the client's key."""
        if client.owner not in self._names:
            self._names[client.owner] = Names(client.owner, client.salt, self.served.vectors)
        return self._names[client.owner]

    def demand_open(self, number: int, client: Client) -> None:
        """Raise ``ApiError`` 404 if no such request of the client is running."""
        if self.open.get(number) != client.owner:
            raise ApiError(404, f"no request {number} of yours is running: it has ended, or was never sent", code="unknown_request")

    def runs(self, client: Client) -> list[str]:
        """Return the names of the client's runs."""
        prefix = self.names(client).prefix
        return sorted(run.removeprefix(prefix) for run in self.store.runs() if run.startswith(prefix))

    def stored_bytes(self) -> dict[tuple[str, str], int]:
        """Return the bytes of the runs and of the vectors of each key, by ``(kind, owner)``."""
        sizes = {("runs", owner): nbytes for owner, nbytes in self.store.bytes_by_owner().items()}
        for owner, names in list(self._names.items()):
            sizes["vectors", owner] = names.nbytes
        return sizes

    def demand_run(self, run: str, client: Client) -> str:
        """Return the store's name of a run; ``ApiError`` 404 if the client has no such one, with the reason if it had."""
        prefix = self.names(client).prefix
        if run and prefix + run in self.store:
            return prefix + run
        names, why = self.runs(client), self.store.why_gone(prefix + run) if run else None
        told = f"you have no run {run!r}" if why is None else why.replace(prefix, "")
        some = ", ".join(names[:TOLD]) + (f" and {len(names) - TOLD} more" if len(names) > TOLD else "")
        raise ApiError(404, f"{told}; there are: {some or 'none'}", code="unknown_run")


async def server_of(request: Request) -> Server:  # a dependency that is no coroutine runs in another thread
    """Return the server of a request."""
    return request.app.state.server


async def client_of(request: Request) -> Client:
    """Return the client of a request; ``ApiError`` 401 for an unknown key."""
    client = request.app.state.server.keys.client(request.headers.get("authorization"))
    note(request, owner=client.owner)
    return client


TheServer = Annotated[Server, Depends(server_of)]
TheClient = Annotated[Client, Depends(client_of)]


async def called(server: Server, client: Client, function: Callable[[Engine], T]) -> T:
    """Run ``function`` on the engine's thread; its errors become answers."""
    try:
        return await server.owner.call(function)
    except Exception as error:
        raise refusal(error, server.names(client).prefix) from error
