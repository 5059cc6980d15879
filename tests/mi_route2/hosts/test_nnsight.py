"""nnsight as a host: what it computes, reads, edits and learns is the torch host's, and its traces see the adapters' points."""

import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import nnsight
import pytest
import torch
from families import FAMILIES, LAYERS, SPECS, VOCAB, Side, make_batch, make_family, make_policy, make_tokens, move
from hypothesis import given, settings
from hypothesis import strategies as st
from mask_oracle import SAMPLE, assert_same, case_id, context, mask_route, plain_loss, run
from nnsight import NNsight, TransformersModel
from nnsight.intervention import backward as patched
from nnsight.intervention.interleaver import OutOfOrderError
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, PreTrainedTokenizerFast

from mi_route2 import attach
from mi_route2.adapters.linear import RoutedLinear
from mi_route2.architectures import ADAPTER_POINTS, POINTS
from mi_route2.hosts import Host, open_host
from mi_route2.hosts.huggingface import TorchHost, branches
from mi_route2.hosts.nnsight import NNsightHost
from mi_route2.rollouts import Policy, Rollouts, positions
from mi_route2.routing import MaskSpec, TrainBatch
from mi_route2.sites import Site

pytestmark = pytest.mark.hosts

UNTIED = ("Llama", "MicroGPT")
"""Families whose unembedding is a weight of its own, and carries adapters here."""


def made(name: str, spec: str = "svd-low", host: Callable[[nn.Module], Host] = NNsightHost) -> tuple[Any, Policy]:
    return make_policy(name, spec, *(("blocks.*", "unembed") if name in UNTIED else ()), host=host)


@functools.cache
def pair(name: str, spec: str = "svd-low") -> tuple[NNsightHost, Policy, TorchHost, Policy]:
    """The same policy on nnsight and on torch: two models, made alike. No test leaves anything on them."""
    return *made(name, spec), *made(name, spec, TorchHost)


def all_sites(host: Host) -> list[Site]:
    blocks = [Site(i, point) for i in range(LAYERS) for point in POINTS if not isinstance(host.architecture.points[point], str)]
    parsed = [Site.parse(f"{slot}.{point}") for slot in branches(host.model) for point in ADAPTER_POINTS]
    return blocks + parsed


def bend(x: Tensor) -> Tensor:
    return x + 0.2 * torch.cos(3 * x)


