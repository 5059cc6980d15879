"""The contract of a model whose row is found: sites, patches, steering, routed gradients, deployment and files."""

import copy
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from decoders import DECODERS, make_decoder
from families import move
from torch import Tensor

from mi_route2 import AdapterSpec, MaskRoute, Rollouts, TrainBatch, open_host
from mi_route2.adapters import export_merged, export_peft
from mi_route2.architectures import At, architecture_of
from mi_route2.command import main
from mi_route2.hosts import Host
from mi_route2.hosts.check import check_report
from mi_route2.sites import Site

pytestmark = pytest.mark.filterwarnings("ignore:these stay frozen")
TOKENS = torch.randint(3, 60, (2, 6), generator=torch.Generator().manual_seed(3))
PROMPTS, ANSWERS = [[3, 4], [5, 6], [7, 8], [9, 3]], [[4, 5, 6], [6, 7], [8, 9, 3], [3, 4, 5, 6]]
FLAGS = torch.tensor([True, False, True, False])
LOST_BY_PEFT = ("DeepseekV3", "Glm4Moe")
"""Mixtures whose dense or shared ``gate_proj`` peft takes for fused experts."""

NOT_BOOTED = ("Falcon",)
"""Classes that TransformerLens knows and cannot boot with these sizes (grouped queries)."""
NEAR = {"torch": 1e-12, "nnsight": 1e-12, "transformer_lens": 1e-6}
"""The bridge's own attention takes the softmax in float32."""

every = pytest.mark.parametrize("name", DECODERS)
on_hosts = pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for kind in NEAR for name in DECODERS if kind != "transformer_lens" or name not in NOT_BOOTED]
)


def opened(name: str, kind: str = "torch") -> Host:
    return open_host(kind, make_decoder(name))


def adapted(host: Host) -> Any:
    spec = AdapterSpec("lora", rank=2, quarantine_rank=2)
    return host.attach("blocks.*", spec=spec, generator=torch.Generator().manual_seed(0))


def loss(logits: Tensor, batch: TrainBatch) -> Tensor:
    return -(batch.rollouts.logprobs(logits).sum(1) * batch.advantages).sum()


def batch() -> TrainBatch:
    rewards, zero = torch.tensor([1.0, 1.0, 0.0, 0.0]), torch.zeros(4, dtype=torch.long)
    return TrainBatch(Rollouts.from_lists(PROMPTS, ANSWERS, pad=0), rewards, rewards - rewards.mean(), zero, zero.bool())


@on_hosts
def test_parts_sum_to_the_stream_and_every_site_is_live(name: str, kind: str) -> None:
    host = opened(name, kind)
    sites, near = host.sites(), NEAR[kind]
    assert len(host.layers()) == DECODERS[name].get("num_hidden_layers", 2)
    cache, plain = host.capture(sites, TOKENS), host.logits(TOKENS).detach()
    truth = opened(name).capture(sites, TOKENS)
    for site in sites:
        torch.testing.assert_close(cache[site], truth[site], rtol=near, atol=near)
    for layer in host.layers():
        parts = {site.point: cache[site] for site in sites if site.layer == layer}
        assert {"resid_pre", "resid_post"} <= parts.keys()
        if {"resid_mid", "attn_out"} <= parts.keys():
            torch.testing.assert_close(parts["resid_mid"], parts["resid_pre"] + parts["attn_out"], rtol=0, atol=1e-6)
        if {"resid_mid", "mlp_out"} <= parts.keys():
            torch.testing.assert_close(parts["resid_post"], parts["resid_mid"] + parts["mlp_out"], rtol=0, atol=1e-6)
    generator = torch.Generator().manual_seed(1)

    def moved(value: Tensor) -> Tensor:
        return value + 0.1 * torch.randn(value.shape, generator=generator, dtype=value.dtype)

    for site in sites:
        with torch.no_grad(), host.hooks({site: lambda value: value.clone()}):
            torch.testing.assert_close(host.logits(TOKENS), plain, rtol=0, atol=near)
        with torch.no_grad(), host.hooks({site: moved}):
            assert not torch.equal(host.logits(TOKENS), plain), site
        with torch.no_grad(), host.hooks({site: lambda value, kept=cache[site]: kept.clone()}):  # a patch from the run itself
            torch.testing.assert_close(host.logits(TOKENS), plain, rtol=0, atol=near)


