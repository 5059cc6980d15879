"""What a request needs to run, and gives back when it goes: a row of keys and values, patch slots, a steering row.

All demands are met or none, so that no request ever runs unpatched or unsteered. Who waits for one of them keeps those behind from
it, and from nothing else. A request that is put back keeps its steering (an
override lives as long as the request) and its patches; its keys and values wait outside of the rows, and come back as they were.
"""

from collections import Counter
from collections.abc import Iterable

from mi_route2.engine.cache import Prefixes, Slots
from mi_route2.engine.request import EngineRequest
from mi_route2.engine.rules import RuleBook
from mi_route2.engine.scheduler import Answer, Scheduler, Turn
from mi_route2.hosts.decoder import Decoder
from mi_route2.hosts.state import ModelState
from mi_route2.runs import RunStore
from mi_route2.sites import Site
from mi_route2.steering.state import Full, SteeringState


class Residents:
    """See the module. ``failed`` holds the sequences that turned out to ask for what is not there, with the reason; ``lost`` those
    that run and whose run of captures cannot go on."""

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
        exact: bool,
    ):
        self.decoder, self.slots, self.steering, self.prefixes, self.state = decoder, slots, steering, prefixes, state
        self.store, self.patch_slots, self.exact = store, patch_slots, exact
        self.rules = RuleBook()
        self.failed: list[tuple[EngineRequest, str]] = []
        self.lost: dict[EngineRequest, str] = {}
        self._short: set[Site] = set()
        """Sites at whose patch slots somebody waits in this turn."""
        self._rows: list[EngineRequest] = []
        self._patches: Counter[Site] = Counter()

    def plan(self, scheduler: Scheduler[EngineRequest]) -> Turn[EngineRequest]:
        """The next step."""
        try:
            return scheduler.plan(self.admit, self.put_back)
        finally:
            self._short.clear()
            self.steering.rows.closed = False

    def admit(self, one: EngineRequest) -> Answer:
        """Meets all of a request's demands (``run``) or none: now (``wait``) or ever (``drop``)."""
        try:
            if not (self._steered(one) if one.admitted else self._reserve(one)):
                return "wait"
        except (KeyError, ValueError, RuntimeError, OSError) as error:
            self.failed.append((one, str(error.args[0]) if error.args else str(error)))
            return "drop"
        one.admitted = True
        self.slots.reserve(one.reach)
        one.row = self.slots.take()
        self._rows.append(one)
        if one.saved is not None:
            self.slots.load(one.row, one.saved)
            one.saved = None
        elif not one.computed:
            self._reuse(one)
        return "run"

    def lacking(self, one: EngineRequest) -> str:
        """Why a request waits although nobody runs."""
        asked = one.request
        try:
            self.rules.check(self.steering, asked.rules, asked.steering, asked.conversation)
        except ValueError as error:
            return str(error)
        return (
            "what it waits for is held, and no request that could give it back runs: drop a configuration, or raise steering_rows"
        )

    def put_back(self, one: EngineRequest) -> None:
        """Preempted: keys and values go out of their row, everything else stays."""
        one.saved = self.slots.save(one.row, one.computed)
        one.result.preemptions += 1
        self.steering.preempted(one.id)
        self._vacate(one)

    def leave(self, one: EngineRequest) -> None:
        """A request is through: what it held is given back."""
        if one.row >= 0:
            self.publish(one)
            self._vacate(one)
        if one.admitted:
            self.steering.release(one.id)
            self.rules.release(one.id)
            self._patches -= Counter(patch.site for patch in one.patches)

    def note(self, pieces: Iterable[tuple[EngineRequest, int]]) -> None:
        """What is computed next is computed under the steering that is in force now."""
        if not self.prefixes.budget:
            return
        idle, changes = not self.steering.sites(), self.steering.changes
        for one, count in pieces:
            if (idle and not one.acts.digests) or one.noted == changes:
                continue  # nothing acts, and nothing ever did; or what was noted of a generated token still acts
            start = one.computed
            if start < one.prompt:
                one.acts.steered(start, b"" if idle else self.steering.content(one.id, decode=False))
            if start + count > one.prompt:
                one.acts.steered(max(start, one.prompt), b"" if idle else self.steering.content(one.id, decode=True))
                one.noted = changes

    def publish(self, one: EngineRequest) -> None:
        """Whole blocks that a request computed may be used by others."""
        blocks, size = one.computed // self.prefixes.block, self.prefixes.block
        if not self.prefixes.budget or blocks <= one.published:
            return
        self._name(one, blocks)
        self.prefixes.keep(one.keys, lambda i: self.slots.save(one.row, (i + 1) * size, i * size))
        one.published = blocks

    def _reserve(self, one: EngineRequest) -> bool:
        demand = Counter(patch.site for patch in one.patches)
        asked = one.request
        if any(site in self._short or self._patches[site] + count > self.patch_slots for site, count in demand.items()):
            self._short.update(demand)
            self.steering.rows.closed |= bool(asked.steering or asked.rules or asked.conversation)
            return False
        if not self._steered(one):
            self._short.update(demand)
            return False
        self._patches.update(demand)
        if asked.run is not None and self.store is not None:
            self._open(one, self.store)
        return True

    def _steered(self, one: EngineRequest) -> bool:
        """Takes its steering rows; ``False`` where they are not free now, or somebody before it waits for such."""
        asked = one.request
        try:
            if asked.rules or asked.conversation is not None:
                self.rules.admit(
                    self.steering, one.id, asked.rules, asked.steering, owner=asked.owner, conversation=asked.conversation
                )
            else:
                self.steering.admit(one.id, asked.steering, owner=asked.owner)
        except Full:
            self.steering.rows.closed = True
            return False
        return True

    def _open(self, one: EngineRequest, store: RunStore) -> None:
        assert one.request.run is not None
        try:
            one.writer = store.writing(
                one.request.run, weights=self.state.weights(), tokens=one.request.prompt, prompt_length=one.prompt
            )
            one.lost = self.lost.setdefault
        except (KeyError, ValueError, RuntimeError, OSError):
            self.steering.release(one.id)
            self.rules.release(one.id)
            self._patches -= Counter(patch.site for patch in one.patches)
            raise

    def _reuse(self, one: EngineRequest) -> None:
        """Takes over the blocks of its prompt that were computed before under the same interventions.

        The last token of the prompt is always computed, and so is whatever has to be captured.
        """
        size = self.prefixes.block
        blocks = min((one.prompt - 1) // size, one.lowest_capture() // size)
        if not self.prefixes.budget or blocks < 1:
            return
        one.acts.steered(0, self.steering.content(one.id, decode=False))
        self._name(one, blocks)
        found = self.prefixes.find(one.keys)
        for i, block in enumerate(found):
            self.slots.load(one.row, block, i * size)
        del one.keys[len(found) :]  # the others are named when it is known what acted on them
        one.computed = one.result.cached = len(found) * size
        one.published = len(found)

    def _name(self, one: EngineRequest, blocks: int) -> None:
        salt = repr((self.state.current, self.exact)).encode()
        self.prefixes.extend(one.keys, salt, one.tokens, one.acts, blocks, one.prompt if self.exact else None)

    def _vacate(self, one: EngineRequest) -> None:
        row, one.row = one.row, -1
        last = self._rows.pop()
        if self.slots.free(row) is not None:
            self._rows[row], last.row = last, row
