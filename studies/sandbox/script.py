"""Driver for scripts: ``execute({"code": text})`` runs a text as a main program and replies with its ``result``."""

from typing import Any


def execute(payload: dict[str, Any]) -> Any:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(payload["code"], "<script>", "exec", dont_inherit=True), namespace)
    return namespace.get("result")
