"""The theorems of hosts on a CUDA device, in float32 and bfloat16: one model, the same adapters, three ways to hook it."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, LAYERS, TRANSFORMERS, Side, alone, make_batch, make_family, make_policy, make_tokens
from gpu import DEVICE, NEEDS, on_device
from mask_oracle import Run, mask_route, plain_loss, run
from torch import Tensor, nn

from mi_route2.architectures import POINTS
from mi_route2.hosts import Host, open_host
from mi_route2.hosts.huggingface import TorchHost
from mi_route2.rollouts import Policy
from mi_route2.routing import MaskSpec
from mi_route2.sites import Site

pytestmark = [pytest.mark.gpu, NEEDS]

ROOT = Path(__file__).parents[2]
DTYPES = [torch.float32, torch.bfloat16]
CLOSE = {torch.float32: 2e-5, torch.bfloat16: 0.05}
"""Largest relative error (by norm) of logits and activations between hosts, or between a padded batch and a row of it."""
LEARNT = {torch.float32: 1e-4, torch.bfloat16: 0.15}
"""Of a parameter's gradient."""
OTHERS = ("transformer_lens", "nnsight")
EAGER = [name for name in TRANSFORMERS if not name.startswith("GPT")]
"""Families to which the bridge gives transformers' eager attention, so that torch is asked for the same."""
FUSED = ("GPT2", "GPTNeoX")
CHANNEL = MaskSpec("own_channel", reinforced_only=False, negative_scale=0.3)
"""Flags that no rounding can turn."""


@cache
def hosted(host: str, name: str, dtype: torch.dtype, beside: str = "torch", spec: str = "lora") -> tuple[Host, Policy]:
    """The family on a host, with the attention that ``beside`` can have too. No test leaves anything on it."""
    attn = "eager" if "transformer_lens" in (host, beside) and name in EAGER else "sdpa"
    return make_policy(name, spec, host=lambda model: open_host(host, model.to(DEVICE)), dtype=dtype, attn=attn)


def tokens_on_device(n: int = 4, side: Side = "right") -> tuple[Tensor, Tensor]:
    tokens, attention = make_tokens(n, side)
    return tokens.to(DEVICE), attention.to(DEVICE)


def error(own: Tensor, expected: Tensor) -> float:
    """Relative, by norm."""
    assert own.shape == expected.shape
    difference, size = (
        (own.detach().cpu().double() - expected.detach().cpu().double()).norm(),
        expected.detach().cpu().double().norm(),
    )
    return float(difference / size.clamp_min(1e-12))


def assert_learnt(
    own: Mapping[str, Tensor], expected: Mapping[str, Tensor], dtype: torch.dtype, exact: Mapping[str, Tensor] | None = None
) -> None:
    """Two roundings of ``exact`` differ by as much as one of them is off; in bfloat16 a gradient of queries can be half noise."""
    assert own.keys() == expected.keys()
    assert any(float(g.abs().max()) > 0 for g in expected.values())
    for name, gradient in expected.items():
        noise = error(gradient, exact[name]) if exact is not None else 0.0
        assert error(own[name], gradient) < LEARNT[dtype] + noise, name


def assert_same_step(own: Run, expected: Run, dtype: torch.dtype, exact: Run | None = None) -> None:
    assert torch.equal(own.decision.flags, expected.decision.flags)
    for adapter in ("kept", "quarantine"):
        assert_learnt(*(getattr(each, adapter) for each in (own, expected)), dtype, exact and getattr(exact, adapter))


def in_float64(name: str, policy: Policy, dtype: torch.dtype) -> tuple[Host, Policy]:
    """The same weights and adapters in float64 on the CPU."""
    weights = make_family(name, dtype).state_dict()

    def build(model: nn.Module) -> Host:
        model.load_state_dict(weights)
        return TorchHost(model)

    exact, oracle = make_policy(name, host=build)
    tensors = oracle.adapters.tensors()
    for key, t in policy.adapters.tensors().items():
        tensors[key].copy_(t)
    return exact, oracle


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


# ---- the same numbers


