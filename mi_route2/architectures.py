"""Table of architectures: the module paths and hook names of every site. A new architecture is one new row.

Logical Linears have the same name in every architecture, even if their weights are fused into one module:

    blocks.<layer>.attn.q  .k  .v  .o        blocks.<layer>.mlp.gate  .up  .down        unembed

The points of the residual stream and of attention (``POINTS``) have one name too. A row gives the place of each in the Hugging Face
(or plain torch) module tree and in TransformerLens's bridge. nnsight walks the torch tree, so its paths are the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

Side = Literal["input", "output", "logits"]
Fusion = Literal["thirds", "per head", "sizes", "grouped"]

HOSTS: Mapping[str, str] = MappingProxyType(
    {
        "torch": "mi_route2.hosts.huggingface:TorchHost",
        "transformer_lens": "mi_route2.hosts.transformer_lens:BridgeHost",
        "nnsight": "mi_route2.hosts.nnsight:NNsightHost",
    }
)
"""Module and class of each host, imported on first use because the libraries take seconds to import."""

POINTS: Mapping[str, str] = MappingProxyType(
    {
        "resid_pre": "the residual stream as the block reads it, [b s d]",
        "resid_mid": "the residual stream between attention and MLP, [b s d]",
        "resid_post": "the residual stream at the output of the block, [b s d]",
        "attn_in": "the normalized residual stream, input of q, k and v, [b s d]",
        "attn_out": "what attention adds to the residual stream, after the post-norm if the model has one, [b s d]",
        "q": "queries as projected, before any norm or rotation, [b s h dh]",
        "k": "keys as projected, before any norm or rotation, [b s h dh] (key-value heads)",
        "v": "values, [b s h dh] (key-value heads)",
        "z": "attention-weighted values by head, input of the output projection, [b s h dh]",
        "mlp_in": "the normalized residual stream, input of the MLP, [b s d]",
        "mlp_out": "what the MLP adds to the residual stream, after the post-norm if the model has one, [b s d]",
    }
)
"""Points of a block: name to description and shape."""

EXPERT_POINTS: Mapping[str, str] = MappingProxyType({"router": "logits of the router over the experts, [b s e]"})
"""Points of a mixture of experts, on the host ``torch``: name to description and shape. A write changes which experts run."""

ATTENTION_POINTS: Mapping[str, str] = MappingProxyType(
    {
        "scores": "attention scores, the argument of the softmax, [b h q k]",
        "pattern": "attention probabilities, [b h q k]",
        "result": "what each head adds to the output of attention, before a post-norm and without the bias, [b s h d]",
    }
)
"""Points inside of attention: name to description and shape. They cost memory and take ``sdpa`` apart: select them by name."""

PATTERNS = ("scores", "pattern")
"""Points with an axis of keys, whose heads stand before the positions of their queries."""

ADAPTER_POINTS: Mapping[str, str] = MappingProxyType(
    {
        "kept_a": "the kept adapter's bottleneck, Vh x or A x, [b s r]",
        "kept_out": "what the kept adapter adds, [b s d_out]",
        "quarantine_out": "what the quarantine adds, [b s d_out]",
    }
)
"""Points of the adapters at one logical Linear: name to description and shape."""

LINEARS = ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.gate", "mlp.up", "mlp.down")
"""Logical Linears of a block; an architecture's row lists those that it has. ``unembed`` belongs to no block."""

HEADED = frozenset({"q", "k", "v", "z", *ATTENTION_POINTS})
"""Points whose values have a head axis."""

CAUSAL: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {"is_causal": (True,), "use_bidirectional_attention": (False, "vision"), "attention_dir": ("causal",)}
)
"""Config values of a model in which no token of text attends to later ones. A config that lacks a key counts as causal."""

FOUND = "_route2_row"
"""Attribute of a model in which the row that was found for it is kept."""

WRAPPED = "_original_component"
"""Attribute name under which TransformerLens's bridge stores a wrapped module, in the model's own tree too."""


