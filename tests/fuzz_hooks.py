"""Hooks of `tests.fuzz` for schemathesis: half of the requests name things that exist, so that they can be accepted.

Drawn text is hardly ever a model's name, a captured run, a stream that runs now or two prompts that align. So half of the cases,
chosen by a hash of what was drawn, get the server's own example there; every other field stays as it was drawn. Loaded by
schemathesis, in an environment without this project.
"""

import json
import os
import zlib
from typing import Any

import requests
import schemathesis  # pyright: ignore[reportMissingImports]

URL, KEY = os.environ["FUZZ_URL"], os.environ["FUZZ_KEY"]
RUN = "captured"
SITES = ("resid_pre", "z", "blocks.0.resid_post", "blocks.1.mlp_out", ["resid_pre", "mlp_out"])
ASKED = requests.Session()
ASKED.headers["Authorization"] = f"Bearer {KEY}"
STUDY: dict[str, Any] = ASKED.get(f"{URL}/v1/study", timeout=60).json()
OPEN: list[requests.Response] = []


def drawn(value: object, n: int) -> int:
    """Return a number below ``n`` that the value decides, so that a case that fails can be sent again."""
    return zlib.crc32(repr(value).encode("utf-8", "backslashreplace")) % n


def stream() -> int:
    """Start a stream that a monitor reads and a vector steers, in place of the last one, and return its number."""
    while OPEN:
        OPEN.pop().close()
    monitor, prompt = STUDY["monitors_example"], STUDY["prompts"][0]
    body = {"prompt": prompt, "max_tokens": 3072, "ignore_eos": True, "stream": True}
    body |= {"monitors": [monitor], "steering_vectors": STUDY["steering_example"]}
    OPEN.append(ASKED.post(f"{URL}/v1/completions", json=body, stream=True, timeout=60))
    OPEN[0].raise_for_status()
    told = next(line for line in OPEN[0].iter_lines() if line.startswith(b"data: {"))
    return json.loads(told.removeprefix(b"data: "))["mi_route2"]["request"]


def capture() -> None:
    """Capture the run that is asked for, if another request has dropped it."""
    body = {"prompt": STUDY["prompts"][0], "max_tokens": 1, "capture": ["blocks.0.resid_post"], "run": RUN}
    if RUN not in ASKED.get(f"{URL}/v1/runs", timeout=60).json()["runs"]:
        ASKED.post(f"{URL}/v1/completions", json=body, timeout=60).raise_for_status()


def patched(body: dict[str, Any], at: int) -> dict[str, Any]:
    """Return the body of a sweep or of a cell about the server's example, with prompts and places that fit it."""
    example = STUDY["examples"][0]
    fits: dict[str, Any] = {"clean": example["clean"], "corrupt": example["corrupt"]}
    if "site" in body:
        fits |= {"site": "blocks.0.resid_post", "position": at, "adapters": None}
    if "answer" in body or "sites" in body or "metric" in body:
        fits |= {
            "answer": example["answer"],
            "foil": example["foil"],
            "sites": SITES[at % len(SITES)],
            "positions": [at],
            "at": None,
        }
    return body | fits


@schemathesis.hook
def before_call(ctx: Any, case: Any, kwargs: dict[str, Any]) -> None:
    """Give half of the cases what they need."""
    path, places, body = case.operation.path, case.path_parameters or {}, case.body
    if drawn((path, places, body), 2):
        return
    if "{name}" in path:
        case.path_parameters = {"name": STUDY["model"]}
    elif "{run}" in path:
        capture()
        case.path_parameters = {"run": RUN}
    elif "{number}" in path:
        case.path_parameters = {"number": stream()}
        if isinstance(body, dict) and "monitor" in body:
            case.body = body | {"monitor": STUDY["monitors_example"]["name"]}
    elif isinstance(body, dict):
        if path in ("/v1/patch_sweep", "/v1/patch_cell", "/v1/align"):
            case.body = patched(body, drawn(body, 8))
        elif "prompt" in body:
            case.body = body | {"prompt": STUDY["prompts"][drawn(body, len(STUDY["prompts"]))]}
        elif "text" in body:
            case.body = body | {"text": STUDY["prompts"][0]}
