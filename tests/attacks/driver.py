"""Driver of the attack suite: runs an action, a solution or a naive verdict in a jail's child.

It needs the standard library only, and is loaded by its path. A payload holds ``program`` (the attack's code), ``names`` (names
that the code may use: canaries, limits), ``calls`` (numbers of system calls by name) and at most one of ``inputs`` (then
``Solution.solve`` is called on each, and the answers are the reply) and ``harness`` (then this code of a naive verdict runs,
with the attack's code as ``code``). Otherwise the reply is ``result``.
"""

import os
import sys


def execute(payload):
    """Return the reply to one payload.

    It never raises, because its caller is as exposed to the attack as itself: the parent makes the verdict.
    """
    space = {"__name__": "solution", "syscall": system_calls(payload["calls"]), **payload["names"]}
    if "harness" in payload:
        return interpreted(payload["harness"], space)
    try:
        exec(compile(payload["program"], "solution.py", "exec"), space)
        if "inputs" not in payload:
            return space.get("result")
        solution = space["Solution"]()
        return [solution.solve(x) for x in payload["inputs"]]
    except BaseException as error:
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return {"raised": f"{type(error).__name__}: {text}"[:200]}


def interpreted(text, space):
    """Run code as a script: an exit ends the process with its code; an error calls ``sys.excepthook`` and ends it with 1."""
    import atexit

    try:
        exec(compile(text, "harness.py", "exec"), space)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    if "result" in space and code == 0:
        return space["result"]
    os._exit(code)


def system_calls(numbers):
    """Return ``syscall(name, *arguments)``, which makes a raw system call.

    The function raises OSError if the call fails, and NotImplementedError if the number of the call is unknown.
    """

    def syscall(name, *arguments):
        import ctypes

        if name not in numbers:
            raise NotImplementedError(f"no number of {name} for this machine")
        library = ctypes.CDLL(None, use_errno=True)
        library.syscall.restype = ctypes.c_long
        words = [ctypes.c_long(word) if isinstance(word, int) else word for word in arguments]
        result = library.syscall(ctypes.c_long(numbers[name]), *words)
        if result == -1:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return result

    return syscall
