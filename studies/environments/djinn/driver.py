"""Driver of one verifier inside the jail: runs it on an answer and replies with its status. Standard library only.

A payload is ``{"modules": {name: source}, "verifier", "function", "cases": [[input, expected], ...], "order_dependent", "code"}``,
the reply ``{"status": "passed"}`` or another word. As in djinn, verifier and answer share a process: exploits are of this.
"""

import builtins
import math
import sys
import types


def execute(payload):
    """Return the verifier's status. It raises what the verifier raises."""
    for name, value in (("math", math), ("gcd", math.gcd)):  # djinn gives answers these two without an import
        setattr(builtins, name, value)
    for name, source in sorted(payload["modules"].items()):
        _load(name, source)
    verify = _load("verifier", payload["verifier"]).verify
    cases = payload["cases"]
    problem = types.SimpleNamespace(
        function_name=payload["function"],
        test_cases=cases,
        order_dependent=payload["order_dependent"],
        get_test_cases_safe=lambda: cases,
    )
    alone = verify.__code__.co_argcount == 1  # a verifier of one problem has its cases in itself
    status = (verify(payload["code"]) if alone else verify(problem, payload["code"])).status
    return {"status": str(getattr(status, "value", status)).lower()}


def _load(name, source=""):
    """Make a module of a text, and its packages; verifiers and answers can import them."""
    module = sys.modules[name] = types.ModuleType(name)
    package, _, last = name.rpartition(".")
    if package:
        setattr(sys.modules.get(package) or _load(package), last, module)
    exec(compile(source, f"{name}.py", "exec", dont_inherit=True), vars(module))
    return module
