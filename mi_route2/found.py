"""Row of ``architectures.py`` for a model that has none: proposed from its module tree, and verified by one forward.

    row = found_row(model)

Names of modules propose the logical Linears. The points are those values of a forward over random tokens that fit the definition of
a point, in the first block and in the last:

    resid_mid = resid_pre + attn_out        resid_post = resid_mid + mlp_out

In a parallel block there is no ``resid_mid``, and ``resid_post = resid_pre + attn_out + mlp_out``. Some models scale what is added
outside of any module; then the row holds the factor.
"""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from mi_route2.architectures import FOUND, PARALLEL, Architecture, At, LinearAt, config_of, unwrapped

TOKENS = 5
"""Length of the row of random tokens."""
ULPS = 4
"""Units in the last place, of the sum of all magnitudes, by which a sum may miss: the model adds in its own dtype."""
ATTENTION = ("self_attn", "self_attention", "attention", "attn")
MLP = ("mlp", "feed_forward", "block_sparse_moe", "ffn")
PARTS: Mapping[str, tuple[str, ...]] = {
    "q": ("q_proj",), "k": ("k_proj",), "v": ("v_proj",), "o": ("o_proj", "out_proj", "dense", "c_proj"),
    "gate": ("gate_proj",), "up": ("up_proj", "fc1", "dense_h_to_4h", "c_fc", "fc_in"),
    "down": ("down_proj", "fc2", "dense_4h_to_h", "c_proj", "fc_out"),
}  # fmt: skip
"""Logical Linear -> names of its module."""


class NotFoundError(ValueError):
    """A check of a proposed row failed; the message names the check."""


def found_row(model: nn.Module) -> Architecture:
    """Return a row for a causal decoder whose class has none, and keep it in the model, where ``architecture_of`` finds it.

    Raises:
        NotFoundError: The model has no blocks that can be told apart, or no values of it add up to its stream.
    """
    plain: Any = unwrapped(model)
    name, config = type(plain).__name__, config_of(plain)
    if getattr(getattr(plain, "config", None), "is_encoder_decoder", False):
        raise NotFoundError(f"{name} is an encoder-decoder: only models that read from left to right have sites")
    if not hasattr(plain, "get_output_embeddings"):
        raise NotFoundError(f"{name} is no known architecture, and no model of transformers in which one could be found")
    head = _head(plain)
    blocks = _blocks(plain, getattr(config, "num_hidden_layers", None))
    stack = plain.get_submodule(blocks)
    whole = next((block for block in stack if _child(block, ATTENTION)), stack[0])
    attention, mlp = _child(whole, ATTENTION), _child(whole, MLP)
    if not attention:
        raise NotFoundError(f"the blocks of this {name} have no attention under the names {', '.join(ATTENTION)}")
    linears = _linears(stack, attention, mlp)
    points = _points(plain, [block for block in stack if _child(block, (attention,))], attention, mlp, linears)
    takes = "position_ids" in inspect.signature(plain.forward).parameters
    row = Architecture(name, (name,), blocks, linears, points, unembed=head, positions=takes, found=True)
    vars(plain)[FOUND] = row
    return row


def _blocks(model: nn.Module, layers: int | None) -> str:
    lists = [
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == layers and not any(part in path for part in ("vision", "audio"))
    ]
    lists = [path for path in lists if not any(path.startswith(f"{other}.") for other in lists)]  # experts are in blocks
    if len(lists) != 1:
        raise NotFoundError(f"this {type(model).__name__} has {len(lists)} lists of {layers} blocks, not one")
    return lists[0]


def _head(model: Any) -> str:
    head = model.get_output_embeddings()
    if head is None:
        raise NotFoundError(f"{type(model).__name__} has no head for language modeling: load it with AutoModelForCausalLM")
    return next(path for path, module in model.named_modules() if module is head)


def _child(block: nn.Module, names: Iterable[str]) -> str:
    return next((name for name in names if name in block._modules), "")


def _linears(stack: nn.Module, attention: str, mlp: str) -> dict[str, LinearAt]:
    found: dict[str, LinearAt] = {}
    for block in stack.children():
        for room, within, names in (("attn", attention, "qkvo"), ("mlp", mlp, ("gate", "up", "down"))):
            inside = block._modules.get(within) if within else block
            if inside is None:
                continue
            prefix = f"{within}." if within else ""
            transposed = {name for name, module in inside.named_children() if type(module).__name__ == "Conv1D"}
            for name in names:
                if module := _child(inside, PARTS[name]):
                    found.setdefault(f"{room}.{name}", LinearAt(prefix + module, transposed=module in transposed))
            for fused, how in (("qkv_proj", "sizes"), ("query_key_value", _how(inside)), ("c_attn", "thirds")):
                known = fused in inside._modules and (how != "thirds" or _thirds(inside.get_submodule(fused)))
                if room == "attn" and known:
                    found |= {f"attn.{n}": LinearAt(prefix + fused, (i, 3, how), fused in transposed) for i, n in enumerate("qkv")}  # pyright: ignore[reportArgumentType]
            if room == "mlp" and "gate_up_proj" in inside._modules:
                found |= {f"mlp.{n}": LinearAt(f"{prefix}gate_up_proj", (i, 2, "thirds")) for i, n in enumerate(("gate", "up"))}
    return found


def _thirds(module: nn.Module) -> bool:
    """Return True for a Conv1D whose queries, keys and values are as wide as the stream: other layouts have the same name."""
    weight = module.get_parameter("weight")
    return weight.shape[1] == 3 * weight.shape[0]


def _how(attention: nn.Module) -> str:
    grouped = getattr(attention, "num_kv_heads", None) not in (None, getattr(attention, "num_heads", None))
    return "grouped" if grouped else "per head"


