"""Points inside of attention, gradients in a cache, and activations of generated tokens, on every host."""

from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from decoders import make_decoder
from families import HEADS, LAYERS, SPECS, VOCAB, make_family, make_tokens, move, move_all
from torch import Tensor
from transformer_lens import patching
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from mi_route2.hosts import HOSTS, Host, open_host
from mi_route2.hosts.decoder import Decoder
from mi_route2.patching import Target, attribute, sweep
from mi_route2.runs import RunStore
from mi_route2.runs.record import record
from mi_route2.sites import Site, precedes

pytestmark = pytest.mark.hosts

TOKENS, _ = make_tokens()
FIRE = pytest.mark.parametrize("name", HOSTS)
INSIDE = ["scores", "pattern", "result"]


@cache
def opened(name: str, family: str, attn: str = "sdpa") -> Host:
    host = open_host(name, make_family(family, attn=attn))
    move(host.attach("blocks.*.attn.*", spec=SPECS["lora"], generator=torch.Generator().manual_seed(7)))
    return host


def close(found: Tensor, expected: Tensor, bound: float = 1e-12) -> bool:
    return found.shape == expected.shape and bool((found - expected).abs().max() < bound)


def by_head(value: Tensor) -> Tensor:
    """``[b s g dh]`` of key-value heads as ``[b h s dh]``."""
    return value.transpose(1, 2).repeat_interleave(HEADS // value.shape[2], 1)


@FIRE
@pytest.mark.parametrize(("family", "attn"), [("GPT2", "sdpa"), ("GPT2", "eager"), ("Qwen3", "sdpa"), ("GPTNeoX", "sdpa")])
def test_attention_is_the_softmax_of_its_scores_times_values(family: str, attn: str, name: str) -> None:
    host = opened(name, family, attn)
    bound = 1e-6 if name == "transformer_lens" and family == "Qwen3" else 1e-12  # the bridge's softmax is float32 there
    with torch.no_grad():
        logits, cache = host.run_with_cache(TOKENS, names=["scores", "pattern", "v", "z"])
        assert close(logits, host.logits(TOKENS), bound)
    for layer in range(LAYERS):
        pattern, scores = cache["pattern", layer], cache["scores", layer]
        assert pattern.shape == (len(TOKENS), HEADS, 9, 9)
        assert close(pattern, scores.softmax(-1), bound)
        assert close(pattern @ by_head(cache["v", layer]), cache["z", layer].transpose(1, 2), bound)
        assert not pattern.triu(1).any()
        assert cache[f"blocks.{layer}.attn.hook_pattern"] is pattern
        assert host.find("blocks.*.attn.hook_attn_scores")[layer] == Site(layer, "scores")
    assert not {site.point for site in host.sites()} & set(INSIDE)


@FIRE
def test_edits_inside_of_attention_act_as_by_hand(name: str) -> None:
    host, layer = opened(name, "GPT2"), 1
    visible = torch.ones(9, 9).tril().double()
    with torch.no_grad():
        plain, value = host.logits(TOKENS), by_head(host.capture([Site(layer, "v")], TOKENS)[Site(layer, "v")])
        uniform = (visible / visible.sum(-1, keepdim=True) @ value).transpose(1, 2)
        with host.hooks({Site(layer, "z"): lambda _: uniform}):
            expected = host.logits(TOKENS)
        assert not close(expected, plain, 1e-3)
        with host.hooks({Site(layer, "scores"): torch.zeros_like}):  # masked keys stay masked
            assert close(host.logits(TOKENS), expected)
        row = torch.randn(9, 1, dtype=torch.float64)  # shifts a query's scores
        halved: Any = {Site(layer, "pattern"): lambda p: p / 2, Site(layer, "scores"): lambda s: s + row}
        with host.hooks(halved), host.hooks({Site(layer, "pattern"): lambda p: p * 2}):
            assert close(host.logits(TOKENS), plain)

        def broken(_: Tensor) -> Tensor:
            raise ArithmeticError

        with pytest.raises(ArithmeticError), host.hooks({Site(0, "scores"): lambda s: s, Site(0, "pattern"): broken}):
            host.logits(TOKENS)
        assert torch.equal(host.logits(TOKENS), plain)
        assert torch.equal(torch.zeros(1, 1, 1, 2).softmax(-1), torch.full((1, 1, 1, 2), 0.5))
    assert [
        precedes(Site(0, a), Site(0, b)) for a, b in (("q", "scores"), ("scores", "pattern"), ("pattern", "z"), ("z", "result"))
    ]


@pytest.mark.parametrize("name", ["torch", "nnsight"])
@pytest.mark.parametrize("family", ["GPT2", "Qwen3"])
def test_results_of_heads_add_up_and_act_as_z(family: str, name: str) -> None:
    host, layer = opened(name, family), 1
    sites = [Site(layer, point) for point in ("result", "attn_out")]
    with torch.no_grad():
        values = host.capture([*sites, Site(layer, "z")], TOKENS)
        with host.hooks({Site(layer, "z"): torch.zeros_like}):
            bias = host.capture(sites, TOKENS)
        assert close(values[sites[0]].sum(2), values[sites[1]] - bias[sites[1]])
        edit = partial(torch.index_fill, dim=2, index=torch.tensor([2]), value=0.0)
        found, expected = (host.run_with_hooks(TOKENS, [(Site(layer, point), edit)]) for point in ("result", "z"))
        assert close(found, expected)
        assert not close(found, host.logits(TOKENS), 1e-3)
    asked: dict[str, Any] = {"clean": TOKENS[0], "corrupt": TOKENS[0].flip(0), "answer": 4, "foil": 9, "progress": False}
    grids = [sweep(host, sites=point, heads=True, **asked).values for point in ("result", "z")]
    np.testing.assert_allclose(*grids, atol=1e-11)


@pytest.mark.parametrize("family", ["Falcon", "Bloom", "DeepseekV3", "Phi3", "Granite"])
def test_attention_of_found_classes_is_taken_apart(family: str) -> None:
    """Shared keys, a bias of positions, a latent projection, a fused one, and outputs that are scaled."""
    host, tokens = open_host("torch", move_all(make_decoder(family))), TOKENS[:, :6]
    with torch.no_grad():
        logits, cache = host.run_with_cache(tokens, names=["pattern", "z", "result", "attn_out"])
        assert close(logits, host.logits(tokens))
        with host.hooks({Site(0, "z"): torch.zeros_like}):
            bias = host.capture([Site(0, "attn_out")], tokens)[Site(0, "attn_out")]
        assert close(cache["result", 0].sum(2), cache["attn_out", 0] - bias)
        first = cache["pattern", 0][:, :, :1, :1]  # the first token attends to itself alone
        assert close(first, torch.ones_like(first), 1e-6)
        with host.hooks({Site(0, "pattern"): lambda p: p / 2}):
            assert close(host.capture([Site(0, "z")], tokens)[Site(0, "z")], cache["z", 0] / 2)


def test_left_padding_leaves_real_tokens_alone() -> None:
    tokens, attention = make_tokens(side="left")
    for family in ("GPT2", "Qwen3"):
        host = opened("torch", family)
        logits, cache = host.run_with_cache(tokens, attention, ["pattern", "scores"])
        assert close(logits[attention], host.logits(tokens, attention)[attention])
        assert not cache["pattern", 1].masked_select((attention[:, :, None] & ~attention[:, None])[:, None]).any()


CLEAN, CORRUPT = (torch.randint(3, VOCAB, (4,), generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
ASKED: dict[str, Any] = {"clean": CLEAN, "corrupt": CORRUPT, "answer": 4, "foil": 9}


def test_a_sweep_of_patterns_is_transformer_lenss_and_its_slope_is_the_estimate() -> None:
    bridge: Any = open_host("transformer_lens", make_family("GPT2"))
    with torch.no_grad():
        _, cache = bridge.bridge.run_with_cache(CLEAN[None])
        ours = (bridge.bridge, CORRUPT[None], cache, lambda logits: logits[0, -1, 4] - logits[0, -1, 9])
        expected = patching.get_act_patch_attn_head_pattern_by_pos(*ours).flatten(0, 1)  # [layers heads, s]
    for host in (bridge, open_host("torch", make_family("GPT2"))):
        grid = sweep(host, sites="pattern", heads=True, progress=False, **ASKED)
        assert grid.forwards == "whole"
        np.testing.assert_allclose(grid.values, expected.numpy(), atol=1e-6)
    for point in ("pattern", "scores"):
        ahead, back = (sweep(host, sites=point, heads=True, alpha=a, progress=False, **ASKED).values for a in (1e-4, -1e-4))
        slope = (ahead - back) / 2e-4
        found = attribute(host, sites=point, heads=True, **ASKED).effect
        np.testing.assert_allclose(found, slope, rtol=0, atol=1e-6 * np.abs(slope).max())
    with pytest.raises(ValueError, match=r"pattern has other keys in the clean run.*equal length"):
        sweep(host, sites="pattern", progress=False, **(ASKED | {"clean": torch.cat([CORRUPT[:2], CLEAN[:1], CORRUPT[2:]])}))
    with pytest.raises(ValueError, match=r"blocks\.0\.pattern\[1\] has an axis of keys.*how='whole'"):
        sweep(host, sites=Target(Site(0, "pattern"), 1), how="resumed", progress=False, **ASKED)


def test_attention_that_cannot_be_taken_apart_says_so() -> None:
    def attend(weigh: Any, _module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **_: Any) -> tuple[Tensor, None]:
        scores = (query @ key.mT).masked_fill(~mask, -torch.inf)
        return (weigh(scores) @ value).transpose(1, 2).contiguous(), None

    kinds: dict[str, Any] = {
        "two softmaxes": lambda s: s.softmax(-1) - 0.5 * torch.softmax(s / 2, -1),
        "own softmax": lambda s: s.exp() / s.exp().sum(-1, keepdim=True),
    }
    for kind, weigh in kinds.items():
        AttentionInterface.register(kind, partial(attend, weigh))
        AttentionMaskInterface.register(kind, lambda *args, **kwargs: sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False}))
    for kind, why in (("two softmaxes", "several softmaxes.*read z"), ("own softmax", "neither softmax nor sdpa of torch.*'sdpa'")):
        host = open_host("torch", make_family("GPT2", attn=kind))
        with pytest.raises(ValueError, match=f"layer 0 (has|calls) {why}"):
            host.run_with_cache(TOKENS, names="blocks.0.pattern")
        assert host.logits(TOKENS).isfinite().all()
    hybrid = open_host("torch", move_all(make_decoder("Qwen3Next")))
    assert [site.layer for site in hybrid.find("pattern")] == [3]
    for site, name, host in (
        (Site(0, "pattern"), "attention has no output projection", hybrid),
        (
            Site(0, "scores"),
            "sink beside the keys: read scores on the transformer_lens host",
            open_host("torch", make_decoder("GptOss")),
        ),
        (Site(0, "pattern"), "read pattern on the torch host", open_host("transformer_lens", make_family("MicroGPT"))),
        (Site(0, "result"), "use the torch host", opened("transformer_lens", "GPT2")),
    ):
        with pytest.raises(ValueError, match=name):
            host.hooks({site: torch.zeros_like})
        if host is not hybrid:
            with pytest.raises(ValueError, match=name):
                host.find(f"blocks.*.{site.point}")
    with pytest.raises(ValueError, match=r"another size at every token: read it with host\.capture"):
        Decoder(opened("torch", "GPT2")).shape(Site(0, "pattern"))
    with pytest.raises(ValueError, match=r"has an axis of keys.*read it with host\.capture"):
        record(opened("torch", "GPT2"), [Site(0, "scores")], TOKENS[:1], store=RunStore(), runs=["one"])


# Gradients


@FIRE
def test_gradients_of_a_cache_are_slopes(name: str) -> None:
    host = open_host(name, make_family("GPT2"))
    points = ["resid_pre", "resid_mid", "v", "pattern", "mlp_out"]

    def loss(logits: Tensor) -> Tensor:
        return logits[:, -1].log_softmax(-1)[:, 3].sum()

    with torch.no_grad():
        logits, cache = host.run_with_cache(TOKENS, names=points, loss=loss)
        assert close(logits, host.logits(TOKENS))
        assert set(cache.gradients) == set(cache)
        for site, value in cache.items():
            assert close(value, host.capture([site], TOKENS)[site])
            step = 1e-4 * torch.randn(value.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
            ends = [float(loss(host.run_with_hooks(TOKENS, [(site, partial(torch.add, sign * step))]))) for sign in (1, -1)]
            assert float((cache.gradients[site] * step).sum()) == pytest.approx((ends[0] - ends[1]) / 2, rel=1e-5), site
    assert not any(cache.gradients[site].requires_grad or value.requires_grad for site, value in cache.items())
    assert all(p.grad is None for p in host.model.parameters())
    with torch.inference_mode():
        again = host.model.requires_grad_(False) and host.run_with_cache(TOKENS, names="z", loss=loss)[1]
    assert again.gradients["z", 0].any()
    for wrong in (lambda logits: logits[:, -1, 0], lambda logits: logits.sum().detach(), lambda _: 1.0):
        with pytest.raises(ValueError, match="compute one number with torch from the logits"):
            host.run_with_cache(TOKENS, names="z", loss=wrong)
    with pytest.raises(ValueError, match="this cache has no gradients"):
        _ = host.run_with_cache(TOKENS, names="z")[1].gradients


# Generated tokens


@FIRE
def test_generated_tokens_have_the_activations_of_the_completed_sequence(name: str) -> None:
    host, prompts = opened(name, "GPT2"), TOKENS[:2, :4]
    completed, cache = host.generate_with_cache(prompts, 5, ["resid_post", "pattern"])
    logits, expected = host.run_with_cache(completed, names=[*cache])
    assert torch.equal(completed[:, :4], prompts)
    assert torch.equal(completed[:, 4:], logits[:, 3:-1].argmax(-1))
    assert all(torch.equal(value, expected[site]) for site, value in cache.items())
    assert cache["resid_post", 1].shape == (2, 9, 16)
    with host.hooks({Site(1, "resid_post"): lambda x: -x}):  # the edit acts on every token, prompt and completion
        moved, cache = host.generate_with_cache(prompts, 3, "resid_pre")
        assert torch.equal(moved[:, 4:], host.logits(moved)[:, 3:-1].argmax(-1))
    assert not torch.equal(moved[:, 4:], completed[:, 4:7])


def test_generated_tokens_are_those_of_transformers_and_draws_are_seeded() -> None:
    host = opened("torch", "Qwen3")
    model: Any = host.model
    tokens, attention = make_tokens(side="left")
    greedy, _ = host.generate_with_cache(tokens, 4, "z", attention=attention)
    kwargs: dict[str, Any] = {"attention_mask": attention.long(), "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    theirs = model.generate(tokens, **kwargs, eos_token_id=None)
    assert torch.equal(greedy, theirs)
    alone, cache = host.generate_with_cache(tokens[-1:, 5:], 4, "z")
    assert torch.equal(alone[0], greedy[-1, 5:])
    assert torch.equal(cache["z", 0], host.capture([Site(0, "z")], alone)[Site(0, "z")])
    draw = partial(host.generate_with_cache, TOKENS[:1, :4].expand(400, -1), 1, "blocks.0.z", temperature=2.0)
    first, again, other = (draw(generator=torch.Generator().manual_seed(seed))[0][:, -1] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    chances = (host.logits(TOKENS[:1, :4])[0, -1] / 2).softmax(-1).detach()
    found = torch.bincount(torch.cat([first, other]), minlength=VOCAB) / 800
    assert float((found - chances).abs().max()) < 5 * float((chances.max() / 800).sqrt())
    for wrong in ({"max_new": 0}, {"temperature": 1.0}, {"generator": torch.Generator()}, {"temperature": -1.0}):
        with pytest.raises(ValueError, match="generate at least one token, with temperature 0 and no generator"):
            host.generate_with_cache(TOKENS, **({"max_new": 1} | wrong))
    with pytest.raises(ValueError, match="pad on the left"):
        host.generate_with_cache(*make_tokens()[:1], 1, attention=make_tokens()[1])
