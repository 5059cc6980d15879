"""Activation patching by plain torch hooks, one cell at a time: the oracle of patch sweeps. It knows the models' trees by heart.

hand = ByHand(model, "Qwen3", adapters)
values = hand.read(tokens)                                        {site: [s ...]}
hand.logits(tokens, Site(1, "z"), [3], values[...][[3]], head=2)   [v], behind the last token
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from families import FAMILIES, HEADS
from torch import Tensor, nn

from mi_route2.adapters import Adapters
from mi_route2.sites import Site

BLOCKS = {"GPT2": "transformer.h", "MicroGPT": "blocks", "GPTNeoX": "gpt_neox.layers", "GPTNeoX (sequential)": "gpt_neox.layers"}
_LLAMA = {
    "resid_pre": ("", "in"), "resid_post": ("", "out"), "attn_in": ("input_layernorm", "out"), "attn_out": ("self_attn", "out"),
    "q": ("self_attn.q_proj", "out"), "k": ("self_attn.k_proj", "out"), "v": ("self_attn.v_proj", "out"),
    "z": ("self_attn.o_proj", "in"), "resid_mid": ("post_attention_layernorm", "in"), "mlp_in": ("post_attention_layernorm", "out"),
    "mlp_out": ("mlp", "out"),
}  # fmt: skip
_GEMMA = {
    **_LLAMA, "attn_out": ("post_attention_layernorm", "out"), "resid_mid": ("pre_feedforward_layernorm", "in"),
    "mlp_in": ("pre_feedforward_layernorm", "out"), "mlp_out": ("post_feedforward_layernorm", "out"),
}  # fmt: skip
_GPT2 = {
    **_LLAMA, "attn_in": ("ln_1", "out"), "attn_out": ("attn", "out"), "q": ("attn.c_attn", "out"), "k": ("attn.c_attn", "out"),
    "v": ("attn.c_attn", "out"), "z": ("attn.c_proj", "in"), "resid_mid": ("ln_2", "in"), "mlp_in": ("ln_2", "out"),
}  # fmt: skip
_NEOX = {
    **_LLAMA, "attn_out": ("post_attention_dropout", "out"), "z": ("attention.dense", "in"), "mlp_out": ("post_mlp_dropout", "out"),
    **dict.fromkeys("qkv", ("attention.query_key_value", "out")),
}  # fmt: skip
_MICRO = {
    **_LLAMA, "attn_in": ("ln1", "out"), "attn_out": ("attn", "out"), "q": ("attn.q", "out"), "k": ("attn.k", "out"),
    "v": ("attn.v", "out"), "z": ("attn.o", "in"), "resid_mid": ("ln2", "in"), "mlp_in": ("ln2", "out"),
}  # fmt: skip
TABLES: dict[str, dict[str, tuple[str, str]]] = {
    **dict.fromkeys(("Qwen3", "Llama", "Mistral"), _LLAMA),
    **dict.fromkeys(("Gemma2", "Gemma3"), _GEMMA),
    "GPT2": _GPT2,
    "GPTNeoX": {point: at for point, at in _NEOX.items() if point != "resid_mid"},
    "GPTNeoX (sequential)": _NEOX,
    "MicroGPT": _MICRO,
}
_ADAPTER = {"kept_a": "hook_kept_a", "kept_out": "hook_kept", "quarantine_out": "hook_quarantine"}
Change = Callable[[Tensor], Tensor | None]


class ByHand:
    """See the module. ``sites`` are all that the model has, those of ``adapters`` too."""

    def __init__(self, model: nn.Module, family: str, adapters: Adapters | None = None):
        self.model, self.family, self.adapters = model, family, adapters
        self.blocks = model.get_submodule(BLOCKS.get(family, "model.layers"))
        self.sites = [Site(layer, point) for layer in range(len(list(self.blocks.children()))) for point in TABLES[family]]
        for name, branch in adapters.sites.items() if adapters else ():
            absent = {"quarantine_out"} if branch.quarantine is None else set()
            self.sites += [Site.parse(f"{name}.{point}") for point in _ADAPTER if point not in absent]

    def read(self, tokens: Tensor) -> dict[Site, Tensor]:
        found: dict[Site, Tensor] = {}

        def keep(site: Site) -> Change:
            return lambda value: found.__setitem__(site, value[0].clone())

        with torch.no_grad(), ExitStack() as stack:
            for site in self.sites:
                self.hook(stack, site, keep(site))
            self.run(tokens)
        return found

    def logits(self, tokens: Tensor, site: Site, positions: Sequence[int], values: Tensor, head: int | None = None) -> Tensor:
        """With all ``positions`` patched, ``[v]``."""
        return self.each(tokens, site, [positions], values[None], head)[0]

    def each(
        self, tokens: Tensor, site: Site, positions: Sequence[Sequence[int]], values: Tensor, head: int | None = None
    ) -> Tensor:
        """With one row of ``positions`` (and of ``values``) patched in each sequence, ``[n v]``."""
        at = torch.arange(len(positions))[:, None], torch.tensor([list(row) for row in positions])

        def write(value: Tensor) -> Tensor:
            new = value.clone()
            (new if head is None else new[:, :, head])[at] = values
            return new

        with torch.no_grad(), ExitStack() as stack:
            if site.point == "resid_mid":
                self.write_between(stack, site, at, values)
            else:
                self.hook(stack, site, write)
            return self.run(tokens, len(positions))

    def run(self, tokens: Tensor, n: int | None = None) -> Tensor:
        """Logits behind the last token, ``[v]``, or of ``n`` sequences."""
        with torch.no_grad():
            out = self.model(tokens.expand(n or 1, -1))
        logits = (out if isinstance(out, Tensor) else out.logits)[:, -1]
        return logits[0] if n is None else logits

    def hook(self, stack: ExitStack, site: Site, change: Change) -> None:
        module, side = self.module(site)

        def edit(raw: Tensor) -> Tensor | None:
            new = change(self.shown(site, raw))
            return None if new is None else self.hidden(site, raw, new)

        def before(_module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
            by_place = bool(args)
            new = edit(args[0] if by_place else kwargs["hidden_states"])
            if new is None:
                return None
            return ((new, *args[1:]), kwargs) if by_place else (args, {**kwargs, "hidden_states": new})

        def after(_module: nn.Module, _args: tuple, output: Any) -> Any:
            new = edit(output[0] if isinstance(output, tuple) else output)
            return new if new is None or not isinstance(output, tuple) else (new, *output[1:])

        pre = side == "in"
        handle = module.register_forward_pre_hook(before, with_kwargs=True) if pre else module.register_forward_hook(after)
        stack.callback(handle.remove)

    def write_between(self, stack: ExitStack, site: Site, at: tuple[Tensor, Tensor], values: Tensor) -> None:
        """The stream between attention and MLP, by what attention adds: ``value - stream``."""
        before: list[Tensor] = []
        self.hook(stack, Site(site.layer, "resid_pre"), lambda value: before.append(value.clone()))

        def write(value: Tensor) -> Tensor:
            new = value.clone()
            new[at] = values - before[-1][at]
            return new

        self.hook(stack, Site(site.layer, "attn_out"), write)

    def module(self, site: Site) -> tuple[nn.Module, str]:
        if site.linear:
            return getattr(self.adapters.sites[site.slot], _ADAPTER[site.point]), "out"
        path, side = TABLES[self.family][site.point]
        block = self.blocks.get_submodule(str(site.layer))
        return (block.get_submodule(path) if path else block), side

    def part(self, site: Site, raw: Tensor) -> Tensor:
        """A fused module's outputs, one axis for the part: ``[b s h 3 dh]`` or ``[b s 3 h dh]`` as ``[3 b s h dh]``."""
        if self.family == "GPT2":
            return raw.unflatten(-1, (3, HEADS, -1)).permute(2, 0, 1, 3, 4)
        return raw.unflatten(-1, (HEADS, 3, -1)).permute(3, 0, 1, 2, 4)

    def fused(self, site: Site) -> bool:
        return site.point in "qkv" and self.family.startswith("GPT")

    def shown(self, site: Site, raw: Tensor) -> Tensor:
        if self.fused(site):
            return self.part(site, raw)["qkv".index(site.point)]
        if site.point in ("q", "z"):
            return raw.unflatten(-1, (HEADS, -1))
        if site.point in ("k", "v"):
            grouped = getattr(FAMILIES[self.family], "num_key_value_heads", None)
            return raw.unflatten(-1, (grouped or HEADS, -1))
        return raw

    def hidden(self, site: Site, raw: Tensor, new: Tensor) -> Tensor:
        if not self.fused(site):
            return new.reshape(raw.shape)
        whole = raw.clone()
        self.part(site, whole)["qkv".index(site.point)].copy_(new)  # a view of it
        return whole
