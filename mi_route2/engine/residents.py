"""Resources of running requests: a row of key-value slots and a steering row.

All of a request's demands are met or none, so that no request ever runs unpatched or unsteered. A preempted request keeps its
patches and its steering (an override lives as long as the request); its keys and values are saved outside of the slots and restored
unchanged.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress

from mi_route2.engine.cache import Prefixes, Saved, Slots
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
        slots: Slots,
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

    def admit(self, one: EngineRequest) -> Admission:
        """Reserve everything that a request needs (``run``), or nothing: now (``wait``), or ever (``drop``)."""
        cost = self.slots.cost(one.reach)
        if self.slot_bytes is not None and self._reserved + cost > self.slot_bytes:
            return "wait"
        try:
            self.steering.admit(one.id, one.request.steering)
            if not one.admitted and one.request.run is not None and self.store is not None:
                self._open(one, self.store)
            one.admitted = True
            reused = [] if one.computed else self._reused(one)
            one.row = self.slots.take(max(1, one.computed, len(reused) * self.prefixes.block))
        except TableFullError:
            return "wait"
        except (KeyError, ValueError, RuntimeError, OSError) as error:
            self.failed.append((one, str(error.args[0]) if error.args else str(error)))
            return "drop"
        self._reserved += cost
        self._rows[one.row] = one
        if one.saved is not None:
            self.slots.load(one.row, one.saved)
            one.saved = None
        for i, block in enumerate(reused):
            self.slots.load(one.row, block, i * self.prefixes.block)
            one.computed = one.result.cached = (i + 1) * self.prefixes.block
            one.published = i + 1
        return "run"

    def fit(self, pieces: Iterable[tuple[EngineRequest, int]]) -> None:
        """Move each request to a row that is long enough for its piece."""
        for one, count in pieces:
            if one.computed + count > self.slots.capacity(one.row):
                old, one.row = one.row, self.slots.move(one.row, one.computed + count, one.computed)
                self._rows[one.row] = one
                self._free(old)

    def put_back(self, one: EngineRequest) -> None:
        """Save the keys and values of a preempted request and free its row; it keeps everything else."""
        one.saved = self.slots.save(one.row, one.computed)
        one.result.preemptions += 1
        self.steering.preempted(one.id)
        self._vacate([one])

    def vacate(self, ones: Iterable[EngineRequest]) -> None:
        """Free the rows of requests that end, at once: one by one, each would take the place of another that ends."""
        ending = [one for one in ones if one.row >= 0]
        for one in ending:
            self.publish(one)
        self._vacate(ending)

    def leave(self, one: EngineRequest) -> None:
        """Release all resources of a request that ended."""
        self.vacate([one])
        self.steering.release(one.id)

    def note(self, pieces: Sequence[tuple[EngineRequest, int]]) -> None:
        """Record the current steering as the one under which the next positions are computed."""
        idle, changes = not self.steering.sites(), self.steering.changes
        for one, count in pieces:
            start = one.computed
            if one.writer is not None and start < one.prompt and one.run_noted != changes:
                one.run_noted = changes  # steering of all requests may have come or gone since the run was opened
                if self._behind(one):
                    with suppress(RuntimeError):  # the store has ended the run, as its next row says
                        one.writer.note(BEHIND, True)
            if not self.prefixes.budget or (idle and not one.acts.digests) or one.noted == changes:
                continue  # no intervention acts or has acted, or those recorded at a generated token are unchanged
            if start < one.prompt:
                one.acts.steered(start, b"" if idle else self.steering.fingerprint(one.id, decode=False))
            if start + count > one.prompt:
                one.acts.steered(max(start, one.prompt), b"" if idle else self.steering.fingerprint(one.id, decode=True))
                one.noted = changes

    def publish(self, one: EngineRequest) -> None:
        """Add the whole blocks that a request computed to the prefix cache."""
        blocks, size = one.computed // self.prefixes.block, self.prefixes.block
        if self.prefixes.budget and blocks > one.published:
            self._name(one, blocks)
            self.prefixes.keep(one.keys, lambda i: self.slots.save(one.row, (i + 1) * size, i * size))
            one.published = blocks

    def _open(self, one: EngineRequest, store: RunStore) -> None:
        assert one.request.run is not None
        meta = {BEHIND: True} if self._behind(one) else None
        one.run_noted = self.steering.changes
        one.writer = store.writing(
            one.request.run, weights=self.version.weights(), tokens=one.request.prompt, prompt_length=one.prompt, meta=meta
        )
        one.lost = self.lost.setdefault

    def _behind(self, one: EngineRequest) -> bool:
        """Return whether something changes the prompt's logits behind the last value that a run can hold."""
        changed = {patch.site for patch in one.patches} | self.steering.prompt_sites(one.id)
        final = Site(self.decoder.layers - 1, "resid_post")
        return any(site.layer is None or site == final for site in changed)

    def _reused(self, one: EngineRequest) -> list[Saved]:
        """Return the blocks of the prompt that were computed before under the same interventions.

        The last token of the prompt is always computed, and so is every captured position.
        """
        size = self.prefixes.block
        blocks = min((one.prompt - 1) // size, one.lowest_capture() // size)
        if not self.prefixes.budget or blocks < 1:
            return []
        one.acts.steered(0, self.steering.fingerprint(one.id, decode=False))
        self._name(one, blocks)
        cached = self.prefixes.find(one.keys)
        del one.keys[len(cached) :]  # later keys are computed once the interventions at their positions are known
        return cached

    def _name(self, one: EngineRequest, blocks: int) -> None:
        self.prefixes.extend(one.keys, one.tokens, one.acts, blocks, one.prompt if self.exact else None)

    def _vacate(self, ones: Sequence[EngineRequest]) -> None:
        rows = [one.row for one in ones]
        for one in ones:
            one.row = -1
            self._reserved -= self.slots.cost(one.reach)
        self._free(*rows)

    def _free(self, *rows: int) -> None:
        """Free rows; a request whose row takes such a place has another one then."""
        for row in rows:
            del self._rows[row]
        for old, new in self.slots.free(*rows).items():
            other = self._rows.pop(old)
            self._rows[new], other.row = other, new
