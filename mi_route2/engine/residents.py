"""Resources of running requests: a row of key-value slots and a steering row.

All of a request's demands are met or none, so that no request ever runs unpatched or unsteered. A preempted request keeps its
patches and its steering (an override lives as long as the request); its keys and values are saved outside of the slots and restored
unchanged.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress

from mi_route2.engine.cache import Prefixes, PrivateSlots, Saved, Slots
from mi_route2.engine.request import EngineRequest
from mi_route2.engine.scheduler import Admission
from mi_route2.hosts.base import ModelVersion
from mi_route2.hosts.decoder import Decoder
from mi_route2.runs import RunStore
from mi_route2.runs.store import BEHIND
from mi_route2.sites import Site
from mi_route2.steering.state import SteeringState
from mi_route2.steering.table import TableFullError


class Residents:
    """Resource allocation for requests; see the module.

    ``failed`` holds requests whose demands can never be met, with the reason; ``lost`` holds running requests whose capture run
    cannot go on.
    """

    def __init__(
        self,
        decoder: Decoder,
        slots: Slots | PrivateSlots,
        steering: SteeringState,
        prefixes: Prefixes,
        version: ModelVersion,
        *,
        store: RunStore | None,
        slot_bytes: int | None,
        exact: bool,
    ):
        self.decoder, self.slots, self.steering, self.prefixes, self.version = decoder, slots, steering, prefixes, version
        self.store, self.slot_bytes, self.exact = store, slot_bytes, exact
        self.failed: list[tuple[EngineRequest, str]] = []
        self.lost: dict[EngineRequest, str] = {}
        self._rows: dict[int, EngineRequest] = {}
        self._reserved = 0

    def admit(self, req: EngineRequest) -> Admission:
        """Reserve everything that a request needs (``run``), or nothing: now (``wait``), or ever (``drop``)."""
        cost = self.slots.cost(req.reach)
        if self.slot_bytes is not None and self._reserved + cost > self.slot_bytes:
            return "wait"
        try:
            self.steering.admit(req.id, req.request.steering)
            if not req.admitted and req.request.run is not None and self.store is not None:
                self._open(req, self.store)
            req.admitted = True
            reused = [] if req.computed else self._reused(req)
            req.row = self.slots.take(max(1, req.computed, len(reused) * self.prefixes.block))
        except TableFullError:
            return "wait"
        except (KeyError, ValueError, RuntimeError, OSError) as error:
            self.failed.append((req, str(error.args[0]) if error.args else str(error)))
            return "drop"
        self._reserved += cost
        self._rows[req.row] = req
        if req.saved is not None:
            self.slots.load(req.row, req.saved)
            req.saved = None
        for i, block in enumerate(reused):
            self.slots.load(req.row, block, i * self.prefixes.block)
            req.computed = req.result.cached = (i + 1) * self.prefixes.block
            req.published = i + 1
        return "run"

    def fit(self, pieces: Iterable[tuple[EngineRequest, int]]) -> None:
        """Move each request to a row that is long enough for its piece."""
        for req, count in pieces:
            if isinstance(self.slots, Slots) and req.computed + count > self.slots.capacity(req.row):
                old, req.row = req.row, self.slots.move(req.row, req.computed + count, req.computed)
                self._rows[req.row] = req
                self._free(old)

    def put_back(self, req: EngineRequest) -> None:
        """Save the keys and values of a preempted request and free its row; it keeps everything else."""
        req.saved = self.slots.save(req.row, req.computed)
        req.result.preemptions += 1
        self.steering.preempted(req.id)
        self._vacate([req])

    def vacate(self, requests: Iterable[EngineRequest]) -> None:
        """Free the rows of requests that end, at once: one by one, each would take the place of another that ends."""
        ending = [req for req in requests if req.row >= 0]
        for req in ending:
            self.publish(req)
        self._vacate(ending)

    def leave(self, req: EngineRequest) -> None:
        """Release all resources of a request that ended."""
        self.vacate([req])
        self.steering.release(req.id)

    def note(self, pieces: Sequence[tuple[EngineRequest, int]]) -> None:
        """Record the current steering as the one under which the next positions are computed."""
        idle, changes = not self.steering.sites(), self.steering.changes
        for req, count in pieces:
            start = req.computed
            if req.writer is not None and start < req.prompt and req.run_noted != changes:
                req.run_noted = changes  # steering of all requests may have come or gone since the run was opened
                if self._behind(req):
                    with suppress(RuntimeError):  # the store has ended the run, as its next row says
                        req.writer.note(BEHIND, True)
            if not self.prefixes.budget or (idle and not req.acts.digests) or req.noted == changes:
                continue  # no intervention acts or has acted, or those recorded at a generated token are unchanged
            if start < req.prompt:
                req.acts.steered(start, b"" if idle else self.steering.fingerprint(req.id, decode=False))
            if start + count > req.prompt:
                req.acts.steered(max(start, req.prompt), b"" if idle else self.steering.fingerprint(req.id, decode=True))
                req.noted = changes

    def publish(self, req: EngineRequest) -> None:
        """Add the whole blocks that a request computed to the prefix cache."""
        blocks, size = req.computed // self.prefixes.block, self.prefixes.block
        if self.prefixes.budget and blocks > req.published:
            self._name(req, blocks)
            self.prefixes.keep(req.keys, lambda i: self.slots.save(req.row, (i + 1) * size, i * size))
            req.published = blocks

    def _open(self, req: EngineRequest, store: RunStore) -> None:
        assert req.request.run is not None
        meta = {BEHIND: True} if self._behind(req) else None
        req.run_noted = self.steering.changes
        req.writer = store.writing(
            req.request.run, weights=self.version.weights(), tokens=req.request.prompt, prompt_length=req.prompt, meta=meta
        )
        req.lost = self.lost.setdefault

    def _behind(self, req: EngineRequest) -> bool:
        """Return whether something changes the prompt's logits behind the last value that a run can hold."""
        changed = {patch.site for patch in req.patches} | self.steering.prompt_sites(req.id)
        final = Site(self.decoder.layers - 1, "resid_post")
        return any(site.layer is None or site == final for site in changed)

    def _reused(self, req: EngineRequest) -> list[Saved]:
        """Return the blocks of the prompt that were computed before under the same interventions.

        The last token of the prompt is always computed, and so is every captured position.
        """
        size = self.prefixes.block
        blocks = min((req.prompt - 1) // size, req.lowest_capture() // size)
        if not self.prefixes.budget or blocks < 1:
            return []
        req.acts.steered(0, self.steering.fingerprint(req.id, decode=False))
        self._name(req, blocks)
        cached = self.prefixes.find(req.keys)
        del req.keys[len(cached) :]  # later keys are computed once the interventions at their positions are known
        return cached

    def _name(self, req: EngineRequest, blocks: int) -> None:
        self.prefixes.extend(req.keys, req.tokens, req.acts, blocks, req.prompt if self.exact else None)

    def _vacate(self, requests: Sequence[EngineRequest]) -> None:
        rows = [req.row for req in requests]
        for req in requests:
            req.row = -1
            self._reserved -= self.slots.cost(req.reach)
        self._free(*rows)

    def _free(self, *rows: int) -> None:
        """Free rows; a request whose row takes such a place has another one then."""
        for row in rows:
            del self._rows[row]
        for old, new in self.slots.free(*rows).items():
            other = self._rows.pop(old)
            self._rows[new], other.row = other, new
