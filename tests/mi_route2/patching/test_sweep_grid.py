"""A grid's reading: extremes, the top, windows, noise; files that are whole or refused; figures."""

import dataclasses
import json
import re
import sys
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors import safe_open

from mi_route2.patching import Alignment, Cell, Grid, Target
from mi_route2.patching.question import Grader, Skip
from mi_route2.sites import Site
from mi_route2.tensor_files import write_tensors

SITES = (Target(Site(2, "resid_pre")), Target(Site(5, "z"), 1), Target(Site(None, "kept_a", "unembed")))


def make(values: Any = None, **changes: Any) -> Grid:
    """Three sites of an 8-layer model, positions 1, 3, 4 (skipped) and 9 of a corrupt prompt of 12 tokens, scored at 10."""
    table = [[0.5, 1.0, np.nan, 3.0], [0.0, -4.0, np.nan, 2.0], [1.0, 1.25, np.nan, 0.75]] if values is None else values
    given: dict[str, Any] = {
        "sites": SITES,
        "positions": (1, 3, 4, 9),
        "labels": ("a", " b", "$\n", "d"),
        "grader": Grader("logit_diff", 7, 8),
        "at": 10,
        "alpha": 1.0,
        "values": np.array(table),
        "clean": 5.0,
        "corrupt": 1.0,
        "replicas": (1.0, 1.25, 0.875),
        "resolution": 1e-6,
        "skipped": (Skip(4, "it has no partner in the clean prompt"),),
        "alignment": Alignment(13, 12, 4, 7),
        "layers": 8,
        "seconds": {"prepare": 0.5, "cells": 1.5},
    }
    return Grid(**{**given, **changes})


def test_extremes_are_cells() -> None:
    grid = make()
    assert grid.argmax == Cell(SITES[0], 9, 3.0)
    assert grid.argmin == Cell(SITES[1], 3, -4.0)
    assert grid.argabs == grid.argmin  # 5 from the corrupt score
    assert [cell.value for cell in grid.top(3)] == [-4.0, 3.0, 0.0]  # 5, 2, then the first of those that are 1 off
    assert len(grid.top(99)) == 9
    assert grid.top(0) == []


def test_numbers_are_the_grids_own() -> None:
    grid = make()
    copy = grid.to_numpy()
    copy[:] = 0
    assert grid.values[0, 3] == 3.0
    np.testing.assert_array_equal(grid.recovered, (grid.values - 1) / 4)
    np.testing.assert_array_equal(grid.effect, grid.values - 1)


@given(st.lists(st.floats(-5, 5), min_size=3, max_size=6), st.floats(-5, 5), st.floats(-5, 5), st.floats(1e-9, 1e-3))
def test_recovery_is_defined_beyond_the_noise_alone(replicas: list[float], corrupt: float, clean: float, resolution: float) -> None:
    grid = make(replicas=tuple(replicas), corrupt=corrupt, clean=clean, resolution=resolution)
    scores = [corrupt, *replicas]
    assert grid.noise_floor == max(max(scores) - min(scores), resolution)
    if abs(clean - corrupt) <= grid.noise_floor:
        with pytest.raises(ValueError, match="equal within the noise floor"):
            _ = grid.recovered
    else:
        assert np.nanmax(np.abs(grid.recovered * (clean - corrupt) + corrupt - grid.values)) < 1e-9


def test_a_window_is_clamped_to_the_model_and_to_what_can_be_patched() -> None:
    grid = make()
    window = grid.zoom()
    assert (list(window.layers), window.positions) == ([2, 3, 4, 5, 6, 7], (0, 1, 2, 3, 5, 6))  # 4 has no partner
    low = grid.zoom(Cell(SITES[0], 1, 0.0))
    assert (list(low.layers), low.positions) == ([0, 1, 2, 3, 4, 5], (0, 1, 2, 3))
    high = grid.zoom(Cell(SITES[2], 9, 0.0), radius=2)
    assert (list(high.layers), high.positions) == ([5, 6, 7], (7, 8, 9, 10))  # 11 is in reach, but behind what is scored
    assert high.sites("z", "mlp_in") == [Site(layer, point) for layer in (5, 6, 7) for point in ("z", "mlp_in")]
    assert grid.zoom(Cell(SITES[1], 3, 0.0), 0).positions == (3,)
    with pytest.raises(ValueError, match="radius of -1"):
        grid.zoom(radius=-1)


def together() -> Grid:
    return make(np.array([[2.0], [1.0], [0.5]]), together=True)


def test_a_grid_of_all_positions_at_once_has_one_column() -> None:
    grid = together()
    assert grid.argmax == Cell(SITES[0], None, 2.0)
    assert grid.zoom().positions == (1, 3, 9)
    assert make().columns == (1, 3, 4, 9)