@dataclass(frozen=True)
class LinearAt:
    """Place of a logical Linear: a module under the block, or a slice of the outputs of a fused module.

    Attributes:
        path: Module path under the block.
        fused: ``(i, n, how)``, the ``i``-th of ``n`` parts: contiguous ``thirds`` (GPT-2), ``sizes`` (Phi-3:
            queries, then the fewer keys and values), interleaved ``per head`` (GPT-NeoX), or ``grouped`` (Falcon: the queries of a
            key-value head, then its key and its value).
        transposed: True if the weight is stored ``[d_in d_out]`` (transformers' Conv1D).
    """

    path: str
    fused: tuple[int, int, Fusion] | None = None
    transposed: bool = False


@dataclass(frozen=True)
class At:
    """Place of a point in the torch tree: one side of a module under the block.

    Attributes:
        path: Module path under the block; ``""`` is the block itself.
        side: The module's input or output, or the ``logits`` of a router, which it computes first.
        linear: True if ``path`` names a logical Linear, whose output is the point (its slice, if the module is fused).
        scale: What the model multiplies the module's value with before it adds it to the stream (Granite).
    """

    path: str
    side: Side = "output"
    linear: bool = False
    scale: float = 1.0


@dataclass(frozen=True)
class VllmAt:
    """Place of a point in the layers of vLLM, which fuse some modules and carry the residual stream as two tensors.

    Attributes:
        path: Module path under the block; ``""`` is the block itself.
        side: The module's input or output.
        stream: True if the value is the sum of the pair ``(hidden_states, residual)``. To write it is to write the value and 0.
        part: ``q``, ``k`` or ``v``: the slice of the outputs of the fused ``qkv_proj``.
    """

    path: str
    side: Side = "output"
    stream: bool = False
    part: str = ""


@dataclass(frozen=True)
class Architecture:
    """Row of the table. In ``points`` and ``bridge_points``, a point that does not exist has a sentence that says why."""

    name: str
    classes: tuple[str, ...]
    blocks: str
    linears: Mapping[str, LinearAt]
    points: Mapping[str, At | str]
    unembed: str = "lm_head"
    bridge_points: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Hook names under ``blocks.<layer>.`` that differ from ``BRIDGE_POINTS``; an entry with a space says why none exists."""
    bridge_linears: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Component paths under ``blocks.<layer>.`` that differ from ``BRIDGE_LINEARS``."""
    positions: bool = True
    """True if the model needs ``position_ids``: a transformers model does not derive positions from its attention mask."""
    table: str | None = None
    """Name in the config of the number of learned positions, if a row that is longer would only meet torch's own error."""
    requires: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    """Config values that select this row, if a model class has several rows."""
    bridge_config: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    """Config values that the bridge assumes; with any other value it computes a different model."""
    found: bool = False
    """True if the row was found in a model (``mi_route2.found``): a layer may lack some of its Linears."""
    exact_eager: bool = False
    """True if eager attention computes in the model's dtype. In the other architectures transformers' softmax is float32, so the
    logits of a float64 model are NaN under left padding (the mask is float64's lowest number, minus infinity in float32)."""

    def __deepcopy__(self, memo: object) -> "Architecture":
        return self  # a constant; mapping proxies cannot be copied


BRIDGE_POINTS: Mapping[str, str] = MappingProxyType(
    {
        "resid_pre": "hook_in",
        "resid_mid": "ln2.hook_in",
        "resid_post": "hook_out",
        "attn_in": "attn.hook_in",
        "attn_out": "attn.hook_out",
        "q": "attn.q.hook_out",
        "k": "attn.k.hook_out",
        "v": "attn.v.hook_out",
        "z": "attn.o.hook_in",
        "mlp_in": "mlp.hook_in",
        "mlp_out": "mlp.hook_out",
        "scores": "attn.hook_attn_scores",
        "pattern": "attn.hook_pattern",
        "result": "its hook_result needs a setting that bypasses adapters: use the torch host",
    }
)
"""Hook names of TransformerLens's bridge under ``blocks.<layer>.``; an architecture's row may override them."""

