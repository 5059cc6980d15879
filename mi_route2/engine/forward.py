"""Forwards over the pieces chosen by the scheduler, with each request's own interventions at each site."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mi_route2.engine.cache import SHELF, PrivateSlots, Slots
from mi_route2.engine.request import EngineRequest
from mi_route2.hosts.base import Edit, Host
from mi_route2.hosts.decoder import Decoder
from mi_route2.patching.patches import Resolved, firing
from mi_route2.sites import Site
from mi_route2.steering.plan import BatchLayout, Piece
from mi_route2.steering.specs import patch, wide
from mi_route2.steering.state import Readings, SteeringState

PREPARED = 16
"""Sets of sites whose hooks are kept, to be registered again in a later step."""

Sink = Callable[[Tensor], None]
"""Receives the captured rows ``[n, ...]`` of one request at one site."""


@dataclass
class Work:
    """Captures and patches at one site in one forward, by ``(row, column)``."""

    captures: list[tuple[Sink, list[tuple[int, int]]]] = field(default_factory=list)
    patches: list[tuple[int, int, Resolved]] = field(default_factory=list)

    def take(self, h: Tensor) -> list[tuple[Sink, Tensor]]:
        """Return copies of the captured values with their sinks."""
        places = [place for _, some in self.captures for place in some]
        values = h[_index(places, 0, h), _index(places, 1, h)]
        return list(zip((sink for sink, _ in self.captures), values.split([len(some) for _, some in self.captures]), strict=True))

    def put(self, h: Tensor) -> Tensor:
        """Return ``h`` with the patches applied; other tokens are unchanged."""
        rows, columns = _index(self.patches, 0, h), _index(self.patches, 1, h)
        there = h[rows, columns]
        source = torch.stack([patch.source.flatten() for *_, patch in self.patches])
        alpha = torch.stack([_alpha(patch, h) for *_, patch in self.patches])
        new = patch(there.flatten(1), source, alpha).reshape(there.shape)
        return h.index_put((rows, columns), new)


def _index(places: Sequence[tuple], which: int, like: Tensor) -> Tensor:
    return torch.tensor([place[which] for place in places], device=like.device)


def _alpha(patch: Resolved, like: Tensor) -> Tensor:
    if isinstance(patch.alpha, Tensor):
        return patch.alpha.flatten()
    return torch.full((patch.source.numel(),), patch.alpha, device=like.device, dtype=wide(patch.source.dtype))


class LayoutForward:
    """Run layouts on a decoder. Hooks stay registered between the forwards of a step, until ``close``.

    Every hook must fire in every forward: ``RuntimeError`` names the sites that did not. A failed forward captures nothing, so that
    it can be run again.
    """

    def __init__(self, decoder: Decoder, steering: SteeringState):
        self._decoder, self._steering = decoder, steering
        self._host: Host = decoder.host
        self._hooks: AbstractContextManager[None] | None = None
        self._prepared: dict[frozenset[Site], AbstractContextManager[None]] = {}
        self._sites: frozenset[Site] = frozenset()
        self._fired: set[Site] = set()
        self._work: dict[Site, Work] = {}
        self._taken: list[tuple[Sink, Tensor]] = []
        self._steered = False

    def run(
        self, layout: BatchLayout, tokens: Tensor, cache: Any, work: dict[Site, Work], keep: Tensor | None, steered: bool
    ) -> tuple[Tensor, Readings | None]:
        """Return the logits ``[b n v]`` at the columns ``keep``, and the monitor readings.

        ``steered`` is the answer of ``SteeringState.begin(layout)``. The model runs in inference mode, in which torch keeps no
        record of views and versions: a twentieth of the engine's time.
        """
        self._steered = steered
        self._need(work.keys() | self._steering.sites() if self._steered else work.keys())
        self._work = work
        self._fired.clear()
        self._taken.clear()
        try:
            free = self._decoder.private or (self._decoder.unmasked and cache.causal)
            allowed = None if free else cache.allowed
            with torch.inference_mode():
                logits = self._decoder(tokens, layout.positions, allowed, cache, keep=keep)
            if silent := self._sites - self._fired:
                raise RuntimeError(f"these hooks did not fire in a forward of the engine: {', '.join(map(str, sorted(silent)))}")
            read = self._steering.end() if self._steered else None
        finally:
            self._work, self._steered = {}, False
        for sink, rows in self._taken:
            sink(rows)
        self._taken.clear()
        return logits, read

    def close(self) -> None:
        """Remove the hooks."""
        hooks, self._hooks, self._sites = self._hooks, None, frozenset()
        if hooks is not None:
            # Fired was checked after every forward; with an exception, the context does not check it again.
            hooks.__exit__(_ClosedError, _ClosedError(), None)

    def _need(self, sites: Iterable[Site]) -> None:
        missing = frozenset(sites) - self._sites
        if not missing:
            return
        wanted = self._sites | missing
        self.close()
        hooks = self._prepared.get(wanted) or self._host.hooks({site: self._edit(site) for site in sorted(wanted)})
        hooks.__enter__()
        self._hooks, self._sites = hooks, wanted
        if len(self._prepared) == PREPARED:
            self._prepared.clear()
        self._prepared[wanted] = hooks

    def forget(self) -> None:
        """Drop all state that belongs to the model's modules, after a change of the model."""
        self._prepared.clear()

    def _edit(self, site: Site) -> Edit:
        def edit(h: Tensor) -> Tensor | None:
            self._fired.add(site)
            work = self._work.get(site)
            new = h if work is None else self._worked(work, h)
            if self._steered:
                new = self._steering.at(site, new)
            return None if new is h else new

        return edit

    @torch.inference_mode(False)  # what is captured may be trained on
    @torch.no_grad()
    def _worked(self, work: Work, h: Tensor) -> Tensor:
        if work.captures:
            self._taken += work.take(h)
        return work.put(h) if work.patches else h


