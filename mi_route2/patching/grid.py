"""Result of a sweep: one value per cell, the clean and corrupt scores and the noise floor; saved on disk, drawn as a heatmap."""

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float

from mi_route2.checks import checked
from mi_route2.patching.question import Alignment, Grader, Skip, whole
from mi_route2.patching.targets import Target
from mi_route2.sites import Site
from mi_route2.tensor_files import read_tensors, write_tensors
from mi_route2.validation import parse_object

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.colors import Colormap
    from plotly.graph_objects import Figure

RADIUS = 3


@dataclass(frozen=True)
class Cell:
    """Score of the corrupt run with the clean value patched in at ``target`` and ``position`` (``None``: at all positions)."""

    target: Target
    position: int | None
    value: float


@dataclass(frozen=True)
class Window:
    """Layers and positions around a cell, for the next sweep."""

    layers: range
    positions: tuple[int, ...]

    def sites(self, *points: str) -> list[Site]:
        """Return the sites of these points in the blocks of the window."""
        return [Site(layer, point) for layer in self.layers for point in points]


@dataclass(frozen=True, eq=False, repr=False)
class Grid:
    """Scores of the cells ``sites`` x ``positions``.

    Attributes:
        sites: Patched targets, the rows.
        positions: Positions of the corrupt prompt.
        labels: Token of each position.
        grader: Metric of the scores.
        at: Scored position of the corrupt prompt.
        alpha: Share of the clean value.
        values: Scores, NaN at ``skipped`` positions; one column if all positions are patched ``together``.
        clean: Score of the clean run.
        corrupt: Score of the corrupt run.
        replicas: Scores of the corrupt run without a patch, from rows of the cells' own forwards.
        resolution: Rounding of the model's dtype, in units of the score.
        skipped: Positions that could not be patched.
        alignment: Alignment of the two prompts.
        layers: Number of layers of the model.
        together: True if all positions are patched at once.
        kind: ``patch`` for scores of runs, ``attribution`` for estimates of them, ``path`` for path patching.
        forwards: Kind of forwards that ran.
        seconds: Time by stage.
        pairs: Grids of the single pairs of prompts, if this one has their means. Positions, ``at`` and alignment are then those of
            the first pair.

    Examples:
        >>> best = grid.top(3)  # the cells that recover most
        >>> table = grid.to_pandas()
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
    pairs: tuple["Grid", ...] = ()

    def __post_init__(self) -> None:
        if self.values.shape != (len(self.sites), len(self.columns)) or len(self.labels) != len(self.positions):
            raise ValueError(f"values of shape {self.values.shape} are not {len(self.sites)} sites x {len(self.columns)} columns")
        without = {skip.position for skip in self.skipped}
        if (np.isnan(self.values) != np.array([column in without for column in self.columns])).any():
            raise ValueError("a grid has no value exactly where a position was skipped")
        scores = np.array([self.clean, self.corrupt, self.alpha, self.resolution, *self.replicas])  # a dtype would parse texts
        if np.isinf(self.values).any() or scores.dtype.kind not in "if" or not np.isfinite(scores).all():
            raise ValueError("a grid has finite scores: leave out a position by naming it in skipped")

    @property
    def columns(self) -> tuple[int | None, ...]:
        """Position of every column; ``None`` if all positions are patched together."""
        return (None,) if self.together else self.positions

    @property
    def metric(self) -> str:
        """Name of the metric: ``logit_diff``, ``logprob``, ``kl``, or ``function`` and the function's name."""
        return self.grader.metric

    @property
    def noise_floor(self) -> float:
        """Range (largest minus smallest) of the scores of the corrupt run and its replicas, at least ``resolution``."""
        scores = (self.corrupt, *self.replicas)
        return max(max(scores) - min(scores), self.resolution)

    @cached_property
    def effect(self) -> Float[np.ndarray, "sites columns"]:
        """Change of the score, ``values - corrupt``."""
        return self.values - self.corrupt

    @cached_property
    def interval(self) -> Float[np.ndarray, "2 sites columns"]:
        """Bounds of the 95% t interval of the mean ``effect`` over ``pairs``; ``ValueError`` for fewer than two pairs."""
        return t_interval(np.stack([pair.effect for pair in self.pairs]) if self.pairs else self.effect[None])

    @property
    def defined(self) -> bool:
        """True if the clean and corrupt scores differ by more than the noise floor, so that ``recovered`` has a meaning."""
        return abs(self.clean - self.corrupt) > self.noise_floor

    @cached_property  # figures read it at every cell
    def recovered(self) -> Float[np.ndarray, "sites columns"]:
        """Share recovered, ``effect / (clean - corrupt)``; ``ValueError`` if clean and corrupt are equal within the noise floor."""
        if not self.defined:
            raise ValueError(
                f"clean ({self.clean:.6g}) and corrupt ({self.corrupt:.6g}) are equal within the noise floor "
                f"{self.noise_floor:.1g}, so there is nothing to recover: choose prompts or tokens that the model tells apart, or "
                "read grid.effect"
            )
        return self.effect / (self.clean - self.corrupt)

    def to_numpy(self) -> Float[np.ndarray, "sites columns"]:
        """Return a copy of ``values``."""
        return self.values.copy()

    @checked
    def cell(self, row: int, column: int) -> Cell:
        """Return the cell at a row and a column, counted from 0; ``IndexError`` outside of the grid."""
        rows, columns = self.values.shape
        if not (-rows <= row < rows and -columns <= column < columns):
            raise IndexError(f"there is no cell ({row}, {column}): this grid has {rows} sites and {columns} columns, from 0 on")
        return Cell(self.sites[row], self.columns[column], float(self.values[row, column]))

    @property
    def argmax(self) -> Cell:
        """Cell with the highest score."""
        return self._at(np.nanargmax(self.values))

    @property
    def argmin(self) -> Cell:
        """Cell with the lowest score."""
        return self._at(np.nanargmin(self.values))

    @property
    def argabs(self) -> Cell:
        """Cell whose score differs most from the corrupt score, in either direction."""
        return self._at(np.nanargmax(np.abs(self.effect)))

    def _at(self, flat: np.intp) -> Cell:
        row, column = np.unravel_index(flat, self.values.shape)
        return self.cell(int(row), int(column))

    @checked
    def top(self, k: int) -> list[Cell]:
        """Return the ``k`` cells whose scores differ most from the corrupt score, largest difference first.

        The list is shorter if the grid has fewer cells with a value; ``ValueError`` for a negative ``k``.
        """
        if k < 0:
            raise ValueError(f"the {k} largest effects do not exist: choose 0 or more")
        # Skipped cells come behind all others, and of equal effects the first cell is first.
        size = np.where(np.isnan(self.effect), -1.0, np.abs(self.effect)).ravel()
        order = np.argsort(-size, kind="stable")
        return [self._at(flat) for flat in order[: min(k, int((size >= 0).sum()))]]

    @checked
    def zoom(self, around: Cell | None = None, radius: int = RADIUS) -> Window:
        """Return the layers and positions within ``radius`` of a cell (``argabs`` by default).

        The window is limited to the model's layers and to positions that can be patched. Nothing runs: pass the result to the
        next sweep, for example over finer sites: ``positions=w.positions``, ``sites=w.sites("z", "mlp_out")``, ``heads=True``.
        The unembedding counts as the last layer.
        """
        if radius < 0:
            raise ValueError(f"a radius of {radius} is not possible: choose 0 or more")
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
        """Return Spearman's rank correlation of the effects of two grids.

        Raises:
            ValueError: The grids have different cells, or one has the same effect in all of them.
        """
        if (self.sites, self.columns, self.skipped) != (other.sites, other.columns, other.skipped):
            raise ValueError("these grids have different sites or positions: sweep both over the same ones")
        from scipy.stats import spearmanr  # the import takes a second, and so does matplotlib's

        mine, two = (grid.effect[~np.isnan(grid.values)] for grid in (self, other))
        if not np.ptp(mine) or not np.ptp(two):
            raise ValueError("a grid has one effect in all of its cells, so they have no ranks: choose sites that act differently")
        correlation: Any = spearmanr(mine, two)
        return float(correlation.statistic)

    def __repr__(self) -> str:
        rows, (peak, what) = len(self.sites), (self.argabs, "recovers" if self.defined else "changes the score by")
        columns = "all positions together" if self.together else f"{len(self.columns)} positions"
        over = f", mean of {len(self.pairs)} pairs" if self.pairs else ""
        change = (peak.value - self.corrupt) / (self.clean - self.corrupt if self.defined else 1.0)
        return (
            f"Grid({self.metric}, {rows} sites x {columns}, {self.kind}{over}: clean {self.clean:.4g}, corrupt {self.corrupt:.4g}, "
            f"noise {self.noise_floor:.1g}; furthest {peak.target}{'' if peak.position is None else f' at {peak.position}'}: "
            f"{peak.value:.4g}, {what} {change:.3g})"
        )

    def _repr_html_(self) -> str:
        """Return an HTML table in the heatmap's colors, for notebooks; for a large grid, only the largest effects."""
        return to_html(self)

    def to_pandas(self) -> "pd.DataFrame":
        """Return a data frame with one row per cell: site, layer, point, head, position, token, value, recovered.

        Means over two pairs or more also have ``low`` and ``high``, the ``interval`` of their effect.

        Missing entries: the layer of the unembedding, the position if all are patched together, ``recovered`` if it is not
        ``defined``.
        """
        import pandas as pd  # the import takes half a second

        shape = self.values.shape
        targets = [target for target in self.sites for _ in self.columns]
        tokens = ("all",) if self.together else self.labels
        recovered = self.recovered if self.defined else np.full(shape, np.nan)
        bounds = dict(zip(("low", "high"), self.interval.reshape(2, -1))) if len(self.pairs) > 1 else {}
        whole = pd.Int64Dtype()
        return pd.DataFrame(
            {
                "site": [str(target) for target in targets],
                "layer": pd.array([target.site.layer for target in targets], dtype=whole),
                "point": [target.site.point for target in targets],
                "head": pd.array([target.head for target in targets], dtype=whole),
                "position": pd.array([*self.columns] * shape[0], dtype=whole),
                "token": [*tokens] * shape[0],
                "value": self.values.ravel(),
                "recovered": recovered.ravel(),
                **bounds,
            }
        )

    def interactive(self) -> "Figure":
        """Return the heatmap as a plotly figure; hovering over a cell shows its site, token, value and share recovered.

        Raises:
            ModuleNotFoundError: plotly is not installed; the extra ``plotly`` installs it.
        """
        return to_plotly(self)

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values; skipped positions and an undefined ``recovered`` are ``None``."""
        cells = {name: getattr(self, name) for name in ("argmax", "argmin", "argabs")}
        return {
            **_said(self),
            "metric": self.metric,
            "noise_floor": self.noise_floor,
            "values": _rows(self.values),
            "recovered": _rows(self.recovered) if self.defined else None,
            "summary": self.alignment.summary,
            **{name: {"site": str(cell.target), "position": cell.position, "value": cell.value} for name, cell in cells.items()},
        }

    @staticmethod
    @checked
    def from_json(said: Mapping[str, Any]) -> "Grid":
        """Return the grid that ``to_json`` described; ``ValueError`` if the description is not complete."""
        try:
            return _grid(dict(said), np.array(said["values"], dtype=float))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"this is not a whole grid ({error}): give what Grid.to_json returned") from error

    @checked
    def heatmap(self, path: Path | str) -> Path:
        """Draw ``recovered`` (``effect`` if it is not defined) as png, svg or pdf, and return the path."""
        return draw(self, Path(path))

    @checked
    def save(self, path: Path | str) -> None:
        """Write one safetensors file atomically: the values, and everything else as JSON in its header, with a checksum."""
        header = {"format": FORMAT, "grid": json.dumps(_said(self))}
        write_tensors(Path(path), {"values": torch.from_numpy(self.to_numpy())}, header)

    @staticmethod
    @checked
    def load(path: Path | str) -> "Grid":
        """Load a file that ``save`` wrote; ``FileNotFoundError``, or ``ValueError`` for a damaged file or another kind of file."""
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"{path} is not a file: give one that Grid.save wrote")
        tensors, header = read_tensors(path)
        if header.get("format") != FORMAT:
            raise ValueError(f"{path} has the format {header.get('format')!r}: this version reads {FORMAT!r}")
        try:
            return _grid(parse_object(header["grid"]), tensors["values"].numpy())
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{path} is not a complete grid ({error}): sweep and save it again") from error


FORMAT = "mi-route2 patch sweep 1"
_NUMBERS = ("at", "alpha", "clean", "corrupt", "resolution", "layers", "together", "kind", "forwards")


def _rows(values: np.ndarray) -> list[list[float | None]]:
    return [[None if np.isnan(value) else value for value in row] for row in values.tolist()]


def _said(grid: Grid) -> dict[str, Any]:
    """Return all fields of the grid as JSON values, except for the cells."""
    return {
        **{name: getattr(grid, name) for name in _NUMBERS},
        "seconds": dict(grid.seconds),
        "sites": [str(target) for target in grid.sites],
        "positions": list(grid.positions),
        "labels": list(grid.labels),
        "grader": {name: getattr(grid.grader, name) for name in ("metric", "answer", "foil")},
        "replicas": list(grid.replicas),
        "skipped": [asdict(skip) for skip in grid.skipped],
        "alignment": asdict(grid.alignment),
        "pairs": [{**_said(pair), "values": _rows(pair.values)} for pair in grid.pairs],
    }


def _grid(said: dict[str, Any], values: np.ndarray) -> Grid:
    # JSON may hold 2.0 or true in these places, which would fail only when somebody indexes with them
    for number in (said["at"], said["layers"], *said["positions"], *said["alignment"].values()):
        whole(number)
    return Grid(
        **{name: said[name] for name in _NUMBERS},
        seconds=dict(said["seconds"]),
        sites=tuple(map(Target.parse, said["sites"])),
        positions=tuple(said["positions"]),
        labels=tuple(said["labels"]),
        grader=Grader(**said["grader"]),
        replicas=tuple(said["replicas"]),
        skipped=tuple(Skip(**skip) for skip in said["skipped"]),
        alignment=Alignment(**said["alignment"]),
        values=values,
        pairs=tuple(_grid(pair, np.array(pair["values"], dtype=float)) for pair in said.get("pairs", ())),
    )


LEVEL = 0.95
_TOLD = 3
"""Most tokens of different pairs in one label."""


def t_interval(values: np.ndarray) -> np.ndarray:
    """Return both bounds ``[2 ...]`` of the 95% t interval of the mean over the first axis, which needs two values or more."""
    from scipy.special import stdtrit  # the import takes a fifth of a second

    if (n := len(values)) < 2:
        raise ValueError("an interval needs at least two pairs of prompts: give lists of clean and corrupt prompts")
    half = stdtrit(n - 1, (1 + LEVEL) / 2) * values.std(0, ddof=1) / n**0.5
    return np.stack([values.mean(0) - half, values.mean(0) + half])


def mean_grid(grids: Sequence[Grid], named: bool) -> Grid:
    """Return the grid of means over pairs of prompts, whose positions are ``named`` or must be the same in all.

    Raises:
        ValueError: Positions that cannot be compared.
    """
    first = grids[0]
    for number, grid in enumerate(grids):
        same = named or (grid.alignment, grid.positions) == (first.alignment, first.positions)
        fits = same and np.array_equal(np.isnan(grid.values), np.isnan(first.values))
        if not (fits or first.together):
            raise ValueError(
                f"the positions of pair {number} are not those of pair 0, so they have no mean: choose pairs of equal lengths, "
                "name positions by texts or Span, or pass together=True"
            )
    tokens = [dict.fromkeys(column) for column in zip(*(grid.labels for grid in grids))]
    return replace(
        first,
        labels=first.labels
        if first.together
        else tuple("/".join(list(some)[:_TOLD]) + "/..." * (len(some) > _TOLD) for some in tokens),
        grader=Grader.of_mean([grid.grader for grid in grids]),
        values=np.mean([grid.values for grid in grids], 0),
        **{name: float(np.mean([getattr(grid, name) for grid in grids])) for name in ("clean", "corrupt")},
        replicas=tuple(map(float, np.mean([grid.replicas for grid in grids], 0))),
        resolution=max(grid.resolution for grid in grids),
        seconds={name: sum(grid.seconds[name] for grid in grids) for name in first.seconds},
        pairs=tuple(grids),
    )


_CELL, _MARGIN, _TALLEST, _WIDEST = 0.17, 1.3, 40.0, 40.0
"""Sizes in inches: a cell, the space for titles and labels, and the maximum height and width of a figure."""
_LETTER, _SHORT = 0.06, 12
"""Height in inches that a letter of a position's label takes, and the letters for which the margin has room."""


