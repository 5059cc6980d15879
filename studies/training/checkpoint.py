"""Checkpoints: all of a run's state in one file, replaced atomically, with the previous file kept, and logs that are cut to match.

The state after step t is: adapter tensors, the optimizer's moments, the route's directions or canary, t, and the length of each
log. Random numbers need no state (see ``studies.common.seeds``). A new checkpoint is written beside the newest one, which then
replaces the previous one, so a complete checkpoint exists at any moment. Logs are flushed first, and on resume they are cut to the
lengths in the checkpoint: what a crash wrote after it is computed again, bit for bit. If the newest checkpoint is damaged, belongs
to another run, or does not match its logs, it is refused with the reason; the previous one then leads to the same bytes in more
steps.
"""

import hashlib
import json
import os
import warnings
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from mi_route2.adapters import Adapters
from mi_route2.routing import Directions, Route
from mi_route2.routing.directions import Provenance
from mi_route2.tensor_files import read_tensors, refuse_infinite, write_tensors
from mi_route2.validation import Natural, parse_object, read_record, validated

FORMAT = "mi-route2 checkpoint 4"
CHECKPOINT, PREVIOUS = "checkpoint.safetensors", "checkpoint.previous.safetensors"
START_ANEW = "choose another --out, or delete that arm's folder to start anew"
MOMENTS = ("exp_avg", "exp_avg_sq")


@validated
class Mark:
    """Point in a log: its length in bytes, and the SHA-256 of these bytes."""

    length: Natural
    sha256: str


@validated
class _Header:
    """Metadata of a checkpoint; ``logs`` and ``provenance`` are JSON."""

    format: str
    step: Annotated[str, Field(pattern=r"^\d+$", description="a whole number in digits")]
    identity: str
    base_hash: str
    logs: str
    provenance: str | None = None

    @property
    def marks(self) -> dict[str, Mark]:
        return {name: Mark(*mark) for name, mark in parse_object(self.logs).items()}


def save_checkpoint(
    folder: Path, adapters: Adapters, optimizer: torch.optim.AdamW, route: Route, *, step: int, identity: str, logs: dict[str, Mark]
) -> None:
    """Write the state after ``step`` steps as the newest checkpoint; the former newest one becomes the previous one.

    Args:
        folder: Folder of the run.
        adapters: Adapters to save.
        optimizer: Optimizer whose moments are saved.
        route: Route whose directions are saved.
        step: Number of finished steps.
        identity: Hash of the run's settings.
        logs: End of each log, by file name.

    Raises:
        ValueError: If an adapter holds a value that is not finite; the existing checkpoint is unchanged then.
        OSError: In one sentence, if the disk is full; the existing checkpoint is unchanged then.
    """
    refuse_infinite(adapters.tensors())  # it would take the place of the last one from which the run can go on
    tensors: dict[str, Tensor] = {f"adapter.{name}": t for name, t in adapters.tensors().items()}
    for name, p in _named(adapters).items():
        for key, value in optimizer.state.get(p, {}).items():
            tensors[f"optimiser.{key}.{name}"] = value
    meta = {"format": FORMAT, "step": str(step), "identity": identity, "base_hash": adapters.base_hash}
    meta["logs"] = json.dumps({name: (mark.length, mark.sha256) for name, mark in logs.items()})
    if route.directions is not None:
        tensors |= {f"direction.{site}": v for site, v in route.directions.vectors.items()}
        meta["provenance"] = json.dumps(asdict(route.directions.provenance))
    newest, fresh = folder / CHECKPOINT, folder / f".{CHECKPOINT}.fresh.tmp"
    try:
        write_tensors(fresh, tensors, meta)
        if newest.exists():
            newest.replace(folder / PREVIOUS)
        fresh.replace(newest)
    except OSError as error:
        reason = error.strerror or str(error).rpartition(": ")[2]  # without the temporary name
        raise OSError(f"could not write {newest}: {reason}") from error
    finally:
        fresh.unlink(missing_ok=True)


@dataclass(frozen=True)
class Checkpoint:
    """Content of a checkpoint file, checked: tensors by name, finished steps, the logs' ends, provenance of the directions."""

    tensors: dict[str, Tensor]
    step: int
    logs: dict[str, Mark]
    provenance: Provenance | None

    def restore(self, adapters: Adapters, optimizer: torch.optim.AdamW, route: Route) -> None:
        """Restore the whole state, each tensor on the device of its owner."""
        for name, t in adapters.tensors().items():
            t.copy_(self.tensors[f"adapter.{name}"])
        for name, p in _named(adapters).items():
            if f"optimiser.step.{name}" in self.tensors:
                moments = {key: self.tensors[f"optimiser.{key}.{name}"].to(p.device, copy=True) for key in MOMENTS}
                optimizer.state[p] = {"step": self.tensors[f"optimiser.step.{name}"].clone(), **moments}
        if self.provenance is not None:
            # In the model's order and newly allocated, so that sums over sites, and BLAS on aligned memory, round as before.
            stored = {site: self.tensors.get(f"direction.{site}") for site in adapters.sites}
            vectors = {s: v.to(adapters.scored(s).device, copy=True) for s, v in stored.items() if v is not None}
            route.directions = Directions(vectors, self.provenance)


