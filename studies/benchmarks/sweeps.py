"""Cost of a patch sweep relative to TransformerLens's: time per cell over whole grids; all cells compared.

    python -m studies.benchmarks sweeps [--quick] [--long | --every] [--only TEXT] [--device cpu] [--rounds 15] [--out FILE.json]

The models are random Qwen3s; with ``--long`` on longer prompts, and SmolLM2-135M. Clean and corrupt prompts differ in every token,
so that each cell needs a run.
TransformerLens runs ``transformer_lens.patching.get_act_patch_resid_pre`` on a bridge around the model, or with ``--every``
``get_act_patch_block_every``, which patches ``attn_out`` and ``mlp_out`` too: a whole forward per cell. A sweep runs

    resumed       cells over the corrupt run's keys and values, starting at their own block, many in a forward
    on a bridge   the same, on the bridge itself (whose wrapped attention then runs in one piece)
    whole         whole forwards of many cells in a batch, through the host's hooks

Within the timed region a sweep runs both prompts first, and TransformerLens, which needs no more, the clean one. Nothing keeps
gradients.
"""

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from mi_route2.hosts import open_host
from mi_route2.models import smollm2
from mi_route2.patching import Grid, sweep
from studies.benchmarks.measurement.contenders import random_qwen3
from studies.benchmarks.measurement.flops import Size
from studies.benchmarks.measurement.paired import Ratio, device_name, ratio, report, take_turns, timers
from studies.benchmarks.options import SweepsOptions
from studies.common.tables import markdown_table

LENS, RESUMED, BRIDGED, WHOLE = "TransformerLens", "resumed", "on a bridge", "whole"
SIDES = (RESUMED, BRIDGED, WHOLE)
POINTS = ("resid_pre", "attn_out", "mlp_out")
"""The points of TransformerLens's ``get_act_patch_block_every``, in its order."""
ANSWER, FOIL = 5, 6
SPREAD = 0.05
"""Standard deviation of the random weights: large enough that a patch moves the logits by more than their rounding error."""


@dataclass(frozen=True)
class Setting:
    """A decoder and the length of its prompts; SmolLM2 if ``pretrained``. ``most`` is the maximum number of rounds.

    The grid is of ``resid_pre``, or of all ``POINTS`` if ``every``; then no sweep runs whole forwards.
    """

    name: str
    layers: int
    d: int
    mlp: int
    heads: int = 4
    vocab: int = 1024
    tokens: int = 64
    pretrained: bool = False
    most: int | None = None
    every: bool = False

    @property
    def points(self) -> tuple[str, ...]:
        """The points of the grid."""
        return POINTS if self.every else POINTS[:1]

    @property
    def sides(self) -> tuple[str, ...]:
        """The sides that are compared with TransformerLens."""
        return SIDES[:2] if self.every else SIDES

    @property
    def cells(self) -> int:
        """Number of cells of the grid."""
        return len(self.points) * self.layers * self.tokens


SETTINGS = (Setting("6 layers, d 256", 6, 256, 768), Setting("12 layers, d 64", 12, 64, 192))
LONG = (
    *(Setting(f"6 layers, d 256, {n} tokens", 6, 256, 768, tokens=n, most=m) for n, m in ((128, 3), (256, 1))),
    *(Setting(f"12 layers, d 64, {n} tokens", 12, 64, 192, tokens=n, most=m) for n, m in ((128, 3), (256, 1))),
    Setting("SmolLM2-135M, 16 tokens", 30, 576, 1536, heads=9, vocab=49152, tokens=16, pretrained=True, most=3),
)
EVERY = (
    *(Setting(f"6 layers, d 256, {n} tokens", 6, 256, 768, tokens=n, most=m, every=True) for n, m in ((64, 3), (128, 1), (256, 1))),
    Setting("12 layers, d 64, 64 tokens", 12, 64, 192, most=3, every=True),
)
QUICK = tuple(
    Setting(name, 2, 32, 48, heads=2, vocab=64, tokens=6, every=every)
    for name, every in (("tiny", False), ("tiny, three points", True))
)


@dataclass(frozen=True)
class SweepResult:
    """Speed of a side relative to TransformerLens, with both medians in milliseconds per cell.

    ``bound`` is that ratio in FLOPs: a whole forward per cell, over the work that no cell can share; ``run`` is the same over the
    work that was run (0 for whole forwards). ``difference`` is the largest difference between the two grids, and ``effect`` the
    largest effect of a patch.
    """

    setting: str
    side: str
    cells: int
    times: Ratio
    lens_ms: float
    own_ms: float
    bound: float
    run: float
    difference: float
    effect: float