class _ClosedError(Exception):
    """Exception that leaves the hooks' context early."""


TokenSpans = list[tuple[EngineRequest, int, int]]
"""Requests with the start position and number of the tokens that each computes in one forward."""

WASTE = 2
"""In one forward over prompt chunks no chunk is longer than this many times the shortest."""


@dataclass(frozen=True, eq=False)
class StepOutput:
    """Output of one engine step.

    ``due`` are the requests to sample a next token for, with their logits ``[n v]`` in float32 or wider; ``readings`` are the
    monitor readings of each forward; ``seen`` maps request to site to the value at its last token; ``failed`` maps each request
    whose forward raised to the reason.
    """

    due: list[EngineRequest]
    logits: Float[Tensor, "n v"] | None
    readings: list[Readings]
    seen: dict[int, dict[Site, Tensor]]
    failed: dict[EngineRequest, str]


def failure(what: str, error: Exception) -> str:
    """Return the sentence with which a request ends; what foreign code said, a prompt perhaps, is behind `` failed with `` only."""
    return f"{what} failed with {type(error).__name__}: {' '.join(str(error).split()) or 'it says no more':.400}"


class ForwardRunner:
    """Runner of the pieces of a step.

    ``exact`` runs every request by itself, in chunks that end at multiples of ``grain`` or with the prompt. So does a private
    decoder, with whole prompts.
    """

    def __init__(self, decoder: Decoder, slots: Slots | PrivateSlots, steering: SteeringState, *, exact: bool, grain: int):
        self.decoder, self.slots, self.steering = decoder, slots, steering
        self._exact, self._grain = exact, grain
        self._forward = LayoutForward(decoder, steering)
        self.forget = self._forward.forget

    def run(self, pieces: Iterable[tuple[EngineRequest, int]], wants: frozenset[Site] = frozenset()) -> StepOutput:
        """Compute the pieces; ``wants`` are sites to capture at the last token of each.

        A forward that fails is repeated for each of its requests alone, so that only the request that cannot run ends. No hook is
        left on the model between two steps.
        """
        try:
            return self._run(pieces, wants)
        finally:
            self._forward.close()

    def _run(self, pieces: Iterable[tuple[EngineRequest, int]], wants: frozenset[Site]) -> StepOutput:
        output = StepOutput([], None, [], {}, {})
        logits: list[Tensor] = []
        waiting = deque(self._groups(pieces))
        while waiting:
            group = [span for span in waiting.popleft() if span[0] not in output.failed]
            if not group:
                continue  # an earlier piece of the same request failed
            work = self._work(group)
            for site in wants:
                _watch(work.setdefault(site, Work()), site, group, output.seen)
            ends = [i for i, (sequence, start, count) in enumerate(group) if start + count == len(sequence.tokens)]
            try:
                group_logits, read = self._one(group, work)
            except Exception as error:  # isolated: out of memory, a hook that did not fire, or any error of the model
                if len(group) == 1:
                    output.failed[group[0][0]] = failure("a forward of this request", error)
                self._forward.close()  # a site that cannot fire must not be demanded of the others
                waiting.extendleft([span] for span in reversed(group) if len(group) > 1)
                continue
            output.due.extend(group[i][0] for i in ends)
            if ends:
                logits.append(group_logits if len(ends) == len(group) else group_logits[ends])
            if read is not None:
                output.readings.append(read)
        if not logits:
            return output
        whole = torch.cat(logits) if len(logits) > 1 else logits[0]
        return replace(output, logits=whole.to(torch.promote_types(whole.dtype, torch.float32)))

    def _groups(self, pieces: Iterable[tuple[EngineRequest, int]]) -> Iterator[TokenSpans]:
        if self._exact or self.decoder.private:
            for sequence, count in pieces:
                yield from ([cut] for cut in self._cuts(sequence, count))
            return
        ordered = sorted(pieces, key=lambda piece: piece[0].row)
        for _, shelf in groupby(ordered, key=lambda piece: piece[0].row // SHELF):
            yield from self._alike([(sequence, sequence.computed, count) for sequence, count in shelf])

    def _alike(self, pieces: TokenSpans) -> Iterator[TokenSpans]:
        """Yield the single tokens together, and longer pieces in groups of similar length."""
        if singles := [piece for piece in pieces if piece[2] == 1]:
            yield singles
        groups: list[TokenSpans] = []
        for piece in sorted((piece for piece in pieces if piece[2] > 1), key=lambda piece: -piece[2]):
            if not groups or piece[2] * WASTE < groups[-1][0][2]:
                groups.append([])
            groups[-1].append(piece)
        yield from (sorted(group, key=lambda piece: piece[0].row) for group in groups)

    def _cuts(self, sequence: EngineRequest, count: int) -> Iterator[tuple[EngineRequest, int, int]]:
        """Yield prompt chunks that end at multiples of the grain, and generated tokens one by one.

        The cuts do not depend on ``count``.
        """
        start, stop = sequence.computed, sequence.computed + count
        while start < stop:
            end = min((start // self._grain + 1) * self._grain, sequence.prompt) if start < sequence.prompt else start + 1
            assert end <= stop, (start, stop, end)
            yield sequence, start, end - start
            start = end

    def _one(self, group: TokenSpans, work: dict[Site, Work]) -> tuple[Float[Tensor, "b v"], Readings | None]:
        """Run one forward and advance each request's ``computed``; return the logits at the end of each piece."""
        device = self.decoder.device
        layout = BatchLayout.of([Piece(req.id, start, count, req.prompt) for req, start, count in group], device)
        width, steered = layout.positions.shape[1], self.steering.begin(layout)
        if width == 1:
            rows, keep = [req.tokens[start] for req, start, _ in group], None
        else:
            # padded with a token of its own: one that is not a number would reach it, because 0 times NaN is NaN
            rows = [req.tokens[start : start + count] + [req.tokens[start]] * (width - count) for req, start, count in group]
            columns = sorted({count - 1 for _, _, count in group})
            unembedding = any(site.layer is None for site in (*work, *(self.steering.acting if steered else ())))
            if unembedding or any(req.scored(start, count) for req, start, count in group):
                columns = list(range(width))  # the unembedding's adapters are read and written at every column
            keep = torch.tensor(columns, device=device)
        tokens = torch.as_tensor(np.array(rows, dtype=np.int64).reshape(len(group), width), device=device)
        cache = self.slots.view(layout, [req.row for req, *_ in group], aligned=self._exact)
        logits, readings = self._forward.run(layout, tokens, cache, work, keep, steered)
        for row, (req, start, count) in enumerate(group):
            req.computed = start + count
            if scored := req.scored(start, count):
                req.score(start, logits[row, :scored])
        if keep is None:
            return logits[:, 0], readings
        ends = torch.searchsorted(keep, torch.tensor([count - 1 for *_, count in group], device=device))
        return logits[torch.arange(len(group), device=device), ends], readings

    def _work(self, group: TokenSpans) -> dict[Site, Work]:
        """Return the captures and patches of the forward, by site."""
        work: dict[Site, Work] = {}
        for row, (req, start, count) in enumerate(group):
            if req.bare:
                continue
            for column, placed in firing(req.patches, start, count):
                work.setdefault(placed.site, Work()).patches.append((row, column, placed))
            for number, capture in enumerate(req.request.capture):
                columns = capture.selection.rows(req.tokens[start : start + count], start, req.prompt)
                if columns:
                    sink = partial(req.keep, number, [start + column for column in columns])
                    work.setdefault(capture.site, Work()).captures.append((sink, [(row, column) for column in columns]))
            for site in req.request.norms:
                places = [(row, column) for column in range(count)]
                work.setdefault(site, Work()).captures.append((partial(req.norm, site, start), places))
        return work


def _watch(work: Work, site: Site, group: TokenSpans, seen: dict[int, dict[Site, Tensor]]) -> None:
    """Capture the last token of each request of the group at one site."""

    def keep(rows: Tensor) -> None:
        for (req, *_), row in zip(group, rows, strict=True):
            seen.setdefault(req.id, {})[site] = row

    work.captures.append((keep, [(row, count - 1) for row, (_, _, count) in enumerate(group)]))
