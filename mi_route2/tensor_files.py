"""Safetensors files that are whole or absent: each carries the SHA-256 of its content, which is checked when it is read.

And tensors as JSON, in base64 of their bytes, little-endian and row by row.
"""

import base64
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from mi_route2.files import parse_json, write_whole

HEADER = "mi-route2"
CHECKSUM = "checksum"


def digest(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """Return the SHA-256 of the metadata and of every tensor's name, type, shape and bytes."""
    hasher = hashlib.sha256(json.dumps(dict(metadata), sort_keys=True).encode())
    for name in sorted(tensors):
        t = tensors[name].detach().cpu().contiguous()
        hasher.update(f"{name} {t.dtype} {tuple(t.shape)} ".encode())
        hasher.update(t.view(-1).view(torch.uint8).numpy().data)  # a view: tensors may be large
    return hasher.hexdigest()


def refuse_infinite(tensors: Mapping[str, Tensor]) -> None:
    """Raise ``ValueError`` naming the first tensor with a value that is not finite."""
    for name, t in tensors.items():
        if not torch.isfinite(t).all():
            raise ValueError(f"{name} holds values that are not finite: nothing was written")


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file with its checksum, atomically.

    The metadata goes into one header entry, as JSON: safetensors orders several entries at random, so the same content would give
    different bytes.
    """
    header = {**metadata, CHECKSUM: digest(tensors, metadata)}
    plain = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    # bytes first: what safetensors leaves behind when a write of its own fails has other names
    write_whole(path, save(plain, metadata={HEADER: json.dumps(header, sort_keys=True)}))


def read_tensors(path: Path, *, unchecked: bool = False) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return all tensors and the header's metadata of a safetensors file.

    Raises:
        ValueError: It is a folder, or the file is incomplete or was changed, or it has no checksum and ``unchecked`` is False.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a folder: give the file in it")
    try:
        with safe_open(path, framework="pt") as handle:
            header = parse_json((handle.metadata() or {}).get(HEADER, "{}"))
            # copies, because safetensors maps the file into memory, and it may change after the check
            tensors = {name: handle.get_tensor(name).clone() for name in handle.keys()}  # noqa: SIM118
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{path} is not a complete safetensors file ({error}); delete it and write it again") from error
    if not isinstance(header, dict) or not all(isinstance(entry, str) for entry in header.values()):
        raise ValueError(f"{path} has a header that is not a JSON object of texts; delete it and write it again")
    checksum = header.pop(CHECKSUM, None)
    if checksum is None and not unchecked:
        raise ValueError(
            f"{path} has no checksum, so changes of it cannot be detected: write it again, or pass unchecked=True to "
            "load_adapters or Directions.load"
        )
    if checksum is not None and checksum != digest(tensors, header):
        raise ValueError(f"{path} is damaged: its content does not match its own checksum; delete it and write it again")
    return tensors, header


def pack(values: Tensor) -> dict[str, Any]:
    """Return a tensor as JSON-able data."""
    flat = values.detach().to("cpu").contiguous().flatten().view(torch.uint8)
    data = base64.b64encode(flat.numpy().tobytes()).decode("ascii")
    return {"dtype": str(values.dtype).removeprefix("torch."), "shape": list(values.shape), "data": data}


def unpack(data: Mapping[str, Any]) -> Tensor:
    """Return the tensor of ``pack``; ``ValueError`` if the data do not fit together."""
    dtype = getattr(torch, str(data["dtype"]), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{data['dtype']!r} is not a dtype of torch")
    values, shape = bytearray(base64.b64decode(data["data"], validate=True)), torch.Size(data["shape"])
    if len(values) != shape.numel() * dtype.itemsize:
        raise ValueError(f"{len(values)} bytes are no {dtype} of shape {list(shape)}")
    if not values:
        return torch.zeros(shape, dtype=dtype)
    return torch.frombuffer(values, dtype=dtype).reshape(shape)
