"""A tiny random model of every architecture, padded rollouts, and policies on any host: what theorems about hosts need.

Every parameter is moved off its init, biases and norms too, so that a bias forgotten or a norm taken for the identity is seen.
``attn="exact"`` is eager attention in the model's own type, by the textbook: transformers' eager softmax is float32 whatever the
model, NaN for float64 under left padding, and the only one that Gemma2 has (torch's ``sdpa`` cannot cap its logits).
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen3Config,
)
from transformers.masking_utils import sdpa_mask

from mi_route2.adapters import Adapters, AdapterSpec
from mi_route2.hosts.base import Host
from mi_route2.hosts.huggingface import TorchHost
from mi_route2.rollouts import Policy, Rollouts
from mi_route2.routing import TrainBatch
from studies.environments.micro.model import MicroGPT
from studies.environments.micro.settings import MicroConfig

VOCAB, LAYERS, WIDTH, HEADS, HEAD, MLP, CONTEXT = 50, 2, 16, 4, 4, 24, 64
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": MLP,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED: dict[str, Any] = {**_BASE, "num_key_value_heads": 2, "head_dim": HEAD}
_TOKENS: dict[str, Any] = {key: _BASE[key] for key in ("pad_token_id", "bos_token_id", "eos_token_id")}

FAMILIES: Mapping[str, PretrainedConfig | MicroConfig] = {
    "Qwen3": Qwen3Config(**_GROUPED, attention_bias=True),
    "Llama": LlamaConfig(**_GROUPED, attention_bias=True, mlp_bias=True),
    "Mistral": MistralConfig(**_GROUPED),
    "Gemma2": Gemma2Config(**_GROUPED, query_pre_attn_scalar=HEAD),
    "Gemma3": Gemma3TextConfig(**_GROUPED, query_pre_attn_scalar=HEAD, layer_types=["sliding_attention", "full_attention"]),
    "GPT2": GPT2Config(
        vocab_size=VOCAB,
        n_embd=WIDTH,
        n_inner=MLP,
        n_layer=LAYERS,
        n_head=HEADS,
        n_positions=CONTEXT,
        **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0),
        **_TOKENS,
    ),
    "GPTNeoX": GPTNeoXConfig(**_BASE),
    "GPTNeoX (sequential)": GPTNeoXConfig(**_BASE, use_parallel_residual=False),
    "MicroGPT": MicroConfig(vocab=VOCAB, d=WIDTH, layers=LAYERS, heads=HEADS, mlp=MLP, context=CONTEXT),
}
"""One configuration an architecture, under the name of its row. Windows of sliding attention are longer than the context, and
there is no dropout."""

TRANSFORMERS = [name for name in FAMILIES if name != "MicroGPT"]
"""The families that are transformers models."""

WITHOUT_SDPA = ("Gemma2",)
"""Families whose logits are capped before the softmax; ``make_family(name, attn="sdpa")`` gives them ``exact``."""

SPECS = {
    "svd": AdapterSpec(kept="svd", quarantine_rank=3),
    "svd-low": AdapterSpec(kept="svd", rank=5, quarantine_rank=3),
    "lora": AdapterSpec(kept="lora", rank=4, quarantine_rank=3),
    "lora-shared": AdapterSpec(kept="lora", rank=4, quarantine="shared"),
    "svd-shared": AdapterSpec(kept="svd", quarantine="shared"),
    "lora-alone": AdapterSpec(kept="lora", rank=4, quarantine="none"),
}
"""Every kind of kept adapter and quarantine that fits at fused Linears as well."""


def exact_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    softcap: float | None = None,
    **_unused: object,
) -> tuple[Tensor, None]:
    """``softmax(cap(q k^T * scaling) + mask) v`` in the type of ``q``; a query that reads nothing (padding) reads everything."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.mT * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = torch.where(attention_mask, scores, torch.finfo(scores.dtype).min)
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None


def _exact_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    return sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False})


AttentionInterface.register("exact", exact_attention)
AttentionMaskInterface.register("exact", _exact_mask)


def make_family(
    name: str, dtype: torch.dtype = torch.float64, attn: str = "sdpa", seed: int = 0, *, window: int | None = None
) -> nn.Module:
    """A model of the family in ``eval`` mode, the same for the same ``seed``; ``window`` is the reach of sliding attention.

    ``attn`` is transformers' ``sdpa`` or ``eager``, or ``exact``; the micro model has its own.
    """
    return copy.deepcopy(_made(name, dtype, "exact" if attn == "sdpa" and name in WITHOUT_SDPA else attn, seed, window))


@cache
def _made(name: str, dtype: torch.dtype, attn: str, seed: int, window: int | None) -> nn.Module:
    """Made once, because a copy takes half of the time."""
    config = copy.deepcopy(FAMILIES[name])
    if isinstance(config, MicroConfig):
        model: nn.Module = MicroGPT(config, torch.Generator().manual_seed(seed)).to(dtype)
    else:
        if window is not None:
            config.sliding_window = window
        with torch.inference_mode(False), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # torch.manual_seed keeps a stack for each kind of device that is absent
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attn)
    return move_all(model, seed=seed).eval()


def move_all(model: nn.Module, scale: float = 0.25, seed: int = 0) -> nn.Module:
    """Add ``scale`` times standard normal noise to every parameter, drawn in float64 by the order of the parameters."""
    generator = torch.Generator().manual_seed(seed + 1000)
    with torch.no_grad():
        for p in model.parameters():
            p += (scale * torch.randn(p.shape, generator=generator, dtype=torch.float64)).to(p)
    return model


def move(adapters: Adapters, scale: float = 0.1, seed: int = 1) -> Adapters:
    """Move every adapter parameter off its init by ``scale`` (0 leaves the init)."""
    generator = torch.Generator().manual_seed(seed + 2000)
    with torch.no_grad():
        for p in [*adapters.kept_parameters().values(), *adapters.quarantine_parameters().values()]:
            p += (scale * torch.randn(p.shape, generator=generator, dtype=torch.float64)).to(p)
    return adapters


Side = Literal["left", "right"]


def make_tokens(n: int = 4, side: Side = "right", seed: int = 2, shortest: int = 4, longest: int = 9) -> tuple[Tensor, Tensor]:
    """``tokens [b s]`` (padding is 0, real tokens are not) and ``attention [b s]``; lengths differ, the first row is full.

    Either side holds the same real tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (n,), generator=generator)
    lengths[0], lengths[-1] = longest, shortest
    drawn = torch.randint(3, VOCAB, (n, longest), generator=generator)
    place = torch.arange(longest)
    attention = place < lengths[:, None] if side == "right" else place >= longest - lengths[:, None]
    tokens = torch.zeros_like(drawn)
    tokens[attention] = drawn[place < lengths[:, None]]
    return tokens, attention


def make_rollouts(n: int = 4, side: Side = "right", seed: int = 2) -> Rollouts:
    """Prompts of 2 to 4 tokens, the rest of each row is its completion."""
    tokens, attention = make_tokens(n, side, seed)
    order = attention.long().cumsum(1)
    prompt = 2 + torch.arange(n) % 3
    return Rollouts(tokens, attention, attention & (order > prompt[:, None]))


def make_batch(n: int = 4, side: Side = "right", seed: int = 2) -> TrainBatch:
    """Rollouts with advantages of both signs, in groups of two."""
    generator = torch.Generator().manual_seed(seed + 100)
    rewards = torch.randint(0, 5, (n,), generator=generator).double() / 4
    advantages = torch.randn(n, generator=generator, dtype=torch.float64)
    return TrainBatch(make_rollouts(n, side, seed), rewards, advantages, torch.arange(n) // 2, torch.zeros(n, dtype=torch.bool))


def alone(batch: TrainBatch, b: int) -> TrainBatch:
    """One rollout of a batch, without its padding."""
    one = batch.rows(torch.tensor([b]))
    real = one.rollouts.attention[0]
    return replace(one, rollouts=Rollouts(*(mask[:, real] for mask in vars(one.rollouts).values())))


def make_policy(
    name: str,
    spec: str | AdapterSpec = "lora",
    *patterns: str,
    scale: float = 0.1,
    host: Callable[[nn.Module], Host] = TorchHost,
    **model: Any,
) -> tuple[Host, Policy]:
    """A host (``host(model)``) of the family, and its policy with adapters moved by ``scale``; ``model`` is for ``make_family``."""
    chosen = SPECS[spec] if isinstance(spec, str) else spec
    made = host(make_family(name, **model))
    adapters = made.attach(*(patterns or ("blocks.*",)), spec=chosen, generator=torch.Generator().manual_seed(7))
    return made, made.policy(move(adapters, scale))
