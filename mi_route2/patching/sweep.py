"""Patch sweep: the clean and the corrupt run of a question, and the grid of scores between them."""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from mi_route2.architectures import HEADED
from mi_route2.checks import checked
from mi_route2.hosts.base import Host, ModelVersion
from mi_route2.patching.forwards import (
    CellGroup,
    Forwards,
    Limits,
    PatchedRow,
    SiteRecord,
    ended,
    forwards,
    plan,
    with_idle,
)
from mi_route2.patching.grid import Cell, Grid, mean_grid
from mi_route2.patching.question import Answers, CleanRun, Given, Metric, Positions, Prompts, Question, ask, each_pair, named
from mi_route2.patching.targets import Choice, Target, choose, seen_by, split
from mi_route2.sites import Site
from mi_route2.steering.specs import patch


@dataclass(frozen=True, eq=False)
class Pair:
    """Clean and corrupt run of a question, with their values at patchable positions and their scores.

    Values are in the order of ``question.sources``; ``scores`` are the clean and the corrupt one.
    """

    question: Question
    clean: SiteRecord
    corrupt: SiteRecord
    scores: tuple[float, float]

    def values(self, target: Target) -> tuple[Tensor, Tensor]:
        """Return the corrupt and the clean values ``[p ...]`` of a target at all positions that can be patched."""
        here, source = (run.values[target.site] for run in (self.corrupt, self.clean))
        return (here, source) if target.head is None else (here[:, target.head], source[:, target.head])

    def split(self, targets: Sequence[Target], heads: bool) -> tuple[Target, ...]:
        """Return ``targets``, split into heads if ``heads``; ``ValueError`` for a head that does not exist."""
        counts = {site: value.shape[1] for site, value in self.corrupt.values.items() if site.point in HEADED}
        for target in targets:
            if target.head is not None and target.head >= counts[target.site]:
                raise ValueError(f"{target} is outside the model: {target.site} has the heads 0..{counts[target.site] - 1}")
        return split(targets, counts) if heads else tuple(targets)

    def grid(
        self,
        targets: Sequence[Target],
        values: Mapping[tuple[Target, int | None], float],
        replicas: Sequence[float] = (),
        **more: Any,
    ) -> Grid:
        """Return a grid with a value for every target and patchable position; ``ValueError`` for a value that is not finite.

        ``more`` are the fields of the grid that neither the question nor its runs know, such as ``alpha``.
        """
        question, (clean, corrupt) = self.question, self.scores
        columns = (None,) if question.together else question.positions
        table = np.full((len(targets), len(columns)), np.nan)
        column = {position: i for i, position in enumerate(columns)}
        line = {target: i for i, target in enumerate(targets)}
        for (target, position), value in values.items():
            if not np.isfinite(value):
                raise ValueError(
                    f"the score is {value} with {target} patched at position {position}: numbers inside of the model overflow"
                )
            table[line[target], column[position]] = value
        logits = self.corrupt.logits
        return Grid(
            sites=tuple(targets),
            positions=question.positions,
            labels=tuple(question.corrupt.labels[position] for position in question.positions),
            grader=question.grader,
            at=question.at,
            values=table,
            clean=clean,
            corrupt=corrupt,
            replicas=tuple(replicas),
            resolution=torch.finfo(logits.dtype).eps * max(1.0, abs(clean), abs(corrupt)),
            skipped=question.skipped,
            alignment=question.alignment,
            together=question.together,
            **more,
        )


class TooManyCellsError(ValueError):
    """A sweep has more cells than it may have."""


def record(forwards: Forwards, question: Question, sites: Sequence[Site]) -> Pair:
    """Run both prompts up to the scored position; ``forwards`` can resume from the corrupt run afterwards.

    Raises:
        KeyError, ValueError: A captured run does not fit.
        ValueError: A score that is not finite.
    """
    return ended(_recording(forwards, question, sites))


def _recording(forwards: Forwards, question: Question, sites: Sequence[Site]) -> Generator[None, None, Pair]:
    """Run ``record`` as a generator that yields between the two runs."""
    places, sources = list(question.sources), list(question.sources.values())
    corrupt = forwards.start(question.corrupt.tokens[: question.at + 1], sites, places)
    yield
    if isinstance(question.clean, CleanRun):
        clean = _captured(question.clean, corrupt, sources)
    else:
        clean = forwards.record(question.clean.tokens[: question.clean_at + 1], sites, sources)
        for site, here in corrupt.values.items():
            if clean.values[site].shape != here.shape:
                raise ValueError(f"{site} has other keys in the clean run than in the corrupt one: give prompts of equal length")
    question.grader.check(len(corrupt.logits))
    logits = torch.stack([clean.logits.to(corrupt.logits), corrupt.logits])
    first, second = question.grader(logits, logits[0]).tolist()
    for name, score in (("clean", first), ("corrupt", second)):
        if not np.isfinite(score):
            raise ValueError(f"the score of the {name} run is {score}: its logits are not finite, so nothing can be compared")
    return Pair(question, clean, corrupt, (first, second))


