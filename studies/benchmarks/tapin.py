"""Speed of Tap-In's matcher and of the linked lists that it replaces, in tokens per second, and its change with text length.

    python -m studies.benchmarks tapin [--quick] [--rounds 15] [--out FILE.json]

The lists are those of the record: for every token, its positions in ascending order, by a head, a tail and a pointer to the next,
one set for the window and one for the text that has left it; each position is appended once it may be a candidate. They run as
plain Python and, the same function, compiled by numba. All sides give the same hints, which is checked at every size that two of
them run.

Growth is measured on the standard library's sources, on the same bytes as one document, on one byte repeated, and on random bytes.
Points at which the lists would take more than 5 seconds per round are left out. Compilation is not timed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from numba import njit
from torch import Tensor

from studies.benchmarks.measurement.paired import Ratio, ratio, report, take_turns, timers
from studies.benchmarks.options import TapInOptions
from studies.common.tables import markdown_table
from studies.lanes.config import BOS, VOCABULARY
from studies.lanes.scoring.bpb import window_starts
from studies.lanes.scoring.tapin import MOST, Hints, find_hints
from studies.lanes.scoring.tapin_index import LEAST
from studies.lanes.text import standard_library

AUTOMATON, COMPILED, PLAIN = "runs and automaton", "linked lists, compiled", "linked lists, plain Python"
WINDOW, STRIDE = 256, 64
PAIRED = 8192
LENGTHS = (10_000, 30_000, 100_000, 300_000, 1_000_000)
GROWTH_ROUNDS = 3
PATIENCE = 5.0

Sides = dict[str, Callable[[Int64[Tensor, " s"]], Hints]]
"""Name -> a function that finds the hints of a stream."""


def chains(ids: Any, starts: Any, window: int, heads: Any, tails: Any, after: Any, counts: Any, out: Any) -> None:
    """Fill ``out`` (4 x n) with token, length, votes and cross at every position, by walking all earlier positions of its token.

    ``heads`` and ``tails`` (2 x vocabulary) and ``after`` (2 x n) are the lists of the window and of the text that has left it: all
    -1. ``counts`` (by token) are zeros. All of them are lists, or arrays for the compiled function.
    """
    document = 0
    for t in range(len(ids)):
        start, token = starts[t], ids[t]
        if token == BOS:
            document = t
            for v in range(len(counts)):
                heads[1][v] = -1
        for kind, place, floor in ((0, t - 2, 0), (1, t - window - 1, document)):  # positions that have become candidates
            if place >= floor:
                v = ids[place]
                if heads[kind][v] < 0:
                    heads[kind][v] = place
                else:
                    after[kind][tails[kind][v]] = place
                tails[kind][v] = place
                after[kind][place] = -1
        while 0 <= heads[0][token] < start:  # positions that have left the window
            heads[0][token] = after[0][heads[0][token]]
        best, winner, is_cross = 0, -1, 0
        for kind, floor in ((0, start), (1, document)):
            p = heads[kind][token]
            while p >= 0:
                reach = min(MOST, p - floor + 1, t - start + 1)
                length = 1
                while length < reach and ids[p - length] == ids[t - length]:
                    length += 1
                if length >= LEAST:
                    counts[ids[p + 1]] += 1
                    if length > best:
                        best, winner, is_cross = length, ids[p + 1], kind
                p = after[kind][p]
        votes = counts[winner] if winner >= 0 else 0
        out[0][t], out[1][t], out[2][t], out[3][t] = winner, best, votes, is_cross
        for v in range(len(counts) if winner >= 0 else 0):
            counts[v] = 0


def linked(tokens: Int64[Tensor, " s"], walk: Callable[..., None], convert: Callable[[np.ndarray], Any]) -> Hints:
    """Return the hints of ``find_hints``, found by ``chains``; ``convert`` converts arrays to the type on which ``walk`` works."""
    n = len(tokens)
    heads, tails = (np.full((2, VOCABULARY), -1) for _ in range(2))
    work = [heads, tails, np.full((2, n), -1), np.zeros(VOCABULARY, dtype=np.int64)]
    hints = convert(np.zeros((4, n), dtype=np.int64))
    starts = window_starts(n, WINDOW, STRIDE).numpy()
    walk(convert(tokens.numpy()), convert(starts), WINDOW, *map(convert, work), hints)
    token, length, votes, cross = torch.from_numpy(np.asarray(hints))
    return Hints(token, length, votes, cross.bool())


def same(one: Hints, other: Hints) -> bool:
    """Return True if all hints are equal."""
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in ("token", "length", "votes", "cross"))


def sides() -> Sides:
    """Return all sides; the lists are compiled at their first stream."""
    compiled = njit(getattr(chains, "__wrapped__", chains))  # the type checker of tests wraps functions
    return {
        AUTOMATON: lambda tokens: find_hints(tokens, WINDOW, window_starts(len(tokens), WINDOW, STRIDE)),
        COMPILED: lambda tokens: linked(tokens, compiled, lambda array: array),
        PLAIN: lambda tokens: linked(tokens, chains, lambda array: array.tolist()),
    }


def texts(n: int, seed: int) -> dict[str, Int64[Tensor, " s"]]:
    """Return name -> a stream of ``n`` tokens."""
    tokens = standard_library().stream("train", n)[:n]
    generator = torch.Generator().manual_seed(seed)
    return {
        "sources, by file": tokens,
        "sources, one document": torch.where(tokens == BOS, ord("\n"), tokens),
        "one byte repeated": torch.full((n,), ord(" ")),
        "random bytes": torch.randint(0, 256, (n,), generator=generator),
    }


def speed(tokens: int, seconds: Sequence[float], rng: np.random.Generator) -> Ratio:
    """Return the tokens per second, by the median of the seconds of every round."""
    taken = ratio(seconds, [1.0] * len(seconds), rng)
    return Ratio(tokens / taken.value, tokens / taken.hi, tokens / taken.lo)


@dataclass(frozen=True)
class Point:
    """A side on a text of one size: its tokens per second; ``None`` if it would take too long."""

    text: str
    side: str
    tokens: int
    speed: Ratio | None


def seconds_of(run: Sides, tokens: Int64[Tensor, " s"], rounds: int, rng: np.random.Generator) -> dict[str, list[float]]:
    """Return the seconds of some sides, which take turns."""
    first, *others = (find(tokens) for find in run.values())
    assert all(same(first, other) for other in others), "the sides differ"
    return take_turns(timers({name: partial(find, tokens) for name, find in run.items()}), rounds, rng)


def growth(run: Sides, lengths: Sequence[int], rng: np.random.Generator, seed: int) -> list[Point]:
    """Return every text at every length, by the matcher and, while they are fast enough, by the compiled lists."""
    points: list[Point] = []
    for text, tokens in texts(lengths[-1], seed).items():
        expected = 0.0  # seconds of the lists, which grow with the square of the length
        for i, n in enumerate(lengths):
            chosen = {name: run[name] for name in ((AUTOMATON, COMPILED) if expected < PATIENCE else (AUTOMATON,))}
            measured = seconds_of(chosen, tokens[:n], GROWTH_ROUNDS, rng)
            speeds = {name: speed(n, seconds, rng) for name, seconds in measured.items()}
            points += [Point(text, side, n, speeds.get(side)) for side in (AUTOMATON, COMPILED)]
            if i + 1 < len(lengths):
                factor = (lengths[i + 1] / n) ** 2
                expected = median(measured[COMPILED]) * factor if COMPILED in measured else expected * factor
    return points


def table(points: Sequence[Point]) -> str:
    """Return a Markdown table: thousands of tokens per second, medians, one column per length."""
    lengths = sorted({point.tokens for point in points})
    rows = []
    for text, side in dict.fromkeys((point.text, point.side) for point in points):
        speeds = {point.tokens: point.speed for point in points if (point.text, point.side) == (text, side)}
        rows.append((text, side, *(f"{one.value / 1000:,.0f}" if (one := speeds[n]) else "-" for n in lengths)))
    return markdown_table(("text", "side", *(f"{n:,}" for n in lengths)), rows, left=2)


def run(options: TapInOptions) -> None:
    """Measure, print the table, and write ``options.out``."""
    rng = np.random.default_rng(options.seed)
    paired, lengths = (150, (100, 300)) if options.quick else (PAIRED, LENGTHS)
    tokens = texts(lengths[-1], options.seed)["sources, by file"]
    run = sides()
    measured = seconds_of(run, tokens[:paired], options.turns, rng)
    measured_long = seconds_of({AUTOMATON: run[AUTOMATON]}, tokens, options.turns, rng)[AUTOMATON]
    speeds = {name: speed(len(tokens[:paired]), seconds, rng) for name, seconds in measured.items()}
    ratios = {name: ratio(measured[PLAIN], seconds, rng) for name, seconds in measured.items()}
    long = speed(len(tokens), measured_long, rng)
    points = growth(run, lengths, rng, options.seed)
    rows = [(name, f"{speeds[name]:,.0f}", *ratios[name].cells(".1f")) for name in speeds]
    tables = (
        markdown_table((f"the first {paired:,} tokens of the sources", "tokens/s (95%)", "times as fast", "95%"), rows),
        f"{len(tokens):,} tokens of the sources: {long:,.0f} tokens/s\n",
        f"thousands of tokens a second:\n\n{table(points)}",
    )
    by_side = {name: {"speed": speeds[name], "ratio": ratios[name]} for name in speeds}
    document = {"window": WINDOW, "stride": STRIDE, "paired": paired, "sides": by_side, "long": long, "growth": points}
    report(options, f"{options.turns} rounds, windows of {WINDOW} tokens every {STRIDE}", "\n".join(tables), document)
