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

The names below are listed in the order in which a new user meets them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mi_route2.adapters import (
    Adapters,
    AdapterSpec,
    Tape,
    attach,
    export_merged,
    export_peft,
    from_pretrained,
    load_adapters,
    save_adapters,
    save_pretrained,
)
from mi_route2.hosts import Host, open_host
from mi_route2.hosts.load import load
from mi_route2.rollouts import Policy, Rollouts
from mi_route2.routing import EraseRoute, MaskRoute, MaskSpec, OpenRoute, PairBatch, StepContext, TrainBatch
from mi_route2.sites import Site, select

if TYPE_CHECKING:
    from mi_route2.engine import Engine, Request, Sampling
    from mi_route2.patching import Grid, sweep
    from mi_route2.runs import RunStore
    from mi_route2.steering.specs import Monitor, Steer, Steering

__all__ = [  # noqa: RUF022 - the order in which a new user meets them
    # A model and its addresses
    "load",
    "open_host",
    "Host",
    "Site",
    "select",
    # Adapters
    "AdapterSpec",
    "attach",
    "Adapters",
    "Tape",
    # Training data
    "Policy",
    "Rollouts",
    "TrainBatch",
    "PairBatch",
    # Routes
    "MaskSpec",
    "MaskRoute",
    "EraseRoute",
    "OpenRoute",
    "StepContext",
    # Interventions
    "sweep",
    "Grid",
    "Engine",
    "Request",
    "Sampling",
    "Steer",
    "Steering",
    "Monitor",
    "RunStore",
    # Saving and exporting
    "save_adapters",
    "load_adapters",
    "save_pretrained",
    "from_pretrained",
    "export_peft",
    "export_merged",
]

_LATER = {
    "sweep": "mi_route2.patching", "Grid": "mi_route2.patching", "RunStore": "mi_route2.runs",
    "Engine": "mi_route2.engine", "Request": "mi_route2.engine", "Sampling": "mi_route2.engine",
    "Steer": "mi_route2.steering.specs", "Steering": "mi_route2.steering.specs", "Monitor": "mi_route2.steering.specs",
}  # fmt: skip
"""Names that are imported on first access, because their dependencies take longer to import than all the others."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
