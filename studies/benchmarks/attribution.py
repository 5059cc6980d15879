"""Cost of attribution: estimates of all heads' outputs and MLPs, and of all edges, against exact patches of the nodes.

Clean and corrupt prompts differ in every token, so each cell of a sweep needs a run. Attribution is compared with the sweep of the
same outputs of heads and MLPs; edges with that of all nodes, which adds queries, keys, values and inputs of MLPs. Exact edges would
take two runs each.
"""

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from mi_route2.hosts import open_host
from mi_route2.models import smollm2
from mi_route2.patching import attribute, edges, sweep
from studies.benchmarks.paired import Benchmark, BenchmarkOptions, Side, random_qwen3
from studies.benchmarks.sweeps import ANSWER, FOIL, discard

SENDERS, NODES = ("z", "mlp_out"), ("q", "k", "v", "z", "mlp_in", "mlp_out")
OUTPUTS, ALL, ATP, STAR, EDGES = "sweep of outputs", "sweep of all nodes", "attribution", "AtP*", "edges"


def build(options: BenchmarkOptions, stack: ExitStack) -> Benchmark:
    """Return sweeps over nodes, and the estimates of the same nodes or of the edges between them."""
    tokens = 6 if options.quick else 16 if options.smollm2 else 64
    layers, d = (2, 32) if options.quick else (12, 256)
    shape = {"layers": layers, "d": d, "heads": 4, "mlp": 3 * d, "vocab": 1024, "context": tokens}
    host = smollm2() if options.smollm2 else open_host("torch", random_qwen3(options.seed, **shape, initializer_range=0.05).eval())
    generator = torch.Generator().manual_seed(options.seed)
    clean = torch.randint(3, 1024, (tokens,), generator=generator)
    corrupt = 3 + (clean - 3 + torch.randint(1, 1021, (tokens,), generator=generator)) % 1021
    asked: dict[str, Any] = {"clean": clean, "corrupt": corrupt, "answer": ANSWER, "foil": FOIL}

    def nodes(points: tuple[str, ...]) -> Any:
        return sweep(host, sites=points, heads=True, progress=False, **asked)

    estimate = partial(attribute, host, sites=SENDERS, heads=True, **asked)
    sides: dict[str, Side] = {
        OUTPUTS: lambda: discard(nodes(SENDERS)),
        ALL: lambda: discard(nodes(NODES)),
        ATP: lambda: discard(estimate()),
        STAR: lambda: discard(estimate(method="atp*")),
        EDGES: lambda: discard(edges(host, **asked)),
    }
    graph, exact = edges(host, **asked), nodes(SENDERS)
    agreement = estimate().rank_correlation(exact)
    head = f"{exact.values.size} cells of outputs and {len(graph)} edges of {len(host.layers())} layers, {tokens} tokens"
    notes = [f"rank correlation of attribution with the sweep of outputs: {agreement:.2f}"]
    return Benchmark(head, sides, [(OUTPUTS, ATP), (OUTPUTS, STAR), (ALL, EDGES)], notes=notes)
