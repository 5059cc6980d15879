"""Bodies of requests, with a limit on every field, and their conversion to the engine's types.

The engine's own types check what they mean (``Monitor``, ``Patch``, ...); here is only what travels. A vector is a list
of numbers, the name of a registered one, or ``{"dtype": "float32", "shape": [64], "data": base64}`` in little-endian bytes.
"""

import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

from mi_route2.engine import Capture, Request, Sampling
from mi_route2.patching.patches import FromRun, Patch
from mi_route2.runs.record import SequencePart, TokenSelection
from mi_route2.serve.models import CLOSED, Served
from mi_route2.serve.options import Mode
from mi_route2.sites import Site
from mi_route2.steering.specs import KINDS, TIERS, Clamp, Monitor, Steer, Steering, Vector
from mi_route2.tensor_files import unpack

TEXT, IDS = 200_000, 65_536
"""Characters of a text, and token ids in a list."""
CHOICES, PATCHES, ENTRIES = 64, 4096, 1024
"""Completions of one call: prompts times ``n``. Patches of a request. Entries of a dict."""

Name = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[\w.:-]*[\w:-][\w.:-]*$")]
"""Not of dots alone, which in an address are no name."""
SiteName = Annotated[str, Field(min_length=1, max_length=128)]
Text = Annotated[str, Field(max_length=TEXT)]
TokenId = Annotated[int, Field(ge=0, lt=2**31, strict=True)]
Ids = Annotated[list[TokenId], Field(max_length=IDS, fail_fast=True)]
Number = Annotated[float, Field(allow_inf_nan=False, strict=True)]
"""A number as such: true is not 1, nor is a text a number."""
Position = Annotated[int, Field(ge=0, lt=2**31, strict=True)]


class Body(BaseModel):
    """A JSON object without unknown fields, whose values have the types of their fields: true is not 1, nor is a text a number.

    A body of millions of faults must not make millions of errors: unknown fields, lists and dicts end at their first one.
    """

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, value: Any) -> Any:
        for name in value if isinstance(value, dict) else ():
            if name not in cls.model_fields:
                raise PydanticCustomError("extra_forbidden", "unknown field", {"field": name[:64]})
        return value


def _vector(value: Any) -> Vector:
    if isinstance(value, Vector):
        return value
    if isinstance(value, dict):
        try:
            value = unpack(value)
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise ValueError(f"the numbers cannot be read from {{dtype, shape, data}}: {sentence_of(error)}") from error
    elif not isinstance(value, str | list):
        raise ValueError("a vector is a name, a list of numbers, or {dtype, shape, data}")
    return Vector(value)


def sentence_of(error: BaseException) -> str:
    """Return an error's message as one line."""
    text = error.args[0] if isinstance(error, KeyError) and error.args else error
    return " ".join(str(text).split()) or type(error).__name__


VectorIn = Annotated[Any, PlainValidator(_vector), Field(description="a name, a list of numbers, or {dtype, shape, data}")]


class Scaled(Body):
    """A vector and its scale."""

    vector: VectorIn
    scale: Number = 1.0

    @model_validator(mode="before")
    @classmethod
    def _bare(cls, value: Any) -> Any:
        return value if isinstance(value, dict) and "vector" in value else {"vector": value}


