"""Grids on disk: one safetensors file, the numbers as a float64 tensor, the rest as JSON in the header, checked on load."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mi_route2.adapters.store import read_tensors, write_tensors
from mi_route2.interventions.sweeps.alignment import Alignment
from mi_route2.interventions.sweeps.grading import Grader
from mi_route2.interventions.sweeps.grid import Grid
from mi_route2.interventions.sweeps.question import Skip
from mi_route2.interventions.sweeps.targets import Target

FORMAT = "mi-route2 patch sweep 1"
_NUMBERS = ("at", "alpha", "clean", "corrupt", "resolution", "layers", "together", "kind", "forwards")


def describe(grid: Grid) -> dict[str, Any]:
    """See ``Grid.to_json``."""

    def rows(values: np.ndarray) -> list[list[float | None]]:
        return [[None if np.isnan(value) else value for value in row] for row in values.tolist()]

    cells = {name: getattr(grid, name) for name in ("argmax", "argmin", "argabs")}
    return {
        **_said(grid),
        "metric": grid.metric,
        "noise_floor": grid.noise_floor,
        "values": rows(grid.values),
        "recovered": rows(grid.recovered) if grid.defined else None,
        "summary": grid.alignment.summary,
        **{name: {"site": str(cell.target), "position": cell.position, "value": cell.value} for name, cell in cells.items()},
    }


def _said(grid: Grid) -> dict[str, Any]:
    """All but the numbers of the cells."""
    return {
        **{name: getattr(grid, name) for name in _NUMBERS},
        "seconds": dict(grid.seconds),
        "flops": dict(grid.flops),
        "sites": [str(target) for target in grid.sites],
        "positions": list(grid.positions),
        "labels": list(grid.labels),
        "grader": asdict(grid.grader),
        "replicas": list(grid.replicas),
        "skipped": [asdict(skip) for skip in grid.skipped],
        "alignment": asdict(grid.alignment),
    }


def write(grid: Grid, path: Path) -> None:
    """Write ``grid`` to ``path``; ``OSError`` where that is not possible."""
    header = {"format": FORMAT, "grid": json.dumps(_said(grid))}
    write_tensors(path, {"values": torch.from_numpy(grid.to_numpy())}, header)


def read(path: Path) -> Grid:
    """The grid in ``path``; ``FileNotFoundError`` where there is none, ``ValueError`` where it is not one."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is no file: give one that Grid.save wrote")
    tensors, header = read_tensors(path)
    if header.get("format") != FORMAT:
        raise ValueError(f"{path} is of the format {header.get('format')!r}: this version reads {FORMAT!r}")
    try:
        return _grid(json.loads(header["grid"]), tensors["values"].numpy())
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} is no whole grid ({error}): sweep and save it again") from error


def _grid(said: dict[str, Any], values: np.ndarray) -> Grid:
    return Grid(
        **{name: said[name] for name in _NUMBERS},
        seconds=dict(said["seconds"]),
        flops=dict(said["flops"]),
        sites=tuple(map(Target.parse, said["sites"])),
        positions=tuple(said["positions"]),
        labels=tuple(said["labels"]),
        grader=Grader(**said["grader"]),
        replicas=tuple(said["replicas"]),
        skipped=tuple(Skip(**skip) for skip in said["skipped"]),
        alignment=Alignment(**said["alignment"]),
        values=values,
    )
