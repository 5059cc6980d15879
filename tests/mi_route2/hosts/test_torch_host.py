"""The torch host against blocks worked out by hand: what is at each point, what an edit does, padding, and wrong use."""

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from blocks_by_hand import by_hand
from families import FAMILIES, HEAD, HEADS, LAYERS, TRANSFORMERS, alone, make_batch, make_family, make_policy, make_tokens
from mask_oracle import FixedFitter, assert_same, plain_loss, random_directions, run
from torch import Tensor, nn
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlamaConfig,
    LlamaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
)

from mi_route2.architectures import ADAPTER_POINTS, POINTS
from mi_route2.hosts import open_host
from mi_route2.hosts.base import Host
from mi_route2.hosts.huggingface import TorchHost
from mi_route2.rollouts import Policy, call_with_mask
from mi_route2.routing import MaskRoute, MaskSpec, TrainBatch
from mi_route2.sites import Site

TOKENS = make_tokens(3)[0]
SEQUENTIAL = [name for name in FAMILIES if name != "GPTNeoX"]


def points(name: str) -> list[str]:
    return [point for point in POINTS if name != "GPTNeoX" or point != "resid_mid"]


def everywhere(name: str) -> list[Site]:
    return [Site(layer, point) for layer in range(LAYERS) for point in points(name)]


@cache
def host_of(name: str) -> TorchHost:
    return TorchHost(make_family(name))


@cache
def policy_of(name: str, spec: str = "lora") -> tuple[Host, Policy]:
    """Adapters everywhere, the unembedding too."""
    return make_policy(name, spec, "*")


def gap(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().abs().max())


def like(value: Tensor, seed: int = 9) -> Tensor:
    return torch.randn(value.shape, generator=torch.Generator().manual_seed(seed), dtype=value.dtype)


