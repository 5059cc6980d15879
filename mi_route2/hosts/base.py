"""What a host is, and what all hosts share.

    host.attach("blocks.*.attn.*", spec=spec, generator=g)      the same adapters, parameters and file on every host
    host.capture([Site(0, "resid_mid")], tokens)                {site: tensor}, in one shape on every host
    with host.hooks({Site(1, "q"): edit}): host.logits(tokens)  read (return None) or write (return a tensor)
    logits, cache = host.run_with_cache(tokens)                 TransformerLens's words and hook names, on every host
    host.run_with_hooks(tokens, [("blocks.1.attn.hook_q", edit)])

Values have the shapes that ``architectures.POINTS`` states: queries, keys, values and ``z`` by head, ``[b s h dh]``. A hook that
was asked for and did not fire is an error that names its site.
"""

import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from mi_route2.adapters import Adapters, AdapterSpec, attach
from mi_route2.adapters.linear import Branch
from mi_route2.adapters.weights import weights_hash
from mi_route2.architectures import (
    ADAPTER_HOOKS,
    ADAPTER_POINTS,
    ARCHITECTURES,
    BRIDGE_LINEARS,
    BRIDGE_POINTS,
    CAUSAL,
    HEADED,
    LENS_POINTS,
    POINTS,
    Architecture,
    architecture_of,
    config_of,
)
from mi_route2.checks import Mask, as_mask, checked
from mi_route2.rollouts import Policy, demand_tokens
from mi_route2.sites import Site, Slot, demand_site, nearest, no_adapter, slots

Edit = Callable[[Tensor], Tensor | None]
"""Reads a site's value and returns ``None``, or returns what the model goes on with."""


Names = Site | str | Iterable[Site | str] | Callable[[str], bool]
"""Sites as a caller names them: itself, a point of all layers (``"resid_pre"``), a name or glob of ours (``"blocks.*.z"``) or of
TransformerLens (``"blocks.0.attn.hook_z"``), several of these, or a function that says of such a name whether it is meant."""


@dataclass(frozen=True)
class Hook:
    """What TransformerLens gives a hook function as ``hook``: the point's ``name`` (TransformerLens's) and ``site``."""

    name: str
    site: Site

    def layer(self) -> int:
        """The block; ``ValueError`` for the unembedding."""
        if self.site.layer is None:
            raise ValueError(f"{self.site} is in no layer")
        return self.site.layer


class ActivationCache(Mapping[Site, Tensor]):
    """Values of one forward by ``Site``, read by name too: ``cache["blocks.0.attn.hook_z"]``, ``cache["z", 0]``."""

    def __init__(self, values: Mapping[Site, Tensor], names: Mapping[str, Site]):
        self._values, self._names = values, names

    def __getitem__(self, key: Site | str | tuple[str, int]) -> Tensor:
        try:
            site = self._names[key] if isinstance(key, str) else Site(key[1], key[0]) if isinstance(key, tuple) else key
            return self._values[site]
        except KeyError as error:
            name = ".".join(map(str, ("blocks", *key[::-1]))) if isinstance(key, tuple) else str(key)
            raise KeyError(f"no value at {name!r} in this cache: the nearest are {nearest(name, list(self._names))}") from error

    def __iter__(self) -> Iterator[Site]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        some = [f"{site} {list(value.shape)}" for site, value in [*self._values.items()][:4]]
        return f"ActivationCache of {len(self)} sites: {', '.join(some)}{', ...' if len(self) > len(some) else ''}"


