"""Requests of our own engine run by vLLM: a request becomes a prompt and ``SamplingParams``, and the answer a ``Result``."""

import os
import random
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import count
from math import nan
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from mi_route2.adapters.io import PEFT_CONFIG, PEFT_TENSORS
from mi_route2.checks import checked
from mi_route2.engine.controllers import Controller, Controllers, RequestView, StepView
from mi_route2.engine.engine import QueueFullError
from mi_route2.engine.request import EngineRequest, Event, Finish, Request, Result, Token, refuse
from mi_route2.engine.sampling import Sampling
from mi_route2.engine.text import GrowingText, grown
from mi_route2.patching.patches import FromRun, Resolved, resolve
from mi_route2.steering.plan import MonitorReading, Piece
from mi_route2.steering.specs import Steering, Vector, VectorLike, looker
from mi_route2.steering.state import SteeringState
from mi_route2.tensor_files import unpack
from mi_route2.validation import parse_object
from mi_route2.vllm.facts import COLDEST, Facts, installed, refuse_settings
from mi_route2.vllm.wire import KEY, Orders, salt, write

EXTENSION = "mi_route2.vllm.worker.WorkerExtension"
SETTINGS: Mapping[str, Any] = MappingProxyType(
    {"worker_extension_cls": EXTENSION, "max_logprobs": -1, "enforce_eager": True, "async_scheduling": False}
)
"""Settings of ``vllm.LLM`` that a ``VllmEngine`` needs."""

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's ``max_lora_rank``."""

_REFUSED: Mapping[str, tuple[object, str]] = MappingProxyType(
    {
        "run": (None, "captures come with the result, not to a run store: leave run out"),
        "priority": (0, "vLLM was not started with priorities: leave priority out"),
        "norms": ((), "norms are not computed in vLLM: capture the site and take the norms of its rows"),
    }
)
"""Field of a ``Request`` -> its only value here, and what to do instead."""


@dataclass(eq=False)
class _Live:
    """Request that vLLM runs, under the name ``key``, or is about to: its prompt, and the arguments of its ``SamplingParams``."""

    key: str
    req: EngineRequest
    prompt: dict[str, Any]
    arguments: dict[str, Any]
    private: bool


