"""Attribution patching: estimates of a sweep's cells from gradients of the corrupt run.

    atp     (patched - corrupt) . d score / d value                                          Nanda, "Attribution Patching", 2023
    ig      (patched - corrupt) . mean over values in between of d score / d value           Marks et al., arXiv:2403.19647
    atp*    sum over layers of |atp with that layer's gradient dropped|, over their number   Kramar et al., arXiv:2403.00745

``ig`` moves a site at all positions (and heads) at once: its cells add up to the exact effect of patching the site together.
In ``atp*`` queries and keys act through exact attention probabilities, and only what reads these is linearized (QK fix). A dropped
layer hides no effect that cancels against what the layer adds (GradDrop). A component's own layer, whose drop leaves nothing of
it, does not count.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from mi_route2.checks import checked
from mi_route2.hosts.base import Edit, Host, expose, gradients, one_after_another, reader
from mi_route2.patching.forwards import PatchedRow, Whole, by_position, writing
from mi_route2.patching.grid import Grid
from mi_route2.patching.question import Answers, CleanRun, Given, Metric, Positions, Prompts, Question, ask, widened
from mi_route2.patching.sweep import Pair, over_pairs, record
from mi_route2.patching.targets import Choice, Target, choose
from mi_route2.sites import Site
from mi_route2.steering.specs import patch

STEPS = 10
OUTPUTS = ("attn_out", "mlp_out")


@checked
@torch.inference_mode(False)  # in which nothing has a gradient, whatever the metric
@over_pairs
def attribute(
    host: Host,
    *,
    clean: Given | CleanRun | Prompts,
    corrupt: Given | Prompts,
    sites: Choice,
    positions: Positions = None,
    answer: Answers = None,
    foil: Answers = None,
    metric: Metric = "logit_diff",
    alpha: float = 1.0,
    heads: bool = False,
    at: int | None = None,
    tokenizer: Any = None,
    together: bool = False,
    method: Literal["atp", "atp*", "ig"] = "atp",
    steps: int | None = None,
) -> Grid:
    """Estimate every cell of ``sweep`` from gradients; the other arguments are the same.

    It runs on every host and architecture, after one forward of each prompt. The parameters' ``.grad`` are unchanged.

    Args:
        method: ``atp`` takes one backward. ``atp*`` takes one per layer; it estimates magnitudes, so no effect is negative.
            ``ig`` takes ``steps`` for every site.
        steps: Values between corrupt and patched, for ``ig``; 10 if ``None``.

    Returns:
        A grid whose ``kind`` is ``attribution``, ``attribution (atp*)`` or ``attribution (ig)``.

    Raises:
        ValueError: As in ``sweep``; the metric has no gradient; ``steps`` of another method; or ``atp*`` of a model with one
            layer, or of queries and keys on a host that lacks ``scores`` and ``pattern``.
        KeyError: As in ``sweep``.
    """
    began, alpha = perf_counter(), float(alpha)
    points = midpoints(steps, method == "ig")
    question = ask(host, clean, corrupt, positions, metric, answer, foil, at, alpha=alpha, tokenizer=tokenizer, together=together)
    chosen, running = choose(host, sites), Whole(host)
    pair = record(running, question, list(dict.fromkeys(target.site for target in chosen)))
    targets, prepared = pair.split(chosen, heads), perf_counter()
    effects = _starred(running, pair, targets, alpha) if method == "atp*" else _linear(running, pair, targets, alpha, points)
    values = {
        (target, position): pair.scores[1] + effect
        for target, row in effects.items()
        for (position, _), effect in zip(question.columns, row.tolist())
    }
    kind = "attribution" if method == "atp" else f"attribution ({method})"
    seconds = {"prepare": prepared - began, "cells": perf_counter() - prepared}
    return pair.grid(targets, values, layers=len(host.layers()), alpha=alpha, kind=kind, forwards="whole", seconds=seconds)


def midpoints(steps: int | None, integrated: bool) -> list[float]:
    """Return the shares of the way at which gradients are taken: ``(i + 1/2) / steps``, or 0 alone for one that starts there."""
    if steps is not None and (not integrated or steps < 1):
        raise ValueError(f"steps={steps}: give method='ig' at least 1 step, and no other method any")
    count = STEPS if steps is None else steps
    return [(i + 0.5) / count for i in range(count)] if integrated else [0.0]


def _linear(
    running: Whole, pair: Pair, targets: Sequence[Target], alpha: float, points: Sequence[float]
) -> dict[Target, Float[Tensor, " columns"]]:
    """Return the effects of ``atp`` and ``ig``."""
    sites = list(dict.fromkeys(target.site for target in targets))
    if points == [0.0]:
        exposed = dict[Site, Tensor]()
        with scored(running.host, pair, {site: expose(exposed, site) for site in sites}) as score:
            slopes = _slopes(score, exposed, pair.question)
    else:
        slopes = {site: _between(running, pair, site, alpha, points) for site in sites}
    return {target: columns(pair.question, _change(pair, target, alpha, slopes)) for target in targets}


def _change(pair: Pair, target: Target, alpha: float, slopes: Mapping[Site, Tensor]) -> Float[Tensor, " p"]:
    here, source = pair.values(target)
    slope = slopes[target.site] if target.head is None else slopes[target.site][:, target.head]
    # The difference of half-precision numbers would lose the digits that the gradient is multiplied with.
    return ((widened(patch(here, source, alpha)) - widened(here)) * widened(slope)).flatten(1).sum(1)


def columns(question: Question, change: Float[Tensor, " p"]) -> Float[Tensor, " columns"]:
    """Return the sum of ``change`` over the positions of each column."""
    return torch.stack([change[list(places)].sum() for _, places in question.columns])


@contextmanager
def scored(host: Host, pair: Pair, edits: Mapping[Site, Edit], rows: int = 1) -> Iterator[Tensor]:
    """Context: the sum of the scores of ``rows`` corrupt runs under ``edits``, with its graph, for ``torch.autograd.grad``."""
    question = pair.question
    tokens = torch.tensor([question.corrupt.tokens[: question.at + 1]], device=pair.corrupt.logits.device)
    with torch.enable_grad(), host.hooks(by_position(edits)):
        score = question.grader(host.logits(tokens.expand(rows, -1))[:, -1], pair.clean.logits).sum()
        if not score.requires_grad:
            raise ValueError(
                f"the metric {question.grader.metric} has no gradient: compute it with torch from the logits, or call sweep"
            )
        yield score


def _slopes(score: Tensor, exposed: Mapping[Site, Tensor], question: Question) -> dict[Site, Tensor]:
    """Return the gradient ``[p ...]`` at the positions that can be patched, summed over rows."""
    index = list(question.sources)
    return {site: slope[:, index].sum(0) for site, slope in zip(exposed, gradients(score, list(exposed.values())))}


def _between(running: Whole, pair: Pair, site: Site, alpha: float, points: Sequence[float]) -> Tensor:
    """Return the mean gradient ``[p ...]`` of runs in which the site has values between the corrupt and the patched ones."""
    here, source = pair.values(Target(site))
    total, limits = torch.zeros_like(widened(here)), running.limits()
    for some in chunks(points, limits.rows(limits.length)):
        values, exposed = torch.stack([patch(here, source, alpha * point) for point in some]), dict[Site, Tensor]()
        write = partial(put_at, list(pair.question.sources), values)
        with scored(running.host, pair, {site: expose(exposed, site, write)}, len(some)) as score:
            total += _slopes(score, exposed, pair.question)[site]
    return total / len(points)


def chunks(points: Sequence[float], most: int) -> list[Sequence[float]]:
    """Return ``points`` in pieces of at most ``most``."""
    return [points[low : low + most] for low in range(0, len(points), most)]


def put_at(positions: Sequence[int], values: Tensor, value: Tensor) -> Tensor:
    """Return a site's value ``[n s ...]`` with ``values`` [n p ...] at ``positions``."""
    new = value.clone()
    new[:, positions] = values.to(value)
    return new


