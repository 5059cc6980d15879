"""Record sites of a batch in a run store: one run per rollout, at chosen positions that count its real tokens."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Annotated, Any, Literal, get_args

import numpy as np
import torch
from jaxtyping import Int
from pydantic import PlainValidator
from torch import Tensor

from mi_route2.architectures import PATTERNS
from mi_route2.checks import Mask, as_mask, checked
from mi_route2.hosts.base import Edit, Host
from mi_route2.runs.store import RunStore, Writer
from mi_route2.sites import Site
from mi_route2.validation import validated

SequencePart = Literal["all", "prompt", "generated", "last"]
SEQUENCE_PARTS = get_args(SequencePart)


def _ordered(numbers: object, info: Any) -> tuple[int, ...] | frozenset[int] | None:
    """Return positions in order, or a set of token ids; ``ValueError`` for values that are not valid."""
    name = info.field_name
    if numbers is None:
        return None
    numbers = numbers.tolist() if isinstance(numbers, Tensor | np.ndarray) else numbers
    if not isinstance(numbers, Iterable) or isinstance(numbers, str | bytes | bytearray | memoryview | Mapping):
        raise ValueError(f"{name} must be a sequence of whole numbers, as {name}=(3, 40), not {numbers!r:.60}")
    plain = [number.item() if isinstance(number, np.generic) else number for number in numbers]
    if not plain:
        raise ValueError(f"{name} is empty: give at least one, or leave it out for no limit")
    if wrong := [number for number in plain if not isinstance(number, int) or isinstance(number, bool) or number < 0]:
        raise ValueError(f"{wrong[0]!r} in {name} is not a whole number from 0 on: logical positions and ids count from 0")
    ordered = sorted(plain)
    if twice := [site for site, other in pairwise(ordered) if site == other]:
        raise ValueError(f"{twice[0]} appears twice in {name}: give each number once")
    return frozenset(ordered) if name == "token_ids" else tuple(ordered)


@validated
class TokenSelection:
    """Selection of positions: a part of the sequence or ``positions``, optionally only those whose token is in ``token_ids``.

    Attributes:
        part: One of ``SEQUENCE_PARTS``; not together with ``positions``.
        positions: Any iterable of whole numbers from 0; stored in order.
        token_ids: Any iterable of whole numbers from 0; stored as a set.

    Raises:
        ValueError: A negative or repeated number, an empty selection, an unknown part, or a part together with positions.
    """

    part: SequencePart = "all"
    positions: Annotated[Iterable[int] | None, PlainValidator(_ordered)] = None
    token_ids: Annotated[Iterable[int] | None, PlainValidator(_ordered)] = None

    def __post_init__(self) -> None:
        if self.positions is not None and self.part != "all":
            raise ValueError(f"part={self.part!r} and positions contradict each other: give one of them")

    def rows(self, tokens: Sequence[int], start: int, prompt_length: int) -> list[int]:
        """Return the selected rows of a chunk, in order, counted from the chunk's first token.

        Args:
            tokens: the ids of the chunk's tokens.
            start: the position of the first of them.
            prompt_length: number of tokens in the prompt of the whole sequence, at least one.
        """
        if start < 0 or prompt_length < 1:
            raise ValueError(f"start={start} and prompt_length={prompt_length} are not valid: they count from 0 and from 1")
        places = self._places(start, start + len(tokens), prompt_length)
        wanted = self.token_ids
        return [place - start for place in places if wanted is None or tokens[place - start] in wanted]

    def missing(self, length: int) -> tuple[int, ...]:
        """Return the requested ``positions`` that a sequence of ``length`` tokens does not have.

        A position whose token is not in ``token_ids`` is not missing.
        """
        positions = self._numbers()
        return positions[bisect_left(positions, length) :]

    def most(self, length: int, prompt_length: int) -> int:
        """Return the greatest number of rows that a sequence of ``length`` tokens can have here, whatever its tokens are."""
        return len(self._places(0, length, prompt_length))

    def _places(self, start: int, stop: int, prompt_length: int) -> Sequence[int]:
        if self.positions is not None:
            numbers = self._numbers()
            return numbers[bisect_left(numbers, start) : bisect_left(numbers, stop)]
        low = {"generated": prompt_length, "last": prompt_length - 1}.get(self.part, 0)
        high = prompt_length if self.part in ("prompt", "last") else stop
        return range(max(low, start), min(high, stop))

    def _numbers(self) -> tuple[int, ...]:
        return () if self.positions is None else tuple(self.positions)


@checked
def record(
    host: Host,
    sites: Iterable[Site],
    tokens: Int[Tensor, "b s"],
    attention: Mask | None = None,
    *,
    store: RunStore,
    runs: Sequence[str],
    weights: str | None = None,
    selection: TokenSelection | None = None,
    prompt_lengths: Sequence[int] | None = None,
    meta: Mapping[str, Any] | None = None,
) -> None:
    """Run the model once and store the values of ``host.capture``, without padding and only at the positions of ``selection``.

    Args:
        host: any host; sites of attached adapters can be recorded too.
        sites: sites to record, at least one.
        tokens: token ids, padded on either side.
        attention: mask of real tokens; all if not given.
        store: the store. Each row of the batch becomes a run; all runs appear together, after the forward.
        runs: the id of each row's run.
        weights: a hash of the model's weights, as in ``RunStore.writing``; ``host.weights_hash()`` if not given, which an engine
            needs to patch from the run.
        selection: positions to keep; all if not given.
        prompt_lengths: number of real tokens in each row's prompt; the whole row if not given.
        meta: notes, the same for every run.

    Raises:
        ValueError: no site; a number of runs or prompt lengths that is not the number of rows; a row without a real token; a
            position that a row does not have; or an argument that ``RunStore.writing`` refuses.
        RuntimeError: a hook that did not fire. After any error no run is kept.
    """
    sites, selection = tuple(sites), selection or TokenSelection()
    if not sites:
        raise ValueError("nothing to record: give at least one site, as Site(0, 'resid_post')")
    if keyed := [site for site in sites if site.point in PATTERNS]:
        raise ValueError(f"{keyed[0]} has an axis of keys, for which a stored run has no room: read it with host.capture")
    if isinstance(runs, str):
        raise ValueError(f"runs is the text {runs!r:.40}: give one id for each row, as [{runs!r:.40}]")
    real = torch.ones_like(tokens, dtype=torch.bool) if attention is None else as_mask("attention", attention)
    columns = [row.nonzero()[:, 0] for row in real]
    prompts = [len(each) for each in columns] if prompt_lengths is None else prompt_lengths
    if not len(runs) == len(prompts) == len(tokens):
        raise ValueError(f"{len(tokens)} rows were given {len(runs)} run ids and {len(prompts)} prompt lengths: give one for each")
    rows = [row[each].tolist() for row, each in zip(tokens, columns)]
    kept = [_kept(*each, selection) for each in zip(runs, rows, prompts)]
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
            with suppress(KeyError):  # already evicted
                store.drop(run)
        raise


def _kept(run: str, row: Sequence[int], prompt: int, selection: TokenSelection) -> list[int]:
    """Return the selected positions of a row; ``ValueError`` for a position that it does not have."""
    if not row:
        raise ValueError(f"the row of run {run!r} has no real token: leave it out")
    if missing := selection.missing(len(row)):
        raise ValueError(f"the row of run {run!r} has {len(row)} tokens, so no position {missing[0]}: give 0 to {len(row) - 1}")
    return selection.rows(row, 0, prompt)


def _appending(site: Site, writers: Sequence[Writer], columns: Sequence[Tensor], kept: Sequence[Sequence[int]]) -> Edit:
    """Return an edit that changes nothing and appends each row's values to its writer."""

    def keep(value: Tensor) -> None:
        for writer, row, places, positions in zip(writers, value.detach(), columns, kept):
            writer.append(site, positions, row[places[list(positions)].to(row.device)])

    return keep
