"""Wire format of a request to a vLLM worker: its interventions as plain JSON, tensors in base64, and the salt of its prefix.

    {"key": ..., "number": 0, "prompt": 12, "private": false,
     "patches": [...], "steering": {"base": [...], ...}, "captures": [...], "readings": false}

The text is one entry of ``SamplingParams.extra_args``. Names were looked up before, so a worker needs nothing else.

vLLM keys its cached keys and values by tokens and by ``cache_salt`` alone. A request whose interventions change activations gets a
salt that is the digest of their content, so equal content shares a prefix and different content does not.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mi_route2.engine.request import Capture, Request
from mi_route2.patching.patches import Resolved
from mi_route2.runs.record import TokenSelection
from mi_route2.sites import Site
from mi_route2.steering.specs import Steering, plain_spec, steering_of
from mi_route2.steering.state import SteeringState
from mi_route2.tensor_files import pack, unpack

KEY = "mi_route2"
"""Entry of ``SamplingParams.extra_args`` that holds a request's interventions."""


@dataclass(frozen=True, eq=False)
class Orders:
    """Interventions of one request, as its worker applies them. ``prompt`` is the number of its tokens.

    The steering of a ``private`` request may change while it runs, so it leaves its keys and values to no other request.
    """

    key: str
    number: int
    prompt: int
    private: bool = False
    patches: tuple[Resolved, ...] = ()
    steering: Steering = field(default_factory=Steering)
    captures: tuple[Capture, ...] = ()
    readings: bool = False

    def __bool__(self) -> bool:
        return bool(self.private or self.patches or self.captures or self.steering != Steering())


def write(orders: Orders) -> str:
    """Return the text that ``read`` reads."""
    return json.dumps(
        {
            "key": orders.key,
            "number": orders.number,
            "prompt": orders.prompt,
            "private": orders.private,
            "patches": [
                {
                    "site": str(patch.site),
                    "position": patch.position,
                    "source": pack(patch.source),
                    "alpha": pack(patch.alpha) if isinstance(patch.alpha, Tensor) else patch.alpha,
                }
                for patch in orders.patches
            ],
            "steering": plain_spec(orders.steering, pack),
            "captures": [{"site": str(capture.site), "where": plain_spec(capture.selection, pack)} for capture in orders.captures],
            "readings": orders.readings,
        }
    )


def read(text: str, dtype: torch.dtype, device: torch.device) -> Orders:
    """Return the interventions in a text that ``write`` wrote; ``ValueError`` for any other text."""
    try:
        raw = json.loads(text)
        patches = tuple(_patch(patch, dtype, device) for patch in raw["patches"])
        steering = steering_of(raw["steering"], unpack)
        captures = tuple(Capture(Site.parse(capture["site"]), TokenSelection(**capture["where"])) for capture in raw["captures"])
        numbers, private = (int(raw["number"]), int(raw["prompt"])), bool(raw["private"])
        return Orders(str(raw["key"]), *numbers, private, patches, steering, captures, bool(raw["readings"]))
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ValueError(f"extra_args[{KEY!r}] of a request is not what this version of mi-route2 writes: {error}") from error


def _patch(raw: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> Resolved:
    alpha = unpack(raw["alpha"]).to(device) if isinstance(raw["alpha"], dict) else float(raw["alpha"])
    return Resolved(Site.parse(raw["site"]), int(raw["position"]), unpack(raw["source"]).to(device, dtype), alpha, b"")


def salt(request: Request, patches: Sequence[Resolved], steering: Steering, state: SteeringState) -> str | None:
    """Return the ``cache_salt`` of a request: equal for equal content, ``None`` if it has no interventions.

    Args:
        request: The request.
        patches: Its patches.
        steering: Its steering, without names.
        state: A state without requests, whose ``fingerprint`` says what acts on prompt tokens and on generated ones.
    """
    state.admit(0, steering)
    try:
        prefill, decode = (state.fingerprint(0, decode=phase) for phase in (False, True))
    finally:
        state.release(0)
    if not (prefill or decode or patches):
        return None
    # A token that one request generates may be in the prompt of another: where the phases differ, it is not the same token.
    prompt = len(request.prompt) if prefill != decode else None
    placed = sorted((patch.position, patch.digest.hex()) for patch in patches)
    data = json.dumps([prefill.hex(), decode.hex(), prompt, placed])
    return f"mi-route2-{hashlib.sha256(data.encode()).hexdigest()}"
