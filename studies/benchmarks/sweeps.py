"""Cost of a patch sweep: a grid of ``resid_pre`` over layers and positions, against TransformerLens's own loop.

Clean and corrupt prompts differ in every token, so each cell needs a run. TransformerLens runs ``get_act_patch_resid_pre``, a whole
forward per cell. A sweep resumes the corrupt run at the cell's block, many cells in a forward; ``whole`` runs whole forwards in
batches.
"""

import contextlib
import io
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from mi_route2.hosts import open_host
from mi_route2.models import smollm2
from mi_route2.patching import Grid, sweep
from studies.benchmarks.paired import Benchmark, BenchmarkOptions, Side, random_qwen3

LENS, RESUMED, WHOLE = "TransformerLens", "sweep", "sweep, whole forwards"
ANSWER, FOIL = 5, 6


def build(options: BenchmarkOptions, stack: ExitStack) -> Benchmark:
    """Return a grid of TransformerLens, and the same grid of a sweep in both forms; the grids are compared first."""
    tokens = 6 if options.quick else 16 if options.smollm2 else 64
    layers, d = (2, 32) if options.quick else (12, 256)

    def opened(host: str) -> Any:
        if options.smollm2:
            return smollm2(host)
        shape = {"layers": layers, "d": d, "heads": 4, "mlp": 3 * d, "vocab": 1024, "context": tokens}
        # large enough weights that a patch moves the logits by more than their rounding error
        return open_host(host, random_qwen3(options.seed, **shape, initializer_range=0.05).eval())

    host, bridged = opened("torch"), opened("transformer_lens")
    vocab, generator = 1024, torch.Generator().manual_seed(options.seed)
    clean = torch.randint(3, vocab, (tokens,), generator=generator)
    shift = torch.randint(1, vocab - 3, (tokens,), generator=generator)
    corrupt = 3 + (clean - 3 + shift) % (vocab - 3)

    @torch.no_grad()
    def lens() -> np.ndarray:
        from transformer_lens import patching

        with contextlib.redirect_stderr(io.StringIO()):  # it draws a progress bar even without a terminal
            _, cache = bridged.bridge.run_with_cache(clean[None])
            metric = lambda logits: logits[0, -1, ANSWER] - logits[0, -1, FOIL]  # noqa: E731
            grid: Any = patching.get_act_patch_resid_pre(bridged.bridge, corrupt[None], cache, metric)
        return grid.double().numpy()

    def own(how: Any) -> Grid:
        return sweep(host, clean=clean, corrupt=corrupt, sites=["resid_pre"], answer=ANSWER, foil=FOIL, how=how, progress=False)

    sides: dict[str, Side] = {
        LENS: lambda: discard(lens()),
        RESUMED: lambda: discard(own("resumed")),
        WHOLE: lambda: discard(own("whole")),
    }
    grid = own("resumed")
    difference = float(np.abs(grid.values - lens()).max() / np.abs(grid.effect).max())
    head = f"{grid.values.size} cells of {grid.values.shape[0]} layers, {tokens} tokens"
    notes = [f"largest difference from TransformerLens's grid, relative to the largest effect: {difference:.1e}"]
    return Benchmark(head, sides, [(RESUMED, LENS), (WHOLE, LENS)], notes=notes)


def discard(_: object) -> None:
    """Drop a result, so that the turn's processor time is the measurement."""
