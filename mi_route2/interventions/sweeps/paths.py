"""Path patching: how much of a sender's effect reaches the score through a receiver, by the direct path between them.

The direct path from a sender S to a receiver R is the one through the residual stream alone (Wang et al. 2022, "Interpretability in
the Wild", appendix B; Goldowsky-Dill et al. 2023, "Localizing Model Behavior with Path Patching"). For a sender at position p:

    1  the corrupt prompt with S at p patched, h' = (1 - alpha) * h + alpha * clean, and with the output of every attention and
       every MLP behind S set to what it was in the corrupt run, at all positions; but for the one that S itself is inside of.
       R takes some value there, which is kept.
    2  the corrupt prompt with R set to that value, and everything else computed as always. This run is scored.

Several receivers take their values in one run and are set together in the other. For the direct effect on the logits, the
receiver is the last block's ``resid_post``. MLPs are frozen as attentions are; Wang et al. let them be computed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from mi_route2.checks import checked
from mi_route2.hosts.base import Edit, Host
from mi_route2.interventions.edits import patch
from mi_route2.interventions.order import precedes
from mi_route2.interventions.sweeps.forwards import Row, with_idle, writing
from mi_route2.interventions.sweeps.grid import Grid
from mi_route2.interventions.sweeps.pair import Pair, record
from mi_route2.interventions.sweeps.plan import plan
from mi_route2.interventions.sweeps.prompts import Given, Positions, places
from mi_route2.interventions.sweeps.question import CleanRun, ask, refuse_dropout, refuse_foreign
from mi_route2.interventions.sweeps.sweep import REPLICAS
from mi_route2.interventions.sweeps.targets import Choice, Target, choose, count_layers, known_sites
from mi_route2.interventions.sweeps.whole import Whole
from mi_route2.sites import Site

_OUTPUTS = ("attn_out", "mlp_out")


@checked
def paths(
    host: Host,
    *,
    clean: Given | CleanRun,
    corrupt: Given,
    senders: Choice,
    receivers: Choice,
    positions: Positions = None,
    received: Positions = None,
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
    progress: bool = True,
) -> Grid:
    """A grid of senders x ``positions`` (``kind="path"``): scores with each one's direct path into the ``receivers`` patched.

    The receivers are set at the positions ``received``, all of them where it is ``None``; ``heads`` splits the senders, and a
    receiver is one head as a ``Target``. All else as in ``sweep``; runs whole forwards, two a batch of cells, on every host and
    architecture. ``ValueError`` for a sender that does not stand before every receiver.
    """
    began, alpha = perf_counter(), float(alpha)
    refuse_dropout(host)
    if replicas < REPLICAS:
        raise ValueError(f"{replicas} replicas of the corrupt run say nothing of noise: run at least {REPLICAS}")
    asked: dict[str, Any] = {"positions": positions, "metric": metric, "answer": answer, "foil": foil, "at": at}
    question = ask(clean, corrupt, tokenizer=tokenizer, together=together, **asked)
    refuse_foreign(host, question, alpha)
    given, into = choose(host, senders), choose(host, receivers)
    _refuse_backwards(given, into)
    running = Whole(host)
    pair = record(running, question, list(dict.fromkeys(target.site for target in given)))
    targets = pair.split(given, heads)
    base = _Base.of(running, question.corrupt.tokens[: question.at + 1], into, known_sites(host))
    columns = [p for p in places(received, question.corrupt) if p <= question.at]
    rows = with_idle(_rows(pair, targets, float(alpha)), replicas, (0, 0))
    values, spread, prepared = {}, [], perf_counter()
    with tqdm(total=len(rows), desc="patching paths", unit="cell", leave=False, disable=None if progress else True) as bar:
        for group in plan([row.place for row in rows], running.costs(), batch):
            some = [rows[i] for i in group.cells]
            logits = base.run(running, some, columns)
            for row, score in zip(some, question.grader(logits, pair.clean.logits).tolist()):
                if row.target is None:
                    spread.append(score)
                else:
                    values[row.target, None if together else row.positions[0]] = score
            bar.update(len(some))
    seconds = {"prepare": prepared - began, "cells": perf_counter() - prepared}
    said: dict[str, Any] = {"kind": "path", "replicas": spread, "forwards": "whole", "seconds": seconds}
    return pair.grid(targets, values, layers=count_layers(host), alpha=float(alpha), **said)


def _rows(pair: Pair, targets: Sequence[Target], alpha: float) -> list[Row]:
    """A row for every cell."""
    where, rows = list(pair.question.sources), []
    for target in targets:
        values = patch(*pair.values(target), alpha)
        for _, some in pair.question.columns:
            rows.append(Row((0, 0), target, tuple(where[i] for i in some), values[list(some)]))
    return rows


@dataclass(frozen=True, eq=False)
class _Base:
    """What the corrupt run ``held`` at the outputs of attentions and MLPs, ``[s d]``; and the receivers."""

    held: Mapping[Site, Tensor]
    into: Sequence[Target]

    @staticmethod
    def of(running: Whole, tokens: Sequence[int], into: Sequence[Target], known: Sequence[Site]) -> "_Base":
        receivers, outputs = [target.site for target in into], [site for site in known if site.point in _OUTPUTS]
        held = running.record(tokens, list(dict.fromkeys([*receivers, *outputs])), range(len(tokens))).values
        for target in into:
            if target.head is not None and target.head >= held[target.site].shape[1]:
                raise ValueError(f"{target} is outside the model: {target.site} has the heads 0..{held[target.site].shape[1] - 1}")
        return _Base({site: held[site] for site in outputs}, into)

    def run(self, running: Whole, rows: Sequence[Row], columns: Sequence[int]) -> Tensor:
        """The logits of run 2, the receivers set at ``columns``."""
        taken = self._receive(running, rows)
        return running.under({site: self._setting(site, value, columns) for site, value in taken.items()}, len(rows))

    def _receive(self, running: Whole, rows: Sequence[Row]) -> dict[Site, Tensor]:
        """What the receivers' sites hold in run 1, ``[n s ...]``."""
        taken: dict[Site, Tensor] = {}
        edits: dict[Site, list[Edit]] = {target.site: [partial(_take, taken, target.site)] for target in self.into}
        for output, value in self.held.items():
            which = [row.target is not None and frozen(row.target.site, output) for row in rows]
            if any(which):
                edits.setdefault(output, []).append(partial(_hold, which, value))
        for site, write in writing(rows, 0, len(next(iter(self.held.values())))).items():
            edits.setdefault(site, []).append(write)
        running.under({site: partial(_one_after_another, some) for site, some in edits.items()}, len(rows))
        return taken

    def _setting(self, site: Site, value: Tensor, columns: Sequence[int]) -> Edit:
        return partial(_set, [target.head for target in self.into if target.site == site], value, columns)


