"""TransformerLens bridge as a host: captures and edits at its hook points, and hook points for the adapters."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.modules import module as every_module
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.factories.architecture_adapter_factory import ArchitectureAdapterFactory
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.architecture_adapter import ArchitectureAdapter
from transformer_lens.model_bridge.generalized_components import (
    AttentionBridge,
    BlockBridge,
    EmbeddingBridge,
    JointQKVAttentionBridge,
    LinearBridge,
    MLPBridge,
    NormalizationBridge,
    RMSNormalizationBridge,
    UnembeddingBridge,
)
from transformer_lens.model_bridge.generalized_components.position_embeddings_attention import PositionEmbeddingsAttentionBridge
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformer_lens.model_bridge.sources.native.model import NativeModel

from mi_route2.adapters import Adapters
from mi_route2.adapters.linear import Branch, RoutedLinear
from mi_route2.architectures import (
    ADAPTER_HOOKS,
    ADAPTER_POINTS,
    BRIDGE_LINEARS,
    BRIDGE_POINTS,
    PATTERNS,
    WRAPPED,
    Architecture,
    architecture_of,
    config_of,
)
from mi_route2.hosts.base import (
    Edit,
    Entering,
    Fired,
    Host,
    answered,
    forward_keywords,
    known_architecture,
    of_libraries,
    whole_stream,
)
from mi_route2.hosts.decoder import COMPARED
from mi_route2.hosts.huggingface import Replays, TorchHost
from mi_route2.rollouts import vocabulary
from mi_route2.sites import Site, Slot, left_out, matching, no_adapter, part_at

ROUTE = "route"
ROUTE_POINTS = ("hook_kept_a", "hook_kept", "hook_quarantine", "hook_mask")
BYPASSES: Mapping[str, tuple[str, ...]] = {
    "use_split_qkv_input": ("attn.q", "attn.k", "attn.v"),
    "use_attn_in": ("attn.q", "attn.k", "attn.v"),
    "use_attn_result": ("attn.o",),
}
"""Settings under which a bridge multiplies by the weights of these Linears itself, without calling them or their adapters.

Settings that bypass q, k and v also read the residual stream before the norm, so that an edit of ``attn_in`` is lost as well."""

_LAYOUT = "_weight_layout_in_out"
_PROCESSORS = ("enable_compatibility_mode", "process_weights")
_PROCESSING = (
    "it folds norms into the weights that adapters are trained on and saved for: boot a fresh bridge and leave its weights raw "
    "(enable_compatibility_mode(no_processing=True) does)"
)


class Inner(nn.Module):
    """Wrapper that moves MicroGPT's tree under ``inner``: the bridge uses the names ``embed``, ``blocks`` and ``unembed``."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, cache: Any = None, position_ids: Tensor | None = None
    ) -> Tensor:
        # under left padding the bridge computes positions for every model that takes them; with a 2-D mask, MicroGPT
        # computes its own
        explicit = attention_mask is not None and attention_mask.ndim == 4
        return self.inner(input_ids, attention_mask, cache, position_ids if explicit else None)


class InnerAdapter(ArchitectureAdapter):
    """Bridge components that wrap MicroGPT's own modules, so that its own forward runs, including its attention and cache."""

    supports_compatibility_mode = False
    supports_kv_cache = False  # generate() only knows transformers' cache; a direct call may pass the module's own cache

    def __init__(self, cfg: TransformerBridgeConfig):
        super().__init__(cfg)

        def norm(name: str) -> NormalizationBridge:
            return NormalizationBridge(name=name, config=self.cfg, use_native_layernorm_autograd=True)

        attention = AttentionBridge(name="attn", config=self.cfg, submodules={n: LinearBridge(name=n) for n in "qkvo"})
        mlp = MLPBridge(name="mlp", submodules={"in": LinearBridge(name="up"), "out": LinearBridge(name="down")})
        block = {"ln1": norm("ln1"), "attn": attention, "ln2": norm("ln2"), "mlp": mlp}
        self.component_mapping = {
            "embed": EmbeddingBridge(name="inner.embed"),
            "pos_embed": EmbeddingBridge(name="inner.pos_embed"),  # PosEmbedBridge would expand one cached token to the batch
            "blocks": BlockBridge(name="inner.blocks", config=self.cfg, submodules=block),
            "ln_final": norm("inner.ln_f"),
            "unembed": UnembeddingBridge(name="inner.unembed"),
        }