def _captured(run: CleanRun, corrupt: SiteRecord, sources: Sequence[int]) -> SiteRecord:
    """Return the captured values at the needed positions.

    Raises:
        KeyError: A site was not captured.
        ValueError: Another shape.
    """
    values = {}
    for site, here in corrupt.values.items():
        if site not in run.values:
            raise KeyError(f"the clean run has no values of {site}: it has {', '.join(map(str, run.values))}")
        values[site] = run.values[site][list(sources)].to(here)
        if values[site].shape != here.shape:
            raise ValueError(
                f"the clean run's {site} has shape {list(values[site].shape[1:])} per token, but the model's {list(here.shape[1:])}"
            )
    if run.logits.shape != corrupt.logits.shape:
        raise ValueError(f"the clean run has {len(run.logits)} logits, but the model {len(corrupt.logits)}")
    return SiteRecord(values, run.logits.to(corrupt.logits))


REPLICAS = 3


def refuse_few(replicas: int) -> None:
    """Raise ``ValueError`` for fewer replicas than a noise floor needs."""
    if replicas < REPLICAS:
        raise ValueError(f"{replicas} replicas of the corrupt run do not measure its noise: run at least {REPLICAS}")


@dataclass(frozen=True)
class Finished:
    """Result of one forward: cells, and scores of unpatched rows of the same forward."""

    cells: tuple[Cell, ...]
    replicas: tuple[float, ...] = ()


@dataclass(frozen=True, eq=False)
class Sweep:
    """Prepared sweep: both runs are done and the cells are planned.

    Attributes:
        pair: The clean and the corrupt run.
        targets: Rows of the grid.
        layers: Number of layers of the model.
        alpha: Share of the clean value.
        known: Cells that need no run, because the patch would change nothing or the scored position cannot read it.
        rows: All other cells, with unpatched rows among them.
        groups: Rows that run together.
        limits: Limits of the groups.
        forwards: Runs the model.
        seconds: Time that the preparation took, with what others did between its forwards.
        state: Detects changes of the model.
        prepared: State of the model when the sweep was prepared.
    """

    pair: Pair
    targets: tuple[Target, ...]
    layers: int
    alpha: float
    known: tuple[Cell, ...]
    rows: tuple[PatchedRow, ...]
    groups: tuple[CellGroup, ...]
    limits: Limits
    forwards: Forwards
    seconds: float
    version: ModelVersion
    prepared: tuple[object, ...]

    @property
    def total(self) -> int:
        """Number of cells."""
        return len(self.targets) * len(self.pair.question.columns)

    def run(self) -> Iterator[Finished]:
        """Yield the results forward by forward, first those that need no forward. Leaving the loop early skips the rest.

        Raises:
            RuntimeError: The model was changed since the sweep was prepared (what ``ModelVersion`` sees): the keys, values and
                residual streams from which cells resume belong to the model before the change.
        """
        self._demand_unmoved()
        if self.known:
            yield Finished(self.known)
        for groups in self._portions():
            entered = yield from self._enter(groups)
            for group in groups:
                self._demand_unmoved()
                rows = [entered[i] for i in group.cells]
                scores = self.pair.question.grader(self.forwards.run(group, rows), self.pair.clean.logits).tolist()
                cells = [Cell(row.target, self._column(row), score) for row, score in zip(rows, scores) if row.target is not None]
                yield Finished(tuple(cells), tuple(score for row, score in zip(rows, scores) if row.target is None))

    def _portions(self) -> Iterator[list[CellGroup]]:
        """Yield groups of which the streams of all cells are held at a time."""
        portion, positions = list[CellGroup](), 0
        for group in self.groups:
            more = sum(max(1, len(self.rows[i].positions)) for i in group.cells)
            if portion and positions + more > self.limits.most_positions:
                yield portion
                portion, positions = [], 0
            portion.append(group)
            positions += more
        if portion:
            yield portion

    def _enter(self, groups: Sequence[CellGroup]) -> Generator[Finished, None, Mapping[int, PatchedRow]]:
        """Return the rows of these groups with the streams with which they enter; yield nothing finished before each forward."""
        cells = [i for group in groups for i in group.cells]
        entering = self.forwards.enter([self.rows[i] for i in cells], self.limits.rows(self.limits.length))
        while True:
            try:
                next(entering)
            except StopIteration as end:
                return dict(zip(cells, end.value))
            yield Finished(())
            self._demand_unmoved()

    def _demand_unmoved(self) -> None:
        self.version.look()
        if self.version.current != self.prepared:
            raise RuntimeError("the model or its adapters' switches changed since this sweep was prepared: prepare it again")

    def _column(self, row: PatchedRow) -> int | None:
        return None if self.pair.question.together else row.positions[0]

    def grid(self, progress: bool = True) -> Grid:
        """Run all cells and return the grid, with a progress bar if ``progress`` and on a terminal."""
        began, done = perf_counter(), []
        with tqdm(total=self.total, desc="patching", unit="cell", leave=False, disable=None if progress else True) as bar:
            for finished in self.run():
                done.append(finished)
                bar.update(len(finished.cells))
        return self.collect(done, perf_counter() - began)

    def collect(self, done: Iterable[Finished], seconds: float) -> Grid:
        """Return the grid of all results of ``run``, which took this many seconds."""
        done = list(done)
        return self.pair.grid(
            self.targets,
            {(cell.target, cell.position): cell.value for finished in done for cell in finished.cells},
            [score for finished in done for score in finished.replicas],
            layers=self.layers,
            alpha=self.alpha,
            forwards=self.forwards.name,
            seconds={"prepare": self.seconds, "cells": seconds},
        )