class VllmEngine:
    """vLLM with interventions per request; see the package.

    ``facts`` are the sizes of the model. ``generate`` runs requests to their end, ``submit`` and ``step`` step by step, with
    ``events``, as in ``Engine``. An engine must be used from one thread.

    Args:
        llm: a ``vllm.LLM`` that was started with ``SETTINGS``; ``launch`` starts one.
        vectors: named vectors that patches and steering may use.
        adapters: folders that ``export_peft`` wrote, by a name of yours, for a vLLM with ``enable_lora=True``.
        generator: draws the seeds of sampled requests that give none. ``None``: seeded nondeterministically.
        controllers: controllers that change steering between steps, as in ``Engine``; with ``()``, you change ``steering``. A
            request whose steering may change shares no prefix: each one with controllers, each steered one with ``()``.
        tokenizer: for stop texts and the results' text; anything with ``decode(ids)``.
        queue: number of requests that may wait; ``None``: any.

    Raises:
        ValueError: vLLM has another version, was started without ``SETTINGS``, or runs a model that was never compared; controllers
            need its worker in this process, as ``launch`` starts it.

    Examples:
        >>> engine = launch(folder, controllers=[ProbeController("calm", 0.5, monitor="probe")])
        >>> engine.steering.hold("calm", Steering(decode=(Steer(site, vector),)))
        >>> results = engine.generate([Request(prompt, steering=Steering(monitors=(Monitor(site, probe, name="probe"),)))])
    """

    def __init__(
        self,
        llm: Any,
        *,
        vectors: Mapping[str, VectorLike] | None = None,
        adapters: Mapping[str, Path | str] | None = None,
        generator: torch.Generator | None = None,
        controllers: Iterable[Controller] | None = None,
        tokenizer: Any = None,
        queue: int | None = None,
    ):
        self.llm = llm
        try:
            answer = llm.collective_rpc("mi_route2_open")[0]
        except (AttributeError, NotImplementedError) as error:
            raise ValueError(f"this vLLM was started without its extension: give it worker_extension_cls={EXTENSION!r}") from error
        if "refused" in answer:
            raise ValueError(answer["refused"])
        self.facts = self.decoder = Facts(**answer["facts"])  # the server reads an engine's sizes in its decoder
        self.controllers, self.tokenizer, self.queue = Controllers(controllers or ()), tokenizer, queue
        self.vectors = {name: Vector(vector) for name, vector in (vectors or {}).items()}
        self._worker = self._steering = None
        if answer["process"] == os.getpid():
            self._worker = llm.collective_rpc("mi_route2_interventions")[0]
        if controllers is not None:
            if self._worker is None:
                raise ValueError("vLLM's worker is another process, which no controller reaches: launch it on one rank")
            self._steering = self._worker.steering
            self.vectors = self._steering.vectors = self.vectors  # one mapping, so that a registered name is known to both
            for site in self.controllers.wants:
                self.facts.shape(site)  # raises an error for an unknown site
            self._worker.wants = self.controllers.wants
        self.events: list[Event] = []
        self.steps = self.tokens = 0
        self.last_error: str | None = None
        self._numbers = count((answer["opened"] - 1) << 32)  # unique among all engines on this vLLM
        self._live: dict[str, _Live] = {}
        self._done: list[Result] = []
        self._adapters = {name: Path(folder) for name, folder in (adapters or {}).items()}
        self._loaded: dict[str, tuple[object, Any]] = {}
        self._seeds = generator or torch.Generator()
        if generator is None:
            self._seeds.seed()

    @property
    def busy(self) -> bool:
        """True if a request runs or waits, or a result was not returned yet."""
        return bool(self._done or self._live)

    @property
    def steering(self) -> SteeringState:
        """Tier, held configurations, monitors, scales and named vectors, as in ``Engine``; set them between two steps.

        Raises:
            ValueError: this engine was made without ``controllers``, so its requests may share their prefixes.
        """
        if self._steering is None:
            raise ValueError("steering cannot change between steps here: make the engine with controllers, which may be ()")
        return self._steering

    @property
    def host(self) -> Any:
        """None: ``ValueError``."""
        raise ValueError(
            "vLLM runs no patch sweeps, attributions or edges: serve the model with --engine own, or send patches with completions"
        )

    @property
    def counts(self) -> dict[str, Any]:
        """Counts for metrics, as in ``Engine``."""
        running = min(len(self._live), self.facts.rows)
        counts = {"running": running, "waiting": len(self._live) - running, "steps": self.steps, "tokens": self.tokens}
        rows = {} if self._steering is None else {"steering_rows": self._steering.rows.used}
        return counts | rows | {"last_error": self.last_error}

    def _encoded(self, request: Request) -> "_Live":
        sampling, steering = request.sampling, self._steering
        if sampling.seed is None and not sampling.plain:
            sampling = replace(sampling, seed=int(torch.randint(2**53, (), generator=self._seeds, device=self._seeds.device)))
        if sampling.stop and self.tokenizer is None:
            raise ValueError("stop texts need a tokenizer: give the engine one, or give stop_tokens")
        private = steering is not None and bool(self.controllers.controllers or request.steering or steering.shared)
        key, number = secrets.token_hex(16), next(self._numbers)
        prompt, arguments, req = encoded(number, request, sampling, self.facts, self.vectors, key, private=private)
        if self.controllers.controllers and arguments["logprobs"] is None:
            arguments["logprobs"] = 0  # of the sampled token, which controllers see
        if sampling.stop:
            req.text = GrowingText(self.tokenizer, sampling.stop, request.prompt)
        return _Live(key, req, prompt, arguments, private)

    @checked
    def submit(self, request: Request, *, adapters: str | None = None) -> int:
        """Queue a request for ``step`` and return its unique number.

        Args:
            request: the request.
            adapters: name of the LoRA under which it runs; ``None``: the base model.

        Raises:
            ValueError, KeyError: as ``generate``.
            QueueFullError: as many requests wait as ``queue`` says.
        """
        if self.queue is not None and len(self._live) >= self.facts.rows + self.queue:
            raise QueueFullError(f"{self.queue} requests wait already, which is the limit: submit this one again later")
        live, lora = self._encoded(request), self._lora(adapters)
        self._add([live], lora)
        return live.req.id

    def _add(self, lives: Iterable["_Live"], lora: Any) -> None:
        for live in lives:
            self._live[live.key] = live
            self.llm.llm_engine.add_request(live.key, live.prompt, _params(live.arguments), lora_request=lora)

    def cancel(self, request: int) -> None:
        """End a request at once; it still gets a result. ``KeyError`` if the request is not in the engine."""
        live = next((live for live in self._live.values() if live.req.id == request), None)
        if live is None:
            raise KeyError(f"request {request} is not in the engine: it has ended, or was never submitted")
        self.llm.llm_engine.abort_request([live.key])
        self._end({live: "cancelled"})

    def close(self) -> None:
        """Cancel all remaining requests."""
        for live in list(self._live.values()):
            self.cancel(live.req.id)

    def step(self) -> list[Result]:
        """Run one step of vLLM, then the controllers, and return the results of the requests that ended since the last one.

        Raises:
            RuntimeError: steering of all requests was set while requests run that share their prefixes with others.
        """
        self.events = []
        if self._live:
            if self._steering is not None and self._steering.shared and not all(live.private for live in self._live.values()):
                raise RuntimeError("steering of all requests was set while plain requests run: set it before, or use a controller")
            torch.get_num_threads()  # sets them in a thread that is new, whose number would change within vLLM's first step there
            try:
                answers = self.llm.llm_engine.step()
            except BaseException:
                abandon(self.llm)
                self._end(dict.fromkeys(self._live.values(), "cancelled"))
                raise
            self._read(answers)
            self.steps += 1
        done, self._done = self._done, []
        return done

    def _read(self, answers: Iterable[Any]) -> None:
        """Append the new tokens, report the step, call the controllers, and end what has ended."""
        ended: dict[_Live, Finish] = {}
        drawn: dict[int, tuple[Token, float]] = {}
        for answer in answers:
            if (live := self._live.get(answer.request_id)) is None:  # a user's own request
                continue
            req, output = live.req, answer.outputs[0]
            req.result.cached = answer.num_cached_tokens or 0
            details = output.logprobs or [None] * len(output.token_ids)
            for token, detail in zip(output.token_ids, details, strict=True):
                new = _token(token, detail if req.detailed else None, req.sampling)
                drawn[req.id] = new, nan if detail is None else detail[token].logprob
                req.result.tokens.append(new)
                req.tokens.append(token)
                self.tokens += 1
                if req.text is not None:
                    req.text.push(token)
            if answer.finished:
                ended[live] = _finish(output.finish_reason)
            elif req.text is not None and req.text.stopped:
                self.llm.llm_engine.abort_request([live.key])
                ended[live] = "stop"
        pieces = () if self._worker is None else self._worker.pieces
        self._report(pieces, drawn)
        if self.controllers.controllers:
            self.controllers.after_step(self._view(pieces, drawn, {live.req.id for live in ended}), self.steering)
        self._end(ended)

    def _report(self, pieces: Iterable[Piece], drawn: Mapping[int, tuple[Token, float]]) -> None:
        """Collect the step's events."""
        read: dict[int, dict[int, dict[str, MonitorReading]]] = {}
        by_number = {live.req.id: live for live in self._live.values()}
        for number, start, length, _ in pieces:
            if (live := by_number.get(number)) is not None and live.req.observed and self._worker is not None:
                kept = getattr(self._worker.results.get(live.key), "readings", {})
                positions = (position for position in range(start, start + length) if position in kept)
                read[number] = {at: {name: MonitorReading(*pair) for name, pair in kept[at].items()} for at in positions}
        for number in by_number:
            if number in drawn or read.get(number):
                self.events.append(Event(number, drawn[number][0] if number in drawn else None, read.get(number, {})))

    def _view(self, pieces: Iterable[Piece], drawn: Mapping[int, tuple[Token, float]], ended: Collection[int]) -> StepView:
        """Return the controllers' view of the step."""
        views, ours = [], {live.req.id for live in self._live.values()}
        for number, start, length, prompt in pieces:
            token, logprob = drawn.get(number, (None, None))
            last = start + length - 1, None if token is None else token.token, logprob
            assert self._worker is not None
            of = self._worker.seen.get(number, {}), self._worker.readings.get(number, {})
            if number in ours:
                views.append(RequestView(number, *last, *of, number in ended, prompt))
        return StepView(self.steps, tuple(views), ours)

    def _end(self, ended: Mapping["_Live", Finish]) -> None:
        """End requests, with what their worker has collected."""
        left = self.llm.collective_rpc("mi_route2_collect", args=([live.key for live in ended],))[0] if ended else {}
        for live, finish in ended.items():
            del self._live[live.key]
            result = _settled(live.req, finish, left.get(live.key))
            if self.tokenizer is not None:
                _word(live.req, self.tokenizer)
            self.last_error = result.error or self.last_error
            self._done.append(result)

    @checked
    def generate(self, requests: Iterable[Request], *, adapters: str | None = None) -> list[Result]:
        """Run ``requests`` together and return their results in order.

        Args:
            requests: the requests.
            adapters: name of the LoRA under which they run; ``None``: the base model.

        Raises:
            ValueError, KeyError: a request cannot be run, or there is no LoRA of this name; none was started.
        """
        lora = self._lora(adapters)
        lives = [self._encoded(request) for request in requests]
        numbers = [live.req.id for live in lives]
        results: dict[int, Result] = {}
        before = self._done
        self._done = []
        try:
            self._add(lives, lora)
            while len(results) < len(lives):
                results |= {result.request: result for result in self.step()}
        except BaseException:
            abandon(self.llm)
            self._end(dict.fromkeys(self._live.values(), "cancelled"))
            results |= {result.request: result for result in self._done}
            raise
        finally:
            self._done = before + [result for number, result in results.items() if number not in numbers]
        return [results[number] for number in numbers]

    def _lora(self, name: str | None) -> Any:
        """Return vLLM's request for a LoRA, a new one if the folder was written again.

        vLLM never reads a number or a prefix under a name again, so a folder with new content needs another number and name.
        """
        if name is None:
            return None
        if name not in self._adapters:
            raise KeyError(f"no LoRA is called {name!r}; there are: {', '.join(self._adapters) or 'none'}")
        folder = self._adapters[name]
        stat = (folder / PEFT_TENSORS).stat()
        stamp, (before, lora) = (stat.st_mtime_ns, stat.st_size, stat.st_ino), self._loaded.get(name, (None, None))
        if stamp != before:
            if lora is not None:
                self.llm.llm_engine.remove_lora(lora.lora_int_id)
            number = 1 + secrets.randbits(30)  # another engine on this vLLM, or its user, may have counted from 1
            lora = import_module("vllm.lora.request").LoRARequest(f"{name} {number}", number, str(folder))
            self._loaded[name] = stamp, lora
        return lora


