"""Scheduling: choose the pieces of the next step. Pure logic over lengths and priorities, without tensors.

Running requests come before waiting ones, single tokens before prompt chunks, higher priority before lower, then first come, first
served. A step computes at most ``budget`` tokens and holds at most ``rows`` requests and ``room`` key-value positions. If room runs
out, or the first waiting request lacks something and requests of lower priority run, the last request of the lowest priority is
preempted and keeps its state. The first waiting request that cannot be admitted blocks those behind it, so that no request of its
priority starves.
"""

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol, TypeVar, runtime_checkable

Admission = Literal["run", "wait", "drop"]


@runtime_checkable
class Schedulable(Protocol):
    """The scheduler's view of a request: ``known`` counts its prompt and generated tokens, ``computed`` those already run."""

    computed: int

    @property
    def arrival(self) -> int: ...

    @property
    def priority(self) -> int: ...

    @property
    def known(self) -> int: ...


J = TypeVar("J", bound=Schedulable)


@dataclass
class StepPlan(Generic[J]):
    """One step: the number of tokens of each request, and the requests preempted for it."""

    pieces: list[tuple[J, int]] = field(default_factory=list)
    preempted: list[J] = field(default_factory=list)  # compared by identity, because two requests may have equal fields


def urgency(job: Schedulable) -> tuple[int, int]:
    """Sort key: higher priority first, then earlier arrival."""
    return -job.priority, job.arrival


class Scheduler(Generic[J]):
    """The queues of waiting and running requests; see the module.

    ``chunk`` is the longest piece of a prompt in one step; pieces end at multiples of ``grain`` or with the known tokens.
    ``ValueError`` if the sizes cannot work.
    """

    def __init__(self, *, rows: int, budget: int, chunk: int, room: int | None = None, grain: int = 1):
        if rows < 1 or grain < 1 or chunk < grain or budget < rows + grain - 1 or (room is not None and room < 1):
            raise ValueError(
                f"rows = {rows}, budget = {budget}, chunk = {chunk}, room = {room} are not valid: all must be at least 1, the "
                f"chunk at least {grain}, and the budget at least {rows + grain - 1}, so that every running request can go on"
            )
        self.rows, self.budget, self.chunk, self.room, self.grain = rows, budget, chunk, room, grain
        self.waiting: list[J] = []
        self.running: list[J] = []

    def add(self, job: J) -> None:
        """Queue a new or preempted request."""
        insort(self.waiting, job, key=urgency)

    def remove(self, job: J) -> None:
        """Remove a request that ended, waiting or running."""
        (self.running if job in self.running else self.waiting).remove(job)

    def put_back(self, job: J) -> None:
        """Move a running request back to the waiting queue."""
        self.running.remove(job)
        self.add(job)

    def plan(self, admit: Callable[[J], Admission], put_back: Callable[[J], None]) -> StepPlan[J]:
        """Plan the next step.

        Args:
            admit: reserves what a waiting request needs (``"run"``), or reports that it is not there now (``"wait"``) or never will
                be (``"drop"``).
            put_back: called for each preempted request.
        """
        plan: StepPlan[J] = StepPlan()
        left = self._go_on(plan, put_back)
        while left > 0 and self.waiting and (job := self.waiting[0]) not in plan.preempted:
            admission = admit(job) if len(self.running) < self.rows and self._fits(plan, job) else "wait"
            if admission == "wait":
                last = max(self.running, key=urgency, default=None)
                if last is None or last.priority >= job.priority:
                    break
                left += self._preempt(last, plan, put_back)
                continue
            self.waiting.remove(job)
            if admission == "run":
                self.running.append(job)
                left -= self._give(plan, job, left)
        return plan

    def _preempt(self, job: J, plan: StepPlan[J], put_back: Callable[[J], None]) -> int:
        """Move a running request back to the waiting queue and out of this step; return the tokens that it would have had."""
        tokens = sum(count for other, count in plan.pieces if other is job)
        self.put_back(job)
        plan.preempted.append(job)
        plan.pieces = [piece for piece in plan.pieces if piece[0] is not job]
        put_back(job)
        return tokens

    def _go_on(self, plan: StepPlan[J], put_back: Callable[[J], None]) -> int:
        """Plan pieces for the running requests; return the remaining budget."""
        singles = [job for job in self.running if job.known - job.computed == 1]
        plan.pieces = [(job, 1) for job in singles]  # the budget is at least the number of rows
        left = self.budget - len(singles)
        for job in sorted((job for job in self.running if job.known - job.computed != 1), key=urgency):
            left -= self._give(plan, job, left)
        if self.room is not None:
            while self._tokens_in_use(plan) > self.room and len(self.running) > 1:
                left += self._preempt(max(self.running, key=urgency), plan, put_back)
        return left

    def _give(self, plan: StepPlan[J], job: J, left: int) -> int:
        """Plan a piece for ``job``, if a whole one fits; return its number of tokens."""
        count = min(job.known - job.computed, self.chunk, left)
        if job.computed + count < job.known:
            count -= (job.computed + count) % self.grain
        if count > 0:
            plan.pieces.append((job, count))
        return max(count, 0)

    def _tokens_in_use(self, plan: StepPlan[J]) -> int:
        return sum(job.computed for job in self.running) + sum(count for _, count in plan.pieces)

    def _fits(self, plan: StepPlan[J], job: J) -> bool:
        """Return whether there is room for all known tokens of ``job`` and one more."""
        return self.room is None or self._tokens_in_use(plan) + job.known + 1 <= self.room