LENS_POINTS: Mapping[str, str] = MappingProxyType(
    {
        "resid_pre": "hook_resid_pre", "resid_mid": "hook_resid_mid", "resid_post": "hook_resid_post", "attn_out": "hook_attn_out",
        "mlp_out": "hook_mlp_out", "q": "attn.hook_q", "k": "attn.hook_k", "v": "attn.hook_v", "z": "attn.hook_z",
        "scores": "attn.hook_attn_scores", "pattern": "attn.hook_pattern", "result": "attn.hook_result",
    }
)  # fmt: skip
"""Hook names of HookedTransformer, which are aliases in TransformerLens's bridge. ``attn_in`` and ``mlp_in`` have none, because
``hook_attn_in`` and ``hook_mlp_in`` are before the norms."""

ADAPTER_HOOKS: Mapping[str, str] = MappingProxyType(
    {"kept_a": "route.hook_kept_a", "kept_out": "route.hook_kept", "quarantine_out": "route.hook_quarantine"}
)
"""Hook names of the adapters' points, under the bridge's component path of their Linear."""

BRIDGE_LINEARS: Mapping[str, str] = MappingProxyType(
    {
        "attn.q": "attn.q", "attn.k": "attn.k", "attn.v": "attn.v", "attn.o": "attn.o",
        "mlp.gate": "mlp.gate", "mlp.up": "mlp.in", "mlp.down": "mlp.out",
    }
)  # fmt: skip
"""TransformerLens component paths of the logical Linears, under ``blocks.<layer>.``."""

VLLM_POINTS: Mapping[str, VllmAt] = MappingProxyType(
    {
        "resid_pre": VllmAt("", "input", stream=True),
        "resid_mid": VllmAt("post_attention_layernorm", "input", stream=True),
        "resid_post": VllmAt("", stream=True),
        "attn_in": VllmAt("input_layernorm"),
        "attn_out": VllmAt("self_attn"),
        "q": VllmAt("self_attn.qkv_proj", part="q"),
        "k": VllmAt("self_attn.qkv_proj", part="k"),
        "v": VllmAt("self_attn.qkv_proj", part="v"),
        "z": VllmAt("self_attn.o_proj", "input"),
        "mlp_in": VllmAt("post_attention_layernorm"),
        "mlp_out": VllmAt("mlp"),
    }
)
"""Places of the points in vLLM's layers of the Llama kind. Experts are fused there, so that only their router and sum are sites."""

VLLM_CLASSES: Mapping[str, Mapping[str, VllmAt]] = MappingProxyType(
    {f"{name}ForCausalLM": VLLM_POINTS for name in ("Qwen3", "Llama", "Qwen2", "Mistral")}
    | {"Qwen3MoeForCausalLM": MappingProxyType({**VLLM_POINTS, "router": VllmAt("mlp.gate")})}
)
"""vLLM's classes that were compared with the host ``torch`` -> the places of the points in their layers."""

