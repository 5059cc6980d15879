"""Theorems of all hosts: shapes of real models, gradients at sites, edits in place, deep copies."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from families import CONTEXT, SPECS, VOCAB, make_batch, make_family, make_tokens, move, move_all
from mask_oracle import assert_same, plain_loss
from torch import Tensor, nn
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.model_bridge.sources.native.model import NativeModel
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen3Config,
)

from mi_route2.adapters import attach, from_pretrained, save_pretrained
from mi_route2.architectures import ADAPTER_POINTS, POINTS
from mi_route2.hosts import HOSTS, Host, open_host
from mi_route2.hosts.decoder import Decoder
from mi_route2.rollouts import Policy, Rollouts, call_with_mask
from mi_route2.sites import Site

OTHERS = [host for host in HOSTS if host != "torch"]
LAYERS = 2
_ODD: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}
_GROUPED = {**_ODD, "num_key_value_heads": 2, "head_dim": 10}
_GPT2: dict[str, Any] = {"vocab_size": VOCAB, "n_embd": 24, "n_layer": LAYERS, "n_head": 4, "n_positions": 64}
_GPT2 |= dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0) | dict.fromkeys(("bos_token_id", "eos_token_id"))
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

CONFIGS: dict[str, PretrainedConfig] = {
    "Llama, one key-value head, scaled positions": LlamaConfig(
        **{**_GROUPED, "num_key_value_heads": 1},
        rope_parameters={**LLAMA3, "rope_theta": 100.0, "original_max_position_embeddings": 16},
    ),
    "Qwen3, tied, some layers in a window": Qwen3Config(
        **_GROUPED, tie_word_embeddings=True, use_sliding_window=True, sliding_window=3, max_window_layers=1
    ),
    "Gemma2, every other layer in a window, capped": Gemma2Config(
        **_GROUPED, sliding_window=3, query_pre_attn_scalar=7, attn_logit_softcapping=1.0, final_logit_softcapping=2.0
    ),
    "Gemma3, windows": Gemma3TextConfig(
        **_GROUPED,
        sliding_window=3,
        query_pre_attn_scalar=7,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "GPT2, a square MLP, scaled by the layer": GPT2Config(**_GPT2, n_inner=24, scale_attn_by_inverse_layer_idx=True),
    "GPTNeoX, tied, half rotated": GPTNeoXConfig(**_ODD, rotary_pct=0.5, hidden_act="gelu_new", tie_word_embeddings=True),
}
"""No two axes are alike: heads times their width is not the stream's, groups differ, and windows are shorter than the text."""


def odd_model(name: str) -> nn.Module:
    """With the attention that the bridge has too: eager, or one that keeps the type for GPT-2 and GPT-NeoX."""
    attn = "sdpa" if name.startswith("GPT") else "eager"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name]), dtype=torch.float64, attn_implementation=attn)
    return move_all(model, 0.2).eval()


def adapted(host: str, model: nn.Module, spec: str = "lora") -> tuple[Host, Policy]:
    opened = open_host(host, model)
    adapters = opened.attach("*", spec=SPECS[spec], generator=torch.Generator().manual_seed(7))
    return opened, opened.policy(move(adapters))


@cache
def odd(host: str, name: str) -> tuple[Host, Policy]:
    return adapted(host, odd_model(name))


def sites_of(host: Host, *linears: str) -> list[Site]:
    """Every point of block 1 that the host has, with the adapters' at ``linears``."""
    points = [Site(1, point) for point in POINTS]
    points += [Site(1, point, linear) for linear in linears for point in ADAPTER_POINTS]
    return [site for site in points if has(host, site)]


def has(host: Host, site: Site) -> bool:
    try:
        return bool(host.address(site))
    except ValueError:
        return False


def gap(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).detach().abs().max())


def shift(x: Tensor) -> Tensor:
    """Another number for every coordinate, so that heads and rows in another order are seen."""
    return x * 0.9 + torch.linspace(-0.1, 0.1, x[0, 0].numel(), dtype=x.dtype).view(x.shape[2:])


# ---- one model


