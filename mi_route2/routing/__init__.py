"""Routes, which decide what the kept adapter learns, with their directions, scores and masks."""

from mi_route2.rollouts import Privileged, TrainBatch, group_advantages
from mi_route2.routing.directions import Directions, HaarFitter, PairBatch, PersonaFitter, TopKFitter
from mi_route2.routing.mask import MaskRoute
from mi_route2.routing.routes import Decision, EraseRoute, OpenRoute, Route, StepContext
from mi_route2.specs import CanarySpec, EraseSpec, MaskSpec, OpenSpec, RouteSpec

__all__ = [
    "CanarySpec",
    "Decision",
    "Directions",
    "EraseRoute",
    "EraseSpec",
    "HaarFitter",
    "MaskRoute",
    "MaskSpec",
    "OpenRoute",
    "OpenSpec",
    "PairBatch",
    "PersonaFitter",
    "Privileged",
    "Route",
    "RouteSpec",
    "StepContext",
    "TopKFitter",
    "TrainBatch",
    "group_advantages",
]
