"""Paired measurement: contenders take turns in one process, and what is quoted is the ratio of their medians.

Time is the processor's, user and system (``time.process_time``): with one thread it is the wall's on a quiet machine, and on a
busy one it does not count the waiting. The order of turns is shuffled every round. The interval is a bootstrap over rounds that
keeps a round's turns together, so that what slows a whole round cancels.

Memory is the peak of what torch's allocator hands out during one step above what was there before (activations, gradients and
scratch tensors; the weights are not in it), from the profiler's record of every allocation and release. It is the same number at
every run. The resident set of a fresh process grows by the same amount to within 1% where every tensor has a mapping of its own
(``MALLOC_MMAP_THRESHOLD_=32768``); with glibc's heap the holes between tensors hide the difference that is to be seen.
"""

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import process_time

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm


@dataclass(frozen=True)
class Contender:
    """``step`` is one forward and backward, ``flops`` its floor; ``reset`` drops the gradients, outside the clock."""

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
    """A ratio of medians with its 95% bootstrap interval."""

    value: float
    lo: float
    hi: float


def peak_bytes(step: Callable[[], object]) -> int:
    """The most that ``step`` held at one time, in bytes, above what was allocated before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        step()
    result = record.profiler and record.profiler.kineto_results
    assert result is not None
    events = [e for e in result.events() if e.name() == "[memory]"]
    changes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]  # pyright: ignore[reportAttributeAccessIssue]
    return int(max(np.cumsum(changes), default=0))


def measure(contenders: Sequence[Contender], rounds: int, rng: np.random.Generator, *, memory: bool = True) -> dict[str, Measured]:
    """``rounds`` turns each, after one turn that warms up and one under the memory record (0 without ``memory``)."""
    peaks: dict[str, int] = {}
    seconds: dict[str, list[float]] = {c.name: [] for c in contenders}
    with tqdm(total=len(contenders) * (rounds + 1), desc="taking turns", unit="step", leave=False) as bar:
        for c in contenders:
            c.step()
            c.reset()
            peaks[c.name] = peak_bytes(c.step) if memory else 0
            c.reset()
            bar.update()
        for _ in range(rounds):
            for i in rng.permutation(len(contenders)):
                c = contenders[i]
                start = process_time()
                c.step()
                seconds[c.name].append(process_time() - start)
                c.reset()
                bar.update()
    return {c.name: Measured(tuple(seconds[c.name]), peaks[c.name]) for c in contenders}


def ratio(over: Sequence[float], under: Sequence[float], rng: np.random.Generator, draws: int = 4000) -> Ratio:
    """``median(over) / median(under)``; both sequences are aligned by round."""
    if len(over) != len(under) or not over:
        raise ValueError(f"{len(over)} and {len(under)} rounds do not pair")
    sides = np.array([over, under])
    drawn = sides[:, rng.integers(len(over), size=(draws, len(over)))]
    top, bottom = np.median(drawn, axis=-1)
    lo, hi = np.quantile(top / bottom, [0.025, 0.975])
    return Ratio(float(np.median(over) / np.median(under)), float(lo), float(hi))


def machine() -> dict[str, str | int]:
    """What the numbers depend on, beside the code."""
    return {
        "torch": torch.__version__,
        "architecture": platform.machine(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }
