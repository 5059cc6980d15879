"""Adapter from ``KeyValues`` to a cache of transformers. It has its own module because transformers takes seconds to import."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from mi_route2.hosts.base import KeyValues

GROUPED = "route2_grouped_sdpa"


class TransformersCache(Cache):
    """transformers' cache interface over ``KeyValues``. The caller supplies positions and masks, so the sequence length stays 0."""

    def __init__(self, inner: KeyValues):
        super().__init__(layers=[])
        self._inner = inner

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return self._inner.update(key_states, value_states, layer_idx)

    def get_seq_length(self, layer_idx: int | None = None) -> int:
        if layer_idx is not None and hasattr(self._inner, "counted"):
            self._inner.counted = True  # pyright: ignore[reportAttributeAccessIssue]
        return 0


def _attention(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_unused: Any,
) -> tuple[Tensor, None]:
    """Compute transformers' ``sdpa`` attention without copying keys and values for each query head of a group.

    Without a mask, one query attends to all keys, and several to those up to their own. With the mask of one query, only the last
    one is wanted, and the others get its result.
    """
    if attention_mask is not None and attention_mask.shape[2] == 1 < (columns := query.shape[2]):
        last, _ = _attention(_module, query[:, :, -1:], key, value, attention_mask, scaling)
        return last.expand(-1, columns, -1, -1), None
    if query.shape[2] == 1 and query.device.type == "cpu":
        return _one_query(query, key, value, attention_mask, query.shape[-1] ** -0.5 if scaling is None else scaling), None
    group = query.shape[1] != key.shape[1]
    causal = attention_mask is None and query.shape[2] > 1
    assert not causal or query.shape[2] == key.shape[2], "only sequences from their beginning can do without a mask"
    mixed = scaled_dot_product_attention(query, key, value, attention_mask, is_causal=causal, scale=scaling, enable_gqa=group)
    return mixed.transpose(1, 2).contiguous(), None


def _one_query(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """Compute ``softmax(q k^T + mask) v`` for one query per row.

    On a CPU this is a quarter faster than ``sdpa``, whose kernels are made for many queries.
    """
    (b, heads, length, width), wide = key.shape, value.shape[3]
    grouped = query.reshape(b * heads, -1, width)
    keys = key.reshape(b * heads, length, width).mT
    if mask is None:
        scores = torch.bmm(grouped * scaling, keys)
    else:
        bias = mask.expand(b, heads, grouped.shape[1], length).reshape(b * heads, grouped.shape[1], length)
        scores = torch.baddbmm(bias, grouped, keys, alpha=scaling)
    return torch.bmm(scores.softmax(-1), value.reshape(b * heads, length, wide)).view(b, 1, -1, wide)


AttentionInterface.register(GROUPED, _attention)


@contextmanager
def grouped(config: Any) -> Iterator[None]:
    """Context: replace the model's ``sdpa`` attention by ``_attention``; any other implementation stays."""
    usual = config._attn_implementation
    if usual != "sdpa":
        yield
        return
    config._attn_implementation_internal = GROUPED
    try:
        yield
    finally:
        config._attn_implementation_internal = usual
