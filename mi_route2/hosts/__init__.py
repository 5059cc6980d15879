"""Models to hook, by three libraries and one interface: plain torch, TransformerLens's bridge, nnsight."""

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mi_route2.checks import checked
from mi_route2.hosts.base import Edit, Host

__all__ = ["HOSTS", "Edit", "Host", "host_class", "open_host"]

HOSTS: Mapping[str, str] = MappingProxyType(
    {
        "torch": "mi_route2.hosts.huggingface:TorchHost",
        "transformer_lens": "mi_route2.hosts.transformer_lens:BridgeHost",
        "nnsight": "mi_route2.hosts.nnsight:NNsightHost",
    }
)
"""Where each host's class is; imported when it is asked for, because the libraries take seconds."""


@checked
def host_class(name: str) -> Callable[[Any], Host]:
    """The host called ``name``; ``ValueError`` with the valid names, or with the package that is missing."""
    if name not in HOSTS:
        raise ValueError(f"unknown host {name!r}: choose from {', '.join(HOSTS)}")
    module, _, kind = HOSTS[name].partition(":")
    try:
        return getattr(importlib.import_module(module), kind)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        raise ValueError(f"the host {name!r} needs the package {package!r}, which is not installed") from error


@checked
def open_host(name: str, model: Any) -> Host:
    """``model`` (a module, or what the host's own library has) on the host called ``name``; errors as in ``host_class``.

    ``TypeError`` for a path: ``load`` opens a checkpoint.
    """
    if isinstance(model, str | Path | Host):
        raise TypeError(f"open_host: model must be a Module, not {model!r:.60}: load(path) opens a checkpoint")
    return host_class(name)(model)
