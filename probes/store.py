"""Probes on disk: one safetensors file with the probe's kind and settings in its header. No pickle.

    header  format = "mi-route2 probe 1", kind = "direction" | "affine", settings = JSON, about = JSON (the caller's)
    tensors direction: direction [d]      affine: weight [d], bias [1]      float64, finite

A file that differs from this is refused with the reason, so a probe that loads is the probe that was saved.
"""

import json
from pathlib import Path

import torch
from torch import Tensor

from mi_route2.checks import checked
from mi_route2.files import parse_json
from mi_route2.probes.affine import AffineProbe
from mi_route2.probes.direction import DirectionProbe, Score
from mi_route2.probes.probe import Probe
from mi_route2.tensor_files import read_tensors, write_tensors

FORMAT = "mi-route2 probe 1"


@checked
def save_probe(path: Path | str, probe: Probe, about: dict[str, str] | None = None) -> None:
    """Write `probe` to `path` atomically.

    Args:
        path: the file.
        probe: a `DirectionProbe` or an `AffineProbe`.
        about: free text, such as the layer and the source of the labels.

    Raises:
        ValueError: another kind of probe.
        OSError: the file cannot be written.
    """
    if isinstance(probe, DirectionProbe):
        probe_type, settings, tensors = "direction", {"score": probe.score}, {"direction": probe.direction}
    elif isinstance(probe, AffineProbe):
        bias = torch.tensor([probe.bias], dtype=torch.float64, device="cpu")
        probe_type, settings, tensors = "affine", {}, {"weight": probe.weight, "bias": bias}
    else:
        raise ValueError(f"A {type(probe).__name__} cannot be saved: only a DirectionProbe or an AffineProbe.")
    header = {"format": FORMAT, "kind": probe_type, "settings": json.dumps(settings), "about": json.dumps(about or {})}
    write_tensors(Path(path), {name: value.double() for name, value in tensors.items()}, header)


@checked
def load_probe(path: Path | str, *, unchecked: bool = False) -> tuple[Probe, dict[str, str]]:
    """Return the probe and its `about`.

    Args:
        path: a file that `save_probe` wrote.
        unchecked: allow a file without a checksum.

    Raises:
        ValueError: any other file; the message names the fault.
    """
    path = Path(path)
    tensors, header = read_tensors(path, unchecked=unchecked)
    if header.get("format") != FORMAT:
        raise ValueError(f"{path}: format {header.get('format')!r}, expected {FORMAT!r}.")
    probe_type, settings, about = header.get("kind"), _json(path, header, "settings"), _json(path, header, "about")
    if probe_type == "direction":
        _check(path, settings, {"score"}, tensors, {"direction": None})
        return DirectionProbe(tensors["direction"], _score(path, settings["score"])), about
    if probe_type == "affine":
        _check(path, settings, set(), tensors, {"weight": None, "bias": 1})
        return AffineProbe(tensors["weight"], float(tensors["bias"])), about
    raise ValueError(f"{path}: kind {probe_type!r} is not one of direction, affine.")


def _json(path: Path, header: dict[str, str], key: str) -> dict[str, str]:
    try:
        value = parse_json(header.get(key, "null"))
    except ValueError as error:
        raise ValueError(f"{path}: the header's {key} is damaged ({error}).") from error
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise ValueError(f"{path}: the header's {key} is not a JSON object of strings.")
    return value


def _score(path: Path, score: str) -> Score:
    if score == "cosine" or score == "projection":
        return score
    raise ValueError(f"{path}: score {score!r} is not one of cosine, projection.")


def _check(path: Path, settings: dict[str, str], keys: set[str], tensors: dict[str, Tensor], sizes: dict[str, int | None]) -> None:
    """Check for exact settings and tensor names, and for one finite float64 axis each (of the given size)."""
    if set(settings) != keys:
        raise ValueError(f"{path}: settings {sorted(settings)}, expected {sorted(keys)}.")
    if set(tensors) != set(sizes):
        raise ValueError(f"{path}: tensors {sorted(tensors)}, expected {sorted(sizes)}.")
    for name, size in sizes.items():
        value = tensors[name]
        if value.ndim != 1 or value.numel() == 0 or (size is not None and value.numel() != size):
            raise ValueError(f"{path}: {name} has shape {tuple(value.shape)}, expected ({size or 'd'},).")
        if value.dtype != torch.float64 or not torch.isfinite(value).all():
            raise ValueError(f"{path}: {name} is not finite float64.")