def prepare(host: Host, **question: Any) -> Sweep:
    """Run both prompts and plan the cells; arguments and errors are those of ``sweep``.

    ``tokens`` limits the tokens of a forward, for a sweep that shares the model with something that must not wait. A single cell
    may need more: as many as the prompt has; and a forward that makes the streams with which cells enter, as many as that more.
    """
    return ended(preparing(host, **question))


@checked
def preparing(
    host: Host,
    *,
    clean: Given | CleanRun,
    corrupt: Given,
    sites: Choice,
    positions: Positions = None,
    answer: int | str | None = None,
    foil: int | str | None = None,
    metric: Metric = "logit_diff",
    alpha: float | int = 1.0,
    heads: bool = False,
    together: bool = False,
    at: int | None = None,
    tokenizer: Any = None,
    batch: int | None = None,
    replicas: int = REPLICAS,
    how: str = "auto",
    shortcuts: bool = True,
    tokens: int | None = None,
    most: int | None = None,
) -> Generator[None, None, Sweep]:
    """Run ``prepare`` as a generator that yields before each of the two runs and after each target, so that others may go on.

    ``most`` limits the cells, or the values that are patched together: ``TooManyCellsError`` before anything is run for more.
    """
    began, alpha = perf_counter(), float(alpha)
    refuse_few(replicas)
    if tokens is not None and tokens < 1:
        raise ValueError(f"forwards of {tokens} tokens are not possible: give at least 1, or leave tokens out")
    question = ask(host, clean, corrupt, positions, metric, answer, foil, at, alpha=alpha, tokenizer=tokenizer, together=together)
    chosen, version = choose(host, sites), ModelVersion(host)
    running = forwards(host, how, chosen)
    before = version.current  # of before the first pause, in which others may change the model: ``run`` then refuses to go on
    _refuse_cells(len(chosen) * len(question.sources), most)  # a cell of all positions together has as many values
    yield
    pair = yield from _recording(running, question, list(dict.fromkeys(target.site for target in chosen)))
    targets, layers = pair.split(chosen, heads), len(host.layers())
    _refuse_cells(len(targets) * len(question.columns), most)
    known, rows = yield from _cells(pair, targets, layers, alpha, running, shortcuts)
    rows = with_idle(rows, replicas, running.places(targets[0], [question.at])[0])
    limits = running.limits()
    if tokens is not None:
        limits = replace(limits, most=min(limits.most, tokens))
    groups = plan([row.place for row in rows], limits, batch)
    seconds = perf_counter() - began
    return Sweep(pair, targets, layers, alpha, tuple(known), tuple(rows), tuple(groups), limits, running, seconds, version, before)


def _refuse_cells(count: int, most: int | None) -> None:
    if most is not None and count > most:
        raise TooManyCellsError(f"{count} cells (sites times positions) are more than {most}: name fewer sites or positions")


def _cells(
    pair: Pair, targets: Sequence[Target], layers: int, alpha: float, running: Forwards, shortcuts: bool
) -> Generator[None, None, tuple[list[Cell], list[PatchedRow]]]:
    """Return the cells that certainly have the corrupt score, and rows for the others; yield after each target."""
    known, rows, question = [], [], pair.question
    positions = list(question.sources)
    for target in targets:
        here, source = pair.values(target)
        values = patch(here, source, alpha)
        there = (values == here).flatten(1).all(1).tolist()  # bit for bit: another value may change the score
        every = [question.at] if shortcuts and not seen_by(target.site, layers) else positions
        acting = list[tuple[int, ...]]()
        for column, places in question.columns:
            some = tuple(i for i in places if positions[i] in every and not (shortcuts and there[i]))
            if some:
                acting.append(some)
            else:
                known.append(Cell(target, column, pair.scores[1]))
        for place, some in zip(running.places(target, [positions[cells[0]] for cells in acting]), acting):
            rows.append(PatchedRow(place, target, tuple(positions[i] for i in some), values[list(some)]))
        yield
    return known, rows