def assert_close(own: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    assert own.shape == expected.shape
    assert float((own - expected).detach().abs().max()) <= tolerance


def gradients(policy: Policy, batch: TrainBatch) -> dict[str, Tensor]:
    """Every adapter gradient of the plain loss."""
    parameters = policy.adapters.kept_parameters() | policy.adapters.quarantine_parameters()
    grads = torch.autograd.grad(plain_loss(policy, batch, batch.advantages), list(parameters.values()), allow_unused=True)
    return {name: torch.zeros_like(p) if g is None else g for (name, p), g in zip(parameters.items(), grads)}


# the same numbers as on torch


@pytest.mark.parametrize("name", FAMILIES)
def test_without_adapters_the_logits_are_the_models_own(name: str) -> None:
    model = make_family(name)
    host = NNsightHost(NNsight(model))
    assert isinstance(host, Host)
    tokens, attention = make_tokens(side="left")
    told = {"position_ids": positions(model, attention), "use_cache": False} if name != "MicroGPT" else {}
    plain, masked = model(tokens), model(tokens, attention_mask=attention.long(), **told)
    for own, expected in ((host.logits(tokens), plain), (host.logits(tokens, attention), masked)):
        assert torch.equal(own, expected if isinstance(expected, Tensor) else expected.logits)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("spec", [MaskSpec(reinforced_only=False), MaskSpec("act", "pooled")], ids=["pooled-grad", "act"])
def test_a_mask_route_step_gives_every_parameter_the_torch_hosts_gradient(name: str, spec: MaskSpec) -> None:
    host, policy, other, expected = pair(name)
    batch = make_batch(6, side="left")
    assert policy.adapters.base_hash == expected.adapters.base_hash
    ours, theirs = policy.adapters.tensors(), expected.adapters.tensors()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    rollouts = batch.rollouts
    assert_close(host.logits(rollouts.tokens, rollouts.attention), other.logits(rollouts.tokens, rollouts.attention))
    own, oracle = (run(p, mask_route(p, spec), batch) for p in (policy, expected))
    assert own.decision.flags is not None
    assert torch.equal(own.decision.flags, oracle.decision.flags)
    assert_same(own.kept, oracle.kept)
    assert_same(own.quarantine, oracle.quarantine)
    assert any(float(g.abs().max()) > 0 for g in own.kept.values())


@pytest.mark.parametrize("case", SAMPLE, ids=case_id)
def test_every_mask_route_is_the_same(case: tuple[str, ...]) -> None:
    """At fused Linears, with micro-batches."""
    score, unit, score_policy, through = case
    spec = MaskSpec(score, unit, through, score_policy, reinforced_only=False)
    batch, runs = make_batch(6), []
    for policy in pair("GPT2")[1::2]:
        runs.append(run(policy, mask_route(policy, spec), batch, micro=3))
    assert_same(runs[0].kept, runs[1].kept)
    assert_same(runs[0].quarantine, runs[1].quarantine)


@pytest.mark.parametrize("spec", [name for name in SPECS if name != "svd-low"])
def test_every_kind_of_adapter_is_the_same(spec: str) -> None:
    runs = [
        run(policy, mask_route(policy, MaskSpec(reinforced_only=False)), make_batch(6)) for policy in pair("GPTNeoX", spec)[1::2]
    ]
    assert_same(runs[0].kept, runs[1].kept)
    assert_same(runs[0].quarantine, runs[1].quarantine)


@pytest.mark.parametrize("name", FAMILIES)
def test_captures_at_every_point_are_the_torch_hosts(name: str) -> None:
    host, _, other, _ = pair(name)
    tokens, attention = make_tokens(side="left")
    sites = all_sites(host)
    own, expected = host.capture(sites, tokens, attention), other.capture(sites, tokens, attention)
    assert own.keys() == expected.keys() == set(sites)
    for site in sites:
        assert not own[site].requires_grad
        assert_close(own[site], expected[site])


def test_a_capture_builds_no_graph() -> None:
    host, graded = pair("GPT2")[0], []
    with host.hooks({Site(1, "q"): lambda x: graded.append(torch.is_grad_enabled())}):
        host.capture([Site(0, "q")], make_tokens()[0])
        host.logits(make_tokens()[0])
    assert graded == [False, True]


@pytest.mark.parametrize("name", FAMILIES)
def test_an_address_is_what_one_writes_in_a_trace(name: str) -> None:
    host, _, _, _ = pair(name)
    tokens, _ = make_tokens()
    sites, found = all_sites(host), {}
    with torch.no_grad(), host.envoy.trace() as tracer:
        with tracer.invoke(tokens):
            pass
        for site in sites:
            with tracer.invoke():
                found[site] = eval(f"root.{host.address(site)}", {"root": host.envoy})
    captured = host.capture(sites, tokens)
    for site in sites:
        assert_close(found[site].reshape(captured[site].shape), captured[site], 1e-12)


@pytest.mark.parametrize("name", FAMILIES)
def test_edits_at_every_point_at_once_are_the_torch_hosts_with_their_gradients(name: str) -> None:
    results = []
    for host, policy in (pair(name)[:2], pair(name)[2:]):
        batch = make_batch(side="left")
        with host.hooks(dict.fromkeys(all_sites(host), bend)):
            results.append((policy.logprobs(batch.rollouts), gradients(policy, batch)))
    assert_close(results[0][0], results[1][0])
    assert_same(results[0][1], results[1][1])


@pytest.mark.parametrize("name", ["GPT2", "GPTNeoX", "Gemma2"])
def test_an_edit_at_each_point_is_the_torch_hosts(name: str) -> None:
    """Also where only what follows is changed: on parts of fused Linears, on tuples, on the stream between attention and MLP."""
    host, _, other, _ = pair(name)
    tokens, _ = make_tokens()
    with torch.no_grad():
        plain = host.logits(tokens)
        for site in [site for site in all_sites(host) if site.layer == 1]:
            with host.hooks({site: bend}), other.hooks({site: bend}):
                own, expected = host.logits(tokens), other.logits(tokens)
            assert_close(own, expected)
            assert float((own - plain).abs().max()) > 1e-9, site
        assert torch.equal(host.logits(tokens), plain)


@settings(max_examples=10)
@given(
    order=st.permutations(range(LAYERS * len(POINTS) + 3)),
    count=st.integers(1, 8),
    side=st.sampled_from(["left", "right"]),
    seed=st.integers(0, 99),
)
def test_sites_need_no_order(order: list[int], count: int, side: Side, seed: int) -> None:
    host, _, other, _ = pair("Llama")
    tokens, attention = make_tokens(side=side, seed=seed)
    sites = all_sites(host)
    edits = {sites[i]: bend for i in order[:count]}
    with torch.no_grad(), host.hooks(edits), other.hooks(edits):
        assert_close(host.logits(tokens, attention)[attention], other.logits(tokens, attention)[attention])


def test_edits_of_one_place_are_made_in_the_order_given_and_captures_see_them() -> None:
    """``q`` and ``k`` are one module's output; contexts nest, the outer one first."""
    q, k = Site(0, "q"), Site(0, "k")
    tokens, _ = make_tokens()
    seen = []
    for host in pair("GPT2")[::2]:
        with torch.no_grad(), host.hooks({k: bend, q: lambda x: 2 * x}), host.hooks({q: bend}):
            seen.append((host.logits(tokens), *host.capture([q, k], tokens).values()))
    for own, expected in zip(*seen):
        assert_close(own, expected)
    plain = pair("GPT2")[0].capture([q], tokens)[q]
    assert_close(seen[0][1], bend(2 * plain))


# traces of one's own


@pytest.fixture
def gpt2() -> Iterator[tuple[Any, NNsightHost, Policy]]:
    """The envoy that a user holds, its host and policy; edits that a test leaves on it are dropped."""
    host, policy, _, _ = pair("GPT2")
    yield host.envoy, host, policy
    host.envoy.clear_edits()


def test_the_points_of_the_adapters_are_envoys(gpt2: tuple[Any, NNsightHost, Policy]) -> None:
    model, host, policy = gpt2
    tokens, _ = make_tokens()
    with torch.no_grad(), model.trace(tokens):
        a = model.transformer.h[0].attn.c_attn.route_v.hook_kept_a.output.save()
        kept = model.transformer.h[0].attn.c_attn.route_v.hook_kept.output.save()
        quarantine = model.transformer.h[0].attn.c_attn.route_v.hook_quarantine.output.save()
        x = model.transformer.h[0].mlp.c_proj.input.save()
        added = model.transformer.h[0].mlp.c_proj.route.hook_kept.output.save()
        y = model.transformer.h[0].mlp.c_proj.output.save()
    found = host.capture([Site(0, point, "attn.v") for point in ADAPTER_POINTS], tokens)
    for own, expected in zip((a, kept, quarantine), found.values()):
        assert_close(own, expected, 1e-12)
    branch = policy.adapters.sites["blocks.0.mlp.down"]
    with torch.no_grad():
        assert_close(added, branch.kept(x, None, None, branch.site, branch.hook_kept_a), 1e-12)
        assert_close(y, host.model.transformer.h[0].mlp.c_proj(x), 1e-12)


def test_a_point_is_written_in_a_trace_and_in_an_edit(gpt2: tuple[Any, NNsightHost, Policy]) -> None:
    model, host, _ = gpt2
    tokens, _ = make_tokens()
    with torch.no_grad(), pair("GPT2")[2].hooks({Site(1, "kept_a", "attn.k"): bend}):
        expected = pair("GPT2")[2].logits(tokens)
    with torch.no_grad(), model.trace(tokens):
        a = model.transformer.h[1].attn.c_attn.route_k.hook_kept_a.output
        model.transformer.h[1].attn.c_attn.route_k.hook_kept_a.output = bend(a)
        logits = model.output.logits.save()
    assert_close(logits, expected)
    with model.edit(inplace=True):
        stored = model.transformer.h[1].attn.c_attn.route_k.hook_kept_a
        stored.output = bend(stored.output)
    assert_close(host.logits(tokens), expected)  # every forward through the host is a trace, and so carries the edit
    with torch.no_grad():
        assert float((host.model(tokens).logits - expected).abs().max()) > 1e-6  # and a bare call of the module is none
        model.clear_edits()
        assert torch.equal(host.logits(tokens), host.model(tokens).logits)


def test_the_stream_between_attention_and_mlp_is_written_in_place(gpt2: tuple[Any, NNsightHost, Policy]) -> None:
    """Replaced and not overwritten, the norm alone would read the new one."""
    model, host, _ = gpt2
    tokens, _ = make_tokens()
    with torch.no_grad(), host.hooks({Site(0, "resid_mid"): bend}):
        expected = host.logits(tokens)
    with torch.no_grad(), model.trace(tokens):
        model.transformer.h[0].ln_2.input[:] = bend(model.transformer.h[0].ln_2.input)
        written = model.output.logits.save()
    with torch.no_grad(), model.trace(tokens):
        model.transformer.h[0].ln_2.input = bend(model.transformer.h[0].ln_2.input)
        replaced = model.output.logits.save()
    assert torch.equal(written, expected)
    assert float((replaced - expected).abs().max()) > 1e-3


def test_a_gradient_at_a_point_is_read_and_written_in_a_trace(gpt2: tuple[Any, NNsightHost, Policy]) -> None:
    """Against a tensor hook at the same point on torch."""
    model, _, policy = gpt2
    tokens, _ = make_tokens()
    host, other = pair("GPT2")[2:]
    seen: list[Tensor] = []

    def watch(x: Tensor) -> None:
        x.register_hook(lambda g: (seen.append(g), 2 * g)[1])

    def watched(policy: Policy) -> dict[str, Tensor]:
        parameters = policy.adapters.kept_parameters() | policy.adapters.quarantine_parameters()
        return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in parameters.items()}

    for one in (policy, other):
        one.model.zero_grad(set_to_none=True)
    with policy.adapters.unrouted(), other.adapters.unrouted():
        with host.hooks({Site(1, "kept_out", "mlp.up"): watch}):
            host.logits(tokens).square().sum().backward()
        with model.trace(tokens):
            kept = model.transformer.h[1].mlp.c_fc.route.hook_kept.output
            loss = model.output.logits.square().sum()
            with loss.backward():
                g = kept.grad.save()
                kept.grad = 2 * kept.grad
    assert_close(g, seen[0])
    assert_same(watched(policy), watched(other))