@dataclass
class _Values:
    """What passed the sides of a block's modules in one forward, in the order in which the sides fired."""

    into: Tensor
    out: Tensor
    sides: dict[tuple[str, str], Tensor]


@contextmanager
def _watching(block: nn.Module, inner: Iterable[str]) -> Iterator[_Values]:
    seen = _Values(torch.empty(0), torch.empty(0), {})

    def first(values: Any) -> Tensor | None:
        value = values[0] if isinstance(values, tuple | list) and len(values) else values
        return value.detach().clone() if isinstance(value, Tensor) else None

    def before(name: str, args: Any, kwargs: Any) -> None:
        value = first(args) if args else first(kwargs.get("hidden_states"))
        if value is not None:
            seen.sides.setdefault((name, "input"), value)

    def after(name: str, out: Any) -> None:
        value = first(out)
        if value is not None:
            seen.sides.setdefault((name, "output"), value)

    handles = []
    inside = dict(block.named_modules())
    deeper = [(path, inside[path]) for path in inner if path in inside]
    for name, module in (("", block), *block.named_children(), *deeper):
        handles.append(module.register_forward_pre_hook(lambda _m, a, k, n=name: before(n, a, k), with_kwargs=True))
        handles.append(module.register_forward_hook(lambda _m, _a, o, n=name: after(n, o)))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
        seen.into, seen.out = seen.sides.get(("", "input"), seen.into), seen.sides.get(("", "output"), seen.out)


def _points(model: Any, blocks: list[nn.Module], attention: str, mlp: str, linears: Mapping[str, LinearAt]) -> dict[str, At | str]:
    size = model.get_input_embeddings().weight.shape[0]
    device = model.get_input_embeddings().weight.device
    tokens = torch.randint(size, (2, TOKENS), generator=torch.Generator().manual_seed(0)).to(device)
    inner = [linears[name].path for name in ("attn.o", "mlp.down") if name in linears]
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        with torch.no_grad(), _watching(blocks[0], inner) as early, _watching(blocks[-1], inner) as late:
            model(input_ids=tokens, use_cache=False)
    except Exception as error:  # whatever the code of a model raises
        raise NotFoundError(f"a forward of this {type(model).__name__} over random tokens fails: {error}") from error
    finally:
        for module in training:
            module.training = True
    factors = dict.fromkeys((1.0, float(getattr(config_of(model), "residual_multiplier", None) or 1.0)))
    at_the_end = _sums(late, attention, factors)
    holding = [choice for choice in _sums(early, attention, factors) if choice in at_the_end]
    if not holding:
        raise NotFoundError(
            f"no values of the blocks of this {type(model).__name__} add up to its stream: resid_post = resid_mid + mlp_out"
        )
    middle, attn_out, mlp_out, scale = holding[0]
    entry = (mlp or linears["mlp.up"].path, "input")
    sides = {"resid_mid": middle, "attn_in": (attention, "input"), "attn_out": attn_out, "mlp_in": entry, "mlp_out": mlp_out}
    places: dict[str, At | str] = {"resid_pre": At("", "input"), "resid_post": At("")}
    for name, side in sides.items():
        if side is None:
            places[name] = PARALLEL
        elif side in early.sides and early.sides[side].ndim < 3:
            places[name] = "its module takes the tokens of all rows as one, [b*s d]"
        else:
            places[name] = At(*side, scale=scale if name.endswith("_out") else 1.0)
    for name in "qkv":
        exists = f"attn.{name}" in linears
        places[name] = At(f"attn.{name}", linear=True) if exists else f"its attention has no Linear for {name} alone"
    if router := next((name for name, child in blocks[-1].named_modules() if "Router" in type(child).__name__), ""):
        places["router"] = At(router, "logits")
    places["z"] = At(linears["attn.o"].path, "input") if "attn.o" in linears else "its attention has no output projection"
    return places


_Side = tuple[str, str]
_Choice = tuple[_Side | None, _Side, _Side, float]


def _sums(values: _Values, attention: str, factors: Iterable[float]) -> list[_Choice]:
    """Return every choice of (resid_mid, attn_out, mlp_out, factor) whose sums hold, modules before those inside of them."""
    into, out = values.into, values.out
    order = list(values.sides)
    late = order[order.index((attention, "input")) :]
    same = {side: values.sides[side].reshape(into.shape) for side in late if side[0] and values.sides[side].numel() == into.numel()}
    outputs, inputs = ([side for side in same if side[1] == way] for way in ("output", "input"))
    found: list[_Choice] = []
    for factor in factors:
        for middle, attn in product(inputs, outputs):
            if adds_up(same[middle], into, factor, same[attn]):
                found += [
                    (middle, attn, mlp, factor) for mlp in outputs if mlp != attn and adds_up(out, same[middle], factor, same[mlp])
                ]
        for attn, mlp in product(outputs, outputs):
            if attn != mlp and attn[0].startswith(attention) and adds_up(out, into, factor, same[attn], same[mlp]):
                found.append((None, attn, mlp, factor))
    return sorted(found, key=lambda choice: (choice[0] is None, choice[1][0].count(".") + choice[2][0].count(".")))


def adds_up(whole: Tensor, before: Tensor, factor: float, *parts: Tensor) -> bool:
    """Return True if ``whole = before + factor * sum(parts)`` up to the rounding of their dtype, everywhere."""
    added = [factor * part.double() for part in parts]
    size = whole.double().abs() + before.double().abs() + sum(part.abs() for part in added)
    miss = (whole.double() - before.double() - sum(added)).abs()
    return bool((miss <= ULPS * torch.finfo(whole.dtype).eps * size).all())
