"""Run the server until a signal ends it."""

import asyncio
import gc
import logging
import os
import secrets
import sys

import torch
import uvicorn

from mi_route2.serve.app import create_app
from mi_route2.serve.auth import LOOPBACK, JsonLines, Keys, log
from mi_route2.serve.models import load
from mi_route2.serve.options import KEY, Options
from mi_route2.serve.state import Server
from mi_route2.validation import demand_device


class Draining(uvicorn.Server):
    """Server that lets requests end before it shuts down; ``ready`` prints the address once it listens."""

    def __init__(self, config: uvicorn.Config, server: Server, drain: float):
        super().__init__(config)
        self._server, self._drain = server, drain

    async def startup(self, sockets: list | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            print(f"{self._server.served.name} is served at http://{shown}:{port}", flush=True)

    async def shutdown(self, sockets: list | None = None) -> None:
        # at once, so that the streams end with a reason before their connections are closed
        await asyncio.gather(self._server.owner.close(self._drain), super().shutdown(sockets))


def keys_of(options: Options) -> Keys:
    """Return the keys that the options name; ``ValueError`` if others could reach the server without one."""
    given = os.environ.get(KEY)
    if options.keys is not None and given:
        raise ValueError(f"keys are in {options.keys} and in ${KEY}: give one of the two")
    keys = Keys.read(options.keys) if options.keys is not None else Keys([(given, True)] if given else [])
    if not keys and options.host not in LOOPBACK:
        raise ValueError(
            f"at {options.host} other machines reach this server, so it needs a key: put one into a file and give --keys FILE, or "
            f"set ${KEY}; a good one is {secrets.token_urlsafe(24)}"
        )
    return keys


def serve(options: Options) -> None:
    """Serve until a signal ends it."""
    keys = keys_of(options)
    if options.study_runs is not None and not options.study_runs.is_dir():
        raise ValueError(f"{options.study_runs} is not a folder: give the one that holds the runs")
    if options.threads is not None and options.threads < 1:
        raise ValueError(f"--threads {options.threads} is not a number of threads: give 1 or more, or leave it out")
    if not 0 <= options.drain <= 86_400:
        raise ValueError(f"--drain {options.drain:g} is no time that one waits: give 0 to 86400 seconds")
    if not 0 <= options.port < 65_536:
        raise ValueError(f"--port {options.port} is none: give 0 to 65535")
    if options.device is not None:
        demand_device(options.device)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    served = load(options.model, adapters=options.adapters, mode=options.mode, dtype=options.dtype, device=options.device)
    log.info("%s is loaded", served.name)
    gc.collect()
    gc.freeze()  # what lives as long as the server is not looked through again at every full collection
    app = create_app(served, keys=keys, limits=options.limits, study_runs=options.study_runs, exact=options.exact)
    app.state.log_prompts = options.log_prompts
    config = uvicorn.Config(
        app,
        host=options.host,
        port=options.port,
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        # longer than clients and proxies keep theirs (5 and 60 seconds): who closes first cuts a request that is on its way
        timeout_keep_alive=75,
        timeout_graceful_shutdown=int(options.drain) + 5,
    )
    Draining(config, app.state.server, options.drain).run()