def hooks_left(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


# ---- what is at each point


@pytest.mark.parametrize("spec", ["svd", "lora-shared"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_point_is_what_the_block_worked_out_by_hand_has_there(name: str, spec: str) -> None:
    host, policy = policy_of(name, spec)
    expected = by_hand(name, host.model, TOKENS, policy=policy)
    found = host.capture(everywhere(name), TOKENS)
    assert gap(host.logits(TOKENS), expected.logits) < 1e-12
    for site, value in found.items():
        assert value.shape == expected.points[site.layer, site.point].shape, site
        assert gap(value, expected.points[site.layer, site.point]) < 1e-12, site
        assert not value.requires_grad


@pytest.mark.parametrize("spec", ["svd-low", "lora"])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_points_of_adapters_are_their_equations(name: str, spec: str) -> None:
    """``kept_a = Vh x`` or ``A x``, ``kept_out = U dS a`` or ``B a``, ``quarantine_out = B_q A_q x``, x from the block by hand."""
    host, policy = policy_of(name, spec)
    sites = [Site(1, point, f"attn.{n}") for point in ADAPTER_POINTS for n in "qkvo"]
    sites += [Site(1, point, "mlp.up") for point in ADAPTER_POINTS]
    found = host.capture([*sites, Site(1, "attn_in"), Site(1, "mlp_in"), Site(1, "z")], TOKENS)
    for site in sites:
        branch = policy.adapters.sites[site.slot]
        x = found[Site(1, {"attn.o": "z", "mlp.up": "mlp_in"}.get(site.linear, "attn_in"))].flatten(2)
        a = x @ (branch.kept.A if spec == "lora" else branch.kept.Vh).T
        expected = {
            "kept_a": a,
            "kept_out": a @ branch.kept.B.T if spec == "lora" else (a * branch.kept.dS) @ branch.kept.U.T,
            "quarantine_out": x @ branch.quarantine.A.T @ branch.quarantine.B.T,
        }
        assert gap(found[site], expected[site.point]) < 1e-12, site
    unembed = host.capture([Site(None, "kept_out", "unembed")], TOKENS)
    assert next(iter(unembed.values())).shape == (3, 9, 50)


# ---- edits


@pytest.mark.parametrize("name", FAMILIES)
def test_an_edit_that_returns_what_it_was_given_changes_no_bit(name: str) -> None:
    host, _ = policy_of(name)
    plain = host.logits(TOKENS)
    sites = [*everywhere(name), Site(0, "kept_a", "attn.q"), Site(1, "kept_out", "mlp.up"), Site(1, "quarantine_out", "attn.v")]
    for edit in (lambda x: x, lambda x: x.clone(), lambda x: None):
        with host.hooks(dict.fromkeys(sites, edit)):
            assert torch.equal(host.logits(TOKENS), plain)
    assert torch.equal(host.logits(TOKENS), plain)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_edit_at_any_point_is_the_block_by_hand_with_that_value(name: str) -> None:
    """All positions of a layer, by random values: logits, and the gradient of what was put there."""
    host, policy = policy_of(name)
    expected = by_hand(name, host.model, TOKENS, policy=policy)
    weights = like(expected.logits, 3)
    for site in everywhere(name):
        new = like(expected.points[site.layer, site.point]).requires_grad_()
        own = by_hand(name, host.model, TOKENS, policy=policy, replaced={(site.layer, site.point): new})
        with host.hooks({site: lambda _, new=new: new}):
            logits = host.logits(TOKENS)
        assert gap(logits, own.logits) < 1e-12, site
        assert gap(logits, expected.logits) > 1e-3, site
        gradients = [torch.autograd.grad((out * weights).sum(), new)[0] for out in (logits, own.logits)]
        assert float(gradients[1].abs().max()) > 1e-6, site
        assert gap(*gradients) < 1e-12 * float(gradients[1].abs().max()) + 1e-14, site


@pytest.mark.parametrize("name", FAMILIES)
def test_the_stream_of_another_run_gives_that_runs_logits_bit_for_bit(name: str) -> None:
    host, _ = policy_of(name)
    other = TOKENS.flip(1)
    target = host.logits(other)
    for layer in range(LAYERS):
        for point in ("resid_pre", "resid_mid", "resid_post"):
            if point in points(name):
                site = Site(layer, point)
                source = host.capture([site], other)[site]
                with host.hooks({site: lambda _, source=source: source}):
                    assert torch.equal(host.logits(TOKENS), target), site


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SEQUENTIAL)
def test_a_patched_resid_mid_is_exact_in_low_precision(name: str, dtype: torch.dtype) -> None:
    """A stream with large entries, as trained models have them: adding a difference behind the block would round it away."""
    host = TorchHost(make_family(name, dtype))
    site, post, other = Site(0, "resid_mid"), Site(0, "resid_post"), TOKENS.flip(1)
    found = host.capture([site, post], other)
    with torch.no_grad(), host.hooks({Site(0, "resid_pre"): lambda x: x + 1000, site: lambda _: found[site]}):
        patched = host.capture([post], TOKENS)
    assert torch.equal(patched[post], found[post])


@pytest.mark.parametrize("name", ["Llama", "GPT2", "MicroGPT", "GPTNeoX (sequential)"])
def test_an_edit_of_resid_mid_may_keep_what_it_saw_and_square_it(name: str) -> None:
    """The tensor is overwritten in place; neither what the edit kept nor autograd may notice."""
    host, policy = policy_of(name)
    kept: list[Tensor] = []

    def edit(x: Tensor) -> Tensor:
        kept.append(x)
        return x * x / 4 + x

    site, parameter = Site(0, "resid_mid"), policy.adapters.scored("blocks.0.attn.q")
    with host.hooks({site: edit}):
        logits = host.logits(TOKENS)
    before = by_hand(name, host.model, TOKENS, policy=policy)
    mid = before.points[0, "resid_mid"]
    assert gap(kept[0], mid) < 1e-12
    own = by_hand(name, host.model, TOKENS, policy=policy, replaced={(0, "resid_mid"): mid * mid / 4 + mid})
    assert gap(logits, own.logits) < 1e-12
    weights = like(logits, 3)
    gradients = [torch.autograd.grad((out * weights).sum(), parameter)[0] for out in (logits, own.logits)]
    assert gap(*gradients) < 1e-12 * float(gradients[1].abs().max())


def test_contexts_nest_the_outer_edit_first_and_capture_sees_what_was_edited() -> None:
    host, _ = policy_of("Llama")
    for point in ("resid_mid", "q", "attn_in", "resid_post"):
        site = Site(0, point)
        plain = host.capture([site], TOKENS)[site]
        with host.hooks({site: lambda x: x + 1}), host.hooks({site: lambda x: x * 2}):
            assert torch.equal(host.capture([site], TOKENS)[site], (plain + 1) * 2), point
    mid, post = Site(0, "resid_mid"), Site(0, "resid_post")
    fixed = like(host.capture([post], TOKENS)[post])
    with host.hooks({post: lambda _: fixed}), host.hooks({mid: lambda x: x + 1}):
        assert torch.equal(host.capture([post], TOKENS)[post], fixed), "resid_post comes after resid_mid, wherever it was asked for"


def test_edits_reach_generation_through_the_model_itself() -> None:
    host = TorchHost(make_family("Llama"))
    prompt = TOKENS[:1, :4]
    plain = host.model.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0)
    with host.hooks({Site(1, "resid_post"): lambda x: -x}):
        turned = host.model.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert not torch.equal(plain, turned)
    assert torch.equal(plain, host.model.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0))


