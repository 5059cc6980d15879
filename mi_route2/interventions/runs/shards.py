"""One shard: some rows of one run in a safetensors file, one tensor a site. Written whole or not at all, checked when read.

What is checked is not in the file but in the index: the file's size, and of each tensor its type, its shape and a SHA-256 of the
run, the site, the positions and every byte. So a damaged index is noticed as well, and no row is given out for another's.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Int, Shaped
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from mi_route2.interventions.runs.info import Kind
from mi_route2.interventions.runs.rows import DTYPES
from mi_route2.sites import Site

DTYPE_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


@dataclass(frozen=True)
class Stored:
    """The rows of one site in the shard of number ``shard``, whose file has ``size`` bytes."""

    run: str
    site: Site
    shard: int
    size: int
    positions: Int[Tensor, " n"]
    kind: Kind
    sha256: str


def seal(run: str, site: Site, positions: Int[Tensor, " n"], rows: Shaped[Tensor, " n *row"]) -> str:
    """SHA-256 of what a tensor of a shard is and of whose it is."""
    header = json.dumps([run, str(site), str(rows.dtype), list(rows.shape)])
    found = hashlib.sha256(header.encode())
    for tensor in (positions, rows):
        found.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def write_shard(path: Path, shard: int, run: str, sites: Mapping[Site, tuple[Tensor, Tensor]]) -> list[Stored]:
    """Write positions and rows by site; ``OSError`` names the file where there is no room for it, and leaves nothing there.

    The bytes are made in memory and written here: what safetensors leaves behind when a write of its own fails has other names.
    """
    data = save({str(site): rows for site, (_, rows) in sites.items()}, metadata={"run": run})
    partial = path.with_name(f".{path.name}.tmp")
    try:
        with partial.open("wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        partial.replace(path)
    except OSError as error:
        raise OSError(
            f"could not write {path} ({error.strerror}): make room there, or give the store another folder; "
            f"nothing of run {run!r} is kept"
        ) from error
    finally:
        partial.unlink(missing_ok=True)
    return [
        Stored(
            run,
            site,
            shard,
            len(data),
            positions,
            Kind(len(rows), rows.dtype, tuple(rows.shape[1:])),
            seal(run, site, positions, rows),
        )
        for site, (positions, rows) in sites.items()
    ]


def read_shard(path: Path, stored: Stored) -> Tensor:
    """The rows ``[n, ...]`` of one site. ``FileNotFoundError`` where the file is gone, ``ValueError`` where it is damaged."""
    found = path.stat().st_size
    if found != stored.size:
        raise damaged(path, stored, f"it has {found} bytes, not {stored.size}")
    try:
        with safe_open(path, framework="pt") as opened:
            rows = opened.get_tensor(str(stored.site)).clone()  # mapped, it would change with the file after the check
    except SafetensorError as error:
        raise damaged(path, stored, str(error)) from error
    kind = Kind(len(stored.positions), rows.dtype, tuple(rows.shape[1:]))
    if rows.ndim == 0 or len(rows) != kind.rows or kind != stored.kind:
        raise damaged(path, stored, f"{stored.site} is {list(rows.shape)} of {rows.dtype}, which the index does not say")
    if seal(stored.run, stored.site, stored.positions, rows) != stored.sha256:
        raise damaged(path, stored, f"the checksum of {stored.site} does not match")
    return rows


def damaged(path: Path, stored: Stored, why: str) -> ValueError:
    """One sentence: which file, why, and what to do."""
    return ValueError(f"{path} is damaged ({why}): drop run {stored.run!r} and capture it again")
