"""Warm server, started by `pool.JailWorker`: it forks one confined child per job and reports to its parent.

Run as ``python -s -S -P server.py CHANNEL PARENT``. The server is small and imports what candidates may import, so that a fork
is quick and a child needs to read no file. The server is trusted: it runs no candidate's code, and handles what candidates write as
bytes that it does not parse. It ends with its parent, and then ends its child and removes its folder. It does not hide itself from
candidates (``getauxval(AT_EXECFN)`` reads its path anyway), because all verdicts are made in the parent.
"""

import contextlib
import gc
import importlib
import io
import json
import os
import struct
import sys
from types import ModuleType
from typing import Any


def load_driver(path: str) -> Any:
    """Run the driver's file and return its ``execute``."""
    module = ModuleType("driver")
    module.__file__ = path
    with open(path, "rb") as file:
        code = compile(file.read(), "<driver>", "exec", dont_inherit=True)
    sys.modules["driver"] = module
    exec(code, module.__dict__)
    if not callable(getattr(module, "execute", None)):
        raise ValueError(f"the driver {path} does not define execute(payload)")
    return module.execute


def import_library(here: str) -> set[str]:
    """Import `studies.sandbox.serve` from the folder ``here``; return the names of the new modules.

    The packages' own ``__init__`` files, which import modules for the parent, are skipped.
    """
    before = set(sys.modules)
    for name, folder in (("studies", os.path.dirname(here)), ("studies.sandbox", here)):
        package = sys.modules[name] = ModuleType(name)
        package.__path__ = [folder]
    importlib.import_module("studies.sandbox.serve")
    return set(sys.modules) - before


def prepare(config: dict[str, Any]) -> tuple[Any, Any, set[str]]:
    """Import everything that the server and its children need, and clear the import path.

    Returns:
        `serve.serve`, the driver's ``execute``, and the names of the modules that only the server uses.
    """
    sys.path += config["search"]
    for name in config["modules"]:
        importlib.import_module(name)
    execute = load_driver(config["driver"])
    sys.path += config["server_search"]
    private = import_library(config["library"])
    sys.path.clear()
    sys.path_importer_cache.clear()
    return sys.modules["studies.sandbox.serve"].serve, execute, private


def main(channel: int, parent: int) -> None:
    config = json.loads(sys.stdin.buffer.read())  # later reads, also those of children, are at its end
    try:
        serve, execute, private = prepare(config)
    except Exception as error:
        text = json.dumps({"error": f"{type(error).__name__}: {error}"}).encode()
        with contextlib.suppress(ConnectionError):  # another server failed before, and nobody listens
            os.write(channel, struct.pack("<Q", len(text)) + text)
        return
    for stream, errors in ((sys.stdout, "strict"), (sys.stderr, "backslashreplace")):
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(encoding="utf-8", errors=errors)
    gc.collect()
    gc.freeze()  # children do not copy what their collections need not look at
    serve(channel, parent, config, execute, private)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
