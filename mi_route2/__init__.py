"""Hooks that route reward hacking out of language models.

Attach adapters to a model, fit a persona direction from a few contrast pairs, and let a route decide what the kept adapter learns
from each rollout; the quarantine learns the rest and is deleted before deployment.
"""

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
from mi_route2.hosts import open_host
from mi_route2.hosts.load import load
from mi_route2.rollouts import Policy, Rollouts
from mi_route2.routing import MaskRoute, StepContext, TrainBatch
from mi_route2.sites import Site, select

__all__ = [
    "AdapterSpec",
    "Adapters",
    "MaskRoute",
    "Policy",
    "Rollouts",
    "Site",
    "StepContext",
    "Tape",
    "TrainBatch",
    "attach",
    "export_merged",
    "export_peft",
    "from_pretrained",
    "load",
    "load_adapters",
    "open_host",
    "save_adapters",
    "save_pretrained",
    "select",
]