class SweepBench:
    """The prompts of one setting, TransformerLens's side, and the sweep's. Both have the same weights."""

    def __init__(self, setting: Setting, seed: int, device: str = "cpu"):
        generator = torch.Generator().manual_seed(seed)
        clean = torch.randint(3, setting.vocab, (setting.tokens,), generator=generator)
        # Another token at every position: shifted by this much, modulo the vocabulary.
        shift = torch.randint(1, setting.vocab - 3, (setting.tokens,), generator=generator)
        self.clean, self.corrupt = (tokens.to(device) for tokens in (clean, 3 + (clean - 3 + shift) % (setting.vocab - 3)))
        self.points = setting.points
        self.host, self.bridged = (self._open(name, setting, seed, device) for name in ("torch", "transformer_lens"))

    @staticmethod
    def _open(host: str, setting: Setting, seed: int, device: str) -> Any:
        if setting.pretrained:
            return smollm2(host, device=device)
        size = Size(setting.layers, setting.d, setting.heads, setting.mlp, setting.vocab, tokens=setting.tokens)
        return open_host(host, random_qwen3(size, seed, initializer_range=SPREAD, pad_token_id=None).eval().to(device))

    def lens(self) -> Float[np.ndarray, "targets positions"]:
        """Return TransformerLens's own grid."""
        from transformer_lens import patching

        def difference(logits: torch.Tensor) -> torch.Tensor:
            return logits[0, -1, ANSWER] - logits[0, -1, FOIL]

        bridge = self.bridged.bridge
        with torch.no_grad(), contextlib.redirect_stderr(io.StringIO()):  # it draws a progress bar even without a terminal
            _, cache = bridge.run_with_cache(self.clean[None])
            run = patching.get_act_patch_block_every if self.points == POINTS else patching.get_act_patch_resid_pre
            grid: Any = run(bridge, self.corrupt[None], cache, difference)
        return grid.double().flatten(0, -2).cpu().numpy()

    def grid(self, side: str) -> Grid:
        """Return the sweep's grid."""
        return sweep(
            self.bridged if side == BRIDGED else self.host,
            clean=self.clean,
            corrupt=self.corrupt,
            sites=self.points,
            answer=ANSWER,
            foil=FOIL,
            how="whole" if side == WHOLE else "resumed",
            progress=False,
        )


def compare(setting: Setting, rounds: int, seed: int, device: str = "cpu") -> tuple[list[SweepResult], dict[str, list[float]]]:
    """Return one row per side, and the seconds of each."""
    rounds = rounds if setting.most is None else min(rounds, setting.most)
    bench = SweepBench(setting, seed, device)
    expected, grids = bench.lens(), {side: bench.grid(side) for side in setting.sides}
    turns: dict[str, Callable[[], object]] = {LENS: bench.lens, **{side: partial(bench.grid, side) for side in setting.sides}}
    measured = take_turns(timers(turns, torch.device(device)), rounds, np.random.default_rng(seed))
    rng, lens, flops = np.random.default_rng(seed), measured[LENS], grids[RESUMED].flops

    def result(side: str) -> SweepResult:
        seconds, grid = measured[side], grids[side]
        return SweepResult(
            setting=setting.name,
            side=side,
            cells=setting.cells,
            times=ratio(lens, seconds, rng),
            lens_ms=1000 * median(lens) / setting.cells,
            own_ms=1000 * median(seconds) / setting.cells,
            bound=flops["whole"] / flops["needed"],
            run=0.0 if side == WHOLE else flops["whole"] / flops["run"],
            difference=float(np.abs(grid.values - expected).max()),
            effect=float(np.abs(grid.effect).max()),
        )

    return [result(side) for side in setting.sides], measured


def table(results: list[SweepResult]) -> str:
    """Return a Markdown table, one line per side."""
    header = ("model", "sweep", "cells", "TransformerLens", "sweep's", "times as fast", "FLOPs: bound, run", "largest difference")
    rows = []
    for r in results:
        flops = f"{r.bound:.1f}, {r.run:.1f}" if r.run else ""
        milliseconds = (f"{r.lens_ms:.2f} ms", f"{r.own_ms:.2f} ms")
        rows.append((r.setting, r.side, r.cells, *milliseconds, f"{r.times:.1f}", flops, f"{r.difference:.1e}"))
    return markdown_table(header, rows, left=2)


def run(options: SweepsOptions) -> None:
    """Measure, print the table, and write ``options.out``."""
    load = QUICK if options.quick else LONG if options.long else EVERY if options.every else SETTINGS
    settings = [setting for setting in load if options.only in setting.name]
    if not settings:
        raise ValueError(f"no model here has {options.only!r} in its name: choose of {', '.join(repr(each.name) for each in load)}")
    results, sides = [], {}
    for setting in settings:
        rows, seconds = compare(setting, options.turns, options.seed, options.device)
        results += rows
        sides[setting.name] = {side: {"seconds": of_side} for side, of_side in seconds.items()}
    worst = max(row.difference / row.effect for row in results)
    tables = f"{table(results)}\nlargest difference of a cell, relative to the largest effect: {worst:.1e}\n"
    device = device_name(torch.device(options.device))
    named = {setting.name: setting for setting in settings}
    document = {"device": device, "settings": named, "rows": results, "sides": sides}
    report(options, f"at most {options.turns} rounds, 1 thread, {device}; prompts that differ in every token", tables, document)
