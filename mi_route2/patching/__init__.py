"""Activation patching: sweeps that find the sites and positions which carry a behavior from one prompt into another."""

from mi_route2.patching.attribution import attribute
from mi_route2.patching.dictionary import Dictionary, FeatureEffect, FeatureEffects
from mi_route2.patching.edges import Edge, Graph, edges
from mi_route2.patching.grid import Cell, Grid, Window
from mi_route2.patching.paths import paths
from mi_route2.patching.question import Alignment, CleanRun, Span, align, tokens_of
from mi_route2.patching.sweep import Finished, Sweep, cells, prepare, sweep
from mi_route2.patching.targets import Target

__all__ = [
    "Alignment",
    "Cell",
    "CleanRun",
    "Dictionary",
    "Edge",
    "FeatureEffect",
    "FeatureEffects",
    "Finished",
    "Graph",
    "Grid",
    "Span",
    "Sweep",
    "Target",
    "Window",
    "align",
    "attribute",
    "cells",
    "edges",
    "paths",
    "prepare",
    "sweep",
    "tokens_of",
]
