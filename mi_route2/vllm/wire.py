"""Wire format of a request to a vLLM worker: its interventions as plain JSON, tensors in base64, and the salt of its prefix.

    {"key": ..., "number": 0, "prompt": 12, "private": false,
     "patches": [...], "steering": {"base": [...], ...}, "captures": [...], "readings": false}

The text is one entry of ``SamplingParams.extra_args``. Names were looked up before, so a worker needs nothing else.

vLLM keys its cached keys and values by tokens and by ``cache_salt`` alone. A request whose interventions change activations gets a
salt that is the digest of their content, so equal content shares a prefix and different content does not.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from mi_route2.engine.request import Capture, Request
from mi_route2.patching.patches import Resolved
from mi_route2.runs.record import TokenSelection
from mi_route2.sites import Site
from mi_route2.steering.specs import Clamp, Monitor, Steer, Steering, Vector
from mi_route2.steering.state import SteeringState
from mi_route2.tensor_files import pack, unpack

KEY = "mi_route2"
"""Entry of ``SamplingParams.extra_args`` that holds a request's interventions."""
_ENTRIES: Mapping[str, type] = {"base": Steer, "prefill": Steer, "decode": Steer, "clamps": Clamp, "monitors": Monitor}


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
            "steering": {field: [_plain(entry) for entry in getattr(orders.steering, field)] for field in _ENTRIES},
            "captures": [{"site": str(capture.site), "where": _plain(capture.selection)} for capture in orders.captures],
            "readings": orders.readings,
        }
    )


def read(text: str, dtype: torch.dtype, device: torch.device) -> Orders:
    """Return the interventions in a text that ``write`` wrote; ``ValueError`` for any other text."""
    try:
        raw = json.loads(text)
        patches = tuple(_patch(patch, dtype, device) for patch in raw["patches"])
        steering = Steering(
            **{field: tuple(_entry(made, entry) for entry in raw["steering"][field]) for field, made in _ENTRIES.items()}
        )
        captures = tuple(Capture(Site.parse(capture["site"]), TokenSelection(**capture["where"])) for capture in raw["captures"])
        numbers, private = (int(raw["number"]), int(raw["prompt"])), bool(raw["private"])
        return Orders(str(raw["key"]), *numbers, private, patches, steering, captures, bool(raw["readings"]))
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ValueError(f"extra_args[{KEY!r}] of a request is not what this version of mi-route2 writes: {error}") from error


def _patch(raw: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> Resolved:
    alpha = unpack(raw["alpha"]).to(device) if isinstance(raw["alpha"], dict) else float(raw["alpha"])
    return Resolved(Site.parse(raw["site"]), int(raw["position"]), unpack(raw["source"]).to(device, dtype), alpha, b"")


def _plain(value: Any) -> Any:
    """Return a spec, or a part of one, as JSON-able data."""
    if isinstance(value, Site):
        return str(value)
    if isinstance(value, Vector):
        return pack(value.data)
    if isinstance(value, Steer | Clamp | Monitor | TokenSelection):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value


def _entry(record: type, raw: Mapping[str, Any]) -> Any:
    fields = dict(raw, site=Site.parse(raw["site"]))
    for name in ("vector", "probe"):
        if name in fields:
            fields[name] = unpack(fields[name])
    for name in ("gates", "quarantined"):
        if fields.get(name) is not None:
            fields[name] = tuple(Site.parse(site) for site in fields[name])
    if "adds" in fields:
        fields["adds"] = tuple(_entry(Steer, add) for add in fields["adds"])
    return record(**fields)


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