def own_output(site: Site) -> Site | None:
    """The output of the attention or MLP that a site is inside of; ``None`` for the stream, and for an output itself."""
    if site.point.startswith("resid") or site.point in _OUTPUTS or site.layer is None:
        return None
    inside_mlp = site.linear.startswith("mlp") or site.point == "mlp_in"
    return Site(site.layer, "mlp_out" if inside_mlp else "attn_out")


def frozen(sender: Site, output: Site) -> bool:
    """Whether a sender's direct path leaves an attention's or MLP's ``output`` as it was."""
    return precedes(sender, output) and output != own_output(sender)


def _take(taken: dict[Site, Tensor], site: Site, value: Tensor) -> None:
    taken[site] = value.detach().clone()


def _hold(which: Sequence[bool], held: Tensor, value: Tensor) -> Tensor:
    rows = torch.tensor(which, device=value.device).view(-1, *[1] * (value.ndim - 1))
    return torch.where(rows, held.to(value), value)


def _set(heads: Sequence[int | None], taken: Tensor, columns: Sequence[int], value: Tensor) -> Tensor:
    new, at = value.clone(), torch.tensor(columns, device=value.device)
    for head in heads:
        if head is None:
            new[:, at] = taken[:, at]
        else:
            new[:, at, head] = taken[:, at, head]
    return new


def _one_after_another(edits: Sequence[Edit], value: Tensor) -> Tensor:
    for edit in edits:
        new = edit(value)
        value = value if new is None else new
    return value


def _refuse_backwards(senders: Sequence[Target], receivers: Sequence[Target]) -> None:
    for sender in senders:
        for receiver in receivers:
            if not precedes(sender.site, receiver.site):
                raise ValueError(f"no path leads from {sender} to {receiver}: a sender stands before its receivers")
