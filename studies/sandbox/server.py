"""A warm server, which `pool.Worker` starts: it forks one confined child a job and reports to its parent.

``python -s -S -P -c BOOT server.py CHANNEL HELD PARENT``, where BOOT runs this text. It is small and
imports what candidates may import, so that a fork is quick and a child needs to read no file. It is trusted: no
candidate's code runs in it, and what candidates write passes through it as bytes that it does not look at. It ends with its
parent, and takes its child and its folder along.
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
"""What programs are told of the machine. The filter refuses the system call."""


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
        code = compile(file.read(), "<driver>", "exec", dont_inherit=True)
    sys.modules["driver"] = module
    exec(code, module.__dict__)
    if not callable(getattr(module, "execute", None)):
        raise ValueError(f"the driver {path} does not define execute(payload)")
    return module.execute


def import_library(here: str) -> set[str]:
    """This library, in the folder `here`, without what its packages import for the parent; the names of the modules that came."""
    before = set(sys.modules)
    for name, folder in (("studies", os.path.dirname(here)), ("studies.sandbox", here)):
        package = sys.modules[name] = ModuleType(name)
        package.__path__ = [folder]
    importlib.import_module("studies.sandbox.serve")
    return set(sys.modules) - before


def renamed(code: CodeType, name: str) -> CodeType:
    """The code, and the code of what is defined in it, as if it came from a file of that name."""
    constants = tuple(renamed(each, name) if isinstance(each, CodeType) else each for each in code.co_consts)
    return code.replace(co_filename=name, co_consts=constants)


@contextlib.contextmanager
def nameless_code() -> Iterator[None]:
    """Until it ends, the code of modules that are loaded is named after the module, and not after the path where it lies."""
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
    """Removes what would tell a candidate where modules lie, who runs them, and on which machine."""
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
    """The library's `serve`, the driver's `execute`, and the modules that are only the server's. Leaves no path to import from."""
    sys.path += config["search"]
    for name in config["modules"]:
        importlib.import_module(name)
    before = set(sys.modules)
    with nameless_code():
        execute = load_driver(config["driver"])
        sys.path += config["own"]
        private = import_library(config["library"])
    sys.path.clear()
    sys.path_importer_cache.clear()
    conceal({"__main__", *set(sys.modules) - before})
    return sys.modules["studies.sandbox.serve"].serve, execute, private


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
    gc.collect()
    gc.freeze()
    gc.disable()  # children do (`child.level`): a server's own collections, which they can count, would tell them their place
    serve(channel, held, parent, config, execute, private)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