def words() -> PreTrainedTokenizerFast:
    """``w7`` is token 7, and ``w0`` the padding."""
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", unk_token="w0")


@functools.cache
def generator() -> tuple[NNsightHost, Policy]:
    host = NNsightHost(TransformersModel(make_family("Llama"), tokenizer=words()))
    return host, host.policy(move(host.attach("blocks.*", spec=SPECS["lora"], generator=torch.Generator().manual_seed(7))))


def test_a_model_with_a_tokenizer_is_the_same_host() -> None:
    (host, policy), (expected, theirs) = generator(), make_policy("Llama")
    for side in ("left", "right"):
        tokens, attention = make_tokens(side=side)
        with torch.no_grad():
            assert_close(host.logits(tokens, attention)[attention], expected.logits(tokens, attention)[attention])
            assert_close(host.logits(tokens), expected.logits(tokens))
    own, oracle = (run(p, mask_route(p, MaskSpec(reinforced_only=False)), make_batch(side="left")) for p in (policy, theirs))
    assert_same(own.kept, oracle.kept)
    assert_same(own.quarantine, oracle.quarantine)


def test_each_invoke_of_a_generation_sees_and_edits_its_own_rows() -> None:
    model, steps = generator()[0].envoy, 3
    long, short = "w3 w4 w5 w6 w7 w8", "w9 w10 w11"

    def point() -> Any:
        return model.model.layers[1].self_attn.q_proj.route.hook_kept_a

    def generated(prompt: str) -> tuple[list[Tensor], Tensor]:
        alone = []
        with model.generate(prompt, max_new_tokens=steps, do_sample=False) as tracer:
            for _ in tracer.iter[:steps]:
                alone.append(point().output)
            ids = tracer.result.save()
        return alone, ids

    solo = [generated(prompt) for prompt in (long, short)]
    seen: list[list[Tensor]] = [[], []]
    with model.generate(max_new_tokens=steps, do_sample=False) as tracer:
        with tracer.invoke(long):
            for _ in tracer.iter[:steps]:
                seen[0].append(point().output)
        with tracer.invoke(short):
            for _ in tracer.iter[:steps]:
                seen[1].append(point().output)
        with tracer.invoke():
            ids = tracer.result.save()
    for row, ((values, alone), pad) in enumerate(zip(solo, (0, 3))):
        assert torch.equal(ids[row, pad:], alone[0])
        assert [len(v) for v in seen[row]] == [1] * steps
        for step, value in enumerate(values):
            assert_close(seen[row][step][:, pad if step == 0 else 0 :], value)

    with model.generate(max_new_tokens=steps, do_sample=False) as tracer:
        with tracer.invoke(long):
            for _ in tracer.iter[:steps]:
                seen[0].append(point().output)
        with tracer.invoke(short):
            for _ in tracer.iter[:steps]:
                mlp = model.model.layers[0].mlp.down_proj.route.hook_kept
                mlp.output = mlp.output + 100
                seen[1].append(point().output)
    for step in range(steps):
        assert_close(seen[0][steps + step], seen[0][step])  # the neighbour is untouched
    assert float((seen[1][steps] - seen[1][0]).abs().max()) > 1e-3