def _few(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > ENTRIES:
        raise ValueError(f"{len(value)} entries are more than {ENTRIES}: give fewer")
    return value


Few = BeforeValidator(_few)
Vectors = Annotated[dict[SiteName, Scaled], Few]
"""``{site: vector}`` or ``{site: {"vector": ..., "scale": ...}}``."""


class RunSource(Body):
    """The value of a captured run at a position, at the patch's site or another one."""

    run: Name
    position: Position
    site: SiteName | None = None


class PatchIn(Body):
    """A patch: ``source`` is ``"zeros"``, a vector, a vector's name, or a run's position."""

    site: SiteName
    position: Position
    source: RunSource | VectorIn
    alpha: Number | VectorIn = 1.0


class CaptureIn(Body):
    """A site to capture, at a part of the sequence or at positions, optionally of certain tokens only."""

    site: SiteName
    part: SequencePart = "all"
    positions: Annotated[list[Position], Field(max_length=IDS, fail_fast=True)] | None = None
    token_ids: Ids | None = None


class ClampIn(Body):
    """A clamp of the projection on a direction; see ``mi_route2.steering.specs.Clamp``."""

    site: SiteName
    vector: VectorIn
    low: Number | None = None
    high: Number | None = None
    strength: Number = 1.0
    phase: Literal["both", "prefill", "decode"] = "both"
    value: Number | None = None


class AddIn(Body):
    """A vector that a monitor adds at a site."""

    site: SiteName
    vector: VectorIn
    scale: Number = 1.0


class MonitorIn(Body):
    """A monitor; see ``mi_route2.steering.specs.Monitor``."""

    site: SiteName
    probe: VectorIn
    threshold: Number = 0.0
    sharpness: Number = 1.0
    mode: Literal["add", "attenuate"] = "add"
    gates: Annotated[list[SiteName], Field(max_length=1024, fail_fast=True)] | None = None
    gate_rows: bool = False
    quarantine: Literal["open", "close"] | None = None
    quarantined: Annotated[list[SiteName], Field(max_length=1024, fail_fast=True)] | None = None
    adds: Annotated[list[AddIn], Field(max_length=64, fail_fast=True)] = Field(default_factory=list)
    depth: Number = 1.0
    prompt: bool | None = None
    name: Annotated[str, Field(max_length=128)] = ""


class SteeringIn(Body):
    """Steering in three tiers, clamps and monitors."""

    steering_vectors: Vectors = Field(default_factory=dict)
    prefill_steering_vectors: Vectors = Field(default_factory=dict)
    decode_steering_vectors: Vectors = Field(default_factory=dict)
    steering_clamps: Annotated[list[ClampIn], Field(max_length=256, fail_fast=True)] = Field(default_factory=list)
    monitors: Annotated[list[MonitorIn], Field(max_length=32, fail_fast=True)] = Field(default_factory=list)


class InterventionFields(SteeringIn):
    """Fields of a completion beyond OpenAI's."""

    patch: Annotated[list[PatchIn], Field(max_length=PATCHES, fail_fast=True)] = Field(default_factory=list)
    capture: Annotated[list[CaptureIn | SiteName], Field(max_length=256, fail_fast=True)] = Field(default_factory=list)
    run: Name | None = Field(None, description="store what is captured under this name, for patches of later requests")
    readings: bool = False
    norms: Annotated[list[SiteName], Field(max_length=64, fail_fast=True)] = Field(default_factory=list)
    adapters: Mode | None = None
    hold: Name | None = Field(None, description="name of a configuration that /v1/steering/set holds")
    top_k: Annotated[int, Field(ge=0, le=2**31)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    ignore_eos: bool = False
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64, fail_fast=True)] = Field(default_factory=list)
    logprob_token_ids: Annotated[list[TokenId], Field(max_length=4096, fail_fast=True)] = Field(default_factory=list)
    priority: Annotated[int, Field(ge=-100, le=0)] = 0


class StreamOptions(Body):
    include_usage: bool = False


Stop = Annotated[str, Field(min_length=1, max_length=256)]


class Generation(InterventionFields):
    """Fields common to completions and chat completions."""

    model: Annotated[str, Field(max_length=256)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    n: Annotated[int, Field(ge=1, le=CHOICES)] = 1
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16, fail_fast=True)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: Annotated[str, Field(max_length=512)] | None = None

    @model_validator(mode="after")
    def _options_of_streams(self) -> "Generation":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options are for streams: set stream to true, or leave them out")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop texts."""
        return () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class Completion(Generation):
    """Body of ``POST /v1/completions``."""

    prompt: (
        Text
        | Ids
        | Annotated[list[Text], Field(max_length=CHOICES, fail_fast=True)]
        | Annotated[list[Ids], Field(max_length=CHOICES, fail_fast=True)]
    )
    max_tokens: Annotated[int, Field(ge=0, le=IDS)] = 16
    logprobs: Annotated[int, Field(ge=0, le=100)] | None = None
    echo: bool = Field(False, description="return the prompt too, with its log-probabilities if logprobs are given")

    @model_validator(mode="after")
    def _echoed(self) -> "Completion":
        if not self.max_tokens and not self.echo:
            raise ValueError("max_tokens=0 generates nothing: give 1 or more, or echo=true for the prompt's log-probabilities")
        if self.echo and self.stream:
            raise ValueError("echo is for whole answers: set stream to false, or leave echo out")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts as texts, or as token ids."""
        single = isinstance(self.prompt, str) or isinstance(next(iter(self.prompt), None), int)
        return [self.prompt] if single else self.prompt  # pyright: ignore[reportReturnType]

    @property
    def top(self) -> int | None:
        """Number of most likely tokens to return."""
        return self.logprobs


class TextPart(Body):
    """A part of a message."""

    type: Annotated[str, Field(max_length=32)] = "text"
    text: Text = ""


class Message(BaseModel):  # an answer's message, which may be sent back, has more fields
    """A message of a conversation."""

    role: Annotated[str, Field(min_length=1, max_length=32)]
    content: Text | Annotated[list[TextPart], Field(max_length=IDS, fail_fast=True)]

    def plain(self) -> dict[str, str]:
        """Return the message as a chat template reads it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": text}