_LLAMA_LINEARS = {
    **{f"attn.{name}": LinearAt(f"self_attn.{name}_proj") for name in "qkvo"},
    **{f"mlp.{name}": LinearAt(f"mlp.{name}_proj") for name in ("gate", "up", "down")},
}
_LLAMA_POINTS = {
    "resid_pre": At("", "input"),
    "resid_mid": At("post_attention_layernorm", "input"),
    "resid_post": At(""),
    "attn_in": At("input_layernorm"),
    "attn_out": At("self_attn"),
    "q": At("attn.q", linear=True),
    "k": At("attn.k", linear=True),
    "v": At("attn.v", linear=True),
    "z": At("self_attn.o_proj", "input"),
    "mlp_in": At("post_attention_layernorm"),
    "mlp_out": At("mlp"),
}
_GEMMA_POINTS = {
    **_LLAMA_POINTS,
    "resid_mid": At("pre_feedforward_layernorm", "input"),
    "attn_out": At("post_attention_layernorm"),
    "mlp_in": At("pre_feedforward_layernorm"),
    "mlp_out": At("post_feedforward_layernorm"),
}
_GEMMA_BRIDGE = {"attn_out": "ln1_post.hook_out", "mlp_out": "ln2_post.hook_out"}
PARALLEL = (
    "attention and MLP read the same stream in parallel, so there is no stream between them: use resid_pre, attn_out or mlp_out"
)
_BRIDGED_PARALLEL = "the bridge builds GPT-NeoX blocks as parallel ones, without a hook between attention and MLP: read it on torch"
_NEOX_LINEARS = {
    **{f"attn.{name}": LinearAt("attention.query_key_value", (i, 3, "per head")) for i, name in enumerate("qkv")},
    "attn.o": LinearAt("attention.dense"),
    "mlp.up": LinearAt("mlp.dense_h_to_4h"),
    "mlp.down": LinearAt("mlp.dense_4h_to_h"),
}
_NEOX_POINTS = {
    **_LLAMA_POINTS,
    "attn_out": At("post_attention_dropout"),
    "z": At("attention.dense", "input"),
    "mlp_out": At("post_mlp_dropout"),
}
_PLAIN_LINEARS = {f"attn.{name}": LinearAt(f"attn.{name}") for name in "qkvo"}
_PLAIN_POINTS = {
    **_LLAMA_POINTS,
    "resid_mid": At("ln2", "input"),
    "attn_in": At("ln1"),
    "attn_out": At("attn"),
    "z": At("attn.o", "input"),
    "mlp_in": At("ln2"),
}
_ATTENTION_ONLY = "its blocks are attention alone, so there is no MLP: use resid_pre, attn_out or resid_post"


def _llama_like(name: str, **changes: object) -> Architecture:
    fields = {"points": _LLAMA_POINTS, **changes}
    return Architecture(name, (f"{name}ForCausalLM",), "model.layers", _LLAMA_LINEARS, **fields)  # pyright: ignore[reportArgumentType]


def _neox(name: str, resid_mid: At | str, bridged: str, *, parallel: bool) -> Architecture:
    return Architecture(
        name,
        ("GPTNeoXForCausalLM",),
        "gpt_neox.layers",
        _NEOX_LINEARS,
        {**_NEOX_POINTS, "resid_mid": resid_mid},
        bridge_points={"resid_mid": bridged},
        bridge_config={"attention_bias": True},
        requires={"use_parallel_residual": parallel},
    )