# ---- padding


PADDED = [(name, side) for name in FAMILIES for side in ("left", "right")]


@pytest.mark.parametrize(("name", "side"), PADDED)
def test_batched_is_single_for_logits_and_captures(name: str, side: Any) -> None:
    host, _ = policy_of(name)
    tokens, attention = make_tokens(4, side)
    sites = [*everywhere(name), Site(0, "kept_a", "attn.q"), Site(1, "kept_out", "mlp.up"), Site(1, "quarantine_out", "attn.v")]
    logits, captured = host.logits(tokens, attention), host.capture(sites, tokens, attention)
    for b, real in enumerate(attention):
        alone = tokens[b, real][None]
        assert gap(logits[b, real], host.logits(alone)[0]) < 1e-12
        for site, value in host.capture(sites, alone).items():
            assert gap(captured[site][b, real], value[0]) < 1e-12, site


@pytest.mark.parametrize(("name", "side"), PADDED)
def test_garbage_under_padding_changes_no_bit(name: str, side: Any) -> None:
    host, _ = policy_of(name)
    tokens, attention = make_tokens(4, side)
    garbage = torch.where(attention, tokens, torch.randint(1, 50, tokens.shape, generator=torch.Generator().manual_seed(4)))
    sites = everywhere(name)
    clean, dirty = (host.capture(sites, t, attention) for t in (tokens, garbage))
    assert torch.equal(host.logits(tokens, attention)[attention], host.logits(garbage, attention)[attention])
    assert all(torch.equal(clean[site][attention], dirty[site][attention]) for site in sites)
    assert not torch.equal(clean[Site(0, "resid_pre")], dirty[Site(0, "resid_pre")])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["Mistral", "Gemma2", "Gemma3"])
def test_batched_is_single_under_sliding_windows(name: str, side: Any) -> None:
    """A window of 3 tokens is counted over columns: left padding must not move it."""
    host = TorchHost(make_family(name, window=3))
    tokens, attention = make_tokens(4, side)
    logits = host.logits(tokens, attention)
    assert gap(logits, TorchHost(make_family(name)).logits(tokens, attention)) > 1e-3
    for b, real in enumerate(attention):
        assert gap(logits[b, real], host.logits(tokens[b, real][None])[0]) < 1e-12


@pytest.mark.parametrize("name", ["Mistral", "Gemma2", "Gemma3"])
@pytest.mark.parametrize("call", ["torch", "transformer_lens", "policy"])
def test_padding_between_tokens_is_refused_where_a_window_would_count_it(name: str, call: str) -> None:
    """Rows 0 and 2 are one-sided, row 1 has padding between its tokens; a window that reaches over the row is no matter."""
    tokens, attention = torch.randint(1, 50, (3, 9), generator=torch.Generator().manual_seed(5)), torch.ones(3, 9, dtype=torch.bool)
    attention[0, :4], attention[1, 3:6], attention[2, 7:] = False, False, False

    def logits(window: int, mask: Tensor, of: Tensor = tokens) -> Tensor:
        model = make_family(name, torch.float32, window=window)
        return call_with_mask(model, of, mask) if call == "policy" else open_host(call, model).logits(of, mask)

    with pytest.raises(ValueError, match=r"row 1 has padding between its tokens.* put the padding on one side"):
        logits(4, attention)
    for window in (4, 9):
        mask = attention if window == 9 else attention | (torch.arange(3) == 1)[:, None]
        found = logits(window, mask)
        for b, real in enumerate(mask):
            alone = logits(window, torch.ones(1, int(real.sum()), dtype=torch.bool), tokens[b, real][None])
            assert gap(found[b, real], alone[0]) < 1e-4