def boot(model: nn.Module) -> TransformerBridge:
    """Boot a bridge around ``model``, which is rewritten in place; ``ValueError`` for an unknown class or a model with adapters."""
    row, class_name = known_architecture(model), type(model).__name__
    if any(isinstance(module, RoutedLinear) for module in model.modules()):
        raise ValueError(
            "this model already has adapters, which booting a bridge would bypass or leave without hook points: call "
            "adapters.detach(), boot the bridge, then host.attach(...)"
        )
    if isinstance(model, NativeModel):
        return build_bridge_from_module(model, "TransformerLensNative", tl_config=model.cfg)
    if row.name != "MicroGPT":
        return build_bridge_from_module(model, class_name, hf_config=model.config)
    ArchitectureAdapterFactory.register_adapter(class_name, InnerAdapter)  # pyright: ignore[reportArgumentType]
    return build_bridge_from_module(Inner(model), class_name, tl_config=_micro_config(model.config))


BATCHED = ("generate_batch", "init_continuous_batching", "continuous_batching_context_manager")
"""Methods of transformers' continuous batching, which needs its own attention implementation, and not the bridge's."""


def refuse_batching(bridge: TransformerBridge) -> None:
    """Make transformers' continuous batching of the bridged model raise an error, because it silently returns wrong numbers."""

    def refuse(*_args: Any, **_kwargs: Any) -> None:
        raise RuntimeError(
            "transformers' continuous batching gives wrong numbers on a bridged model: use mi_route2.engine.Engine, or generate()"
        )

    for model in (bridge, bridge.original_model):
        for name in BATCHED:
            if hasattr(model, name):
                setattr(model, name, refuse)


def _micro_config(config: Any) -> TransformerBridgeConfig:
    return TransformerBridgeConfig(
        d_model=config.d,
        d_head=config.d // config.heads,
        n_layers=config.layers,
        n_ctx=config.context,
        n_heads=config.heads,
        d_mlp=config.mlp,
        d_vocab=config.vocab,
        act_fn="gelu",
        normalization_type="LN",
    )


def wrapped_model(bridge: TransformerBridge) -> nn.Module:
    """Return the model around which a bridge was booted."""
    model = bridge.original_model
    return model.inner if isinstance(model, Inner) else model


@dataclass(frozen=True)
class Place:
    """Logical Linear of a bridge: the component at ``path``, which wraps the Linear."""

    path: str
    component: nn.Module
    transposed: bool

    @property
    def wrapped(self) -> nn.Module:
        return getattr(self.component, WRAPPED)

    def slot(self, name: str) -> Slot:
        return Slot(name, f"{self.path}.{WRAPPED}", self.wrapped, None, self.transposed)


def linears(bridge: TransformerBridge, architecture: Architecture) -> dict[str, Place]:
    """Return every logical Linear of a bridge, in the order of the torch host, so that equal seeds give equal adapters."""
    paths = {**BRIDGE_LINEARS, **architecture.bridge_linears}
    places = {}
    for layer in range(len(bridge.blocks)):
        for linear, at in architecture.linears.items():
            path = f"blocks.{layer}.{paths[linear]}"
            component = part_at(bridge, path)
            if component is None or (architecture.found and not hasattr(component, WRAPPED)):
                if architecture.found:  # no layer of a found row needs to have all of its Linears
                    continue
                raise ValueError(f"this bridge has no {path}: another version of TransformerLens built it")
            wrapped = getattr(component, WRAPPED)
            base = wrapped.base if isinstance(wrapped, RoutedLinear) else wrapped
            plain = isinstance(base, nn.Linear)  # the bridge copies each part of a fused Conv1D into a Linear
            if architecture.found and not plain and type(base).__name__ != "Conv1D":  # a router under the name of a Linear
                continue
            places[f"blocks.{layer}.{linear}"] = Place(path, component, at.transposed and not plain)
    places["unembed"] = Place("unembed", bridge.get_submodule("unembed"), False)
    return places


