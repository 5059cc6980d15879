"""Path patching: the direct effect of a sender through a receiver (Goldowsky-Dill et al., arXiv:2304.05969).

The corrupt prompt runs twice. Run 1 patches the sender with every other attention and MLP output held at its corrupt value, and
records the receivers. Run 2 sets the receivers to those values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from mi_route2.checks import checked
from mi_route2.hosts.base import Edit, Host, one_after_another
from mi_route2.patching.attribution import OUTPUTS
from mi_route2.patching.forwards import PatchedRow, Whole, plan, with_idle, writing
from mi_route2.patching.grid import Grid
from mi_route2.patching.question import CleanRun, Given, Metric, Positions, ask, places
from mi_route2.patching.sweep import REPLICAS, Pair, record, refuse_few
from mi_route2.patching.targets import Choice, Target, choose
from mi_route2.sites import Site, precedes
from mi_route2.steering.specs import patch


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
    metric: Metric = "logit_diff",
    alpha: float | int = 1.0,
    heads: bool = False,
    together: bool = False,
    at: int | None = None,
    tokenizer: Any = None,
    batch: int | None = None,
    replicas: int = REPLICAS,
    progress: bool = True,
) -> Grid:
    """Path-patch every sender at every position: score with its direct path into the ``receivers`` patched (``kind="path"``).

    Whole forwards run, two per batch of cells, on every host and architecture. Arguments and errors as in ``sweep``, except for:

    Args:
        senders: sites whose direct effect is measured, the rows of the grid; ``heads`` splits them.
        receivers: sites that are set to what they receive from the sender; a ``Target`` is one head.
        received: positions at which the receivers are set; all if ``None``.

    Raises:
        ValueError: A sender does not come before every receiver, or all of ``received`` comes after the scored position.
    """
    began, alpha = perf_counter(), float(alpha)
    refuse_few(replicas)
    question = ask(host, clean, corrupt, positions, metric, answer, foil, at, alpha=alpha, tokenizer=tokenizer, together=together)
    source, into = choose(host, senders), choose(host, receivers)
    _refuse_backwards(source, into)
    running = Whole(host)
    pair = record(running, question, list(dict.fromkeys(target.site for target in source)))
    targets = pair.split(source, heads)
    base = _Base.of(running, question.corrupt.tokens[: question.at + 1], into, host.sites())
    columns = [p for p in places(received, question.corrupt) if p <= question.at]  # nothing after the scored position runs
    if not columns:
        raise ValueError(f"nothing can be received: every position comes after position {question.at}, which is scored")
    rows = with_idle(_rows(pair, targets, alpha), replicas, (0, 0))
    values, spread, prepared = {}, [], perf_counter()
    with tqdm(total=len(rows), desc="patching paths", unit="cell", leave=False, disable=None if progress else True) as bar:
        for group in plan([row.place for row in rows], running.limits(), batch):
            some = [rows[i] for i in group.cells]
            logits = base.run(running, some, columns)
            for row, score in zip(some, question.grader(logits, pair.clean.logits).tolist()):
                if row.target is None:
                    spread.append(score)
                else:
                    values[row.target, None if together else row.positions[0]] = score
            bar.update(len(some))
    seconds = {"prepare": prepared - began, "cells": perf_counter() - prepared}
    more: dict[str, Any] = {"kind": "path", "forwards": "whole", "seconds": seconds}
    return pair.grid(targets, values, spread, layers=len(host.layers()), alpha=alpha, **more)


def _rows(pair: Pair, targets: Sequence[Target], alpha: float) -> list[PatchedRow]:
    """Return a row for every cell."""
    positions, rows = list(pair.question.sources), []
    for target in targets:
        values = patch(*pair.values(target), alpha)
        for _, some in pair.question.columns:
            rows.append(PatchedRow((0, 0), target, tuple(positions[i] for i in some), values[list(some)]))
    return rows


@dataclass(frozen=True, eq=False)
class _Base:
    """Outputs ``[s d]`` of attentions and MLPs in the corrupt run, and the receivers."""

    corrupt: Mapping[Site, Tensor]
    into: Sequence[Target]

    @staticmethod
    def of(running: Whole, tokens: Sequence[int], into: Sequence[Target], known: Sequence[Site]) -> "_Base":
        receivers, outputs = [target.site for target in into], [site for site in known if site.point in OUTPUTS]
        values = running.record(tokens, list(dict.fromkeys([*receivers, *outputs])), range(len(tokens))).values
        for target in into:
            if target.head is not None and target.head >= (heads := values[target.site].shape[1]):
                raise ValueError(f"{target} is outside the model: {target.site} has the heads 0..{heads - 1}")
        return _Base({site: values[site] for site in outputs}, into)

    def run(self, running: Whole, rows: Sequence[PatchedRow], columns: Sequence[int]) -> Tensor:
        """Return the logits of run 2, with the receivers set at ``columns``."""
        taken = self._receive(running, rows)
        heads = {site: [target.head for target in self.into if target.site == site] for site in taken}
        return running.under({site: partial(_set, heads[site], value, columns) for site, value in taken.items()}, len(rows))

    def _receive(self, running: Whole, rows: Sequence[PatchedRow]) -> dict[Site, Tensor]:
        """Return the values ``[n s ...]`` at the receivers' sites in run 1."""
        taken: dict[Site, Tensor] = {}
        # Edits of a site run in order: a receiver that is itself an output is recorded before it is held at its corrupt value.
        edits: dict[Site, list[Edit]] = {target.site: [partial(_take, taken, target.site)] for target in self.into}
        for output, value in self.corrupt.items():
            which = [row.target is not None and frozen(row.target.site, output) for row in rows]
            if any(which):
                edits.setdefault(output, []).append(partial(_hold, which, value))
        for site, write in writing(rows, 0, len(next(iter(self.corrupt.values())))).items():
            edits.setdefault(site, []).append(write)
        running.under({site: partial(one_after_another, some) for site, some in edits.items()}, len(rows))
        return taken


def sublayer_output(site: Site) -> Site | None:
    """Return the output of the attention or MLP that contains the site; ``None`` for the residual stream and for outputs."""
    if site.point.startswith("resid") or site.point in OUTPUTS or site.layer is None:
        return None
    inside_mlp = site.linear.startswith("mlp") or site.point == "mlp_in"
    return Site(site.layer, "mlp_out" if inside_mlp else "attn_out")


def frozen(sender: Site, output: Site) -> bool:
    """Return whether an attention's or MLP's ``output`` is held at its corrupt value on a sender's direct path."""
    return precedes(sender, output) and output != sublayer_output(sender)


def _take(taken: dict[Site, Tensor], site: Site, value: Tensor) -> None:
    taken[site] = value.detach().clone()


def _hold(which: Sequence[bool], corrupt: Tensor, value: Tensor) -> Tensor:
    rows = torch.tensor(which, device=value.device).view(-1, *[1] * (value.ndim - 1))
    return torch.where(rows, corrupt.to(value), value)


def _set(heads: Sequence[int | None], taken: Tensor, columns: Sequence[int], value: Tensor) -> Tensor:
    new, at = value.clone(), torch.tensor(columns, device=value.device)
    for head in heads:
        if head is None:
            new[:, at] = taken[:, at]
        else:
            new[:, at, head] = taken[:, at, head]
    return new


def _refuse_backwards(senders: Sequence[Target], receivers: Sequence[Target]) -> None:
    for sender, receiver in product(senders, receivers):
        if not precedes(sender.site, receiver.site):
            raise ValueError(f"no path leads from {sender} to {receiver}: a sender must come before its receivers")