CASES = {"left": ("act-token-live", "grad-pooled-live"), "right": ("act-pooled-ablated", "grad-rollout-live")}


def rule(case: str) -> MaskSpec:
    score, unit, policy = case.split("-")
    return MaskSpec(score=score, unit=unit, score_policy=policy, reinforced_only=False, through="filter")


@pytest.mark.parametrize(("name", "side"), PADDED)
def test_batched_is_single_for_flags_scores_and_gradients(name: str, side: Any) -> None:
    _, policy = policy_of(name, "lora")
    batch = make_batch(3, side)
    for case in CASES[side]:
        spec = rule(case)
        route = MaskRoute(spec, FixedFitter(random_directions(policy, spec.score)))
        route.refresh(policy, 0)
        together = run(policy, route, batch)
        apart = [run(policy, route, alone(batch, b)) for b in range(len(batch.rollouts))]
        assert gap(together.decision.scores, torch.cat([one.decision.scores for one in apart])) < 1e-12
        assert torch.equal(together.decision.flags, torch.cat([one.decision.flags for one in apart]))
        for adapter in ("kept", "quarantine"):
            whole = getattr(together, adapter)
            assert_same(whole, {n: sum(getattr(one, adapter)[n] for one in apart) for n in whole}, 1e-11)


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_eager_attention_in_float64_with_padding_on_the_left_is_refused_where_it_is_nan(name: str) -> None:
    tokens, attention = make_tokens(3, "left")
    host = TorchHost(make_family(name, attn="eager"))
    plain = host.model(tokens, attention_mask=attention.long()).logits
    assert bool(plain[attention].isnan().any()) == (name != "GPT2"), "what transformers does"
    if name == "GPT2":
        assert gap(host.logits(tokens, attention)[attention], host_of(name).logits(tokens, attention)[attention]) < 1e-12
    else:
        with pytest.raises(ValueError, match=r"eager attention in float64 gives NaN .*load it with attn_implementation='sdpa'"):
            host.logits(tokens, attention)
    assert not host.logits(*make_tokens(3, "right")).isnan().any()
    single = TorchHost(make_family(name, torch.float32, attn="eager"))
    logits = single.logits(tokens, attention)
    for b, real in enumerate(attention):
        assert gap(logits[b, real], single.logits(tokens[b, real][None])[0]) < 2e-5


def test_without_a_mask_nothing_is_padding() -> None:
    for name in FAMILIES:
        host = host_of(name)
        assert torch.equal(host.logits(TOKENS), host.logits(TOKENS, torch.ones_like(TOKENS, dtype=torch.bool)))


# ---- wrong use


def test_a_hook_that_did_not_fire_is_named() -> None:
    host = TorchHost(make_family("Llama"))
    other = TorchHost(make_family("Llama"))
    with pytest.raises(
        RuntimeError, match=r"did not fire: blocks\.1\.resid_mid \(model\.layers\.1\.post_attention_layernorm\.input\)"
    ):
        with host.hooks({Site(1, "resid_mid"): lambda x: x}):
            other.logits(TOKENS)
    with pytest.raises(RuntimeError, match=r"blocks\.0\.q \(model\.layers\.0\.self_attn\.q_proj\.output\)"):
        with host.hooks({Site(0, "q"): lambda x: x}):
            pass
    assert hooks_left(host.model) == 0