def abandon(llm: Any) -> None:
    """Abort all requests that an interrupted ``generate`` left in vLLM, also those that a user had added, and forget all prefixes.

    vLLM counts a step's tokens as computed, and offers their blocks as prefixes, before it runs the step. After a step that broke
    off it would wait for a left request for ever, and other requests would read keys and values that were never written.

    Raises:
        RuntimeError: vLLM keeps its prefixes.
    """
    engine = llm.llm_engine
    engine.abort_request(list(engine.output_processor.request_states), internal=True)
    if not llm.reset_prefix_cache():
        raise RuntimeError("vLLM was interrupted and keeps prefixes that may be half computed: start it again")


@contextmanager
def preserving_process() -> Iterator[None]:
    """Context in which vLLM may start; random numbers and torch's threads are ours again afterwards.

    vLLM seeds Python, NumPy and torch with its own seed, the same in every run. The worker of its CPU build replaces
    ``torch.set_num_threads`` by a function that does nothing.
    """
    count, change, started = torch.get_num_threads(), torch.set_num_threads, torch.cuda.is_initialized()
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([torch.cuda.current_device()] if started else []):
            yield
    finally:
        if torch.cuda.is_initialized() and not started:
            torch.cuda.manual_seed_all(torch.initial_seed())  # as torch seeds a GPU at its first use
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_num_threads = change
        torch.set_num_threads(count)


