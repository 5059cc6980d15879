"""Forwards of a sweep: planning which cells run together, and running them whole or resumed from the corrupt run.

``Resumed`` enters the model at a cell's own block and position and reuses the keys, values and residual streams of the corrupt run.
What other positions do not read in that block (queries, and all behind the attention) is patched at every position of one sequence,
whose cells enter at the next block. ``Whole`` runs the whole prompt on any host.
"""

from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mi_route2.architectures import PATTERNS
from mi_route2.hosts.base import Edit, Host, forward_hooks, of_libraries
from mi_route2.hosts.decoder import Decoder
from mi_route2.patching.targets import Target, entries, seen_by
from mi_route2.sites import Site

T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """Limits on what runs together, for sequences of ``length`` tokens.

    Attributes:
        length: Number of tokens.
        most: Limit on the tokens of a group; a quarter of the limit on its keys, which are copied for each cell.
        most_positions: Limit on the patched positions of cells whose streams are held at a time.
    """

    length: int
    most: int
    most_positions: int

    def rows(self, columns: int) -> int:
        """Return the maximum number of cells in a group over this number of columns."""
        return max(1, min(self.most // columns, 4 * self.most // self.length))


@dataclass(frozen=True)
class CellGroup:
    """Cells that run together over the columns from ``start`` on, as indices in the order in which they enter."""

    start: int
    cells: tuple[int, ...]


def ended(steps: Generator[None, None, T]) -> T:
    """Run a generator to its end and return its return value."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def plan(places: Sequence[tuple[int, int]], limits: Limits, batch: int | None = None) -> list[CellGroup]:
    """Group cells with these ``(entry, position)``, as many as may run together; ``batch`` limits the cells of a group."""
    if batch is not None and batch < 1:
        raise ValueError(f"a batch of {batch} cells is not possible: choose at least 1, or leave it out")
    # Neighbors in this order begin at nearly the same position, so a group runs few columns that a cell does not need.
    cells = sorted(range(len(places)), key=lambda cell: places[cell][::-1])
    groups: list[CellGroup] = []
    low = 0
    while low < len(cells):
        start = places[cells[low]][1]
        size = min(limits.rows(limits.length - start), batch or len(cells))
        groups.append(CellGroup(start, tuple(sorted(cells[low : low + size], key=lambda cell: places[cell][0]))))
        low += size
    return groups


@dataclass(frozen=True, eq=False)
class PatchedRow:
    """One sequence of a forward: the corrupt run, with ``values`` [p ...] patched at ``target`` and ``positions`` (if any).

    ``place`` is the block where the row enters, and its first column. If the patch lies before that block, ``stream`` [p d] is the
    residual stream with which the row enters, at ``positions``.
    """

    place: tuple[int, int]
    target: Target | None = None
    positions: tuple[int, ...] = ()
    values: Tensor | None = None
    stream: Tensor | None = None

    @property
    def head(self) -> int | None:
        """Head of the target, if any."""
        return None if self.target is None else self.target.head


@dataclass(frozen=True, eq=False)
class SiteRecord:
    """Result of a run: values of sites at the requested positions, and the logits at its last token."""

    values: Mapping[Site, Tensor]
    logits: Float[Tensor, " v"]


def passes(rows: Sequence[PatchedRow], most: int) -> list[dict[int, list[PatchedRow]]]:
    """Plan forwards of the corrupt run in which sequences join for the length of a block, first that run itself, then ``most``.

    They are for rows that enter behind the block in which they patch. What such a row changes of the block's output is its own
    columns, so one sequence with the values of all rows of a target has the streams of them all.
    """
    idle = tuple(sorted({row.place[1] for row in rows if row.target is None}))
    by_target: dict[Target, list[PatchedRow]] = defaultdict(list)
    for row in rows:
        if row.target is not None and row.target.site.layer == row.place[0] - 1 and row.target.site.point != "resid_post":
            by_target[row.target].append(row)
    planned: list[dict[int, list[PatchedRow]]] = []
    seen: dict[int, int] = defaultdict(int)
    for target, some in by_target.items():
        layer = some[0].place[0] - 1
        number, seen[layer] = seen[layer] // most, seen[layer] + 1
        if number == len(planned):
            planned.append({})
        positions = tuple(position for row in some for position in row.positions)
        values = torch.cat([row.values for row in some if row.values is not None])
        joining = planned[number].setdefault(layer, [PatchedRow((layer, 0), positions=idle)])
        joining.append(PatchedRow((layer, 0), target, positions, values))
    return planned


def span(joining: Mapping[int, Sequence[PatchedRow]]) -> range:
    """Return the columns that hold all positions of these sequences, which are the only ones to be run."""
    positions = [position for rows in joining.values() for row in rows for position in row.positions]
    return range(min(positions), max(positions) + 1)


@runtime_checkable
class Forwards(Protocol):
    """Protocol: runs the model for a sweep."""

    name: str

    def record(self, tokens: Sequence[int], sites: Sequence[Site], places: Sequence[int]) -> SiteRecord:
        """Run ``tokens`` and return the values of ``sites`` at ``places``."""
        ...

    def start(self, tokens: Sequence[int], sites: Sequence[Site], places: Sequence[int]) -> SiteRecord:
        """Run ``tokens`` as ``record`` does, and keep the run for ``run`` to resume from."""
        ...

    def places(self, target: Target, columns: Sequence[int]) -> list[tuple[int, int]]:
        """Return the block where each cell of a target enters, and its first column, which ``columns`` are."""
        ...

    def limits(self) -> Limits:
        """Return the limits on groups of cells."""
        ...

    def enter(self, rows: Sequence[PatchedRow], most: int) -> Generator[None, None, list[PatchedRow]]:
        """Return the rows with the streams with which they enter; yield before each forward, of ``most`` more sequences a block."""
        ...

    def run(self, group: CellGroup, rows: Sequence[PatchedRow]) -> Float[Tensor, "n v"]:
        """Return the logits at the last token of each row."""
        ...


def by_position(edits: Mapping[Site, Edit]) -> dict[Site, Edit]:
    """Give the edits of ``scores`` and ``pattern`` values ``[b q h k]``, whose positions and heads are where others have them."""
    return {site: partial(_by_position, edit) if site.point in PATTERNS else edit for site, edit in edits.items()}


def _by_position(edit: Edit, value: Tensor) -> Tensor | None:
    new = edit(value.transpose(1, 2))
    return None if new is None else new.transpose(1, 2)


def selecting(into: dict[Site, Tensor], site: Site, index: Tensor) -> Edit:
    """Return an edit that stores the first sequence's values at the positions ``index``."""
    return partial(_keep, into, site, index)


def _keep(into: dict[Site, Tensor], site: Site, index: Tensor, value: Tensor) -> None:
    into[site] = value.detach()[0].index_select(0, index)


def writing(rows: Sequence[PatchedRow], start: int, columns: int) -> dict[Site, Edit]:
    """Return edits that patch the rows' values, but those in a ``stream``, in a forward over ``columns`` columns from ``start``."""
    by_site: dict[Site, list[int]] = defaultdict(list)
    for i, row in enumerate(rows):
        if row.target is not None and row.stream is None:
            by_site[row.target.site].append(i)
    return {site: partial(_write, rows, numbers, start, columns) for site, numbers in by_site.items()}


def _write(rows: Sequence[PatchedRow], numbers: Sequence[int], start: int, columns: int, value: Tensor) -> Tensor:
    new = value.clone()
    lacking = columns - value.shape[1]  # after the last block's attention, only the last column may be left
    for by_head in (False, True):  # a head is one more axis of the index, so the two kinds cannot be one assignment
        some = [i for i in numbers if (rows[i].head is not None) == by_head]
        if some:
            put(
                new,
                [(i, p - start - lacking, rows[i].head) for i in some for p in rows[i].positions],
                [rows[i].values for i in some],
            )
    return new


def put(into: Tensor, places: Sequence[tuple[int, int, int | None]], values: Sequence[Tensor | None]) -> None:
    """Write ``values`` [p ...] one after another at ``places``: rows, columns, and heads, which all of them have or none."""
    axes = list(zip(*places)) if places[0][2] is not None else list(zip(*places))[:2]
    new = torch.cat([value for value in values if value is not None])
    into[tuple(torch.tensor(axis, device=into.device) for axis in axes)] = new.to(into)


def with_idle(rows: list[PatchedRow], count: int, otherwise: tuple[int, int]) -> list[PatchedRow]:
    """Return ``rows`` with ``count`` unpatched rows among them, spread evenly, each at the place of a neighboring cell."""
    if not rows:
        return [PatchedRow(otherwise)] * count
    mixed = sorted(rows, key=lambda row: row.place[::-1])  # groups are cut in order of position
    # spread over groups of all sizes, because the rounding of a forward depends on its shape; from the end, so that indices hold
    for i in np.linspace(0, len(rows) - 1, count).round().astype(int)[::-1]:
        mixed.insert(int(i), PatchedRow(mixed[i].place))
    return mixed


_ACCELERATED = 2**17
"""Number of tokens per forward at which an accelerator is efficient. Groups depend on constants and on no measurement, so that a
repeated sweep gives the same bits."""
_STREAM, _FEWEST = 2**18, 2**10
"""Numbers of a group's residual stream that stay in a CPU's cache from one operation to the next, and the number of tokens from
which on its matrix products are efficient."""
HELD = 2**26
"""Numbers of the streams with which a sweep's cells enter that are held at a time, 256 MB in float32, and twice while rows
get them; more are computed later."""
_LOGITS = 2**29
"""Most logits of a forward on an accelerator, which would take 2 GB in float32."""


@dataclass
class _Recording:
    """Cache that keeps every layer's keys and values ``[1 h s dh]``."""

    kept: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def update(self, key: Tensor, value: Tensor, layer: int, /) -> tuple[Tensor, Tensor]:
        self.kept[layer] = (key, value)
        return key, value


@dataclass(frozen=True)
class _Prefixed:
    """Cache that puts the keys and values before ``start`` of a recorded run in front of those of every row."""

    kept: Mapping[int, tuple[Tensor, Tensor]]
    start: int

    def update(self, key: Tensor, value: Tensor, layer: int, /) -> tuple[Tensor, Tensor]:
        if not self.start:
            return key, value
        # a view of the one recorded row for every row: ``torch.cat`` makes the only copy
        before = (old[:, :, : self.start].expand(len(key), -1, -1, -1) for old in self.kept[layer])
        keys, values = (torch.cat(pair, dim=2) for pair in zip(before, (key, value)))
        return keys, values


class Resumed:
    """Forwards that resume from a recorded run; see the module.

    ``decoder`` calls the model; ``start`` stores the keys, values and residual streams of the run.
    """

    name = "resumed"

    def __init__(self, decoder: Decoder):
        self.decoder, self.host = decoder, decoder.host
        self._tokens = torch.zeros(0, dtype=torch.long)
        self._kept: Mapping[int, tuple[Tensor, Tensor]] = {}
        self._streams: dict[int, Tensor] = {}

    def record(self, tokens: Sequence[int], sites: Sequence[Site], places: Sequence[int]) -> SiteRecord:
        return self._record(tokens, sites, places, ())[0]

    def start(self, tokens: Sequence[int], sites: Sequence[Site], places: Sequence[int]) -> SiteRecord:
        # block 0 is entered with the tokens themselves, so nobody needs the stream before it
        before = sorted({entry for site in sites for entry in entries(site, self.decoder.layers)} - {0})
        record, self._kept, self._streams = self._record(tokens, sites, places, before)
        self._tokens = torch.tensor(tokens, device=self.decoder.device)
        return record

    def _record(
        self, tokens: Sequence[int], sites: Sequence[Site], places: Sequence[int], entries: Sequence[int]
    ) -> tuple[SiteRecord, Mapping[int, tuple[Tensor, Tensor]], dict[int, Tensor]]:
        """Run the whole prompt; return also the keys, the values and the residual streams before the blocks ``entries``."""
        values: dict[Site, Tensor] = {}
        streams: dict[int, Tensor] = {}
        index = torch.tensor(places, device=self.decoder.device)
        edits = {site: selecting(values, site, index) for site in sites}
        for site in (Site(layer, "resid_pre") for layer in entries):
            edits[site] = partial(_keep_stream, streams, site, edits.get(site))
        ids = torch.tensor([list(tokens)], device=self.decoder.device)
        cache = _Recording()
        with torch.no_grad(), self.host.hooks(edits), self.host.fused():
            # If values of the unembedding's adapters are requested, every column must be unembedded.
            keep = None if any(site.layer is None for site in sites) else _last(ids)
            logits = self.decoder(ids, *_causal(0, len(tokens), ids.device), cache, keep=keep)
        return SiteRecord(values, logits[0, -1]), cache.kept, streams

    def places(self, target: Target, columns: Sequence[int]) -> list[tuple[int, int]]:
        """Return the block of the target, or that behind it, where other positions read what it changes, if this is cheaper.

        A sequence that has the values of all these cells costs as many columns as they are apart, and as many of the corrupt run.
        """
        inside, behind = entries(target.site, self.decoder.layers)
        separate = sum(len(self._tokens) - column for column in columns)
        together = 1 + max(columns, default=0) - min(columns, default=0)
        shared = target.site.point == "resid_post" or separate > 2 * together
        return [(behind if shared else inside, column) for column in columns]

    def enter(self, rows: Sequence[PatchedRow], most: int) -> Generator[None, None, list[PatchedRow]]:
        """Return the rows with their streams: those that they patch, and those behind the block in which they patch.

        Where there are any of the second kind, unpatched rows enter with a stream of the same forward: their noise is that of the
        others.
        """
        streams: dict[tuple[int, Target | None, int], Tensor] = {}
        for joining in passes(rows, most):
            yield
            self._pass(joining, streams)
        return [_entering(row, streams) for row in rows]

    def _pass(self, joining: Mapping[int, Sequence[PatchedRow]], streams: dict[tuple[int, Target | None, int], Tensor]) -> None:
        """Run columns of the corrupt run, with sequences beside it in their blocks; keep what a block gives at their positions."""
        columns = span(joining)
        start, tokens = columns.start, self._tokens[None, columns.start : columns.stop]
        edits: dict[Site, Edit] = {}
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            for layer, rows in joining.items():
                block, join = self.decoder.blocks[layer], partial(_join, rows, (), 0, None)
                stack.callback(block.register_forward_pre_hook(join, with_kwargs=True, prepend=True).remove)
                stack.callback(block.register_forward_hook(partial(_leave, rows, layer + 1, start, streams)).remove)
                edits |= writing(rows, start, len(columns))
            stack.enter_context(self.host.hooks(edits))
            stack.enter_context(self.host.fused())
            cache = _Prefixed(self._kept, start)
            self.decoder(tokens, *_causal(start, len(columns), tokens.device), cache, keep=_last(tokens))

    def limits(self) -> Limits:
        length, (width,) = len(self._tokens), self.decoder.shape(Site(0, "resid_pre"))
        on_cpu = self.decoder.device.type == "cpu"
        most = max(_FEWEST, _STREAM // width) if on_cpu else min(_ACCELERATED, _LOGITS // self.decoder.vocabulary)
        return Limits(length, max(most, length), max(1, HELD // width))

    def run(self, group: CellGroup, rows: Sequence[PatchedRow]) -> Float[Tensor, "n v"]:
        """Return the logits of ``rows``, given in the order in which they enter.

        The model is called with one sequence, and hooks at the blocks add the other rows, so that the model computes positions and
        mask only once.
        """
        columns, first = len(self._tokens) - group.start, rows[0].place[0]
        tokens = self._tokens[None, group.start :]
        logits: list[Tensor] = []
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            for entry in sorted({row.place[0] for row in rows}):
                stack.callback(self._joining(rows, entry, group.start).remove)
            stack.enter_context(self.host.hooks(writing(rows, group.start, columns)))
            stack.enter_context(self.host.fused())  # before hooks of ours, which it would take for somebody's
            entering = (first, self._streams[first][None, group.start :]) if first else None
            places, cache = _causal(group.start, columns, tokens.device), _Prefixed(self._kept, group.start)
            if not self.decoder.compared:  # its block may be of another shape, and it may scale or cap what the unembedding gives
                whole = any(row.target is not None and row.target.site.layer is None for row in rows)
                return self.decoder(tokens, *places, cache, entry=entering, keep=None if whole else _last(tokens))[:, -1]
            for handle in self._scored_column(logits, columns, last_only=all(self._seen(row) for row in rows)):
                stack.callback(handle.remove)
            self.decoder(tokens, *places, cache, entry=entering)
        return logits[0]

    def _joining(self, rows: Sequence[PatchedRow], entry: int, start: int) -> RemovableHandle:
        """Register a hook that adds, at block ``entry``, the rows that enter there."""
        joining = [row for row in rows if row.place[0] == entry]
        among = [i for i, row in enumerate(joining) if row.stream is not None]
        # The rows that enter first replace the sequence with which the model was called.
        stream = None if entry == rows[0].place[0] else self._streams[entry][None, start:]
        hook = partial(_join, joining, among, start, stream)
        # ``prepend``, so that a library's hooks at this block see all rows
        return self.decoder.blocks[entry].register_forward_pre_hook(hook, with_kwargs=True, prepend=True)

    def _seen(self, row: PatchedRow) -> bool:
        """Return whether a row writes nothing after the last block's attention, except at the scored column."""
        behind = row.target is not None and not seen_by(row.target.site, self.decoder.layers)
        return not behind or row.positions == (len(self._tokens) - 1,)

    def _scored_column(self, logits: list[Tensor], columns: int, last_only: bool) -> list[RemovableHandle]:
        """Register hooks that read the rows' logits at the last column, and return logits of a single sequence to the model.

        With ``last_only``, the last block computes nothing but keys and values at the other columns: its queries, attention, norm
        and MLP, and the unembedding, see the last column only. The block adds that to every column of the stream, so the columns
        before the last one are wrong, but nothing reads them.
        """
        handles = [self.decoder.unembed.register_forward_hook(partial(_keep_scored, logits, columns), prepend=True)]
        if not last_only or columns == 1:
            return handles
        block, linears = self.decoder.blocks[-1], self.host.architecture.linears
        # attention expects all columns of these two: they give views of the last one
        inside = [block.get_submodule(at.path) for at in (linears["attn.q"], linears["attn.o"]) if at.fused is None]
        for module in (*inside, self._in_last("resid_mid"), self.decoder.unembed):
            handles.append(module.register_forward_pre_hook(_last_column, prepend=True))
        handles += [module.register_forward_hook(partial(_spread, columns), prepend=True) for module in inside]
        handles.append(self._in_last("attn_out").register_forward_pre_hook(_last_query, with_kwargs=True))
        return handles

    def _in_last(self, point: str) -> nn.Module:
        """Return the last block's module at a point."""
        at: Any = self.host.architecture.points[point]
        return self.decoder.blocks[-1].get_submodule(at.path)


def _keep_stream(streams: dict[int, Tensor], site: Site, also: Edit | None, value: Tensor) -> None:
    assert site.layer is not None
    streams[site.layer] = value.detach()[0].clone()
    if also is not None:
        also(value)


_Called = tuple[tuple[Any, ...], dict[str, Any]]


def _join(
    joining: Sequence[PatchedRow],
    among: Sequence[int],
    start: int,
    stream: Tensor | None,
    _module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> _Called:
    """Return a block's arguments with the streams of more rows added; if ``stream`` is ``None``, with those of ``joining`` only."""
    before: Tensor = args[0] if args else kwargs["hidden_states"]
    new = (before if stream is None else stream).repeat(len(joining), 1, 1)
    if among:
        places = [(i, position - start, None) for i in among for position in joining[i].positions]
        put(new, places, [joining[i].stream for i in among])
    if stream is not None:
        new = torch.cat((before, new))
    return ((new, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": new})


def _leave(
    rows: Sequence[PatchedRow],
    entry: int,
    start: int,
    streams: dict[tuple[int, Target | None, int], Tensor],
    _module: nn.Module,
    _args: Any,
    output: Tensor | tuple[Any, ...],
) -> Tensor | tuple[Any, ...]:
    """Keep the rows' streams before block ``entry`` at their positions; return the first row's whole stream alone."""
    stream = output[0] if isinstance(output, tuple) else output
    for i, row in enumerate(rows):
        kept = stream[i, [position - start for position in row.positions]]
        streams |= {(entry, row.target, position): value for position, value in zip(row.positions, kept)}
    return (stream[:1], *output[1:]) if isinstance(output, tuple) else stream[:1]


def _entering(row: PatchedRow, streams: Mapping[tuple[int, Target | None, int], Tensor]) -> PatchedRow:
    """Return ``row`` with the stream with which it enters, unless that is the one that the corrupt run left."""
    (entry, column), site = row.place, None if row.target is None else row.target.site
    positions = row.positions or (column,)
    if (entry, row.target, positions[0]) in streams:
        return replace(row, positions=positions, stream=torch.stack([streams[entry, row.target, p] for p in positions]))
    patched = site is not None and (site.point == "resid_pre" or (site.point == "resid_post" and site.layer == entry - 1))
    return replace(row, stream=row.values) if patched else row


def _last_column(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (args[0][:, -1:], *args[1:])


def _last_query(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Called:
    """Return an attention's arguments with the mask of its last query; a ``Decoder``'s attention then computes that one alone."""
    mask = kwargs.get("attention_mask")
    return (args, kwargs) if mask is None else (args, {**kwargs, "attention_mask": mask[:, :, -1:]})


def _spread(columns: int, _module: nn.Module, _args: Any, output: Tensor) -> Tensor:
    return output.expand(-1, columns, -1)


def _keep_scored(logits: list[Tensor], columns: int, _module: nn.Module, _args: Any, output: Tensor) -> Tensor:
    logits.append(output[:, -1])
    return output[:1, -1:].expand(1, columns, -1)


def _last(tokens: Tensor) -> Tensor:
    return torch.tensor([tokens.shape[1] - 1], device=tokens.device)


def _causal(start: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return positions ``[1 t]`` from ``start`` on, and the causal mask of their queries over all keys ``[1 1 t S]``."""
    positions = torch.arange(start, start + columns, device=device)
    allowed = torch.arange(start + columns, device=device) <= positions[:, None]
    return positions[None], allowed[None, None]


_TOKENS = {"cpu": 2**11}
_ROOM = 2**27
"""Maximum number of tokens in a whole forward, and of logits."""


class Whole:
    """Forwards of whole prompts on any host; nothing is kept between forwards."""

    name = "whole"

    def __init__(self, host: Host):
        self.host, self._device = host, next(host.model.parameters()).device
        self._tokens = torch.zeros(0, dtype=torch.long)
        self._vocabulary = 1

    def record(self, tokens: Sequence[int], sites: Sequence[Site], places: Sequence[int]) -> SiteRecord:
        values: dict[Site, Tensor] = {}
        index = torch.tensor(places, device=self._device)
        with torch.no_grad(), self.host.hooks(by_position({site: selecting(values, site, index) for site in sites})):
            logits = self.host.logits(torch.tensor([list(tokens)], device=self._device))
        return SiteRecord(values, logits[0, -1])

    def start(self, tokens: Sequence[int], sites: Sequence[Site], places: Sequence[int]) -> SiteRecord:
        record = self.record(tokens, sites, places)
        self._tokens, self._vocabulary = torch.tensor(tokens, device=self._device), len(record.logits)
        return record

    def places(self, target: Target, columns: Sequence[int]) -> list[tuple[int, int]]:
        return [(0, 0)] * len(columns)

    def limits(self) -> Limits:
        """Return limits that make groups as large as memory allows."""
        length = len(self._tokens)
        most = min(_TOKENS.get(self._device.type, _ACCELERATED), _ROOM // self._vocabulary)
        return Limits(length, max(most, length), HELD)

    def enter(self, rows: Sequence[PatchedRow], most: int) -> Generator[None, None, list[PatchedRow]]:
        """Return the rows as they are, without a forward."""
        yield from ()
        return list(rows)

    def run(self, group: CellGroup, rows: Sequence[PatchedRow]) -> Float[Tensor, "n v"]:
        return self.under(writing(rows, 0, len(self._tokens)), len(rows))

    def under(self, edits: Mapping[Site, Edit], n: int) -> Float[Tensor, "n v"]:
        """Return the logits at the last token of ``n`` copies of the started run, under ``edits``."""
        with torch.no_grad(), self.host.hooks(by_position(edits)):
            return self.host.logits(self._tokens.expand(n, -1))[:, -1]


def forwards(host: Host, how: str = "auto", targets: Sequence[Target] = ()) -> Forwards:
    """Return ``resumed`` or ``whole`` forwards, or for ``auto`` the first of them that the host and the ``targets`` support.

    Raises:
        ValueError: Another name, or ``resumed`` on a host or architecture without a decoder, under hooks of others, or at a target
            whose values have an axis of keys.
    """
    if how not in ("auto", "resumed", "whole"):
        raise ValueError(f"unknown forwards {how!r}: choose among auto, resumed, whole")
    if how == "whole":
        return Whole(host)
    try:
        _refuse_hooks(host)
        if keyed := [target for target in targets if target.site.point in PATTERNS]:
            raise ValueError(f"{keyed[0]} has an axis of keys, which a resumed run sees in part: take how='whole'")
        if (decoder := Decoder(host)).private:
            raise ValueError("the model keeps its state in a cache of its own, from which no forward can resume: use whole")
        return Resumed(decoder)
    except ValueError:  # the decoder does not support this host or architecture
        if how == "resumed":
            raise
        return Whole(host)


def _refuse_hooks(host: Host) -> None:
    """Raise ``ValueError`` if somebody's hook stands on the model.

    It would see the columns of a group and not the whole prompt, and act once more on the stream with which a cell enters.
    """
    if not all(map(of_libraries, forward_hooks(host.model.modules()))):
        raise ValueError(
            "a hook stands on the model, and a resumed run would show it other positions than the prompt has: take how='whole'"
        )
