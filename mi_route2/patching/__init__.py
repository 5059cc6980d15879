"""Activation patching: sweeps that find the sites and positions which carry a behavior from one prompt into another."""

from mi_route2.patching.grid import Cell, Grid, Window
from mi_route2.patching.paths import attribute, paths
from mi_route2.patching.question import Alignment, CleanRun, Span, align, tokens_of
from mi_route2.patching.sweep import Finished, Sweep, cells, prepare, sweep
from mi_route2.patching.targets import Target

__all__ = [
    "Alignment",
    "Cell",
    "CleanRun",
    "Finished",
    "Grid",
    "Span",
    "Sweep",
    "Target",
    "Window",
    "align",
    "attribute",
    "cells",
    "paths",
    "prepare",
    "sweep",
    "tokens_of",
]
