"""Bodies of requests, with a limit on every field, and their conversion to the engine's types.

The engine's own types check what they mean (``Monitor``, ``Patch``, ``Rule``, ...); here is only what travels. A vector is a list
of numbers, the name of a registered one, or ``{"dtype": "float32", "shape": [64], "data": base64}`` in little-endian bytes.
"""

import asyncio
import base64
import binascii
import math
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

import torch
from jaxtyping import Float
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, model_validator
from torch import Tensor

from mi_route2.architectures import ADAPTER_POINTS
from mi_route2.engine import Capture, Request, Sampling
from mi_route2.engine.rules import RULES, Rule, parse_rules
from mi_route2.patching.patches import ZEROS, FromRun, Patch
from mi_route2.runs.record import SequencePart, TokenSelection
from mi_route2.serve.models import CLOSED, MODES, Served
from mi_route2.serve.options import Mode
from mi_route2.sites import Site
from mi_route2.steering.specs import KINDS, TIERS, Clamp, Monitor, Steer, Steering, Vector

NUMBERS = 1 << 20
"""Numbers in a vector."""
TEXT, IDS = 200_000, 65_536
"""Characters of a text, and token ids in a list."""
SPANS, SITES = 64, 512
"""Texts among a sweep's positions, and its names of sites, each of which is looked for."""
CHOICES, PATCHES = 64, 4096
"""Completions of one call: prompts times ``n``. Patches of a request."""

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
    """A JSON object without unknown fields, whose values have the types of their fields: true is not 1, nor is a text a number."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class Packed(Body):
    """Numbers as base64 of little-endian bytes, row by row."""

    dtype: Literal["float16", "bfloat16", "float32", "float64"]
    shape: Annotated[list[Annotated[int, Field(ge=1, le=NUMBERS)]], Field(min_length=1, max_length=2)]
    data: Annotated[str, Field(max_length=12 * NUMBERS)]

    def tensor(self) -> Tensor:
        """Return the numbers; ``ValueError`` if ``data`` is not as long as ``shape`` says, or not base64."""
        try:
            raw = base64.b64decode(self.data, validate=True)
        except (binascii.Error, ValueError) as error:
            raise ValueError(f"the data of a vector is not base64 ({error}): encode its bytes with base64.b64encode") from error
        dtype: torch.dtype = getattr(torch, self.dtype)
        wanted = math.prod(self.shape) * dtype.itemsize
        if len(raw) != wanted:
            raise ValueError(f"the data of a vector has {len(raw)} bytes, but {self.dtype} of shape {self.shape} has {wanted}")
        return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(self.shape)


NumberRow = Annotated[list[Number], Field(min_length=1, max_length=NUMBERS, fail_fast=True)]
NumberRows = Annotated[list[NumberRow], Field(min_length=1, max_length=1024, fail_fast=True)]


def _kind(value: Any) -> str | None:
    """Return the alternative of a union that a value is meant as, so that no other one is tried on each of its numbers."""
    if isinstance(value, list):
        return "rows of numbers" if value and isinstance(value[0], list) else "a list of numbers"
    if isinstance(value, dict | BaseModel):
        fields = value if isinstance(value, dict) else type(value).model_fields
        return "a position of a run" if "run" in fields else "a scaled vector" if "vector" in fields else "packed numbers"
    return "a name" if isinstance(value, str) else "a number" if isinstance(value, int | float) else None


def _one_of(what: str) -> Discriminator:
    return Discriminator(_kind, "not_of_these_kinds", f"this is {what}")


AName: TypeAlias = Annotated[Name, Tag("a name")]
APacked: TypeAlias = Annotated[Packed, Tag("packed numbers")]
ARow: TypeAlias = Annotated[NumberRow, Tag("a list of numbers")]
SomeRows: TypeAlias = Annotated[NumberRows, Tag("rows of numbers")]
_NUMBERS = "a list of numbers, or {dtype, shape, data}"
VectorIn: TypeAlias = Annotated[AName | APacked | ARow | SomeRows, _one_of(f"a name, {_NUMBERS}")]


class Scaled(Body):
    """A vector and its scale."""

    vector: VectorIn
    scale: Number = 1.0


ScaledIn: TypeAlias = Annotated[
    AName | APacked | ARow | SomeRows | Annotated[Scaled, Tag("a scaled vector")],
    _one_of(f"a name, {_NUMBERS}, or {{vector, scale}}"),
]
Vectors = Annotated[dict[SiteName, ScaledIn], Field(max_length=1024)]
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
    source: Annotated[
        Annotated[RunSource, Tag("a position of a run")] | AName | APacked | ARow | SomeRows,
        _one_of(f"a name, {_NUMBERS}, or {{run, position}}"),
    ]
    alpha: Annotated[Annotated[Number, Tag("a number")] | APacked | ARow, _one_of(f"a number, {_NUMBERS}")] = 1.0


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
    gates: Annotated[list[SiteName], Field(max_length=1024)] | None = None
    gate_rows: bool = False
    quarantine: Literal["open", "close"] | None = None
    quarantined: Annotated[list[SiteName], Field(max_length=1024)] | None = None
    adds: Annotated[list[AddIn], Field(max_length=64)] = Field(default_factory=list)
    depth: Number = 1.0
    prompt: bool = False
    name: Annotated[str, Field(max_length=128)] = ""


class SteeringIn(Body):
    """Steering in three tiers, clamps and monitors."""

    steering_vectors: Vectors = Field(default_factory=dict)
    prefill_steering_vectors: Vectors = Field(default_factory=dict)
    decode_steering_vectors: Vectors = Field(default_factory=dict)
    steering_clamps: Annotated[list[ClampIn], Field(max_length=256)] = Field(default_factory=list)
    monitors: Annotated[list[MonitorIn], Field(max_length=32)] = Field(default_factory=list)


class Interventions(SteeringIn):
    """Fields of a completion beyond OpenAI's."""

    patch: Annotated[list[PatchIn], Field(max_length=PATCHES, fail_fast=True)] = Field(default_factory=list)
    capture: Annotated[list[CaptureIn | SiteName], Field(max_length=256)] = Field(default_factory=list)
    run: Name | None = Field(None, description="store what is captured under this name, for patches of later requests")
    steering: Annotated[list[dict[str, Any]], Field(max_length=RULES)] = Field(
        default_factory=list, description="declarative rules: [{when, scope, apply}]"
    )
    conversation_id: Name | None = None
    readings: bool = False
    norms: Annotated[list[SiteName], Field(max_length=64)] = Field(default_factory=list)
    adapters: Mode | None = Field(None, description=f"one of {', '.join(MODES)}")
    hold: Name | None = Field(None, description="name of a configuration that /v1/steering/set holds")
    top_k: Annotated[int, Field(ge=0, le=2**31)] = 0
    ignore_eos: bool = False
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] = Field(default_factory=list)
    logprob_token_ids: Annotated[list[TokenId], Field(max_length=4096)] = Field(default_factory=list)
    priority: Annotated[int, Field(ge=-100, le=0)] = 0
    deadline: Annotated[float, Field(gt=0, le=86_400)] | None = Field(None, description="seconds")


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool | None = None