# masks


IN_FORWARD = {
    "act-token": MaskSpec("act", "token", reinforced_only=False),
    "ablated": MaskSpec("grad", "pooled", score_policy="ablated", reinforced_only=False),
    "channel": MaskSpec("own_channel", "pooled", reinforced_only=False),
}
LATER = {"own-grad": MaskSpec("grad", "rollout", reinforced_only=False), "pooled-grad": MaskSpec("grad", reinforced_only=False)}
SITE = "blocks.1.attn.k"


def traced_loss(model: Any, rollouts: Rollouts, advantages: Tensor) -> Any:
    """``plain_loss`` of the logits that an open trace reads; a tensor whose ``backward()`` may be a context."""
    chosen = model.output.logits[:, :-1].log_softmax(-1).gather(-1, rollouts.tokens[:, 1:, None])[..., 0]
    picked = torch.where(rollouts.predictors[:, :-1], chosen, 0.0)
    return -(advantages[:, None] * picked).sum() / 50


def torch_overruled(spec: MaskSpec, mask: Callable[[Tensor], Tensor] | None) -> tuple[list[Tensor], Any]:
    """On the torch host: masks as a torch hook at the point sees them, and the run under what it returns."""
    policy, seen = pair("GPT2")[3], []

    def at_point(_module: nn.Module, _args: Any, keep: Tensor) -> Tensor | None:
        seen.append(keep)
        return None if mask is None else mask(keep)

    with policy.adapters.sites[SITE].hook_mask.register_forward_hook(at_point):
        return seen, run(policy, mask_route(policy, spec), make_batch(6))


