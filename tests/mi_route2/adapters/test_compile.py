"""``torch.compile`` takes the routed forward without a graph break, and what it makes is the eager forward.

That is a forward without gradients, or under ``unrouted()``. Of any other, the graph breaks at every adapter.

The checks of shapes at run time, under which this suite runs, cannot be traced. So the theorems below are collected under their
own name in a child without them; to run them by hand:

    JAXTYPING_DISABLE=1 pytest -o addopts=--import-mode=importlib -o python_functions='check_*' \\
        tests/mi_route2/adapters/test_compile.py
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import SPECS, VOCAB, make_batch, make_policy, make_tokens, move
from mask_oracle import mask_route, run
from torch import Tensor, nn

from mi_route2.adapters import Adapters, attach
from mi_route2.rollouts import Policy, call_with_mask
from mi_route2.routing import MaskSpec

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[3]
ROUTES = {
    "pooled gradient": MaskSpec(reinforced_only=False),
    "activation per token, detached": MaskSpec("act", "token", through="detach", reinforced_only=False),
}


def test_every_check_below_passes_in_a_child() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "--show-capture=no", "-p", "no:cacheprovider"]
    changed = ["-o", "addopts=--import-mode=importlib", "-o", "python_functions=check_*"]
    environment = os.environ | {"JAXTYPING_DISABLE": "1"}
    done = subprocess.run([*command, *changed, __file__], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    """No graph of one check is left to the next; the counts of graphs start at 0."""
    yield
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()
        dynamo.utils.counters.clear()


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


Result = tuple[Tensor, dict[str, Tensor]]


def result(adapters: Adapters, forward: Callable[[], Any]) -> Result:
    """The output of a forward, and every adapter gradient of a loss of it (0 where none arrives)."""
    parameters = adapters.kept_parameters() | adapters.quarantine_parameters()
    with nullcontext() if adapters._board.merged else adapters.unrouted():
        out = forward()
    out = out if isinstance(out, Tensor) else out.logits
    if not out.requires_grad:
        return out, {}
    weights = torch.cos(torch.arange(out.numel(), dtype=out.dtype)).view_as(out)
    grads = torch.autograd.grad((weights * out).sum(), list(parameters.values()), allow_unused=True)
    return out.detach(), {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(parameters.items(), grads)}


def assert_same(own: Result, expected: Result, tolerance: float = 1e-13) -> None:
    assert float((own[0] - expected[0]).abs().max()) <= tolerance * float(expected[0].abs().max())
    assert own[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert float((own[1][name] - gradient).abs().max()) <= tolerance * float(gradient.abs().max()), name


CONTEXTS = ("full", "deployed", "reference", "merged")


def assert_contexts_agree(
    adapters: Adapters,
    eager: Callable[[], Any],
    compiled: Callable[[], Any],
    names: Sequence[str] = CONTEXTS,
    tolerance: float = 1e-13,
) -> None:
    """In turn, and back again: a switch is seen by the compiled forward, and what was compiled for a context is used again."""
    contexts = {name: getattr(adapters, name) for name in names}
    expected = {name: result_in(context(), adapters, eager) for name, context in contexts.items()}
    for name, context in contexts.items():
        assert_same(result_in(context(), adapters, compiled), expected[name], tolerance)
    if adapters.has_quarantine and "deployed" in names:
        assert not torch.equal(expected["full"][0], expected["deployed"][0])
    before = graphs()
    for name in reversed(names):
        assert_same(result_in(contexts[name](), adapters, compiled), expected[name], tolerance)
    assert graphs() == before


def result_in(context: Any, adapters: Adapters, forward: Callable[[], Any]) -> Result:
    with context:
        return result(adapters, forward)


def linears(kind: str, count: int = 2) -> tuple[nn.Module, Adapters, Tensor]:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 12))[: 2 * count].double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / 4)
    adapters = move(attach(model, "*", spec=SPECS[kind], generator=generator, expect=count))
    return model, adapters, torch.randn(3, 5, 12, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("kind", ["svd", "lora-shared"])
def check_every_kind_of_adapter_in_every_context(kind: str) -> None:
    model, adapters, x = linears(kind)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_contexts_agree(adapters, lambda: model(x), lambda: compiled(x))


def one_block(name: str) -> tuple[Any, Policy]:
    """A model of the family without its other blocks: tracing takes seconds a block."""
    host, policy = make_policy(name, "lora", "blocks.0.*")
    blocks = host.model.get_submodule(host.architecture.blocks)
    host.model.set_submodule(host.architecture.blocks, blocks[:1])
    return host, policy


def check_a_whole_model_in_context_after_context() -> None:
    """Linears fused in one module; those of their own are in ``tests/gpu/test_hosts_cuda.py``, with a backend that compiles.

    Positions under padding on the left reach it: a wrapper has another class than its model, whose architecture asks for them.
    """
    host, policy = one_block("GPT2")
    tokens, attention = make_tokens(side="left")
    told = host.keywords(attention)
    host.model.config.use_cache = told.pop("use_cache")
    compiled = torch.compile(host.model, fullgraph=True, backend="aot_eager")
    assert_contexts_agree(policy.adapters, lambda: host.model(tokens, **told), lambda: compiled(tokens, **told), CONTEXTS[:3])
    before = graphs()
    with policy.adapters.unrouted():
        own, expected = (call_with_mask(model, tokens, attention).detach() for model in (compiled, host.model))
    assert_same((own, {}), (expected, {}))
    assert graphs() == before


def check_an_update_is_seen_without_another_graph() -> None:
    """As are parameters that are loaded: both write into the tensors that the graph was given."""
    model, adapters, x = linears("lora")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    before, graph = result(adapters, lambda: compiled(x)), graphs()
    move(adapters, seed=5)
    after = result(adapters, lambda: compiled(x))
    assert_same(after, result(adapters, lambda: model(x)))
    assert float((after[0] - before[0]).abs().max()) > 1e-3
    assert graphs() == graph


class Tiny(nn.Module):
    """All that a route needs: tokens in, logits out, a Linear between them."""

    def __init__(self, generator: torch.Generator):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, VOCAB)
        for p in self.double().parameters():
            p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64) / 2

    def forward(self, tokens: Tensor) -> Tensor:
        return self.down(torch.nn.functional.gelu(self.up(self.embed(tokens))))


def eager_and_compiled(how: str = "around", backend: str = "eager", **given: Any) -> tuple[Policy, Policy]:
    """Two policies of equal models and adapters, the second one compiled: around the model, or in place.

    Where the graph breaks is up to what traces it, before the backend (which is half of the time) is given anything.
    """
    policies = []
    for _ in range(2):
        generator = torch.Generator().manual_seed(1)
        model = Tiny(generator)
        policies.append(Policy(model, move(attach(model, "up", spec=SPECS["lora"], generator=generator))))
    eager, compiled = policies
    if how == "around":
        return eager, replace(compiled, model=torch.compile(compiled.model, backend=backend, **given))
    compiled.model.compile(backend=backend, **given)
    return eager, compiled


@pytest.mark.parametrize(("route", "how"), zip(ROUTES, ("in place", "around"), strict=True))
def check_a_step_under_a_route_breaks_the_graph_and_learns_the_same(route: str, how: str) -> None:
    """A gate is Python with state that the backward calls, and no graph holds that: torch runs the adapters as they are."""
    policy, compiled = eager_and_compiled(how, "aot_eager")
    batch = make_batch(6)
    with torch.no_grad():
        plain = compiled.logprobs(batch.rollouts)
    own, expected = (run(p, mask_route(p, ROUTES[route]), batch) for p in (compiled, policy))
    assert torch.equal(own.decision.flags, expected.decision.flags)
    assert 0 < int(own.decision.flags.sum()) < own.decision.flags.numel()
    for learnt, right in ((own.kept, expected.kept), (own.quarantine, expected.quarantine)):
        assert learnt.keys() == right.keys()
        assert all(torch.equal(learnt[name], right[name]) for name in right)
        assert any(g.any() for g in right.values())
    assert torch._dynamo.utils.counters["graph_break"]
    with torch.no_grad():
        assert torch.equal(compiled.logprobs(batch.rollouts), plain)


def check_a_compiled_forward_that_no_tape_recorded_is_refused_and_learns_nothing() -> None:
    """As an eager one; reading gradients is allowed."""
    policy, compiled = eager_and_compiled()
    parameters = list(compiled.adapters.kept_parameters().values())
    tokens, _ = make_tokens()
    read, expected = (
        torch.autograd.grad(p.model(tokens).square().sum(), list(p.adapters.kept_parameters().values())) for p in (compiled, policy)
    )
    assert all(torch.equal(g, right) for g, right in zip(read, expected))
    with pytest.raises(RuntimeError, match="from a forward that no tape recorded"):
        compiled.model(tokens).square().sum().backward()
    assert all(p.grad is None for p in parameters)