def test_a_grid_says_what_does_not_fit() -> None:
    for changes, said in (
        ({"values": np.zeros((3, 3))}, "3 sites x 4 columns"),
        ({"labels": ("a",)}, "3 sites x 4 columns"),
        ({"values": np.zeros((3, 4))}, "exactly where a position was skipped"),
        ({"skipped": ()}, "exactly where a position was skipped"),
        ({"clean": float("nan")}, "finite scores"),
        ({"replicas": (float("inf"),)}, "finite scores"),
        ({"values": np.where(make().values == 3, np.inf, make().values)}, "finite scores"),
    ):
        with pytest.raises(ValueError, match=said):
            make(changes.pop("values", None), **changes)


def test_a_description_that_is_no_grid_is_refused_in_one_sentence() -> None:
    described = make().to_json()
    for changes in (
        {"clean": "x"}, {"clean": "5.0"}, {"corrupt": None}, {"values": [["a"] * 4] * 3}, {"values": [[1.0]]}, {"replicas": None},
        {"at": None}, {"layers": 3.5}, {"positions": [1, 3, 4, "9"]}, {"alignment": described["alignment"] | {"prefix": 1.5}},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"(?s)not a whole grid .*: give what Grid\.to_json returned"):
            Grid.from_json({**described, **changes})
    with pytest.raises(ValueError, match="choose 0 or more"):
        make().top(-1)


def assert_same(one: Grid, other: Grid) -> None:
    for f in dataclasses.fields(Grid):
        if f.name == "values":
            np.testing.assert_array_equal(one.values, other.values)
        else:
            assert getattr(one, f.name) == getattr(other, f.name), f.name


@pytest.mark.parametrize("grid", [make(), together(), make(grader=Grader("kl"), kind="path", forwards="whole")])
def test_a_file_gives_the_grid_back(grid: Grid, tmp_path: Path) -> None:
    grid.save(tmp_path / "g.safetensors")
    assert_same(Grid.load(tmp_path / "g.safetensors"), grid)
    assert [path.name for path in tmp_path.iterdir()] == ["g.safetensors"]
    with safe_open(tmp_path / "g.safetensors", framework="pt") as handle:
        inside = json.loads(json.loads(handle.metadata()["mi-route2"])["grid"])
    assert inside["sites"] == ["blocks.2.resid_pre", "blocks.5.z[1]", "unembed.kept_a"]


def test_json_has_all_of_it() -> None:
    grid = make()
    found = json.loads(json.dumps(grid.to_json(), allow_nan=False))
    assert found["values"] == [[0.5, 1.0, None, 3.0], [0.0, -4.0, None, 2.0], [1.0, 1.25, None, 0.75]]
    assert found["recovered"][0] == [-0.125, 0.0, None, 0.5]
    assert found["argmin"] == {"site": "blocks.5.z[1]", "position": 3, "value": -4.0}
    assert found["skipped"] == [{"position": 4, "why": "it has no partner in the clean prompt"}]
    assert (found["metric"], found["noise_floor"], found["grader"]["answer"]) == ("logit_diff", grid.noise_floor, 7)
    assert make(clean=1.0).to_json()["recovered"] is None
    assert together().to_json()["argmax"]["position"] is None


def test_a_file_that_is_no_grid_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "g.safetensors"
    with pytest.raises(FileNotFoundError, match=r"Grid\.save"):
        Grid.load(path)
    make().save(path)
    whole = path.read_bytes()
    for damaged in (whole[:-3], whole.replace(b"blocks.5.z[1]", b"blocks.4.z[1]"), whole[:-8] + b"\0" * 8, b"no"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="write it again"):
            Grid.load(path)
    write_tensors(path, {"values": torch.zeros(1)}, {"format": "other"})
    with pytest.raises(ValueError, match="format 'other'"):
        Grid.load(path)
    for said in ("{}", "[]", "nothing", "[" * 100_000, '{"at": NaN}', '{"at": 1, "at": 2}'):
        header = {"format": "mi-route2 patch sweep 1", "grid": said}
        write_tensors(path, {"values": torch.zeros(1)}, header)
        with pytest.raises(ValueError, match="not a complete grid"):
            Grid.load(path)


ONE_SITE = make([[0.5, 1.0, np.nan, 3.0]], sites=SITES[:1], labels=("<|begin_of_text|>", " b", "$", "d"))


@pytest.mark.parametrize(
    "grid", [make(), together(), make(clean=1.0), ONE_SITE], ids=["recovered", "together", "undefined", "one site, a long token"]
)
def test_a_heatmap_is_drawn(grid: Grid, tmp_path: Path) -> None:
    found = grid.heatmap(tmp_path / "map.png")
    first = found.read_bytes()
    image = np.asarray(Image.open(found).convert("RGB")).reshape(-1, 3).astype(int)
    spread = image.max(1) - image.min(1)
    assert spread.max() > 60  # there is colour
    grid.heatmap(found)
    assert found.read_bytes() == first
    svg = grid.heatmap(tmp_path / "map.svg").read_text(encoding="utf-8")
    assert "recovered" in svg if grid.defined else "change of logit_diff" in svg
    with pytest.raises(ValueError, match=r"\.png, \.svg or \.pdf"):
        grid.heatmap(tmp_path / "map.gif")


