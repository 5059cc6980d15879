"""Plain torch model as a host: a transformers model or the micro model, hooked by torch's own module hooks.

Gradient checkpointing runs a block's modules a second time in the backward, under the same edits, so ``backward()`` must be called
inside of ``hooks``. A backward outside of it, and a replay without a forward, are errors: the gradients would be those of a
different forward.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from mi_route2.adapters.linear import Branch, RoutedLinear
from mi_route2.adapters.tape import in_backward
from mi_route2.architectures import ADAPTER_HOOKS, ADAPTER_POINTS, ATTENTION_POINTS, HEADED, PATTERNS, Architecture, At, heads
from mi_route2.hosts.base import (
    Edit,
    Entering,
    Fired,
    Host,
    answered,
    forward_keywords,
    known_architecture,
    split_heads,
    whole_stream,
)
from mi_route2.sites import Site, block_paths, module_at, no_adapter, part_at, refuse_booted, slot_at


@dataclass(frozen=True)
class Tap:
    """One side of a module, or some rows of its output, split into ``heads`` if the point has a head axis; times ``scale``.

    The side of a value inside of the module is the point itself.
    """

    path: str
    side: str
    rows: Tensor | None = None
    heads: int = 1
    scale: float = 1.0

    def read(self, site: Site, raw: Tensor) -> Tensor:
        """Return the module's value in the point's shape."""
        raw = raw if self.scale == 1 else raw * self.scale
        return split_heads(site, raw if self.rows is None else raw[..., self.rows.to(raw.device)], self.heads)

    def write(self, raw: Tensor, new: Tensor) -> Tensor:
        """Return ``raw`` with the point's value replaced."""
        flat = new.reshape(*raw.shape[:-1], -1).to(raw.dtype)
        flat = flat if self.scale == 1 else flat / self.scale
        return flat if self.rows is None else raw.index_copy(-1, self.rows.to(raw.device), flat)


def branches(model: nn.Module) -> dict[str, tuple[str, Branch]]:
    """Return logical Linear -> (module path, branch) of every attached adapter."""
    return {m.site: (path, m) for path, m in model.named_modules() if isinstance(m, Branch)}


def tap_of(model: nn.Module, architecture: Architecture, site: Site) -> Tap:
    """Return the module and side of ``site`` in the torch tree.

    Raises:
        KeyError: The layer is outside of the model, or no adapter is attached at the Linear.
        ValueError: The architecture lacks the point.
    """
    if site.point in ADAPTER_POINTS:
        known = branches(model)
        if site.slot not in known:
            raise no_adapter(site.slot, known)
        return Tap(f"{known[site.slot][0]}.{ADAPTER_HOOKS[site.point].removeprefix('route.')}", "output")
    paths = block_paths(model, architecture)
    if site.layer is None or not 0 <= site.layer < len(paths):
        raise KeyError(f"{site} is outside the model: its layers are 0..{len(paths) - 1}")
    if site.point in ATTENTION_POINTS:
        return _attention_tap(model, architecture, site, paths[site.layer])
    at = architecture.points.get(site.point, "it is no mixture of experts")
    if isinstance(at, str):
        raise ValueError(f"{architecture.name} has no {site.point}: {at}")
    count = heads(model, site.point) if site.point in HEADED else 1
    if at.linear:
        slot = slot_at(model, architecture, site.layer, at.path)
        return Tap(slot.path, "output", slot.rows, count)
    path = f"{paths[site.layer]}.{at.path}" if at.path else paths[site.layer]
    module_at(model, architecture, path)
    return Tap(path, at.side, None, count, at.scale)


def _attention_tap(model: nn.Module, architecture: Architecture, site: Site, block: str) -> Tap:
    output = architecture.linears.get("attn.o")
    if output is None or part_at(model, path := f"{block}.{output.path}") is None:
        raise ValueError(
            f"layer {site.layer} of this {architecture.name} has no {site.point}: its attention has no output projection"
        )
    if site.point == "result":
        at = architecture.points["attn_out"]
        return Tap(path, "result", None, heads(model, "result"), at.scale if isinstance(at, At) else 1.0)
    path = path.rpartition(".")[0]
    if getattr(model.get_submodule(path), "sinks", None) is not None:
        raise ValueError(
            f"the softmax of {architecture.name} has a sink beside the keys: read {site.point} on the transformer_lens host"
        )
    return Tap(path, site.point)