# AtP*


def _side(target: Target) -> str | None:
    """Return ``q`` or ``k`` if the target acts through the attention probabilities alone, and else ``None``."""
    part = target.site.linear.removeprefix("attn.") or target.site.point
    return part if part in ("q", "k") else None


def _starred(running: Whole, pair: Pair, targets: Sequence[Target], alpha: float) -> dict[Target, Float[Tensor, " columns"]]:
    """Return the effects of ``atp*``."""
    host, question = running.host, pair.question
    layers = len(host.layers())
    if layers < 2:
        raise ValueError("atp* drops the gradient of one layer of several, and this model has one: take method='atp'")
    by_layer: dict[int, list[Target]] = defaultdict(list)
    for target in targets:
        if _side(target) is not None and target.site.layer is not None:
            by_layer[target.site.layer].append(target)
    fresh = _fresh(running, pair, by_layer, alpha) if by_layer else {}
    scores, exposed, dropped = dict[Site, Tensor](), dict[Site, Tensor](), [-1]
    edits: dict[Site, list[Edit]] = defaultdict(list)
    linear = (target.site for target in targets if _side(target) is None)
    for site in dict.fromkeys([*linear, *(Site(layer, "pattern") for layer in by_layer)]):
        edits[site].append(expose(exposed, site))
    for site in (Site(layer, "scores") for layer in by_layer):
        edits[site].append(reader(scores, site))
    for site in (site for site in host.sites() if site.point in OUTPUTS):  # behind a node, so that its gradient is dropped too
        edits[site].append(partial(_droppable, dropped, site.layer))
    totals = {target: torch.zeros(len(question.columns), dtype=torch.float64) for target in targets}
    with scored(host, pair, _merged(edits)) as score:
        for dropped[0] in range(layers):
            slopes = dict(zip(exposed, gradients(score, list(exposed.values()), keep=True)))
            here = {site: slope[0, list(question.sources)] for site, slope in slopes.items()}
            for target, total in totals.items():
                if target in fresh:
                    base, slope = (
                        some[Site(target.site.layer, point)][0] for some, point in ((scores, "scores"), (slopes, "pattern"))
                    )
                    change = _attended(target, fresh[target], widened(base), widened(slope), question)
                else:
                    change = columns(question, _change(pair, target, alpha, here))
                total += change.abs().to(total)
    return {target: total / (layers - _dropped_once(target.site)) for target, total in totals.items()}


