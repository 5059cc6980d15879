"""Serve a model over HTTP.

    python -m mi_route2.serve                                   the micro model, trained in seconds; open the address it prints
    python -m mi_route2.serve --model smollm2
    python -m mi_route2.serve --model CHECKPOINT --adapters FOLDER --mode deployed
    python -m mi_route2.serve --host 0.0.0.0 --keys FILE        other machines need a key

The address serves a page for people, /docs for the interface, and OpenAI's clients at /v1. SIGTERM lets what runs end, for at most
--drain seconds.
"""

import signal
import sys
from importlib.util import find_spec

import tyro

from mi_route2.serve.options import Options


def main() -> None:
    options = tyro.cli(Options, prog="python -m mi_route2.serve", description=__doc__)
    for package in ("fastapi", "uvicorn"):
        if find_spec(package) is None:
            raise ValueError(f"the server needs {package}, which is not installed: pip install 'mi-route2[serve]'")
    from mi_route2.serve.run import serve  # with torch

    serve(options)


if __name__ == "__main__":
    # uvicorn raises the signal that ended it once more, when everything is done
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"mi_route2.serve: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
