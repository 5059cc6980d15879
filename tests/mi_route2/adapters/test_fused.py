"""Adapters at parts of fused modules (GPT-2's thirds, GPT-NeoX's heads) are those of the same model with its parts apart.

The oracle is a copy of the model in which the test has replaced every fused or transposed module by plain ``nn.Linear`` ones.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from families import HEAD, HEADS, LAYERS, SPECS, make_batch, make_family, make_tokens, move
from mask_oracle import FixedFitter, assert_same, plain_loss, random_directions, run
from torch import Tensor, nn

from mi_route2.adapters import attach
from mi_route2.adapters.io import load_adapters, save_adapters
from mi_route2.adapters.linear import RoutedLinear
from mi_route2.rollouts import Policy
from mi_route2.routing import MaskRoute, MaskSpec
from mi_route2.sites import Slot

FUSED = ("GPT2", "GPTNeoX")
PATTERNS = {"all": ("blocks.*",), "q": ("blocks.*.attn.q",), "q and v": ("blocks.*.attn.[qv]", "blocks.1.mlp.*")}
CASES = [
    MaskSpec(score="grad", unit="pooled", reinforced_only=False),
    MaskSpec(score="act", unit="token", through="detach", reinforced_only=False),
    MaskSpec(score="full", score_policy="ablated", through="detach", reinforced_only=False),
]
TOKENS = make_tokens(3)[0]


# ---- the same model, apart


def linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    out = nn.Linear(weight.shape[1], weight.shape[0], dtype=weight.dtype)
    with torch.no_grad():
        out.weight.copy_(weight)
        out.bias.copy_(bias)
    return out


class Apart(nn.Module):
    """``q``, ``k`` and ``v`` as Linears of their own; what they give is put together as the fused module gives it."""

    def __init__(self, weight: Tensor, bias: Tensor, per_head: bool):
        super().__init__()
        self.per_head = per_head
        rows = torch.arange(len(weight))
        parts = rows.view(HEADS, 3, HEAD).unbind(1) if per_head else rows.view(3, HEADS, HEAD).unbind(0)
        self.q, self.k, self.v = (linear(weight[part.flatten()], bias[part.flatten()]) for part in parts)

    def forward(self, x: Tensor) -> Tensor:
        parts = [part(x).unflatten(-1, (HEADS, HEAD)) for part in (self.q, self.k, self.v)]
        return torch.stack(parts, dim=-2 if self.per_head else -3).flatten(-3)


def taken_apart(name: str) -> tuple[nn.Module, dict[str, Slot]]:
    """The family's model without fused or transposed modules, and its logical Linears in the order of the forward."""
    model, known = make_family(name), {}
    gpt2 = name == "GPT2"
    for layer in range(LAYERS):
        block = f"transformer.h.{layer}" if gpt2 else f"gpt_neox.layers.{layer}"
        own = ("attn.c_proj", "mlp.c_fc", "mlp.c_proj") if gpt2 else ("attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
        fused = "attn.c_attn" if gpt2 else "attention.query_key_value"
        for path in (fused, *own):
            module: Any = model.get_submodule(f"{block}.{path}")
            weight, bias = (module.weight.mT if gpt2 else module.weight).detach().clone(), module.bias
            apart = Apart(weight, bias, not gpt2) if path == fused else linear(weight, bias)
            model.set_submodule(f"{block}.{path}", apart)
        paths = {f"attn.{n}": f"{block}.{fused}.{n}" for n in "qkv"}
        paths |= {n: f"{block}.{path}" for n, path in zip(("attn.o", "mlp.up", "mlp.down"), own)}
        for n, path in paths.items():
            known[f"blocks.{layer}.{n}"] = Slot(f"blocks.{layer}.{n}", path, model.get_submodule(path))
    known["unembed"] = Slot("unembed", "lm_head", model.get_submodule("lm_head"))
    return model, known


def both(name: str, spec: str, which: str = "all", scale: float = 0.1) -> tuple[Policy, Policy]:
    """The policy on the fused model, and on the one that was taken apart."""
    apart, known = taken_apart(name)
    policies = []
    for model, slots in ((make_family(name), None), (apart, known)):
        generator = torch.Generator().manual_seed(7)
        adapters = attach(model, *PATTERNS[which], spec=SPECS[spec], generator=generator, known=slots)
        policies.append(Policy(model, move(adapters, scale)))
    return policies[0], policies[1]


def gap(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().abs().max())


def logits(policy: Policy) -> Tensor:
    return policy.model(TOKENS).logits


def gradients(policy: Policy) -> dict[str, Tensor]:
    parameters = {f"kept.{n}": p for n, p in policy.adapters.kept_parameters().items()}
    parameters |= {f"quarantine.{n}": p for n, p in policy.adapters.quarantine_parameters().items()}
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in parameters.items()}


@pytest.mark.parametrize("name", FUSED)
def test_the_oracle_is_the_same_model(name: str) -> None:
    apart, known = taken_apart(name)
    assert gap(apart(TOKENS).logits, make_family(name)(TOKENS).logits) < 1e-13
    assert all(type(slot.module) is nn.Linear and slot.rows is None and not slot.transposed for slot in known.values())


# ---- forward, gradients, files