class ChatCompletion(Generation):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=1024, fail_fast=True)]
    continue_final_message: bool = Field(False, description="write on where the last message ends, instead of answering it")
    add_generation_prompt: bool | None = Field(None, description="by default, unless the last message is continued")
    max_tokens: Annotated[int, Field(ge=1, le=IDS)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=IDS)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=100)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> "ChatCompletion":
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message leaves no room for add_generation_prompt: set one of them to true")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: set logprobs to true as well")
        return self

    @property
    def top(self) -> int | None:
        """Number of most likely tokens to return."""
        return (self.top_logprobs or 0) if self.logprobs else None


class SpanIn(Body):
    """The tokens that overlap ``text`` at its ``occurrence``-th appearance in the corrupt prompt."""

    text: Annotated[str, Field(min_length=1, max_length=1024)]
    occurrence: Annotated[int, Field(ge=0, lt=10_000)] = 0


Prompt = Text | Annotated[list[TokenId], Field(min_length=1, max_length=IDS, fail_fast=True)]
Answer = TokenId | Annotated[str, Field(min_length=1, max_length=256)]


class PairIn(Body):
    """Two prompts, and the score that tells them apart."""

    clean: Prompt
    corrupt: Prompt
    answer: Answer | None = None
    foil: Answer | None = None
    metric: Literal["logit_diff", "logprob", "kl"] = "logit_diff"
    at: Position | None = None
    steps: Annotated[int, Field(ge=1, le=100)] | None = None


class SweepIn(PairIn):
    """Body of ``POST /v1/patch_sweep``; see ``mi_route2.patching.sweep``, and ``attribute`` for methods that are not exact."""

    method: Literal["exact", "atp", "atp*", "ig"] = "exact"
    sites: SiteName | Annotated[list[SiteName], Field(min_length=1, max_length=512, fail_fast=True)] = "resid_pre"
    positions: (
        Annotated[list[Position | SpanIn | Annotated[str, Field(max_length=1024)]], Field(max_length=IDS, fail_fast=True)] | None
    ) = None
    heads: bool = False
    together: bool = False
    alpha: Number = 1.0
    replicas: Annotated[int, Field(ge=3, le=64)] = 3
    stream: bool = False


class EdgesIn(PairIn):
    """Body of ``POST /v1/edges``; see ``mi_route2.patching.edges``. ``kept`` are the sizes of circuits to measure."""

    method: Literal["eap", "ig"] = "eap"
    k: Annotated[int, Field(ge=1, le=10_000)] = 100
    kept: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=16, fail_fast=True)] = Field(default_factory=list)


class CellIn(Body):
    """Body of ``POST /v1/patch_cell``: one cell of a sweep, whose patched model then answers."""

    clean: Prompt
    corrupt: Prompt
    site: SiteName
    position: Position | None = Field(None, description="a position of the corrupt prompt; null: all at once")
    alpha: Number = 1.0
    max_tokens: Annotated[int, Field(ge=1, le=1024)] = 16


class TokenizeIn(Body):
    text: Text


class AlignIn(Body):
    clean: Prompt
    corrupt: Prompt


class SetSteering(SteeringIn):
    """Body of ``POST /v1/steering/set``.

    ``vectors`` registers named vectors; ``name`` holds the steering under a name.
    """

    name: Name | None = None
    vectors: Annotated[dict[Name, VectorIn], Few] = Field(default_factory=dict)


class ClearSteering(Body):
    """Body of ``POST /v1/steering/clear``."""

    name: Name | None = None
    vectors: Annotated[list[Name], Field(max_length=256, fail_fast=True)] = Field(default_factory=list)


class ScaleIn(Body):
    scale: Annotated[float, Field(ge=0, le=1e9)]


class ThresholdIn(Body):
    monitor: Annotated[str, Field(max_length=128)]
    threshold: Number


def site_of(name: str) -> Site:
    """Return a site by name; ``ValueError`` for a text of another form."""
    try:
        return Site.parse(name)
    except KeyError as error:
        raise ValueError(str(error.args[0] if error.args else error)) from error


def _steer(site: str, entry: Scaled | AddIn) -> Steer:
    return Steer(site_of(site), entry.vector, entry.scale)


def _tier(entries: Mapping[str, Scaled]) -> tuple[Steer, ...]:
    return tuple(_steer(site, entry) for site, entry in entries.items())


def _some(sites: Sequence[str] | None) -> tuple[Site, ...] | None:
    return None if sites is None else tuple(map(site_of, sites))


def _clamp(entry: ClampIn) -> Clamp:
    low, high = -math.inf if entry.low is None else entry.low, math.inf if entry.high is None else entry.high
    return Clamp(site_of(entry.site), entry.vector, low, high, entry.strength, entry.phase, entry.value)