GRIDS = pytest.mark.parametrize("grid", [make(), together(), make(clean=1.0)], ids=["recovered", "together", "undefined"])


@GRIDS
def test_a_table_has_a_row_for_every_cell(grid: Grid) -> None:
    table = grid.to_pandas()
    assert list(table.columns) == ["site", "layer", "point", "head", "position", "token", "value", "recovered"]
    assert len(table) == grid.values.size
    for i, row in enumerate(table.to_dict("records")):
        cell = grid.cell(*divmod(i, len(grid.columns)))
        site = cell.target.site
        assert (row["site"], row["point"]) == (str(cell.target), site.point)
        for name, expected in (("layer", site.layer), ("head", cell.target.head), ("position", cell.position)):
            assert pd.isna(row[name]) if expected is None else row[name] == expected
        assert row["token"] == ("all" if cell.position is None else grid.labels[grid.positions.index(cell.position)])
        np.testing.assert_equal(row["value"], cell.value)
        np.testing.assert_equal(row["recovered"], (cell.value - grid.corrupt) / 4 if grid.defined else np.nan)
    text = table.to_csv(index=False)
    np.testing.assert_array_equal(pd.read_csv(StringIO(text))["value"], table["value"])


class Cells(HTMLParser):
    """Return the text and title of every cell of a table as a browser shows them, and all that it would load from elsewhere."""

    def __init__(self, page: str):
        super().__init__()
        self.titles: list[str] = []
        self.loads: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.tags.append(tag)
        self.loads += [f"{tag} {name}" for name in ("src", "href") if name in named] + ["url"] * ("url(" in str(named.get("style")))
        if tag == "td":
            self.titles.append(str(named["title"]))

    def handle_data(self, data: str) -> None:
        self.text += data


@GRIDS
def test_a_notebook_shows_every_cell_and_loads_nothing(grid: Grid) -> None:
    page = Cells(grid._repr_html_())
    assert len(page.titles) == grid.values.size
    assert not page.loads
    assert any("blocks.5.z[1]" in title and "-4" in title for title in page.titles) or grid.together
    assert grid.metric in page.text
    assert ("recovered" if grid.defined else "change of logit_diff") in page.text


def test_a_token_is_text_in_a_page_and_a_figure_and_no_markup() -> None:
    grid = make(labels=("<script>", 'a "$b$"', "b", "</td><img src=x>"), grader=Grader("function <lambda>"), clean=1.0)
    page = Cells(grid._repr_html_())
    assert not {"script", "img"} & set(page.tags)
    assert any("<script>" in title for title in page.titles)
    figure = str(grid.interactive().to_dict())
    assert not {"<script>", "<lambda>"} & set(re.findall("<[a-z]+>", figure))
    assert "$" not in figure  # two of them are mathematics in a page that has MathJax
    assert set(re.findall(r"&([a-z]+);", figure)) == {"lt", "gt"}  # plotly knows few others, and `quot` is not among them


def test_of_a_large_grid_the_cells_with_an_effect_are_shown() -> None:
    values = np.ones((100, 90))
    values[70, 80] = 3.0
    sites = tuple(Target(Site(layer, "resid_pre")) for layer in range(100))
    grid = make(values, sites=sites, positions=tuple(range(90)), labels=("t",) * 90, skipped=(), layers=100, at=89)
    page = Cells(grid._repr_html_())
    assert len(page.titles) < 2000
    assert any(title.startswith("blocks.70.resid_pre, position 80") for title in page.titles)
    assert "of 100 sites" in page.text
    assert "of 90 positions" in page.text


@GRIDS
def test_an_interactive_figure_tells_every_cell_when_pointed_at(grid: Grid) -> None:
    figure = grid.interactive()
    (heat,) = figure.data
    expected = grid.recovered if grid.defined else grid.effect
    np.testing.assert_array_equal(np.asarray(heat.z, dtype=float), expected)
    assert heat.zmin == -heat.zmax == -np.nanmax(np.abs(expected))
    told = heat.customdata[1][0]
    assert list(told[:1]) == ["blocks.5.z[1]"]
    value = grid.values[1, 0]
    assert f"{value:.6g}" in told
    assert (f"{grid.recovered[1, 0]:.4g}" if grid.defined else "not defined") in told
    for name in ("site", "token", "value", "recovered"):
        assert f"{name} %{{customdata" in heat.hovertemplate
    page = figure.to_html(include_plotlyjs=False)
    assert "cdn" not in page


def test_without_plotly_one_sentence_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'mi-route2\[plotly\]'"):
        make().interactive()


def test_a_grid_prints_as_what_it_found() -> None:
    said = repr(make())
    assert len(said) < 300
    for word in ("logit_diff", "3 sites x 4 positions", "clean 5", "corrupt 1", "blocks.5.z[1] at 3", "-4"):
        assert word in said
    assert "all positions together" in repr(together())
