"""MicroGPT, a pre-LN transformer small enough to train from scratch in half a minute, and sampling from it."""

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from studies.environments.micro.language import COMPLETION_LENGTH
from studies.environments.micro.settings import MicroConfig
from studies.environments.sampling import complete, draw_uniforms


@runtime_checkable
class MicroKeyValues(Protocol):
    """Protocol of the model's cache: ``KVCache``, or another implementation."""

    def update(self, key: Tensor, value: Tensor, layer: int, /) -> tuple[Tensor, Tensor]: ...


@dataclass
class KVCache:
    """Keys and values of the tokens read so far, one [b h s d] tensor per layer; `forward` appends to it."""

    keys: list[Float[Tensor, "b h s d"]] = field(default_factory=list)
    values: list[Float[Tensor, "b h s d"]] = field(default_factory=list)

    @property
    def length(self) -> int:
        return self.keys[0].shape[2] if self.keys else 0

    def update(
        self, key: Float[Tensor, "b h s d"], value: Float[Tensor, "b h s d"], layer: int
    ) -> tuple[Float[Tensor, "b h t d"], Float[Tensor, "b h t d"]]:
        """Append new keys and values to a layer, and return all of that layer's."""
        if layer == len(self.keys):
            self.keys.append(key)
            self.values.append(value)
        else:
            self.keys[layer] = torch.cat((self.keys[layer], key), dim=2)
            self.values[layer] = torch.cat((self.values[layer], value), dim=2)
        return self.keys[layer], self.values[layer]

    def keep(self, rows: Bool[Tensor, " b"]) -> None:
        """Drop every row of the batch that is False in `rows`."""
        self.keys = [key[rows] for key in self.keys]
        self.values = [value[rows] for value in self.values]


class MicroAttention(nn.Module):
    """Causal multi-head attention with separate, bias-free projections."""

    def __init__(self, config: MicroConfig, layer: int) -> None:
        super().__init__()
        self.heads, self.layer = config.heads, layer
        self.q, self.k, self.v, self.o = (nn.Linear(config.d, config.d, bias=False) for _ in range(4))

    def forward(
        self, x: Float[Tensor, "b s d"], allowed: Bool[Tensor, "#b 1 s t"] | None, cache: MicroKeyValues | None
    ) -> Float[Tensor, "b s d"]:
        """Apply attention under the mask `allowed`; None means causal over `x` only, or a single query over everything."""
        query, key, value = (self._split(linear(x)) for linear in (self.q, self.k, self.v))
        if cache is not None:
            key, value = cache.update(key, value, self.layer)
        causal = allowed is None and x.shape[1] > 1
        mixed = scaled_dot_product_attention(query, key, value, attn_mask=allowed, is_causal=causal)
        return self.o(mixed.transpose(1, 2).flatten(2))

    def _split(self, x: Float[Tensor, "b s d"]) -> Float[Tensor, "b h s dh"]:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class MicroMLP(nn.Module):
    def __init__(self, config: MicroConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.d, config.mlp, bias=False)
        self.down = nn.Linear(config.mlp, config.d, bias=False)

    def forward(self, x: Float[Tensor, "b s d"]) -> Float[Tensor, "b s d"]:
        return self.down(gelu(self.up(x)))


class MicroBlock(nn.Module):
    def __init__(self, config: MicroConfig, layer: int) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(config.d)
        self.attn = MicroAttention(config, layer)
        self.ln2 = nn.LayerNorm(config.d)
        self.mlp = MicroMLP(config)

    def forward(
        self, x: Float[Tensor, "b s d"], allowed: Bool[Tensor, "#b 1 s t"] | None, cache: MicroKeyValues | None
    ) -> Float[Tensor, "b s d"]:
        x = x + self.attn(self.ln1(x), allowed, cache)
        return x + self.mlp(self.ln2(x))


