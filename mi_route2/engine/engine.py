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

The engine sees that a model changed by torch's counters of in-place writes and by the switches of routed adapters. It does not see
writes through ``p.data``, by fused optimizers and from numpy, nor changes of hooks, of settings such as scales, of code, and of
other libraries' adapters: call ``engine.model_changed()`` after these.
"""

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from math import isfinite
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from mi_route2.checks import checked
from mi_route2.engine.cache import Prefixes, PrivateSlots, Slots
from mi_route2.engine.controllers import Controller, Controllers, RequestView, StepView
from mi_route2.engine.forward import ForwardRunner, StepOutput, failure
from mi_route2.engine.request import EngineRequest, Event, Finish, Request, Result, Token, detailed, refuse
from mi_route2.engine.residents import Residents
from mi_route2.engine.sampling import Sampling, choose
from mi_route2.engine.scheduler import Scheduler
from mi_route2.engine.text import GrowingText, grown
from mi_route2.hosts.base import Host, ModelVersion
from mi_route2.hosts.decoder import Decoder
from mi_route2.patching.patches import FromRun, Resolved, resolve
from mi_route2.runs import RunStore
from mi_route2.runs.store import demand_name, invalid
from mi_route2.steering.plan import MonitorReading
from mi_route2.steering.specs import VectorLike, looker
from mi_route2.steering.state import SteeringState

_DECODING = "the tokenizer's decoding of what was generated"


class QueueFullError(RuntimeError):
    """Error for a request beyond the maximum number of waiting requests."""


@checked
class Engine:
    """Continuous batching over one model; see the module.

    ``events`` are the new tokens and readings of the last step, for streams. ``steering`` holds globals, tiers and named vectors;
    ``prefixes`` counts hits and misses; ``steps`` and ``tokens`` count steps and generated tokens so far; ``last_error`` is the
    reason of the last request that failed.

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
        steering_rows: number of different steering configurations at once.
        store: the run store for reading and writing captured runs.
        tokenizer: for stop texts and the results' text; anything with ``decode(ids)``.
        vectors: named vectors that patches and steering may use.
        controllers: controllers that change steering between steps.
        exact: see the module.
        queue: number of requests that may wait; ``None``: any.
        generator: draws the seeds of sampled requests that give none. ``None``: seeded nondeterministically.

    Raises:
        ValueError: the host or architecture has no decoder, or sizes are invalid.

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
        steering_rows: int = 64,
        store: RunStore | None = None,
        tokenizer: Any = None,
        vectors: Mapping[str, VectorLike] | None = None,
        controllers: Iterable[Controller] = (),
        exact: bool = False,
        queue: int | None = None,
        generator: torch.Generator | None = None,
    ):
        sizes = {"rows": rows, "budget": budget, "chunk": chunk, "room": room, "queue": queue, "block": block}
        for name, size in (
            sizes | {"slot_bytes": slot_bytes, "prefix_bytes": prefix_bytes, "steering_rows": steering_rows}
        ).items():
            least = 0 if name in ("prefix_bytes", "steering_rows") else 1
            if size is not None and (isinstance(size, bool) or size < least):
                raise ValueError(f"{name} = {size} is not valid: give a whole number of at least {least}")
        self.host, self.decoder, self.tokenizer = host, Decoder(host), tokenizer
        model, dtype, device = self.decoder, self.decoder.dtype, self.decoder.device
        grain = block if exact else 1
        if model.private:  # a prompt is one piece, and all of its state belongs to its request
            grain = chunk = model.context
            budget, prefix_bytes = max(budget, rows + chunk - 1), 0
        self.scheduler: Scheduler[EngineRequest] = Scheduler(rows=rows, budget=budget, chunk=chunk, room=room, grain=grain)
        self._steering = SteeringState(model.shape, rows=steering_rows, dtype=dtype, device=device, adapter_sites=model.adapters())
        for name, vector in (vectors or {}).items():
            self._steering.register(name, vector)
        self.prefixes = Prefixes(block, prefix_bytes)
        self.steps = self.tokens = 0
        self._seeds = generator or torch.Generator("cpu")
        if generator is None:
            self._seeds.seed()
        self.last_error: str | None = None
        self._version = ModelVersion(host)
        if model.private:
            position = 2 * model.layers * model.heads * model.width * dtype.itemsize
            slots = PrivateSlots(model.begin, most=model.context, position=position)
        else:
            slots = Slots(model.layers, rows, model.heads, model.width, most=model.context, dtype=dtype, device=device)
        self._runner = ForwardRunner(model, slots, self._steering, exact=exact, grain=grain)
        self._residents = Residents(
            model, slots, self._steering, self.prefixes, self._version, store=store, slot_bytes=slot_bytes, exact=exact
        )
        self.controllers = Controllers(controllers)
        for site in sorted(self.controllers.wants):
            model.shape(site)  # raises an error for an unknown site
        self.queue = queue
        self.events: list[Event] = []
        self._readers: dict[int, EngineRequest] = {}
        """Requests that want their monitors' readings."""
        self._requests: dict[int, EngineRequest] = {}
        self._arrivals = 0
        self._done: list[Result] = []
        self._refit = False
        """True if the model changed and the held configurations were not compared with it."""

    @property
    def steering(self) -> SteeringState:
        """Globals, tiers, held configurations, monitors and named vectors, for the model as it is now."""
        if not self._requests:
            self._look()  # so that what is set next is compared with the adapters that are attached
        return self._steering

    @property
    def busy(self) -> bool:
        """True if a step would do something: a request runs or waits, or a result was not returned yet."""
        return bool(self._done or self._requests)

    @property
    def resources(self) -> dict[str, int]:
        """Resources that requests hold now: rows and bytes of keys and values, and steering rows."""
        slots = self._residents.slots
        return {"slots": slots.used, "slot_bytes": slots.bytes, "steering_rows": self._steering.rows.used}

    @property
    def counts(self) -> dict[str, Any]:
        """Counts for metrics: requests, steps, tokens, resources, and blocks of the prefix cache; and the last error."""
        return {
            "running": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting),
            "steps": self.steps,
            "tokens": self.tokens,
            **self.resources,
            "prefix_hits": self.prefixes.hits,
            "prefix_misses": self.prefixes.misses,
            "prefix_bytes": self.prefixes.bytes,
            "last_error": self.last_error,
        }

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
        request, patches = self._checked(request)
        if self.queue is not None and len(self.scheduler.waiting) >= self.queue:
            raise QueueFullError(f"{self.queue} requests wait already, which is the limit: submit this one again later")
        number = self._arrivals
        self._arrivals += 1
        sampling = self._seeded(request.sampling)
        req = EngineRequest(number, request, Result(number, seed=sampling.seed), sampling, patches)
        if request.readings:
            self._readers[number] = req
        if sampling.stop:
            req.text = GrowingText(self.tokenizer, sampling.stop, request.prompt)
        self._requests[number] = req
        self.scheduler.add(req)
        return number

    def cancel(self, request: int) -> None:
        """End a request at once; it still gets a result. ``KeyError`` if the request is not in the engine."""
        self._end(self._find(request), "cancelled")

    def preempt(self, request: int) -> None:
        """Preempt a running request, as happens if room runs out. ``KeyError`` if it is not running."""
        req = self._find(request)
        if req.row < 0:
            raise KeyError(f"request {request} is waiting: only a running request can be preempted")
        self.scheduler.put_back(req)
        self._residents.put_back(req)

    @checked
    def generate(self, requests: Iterable[Request], *, progress: bool = True) -> list[Result]:
        """Run ``requests`` and return their results in order. A progress bar counts tokens if this takes more than three seconds.

        If a request is refused, or anything else raises, these requests are cancelled. Results of requests that were submitted
        before come with the next ``step``.

        Raises:
            ValueError, KeyError, RuntimeError: as ``submit`` and ``step``.
        """
        numbers: list[int] = []
        results: dict[int, Result] = {}
        others: list[Result] = []
        try:
            for request in requests:
                numbers.append(self.submit(request))
            if numbers:
                self._residents.slots.fit(max(self._requests[number].reach for number in numbers), len(numbers))
            most = sum(self._requests[number].sampling.max_new for number in numbers)
            with tqdm(total=most, desc="tokens", delay=3, leave=False, disable=None if progress else True) as bar:
                while len(results) < len(numbers):
                    before = self.tokens
                    for result in self.step():
                        if result.request in numbers:
                            results[result.request] = result
                        else:
                            others.append(result)
                    bar.update(self.tokens - before)
        except BaseException:
            for number in self._requests.keys() & set(numbers):
                self.cancel(number)
            self._done = [result for result in self._done if result.request not in numbers]
            raise
        finally:
            self._done = others + self._done
        return [results[number] for number in numbers]

    @torch.no_grad()
    def step(self) -> list[Result]:
        """Run one step and return the results of the requests that ended since the last one.

        Raises:
            RuntimeError: the model changed while requests run, so that their keys and values are those of another model.
        """
        self.events = []
        if self._requests:
            if self._version.changed:
                raise RuntimeError(
                    f"the model changed while {len(self._requests)} requests ran: let them end before, or cancel them with close()"
                )
            plan = self.scheduler.plan(self._residents.admit, self._residents.put_back)
            for req, reason in self._residents.failed:
                self._residents.leave(req)
                self._hand_out(req, "error", reason)
            self._residents.failed.clear()
            if plan.pieces:
                self._run(plan.pieces)
            elif self.scheduler.waiting and not self.scheduler.running and not plan.preempted:
                reason = "held configurations leave it no steering row: drop one, or raise steering_rows"
                self._end(self.scheduler.waiting[0], "error", reason)
            self.steps += 1
        done, self._done = self._done, []
        return done

    def _run(self, pieces: list[tuple[EngineRequest, int]]) -> None:
        """Run the step's forwards, append one token to each request that is ready to sample, and end the finished ones."""
        starts = {req: req.computed for req, _ in pieces}
        ended: dict[EngineRequest, tuple[Finish, str | None]] = {}
        try:
            self._residents.fit(pieces)
            self._residents.note(pieces)
            output = self._runner.run(pieces, self.controllers.wants)
            self._read(output)
            if output.logits is not None:
                self._append(output.due, output.logits, ended)
        except BaseException:  # Ctrl-C, for example: what these requests have computed is not known
            for req, _ in pieces:
                self._end(req, "cancelled")
            raise
        self._report(starts, output)
        for req, count in pieces:
            if count > 1:
                self._residents.publish(req)
        for req, reason in (output.failed | self._residents.lost).items():
            ended[req] = "error", reason
        self._residents.lost.clear()
        if self.controllers.controllers:
            self.controllers.after_step(self._view(pieces, output, set(ended)), self._steering)
        self._residents.vacate(ended)
        for req, (finish, error) in ended.items():
            if req.id in self._requests:  # otherwise a controller has cancelled it
                self._end(req, finish, error)

    def _read(self, output: StepOutput) -> None:
        """Store the monitors' readings with the requests that want them."""
        for readings in output.readings if self._readers else ():
            for request, name, start, track in readings.each():
                if (reader := self._readers.get(request)) is not None:
                    for position, (score, gate) in enumerate(zip(track.scores.tolist(), track.gates.tolist(), strict=True), start):
                        reader.note(position, {name: MonitorReading(score, gate)})

    def _report(self, starts: Mapping[EngineRequest, int], output: StepOutput) -> None:
        """Collect the step's events."""
        due = set(output.due)
        for req, start in starts.items():
            result = req.result
            new = result.tokens[-1] if req in due and len(req.tokens) > req.computed else None
            positions = range(start, req.computed) if req.observed else ()
            read = {at: result.readings[at] for at in positions if at in result.readings}
            norms = {at: result.norms[at] for at in positions if at in result.norms}
            if new is not None or read or norms:
                self.events.append(Event(req.id, new, read, norms))

    def close(self) -> None:
        """Cancel all remaining requests."""
        for req in list(self._requests.values()):
            self._end(req, "cancelled")

    def model_changed(self) -> None:
        """Drop everything that depends on the model, after a change that the engine does not see (see the module).

        Raises:
            RuntimeError: requests run or wait, whose keys and values are those of the model before.
        """
        if self._requests:
            raise RuntimeError(f"{len(self._requests)} requests run or wait: let them end before, or cancel them with close()")
        self._look(changed=True)

    def _look(self, changed: bool = False) -> None:
        """Compare the model with what it was, and drop everything that depends on it if it has changed."""
        if self._version.look() or changed:
            self._version.forget()
            self.prefixes.clear()
            self.decoder.forget()
            self._runner.forget()
            self._steering.set_adapter_sites(self.decoder.adapters())
            self._refit = True

    def _find(self, request: int) -> EngineRequest:
        if isinstance(request, bool) or not isinstance(request, int | np.integer) or request not in self._requests:
            raise KeyError(f"request {request} is not in the engine: it has ended, or was never submitted")
        return self._requests[int(request)]

    def _checked(self, request: Request) -> tuple[Request, tuple[Resolved, ...]]:
        """Return the request with its names resolved, and its patches with their sources; raise if it could never run."""
        if not self._requests:
            self._look()
        model, residents, store = self.decoder, self._residents, self._residents.store
        model.demand_fit()
        refuse(request, model.context, model.vocabulary)
        length, room = len(request.prompt) + request.sampling.max_new, self.scheduler.room
        if room is not None and length > room:
            raise ValueError(f"{length} tokens of prompt and completion exceed the engine's room of {room}")
        if request.sampling.stop and self.tokenizer is None:
            raise ValueError("stop texts need a tokenizer: give the engine one, or use stop_tokens")
        if residents.slot_bytes is not None and (needed := residents.slots.cost(length - 1)) > residents.slot_bytes:
            raise ValueError(
                f"{length} tokens need {needed:,} bytes of keys and values, but the engine may hold {residents.slot_bytes:,}: ask "
                "for fewer tokens, or raise slot_bytes"
            )
        sites = {*(patch.site for patch in request.patch), *(capture.site for capture in request.capture), *request.norms}
        for site in sites | self._steering.sites():
            model.shape(site)  # raises an error for an unknown site, or one whose adapters are off
        if self._refit:
            self._steering.refit()
            self._refit = False
        named = self._steering.vectors
        steering = request.steering and request.steering.resolved(looker(named))
        if steering is not request.steering:  # a copy is validated anew, which takes longer than all of this
            request = replace(request, steering=steering)
        self._steering.check(steering)
        vectors = (
            {name: tensor.data if tensor.flat else tensor.data.reshape(tensor.shape) for name, tensor in named.items()}
            if request.patch
            else {}
        )
        with nullcontext() if store is None else store.unchanged():
            self._refuse_runs(request, store)
            patches = resolve(request.patch, model.shape, runs=store, vectors=vectors, dtype=model.dtype, device=model.device)
        return request, patches

    def _refuse_runs(self, request: Request, store: RunStore | None) -> None:
        """Raise if a run cannot be read by this model or cannot be written."""
        read = {patch.source.run for patch in request.patch if isinstance(patch.source, FromRun)}
        for run in read if store is not None else ():
            assert store is not None
            if (captured := store.info(run).weights) != self._version.weights():
                raise ValueError(invalid(run, captured, self._version.weights()))
        if request.run is None:
            return
        if store is None:
            raise ValueError(f"run {request.run!r} cannot be stored without a run store: give the engine one")
        demand_name(request.run)
        if not request.capture:
            raise ValueError(f"run {request.run!r} would be empty: the request captures nothing")
        if any(req.request.run == request.run for req in self._requests.values()):
            raise ValueError(f"another request of the engine already writes run {request.run!r}: use another name")
        if request.run in store:
            raise ValueError(f"there is already a run {request.run!r}: drop it first, or use another name")

    def _seeded(self, sampling: Sampling) -> Sampling:
        """Return ``sampling`` with a seed, drawing one of 53 bits, which JavaScript can read, if it samples and has none."""
        if sampling.plain or sampling.seed is not None:
            return sampling
        return replace(sampling, seed=int(torch.randint(2**53, (), generator=self._seeds, device=self._seeds.device)))

    def _append(self, due: list[EngineRequest], logits: Tensor, ended: dict[EngineRequest, tuple[Finish, str | None]]) -> None:
        """Append the next token of each request in ``due``; add those that end to ``ended``, with finish and error."""
        if self._residents.exact and logits.is_cuda and len(due) > 1:  # there a long row's softmax is split by its address
            for i, req in enumerate(due):
                self._append([req], logits[i : i + 1].clone(), ended)
            return
        uniforms = [req.uniforms[req.generated] if req.uniforms else 0.0 for req in due]
        chosen, values = choose(logits, [req.sampling for req in due], uniforms)
        for i, (req, token, value) in enumerate(zip(due, chosen.tolist(), values.tolist(), strict=True)):
            if not isfinite(value):
                reason = f"the logits at position {req.known - 1} are not finite: is an intervention too strong?"
                ended[req] = "error", reason
                continue
            req.result.tokens.append(
                detailed(token, logits[i], req.sampling.logprobs, req.sampling.logprob_token_ids) if req.detailed else Token(token)
            )
            req.tokens.append(token)
            self.tokens += 1
            try:
                stopped = req.stops and self._stopped(req, token)
            except Exception as error:  # a tokenizer is the user's code, whose errors must not end other requests
                ended[req] = "error", failure(_DECODING, error)
                continue
            if stopped or len(req.tokens) >= req.most:
                ended[req] = "stop" if stopped else "length", None

    def _logprobs(self, logits: Float[Tensor, "n v"]) -> Float[Tensor, "n v"]:
        if self._residents.exact and logits.is_cuda:  # there a long row's softmax is split by its address
            return torch.cat([row.clone().log_softmax(-1) for row in logits.split(1)])
        return logits.log_softmax(-1)

    def _view(self, pieces: list[tuple[EngineRequest, int]], output: StepOutput, ended: set[EngineRequest]) -> StepView:
        """Return the controllers' view of the step."""
        readings: dict[int, Mapping[str, MonitorReading]] = {}
        for each in output.readings:
            readings |= each.last()
        places = {req: i for i, req in enumerate(output.due)}
        logprobs = None if output.logits is None else self._logprobs(output.logits)
        views = []
        for req, _ in pieces:
            drawn = places.get(req) if req.known > req.computed else None  # a failed request has no token
            views.append(
                RequestView(
                    req.id,
                    req.computed - 1,
                    None if drawn is None else req.tokens[-1],
                    None if drawn is None or logprobs is None else float(logprobs[drawn][req.tokens[-1]]),
                    output.seen.get(req.id, {}),
                    readings.get(req.id, {}),
                    req in ended,
                    req.prompt,
                )
            )
        return StepView(self.steps, tuple(views), self._requests.keys())

    def _stopped(self, req: EngineRequest, token: int) -> bool:
        """Return whether the token ends the request, or a stop text has appeared with it."""
        if req.text is not None:
            req.text.push(token)
        return (req.text is not None and req.text.stopped) or token in req.sampling.stop_tokens

    def _end(self, req: EngineRequest, finish: Finish, error: str | None = None) -> None:
        """End a request and release its resources."""
        self.scheduler.remove(req)
        self._residents.leave(req)
        self._hand_out(req, finish, error)

    def _hand_out(self, req: EngineRequest, finish: Finish, error: str | None = None) -> None:
        del self._requests[req.id]
        self._readers.pop(req.id, None)
        result = req.result
        result.finish, result.error = finish, error
        if self.tokenizer is not None:
            try:
                if req.text is not None:
                    req.text.end()  # a stop text may end with a character that is not finished
                if req.text is not None and req.text.stopped:
                    result.text, result.finish = req.text.text, "stop" if finish == "length" else finish
                else:
                    result.text = grown(self.tokenizer, req.request.prompt, result.ids)
            except Exception as wrong:
                result.finish, result.error = "error", error or failure(_DECODING, wrong)
        req.settle()
        self.last_error = result.error or self.last_error
        self._done.append(result)