@pytest.mark.parametrize("host", OTHERS)
@pytest.mark.parametrize("name", CONFIGS)
def test_models_of_real_shapes_are_the_same_on_every_host(name: str, host: str) -> None:
    """Logits, every site, an edit at all of them at once, and every gradient."""
    (own, policy), (torch_host, expected) = odd(host, name), odd("torch", name)
    tokens, _ = make_tokens()
    assert policy.adapters.base_hash == expected.adapters.base_hash
    assert gap(own.logits(tokens), torch_host.logits(tokens)) < 1e-10
    sites = sites_of(own, "attn.k", "mlp.down")
    assert len(sites) >= len(POINTS) - 1 + 2 * 3
    ours, theirs = own.capture(sites, tokens), torch_host.capture(sites, tokens)
    assert max(gap(ours[site], theirs[site]) for site in sites) < 1e-10
    edits = dict.fromkeys(sites, shift)
    with torch.no_grad(), own.hooks(edits), torch_host.hooks(edits):
        assert gap(own.logits(tokens), torch_host.logits(tokens)) < 1e-10
    batch, gradients = make_batch(), []
    for each in (policy, expected):
        parameters = each.adapters.kept_parameters() | each.adapters.quarantine_parameters()
        found = torch.autograd.grad(plain_loss(each, batch, batch.advantages), list(parameters.values()))
        gradients.append(dict(zip(parameters, found)))
    assert any(float(g.abs().max()) > 1e-4 for g in gradients[1].values())
    assert_same(*gradients, 1e-10)


def padded_on_both_sides() -> tuple[Tensor, Tensor]:
    place, sides = torch.arange(11), ((0, 0), (3, 0), (0, 4), (2, 3))
    attention = torch.stack([(place >= left) & (place < 11 - right) for left, right in sides])
    drawn = torch.randint(3, VOCAB, attention.shape, generator=torch.Generator().manual_seed(3))
    return torch.where(attention, drawn, 0), attention


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("name", ["Gemma3", "GPT2", "MicroGPT"])
def test_a_batch_with_padding_on_both_sides_is_its_rows_alone(name: str, host: str) -> None:
    """In float32, where every host can; sliding windows of three tokens."""
    own, _ = adapted(host, make_family(name, torch.float32, "eager", window=3 if name == "Gemma3" else None))
    tokens, attention = padded_on_both_sides()
    sites = sites_of(own, "attn.q")
    logits, found = own.logits(tokens, attention), own.capture(sites, tokens, attention)
    for b, real in enumerate(attention):
        alone = tokens[b, real][None]
        assert gap(logits[b, real], own.logits(alone)[0]) < 5e-6
        assert max(gap(found[site][b, real], value[0]) for site, value in own.capture(sites, alone).items()) < 5e-6


