"""Both adapters in one matmul (``Adapters.stack``): the outputs, gradients and hooks of each on its own.

Every legal combination of a mask is in ``routing/test_mask_route.py``, against the written-out policy.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import pytest
import torch
from families import make_batch, make_policy, make_tokens
from mask_oracle import assert_same, erase_route, mask_route, run
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from mi_route2.adapters import AdapterSpec, linear
from mi_route2.architectures import ADAPTER_POINTS
from mi_route2.hosts import HOSTS, open_host
from mi_route2.rollouts import Policy, packed_forward
from mi_route2.routing import MaskRoute, MaskSpec, OpenRoute, OpenSpec, Route
from mi_route2.sites import Site

LORA, SVD = (AdapterSpec(kept, rank=4, quarantine_rank=3) for kept in ("lora", "svd"))  # pyright: ignore[reportArgumentType]
EXACT = {"rtol": 0.0, "atol": 1e-12}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The stacked matmuls so far: without it, a test would pass if nothing was ever stacked."""
    noted: list[str] = []

    def noting(*given: object, **named: object) -> Tensor:
        noted.append(f"{named['site']}.{named['name']}")
        return real(*given, **named)  # pyright: ignore[reportArgumentType]

    real = linear.apply_factors
    monkeypatch.setattr(linear, "apply_factors", noting)
    return noted


def pair(name: str = "Qwen3", spec: AdapterSpec = LORA, **options: object) -> tuple[Policy, Policy]:
    """Two equal policies: separate, and stacked."""
    (_, separate), (_, stacked) = (make_policy(name, spec, **options) for _ in range(2))  # pyright: ignore[reportArgumentType]
    stacked.adapters.stack = True
    return separate, stacked


ROUTES: dict[str, Callable[[Policy], Route]] = {
    "open": lambda policy: OpenRoute(OpenSpec()),
    "erase": erase_route,
    "penalty": lambda policy: mask_route(policy, MaskSpec(score="grad"), l1=0.5),
    "live gradients": lambda policy: mask_route(policy, MaskSpec(score="grad", tau=0.02, unit="rollout", through="detach")),
    "own flags, detached": lambda policy: MaskRoute.from_flags(torch.arange(4) % 2 == 0, through="detach"),
}


def replayed(policy: Policy, reentrant: bool) -> Policy:
    model: nn.Module = policy.model
    model.get_input_embeddings().weight.requires_grad_(True)  # pyright: ignore  # a reentrant checkpoint needs an input with a gradient
    for block in model.model.layers:  # pyright: ignore
        block.forward = lambda *a, f=block.forward, **k: checkpoint(f, *a, use_reentrant=reentrant, **k)
    return policy


