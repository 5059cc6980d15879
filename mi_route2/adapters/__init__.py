"""Kept adapter and quarantine at a Linear, and the exact per-rollout backward."""

from mi_route2.adapters.attach import Adapters, AdapterSpec, attach
from mi_route2.adapters.store import load_adapters, save_adapters
from mi_route2.adapters.tape import Tape

__all__ = ["AdapterSpec", "Adapters", "Tape", "attach", "load_adapters", "save_adapters"]