def read_checkpoint(path: Path, adapters: Adapters, *, identity: str) -> Checkpoint:
    """Read a checkpoint of this run.

    Raises:
        ValueError: If the file is damaged or belongs to another run; the message has the reason.
    """
    try:
        tensors, meta = read_tensors(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror or error})") from error
    except ValueError as error:
        raise ValueError(str(error).removesuffix("; delete it and write it again")) from error
    if meta.get("format") != FORMAT:
        raise ValueError(f"{path} is not a checkpoint of this study (format {meta.get('format')!r}, expected {FORMAT!r})")
    try:
        header = read_record(_Header, meta)
        marks, provenance = header.marks, None if header.provenance is None else read_record(Provenance, header.provenance)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: its header is not of this version ({error})") from error
    if header.identity != identity:
        raise ValueError(f"{path} was written under other settings")
    if header.base_hash != adapters.base_hash:
        raise ValueError(f"{path} was written on other base weights (hash {header.base_hash}, not {adapters.base_hash})")
    expected = {f"adapter.{name}": t.shape for name, t in adapters.tensors().items()}
    stored = {name: t.shape for name, t in tensors.items() if name.startswith("adapter.")}
    if differing := sorted(name for name in expected.keys() | stored.keys() if expected.get(name) != stored.get(name)):
        raise ValueError(f"{path} does not fit the model's adapters, first in {differing[0]}")
    return Checkpoint(tensors, int(header.step), marks, provenance)


def resume(
    folder: Path, adapters: Adapters, optimizer: torch.optim.AdamW, route: Route, *, identity: str, logs: Collection[str]
) -> int:
    """Restore the newest usable checkpoint in ``folder`` and cut the logs to it; return the number of finished steps.

    Without a checkpoint the result is 0 and ``logs`` are emptied. If the newest one is refused and the previous one is used, a
    warning says why.

    Raises:
        ValueError: If there are checkpoints and none can be used; nothing is changed then.
    """
    refused: list[str] = []
    there = [folder / name for name in (CHECKPOINT, PREVIOUS) if (folder / name).exists()]
    for path in there:
        try:
            checkpoint = read_checkpoint(path, adapters, identity=identity)
            if checkpoint.logs.keys() != set(logs):  # a path such as ../file would be cut
                raise ValueError(f"{path} is of the logs {', '.join(checkpoint.logs)}, not of {', '.join(logs)}")
            for name, mark in checkpoint.logs.items():
                refuse_changed(folder / name, mark, path.name)
        except ValueError as error:
            refused.append(str(error))
            continue
        if refused:
            warnings.warn(f"{refused[0]}; going on from {path.name}, after {checkpoint.step} steps", stacklevel=2)
            path.replace(folder / CHECKPOINT)  # otherwise the next rotation would make the refused one the previous one
        checkpoint.restore(adapters, optimizer, route)
        for name, mark in checkpoint.logs.items():
            cut(folder / name, mark.length)
        return checkpoint.step
    if refused:
        raise ValueError(f"{'; '.join(refused)}; {START_ANEW}")
    for name in logs:
        cut(folder / name, 0)
    return 0


def refuse_changed(log: Path, mark: Mark, since: str) -> None:
    """Check that a log is not shorter than at ``mark``, and that its bytes up to there are those when ``since`` was written.

    Raises:
        ValueError: If it is shorter, or has changed.
    """
    size = log.stat().st_size if log.exists() else 0
    if size < mark.length:
        raise ValueError(f"{log} has {size} bytes, but {since} was written after {mark.length}")
    if hash_of(log, mark.length).hexdigest() != mark.sha256:
        raise ValueError(f"{log} was changed: its first {mark.length} bytes are not those after which {since} was written")


def hash_of(log: Path, length: int) -> "hashlib._Hash":
    """Return the SHA-256 of a log's first ``length`` bytes (none if there is no log), to be updated with what follows."""
    if not length:
        return hashlib.sha256()
    with log.open("rb") as file:
        return hashlib.sha256(file.read(length))


def cut(log: Path, length: int) -> None:
    """Cut a log back to ``length`` bytes; ``OSError`` in one sentence if that cannot be done."""
    if log.exists():
        try:
            with log.open("r+b") as file:
                file.truncate(length)
                os.fsync(file.fileno())
        except OSError as error:
            raise OSError(f"could not cut {log} back to its checkpoint: {error.strerror}") from error


def _named(adapters: Adapters) -> dict[str, torch.nn.Parameter]:
    kept = {f"kept.{name}": p for name, p in adapters.kept_parameters().items()}
    return kept | {f"quarantine.{name}": p for name, p in adapters.quarantine_parameters().items()}