LAYOUTS: dict[str, Callable[[Policy], Policy]] = {
    "padded": lambda policy: policy,
    "packed": lambda policy: replace(policy, forward=packed_forward(policy.model)),
    "checkpointed": partial(replayed, reentrant=False),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("spec", [LORA, SVD], ids=["lora", "svd"])
def test_a_step_is_that_of_separate_adapters(calls: list[str], spec: AdapterSpec, route: str, layout: str) -> None:
    separate, stacked = pair(spec=spec)
    expected = run(separate, ROUTES[route](separate), make_batch())
    assert not calls
    stacked = LAYOUTS[layout](stacked)
    own = run(stacked, ROUTES[route](stacked), make_batch())
    assert_same(own.kept, expected.kept)
    assert_same(own.quarantine, expected.quarantine)
    if route != "penalty":
        assert len(set(calls)) == 2 * len(stacked.adapters.sites)
    elif layout == "padded":  # a packed forward is tried out once, without a tape
        assert not calls


class SumsOverTokens(TorchDispatchMode):
    """Count of matrix products that sum over all ``tokens``: those by which a factor gets its gradient."""

    def __init__(self, tokens: int):
        super().__init__()
        self.tokens, self.count = tokens, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.mm.default and args[0].shape[1] == self.tokens
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("through", ["filter", "detach"])
def test_a_factor_of_both_adapters_has_its_gradient_from_one_product(through: Literal["filter", "detach"]) -> None:
    """Of flags that are known in the backward, one pass over its output's gradient serves both, and not one each."""
    batch = make_batch()
    counts = []
    for policy in pair():
        route = MaskRoute.from_flags(torch.arange(4) % 2 == 0, through=through)
        with SumsOverTokens(batch.rollouts.tokens.numel()) as sums:
            run(policy, route, batch)
        counts.append(sums.count / len(policy.adapters.sites))
    assert counts == [4, 2]


@pytest.mark.parametrize("spec", [LORA, SVD], ids=["lora", "svd"])
def test_ordinary_autograd_transforms_and_reading_are_those_of_separate_adapters(calls: list[str], spec: AdapterSpec) -> None:
    found: list[dict[str, Tensor]] = []
    for policy in pair("MicroGPT", spec):
        tokens, parameters = make_tokens()[0], dict(policy.model.named_parameters())

        def loss(trained: dict[str, Tensor], row: Tensor, model: nn.Module = policy.model) -> Tensor:
            out = torch.func.functional_call(model, trained, (row[None],))
            return out.log_softmax(-1)[..., 3].sum()

        trained = {name: p.detach() for name, p in parameters.items() if p.requires_grad}
        with policy.adapters.unrouted():
            policy.model(tokens).log_softmax(-1)[..., 3].sum().backward()
        plain = {f"plain {name}": p.grad for name, p in parameters.items() if p.grad is not None}
        each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(trained, tokens)
        some = [p for p in parameters.values() if p.requires_grad]
        read = torch.autograd.grad(policy.model(tokens).log_softmax(-1)[..., 3].sum(), some)
        found.append({**plain, **{f"each {name}": g for name, g in each.items()}, **{f"read {i}": g for i, g in enumerate(read)}})
        assert bool(calls) is (policy.adapters.stack and spec is LORA)  # an SVD needs a tape
    assert_same(*found)


def test_a_backward_that_no_route_decides_is_refused() -> None:
    _, stacked = pair("MicroGPT")
    logits = stacked.model(make_tokens()[0])
    with pytest.raises(RuntimeError, match="no tape recorded"):
        logits.sum().backward()


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("spec", [LORA, SVD], ids=["lora", "svd"])
def test_every_point_of_an_adapter_fires_on_every_host(calls: list[str], spec: AdapterSpec, host: str) -> None:
    opened, policy = make_policy("GPT2", spec, host=partial(open_host, host))
    sites = [Site.parse(f"{name}.{point}") for name in policy.adapters.sites for point in ADAPTER_POINTS]
    tokens = make_tokens()[0]
    with policy.adapters.unrouted():
        plain, expected = opened.logits(tokens), opened.run_with_cache(tokens, None, sites)[1]
        policy.adapters.stack = True
        own = opened.run_with_cache(tokens, None, sites)[1]
        assert not calls
        assert all(torch.allclose(own[site], expected[site], **EXACT) for site in sites)
        assert set(opened.sites()) >= set(sites)
        assert torch.allclose(opened.logits(tokens), plain, **EXACT)
    # nnsight reads at a module without a hook that could be seen; an SVD needs a tape
    assert bool(calls) == (host != "nnsight" and spec is LORA)


def test_a_hook_at_an_adapters_own_module_fires(calls: list[str]) -> None:
    _, stacked = pair("MicroGPT")
    site, branch = next(iter(stacked.adapters.sites.items()))
    seen: list[Tensor] = []
    assert branch.quarantine is not None
    with branch.quarantine.register_forward_hook(lambda module, given, out: seen.append(out)):
        stacked.model(make_tokens()[0])
    assert len(seen) == 1
    assert f"{site}.A" not in calls
    assert len(set(calls)) == 2 * (len(stacked.adapters.sites) - 1)


WATCHES: dict[str, Callable[[nn.Module, Callable[..., None]], object]] = {
    "nobody": lambda base, keep: None,
    "a hook": lambda base, keep: base.register_forward_hook(keep),
    "a hook of every module": lambda base, keep: register_module_forward_hook(keep),
    "its own forward": lambda base, keep: base.__dict__.update(forward=partial(_kept, base, keep)),
}


def _kept(base: nn.Module, keep: Callable[..., None], x: Tensor) -> Tensor:
    out = type(base).forward(base, x)
    keep(base, (x,), out)
    return out


@pytest.mark.parametrize("watch", WATCHES)
def test_adapters_are_added_in_the_memory_of_a_base_that_nobody_watches(watch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, site = pair()[1], "blocks.0.mlp.up"  # without a bias, whose sum torch returns as a view
    branch = policy.adapters.sites[site]
    base, added, held = branch._slot[0].module, set[str](), list[tuple[Tensor, Tensor]]()

    def noting(*given: object, **named: object) -> Tensor:
        if named.get("overwrite"):
            added.add(str(named["site"]))
        return real(*given, **named)  # pyright: ignore[reportArgumentType]

    def keep(module: nn.Module, given: tuple[Tensor], out: Tensor) -> None:
        if module is base:
            held.append((out, functional.linear(given[0], branch.weight)))

    real = linear.apply_factors
    monkeypatch.setattr(linear, "apply_factors", noting)
    handle: Any = WATCHES[watch](base, keep)
    try:
        run(policy, OpenRoute(OpenSpec()), make_batch())
    finally:
        if hasattr(handle, "remove"):
            handle.remove()
    assert (site in added) is (watch == "nobody")
    assert bool(added) is (watch != "a hook of every module")
    assert bool(held) is (watch != "nobody")
    assert all(torch.allclose(out, expected, **EXACT) for out, expected in held)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_base_and_each_adapter_alone_are_the_same_bits(calls: list[str], dtype: torch.dtype) -> None:
    tokens = make_tokens()[0]
    for scale in (0.0, 0.1):
        separate, stacked = pair("MicroGPT", scale=scale, dtype=dtype)
        for mode in ("deployed", "reference", *(("full",) if scale == 0 else ())):
            calls.clear()
            with getattr(separate.adapters, mode)(), getattr(stacked.adapters, mode)():
                assert torch.equal(stacked.model(tokens), separate.model(tokens))
            assert bool(calls) is (mode == "full")
        with torch.no_grad():
            calls.clear()
            assert torch.equal(stacked.model(tokens), separate.model(tokens))
            assert not calls


@pytest.mark.parametrize("spec", [AdapterSpec(fold=True), AdapterSpec("lora", rank=4, quarantine="shared")], ids=["fold", "shared"])
def test_other_adapters_cannot_be_stacked(spec: AdapterSpec) -> None:
    _, policy = make_policy("MicroGPT", spec)
    with pytest.raises(ValueError, match=r"cannot be stacked: attach a LoRA quarantine and no folded SVD"):
        policy.adapters.stack = True
    assert not policy.adapters.stack
    assert "stacked" not in repr(policy.adapters)
    policy.adapters.stack = False
    assert "(stacked)" in repr(pair("MicroGPT")[1].adapters)
