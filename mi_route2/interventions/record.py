"""Capture sites of a batch into a run store: one run a rollout, positions counted over its real tokens."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from mi_route2.hosts.base import Edit, Host
from mi_route2.interventions.runs import RunStore, Writer
from mi_route2.interventions.where import Where
from mi_route2.sites import Site


def record(
    host: Host,
    sites: Iterable[Site],
    tokens: Int[Tensor, "b s"],
    attention: Bool[Tensor, "b s"] | None = None,
    *,
    store: RunStore,
    runs: Sequence[str],
    weights: str | None = None,
    where: Where | None = None,
    prompt_lengths: Sequence[int] | None = None,
    meta: Mapping[str, Any] | None = None,
) -> None:
    """Run the model once and keep what ``host.capture`` would give, without the padding and only where ``where`` says.

    Args:
        host: any host; sites of attached adapters are sites as well.
        sites: where to read, one at least.
        tokens: token ids, padded on either side.
        attention: which of them are real; all, where not given.
        store: where the runs go. A row of the batch becomes a run, there once all of them are through.
        runs: the id of each row's run.
        weights: a hash of the model's weights, as of ``RunStore.writing``. ``host.weights_hash()``, where not given: an engine
            patches from no run of another hash.
        where: positions to keep; all, where not given.
        prompt_lengths: real tokens of each row's prompt; the whole row, where not given.
        meta: notes, the same for every run.

    Raises:
        ValueError: no site; another number of runs or prompt lengths than of rows; a row without a real token; a position that a
            row does not have; what ``RunStore.writing`` refuses.
        RuntimeError: a hook that did not fire. No run is kept then, nor after any other error.
    """
    sites, where = tuple(sites), where or Where()
    if not sites:
        raise ValueError("nothing to record: give at least one site, as Site(0, 'resid_post')")
    real = torch.ones_like(tokens, dtype=torch.bool) if attention is None else attention
    columns = [row.nonzero()[:, 0] for row in real]
    prompts = [len(each) for each in columns] if prompt_lengths is None else prompt_lengths
    if not len(runs) == len(prompts) == len(tokens):
        raise ValueError(f"{len(tokens)} rows were given {len(runs)} run ids and {len(prompts)} prompt lengths: give one for each")
    rows = [row[each].tolist() for row, each in zip(tokens, columns)]
    kept = [_kept(*each, where) for each in zip(runs, rows, prompts)]
    weights = host.weights_hash() if weights is None else weights
    writers: list[Writer] = []
    done: list[str] = []
    try:
        for run, row, prompt in zip(runs, rows, prompts):
            writers.append(store.writing(run, weights=weights, tokens=row, prompt_length=prompt, meta=meta))
        edits = {site: _appending(site, writers, columns, kept) for site in sites}
        with torch.no_grad(), host.hooks(edits):
            host.logits(tokens, attention)
        for writer in writers:
            writer.close()
            done.append(writer.run)
    except BaseException:
        for writer in writers:
            writer.abort()
        for run in done:
            with suppress(KeyError):  # evicted already
                store.drop(run)
        raise


def _kept(run: str, row: Sequence[int], prompt: int, where: Where) -> list[int]:
    """Positions of a row that are kept; ``ValueError`` for one that it does not have."""
    if not row:
        raise ValueError(f"the row of run {run!r} has no real token: leave it out")
    if missing := where.missing(len(row)):
        raise ValueError(f"the row of run {run!r} has {len(row)} tokens, so no position {missing[0]}: ask for 0 to {len(row) - 1}")
    return where.rows(row, 0, prompt)


def _appending(site: Site, writers: Sequence[Writer], columns: Sequence[Tensor], kept: Sequence[Sequence[int]]) -> Edit:
    """An edit that changes nothing, and gives each row's writer its values."""

    def keep(value: Tensor) -> None:
        for writer, row, places, positions in zip(writers, value.detach(), columns, kept):
            writer.append(site, positions, row[places[list(positions)].to(row.device)])

    return keep
