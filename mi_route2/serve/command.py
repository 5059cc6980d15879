"""The command ``serve``. Nothing is imported here that needs torch or a web framework, so ``--help`` waits for neither.

mi-route2 serve                                   the micro model, trained in seconds; open the address it prints
mi-route2 serve --model smollm2
mi-route2 serve --model CHECKPOINT --adapters FOLDER --mode deployed
mi-route2 serve --model CHECKPOINT --engine vllm   in an environment that has vLLM
mi-route2 serve --host 0.0.0.0 --token TOKEN      other machines need the token
"""

import os
import secrets
import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import tyro

from mi_route2.serve.options import Mode, ServerLimits

TOKEN = "MI_ROUTE2_TOKEN"
_LIMITS = ServerLimits()


def serve(
    model: Annotated[str, tyro.conf.arg(help="micro, smollm2, the folder of a checkpoint, or module:function")] = "micro",
    adapters: Annotated[Path | None, tyro.conf.arg(help="folder of adapters, as save_pretrained writes it")] = None,
    mode: Annotated[Mode, tyro.conf.arg(help="which adapters act")] = "full",
    dtype: Annotated[str | None, tyro.conf.arg(help="type of a checkpoint's weights, as float32 or bfloat16")] = None,
    device: Annotated[str | None, tyro.conf.arg(help="device of the model, as cpu or cuda")] = None,
    engine: Annotated[Literal["own", "vllm"], tyro.conf.arg(help="engine: own, or vLLM for a checkpoint's folder")] = "own",
    host: Annotated[str, tyro.conf.arg(help="address to listen at; any other than this machine's own needs a token")] = "127.0.0.1",
    port: Annotated[int, tyro.conf.arg(help="port; 0 takes a free one")] = 8000,
    token: Annotated[str | None, tyro.conf.arg(help=f"token that every client must send; or in ${TOKEN}")] = None,
    limits: Annotated[ServerLimits, tyro.conf.arg(name="")] = _LIMITS,
    exact: Annotated[bool, tyro.conf.arg(help="answers do not depend on other requests, bit for bit (slower)")] = False,
    drain: Annotated[float, tyro.conf.arg(help="seconds that running requests have to end after SIGTERM")] = 10.0,
    threads: Annotated[int | None, tyro.conf.arg(help="threads of torch")] = None,
) -> None:
    """Serve a model over HTTP until a signal ends it: a page for people, /docs for the interface, /v1 for OpenAI's clients."""
    for package in ("fastapi", "uvicorn"):
        if find_spec(package) is None:
            raise ValueError(f"the server needs {package}, which is not installed: pip install 'mi-route2[serve]'")
    token = token or os.environ.get(TOKEN)
    if token is None and host not in ("localhost", "127.0.0.1", "::1"):
        raise ValueError(f"other machines reach this server at {host}, so it needs a token: --token {secrets.token_urlsafe(24)}")
    if threads is not None and threads < 1:
        raise ValueError(f"--threads {threads} is not a number of threads: give 1 or more, or leave it out")
    if not 0 <= port < 65_536:
        raise ValueError(f"--port {port} is not a port: give 0 to 65535")
    given = {"adapters": adapters, "mode": None if mode == "full" else mode, "device": device, "exact": exact or None}
    if engine == "vllm" and (refused := [name for name, value in (given | {"threads": threads}).items() if value is not None]):
        raise ValueError(
            f"--{refused[0]} is not possible with --engine vllm: leave it out; mi-route2 export merges adapters into a checkpoint"
        )
    from mi_route2.serve.app import run  # with torch and the web framework
    from mi_route2.serve.models import load, load_vllm

    if engine == "vllm":
        served = load_vllm(model, dtype=dtype, limits=limits)
    else:
        served = load(model, adapters=adapters, mode=mode, dtype=dtype, device=device, threads=threads)
    run(served, host=host, port=port, token=token, limits=limits, exact=exact, drain=drain)


def main() -> None:
    """Run ``serve`` with the arguments of the command line."""
    # uvicorn raises the signal that ended it once more, when everything is done
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        tyro.cli(serve, prog="mi-route2 serve")
    except (ValueError, OSError) as error:
        sys.exit(f"mi-route2 serve: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
