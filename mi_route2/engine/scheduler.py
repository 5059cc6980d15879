"""Scheduling: choose the pieces of the next step. Pure logic over lengths and priorities, without tensors.

Running requests come before waiting ones, single tokens before prompt chunks, higher priority before lower, then the owner with the
smaller share so far, then first come, first served. If no request of a priority was admitted for ``patience`` steps while more
urgent ones were there, the first of those that wait gains a level; it goes first there, but preempts no more than it did before. A
step computes at most ``budget`` tokens and holds at most ``rows`` requests and ``room`` key-value positions. If room runs out, or a
request of higher priority waits for a row or for memory, the last request of the lowest priority is preempted and keeps its state.
So is the last one of the owner with most rows, if these are several, if an owner without any waits.
For a steering row only a request is preempted whose rows, with those that are free, are all that the other one lacks.
The first waiting request that lacks a row or room blocks those behind it, so that no request starves. A request that lacks another
resource is passed by: ``admit`` ensures that no later request takes that resource.
"""

from bisect import insort
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from math import inf, nextafter
from typing import Generic, Literal, Protocol, TypeVar, runtime_checkable

Answer = Literal["run", "full", "steering", "wait", "drop"]


@runtime_checkable
class Schedulable(Protocol):
    """The scheduler's view of a request: ``known`` counts its prompt and generated tokens, ``computed`` those already run."""

    priority: int
    turn: float
    arrival: int
    computed: int

    @property
    def owner(self) -> str: ...

    @property
    def known(self) -> int: ...


J = TypeVar("J", bound=Schedulable)


@dataclass
class Turn(Generic[J]):
    """One step: the number of tokens of each request, and the requests admitted and preempted for it."""

    pieces: list[tuple[J, int]] = field(default_factory=list)
    admitted: list[J] = field(default_factory=list)
    preempted: list[J] = field(default_factory=list)  # compared by identity, because two requests may have equal fields


def _any(_job: Schedulable, _waiting: Schedulable) -> bool:
    return True


def urgency(job: Schedulable) -> tuple[int, float, int]:
    """Sort key: higher priority first, then the earlier turn, then earlier arrival."""
    return -job.priority, job.turn, job.arrival


@dataclass
class Asked:
    """Tokens that a waiting request asks for, its turn, and where the engine was when it came."""

    tokens: int
    came: float
    turn: float

    @property
    def end(self) -> float:
        return self.turn + self.tokens


class Shares:
    """Turns of requests of one priority, by which owners that wait get equal shares of the engine.

    The turns of an owner's requests are as far apart as the tokens that they ask for, and begin where the engine is now (start-time
    fair queueing; Goyal, Vin and Cheng 1996). Requests of a single owner keep their order, and those that end without having run
    cost nothing.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._served: dict[str, float] = {}
        self._waiting: dict[str, dict[int, Asked]] = {}
        """By owner, the waiting requests in order."""

    def turn(self, owner: str, request: int, tokens: int) -> float:
        """Return the turn of an owner's next request."""
        waiting = self._waiting.setdefault(owner, {})
        last = waiting[next(reversed(waiting))].end if waiting else 0.0
        turn = max(self._now, self._served.get(owner, 0.0), last)
        waiting[request] = Asked(tokens, self._now, turn)
        return turn

    def turns(self, owner: str) -> dict[int, float]:
        """Return the turns of an owner's waiting requests as if those that left without having run had never been there."""
        last, waiting = self._served.get(owner, 0.0), self._waiting.get(owner, {})
        for asked in waiting.values():
            asked.turn = max(asked.came, last)
            last = asked.end
        return {request: asked.turn for request, asked in waiting.items()}

    def served(self, owner: str, request: int, turn: float = -inf) -> None:
        """Record the start of a request; owners behind its turn, or behind the earlier one that it was given, start here."""
        if (asked := self.left(owner, request)) is None:
            return  # it ran before and was preempted
        self._now = max(self._now, asked.turn if turn == -inf else min(asked.turn, turn))
        self._served[owner] = max(self._served.get(owner, 0.0), asked.end)
        self._served = {one: after for one, after in self._served.items() if after > self._now}

    def left(self, owner: str, request: int) -> Asked | None:
        """Remove a request from the waiting ones and return its entry; ``None`` if it ran before."""
        waiting = self._waiting.get(owner, {})
        asked = waiting.pop(request, None)
        if not waiting:
            self._waiting.pop(owner, None)
        return asked


