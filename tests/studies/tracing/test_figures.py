"""Figures and levels of a tracing, against numbers that are known: no run is needed."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from studies.tracing import figures
from studies.tracing.measures import Traces, levels
from studies.tracing.pairs import CONTRASTS, SIDES
from studies.tracing.patching import CONTROLS, DELETION, EVERYWHERE, QUESTION
from studies.tracing.settings import Settings

ADAPTERS = ("kept_out", "quarantine_out", "both")
PLACES = (EVERYWHERE, "blocks.0", "blocks.0.mlp.up", "blocks.0.mlp.down")
GAP = 10.0


def effect(contrast: str, side: str, source: str, place: str, adapter: str) -> float:
    """Return another number for every cell."""
    order = CONTRASTS, SIDES, (QUESTION, DELETION, *CONTROLS), PLACES, ADAPTERS
    index = np.ravel_multi_index(
        [names.index(name) for names, name in zip(order, (contrast, side, source, place, adapter), strict=True)], [*map(len, order)]
    )
    return 0.01 * (1 + float(index))


@pytest.fixture
def traces() -> Traces:
    cells = [
        {"name": f"{place}:{adapter}", "where": place, "adapter": adapter, "sites": 1 if place.count(".") == 3 else 2}
        for place in PLACES
        for adapter in ADAPTERS
        if adapter != "both" or place.count(".") < 2
    ]
    effects = {f"scores/{contrast}/{side}": np.full(3, GAP * (side == "hack")) for contrast in CONTRASTS for side in SIDES}
    for contrast in CONTRASTS:
        for side in SIDES:
            for source in (QUESTION, DELETION, *CONTROLS):
                for cell in cells:
                    value = effect(contrast, side, source, cell["where"], cell["adapter"])
                    effects[f"{contrast}/{side}/{source}/{cell['name']}"] = np.full(3, value)
    settings = Settings("0" * 64, ("absorb",))
    return Traces(Path(), settings, {"preset": "strong"}, {("absorb", 0): {"cells": cells}}, {("absorb", 0): effects})


def shares(side: str, value: float) -> float:
    return value / (GAP if side == "honest" else -GAP)


def test_every_panel_draws_its_own_contrast_direction_cells_and_controls(traces: Traces, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: dict[str, Figure] = {}
    monkeypatch.setattr(figures, "save_figure", lambda figure, path: (drawn.update({path.name: figure}), path)[1])
    figures.write_figures(traces, Path())
    lines = [(contrast, side) for contrast in CONTRASTS for side in ("honest", "hack")]
    said = {"honest": "into the honest", "hack": "into the hacking"}
    for axes, (contrast, side) in zip(drawn[figures.CARRIED].axes[:4], lines, strict=True):
        assert axes.get_ylabel() == f"{contrast}:\n{said[side]}"
        wanted = [
            [shares(side, effect(contrast, side, QUESTION, place, adapter)) for place in ("blocks.0", EVERYWHERE)]
            for adapter in ADAPTERS
        ]
        np.testing.assert_allclose(np.asarray(axes.images[0].get_array()), wanted)
    assert [label.get_text() for label in drawn[figures.CARRIED].axes[3].get_xticklabels()] == ["blocks.0", EVERYWHERE]
    legend = {text.get_text(): patch.get_facecolor() for text, patch in _legend(drawn[figures.BESIDE])}
    for axes, (contrast, side) in zip(drawn[figures.BESIDE].axes, lines, strict=True):
        assert axes.get_ylabel() == f"{contrast}:\n{said[side]}\nshare of the gap"
        bars = [
            (bar.get_height(), bar.get_facecolor()) for container in axes.containers for bar in getattr(container, "patches", ())
        ]
        wanted = [
            (pytest.approx(shares(side, effect(contrast, side, source, EVERYWHERE, adapter))), legend[figures.SAID[source]])
            for adapter in ADAPTERS
            for source in (QUESTION, *CONTROLS)
        ]
        assert bars == wanted
        places = [bar.get_x() for container in axes.containers for bar in getattr(container, "patches", ())]
        assert places == sorted(places)
    for axes, contrast in zip(drawn[figures.DELETING].axes, CONTRASTS, strict=True):
        for dots, adapter in zip(axes.collections, ("kept_out", "quarantine_out"), strict=True):
            places = ("blocks.0.mlp.up", "blocks.0.mlp.down")
            wanted = [[effect(contrast, "hack", source, place, adapter) for source in (DELETION, QUESTION)] for place in places]
            np.testing.assert_allclose(np.asarray(dots.get_offsets()), wanted)


def _legend(figure: Figure) -> list:
    (legend,) = figure.legends
    return list(zip(legend.get_texts(), legend.get_patches(), strict=True))


def test_levels_are_the_scores_with_the_adapter_of_their_name_at_zero(traces: Traces) -> None:
    for row in levels(traces):
        contrast, side = row["contrast"], row["rollout"]
        plain = GAP * (side == "hack")
        assert row["on"]["mean"] == pytest.approx(plain)
        for state, adapter in (("deleted", "quarantine_out"), ("base", "both")):
            assert row[state]["mean"] == pytest.approx(plain + effect(contrast, side, DELETION, EVERYWHERE, adapter))