class Host(ABC):
    """A model whose sites can be hooked.

    A host says how its library calls the model, where a site is, and how hooks get there. What follows from these is here.
    """

    name: str
    model: nn.Module
    architecture: Architecture

    @checked
    def logits(self, tokens: Int[Tensor, "b s"], attention: Mask | None = None) -> Float[Tensor, "b s v"]:
        """Next-token logits; padding on either side, positions counted over real tokens.

        ``attention`` is boolean, or 0 and 1 as a tokenizer gives it. ``ValueError`` for a token that the model lacks.
        """
        demand_tokens(self.model, tokens)
        return self._logits(tokens, None if attention is None else as_mask("attention", attention))

    @abstractmethod
    def _logits(self, tokens: Int[Tensor, "b s"], attention: Bool[Tensor, "b s"] | None) -> Float[Tensor, "b s v"]:
        """``logits`` of checked arguments."""

    @abstractmethod
    def address(self, site: Site) -> str:
        """The site's name in this host's own language. ``ValueError`` says why, where the host or architecture lacks it."""

    @checked
    def hooks(self, edits: Mapping[Site, Edit]) -> AbstractContextManager[None]:
        """Context: every forward through this host runs under ``edits``. On a clean exit all must have fired (``RuntimeError``)."""
        for site, edit in edits.items():
            demand_site(site, "a hook")
            if not callable(edit):
                raise TypeError(f"the edit of {site} is a {type(edit).__name__}: give a function of the site's value")
        return self._hooks(edits)

    @abstractmethod
    def _hooks(self, edits: Mapping[Site, Edit]) -> AbstractContextManager[None]:
        """``hooks`` of checked arguments."""

    @checked
    def attach(
        self,
        *patterns: str,
        spec: AdapterSpec | None = None,
        generator: torch.Generator | None = None,
        expect: int | None = None,
        cache_dir: Path | None = None,
    ) -> Adapters:
        """Adapters at the logical Linears that ``patterns`` select; as ``mi_route2.attach``."""
        adapters = attach(
            self.model,
            *patterns,
            spec=spec,
            generator=generator,
            expect=expect,
            cache_dir=cache_dir,
            known=self._linears(patterns),
        )
        return self._listed(adapters)

    def linears(self) -> dict[str, Slot]:
        """Every logical Linear of the model by name, with or without adapters."""
        return slots(self.model)

    def weights_hash(self) -> str:
        """Hash of all weights by content, those of attached adapters included: what a captured run belongs to.

        It is the same on every host, and says nothing of the adapters' switches. ``RunStore.writing`` and ``invalidate`` take it.
        """
        return weights_hash(self.model, self.linears(), adapters=True)

    def _linears(self, patterns: tuple[str, ...]) -> dict[str, Slot] | None:
        """The model's logical Linears, where they are not those of ``slots``; refuses ``patterns`` that this host cannot serve."""
        return None

    def _listed(self, adapters: Adapters) -> Adapters:
        """``adapters``, which stand now, once the library knows their points."""
        return adapters

    @checked
    def policy(self, adapters: Adapters) -> Policy:
        """The model with its adapters, called through this host. A deep copy of it is called through a copy of the host."""
        return Policy(self.model, adapters, self._forward)

    def _forward(self, _model: nn.Module, tokens: Tensor, attention: Tensor) -> Tensor:
        return self._logits(tokens, attention)

    def hook_names(self, site: Site) -> tuple[str, ...]:
        """The names of a site: ours, and those that TransformerLens and its bridge have for it, on every host."""
        row = self.architecture
        if site.point in ADAPTER_POINTS:
            linear = site.linear if site.layer is None else {**BRIDGE_LINEARS, **row.bridge_linears}[site.linear]
            lens = [f"{linear}.{ADAPTER_HOOKS[site.point]}"]
        else:
            hooks = LENS_POINTS.get(site.point), {**BRIDGE_POINTS, **row.bridge_points}[site.point]
            lens = [hook for hook in hooks if hook is not None and " " not in hook]  # one with a space is a reason
        return (str(site), *(name if site.layer is None else f"blocks.{site.layer}.{name}" for name in lens))

    def sites(self) -> list[Site]:
        """Every site of the model, layer by layer; those of attached adapters, as they are switched now, behind the blocks' own."""
        found = []
        for layer in range(len(self.layers())):
            for point in POINTS:
                try:
                    self.address(site := Site(layer, point))
                except ValueError:  # this architecture, or this host, lacks the point
                    continue
                found.append(site)
        branches = [module for module in self.model.modules() if isinstance(module, Branch)]
        return found + [Site.parse(f"{b.site}.{point}") for b in branches for point in ADAPTER_POINTS if point in b.fires]

    def layers(self) -> range:
        """The layers of the model's blocks."""
        return range(len({name.split(".")[1] for name in self.linears() if name.startswith("blocks.")}))

    def find(self, name: str, known: Sequence[Site] | None = None) -> list[Site]:
        """The sites that ``name`` means (see ``Names``), among ``known`` or all; ``KeyError`` for none, with the nearest names."""
        known = self.sites() if known is None else known
        chosen = [site for site in known if name == site.point or fnmatchcase(str(site), name)]
        # our names first: a glob over adapters' points would match hooks of the bridge at the same Linear
        chosen = chosen or [site for site in known if any(fnmatchcase(lens, name) for lens in self.hook_names(site))]
        if not chosen:
            if name in POINTS:
                self.address(Site(0, name))  # says why this architecture has none
            adapted = [site.slot for site in known if site.linear]
            if (
                name.rpartition(".")[2] in ADAPTER_POINTS
                and not adapted
                and not any(isinstance(m, Branch) for m in self.model.modules())
            ):
                raise no_adapter(name, ())
            names = dict.fromkeys([*(site.point for site in known), *(one for site in known for one in self.hook_names(site))])
            raise KeyError(f"no site matches {name!r}: the nearest are {nearest(name, [*names])}")
        return chosen

    def _named(self, names: Names | None) -> list[Site]:
        if isinstance(names, Site):
            return [names]
        if isinstance(names, str):
            return self.find(names)
        known = self.sites()
        if names is None:
            return known
        if callable(names):
            found = [site for site in known if any(map(names, self.hook_names(site)))]
            if not found:
                raise KeyError(f"the function of names fits no site: names are such as {', '.join(self.hook_names(known[0]))}")
            return found
        found = [site for one in names for site in (self.find(one, known) if isinstance(one, str) else [one])]
        return list(dict.fromkeys(found))

    @checked
    def run_with_cache(
        self, tokens: Int[Tensor, "b s"], attention: Mask | None = None, names: Names | None = None
    ) -> tuple[Float[Tensor, "b s v"], ActivationCache]:
        """Logits, and detached values at the sites that ``names`` means, at all of them where it is ``None``.

        ``cache[Site(0, "z")]``, ``cache["blocks.0.attn.hook_z"]`` and ``cache["z", 0]`` are one value. As in TransformerLens the
        logits have a graph unless gradients are off. ``attention`` and errors as in ``logits``; ``KeyError`` for an unknown name.
        """
        sites, values = self._named(names), dict[Site, Tensor]()
        with self.hooks({site: reader(values, site) for site in sites}):
            logits = self.logits(tokens, attention)
        return logits, ActivationCache(values, {name: site for site in values for name in self.hook_names(site)})

    @checked
    def run_with_hooks(
        self, tokens: Int[Tensor, "b s"], hooks: Iterable[Any], attention: Mask | None = None
    ) -> Float[Tensor, "b s v"]:
        """Logits under ``hooks``, pairs of ``Names`` and a function of the value, or TransformerLens's of ``(value, hook)``.

        A function returns ``None`` to read, or a tensor that the model goes on with; at one site they act in the order given.
        Errors as in ``hooks``.
        """
        edits: dict[Site, list[Edit]] = {}
        for pair in hooks:
            if not isinstance(pair, tuple | list) or len(pair) != 2 or not callable(pair[1]):
                raise TypeError(f"a hook is a name and a function, as in ('blocks.0.attn.hook_z', edit), not {pair!r:.60}")
            names, function = pair
            for site in self._named(names):
                edits.setdefault(site, []).append(self._edit(site, function))
        with self.hooks({site: partial(one_after_another, some) for site, some in edits.items()}):
            return self.logits(tokens, attention)

    def _edit(self, site: Site, function: Callable[..., Any]) -> Edit:
        try:
            takes_hook = "hook" in inspect.signature(function).parameters
        except ValueError:  # a function of C has no signature: torch.zeros_like
            takes_hook = False
        if not takes_hook:
            return function
        return partial(function, hook=Hook(self.hook_names(site)[1], site))

    @checked
    def capture(self, sites: Iterable[Site], tokens: Int[Tensor, "b s"], attention: Mask | None = None) -> dict[Site, Tensor]:
        """The values of ``run_with_cache`` at ``sites``, without gradients."""
        chosen = list(sites)
        for site in chosen:
            demand_site(site, "a hook")
        with torch.no_grad():
            return dict(self.run_with_cache(tokens, attention, chosen)[1])


