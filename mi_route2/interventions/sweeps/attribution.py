"""Attribution patching: a first-order estimate of every cell of a sweep, from one backward through the corrupt run.

    score(patched) - score(corrupt)  ~  (patched value - corrupt value) . d score / d value

at each site and position (Nanda 2023, "Attribution Patching: Activation Patching At Industrial Scale"; Kramár et al. 2024, "AtP*").
It is good where the model is nearly linear over the step, and poor for the whole stream and for saturated attention: compare it
with some exact cells, ``attribute(...).rank_correlation(sweep(...))``.
"""

from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from mi_route2.checks import checked
from mi_route2.hosts.base import Host
from mi_route2.interventions.edits import patch
from mi_route2.interventions.sweeps.grading import widened
from mi_route2.interventions.sweeps.grid import Grid
from mi_route2.interventions.sweeps.pair import Pair, record
from mi_route2.interventions.sweeps.prompts import Given, Positions
from mi_route2.interventions.sweeps.question import CleanRun, ask, refuse_dropout, refuse_foreign
from mi_route2.interventions.sweeps.targets import Choice, choose, count_layers
from mi_route2.interventions.sweeps.whole import Whole
from mi_route2.sites import Site


@checked
def attribute(
    host: Host,
    *,
    clean: Given | CleanRun,
    corrupt: Given,
    sites: Choice,
    positions: Positions = None,
    answer: int | str | None = None,
    foil: int | str | None = None,
    metric: str = "logit_diff",
    alpha: float = 1.0,
    heads: bool = False,
    at: int | None = None,
    tokenizer: Any = None,
    together: bool = False,
) -> Grid:
    """The grid of ``sweep`` with estimates for scores (``kind="attribution"``); arguments and errors are the same.

    Two recorded forwards, one more and its backward, on every host and architecture. The parameters' gradients stay as they are.
    """
    began = perf_counter()
    refuse_dropout(host)
    asked: dict[str, Any] = {"positions": positions, "metric": metric, "answer": answer, "foil": foil, "at": at}
    question = ask(clean, corrupt, tokenizer=tokenizer, together=together, **asked)
    refuse_foreign(host, question, alpha)
    chosen = choose(host, sites)
    sites_used = list(dict.fromkeys(target.site for target in chosen))
    pair = record(Whole(host), question, sites_used)
    targets, slopes = pair.split(chosen, heads), gradients(host, pair, sites_used)
    prepared = perf_counter()
    values = {}
    for target in targets:
        here, source = pair.values(target)
        slope = slopes[target.site] if target.head is None else slopes[target.site][:, target.head]
        # A difference of half-precision numbers would lose what the gradient is to be multiplied with.
        step = widened(patch(here, source, float(alpha))) - widened(here)
        change = (step * widened(slope)).flatten(1).sum(1)
        for position, columns in question.columns:
            values[target, position] = pair.scores[1] + float(change[list(columns)].sum())
    seconds = {"prepare": prepared - began, "cells": perf_counter() - prepared}
    layers = count_layers(host)
    return pair.grid(targets, values, layers=layers, alpha=float(alpha), kind="attribution", forwards="whole", seconds=seconds)


def gradients(host: Host, pair: Pair, sites: list[Site]) -> dict[Site, Tensor]:
    """``d score / d value`` of the corrupt run at every site, ``[p ...]`` at the positions that can be patched."""
    question, exposed = pair.question, dict[Site, Tensor]()
    device = pair.corrupt.logits.device
    tokens = torch.tensor([question.corrupt.tokens[: question.at + 1]], device=device)
    with torch.enable_grad(), host.hooks({site: partial(_expose, exposed, site) for site in sites}):
        logits = host.logits(tokens)[:, -1]
        score = question.grader(logits, pair.clean.logits).sum()
        found = torch.autograd.grad(score, [exposed[site] for site in sites], allow_unused=True)
    index = torch.tensor(list(question.sources), device=device)
    return {
        site: (torch.zeros_like(exposed[site]) if slope is None else slope)[0].index_select(0, index)
        for site, slope in zip(sites, found)
    }


def _expose(exposed: dict[Site, Tensor], site: Site, value: Tensor) -> Tensor:
    exposed[site] = value if value.requires_grad else value.detach().requires_grad_()  # a frozen model has no graph yet
    return exposed[site]