class TorchHost(Host):
    """Host of a plain torch model; see ``Host``.

    Raises:
        ValueError: The architecture is unknown, or TransformerLens's bridge has rewritten the model.
    """

    name = "torch"

    def __init__(self, model: nn.Module):
        refuse_booted(model)
        self.model, self.architecture = model, known_architecture(model)

    def _logits(self, tokens: Int[Tensor, "b s"], attention: Bool[Tensor, "b s"] | None) -> Float[Tensor, "b s v"]:
        out = self.model(tokens, **self.keywords(attention))
        return out if isinstance(out, Tensor) else out.logits

    def keywords(self, attention: Bool[Tensor, "b s"] | None) -> dict[str, Any]:
        """Return the model's keyword arguments, as ``forward_keywords``; eager attention in float64 would return NaN."""
        return forward_keywords(self.model, self.architecture, attention, self._refuse_nan)

    def _refuse_nan(self, _attention: Tensor) -> None:
        eager = getattr(getattr(self.model, "config", None), "_attn_implementation", None) == "eager"
        if eager and not self.architecture.exact_eager and next(self.model.parameters()).dtype == torch.float64:
            raise ValueError(
                f"{type(self.model).__name__} with eager attention in float64 gives NaN if padding stands left of a token (its "
                "softmax is float32): load it with attn_implementation='sdpa' if it has that, pad on the right, or use float32"
            )

    def address(self, site: Site) -> str:
        tap = tap_of(self.model, self.architecture, site)
        return f"{tap.path}.{tap.side}" + ("" if tap.rows is None else f"[..., {len(tap.rows)} rows]")

    def _prepared(self, edits: Mapping[Site, Edit]) -> Entering:
        return partial(self._hooked, whole_stream(edits), self._places(edits))

    def _places(self, sites: Iterable[Site]) -> dict[Site, tuple[Tap, nn.Module]]:
        taps = {site: tap_of(self.model, self.architecture, site) for site in sites}
        return {site: (tap, self.model.get_submodule(tap.path)) for site, tap in taps.items()}

    @contextmanager
    def _hooked(self, edits: Mapping[Site, Edit], places: Mapping[Site, tuple[Tap, nn.Module]]) -> Iterator[None]:
        if any(_at(self.model, tap.path) is not module for tap, module in places.values()):
            places = self._places(edits)  # adapters were attached or detached, or a module replaced, since the sites were looked up
        linears = [(site, *_standing(self.model, places[site][0].path)) for site in edits if site.point in HEADED]
        fired, again = Fired(edits), Replays(self.model)
        handles = list(again.handles)
        if linears:
            handles.append(self.model.register_forward_pre_hook(partial(_refuse_moved, linears)))
        try:
            for site, edit in edits.items():
                tap, module = places[site]
                edited = partial(_edited, site, tap, edit, fired, again)
                if site.point in PATTERNS:
                    handles += _softmax_hooks(module, site, edited)
                elif site.point == "result":
                    handles.append(module.register_forward_hook(partial(self._by_head, site, tap.heads, edited)))
                elif tap.side == "logits":
                    handles += _router_hooks(self.model.get_submodule(tap.path.rpartition(".")[0]), module, edited)
                else:
                    handles.append(_attach_hook(module, tap.side, edited))
            yield
        finally:
            for handle in handles:
                handle.remove()
        again.guard({site: module for site, (_, module) in places.items()})
        fired.demand(self.address)

    def _by_head(self, site: Site, count: int, edited: Edit, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        """Edit the output projection's ``output`` by head: ``z_h W_O_h``, with the adapters that are switched on."""
        weight = slot_at(self.model, self.architecture, site.layer, "attn.o").weight
        if isinstance(module, RoutedLinear):
            weight = module.branches[0][0].merged(weight)
        result = torch.einsum("...he,dhe->...hd", *(part.unflatten(-1, (count, -1)) for part in (args[0], weight)))
        new = edited(result)
        return None if new is None else output + (new - result).sum(-2)


def _at(model: nn.Module, path: str) -> nn.Module | None:
    """Return the module at ``path``, without the checks of ``get_submodule``; ``None`` if it was removed."""
    module: nn.Module | None = model
    for name in path.split("."):
        module = None if module is None else module._modules.get(name)
    return module


_Standing = tuple[Site, dict[str, nn.Module | None], str, nn.Module | None]
"""A site at a Linear, the modules beside it, its name among them, and the module that stood there."""


def _standing(model: nn.Module, path: str) -> tuple[dict[str, nn.Module | None], str, nn.Module | None]:
    parent, _, name = path.rpartition(".")
    beside = model.get_submodule(parent)._modules
    if name not in beside:
        refuse_booted(model)  # a bridge answers for the modules that it has replaced
    return beside, name, beside[name]


def _refuse_moved(linears: Iterable[_Standing], _module: nn.Module, _args: Any) -> None:
    """Raise ``RuntimeError`` if adapters were attached or detached at a site since its hook was registered."""
    for site, beside, name, module in linears:
        if beside[name] is not module:
            raise RuntimeError(
                f"adapters came to {site}, or went, since hooks() was entered, so that its edit would not see what they add: leave "
                "hooks() and enter it again"
            )


class Replays:
    """Check that edits also act when gradient checkpointing runs their modules again in the backward.

    A model in ``eval`` mode within ``no_grad`` needs no hook on the root, which would send every call the long way through torch.
    """

    def __init__(self, model: nn.Module):
        self._graded = torch.is_grad_enabled()
        self._due: dict[Site, int] = {}
        # in training, blocks may be checkpointed, and gradients switched on before the forward
        tells = self._graded or model.training
        self.handles = [model.register_forward_pre_hook(self._started, prepend=True)] if tells else []

    def _started(self, _module: nn.Module, _args: Any) -> None:
        self._graded = torch.is_grad_enabled()  # reentrant checkpointing switches it off inside

    def edited(self, site: Site) -> None:
        """Record that a value was replaced; ``RuntimeError`` in a replay for which no forward under the edit was recorded."""
        if in_backward():
            if not self._due.get(site):
                raise RuntimeError(
                    f"the backward runs the forward again (gradient checkpointing) and applied the edit of {site} more often than "
                    "forwards did: run every forward of this backward inside of hooks(), entered with gradients on, and one "
                    "backward per forward"
                )
            self._due[site] -= 1
        elif (self._graded or torch.is_grad_enabled()) and checkpointing():
            self._due[site] = self._due.get(site, 0) + 1

    def guard(self, modules: Mapping[Site, nn.Module]) -> None:
        """Put a guard on each module whose replay is still due; the guard is removed by the module's next forward."""
        for site in (site for site, due in self._due.items() if due):
            _guard(modules[site], site)


def _guard(module: nn.Module, site: Site) -> None:
    def check(_module: nn.Module, _args: Any) -> None:
        handle.remove()
        if in_backward():
            raise RuntimeError(
                f"the backward runs the forward again (gradient checkpointing), but the edit of {site} was removed: run backward() "
                "inside of hooks()"
            )

    handle = module.register_forward_pre_hook(check, prepend=True)


def checkpointing() -> bool:
    """Return whether this code runs under torch's gradient checkpointing, in a forward that was called with gradients on."""
    saving = torch._C._autograd._top_saved_tensors_default_hooks(True)  # pyright: ignore[reportAttributeAccessIssue]
    return not torch.is_grad_enabled() or (saving is not None and saving[0].__module__ == "torch.utils.checkpoint")


def _attach_hook(module: nn.Module, side: str, edited: Edit) -> RemovableHandle:
    if side == "input":
        return module.register_forward_pre_hook(partial(_before, edited), with_kwargs=True)
    return module.register_forward_hook(partial(_after, edited))


class _Logits(TorchFunctionMode):
    """Context: the first linear map in it, the logits of a router ``[b*s e]``, is edited as ``[b s e]``."""

    def __init__(self, edited: Edit):
        super().__init__()
        self.edited, self.due = edited, False
        self.rows: tuple[int, ...] = ()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is not nn.functional.linear or not self.due:
            return out
        self.due = False
        new = self.edited(out.view(*self.rows, out.shape[-1]))
        return out if new is None else new.reshape(out.shape)


def _router_hooks(mixture: nn.Module, router: nn.Module, edited: Edit) -> list[RemovableHandle]:
    """Register hooks that edit a router's logits; experts are chosen after them, within the router's own forward."""
    mode = _Logits(edited)

    def begin(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mode.rows = _stream(args, kwargs).shape[:-1]

    def enter(_module: nn.Module, _args: Any) -> None:
        mode.due = True
        mode.__enter__()

    def leave(*_: Any) -> None:
        mode.__exit__(None, None, None)

    return [
        mixture.register_forward_pre_hook(begin, with_kwargs=True),
        router.register_forward_pre_hook(enter),
        router.register_forward_hook(leave, always_call=True),
    ]


class _Softmax(TorchFunctionMode):
    """Context of an attention: the argument (``scores``) or the value (``pattern``) of its softmax, ``[b h q k]``, is edited.

    ``sdpa`` is taken apart, with a softmax in float32 or wider.
    """

    _SOFTMAX = (functional.softmax, torch.softmax, Tensor.softmax)

    def __init__(self, site: Site, edited: Edit):
        super().__init__()
        self.site, self.edited = site, edited
        self.entered = self.seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.scaled_dot_product_attention:
            return self._attend(*args, **(kwargs or {}))
        if func in self._SOFTMAX and args and args[0].ndim == 4:
            return self._softmax(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        group, wide = query.shape[1] // key.shape[1], torch.promote_types(query.dtype, torch.float32)
        key, values = (part.repeat_interleave(group, 1) for part in (key, value))
        scores = query.to(wide) @ key.to(wide).mT * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is not None:  # with a finite number, because the row of padding may be masked as a whole
            hidden = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, torch.finfo(wide).min) if hidden else scores + attn_mask
        pattern = self._softmax(functional.softmax, scores, -1).to(value)
        return (functional.dropout(pattern, dropout_p) if dropout_p else pattern) @ values

    def _softmax(self, softmax: Any, scores: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.seen:
            raise ValueError(f"layer {self.site.layer} has several softmaxes, so that it has no one {self.site.point}: read z")
        self.seen = True
        if self.site.point == "scores":
            scores = scores if (new := self.edited(scores)) is None else new
        pattern = softmax(scores, *args, **kwargs)
        return pattern if self.site.point == "scores" or (new := self.edited(pattern)) is None else new


def _softmax_hooks(attention: nn.Module, site: Site, edited: Edit) -> list[RemovableHandle]:
    """Register hooks that edit a point of an attention's softmax; contexts end in the reverse of their order."""
    mode = _Softmax(site, edited)

    def enter(*_: Any) -> None:
        mode.entered, mode.seen = True, False
        mode.__enter__()

    def leave(_module: nn.Module, _args: Any, output: Any) -> None:
        if mode.entered:  # another hook may have failed before
            mode.entered = False
            mode.__exit__(None, None, None)
            if output is not None and not mode.seen:
                raise ValueError(
                    f"layer {site.layer} calls neither softmax nor sdpa of torch, so {site.point} cannot be read: load the "
                    "model with attn_implementation='sdpa'"
                )

    return [
        attention.register_forward_pre_hook(enter),
        attention.register_forward_hook(leave, prepend=True, always_call=True),
    ]


def _stream(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return args[0] if args and isinstance(args[0], Tensor) else kwargs["hidden_states"]


def _edited(site: Site, tap: Tap, edit: Edit, fired: Fired, again: Replays, raw: Tensor) -> Tensor | None:
    """Return the module's value after the edit; ``None`` if the edit only read."""
    fired.saw(site)
    new = answered(site, edit, tap.read(site, raw))
    if new is None:
        return None
    again.edited(site)
    return tap.write(raw, new)


_Called = tuple[tuple[Any, ...], dict[str, Any]]


def _before(edited: Edit, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Called | None:
    new = edited(_stream(args, kwargs))
    if new is None:
        return None
    by_place = bool(args) and isinstance(args[0], Tensor)
    return ((new, *args[1:]), kwargs) if by_place else (args, {**kwargs, "hidden_states": new})


def _after(edited: Edit, _module: nn.Module, _args: Any, output: Any) -> Any:
    if isinstance(output, Tensor):
        return edited(output)
    new = edited(output[0])
    return None if new is None else (new, *output[1:])