def launch(
    model: Path | str,
    *,
    vectors: Mapping[str, VectorLike] | None = None,
    adapters: Mapping[str, Path | str] | None = None,
    generator: torch.Generator | None = None,
    controllers: Iterable[Controller] | None = None,
    tokenizer: Any = None,
    queue: int | None = None,
    **settings: Any,
) -> VllmEngine:
    """Start vLLM in this process on a checkpoint's folder.

    Args:
        model: the folder.
        vectors: as for ``VllmEngine``.
        adapters: as for ``VllmEngine``; vLLM is started with room for their ranks.
        generator: as for ``VllmEngine``.
        controllers: as for ``VllmEngine``.
        tokenizer: as for ``VllmEngine``.
        queue: as for ``VllmEngine``.
        **settings: of ``vllm.LLM``, for example ``dtype="float32"``.

    Raises:
        ModuleNotFoundError: vLLM is not installed.
        ValueError: a setting, or this version of vLLM, is refused.
    """
    if "worker_extension_cls" in settings:
        raise ValueError("worker_extension_cls is what this package needs for itself: leave it out")
    refuse_settings(settings)
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"}
    room = {"enable_lora": True, "max_lora_rank": _rank(adapters.values())} if adapters else {}
    vllm = installed()
    with preserving_process():
        llm = vllm.LLM(str(model), **({"skip_tokenizer_init": True} | room | settings | dict(SETTINGS)))
    given = {"generator": generator, "controllers": controllers, "tokenizer": tokenizer, "queue": queue}
    return VllmEngine(llm, vectors=vectors, adapters=adapters, **given)