@pytest.mark.parametrize("kind", IN_FORWARD)
def test_masks_that_the_forward_knows_are_read_and_overruled_in_its_trace(kind: str, gpt2: tuple[Any, NNsightHost, Policy]) -> None:
    model, _, policy = gpt2
    spec, batch = IN_FORWARD[kind], make_batch(6)
    seen, expected = torch_overruled(spec, lambda keep: 1 - keep)
    policy.model.zero_grad(set_to_none=True)
    step = mask_route(policy, spec).begin(policy, batch, context(spec, 6))
    (micro_batch,) = step.micro_batches
    with policy.adapters.recording(micro_batch.tape):
        with model.trace(batch.rollouts.tokens):
            point = model.transformer.h[1].attn.c_attn.route_k.hook_mask
            keep = point.output.save()
            point.output = 1 - keep
            loss = traced_loss(model, batch.rollouts, micro_batch.advantages).save()
        loss.backward()
    decision = step.finish()
    assert torch.equal(keep, seen[0])
    assert 0 < float(keep.mean()) < 1
    assert decision.extra["overruled"] == expected.decision.extra["overruled"] == 1
    assert_same({name: p.grad for name, p in policy.adapters.kept_parameters().items()}, expected.kept)


@pytest.mark.parametrize("kind", LATER)
def test_masks_decided_later_are_reached_in_a_trace_that_holds_the_backward(
    kind: str, gpt2: tuple[Any, NNsightHost, Policy]
) -> None:
    """A second invoke waits at the point while the first runs the backward and finishes the step."""
    model, _, policy = gpt2
    spec, batch = LATER[kind], make_batch(6)
    seen, expected = torch_overruled(spec, lambda keep: 1 - keep)
    policy.model.zero_grad(set_to_none=True)
    step = mask_route(policy, spec).begin(policy, batch, context(spec, 6))
    (micro_batch,) = step.micro_batches
    with policy.adapters.recording(micro_batch.tape), model.trace() as tracer:
        with tracer.invoke(batch.rollouts.tokens):
            a = model.transformer.h[1].mlp.c_fc.route.hook_kept_a.output
            loss = traced_loss(model, batch.rollouts, micro_batch.advantages)
            with loss.backward():
                g = a.grad.save()
            decision = nnsight.save(step.finish())
        with tracer.invoke():
            point = model.transformer.h[1].attn.c_attn.route_k.hook_mask
            keep = point.output.save()
            point.output = 1 - keep
    assert torch.equal(keep, seen[0])
    assert float(g.abs().max()) > 0
    assert torch.equal(decision.flags, expected.decision.flags)
    assert_same({name: p.grad for name, p in policy.adapters.kept_parameters().items()}, expected.kept)


