"""Warm server, started by `pool.Worker`: it forks one confined child per job and reports to its parent.

Run as ``python -s -S -P -c BOOT server.py CHANNEL HELD PARENT``, where BOOT executes this text. The server is small and imports
what candidates may import, so that a fork is quick and a child needs to read no file. The server is trusted: it runs no candidate's
code, and handles what candidates write as bytes that it does not parse. It ends with its parent, and then ends its child and
removes its folder.
"""

import contextlib
import gc
import importlib
import io
import json
import os
import posix
import struct
import sys
from collections.abc import Iterable, Iterator
from importlib.machinery import SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

NAMELESS = os.uname_result(("Linux", "jail", "", "", os.uname().machine))
"""Result of ``os.uname`` for programs, which hides the machine's name. The filter refuses the system call."""


def receive_config(channel: int) -> dict[str, Any]:
    with open(channel, "rb", buffering=0, closefd=False) as file:
        size = struct.unpack("<Q", file.read(8))[0]
        text = bytearray()
        while len(text) < size:
            text += file.read(size - len(text)) or sys.exit(1)
    return json.loads(text)


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


def renamed(code: CodeType, name: str) -> CodeType:
    """Return a copy of a code object, and of the code objects inside it, with the file name ``name``."""
    constants = tuple(renamed(each, name) if isinstance(each, CodeType) else each for each in code.co_consts)
    return code.replace(co_filename=name, co_consts=constants)


@contextlib.contextmanager
def nameless_code() -> Iterator[None]:
    """Give the code of modules that are loaded in this context the module's name as file name, instead of its path."""
    get_code = SourceFileLoader.get_code

    def get_nameless_code(self: SourceFileLoader, fullname: str) -> CodeType | None:
        code = get_code(self, fullname)
        return code and renamed(code, f"<{fullname}>")

    SourceFileLoader.get_code = get_nameless_code
    try:
        yield
    finally:
        SourceFileLoader.get_code = get_code


def conceal(names: Iterable[str]) -> None:
    """Remove data that would reveal to a candidate where modules are stored, who runs them, and on which machine."""
    for module in (sys.modules[name] for name in names):
        for name in ("__file__", "__cached__", "__path__", "__spec__", "__loader__"):
            if name in vars(module):
                setattr(module, name, None)
    sys.argv[:] = sys.orig_argv[:] = [""]
    for name in ("executable", "_base_executable"):
        setattr(sys, name, "")
    sys.prefix, sys.exec_prefix = sys.base_prefix, sys.base_exec_prefix
    os.environ.clear()
    for module in (os, posix):
        setattr(module, "uname", lambda: NAMELESS)  # noqa: B010 - a type checker takes it for a constant


def prepare(config: dict[str, Any]) -> tuple[Any, Any, set[str]]:
    """Import everything that the server and its children need, and clear the import path.

    Returns:
        `serve.serve`, the driver's ``execute``, and the names of the modules that only the server uses.
    """
    sys.path += config["search"]
    for name in config["modules"]:
        importlib.import_module(name)
    before = set(sys.modules)
    with nameless_code():
        execute = load_driver(config["driver"])
        sys.path += config["server_search"]
        private = import_library(config["library"])
    sys.path.clear()
    sys.path_importer_cache.clear()
    conceal({"__main__", *set(sys.modules) - before})
    return sys.modules["studies.sandbox.serve"].serve, execute, private


def main(channel: int, lock: int, parent: int) -> None:
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
    gc.collect()
    gc.freeze()
    gc.disable()  # children enable it (`child.level`): they could count the server's collections and infer their place
    serve(channel, lock, parent, config, execute, private)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
