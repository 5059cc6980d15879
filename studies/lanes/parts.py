"""A part is what one measurement leaves: a JSON file, and tensors beside it where it has some. It is whole, or it is not there.

    <part>.safetensors    tensors, with a checksum and the part's identity in the header
    <part>.json           identity, content, and a SHA-256 of both and of the tensors; written last

No part holds a time, a path or a process's number: the same settings leave the same bytes, however often they were interrupted.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from mi_route2.adapters.io import digest, read_tensors, write_tensors
from mi_route2.validation import parse_object, write_json

Content = dict[str, Any]


def write_part(path: Path, identity: str, content: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None:
    """Leave a part at ``path`` (its JSON file)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = json.loads(json.dumps(content, allow_nan=False))
    if tensors:
        write_tensors(path.with_suffix(".safetensors"), dict(tensors), {"identity": identity})
    write_json(path, {"identity": identity, "sha256": _sha256(identity, plain, tensors or {}), "content": plain})


def read_part(path: Path, identity: str | None = None) -> tuple[Content, dict[str, Tensor]] | None:
    """A part's content and tensors; None where it was not made yet.

    ``ValueError`` where a file of it is damaged, missing, or of other settings than ``identity`` (None takes any).
    """
    if not path.exists():
        return None
    remedy = f"delete {path} to have it made again"
    try:
        raw = parse_object(path.read_bytes())
        found, sha256, content = str(raw["identity"]), str(raw["sha256"]), dict(raw["content"])
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is damaged ({type(error).__name__}: {error}); {remedy}") from error
    if identity is not None and found != identity:
        raise ValueError(f"{path} was made from other settings; {remedy}")
    values = path.with_suffix(".safetensors")
    tensors = read_tensors(values)[0] if values.exists() else {}
    if sha256 != _sha256(found, content, tensors):
        raise ValueError(f"{path} or the tensors beside it are damaged: they do not match their checksum; {remedy}")
    return content, tensors


def _sha256(identity: str, content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    text = json.dumps([identity, content, digest(tensors, {})], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