class Scheduler(Generic[J]):
    """The queues of waiting and running requests; see the module.

    ``chunk`` is the longest piece of a prompt in one step; pieces end at multiples of ``grain`` or with the known tokens.
    ``ValueError`` if the sizes cannot work.
    """

    def __init__(self, *, rows: int, budget: int, chunk: int, room: int | None = None, grain: int = 1, patience: int | None = None):
        if rows < 1 or grain < 1 or chunk < grain or budget < rows + grain - 1 or (room is not None and room < 1):
            raise ValueError(
                f"rows = {rows}, budget = {budget}, chunk = {chunk}, room = {room} are not valid: all must be at least 1, the "
                f"chunk at least {grain}, and the budget at least {rows + grain - 1}, so that every running request can go on"
            )
        self.rows, self.budget, self.chunk, self.room, self.grain = rows, budget, chunk, room, grain
        self.patience = patience
        self._turns = 0
        self._since: dict[int, int] = {}
        """Priority that waiting requests ask for, and the turn since which none of them was admitted."""
        self._gained: dict[int, int] = {}
        """Levels that requests have gained, by arrival number."""
        self.waiting: list[J] = []
        self.running: list[J] = []
        self._lacking: set[int] = set()
        """Arrival numbers of requests that lacked another resource when last asked."""
        self._tight: J | None = None
        """The first request that lacked memory, or a steering row, when last asked."""
        self._gives: Callable[[J, J], bool] = _any
        """True for a running request whose preemption gives back what the waiting one lacks."""

    def add(self, job: J) -> None:
        """Queue a new or preempted request."""
        insort(self.waiting, job, key=urgency)

    def sort(self) -> None:
        """Sort the waiting requests after some turns have changed."""
        self.waiting.sort(key=urgency)

    def remove(self, job: J) -> None:
        """Remove a request that ended, waiting or running."""
        (self.running if job in self.running else self.waiting).remove(job)
        self._lacking.discard(job.arrival)
        self._gained.pop(job.arrival, None)
        if self._tight is job:
            self._tight = None

    def put_back(self, job: J) -> None:
        """Move a running request back to the waiting queue."""
        self.running.remove(job)
        self.add(job)

    def plan(
        self,
        admit: Callable[[J], Answer],
        put_back: Callable[[J], None],
        steered: Callable[[J, J], bool] = lambda _job, _waiting: False,
    ) -> Turn[J]:
        """Plan the next step.

        Args:
            admit: meets a waiting request's other demands (``"run"``), or reports that they cannot be met now (``"wait"``), not
                before another one gives memory (``"full"``) or a steering row (``"steering"``) back, or ever (``"drop"``).
            put_back: called for each preempted request, before any request is admitted.
            steered: True for a running request that would give back the steering rows which the waiting one lacks.
        """
        turn: Turn[J] = Turn()
        self._turns += 1
        self._promote()
        self._make_way(turn, put_back)
        left, tight, self._tight = self._go_on(turn, put_back), self._tight, None
        owners = {job.owner for job in self.running} if self.waiting else set[str]()
        for job in list(self.waiting):
            if left <= 0 or len(self.running) >= self.rows or job in turn.preempted or not self._fits(turn, job):
                break
            self._lacking.discard(job.arrival)
            tight = None if job is tight else tight
            answer = admit(job)
            if answer in ("wait", "full", "steering"):
                self._lacking.add(job.arrival)
                if answer != "wait" and (self._tight is None or self._before(job, self._tight, owners)):
                    self._tight, self._gives = job, steered if answer == "steering" else _any
                continue
            self.waiting.remove(job)
            if answer == "drop":
                self._gained.pop(job.arrival, None)
                continue
            self._since[self._asked(job)] = self._turns
            self.running.append(job)
            owners.add(job.owner)
            turn.admitted.append(job)
            left -= self._give(turn, job, left)
        if self._tight is None:
            self._tight = tight  # it was not asked again, as all rows are taken, and no way was made for it
        return turn

    @staticmethod
    def _before(job: J, first: J, owners: Collection[str]) -> bool:
        """Return whether way is made for ``job`` and not for the ``first`` one, whose owner has a row: nobody would for that."""
        return job.priority == first.priority and first.owner in owners and job.owner not in owners

    def _asked(self, job: J) -> int:
        """Return the priority that a request had when it came."""
        return job.priority - self._gained.get(job.arrival, 0)

    def _promote(self) -> None:
        """Raise the first request of a priority of which none was admitted for ``patience`` steps, so that none waits for ever.

        Only the first: if all were raised that have waited for long, one owner's many requests would go before all newcomers.
        """
        if self.patience is None or not self.waiting:
            return
        first: dict[int, J] = {}
        for job in self.waiting:
            first.setdefault(self._asked(job), job)
        self._since = {asked: self._since.get(asked, self._turns) for asked in first}
        highest = max(job.priority for job in (*self.running, *self.waiting))
        late = [one for one in first if self._turns - self._since[one] > self.patience and first[one].priority < highest]
        for asked in late:
            job = first[asked]
            job.priority, job.turn = job.priority + 1, -inf
            self._gained[job.arrival] = job.priority - asked
            self._since[asked] = self._turns
        if late:
            self.sort()

    def _preempt(self, job: J, turn: Turn[J], put_back: Callable[[J], None]) -> None:
        """Move a running request back to the waiting queue and out of this turn."""
        self.put_back(job)
        turn.preempted.append(job)
        turn.pieces = [piece for piece in turn.pieces if piece[0] is not job]
        put_back(job)

    def _make_way(self, turn: Turn[J], put_back: Callable[[J], None]) -> None:
        """Preempt requests for those that lack nothing but a row, if all are taken, and one for the first that lacks memory."""
        taken, coming, refused = 0, set[str](), set[tuple[int, str]]()
        for job in [job for job in self.waiting if job is self._tight or job.arrival not in self._lacking]:
            if job is self._tight or len(self.running) + taken >= self.rows:
                alike = self._asked(job), job.owner  # of whom hundreds may wait
                if job is not self._tight and alike in refused:
                    continue
                if (victim := self._victim(job, coming)) is None:
                    if job is not self._tight:
                        refused.add(alike)
                    continue
                refused.clear()
                equal, without = victim.priority >= self._asked(job), all(one.owner != job.owner for one in self.running)
                if equal or (job is self._tight and without):  # for which it may have been taken before others of its priority
                    self._pull(job, victim)
                self._preempt(victim, turn, put_back)
                if job is self._tight:
                    self._tight = None
                    self._lacking.discard(job.arrival)  # if those before it take all rows, it lacks a row and nothing else
            taken += 1
            coming.add(job.owner)

    def _pull(self, job: J, victim: J) -> None:
        """Move a request before those that would take the row in its place: the victim, and what owners with rows have waiting."""
        owners = {one.owner for one in self.running}
        peers = [one for one in (victim, *self.waiting) if one.priority == job.priority and one.owner in owners and one.turn > -inf]
        job.turn = min([job.turn, *(nextafter(one.turn, -inf) for one in peers)])
        if victim.priority == job.priority:
            victim.turn = max(victim.turn, nextafter(job.turn, inf))
        self.sort()

    def _victim(self, job: J, coming: Collection[str]) -> J | None:
        """Return the running request that makes way for this one: one of lower priority, or of an owner who has several.

        What a request has gained by waiting gives it the next row, and nobody else's. ``coming`` are owners who get a row now.
        """
        asked = self._asked(job)
        givers = [one for one in self.running if self._gives(one, job)] if job is self._tight else self.running
        least = max(givers, key=urgency, default=None)
        if least is None or least.priority < asked:
            return least
        rows = Counter(one.owner for one in self.running)
        if job.owner in rows or job.owner in coming:
            return None
        equal = [one for one in givers if one.priority == asked and rows[one.owner] > 1]
        return max(equal, key=lambda one: (rows[one.owner], urgency(one)), default=None)

    def _go_on(self, turn: Turn[J], put_back: Callable[[J], None]) -> int:
        """Plan pieces for the running requests; return the remaining budget."""
        singles = [job for job in self.running if job.known - job.computed == 1]
        turn.pieces = [(job, 1) for job in singles]  # the budget is at least the number of rows
        left = self.budget - len(singles)
        if len(singles) < len(self.running):
            for job in sorted((job for job in self.running if job.known - job.computed != 1), key=urgency):
                left -= self._give(turn, job, left)
        if self.room is not None:
            while self._tokens_in_use(turn) > self.room and len(self.running) > 1:
                job = max(self.running, key=urgency)
                left += sum(count for other, count in turn.pieces if other is job)
                self._preempt(job, turn, put_back)
        return left

    def _give(self, turn: Turn[J], job: J, left: int) -> int:
        """Plan a piece for ``job``, if a whole one fits; return its number of tokens."""
        count = min(job.known - job.computed, self.chunk, left)
        if job.computed + count < job.known:
            count -= (job.computed + count) % self.grain
        if count > 0:
            turn.pieces.append((job, count))
        return max(count, 0)

    def _tokens_in_use(self, turn: Turn[J]) -> int:
        return sum(job.computed for job in self.running) + sum(count for _, count in turn.pieces)

    def _fits(self, turn: Turn[J], job: J) -> bool:
        """Return whether there is room for all known tokens of ``job`` and one more."""
        return self.room is None or self._tokens_in_use(turn) + job.known + 1 <= self.room