Stop = Annotated[str, Field(min_length=1, max_length=256)]


class WithoutNull(BaseModel):
    """An object in which null stands for a field that is not given, as OpenAI's clients mean it."""

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, given: Any) -> Any:
        return {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else given


class Generation(WithoutNull, Interventions):
    """Fields common to completions and chat completions."""

    model: Annotated[str, Field(max_length=256)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    n: Annotated[int, Field(ge=1, le=CHOICES)] = 1
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: Annotated[str, Field(max_length=512)] | None = None
    presence_penalty: Literal[0] | None = None
    frequency_penalty: Literal[0] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None

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

    prompt: Text | Ids | Annotated[list[Text], Field(max_length=CHOICES)] | Annotated[list[Ids], Field(max_length=CHOICES)]
    max_tokens: Annotated[int, Field(ge=1, le=IDS)] = 16
    logprobs: Annotated[int, Field(ge=0, le=100)] | None = None
    echo: Literal[False] = False
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts as texts, or as token ids."""
        one = isinstance(self.prompt, str) or isinstance(next(iter(self.prompt), None), int)
        return [self.prompt] if one else self.prompt  # pyright: ignore[reportReturnType]

    @property
    def top(self) -> int | None:
        """Number of most likely tokens to return."""
        return self.logprobs


class TextPart(Body):
    type: Literal["text"]
    text: Text


class Message(WithoutNull):  # an answer's message, which may be sent back, has `refusal`
    """A message of a conversation."""

    model_config = ConfigDict(extra="forbid")
    role: Annotated[str, Field(min_length=1, max_length=32)]
    content: Text | Annotated[list[TextPart], Field(max_length=64)]
    name: Annotated[str, Field(max_length=64)] | None = None

    def plain(self) -> dict[str, str]:
        """Return the message as a chat template reads it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": text, **({} if self.name is None else {"name": self.name})}


class ChatCompletion(Generation):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=1024)]
    max_tokens: Annotated[int, Field(ge=1, le=IDS)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=IDS)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=100)] | None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None

    @model_validator(mode="after")
    def _logprobs(self) -> "ChatCompletion":
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


