"""The clean and the corrupt run of a question, and the grid that lies between them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from mi_route2.architectures import HEADED
from mi_route2.checks import checked
from mi_route2.hosts.base import Host
from mi_route2.hosts.state import ModelState
from mi_route2.patching.forwards import Forwards, Group, Record, Row, forwards, needed, plan, spent, with_idle
from mi_route2.patching.grid import Cell, Grid
from mi_route2.patching.question import CleanRun, Given, Metric, Positions, Question, ask, refuse_dropout, refuse_foreign
from mi_route2.patching.targets import Choice, Target, choose, seen_by, split
from mi_route2.sites import Site
from mi_route2.steering.specs import patch


@dataclass(frozen=True, eq=False)
class Pair:
    """Values of the targets' sites at the positions that can be patched, in the order of ``question.sources``, and both scores."""

    question: Question
    clean: Record
    corrupt: Record
    scores: tuple[float, float]

    def values(self, target: Target) -> tuple[Tensor, Tensor]:
        """The corrupt and the clean values ``[p ...]`` of a target at all positions that can be patched."""
        here, source = (run.values[target.site] for run in (self.corrupt, self.clean))
        return (here, source) if target.head is None else (here[:, target.head], source[:, target.head])

    def split(self, targets: Sequence[Target], heads: bool) -> tuple[Target, ...]:
        """``targets``, those by head as their heads where ``heads`` says so. ``ValueError`` for a head that is not there."""
        counts = {site: value.shape[1] for site, value in self.corrupt.values.items() if site.point in HEADED}
        for target in targets:
            if target.head is not None and target.head >= counts[target.site]:
                raise ValueError(f"{target} is outside the model: {target.site} has the heads 0..{counts[target.site] - 1}")
        return split(targets, counts) if heads else tuple(targets)

    def grid(
        self,
        targets: Sequence[Target],
        values: Mapping[tuple[Target, int | None], float],
        *,
        layers: int,
        alpha: float,
        kind: str = "patch",
        replicas: Sequence[float] = (),
        forwards: str = "",
        seconds: Mapping[str, float] | None = None,
        flops: Mapping[str, float] | None = None,
    ) -> Grid:
        """A grid with a value for every target and every position that can be patched. ``ValueError`` for one that is not
        finite."""
        question, (clean, corrupt) = self.question, self.scores
        columns = (None,) if question.together else question.positions
        table = np.full((len(targets), len(columns)), np.nan)
        column = {position: i for i, position in enumerate(columns)}
        line = {target: i for i, target in enumerate(targets)}
        for (target, position), value in values.items():
            if not np.isfinite(value):
                raise ValueError(
                    f"the score is {value} with {target} patched at position {position}: the model's own numbers overflow"
                )
            table[line[target], column[position]] = value
        logits = self.corrupt.logits
        return Grid(
            sites=tuple(targets),
            positions=question.positions,
            labels=tuple(question.corrupt.labels[position] for position in question.positions),
            grader=question.grader,
            at=question.at,
            alpha=alpha,
            values=table,
            clean=clean,
            corrupt=corrupt,
            replicas=tuple(replicas),
            resolution=torch.finfo(logits.dtype).eps * max(1.0, abs(clean), abs(corrupt)),
            skipped=question.skipped,
            alignment=question.alignment,
            layers=layers,
            together=question.together,
            kind=kind,
            forwards=forwards,
            seconds=dict(seconds or {}),
            flops=dict(flops or {}),
        )


def record(forwards: Forwards, question: Question, sites: Sequence[Site]) -> Pair:
    """Runs both prompts, up to the position that is scored. ``forwards`` can go on from the corrupt one then."""
    places, sources = list(question.sources), list(question.sources.values())
    corrupt = forwards.start(question.corrupt.tokens[: question.at + 1], sites, places)
    if isinstance(question.clean, CleanRun):
        clean = _captured(question.clean, corrupt, sources)
    else:
        clean = forwards.record(question.clean.tokens[: question.clean_at + 1], sites, sources)
    question.grader.check(len(corrupt.logits))
    logits = torch.stack([clean.logits.to(corrupt.logits), corrupt.logits])
    first, second = question.grader(logits, logits[0]).tolist()
    return Pair(question, clean, corrupt, (first, second))


