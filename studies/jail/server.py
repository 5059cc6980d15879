"""A warm server: ``python -s -S -P server.py CHANNEL HELD PARENT`` forks one confined child a job and reports to its parent.

It is small and imports what candidates may import, so that a fork is quick and a child needs to read no file. It is trusted: no
candidate's code runs in it, and what candidates write passes through it as bytes that it does not look at. It ends with its
parent, and takes its child and its folder along.
"""

import gc
import importlib
import io
import json
import os
import struct
import sys
from types import ModuleType
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))


def receive_config(channel: int) -> dict[str, Any]:
    with open(channel, "rb", buffering=0, closefd=False) as file:
        size = struct.unpack("<Q", file.read(8))[0]
        text = bytearray()
        while len(text) < size:
            text += file.read(size - len(text)) or sys.exit(1)
    return json.loads(text)


def load_driver(path: str) -> Any:
    """The driver's `execute`."""
    module = ModuleType("driver")
    module.__file__ = path
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    sys.modules["driver"] = module
    exec(code, module.__dict__)
    if not callable(getattr(module, "execute", None)):
        raise ValueError(f"the driver {path} does not define execute(payload)")
    return module.execute


def import_library() -> set[str]:
    """This library without what its packages import for the parent; the names of all modules that came with it."""
    before = set(sys.modules)
    for name, folder in (("studies", os.path.dirname(HERE)), ("studies.jail", HERE)):
        package = sys.modules[name] = ModuleType(name)
        package.__path__ = [folder]
    importlib.import_module("studies.jail.serve")
    return set(sys.modules) - before


def prepare(config: dict[str, Any]) -> tuple[Any, Any, set[str]]:
    """The library's `serve`, the driver's `execute`, and the modules that are only the server's. Leaves no path to import from."""
    sys.path += config["search"]
    for name in config["modules"]:
        importlib.import_module(name)
    execute = load_driver(config["driver"])
    sys.path += config["own"]
    private = import_library()
    sys.path.clear()
    sys.path_importer_cache.clear()
    return sys.modules["studies.jail.serve"].serve, execute, private


def main(channel: int, held: int, parent: int) -> None:
    config = receive_config(channel)
    try:
        serve, execute, private = prepare(config)
    except Exception as error:
        text = json.dumps({"error": f"{type(error).__name__}: {error}"}).encode()
        os.write(channel, struct.pack("<Q", len(text)) + text)
        return
    for stream, errors in ((sys.stdout, "strict"), (sys.stderr, "backslashreplace")):
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(encoding="utf-8", errors=errors)
    os.environ.clear()
    gc.collect()
    gc.freeze()
    serve(channel, held, parent, config, execute, private)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
