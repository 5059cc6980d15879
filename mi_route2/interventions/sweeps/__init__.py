"""Patch sweeps: which sites and positions carry a behaviour from one prompt into another."""

from mi_route2.interventions.sweeps.alignment import Alignment, align, tokens_of
from mi_route2.interventions.sweeps.attribution import attribute
from mi_route2.interventions.sweeps.grid import Cell, Grid, Window
from mi_route2.interventions.sweeps.paths import paths
from mi_route2.interventions.sweeps.prompts import Span
from mi_route2.interventions.sweeps.question import CleanRun
from mi_route2.interventions.sweeps.sweep import Finished, Sweep, cells, prepare, sweep
from mi_route2.interventions.sweeps.targets import Target

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
