"""One file that holds all of a run's state, replaced whole; and logs that are cut back to it.

A run's state after step t is: adapter tensors, the optimiser's moments, the route's directions, t, and how long each log was.
Random numbers need no state (see ``randomness``). A checkpoint is written beside the old one and renamed over it; logs are
flushed first, and on resume they are cut to the lengths that the checkpoint names. What a crash wrote after it is done again,
bit for bit.
"""

import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from mi_route2.adapters import Adapters
from mi_route2.adapters.store import read_tensors, write_tensors
from mi_route2.routing import Directions, Route
from mi_route2.routing.directions import Provenance
from mi_route2.routing.optimiser import RoutedAdamW

FORMAT = "mi-route2 checkpoint 2"


def save_checkpoint(
    path: Path, adapters: Adapters, optimiser: RoutedAdamW, route: Route, *, step: int, identity: str, logs: dict[str, int]
) -> None:
    """Write the state after ``step`` steps. ``identity`` names the run's settings; ``logs`` are byte lengths by file name."""
    tensors: dict[str, Tensor] = {f"adapter.{name}": t for name, t in adapters.tensors().items()}
    for name, p in _named(adapters).items():
        for key, value in optimiser.state.get(p, {}).items():
            tensors[f"optimiser.{key}.{name}"] = value
    meta = {"format": FORMAT, "step": str(step), "identity": identity, "logs": json.dumps(logs)}
    if route.directions is not None:
        tensors |= {f"direction.{site}": v for site, v in route.directions.vectors.items()}
        meta["provenance"] = json.dumps(asdict(route.directions.provenance))
    write_tensors(path, tensors, meta | {"sha256": _digest(tensors, meta)})


def load_checkpoint(
    path: Path, adapters: Adapters, optimiser: RoutedAdamW, route: Route, *, identity: str
) -> tuple[int, dict[str, int]]:
    """Restore everything; the number of finished steps and the logs' lengths. ``ValueError`` for a foreign or broken file."""
    tensors, meta = read_tensors(path)
    if meta.get("format") != FORMAT:
        raise ValueError(
            f"{path} is not a checkpoint of this study (format {meta.get('format')!r}, expected {FORMAT!r}); "
            "delete that arm's folder to start anew"
        )
    if meta.pop("sha256", None) != _digest(tensors, meta):
        raise ValueError(f"{path} is damaged: it does not match its own checksum; delete that arm's folder to start anew")
    if meta.get("identity") != identity:
        raise ValueError(
            f"{path} was written under other settings; choose another --out, or delete that arm's folder to start anew"
        )
    own = adapters.tensors()
    found = {name.removeprefix("adapter."): t for name, t in tensors.items() if name.startswith("adapter.")}
    if own.keys() != found.keys():
        raise ValueError(f"{path} does not fit the model's adapters: {sorted(own.keys() ^ found.keys())[:3]}")
    for name, t in own.items():
        t.copy_(found[name])
    for name, p in _named(adapters).items():
        keys = [k for k in ("step", "exp_avg", "exp_avg_sq") if f"optimiser.{k}.{name}" in tensors]
        if keys:
            optimiser.state[p] = {k: tensors[f"optimiser.{k}.{name}"].clone() for k in keys}
    if "provenance" in meta:
        # In the model's order and freshly allocated: sums over sites, and BLAS on aligned memory, then round as they did before.
        vectors = {site: tensors[f"direction.{site}"].clone() for site in adapters.sites if f"direction.{site}" in tensors}
        route.directions = Directions(vectors, Provenance(**json.loads(meta["provenance"])))
    return int(meta["step"]), {name: int(n) for name, n in json.loads(meta["logs"]).items()}


def _named(adapters: Adapters) -> dict[str, torch.nn.Parameter]:
    kept = {f"kept.{name}": p for name, p in adapters.kept_parameters().items()}
    return kept | {f"quarantine.{name}": p for name, p in adapters.quarantine_parameters().items()}


def _digest(tensors: dict[str, Tensor], meta: dict[str, str]) -> str:
    """SHA-256 of every tensor's name, type, shape and bytes, and of the rest of the header."""
    digest = hashlib.sha256(json.dumps(meta, sort_keys=True).encode())
    for name in sorted(tensors):
        t = tensors[name].detach().cpu()
        digest.update(f"{name} {t.dtype} {tuple(t.shape)};".encode())
        digest.update(t.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def cut(path: Path, length: int) -> None:
    """Cut a log back to ``length`` bytes; ``ValueError`` where it is shorter, because then it is not the checkpoint's log."""
    size = path.stat().st_size if path.exists() else 0
    if size < length:
        raise ValueError(
            f"{path} has {size} bytes, but the checkpoint was written after {length}: delete that arm's folder to start anew"
        )
    if path.exists():
        with path.open("r+b") as log:
            log.truncate(length)
            os.fsync(log.fileno())