@pytest.mark.parametrize("host", OTHERS)
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_captures_are_the_torch_hosts(name: str, host: str, dtype: torch.dtype) -> None:
    (own, policy), (torch_host, expected) = hosted(host, name, dtype), hosted("torch", name, dtype, beside=host)
    ours, theirs = policy.adapters.tensors(), expected.adapters.tensors()
    assert policy.adapters.base_hash == expected.adapters.base_hash
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(t, theirs[key]) and t.device.type == DEVICE and t.dtype == torch.float32 for key, t in ours.items())
    tokens, _ = tokens_on_device()
    with torch.no_grad():
        logits, other = own.logits(tokens), torch_host.logits(tokens)
    assert logits.device.type == DEVICE
    assert logits.dtype == other.dtype == dtype
    assert error(logits, other) < CLOSE[dtype]
    sites = [Site(i, point) for i in range(LAYERS) for point in points_of(own, name)]
    sites += [Site(1, point, linear) for point in ("kept_a", "kept_out", "quarantine_out") for linear in ("attn.k", "mlp.down")]
    captured, there = own.capture(sites, tokens), torch_host.capture(sites, tokens)
    for site in sites:
        assert error(captured[site], there[site]) < CLOSE[dtype], site


def points_of(host: Host, name: str) -> list[str]:
    return [p for p in POINTS if not isinstance(host.architecture.points[p], str) and not (p == "resid_mid" and "NeoX" in name)]


