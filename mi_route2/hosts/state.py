"""Fingerprint of a model's state: its weights and modules, their settings and code, the switches of adapters, and hooks.

Cached keys and values are valid for one such state only.
"""

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain, cycle
from operator import attrgetter, itemgetter, methodcaller
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as every_module

from mi_route2.adapters.linear import RoutedLinear, Switchboard
from mi_route2.adapters.weights import checksums
from mi_route2.architectures import config_of
from mi_route2.hosts.base import Host
from mi_route2.hosts.decoder import plain_model

KNOWN = {"torch", "transformers", "transformer_lens", "mi_route2"}
"""Packages whose modules hold no numbers but parameters, buffers and public settings."""
SWITCHES = ("_disable_adapters", "_active_adapter")
"""Private attributes by which layers of PEFT switch their adapters."""
SCALES = "scaling"
"""The dict by which they scale them."""

COMPONENTS = (
    "weights",
    "the tree of modules and tensors",
    "hooks",
    "torch's global hooks",
    "a module's class, forward, scale or setting",
    "adapters' switches",
    "autocast",
    "the attention implementation",
)
"""Components that a quick check compares, in the order of ``ModelState._quick``."""

_REGISTERED = itemgetter("_modules", "_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks")
_VALUES, _VERSION = methodcaller("values"), attrgetter("_version")


class ModelState:
    """Detector of changes to a model: weights, modules, their settings (scales, epsilons) and code, adapters' switches, and hooks.

    ``look`` walks the whole model and reads all of its bytes (9 GB/s on one core, .05 s for 125M float32 weights), because torch's
    version counters miss the writes of fused optimizers and writes through ``p.data``. ``changed`` is a quick check of everything
    else, over the modules of the last ``look``. ``glance`` reads one tensor again, so that as many calls as there are tensors find
    any such write.
    """

    def __init__(self, host: Host):
        self._host, self._config = host, config_of(plain_model(host))
        # Kept alive, so that no later module or tensor can have the id of one that was removed.
        self._modules: list[nn.Module] = []
        self._attributes: list[dict[str, Any]] = []
        self._tensors: list[Tensor] = []
        self._written: list[Tensor] = []
        """The tensors whose writes torch counts."""
        self._settings: tuple[list[dict[str, object]], list[str]] = [], []
        self._scaled: list[dict[str, object]] = []
        """The attributes of modules that have scales."""
        self._classes: list[type[nn.Module]] = []
        self._boards: list[Switchboard] = []
        self._weights: str | None = None
        self._named: dict[str, Tensor] = {}
        self._contents: dict[str, bytes] = {}
        self._turns: Iterator[str] = iter(())
        """Tensors, their hashes at the last ``look``, and their names in the order in which ``glance`` reads them, without end."""
        self._written_to = ""
        """The tensor in which ``glance`` found other bytes, in words."""
        self.opaque = False
        """True if somebody else's code acts (a hook, a module, a forward put on one or its class): its numbers are unknown."""
        self.current: tuple[object, ...] = ()
        self.digest = b""
        """SHA-256 of ``current``, of which every block of the prefix cache is named."""
        self.look()

    def look(self) -> bool:
        """Walk the whole model and update ``current``; return True if the state differs from the previous one.

        Also if ``glance`` saw other bytes meanwhile that are those of before again.
        """
        before, seen = self.current, bool(self._written_to)
        self._host.settle()
        model = self._host.model
        named = dict(chain(model.named_parameters(), model.named_buffers()))
        self._modules, self._tensors = list(model.modules()), list(named.values())
        self._attributes = list(map(vars, self._modules))
        self._written = [t for t in self._tensors if not t.is_inference()]
        settings = [(vars(m), name) for m in self._modules for name in ("forward", *_settings(m))]
        self._settings = [attributes for attributes, _ in settings], [name for _, name in settings]
        self._scaled = [vars(m) for m in self._modules if isinstance(vars(m).get(SCALES), dict)]
        self._boards = list({id(m.board): m.board for m in self._modules if isinstance(m, RoutedLinear)}.values())
        self._classes = list(dict.fromkeys(map(type, self._modules)))
        functions = any(not of_libraries(hook, (_OF_BRIDGE,)) for hook in forward_hooks(self._modules))
        known = KNOWN | {_package(type(plain_model(self._host)))}
        foreign = any(_package(kind) not in known or _given_forward(kind) for kind in self._classes)
        self.opaque = functions or foreign or any("forward" in vars(m) for m in self._modules)
        self._named, self._contents = named, checksums(named)
        self._turns, self._written_to = cycle(named), ""
        sums = tuple(self._contents.values())
        self.current = (*self._quick(), sums)
        self.digest = hashlib.sha256(repr(self.current).encode()).digest()
        if before and before[-1] != sums:
            self._weights = None
        return seen or self.current != before

    @property
    def changed(self) -> str:
        """Member of ``COMPONENTS`` that changed since the last ``look``, or a tensor that ``glance`` read; ``""`` if none did."""
        now = self._quick()
        if now == self.current[:-1]:
            return self._written_to
        return next(component for component, was, one in zip(COMPONENTS, self.current[:-1], now, strict=True) if was != one)

    def glance(self) -> None:
        """Read the next tensor again, in turn; ``changed`` from now on if something was written to it since the last ``look``."""
        with suppress(torch.OutOfMemoryError):  # which is no change, and would end all requests: it is read at its next turn
            if (name := next(self._turns, None)) is not None and checksums({name: self._named[name]})[name] != self._contents[name]:
                self._written_to = f"the bytes of {name}"

    def weights(self) -> str:
        """Return ``Host.weights_hash``, cached until a ``look`` finds other weights."""
        if self._weights is None:
            self._weights = self._host.weights_hash()
        return self._weights

    def _quick(self) -> tuple[object, ...]:
        versions = sum(map(_VERSION, self._written))
        children, parameters, buffers, after, before = zip(*map(_REGISTERED, self._attributes), strict=True)
        # A module or a parameter that was replaced is found in its parent, without a walk of the tree.
        some = filter(None, chain(children, parameters, buffers))  # most are empty
        places = tuple(map(id, chain.from_iterable(map(_VALUES, some))))
        hooks = tuple(chain.from_iterable(chain(after, before)))  # torch never uses the id of a hook again
        everywhere = (*every_module._global_forward_hooks, *every_module._global_forward_pre_hooks)
        # A forward that was put on the module itself or on its class, another class, another scale or epsilon.
        forwards = (one.forward for one in self._classes)
        code = (*map(type, self._modules), *forwards, *map(dict.get, *self._settings), *map(_scales, self._scaled))
        boards = tuple((board.kept, board.quarantine, board.merged) for board in self._boards)
        kind = self._tensors[0].device.type if self._tensors else "cpu"
        cast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        attention = getattr(self._config, "_attn_implementation", None)
        return versions, places, hooks, everywhere, code, boards, cast, attention


