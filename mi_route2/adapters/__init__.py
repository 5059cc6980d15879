"""Kept and quarantine adapters at a Linear, and the exact per-rollout backward."""

from mi_route2.adapters.attach import Adapters, attach
from mi_route2.adapters.io import export_merged, export_peft, from_pretrained, load_adapters, save_adapters, save_pretrained
from mi_route2.adapters.tape import Tape
from mi_route2.specs import AdapterSpec

__all__ = [
    "AdapterSpec",
    "Adapters",
    "Tape",
    "attach",
    "export_merged",
    "export_peft",
    "from_pretrained",
    "load_adapters",
    "save_adapters",
    "save_pretrained",
]