class StoredIn(Body):
    """A captured run, whose prompt is the clean one."""

    run: Name


class SweepIn(Body):
    """Body of ``POST /v1/patch_sweep``; see ``mi_route2.patching.sweep``."""

    clean: Prompt | StoredIn = Field(
        description="a prompt, or a run with the sites at the whole prompt and resid_post of the last block at its last token"
    )
    corrupt: Prompt
    answer: Answer | None = None
    foil: Answer | None = None
    metric: Literal["logit_diff", "logprob", "kl"] = "logit_diff"
    sites: SiteName | Annotated[list[SiteName], Field(min_length=1, max_length=SITES)] = "resid_pre"
    positions: (
        Annotated[list[Position | SpanIn | Annotated[str, Field(max_length=1024)]], Field(max_length=IDS, fail_fast=True)] | None
    ) = None
    heads: bool = False
    together: bool = False
    at: Position | None = None
    alpha: Number = 1.0
    replicas: Annotated[int, Field(ge=3, le=64)] = 3
    stream: bool = False

    @model_validator(mode="after")
    def _spans(self) -> "SweepIn":
        texts = {
            one if isinstance(one, str) else (one.text, one.occurrence) for one in self.positions or () if not isinstance(one, int)
        }
        if len(texts) > SPANS:
            raise ValueError(f"positions name {len(texts)} texts, each of which is looked for: name at most {SPANS}, or numbers")
        return self


class CellIn(Body):
    """Body of ``POST /v1/patch_cell``: one cell of a sweep, whose patched model then answers."""

    clean: Prompt
    corrupt: Prompt
    site: SiteName
    position: Position | None = Field(None, description="a position of the corrupt prompt; null: all at once")
    alpha: Number = 1.0
    max_tokens: Annotated[int, Field(ge=1, le=1024)] = 16
    adapters: Mode | None = None


class TokenizeIn(Body):
    text: Text


class AlignIn(Body):
    clean: Prompt
    corrupt: Prompt


class SetSteering(SteeringIn):
    """Body of ``POST /v1/steering/set``.

    ``vectors`` registers named vectors; ``name`` holds the steering under a name; with ``scope: "global"`` it acts on every
    request, which takes the admin key.
    """

    scope: Literal["own", "global"] = "own"
    name: Name | None = None
    vectors: Annotated[dict[Name, VectorIn], Field(max_length=256)] = Field(default_factory=dict)


class ClearSteering(Body):
    """Body of ``POST /v1/steering/clear``."""

    scope: Literal["own", "global"] = "own"
    name: Name | None = None
    vectors: Annotated[list[Name], Field(max_length=256)] = Field(default_factory=list)


class ScaleIn(Body):
    scale: Annotated[float, Field(ge=0, le=1e9)]


class ThresholdIn(Body):
    monitor: Annotated[str, Field(max_length=128)]
    threshold: Number


class UnknownNameError(KeyError):
    """Error for a name that no vector, run or configuration of the client has; the message lists those that exist."""


@dataclass
class Names:
    """Named vectors and held configurations of one key; ``shared`` are vectors that all may use."""

    owner: str
    salt: str
    """Salt of its prefix cache."""
    shared: Mapping[str, Tensor]
    vectors: dict[str, Vector] = field(default_factory=dict)
    configurations: dict[str, SteeringIn] = field(default_factory=dict)
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while they change, so that what several requests add is counted together."""

    @property
    def prefix(self) -> str:
        """Prefix of its names in the engine, whose names are common to all keys."""
        return f"{self.owner}/"

    @property
    def nbytes(self) -> int:
        """Bytes of the vectors, and of the numbers in configurations."""
        steering = sum(_weight(one) for one in self.configurations.values())
        return steering + sum(vector.data.nbytes for vector in self.vectors.values())

    def inside(self, name: str) -> str:
        """Return the engine's name for a vector, run or conversation of this key."""
        return self.prefix + name

    def vector(self, name: str) -> str:
        """Return the engine's name of a vector; ``UnknownNameError`` if the key has none of this name."""
        if name in self.vectors:
            return self.inside(name)
        if name in self.shared:
            return name
        known = ", ".join(sorted({*self.vectors, *self.shared})) or "none"
        raise UnknownNameError(f"no vector is registered as {name!r}; there are: {known}: register it with /v1/steering/set")

    def configuration(self, name: str) -> SteeringIn:
        """Return a held configuration; ``UnknownNameError`` if the key has none of this name."""
        if name not in self.configurations:
            known = ", ".join(sorted(self.configurations)) or "none"
            raise UnknownNameError(f"no configuration is held as {name!r}; there are: {known}: hold it with /v1/steering/set")
        return self.configurations[name]