def known_architecture(model: nn.Module) -> Architecture:
    """The model's row; ``ValueError`` with the known ones, and for a model that is not causal."""
    row = architecture_of(model)
    if row is None:
        classes = ", ".join(dict.fromkeys(name for row in ARCHITECTURES.values() for name in row.classes))
        raise ValueError(
            f"{type(model).__name__} is no known architecture: choose among {classes}, or add a row to architectures.py"
        )
    for key, usual in CAUSAL.items():
        if (value := getattr(config_of(model), key, None)) not in (None, usual):
            raise ValueError(
                f"this {type(model).__name__} has {key}={value!r}, but hosts are for causal models: padding would leak"
            )
    return row


def positions(attention: Bool[Tensor, "b s"]) -> Int[Tensor, "b s"]:
    """Each real token's place among the real ones; 0 on padding."""
    return (attention.long().cumsum(1) - 1).clamp_min(0)


def split_heads(site: Site, value: Tensor, count: int) -> Tensor:
    """``[b s h*dh]`` as ``[b s h dh]`` at a point by head."""
    return value.unflatten(-1, (count, -1)) if site.point in HEADED and value.ndim == 3 else value


class Fired:
    """Which of the requested sites were seen."""

    def __init__(self, sites: Iterable[Site]):
        self._silent = dict.fromkeys(sites)

    def saw(self, site: Site) -> None:
        self._silent.pop(site, None)

    def demand(self, address: Callable[[Site], str]) -> None:
        """``RuntimeError`` naming each site whose hook did not fire."""
        if self._silent:
            names = ", ".join(f"{site} ({address(site)})" for site in self._silent)
            raise RuntimeError(
                f"these hooks did not fire: {names}; run the forward inside the context, through the host's own model"
                + (_COMPILED if compiled_anything() else "")
            )


