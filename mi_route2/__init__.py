"""Hooks that route reward hacking out of language models.

Attach adapters to a model, fit a persona direction from a few contrast pairs, and let a route decide what the kept adapter learns
from each rollout; the quarantine learns the rest and is deleted before deployment.
"""

from mi_route2.adapters import Adapters, AdapterSpec, Tape, attach, load_adapters, save_adapters
from mi_route2.rollouts import Policy, Rollouts
from mi_route2.sites import select

__all__ = [
    "AdapterSpec",
    "Adapters",
    "Policy",
    "Rollouts",
    "Tape",
    "attach",
    "load_adapters",
    "save_adapters",
    "select",
]