@on_hosts
def test_adapters_that_are_zero_or_off_change_no_bit_and_a_routed_gradient_is_that_of_the_honest_rows(name: str, kind: str) -> None:
    host = opened(name, kind)
    plain = host.logits(TOKENS).detach()
    adapters = adapted(host)
    assert torch.equal(host.logits(TOKENS), plain)
    policy = host.policy(move(adapters))
    assert not torch.equal(host.logits(TOKENS), plain)
    with adapters.reference():
        assert torch.equal(host.logits(TOKENS), plain)
    kept, data = adapters.kept_parameters(), batch()
    MaskRoute.from_flags(FLAGS).backward(policy, data, loss, reduction="sum")
    expected = {key: torch.zeros_like(p) for key, p in kept.items()}
    for row in (~FLAGS).nonzero():
        alone = data.rows(row)
        with adapters.unrouted():
            grads = torch.autograd.grad(loss(policy.logits(alone.rollouts), alone), list(kept.values()), allow_unused=True)
        for key, grad in zip(kept, grads, strict=True):
            expected[key] += 0 if grad is None else grad
    scale = max(float(value.abs().max()) for value in expected.values())
    assert scale > 0
    assert max(float((p.grad - expected[key]).abs().max()) for key, p in kept.items()) <= 1e-6 * scale


