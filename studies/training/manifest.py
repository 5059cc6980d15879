"""Manifest of a finished run folder: what its result depends on, where it was made, and the checksums of its files.

A report reads manifests and no jobs, because a folder may have been made by an earlier version or on another machine.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from mi_route2.validation import Natural, read_object, read_record, validated

MANIFEST = "manifest.json"
REMEDY = "run the command again that made this folder"
UNUSUAL = ("host", "precision", "sampler", "device", "pairs_sha256")
"""Entries of a manifest that stand there only if they are not the default ones."""


@validated
class Manifest:
    """Description of a finished job folder; ``identity`` is a hash of everything that its result depends on."""

    arm: str
    seed: Natural
    status: Literal["finished", "running"]
    identity: str
    settings_hash: str
    arm_spec: dict[str, Any]
    versions: dict[str, str]
    platform: dict[str, str]
    checksums: dict[str, str]
    host: str | None = None
    precision: str | None = None
    sampler: str | None = None
    device: str | None = None
    pairs_sha256: str | None = None


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a run folder.

    Raises:
        ValueError: If it is missing or damaged.
    """
    path = folder / MANIFEST
    try:
        return read_record(Manifest, read_object(path, REMEDY))
    except ValueError as error:
        message = str(error) if str(path) in str(error) else f"{path} is damaged ({error})"
        raise ValueError(f"{message}; delete {folder} to run this arm again") from error


def verify(folder: Path, checksums: Mapping[str, str]) -> None:
    """Check files of a finished run; ``ValueError`` if one is missing, or is not that of the run."""
    for name, expected in sorted(checksums.items()):
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{path} is missing from a finished run: delete {folder} and run this arm again")
        with path.open("rb") as file:
            actual = hashlib.file_digest(file, "sha256").hexdigest()
        if actual != expected:
            raise ValueError(
                f"{path} does not match its checksum in manifest.json (it changed after the run ended): "
                f"restore it, or delete {folder} and run this arm again"
            )


def unusual_entries(manifest: Manifest) -> dict[str, str]:
    """Return host, precision, sampler, device and the pairs' hash of a run, if they are not the default ones."""
    entries = {name: getattr(manifest, name) for name in UNUSUAL}
    return {name: value for name, value in entries.items() if value is not None}