def refuse_config(model: nn.Module, architecture: Architecture) -> None:
    """Raise ``ValueError`` if the model's config has a value that the bridge ignores."""
    for key, usual in architecture.bridge_config.items():
        if (value := getattr(config_of(model), key, usual)) != usual:
            raise ValueError(
                f"the bridge ignores {key}={value!r} of this {type(model).__name__} and would compute another model: "
                "use the torch or the nnsight host"
            )


def refuse_processed(bridge: TransformerBridge) -> None:
    """Raise ``RuntimeError`` if the bridge's weights were processed."""
    if bridge._weights_processed:
        raise RuntimeError(f"weight processing was applied to this bridge, and {_PROCESSING}")


def refuse_foreign(bridge: TransformerBridge) -> None:
    """Raise ``ValueError`` for a bridge around a model that already had adapters when the bridge was booted."""
    for module in bridge.original_model.modules():
        if isinstance(module, Branch) and not isinstance(module.hook_mask, HookPoint):
            raise ValueError(
                f"the adapters at {module.site} were attached before the bridge was booted, which bypasses them or leaves them "
                "without hook points: detach them, boot the bridge, then host.attach(...)"
            )


def refuse_bypassed(bridge: TransformerBridge, sites: Iterable[str]) -> None:
    """Raise ``RuntimeError`` if a setting of the bridge bypasses a Linear at ``sites``."""
    for flag, passed in BYPASSES.items():
        if getattr(bridge.cfg, flag, False) and (past := [site for site in sites if site.endswith(passed)]):
            raise RuntimeError(_bypass(flag, past[0]))


def refuse_uncalled(bridge: TransformerBridge, places: Iterable[Place], run: Callable[[], object]) -> None:
    """Raise ``ValueError`` for a Linear that ``run``, one forward of the bridge, does not call: adapters there would never act.

    A component that was replaced, or one in a parent that was replaced or that wraps another module, is in the tree and not called.
    """
    chosen, called = list(places), set[int]()
    with ExitStack() as hooks:
        for place in chosen:
            hooks.callback(place.wrapped.register_forward_pre_hook(lambda module, _: called.add(id(module))).remove)
        # dropout must not move the generator from which the adapters are drawn
        hooks.enter_context(torch.random.fork_rng([p.device for p in bridge.parameters() if p.is_cuda][:1]))
        hooks.enter_context(torch.no_grad())
        run()
    for place in chosen:
        if part_at(bridge, place.path) is not place.component or id(place.wrapped) not in called:
            raise ValueError(
                f"the model does not call the component at {place.path}, because it or its parent was replaced or wraps another "
                "module, so adapters there would never act: replace the module in the model, and boot a bridge around that"
            )


def _bypass(flag: str, site: str) -> str:
    return f"under {flag} the bridge multiplies by the weights of {site} itself and bypasses its adapters: set_{flag}(False)"


def refuse_lost(bridge: TransformerBridge, site: Site) -> None:
    """Raise ``RuntimeError`` for an edit that a setting of the bridge would lose."""
    for flag, passed in BYPASSES.items():
        if site.point == "attn_in" and "attn.q" in passed and getattr(bridge.cfg, flag, False):
            raise RuntimeError(
                f"under {flag} the bridge reads the stream before {site}, and loses an edit there: set_{flag}(False)"
            )