def monitor_of(entry: MonitorIn) -> Monitor:
    """Return the engine's monitor."""
    if entry.name == CLOSED:
        raise ValueError(f"{CLOSED!r} is the name of the server's own monitor, whose readings are not told: give another name")
    plain = {
        field: getattr(entry, field) for field in ("threshold", "sharpness", "mode", "gate_rows", "quarantine", "depth", "prompt")
    }
    return Monitor(
        site_of(entry.site),
        entry.probe,
        gates=_some(entry.gates),
        quarantined=_some(entry.quarantined),
        adds=tuple(_steer(add.site, add) for add in entry.adds),
        name=entry.name,
        **plain,
    )


def steering_of(body: SteeringIn, *more: Monitor) -> Steering:
    """Return the engine's steering, with ``more`` monitors."""
    return Steering(
        base=_tier(body.steering_vectors),
        prefill=_tier(body.prefill_steering_vectors),
        decode=_tier(body.decode_steering_vectors),
        clamps=tuple(map(_clamp, body.steering_clamps)),
        monitors=(*map(monitor_of, body.monitors), *more),
    )


def joined(steering: Steering, other: Steering) -> Steering:
    """Return the steering of both."""
    return Steering(**{field: (*getattr(steering, field), *getattr(other, field)) for field in KINDS})


def patch_of(entry: PatchIn) -> Patch:
    """Return the engine's patch."""
    source: Any = entry.source
    if isinstance(source, RunSource):
        source = FromRun(source.run, source.position, None if source.site is None else site_of(source.site))
    else:
        source = source.name or source.data.reshape(source.shape)
    alpha = entry.alpha.data if isinstance(entry.alpha, Vector) else entry.alpha
    return Patch(site_of(entry.site), entry.position, source, alpha)


def capture_of(entry: CaptureIn | str) -> Capture:
    """Return the engine's capture."""
    if isinstance(entry, str):
        return Capture(site_of(entry))
    return Capture(site_of(entry.site), TokenSelection(entry.part, entry.positions, entry.token_ids))


def sampling_of(body: Generation, served: Served, max_new: int, index: int, top: int | None) -> Sampling:
    """Return the sampling of choice ``index``; a given seed is counted up, so that choices differ and each can be repeated.

    Drawn seeds have 53 bits, so that JavaScript can read them in an answer and give them again.
    """
    seed = None if body.temperature == 0 else secrets.randbits(53) if body.seed is None else (body.seed + index) % 2**63
    ends = () if body.ignore_eos else served.stop_tokens
    return Sampling(
        max_new=max(1, max_new),
        temperature=body.temperature,
        min_p=body.min_p,
        top_k=body.top_k,
        top_p=body.top_p,
        seed=seed,
        stop_tokens=tuple(dict.fromkeys((*ends, *body.stop_token_ids))),
        stop=body.stops,
        logprobs=top,
        logprob_token_ids=tuple(body.logprob_token_ids),
        prompt_logprobs=top if isinstance(body, Completion) and body.echo else None,
    )


def refuse_closed(request: Request) -> None:
    """Raise ``ValueError`` for a patch or a vector at a quarantine that is off in this request, where it would be lost."""
    steering = request.steering or Steering()
    vectors = (vector for tier in TIERS for vector in steering.vectors(tier))
    adds = (add for monitor in steering.monitors for add in monitor.adds)
    for part in (*request.patch, *vectors, *steering.clamps, *adds):
        if part.site.point == "quarantine_out":
            raise ValueError(f"{part.site} is of an adapter that is off in the mode of this request: leave `adapters` or this out")


def request_of(
    body: InterventionFields, prompt: Sequence[int], sampling: Sampling, held: Mapping[str, SteeringIn], closing: Monitor | None
) -> Request:
    """Return the engine's request of one choice; ``held`` are configurations by name.

    Raises:
        ValueError: a field cannot be converted.
        KeyError: no configuration is held under the name in ``hold``.
    """
    steering = steering_of(body, *(() if closing is None else (closing,)))
    if body.hold is not None:
        if body.hold not in held:
            raise KeyError(f"no configuration is held as {body.hold!r}; there are: {', '.join(sorted(held)) or 'none'}")
        steering = joined(steering_of(held[body.hold]), steering)
    request = Request(
        tuple(prompt),
        sampling,
        patch=tuple(map(patch_of, body.patch)),
        steering=steering if any(getattr(steering, field) for field in KINDS) else None,
        capture=tuple(map(capture_of, body.capture)),
        run=body.run,
        priority=body.priority,
        readings=body.readings,
        norms=tuple(map(site_of, body.norms)),
    )
    if closing is not None:
        refuse_closed(request)
    return request
