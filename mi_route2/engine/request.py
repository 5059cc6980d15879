"""Request and result types, and the engine's state of one request."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import nan
from types import MappingProxyType
from typing import Annotated, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from mi_route2.engine.cache import Acts, Saved
from mi_route2.engine.sampling import Sampling, TokenIds
from mi_route2.engine.text import GrowingText
from mi_route2.patching.patches import Patch, Resolved
from mi_route2.runs.record import TokenSelection
from mi_route2.runs.store import Writer
from mi_route2.sites import Site
from mi_route2.steering.plan import MonitorReading
from mi_route2.steering.specs import At, Plain, Steering, several
from mi_route2.validation import validated

Finish = Literal["length", "stop", "cancelled", "error"]


@validated
class Capture:
    """Keep the activations of ``site`` at the positions of ``selection``, before any patch or steering at that site."""

    site: At
    selection: Annotated[TokenSelection, Field(description="a TokenSelection, as TokenSelection('prompt')")] = field(
        default_factory=TokenSelection
    )


@validated
class Request:
    """One sequence and its interventions.

    Attributes:
        prompt: token ids.
        capture: sites to capture; the values come with the result or, if ``run`` is given, go to the run store under that name.
        priority: higher runs first.
        readings: return what the request's monitors read at each token but the last one, prompt included; the prompt is then
            computed anew.
        norms: sites whose value's norm is returned for each such token; it is that of a capture, before a
            monitor's gate, so that ``quarantine_out`` has a norm also if the quarantine is closed.

    Raises:
        ValueError: a field has the wrong type.

    Examples:
        >>> request = Request((3, 4, 5), Sampling(max_new=8), steering=Steering(decode=(Steer(site, vector, -2.0),)))
    """

    prompt: TokenIds
    sampling: Annotated[Sampling, Field(description="a Sampling: write Sampling(...)")] = field(default_factory=Sampling)
    patch: Annotated[tuple[Patch, ...], several(Patch)] = ()
    steering: Annotated[Steering, Field(description="a Steering: write Steering(...)")] | None = None
    capture: Annotated[tuple[Capture, ...], several(Capture)] = ()
    run: str | None = None
    priority: Annotated[int, Plain] = 0
    readings: Annotated[bool, Plain] = False
    norms: Annotated[tuple[Site, ...], several(Site)] = ()

    __eq__, __hash__ = object.__eq__, object.__hash__  # by identity: requests with equal fields are different requests


class Token(NamedTuple):
    """One generated token; if requested, its log-probability (else NaN) and those of the most likely and of given tokens."""

    token: int
    logprob: float = nan
    top: Mapping[int, float] = MappingProxyType({})
    requested: tuple[float, ...] = ()


class Event(NamedTuple):
    """Outcome of one step for one request: the new token, if any, and the readings at each computed position."""

    request: int
    token: Token | None
    readings: Mapping[int, Mapping[str, MonitorReading]] = MappingProxyType({})
    norms: Mapping[int, Mapping[Site, float]] = MappingProxyType({})


def detailed(token: int, logits: Float[Tensor, " v"], most: int | None, requested: Sequence[int] = ()) -> Token:
    """Return the token with its log-probability and those of the ``most`` likeliest and of ``requested`` tokens."""
    logprobs = logits.log_softmax(-1)
    best = _likeliest(logits, most or 0)
    top = dict(zip(best.tolist(), logprobs[best].tolist(), strict=True))
    return Token(token, float(logprobs[token]), top, tuple(logprobs[list(requested)].tolist()))


def _likeliest(logits: Float[Tensor, " v"], count: int) -> Int[Tensor, " n"]:
    """Return the tokens of the greatest logits; of equal ones, of which bfloat16 has many, the first, as the greedy choice does."""
    best = logits.topk(min(count + 1, len(logits)))
    if bool((best.values[1:] < best.values[:-1]).all()):
        return best.indices[:count]
    among = (logits >= best.values[count - 1]).nonzero()[:, 0]
    return among[logits[among].sort(descending=True, stable=True).indices[:count]]


@dataclass(frozen=True, eq=False)
class Captured:
    """Captured values ``[n, ...]`` of one site and their logical positions, ascending."""

    positions: tuple[int, ...]
    rows: Float[Tensor, "n ..."]


@dataclass(eq=False)
class Result:
    """The outcome of one request. ``error`` is a one-sentence reason if ``finish`` is ``"error"``.

    ``prompt_logprobs`` are the prompt's tokens but the first, with their log-probabilities, if requested.

    ``text`` is what the text of the prompt grows by, up to a stop text.

    ``unfired`` names each capture and patch at a position that was never computed because the request ended before, and each
    capture that no token matched. ``seed`` is the request's seed, or the one that the engine drew. ``cached`` counts prompt tokens
    whose keys and values came from the prefix cache, ``preemptions`` how often the request was preempted (on vLLM always 0, since
    it does not tell). ``readings`` and ``norms`` are by position; the last generated token is never read.
    """

    request: int
    tokens: list[Token] = field(default_factory=list)
    finish: Finish | None = None
    text: str | None = None
    error: str | None = None
    captured: dict[Site, Captured] = field(default_factory=dict)
    unfired: list[str] = field(default_factory=list)
    readings: dict[int, dict[str, MonitorReading]] = field(default_factory=dict)
    norms: dict[int, dict[Site, float]] = field(default_factory=dict)
    seed: int | None = None
    cached: int = 0
    preemptions: int = 0
    prompt_logprobs: list[Token] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        """The generated token ids."""
        return [token.token for token in self.tokens]

    @property
    def logprobs(self) -> list[float]:
        """The log-probabilities of the generated tokens."""
        return [token.logprob for token in self.tokens]


@dataclass(eq=False)
class EngineRequest:
    """The engine's state of one request.

    ``row`` is its row of key-value slots while it runs; ``saved`` holds its keys and values while it is preempted. ``lost`` is
    called if the run that it writes cannot go on. ``text`` is the text in which stop texts are looked for. ``bare`` is true if it
    has no patch and captures nothing. ``noted`` is the steering state's change count when ``acts`` was last updated for generated
    tokens, and ``run_noted`` when the run's notes were.
    """

    id: int
    request: Request
    result: Result
    sampling: Sampling
    patches: tuple[Resolved, ...] = ()
    tokens: list[int] = field(init=False)
    computed: int = 0
    row: int = -1
    saved: Saved | None = None
    admitted: bool = False
    acts: Acts = field(default_factory=Acts)
    noted: int = -1
    run_noted: int = -1
    text: GrowingText | None = None
    keys: list[bytes] = field(default_factory=list)
    published: int = 0
    writer: Writer | None = None
    lost: Callable[["EngineRequest", str], object] | None = None
    captured: dict[int, list[tuple[list[int], Tensor]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)
        self.prompt = len(self.tokens)
        # What every step asks of every request.
        self.most = self.prompt + self.sampling.max_new
        self.detailed = self.sampling.detailed
        self.stops = bool(self.sampling.stop or self.sampling.stop_tokens)
        self.observed = bool(self.request.readings or self.request.norms)
        self.bare = not (self.patches or self.request.capture or self.request.norms)
        self.uniforms = self.sampling.uniforms()
        self.acts.patches = [(patch.position, patch.digest) for patch in self.patches]

    @property
    def arrival(self) -> int:
        return self.id

    @property
    def priority(self) -> int:
        return self.request.priority

    @property
    def known(self) -> int:
        return len(self.tokens)

    @property
    def generated(self) -> int:
        """The number of generated tokens."""
        return len(self.tokens) - self.prompt

    @property
    def reach(self) -> int:
        """The maximum number of positions to compute: the last generated token is never read by the model."""
        return self.prompt + self.request.sampling.max_new - 1

    def lowest_capture(self) -> int:
        """Return the first position of the prompt that must be computed, or the prompt's length if there is none."""
        if self.request.readings or self.request.norms or self.sampling.prompt_logprobs is not None:
            return 0
        first = [capture.selection.rows(self.request.prompt, 0, self.prompt)[:1] for capture in self.request.capture]
        return min((row for rows in first for row in rows), default=self.prompt)

    def scored(self, start: int, count: int) -> int:
        """Return how many of the positions from ``start`` on precede a prompt token whose log-probability is requested."""
        return 0 if self.sampling.prompt_logprobs is None else max(0, min(count, self.prompt - 1 - start))

    def score(self, start: int, logits: Float[Tensor, "n v"]) -> None:
        """Store the log-probabilities of the prompt tokens behind the positions from ``start`` on."""
        for position, row in enumerate(logits.to(torch.promote_types(logits.dtype, torch.float32)), start + 1):
            self.result.prompt_logprobs.append(detailed(self.tokens[position], row, self.sampling.prompt_logprobs))

    def keep(self, number: int, positions: list[int], rows: Tensor) -> None:
        """Store the activations of capture ``number``."""
        stored = self.captured.setdefault(number, [])
        if self.request.run is not None:
            self._write(self.request.capture[number].site, positions, rows.detach())
        else:
            stored.append((positions, rows.detach()))

    def note(self, position: int, readings: Mapping[str, MonitorReading]) -> None:
        """Store what monitors read at a position."""
        self.result.readings.setdefault(position, {}).update(readings)

    def norm(self, site: Site, start: int, rows: Tensor) -> None:
        """Store the norms of the values of ``site`` at the positions from ``start`` on."""
        lengths = rows.flatten(1).to(torch.promote_types(rows.dtype, torch.float32)).norm(dim=-1).tolist()
        for position, length in enumerate(lengths, start):
            self.result.norms.setdefault(position, {})[site] = length

    def _write(self, site: Site, positions: list[int], rows: Tensor) -> None:
        """Append to the run, if it is still open; a full or closed store, or an ended run, must not affect other requests."""
        if self.writer is None:
            return
        try:
            self.writer.append(site, positions, rows)
        except (ValueError, RuntimeError, OSError) as error:
            self.writer.abort()
            self.writer = None
            if self.lost is not None:
                self.lost(self, str(error))

    def settle(self) -> None:
        """Move the captures into the result, or close the run; that of a failed or cancelled request is a part, and discarded."""
        result = self.result
        result.unfired = self.unfired()
        if self.request.run is None:
            for number, stored in self.captured.items():
                positions = tuple(chain.from_iterable(some for some, _ in stored))
                result.captured[self.request.capture[number].site] = Captured(positions, torch.cat([rows for _, rows in stored]))
        if self.writer is None:
            return
        if result.finish in ("error", "cancelled"):
            self.writer.abort()
            return
        try:
            self.writer.add_tokens(result.ids)
            self.writer.close()
        except (ValueError, RuntimeError, OSError, MemoryError) as error:
            result.finish, result.error = "error", str(error) or f"there is no memory to store run {self.request.run!r}"

    def unfired(self) -> list[str]:
        """Return the captures and patches at positions that were never computed."""
        missed = [f"patch at {patch.site}, position {patch.position}" for patch in self.patches if patch.position >= self.computed]
        for number, capture in enumerate(self.request.capture):
            if capture.selection.positions is None and number not in self.captured:
                missed.append(f"capture at {capture.site}, of which no token came")
            missed += [f"capture at {capture.site}, position {position}" for position in capture.selection.missing(self.computed)]
        return missed


