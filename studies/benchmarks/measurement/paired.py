"""Paired measurement: contenders take turns in one process, and the result is the ratio of their medians.

Time is processor time, user and system (``time.process_time``): with one thread it equals wall-clock time on a quiet machine, and
on a busy one it does not include waiting. The order of turns is shuffled every round. The interval is a bootstrap over rounds that
keeps a round's turns together, so that whatever slows a whole round cancels.

Memory is the peak of torch's allocations during one step above what was allocated before (activations, gradients and scratch
tensors, but not the weights), from the profiler's record of every allocation and release. It is the same number at every run. The
resident set of a fresh process grows by the same amount to within 1% if every tensor has its own mapping
(``MALLOC_MMAP_THRESHOLD_=32768``); with glibc's heap, holes between tensors hide the difference of interest.
"""

import gc
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter, process_time

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

from studies.benchmarks.options import Benchmark
from studies.common.tables import markdown_table

Turn = Callable[[], Mapping[str, float]]
"""A turn: what it measured by name, seconds of one or more sides of a table."""


@dataclass(frozen=True)
class Contender:
    """A side of which memory is measured too.

    ``step`` is one forward and backward, ``flops`` its floor; ``reset`` drops the gradients, outside of the timed region.
    """

    name: str
    flops: int
    step: Callable[[], object]
    reset: Callable[[], None]


@dataclass(frozen=True)
class Measured:
    """Seconds of every round, and the step's peak memory in bytes."""

    seconds: tuple[float, ...]
    peak_bytes: int


@dataclass(frozen=True)
class Ratio:
    """A ratio of medians, or of tokens to a median of seconds, with its 95% bootstrap interval."""

    value: float
    lo: float
    hi: float

    def __format__(self, spec: str) -> str:
        """Return ``value (lo - hi)``, each number formatted by ``spec``."""
        value, interval = self.cells(spec)
        return f"{value} ({interval})" if interval else value

    def cells(self, spec: str = ".3f") -> tuple[str, str]:
        """Return the value and the interval as two cells of a table; the second is empty after a single round, which has none."""
        return f"{self.value:{spec}}", "" if self.lo == self.hi else f"{self.lo:{spec}} - {self.hi:{spec}}"


@dataclass(frozen=True)
class PairedRatio:
    """Time of ``over`` relative to ``under``; the limits are the maximum allowed ratios of time and of peak memory."""

    over: str
    under: str
    limit: float | None = None
    memory_limit: float | None = None


@dataclass(frozen=True)
class PairedRatioResult:
    """The measured ratio of times of a row."""

    over: str
    under: str
    limit: float | None
    time: Ratio


def allocations(step: Callable[[], object]) -> list[int]:
    """Return the bytes of every allocation during ``step``, in order; those of a release are negative."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        step()
    result = record.profiler and record.profiler.kineto_results
    assert result is not None
    events = [e for e in result.events() if e.name() == "[memory]"]
    return [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]  # pyright: ignore[reportAttributeAccessIssue]


def peak_bytes(step: Callable[[], object]) -> int:
    """Return the maximum memory that ``step`` held at one time, in bytes, above what was allocated before it."""
    return int(max(np.cumsum(allocations(step)), default=0))


@contextmanager
def collected() -> Iterator[None]:
    """Collect garbage, and exclude all that is alive from later collections: one of everything takes half a second of a turn.

    What a caller had excluded stays so, for Python can include again everything or nothing.
    """
    before = gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if before < 1000:  # Python 3.12 itself excludes some hundred
            gc.unfreeze()


def timed(call: Callable[[], object]) -> float:
    """Return the processor seconds of a call."""
    began = process_time()
    call()
    return process_time() - began


def clock(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds between two waits for the device."""
    wait(device)
    began = perf_counter()
    call()
    wait(device)
    return perf_counter() - began


