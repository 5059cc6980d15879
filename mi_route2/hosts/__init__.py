"""Hosts: models with hooks through plain torch, TransformerLens's bridge or nnsight, with one interface."""

import importlib
from collections.abc import Callable
from typing import Any

from torch import nn

from mi_route2.architectures import HOSTS
from mi_route2.checks import checked
from mi_route2.hosts.base import Edit, Host

__all__ = ["HOSTS", "Edit", "Host", "host_class", "open_host"]


@checked
def host_class(name: str) -> Callable[[Any], Host]:
    """Return the host class called ``name``; ``ValueError`` with the valid names, or with the name of the missing package."""
    if name not in HOSTS:
        raise ValueError(f"unknown host {name!r}: choose from {', '.join(HOSTS)}")
    module, _, host_class = HOSTS[name].partition(":")
    try:
        return getattr(importlib.import_module(module), host_class)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        raise ValueError(f"the host {name!r} needs the package {package!r}, which is not installed") from error


@checked
def open_host(name: str, model: Any) -> Host:
    """Open ``model`` (a torch module, or a model object of the host's library) on the host called ``name``.

    Raises:
        ValueError: As in ``host_class``.
        TypeError: ``model`` is neither, as a path (``load`` opens a checkpoint), or already a host.

    Examples:
        >>> host = open_host("torch", model)
    """
    if not isinstance(model, nn.Module) and not hasattr(model, "_module"):  # an envoy of nnsight has one
        raise TypeError(f"open_host: model must be a Module, not {model!r:.60}: load(path) opens a checkpoint")
    return host_class(name)(model)
