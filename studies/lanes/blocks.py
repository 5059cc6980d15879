"""Attention and MLP of a block, with the gates that a block owns.

    attention   q, k normed over each head, rotary positions, q times a gain per head, causal softmax
    MLP         down(relu(up x)^2)

The two sublayers of a block are called apart, because the wiring decides what each reads and where it writes.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from studies.lanes.config import LanesConfig

EPS = 1e-6
ROTARY_BASE = 10_000.0


def rms(x: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
    """`x / sqrt(mean(x^2) + eps)` over the last axis, without a gain."""
    return functional.rms_norm(x, (x.shape[-1],), eps=EPS)


def rotations(length: int, d_head: int, like: Tensor) -> tuple[Float[Tensor, "s half"], Float[Tensor, "s half"]]:
    """Cosine and sine of every position's angles, computed in float64 and given in the type and on the device of `like`."""
    half = d_head // 2
    rates = ROTARY_BASE ** (-torch.arange(half, dtype=torch.float64, device=like.device) / half)
    angles = torch.arange(length, dtype=torch.float64, device=like.device)[:, None] * rates
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(x: Float[Tensor, "b h s d"], cos: Float[Tensor, "s half"], sin: Float[Tensor, "s half"]) -> Float[Tensor, "b h s d"]:
    """Turn the first half of the features against the second, by each position's angles."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class Attention(nn.Module):
    """Causal self-attention over `heads` heads."""

    def __init__(self, config: LanesConfig):
        super().__init__()
        d = config.d_model
        self.heads = config.heads
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.q_gain = nn.Parameter(torch.full((config.heads,), config.q_gain))

    def forward(
        self, x: Float[Tensor, "b s d"], turns: tuple[Tensor, Tensor], bias: Float[Tensor, "heads 1 d_head"] | None = None
    ) -> Float[Tensor, "b s d"]:
        """Attention's output. `bias`, if any, is added to the keys of every position, before they are normed."""
        q, k, v = (self._by_head(linear(x)) for linear in (self.q, self.k, self.v))
        if bias is not None:
            k = k + bias
        q = rotate(rms(q), *turns) * self.q_gain[:, None, None]
        z = functional.scaled_dot_product_attention(q, rotate(rms(k), *turns), v, is_causal=True)
        return self.o(z.transpose(1, 2).flatten(2))

    def _by_head(self, x: Float[Tensor, "b s d"]) -> Float[Tensor, "b h s d_head"]:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class MLP(nn.Module):
    """Two matrices with a squared rectifier between them."""

    def __init__(self, config: LanesConfig):
        super().__init__()
        self.up = nn.Linear(config.d_model, config.mlp * config.d_model, bias=False)
        self.down = nn.Linear(config.mlp * config.d_model, config.d_model, bias=False)

    def forward(self, x: Float[Tensor, "b s d"]) -> Float[Tensor, "b s d"]:
        return self.down(functional.relu(self.up(x)).square())


class Block(nn.Module):
    """The sublayers of one physical block, and its gates: `mix` (what of stream and embedding is read) and two scales."""

    def __init__(self, config: LanesConfig, layer: int):
        super().__init__()
        d = config.d_model
        self.attn, self.mlp = Attention(config), MLP(config)
        self.attn_scale, self.mlp_scale = nn.Parameter(torch.ones(d)), nn.Parameter(torch.ones(d))
        self.mix = nn.Parameter(torch.stack((torch.ones(d), torch.zeros(d))))
        self.damping = 1 / math.sqrt(layer + 1)

    def mixed(self, lane: Float[Tensor, "b s d"], x0: Float[Tensor, "b s d"]) -> Float[Tensor, "b s d"]:
        """What is read of a lane, before its norm: `m0 * lane + m1 * x0`."""
        return self.mix[0] * lane + self.mix[1] * x0