def refuse_left_padding(bridge: TransformerBridge, attention: Tensor) -> None:
    """Raise ``ValueError`` for left padding in float64, for which TransformerLens returns NaN.

    The float64 mask becomes -inf in its float32 softmax, and a query at leading padding has nothing else to attend to.
    """
    leading, exact = not bool(attention[:, 0].all()), next(bridge.parameters()).dtype == torch.float64
    affected = isinstance(bridge.blocks[0].attn, PositionEmbeddingsAttentionBridge) and not bridge.compatibility_mode
    if leading and exact and affected:
        raise ValueError(
            "the bridge's attention gives NaN for padding on the left in float64, because its softmax is float32: pad on the "
            "right, load the model in float32, or call bridge.enable_compatibility_mode(no_processing=True)"
        )


def list_points(bridge: TransformerBridge, adapters: Adapters, places: Mapping[str, Place]) -> None:
    """Add TransformerLens hook points to the adapters and register them under their component; ``adapters.detach()`` removes them.

    The scan adds to the hook registry. If the registry were cleared and scanned again, shared points would get the names of their
    aliases: ``hook.name`` of ``blocks.0.attn.hook_out`` would become ``blocks.0.hook_attn_out``.
    """
    for site, branch in adapters.sites.items():
        for point in ROUTE_POINTS:
            setattr(branch, point, HookPoint().train(branch.training))
        # nn.Module's own method: a component would set the attribute on the module it wraps, which also has a route
        nn.Module.__setattr__(places[site].component, ROUTE, branch)
        bridge._scan_existing_hooks(branch, f"{places[site].path}.{ROUTE}")  # the rest of the bridge is listed
    standing = [places[site] for site in adapters.sites]
    for parent in _parents(bridge, standing):
        vars(parent)[_LAYOUT] = partial(_stored_in_out, parent)
    guarded = _guard(bridge, list(adapters.sites))
    adapters.on_detach.append(partial(_unlist, bridge, standing, guarded))  # not a closure, which a deep copy would share


def _unlist(bridge: TransformerBridge, places: Iterable[Place], guarded: Iterable[str]) -> None:
    for place in places:
        delattr(place.component, ROUTE)
        for point in ROUTE_POINTS:
            bridge._hook_registry.pop(f"{place.path}.{ROUTE}.{point}", None)
    for parent in _parents(bridge, places):
        vars(parent).pop(_LAYOUT)
    for method in guarded:
        vars(bridge).pop(method, None)


def _parents(bridge: TransformerBridge, places: Iterable[Place]) -> list[nn.Module]:
    """Return the attention and MLP components around ``places``."""
    paths = dict.fromkeys(place.path.rpartition(".")[0] for place in places)
    return [parent for parent in map(bridge.get_submodule, paths) if hasattr(parent, _LAYOUT)]


def _stored_in_out(parent: Any, component: nn.Module) -> bool | None:
    """Return whether a weight is stored ``[d_in d_out]``, as the bridge needs for ``W_O``, ``OV`` and similar properties.

    The bridge decides by the class of the wrapped module. For a routed Linear it would guess from the shape, which transposes a
    square weight.
    """
    wrapped = getattr(component, WRAPPED)
    return wrapped.transposed if isinstance(wrapped, RoutedLinear) else getattr(type(parent), _LAYOUT)(parent, component)


def _guard(bridge: TransformerBridge, sites: list[str]) -> list[str]:
    """Replace the methods that would change weights under the adapters, or bypass them, by refusals; return their names."""
    whys = {name: f"{name}() is refused while adapters stand: {_PROCESSING}" for name in _PROCESSORS}
    for flag, passed in BYPASSES.items():
        if past := [site for site in sites if site.endswith(passed)]:
            whys[f"set_{flag}"] = _bypass(flag, past[0])
    for name, why in whys.items():
        vars(bridge)[name] = partial(_refuse, bridge, name, why)
    return list(whys)