def over_pairs(single: Callable[..., Grid]) -> Callable[..., Grid]:
    """Give a function of one pair of prompts also lists of pairs, for which it returns the grid of means."""

    @wraps(single)
    def call(host: Host, **asked: Any) -> Grid:
        if (pairs := each_pair(asked)) is None:
            return single(host, **asked)
        return mean_grid([single(host, **pair) for pair in pairs], named(asked.get("positions")))

    return call


@checked
@over_pairs
def sweep(
    host: Host,
    *,
    clean: Given | CleanRun | Prompts,
    corrupt: Given | Prompts,
    sites: Choice,
    positions: Positions = None,
    answer: Answers = None,
    foil: Answers = None,
    metric: Metric = "logit_diff",
    alpha: float | int = 1.0,
    heads: bool = False,
    together: bool = False,
    at: int | None = None,
    tokenizer: Any = None,
    batch: int | None = None,
    replicas: int = REPLICAS,
    how: str = "auto",
    shortcuts: bool = True,
    progress: bool = True,
) -> Grid:
    """Patch every selected site at every position, one at a time, and score each.

    Args:
        host: the model.
        clean: the prompt whose values are patched in: token ids, a text (with a ``tokenizer``), or a ``CleanRun``; or a list of
            prompts, for means over pairs (``Grid.pairs``).
        corrupt: the prompt that is run, or as many. If its length differs from the clean one's, the two are aligned (``align``).
        sites: a point for all layers (``"resid_pre"``, ``"kept_a"``), a glob (``"blocks.*.attn.q.kept_a"``), a ``Site``, a
            ``Target`` (one head), or several of these.
        positions: of the corrupt prompt: numbers, texts or ``Span``; all if ``None``.
        answer: one token, an id or a text; for several pairs, one or one each. ``kl`` and functions take none.
        foil: likewise, for ``logit_diff`` only.
        metric: ``logit_diff``, ``logprob`` (nats), ``kl`` of the clean from the patched distribution (nats), or a function of one
            run's logits ``[v]`` at the scored position, in float64, that returns a number.
        alpha: 1 replaces, 0 changes nothing.
        heads: patch points with heads (q, k, v, z, scores, pattern, result) head by head.
        together: patch all positions at once, in one cell per site.
        at: the scored position, the last if ``None``.
        tokenizer: encodes texts and labels tokens.
        batch: the maximum number of cells in a forward; as many as run well together if ``None``.
        replicas: unpatched rows of the corrupt run among the cells, for the noise floor; 3 or more.
        how: ``resumed`` from the corrupt run's keys and values, ``whole`` forwards, or ``auto``: resumed if the host supports it
            and no hook of somebody else stands on the model.
        shortcuts: skip cells that must have the corrupt score, because the clean value equals the corrupt one bit for bit, or
            because the cell is after the last block's attention at a position that is not scored.
        progress: show a bar on a terminal.

    Raises:
        KeyError: An unknown site.
        ValueError: A position outside of the prompt, a token that the model lacks, an answer of several tokens, prompts that cannot
            be aligned, pairs whose positions cannot be compared, or a model with active dropout.
        RuntimeError: A site that does not fire.

    Examples:
        >>> grid = sweep(host, sites="resid_pre", clean=[3, 7, 1, 5], corrupt=[9, 7, 1, 5], answer=3, foil=9)
        >>> grid.values.shape
        (2, 4)
    """
    planned = prepare(
        host,
        clean=clean,
        corrupt=corrupt,
        sites=sites,
        positions=positions,
        answer=answer,
        foil=foil,
        metric=metric,
        alpha=alpha,
        heads=heads,
        together=together,
        at=at,
        tokenizer=tokenizer,
        batch=batch,
        replicas=replicas,
        how=how,
        shortcuts=shortcuts,
    )
    return planned.grid(progress)


@checked
def cells(host: Host, **question: Any) -> Iterator[tuple[Cell, ...]]:
    """Yield the cells of ``sweep``, which has the same arguments, as each forward is done; errors are raised at the first one.

    Closing the iterator, or leaving its loop, ends the sweep between two forwards.
    """
    for finished in prepare(host, **question).run():
        if finished.cells:
            yield finished.cells