def _weight(given: Any) -> int:
    """Return about how many bytes the numbers and texts of a body take."""
    if isinstance(given, BaseModel):
        return sum(_weight(getattr(given, name)) for name in type(given).model_fields)
    if isinstance(given, dict):
        return sum(len(name) + _weight(one) for name, one in given.items())
    if isinstance(given, list):
        return 32 * len(given) if given and isinstance(given[0], float | int) else sum(map(_weight, given))
    return len(given) if isinstance(given, str) else 8


def site_of(name: str) -> Site:
    """Return a site by name; ``ValueError`` for a text of another form."""
    try:
        return Site.parse(name)
    except KeyError as error:
        raise ValueError(str(error.args[0] if error.args else error)) from error


def numbers_of(given: Packed | list[Any]) -> Float[Tensor, "..."]:
    """Return a vector's numbers."""
    if isinstance(given, Packed):
        return given.tensor()
    if given and isinstance(given[0], list) and len({len(row) for row in given}) > 1:
        raise ValueError("a vector in rows needs rows of one length: [[1, 2], [3, 4]]")
    return torch.tensor(given, dtype=torch.float64)


def vector_of(given: Any, names: Names) -> Tensor | str:
    """Return a vector's numbers, or its name in the engine."""
    return names.vector(given) if isinstance(given, str) else numbers_of(given)


def _steer(site: str, given: Scaled | AddIn, names: Names) -> Steer:
    return Steer(site_of(site), vector_of(given.vector, names), given.scale)


def _tier(entries: Mapping[str, Any], names: Names) -> tuple[Steer, ...]:
    return tuple(_steer(site, one if isinstance(one, Scaled) else Scaled(vector=one), names) for site, one in entries.items())


def _some(sites: Sequence[str] | None) -> tuple[Site, ...] | None:
    return None if sites is None else tuple(map(site_of, sites))


def _clamp(given: ClampIn, names: Names) -> Clamp:
    low, high = -math.inf if given.low is None else given.low, math.inf if given.high is None else given.high
    vector = vector_of(given.vector, names)
    return Clamp(site_of(given.site), vector, low, high, given.strength, given.phase, given.value)


def monitor_of(given: MonitorIn, names: Names) -> Monitor:
    """Return the engine's monitor."""
    if given.name == CLOSED:
        raise ValueError(f"{CLOSED!r} is the name of the server's own monitor, whose readings are not told: give another name")
    plain = {one: getattr(given, one) for one in ("threshold", "sharpness", "mode", "gate_rows", "quarantine", "depth", "prompt")}
    return Monitor(
        site_of(given.site),
        vector_of(given.probe, names),
        gates=_some(given.gates),
        quarantined=_some(given.quarantined),
        adds=tuple(_steer(one.site, one, names) for one in given.adds),
        name=given.name,
        **plain,
    )


def steering_of(given: SteeringIn, names: Names, *more: Monitor) -> Steering:
    """Return the engine's steering, with ``more`` monitors."""
    return Steering(
        base=_tier(given.steering_vectors, names),
        prefill=_tier(given.prefill_steering_vectors, names),
        decode=_tier(given.decode_steering_vectors, names),
        clamps=tuple(_clamp(one, names) for one in given.steering_clamps),
        monitors=(*(monitor_of(one, names) for one in given.monitors), *more),
    )


def joined(one: Steering, other: Steering) -> Steering:
    """Return the steering of both."""
    return Steering(**{kind: (*getattr(one, kind), *getattr(other, kind)) for kind in KINDS})


def patch_of(given: PatchIn, names: Names) -> Patch:
    """Return the engine's patch."""
    source: Any = given.source
    if isinstance(source, RunSource):
        resolved: Any = FromRun(names.inside(source.run), source.position, None if source.site is None else site_of(source.site))
    else:
        resolved = ZEROS if source == ZEROS else vector_of(source, names)
    alpha = given.alpha if isinstance(given.alpha, int | float) else numbers_of(given.alpha)
    return Patch(site_of(given.site), given.position, resolved, alpha)


