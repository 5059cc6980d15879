"""Driver of one LeetCode program inside the jail: runs it and returns its behavior as data, never a verdict. Standard library only.

The jail's server loads this file by its path and calls `execute` in a confined child. A payload is one of two jobs:

    {"setup", "code", "function", "calls": [text, ...], "attributes": [name, ...], "room": bytes}     call it
    {"setup", "code", "function", "run_tests": true}                                                  run its own tests

``room`` limits the JSON of all values together; values beyond it become opaque. The two jobs run in separate processes, so that
prints and files of ``run_tests`` do not count as the program's own. The reply:

    status      ok; syntax: it does not compile; error: its definition raised; absent: no ``Solution`` with that method
    raised      the exception's name if status is error
    exit        the status with which the program asked to end, or None; nothing is called after that
    returns     one per call, in order: ["value", encoded, overrides] or ["raised", exception's name]
    attributes  name -> encoded, of the instance that was called last, if it has them
    run_tests   absent, passed or failed

Expected values are never sent here, because the program shares this process: even if it forges the reply, it does not know the
answers.
"""

import contextlib
import gc
import importlib.util
import json
import sys
import types
from pathlib import Path


def _load_beside(name):
    """Import a module of this folder, which is not on the path here."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module


values = _load_beside("values")


def execute(payload):
    """Return the reply to one payload. It never raises."""
    reply = {"status": "ok", "raised": "", "exit": None, "returns": [], "attributes": {}, "run_tests": "absent"}
    space = _space()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue] - what was printed before the process ends itself counts
    try:
        exec(compile(payload["setup"], "setup.py", "exec", dont_inherit=True), space)
        _run(payload, space, reply)
    except SystemExit as end:
        reply["exit"] = _status(end)
    except BaseException as error:
        reply.update(status="error", raised=_name(error))
    space.clear()
    gc.collect()  # flushes files that the program left open, as at the end of its own process
    for stream in (sys.stdout, sys.__stdout__):
        with contextlib.suppress(BaseException):
            stream.flush()  # pyright: ignore[reportOptionalMemberAccess]
    return reply


def _run(payload, space, reply):
    try:
        code = compile(payload["code"], "solution.py", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):
        reply["status"] = "syntax"
        return
    exec(code, space)
    solution = _solution(space, payload["function"])
    if solution is None:
        reply["status"] = "absent"
    elif payload.get("run_tests"):
        reply["run_tests"] = _run_tests(solution, space)
    else:
        _call_all(payload, solution, space, reply)


def _space():
    """Return the namespace of a new module, in which classes with string annotations can look up names."""
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    return vars(module)


def _solution(space, function):
    """Return the program's `Solution`, or None if it has no such method."""
    solution = space.get("Solution")
    return solution if isinstance(solution, type) and callable(getattr(solution, function, None)) else None


def _call_all(payload, solution, space, reply):
    """Fill in returns and attributes; if the program ends itself, also by ``SystemExit``, those so far are kept."""
    nodes, left = _nodes(space), ReplyBudget(payload["room"])
    instance = None
    for text in payload["calls"]:
        try:
            args, kwargs = (values.decode(part, nodes) for part in _arguments(text))
            instance = solution()
            value = getattr(instance, payload["function"])(*args, **kwargs)
            reply["returns"].append(["value", left.encode(value, nodes), values.overrides(value)])
        except SystemExit:
            raise
        except BaseException as error:
            reply["returns"].append(["raised", _name(error)])
    for name in payload["attributes"]:
        with contextlib.suppress(BaseException):
            reply["attributes"][name] = left.encode(getattr(solution() if instance is None else instance, name), nodes)


class ReplyBudget:
    """Remaining bytes for a program's values."""

    def __init__(self, left):
        self.left = left

    def encode(self, value, nodes):
        encoded = values.encode(value, nodes)
        self.left -= len(json.dumps(encoded))
        return encoded if self.left >= 0 else {"opaque": "too large"}


def _arguments(text):
    """Return positional and named arguments of a call's text, the named ones as an encoded dict's content."""
    args, kwargs = json.loads(text)
    return args, {"dict": [[name, value] for name, value in kwargs.items()]}


def _run_tests(solution, space):
    """Return the outcome of the program's own ``run_tests``, a method or a function: absent, passed or failed."""
    try:
        test = getattr(solution(), "run_tests", space.get("run_tests"))
        if not callable(test):
            return "absent"
        return "failed" if test() is False else "passed"
    except BaseException:
        return "failed"


def _nodes(space):
    """Return the classes of list and tree nodes in the program's namespace (its own, if it defines them), and their builders."""

    def linked(chain):
        first = None
        for value in reversed(chain.values):
            node = space["ListNode"](value)
            node.next, first = first, node
        return first

    def tree(levels):
        waiting = iter(levels.levels[1:])
        root = space["TreeNode"](levels.levels[0][0])
        queue = [root]
        for node in queue:
            for side in ("left", "right"):
                child = next(waiting, None)
                if child is not None:
                    setattr(node, side, space["TreeNode"](child[0]))
                    queue.append(getattr(node, side))
        return root

    return values.Nodes((space.get("ListNode"),), (space.get("TreeNode"),), linked, tree)  # compared by identity alone


def _name(error):
    """Return an exception's name as short ASCII text; a program's own exception may have any name."""
    return type(error).__name__[:80].encode("ascii", "replace").decode()


def _status(end):
    """Return the exit status that a SystemExit requests."""
    if end.code is None:
        return 0
    return end.code & 0xFF if isinstance(end.code, int) else 1
