"""A plain torch model as a host: a transformers model or the micro model, hooked by torch's own module hooks."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mi_route2.adapters import Adapters, AdapterSpec, attach
from mi_route2.adapters.routed import Branch
from mi_route2.architectures import ADAPTER_POINTS, Architecture, At, heads
from mi_route2.hosts.base import Edit, Fired, known_architecture, positions, reader, split_heads, whole_stream
from mi_route2.rollouts import Policy
from mi_route2.sites import Site, block_paths, nearest, slots

HOOKS = {"kept_a": "hook_kept_a", "kept_out": "hook_kept", "quarantine_out": "hook_quarantine"}
"""The adapter's points by the name of their module in a ``Branch``."""


@dataclass(frozen=True)
class Tap:
    """One side of a module, or some rows of its output, split into ``heads`` where the point is one by head."""

    path: str
    side: str
    rows: Tensor | None = None
    heads: int = 1

    def read(self, site: Site, raw: Tensor) -> Tensor:
        """The module's value in the point's shape."""
        return split_heads(site, raw if self.rows is None else raw[..., self.rows], self.heads)

    def write(self, raw: Tensor, new: Tensor) -> Tensor:
        """``raw`` with the point's value replaced."""
        flat = new.reshape(*raw.shape[:-1], -1).to(raw.dtype)
        return flat if self.rows is None else raw.index_copy(-1, self.rows.to(raw.device), flat)


def branches(model: nn.Module) -> dict[str, tuple[str, Branch]]:
    """Logical Linear -> (module path, branch) of every attached adapter."""
    return {m.site: (path, m) for path, m in model.named_modules() if isinstance(m, Branch)}


def tap_of(model: nn.Module, architecture: Architecture, site: Site) -> Tap:
    """Where ``site`` is in the torch tree; ``ValueError`` or ``KeyError`` in one sentence where it is not."""
    if site.point in ADAPTER_POINTS:
        known = branches(model)
        if site.slot not in known:
            raise KeyError(f"no adapter at {site.slot!r}: the nearest are {nearest(site.slot, list(known))}")
        return Tap(f"{known[site.slot][0]}.{HOOKS[site.point]}", "output")
    paths = block_paths(model, architecture)
    if site.layer is None or not 0 <= site.layer < len(paths):
        raise KeyError(f"{site} is outside the model: its layers are 0..{len(paths) - 1}")
    at = architecture.points[site.point]
    if isinstance(at, str):
        raise ValueError(f"{architecture.name} has no {site.point}: {at}")
    return _tap(model, paths[site.layer], at, site)


def _tap(model: nn.Module, block: str, at: At, site: Site) -> Tap:
    count = heads(model, site.point)
    if at.linear:
        slot = slots(model)[f"blocks.{site.layer}.{at.path}"]
        return Tap(slot.path, "output", slot.rows, count)
    return Tap(f"{block}.{at.path}" if at.path else block, at.side, None, count)


class TorchHost:
    """See ``Host``. Raises ``ValueError`` for a model of no known architecture."""

    name = "torch"

    def __init__(self, model: nn.Module):
        self.model, self.architecture = model, known_architecture(model)

    def attach(
        self,
        *patterns: str,
        spec: AdapterSpec | None = None,
        generator: torch.Generator,
        expect: int | None = None,
        cache_dir: Path | None = None,
    ) -> Adapters:
        return attach(self.model, *patterns, spec=spec, generator=generator, expect=expect, cache_dir=cache_dir)

    def policy(self, adapters: Adapters) -> Policy:
        return Policy(self.model, adapters, lambda _model, tokens, attention: self.logits(tokens, attention))

    def logits(self, tokens: Int[Tensor, "b s"], attention: Bool[Tensor, "b s"] | None = None) -> Float[Tensor, "b s v"]:
        out = self.model(tokens, **self.keywords(attention))
        return out if isinstance(out, Tensor) else out.logits

    def keywords(self, attention: Bool[Tensor, "b s"] | None) -> dict[str, Any]:
        """What the model is told beside the tokens: nothing where nothing stands left of a real token."""
        extra: dict[str, Any] = {"use_cache": False} if self.architecture.positions else {}
        if attention is None or bool((attention[:, 1:] <= attention[:, :-1]).all()):
            return extra
        if self.architecture.positions:
            extra["position_ids"] = positions(attention)
        return extra | {"attention_mask": attention.long()}

    def address(self, site: Site) -> str:
        tap = tap_of(self.model, self.architecture, site)
        return f"{tap.path}.{tap.side}" + ("" if tap.rows is None else f"[..., {len(tap.rows)} rows]")

    def capture(
        self, sites: Iterable[Site], tokens: Int[Tensor, "b s"], attention: Bool[Tensor, "b s"] | None = None
    ) -> dict[Site, Tensor]:
        found: dict[Site, Tensor] = {}
        with torch.no_grad(), self.hooks({site: reader(found, site) for site in sites}):
            self.logits(tokens, attention)
        return found

    @contextmanager
    def hooks(self, edits: Mapping[Site, Edit]) -> Iterator[None]:
        fired = Fired(edits)
        whole = whole_stream(edits)
        taps = {site: tap_of(self.model, self.architecture, site) for site in whole}
        with ExitStack() as handles:
            for site, tap in taps.items():
                handles.callback(_attach_hook(self.model.get_submodule(tap.path), site, tap, whole[site], fired).remove)
            yield
        fired.demand(self.address)


def _attach_hook(module: nn.Module, site: Site, tap: Tap, edit: Edit, fired: Fired) -> RemovableHandle:
    def edited(raw: Tensor) -> Tensor | None:
        fired.saw(site)
        new = edit(tap.read(site, raw))
        return None if new is None else tap.write(raw, new)

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        by_place = bool(args) and isinstance(args[0], Tensor)
        new = edited(args[0] if by_place else kwargs["hidden_states"])
        if new is None:
            return None
        return ((new, *args[1:]), kwargs) if by_place else (args, {**kwargs, "hidden_states": new})

    def after(_module: nn.Module, _args: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return edited(output)
        new = edited(output[0])
        return None if new is None else (new, *output[1:])

    if tap.side == "input":
        return module.register_forward_pre_hook(before, with_kwargs=True)
    return module.register_forward_hook(after)
