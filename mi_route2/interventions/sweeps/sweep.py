"""Activation patching over a grid: every cell is the corrupt run with one of the clean run's values put in.

grid = sweep(host, clean=tokens, corrupt=others, sites="resid_pre", answer=17, foil=23)
grid.recovered, grid.top(5), grid.heatmap("resid_pre.png")

for finished in cells(host, clean=..., corrupt=..., sites="z", heads=True, answer=17, foil=23):
    ...                                     the cells of each forward as it is done; leaving the loop ends the sweep

h' = (1 - alpha) * h + alpha * source       at (site, position), the source at the position's partner in the clean prompt
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from tqdm import tqdm

from mi_route2.checks import checked
from mi_route2.hosts.base import Host
from mi_route2.interventions.edits import patch
from mi_route2.interventions.state import ModelState
from mi_route2.interventions.sweeps.forwards import Forwards, Row, with_idle
from mi_route2.interventions.sweeps.grid import Cell, Grid
from mi_route2.interventions.sweeps.pair import Pair, record
from mi_route2.interventions.sweeps.plan import Group, needed, plan, spent
from mi_route2.interventions.sweeps.prompts import Given, Positions
from mi_route2.interventions.sweeps.question import CleanRun, ask, refuse_dropout, refuse_foreign
from mi_route2.interventions.sweeps.targets import Choice, Target, choose, count_layers, seen_by
from mi_route2.interventions.sweeps.whole import forwards

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
    metric: str = "logit_diff",
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
    targets, layers = pair.split(chosen, heads), count_layers(host)
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
    metric: str = "logit_diff",
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
        answer: one token, an id or a text. ``kl`` takes none.
        foil: likewise, for ``logit_diff`` alone.
        metric: ``logit_diff``, ``logprob`` (nats) or ``kl`` of the clean from the patched distribution (nats).
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