def _merged(edits: Mapping[Site, Sequence[Edit]]) -> dict[Site, Edit]:
    return {site: partial(one_after_another, some) for site, some in edits.items()}


def _dropped_once(site: Site) -> bool:
    """Return whether one layer's drop leaves no gradient at the site: it lies inside of the layer's attention or MLP."""
    return site.layer is not None and not site.point.startswith("resid")


def _droppable(dropped: list[int], layer: int | None, value: Tensor) -> Tensor:
    """Return the value, whose gradient is 0 in a backward while ``dropped`` has its layer."""
    new = value.clone()
    if new.requires_grad:
        new.register_hook(lambda slope: torch.zeros_like(slope) if dropped[0] == layer else slope)
    return new


def _fresh(
    running: Whole, pair: Pair, by_layer: Mapping[int, Sequence[Target]], alpha: float
) -> dict[Target, Float[Tensor, "t h s"]]:
    """Return the attention scores of each query and key target's layer with the target patched at all positions.

    One forward has a row for each target of a layer, in all layers at once, because every attention's output is held.
    """
    tokens, positions = pair.question.corrupt.tokens[: pair.question.at + 1], tuple(pair.question.sources)
    held = running.record(tokens, [Site(layer, "attn_out") for layer in by_layer], range(len(tokens))).values
    edits, scores = defaultdict[Site, list[Edit]](list), dict[Site, Tensor]()
    for layer, some in by_layer.items():
        edits[Site(layer, "scores")].append(reader(scores, Site(layer, "scores")))
        rows = [PatchedRow((0, 0), target, positions, patch(*pair.values(target), alpha)) for target in some]
        for site, edit in writing(rows, 0, len(tokens)).items():
            edits[site].append(edit)
        edits[Site(layer, "attn_out")].append(held[Site(layer, "attn_out")].expand_as)
    running.under(_merged(edits), max(map(len, by_layer.values())))
    rows = ((target, Site(layer, "scores"), row) for layer, some in by_layer.items() for row, target in enumerate(some))
    return {target: widened(scores[site][row]) for target, site, row in rows}


def _attended(
    target: Target, fresh: Float[Tensor, "t h s"], base: Float[Tensor, "t h s"], slope: Float[Tensor, "t h s"], question: Question
) -> Float[Tensor, " columns"]:
    """Return the change of the attention probabilities, times their gradient, for a query or key patched at each column."""
    moved = (fresh != base).any(0).any(1)  # a head's own scores, or those of a group that shares a key
    fresh, base, slope = fresh[:, moved], base[:, moved], slope[:, moved]
    before, positions = base.softmax(-1), torch.tensor(list(question.sources), device=base.device)
    if _side(target) == "q":  # a query has a row of its own
        return columns(question, ((fresh.softmax(-1) - before) * slope).sum((1, 2))[positions])
    effects: list[Tensor] = []
    for _, places in question.columns:
        patched = base.clone()
        patched[..., positions[list(places)]] = fresh[..., positions[list(places)]]
        effects.append(((patched.softmax(-1) - before) * slope).sum())
    return torch.stack(effects)
