"""What a sweep found: a value a cell, with the two runs between which it lies and its noise floor; on disk, and as a heatmap."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from jaxtyping import Float
from scipy.stats import spearmanr

from mi_route2.adapters.io import read_tensors, write_tensors
from mi_route2.checks import checked
from mi_route2.patching.question import Alignment, Grader, Skip
from mi_route2.patching.targets import Target
from mi_route2.plots import GREY, PAGE_WIDTH, new_figure, save_figure, style
from mi_route2.sites import Site

RADIUS = 3


@dataclass(frozen=True)
class Cell:
    """The score of the corrupt run with the clean value put in at ``target`` and ``position`` (``None``: at all of them)."""

    target: Target
    position: int | None
    value: float


@dataclass(frozen=True)
class Window:
    """Layers and positions around a cell, to be swept next."""

    layers: range
    positions: tuple[int, ...]

    def sites(self, *points: str) -> list[Site]:
        """These points of the blocks in the window."""
        return [Site(layer, point) for layer in self.layers for point in points]


@dataclass(frozen=True, eq=False)
class Grid:
    """Scores ``values`` of ``sites`` x ``positions``, NaN where a position was ``skipped``; one column where all that were not
    skipped are patched ``together``.

    ``positions`` and ``labels`` are of the corrupt prompt; ``at`` is the position that was scored. ``replicas`` are scores of the
    corrupt run itself, without a patch, from rows of the cells' own forwards. ``kind`` is ``patch`` for scores of runs,
    ``attribution`` for first-order estimates of them, ``path`` for path patching. ``seconds`` and ``flops`` are what it took.
    """

    sites: tuple[Target, ...]
    positions: tuple[int, ...]
    labels: tuple[str, ...]
    grader: Grader
    at: int
    alpha: float
    values: Float[np.ndarray, "sites columns"]
    clean: float
    corrupt: float
    replicas: tuple[float, ...]
    resolution: float
    skipped: tuple[Skip, ...]
    alignment: Alignment
    layers: int
    together: bool = False
    kind: str = "patch"
    forwards: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)
    flops: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.values.shape != (len(self.sites), len(self.columns)) or len(self.labels) != len(self.positions):
            raise ValueError(f"values of shape {self.values.shape} are not {len(self.sites)} sites x {len(self.columns)} columns")
        without = {skip.position for skip in self.skipped}
        if (np.isnan(self.values) != np.array([column in without for column in self.columns])).any():
            raise ValueError("a grid has no value exactly where a position was skipped")

    @property
    def columns(self) -> tuple[int | None, ...]:
        """The position of every column; ``None`` where all are patched together."""
        return (None,) if self.together else self.positions

    @property
    def metric(self) -> str:
        """``logit_diff``, ``logprob``, ``kl``, or ``function`` and the name of one."""
        return self.grader.metric

    @property
    def noise_floor(self) -> float:
        """Spread (largest less smallest) of the corrupt run's score and its replicas; rounding of the model's type at least."""
        scores = (self.corrupt, *self.replicas)
        return max(max(scores) - min(scores), self.resolution)

    @cached_property
    def effect(self) -> Float[np.ndarray, "sites columns"]:
        """``values - corrupt``."""
        return self.values - self.corrupt

    @property
    def defined(self) -> bool:
        """Whether clean and corrupt are further apart than the noise floor, so that there is something to recover."""
        return abs(self.clean - self.corrupt) > self.noise_floor

    @property
    def recovered(self) -> Float[np.ndarray, "sites columns"]:
        """``effect / (clean - corrupt)``. ``ValueError`` where these two are equal within the noise floor."""
        if not self.defined:
            raise ValueError(
                f"clean ({self.clean:.6g}) and corrupt ({self.corrupt:.6g}) are equal within the noise floor "
                f"{self.noise_floor:.1g}, so there is nothing to recover: choose prompts or tokens that the model tells apart, or "
                "read grid.effect"
            )
        return self.effect / (self.clean - self.corrupt)

    def to_numpy(self) -> Float[np.ndarray, "sites columns"]:
        """A copy of ``values``."""
        return self.values.copy()

    @checked
    def cell(self, row: int, column: int) -> Cell:
        """The cell at a place of the grid, counted from 0. ``IndexError`` outside of it."""
        rows, columns = self.values.shape
        if not (-rows <= row < rows and -columns <= column < columns):
            raise IndexError(f"there is no cell ({row}, {column}): this grid has {rows} sites and {columns} columns, from 0 on")
        return Cell(self.sites[row], self.columns[column], float(self.values[row, column]))

    @property
    def argmax(self) -> Cell:
        """The cell with the highest score."""
        return self._at(np.nanargmax(self.values))

    @property
    def argmin(self) -> Cell:
        """The cell with the lowest score."""
        return self._at(np.nanargmin(self.values))

    @property
    def argabs(self) -> Cell:
        """The cell that is furthest from the corrupt score, to either side."""
        return self._at(np.nanargmax(np.abs(self.effect)))

    def _at(self, flat: np.intp) -> Cell:
        row, column = np.unravel_index(flat, self.values.shape)
        return self.cell(int(row), int(column))

    @checked
    def top(self, k: int) -> list[Cell]:
        """The ``k`` cells that are furthest from the corrupt score, the furthest first; fewer where the grid has fewer."""
        size = np.where(np.isnan(self.effect), -1.0, np.abs(self.effect)).ravel()
        order = np.argsort(-size, kind="stable")
        return [self._at(flat) for flat in order[: min(k, int((size >= 0).sum()))]]

    @checked
    def zoom(self, around: Cell | None = None, radius: int = RADIUS) -> Window:
        """Layers and positions within ``radius`` of a cell (``argabs``), clamped to the model and to what can be patched.

        It runs nothing: give what it returns to the next sweep, over finer sites perhaps: ``positions=w.positions``,
        ``sites=w.sites("z", "mlp_out")``, ``heads=True``. The unembedding counts as the last layer.
        """
        if radius < 0:
            raise ValueError(f"a radius of {radius} cannot be: choose 0 or more")
        peak = self.argabs if around is None else around
        layer = self.layers - 1 if peak.target.site.layer is None else peak.target.site.layer
        layers = range(max(0, layer - radius), min(self.layers, layer + radius + 1))
        if peak.position is None:
            without = {skip.position for skip in self.skipped}
            return Window(layers, tuple(p for p in self.positions if p not in without))
        near = range(max(0, peak.position - radius), min(self.at, peak.position + radius) + 1)
        return Window(layers, tuple(p for p in near if p not in self.alignment.skipped))

    @checked
    def rank_correlation(self, other: "Grid") -> float:
        """Spearman's rank correlation of the effects of two grids over the same cells. ``ValueError`` for other cells."""
        if (self.sites, self.columns, self.skipped) != (other.sites, other.columns, other.skipped):
            raise ValueError("these grids have other sites or positions: sweep both over the same")
        cells = ~np.isnan(self.values)
        correlation: Any = spearmanr(self.effect[cells], other.effect[cells])
        return float(correlation.statistic)

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON has it: numbers, texts, lists and ``None`` (for a position that was skipped, and for ``recovered``
        where that is not defined)."""
        from mi_route2.patching.grid import describe

        return describe(self)

    @checked
    def heatmap(self, path: Path | str) -> Path:
        """A figure of ``recovered`` (``effect`` where that is not defined) as png, svg or pdf; the path."""
        from mi_route2.patching.grid import draw  # matplotlib takes a second to import

        return draw(self, Path(path))

    @checked
    def save(self, path: Path | str) -> None:
        """One safetensors file: the numbers, all else as JSON in its header, with a checksum. Whole or not at all."""
        from mi_route2.patching.grid import write

        write(self, Path(path))

    @staticmethod
    @checked
    def load(path: Path | str) -> "Grid":
        """What ``save`` wrote. ``ValueError`` for a file that is damaged or of another kind."""
        from mi_route2.patching.grid import read

        return read(Path(path))


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
        "grader": {name: getattr(grid.grader, name) for name in ("metric", "answer", "foil")},
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


_CELL, _MARGIN, _TALLEST, _WIDEST = 0.17, 1.3, 40.0, 40.0
"""Inches: a cell, what titles and labels take, and the limits of a figure."""


def draw(grid: Grid, path: Path) -> Path:
    """Writes the heatmap; ``ValueError`` for a suffix or folder that ``save_figure`` does not take."""
    shown = grid.recovered if grid.defined else grid.effect
    what = "recovered" if grid.defined else f"change of {grid.metric}"
    rows, columns = shown.shape
    height, width = min(_TALLEST, _MARGIN + _CELL * rows), min(_WIDEST, max(PAGE_WIDTH, _MARGIN + _CELL * columns))
    with style():
        figure = new_figure(width, height)
        axes = figure.add_subplot()
        reach = float(np.nanmax(np.abs(shown))) or 1.0
        colours = matplotlib.colormaps["RdBu"].with_extremes(bad=GREY)  # white is no effect
        image = axes.imshow(shown, aspect="auto", origin="lower", cmap=colours, vmin=-reach, vmax=reach, interpolation="nearest")
        axes.grid(visible=False)
        ticks = ["all"] if grid.together else [_tick(p, label) for p, label in zip(grid.positions, grid.labels)]
        axes.set_xticks(range(columns), ticks, rotation=90)
        axes.set_yticks(range(rows), [str(target) for target in grid.sites])
        if grid.at in grid.columns:
            axes.get_xticklabels()[grid.positions.index(grid.at)].set_fontweight("bold")
        axes.set_xlabel("token of the corrupt prompt")
        axes.set_title(f"{grid.metric}: clean {grid.clean:.3g}, corrupt {grid.corrupt:.3g}, noise {grid.noise_floor:.1g}")
        figure.colorbar(image, ax=axes, label=what, shrink=min(1.0, 3 / height))
        return save_figure(figure, path)


def _tick(position: int, label: str) -> str:
    """A token as text that a figure can have: no line breaks, no markup."""
    return f"{label!r}"[1:-1].replace("$", r"\$") + f"  {position}"