@pytest.mark.parametrize(
    ("name", "site", "kind", "sentence"),
    [
        ("Llama", Site(2, "resid_pre"), KeyError, r"blocks\.2\.resid_pre is outside the model: its layers are 0\.\.1"),
        ("GPTNeoX", Site(0, "resid_mid"), ValueError, "GPTNeoX has no resid_mid: attention and MLP read the same stream"),
        ("GPT2", Site(0, "kept_a", "mlp.gate"), KeyError, r"no adapter at 'blocks\.0\.mlp\.gate': the nearest are blocks\.0\.mlp"),
        ("Llama", Site(7, "kept_a", "mlp.up"), KeyError, r"no adapter at 'blocks\.7\.mlp\.up': the nearest are blocks"),
    ],
)
def test_sites_that_the_model_lacks_are_refused_before_anything_runs(name: str, site: Site, kind: type, sentence: str) -> None:
    host, _ = policy_of(name)
    before = hooks_left(host.model)
    for use in (lambda: host.capture([Site(0, "q"), site], TOKENS), lambda: host.address(site)):
        with pytest.raises(kind, match=sentence):
            use()
    assert hooks_left(host.model) == before


def test_adapter_points_of_a_bare_model_are_refused() -> None:
    with pytest.raises(KeyError, match=r"no adapter at 'blocks\.0\.attn\.q': attach them first, with host\.attach"):
        TorchHost(make_family("Llama")).capture([Site(0, "kept_a", "attn.q")], TOKENS)


def test_models_without_text_of_their_own_are_refused() -> None:
    text = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=50, d_model=16, d_ff=24, num_layers=1, num_heads=4))
    refused = {
        "no head for language": LlamaForSequenceClassification(LlamaConfig(**text)),
        "encoder-decoder": t5,
        "no known": nn.Linear(3, 3),
    }
    for reason, model in refused.items():
        with pytest.raises(ValueError, match=reason):
            TorchHost(model)


def test_a_wrapper_of_vision_and_text_is_its_text() -> None:
    text = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28}
    seen = Gemma3Config(
        text_config={**text, "head_dim": 4, "sliding_window": 3}, vision_config={**vision, "patch_size": 14}, mm_tokens_per_image=4
    )
    host = TorchHost(Gemma3ForConditionalGeneration(seen).double().eval())
    assert host.address(Site(1, "resid_pre")).startswith("model.language_model.layers.1.")
    middle = torch.tensor([[True, True, False, True, True, True, True]])
    with pytest.raises(ValueError, match="padding between its tokens"):
        host.logits(torch.ones(1, 7, dtype=torch.long), middle)
    with pytest.raises(ValueError, match=r"50 is not a token .* 0\.\.49"):
        host.logits(torch.full((1, 3), 50))


def test_a_tree_that_is_not_its_rows_is_said_at_the_site() -> None:
    host = TorchHost(make_family("Llama"))
    del host.model.model.layers[0].post_attention_layernorm
    with pytest.raises(ValueError, match=r"has no module 'model\.layers\.0\.post_attention_layernorm', which the row 'Llama'"):
        host.address(Site(0, "resid_mid"))
    with pytest.raises(ValueError, match="has no module"):
        host.capture([Site(0, "resid_mid")], TOKENS)
    assert hooks_left(host.model) == 0


# ---- gradient checkpointing


def checkpointed(name: str, reentrant: bool) -> tuple[TorchHost, Policy, TrainBatch]:
    host, policy = make_policy(name, "lora")
    assert isinstance(host, TorchHost)
    host.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        host.model.enable_input_require_grads()
    host.model.train()
    return host, policy, make_batch(3)


