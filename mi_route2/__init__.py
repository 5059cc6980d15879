"""Hooks that route reward hacking out of language models.

Attach two adapters to a model, a kept one and a quarantine; fit a persona direction on a few contrast pairs; let a route decide
what the kept adapter learns from each rollout. The quarantine learns the rest and is deleted before deployment. Capture, patch
and steer then show which adapter learned what.

    host = load("path/to/model")                                  # or attach(model, ...) to any torch module
    adapters = host.attach("blocks.*", spec=AdapterSpec("lora", rank=8, quarantine_rank=8))
    policy = host.policy(adapters)
    route = MaskRoute.from_pairs(pairs, MaskSpec(score="act"))    # or MaskRoute.from_flags(flags)
    route.refresh(policy, step=0)
    decision = route.backward(policy, batch, loss_fn)             # every .grad is final and exact
    with adapters.deployed():                                     # the quarantine is off
        ...

The names below are listed in the order in which a new user meets them. Others are imported from their rooms: further routes from
``mi_route2.routing``, results of sweeps from ``mi_route2.patching``, captured runs from ``mi_route2.runs``, whole checkpoints from
``mi_route2.adapters``. Activations are captured and patched by methods of ``Host``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mi_route2.adapters import AdapterSpec, attach, export_merged, export_peft, load_adapters, save_adapters
from mi_route2.hosts import Host, open_host
from mi_route2.hosts.load import load
from mi_route2.rollouts import Policy, Rollouts
from mi_route2.routing import MaskRoute, MaskSpec, PairBatch, Route, StepContext, TrainBatch
from mi_route2.sites import Site

if TYPE_CHECKING:
    from mi_route2.engine import Engine, Request, Sampling
    from mi_route2.patching import sweep
    from mi_route2.steering.specs import Monitor, Steer, Steering

__all__ = [  # noqa: RUF022 - the order in which a new user meets them
    # A model and its addresses
    "load",
    "open_host",
    "Host",
    "Site",
    # Adapters
    "AdapterSpec",
    "attach",
    # Training data
    "Policy",
    "Rollouts",
    "TrainBatch",
    "PairBatch",
    # Routes
    "Route",
    "MaskSpec",
    "MaskRoute",
    "StepContext",
    # Interventions
    "sweep",
    "Engine",
    "Request",
    "Sampling",
    "Steer",
    "Steering",
    "Monitor",
    # Saving and exporting
    "save_adapters",
    "load_adapters",
    "export_peft",
    "export_merged",
]

_LATER = {
    "sweep": "mi_route2.patching",
    **dict.fromkeys(("Engine", "Request", "Sampling"), "mi_route2.engine"),
    **dict.fromkeys(("Steer", "Steering", "Monitor"), "mi_route2.steering.specs"),
}
"""Names that are imported on first access, because their dependencies take longer to import than all the others."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