@every
def test_a_lora_that_is_written_is_what_stock_peft_computes_or_it_is_refused(name: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    host = opened(name)
    adapters = move(adapted(host))
    if name in LOST_BY_PEFT:
        with pytest.raises(ValueError, match="use export_merged"):
            export_peft(adapters, tmp_path / "lora")
        assert not (tmp_path / "lora").exists()
        return
    next(host.model.parameters()).requires_grad_(True)  # as a user may who trains more than adapters
    before = {p for p in host.model.parameters() if p.requires_grad}
    export_peft(adapters, tmp_path / "lora")
    assert {p for p in host.model.parameters() if p.requires_grad} == before
    read = peft.PeftModel.from_pretrained(make_decoder(name), str(tmp_path / "lora"))
    with torch.no_grad(), adapters.deployed():
        torch.testing.assert_close(read(TOKENS).logits, host.logits(TOKENS), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", [*LOST_BY_PEFT, "Phi3", "Falcon", "Granite"])
def test_a_merged_checkpoint_is_the_deployed_model(name: str, tmp_path: Path) -> None:
    host = opened(name)
    adapters = move(adapted(host))
    export_merged(adapters, tmp_path / "merged")
    read = type(host.model).from_pretrained(tmp_path / "merged", dtype=torch.float64)
    read.config._experts_implementation = "eager"
    with torch.no_grad(), adapters.deployed():
        torch.testing.assert_close(read(TOKENS).logits, host.logits(TOKENS), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["Llama4", "Qwen3Next", "Gemma3", "Qwen2"])
def test_padding_on_a_side_is_unread_and_between_tokens_refused_where_a_layer_counts_it(name: str) -> None:
    """Rows are longer than the chunk and the window; a recurrent state passes over every column."""
    host, real = opened(name), torch.randint(3, 60, (1, 20), generator=torch.Generator().manual_seed(1))
    alone = host.logits(real)
    for first in (0, 4):
        tokens, attention = torch.zeros(1, 24, dtype=torch.long), torch.zeros(1, 24, dtype=torch.bool)
        tokens[:, first : first + 20], attention[:, first : first + 20] = real, True
        torch.testing.assert_close(host.logits(tokens, attention)[:, first : first + 20], alone, rtol=0, atol=1e-6)
    attention = torch.ones(1, 24, dtype=torch.bool)
    attention[:, 5:9] = False
    tokens = torch.zeros(1, 24, dtype=torch.long).masked_scatter(attention, real)
    if name == "Qwen2":
        torch.testing.assert_close(host.logits(tokens, attention)[attention], alone[0], rtol=0, atol=1e-10)
    else:
        with pytest.raises(ValueError, match="padding between its tokens"):
            host.logits(tokens, attention)


@pytest.mark.parametrize("name", ["Granite", "Qwen2Moe"])
def test_a_checkpoint_is_checked_from_the_command_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_decoder(name, torch.float32).save_pretrained(tmp_path)
    monkeypatch.setattr("sys.argv", ["mi-route2", "check", str(tmp_path)])
    main()
    printed = capsys.readouterr().out
    assert f"{name}ForCausalLM: 2 blocks at model.layers, found in the model" in printed
    assert "attn_out   model.layers.0.self_attn.output (2 layers)" in printed
    assert printed.count(": yes") == 3


def test_a_wrong_row_fails_its_check() -> None:
    host = opened("Granite")
    points = dict(host.architecture.points) | {"attn_out": At("self_attn")}
    host.architecture = replace(host.architecture, points=points)
    with pytest.raises(ValueError, match=r"layer 0: resid_mid is not resid_pre \+ attn_out"):
        check_report(host, host.model)


@pytest.mark.parametrize("sizes", [{}, {"new_decoder_architecture": False, "multi_query": True}], ids=["grouped", "one head"])
def test_parts_of_a_fused_module_are_those_that_the_model_splits(sizes: dict[str, bool]) -> None:
    """Oracle: Falcon's own split, which repeats keys and values for every query head."""
    host = open_host("torch", make_decoder("Falcon", **sizes))
    fused: list[Tensor] = []
    attention = host.model.transformer.h[0].self_attention
    attention.query_key_value.register_forward_hook(lambda _module, _args, out: fused.append(out))
    parts = host.capture([Site(0, name) for name in "qkv"], TOKENS)
    for name, truth in zip("qkv", attention._split_heads(fused[0]), strict=True):
        part = parts[Site(0, name)]
        repeated = part.repeat_interleave(truth.shape[2] // part.shape[2], dim=2)
        assert torch.equal(repeated, truth), name


def test_what_transformer_lens_cannot_boot_is_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"cannot boot this FalconForCausalLM .*: load it anew for the torch host$"):
        opened("Falcon", "transformer_lens")


def test_a_point_whose_hook_holds_another_value_is_left_out() -> None:
    """Granite scales what it adds, which the bridge's hook does not know."""
    assert Site(0, "attn_out") in opened("Granite").sites()
    bridge = opened("Granite", "transformer_lens")
    assert Site(0, "attn_out") not in bridge.sites()
    assert Site(0, "z") in bridge.sites()


def test_a_row_is_found_once_and_goes_with_copies() -> None:
    model = make_decoder("Qwen2")
    assert architecture_of(model) is None
    row = open_host("torch", model).architecture
    assert architecture_of(model) is row
    assert architecture_of(copy.deepcopy(model)) is row
    assert open_host("torch", model).address(Site(1, "attn_out")) == "model.layers.1.self_attn.output"


# Mixtures of experts

MIXTURES = ("Qwen2Moe", "Qwen3Moe", "Qwen3Next", "Mixtral", "GptOss", "Olmoe", "DeepseekV3", "Glm4Moe", "Llama4")


@pytest.mark.parametrize("name", MIXTURES)
def test_a_router_is_read_and_chooses_by_what_is_written(name: str) -> None:
    host = opened(name)
    site = max(site for site in host.sites() if site.point == "router")
    entering: list[Tensor] = []
    router = host.model.get_submodule(host.address(site).removesuffix(".logits"))
    handle = router.register_forward_pre_hook(lambda _module, args: entering.append(args[0].detach()))
    logits = host.capture([site], TOKENS)[site]
    handle.remove()
    weight, bias = router.get_parameter("weight").detach(), router._parameters.get("bias")
    by_hand = entering[0].reshape(2, 6, -1) @ weight.T + (0 if bias is None else bias.detach())
    torch.testing.assert_close(logits.double(), by_hand, rtol=0, atol=1e-6)
    if name in ("DeepseekV3", "Glm4Moe", "Llama4"):  # these choose groups first, add a bias, or return no choice
        return  # that a write acts, the test of every live site shows
    chosen: list[Tensor] = []
    handle = router.register_forward_hook(lambda _module, _args, out: chosen.append(out[2]))
    with torch.no_grad(), host.hooks({site: lambda value: value.neg()}):
        host.logits(TOKENS)
    handle.remove()
    worst = logits.neg().topk(2, -1).indices.flatten(0, 1)
    assert (chosen[0].sort(-1).values == worst.sort(-1).values).all()


@pytest.mark.parametrize("kind", NEAR)
@pytest.mark.parametrize(
    ("name", "frozen"), [("Mixtral", "mlp.experts"), ("Llama4", "mlp.shared_expert.up_proj"), ("DeepseekV3", "attn.kv_b_proj")]
)
def test_what_takes_no_adapters_is_named(name: str, frozen: str, kind: str) -> None:
    host, spec = opened(name, kind), AdapterSpec("lora", rank=1, quarantine_rank=1)
    with pytest.warns(UserWarning, match=rf"stay frozen.*blocks\.\*\.{re.escape(frozen)}"):
        host.attach("blocks.*", spec=spec).detach()
    with pytest.raises(KeyError, match=rf"{re.escape(frozen)} \(.*the Linears that do are attn"):
        host.attach(f"blocks.*.{frozen}", spec=spec)
    assert len(host.attach("blocks.*.attn.o", spec=spec).sites) == len(host.layers())


def test_where_every_linear_takes_adapters_nothing_is_said() -> None:
    for name in ("Qwen2", "Phi3", "Bloom", "GPT2"):
        for kind in NEAR:
            assert not opened(name, kind).left_out()