@pytest.mark.parametrize("which", PATTERNS)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", FUSED)
def test_fused_is_apart(name: str, spec: str, which: str) -> None:
    """Names, start values, base, logits under every switch, plain gradients of both adapters, merged weights."""
    fused, apart = both(name, spec, which)
    assert list(fused.adapters.sites) == list(apart.adapters.sites)
    assert fused.adapters.base_hash == apart.adapters.base_hash
    own, other = fused.adapters.tensors(), apart.adapters.tensors()
    assert own.keys() == other.keys()
    assert all(torch.equal(own[n], other[n]) for n in own)
    for switch in ("full", "deployed", "reference"):
        with getattr(fused.adapters, switch)(), getattr(apart.adapters, switch)():
            plain = logits(fused)
            assert gap(plain, logits(apart)) < 1e-12, switch
            with fused.adapters.merged():
                assert gap(logits(fused), plain) < 1e-12, switch
    batch = make_batch(3)
    for policy in (fused, apart):
        with policy.adapters.unrouted():
            plain_loss(policy, batch, batch.advantages).backward()
    assert_same(gradients(fused), gradients(apart), 1e-12)
    for site, branch in fused.adapters.sites.items():
        weight = branch.weight.double()
        assert gap(branch.merged(weight), apart.adapters.sites[site].merged(apart.adapters.sites[site].weight)) < 1e-13


@pytest.mark.parametrize("case", CASES, ids=lambda spec: f"{spec.score}-{spec.unit}-{spec.through}")
@pytest.mark.parametrize("spec", ["svd", "lora", "lora-alone"])
@pytest.mark.parametrize("name", FUSED)
def test_routed_gradients_are_those_apart(name: str, spec: str, case: MaskSpec) -> None:
    batch, runs = make_batch(4), []
    for policy in both(name, spec):
        route = MaskRoute(case, FixedFitter(random_directions(policy, case.score)))
        route.refresh(policy, 0)
        runs.append(run(policy, route, batch))
    fused, apart = runs
    assert torch.equal(fused.decision.flags, apart.decision.flags)
    assert gap(fused.decision.scores, apart.decision.scores) < 1e-11
    assert_same(fused.kept, apart.kept, 1e-11)
    assert_same(fused.quarantine, apart.quarantine, 1e-11)


@pytest.mark.parametrize("name", FUSED)
def test_files_are_the_same_and_load_on_either(name: str, tmp_path: Path) -> None:
    fused, apart = both(name, "svd-low")
    for policy, path in ((fused, tmp_path / "fused"), (apart, tmp_path / "apart")):
        save_adapters(policy.adapters, path)
    assert (tmp_path / "fused").read_bytes() == (tmp_path / "apart").read_bytes()
    plain = logits(fused)
    move(fused.adapters, seed=5)
    assert gap(logits(fused), plain) > 1e-3
    load_adapters(fused.adapters, tmp_path / "apart")
    assert torch.equal(logits(fused), plain)


# ---- per rollout


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("spec", ["svd", "lora"])
@pytest.mark.parametrize("name", [*FUSED, "Llama", "Gemma3"])
def test_gradient_checkpointing_changes_no_gradient(name: str, spec: str, reentrant: bool) -> None:
    """Plain, and under a mask route, whose flags of the forward are worked out once more in the backward's forward."""
    batch, results = make_batch(3), []
    for checkpointed in (False, True):
        model: Any = make_family(name)
        adapters = attach(model, "blocks.*", spec=SPECS[spec], generator=torch.Generator().manual_seed(7))
        if checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            if reentrant:
                model.enable_input_require_grads()
            model.train()
        policy = Policy(model, move(adapters))
        with policy.adapters.unrouted():
            plain_loss(policy, batch, batch.advantages).backward()
        found = [gradients(policy)]
        for case in CASES[:2]:
            route = MaskRoute(case, FixedFitter(random_directions(policy, case.score)))
            route.refresh(policy, 0)
            routed = run(policy, route, batch)
            found += [routed.kept, routed.quarantine]
        results.append(found)
    for plain, own in zip(*results, strict=True):
        assert_same(own, plain, 1e-12)


# ---- off, merged, generation


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", [*FUSED, "GPTNeoX (sequential)"])
def test_off_is_the_base_bit_for_bit(name: str, spec: str) -> None:
    base = make_family(name)(TOKENS).logits
    model = make_family(name)
    adapters = attach(model, *PATTERNS["q and v"], spec=SPECS[spec], generator=torch.Generator().manual_seed(7))
    assert torch.equal(model(TOKENS).logits, base), "at init"
    move(adapters, 1.0)
    assert gap(model(TOKENS).logits, base) > 1e-2
    with adapters.reference():
        assert torch.equal(model(TOKENS).logits, base)
    assert adapters.detach() is model
    assert torch.equal(model(TOKENS).logits, base)
    assert not any(isinstance(m, RoutedLinear) for m in model.modules())


@pytest.mark.parametrize("name", [*FUSED, "Qwen3", "Gemma3"])
def test_merged_generation_is_unmerged_generation(name: str) -> None:
    """With transformers' own ``generate`` and its cache, on left-padded prompts; and the adapters do change what is generated."""
    model: Any = make_family(name)
    adapters = attach(model, "*", spec=SPECS["lora"], generator=torch.Generator().manual_seed(7))
    tokens, attention = make_tokens(4, "left")
    settings = {
        "max_new_tokens": 12,
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": None,
        "attention_mask": attention.long(),
    }
    base = model.generate(tokens, **settings)
    move(adapters)
    plain = model.generate(tokens, **settings)
    with adapters.merged():
        assert torch.equal(model.generate(tokens, **settings), plain)
        assert torch.equal(model.generate(tokens, **settings, use_cache=False), plain)
    assert torch.equal(model.generate(tokens, **settings), plain)
    with adapters.deployed(), adapters.merged():
        deployed = model.generate(tokens, **settings)
    with adapters.deployed():
        assert torch.equal(model.generate(tokens, **settings), deployed)
    with adapters.reference(), adapters.merged():
        assert torch.equal(model.generate(tokens, **settings), base)
    assert not torch.equal(plain, base)
    assert not torch.equal(plain, deployed)


# ---- other types


# ---- memory