@pytest.mark.parametrize("host", OTHERS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_routed_step_learns_what_it_does_on_the_torch_host(name: str, host: str, dtype: torch.dtype) -> None:
    """Under flags that are given, and under gradient flags with the threshold where it tells the scores apart best."""
    (_, policy), (_, expected) = hosted(host, name, dtype), hosted("torch", name, dtype, beside=host)
    batch = on_device(make_batch(8))
    own, there = (run(p, mask_route(p, CHANNEL), batch) for p in (policy, expected))
    assert own.decision.flags.any()
    oracle = in_float64(name, expected, dtype)[1] if dtype is torch.bfloat16 else None
    assert_same_step(own, there, dtype, oracle and run(oracle, mask_route(oracle, CHANNEL), make_batch(8)))
    scores = run(expected, mask_route(expected, MaskSpec(reinforced_only=False)), batch).decision.scores
    tau, margin = widest_gap(scores)
    gradient = MaskSpec(tau=tau, reinforced_only=False)
    own, there = (run(p, mask_route(p, gradient), batch) for p in (policy, expected))
    assert float((own.decision.scores - there.decision.scores).abs().max()) < margin
    exact = oracle and run(oracle, mask_route(oracle, gradient), make_batch(8))
    assert exact is None or torch.equal(exact.decision.flags, there.decision.flags.cpu())
    assert_same_step(own, there, dtype, exact)


def widest_gap(scores: Tensor) -> tuple[float, float]:
    """The middle of the widest gap between scores in a row, and half of that gap."""
    ordered = scores.double().sort().values
    gaps = ordered.diff()
    i = int(gaps.argmax())
    return float((ordered[i] + ordered[i + 1]) / 2), float(gaps[i] / 2)


@pytest.mark.parametrize("host", ["torch", *OTHERS])
@pytest.mark.parametrize("name", FUSED)
def test_fused_adapters_learn_what_the_float64_policy_does(name: str, host: str, dtype: torch.dtype) -> None:
    """Logits and every gradient against the same weights in float64 on the CPU."""
    own, policy = hosted(host, name, dtype)
    exact, oracle = in_float64(name, policy, dtype)
    batch = make_batch(8)
    tokens = batch.rollouts.tokens
    assert error(own.logits(tokens.to(DEVICE)), exact.logits(tokens)) < CLOSE[dtype]
    step, expected = run(policy, mask_route(policy, CHANNEL), on_device(batch)), run(oracle, mask_route(oracle, CHANNEL), batch)
    assert torch.equal(step.decision.flags.cpu(), expected.decision.flags)
    assert_learnt(step.kept, expected.kept, dtype)
    assert_learnt(step.quarantine, expected.quarantine, dtype)


# ---- what is exact anywhere


@pytest.mark.parametrize("host", ["torch", *OTHERS])
@pytest.mark.parametrize("name", ["Qwen3", "GPT2"])
def test_what_is_flagged_leaves_exactly_nothing(name: str, host: str, dtype: torch.dtype) -> None:
    _, policy = hosted(host, name, dtype)
    batch = on_device(make_batch(8))
    own = run(policy, mask_route(policy, MaskSpec(tau=-2.0, reinforced_only=False)), batch)
    assert own.decision.flags.all()
    assert all(torch.equal(g, torch.zeros_like(g)) for g in own.kept.values())
    assert all(g.any() and torch.isfinite(g).all() for g in own.quarantine.values())


@pytest.mark.parametrize(
    "spec", [MaskSpec(tau=-2.0, reinforced_only=False), MaskSpec("grad", "rollout", tau=-2.0, reinforced_only=False)]
)
@pytest.mark.parametrize("host", ["torch", *OTHERS])
def test_a_hook_at_the_mask_is_what_happens_wherever_the_backward_runs(host: str, spec: MaskSpec, dtype: torch.dtype) -> None:
    """On a device the backward has a thread of its own, and a module's own gradient flag passes its point there."""
    _, policy = hosted(host, "Qwen3", dtype)
    batch, site = on_device(make_batch(8)), "blocks.0.mlp.up"
    point = policy.adapters.sites[site].hook_mask
    with point.register_forward_hook(lambda _module, _args, keep: torch.ones_like(keep)):
        own = run(policy, mask_route(policy, spec), batch)
    parameters = policy.adapters.kept_parameters()
    plain = torch.autograd.grad(plain_loss(policy, batch, batch.advantages), list(parameters.values()))
    for (name, _), gradient in zip(parameters.items(), plain):
        if name.startswith(site):
            assert error(own.kept[name], gradient) < LEARNT[dtype], name
        else:
            assert not own.kept[name].any(), name


@pytest.mark.parametrize("host", ["torch", *OTHERS])
def test_an_edit_acts_and_leaves_nothing(host: str, dtype: torch.dtype) -> None:
    own, _ = hosted(host, "Qwen3", dtype)
    tokens, _ = tokens_on_device()
    with torch.no_grad():
        plain = own.logits(tokens)
        with own.hooks({Site(1, "resid_post"): torch.zeros_like}):
            assert torch.equal(own.logits(tokens), torch.zeros_like(plain))
        assert torch.equal(own.logits(tokens), plain)


@pytest.mark.parametrize("host", ["torch", *OTHERS])
def test_a_model_on_the_cpu_stays_there_beside_a_device(host: str) -> None:
    own, policy = make_policy("Qwen3", host=lambda model: open_host(host, model), dtype=torch.float32)
    batch = make_batch(4)
    assert own.logits(batch.rollouts.tokens).device.type == "cpu"
    step = run(policy, mask_route(policy, CHANNEL), batch)
    assert all(g.device.type == "cpu" and torch.isfinite(g).all() for g in step.kept.values())


# ---- padding


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("host", ["torch", *OTHERS])
@pytest.mark.parametrize("name", ["Qwen3", "Gemma3", "GPT2", "GPTNeoX", "MicroGPT"])
def test_a_padded_batch_gives_what_each_row_gives_alone(name: str, host: str, side: Side, dtype: torch.dtype) -> None:
    own, policy = hosted(host, name, dtype)
    tokens, attention = tokens_on_device(4, side)
    site = Site(LAYERS - 1, "resid_post")
    with torch.no_grad():
        logits, captured = own.logits(tokens, attention), own.capture([site], tokens, attention)[site]
        for b, real in enumerate(attention):
            one = tokens[b, real][None]
            assert error(logits[b, real], own.logits(one)[0]) < CLOSE[dtype]
            assert error(captured[b, real], own.capture([site], one)[site][0]) < CLOSE[dtype]
    batch = on_device(make_batch(4, side))
    parameters = list((policy.adapters.kept_parameters() | policy.adapters.quarantine_parameters()).values())
    whole = torch.autograd.grad(plain_loss(policy, batch, batch.advantages), parameters)
    apart = [torch.zeros_like(g) for g in whole]
    for b in range(4):
        one = alone(batch, b)
        for total, gradient in zip(apart, torch.autograd.grad(plain_loss(policy, one, one.advantages), parameters)):
            total += gradient
    assert max(error(own, expected) for own, expected in zip(whole, apart)) < LEARNT[dtype]


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a second device")
def test_a_model_on_two_devices_is_refused() -> None:
    model = make_family("Qwen3", torch.float32).to(DEVICE)
    model.get_submodule("lm_head").to("cpu")
    with pytest.raises(ValueError, match=r"the weights of this model are on cpu and cuda:0, .* load it on one device"):
        open_host("torch", model).attach("blocks.*")


# ---- torch.compile, in a child without the checks of shapes at run time, which cannot be traced


if DEVICE != "cpu":  # there tests/mi_route2/adapters/test_compile.py has one of the cases, in the child of its own checks

    def test_compiled_is_eager(tmp_path: Path) -> None:
        command = [sys.executable, "-m", "pytest", "-q", "--show-capture=no", "-p", "no:cacheprovider", str(Path(__file__))]
        changed = ["-o", "addopts=--import-mode=importlib", "-o", "python_functions=check_*"]
        environment = os.environ | {"JAXTYPING_DISABLE": "1", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        done = subprocess.run([*command, *changed], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "8 passed" in done.stdout


@pytest.mark.parametrize("name", ["Qwen3", "GPT2"])
def check_compiled_is_eager_in_every_context(name: str, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    host, policy = hosted("torch", name, dtype)
    if DEVICE == "cpu":  # one block: each takes seconds to trace
        host, policy = hosted.__wrapped__("torch", name, dtype)
        blocks = host.model.get_submodule(host.architecture.blocks)
        host.model.set_submodule(host.architecture.blocks, blocks[:1])
    tokens, attention = tokens_on_device(side="left")
    told: dict[str, Any] = host.keywords(attention)  # pyright: ignore[reportAttributeAccessIssue]
    backend = "aot_eager" if DEVICE == "cpu" else "inductor"  # whose C++ compiler takes minutes
    adapters, compiled = policy.adapters, torch.compile(host.model, fullgraph=True, backend=backend)
    parameters = adapters.kept_parameters() | adapters.quarantine_parameters()

    def outcome(forward: Callable[..., Any]) -> tuple[Tensor, dict[str, Tensor]]:
        logits = forward(tokens, **told).logits
        loss = -logits[attention].float().log_softmax(-1)[:, 3].sum()
        if not loss.requires_grad:
            return logits, {}
        grads = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        return logits.detach(), {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(parameters.items(), grads)}

    for context in (adapters.full, adapters.deployed, adapters.reference, adapters.full):
        with adapters.unrouted(), context():
            (own, learnt), (expected, right) = outcome(compiled), outcome(host.model)
        assert error(own[attention], expected[attention]) < CLOSE[dtype]
        assert learnt.keys() == right.keys()
        for key, gradient in right.items():
            assert error(learnt[key], gradient) < LEARNT[dtype], key


@pytest.mark.parametrize("hooked", [False, True])
def check_a_step_under_a_route_on_a_compiled_model_is_the_eager_one(hooked: bool, dtype: torch.dtype) -> None:
    """The graph breaks at every adapter, which runs as it is: a graph of one module would pass the hook at another's mask by."""
    torch._dynamo.reset()
    (_, eager), (_, policy), batch = (
        hosted("torch", "Qwen3", dtype),
        hosted.__wrapped__("torch", "Qwen3", dtype),
        on_device(make_batch(8)),
    )
    policy.model.compile(backend="aot_eager" if DEVICE == "cpu" else "inductor")
    steps = []
    for each in (policy, eager):
        point = each.adapters.sites["blocks.0.mlp.up"].hook_mask
        with point.register_forward_hook(lambda _module, _args, keep: torch.ones_like(keep)) if hooked else nullcontext():
            steps.append(run(each, mask_route(each, CHANNEL), batch))
    assert_same_step(*steps, dtype)
    assert torch._dynamo.utils.counters["graph_break"]
    without = run(eager, mask_route(eager, CHANNEL), batch)
    assert (error(steps[0].kept["blocks.0.mlp.up.B"], without.kept["blocks.0.mlp.up.B"]) > 0.3) == hooked