class MicroGPT(nn.Module):
    """Language model of the micro world. Parameters are drawn from `generator` (N(0, .02), residual outputs scaled by depth)."""

    def __init__(self, config: MicroConfig, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.d)
        self.pos_embed = nn.Embedding(config.context, config.d)
        self.blocks = nn.ModuleList(MicroBlock(config, layer) for layer in range(config.layers))
        self.ln_f = nn.LayerNorm(config.d)
        self.unembed = nn.Linear(config.d, config.vocab, bias=False)
        self._initialise(generator)

    @torch.no_grad()
    def _initialise(self, generator: torch.Generator | None) -> None:
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                residual = name.endswith(("attn.o.weight", "mlp.down.weight"))
                std = 0.02 / (2 * self.config.layers) ** 0.5 if residual else 0.02
                parameter.normal_(0.0, std, generator=generator)

    def forward(
        self,
        tokens: Int[Tensor, "b s"],
        attention_mask: Int[Tensor, "b t"] | Bool[Tensor, "b t"] | Bool[Tensor, "b 1 s t"] | None = None,
        cache: MicroKeyValues | None = None,
        position_ids: Int[Tensor, "b s"] | None = None,
    ) -> Float[Tensor, "b s v"]:
        """Return next-token logits ``[b s v]``; those at padding have no meaning.

        Args:
            tokens: Token ids.
            attention_mask: 1 on tokens and 0 on padding, left or right, over the cached and the new tokens (t = cached + s);
                positions count its ones. Without a mask, every token counts. Together with `position_ids`: which key each query may
                attend to, [b 1 s t].
            cache: Keys and values of earlier tokens. With `position_ids`, any implementation.
            position_ids: Positions of the tokens, which are not counted then.

        Raises:
            ValueError: More than `context` tokens, or a mask of another length.
        """
        if position_ids is not None:
            if attention_mask is None or attention_mask.ndim != 4:
                raise ValueError("position_ids need an attention_mask [b 1 s t], which says what each query may attend to")
            positions, allowed = position_ids, attention_mask
        else:
            positions, allowed = self._layout(tokens, attention_mask, cache)
        x = self.embed(tokens) + self.pos_embed(positions)
        for block in self.blocks:
            x = block(x, allowed, cache)
        return self.unembed(self.ln_f(x))

    def _layout(self, tokens: Tensor, attention_mask: Tensor | None, cache: MicroKeyValues | None) -> tuple[Tensor, Tensor | None]:
        """Return positions and attention mask, counted over a padding mask and this module's own cache."""
        if cache is not None and not isinstance(cache, KVCache):
            raise ValueError("a cache of another kind does not count its tokens: give position_ids and a 4-D attention_mask")
        past = cache.length if cache is not None else 0
        total = past + tokens.shape[1]
        if total > self.config.context:
            raise ValueError(f"{total} tokens exceed the context: choose at most {self.config.context}")
        if attention_mask is None:
            return torch.arange(past, total, device=tokens.device), _allowed(None, past, total, tokens.device)
        if attention_mask.shape[1] != total:
            raise ValueError(f"the mask covers {attention_mask.shape[1]} tokens, not all {total}, cached ones included")
        positions = (attention_mask.long().cumsum(1) - 1).clamp(min=0)[:, past:]
        return positions, _allowed(attention_mask, past, total, tokens.device)


def _allowed(
    attention_mask: Int[Tensor, "b t"] | Bool[Tensor, "b t"] | None, past: int, total: int, device: torch.device
) -> Bool[Tensor, "#b 1 s t"] | None:
    """Return the mask of keys that each new query may attend to, or None if the causal fast path is equivalent."""
    if attention_mask is None and (past == 0 or total - past == 1):
        return None
    query = torch.arange(past, total, device=device)[:, None]
    key = torch.arange(total, device=device)[None, :]
    allowed = (key <= query)[None, None]
    if attention_mask is not None:
        # A padding query attends to itself, because a row without any key would be NaN, and 0 * NaN would spread it.
        allowed = allowed & attention_mask.bool()[:, None, None, :] | (key == query)
    return allowed


@torch.no_grad()
def generate(
    model: MicroGPT,
    prompts: Int[Tensor, "b s"],
    max_new: int = COMPLETION_LENGTH,
    temperature: float = 1.0,
    *,
    generator: torch.Generator,
    eos: int,
) -> Int[Tensor, "b n"]:
    """Sample completions [b max_new], filled with `eos` after the first one. Prompts must all have the same length.

    Raises ValueError unless `temperature` is positive.
    """
    uniforms = draw_uniforms(len(prompts), max_new, generator).to(prompts.device)
    cache = KVCache()

    def go_on(drawn: Int[Tensor, " r"], alive: Bool[Tensor, " b"]) -> Float[Tensor, "r v"]:
        if not bool(alive.all()):
            cache.keep(alive)
        return model(drawn[:, None], cache=cache)[:, -1]

    def first() -> Float[Tensor, "b v"]:
        return model(prompts, cache=cache)[:, -1]

    return complete(first, go_on, uniforms, temperature=temperature, ends=(eos,), fill=eos)
