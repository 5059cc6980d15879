"""A TransformerLens bridge as a host: captures and edits at its hook points, adapters with hook points of their own.

    host = BridgeHost(model)                                  a transformers model, MicroGPT, a native model or a bridge
    adapters = host.attach("blocks.*", spec=spec, generator=g)
    host.bridge.run_with_cache(tokens, names_filter="blocks.0.attn.q.route.hook_kept_a")

What the adapters add is addressable as everything else is in TransformerLens: ``route.hook_kept_a``, ``route.hook_kept``,
``route.hook_quarantine`` and ``route.hook_mask`` under ``blocks.<layer>.attn.q`` .k .v .o, ``mlp.gate`` .in .out, and ``unembed``.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge import TransformerBridge

from mi_route2.adapters import Adapters
from mi_route2.adapters.routed import RoutedLinear
from mi_route2.architectures import ADAPTER_POINTS, BRIDGE_POINTS
from mi_route2.hosts.base import Edit, Fired, Host, answered, known_architecture, positions, whole_stream
from mi_route2.hosts.bridge import (
    ROUTE,
    boot,
    linears,
    list_points,
    refuse_batching,
    refuse_bypassed,
    refuse_config,
    refuse_foreign,
    refuse_left_padding,
    refuse_lost,
    refuse_processed,
    wrapped_model,
)
from mi_route2.hosts.huggingface import HOOKS, Replays
from mi_route2.sites import Site, Slot, matching, no_adapter


class BridgeHost(Host):
    """See ``Host``. A model that is no bridge is booted as one, in place.

    Adapters stand at the bridge's own Linears, with hook points; ``adapters.detach()`` takes both away. While they stand the bridge
    refuses what would change the weights under them, or pass them by. ``ValueError`` for a model of no known architecture, for one
    that had adapters before the boot, and for one whose config the bridge does not heed; ``RuntimeError`` for processed weights.
    """

    name = "transformer_lens"

    def __init__(self, model: nn.Module):
        inner = wrapped_model(model) if isinstance(model, TransformerBridge) else model
        self.architecture = known_architecture(inner)
        refuse_config(inner, self.architecture)
        self.bridge = model if isinstance(model, TransformerBridge) else boot(model)
        self.model = self.bridge
        refuse_foreign(self.bridge)
        refuse_processed(self.bridge)
        refuse_batching(self.bridge)
        self._places = linears(self.bridge, self.architecture)

    def linears(self) -> dict[str, Slot]:
        return {name: place.slot(name) for name, place in self._places.items()}

    def _linears(self, patterns: tuple[str, ...]) -> dict[str, Slot]:
        refuse_processed(self.bridge)
        known = self.linears()
        refuse_bypassed(self.bridge, matching(known, *patterns))
        return known

    def _listed(self, adapters: Adapters) -> Adapters:
        list_points(self.bridge, adapters, self._places)
        return adapters

    def _logits(self, tokens: Int[Tensor, "b s"], attention: Bool[Tensor, "b s"] | None) -> Float[Tensor, "b s v"]:
        """See ``Host``. ``ValueError`` for float64 with padding on the left, where the bridge gives NaN."""
        refuse_processed(self.bridge)
        return self.bridge(tokens, **self.keywords(attention))

    def keywords(self, attention: Bool[Tensor, "b s"] | None) -> dict[str, Any]:
        """What the bridge is told beside the tokens: nothing where nothing stands left of a real token."""
        extra: dict[str, Any] = {"use_cache": False} if self.architecture.positions else {}
        if attention is None or bool((attention[:, 1:] <= attention[:, :-1]).all()):
            return extra
        refuse_left_padding(self.bridge, attention)
        if self.architecture.positions:
            extra["position_ids"] = positions(attention)
        return extra | {"attention_mask": attention.long()}

    def address(self, site: Site) -> str:
        """The TransformerLens hook name, ``blocks.3.ln2.hook_in`` or ``blocks.3.mlp.out.route.hook_kept_a``."""
        if site.point in ADAPTER_POINTS:
            known = {name: place.path for name, place in self._places.items() if isinstance(place.wrapped, RoutedLinear)}
            if site.slot not in known:
                raise no_adapter(site.slot, known)
            return f"{known[site.slot]}.{ROUTE}.{HOOKS[site.point]}"
        layers = len(self.bridge.blocks)
        if site.layer is None or not 0 <= site.layer < layers:
            raise KeyError(f"{site} is outside the model: its layers are 0..{layers - 1}")
        hook = {**BRIDGE_POINTS, **self.architecture.bridge_points}[site.point]
        if " " in hook:
            raise ValueError(f"the bridge of {self.architecture.name} has no {site.point}: {hook}")
        return f"blocks.{site.layer}.{hook}"

    @contextmanager
    def _hooks(self, edits: Mapping[Site, Edit]) -> Iterator[None]:
        refuse_processed(self.bridge)
        names = {site: self.address(site) for site in edits}
        # run_with_hooks calls the bridge's forward by itself; the model that the bridge wraps is called by every run
        fired, again = Fired(edits), Replays(self.bridge.original_model)
        hooks = [(names[site], self._hook(site, edit, fired, again)) for site, edit in whole_stream(edits).items()]
        try:
            with self.bridge.hooks(fwd_hooks=hooks):
                yield
        finally:
            again.root.remove()
        again.guard({site: self.bridge.hook_dict[name] for site, name in names.items()})
        fired.demand(self.address)

    def _hook(self, site: Site, edit: Edit, fired: Fired, again: Replays) -> Callable[..., Tensor | None]:
        def edited(value: Tensor, hook: HookPoint) -> Tensor | None:
            fired.saw(site)
            new = answered(site, edit, value)
            if new is None:
                return None
            refuse_lost(self.bridge, site)
            again.edited(site)
            return new.to(value.dtype)

        return edited
