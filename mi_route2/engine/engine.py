"""Continuous batching: requests join and leave at any step, each with its own prompt, sampling and interventions.

    engine = Engine(host)
    results = engine.generate([Request(prompt, Sampling(max_new=64)), ...])

    engine.submit(request)           or step by step
    while engine.busy:
        for result in engine.step():
            ...

A step runs one forward over all decoding requests, and further forwards over chunks of prompts. The tokens of a request do not
depend on the other requests beyond float noise (matrix products round differently in another shape). With ``exact=True`` every
request runs alone in chunks of one fixed size, and no bit depends on other requests, the chunk size, preemption or the prefix
cache. An engine must be used from one thread.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import nullcontext
from dataclasses import replace
from math import isfinite
from time import monotonic
from typing import Any, Literal
from weakref import WeakMethod

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm

from mi_route2.checks import checked
from mi_route2.engine.cache import Prefixes, Slots
from mi_route2.engine.controllers import Controllers, ProbeController, RequestView, StepView
from mi_route2.engine.forward import Ran, Runner, failure
from mi_route2.engine.interrupts import unbroken
from mi_route2.engine.request import EngineRequest, Event, Finish, Request, Result, Token, refuse
from mi_route2.engine.residents import Residents
from mi_route2.engine.rules import RuleBook
from mi_route2.engine.sampling import Sampling, choose
from mi_route2.engine.scheduler import Scheduler, Shares
from mi_route2.engine.text import GrowingText, grown
from mi_route2.hosts.base import Host
from mi_route2.hosts.decoder import Decoder
from mi_route2.hosts.state import ModelState
from mi_route2.patching.patches import FromRun, Resolved, resolve
from mi_route2.runs import RunStore
from mi_route2.runs.disk import invalid
from mi_route2.runs.rows import demand_name
from mi_route2.steering.plan import Reading
from mi_route2.steering.specs import UNSTEERED, Monitor, Steering, VectorLike, looker
from mi_route2.steering.state import SteeringState

_DECODING = "the tokenizer's decoding of what was generated"


class QueueFullError(RuntimeError):
    """Error for a request beyond the maximum number of waiting requests."""


@checked
class Engine:
    """Continuous batching over one model; see the module.

    ``events`` are the new tokens and readings of the last step, for streams; ``paused`` is true between ``pause`` and ``resume``.
    ``steering`` holds globals, tiers and named vectors; ``prefixes`` counts hits and misses; ``steps`` and ``tokens`` count steps
    and generated tokens so far; ``last_error`` is the reason of the last request that failed.

    Args:
        host: the model on the host ``torch`` or ``transformer_lens``, in ``eval`` mode; attach adapters before.
        rows: number of requests that run at once.
        budget: tokens in one step.
        chunk: the longest piece of a prompt in one step.
        room: total key-value positions; requests are preempted if it runs out. ``None``: rows times the context.
        block: tokens in a block of the prefix cache.
        prefix_bytes: size of the prefix cache; 0 disables it.
        slot_bytes: bytes of keys and values that running requests may reserve, each for its own longest length; others wait.
            ``None``: any.
        patch_slots: patches at one site over all running requests.
        steering_rows: number of different steering configurations at once.
        store: the run store for reading and writing captured runs.
        tokenizer: for stop texts and the results' text; anything with ``decode(ids)``.
        vectors: named vectors that patches and steering may use.
        controllers: controllers that change steering between steps.
        exact: see the module.
        queue: number of requests that may wait; ``None``: any.
        patience: steps without one of its priority after which the first waiting request gains a level; ``None``: never.
        generator: draws the seeds of sampled requests that give none. ``None``: seeded nondeterministically.

    Raises:
        ValueError: the host or architecture has no decoder, sizes are invalid, or the controllers belong to another engine.

    Examples:
        >>> engine = Engine(host)
        >>> short, long = engine.generate([Request((3, 4, 5), Sampling(max_new=2)), Request((3, 4), Sampling(max_new=8))])
    """

    def __init__(
        self,
        host: Host,
        *,
        rows: int = 64,
        budget: int = 2048,
        chunk: int = 256,
        room: int | None = None,
        block: int = 16,
        prefix_bytes: int = 256 << 20,
        slot_bytes: int | None = None,
        patch_slots: int = 1024,
        steering_rows: int = 64,
        store: RunStore | None = None,
        tokenizer: Any = None,
        vectors: Mapping[str, VectorLike] | None = None,
        controllers: Controllers | None = None,
        exact: bool = False,
        queue: int | None = None,
        patience: int | None = 512,
        generator: torch.Generator | None = None,
    ):
        sizes = {"rows": rows, "budget": budget, "chunk": chunk, "room": room, "queue": queue, "patience": patience}
        sizes |= {"block": block, "prefix_bytes": prefix_bytes, "slot_bytes": slot_bytes, "patch_slots": patch_slots}
        for name, size in (sizes | {"steering_rows": steering_rows}).items():
            least = 0 if name in ("prefix_bytes", "steering_rows") else 1
            if size is not None and (isinstance(size, bool) or size < least):
                raise ValueError(f"{name} = {size} is not valid: give a whole number of at least {least}")
        if tokenizer is not None and not callable(getattr(tokenizer, "decode", None)):
            raise TypeError(f"the tokenizer must have decode(ids), but {type(tokenizer).__name__} has none: give the model's own")
        self.host, self.decoder, self.tokenizer = host, Decoder(host), tokenizer
        model, kind, device = self.decoder, self.decoder.dtype, self.decoder.device
        grain = block if exact else 1
        self.scheduler: Scheduler[EngineRequest] = Scheduler(
            rows=rows, budget=budget, chunk=chunk, room=room, grain=grain, patience=patience
        )
        book = RuleBook(rivals=_weakly(self._rivals))
        self._steering = SteeringState(
            model.shape,
            rows=steering_rows,
            dtype=kind,
            device=device,
            adapter_sites=model.adapters(),
            guard=_weakly(self._refuse_monitor),
            guard_rules=book.refuse,
        )
        for name, vector in (vectors or {}).items():
            self._steering.register(name, vector)
        self.prefixes = Prefixes(block, prefix_bytes)
        self.steps = self.tokens = 0
        self._seeds = generator or torch.Generator("cpu")
        if generator is None:
            self._seeds.seed()
        self.last_error: str | None = None
        self._state = ModelState(host)
        slots = Slots(model.layers, rows, model.heads, model.width, most=model.context, dtype=kind, device=device)
        self._runner = Runner(model, slots, self._steering, self._state, exact=exact, grain=grain)
        self._residents = Residents(
            model,
            slots,
            self._steering,
            self.prefixes,
            self._state,
            store=store,
            patch_slots=patch_slots,
            slot_bytes=slot_bytes,
            exact=exact,
            patience=patience,
            rules=book,
        )
        self.controllers = Controllers() if controllers is None else controllers
        if any(isinstance(one, RuleBook) for one in self.controllers.sync):
            raise ValueError("these controllers belong to another engine: give each engine its own")
        for one in (*self.controllers.sync, *self.controllers.queues):
            if one.name == book.name:
                raise ValueError(f"a controller is called {book.name!r}, which is the name of the engine's own: call it otherwise")
            if isinstance(one, ProbeController):
                one.demand_fit(model.shape)
                one.follows.clear()  # requests of another engine that had it before have the same numbers
        self.controllers.sync.insert(0, book)
        self.queue, self.paused = queue, False
        self.events: list[Event] = []
        self._shares: defaultdict[int, Shares] = defaultdict(Shares)
        """Fair queues by priority: a request at one priority costs no owner a turn at another."""
        self._moved: set[tuple[int, str]] = set()
        """Priorities and owners of requests that have left without having run."""
        self._refit = False
        """True if the model changed and the steering of all requests and of held configurations was not checked against it."""
        self._seen = 0
        """Number of the first request that came after the last change was seen."""
        self._kept = False
        self._late: list[EngineRequest] = []
        """Requests that came while the engine is paused."""
        self._deadlines: dict[EngineRequest, float] = {}
        self._readers: dict[int, EngineRequest] = {}
        """Requests that want their monitors' readings."""
        self._sequences: dict[int, EngineRequest] = {}
        self._owners: Counter[str] = Counter()
        self._arrivals = 0
        self._done: list[Result] = []
        self._untold: list[Event] = []
        """Events of requests that were submitted before a ``generate``, from its steps."""
        self._stepping = False

    @property
    def steering(self) -> SteeringState:
        """Globals, tiers, held configurations, monitors and named vectors, for the model as it is now."""
        if self._still and self._state.changed:
            self._look()  # so that what is set next is compared with the adapters that are attached
        return self._steering

    @property
    def busy(self) -> bool:
        """True if a step would do something.

        A request runs or waits and is not paused, the deadline of a paused one has passed, or a result was not returned yet.
        """
        return bool(self._done or (self._going or self._overdue() if self.paused else self._sequences))

    @property
    def resources(self) -> dict[str, int]:
        """Resources that requests hold now: rows and bytes of keys and values, patch slots, and steering rows."""
        slots, patches = self._residents.slots, self._residents.patches
        return {"slots": slots.used, "slot_bytes": slots.bytes, "patch_slots": patches, "steering_rows": self._steering.rows.used}

    @property
    def _going(self) -> bool:
        """True if requests still run that ``pause("finish")`` lets end."""
        return len(self._sequences) > len(self._late) and not self._kept

    @property
    def _still(self) -> bool:
        """True if the model may be changed now: no request runs or waits, but for those that a pause keeps."""
        return not (self._going if self.paused else self._sequences)

    @checked
    def check(self, request: Request) -> None:
        """Raise what ``submit`` would raise except for a full queue, without queueing the request."""
        self._checked(request)

    @checked
    def submit(self, request: Request) -> int:
        """Queue a request and return its unique number.

        Names are resolved and patch sources are read here: vectors or runs that are registered, dropped or evicted while the
        request waits do not affect it.

        Raises:
            ValueError, KeyError: the request cannot be run.
            QueueFullError: as many requests wait as ``queue`` says.
            RuntimeError, OSError: the model is in training mode or has another dtype, device or attention than it had, or the store
                cannot be read.
        """
        asked, patches = self._checked(request)
        with unbroken():
            return self._queued(asked, patches)

    def _queued(self, asked: Request, patches: tuple[Resolved, ...]) -> int:
        """Queue a request that was checked."""
        waiting = len(self.scheduler.waiting) + len(self._late)
        if self.queue is not None and waiting >= self.queue:
            raise QueueFullError(f"{waiting} requests wait already, which is the limit: submit this one again later")
        number = self._arrivals
        self._arrivals += 1
        sampling = self._seeded(asked.sampling)
        named = {name: self._steering.vectors[name] for rule in asked.rules for name in rule.names}
        sequence = EngineRequest(number, number, asked, Result(number, seed=sampling.seed), sampling, patches, named)
        sequence.turn = self._shares[asked.priority].turn(asked.owner, number, sequence.reach)
        if asked.deadline is not None:
            self._deadlines[sequence] = monotonic() + asked.deadline
        if asked.readings:
            self._readers[number] = sequence
        if sampling.stop:
            sequence.text = GrowingText(self.tokenizer, sampling.stop, asked.prompt)
        self._sequences[number] = sequence
        self._owners[asked.owner] += 1
        if self.paused:
            self._late.append(sequence)
        else:
            self.scheduler.add(sequence)
        return number

    def partial(self, request: int) -> Result:
        """Return the result so far of a request that has not ended. ``KeyError`` if it is not in the engine."""
        return self._find(request).result

    @unbroken()
    def cancel(self, request: int) -> None:
        """End a request at once; it still gets a result. ``KeyError`` if the request is not in the engine."""
        self._end(self._find(request), "cancelled")

    @unbroken()
    def preempt(self, request: int) -> None:
        """Preempt a running request, as happens if room runs out. ``KeyError`` if it is not running."""
        one = self._find(request)
        if one.row < 0:
            raise KeyError(f"request {request} is waiting: only a running request can be preempted")
        self.scheduler.put_back(one)
        self._residents.put_back(one)

    @checked
    def generate(self, requests: Iterable[Request], *, progress: bool = True) -> list[Result]:
        """Run ``requests`` and return their results in order. A progress bar counts tokens if this takes more than three seconds.

        If a request is refused, or anything else raises, none of these requests stays in the engine. Results and events of requests
        that were submitted before come with the next ``step``.

        Raises:
            RuntimeError: the engine is paused.
        """
        if self.paused:
            raise RuntimeError("the engine is paused, so that no request would run: call resume() before")
        most: dict[int, int] = {}
        results: dict[int, Result] = {}
        others: list[Result] = []
        untold: list[Event] = []
        owners = set(self._owners)
        with unbroken() as let_through:
            try:
                for request in requests:
                    most[self.submit(request)] = request.sampling.max_new
                    let_through()
                with tqdm(total=sum(most.values()), unit="token", delay=3, leave=False, disable=None if progress else True) as bar:
                    while len(results) < len(most):
                        if not self.busy:
                            raise RuntimeError(
                                "the engine was paused while these requests ran: call resume() and submit them again"
                            )
                        before = self.tokens
                        done = self.step()
                        untold += [event for event in self.events if event.request not in most]
                        ended = {one.request: one for one in done if one.request in most}
                        others += [one for one in done if one.request not in most]
                        results |= ended
                        # a request that stopped early counts as complete
                        bar.update(self.tokens - before + sum(most[number] - len(one.tokens) for number, one in ended.items()))
                        let_through()
            except BaseException:
                self._withdraw(most, owners)
                raise
            finally:
                self._done, self._untold = others + self._done, untold + self._untold
        return [results[number] for number in most]

    @torch.no_grad()
    def step(self) -> list[Result]:
        """Run one step and return the results of the requests that ended since the last one.

        An interrupt (Ctrl-C) is raised when the step is done; the next one goes on and returns the results.

        Raises:
            RuntimeError: the model changed while requests run, so that their keys and values are those of another model, or a step
                is being run already, which has called a controller.
        """
        if self._stepping:
            raise RuntimeError("a step cannot be run within a step: submit(request) there, and it runs from the next step on")
        with unbroken():
            self._stepping = True
            try:
                self._step()
            finally:
                self._stepping = False
        done, self._done = self._done, []
        return done

    def _step(self) -> None:
        self.events, self._untold = self._untold, []
        self._expire()
        if self._going if self.paused else self._sequences:
            self._state.glance()
            if self._sequences and (what := self._state.changed):
                raise RuntimeError(
                    f"the model changed while {len(self._sequences)} requests ran ({what}): let them end before, cancel them, "
                    "or pause the engine around a change of weights"
                )
            self.controllers.before_step(self._steering)
            self._move_up()
            turn = self._residents.plan(self.scheduler)
            for one in turn.admitted:
                self._shares[one.request.priority].served(one.request.owner, one.id, one.turn)
            for one, reason in self._residents.failed:
                self._residents.leave(one)
                self._hand_out(one, "error", reason)
            self._residents.failed.clear()
            if turn.pieces:
                self._run(turn.pieces)
            elif self.scheduler.waiting and not self.scheduler.running and not turn.preempted:
                # a request that was preempted just now comes back in the next step, and may hold what the first one lacks
                self._end(first := self.scheduler.waiting[0], "error", self._residents.lacking(first))
            self.steps += 1

    def _run(self, pieces: list[tuple[EngineRequest, int]]) -> None:
        """Run the step's forwards, append one token to each request that is ready to sample, and end the finished ones."""
        pieces = self._residents.fit(pieces)
        self._residents.note(pieces)
        starts = {one: one.computed for one, _ in pieces}
        ended: list[tuple[EngineRequest, Finish, str | None]] = []
        ran = None
        try:
            ran = self._runner.run(pieces, self.controllers.wants(self.decoder.shape))
            self._read(ran)
            if ran.logits is not None:
                self._append(ran.due, ran.logits, ended)
        except BaseException:
            if ran is not None:
                self._tell(starts, ran)
            for one, finish, error in ended:
                self._end(one, finish, error)
            for one, _ in pieces:
                if one.id in self._sequences and (one.computed == one.known or one.generated == one.sampling.max_new):
                    self._end(one, "error", "the step that made its next token was interrupted")
            raise
        self._tell(starts, ran)
        for one, count in pieces:
            if count > 1:
                self._residents.publish(one)
        if failed := ran.failed | self._residents.lost:
            ended = [one for one in ended if one[0] not in failed] + [(one, "error", why) for one, why in failed.items()]
            self._residents.lost.clear()
        if ran.interrupt is not None:
            pieces = [(one, count) for one, count in pieces if one.computed > starts[one]]
        try:
            if len(self.controllers.sync) > 1 or not self._residents.rules.idle:
                self.controllers.after_step(self._view(pieces, ran, {one for one, *_ in ended}), self._steering)
        finally:  # a request that has its last token must not get another one, whatever came between
            self._residents.vacate(one for one, *_ in ended)
            for one, finish, error in ended:
                if one.id in self._sequences:  # otherwise a controller has cancelled it
                    self._end(one, finish, error)
        if ran.interrupt is not None:
            raise ran.interrupt

    def _move_up(self) -> None:
        """Give an owner's waiting requests the turns of its requests that left before they ran."""
        moved = {number: turn for priority, owner in self._moved for number, turn in self._shares[priority].turns(owner).items()}
        self._moved.clear()
        for number, turn in moved.items():
            one = self._sequences[number]
            one.turn = min(one.turn, turn)  # one that has gained a level stays the first there
        if moved:
            self.scheduler.sort()

    def _overdue(self) -> list[EngineRequest]:
        """Return the requests whose deadline has passed."""
        now = monotonic() if self._deadlines else 0.0
        return [one for one, ends in self._deadlines.items() if ends <= now]

    def _expire(self) -> None:
        """End the requests whose deadline has passed."""
        for one in self._overdue():
            asked = one.request.deadline
            self._end(one, "error", f"its deadline of {asked:g} s has passed, after {one.generated} tokens: give it more time")

    def _read(self, ran: Ran) -> None:
        """Store the monitors' readings with the requests that want them."""
        for readings in ran.readings if self._readers else ():
            for request, name, start, track in readings.each():
                if (one := self._readers.get(request)) is not None:
                    for position, (score, gate) in enumerate(zip(track.scores.tolist(), track.gates.tolist(), strict=True), start):
                        one.note(position, {name: Reading(score, gate)})

    def _tell(self, starts: Mapping[EngineRequest, int], ran: Ran) -> None:
        """Collect the step's events."""
        due = set(ran.due)
        for one, start in starts.items():
            result = one.result
            new = result.tokens[-1] if one in due and len(one.tokens) > one.computed else None
            positions = range(start, one.computed) if one.observed else ()
            read = {at: result.readings[at] for at in positions if at in result.readings}
            norms = {at: result.norms[at] for at in positions if at in result.norms}
            if new is not None or read or norms:
                self.events.append(Event(one.id, new, read, norms))

    @checked
    @unbroken()
    def pause(self, mode: Literal["abort", "finish", "keep"] = "finish") -> None:
        """Stop admitting requests, so that the model's weights may be changed; new requests wait for ``resume``.

        Args:
            mode: what happens to the requests in the engine. ``abort`` cancels them. ``finish`` lets them run to their end: call
                ``step`` while ``busy``. ``keep`` stops them where they are; they go on after ``resume``.

        Raises:
            RuntimeError: the engine is paused already.
        """
        if self.paused:
            raise RuntimeError("the engine is paused already: call resume() before")
        if mode == "abort":
            for one in list(self._sequences.values()):
                self._end(one, "cancelled")
        self.paused, self._kept = True, mode == "keep"
        for one in list(self.scheduler.running) if self._kept else ():
            self.scheduler.put_back(one)
            self._residents.put_back(one)

    @unbroken()
    def resume(self) -> None:
        """Resume after ``pause``. If the model has changed, everything that depends on it is dropped.

        Requests that were kept then compute their keys and values, captures and readings anew, from the tokens that they have. One
        that writes a run or patches from one ends with an error, because these belong to the model before.

        Raises:
            RuntimeError: the engine is not paused, or ``pause("finish")`` still has requests to end.
            ValueError, KeyError: what acts on all requests, or is held, does not fit adapters that were attached anew: clear or
                drop it, and call this again.
        """
        if not self.paused:
            raise RuntimeError("the engine is not paused")
        if self._going:
            raise RuntimeError("requests that may finish are still running: call step() while the engine is busy, then resume()")
        self._look()
        if self._refit:
            self._steering.refit()
            self._refit = False
            for one in list(self._sequences.values()):
                read = one.id < self._seen and any(isinstance(patch.source, FromRun) for patch in one.request.patch)
                if one.writer is not None or read:
                    self._end(one, "error", "the weights were changed while it ran, and its run belongs to those before")
                elif (why := self._unfit(one)) is not None:
                    self._end(one, "error", why)
                else:
                    one.restart()
        self.paused = self._kept = False
        late, self._late = self._late, []
        for one in late:
            if one.id in self._sequences:
                self.scheduler.add(one)

    @unbroken()
    def close(self) -> None:
        """Cancel all remaining requests."""
        for one in list(self._sequences.values()):
            self._end(one, "cancelled")

    @unbroken()
    def _look(self) -> None:
        """Compare the model with what it was, and drop everything that depends on it if it has changed."""
        if self._state.look():
            self.prefixes.clear()
            self.decoder.forget()
            self._runner.forget()
            self._steering.set_adapter_sites(self.decoder.adapters())
            self._refit, self._seen = True, self._arrivals

    def _withdraw(self, requests: Iterable[int], owners: Set[str]) -> None:
        """Remove requests as if they had never been submitted; ``owners`` are those that had other requests before."""
        withdrawn = set(requests)
        for number in withdrawn & self._sequences.keys():
            one = self._sequences[number]
            new = {one.request.owner} - owners
            self._owners.update(new)  # so that what the owner held before does not end with this request
            self._end(one, "cancelled")  # its unfinished run is not kept
            self._owners.subtract(new)
        self._owners = +self._owners
        self._residents.rules.withdraw(withdrawn)
        self._done = [one for one in self._done if one.request not in withdrawn]

    def _find(self, request: int) -> EngineRequest:
        if isinstance(request, bool) or not isinstance(request, int | np.integer) or request not in self._sequences:
            raise KeyError(f"request {request} is not in the engine: it has ended, or was never submitted")
        return self._sequences[int(request)]

    def _checked(self, request: Request) -> tuple[Request, tuple[Resolved, ...]]:
        """Return the request with its names resolved, and its patches with their sources; raise if it could never run."""
        if self._still and (not self.paused or self._state.changed):
            self._look()
        model, residents, store = self.decoder, self._residents, self._residents.store
        model.demand_fit()
        refuse(request, model.context, model.vocabulary)
        room = self.scheduler.room
        if room is not None and len(request.prompt) + request.sampling.max_new > room:
            raise ValueError(f"{len(request.prompt)} + {request.sampling.max_new} tokens exceed the engine's room of {room}")
        if request.sampling.stop and self.tokenizer is None:
            raise ValueError("stop texts need a tokenizer: give the engine one, or use stop_tokens")
        limit, needed = residents.slot_bytes, residents.slots.cost(len(request.prompt) + request.sampling.max_new - 1)
        if limit is not None and needed > limit:
            raise ValueError(
                f"{len(request.prompt)} + {request.sampling.max_new} tokens need {needed:,} bytes of keys and values, but the "
                f"engine may hold {limit:,}: ask for fewer tokens, or raise slot_bytes"
            )
        crowded = Counter(patch.site for patch in request.patch)
        for site, count in crowded.items():
            if count > residents.patch_slots:
                raise ValueError(f"{count} patches at {site} exceed the engine's limit of {residents.patch_slots} per site")
        for site in {*crowded, *(capture.site for capture in request.capture), *request.norms, *self._steering.sites()}:
            model.shape(site)  # raises an error for an unknown site, or one whose adapters are off
        if self._refit:
            self._steering.refit()
            self._refit = self.paused  # resume has requests to compute anew
        named = self._steering.vectors
        steering = request.steering and request.steering.resolved(looker(named))
        asked = request
        if steering is not request.steering or request.rules:  # a copy is validated anew, which takes longer than all of this
            asked = replace(request, steering=steering, rules=tuple(rule.resolved(looker(named)) for rule in request.rules))
        for monitor in (steering or UNSTEERED).monitors:
            self.controllers.demand_same(monitor, named)
        if len(rivals := self._rivals(steering or UNSTEERED)) > 1:
            raise ValueError(
                f"the controllers {rivals[0]!r} and {rivals[1]!r} would both set the scale and the row of this request: give each "
                "a monitor of its own"
            )
        self.controllers.demand_held(rivals, self._steering.configurations)
        residents.rules.check(self._steering, asked.rules, steering, asked.conversation)
        shaped = {name: one.data if one.flat else one.data.reshape(one.shape) for name, one in named.items()}
        vectors = shaped if request.patch else {}
        with nullcontext() if store is None else store.unchanged():
            self._refuse_runs(request, store)
            return asked, resolve(request.patch, model.shape, runs=store, vectors=vectors, dtype=model.dtype, device=model.device)

    def _unfit(self, one: EngineRequest) -> str | None:
        """Return why the interventions of a request do not fit a model whose adapters were attached anew; ``None`` if they do."""
        try:
            for patch in one.patches:
                if (shape := self.decoder.shape(patch.site)) != tuple(patch.source.shape):
                    return f"the patch at {patch.site} has shape {list(patch.source.shape)}, but the site has {list(shape)} now"
            if one.admitted:
                self._steering.refit(one.id)
        except (ValueError, KeyError) as error:
            return str(error.args[0])
        return None

    def _refuse_monitor(self, name: str, monitor: Monitor, request: int | None) -> None:
        """Raise ``ValueError`` for a monitor that would set a probe controller on a request beside rules or another one.

        Likewise for one that a controller would take for its own.
        """
        self.controllers.demand_same(monitor, self._steering.vectors)
        every = self.controllers.probe_controllers(())
        readers = [one for one in self.controllers.probe_controllers({name}) if one not in every]
        if not readers:
            return
        rules, sequences = self._residents.rules, self._sequences
        for one in sequences.values() if request is None else [sequences[request]] if request in sequences else []:
            asked = one.request
            names = {*(monitor.name for monitor in (asked.steering or UNSTEERED).monitors), *self._steering.watching(one.id)}
            rivals = self.controllers.probe_controllers({name, *names, *self._steering.monitors}, one.id)
            self.controllers.demand_held(rivals, self._steering.configurations)
            told = asked.rules, asked.steering, asked.conversation, one.named
            if len(rivals) > 1 or rules.switches(self._steering, one.id, *told):
                raise ValueError(
                    f"the controller {readers[0]!r} would read this monitor on request {one.id}, whose scale and row a rule or "
                    "another controller sets: set it on other requests, or when this one has ended"
                )

    def _rivals(self, steering: Steering) -> list[str]:
        """Return the names of the probe controllers that set the scale and the row of a request with this steering."""
        return self.controllers.probe_controllers({*(monitor.name for monitor in steering.monitors), *self._steering.monitors})

    def _refuse_runs(self, request: Request, store: RunStore | None) -> None:
        """Raise if a run cannot be read by this model or cannot be written."""
        read = {patch.source.run for patch in request.patch if isinstance(patch.source, FromRun)}
        for run in read if store is not None else ():
            assert store is not None
            if (captured := store.info(run).weights) != self._state.weights():
                raise ValueError(invalid(run, captured, self._state.weights()))
        if request.run is None:
            return
        if store is None:
            raise ValueError(f"run {request.run!r} cannot be stored without a run store: give the engine one")
        demand_name(request.run)
        if not request.capture:
            raise ValueError(f"run {request.run!r} would be empty: the request captures nothing")
        if any(one.request.run == request.run for one in self._sequences.values()):
            raise ValueError(f"another request of the engine already writes run {request.run!r}: use another name")
        if request.run in store:
            raise ValueError(f"there is already a run {request.run!r}: drop it first, or use another name")

    def _seeded(self, sampling: Sampling) -> Sampling:
        """Return ``sampling`` with a seed, drawing one of 53 bits, which JavaScript can read, if it samples and has none."""
        if sampling.plain or sampling.seed is not None:
            return sampling
        return replace(sampling, seed=int(torch.randint(2**53, (), generator=self._seeds, device=self._seeds.device)))

    def _append(self, due: list[EngineRequest], logits: Tensor, ended: list[tuple[EngineRequest, Finish, str | None]]) -> None:
        """Append the next token of each request in ``due``; add those that end to ``ended``, with finish and error."""
        if self._residents.exact and logits.is_cuda and len(due) > 1:  # there a long row's softmax is split by its address
            for i, one in enumerate(due):
                self._append([one], logits[i : i + 1].clone(), ended)
            return
        uniforms = [one.uniforms[one.generated] if one.uniforms else 0.0 for one in due]
        try:
            chosen, values = choose(logits, [one.sampling for one in due], uniforms)
        except Exception as error:  # no memory for all of them at once, or for this one
            if len(due) == 1:
                ended.append((due[0], "error", failure("the choice of its next token", error)))
            else:
                for i, one in enumerate(due):
                    self._append([one], logits[i : i + 1], ended)
            return
        for i, (one, token, value) in enumerate(zip(due, chosen.tolist(), values.tolist(), strict=True)):
            if not isfinite(value):
                reason = f"the logits at position {one.known - 1} are not finite: is an intervention too strong?"
                ended.append((one, "error", reason))
                continue
            what = "the log-probabilities of its next token"
            try:
                one.result.tokens.append(_detailed(token, logits[i], one.sampling) if one.detailed else Token(token))
                one.tokens.append(token)
                self.tokens += 1
                what = _DECODING  # a tokenizer is the user's code, whose errors must not end other requests
                stopped = one.stops and self._stopped(one, token)
            except Exception as error:
                ended.append((one, "error", failure(what, error)))
                continue
            if stopped:
                ended.append((one, "stop", None))
            elif len(one.tokens) >= one.most:
                ended.append((one, "length", None))

    def _logprobs(self, logits: Float[Tensor, "n v"]) -> Float[Tensor, "n v"]:
        if self._residents.exact and logits.is_cuda:
            return torch.cat([row.clone().log_softmax(-1) for row in logits.split(1)])
        return logits.log_softmax(-1)

    def _view(self, pieces: list[tuple[EngineRequest, int]], ran: Ran, ended: set[EngineRequest]) -> StepView:
        """Return the controllers' view of the step."""
        readings: dict[int, Mapping[str, Reading]] = {}
        for each in ran.readings:
            readings |= each.last()
        places = {one: i for i, one in enumerate(ran.due)}
        try:
            logprobs = None if ran.logits is None else self._logprobs(ran.logits)
        except RuntimeError:  # no memory for them: controllers must see the step in any case
            logprobs = None
        views = []
        for one, _ in pieces:
            drawn = places.get(one) if one.known > one.computed else None  # a failed request has no token
            views.append(
                RequestView(
                    one.id,
                    one.computed - 1,
                    None if drawn is None else one.tokens[-1],
                    None if drawn is None or logprobs is None else float(logprobs[drawn][one.tokens[-1]]),
                    ran.seen.get(one.id, {}),
                    readings.get(one.id, {}),
                    one in ended,
                    one.prompt,
                )
            )
        return StepView(self.steps, tuple(views), self._sequences.keys())

    def _stopped(self, one: EngineRequest, token: int) -> bool:
        """Return whether the token ends the request, or a stop text has appeared with it."""
        if one.text is not None:
            one.text.push(token)
        return (one.text is not None and one.text.stopped) or token in one.sampling.stop_tokens

    def _end(self, one: EngineRequest, finish: Finish, error: str | None = None) -> None:
        """End a request and release its resources."""
        if one in self._late:
            self._late.remove(one)
        else:
            self.scheduler.remove(one)
        self._residents.leave(one)
        self._hand_out(one, finish, error)

    def _hand_out(self, one: EngineRequest, finish: Finish, error: str | None = None) -> None:
        del self._sequences[one.id]
        self._owners[one.request.owner] -= 1
        if not self._owners[one.request.owner]:
            del self._owners[one.request.owner]
            self._steering.leave(one.request.owner)
        if self._shares[one.request.priority].left(one.request.owner, one.id) is not None:
            self._moved.add((one.request.priority, one.request.owner))
        self._deadlines.pop(one, None)
        self._readers.pop(one.id, None)
        result = one.result
        result.finish, result.error = finish, error
        if self.tokenizer is not None:
            try:
                if one.text is not None:
                    one.text.end()  # a stop text may end with a character that is not finished
                if one.text is not None and one.text.stopped:
                    result.text, result.finish = one.text.text, "stop" if finish == "length" else finish
                else:
                    result.text = grown(self.tokenizer, one.request.prompt, result.ids)
            except Exception as wrong:
                result.finish, result.error = "error", error or failure(_DECODING, wrong)
        one.settle()
        self.last_error = result.error or self.last_error
        self._done.append(result)


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``method`` for a part of its engine to call.

    The part does not keep the engine alive: its keys and values are freed with its last reference, not with a later collection.
    """
    weak = WeakMethod(method)

    def call(*given: Any) -> Any:
        if (bound := weak()) is None:
            raise RuntimeError("the engine that this belongs to is gone: keep the engine, not only its parts")
        return bound(*given)

    return call


def _detailed(token: int, logits: Float[Tensor, " v"], sampling: Sampling) -> Token:
    """Return the token with the requested log-probabilities."""
    logprobs = logits.log_softmax(-1)
    best = _likeliest(logits, sampling.logprobs or 0)
    top = dict(zip(best.tolist(), logprobs[best].tolist(), strict=True))
    return Token(token, float(logprobs[token]), top, tuple(logprobs[list(sampling.logprob_token_ids)].tolist()))


def _likeliest(logits: Float[Tensor, " v"], count: int) -> Int[Tensor, " n"]:
    """Return the tokens of the greatest logits; of equal ones, of which bfloat16 has many, the first, as the greedy choice does."""
    best = logits.topk(min(count + 1, len(logits)))
    if bool((best.values[1:] < best.values[:-1]).all()):
        return best.indices[:count]
    among = (logits >= best.values[count - 1]).nonzero()[:, 0]
    return among[logits[among].sort(descending=True, stable=True).indices[:count]]