def _colored(grid: Grid) -> tuple[np.ndarray, str, float]:
    """Return the values that the colors stand for, their name, and the value of the strongest color."""
    colored = grid.recovered if grid.defined else grid.effect
    # values are divided by the strongest one, which is 0 in a grid without any effect
    return colored, "recovered" if grid.defined else f"change of {grid.metric}", float(np.nanmax(np.abs(colored))) or 1.0


def _colors() -> "Colormap":
    import matplotlib

    from mi_route2.plots import GRAY

    return matplotlib.colormaps["RdBu"].with_extremes(bad=GRAY)  # white is no effect


def _title(grid: Grid) -> str:
    return f"{grid.metric}: clean {grid.clean:.3g}, corrupt {grid.corrupt:.3g}, noise {grid.noise_floor:.1g}"


def _told(grid: Grid, row: int, column: int) -> tuple[str, str, str, str]:
    """Return site, position and token, value, and share recovered of a cell, as text."""
    cell = grid.cell(row, column)
    token = "all positions" if cell.position is None else f"position {cell.position} {grid.labels[column]!r}"
    if np.isnan(cell.value):
        return str(cell.target), token, "skipped", "skipped"
    recovered = f"{grid.recovered[row, column]:.4g}" if grid.defined else "not defined"
    return str(cell.target), token, f"{cell.value:.6g}", recovered