def capture_of(given: CaptureIn | str) -> Capture:
    """Return the engine's capture."""
    if isinstance(given, str):
        return Capture(site_of(given))
    return Capture(site_of(given.site), TokenSelection(given.part, given.positions, given.token_ids))


def rules_of(given: Sequence[dict[str, Any]], names: Names) -> tuple[Rule, ...]:
    """Return the engine's rules: the JSON of ``parse_rules``, in which vectors may be packed, or names of the key."""

    def read(value: Any, depth: int = 0) -> Any:
        if depth > 8:
            raise ValueError("steering rules are nested too deeply: a rule is {when, scope, apply}")
        if isinstance(value, dict):
            return {key: vector(one) if key == "vector" else read(one, depth + 1) for key, one in value.items()}
        return [read(one, depth + 1) for one in value] if isinstance(value, list) else value

    def vector(value: Any) -> Any:
        if isinstance(value, dict):
            try:
                return Packed.model_validate(value).tensor()
            except ValidationError as error:
                first = error.errors()[0]
                place = ".".join(map(str, first["loc"]))
                raise ValueError(f"the vector of a rule: {place}: {first['msg']}") from error
        if isinstance(value, list) and len(value) > NUMBERS:
            raise ValueError(f"a vector has {len(value)} numbers, more than {NUMBERS}")
        return names.vector(value) if isinstance(value, str) else value

    return parse_rules([read(rule) for rule in given])


def sampling_of(body: Generation, served: Served, max_new: int, index: int, top: int | None) -> Sampling:
    """Return the sampling of choice ``index``; a given seed is counted up, so that choices differ and each can be repeated.

    Drawn seeds have 53 bits, so that JavaScript can read them in an answer and give them again.
    """
    seed = None if body.temperature == 0 else secrets.randbits(53) if body.seed is None else (body.seed + index) % 2**63
    ends = () if body.ignore_eos else served.stop_tokens
    return Sampling(
        max_new=max_new,
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        seed=seed,
        stop_tokens=tuple(dict.fromkeys((*ends, *body.stop_token_ids))),
        stop=body.stops,
        logprobs=top,
        logprob_token_ids=tuple(body.logprob_token_ids),
    )


def refuse_closed(closing: Monitor | None, sites: Iterable[Site]) -> None:
    """Raise ``ValueError`` for a site of an adapter that ``closing`` switches off, where a patch or a vector would be lost."""
    points = () if closing is None else ("quarantine_out",) if closing.quarantined is None else tuple(ADAPTER_POINTS)
    if off := [site for site in sites if site.point in points]:
        raise ValueError(f"{off[0]} is of an adapter that is off in the mode of this request: leave `adapters` or this out")


def _acting(request: Request) -> Iterator[Site]:
    """Yield the sites at which a request changes values."""
    steering = request.steering or Steering()
    steered = (*(one for tier in TIERS for one in steering.vectors(tier)), *steering.clamps)
    added = (one for many in (*steering.monitors, *request.rules) for one in (many.add if isinstance(many, Rule) else many.adds))
    for one in (*request.patch, *steered, *added):
        yield one.site


def request_of(
    body: Interventions, prompt: Sequence[int], sampling: Sampling, names: Names, closing: Monitor | None, deadline: float
) -> Request:
    """Return the engine's request of one choice.

    Raises:
        ValueError: a field cannot be converted.
        UnknownNameError: a name that the key does not have.
    """
    steering = steering_of(body, names, *(() if closing is None else (closing,)))
    if body.hold is not None:
        steering = joined(steering_of(names.configuration(body.hold), names), steering)
    request = Request(
        tuple(prompt),
        sampling,
        patch=tuple(patch_of(one, names) for one in body.patch),
        steering=steering if any(getattr(steering, kind) for kind in KINDS) else None,
        capture=tuple(capture_of(one) for one in body.capture),
        run=None if body.run is None else names.inside(body.run),
        priority=body.priority,
        rules=rules_of(body.steering, names) if body.steering else (),
        conversation=None if body.conversation_id is None else names.inside(body.conversation_id),
        owner=names.owner,
        readings=body.readings,
        norms=tuple(map(site_of, body.norms)),
        deadline=min(body.deadline or deadline, deadline),
        salt=names.salt,
    )
    refuse_closed(closing, _acting(request))
    return request