def _refuse(bridge: TransformerBridge, method: str, why: str, *args: Any, **kwargs: Any) -> Any:
    if args == (False,) or kwargs.get("no_processing"):  # these calls change no weights and bypass no adapter
        return getattr(type(bridge), method)(bridge, *args, **kwargs)
    raise RuntimeError(why)


PROJECTIONS = ("q", "k", "v", "o")
"""Parts of a bridge's attention that the wrapped attention calls too, with their hooks."""


def fusible(bridge: TransformerBridge) -> bool:
    """Return whether the wrapped attention of every block computes what the bridge's own does, and nobody could tell them apart.

    The bridge's own is eager, because hooks may read and change scores, patterns, rotated queries and keys. The wrapped one has
    none of these, and no forks of its input by head (``use_split_qkv_input`` and the like).
    """
    everywhere = (*every_module._global_forward_hooks, *every_module._global_forward_pre_hooks)
    forked = any(getattr(bridge.cfg, flag, False) for flag in BYPASSES)
    return not (everywhere or forked or bridge.compatibility_mode) and all(_fusible(block.attn) for block in bridge.blocks)


def _fusible(attention: nn.Module) -> bool:
    if type(attention) is not PositionEmbeddingsAttentionBridge:
        return False
    wrapped = getattr(attention, WRAPPED)
    passed = [attention, wrapped]  # modules whose hooks would see something else, or nothing
    for name, part in attention.named_children():
        if name not in (*PROJECTIONS, WRAPPED, "hook_in", "hook_out"):
            passed += part.modules()
    hooks = (hook for point in passed for hook in (*point._forward_hooks.values(), *point._forward_pre_hooks.values()))
    return all(map(of_libraries, hooks)) and not any("forward" in vars(point) for point in passed)


def _observed(norm: RMSNormalizationBridge) -> bool:
    """Return whether the norm is not the wrapped one, or a hook could see its scale, or somebody put a forward on it."""
    overridden = "forward" in vars(norm) or not norm.use_native_layernorm_autograd
    inside = (norm.hook_scale, norm.hook_normalized)
    return overridden or any(point._forward_hooks or point._forward_pre_hooks or point.bwd_hooks for point in inside)


def _as_wrapped(norm: RMSNormalizationBridge, hidden_states: Tensor, **_given: object) -> Tensor:
    """The norm's forward without its scale and normalized values, which it computes for hooks and drops."""
    x, wrapped = norm.hook_in(hidden_states), getattr(norm, WRAPPED)
    return norm.hook_out(wrapped(x).to(x.dtype))


@dataclass(frozen=True)
class _Truth:
    """What a model computes before it is booted, at the points of its first and its last block."""

    tokens: Tensor
    logits: Tensor
    values: Mapping[Site, Tensor]

    @staticmethod
    def of(model: nn.Module) -> "_Truth":
        host = TorchHost(model)
        device = next(model.parameters()).device
        tokens = torch.randint(vocabulary(model) or 2, (1, 5), generator=torch.Generator().manual_seed(0)).to(device)
        ends = {host.layers()[0], host.layers()[-1]}
        with torch.no_grad():
            return _Truth(tokens, host.logits(tokens), host.capture([s for s in host.sites() if s.layer in ends], tokens))


def _near(own: Tensor, other: Tensor) -> bool:
    """Return True up to the rounding of attention in float32."""
    share = 1e-4 if own.dtype in (torch.float32, torch.float64) else 0.05
    return float((own - other).abs().max()) <= share * float(other.abs().max())