@pytest.mark.parametrize("host", HOSTS)
def test_a_row_longer_than_the_table_of_positions_is_refused_and_padding_is_no_token(host: str) -> None:
    there, policy = adapted(host, make_family("GPT2"))
    tokens, real = torch.full((2, CONTEXT + 2), 3), torch.ones(2, CONTEXT + 2, dtype=torch.bool)
    answers = (torch.arange(CONTEXT + 2) > 3).expand(2, -1)
    for rows in (lambda: there.logits(tokens), lambda: policy.logits(Rollouts(tokens, real, answers))):
        with pytest.raises(ValueError, match=f"^a row has {CONTEXT + 2} tokens, and this model learned positions for {CONTEXT}:"):
            rows()
    real[:, :2] = False  # left padding has no positions
    assert there.logits(tokens, real).isfinite().all()


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("name", ["Llama", "Gemma3"])
@pytest.mark.parametrize("rope", ["longrope", "dynamic"])
def test_padding_under_angles_that_depend_on_the_longest_row_is_refused(rope: str, name: str, host: str) -> None:
    """Rows that are on the same side of the model's first context as the batch are still the single ones.

    Gemma 3 has angles of their own in the layers with a window.
    """
    by_kind = {"longrope": {"original_max_position_embeddings": 6, "short_factor": [1.0] * 5, "long_factor": [2.0] * 5}}
    rotation = {"rope_type": rope, "rope_theta": 100.0, "factor": 3.0, **by_kind.get(rope, {})}
    sizes = {**_GROUPED, "max_position_embeddings": 6 if rope == "dynamic" else 64}
    if name == "Gemma3":
        layers = {"full_attention": rotation, "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}
        config: PretrainedConfig = Gemma3TextConfig(**sizes, layer_types=[*layers], rope_parameters=layers)
    else:
        config = LlamaConfig(**sizes, rope_parameters=rotation)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    own, policy = adapted(host, move_all(model, 0.2).eval())
    for side in ("left", "right"):
        tokens, attention = make_tokens(3, side, shortest=4, longest=9)
        with pytest.raises(ValueError, match=rf"rope type '{rope}' .* a row of \d tokens .* run it without padding"):
            own.logits(tokens, attention)
        plain = (call_with_mask,) if host == "torch" else ()
        for forward in (policy.forward, *plain):
            with pytest.raises(ValueError, match=rf"rope type '{rope}'"):
                forward(policy.model, tokens, attention)
        tokens, attention = make_tokens(3, side, shortest=3, longest=6)
        logits = own.logits(tokens, attention)
        for row, real, found in zip(tokens, attention, logits):
            assert gap(found[real], own.logits(row[real][None])[0]) < 5e-6
    assert own.logits(tokens.repeat(1, 2)).isfinite().all()  # rows of one length without padding


def bidirectional(which: str) -> nn.Module:
    if which == "native":
        shape = {"d_model": 16, "d_head": 4, "n_heads": 4, "n_layers": 2, "n_ctx": 64, "d_vocab": VOCAB, "d_mlp": 24}
        return NativeModel(TransformerBridgeConfig(**shape, act_fn="gelu", attention_dir="bidirectional")).double()
    changed = {"use_bidirectional_attention": True} if which == "Gemma3" else {"is_causal": False}
    model = make_family(which)
    model.config.update(changed)
    return type(model)(model.config).double().eval()


@pytest.mark.parametrize("which", ["Llama", "Gemma3", "native"])
def test_a_model_that_reads_what_comes_after_is_refused(which: str) -> None:
    """Nothing is said to a causal model of padding on the right: another would read it."""
    model = bidirectional(which)
    tokens, attention = make_tokens()
    logits = [out if isinstance(out, Tensor) else out.logits for out in (model(tokens), model(tokens[-1:, attention[-1]]))]
    assert gap(logits[0][-1, attention[-1]], logits[1][0]) > 1e-3
    for host in HOSTS:
        with pytest.raises(ValueError, match=r"has \w+=.*, but it must be causal"):
            open_host(host, model)


# ---- edits and gradients


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_an_edit_in_place_that_returns_nothing_is_refused(name: str, host: str) -> None:
    """It would act where the value is a view of the model's tensor, and not where it is a copy: a part of a fused module."""
    own, _ = adapted(host, make_family(name, attn="eager"))
    tokens, _ = make_tokens()

    def forgets(x: Tensor) -> None:
        x.mul_(2)

    def double(x: Tensor) -> Tensor:
        return x.mul_(2)

    for site in sites_of(own, "attn.k"):
        refused = pytest.raises(ValueError, match=rf"the edit of {site} wrote into its value in place and returned None: return")
        with torch.no_grad(), refused, own.hooks({site: forgets}):
            own.logits(tokens)
        logits = []
        for edit in (double, lambda x: x * 2):
            with torch.no_grad(), own.hooks({site: edit}):
                logits.append(own.logits(tokens))
        assert torch.equal(*logits), site


@pytest.mark.parametrize("host", HOSTS)
def test_hooks_can_be_entered_again_and_leave_nothing(host: str) -> None:
    own, _ = adapted(host, make_family("Llama", attn="eager"))
    tokens, _ = make_tokens()
    doubled = own.hooks({Site(1, "resid_mid"): lambda x: x * 2})
    with torch.no_grad():
        plain = own.logits(tokens)
        for _ in range(2):
            with doubled:
                first, second = own.logits(tokens), own.logits(tokens)
            assert torch.equal(first, second)
            assert not torch.equal(first, plain)
            assert torch.equal(own.logits(tokens), plain)
    with pytest.raises(RuntimeError, match="did not fire"), doubled:
        pass  # that it fired the last time is no excuse


@pytest.mark.parametrize("host", HOSTS)
def test_hooks_entered_after_adapters_have_come_and_gone_see_the_model_of_now(host: str) -> None:
    own = open_host(host, make_family("Llama"))
    tokens, _ = make_tokens()
    site, seen = Site(1, "q"), list[Tensor]()
    reading = own.hooks({site: lambda x: seen.append(x.clone())})
    with torch.no_grad():
        for change in ("none", "attached", "detached"):
            if change == "attached":
                adapters = own.attach("blocks.*.attn.q", spec=SPECS["lora"], generator=torch.Generator().manual_seed(7))
                move(adapters, 0.2)
            elif change == "detached":
                adapters.detach()
            with reading:
                own.logits(tokens)
            assert torch.equal(seen[-1], own.capture([site], tokens)[site]), change


@pytest.mark.parametrize("host", HOSTS)
def test_adapters_that_come_or_go_inside_of_hooks_are_seen_or_said(host: str) -> None:
    own, (tokens, _) = open_host(host, make_family("Llama")), make_tokens()
    doubled = own.hooks({Site(1, "q"): lambda x: x * 2})
    moved = pytest.raises(RuntimeError, match=r"adapters came to blocks\.1\.q, or went")
    with torch.no_grad(), moved if host == "torch" else nullcontext(), doubled:
        adapters = own.attach("blocks.*.attn.q", spec=SPECS["lora"], generator=torch.Generator().manual_seed(7))
        move(adapters, 0.2)
        inside = own.logits(tokens)
    with torch.no_grad(), doubled:
        assert host == "torch" or torch.equal(own.logits(tokens), inside)
        own.logits(tokens)
    with torch.no_grad(), own.hooks({Site(0, "kept_a", "attn.q"): lambda x: x * 2}):
        own.logits(tokens)
        adapters.detach()


def gradient_of_what_is_added(host: Host, site: Site, tokens: Tensor) -> Tensor:
    """The oracle: the gradient of zeros that are added there."""
    delta: list[Tensor] = []

    def add(x: Tensor) -> Tensor:
        delta.append(torch.zeros_like(x, requires_grad=True))
        return x + delta[0]

    with host.hooks({site: add}):
        loss = host.logits(tokens).log_softmax(-1)[..., 3].sum()
    return torch.autograd.grad(loss, delta[0])[0]


ASKING: dict[str, Callable[[Tensor, list[Tensor]], Any]] = {
    "register_hook": lambda x, got: x.register_hook(got.append),
    "retain_grad": lambda x, got: (x.retain_grad(), got.append(x)),
}


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("name", ["Qwen3", "GPT2"])
def test_a_reader_that_asks_for_the_gradient_gets_it_at_every_site(name: str, host: str) -> None:
    """Also where the value is a view or a copy of the model's tensor: by head, a part of a fused module, the stream."""
    own, policy = adapted(host, make_family(name, attn="eager"))
    tokens, _ = make_tokens()
    plain = own.logits(tokens)
    for site in sites_of(own, "attn.k"):
        expected = gradient_of_what_is_added(own, site, tokens)
        for how, ask in ASKING.items():
            got: list[Tensor] = []
            with policy.adapters.unrouted():
                with own.hooks({site: lambda x, ask=ask, got=got: ask(x, got) and None}):
                    logits = own.logits(tokens)
                    logits.log_softmax(-1)[..., 3].sum().backward()
            assert torch.equal(logits, plain)
            (found,) = [x.grad if how == "retain_grad" else x for x in got]
            assert found is not None, (site, how)
            assert gap(found, expected) < 1e-12, (site, how)


# ---- copies


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("name", ["Llama", "GPT2", "MicroGPT"])
def test_a_deep_copy_of_a_policy_is_a_policy_of_its_own(name: str, host: str) -> None:
    """A frozen reference is made so. It may not follow what is trained, nor switch it, nor take its hook points along."""
    own, policy = adapted(host, make_family(name, attn="eager"))
    tokens, _ = make_tokens()
    batch, site = make_batch(), Site(0, "kept_a", "attn.q")
    with torch.no_grad():
        before, value = policy.logprobs(batch.rollouts), own.capture([site], tokens)[site]
        reference = copy.deepcopy(policy)
        for p in policy.adapters.kept_parameters().values():
            p.mul_(2)
        after = policy.logprobs(batch.rollouts)
        assert torch.equal(reference.logprobs(batch.rollouts), before)
        assert gap(after, before) > 1e-3
        with reference.adapters.reference():
            assert torch.equal(policy.logprobs(batch.rollouts), after)
            assert gap(reference.logprobs(batch.rollouts), before) > 1e-3
        reference.adapters.detach()
        assert torch.equal(policy.logprobs(batch.rollouts), after)
        assert torch.equal(own.capture([site], tokens)[site], 2 * value)
        twin = copy.deepcopy(own)
        assert torch.equal(twin.capture([site], tokens)[site], 2 * value)
        with own.hooks({site: torch.zeros_like}):
            assert gap(twin.logits(tokens), own.logits(tokens)) > 1e-3


# ---- a model that a bridge was booted around


@pytest.mark.parametrize("name", ["Llama", "GPT2", "MicroGPT"])
def test_a_booted_model_is_for_its_bridge_alone(name: str, tmp_path: Any) -> None:
    """Its own tree is partly dead: GPT-2's fused module never runs again."""
    model = make_family(name, attn="eager")
    host: Any = open_host("transformer_lens", model)
    adapters = move(host.attach("blocks.*", spec=SPECS["lora"], generator=torch.Generator().manual_seed(7)))
    save_pretrained(adapters, tmp_path / "a")
    adapters.detach()
    lora: dict[str, Any] = {"spec": SPECS["lora"], "generator": torch.Generator()}
    for misuse in (
        lambda: attach(model, "blocks.*", **lora),
        lambda: attach(host.bridge, "*", **lora),
        lambda: from_pretrained(host.bridge, tmp_path / "a"),
        lambda: open_host("torch", model),
        lambda: open_host("nnsight", model),
    ):
        with pytest.raises(
            ValueError, match=r"is a TransformerLens bridge, or one was booted.*host = open_host\('transformer_lens'"
        ):
            misuse()
    assert list(from_pretrained(host, tmp_path / "a").sites) == list(adapters.sites)


BLOCKS = {"Llama": "model.layers", "GPT2": "transformer.h", "MicroGPT": "blocks"}


@pytest.mark.parametrize("part", ["", "mlp"])
@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("name", BLOCKS)
def test_layers_that_share_a_module_are_refused(name: str, opened: bool, part: str) -> None:
    """Both before a model is opened and in a host that is open: a hook at one layer would act on, and read, both."""
    model = make_family(name)
    host = open_host("torch", model) if opened else None
    blocks: Any = model.get_submodule(BLOCKS[name])
    if part:
        blocks[1].mlp = blocks[0].mlp
    else:
        blocks[1] = blocks[0]
    places = rf"{BLOCKS[name]}\.0\.mlp\S* and {BLOCKS[name]}\.1\.mlp\S*" if part else "layer 0 and layer 1"
    sentence = rf"{places} of this {type(model).__name__} are one \w+, so a site of one would be a site of both"
    if host is not None:
        with pytest.raises(ValueError, match=sentence):
            Decoder(host)
        with pytest.raises(ValueError, match=sentence):
            host.attach("blocks.*", spec=SPECS["lora"], generator=torch.Generator().manual_seed(0))
        if not part:
            with pytest.raises(ValueError, match=sentence):
                host.capture([Site(1, "resid_pre")], make_tokens()[0])
        return
    for other in HOSTS:
        with pytest.raises(ValueError, match=sentence):
            open_host(other, model)
    with pytest.raises(ValueError, match=sentence):
        attach(model, "blocks.*", spec=SPECS["lora"], generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("layer", "one", "other"),
    [
        (0, "input_layernorm", "post_attention_layernorm"),
        (0, "self_attn.k_proj", "self_attn.v_proj"),
        (1, "self_attn.k_proj", "self_attn.v_proj"),
    ],
)
def test_a_module_at_two_places_is_refused(layer: int, one: str, other: str) -> None:
    """Within a layer and across layers: one norm before attention and MLP gave the MLP's input at ``attn_in``."""
    model = make_family("Qwen3")
    (owner, _, name), shared = other.rpartition("."), model.get_submodule(f"model.layers.0.{one}")
    setattr(model.get_submodule(f"model.layers.{layer}.{owner}".rstrip(".")), name, shared)
    sentence = rf"model\.layers\.0\.{one} and model\.layers\.{layer}\.{other} of this Qwen3ForCausalLM are one \w+, so a site"
    for host in HOSTS:
        with pytest.raises(ValueError, match=sentence):
            open_host(host, model)
