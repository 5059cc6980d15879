"""The figure style: the same bytes, whole files, and colours that colour-blind readers tell apart."""

import errno
import itertools
import os
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from mi_route2 import plots
from mi_route2.files import write_whole

# Machado, Oliveira and Fernandes, "A Physiologically-based Model for Simulation of Color Vision Deficiency" (2009), severity 1
DEFICIENCIES = {
    "none": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def _lab(color: str, deficiency: str) -> np.ndarray:
    rgb = np.array(to_rgb(color))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.asarray(DEFICIENCIES[deficiency]) @ linear, 0, 1)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = np.cbrt(to_xyz @ seen / np.array([0.9505, 1.0, 1.089]))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def _figure() -> Figure:
    figure = plots.new_figure(3, 2)
    figure.subplots().plot([0, 1, 2], [0.1, 0.4, 0.2], label="a line")
    return figure


@pytest.mark.parametrize("deficiency", DEFICIENCIES)
@pytest.mark.parametrize(
    "together",
    [
        (plots.ORANGE, plots.VERMILLION, plots.BLUE),  # quantities per mode
        (plots.VERMILLION, plots.BLUE, plots.GREEN),  # hack, clean, teacher
        (plots.BLUE, plots.VERMILLION, plots.GRAY),  # kept, quarantine, comparison
    ],
)
def test_colors_drawn_together_differ_for_every_reader(together: tuple[str, ...], deficiency: str) -> None:
    for one, other in itertools.combinations(together, 2):
        assert np.linalg.norm(_lab(one, deficiency) - _lab(other, deficiency)) > 15


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_the_same_figure_gives_the_same_bytes(tmp_path: Path, suffix: str) -> None:
    for name in ("one", "two"):
        with plots.style():
            plots.save_figure(_figure(), tmp_path / f"{name}.{suffix}")
    assert (tmp_path / f"one.{suffix}").read_bytes() == (tmp_path / f"two.{suffix}").read_bytes()


def test_a_users_settings_neither_change_a_figure_nor_are_changed(tmp_path: Path) -> None:
    with plots.style():
        plots.save_figure(_figure(), tmp_path / "plain.png")
    with matplotlib.rc_context({"font.size": 21.0, "axes.facecolor": "red"}):
        with plots.style():
            plots.save_figure(_figure(), tmp_path / "hostile.png")
        assert matplotlib.rcParams["font.size"] == 21.0
        assert matplotlib.rcParams["axes.facecolor"] == "red"
    assert (tmp_path / "plain.png").read_bytes() == (tmp_path / "hostile.png").read_bytes()


def test_the_style_is_undone_after_an_error() -> None:
    before = dict(matplotlib.rcParams)
    with pytest.raises(RuntimeError), plots.style():
        raise RuntimeError
    assert dict(matplotlib.rcParams) == before


def test_another_suffix_and_a_missing_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\.png, \.svg or \.pdf"):
        plots.save_figure(_figure(), tmp_path / "figure.bmp")
    with pytest.raises(OSError, match=r"could not write .*figure\.png, .*: No such file"):
        plots.save_figure(_figure(), tmp_path / "missing" / "figure.png")


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_whole(tmp_path / "table.md", b"old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