def _captured(run: CleanRun, corrupt: Record, sources: Sequence[int]) -> Record:
    """The captured values where they are needed. ``KeyError`` for a site that was not captured, ``ValueError`` for another
    shape."""
    values = {}
    for site, here in corrupt.values.items():
        if site not in run.values:
            raise KeyError(f"the clean run has no values of {site}: it has {', '.join(map(str, run.values))}")
        values[site] = run.values[site][list(sources)].to(here)
        if values[site].shape != here.shape:
            raise ValueError(
                f"the clean run's {site} has shape {list(values[site].shape[1:])} a token, and the model's {list(here.shape[1:])}"
            )
    if run.logits.shape != corrupt.logits.shape:
        raise ValueError(f"the clean run has {len(run.logits)} logits, and the model {len(corrupt.logits)}")
    return Record(values, run.logits.to(corrupt.logits))


REPLICAS = 3


@dataclass(frozen=True)
class Finished:
    """What one forward gave: cells, and scores of the corrupt run as it is, from rows of the same forward."""

    cells: tuple[Cell, ...]
    replicas: tuple[float, ...] = ()


@dataclass(frozen=True, eq=False)
class Sweep:
    """A sweep whose two runs are done and whose cells are planned.

    ``known`` are cells that need no run: what would be put in is there already, or the scored position cannot read it. The others
    are ``rows``, with some of the corrupt run as it is among them, and run in ``groups``.
    """

    pair: Pair
    targets: tuple[Target, ...]
    layers: int
    alpha: float
    known: tuple[Cell, ...]
    rows: tuple[Row, ...]
    groups: tuple[Group, ...]
    forwards: Forwards
    seconds: float
    state: ModelState
    prepared: tuple[object, ...]

    @property
    def total(self) -> int:
        """How many cells there are."""
        return len(self.targets) * len(self.pair.question.columns)

    def run(self) -> Iterator[Finished]:
        """Forward by forward; what needs no forward comes first. Leaving the loop early leaves the rest undone.

        ``RuntimeError`` for a model that was changed since the sweep was prepared, also between two forwards: the keys, values and
        streams that cells go on from are of the model before.
        """
        self.state.look()
        if self.state.current != self.prepared:
            raise self._stale()
        if self.known:
            yield Finished(self.known)
        for group in self.groups:
            if self.state.changed:
                raise self._stale()
            rows = [self.rows[i] for i in group.cells]
            scores = self.pair.question.grader(self.forwards.run(group, rows), self.pair.clean.logits).tolist()
            cells = [Cell(row.target, self._column(row), score) for row, score in zip(rows, scores) if row.target is not None]
            yield Finished(tuple(cells), tuple(score for row, score in zip(rows, scores) if row.target is None))

    def _stale(self) -> RuntimeError:
        return RuntimeError("weights, adapters' switches or hooks have changed since this sweep was prepared: prepare it again")

    def _column(self, row: Row) -> int | None:
        return None if self.pair.question.together else row.positions[0]

    def grid(self, progress: bool = True) -> Grid:
        """Runs all cells, under a progress bar where ``progress`` and a terminal are there."""
        began, values, replicas = perf_counter(), {}, []
        with tqdm(total=self.total, desc="patching", unit="cell", leave=False, disable=None if progress else True) as bar:
            for finished in self.run():
                values |= {(cell.target, cell.position): cell.value for cell in finished.cells}
                replicas += finished.replicas
                bar.update(len(finished.cells))
        return self.pair.grid(
            self.targets,
            values,
            layers=self.layers,
            alpha=self.alpha,
            replicas=replicas,
            forwards=self.forwards.name,
            seconds={"prepare": self.seconds, "cells": perf_counter() - began},
            flops=self.flops(),
        )

    def flops(self) -> dict[str, float]:
        """``whole``: of a whole forward a cell; ``needed``: of what a cell cannot share; ``run``: of the groups. Nothing where
        whole forwards are what is run."""
        if self.forwards.name == "whole":
            return {}
        costs = self.forwards.costs()
        cells = [row.place for row in self.rows if row.target is not None]
        run = spent(self.groups, [row.place for row in self.rows], costs)
        return {"whole": costs.whole * self.total, "needed": needed(cells, costs), "run": run}


@checked
def prepare(
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
) -> Sweep:
    """Runs both prompts and plans the cells; arguments and errors are those of ``sweep``."""
    began, alpha = perf_counter(), float(alpha)
    if replicas < REPLICAS:
        raise ValueError(f"{replicas} replicas of the corrupt run say nothing of noise: run at least {REPLICAS}")
    refuse_dropout(host)
    asked: dict[str, Any] = {"positions": positions, "metric": metric, "answer": answer, "foil": foil, "at": at}
    question = ask(clean, corrupt, tokenizer=tokenizer, together=together, **asked)
    refuse_foreign(host, question, alpha)
    chosen, running = choose(host, sites), forwards(host, how)
    pair = record(running, question, list(dict.fromkeys(target.site for target in chosen)))
    targets, layers = pair.split(chosen, heads), len(host.layers())
    known, rows = _cells(pair, targets, layers, alpha, running, shortcuts)
    rows = with_idle(rows, replicas, running.place(targets[0], question.at))
    groups = plan([row.place for row in rows], running.costs(), batch)
    state, seconds = ModelState(host), perf_counter() - began
    return Sweep(pair, targets, layers, alpha, tuple(known), tuple(rows), tuple(groups), running, seconds, state, state.current)


def _cells(
    pair: Pair, targets: Sequence[Target], layers: int, alpha: float, running: Forwards, shortcuts: bool
) -> tuple[list[Cell], list[Row]]:
    """Cells that have the corrupt score for certain, and rows for the others."""
    known, rows, question = [], [], pair.question
    where = list(question.sources)
    for target in targets:
        here, source = pair.values(target)
        values = patch(here, source, alpha)
        there = (values == here).flatten(1).all(1).tolist()
        every = [question.at] if shortcuts and not seen_by(target.site, layers) else where
        for column, places in question.columns:
            acting = [i for i in places if where[i] in every and not (shortcuts and there[i])]
            if acting:
                chosen = tuple(where[i] for i in acting)
                rows.append(Row(running.place(target, chosen[0]), target, chosen, values[acting]))
            else:
                known.append(Cell(target, column, pair.scores[1]))
    return known, rows


@checked
def sweep(
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
    progress: bool = True,
) -> Grid:
    """Patch every chosen site at every position, one at a time, and score each.

    Args:
        clean: the prompt whose values are put in: token ids, a text (with a ``tokenizer``), or a ``CleanRun``.
        corrupt: the prompt that is run. Of another length than the clean one, it is aligned with it (``align``).
        sites: a point for all layers (``"resid_pre"``, ``"kept_a"``), a glob (``"blocks.*.attn.q.kept_a"``), a ``Site``, a
            ``Target`` (one head), or several of these.
        positions: of the corrupt prompt: numbers, texts or ``Span``; all where it is ``None``.
        answer: one token, an id or a text. ``kl`` and functions take none.
        foil: likewise, for ``logit_diff`` alone.
        metric: ``logit_diff``, ``logprob`` (nats), ``kl`` of the clean from the patched distribution (nats), or a function of one
            run's logits ``[v]`` at the scored position, in float64, that returns a number.
        alpha: 1 replaces, 0 changes nothing.
        heads: q, k, v and z head by head.
        together: patch all positions at once, in one cell a site.
        at: the position that is scored, the last where it is ``None``.
        batch: the most cells in a forward; chosen by a cost model where it is ``None``.
        replicas: rows of the corrupt run as it is, run among the cells for the noise floor; 3 or more.
        how: ``resumed`` over the corrupt run's keys and values, ``whole`` forwards, or ``auto``: resumed where the host can.
        shortcuts: leave out cells that must have the corrupt score: what would be put in is there already bit for bit, or it
            stands behind the last block's attention at another position than the scored one.
        progress: a bar on a terminal.

    ``KeyError`` for an unknown site, ``ValueError`` for a position outside of the prompt, a token that the model lacks, an answer
    of several tokens, prompts that cannot be aligned, and a model that drops activations at random; ``RuntimeError`` for a site
    that does not fire.
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
def cells(host: Host, **given: Any) -> Iterator[tuple[Cell, ...]]:
    """The cells of ``sweep``, which takes the same arguments, as each forward is done; the errors come with the first.

    Closing the iterator, or leaving its loop, ends the sweep between two forwards.
    """
    for finished in prepare(host, **given).run():
        if finished.cells:
            yield finished.cells