def test_a_mask_decided_later_is_not_there_in_the_forwards_trace(gpt2: tuple[Any, NNsightHost, Policy]) -> None:
    model, _, policy = gpt2
    batch = make_batch(6)
    (micro_batch,) = mask_route(policy, LATER["own-grad"]).begin(policy, batch, context(LATER["own-grad"], 6)).micro_batches
    with policy.adapters.recording(micro_batch.tape):
        with pytest.raises(OutOfOrderError, match=r"route_k\.hook_mask"):
            with model.trace(batch.rollouts.tokens):
                model.transformer.h[1].attn.c_attn.route_k.hook_mask.output.save()


# envoys and the module tree


def test_envoys_that_are_older_than_the_adapters_are_renewed() -> None:
    """A trace of them would silently read the base Linear under the Linear's old name: pinned here, and what the host does."""
    module = make_family("GPT2")
    model = NNsight(module)
    held, tokens = model.transformer.h[0].attn.c_attn, make_tokens()[0]
    host = NNsightHost(model)
    adapters = move(attach(module, "blocks.*", spec=SPECS["lora"], generator=torch.Generator().manual_seed(7)))
    values = []
    for _ in range(2):
        with torch.no_grad(), model.trace(tokens):
            x = model.transformer.h[0].attn.c_attn.input.save()
            values.append(model.transformer.h[0].attn.c_attn.output)
        host.refresh()
    assert_close(values[0], module.transformer.h[0].attn.c_attn.base(x))
    assert_close(values[1], module.transformer.h[0].attn.c_attn(x))
    assert float((values[0] - values[1]).abs().max()) > 1e-3
    assert isinstance(held._module, RoutedLinear)
    assert held.route_q.hook_kept_a.path == "model.transformer.h.0.attn.c_attn.route_q.hook_kept_a"
    adapters.detach()
    with torch.no_grad():
        assert torch.equal(host.logits(tokens), make_family("GPT2")(tokens).logits)  # and without a call of refresh
    assert "route_q" not in held._child_map
    with torch.no_grad(), model.trace(tokens):
        y = held.output.save()
    assert_close(y, values[0])


