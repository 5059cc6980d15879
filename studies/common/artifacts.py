"""Artifacts of a study: JSON with tensors beside it, written atomically, checked on reading, and refused if from another run."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from mi_route2.tensor_files import digest, read_tensors, write_tensors
from mi_route2.validation import parse_object, write_json

Artifact = tuple[dict[str, Any], dict[str, Tensor]]
"""Content and tensors of an artifact."""


def write_part(path: Path, identity: str, data: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None:
    """Write an artifact: its tensors, then the JSON file ``path`` with the checksum of both. If the JSON exists, both are complete.

    Args:
        path: The JSON file; tensors are written beside it, with the suffix ``.safetensors``.
        identity: A hash of everything except the code that the artifact depends on.
        data: Plain data.
        tensors: Tensors by name, which may hold NaN (tables of rows of unequal length do); no file is written if there are none.

    Raises:
        ValueError: If a number of ``data`` is not finite.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        plain = json.loads(json.dumps(data, allow_nan=False))
    except ValueError as error:
        raise ValueError(f"{path} is not written: a number in it is NaN or infinite; change the settings behind it") from error
    contiguous = {name: tensor.contiguous() for name, tensor in (tensors or {}).items()}
    values = path.with_suffix(".safetensors")
    path.unlink(missing_ok=True)  # of an earlier part, which the tensors would not fit
    if contiguous:
        write_tensors(values, contiguous, {"identity": identity})
    else:
        values.unlink(missing_ok=True)  # of an earlier part under this name
    write_json(path, {"identity": identity, "sha256": _sha256(identity, plain, contiguous), "content": plain})


def read_part(path: Path, identity: str | None = None) -> Artifact | None:
    """Return an artifact's content and tensors; ``None`` if it was not made yet.

    Raises:
        ValueError: A file of it is damaged or missing, or its identity is not ``identity`` (``None`` accepts any).
    """
    if not path.exists():
        return None
    remedy = f"delete {path} to have it made again"
    try:
        raw = parse_object(path.read_bytes())
        stored, sha256, data = str(raw["identity"]), str(raw["sha256"]), dict(raw["content"])
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is damaged ({type(error).__name__}: {error}); {remedy}") from error
    if identity is not None and stored != identity:
        raise ValueError(f"{path} was made from other settings or another run; {remedy}")
    values = path.with_suffix(".safetensors")
    tensors, header = read_tensors(values) if values.exists() else ({}, {"identity": stored})
    if sha256 != _sha256(stored, data, tensors) or header.get("identity") != stored:
        raise ValueError(f"{path} or the tensors beside it are damaged: they do not match their checksum; {remedy}")
    return data, tensors


def _sha256(identity: str, data: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    text = json.dumps([identity, data, digest(tensors, {})], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
