"""Resources of running requests: a row of key-value slots, patch slots and a steering row.

All of a request's demands are met or none, so that no request ever runs unpatched or unsteered. A request that waits for a resource
blocks those behind it from that resource only. A preempted request keeps its patches and its steering (an override lives as long as
the request); its keys and values are saved outside of the slots and restored unchanged.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from math import inf

from mi_route2.engine.cache import Prefixes, Saved, Slots
from mi_route2.engine.request import EngineRequest
from mi_route2.engine.rules import RuleBook
from mi_route2.engine.scheduler import Answer, Scheduler, Turn
from mi_route2.hosts.decoder import Decoder
from mi_route2.hosts.state import ModelState
from mi_route2.runs import RunStore
from mi_route2.runs.rows import BEHIND
from mi_route2.sites import Site
from mi_route2.steering.state import Full, SteeringState
from mi_route2.steering.table import row_key

AGAIN = 16
"""Steps after which a request that waits for steering rows is composed and checked anew."""


class Residents:
    """Resource allocation for requests; see the module.

    ``failed`` holds requests whose demands can never be met, with the reason; ``lost`` holds running requests whose capture run
    cannot go on, or that have outgrown their row while there is no memory for a longer one.
    """

    def __init__(
        self,
        decoder: Decoder,
        slots: Slots,
        steering: SteeringState,
        prefixes: Prefixes,
        state: ModelState,
        *,
        store: RunStore | None,
        patch_slots: int,
        slot_bytes: int | None,
        exact: bool,
        patience: int | None,
        rules: RuleBook,
    ):
        self.decoder, self.slots, self.steering, self.prefixes, self.state = decoder, slots, steering, prefixes, state
        self.store, self.patch_slots, self.slot_bytes, self.exact = store, patch_slots, slot_bytes, exact
        self.patience = inf if patience is None else patience
        self.rules = rules
        self.failed: list[tuple[EngineRequest, str]] = []
        self.lost: dict[EngineRequest, str] = {}
        self._short: set[Site] = set()
        """Sites whose patch slots a request waits for in this turn."""
        self._rows: dict[int, EngineRequest] = {}
        self._reserved = 0
        self._tight = False
        """True if a request waits for bytes of keys and values in this turn."""
        self._kept: set[float] = set()
        """Priorities of requests that wait in this turn for more than one steering row, to which any goes that is given back;
        ``inf`` for one before which nobody is moved."""
        self._patches: Counter[Site] = Counter()

    @property
    def _caching(self) -> bool:
        """True if prefixes are kept and reused, which they are not beside functions whose numbers may change unseen."""
        return self.prefixes.budget > 0 and not self.state.opaque

    @property
    def patches(self) -> int:
        """Number of patch slots in use, over all sites."""
        return self._patches.total()

    def plan(self, scheduler: Scheduler[EngineRequest]) -> Turn[EngineRequest]:
        """Plan the next step."""
        coming, row = len(scheduler.waiting), self.slots.cost(1)
        # no more rows at once than may be reserved: they are allocated although nobody uses them yet
        self.slots.coming = coming if self.slot_bytes is None else min(coming, max(0, self.slot_bytes - self._reserved) // row)
        try:
            return scheduler.plan(self.admit, self.put_back, lambda one, waiting: self.steering.gives_rows(one.id, waiting.needs))
        finally:
            self._short.clear()
            self._kept.clear()
            self._tight = self.steering.rows.closed = self.steering.rows.sealed = False

    def admit(self, one: EngineRequest) -> Answer:
        """Reserve everything that a request needs (``run``), or nothing.

        Nothing is reserved until another request frees memory (``full``) or a steering row (``steering``), yet (``wait``), or ever
        (``drop``).
        """
        cost = self.slots.cost(one.reach)
        if self._tight or (self.slot_bytes is not None and self._reserved + cost > self.slot_bytes):
            self._tight = True
            return "full"
        try:
            if one.unsaved is not None:
                raise RuntimeError(one.unsaved)
            if (lacked := self._lacked(one)) is not None:
                return lacked
            one.admitted = True
            reused = [] if one.computed else self._reused(one)
            one.row = self._new_row(max(1, one.computed, len(reused) * self.prefixes.block))
        except (KeyError, ValueError, RuntimeError, OSError) as error:
            if not one.result.preemptions:
                self.rules.withdraw({one.id})  # it never ran, so it brings nothing about in its conversation
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

    def lacking(self, one: EngineRequest) -> str:
        """Return the reason why a request waits although no request runs."""
        asked = one.request
        try:
            self.rules.check(self.steering, asked.rules, asked.steering, asked.conversation, one.named)
        except ValueError as error:
            return str(error)
        return (
            "what it waits for is held, and no request that could give it back runs: drop a configuration, or raise steering_rows"
        )

    def fit(self, pieces: Iterable[tuple[EngineRequest, int]]) -> list[tuple[EngineRequest, int]]:
        """Move each request to a row that is long enough for its piece; return the pieces whose requests have one."""
        fitting, capacity = [], self.slots.capacity
        for one, count in pieces:
            if one.computed + count > capacity(one.row):
                old = one.row
                try:
                    one.row = self.slots.move(old, one.computed + count, one.computed)
                except RuntimeError as error:
                    self.lost[one] = _without_memory(error)
                    continue
                self._rows[one.row] = one
                self._free(old)
            fitting.append((one, count))
        return fitting

    def put_back(self, one: EngineRequest) -> None:
        """Save the keys and values of a preempted request and free its row; it keeps everything else.

        Without memory for the copy, it ends with that reason when it would go on.
        """
        try:
            one.saved = self.slots.save(one.row, one.computed)
        except RuntimeError as error:
            one.unsaved = _without_memory(error)
        one.result.preemptions += 1
        self.steering.preempted(one.id)
        self._vacate([one])

    def vacate(self, ones: Iterable[EngineRequest]) -> None:
        """Free the rows of requests that end, at once: one by one, each would take the place of another that ends."""
        there = [one for one in ones if one.row >= 0]
        for one in there:
            self.publish(one)
        self._vacate(there)

    def leave(self, one: EngineRequest) -> None:
        """Release all resources of a request that ended."""
        self.vacate([one])
        if one.admitted:
            self._release(one)

    def _release(self, one: EngineRequest) -> None:
        self.steering.release(one.id, stays=True)
        self.rules.release(one.id)
        self._patches -= Counter(patch.site for patch in one.patches)

    def note(self, pieces: Sequence[tuple[EngineRequest, int]]) -> None:
        """Record the current steering as the one under which the next positions are computed."""
        idle, changes = not self.steering.sites(), self.steering.changes
        for one, _ in pieces:
            if one.writer is not None and one.computed < one.prompt and one.told != changes:
                one.told = changes  # steering of all requests may have come or gone since the run was opened
                if self._behind(one):
                    with suppress(RuntimeError):  # the store has ended the run, as its next row is told
                        one.writer.note(BEHIND, True)
        if not self._caching:
            return
        for one, count in pieces:
            if (idle and not one.acts.digests) or one.noted == changes:
                continue  # no intervention acts or has acted, or those recorded at a generated token are unchanged
            start = one.computed
            if start < one.prompt:
                one.acts.steered(start, b"" if idle else self.steering.fingerprint(one.id, decode=False))
            if start + count > one.prompt:
                one.acts.steered(max(start, one.prompt), b"" if idle else self.steering.fingerprint(one.id, decode=True))
                one.noted = changes

    def publish(self, one: EngineRequest) -> None:
        """Add the whole blocks that a request computed to the prefix cache."""
        blocks, size = one.computed // self.prefixes.block, self.prefixes.block
        if not self._caching or blocks <= one.published:
            return
        self._name(one, blocks)
        with suppress(RuntimeError):  # no memory for a copy: prefixes only save time
            self.prefixes.keep(one.keys, one.request.salt, lambda i: self.slots.save(one.row, (i + 1) * size, i * size))
        one.published = blocks

    def _lacked(self, one: EngineRequest) -> Answer | None:
        """Reserve patch slots and steering rows; return the answer to a request that lacks some, having reserved nothing."""
        if one.admitted:
            return self._unsteered(one)
        demand = Counter(patch.site for patch in one.patches)
        asked = one.request
        if any(site in self._short or self._patches[site] + count > self.patch_slots for site, count in demand.items()):
            self._short.update(demand)
            if (asked.steering and row_key(asked.steering)) or asked.rules or asked.conversation:
                self.steering.rows.closed = True
                self._keep(one)
            return "wait"
        if (lacked := self._unsteered(one)) is not None:
            self._short.update(demand)
            return lacked
        self._patches.update(demand)
        if asked.run is not None and self.store is not None:
            self._open(one, self.store)
        return None

    def _unsteered(self, one: EngineRequest) -> Answer | None:
        """Acquire the request's steering rows, or answer that they are not free now or that an earlier request waits for some.

        Only for a single row, which no earlier request waits for, it is worth to preempt another one: it would take any other back
        in the next step.
        """
        asked, rows = one.request, self.steering.rows
        # A preempted request has waited already, and keeps what those before it may wait for: they must not keep it from its rows.
        closed, rows.closed = rows.closed, rows.closed and not one.admitted
        sealed, rows.sealed = rows.sealed, rows.sealed and not one.admitted
        try:
            # rules that come to hold or lapse change what it needs, so that this is composed and checked anew, if not at every step
            if self._rows and not one.admitted and one.lacked % AGAIN and (missing := rows.missing(one.needs)) > 0:
                raise Full("it lacks what it lacked", missing, one.needs)
            self.rules.admit(self.steering, one.id, asked.rules, asked.steering, asked.conversation, one.named, owner=asked.owner)
        except Full as full:
            one.needs, one.lacked, closed = full.needed, one.lacked + 1, True
            sealed |= one.lacked > self.patience
            if full.missing > 1:
                self._keep(one)
                return "wait"
            first_of_owner = self._kept == {one.priority} and not self._runs(one.owner)  # so that it is moved before those
            return "steering" if one.admitted or first_of_owner or not self._kept else "wait"
        finally:
            rows.closed, rows.sealed = closed, sealed
        return None

    def _keep(self, one: EngineRequest) -> None:
        """Note a request to which steering rows go that are given back, if not for an owner who runs nothing while its own does."""
        # not for ever, or others who come one after another would keep it from its rows
        moved = one.turn > -inf and one.lacked <= AGAIN * self.patience and self._runs(one.owner)
        self._kept.add(one.priority if moved else inf)

    def _runs(self, owner: str) -> bool:
        return any(one.owner == owner for one in self._rows.values())

    def _open(self, one: EngineRequest, store: RunStore) -> None:
        assert one.request.run is not None
        meta = {BEHIND: True} if self._behind(one) else None
        one.told = self.steering.changes
        try:
            one.writer = store.writing(
                one.request.run, weights=self.state.weights(), tokens=one.request.prompt, prompt_length=one.prompt, meta=meta
            )
            one.lost = self.lost.setdefault
        except (KeyError, ValueError, RuntimeError, OSError):
            self._release(one)
            raise

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
        if not self._caching or blocks < 1:
            return []
        one.acts.steered(0, self.steering.fingerprint(one.id, decode=False))
        self._name(one, blocks)
        cached = self.prefixes.find(one.keys, one.request.salt)
        del one.keys[len(cached) :]  # later keys are computed once the interventions at their positions are known
        return cached

    def _new_row(self, length: int) -> int:
        try:
            return self.slots.take(length)
        except RuntimeError as error:
            raise RuntimeError(_without_memory(error)) from error

    def _name(self, one: EngineRequest, blocks: int) -> None:
        salt = self.state.digest + repr((self.exact, one.request.salt)).encode()
        self.prefixes.extend(one.keys, salt, one.tokens, one.acts, blocks, one.prompt if self.exact else None)

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


def _without_memory(error: RuntimeError) -> str:
    why = " ".join(str(error).split())
    return f"there is no memory for its keys and values ({why:.200}): let fewer requests run at once, or give the engine slot_bytes"
