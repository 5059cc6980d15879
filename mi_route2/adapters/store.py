"""Adapters on disk: safetensors with the spec in the header, checked on load; the deployed file holds no quarantine tensor."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mi_route2.adapters.attach import Adapters

HEADER = "mi-route2"
Which = Literal["full", "deployed"]
FORMAT = "mi-route2 adapters 2"


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file whole or not at all (a temporary file in the same folder, then a rename).

    The metadata goes into one header entry, as JSON: with several, safetensors orders them at random and the same content
    would give other bytes.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        save_file(
            {name: t.detach().cpu().contiguous() for name, t in tensors.items()},
            partial,
            metadata={HEADER: json.dumps(metadata, sort_keys=True)},
        )
        with partial.open("rb") as written:
            os.fsync(written.fileno())
        partial.replace(path)
    except SafetensorError as error:  # safetensors reports a full disk as its own error
        raise OSError(f"could not write {path}: {error}") from error
    finally:
        partial.unlink(missing_ok=True)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """All tensors and the header's metadata; ``ValueError`` with a sentence where the file is not whole."""
    try:
        with safe_open(path, framework="pt") as handle:
            header = json.loads((handle.metadata() or {}).get(HEADER, "{}"))
            return {name: handle.get_tensor(name) for name in handle.keys()}, header  # noqa: SIM118
    except (SafetensorError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a whole safetensors file ({error}); delete it and write it again") from error


def save_adapters(adapters: Adapters, path: Path, which: Which = "full") -> None:
    """Save the kept adapter, with the quarantine (``full``) or without it (``deployed``)."""
    if which not in ("full", "deployed"):
        raise ValueError(f"which={which!r} is neither 'full' nor 'deployed'")
    metadata = {"format": FORMAT, "which": which, "spec": json.dumps(asdict(adapters.spec)), "base_hash": adapters.base_hash}
    write_tensors(path, adapters.tensors(quarantine=which == "full"), metadata)


def load_adapters(adapters: Adapters, path: Path, *, any_base: bool = False) -> None:
    """Copy a saved file into ``adapters``; a deployed file zeroes nothing but leaves the quarantine as it is.

    ``ValueError`` says what differs: other base weights under the sites (``any_base=True`` allows them, for a base in another
    dtype or trained further), a missing or foreign name, a shape, or a value that is not finite. Nothing is changed unless
    everything fits.
    """
    found, metadata = read_tensors(path)
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{path} is not a file of adapters (format {metadata.get('format')!r}, expected {FORMAT!r})")
    own = adapters.tensors(quarantine=metadata.get("which") != "deployed")
    if missing := sorted(own.keys() - found.keys()):
        raise ValueError(f"{path} lacks {len(missing)} adapter tensors that the model has, first {missing[0]!r}")
    if foreign := sorted(found.keys() - own.keys()):
        raise ValueError(f"{path} holds {len(foreign)} tensors that the model has no place for, first {foreign[0]!r}")
    if not any_base and metadata.get("base_hash") != adapters.base_hash:
        raise ValueError(
            f"{path} was trained on other base weights (hash {metadata.get('base_hash')}, this model's is {adapters.base_hash}); "
            "load that base model, or pass any_base=True if the difference is meant"
        )
    for name, tensor in found.items():
        if tensor.shape != own[name].shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)} in {path}, but {tuple(own[name].shape)} in the model")
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{name} in {path} holds values that are not finite")
    for name, tensor in found.items():
        own[name].copy_(tensor)