_MOST = 40
"""Maximum number of rows and of columns in a notebook's table."""


def to_html(grid: Grid) -> str:
    """Return the grid as an HTML table; see ``Grid._repr_html_``."""
    colored, what, reach = _colored(grid)
    # A stable order, so that of equal effects the first is kept, as in ``top``
    size = np.where(np.isnan(grid.effect), -1.0, np.abs(grid.effect))
    rows, columns = (sorted(np.argsort(-size.max(axis), kind="stable")[:_MOST].tolist()) for axis in (1, 0))
    colors = _colors()

    def cell(row: int, column: int) -> str:
        red, green, blue, _ = colors(np.ma.masked_invalid(colored[row, column] / reach / 2 + 0.5))
        # weights of about how bright the eye sees red, green and blue
        ink = "black" if 0.3 * red + 0.6 * green + 0.1 * blue > 0.5 else "white"
        site, token, value, recovered = map(html.escape, _told(grid, row, column))
        style = f"background:rgb({255 * red:.0f},{255 * green:.0f},{255 * blue:.0f});color:{ink}"
        text = "" if np.isnan(colored[row, column]) else f"{colored[row, column]:.2f}"
        return f'<td style="{style}" title="{site}, {token}: {value}, recovered {recovered}">{text}</td>'

    ticks = _ticks(grid)
    heads = "".join(f"<th>{html.escape(ticks[column])}</th>" for column in columns)
    lines = "".join(
        f"<tr><th>{html.escape(str(grid.sites[row]))}</th>{''.join(cell(row, column) for column in columns)}</tr>"
        for row in reversed(rows)  # upwards, as in the heatmap
    )
    counts = [f"{len(rows)} of {len(grid.sites)} sites"] if len(rows) < len(grid.sites) else []
    counts += [f"{len(columns)} of {len(grid.columns)} positions"] if len(columns) < len(grid.columns) else []
    most = f"; those with the largest effects, {' and '.join(counts)}" if counts else ""
    caption = html.escape(f"{_title(grid)}; cells: {what}{most}")
    return f'<table style="font-size:80%"><caption>{caption}</caption>{lines}<tr><th></th>{heads}</tr></table>'