def test_nothing_outlives_a_forward(gpt2: tuple[Any, NNsightHost, Policy]) -> None:
    _, host, _ = gpt2
    tokens, _ = make_tokens()
    gc.collect()
    gc.disable()
    try:
        with host.hooks({Site(0, "resid_mid"): bend}):
            logits = host.logits(tokens)
        alive = weakref.ref(logits)
        del logits
        assert alive() is None
    finally:
        gc.enable()


# what importing nnsight does to torch


def test_the_patched_backward_changes_no_gradient_and_no_hook(gpt2: tuple[Any, NNsightHost, Policy]) -> None:
    """``Tensor.backward`` is nnsight's once it is imported; torch's own is what it was."""
    assert torch.Tensor.backward is patched._backward
    _, host, policy = gpt2
    batch, route = make_batch(6), mask_route(policy, MaskSpec(reinforced_only=False))
    seen: list[list[Tensor]] = []
    found = []
    for backward in (torch.Tensor.backward, patched._original_backward):
        policy.model.zero_grad(set_to_none=True)
        seen.append([])
        block = host.model.transformer.h[1]
        step = route.begin(policy, batch, context(route.spec, 6))
        (micro_batch,) = step.micro_batches
        hooks = (
            block.register_forward_hook(lambda _m, _a, y: seen[-1].append(y.detach())),
            block.register_full_backward_hook(lambda _m, _i, o: seen[-1].append(o[0])),
        )
        with hooks[0], hooks[1], policy.adapters.recording(micro_batch.tape):
            backward(plain_loss(policy, micro_batch.batch, micro_batch.advantages))
        step.finish()
        found.append({name: p.grad for name, p in policy.adapters.kept_parameters().items()})
    assert len(seen[0]) == len(seen[1]) == 2
    assert all(torch.equal(a, b) for a, b in zip(*seen))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_a_backward_on_the_line_of_a_with_is_taken_for_a_trace_and_the_step_says_so(
    gpt2: tuple[Any, NNsightHost, Policy],
) -> None:
    """nnsight goes by the line: here it runs no backward at all. The docs warn of it; a route refuses to finish."""
    _, _, policy = gpt2
    batch, route = make_batch(6), mask_route(policy, MaskSpec(reinforced_only=False))
    step = route.begin(policy, batch, context(route.spec, 6))
    (micro_batch,) = step.micro_batches
    # fmt: off
    with policy.adapters.recording(micro_batch.tape): plain_loss(policy, micro_batch.batch, micro_batch.advantages).backward()  # noqa: E701
    # fmt: on
    with pytest.raises(RuntimeError, match="did not report a gradient"):
        step.finish()


# errors


def test_a_site_that_did_not_fire_is_named(gpt2: tuple[Any, NNsightHost, Policy]) -> None:
    _, host, policy = gpt2
    tokens, _ = make_tokens()
    site = Site(1, "kept_out", "mlp.up")
    message = r"did not fire: blocks\.1\.mlp\.up\.kept_out \(transformer\.h\[1\]\.mlp\.c_fc\.route\.hook_kept\.output\)"
    with pytest.raises(RuntimeError, match=message), policy.adapters.reference():
        host.capture([site, Site(0, "q")], tokens)
    with pytest.raises(RuntimeError, match=message), host.hooks({site: bend}):
        pass
    with host.hooks({site: bend}):  # it is enough that one forward came there
        with policy.adapters.reference():
            host.logits(tokens)
        host.logits(tokens)


