"""Cells resumed over the corrupt run: its keys and values below the lowest patched position, its stream where a cell enters.

A cell at block L and position p enters at block L with the corrupt stream from p on, its own value put in; hooks are needed only
inside a block. In the last block only the scored column matters behind attention: its MLP and the unembedding see one column a
cell.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mi_route2.hosts.base import Edit
from mi_route2.hosts.decoder import Decoder
from mi_route2.interventions.sweeps.forwards import Record, Row, put, selecting, writing
from mi_route2.interventions.sweeps.plan import Costs, Group
from mi_route2.interventions.sweeps.targets import Target, seen_by
from mi_route2.sites import Site

_OVERHEAD, _MOST = {"cpu": 5e7}, {"cpu": 2**12}
_ACCELERATED = (2e10, 2**17)
"""FLOPs in the time of a block's call, and the tokens of a forward that a device is quick with: a CPU core makes some 6e10 FLOPs a
second and takes nearly 1 ms, an accelerator 1e14 and 0.2 ms. Groups are cut by this and by nothing that is measured in the run,
so that a sweep gives the same bits again."""


@dataclass
class _Recording:
    """Keeps every layer's keys and values ``[1 h s dh]``."""

    kept: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def update(self, key: Tensor, value: Tensor, layer: int, /) -> tuple[Tensor, Tensor]:
        self.kept[layer] = (key, value)
        return key, value


@dataclass(frozen=True)
class _Prefixed:
    """Puts the keys and values before ``start`` of a recorded run in front of those of every row."""

    kept: Mapping[int, tuple[Tensor, Tensor]]
    start: int

    def update(self, key: Tensor, value: Tensor, layer: int, /) -> tuple[Tensor, Tensor]:
        if not self.start:
            return key, value
        before = (old[:, :, : self.start].expand(len(key), -1, -1, -1) for old in self.kept[layer])
        keys, values = (torch.cat(pair, dim=2) for pair in zip(before, (key, value)))
        return keys, values