def refuse(request: Request, context: int, vocabulary: int) -> None:
    """Raise a one-sentence ``ValueError`` for a request that no engine can run on this model."""
    length = len(request.prompt)
    if not length:
        raise ValueError("the prompt is empty: give at least one token")
    sampling = request.sampling
    ids = (*request.prompt, *sampling.logprob_token_ids, *sampling.stop_tokens)
    if wrong := [token for token in ids if not 0 <= token < vocabulary]:
        raise ValueError(f"token {wrong[0]} is outside the vocabulary: its ids are 0..{vocabulary - 1}")
    if (most := max(sampling.logprobs or 0, sampling.prompt_logprobs or 0)) > vocabulary:
        raise ValueError(f"logprobs = {most} exceeds the vocabulary of {vocabulary}")
    reach = length + sampling.max_new - 1
    if reach > context:
        raise ValueError(
            f"a prompt of {length} tokens and max_new = {sampling.max_new} need {reach} positions, but the context has {context}"
        )
    for patch in request.patch:
        if patch.position >= reach:
            raise ValueError(f"the patch at {patch.site} names position {patch.position}, but this request computes 0..{reach - 1}")
    sites = [capture.site for capture in request.capture]
    if twice := [site for site in sites if sites.count(site) > 1]:
        raise ValueError(f"two captures name {twice[0]}: give one capture per site, with all its positions")
    for capture in request.capture:
        if missing := capture.selection.missing(reach):
            raise ValueError(f"the capture at {capture.site} names position {missing[0]}, but this request computes 0..{reach - 1}")