def _rank(folders: Iterable[Path | str]) -> int:
    """Return the smallest rank that vLLM reserves for the LoRAs in ``folders``."""
    configs = [parse_object((Path(folder) / PEFT_CONFIG).read_bytes()) for folder in folders]
    return rank_of_vllm(max(rank for config in configs for rank in (config["r"], *config.get("rank_pattern", {}).values())))


def rank_of_vllm(rank: int) -> int:
    """Return the smallest rank that vLLM reserves, which has steps, for a LoRA of ``rank``; ``ValueError`` above the largest."""
    if rank > RANKS[-1]:
        raise ValueError(f"a LoRA of rank {rank} is more than vLLM runs, which is {RANKS[-1]}: attach adapters with a lower rank")
    return next(step for step in RANKS if step >= rank)


def resolved(request: Request, facts: Facts, vectors: Mapping[str, Vector]) -> tuple[tuple[Resolved, ...], Steering]:
    """Return a request's patches and steering without names; ``ValueError`` or ``KeyError`` if vLLM cannot run the request."""
    for name, (only, remedy) in _REFUSED.items():
        if getattr(request, name) != only:
            raise ValueError(f"{name}={getattr(request, name)!r:.60} is not possible on vLLM: {remedy}")
    if request.sampling.prompt_logprobs is not None:
        raise ValueError("log-probabilities of a prompt are not read here: use this project's own Engine")
    _refuse_sampling(request.sampling)
    refuse(request, facts.context, facts.vocabulary)
    if runs := [patch for patch in request.patch if isinstance(patch.source, FromRun)]:
        raise ValueError(
            f"the patch at {runs[0].site} reads a run, and no run can be compared with vLLM's weights: give its row as a tensor"
        )
    for capture in request.capture:
        facts.shape(capture.site)
    named = {name: vector.data for name, vector in vectors.items()}
    patches = resolve(request.patch, facts.shape, vectors=named, dtype=facts.torch_dtype)
    steering = (request.steering or Steering()).resolved(looker(vectors))
    SteeringState(facts.shape, rows=1, dtype=facts.torch_dtype).check(steering)
    return patches, steering


def _refuse_sampling(how: Sampling) -> None:
    """Raise ``ValueError`` for a distribution from which vLLM would draw otherwise than our engine."""
    if how.plain:
        return
    if how.temperature < COLDEST:
        raise ValueError(f"temperature={how.temperature} is not possible, vLLM would sample at {COLDEST}: give that or more, or 0")
    if (how.top_k or how.min_p) and how.top_p < 1:
        raise ValueError(
            f"top_k={how.top_k} and min_p={how.min_p} with top_p={how.top_p} are not possible on vLLM, which takes the share of "
            "what these keep and not of the whole distribution: give top_p alone, or leave it out"
        )