class Resumed:
    """See the module. ``decoder`` calls the model; ``start`` keeps the keys, values and streams of the run to go on from."""

    name = "resumed"

    def __init__(self, decoder: Decoder):
        self.decoder, self.host = decoder, decoder.host
        self._tokens = torch.zeros(0, dtype=torch.long)
        self._kept: Mapping[int, tuple[Tensor, Tensor]] = {}
        self._streams: dict[int, Tensor] = {}
        self._costs: Costs | None = None

    def record(self, tokens: Sequence[int], sites: Sequence[Site], places: Sequence[int]) -> Record:
        return self._record(tokens, sites, places, ())[0]

    def start(self, tokens: Sequence[int], sites: Sequence[Site], places: Sequence[int]) -> Record:
        entries = sorted({self.place(Target(site), 0)[0] for site in sites} - {0})
        found, self._kept, self._streams = self._record(tokens, sites, places, entries)
        self._tokens = torch.tensor(tokens, device=self.decoder.device)
        self._costs = self._count()
        return found

    def _record(
        self, tokens: Sequence[int], sites: Sequence[Site], places: Sequence[int], entries: Sequence[int]
    ) -> tuple[Record, Mapping[int, tuple[Tensor, Tensor]], dict[int, Tensor]]:
        """A whole run; the keys, values and the streams in front of the blocks ``entries`` too."""
        if len(tokens) > self.decoder.context:
            raise ValueError(f"the prompt has {len(tokens)} tokens, and the model takes {self.decoder.context}")
        values: dict[Site, Tensor] = {}
        streams: dict[int, Tensor] = {}
        index = torch.tensor(places, device=self.decoder.device)
        edits = {site: selecting(values, site, index) for site in sites}
        for site in (Site(layer, "resid_pre") for layer in entries):
            edits[site] = partial(_keep_stream, streams, site, edits.get(site))
        given = torch.tensor([list(tokens)], device=self.decoder.device)
        cache = _Recording()
        with torch.no_grad(), self.host.hooks(edits):
            # The unembedding works at every column where its adapters' values are asked for.
            keep = None if any(site.layer is None for site in sites) else _last(given)
            logits = self.decoder(given, *_causal(0, len(tokens), given.device), cache, keep=keep)
        return Record(values, logits[0, -1]), cache.kept, streams

    def place(self, target: Target, position: int) -> tuple[int, int]:
        """A block's own, or the next where the stream behind it is meant; the first block is entered with its tokens."""
        layer, last = target.site.layer, self.decoder.layers - 1
        if layer is None:
            return last, position
        return min(layer + (target.site.point == "resid_post"), last), position

    def costs(self) -> Costs:
        assert self._costs is not None, "start() comes first"
        return self._costs

    def _count(self) -> Costs:
        block, device = self.decoder.blocks[-1], self.decoder.device.type
        overhead, most = (table.get(device, other) for table, other in zip((_OVERHEAD, _MOST), _ACCELERATED))
        z, stream = Site(0, "z"), Site(0, "resid_pre")
        seen = self.host.capture([z, stream], self._tokens[None, :1])
        return Costs(
            layers=self.decoder.layers,
            length=len(self._tokens),
            column=2.0 * _weights(block),
            mlp=2.0 * _weights(self._mlp()),
            pair=4.0 * seen[z].numel(),
            unembed=2.0 * self.decoder.vocabulary * seen[stream].numel(),
            overhead=overhead,
            most=max(int(most), len(self._tokens)),
        )

    def run(self, group: Group, rows: Sequence[Row]) -> Float[Tensor, "n v"]:
        """``rows`` in the order in which they enter. The model is called with one sequence, to which the blocks add the others:
        what it makes of positions and of the mask is then made once."""
        columns, first = len(self._tokens) - group.start, rows[0].place[0]
        tokens = self._tokens[None, group.start :]
        found: list[Tensor] = []
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            for entry in sorted({row.place[0] for row in rows}):
                stack.callback(self._joining(rows, entry, group.start).remove)
            for handle in self._scored_column(found, columns, alone=all(self._seen(row) for row in rows)):
                stack.callback(handle.remove)
            stack.enter_context(self.host.hooks(writing(rows, group.start, columns, apart=self._in_stream)))
            entering = (first, self._streams[first][None, group.start :]) if first else None
            cache = _Prefixed(self._kept, group.start)
            self.decoder(tokens, *_causal(group.start, columns, tokens.device), cache, entry=entering)
        return found[0]

    def _in_stream(self, row: Row) -> bool:
        """Whether a row's value is put into the stream with which it enters."""
        if row.target is None:
            return False
        (entry, _), site = row.place, row.target.site
        return site == Site(entry, "resid_pre") or (site.layer == entry - 1 and site.point == "resid_post")

    def _joining(self, rows: Sequence[Row], entry: int, start: int) -> RemovableHandle:
        """Lets block ``entry`` go on with the rows that enter there as well."""
        joining = [row for row in rows if row.place[0] == entry]
        among = [i for i, row in enumerate(joining) if self._in_stream(row)]
        # The first to enter take the sequence's place that the model was called with.
        stream = None if entry == rows[0].place[0] else self._streams[entry][None, start:]
        hook = partial(_join, joining, among, start, stream)
        return self.decoder.blocks[entry].register_forward_pre_hook(hook, with_kwargs=True, prepend=True)

    def _seen(self, row: Row) -> bool:
        """Whether a row writes nothing behind the last block's attention, but at the scored column."""
        behind = row.target is not None and not seen_by(row.target.site, self.decoder.layers)
        return not behind or row.positions == (len(self._tokens) - 1,)

    def _scored_column(self, found: list[Tensor], columns: int, alone: bool) -> list[RemovableHandle]:
        """Finds the rows' logits behind the last column, and tells the model of one sequence, as it was called.

        ``alone``: the last block's MLP and the unembedding see that column only. The block adds what its MLP says to every column
        of the stream: those before the last come out wrong, and nothing reads them.
        """
        handles = [self.decoder.unembed.register_forward_hook(partial(_find, found, columns))]
        if alone and columns > 1:
            handles += [module.register_forward_pre_hook(_last_column) for module in (self._mlp(), self.decoder.unembed)]
        return handles

    def _mlp(self) -> nn.Module:
        """The last block's MLP."""
        at: Any = self.host.architecture.points["mlp_out"]
        return self.decoder.blocks[-1].get_submodule(at.path)


def _keep_stream(streams: dict[int, Tensor], site: Site, also: Edit | None, value: Tensor) -> None:
    assert site.layer is not None
    streams[site.layer] = value.detach()[0].clone()
    if also is not None:
        also(value)


_Called = tuple[tuple[Any, ...], dict[str, Any]]


def _join(
    joining: Sequence[Row],
    among: Sequence[int],
    start: int,
    stream: Tensor | None,
    _module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> _Called:
    """A block's arguments with the stream of more rows; ``None`` for ``stream``: with that of these rows alone."""
    before: Tensor = args[0] if args else kwargs["hidden_states"]
    new = (before if stream is None else stream).repeat(len(joining), 1, 1)
    if among:
        put(new, joining, among, start)
    if stream is not None:
        new = torch.cat((before, new))
    return ((new, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": new})


def _last_column(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (args[0][:, -1:], *args[1:])


def _find(found: list[Tensor], columns: int, _module: nn.Module, _args: Any, output: Tensor) -> Tensor:
    found.append(output[:, -1])
    return output[:1, -1:].expand(1, columns, -1)


def _weights(module: nn.Module) -> int:
    """Numbers that a token is multiplied with."""
    return sum(p.numel() for p in (*module.parameters(), *module.buffers()) if p.ndim >= 2)


def _last(tokens: Tensor) -> Tensor:
    return torch.tensor([tokens.shape[1] - 1], device=tokens.device)


def _causal(start: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Positions ``[1 t]`` from ``start`` on, and which keys from 0 on their queries may read ``[1 1 t S]``."""
    positions = torch.arange(start, start + columns, device=device)
    allowed = torch.arange(start + columns, device=device) <= positions[:, None]
    return positions[None], allowed[None, None]