def to_plotly(grid: Grid) -> "Figure":
    """Return the grid as a plotly heatmap; see ``Grid.interactive``."""
    try:
        from plotly.graph_objects import Figure, Heatmap
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the interactive heatmap needs plotly, which is not installed: pip install 'mi-route2[plotly]'", name="plotly"
        ) from error
    from matplotlib.colors import to_hex

    colored, what, reach = _colored(grid)
    rows, columns = range(len(grid.sites)), range(len(grid.columns))
    heat = Heatmap(
        z=colored,
        zmin=-reach,
        zmax=reach,
        colorscale=[[i / 10, to_hex(_colors()(i / 10))] for i in range(11)],
        colorbar={"title": {"text": _plain(what)}},
        customdata=[[tuple(map(_plain, _told(grid, row, column))) for column in columns] for row in rows],
        hovertemplate="site %{customdata[0]}<br>token %{customdata[1]}<br>value %{customdata[2]}"
        "<br>recovered %{customdata[3]}<extra></extra>",
        hoverongaps=False,
    )
    figure = Figure(heat)
    figure.update_layout(title=_plain(_title(grid)), template="plotly_white")
    # Two tokens may have the same text, and an axis of texts would merge them into one column
    figure.update_xaxes(title="token of the corrupt prompt", tickvals=[*columns], ticktext=[*map(_plain, _ticks(grid))])
    figure.update_yaxes(tickvals=[*rows], ticktext=[str(target) for target in grid.sites])
    return figure


