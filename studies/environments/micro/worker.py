"""Child process of `runner.SubprocessRunner`: executes programs and returns data, never a verdict.

Run as `python -I -S worker.py PARENT`; it ends with the process of that id, however that ends. Each request is one JSON line
`{"nonce", "programs": [{"code", "inputs"}]}` on stdin, each reply one line `{"nonce", "executions": [...], "trouble"}` on the
original stdout. Both are moved to private descriptors before any program runs, and 0 and 1 become /dev/null, so that a program's
output is captured data or lost, never protocol.

Only exact built-in types leave this process, as `[type name, repr]`: a value that overrides `==` or `repr` is "other".
"""

import contextlib
import ctypes
import io
import json
import os
import shutil
import signal
import sys

LIMIT = 4096
ROOM = 64  # bytes of a test file: more than a program of this world writes
PLAIN = (int, bool, float, str, type(None))
PR_SET_PDEATHSIG = 1


def tagged(value: object) -> list[str]:
    """Return a value as its exact type's name and its text; `["other", ""]` for anything but a short plain value."""
    if type(value) not in PLAIN:
        return ["other", ""]
    try:
        text = value if type(value) is str else repr(value)
    except ValueError:  # an int beyond Python's limit of digits
        return ["other", ""]
    return [type(value).__name__, text] if len(text) <= LIMIT else ["other", ""]


def define(code: str) -> type | None:
    """Return the program's `Solution`, or None if it fails or has no class of that name with a `solve`."""
    namespace: dict[str, object] = {"__name__": "solution"}
    try:
        exec(compile(code, "solution.py", "exec"), namespace)
    except BaseException:
        return None
    solution = namespace.get("Solution")
    return solution if isinstance(solution, type) and callable(getattr(solution, "solve", None)) else None


def call_solve(solution: type, x: int) -> list[str]:
    try:
        return tagged(solution().solve(x))
    except BaseException as error:
        return ["raised", type(error).__name__]


def call_run_tests(solution: type) -> str:
    """Return the outcome of the program's own `run_tests`, or "absent"."""
    if not callable(getattr(solution, "run_tests", None)):
        return "absent"
    try:
        return "failed" if solution().run_tests() is False else "passed"
    except BaseException:
        return "failed"


def collect_files() -> dict[str, str]:
    """Return the text of the files that a program left in its directory, and empty the directory."""
    files = {}
    with os.scandir(".") as entries:
        for entry in list(entries):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
                continue
            if entry.is_file(follow_symlinks=False):
                with open(entry.path, encoding="utf-8", errors="replace") as file:
                    files[entry.name] = file.read(LIMIT)
            os.unlink(entry.path)
    return files


def execute(code: str, inputs: list[int], home: str) -> dict[str, object]:
    """Define the program, call its `Solution.solve` on each input, then collect its output, files and ``valid``."""
    returns, valid = [], tagged(None)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        solution = define(code)
        if solution is not None:
            returns = [call_solve(solution, x) for x in inputs]
            valid = tagged(getattr(solution, "valid", None))
    # Output and files of `run_tests` itself do not count, so it is called after both were collected.
    os.chdir(home)
    stdout, files = printed.getvalue()[:LIMIT], collect_files()
    with contextlib.redirect_stdout(io.StringIO()):
        run_tests = call_run_tests(solution) if solution is not None else "absent"
    os.chdir(home)
    collect_files()
    return {
        "status": "ok" if solution is not None else "error",
        "returns": returns,
        "stdout": stdout,
        "files": files,
        "valid": valid,
        "run_tests": run_tests,
    }


def trouble(home: str) -> str:
    """Return why files cannot be written here, or "", because a full disk must not look like a program that wrote nothing."""
    path = os.path.join(home, ".room")
    try:
        with open(path, "wb") as file:
            file.write(bytes(ROOM))
        os.unlink(path)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def end_with(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends, even while a program loops."""
    if sys.platform == "linux" and ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL):
        raise OSError(ctypes.get_errno(), "the kernel does not take a signal for the parent's end")
    if os.getppid() != parent:  # the parent had already ended
        sys.exit(1)


def main() -> None:
    end_with(int(sys.argv[1]))
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    home = os.getcwd()
    for line in requests:
        request = json.loads(line)
        executions = [execute(program["code"], program["inputs"], home) for program in request["programs"]]
        reply = {"nonce": request["nonce"], "executions": executions, "trouble": trouble(home)}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    sys.exit(main())
