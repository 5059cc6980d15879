"""Capture sites of a batch into a run store: one run a rollout, at chosen positions, counted over its real tokens."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Annotated, Any, Literal, get_args

import torch
from jaxtyping import Bool, Int
from pydantic import PlainValidator
from torch import Tensor

from mi_route2.hosts.base import Edit, Host
from mi_route2.runs import RunStore, Writer
from mi_route2.sites import Site
from mi_route2.validation import validated

Part = Literal["all", "prompt", "generated", "last"]
PARTS = get_args(Part)


def _ordered(numbers: object, info: Any) -> tuple[int, ...] | frozenset[int] | None:
    """Positions in order, or a set of token ids; ``ValueError`` says what is wrong with them."""
    name = info.field_name
    if numbers is None:
        return None
    if not isinstance(numbers, Iterable):
        raise ValueError(f"{name} is a sequence of whole numbers, as {name}=(3, 40), not {numbers!r:.60}")
    given = list(numbers)
    if not given:
        raise ValueError(f"{name} is empty: name at least one, or leave it out for no limit")
    if wrong := [number for number in given if not isinstance(number, int) or isinstance(number, bool) or number < 0]:
        raise ValueError(f"{wrong[0]!r} in {name} is not a whole number from 0 on: logical positions and ids count from 0")
    ordered = sorted(given)
    if twice := [one for one, other in pairwise(ordered) if one == other]:
        raise ValueError(f"{twice[0]} stands twice in {name}: name each number once")
    return frozenset(ordered) if name == "token_ids" else tuple(ordered)


@validated
class Where:
    """A part of the sequence (one of ``PARTS``) or ``positions`` by number; of these, where ``token_ids`` holds the token.

    ``positions`` and ``token_ids`` take any iterable of whole numbers from 0 on, and are kept in order. ``ValueError`` for a
    negative or repeated number, an empty choice, an unknown part, and for a part together with positions.
    """

    part: Part = "all"
    positions: Annotated[Iterable[int] | None, PlainValidator(_ordered)] = None
    token_ids: Annotated[Iterable[int] | None, PlainValidator(_ordered)] = None

    def __post_init__(self) -> None:
        if self.positions is not None and self.part != "all":
            raise ValueError(f"part={self.part!r} and positions contradict each other: give one of them")

    def rows(self, tokens: Sequence[int], start: int, prompt_length: int) -> list[int]:
        """The rows of a chunk that are kept, in order, counted from the chunk's first token.

        Args:
            tokens: the ids of the chunk's tokens.
            start: the position of the first of them.
            prompt_length: tokens in the prompt of the whole sequence; one at least.
        """
        if start < 0 or prompt_length < 1:
            raise ValueError(f"start={start} and prompt_length={prompt_length} cannot be: they count from 0 and from 1")
        places = self._places(start, start + len(tokens), prompt_length)
        wanted = self.token_ids
        return [place - start for place in places if wanted is None or tokens[place - start] in wanted]

    def missing(self, length: int) -> tuple[int, ...]:
        """The asked-for ``positions`` that never came in a sequence of which the model read ``length`` tokens.

        A position that came and held another token than ``token_ids`` asks for did come.
        """
        positions = self._numbers()
        return positions[bisect_left(positions, length) :]

    def _places(self, start: int, stop: int, prompt_length: int) -> Sequence[int]:
        if self.positions is not None:
            numbers = self._numbers()
            return numbers[bisect_left(numbers, start) : bisect_left(numbers, stop)]
        low = {"generated": prompt_length, "last": prompt_length - 1}.get(self.part, 0)
        high = prompt_length if self.part in ("prompt", "last") else stop
        return range(max(low, start), min(high, stop))

    def _numbers(self) -> tuple[int, ...]:
        return () if self.positions is None else tuple(self.positions)


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
