"""Every figure is drawn from the artifacts, the same bytes each time, and nothing in it lies outside of it."""

from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from mi_route2.plots import save_figure, style
from studies.lanes.figures import FIGURES
from studies.lanes.study import load

pytestmark = pytest.mark.study


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_shows_its_data_inside_of_its_page(name: str, study: Path, tmp_path: Path) -> None:
    with style():
        figure = FIGURES[name](study, load(study))
        save_figure(figure, tmp_path / "a.png", dpi=40)
        save_figure(FIGURES[name](study, load(study)), tmp_path / "b.png", dpi=40)
        figure.set_dpi(40)
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        page = figure.bbox
        for axes in figure.axes:
            assert axes.has_data()
            box = axes.get_tightbbox(canvas.get_renderer())
            assert box is not None
            assert page.x0 - 1 <= box.x0
            assert page.y0 - 1 <= box.y0
            assert box.x1 <= page.x1 + 1
            assert box.y1 <= page.y1 + 1
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