def _native(
    which: str, mlp: Mapping[str, LinearAt], missing: Mapping[str, str] = MappingProxyType({}), **requires: bool
) -> Architecture:
    return Architecture(
        f"TransformerLens native{which}",
        ("NativeModel",),
        "layers",
        {**_PLAIN_LINEARS, **mlp},
        {**_PLAIN_POINTS, **missing},
        unembed="head",
        bridge_points=missing,
        requires=requires,
    )


ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        row.name: row
        for row in (
            _llama_like("Qwen3"),
            _llama_like("Llama"),
            _llama_like("Mistral"),
            _llama_like("Gemma2", points=_GEMMA_POINTS, bridge_points=_GEMMA_BRIDGE),
            _llama_like(
                "Gemma3",
                points=_GEMMA_POINTS,
                bridge_points=_GEMMA_BRIDGE,
                bridge_config={"attn_logit_softcapping": None},  # transformers ignores this cap in Gemma 3
            ),
            Architecture(
                "GPT2",
                ("GPT2LMHeadModel",),
                "transformer.h",
                {
                    **{f"attn.{n}": LinearAt("attn.c_attn", (i, 3, "thirds"), True) for i, n in enumerate("qkv")},
                    "attn.o": LinearAt("attn.c_proj", transposed=True),
                    "mlp.up": LinearAt("mlp.c_fc", transposed=True),
                    "mlp.down": LinearAt("mlp.c_proj", transposed=True),
                },
                {
                    **_LLAMA_POINTS,
                    "resid_mid": At("ln_2", "input"),
                    "attn_in": At("ln_1"),
                    "attn_out": At("attn"),
                    "z": At("attn.c_proj", "input"),
                    "mlp_in": At("ln_2"),
                },
                table="n_positions",
                bridge_config={"scale_attn_weights": True},
                exact_eager=True,
            ),
            _neox("GPTNeoX", PARALLEL, PARALLEL, parallel=True),
            _neox("GPTNeoX (sequential)", _LLAMA_POINTS["resid_mid"], _BRIDGED_PARALLEL, parallel=False),
            Architecture(
                "MicroGPT",
                ("MicroGPT",),
                "blocks",
                {**_PLAIN_LINEARS, "mlp.up": LinearAt("mlp.up"), "mlp.down": LinearAt("mlp.down")},
                _PLAIN_POINTS,
                unembed="unembed",
                positions=False,
            ),
            _native("", {"mlp.up": LinearAt("mlp.fc_in"), "mlp.down": LinearAt("mlp.fc_out")}, attn_only=False, gated_mlp=False),
            _native(
                ", gated",
                {"mlp.gate": LinearAt("mlp.gate"), "mlp.up": LinearAt("mlp.in"), "mlp.down": LinearAt("mlp.out")},
                attn_only=False,
                gated_mlp=True,
            ),
            _native(", attention alone", {}, dict.fromkeys(("resid_mid", "mlp_in", "mlp_out"), _ATTENTION_ONLY), attn_only=True),
        )
    }
)  # fmt: skip
"""Every known architecture, by name."""


def config_of(model: object) -> object:
    """Return the model's config of text, from its attribute ``config`` or ``cfg``; ``None`` if it has neither."""
    model = unwrapped(model)
    config = getattr(model, "config", None) or getattr(model, "cfg", None)
    text = getattr(config, "get_text_config", None)
    return config if text is None else text(decoder=True)


def unwrapped(model: object) -> object:
    """Return the model inside of the wrappers of ``torch.compile`` and DDP."""
    inside = {"OptimizedModule": "_orig_mod", "DistributedDataParallel": "module"}
    while name := inside.get(type(model).__name__):
        model = getattr(model, name)
    return model


def _class_name(model: object) -> str:
    """Return the name of the model's class; FSDP2 puts a class of its own before it."""
    kinds = type(unwrapped(model)).__mro__
    return kinds[2 if kinds[1].__name__ == "FSDPModule" else 0].__name__


def architecture_of(model: object) -> Architecture | None:
    """Return the row for a model's class and config, or the one that was found in the model; ``None`` if there is none."""
    name, config = _class_name(model), config_of(model)
    for row in ARCHITECTURES.values():
        if name in row.classes and all(getattr(config, key, value) == value for key, value in row.requires.items()):
            return row
    return vars(unwrapped(model)).get(FOUND)


_GROUPS = ("num_key_value_heads", "n_key_value_heads", "num_kv_heads")


def heads(model: object, point: str) -> int:
    """Return the number of heads at a point of ``HEADED``; ``ValueError`` if the model's config does not give it."""
    config = config_of(model)
    keys = ("num_attention_heads", "n_head", "n_heads", "heads")
    queries = next((int(getattr(config, key)) for key in keys if hasattr(config, key)), None)
    if queries is None:
        raise ValueError(f"the config of this {type(model).__name__} gives no number of heads: it needs one of {', '.join(keys)}")
    grouped = next((value for key in _GROUPS if (value := getattr(config, key, None))), None)
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        grouped = 1  # Falcon 7B, whose number of key-value heads is not read
    return int(grouped) if point in ("k", "v") and grouped else queries