def _plain(text: str) -> str:
    """Return a text that plotly shows as it is: no markup, and no mathematics between dollars. It does not know ``&quot;``."""
    return html.escape(text, quote=False).replace("$", "&#36;")


def draw(grid: Grid, path: Path) -> Path:
    """Write the heatmap to ``path``; ``ValueError`` for a suffix or folder that ``save_figure`` refuses."""
    from mi_route2.plots import PAGE_WIDTH, new_figure, save_figure, style

    colored, what, reach = _colored(grid)
    by_head = len(grid.columns) == 1 and all(target.head is not None for target in grid.sites)
    panels = _by_head(grid, colored) if by_head else {"": colored}
    low = min(target.site.layer or 0 for target in grid.sites) if by_head else 0
    (rows, columns), ticks = next(iter(panels.values())).shape, [] if by_head else _ticks(grid)
    margin = _MARGIN + _LETTER * max(0, max(map(len, ticks), default=0) - _SHORT)
    height, width = min(_TALLEST, margin + _CELL * rows), min(_WIDEST, max(PAGE_WIDTH, _MARGIN + _CELL * columns * len(panels)))
    with style():
        figure = new_figure(width, height)
        for axes, (name, panel) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items()):
            image = axes.imshow(
                panel, aspect="auto", origin="lower", cmap=_colors(), vmin=-reach, vmax=reach, interpolation="nearest"
            )
            axes.grid(visible=False)
            if by_head:
                axes.set(xlabel=f"head of {name}", ylabel="layer", xticks=range(panel.shape[1]))
                axes.set_yticks(range(rows), [str(low + row) for row in range(rows)])
                continue
            # matplotlib reads a text between two dollars as mathematics
            axes.set_xticks(range(columns), [tick.replace("$", r"\$") for tick in ticks], rotation=90)
            axes.set_yticks(range(rows), [str(target) for target in grid.sites])
            if grid.at in grid.columns:
                axes.get_xticklabels()[grid.positions.index(grid.at)].set_fontweight("bold")
            axes.set_xlabel("token of the corrupt prompt")
        figure.suptitle(_title(grid))
        figure.colorbar(image, ax=figure.axes, label=what, shrink=min(1.0, 3 / height))
        return save_figure(figure, path)


def _by_head(grid: Grid, colored: Float[np.ndarray, "sites 1"]) -> dict[str, Float[np.ndarray, "layers h"]]:
    """Return the values of each point by layer, from the first one on, and head; those that were not patched are NaN."""
    used = [target.site.layer or 0 for target in grid.sites]
    heads = {target.site.point: 1 + (target.head or 0) for target in sorted(grid.sites, key=lambda target: target.head or 0)}
    panels = {point: np.full((1 + max(used) - min(used), count), np.nan) for point, count in heads.items()}
    for target, (value,) in zip(grid.sites, colored):
        panels[target.site.point][(target.site.layer or 0) - min(used), target.head or 0] = value
    return panels


def _ticks(grid: Grid) -> list[str]:
    """Return the name of every column: its token and position on one line."""
    if grid.together:
        return ["all"]
    return [f"{label!r}"[1:-1] + f"  {position}" for position, label in zip(grid.positions, grid.labels)]
