"""Hooks that route reward hacking out of language models.

Attach two adapters to a model, a kept one and a quarantine; fit a persona direction on a few contrast pairs; let a route decide
what the kept adapter learns from each rollout. The quarantine learns from every rollout, and only it from those that are flagged;
it is deleted before deployment. Capture, patch and steer then show which adapter learned what.

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

if TYPE_CHECKING:  # what ``__getattr__`` does, for editors and type checkers
    from mi_route2.adapters import attach, export_merged, export_peft, load_adapters, save_adapters
    from mi_route2.engine import Engine, Request, Sampling
    from mi_route2.hosts import Host, open_host
    from mi_route2.hosts.load import load
    from mi_route2.patching import sweep
    from mi_route2.rollouts import Policy, Rollouts
    from mi_route2.routing import MaskRoute, PairBatch, Route, StepContext, TrainBatch
    from mi_route2.sites import Site
    from mi_route2.specs import AdapterSpec, MaskSpec
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

_MODULES = {
    **dict.fromkeys(("attach", "export_merged", "export_peft", "load_adapters", "save_adapters"), "mi_route2.adapters"),
    **dict.fromkeys(("Engine", "Request", "Sampling"), "mi_route2.engine"),
    **dict.fromkeys(("Host", "open_host"), "mi_route2.hosts"),
    "load": "mi_route2.hosts.load",
    "sweep": "mi_route2.patching",
    **dict.fromkeys(("Policy", "Rollouts"), "mi_route2.rollouts"),
    **dict.fromkeys(("MaskRoute", "PairBatch", "Route", "StepContext", "TrainBatch"), "mi_route2.routing"),
    "Site": "mi_route2.sites",
    **dict.fromkeys(("AdapterSpec", "MaskSpec"), "mi_route2.specs"),
    **dict.fromkeys(("Monitor", "Steer", "Steering"), "mi_route2.steering.specs"),
}
"""Name -> its module, which is imported on first access: torch takes more than a second, and command lines need none of it."""
_ROOMS = ("adapters", "engine", "hosts", "patching", "rollouts", "routing", "runs", "sites", "specs", "steering")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    if name in _ROOMS:  # so that ``import mi_route2`` is enough for mi_route2.patching.paths
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ROOMS})
