"""The bridge is the torch model: same numbers everywhere, adapters among its hook points, wrong orders said.

The bridge's own arithmetic sets what it can be compared with: Llama-like attention is eager with a float32 softmax (the torch host
at ``eager``), GPT-2's and GPT-NeoX's softmax is in the model's type (the torch host at ``sdpa``).
"""

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from families import (
    FAMILIES,
    SPECS,
    TRANSFORMERS,
    VOCAB,
    make_batch,
    make_family,
    make_tokens,
    move,
    move_all,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from mask_oracle import CASES, assert_same, context, mask_route, plain_loss, run
from torch import Tensor, nn
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformer_lens.model_bridge.sources.native.model import NativeModel

from mi_route2.adapters import Adapters, AdapterSpec, load_adapters, save_adapters
from mi_route2.architectures import ADAPTER_POINTS, POINTS
from mi_route2.hosts import open_host
from mi_route2.hosts.base import Host
from mi_route2.hosts.huggingface import TorchHost
from mi_route2.hosts.transformer_lens import BridgeHost
from mi_route2.rollouts import Policy
from mi_route2.routing import MaskSpec, TrainBatch
from mi_route2.sites import Site
from studies.environments.micro.model import KVCache

pytestmark = pytest.mark.hosts

FLOAT32_SOFTMAX = [name for name in TRANSFORMERS if not name.startswith("GPT")]
TOKEN_ROW = torch.arange(3, 12)[None]
ROUTE_POINTS = ("hook_kept_a", "hook_kept", "hook_quarantine", "hook_mask")
GRAD_UNIT = MaskSpec(score="grad", unit="rollout", reinforced_only=False)
TOKENS = MaskSpec(score="act", unit="token", through="detach", reinforced_only=False)

NATIVE: dict[str, dict[str, Any]] = {
    "native": {"d_mlp": 24, "act_fn": "gelu"},
    "native gated": {
        "d_mlp": 24, "act_fn": "silu", "gated_mlp": True, "normalization_type": "RMS", "n_key_value_heads": 2,
        "positional_embedding_type": "rotary", "final_rms": True,
    },
    "native attention alone": {"attn_only": True},
}  # fmt: skip
EVERYWHERE = [*FAMILIES, *NATIVE]


def generator(seed: int = 7) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def native_config(name: str) -> TransformerBridgeConfig:
    return TransformerBridgeConfig(
        d_model=16, d_head=4, n_heads=4, n_layers=2, n_ctx=64, d_vocab=VOCAB, seed=0, **{"normalization_type": "LN", **NATIVE[name]}
    )


def fresh(name: str, **changes: Any) -> nn.Module:
    """A model, not yet booted; the torch model that the bridge equals in its arithmetic."""
    if name in FAMILIES:
        return make_family(name, **{"attn": "eager" if name in FLOAT32_SOFTMAX else "sdpa", **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return NativeModel(native_config(name)).double().eval()


def adapted(host: Host, spec: str | AdapterSpec = "lora", *patterns: str) -> Policy:
    chosen = SPECS[spec] if isinstance(spec, str) else spec
    return host.policy(move(host.attach(*(patterns or ("*",)), spec=chosen, generator=generator())))


Pair = tuple[TorchHost, Policy, BridgeHost, Policy]


@cache
def pair(name: str, spec: str = "lora") -> Pair:
    """The same model on both hosts, with the same adapters at every Linear, built once for this file."""
    torch_host, bridge_host = TorchHost(fresh(name)), BridgeHost(fresh(name))
    return torch_host, adapted(torch_host, spec), bridge_host, adapted(bridge_host, spec)


def own(name: str = "MicroGPT", spec: str | None = "lora") -> tuple[BridgeHost, Policy]:
    """A host that a test may change, with adapters where ``spec`` names some."""
    host = BridgeHost(fresh(name))
    return host, adapted(host, spec) if spec else None  # pyright: ignore[reportReturnType]


def largest(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().abs().max())


def block_sites(host: Host) -> list[Site]:
    """Every point of a block that the host has, in the last layer and the first."""
    found = []
    for site in [Site(layer, point) for layer in (0, 1) for point in POINTS]:
        try:
            host.address(site)
        except ValueError:
            continue
        found.append(site)
    return found


def adapter_sites(adapters: Adapters, every: int = 1) -> list[Site]:
    """Their points, at every Linear or at every fifth of the list."""
    return [Site.parse(f"{name}.{point}") for name in list(adapters.sites)[::every] for point in ADAPTER_POINTS]


# --- the same model -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "spec"), [*((name, "lora") for name in EVERYWHERE), ("GPT2", "svd"), ("Qwen3", "svd-low")])
def test_adapters_logits_and_every_gradient_are_those_of_the_torch_host(name: str, spec: str) -> None:
    torch_host, torch_policy, host, policy = pair(name, spec)
    assert list(policy.adapters.sites) == list(torch_policy.adapters.sites)
    assert policy.adapters.base_hash == torch_policy.adapters.base_hash
    for key, tensor in torch_policy.adapters.tensors().items():
        assert torch.equal(policy.adapters.tensors()[key], tensor)
    batch = make_batch()
    assert largest(host.logits(batch.rollouts.tokens), torch_host.logits(batch.rollouts.tokens)) < 1e-10
    for rule in (GRAD_UNIT, TOKENS):
        masks: list[Tensor] = []
        with host.bridge.hooks(fwd_hooks=[(is_mask, lambda keep, hook, masks=masks: masks.append(keep))]):
            found = run(policy, mask_route(policy, rule), batch)
        expected = run(torch_policy, mask_route(torch_policy, rule), batch)
        assert_same(found.kept, expected.kept)
        assert_same(found.quarantine, expected.quarantine)
        assert all(float(g.abs().max()) > 0 for g in found.quarantine.values())
        assert torch.equal(found.decision.flags, expected.decision.flags)
        assert len(masks) == len(policy.adapters.sites)
        assert {float(keep.min()) for keep in masks} | {float(keep.max()) for keep in masks} == {0.0, 1.0}


def is_mask(name: str) -> bool:
    return name.endswith("route.hook_mask")


@pytest.mark.parametrize("name", FLOAT32_SOFTMAX)
def test_the_gap_to_an_exact_softmax_is_the_one_that_the_docs_state(name: str) -> None:
    """Upstream's softmax is float32: within 2e-6 of the exact model, on logits of size 4, and not nearer than 1e-8."""
    tokens, _ = make_tokens()
    host = pair(name)[2]
    with pair(name)[3].adapters.reference(), torch.no_grad():
        gap = largest(host.logits(tokens), TorchHost(make_family(name, attn="exact")).logits(tokens))
    assert 1e-8 < gap < 2e-6


@pytest.mark.parametrize("name", EVERYWHERE)
def test_captures_and_edits_at_every_point_are_those_of_the_torch_host(name: str) -> None:
    torch_host, _, host, policy = pair(name)
    tokens, attention = make_tokens()
    sites = [*block_sites(host), *adapter_sites(policy.adapters, every=5)]
    assert len(sites) == len(block_sites(torch_host)) + (9 if len(policy.adapters.sites) > 10 else 6) - 2 * ("sequential" in name)
    theirs, ours = torch_host.capture(sites, tokens, attention), host.capture(sites, tokens, attention)
    for site in sites:
        assert ours[site].shape == theirs[site].shape, site
        assert largest(ours[site], theirs[site]) < 1e-10, site
    edited = []
    for each in (torch_host, host):
        with torch.no_grad(), each.hooks({site: edit_of(ours[site]) for site in sites}):
            edited.append(each.logits(tokens))
    assert largest(*edited) < 1e-10


def edit_of(value: Tensor) -> Callable[[Tensor], Tensor]:
    """Shrink and push: another push for every coordinate, so that heads or parts in another order are seen."""
    push = torch.linspace(-0.1, 0.1, value[0, 0].numel(), dtype=torch.float64).view(value.shape[2:])
    return lambda x: x * 0.9 + push


def test_every_point_acts_on_the_logits_and_as_on_torch() -> None:
    torch_host, _, host, policy = pair("MicroGPT")
    tokens, _ = make_tokens()
    sites = [*block_sites(host), *adapter_sites(policy.adapters, every=6)]
    values, plain = host.capture(sites, tokens), host.logits(tokens)
    for site in sites:
        logits = []
        for each in (torch_host, host):
            with torch.no_grad(), each.hooks({site: edit_of(values[site])}):
                logits.append(each.logits(tokens))
        assert torch.equal(*logits), site
        assert largest(logits[0], plain) > 1e-6, site


@pytest.mark.parametrize("name", ["Qwen3", "Gemma3", "GPT2", "MicroGPT"])
def test_an_edit_of_the_bridges_own_resid_mid_misses_the_stream_that_the_block_keeps(name: str) -> None:
    """Upstream's hook is at the norm: the MLP reads the edit, the residual does not carry it. Ours acts on the whole stream."""
    _, _, host, policy = pair(name)
    tokens, _ = make_tokens()
    site, shift = Site(1, "resid_mid"), torch.full((16,), 0.7, dtype=torch.float64)
    seen: dict[str, dict[Site, Tensor]] = {}

    def stream() -> dict[Site, Tensor]:
        return host.capture([Site(1, "mlp_out"), Site(1, "resid_post")], tokens)

    with policy.adapters.reference():
        seen["plain"] = stream()
        with host.bridge.hooks(fwd_hooks=[(host.address(site), lambda x, hook: x + shift)]):
            seen["upstream"] = stream()
        with host.hooks({site: lambda x: x + shift}):
            seen["ours"] = stream()
    change = {
        how: (seen[how][Site(1, "resid_post")] - seen["plain"][Site(1, "resid_post")])
        - (seen[how][Site(1, "mlp_out")] - seen["plain"][Site(1, "mlp_out")])
        for how in ("upstream", "ours")
    }
    assert float(change["upstream"].abs().max()) < 1e-12
    assert largest(change["ours"], shift.expand_as(change["ours"])) < 1e-12


def test_a_saved_file_loads_on_the_other_host(tmp_path: Path) -> None:
    for name in ("GPT2", "GPTNeoX", "Gemma2", "native gated"):
        torch_host, torch_policy, host, policy = pair(name)
        for source, target in ((policy, torch_policy), (torch_policy, policy)):
            save_adapters(source.adapters, tmp_path / "saved")
            written = {key: t.clone() for key, t in source.adapters.tensors().items()}
            move(target.adapters, seed=5)
            load_adapters(target.adapters, tmp_path / "saved")
            assert all(torch.equal(t, written[key]) for key, t in target.adapters.tensors().items())
        tokens, _ = make_tokens()
        assert largest(host.logits(tokens), torch_host.logits(tokens)) < 1e-10


# --- hook points ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Qwen3", "GPT2", "native", "MicroGPT"])
def test_adapter_points_are_in_run_with_cache(name: str) -> None:
    _, _, host, policy = pair(name)
    tokens, _ = make_tokens()
    values = host.capture(adapter_sites(policy.adapters), tokens)
    for names in (None, "blocks.0.attn.q.route.hook_kept_a", ["unembed.route.hook_kept"], lambda n: ".route." in n):
        with torch.no_grad():
            _, cached = host.bridge.run_with_cache(tokens, names_filter=names)
        found = {key for key in cached if ".route." in key}
        expected = {host.address(site): value for site, value in values.items()}
        assert found == (set(names) if isinstance(names, list) else {names} if isinstance(names, str) else set(expected))
        assert all(torch.equal(cached[key], expected[key]) for key in found)
    assert f"blocks.1.mlp.out.route.{ROUTE_POINTS[2]}" in host.bridge.hook_dict


@pytest.mark.parametrize("name", ["Gemma3", "GPTNeoX", "MicroGPT"])
def test_backward_hooks_see_and_change_the_gradient(name: str) -> None:
    """With the gradient at ``hook_kept``, a LoRA's gradients are outer products: ``dB = sum dy a^T``, ``dA = sum (B^T dy) x^T``."""
    _, _, host, policy = pair(name)
    tokens, _ = make_tokens()
    where, seen = "blocks.1.mlp.out", {}
    kept = policy.adapters.sites["blocks.1.mlp.down"].kept

    def keep(key: str) -> Callable[..., None]:
        return lambda value, hook: seen.update({key: value})

    def gradients(scale: float | None) -> tuple[Tensor, Tensor]:
        host.model.zero_grad()
        hooks: list[Any] = [(f"{where}.route.hook_kept", keep("dy"))]
        if scale is not None:
            hooks = [(f"{where}.route.hook_kept", lambda grad, hook: grad * scale)]
        reads = [(f"{where}.route.hook_kept_a", keep("a")), (f"{where}.hook_in", keep("x"))]
        with host.bridge.hooks(fwd_hooks=reads, bwd_hooks=hooks):
            with policy.adapters.unrouted():
                host.logits(tokens).log_softmax(-1)[..., 3].sum().backward()
        return kept.A.grad.clone(), kept.B.grad.clone()

    dA, dB = gradients(None)
    dy, a, x = (seen[key].flatten(0, 1) for key in ("dy", "a", "x"))
    assert largest(dB, dy.mT @ a) < 1e-12
    assert largest(dA, (dy @ kept.B).mT @ x) < 1e-12
    for halved, whole in zip(gradients(0.5), (dA, dB)):
        assert largest(halved, whole / 2) < 1e-12


@pytest.mark.parametrize("name", ["Qwen3", "GPT2", "GPTNeoX"])
def test_hooks_fire_once_a_new_token_in_cached_generation(name: str) -> None:
    torch_host, _, host, _ = pair(name)
    tokens, _ = make_tokens()
    seen: list[tuple[str, Tensor]] = []
    watch = [(f"blocks.0.attn.q.route.{p}", lambda value, hook: seen.append((hook.name, value))) for p in ROUTE_POINTS]
    with host.bridge.hooks(fwd_hooks=watch):
        text = host.bridge.generate(tokens, max_new_tokens=4, do_sample=False, stop_at_eos=False, verbose=False)
    by_hand = tokens
    with torch.no_grad():
        for _ in range(4):
            by_hand = torch.cat([by_hand, torch_host.logits(by_hand)[:, -1].argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(text, by_hand)
    whole = host.capture([Site(0, "kept_a", "attn.q"), Site(0, "kept_out", "attn.q"), Site(0, "quarantine_out", "attn.q")], text)
    for point, value in zip(ROUTE_POINTS[:3], whole.values()):
        pieces = [value for name, value in seen if name == f"blocks.0.attn.q.route.{point}"]
        assert [piece.shape[1] for piece in pieces] == [tokens.shape[1], 1, 1, 1]
        assert largest(torch.cat(pieces, dim=1), value[:, :-1]) < 1e-6  # the float32 softmax over a longer row
    assert not [name for name, _ in seen if name.endswith("hook_mask")]  # nothing is masked outside a route's step


# --- overruling the mask --------------------------------------------------------------------------------------------------------


def brute_force(host: Host, policy: Policy, batch: TrainBatch, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """``sum_b w_b G_b``, each ``G_b`` by plain autograd on a batch of rollout ``b`` alone."""
    parameters = policy.adapters.kept_parameters()
    total = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for b in range(len(batch.rollouts)):
        one = batch.rows(torch.tensor([b]))
        found = torch.autograd.grad(plain_loss(policy, one, one.advantages), list(parameters.values()))
        for name, gradient in zip(parameters, found):
            total[name] += weights[name.rpartition(".")[0]][b] * gradient
    return total


RULES = {
    "in the forward": MaskSpec(score="act", reinforced_only=False),
    "in the backward": GRAD_UNIT,
    "when the step is finished": MaskSpec(score="grad", unit="pooled", reinforced_only=False),
    "before the loss": MaskSpec(score="full", unit="pooled", score_policy="ablated", reinforced_only=False),
}


@pytest.mark.parametrize("when", RULES)
@settings(max_examples=4)
@given(bits=st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=4, max_size=4), sites=st.sampled_from(["one", "all"]))
def test_a_hook_on_the_mask_decides_what_the_kept_adapter_learns(when: str, bits: list[float], sites: str) -> None:
    """Whatever mask a hook returns, at one module or all: the gradient is the brute-force sum with it; the quarantine's stays."""
    _, _, host, policy = pair("MicroGPT")
    batch, rule = make_batch(), RULES[when]
    own_masks: dict[str, Tensor] = {}
    with host.bridge.hooks(fwd_hooks=[(is_mask, lambda keep, hook: own_masks.update({hook.name: keep}))]):
        plain = run(policy, mask_route(policy, rule), batch)
    path = {site: host.address(Site.parse(f"{site}.kept_a")).replace("hook_kept_a", "hook_mask") for site in policy.adapters.sites}
    chosen = list(path)[3:4] if sites == "one" else list(path)
    masks = {site: torch.tensor(bits, dtype=torch.float64) for site in chosen}
    hooks = [(path[site], lambda keep, hook, mask=mask: mask) for site, mask in masks.items()]
    with host.bridge.hooks(fwd_hooks=hooks):
        found = run(policy, mask_route(policy, rule), batch)
    weights = {site: masks.get(site, own_masks[path[site]]) for site in path}
    assert_same(found.kept, brute_force(host, policy, batch, weights))
    assert_same(found.quarantine, plain.quarantine)
    assert ("overruled" in found.decision.extra) == any(not torch.equal(masks[s], own_masks[path[s]]) for s in masks)


def test_the_mask_fires_once_a_module_when_the_docs_say() -> None:
    """In the forward where flags are known by then, else in the backward, pooled gradient flags when the step is finished."""
    _, _, host, policy = pair("MicroGPT")
    batch, now, seen = make_batch(), ["begin"], list[str]()
    for score, unit, score_policy, through in CASES:
        rule = MaskSpec(score=score, unit=unit, score_policy=score_policy, through=through)
        route = mask_route(policy, rule)
        with host.bridge.hooks(fwd_hooks=[(is_mask, lambda keep, hook: seen.append(now[0]))]):
            step = route.begin(policy, batch, context(rule, len(batch.rollouts)))
            with policy.adapters.recording(step.micro_batches[0].tape):
                now[0] = "forward"
                loss = plain_loss(policy, batch, batch.advantages)
                now[0] = "backward"
                loss.backward()
            now[0] = "finish"
            step.finish()
        live_gradient = score_policy == "live" and score in ("grad", "full")
        late = live_gradient or (score, unit, score_policy) == ("act", "pooled", "live")
        expected = "forward" if not late else "finish" if live_gradient and unit == "pooled" else "backward"
        assert seen == [expected] * len(policy.adapters.sites), rule
        seen.clear()


# --- padding --------------------------------------------------------------------------------------------------------------------


def singles(host: Host, tokens: Tensor, attention: Tensor) -> Tensor:
    """Logits of every row without its padding, the real tokens of all rows in order."""
    return torch.cat([host.logits(row[real][None])[0] for row, real in zip(tokens, attention)])


@pytest.mark.parametrize("name", EVERYWHERE)
def test_padding_on_the_right_changes_nothing(name: str) -> None:
    host = pair(name)[2]
    tokens, attention = make_tokens()
    with torch.no_grad():
        assert largest(host.logits(tokens, attention)[attention], singles(host, tokens, attention)) < (
            1e-6 if name in FLOAT32_SOFTMAX else 1e-10  # a float32 softmax over a longer row
        )


@pytest.mark.parametrize("name", ["GPT2", "GPTNeoX", "native", "native gated", "MicroGPT"])
def test_padding_on_the_left_is_exact_where_the_softmax_is(name: str) -> None:
    _, _, host, policy = pair(name)
    batch = make_batch(side="left")
    tokens, attention = batch.rollouts.tokens, batch.rollouts.attention
    with torch.no_grad():
        assert largest(host.logits(tokens, attention)[attention], singles(host, tokens, attention)) < 1e-10
    sites = block_sites(host)
    left, right = host.capture(sites, tokens, attention), host.capture(sites, *make_tokens())
    assert all(largest(left[site][attention], right[site][make_tokens()[1]]) < 1e-10 for site in sites)
    found, expected = run(policy, mask_route(policy, GRAD_UNIT), batch), run(policy, mask_route(policy, GRAD_UNIT), make_batch())
    assert_same(found.kept, expected.kept)
    assert_same(found.quarantine, expected.quarantine)


@pytest.mark.parametrize("name", FLOAT32_SOFTMAX)
def test_padding_on_the_left_in_float64_is_refused_where_upstream_gives_nan(name: str) -> None:
    host = pair(name)[2]
    tokens, attention = make_tokens(side="left")
    with pytest.raises(ValueError, match=r"NaN for padding on the left in float64.*pad on the right, load the model in float32"):
        host.logits(tokens, attention)
    with torch.no_grad():
        assert bool(host.bridge(tokens, attention_mask=attention.long())[attention].isnan().any())


# --- ways to a bridge -----------------------------------------------------------------------------------------------------------


def test_a_host_takes_a_model_or_a_bridge() -> None:
    tokens, _ = make_tokens()
    model = fresh("Llama")
    plain = TorchHost(fresh("Llama")).logits(tokens)
    bridge = build_bridge_from_module(model, "LlamaForCausalLM", hf_config=model.config)
    native = TransformerBridge.boot_native(native_config("native"))
    for host in (BridgeHost(bridge), open_host("transformer_lens", fresh("Llama")), BridgeHost(native)):
        assert isinstance(host, Host)
        assert host.name == "transformer_lens"
        assert isinstance(host.model, TransformerBridge)
        assert host.logits(tokens).shape == (4, 9, VOCAB)
    assert torch.equal(BridgeHost(bridge).logits(tokens), plain)


def test_the_micro_model_runs_its_own_forward_with_its_own_cache() -> None:
    tokens, _ = make_tokens()
    plain, (host, policy) = fresh("MicroGPT"), own(spec="svd")
    with policy.adapters.reference():
        assert torch.equal(host.bridge(tokens), plain(tokens))
        cache, reference = KVCache(), KVCache()
        for piece in (tokens[:, :5], tokens[:, 5:6], tokens[:, 6:]):
            assert torch.equal(host.bridge(piece, cache=cache), plain(piece, cache=reference))
    whole = host.logits(tokens)
    cache, seen = KVCache(), []
    with host.bridge.hooks(fwd_hooks=[("blocks.1.mlp.in.route.hook_kept_a", lambda a, hook: seen.append(a.shape[1]))]):
        pieces = [host.bridge(tokens[:, i : i + 1], cache=cache) for i in range(tokens.shape[1])]
    assert largest(torch.cat(pieces, dim=1), whole) < 1e-10
    assert seen == [1] * tokens.shape[1]
    text = host.bridge.generate(tokens, max_new_tokens=2, do_sample=False, stop_at_eos=False, verbose=False)
    assert torch.equal(text[:, -2], whole[:, -1].argmax(-1))


def test_every_point_of_the_micro_model_is_the_torch_hooks_value() -> None:
    """Bit for bit, and the bridge's finer hooks as well: norms, embeddings, logits."""
    plain, host = fresh("MicroGPT"), BridgeHost(fresh("MicroGPT"))
    tokens, _ = make_tokens()
    seen: dict[str, Tensor] = {}
    for path in ("embed", "pos_embed", "blocks.0.ln1", "blocks.1.ln2", "blocks.0.mlp.up", "blocks.1.attn", "ln_f", "unembed"):
        plain.get_submodule(path).register_forward_hook(lambda _m, _a, out, path=path: seen.update({path: out}))
    plain(tokens)
    _, cached = host.bridge.run_with_cache(tokens)
    renamed = {"blocks.0.mlp.up": "blocks.0.mlp.in", "ln_f": "ln_final"}
    for path, value in seen.items():
        assert torch.equal(cached[f"{renamed.get(path, path)}.hook_out"], value), path
    assert torch.equal(host.bridge(tokens), plain(tokens))


# --- detaching ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Qwen3", "GPT2", "native", "MicroGPT"])
def test_detach_leaves_the_bridge_as_it_was(name: str) -> None:
    host, _ = own(name, None)
    tokens, _ = make_tokens()
    bridge = host.bridge
    before = bridge(tokens), points_of(bridge), list(dict(bridge.named_modules()))
    for _ in range(2):
        adapters = move(host.attach("blocks.*", spec=SPECS["lora"], generator=generator()))
        assert not any(p.requires_grad for p in bridge.parameters() if not any(p is q for q in all_parameters(adapters)))
        assert {key: point for key, point in points_of(bridge).items() if ".route." not in key} == before[1]
        assert adapters.detach() is bridge
        assert points_of(bridge) == before[1]
        assert list(dict(bridge.named_modules())) == before[2]
        assert torch.equal(bridge(tokens), before[0])
        assert all(p.requires_grad for p in bridge.parameters())
        with pytest.raises(KeyError):
            bridge.run_with_hooks(tokens, fwd_hooks=[("blocks.0.attn.q.route.hook_kept", lambda value, hook: None)])
    if name != "MicroGPT":
        bridge.enable_compatibility_mode()  # upstream's own processing works again


def points_of(bridge: TransformerBridge) -> dict[str, tuple[nn.Module, str | None]]:
    """Every hook point with its name: a user's function reads ``hook.name``, so listing ours may not rename others."""
    return {key: (point, point.name) for key, point in bridge.hook_dict.items()}


def all_parameters(adapters: Adapters) -> list[nn.Parameter]:
    return [*adapters.kept_parameters().values(), *adapters.quarantine_parameters().values()]


@pytest.mark.parametrize("name", ["Qwen3", "GPT2", "GPTNeoX", "native"])
def test_a_second_host_around_adapters_attaches_the_same_once_they_are_gone(name: str) -> None:
    """GPT-2's q, k, v and o are square: what it takes for transposed has another singular basis."""
    host, policy = own(name, "svd")
    again = BridgeHost(host.bridge)
    policy.adapters.detach()
    adapters = again.attach("*", spec=SPECS["svd"], generator=generator())
    assert adapters.base_hash == policy.adapters.base_hash
    for site, branch in adapters.sites.items():
        assert torch.equal(branch.kept.U, policy.adapters.sites[site].kept.U), site
        assert torch.equal(branch.kept.Vh, policy.adapters.sites[site].kept.Vh), site


WEIGHTS = ("W_Q", "W_K", "W_V", "W_O", "W_in", "W_out", "W_U", "W_E", "b_Q", "b_O", "b_in", "b_U")


@pytest.mark.parametrize("name", [*TRANSFORMERS, "native", "MicroGPT"])
def test_the_bridges_weights_are_the_base_models_whatever_stands_on_them(name: str) -> None:
    """It tells how a weight is stored by the class of what it wraps: a square one must not come out transposed."""
    host, _ = own(name, None)
    bridge, layers = host.bridge, range(len(host.bridge.blocks))

    def weights() -> dict[str, Tensor | None]:
        found = {w: getattr(bridge, w, None) for w in WEIGHTS}
        return found | {f"{i}.{w}": getattr(bridge.blocks[i].attn, w, None) for i in layers for w in WEIGHTS[:4]}

    before, routed = weights(), []
    for _ in range(2):
        adapters = host.attach("*", spec=SPECS["lora"], generator=generator())
        routed.append(weights())
        adapters.detach()
        routed.append(weights())
    assert sum(w is not None for w in before.values()) > 8
    for after in routed:
        for key, weight in before.items():
            assert (weight is None) == (after[key] is None), key
            assert weight is None or torch.equal(after[key], weight), key


def test_a_failed_attach_leaves_no_trace() -> None:
    host, _ = own(spec=None)
    before = list(dict(host.bridge.named_modules()))
    with pytest.raises(KeyError, match=r"write 'blocks\.\*\.attn\.o'"):
        host.attach("blocks.*.attn.c_proj", generator=generator())
    with pytest.raises(ValueError, match="not 5"):
        host.attach("blocks.*.attn.*", generator=generator(), expect=5)
    with pytest.raises(ValueError, match="rank 99"):
        host.attach("blocks.*", spec=AdapterSpec(kept="lora", rank=99), generator=generator())
    assert list(dict(host.bridge.named_modules())) == before
    assert all(p.requires_grad for p in host.bridge.parameters())
    adapted(host)
    with pytest.raises(ValueError, match="already has adapters"):
        host.attach("blocks.*", generator=generator())


# --- wrong orders, said ---------------------------------------------------------------------------------------------------------


UNHEEDED = {"GPT2": ("scale_attn_weights", False), "Gemma3": ("attn_logit_softcapping", 1.0), "GPTNeoX": ("attention_bias", False)}


@pytest.mark.parametrize("name", UNHEEDED)
def test_a_config_that_the_bridge_does_not_heed_is_refused(name: str) -> None:
    """It would be another model, in silence; GPT-NeoX without biases is an assertion without a word."""
    key, value = UNHEEDED[name]
    model = fresh(name)
    model.config.update({key: value})
    model = move_all(type(model)(model.config).double()).eval()  # pyright: ignore[reportCallIssue]
    model.set_attn_implementation("eager")  # pyright: ignore[reportCallIssue]
    tokens, _ = make_tokens()
    plain = TorchHost(model).logits(tokens)
    with pytest.raises(ValueError, match=rf"the bridge ignores {key}={value} of this .*: use the torch or the nnsight host"):
        BridgeHost(model)
    assert torch.equal(TorchHost(model).logits(tokens), plain), "untouched"
    if name == "GPTNeoX":
        with pytest.raises(AssertionError):
            build_bridge_from_module(model, type(model).__name__, hf_config=model.config)
        return
    bridge = build_bridge_from_module(model, type(model).__name__, hf_config=model.config)
    assert largest(bridge(tokens), plain) > 1e-3, "what makes it worth refusing"
    with pytest.raises(ValueError, match="the bridge ignores"):
        BridgeHost(bridge)


@pytest.mark.parametrize("name", ["Qwen3", "GPT2", "MicroGPT"])
def test_adapters_before_the_boot_are_refused(name: str) -> None:
    """Of GPT-2 the boot would drop those at q, k and v in silence: it copies the base weights apart."""
    model = fresh(name)
    adapters = move(TorchHost(model).attach("blocks.*", spec=SPECS["lora"], generator=generator()))
    with pytest.raises(ValueError, match=r"already has adapters.*detach.*boot.*attach"):
        BridgeHost(model)
    adapters.detach()
    assert BridgeHost(model).attach("blocks.*", generator=generator())


@pytest.mark.parametrize("point", ["q", "z"])
def test_a_torch_host_of_a_model_around_which_a_bridge_was_booted_says_so(point: str) -> None:
    model = make_family("Llama")
    host = open_host("torch", model)
    open_host("transformer_lens", model)
    before = len(model._forward_pre_hooks)
    with pytest.raises(ValueError, match="this model is a TransformerLens bridge, or one was booted around it"):
        host.run_with_hooks(TOKEN_ROW, [(Site(0, point), lambda value: value * 0)])
    assert len(model._forward_pre_hooks) == before


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("parent", ["blocks.0.mlp", "blocks.0.attn", "blocks.0"])
@pytest.mark.parametrize("name", ["Llama", "GPT2", "MicroGPT"])
def test_adapters_act_or_are_refused_where_a_parent_wraps_another_module(name: str, parent: str, before: bool) -> None:
    """Most parents then call copies of their components. The look at it takes nothing from the generator of the adapters."""
    bridge = BridgeHost(fresh(name)).bridge
    host = None if before else BridgeHost(bridge)
    component: Any = bridge.get_submodule(parent)
    component.set_original_component(copy.deepcopy(component.original_component))
    host = host or BridgeHost(bridge)
    plain, drawn, refused = host.logits(TOKEN_ROW), torch.get_rng_state(), dict[str, str]()
    for site in host.linears():
        try:
            adapters = host.attach(site, spec=SPECS["lora"], generator=generator())
        except ValueError as error:
            refused[site] = str(error)
            continue
        move(adapters)
        assert largest(host.logits(TOKEN_ROW), plain) > 1e-9, site
        adapters.detach()
    assert torch.equal(host.logits(TOKEN_ROW), plain), "untouched"
    assert all("does not call the component at blocks.0" in said for said in refused.values())
    assert all(site.startswith(parent) for site in refused)
    assert refused or parent == "blocks.0.attn", "an attention calls its own components"
    assert torch.equal(torch.get_rng_state(), drawn)


def test_weight_processing_is_refused_before_and_while_adapters_stand() -> None:
    host, policy = own("Qwen3")
    tokens, (hash_before, logits) = make_tokens()[0], (policy.adapters.base_hash, host.logits(make_tokens()[0]))
    for process in (host.bridge.enable_compatibility_mode, host.bridge.process_weights):
        with pytest.raises(RuntimeError, match=r"refused while adapters stand: it folds norms.*no_processing=True"):
            process()
    assert policy.adapters.base_hash == hash_before
    assert torch.equal(host.logits(tokens), logits)
    policy.adapters.detach()
    host.bridge.enable_compatibility_mode()
    for call in (
        lambda: host.attach("blocks.*", generator=generator()),
        lambda: host.logits(tokens),
        lambda: host.capture([Site(0, "resid_pre")], tokens),
        lambda: BridgeHost(host.bridge),
    ):
        with pytest.raises(RuntimeError, match=r"weight processing was applied to this bridge.*boot a fresh bridge"):
            call()


@pytest.mark.parametrize(
    ("name", "flag"), [("Qwen3", "use_split_qkv_input"), ("GPT2", "use_attn_in"), ("Llama", "use_attn_result")]
)
def test_settings_under_which_the_bridge_passes_adapters_by_are_refused(name: str, flag: str) -> None:
    host, policy = own(name)
    tokens, site = make_tokens()[0], "attn.o" if flag == "use_attn_result" else "attn.q"
    full = host.logits(tokens)
    with pytest.raises(RuntimeError, match=f"under {flag} the bridge multiplies by the weights of blocks.0.{site} itself"):
        getattr(host.bridge, f"set_{flag}")(True)
    with pytest.raises(RuntimeError, match=f"under {flag}"):
        setattr(host.bridge.cfg, flag, True)
    getattr(host.bridge, f"set_{flag}")(False)
    getattr(TransformerBridge, f"set_{flag}")(host.bridge, True)
    assert largest(host.logits(tokens), full) > 1e-3  # what makes it worth refusing: in silence
    policy.adapters.detach()
    with pytest.raises(RuntimeError, match=f"under {flag}"):
        host.attach("blocks.*", generator=generator())
    assert host.attach("blocks.*.mlp.*", generator=generator())  # these are called


def test_an_edit_that_does_not_fit_says_so_and_leaves_no_hook() -> None:
    host, _ = own()
    tokens, _ = make_tokens()
    for new, why in (
        (lambda x: x[:, :1], r"shape \[4, 1, 16\], but the site has \[4, 9, 16\]"),
        (lambda x: 3.0, "float: return None"),
    ):
        for point in ("resid_mid", "mlp_out"):
            with pytest.raises(ValueError, match=rf"the edit of blocks\.0\.{point} returned a.*{why}"):
                with host.hooks({Site(0, point): new}):
                    host.logits(tokens)
    assert not any(point.has_hooks() for point in host.bridge.hook_points())


def test_a_model_of_no_known_architecture_is_refused_untouched() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="no known architecture"):
        BridgeHost(model)
    assert type(model[0]) is nn.Linear


# --- gradient checkpointing -----------------------------------------------------------------------------------------------------


def checkpointed(host: BridgeHost, reentrant: bool = False) -> BridgeHost:
    host.bridge.original_model.activation_checkpointing_enable({"use_reentrant": reentrant})
    host.bridge.train()
    return host


def kept_gradients(policy: Policy) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in policy.adapters.kept_parameters().items() if p.grad is not None}
    policy.model.zero_grad()
    return found


EDITS = {Site(0, "resid_mid"): lambda x: x * 1.5, Site(1, "q"): lambda q: q + 0.3}


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_gives_the_same_step_and_the_same_edited_gradient(reentrant: bool) -> None:
    _, policy_plain, _, _ = pair("Qwen3")
    host, policy = own("Qwen3")
    batch = make_batch()

    def edited() -> dict[str, Tensor]:
        with host.hooks(EDITS):
            with policy.adapters.unrouted():
                plain_loss(policy, batch, batch.advantages).backward()
        return kept_gradients(policy)

    expected = edited()
    checkpointed(host, reentrant)
    calls: list[bool] = []
    with host.bridge.hooks(fwd_hooks=[("blocks.0.attn.q.hook_in", lambda x, hook: calls.append(True))]):
        assert_same(edited(), expected)
    assert len(calls) == 2  # the forward, and again in the backward
    for rule in (GRAD_UNIT, TOKENS):
        assert_same(
            run(policy, mask_route(policy, rule), batch).kept, run(policy_plain, mask_route(policy_plain, rule), batch).kept
        )


@pytest.mark.parametrize("reentrant", [False, True])
def test_edits_that_are_gone_when_checkpointing_runs_the_forward_again_are_an_error(reentrant: bool) -> None:
    """Upstream's own context is silent: the backward then differentiates another forward than the one that gave the loss."""
    host, policy = own("Qwen3")
    batch, double = make_batch(), [("blocks.0.mlp.in.hook_out", lambda x, hook: x * 2)]
    checkpointed(host, reentrant)
    with policy.adapters.unrouted():
        with host.bridge.hooks(fwd_hooks=double):
            plain_loss(policy, batch, batch.advantages).backward()
        right = kept_gradients(policy)
        with host.bridge.hooks(fwd_hooks=double):
            loss = plain_loss(policy, batch, batch.advantages)
        loss.backward()
        wrong = kept_gradients(policy)
        assert max(largest(wrong[name], right[name]) for name in right) > 1e-3
        with host.hooks({Site(0, "attn_out"): lambda x: x * 2}):
            loss = plain_loss(policy, batch, batch.advantages)
        with pytest.raises(RuntimeError, match=r"the edit of blocks\.0\.attn_out was removed: run backward\(\) inside"):
            loss.backward()
        loss = plain_loss(policy, batch, batch.advantages)
        with (
            pytest.raises(RuntimeError, match=r"attn_out more often than forwards did"),
            host.hooks({Site(0, "attn_out"): lambda x: x * 2}),
        ):
            loss.backward()
