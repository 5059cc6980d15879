"""A sweep's grid is TransformerLens's own, and that of nnsight traces, on the same model."""

from typing import Any

import numpy as np
import pytest
import torch
from families import HEADS, LAYERS, SPECS, VOCAB, make_family, move
from patched_by_hand import ByHand
from torch import Tensor
from transformer_lens import patching
from transformer_lens.model_bridge.generalized_components import NormalizationBridge
from transformer_lens.model_bridge.generalized_components.position_embeddings_attention import PositionEmbeddingsAttentionBridge

from mi_route2.hosts import HOSTS, Host, open_host
from mi_route2.hosts.decoder import COMPARED
from mi_route2.patching import Grid, sweep
from mi_route2.sites import Site

ANSWER, FOIL, LENGTH = 4, 9, 3
CLEAN, CORRUPT = (torch.randint(3, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
OF_LENS = {
    "resid_pre": patching.get_act_patch_resid_pre,
    "resid_mid": patching.get_act_patch_resid_mid,
    "attn_out": patching.get_act_patch_attn_out,
    "mlp_out": patching.get_act_patch_mlp_out,
    "z": patching.get_act_patch_attn_head_out_by_pos,
    "q": patching.get_act_patch_attn_head_q_by_pos,
    "k": patching.get_act_patch_attn_head_k_by_pos,
    "v": patching.get_act_patch_attn_head_v_by_pos,
}


def adapted(name: str, family: str, dtype: torch.dtype = torch.float32) -> Host:
    host = open_host(name, make_family(family).to(dtype))
    given: Any = {"spec": SPECS["lora"], "generator": torch.Generator().manual_seed(7)}
    move(host.attach("blocks.*", **given))
    return host


def swept(host: Host, **given: Any) -> Grid:
    return sweep(host, clean=CLEAN, corrupt=CORRUPT, answer=ANSWER, foil=FOIL, progress=False, **given)


def difference(logits: Tensor) -> Tensor:
    return logits[0, -1, ANSWER] - logits[0, -1, FOIL]


@pytest.mark.matrix
@pytest.mark.parametrize("family", COMPARED)
def test_transformer_lens_patches_the_same(family: str) -> None:
    """Its own functions over every layer and position, and every head; ``run_with_hooks`` at the points that they lack."""
    host: Any = adapted("transformer_lens", family)
    bridge = host.bridge.eval()
    with torch.no_grad():
        _, cache = bridge.run_with_cache(CLEAN[None])
        for point, patch in OF_LENS.items():
            heads = point in "qkvz"
            expected = patch(bridge, CORRUPT[None], cache, difference).double().numpy()
            grid = swept(host, sites=point, heads=heads)
            found = grid.values.reshape(LAYERS, -1, LENGTH).transpose(0, 2, 1) if heads else grid.values
            assert grid.forwards == "resumed"
            assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max(), point
        for site in (Site(1, "attn_in"), Site(0, "mlp_in"), Site(0, "resid_post"), *adapter_points(family)):
            grid, name = swept(host, sites=site), host.address(site)
            for position, value in enumerate(grid.values[0]):

                def put(x: Tensor, hook: Any, name: str = name, position: int = position) -> Tensor:
                    x = x.clone()
                    x[:, position] = cache[name][:, position]
                    return x

                logits = bridge.run_with_hooks(CORRUPT[None], fwd_hooks=[(name, put)])
                assert value == pytest.approx(float(difference(logits)), abs=1e-5), (site, position)


def adapter_points(family: str) -> list[Site]:
    last = "mlp.gate" if family in ("Qwen3", "Llama") else "mlp.up"
    return [Site(0, "kept_a", "attn.v"), Site(1, "kept_out", "attn.o"), Site(0, "quarantine_out", last)]


@pytest.mark.parametrize("family", ["Qwen3", "GPT2"])
def test_nnsight_traces_patch_the_same(family: str) -> None:
    host: Any = adapted("torch", family, torch.float64)
    other: Any = adapted("nnsight", family, torch.float64)
    model = other.envoy
    blocks = model.model.layers if family == "Qwen3" else model.transformer.h
    where = {Site(1, "mlp_out"): lambda: blocks[1].mlp, Site(0, "resid_post"): lambda: blocks[0]}
    if family == "Qwen3":
        where[Site(1, "kept_a", "attn.q")] = lambda: blocks[1].self_attn.q_proj.route.hook_kept_a
    for site, envoy in where.items():
        grid = swept(host, sites=site)
        with torch.no_grad(), model.trace(CLEAN[None]):
            source = envoy().output.save()
        for position, value in enumerate(grid.values[0]):
            with torch.no_grad(), model.trace(CORRUPT[None]):
                new = envoy().output.clone()
                new[:, position] = source[:, position]
                envoy().output = new
                logits = model.lm_head.output.save()
            assert value == pytest.approx(float(difference(logits)), abs=1e-10), (site, position)


@pytest.mark.parametrize("family", ["Qwen3", "GPT2", "Gemma3", "MicroGPT"])
def test_every_host_gives_the_same_grid(family: str) -> None:
    sites = ["resid_pre", "resid_mid", "q", "z", "mlp_out", "kept_a", "quarantine_out"]
    expected = swept(adapted("torch", family, torch.float64), sites=sites)
    scale = np.abs(expected.values).max()
    for name in HOSTS:
        dtype = torch.float32 if name == "transformer_lens" else torch.float64
        grid = swept(adapted(name, family, dtype), sites=sites)
        assert grid.sites == expected.sites
        assert grid.forwards == ("resumed" if name != "nnsight" and family != "Gemma3" else "whole")
        tolerance = 1e-10 if dtype == torch.float64 else 1e-5
        assert np.abs(grid.values - expected.values).max() < tolerance * scale, name


def test_heads_are_counted_on_every_host() -> None:
    for name in HOSTS:
        grid = swept(adapted(name, "Qwen3"), sites=["z", "k"], heads=True)
        assert [target.head for target in grid.sites] == [*range(HEADS)] * LAYERS + [*range(2)] * LAYERS


FUSED = pytest.mark.parametrize("family", ["Qwen3", "Llama"])
"""Architectures whose attention a bridge takes apart, and whose wrapped attention has the same projections."""


def switched(host: Any) -> bool:
    """Return whether the wrapped model's attention is fused now; then every block's must be."""
    attentions = [block.attn for block in host.bridge.blocks]
    implementation = host.bridge.original_model.config._attn_implementation
    assert [("forward" in vars(one)) for one in attentions] == [implementation == "sdpa"] * LAYERS
    return implementation == "sdpa"


@FUSED
def test_a_bridge_in_float64_is_patched_as_by_plain_hooks(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bridge's own attention, whose softmax is float32, is not called, and its wrapped one rounds in float64 alone."""
    plain, host = adapted("torch", family, torch.float64), adapted("transformer_lens", family, torch.float64)
    hand, own = ByHand(plain.model, family), PositionEmbeddingsAttentionBridge.forward

    def shapes_alone(*args: Any, hidden_states: Tensor, **given: Any) -> Any:
        assert hidden_states.shape[:2] == (1, 1), "the bridge took its attention apart"
        return own(*args, hidden_states=hidden_states, **given)

    monkeypatch.setattr(PositionEmbeddingsAttentionBridge, "forward", shapes_alone)
    grid = swept(host, sites=["resid_pre", "attn_in", "q", "k", "v", "z", "attn_out", "mlp_out"])
    here, source = hand.read(CORRUPT), hand.read(CLEAN)
    assert grid.forwards == "resumed"
    for target, row in zip(grid.sites, grid.values, strict=True):
        logits = hand.each(CORRUPT, target.site, [[p] for p in range(LENGTH)], source[target.site][:, None], None)
        assert here[target.site].shape == source[target.site].shape
        assert np.abs(row - (logits[:, ANSWER] - logits[:, FOIL]).numpy()).max() < 1e-10, target


def test_attention_is_fused_within_the_sweep_alone_also_after_an_error() -> None:
    host: Any = adapted("transformer_lens", "Qwen3")
    seen = list[int]()

    def metric(logits: Tensor) -> Tensor:
        seen.append(len(seen))
        if len(seen) > 3:
            raise ArithmeticError("a metric of the user's own")
        return logits[ANSWER]

    with pytest.raises(ArithmeticError):
        sweep(host, clean=CLEAN, corrupt=CORRUPT, sites="resid_pre", metric=metric, progress=False)
    assert not switched(host)
    with host.fused():
        assert switched(host)
    assert not switched(host)


@FUSED
def test_norms_are_the_wrapped_ones_with_the_same_bits(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the bridge, which compute a scale for hooks as well, run outside of a sweep's forwards, and at their end."""
    host, own = adapted("transformer_lens", family), NormalizationBridge._hf_autograd_forward_with_hooks
    calls: list[Any] = []

    def counted(norm: Any, x: Tensor) -> Tensor:
        calls.append(norm)
        return own(norm, x)

    monkeypatch.setattr(NormalizationBridge, "_hf_autograd_forward_with_hooks", counted)
    fused, few = swept(host, sites="resid_pre").values, len(calls)
    monkeypatch.setattr("mi_route2.hosts.transformer_lens._observed", lambda norm: True)
    assert np.array_equal(swept(host, sites="resid_pre").values, fused)
    assert 2 * few < len(calls) - few


@pytest.mark.parametrize("name", ["hook_scale", "hook_normalized"])
def test_a_norm_stays_as_it_is_where_somebody_could_tell(name: str) -> None:
    host: Any = open_host("transformer_lens", make_family("Qwen3"))
    host.bridge.add_hook(f"blocks.0.ln1.{name}", lambda x, hook: x)
    first, second = host.bridge.blocks
    with host.fused():
        norms = (first.ln1, first.ln2, second.ln1, second.attn.k_norm)
        assert ["forward" in vars(norm) for norm in norms] == [False, True, True, True]
    assert not any("forward" in vars(module) for module in host.bridge.modules())


LOOKERS: dict[str, Any] = {
    "scores": lambda bridge: bridge.add_hook("blocks.1.attn.hook_attn_scores", lambda x, hook: x),
    "rotated keys": lambda bridge: bridge.add_hook("blocks.0.attn.hook_rot_k", lambda x, hook: x),
    "a norm's scale": lambda bridge: bridge.add_hook("blocks.0.attn.q_norm.hook_scale", lambda x, hook: x),
    "the module": lambda bridge: bridge.blocks[0].attn.register_forward_hook(lambda *_: None),
    "the wrapped module": lambda bridge: bridge.blocks[0].attn.original_component.register_forward_pre_hook(lambda *_: None),
    "a forward of its own": lambda bridge: vars(bridge.blocks[1].attn).update(forward=bridge.blocks[1].attn.forward),
    "inputs by head": lambda bridge: bridge.set_use_split_qkv_input(True),
}


@pytest.mark.parametrize("what", LOOKERS)
def test_attention_stays_as_it_is_where_somebody_could_tell(what: str) -> None:
    host: Any = open_host("transformer_lens", make_family("Qwen3"))
    LOOKERS[what](host.bridge)
    with host.fused():
        assert host.bridge.original_model.config._attn_implementation == "eager"


@pytest.mark.parametrize("family", ["Gemma2", "GPT2", "MicroGPT"])
def test_attention_of_other_architectures_stays_as_it_is(family: str) -> None:
    """Gemma 2 caps its scores, GPT-2's projections are copies on a bridge, and MicroGPT's attention is in one piece."""
    host: Any = open_host("transformer_lens", make_family(family))
    before = [vars(block.attn).get("forward") for block in host.bridge.blocks]
    with host.fused():
        assert [vars(block.attn).get("forward") for block in host.bridge.blocks] == before == [None] * len(before)


def test_hooks_on_projections_and_outputs_do_not_keep_attention_apart() -> None:
    host: Any = open_host("transformer_lens", make_family("Qwen3"))
    for name in ("attn.hook_in", "attn.q.hook_out", "attn.v.hook_out", "attn.o.hook_in", "attn.hook_out", "mlp.hook_out"):
        host.bridge.add_hook(f"blocks.0.{name}", lambda x, hook: x)
    with torch.no_grad():
        host.bridge.run_with_cache(CLEAN[None])  # after which transformers has hooks of its own on the wrapped modules
    with host.fused():
        assert switched(host)


@FUSED
def test_a_users_hook_on_the_pattern_still_acts_in_a_sweep(family: str) -> None:
    """As it does in TransformerLens's own function, with the same hook."""
    host: Any = adapted("transformer_lens", family)
    plain, bridge = swept(host, sites="resid_pre"), host.bridge
    bridge.add_hook("blocks.1.attn.hook_pattern", lambda pattern, hook: 0.5 * pattern)
    grid = swept(host, sites="resid_pre")
    with torch.no_grad():
        _, cache = bridge.run_with_cache(CLEAN[None])
        expected = OF_LENS["resid_pre"](bridge, CORRUPT[None], cache, difference).double().numpy()
    scale = np.abs(expected).max()
    assert np.abs(grid.values - expected).max() < 1e-5 * scale < np.abs(grid.values - plain.values).max()
