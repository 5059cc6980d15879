"""Paired measurement: the sides take turns in one process, and a result is the ratio of their medians.

Time is processor time (``time.process_time``): with one thread it equals wall-clock time on a quiet machine and excludes waiting on
a busy one. The order of turns is shuffled every round. The 95% interval is a bootstrap over rounds that keeps a round's turns
together, so that whatever slows a whole round cancels.
"""

import gc
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from time import process_time
from typing import Annotated, Any

import numpy as np
import torch
import tyro
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

from mi_route2.files import write_whole
from studies.common.tables import markdown_table

Side = Callable[[], float | None]
"""One turn of a side. It returns its own seconds, or None if the turn's processor time is the measurement."""


@dataclass(frozen=True)
class BenchmarkOptions:
    """Options of every benchmark."""

    quick: Annotated[bool, tyro.conf.arg(help="a tiny model and three rounds: shows that every side runs, not how fast")] = False
    smollm2: Annotated[bool, tyro.conf.arg(help="measure SmolLM2-135M in place of a random model")] = False
    rounds: Annotated[int | None, tyro.conf.arg(help="turns per side; default: 15, or 3 with --quick")] = None
    seed: Annotated[int, tyro.conf.arg(help="seed of the weights, the tokens and the order of turns")] = 0
    out: Annotated[Path | None, tyro.conf.arg(help="write all measurements to this JSON file")] = None

    @property
    def turns(self) -> int:
        """Number of rounds."""
        return self.rounds or (3 if self.quick else 15)


@dataclass(frozen=True)
class Benchmark:
    """Sides by name, and the pairs of sides to compare.

    Attributes:
        head: Sentence on what is measured.
        sides: The sides.
        pairs: (side, peer) of every ratio.
        memory: Compare peak memory too.
        notes: Further lines below the table.
    """

    head: str
    sides: Mapping[str, Side]
    pairs: Sequence[tuple[str, str]]
    memory: bool = False
    notes: Sequence[str] = field(default=())


@dataclass(frozen=True)
class PairedRatio:
    """Median time of ``side`` relative to ``peer``, with its 95% interval, and the ratio of their peak memory."""

    side: str
    peer: str
    value: float
    low: float
    high: float
    memory: float | None = None


def take_turns(sides: Mapping[str, Side], rounds: int, rng: np.random.Generator) -> dict[str, list[float]]:
    """Return the seconds of every side in every round, after a warm-up turn of each."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    with tqdm(total=(rounds + 1) * len(sides), desc="taking turns", unit="turn", leave=False, disable=None) as bar:
        for turn in sides.values():
            turn()
            bar.update()
        gc.collect()
        gc.freeze()  # a collection of everything that is alive would take half a second of a turn
        for name in (name for _ in range(rounds) for name in rng.permutation(list(sides))):
            began = process_time()
            own = sides[name]()
            seconds[name].append(process_time() - began if own is None else own)
            bar.update()
        gc.unfreeze()
    return seconds


def ratio(over: Sequence[float], under: Sequence[float], rng: np.random.Generator, draws: int = 4000) -> tuple[float, float, float]:
    """Return ``median(over) / median(under)`` and its 95% bootstrap interval; both sequences are aligned by round.

    Raises:
        ValueError: If the sequences differ in length, or are empty.
    """
    if len(over) != len(under) or not over:
        raise ValueError(f"{len(over)} and {len(under)} rounds do not pair: give equally many, at least one")
    drawn = np.array([over, under])[:, rng.integers(len(over), size=(draws, len(over)))]
    top, bottom = np.median(drawn, axis=-1)
    low, high = np.quantile(top / bottom, [0.025, 0.975])
    return float(np.median(over) / np.median(under)), float(low), float(high)


def peak_bytes(step: Callable[[], object]) -> int:
    """Return the maximum memory that ``step`` held at one time, in bytes, above what was allocated before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        step()
    result = record.profiler and record.profiler.kineto_results
    assert result is not None
    events: Any = [event for event in result.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return int(max(np.cumsum(sizes), default=0))


def run(build: Callable[[BenchmarkOptions, ExitStack], Benchmark], options: BenchmarkOptions) -> list[PairedRatio]:
    """Measure a benchmark, print its table, write ``options.out``, and return the ratios.

    Raises:
        ValueError: If there are fewer than three rounds.
    """
    if options.turns < 3:
        raise ValueError(f"--rounds must be at least 3, not {options.turns}")
    with ExitStack() as stack:
        benchmark = build(options, stack)
        seconds = take_turns(benchmark.sides, options.turns, np.random.default_rng(options.seed))
        peaks = {name: peak_bytes(side) for name, side in benchmark.sides.items()} if benchmark.memory else {}
    rng = np.random.default_rng(options.seed)
    results = [
        PairedRatio(side, peer, *ratio(seconds[side], seconds[peer], rng), peaks[side] / max(peaks[peer], 1) if peaks else None)
        for side, peer in benchmark.pairs
    ]
    print(f"{benchmark.head}; {options.turns} rounds, one thread\n")
    print(table(results, seconds), end="")
    print(*benchmark.notes, sep="\n")
    if options.out is not None:
        machine = {"torch": torch.__version__, "architecture": platform.machine(), "head": benchmark.head}
        document = {**machine, "rows": [asdict(row) for row in results], "seconds": seconds}
        write_whole(options.out, (json.dumps(document, indent=1) + "\n").encode())
        print(f"wrote {options.out}")
    return results


def table(results: Sequence[PairedRatio], seconds: Mapping[str, Sequence[float]]) -> str:
    """Return a Markdown table of the ratios; below 1 the side is faster than its peer."""
    ms = {name: f"{1000 * median(values):.1f} ms" for name, values in seconds.items()}
    memory = any(row.memory is not None for row in results)
    header = ("side", "", "peer", "", "time", "95%", *(["memory"] if memory else []))
    rows = [
        (
            *(row.side, ms[row.side], row.peer, ms[row.peer], f"{row.value:.3f}", f"{row.low:.3f} - {row.high:.3f}"),
            *([f"{row.memory:.2f}"] if row.memory is not None else []),
        )
        for row in results
    ]
    return markdown_table(header, rows)


def timed_steps(steps: Sequence[Callable[[], object]]) -> Side:
    """Return a side that runs several calls in a turn, so that a turn is long enough for the clock."""
    return partial(_run_all, steps)


def _run_all(steps: Sequence[Callable[[], object]]) -> None:
    for step in steps:
        step()


def random_qwen3(seed: int, *, layers: int, d: int, heads: int, mlp: int, vocab: int, context: int, **more: Any) -> Any:
    """Return a random Qwen3 decoder. ``more`` are further fields of its configuration."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=d,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=d // heads,
        max_position_embeddings=context,
        pad_token_id=None,
        eos_token_id=None,
        **more,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)