def gradients(policy: Policy) -> dict[str, Tensor]:
    out = {n: p.grad.clone() for n, p in policy.adapters.kept_parameters().items()}
    policy.model.zero_grad()
    return out


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["Llama", "GPT2", "GPTNeoX (sequential)", "Gemma3"])
def test_edits_under_checkpointing_have_the_gradients_of_edits_without(name: str, reentrant: bool) -> None:
    edits = {Site(0, "resid_mid"): lambda x: x * 2, Site(1, "attn_in"): lambda x: x + 1, Site(1, "mlp_out"): lambda x: x * 0.5}
    plain_host, plain = make_policy(name, "lora")
    host, policy, batch = checkpointed(name, reentrant)
    for own_host, own in ((plain_host, plain), (host, policy)):
        with own_host.hooks(edits):
            with own.adapters.unrouted():
                plain_loss(own, batch, batch.advantages).backward()
    assert_same(gradients(policy), gradients(plain), 1e-12)
    with policy.adapters.unrouted():
        with pytest.raises(RuntimeError, match=r"the edit of blocks\.\d\.\w+ was removed: run backward\(\) inside of hooks\(\)"):  # noqa: PT012
            with host.hooks(edits):
                loss = plain_loss(policy, batch, batch.advantages)
            loss.backward()
        loss = plain_loss(policy, batch, batch.advantages)
        with pytest.raises(RuntimeError, match="more often than forwards did: run every forward of this backward inside"):
            with host.hooks(edits):
                (loss + plain_loss(policy, batch, batch.advantages)).backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_edits_entered_without_gradients_are_right_or_refused(reentrant: bool) -> None:
    """In training a hook on the root tells of the gradients outside of a reentrant checkpoint, in which there are none."""
    edits = {Site(0, "resid_mid"): lambda x: x * 2}
    plain_host, plain = make_policy("Llama", "lora")
    host, policy, batch = checkpointed("Llama", reentrant)

    def loss_of(own_host: Host, own: Policy, *, inside: bool) -> Tensor:
        with torch.no_grad(), own_host.hooks(edits), torch.enable_grad():
            loss = plain_loss(own, batch, batch.advantages)
            if inside:
                loss.backward()
        return loss

    with plain.adapters.unrouted(), policy.adapters.unrouted():
        for own_host, own in ((plain_host, plain), (host, policy)):
            loss_of(own_host, own, inside=True)
        assert_same(gradients(policy), gradients(plain), 1e-12)
        with pytest.raises(RuntimeError, match=r"was removed: run backward\(\) inside of hooks\(\)"):
            loss_of(host, policy, inside=False).backward()
    before = len(host.model._forward_pre_hooks)
    host.model.eval()
    with torch.no_grad(), host.hooks(edits):
        assert len(host.model._forward_pre_hooks) == before
        host.logits(batch.rollouts.tokens)


@pytest.mark.parametrize("reentrant", [False, True])
def test_reading_under_checkpointing_is_free_and_leaves_nothing(reentrant: bool) -> None:
    host, policy, batch = checkpointed("Llama", reentrant)
    before = hooks_left(host.model)
    seen: list[Tensor] = []
    with policy.adapters.unrouted():
        with host.hooks({Site(0, "mlp_in"): lambda x: seen.append(x.detach())}):
            loss = plain_loss(policy, batch, batch.advantages)
        loss.backward()
    assert len(seen) == 1
    assert hooks_left(host.model) == before
    with host.hooks({Site(0, "mlp_in"): lambda x: x * 2}):
        plain_loss(policy, batch, batch.advantages)  # no backward: the guard goes with the next forward
    policy.model.zero_grad()
    with policy.adapters.unrouted():
        plain_loss(policy, batch, batch.advantages).backward()
    assert hooks_left(host.model) == before


def raw_value(module: nn.Module, side: str, run: Callable[[], object]) -> Tensor:
    """Return the value that torch's own hook sees at one side of a module."""
    seen: list[Tensor] = []
    if side == "input":
        handle = module.register_forward_pre_hook(lambda _m, args, kw: seen.append((*args, *kw.values())[0]), with_kwargs=True)
    else:
        handle = module.register_forward_hook(lambda _m, _a, out: seen.append(out if isinstance(out, Tensor) else out[0]))
    run()
    handle.remove()
    return seen[0]


@pytest.mark.parametrize("name", ["Gemma2", "GPTNeoX"])
def test_the_address_is_where_the_hook_is(name: str) -> None:
    host = host_of(name)
    for site in everywhere(name):
        path, _, side = re.sub(r"\[.*", "", host.address(site)).rpartition(".")
        raw = raw_value(host.model.get_submodule(path), side, lambda: host.logits(TOKENS))
        found = host.capture([site], TOKENS)[site]
        if name == "GPTNeoX" and site.point in "qkv":
            assert host.address(site).endswith("query_key_value.output[..., 16 rows]")
            raw = raw.unflatten(-1, (HEADS, 3, HEAD))[..., "qkv".index(site.point), :]
        assert torch.equal(raw.flatten(2), found.flatten(2)), site
