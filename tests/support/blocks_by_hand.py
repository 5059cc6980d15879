"""The blocks of every tiny family worked out by hand from the weights: an oracle for what is at each point and what an edit does.

It uses the model's embeddings, norms and rotary tables, and nothing else of it: projections are matrices, attention is the
textbook's. Adapters are added to the matrices. Every point can be replaced on the way.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from families import HEADS
from torch import Tensor, nn

from mi_route2.adapters.linear import LoRA, SharedQuarantine
from mi_route2.rollouts import Policy

Replaced = Mapping[tuple[int, str], Tensor]
"""(layer, point) -> the value to go on with."""

PATHS = {
    "llama": {
        **{f"attn.{n}": f"self_attn.{n}_proj" for n in "qkvo"},
        **{f"mlp.{n}": f"mlp.{n}_proj" for n in ("gate", "up", "down")},
    },
    "gpt2": {"attn.o": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"},
    "neox": {"attn.o": "attention.dense", "mlp.up": "mlp.dense_h_to_4h", "mlp.down": "mlp.dense_4h_to_h"},
    "micro": {n: n for n in ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.up", "mlp.down")},
}
NORMS = {  # before attention, before the MLP, behind attention, behind the MLP, last
    "llama": ("input_layernorm", "post_attention_layernorm", None, None, "model.norm"),
    "gemma": (
        "input_layernorm",
        "pre_feedforward_layernorm",
        "post_attention_layernorm",
        "post_feedforward_layernorm",
        "model.norm",
    ),
    "gpt2": ("ln_1", "ln_2", None, None, "transformer.ln_f"),
    "neox": ("input_layernorm", "post_attention_layernorm", None, None, "gpt_neox.final_layer_norm"),
    "micro": ("ln1", "ln2", None, None, "ln_f"),
}
BLOCKS = {"llama": "model.layers", "gpt2": "transformer.h", "neox": "gpt_neox.layers", "micro": "blocks"}
ACTS = {
    "Gemma2": lambda x: nn.functional.gelu(x, approximate="tanh"),
    "Gemma3": lambda x: nn.functional.gelu(x, approximate="tanh"),
    "GPT2": lambda x: nn.functional.gelu(x, approximate="tanh"),
}


@dataclass(frozen=True)
class ByHand:
    logits: Tensor
    points: dict[tuple[int, str], Tensor]


def by_hand(
    name: str, model: nn.Module, tokens: Tensor, *, policy: Policy | None = None, replaced: Replaced | None = None
) -> ByHand:
    """Logits and every point of every block; rows are full (padding on the right is then harmless)."""
    return _Hand(name, model, tokens, policy, replaced or {}).run()


class _Hand:
    def __init__(self, name: str, model: Any, tokens: Tensor, policy: Policy | None, replaced: Replaced):
        self.name, self.model, self.tokens, self.policy, self.replaced = name, model, tokens, policy, replaced
        self.kind = {"GPT2": "gpt2", "MicroGPT": "micro"}.get(name, "neox" if name.startswith("GPTNeoX") else "llama")
        self.norms = NORMS["gemma" if name.startswith("Gemma") else self.kind]
        self.place = torch.arange(tokens.shape[1])
        self.points: dict[tuple[int, str], Tensor] = {}

    def at(self, layer: int, point: str, value: Tensor) -> Tensor:
        value = self.replaced.get((layer, point), value)
        self.points[layer, point] = value
        return value

    def norm(self, x: Tensor, layer: int, which: int) -> Tensor:
        path = self.norms[which]
        return x if path is None else self.block(layer).get_submodule(path)(x)

    def block(self, layer: int) -> nn.Module:
        return self.model.get_submodule(f"{BLOCKS[self.kind]}.{layer}")

    def embedded(self) -> Tensor:
        if self.kind == "gpt2":
            return self.model.transformer.wte(self.tokens) + self.model.transformer.wpe(self.place)
        if self.kind == "neox":
            return self.model.gpt_neox.embed_in(self.tokens)
        if self.kind == "micro":
            return self.model.embed(self.tokens) + self.model.pos_embed(self.place)
        return self.model.model.embed_tokens(self.tokens)  # Gemma's scales its own output

    def run(self) -> ByHand:
        x = self.embedded()
        for layer in range(len(list(self.model.get_submodule(BLOCKS[self.kind]).children()))):
            x = self.one_block(layer, x)
        last = self.norms[4]
        assert last is not None
        head = self.model.unembed if self.kind == "micro" else self.model.lm_head
        logits = self.applied(self.model.get_submodule(last)(x), *self.adapted("unembed", *_plain(head)))
        if self.name == "Gemma2":
            logits = 30.0 * torch.tanh(logits / 30.0)
        return ByHand(logits, self.points)

    def one_block(self, layer: int, x: Tensor) -> Tensor:
        pre = self.at(layer, "resid_pre", x)
        read = self.at(layer, "attn_in", self.norm(pre, layer, 0))
        q, k, v = (self.at(layer, n, self.linear(layer, f"attn.{n}", read).unflatten(-1, (-1, 4))) for n in "qkv")
        z = self.at(layer, "z", self.attend(layer, q, k, v))
        attended = self.at(layer, "attn_out", self.norm(self.linear(layer, "attn.o", z.flatten(2)), layer, 2))
        stream = pre if self.name == "GPTNeoX" else self.at(layer, "resid_mid", pre + attended)
        read = self.at(layer, "mlp_in", self.norm(stream, layer, 1))
        added = self.at(layer, "mlp_out", self.norm(self.mlp(layer, read), layer, 3))
        return self.at(layer, "resid_post", stream + added + (attended if self.name == "GPTNeoX" else 0))

    def mlp(self, layer: int, x: Tensor) -> Tensor:
        up = self.linear(layer, "mlp.up", x)
        if self.kind == "llama":
            act = ACTS.get(self.name, nn.functional.silu)
            hidden = act(self.linear(layer, "mlp.gate", x)) * up
        else:
            hidden = ACTS.get(self.name, nn.functional.gelu)(up)
        return self.linear(layer, "mlp.down", hidden)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.name in ("Qwen3", "Gemma3"):
            own: Any = self.block(layer).get_submodule("self_attn")
            q, k = own.q_norm(q), own.k_norm(k)
        if self.kind in ("llama", "neox"):
            cos, sin = self.rotary(layer, q)
            q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        k, v = (t.repeat_interleave(HEADS // t.shape[2], dim=2) for t in (k, v))
        scores = torch.einsum("bshd,bthd->bhst", q, k) / q.shape[-1] ** 0.5
        if self.name == "Gemma2":
            scores = 50.0 * torch.tanh(scores / 50.0)
        scores = scores.masked_fill(self.place[:, None] < self.place[None, :], -torch.inf)
        return torch.einsum("bhst,bthd->bshd", scores.softmax(-1), v)

    def rotary(self, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        inner = self.model.gpt_neox if self.kind == "neox" else self.model.model
        kind = (self.model.config.layer_types[layer],) if self.name == "Gemma3" else ()
        return inner.rotary_emb(like, self.place[None], *kind)

    def linear(self, layer: int, linear: str, x: Tensor) -> Tensor:
        W, bias = self.matrix(layer, linear)
        return self.applied(x, *self.adapted(f"blocks.{layer}.{linear}", W, bias))

    def applied(self, x: Tensor, W: Tensor, bias: Tensor | None) -> Tensor:
        return x @ W.T if bias is None else x @ W.T + bias

    def matrix(self, layer: int, linear: str) -> tuple[Tensor, Tensor | None]:
        block, part = self.block(layer), "qkv".find(linear[-1])
        if linear in PATHS[self.kind]:
            module: Any = block.get_submodule(PATHS[self.kind][linear])
            W, bias = _plain(module)
            return (W.T if self.kind == "gpt2" else W), bias
        if self.kind == "gpt2":
            W, bias = _plain(block.get_submodule("attn.c_attn"))
            return W.T.chunk(3)[part], bias.chunk(3)[part]
        W, bias = _plain(block.get_submodule("attention.query_key_value"))
        return W.unflatten(0, (HEADS, 3, 4))[:, part].flatten(0, 1), bias.unflatten(0, (HEADS, 3, 4))[:, part].flatten()

    def adapted(self, slot: str, W: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        branch = None if self.policy is None else self.policy.adapters.sites.get(slot)
        if branch is None:
            return W, bias
        kept, quarantine = branch.kept, branch.quarantine
        W = W + (kept.B @ kept.A if isinstance(kept, LoRA) else kept.U @ kept.dS.diag() @ kept.Vh)
        if isinstance(quarantine, SharedQuarantine):
            own = quarantine.shared
            W = W + (own @ kept.A if isinstance(kept, LoRA) else kept.U @ own.diag() @ kept.Vh)
        elif quarantine is not None:
            W = W + quarantine.B @ quarantine.A
        return W, bias


def _plain(module: Any) -> tuple[Tensor, Any]:
    base = getattr(module, "base", module)
    return base.weight, base.bias


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The first ``cos.shape[-1]`` numbers of each head are turned, in pairs of first and second half; the rest stays."""
    n = cos.shape[-1]
    turned, rest = x[..., :n], x[..., n:]
    half = torch.cat([-turned[..., n // 2 :], turned[..., : n // 2]], dim=-1)
    return torch.cat([turned * cos[:, :, None] + half * sin[:, :, None], rest], dim=-1)