def wait(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def device_name(device: torch.device) -> str:
    """Return what the device is, as a table's head says it."""
    return "the CPU" if device.type == "cpu" else torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def timers(calls: Mapping[str, Callable[[], object]], device: torch.device | None = None) -> dict[str, Turn]:
    """Return sides that time each call: processor time, or the clock on an accelerator."""
    took = timed if device is None or device.type == "cpu" else partial(clock, device=device)
    return {name: lambda name=name, call=call: {name: took(call)} for name, call in calls.items()}


def take_turns(sides: Mapping[str, Turn], rounds: int, rng: np.random.Generator) -> dict[str, list[float]]:
    """Return what every side measured in every round, after a warm-up turn; names are in the order of the sides."""
    seconds: dict[str, list[float]] = {}
    with tqdm(total=(rounds + 1) * len(sides), desc="taking turns", unit="turn", leave=False) as bar:
        for turn in sides.values():
            seconds |= {name: [] for name in turn()}
            bar.update()
        with collected():
            for name in (name for _ in range(rounds) for name in rng.permutation(list(sides))):
                for part, took in sides[name]().items():
                    seconds[part].append(took)
                bar.update()
    return seconds


def measure(contenders: Sequence[Contender], rounds: int, rng: np.random.Generator) -> dict[str, Measured]:
    """Measure ``rounds`` turns of each contender, after a warm-up turn, and the memory of one more."""

    def turn(c: Contender) -> dict[str, float]:
        seconds = timed(c.step)
        c.reset()
        return {c.name: seconds}

    seconds, measured = take_turns({c.name: partial(turn, c) for c in contenders}, rounds, rng), {}
    for c in tqdm(contenders, desc="measuring memory", unit="side", leave=False):
        measured[c.name] = Measured(tuple(seconds[c.name]), peak_bytes(c.step))
        c.reset()
    return measured


def ratio(over: Sequence[float], under: Sequence[float], rng: np.random.Generator, draws: int = 4000) -> Ratio:
    """Return ``median(over) / median(under)``; both sequences are aligned by round.

    Raises:
        ValueError: If the sequences differ in length, or are empty.
    """
    if len(over) != len(under) or not over:
        raise ValueError(f"{len(over)} and {len(under)} rounds do not pair: give equally many, at least one")
    sides = np.array([over, under])
    drawn = sides[:, rng.integers(len(over), size=(draws, len(over)))]
    top, bottom = np.median(drawn, axis=-1)
    lo, hi = np.quantile(top / bottom, [0.025, 0.975])
    return Ratio(float(np.median(over) / np.median(under)), float(lo), float(hi))


def compared(
    rows: Sequence[PairedRatio], seconds: Mapping[str, Sequence[float]], rng: np.random.Generator
) -> list[PairedRatioResult]:
    """Return the rows, measured."""
    return [PairedRatioResult(r.over, r.under, r.limit, ratio(seconds[r.over], seconds[r.under], rng)) for r in rows]


def side_table(results: Sequence[PairedRatioResult], shown: Callable[[str], str], header: Sequence[str]) -> str:
    """Return a Markdown table of rows: the ``shown`` number of both sides, and the ratio."""
    rows = [
        (r.over, shown(r.over), r.under, shown(r.under), *r.time.cells(), "" if r.limit is None else f"{r.limit:.2f}")
        for r in results
    ]
    return markdown_table(header, rows)


def token_table(results: Sequence[PairedRatioResult], seconds: Mapping[str, Sequence[float]], tokens: Mapping[str, int]) -> str:
    """Return a Markdown table: generated tokens per second of processor time on both sides, and the ratio of times."""
    header = ("what", "tokens/s", "against", "tokens/s", "time", "95%", "at most")
    return side_table(results, lambda name: f"{tokens[name] / median(seconds[name]):,.0f}", header)


QUICK = "so small a load shows that every side runs, and no more"


def report(options: Benchmark, head: str, tables: str, document: Mapping[str, object], quick: str = QUICK) -> None:
    """Print a head, with the reservation ``quick`` if the load is tiny, and tables; write ``document`` to ``options.out``."""
    print(f"{head}\n{quick}\n" if options.quick else f"{head}\n")
    print(tables, end="")
    options.write({"machine": machine(), "rounds": options.turns, **document})


def machine() -> dict[str, str | int]:
    """Return the properties of the machine on which the numbers depend."""
    return {
        "torch": torch.__version__,
        "architecture": platform.machine(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }
