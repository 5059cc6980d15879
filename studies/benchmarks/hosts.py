"""Cost of hooks: a forward that reads the stream after every block, against one without hooks and against TransformerLens's own.

Every side has the same weights. TransformerLens's bridge makes attention eager, so its peer is eager attention too.
"""

import copy
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mi_route2.hosts import Host, open_host
from mi_route2.models import smollm2
from mi_route2.sites import Site
from studies.benchmarks.paired import Benchmark, BenchmarkOptions, random_qwen3, timed_steps

PLAIN, EAGER = "plain forward", "plain forward, eager attention"
TORCH, BRIDGE, NNSIGHT, LENS = "TorchHost", "BridgeHost", "NNsightHost", "TransformerLens run_with_hooks"


def build(options: BenchmarkOptions, stack: ExitStack) -> Benchmark:
    """Return a forward of each host with hooks, two without, and one of TransformerLens."""
    if options.smollm2:
        model: Any = smollm2().model
    else:
        layers, d = (2, 32) if options.quick else (6, 256)
        model = random_qwen3(options.seed, layers=layers, d=d, heads=4, mlp=3 * d, vocab=1024, context=64)
    model = model.eval().requires_grad_(False)
    b, s, calls = (2, 8, 1) if options.quick else (4, 64, 4)
    tokens = torch.randint(1024, (b, s), generator=torch.Generator().manual_seed(options.seed))
    attention = torch.ones_like(tokens, dtype=torch.bool)
    sites = [Site(layer, "resid_post") for layer in range(model.config.num_hidden_layers)]

    def own(name: str) -> Any:
        made = copy.deepcopy(model)
        made.set_attn_implementation("eager" if name == EAGER else "sdpa")
        return made

    hosts: dict[str, Host] = {
        TORCH: open_host("torch", own(TORCH)),
        BRIDGE: open_host("transformer_lens", own(BRIDGE)),
        NNSIGHT: open_host("nnsight", own(NNSIGHT)),
    }

    @torch.no_grad()
    def hooked(host: Host) -> list[Tensor]:
        values: list[Tensor] = []
        with host.hooks({site: lambda value: values.append(value.detach()) for site in sites}):
            host.logits(tokens, attention)
        assert len(values) == len(sites)
        return values

    @torch.no_grad()
    def unhooked(plain: Any) -> None:
        plain(tokens, use_cache=False)

    @torch.no_grad()
    def lens() -> None:
        values: list[Tensor] = []
        bridge: Any = hosts[BRIDGE]
        names = [f"blocks.{site.layer}.hook_resid_post" for site in sites]
        bridge.bridge.run_with_hooks(
            tokens, fwd_hooks=[(name, lambda value, hook: values.append(value.detach())) for name in names]
        )
        assert len(values) == len(sites)

    steps: dict[str, Callable[[], object]] = {name: partial(unhooked, own(name)) for name in (PLAIN, EAGER)}
    steps |= {name: partial(hooked, host) for name, host in hosts.items()}
    steps[LENS] = lens
    sides = {name: timed_steps([step] * calls) for name, step in steps.items()}
    pairs = [(TORCH, PLAIN), (NNSIGHT, PLAIN), (BRIDGE, EAGER), (BRIDGE, LENS), (EAGER, PLAIN)]
    return Benchmark(f"{len(sites)} layers, d = {model.config.hidden_size}, {calls} forwards of {b} x {s} tokens", sides, pairs)