def test_a_site_that_is_not_there_is_refused_at_once() -> None:
    tokens, _ = make_tokens()
    with pytest.raises(ValueError, match="no stream between them"):
        pair("GPTNeoX")[0].capture([Site(0, "resid_mid")], tokens)
    with pytest.raises(KeyError, match="no adapter at 'unembed'"):
        pair("GPT2")[0].capture([Site(None, "kept_a", "unembed")], tokens)
    with pytest.raises(KeyError, match=r"its layers are 0\.\.1"), pair("GPT2")[0].hooks({Site(2, "q"): bend}):
        pass


def test_models_that_cannot_be_hosts_are_refused() -> None:
    with pytest.raises(ValueError, match="no known architecture"):
        NNsightHost(NNsight(nn.Linear(2, 2)))
    with torch.device("meta"):
        empty = type(make_family("Llama"))(LlamaConfig(**FAMILIES["Llama"].to_dict()))
    with pytest.raises(ValueError, match="not loaded: pass dispatch=True"):
        NNsightHost(NNsight(empty))
    host = open_host("nnsight", make_family("MicroGPT"))
    assert host.name == "nnsight"
    host.attach("blocks.*", spec=SPECS["lora"], generator=torch.Generator().manual_seed(0), expect=6 * LAYERS)


@pytest.mark.parametrize("where", ["in an invoke", "between invokes"])
def test_a_forward_through_the_host_inside_a_trace_is_refused(where: str, gpt2: tuple[Any, NNsightHost, Policy]) -> None:
    model, host, _ = gpt2
    tokens, _ = make_tokens()
    with pytest.raises(RuntimeError, match="a trace of this model is open"), model.trace() as tracer:  # noqa: PT012
        with tracer.invoke(tokens):
            model.transformer.h[0].output.save()
            if where == "in an invoke":
                host.logits(tokens)
        if where == "between invokes":
            host.logits(tokens)
    with torch.no_grad():
        assert torch.equal(host.logits(tokens), host.model(tokens).logits)


def test_an_error_in_an_edit_is_the_users_own_and_leaves_the_host_usable(gpt2: tuple[Any, NNsightHost, Policy]) -> None:
    _, host, _ = gpt2
    tokens, _ = make_tokens()

    def fails(x: Tensor) -> Tensor:
        raise ArithmeticError("mine")

    with pytest.raises(ArithmeticError, match="mine"), host.hooks({Site(1, "resid_post"): bend, Site(0, "z"): fails}):
        host.logits(tokens)
    with torch.no_grad():
        assert torch.equal(host.logits(tokens), host.model(tokens).logits)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of the forward without gradients
@pytest.mark.parametrize("reentrant", [False, True])
def test_an_edit_under_checkpointing_is_refused_and_reading_is_not(reentrant: bool) -> None:
    host, policy = made("MicroGPT")
    batch = make_batch()
    expected = gradients(policy, batch)
    policy.model.embed.requires_grad_(True)  # a reentrant checkpoint needs an input that requires grad
    block = host.model.blocks[0]
    inner = type(block).forward
    block.__dict__["forward"].state.body = lambda module, *a: checkpoint(
        functools.partial(inner, module), *a, use_reentrant=reentrant
    )
    seen: list[Tensor] = []
    site = Site(0, "mlp_out")

    def read(x: Tensor) -> None:
        seen.append(x.detach())

    with host.hooks({site: read}):
        policy.model.zero_grad(set_to_none=True)
        with policy.adapters.unrouted():
            plain_loss(policy, batch, batch.advantages).backward()
    own = policy.adapters.kept_parameters() | policy.adapters.quarantine_parameters()
    assert_same({name: p.grad for name, p in own.items()}, expected)
    assert len(seen) == 1
    refused = pytest.raises(RuntimeError, match=r"the edit of blocks\.0\.mlp_out would be lost: under gradient checkpointing")
    with refused, host.hooks({site: bend}):
        host.logits(batch.rollouts.tokens)
    with torch.no_grad(), host.hooks({site: bend}):  # without gradients nothing is run again
        host.logits(batch.rollouts.tokens)
    with host.hooks({Site(1, "mlp_out"): bend}):  # and this block is not checkpointed
        host.logits(batch.rollouts.tokens)
