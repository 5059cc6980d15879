"""Serve a model over HTTP.

    python -m mi_route2.serve                                   the micro model, trained in seconds; open the address it prints
    python -m mi_route2.serve --model smollm2
    python -m mi_route2.serve --model CHECKPOINT --adapters FOLDER --mode deployed
    python -m mi_route2.serve --host 0.0.0.0 --keys FILE        other machines need a key

The address serves a page for people, /docs for the interface, and OpenAI's clients at /v1. SIGTERM lets what runs end, for at most
--drain seconds.
"""

import asyncio
import gc
import logging
import os
import secrets
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import tyro

try:
    import fastapi  # noqa: F401
    import uvicorn
except ModuleNotFoundError as error:
    sys.exit(f"the server needs {error.name}, which is not installed: pip install 'mi-route2[serve]'")

from mi_route2.serve.app import create_app
from mi_route2.serve.auth import LOOPBACK, Keys, log
from mi_route2.serve.models import Mode, load
from mi_route2.serve.state import Limits, Server

KEY = "MI_ROUTE2_KEY"


@dataclass(frozen=True)
class Options:
    """Options of the server."""

    model: Annotated[str, tyro.conf.arg(help="micro, smollm2, the folder of a checkpoint, or module:function")] = "micro"
    adapters: Annotated[Path | None, tyro.conf.arg(help="folder of adapters, as save_pretrained writes it")] = None
    mode: Annotated[Mode, tyro.conf.arg(help="which adapters act")] = "full"
    dtype: Annotated[str | None, tyro.conf.arg(help="type of a checkpoint's weights, as float32 or bfloat16")] = None
    device: Annotated[str | None, tyro.conf.arg(help="device of the model, as cpu or cuda")] = None
    host: Annotated[str, tyro.conf.arg(help="address to listen at; any other than this machine's own needs keys")] = "127.0.0.1"
    port: Annotated[int, tyro.conf.arg(help="port; 0 takes a free one")] = 8000
    keys: Annotated[
        Path | None, tyro.conf.arg(help=f"file of keys, one per line, an admin's after the word admin; or one in ${KEY}")
    ] = None
    limits: Annotated[Limits, tyro.conf.arg(name="")] = field(default_factory=Limits)
    exact: Annotated[bool, tyro.conf.arg(help="answers do not depend on other requests, bit for bit (slower)")] = False
    study_runs: Annotated[Path | None, tyro.conf.arg(help="folder of studies' runs, for the page")] = None
    drain: Annotated[float, tyro.conf.arg(help="seconds that running requests have to end after SIGTERM")] = 10.0
    threads: Annotated[int | None, tyro.conf.arg(help="threads of torch")] = None


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


def main(options: Options) -> None:
    """Serve until a signal ends it."""
    keys = keys_of(options)
    if options.study_runs is not None and not options.study_runs.is_dir():
        raise ValueError(f"{options.study_runs} is not a folder: give the one that holds the runs")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    served = load(options.model, adapters=options.adapters, mode=options.mode, dtype=options.dtype, device=options.device)
    log.info("%s is loaded", served.name)
    gc.collect()
    gc.freeze()  # what lives as long as the server is not looked through again at every full collection
    app = create_app(served, keys=keys, limits=options.limits, study_runs=options.study_runs, exact=options.exact)
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


if __name__ == "__main__":
    # uvicorn raises the signal that ended it once more, when everything is done
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        main(tyro.cli(Options, description=__doc__))
    except (ValueError, OSError) as error:
        sys.exit(f"mi_route2.serve: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