def _scales(module: dict[str, object]) -> object:
    """Return a copy of a layer's scales that can be compared (numpy's and torch's numbers by their values)."""
    given = module.get(SCALES)
    if not isinstance(given, dict):
        return given
    return {name: one.tolist() if isinstance(one, Tensor | np.generic) else one for name, one in given.items()}


def forward_hooks(modules: Iterable[nn.Module]) -> Iterator[object]:
    """Yield the forward hooks of ``modules``, and torch's global ones."""
    for m in modules:
        yield from (*m._forward_hooks.values(), *m._forward_pre_hooks.values())
    yield from (*every_module._global_forward_hooks.values(), *every_module._global_forward_pre_hooks.values())


_OF_BRIDGE = "transformer_lens.model_bridge."
"""Module of hooks that a bridge has put on its own modules (hooks that users add are functions of ``hook_points``)."""


def of_libraries(hook: object, libraries: tuple[str, ...] = (_OF_BRIDGE, "transformers.")) -> bool:
    """Return whether a library has put the hook on its own modules: a bridge, or transformers at the first cached run."""
    return str(getattr(hook, "__module__", "")).startswith(libraries)


def _given_forward(kind: type[nn.Module]) -> bool:
    """Return whether a class has a forward that was not written in it, but put on it later."""
    owner = next(one for one in kind.__mro__ if "forward" in vars(one))
    return owner is not nn.Module and getattr(owner.forward, "__qualname__", "") != f"{owner.__qualname__}.forward"


def _package(kind: type[nn.Module]) -> str:
    return kind.__module__.partition(".")[0]


def _settings(module: nn.Module) -> list[str]:
    """Return the names of the module's public numbers, switches and texts (private ones are notes of its forward)."""
    attributes = vars(module)
    public = [name for name, value in attributes.items() if type(value) in (bool, int, float, str, NoneType) and name[0] != "_"]
    return [*public, *(name for name in SWITCHES if name in attributes)]