class BridgeHost(Host):
    """Host of a TransformerLens bridge; see ``Host``. Any other model is booted as a bridge, in place.

    Adapters are attached to the bridge's own Linears and have hook points; ``adapters.detach()`` removes both. While they are
    attached, the bridge refuses calls that would change the weights under them, or bypass them.

    Raises:
        ValueError: The architecture is unknown, the model had adapters before the bridge was booted, or its config has a value that
            the bridge ignores.
        RuntimeError: The bridge's weights were processed.
    """

    name = "transformer_lens"

    def __init__(self, model: nn.Module):
        inner = wrapped_model(model) if isinstance(model, TransformerBridge) else model
        if inner is not model and architecture_of(inner) is None:
            raise ValueError(
                f"the sites of a {type(inner).__name__} are found before it is booted: give open_host the transformers model itself"
            )
        self.architecture = known_architecture(inner)
        refuse_config(inner, self.architecture)
        truth = _Truth.of(inner) if self.architecture.found and inner is model else None
        try:
            self.bridge = model if isinstance(model, TransformerBridge) else boot(model)
        except (AttributeError, KeyError, RuntimeError) as error:
            if truth is None:
                raise
            raise ValueError(
                f"TransformerLens cannot boot this {type(inner).__name__} ({type(error).__name__}): load it anew for the torch host"
            ) from error
        self.model = self.bridge
        for block in self.bridge.blocks:
            block._maybe_wire_capture_hooks()  # taken off by changes of the bridge's modes
        refuse_foreign(self.bridge)
        refuse_processed(self.bridge)
        refuse_batching(self.bridge)
        self._places = linears(self.bridge, self.architecture)
        if truth is not None:
            self._compare(truth)

    def _compare(self, truth: "_Truth") -> None:
        """Leave out the points at which the bridge holds another value than the model; ``ValueError`` for other logits."""
        with torch.no_grad():
            logits = self._logits(truth.tokens, None)
        if not _near(logits, truth.logits):
            raise ValueError(f"the bridge of this {self.architecture.name} computes another model: use the torch host")
        reasons = dict(self.architecture.bridge_points)
        for site, value in truth.values.items():
            try:
                held = self.capture([site], truth.tokens)[site]
            except (KeyError, ValueError, RuntimeError):
                held = None
            if held is None or held.shape != value.shape or not _near(held, value):
                reasons[site.point] = "its hook is missing or holds another value than the model has there"
        for point, place in self.architecture.points.items():
            if isinstance(place, str):
                reasons[point] = place
        self.architecture = replace(self.architecture, bridge_points=reasons)

    def linears(self) -> dict[str, Slot]:
        return {name: place.slot(name) for name, place in self._places.items()}

    def left_out(self) -> dict[str, str]:
        return left_out(wrapped_model(self.bridge), self.linears())

    @contextmanager
    def fused(self) -> Iterator[None]:
        """Context: attention (as ``sdpa``) and norms are those of the wrapped model; nothing changes if a hook could tell."""
        if self.architecture.name not in COMPARED or not fusible(self.bridge):  # others cap scores, which sdpa does not
            yield
            return
        attentions = [block.attn for block in self.bridge.blocks]
        children = (part for block in self.bridge.blocks for parent in (block, block.attn) for part in parent.children())
        norms = [part for part in children if type(part) is RMSNormalizationBridge and not _observed(part)]
        config: Any = config_of(wrapped_model(self.bridge))
        usual = config._attn_implementation
        try:
            for norm in norms:
                vars(norm)["forward"] = partial(_as_wrapped, norm)
            for attention in attentions:
                # TransformerLens's forward for attention that is not taken apart: hook_in, the wrapped module, hook_out
                vars(attention)["forward"] = partial(AttentionBridge.forward, attention)
            config._attn_implementation_internal = "sdpa"
            yield
        finally:
            config._attn_implementation_internal = usual
            for changed in (*attentions, *norms):
                vars(changed).pop("forward", None)

    def _linears(self, patterns: tuple[str, ...]) -> dict[str, Slot]:
        refuse_processed(self.bridge)
        known = self.linears()
        chosen = matching(known, *patterns, without=self.left_out())
        refuse_bypassed(self.bridge, chosen)
        token = torch.zeros((1, 1), dtype=torch.long, device=next(self.bridge.parameters()).device)
        refuse_uncalled(self.bridge, (self._places[name] for name in chosen), lambda: self._logits(token, None))
        return known

    def _listed(self, adapters: Adapters) -> Adapters:
        list_points(self.bridge, adapters, self._places)
        return adapters

    def _logits(self, tokens: Int[Tensor, "b s"], attention: Bool[Tensor, "b s"] | None) -> Float[Tensor, "b s v"]:
        """Run the bridge; see ``Host``. ``ValueError`` for float64 with left padding, for which the bridge returns NaN."""
        refuse_processed(self.bridge)
        logits = self.bridge(tokens, **self.keywords(attention))
        for block in self.bridge.blocks:
            # GPT-2's and GPT-NeoX's attention keeps its last pattern, which nobody reads, and with it a graph that cannot be copied
            if (attention_of := block._modules.get("attn")) is not None:
                vars(attention_of)["_pattern"] = None
        return logits

    def keywords(self, attention: Bool[Tensor, "b s"] | None) -> dict[str, Any]:
        """Return the bridge's keyword arguments, as ``forward_keywords``."""
        return forward_keywords(wrapped_model(self.bridge), self.architecture, attention, partial(refuse_left_padding, self.bridge))

    def address(self, site: Site) -> str:
        """Return the TransformerLens hook name, ``blocks.3.ln2.hook_in`` or ``blocks.3.mlp.out.route.hook_kept_a``."""
        if site.point in ADAPTER_POINTS:
            known = {name: place.path for name, place in self._places.items() if isinstance(place.wrapped, RoutedLinear)}
            if site.slot not in known:
                raise no_adapter(site.slot, known)
            return f"{known[site.slot]}.{ADAPTER_HOOKS[site.point]}"
        layers = len(self.bridge.blocks)
        if site.layer is None or not 0 <= site.layer < layers:
            raise KeyError(f"{site} is outside the model: its layers are 0..{layers - 1}")
        hook = {**BRIDGE_POINTS, **self.architecture.bridge_points}.get(site.point, "use the torch host")
        if " " in hook:
            raise ValueError(f"the bridge of {self.architecture.name} has no {site.point}: {hook}")
        apart = (PositionEmbeddingsAttentionBridge, JointQKVAttentionBridge)
        if site.point in PATTERNS and not isinstance(self.bridge.blocks[site.layer]._modules.get("attn"), apart):
            raise ValueError(f"the bridge leaves attention of {self.architecture.name} whole: read {site.point} on the torch host")
        name = f"blocks.{site.layer}.{hook}"
        if self.architecture.found and name not in self.bridge.hook_dict:
            raise ValueError(f"layer {site.layer} of this {self.architecture.name} has no {site.point}: other layers have it")
        return name

    def _prepared(self, edits: Mapping[Site, Edit]) -> Entering:
        refuse_processed(self.bridge)
        return partial(self._hooked, edits, {site: self.address(site) for site in edits})

    @contextmanager
    def _hooked(self, edits: Mapping[Site, Edit], names: Mapping[Site, str]) -> Iterator[None]:
        # run_with_hooks bypasses the hooks of the bridge's own __call__, but every run calls the wrapped model
        fired, again = Fired(edits), Replays(self.bridge.original_model)
        hooks = [(names[site], self._hook(site, edit, fired, again)) for site, edit in whole_stream(edits).items()]
        try:
            with self.bridge.hooks(fwd_hooks=hooks):
                points = {site: self.bridge.hook_dict[name] for site, name in names.items()}  # adapters may be detached inside
                yield
        finally:
            for handle in again.handles:
                handle.remove()
        again.guard(points)
        fired.demand(self.address)

    def _hook(self, site: Site, edit: Edit, fired: Fired, again: Replays) -> Callable[..., Tensor | None]:
        def edited(value: Tensor, hook: HookPoint) -> Tensor | None:
            fired.saw(site)
            new = answered(site, edit, value)
            if new is None:
                return None
            refuse_lost(self.bridge, site)
            again.edited(site)
            return new.to(value.dtype).view_as(value)  # never a parameter, which the bridge's modules would keep as their own

        return edited