_COMPILED = (
    ". torch.compile has made graphs here, and a graph does not look for hooks that come after it: set "
    "torch._dynamo.config.skip_nnmodule_hook_guards = False before compiling"
)


def compiled_anything() -> bool:
    """Whether ``torch.compile`` traced something in this process."""
    dynamo = sys.modules.get("torch._dynamo")
    return dynamo is not None and bool(dynamo.utils.counters["frames"])


def answered(site: Site, edit: Edit, value: Tensor) -> Tensor | None:
    """What ``edit`` puts in the place of ``value``; ``None`` where it only read.

    A value that was asked for its gradient (``retain_grad``, ``register_hook``) is put back itself: as a view or a copy of the
    model's tensor it would have none. ``ValueError`` for an answer that does not fit, and for a value that was written in place
    without being returned, which acts or does not by where the site is (inference mode does not count writes).
    """
    writes = None if value.is_inference() else value._version
    new = edit(value)
    if new is not None:
        return fitting(site, value, new)
    if writes is not None and value._version != writes:
        raise ValueError(f"the edit of {site} wrote into its value in place and returned None: return the tensor to go on with")
    return value if value.retains_grad or value._backward_hooks else None


def fitting(site: Site, value: Tensor, new: object) -> Tensor:
    """``new``, an edit's answer; ``ValueError`` where it cannot stand in the place of ``value``."""
    if not isinstance(new, Tensor):
        raise ValueError(f"the edit of {site} returned a {type(new).__name__}: return None to read only, or a tensor to write")
    if new.shape != value.shape:
        raise ValueError(f"the edit of {site} returned a tensor of shape {list(new.shape)}, but the site has {list(value.shape)}")
    return new


def whole_stream(edits: Mapping[Site, Edit]) -> dict[Site, Edit]:
    """Edits with those of ``resid_mid`` made whole: the block adds its MLP to the stream itself, not to what its norm was given.

    The norm is given the very tensor that the block goes on with, so it is overwritten in place, and the stream is then what the
    edit returned to the last bit, in any precision. Adding the difference behind the block would leave rounding, in half precision
    a lot. The edit sees a copy: what it keeps stays as it was.
    """
    return {site: _overwriting(site, edit) if site.point == "resid_mid" else edit for site, edit in edits.items()}


def _overwriting(site: Site, edit: Edit) -> Edit:
    def overwrite(x: Tensor) -> Tensor | None:
        new = answered(site, edit, x.clone())
        return None if new is None else x.copy_(new)

    return overwrite


def one_after_another(edits: Sequence[Edit], value: Tensor) -> Tensor | None:
    """What several edits of one value leave; ``None`` if all of them only read."""
    wrote = False
    for edit in edits:
        if (new := edit(value)) is not None:
            value, wrote = new, True
    return value if wrote else None


def reader(into: dict[Site, Tensor], site: Site) -> Edit:
    """An edit that keeps a copy and changes nothing."""

    def keep(value: Tensor) -> None:
        into[site] = value.detach().clone()

    return keep


@runtime_checkable
class KeyValues(Protocol):
    """Keys and values of a forward's sequences, by layer."""

    def update(self, key: Tensor, value: Tensor, layer: int, /) -> tuple[Tensor, Tensor]:
        """Takes the new ones ``[b h t dh]`` and returns all that the forward's queries may read ``[b h S dh]``."""
        ...