def encoded(
    number: int,
    request: Request,
    sampling: Sampling,
    facts: Facts,
    vectors: Mapping[str, Vector],
    key: str,
    *,
    private: bool = False,
) -> tuple[dict[str, Any], dict[str, Any], EngineRequest]:
    """Return a request's prompt for vLLM, the arguments of its ``SamplingParams``, and what its result is collected in.

    Args:
        number: number of the request in its results.
        request: the request; errors as in ``resolved``.
        sampling: its sampling, with a seed if it samples.
        facts: of the model.
        vectors: named vectors.
        key: name under which the worker keeps what the request leaves.
        private: whether its steering may change while it runs, so that no prefix may be shared.
    """
    patches, steering = resolved(request, facts, vectors)
    req = EngineRequest(number, request, Result(number, seed=sampling.seed), sampling, patches)
    orders = Orders(key, number, len(request.prompt), private, patches, steering, request.capture, request.readings)
    prompt: dict[str, Any] = {"prompt_token_ids": list(request.prompt)}
    state = SteeringState(facts.shape, rows=1, dtype=facts.torch_dtype)
    cache_salt = f"mi-route2-private-{key}" if private else salt(request, patches, steering, state)
    if cache_salt is not None:
        prompt["cache_salt"] = cache_salt
    arguments = _sampling(sampling)
    if orders:
        arguments["extra_args"] = {KEY: write(orders)}
    # What a cached prefix holds is not computed by this request, so nothing of it would be captured or read.
    if req.lowest_capture() < req.prompt:
        arguments["skip_reading_prefix_cache"] = True
    return prompt, arguments, req


def _sampling(sampling: Sampling) -> dict[str, Any]:
    logprobs = -1 if sampling.logprob_token_ids else sampling.logprobs
    return {
        "max_tokens": sampling.max_new,
        "temperature": float(sampling.temperature),
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "seed": sampling.seed,
        "stop_token_ids": list(sampling.stop_tokens),
        "logprobs": logprobs,
        "ignore_eos": True,  # as in our engine, stop_tokens alone end a request
        "detokenize": False,
    }


def _params(arguments: Mapping[str, Any]) -> Any:
    vllm = installed()
    return vllm.SamplingParams(**arguments, output_kind=import_module("vllm.sampling_params").RequestOutputKind.DELTA)


def _settled(req: EngineRequest, finish: Finish, left: Mapping[str, Any] | None) -> Result:
    """Return the result of a request that ended, with what the worker collected."""
    result = req.result
    result.finish = finish
    req.computed = len(req.tokens) - 1
    for number, kept in (left or {}).get("captured", {}).items():
        order = sorted(range(len(kept["positions"])), key=kept["positions"].__getitem__)
        req.keep(int(number), [kept["positions"][i] for i in order], unpack(kept["rows"])[order])
    for position, readings in sorted((left or {}).get("readings", {}).items(), key=lambda item: int(item[0])):
        req.note(int(position), {name: MonitorReading(*pair) for name, pair in readings.items()})
    if left is not None and left["error"] is not None:
        result.finish, result.error = "error", left["error"]
    elif result.cached > (lowest := req.lowest_capture()):
        result.finish = "error"
        result.error = f"vLLM took {result.cached} tokens from its cache, and nothing was captured or read from {lowest} on"
    req.settle()
    return result


def _word(req: EngineRequest, tokenizer: Any) -> None:
    """Set the text of a request that ended."""
    result = req.result
    if req.text is not None:
        req.text.end()  # a stop text may end with a character that is not finished
    if req.text is not None and req.text.stopped:
        result.text, result.finish = req.text.text, "stop" if result.finish == "length" else result.finish
    else:
        result.text = grown(tokenizer, req.request.prompt, result.ids)


def _finish(reason: str | None) -> Finish:
    return "length" if reason == "length" else "stop" if reason == "stop" else "cancelled"


def _token(token: int, detail: Mapping[int, Any] | None, sampling: Sampling) -> Token:
    if detail is None:
        return Token(token)
    best = sorted((logprob.rank, token_id) for token_id, logprob in detail.items() if logprob.rank is not None)
    top = {token_id: detail[token_id].logprob for _, token_id in best[: sampling.logprobs or 0]}
    requested = tuple(detail[token_id].logprob for token_id in sampling.logprob_token_ids)
    return Token(token, detail[token].logprob, top, requested)
