"""nnsight model as a host: ``NNsight(module)`` or ``TransformersModel(...)``, with sites read and written in traces.

    host = NNsightHost(NNsight(hf))
    adapters = host.attach("blocks.*.attn.*", spec=spec, generator=g)
    with host.envoy.trace(tokens):                      # the adapters' points are envoys like any other
        a = host.envoy.transformer.h[0].attn.c_attn.route_q.hook_kept_a.output.save()

Every forward through this host is one trace of ``host.envoy``, so edits that were stored on it (``edit(inplace=True)``) act too. In
the trace each requested site has its own invoke without input, which sees the whole batch, so sites may be given in any order.

An envoy shows a module's input after torch's forward pre-hooks and its output before torch's forward hooks.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from nnsight import Envoy, NNsight
from nnsight.intervention.interleaver import OutOfOrderError
from torch import Tensor, nn

from mi_route2.adapters import Adapters
from mi_route2.architectures import ATTENTION_POINTS
from mi_route2.hosts.base import Edit, Entering, Fired, Host, answered, whole_stream
from mi_route2.hosts.huggingface import Tap, TorchHost, checkpointing, tap_of
from mi_route2.sites import Site

_ATTENTION = ("self_attn", "attn")
MASK = "hook_mask"


@dataclass(frozen=True, eq=False)
class _Requested:
    """Request of one ``hooks`` context: the tap and the edit of each site."""

    taps: dict[Site, Tap]
    edits: dict[Site, Edit]
    fired: Fired


class NNsightHost(Host):
    """Host of an nnsight model; see ``Host``. A plain module is wrapped in ``NNsight``.

    Attributes:
        envoy: The root envoy (``NNsight`` or ``TransformersModel``); ``refresh`` keeps its tree equal to the module tree.

    Raises:
        ValueError: The weights are not loaded yet, or the architecture is unknown.
    """

    name = "nnsight"

    def __init__(self, model: Envoy | nn.Module):
        self.envoy: Any = model if isinstance(model, Envoy) else NNsight(model)
        if any(p.is_meta for p in self.envoy._module.parameters()):
            raise ValueError("this model's weights are not loaded: pass dispatch=True, or call .dispatch() before making the host")
        self._torch = TorchHost(self.envoy._module)
        self.model, self.architecture = self._torch.model, self._torch.architecture
        self._open: list[_Requested] = []
        self.refresh()

    def refresh(self) -> None:
        """Rebuild the envoys after modules were replaced in the module tree.

        nnsight builds its envoys once and identifies a module by its path: after ``mi_route2.attach`` or ``adapters.detach()`` on
        the bare module, a stale ``...q_proj.output`` would be that of the base Linear, or nothing. ``attach`` of this host and
        every forward through this host call ``refresh``; call it yourself before your own trace if modules were changed in another
        way.
        """
        if not _mirrors(self.envoy, self.model):
            self.envoy._update(self.model)

    def __deepcopy__(self, memo: dict[int, Any]) -> "NNsightHost":
        """Return a host of a copy of the module, with new envoys, because a copied envoy would wait at the original module.

        Raises:
            RuntimeError: Edits are stored on the envoy.
        """
        if self.envoy._edits:
            raise RuntimeError(
                "edits are stored on this envoy, and a copy would be without them: call clear_edits() before copying"
            )
        return NNsightHost(copy.deepcopy(self.model, memo))

    def _listed(self, adapters: Adapters) -> Adapters:
        self.refresh()
        return adapters

    def _logits(self, tokens: Int[Tensor, "b s"], attention: Bool[Tensor, "b s"] | None) -> Float[Tensor, "b s v"]:
        """Run one trace; see ``Host``.

        Raises:
            RuntimeError: A trace of the same model is open, an edit lies in a part that checkpointing runs again, or a stored edit
                waits at a mask that this forward does not compute.
        """
        try:
            return self._traced(tokens, attention)
        except OutOfOrderError as error:
            if f".{MASK}." not in str(error):
                raise
            raise RuntimeError(
                f"an edit waits at a {MASK} that did not fire in this forward ({error}): use a torch hook at "
                f"adapters.sites[name].{MASK} in a step of a MaskRoute; clear_edits() removes stored edits"
            ) from error

    def _traced(self, tokens: Int[Tensor, "b s"], attention: Bool[Tensor, "b s"] | None) -> Float[Tensor, "b s v"]:
        if self.envoy.interleaver.mediators:
            raise RuntimeError("a trace of this model is open: read envoys in it, or leave it before a forward through the host")
        self.refresh()
        keywords, results = self._torch.keywords(attention), {}
        # Each invoke waits for its site in its own body and not in a called function: a run-time shape checker keeps its own call
        # stack, on which such a function's frame would end up among the model's frames.
        with self.envoy.trace() as tracer:
            with tracer.invoke(tokens, **keywords):
                results["result"] = tracer.result
            for tap, edited in self._workers():
                with tracer.invoke():
                    here = self.envoy.get(tap.path)
                    try:
                        raw = here.inputs if tap.side == "input" else here.output
                    except OutOfOrderError:  # this forward never ran the module; Fired raises the error
                        new = None
                    else:
                        new = edited(raw)
                    if new is not None and tap.side == "input":
                        here.inputs = new
                    elif new is not None:
                        here.output = new
        out = results["result"]
        return out if isinstance(out, Tensor) else out.logits

    def address(self, site: Site) -> str:
        """Return the expression that follows the root envoy in a trace: ``model.layers[1].self_attn.output[0]``.

        At points with a head axis the value has the module's own shape, with the heads side by side (except for parts interleaved
        by head).
        """
        tap = self._tap(site)
        *names, last = tap.path.split(".")
        path = "".join(f"[{name}]" if name.isdecimal() else f".{name}" for name in [*names, last]).removeprefix(".")
        # transformers' attention modules return (output, weights); all other modules with a site return a tensor
        of_tuple = site.point == "attn_out" and self.architecture.positions and last in _ATTENTION
        return f"{path}.{tap.side}" + ("[0]" if of_tuple else "") + _rows(tap)

    def _tap(self, site: Site) -> Tap:
        tap = tap_of(self.model, self.architecture, site)
        if tap.side == "logits":
            raise ValueError(f"{site} is a value inside of its module, where no envoy is: use the torch host")
        return tap

    def _prepared(self, edits: Mapping[Site, Edit]) -> Entering:
        return partial(self._hooked, edits)

    @contextmanager
    def _hooked(self, edits: Mapping[Site, Edit]) -> Iterator[None]:
        inside = {site: edit for site, edit in edits.items() if site.point in ATTENTION_POINTS}  # where no envoy is
        whole = whole_stream({site: edit for site, edit in edits.items() if site not in inside})
        taps = {site: self._tap(site) for site in whole}
        requested = _Requested(taps, whole, Fired(whole))
        self._open.append(requested)
        try:
            with self._torch.hooks(inside) if inside else nullcontext():
                yield
        finally:
            self._open.remove(requested)
        requested.fired.demand(self.address)

    def _workers(self) -> list[tuple[Tap, Callable[[Any], Any]]]:
        """Return, for every open context in order, each tap and the function that is applied to its raw value."""
        grad = torch.is_grad_enabled()
        return [(tap, _edited(site, tap, r.edits[site], r.fired, grad)) for r in self._open for site, tap in r.taps.items()]


def _mirrors(envoy: Envoy, module: nn.Module) -> bool:
    """Return whether the envoy tree has exactly one envoy per module of the module tree."""
    children = {name: child for name, child in module._modules.items() if child is not None}
    envoys = envoy._child_map
    return envoys.keys() == children.keys() and all(
        envoys[name]._module is child and _mirrors(envoys[name], child) for name, child in children.items()
    )


def _edited(site: Site, tap: Tap, edit: Edit, fired: Fired, grad: bool) -> Callable[[Any], Any]:
    """Return a function from a raw value (``inputs`` or ``output`` of an envoy) to its replacement, or to ``None``."""

    def edited(raw: Any) -> Any:
        fired.saw(site)
        stream, put = _inputs(raw) if tap.side == "input" else _output(raw)
        new = answered(site, edit, tap.read(site, stream))
        if new is None:
            return None
        if grad and checkpointing():
            raise RuntimeError(
                f"the edit of {site} would be lost: under gradient checkpointing the backward runs this part of the forward again, "
                "after the trace; switch checkpointing off, or edit on the torch host, with backward() inside of its hooks()"
            )
        return put(tap.write(stream, new))

    return edited


def _inputs(raw: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """Return the residual stream among a call's arguments, and a function that replaces it."""
    args, kwargs = raw
    if args and isinstance(args[0], Tensor):
        return args[0], lambda new: ((new, *args[1:]), kwargs)
    return kwargs["hidden_states"], lambda new: (args, {**kwargs, "hidden_states": new})


def _output(raw: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """Return the residual stream in a module's output, and a function that replaces it."""
    return (raw, lambda new: new) if isinstance(raw, Tensor) else (raw[0], lambda new: (new, *raw[1:]))


def _rows(tap: Tap) -> str:
    """Return the index of the outputs that belong to the point, if the module is fused."""
    if tap.rows is None:
        return ""
    first, last, n = int(tap.rows[0]), int(tap.rows[-1]), len(tap.rows)
    if last - first + 1 == n:
        return f"[..., {first}:{last + 1}]"
    part = first * tap.heads // n
    return f".unflatten(-1, ({tap.heads}, 3, -1))[..., {part}, :]"
