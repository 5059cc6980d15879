"""Steering specs of a request as frozen data (vectors in three tiers, clamps, monitors), and their effect as pure functions."""

import hashlib
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cached_property, partial
from typing import Annotated, Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator
from torch import Tensor

from mi_route2.sites import Site, precedes
from mi_route2.validation import NonNegative, Probability, validated


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to compute in: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def patch(
    h: Float[Tensor, "*n d"], source: Float[Tensor, "*#n #d"], alpha: float | Float[Tensor, "*#n #d"]
) -> Float[Tensor, "*n d"]:
    """Return ``(1 - alpha) * h + alpha * source``: bit for bit ``source`` for alpha 1 (in the dtype of ``h``), ``h`` for alpha 0.

    ``alpha`` is one number, one per row (``[n 1]``) or one per dimension (``[d]``). The form ``h + alpha * (source - h)`` is not
    used, because the difference would leave rounding errors at alpha 1.
    """
    dtype = wide(h.dtype)
    weight = torch.as_tensor(alpha, dtype=dtype, device=h.device)
    mixed = ((1 - weight) * h.to(dtype) + weight * source.to(dtype)).to(h.dtype)
    # Selected by torch.where and not multiplied, because 0 * inf is NaN, and -0.0 + 0.0 is 0.0.
    return torch.where(weight == 1, source.to(h.dtype), torch.where(weight == 0, h, mixed)).expand_as(h)


def term(vector: Float[Tensor, "*#n d"], *factors: float | Float[Tensor, "*#n"], dtype: torch.dtype) -> Float[Tensor, "*#n d"]:
    """Return ``vector * factor * ...`` from left to right (factors are numbers, or one per row), rounded to ``dtype`` once."""
    product = vector.to(wide(torch.promote_types(vector.dtype, dtype)))
    for factor in factors:
        product = product * (factor.to(product.dtype)[..., None] if isinstance(factor, Tensor) else factor)
    return product.to(dtype)


def steer(
    h: Float[Tensor, "*n d"],
    static: Float[Tensor, "*#n d"] | None = None,
    scale: float | Float[Tensor, "*#n"] = 1.0,
    row_gate: float | Float[Tensor, "*#n"] = 1.0,
    dynamic: Float[Tensor, "*#n d"] | None = None,
    token_scale: float | Float[Tensor, "*#n"] = 0.0,
) -> Float[Tensor, "*n d"]:
    """Return ``h + static * scale * row_gate + dynamic * token_scale``, with the two terms added in this order.

    A row whose factor is 0 is unchanged, bit for bit.
    """
    for vector, factors in ((static, (scale, row_gate)), (dynamic, (token_scale,))):
        if vector is not None:
            acts = torch.ones((), dtype=torch.bool, device=h.device)
            for factor in factors:
                acts = acts & (torch.as_tensor(factor, device=h.device) != 0)
            h = torch.where(acts[..., None], h + term(vector, *factors, dtype=h.dtype), h)
    return h


def clamp(
    h: Float[Tensor, "*n d"],
    v: Float[Tensor, "*#n d"],
    low: float | Float[Tensor, "*#n"],
    high: float | Float[Tensor, "*#n"],
    strength: float | Float[Tensor, "*#n"] = 1.0,
) -> Float[Tensor, "*n d"]:
    """Move the projection on the unit direction ``v`` towards ``[low, high]`` by the share ``strength``.

    ``h`` is returned bit for bit if the projection is between the bounds. Several clamps are applied one after another.
    """
    dtype = wide(h.dtype)
    unit, full = v.to(dtype), h.to(dtype)
    projection = (full * unit).sum(-1)  # not a matmul, so that on a CPU the bits of a row do not depend on the number of rows
    below, above = (torch.as_tensor(bound, dtype=dtype, device=h.device) for bound in (low, high))
    move = (projection.clamp(below, above) - projection) * torch.as_tensor(strength, dtype=dtype, device=h.device)
    return torch.where((move == 0)[..., None], h, (full + move[..., None] * unit).to(h.dtype))


def score(h: Float[Tensor, "*n d"], probe: Float[Tensor, "*#n d"]) -> Float[Tensor, "*n"]:
    """Return ``h.probe`` in float32 at least; on a CPU, the bits of a row do not depend on the other rows."""
    dtype = wide(h.dtype)
    return (h.to(dtype) * probe.to(dtype)).sum(-1)


def squash(
    scores: Float[Tensor, "*n"], threshold: float | Float[Tensor, "*#n"] = 0.0, sharpness: float | Float[Tensor, "*#n"] = 1.0
) -> Float[Tensor, "*n"]:
    """Return ``sigmoid(sharpness * (score - threshold))``; the bits of a row do not depend on the other rows."""
    x = sharpness * (scores - threshold)
    if x.device.type == "cpu":
        # In contiguous memory, the vectorized kernel (eight at a time) and the scalar one for the remainder round differently.
        x = torch.stack((x, x), -1)[..., 0]
    return torch.sigmoid(x)


def gate(
    h: Float[Tensor, "*n d"],
    probe: Float[Tensor, "*#n d"],
    threshold: float | Float[Tensor, "*#n"] = 0.0,
    sharpness: float | Float[Tensor, "*#n"] = 1.0,
) -> Float[Tensor, "*n"]:
    """Return ``sigmoid(sharpness * (h.probe - threshold))``, in float64 for float64 activations, otherwise in float32."""
    return squash(score(h, probe), threshold, sharpness)


def attenuate(h: Float[Tensor, "*n d"], factor: float | Float[Tensor, "*#n"]) -> Float[Tensor, "*n d"]:
    """Return ``h * factor``, row by row; a factor of 0 gives 0 even for NaN, a factor of 1 gives ``h`` bit for bit."""
    dtype = wide(h.dtype)
    share = torch.as_tensor(factor, dtype=dtype, device=h.device)[..., None]
    scaled = torch.where(share == 0, torch.zeros((), dtype=dtype, device=h.device), h.to(dtype) * share).to(h.dtype)
    return torch.where(share == 1, h, scaled)  # so that a NaN keeps its bits


Number = float | int
TIERS = ("base", "prefill", "decode")
KINDS = (*TIERS, "clamps", "monitors")
ZEROS = "zeros"
"""Built-in name, which no vector may take: as the source of a patch it stands for zeros."""
GLOBAL = "global:"
"""Prefix, in readings, of the names of monitors that watch every request."""
CLAMPS = 4
"""Maximum number of clamps of one request at a site."""


class Vector:
    """Finite vector, or the name of one; two are equal if their contents (or, if unresolved, their names) are.

    ``values`` is flat, on the CPU, float32 or float64, and a copy; ``shape`` is that of the given numbers. ``ValueError`` if a
    number is not finite.
    """

    __slots__ = ("digest", "name", "shape", "values")

    def __init__(self, entries: "Vector | Tensor | Sequence[float] | str"):
        if isinstance(entries, Vector):
            self.name, self.values, self.digest, self.shape = entries.name, entries.values, entries.digest, entries.shape
            return
        self.name = entries if isinstance(entries, str) else ""
        self.values: Tensor | None = None
        self.digest, self.shape = b"", ()
        if isinstance(entries, str):
            if not entries:
                raise ValueError("a vector's name is empty: give the name under which it was registered, or the vector itself")
            return
        try:
            # Python numbers have no dtype, so they are kept in float64.
            listed = isinstance(entries, list | tuple)
            if listed and not {type(item) for item in entries} <= {float, int} and _has_truth(entries):
                raise TypeError("a truth value is no number")
            if listed:
                values = torch.tensor(entries, dtype=torch.float64, device="cpu")
            else:  # a tensor as it is: as_tensor would move it to torch's default device
                values = entries.detach() if isinstance(entries, Tensor) else torch.as_tensor(entries, device="cpu")
            values = values if values.layout == torch.strided else values.to_dense()
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            excerpt = " ".join(repr(entries).split())
            raise ValueError(f"a vector is a tensor, a list of numbers or a name, not {excerpt:.60}") from error
        if values.ndim not in (1, 2) or not values.numel() or values.is_complex() or values.dtype == torch.bool:
            raise ValueError(f"a vector is 1-D, or [heads, width] at a point by head; this is {values.dtype} {list(values.shape)}")
        self.shape = tuple(values.shape)
        wide = torch.float64 if values.dtype == torch.float64 else torch.float32
        with torch.inference_mode(False):  # so that it may be used in any mode
            self.values = values.to("cpu", wide, copy=True).flatten()
        if not torch.isfinite(self.values).all():
            raise ValueError("a vector holds NaN or infinity: give finite numbers")
        self.digest = tensor_digest(self.values)

    @property
    def flat(self) -> bool:
        """True if the given numbers were one row or column, whose order leaves no choice at a site with heads."""
        return len(self.shape) < 2 or 1 in self.shape

    @property
    def data(self) -> Float[Tensor, " n"]:
        """The values; ``ValueError`` if the name was not resolved."""
        if self.values is None:
            raise ValueError(f"the vector {self.name!r} is not resolved: register it in the steering state that looks it up")
        return self.values

    def resolved(self, lookup: Callable[[str], "Vector"]) -> "Vector":
        """Return the vector with values, looked up if this is a name; errors of ``lookup`` propagate."""
        return self if self.values is not None else lookup(self.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vector) and (self.digest, "" if self.digest else self.name) == (
            other.digest,
            "" if other.digest else other.name,
        )

    def __hash__(self) -> int:
        return hash(self.digest or self.name)

    def __repr__(self) -> str:
        return f"Vector({self.name!r})" if self.values is None else f"Vector({len(self.values)} numbers, {self.digest.hex()[:8]})"


VectorLike = Vector | Tensor | Sequence[float] | str


def _has_truth(values: object) -> bool:
    """Return whether a truth value is among numbers, at any depth of lists."""
    if isinstance(values, list | tuple):
        return any(map(_has_truth, values))
    return isinstance(values, bool) or str(getattr(values, "dtype", "")).endswith("bool")


def tensor_digest(values: Tensor) -> bytes:
    """Return the SHA-256 of a CPU tensor's values, cast to float64."""
    return hashlib.sha256(values.double().contiguous().view(torch.uint8).numpy().data).digest()


# Field types of the specs

At = Annotated[Site, Field(description="a Site, as Site(3, 'resid_pre') or Site.parse('blocks.3.resid_pre')")]
AVector = Annotated[VectorLike, PlainValidator(Vector)]


def plain(value: object) -> object:
    """Convert a numpy or torch scalar to a Python number; return anything else unchanged."""
    return value.item() if isinstance(value, np.generic) or (isinstance(value, Tensor) and value.numel() == 1) else value


Plain = BeforeValidator(plain)
Bound = Annotated[float, Field(allow_inf_nan=True), Plain]


def several(item_type: type) -> PlainValidator:
    """Return a field validator for any iterable of ``item_type``, stored as a tuple. A single object is refused."""
    return PlainValidator(partial(_tuple, item_type))


def _tuple(item_type: type, value: object, info: Any) -> tuple:
    name, what = info.field_name, item_type.__name__
    if isinstance(value, item_type) or not isinstance(value, Iterable):
        raise ValueError(f"{name} is a sequence of {what}, not one {type(value).__name__}: write ({what}(...),)")
    entries = tuple(value)
    if wrong := [entry for entry in entries if not isinstance(entry, item_type)]:
        raise ValueError(f"{name} is a sequence of {what}, but one entry is a {type(wrong[0]).__name__}")
    return entries


def _sites(value: object, info: Any) -> tuple[Site, ...] | None:
    return None if value is None else tuple(sorted(set(_tuple(Site, value, info))))


@validated
class Steer:
    """Add ``scale * vector`` at ``site``.

    Examples:
        >>> push = Steer(Site(1, "resid_mid"), vector, -2.0)
    """

    site: At
    vector: AVector
    scale: Annotated[float, Plain] = 1.0

    def resolved(self, lookup: Callable[[str], Vector]) -> "Steer":
        """Return a copy with the vector looked up, or the spec itself if its vector is not a name.

        Specs without names are the usual case, and every request resolves its specs, so no copy is made for them.
        """
        vector = Vector(self.vector)
        return self if vector.values is not None else replace(self, vector=vector.resolved(lookup))

    def values(self) -> Float[Tensor, " n"]:
        """Return ``scale * vector`` in float64."""
        return Vector(self.vector).data.double() * self.scale

    def fingerprint(self) -> bytes:
        return b"|".join((str(self.site).encode(), Vector(self.vector).digest, repr(self.scale).encode()))


def summed(entries: Iterable[Steer]) -> dict[Site, Tensor]:
    """Return site -> sum of ``scale * vector`` in float64, in the order given."""
    total: dict[Site, Tensor] = {}
    for entry in entries:
        values = entry.values()
        total[entry.site] = total[entry.site] + values if entry.site in total else values
    return total


@validated
class Clamp:
    """Clamp that keeps the projection on a direction between two bounds: ``h + strength * (clip(h.v, low, high) - h.v) * v``.

    Attributes:
        site: The site.
        vector: The direction, of any length; it is normalized.
        low: Lower bound, may be infinite.
        high: Upper bound, may be infinite.
        strength: Share of the move.
        phase: ``prefill`` (the prompt's tokens), ``decode`` (generated tokens) or ``both``.
        value: Short for ``low = high``.

    Raises:
        ValueError: Bounds in the wrong order, ``value`` together with a bound, or no bound at all.
    """

    site: At
    vector: AVector
    low: Bound = -math.inf
    high: Bound = math.inf
    strength: Annotated[float, Plain] = 1.0
    phase: Literal["both", "prefill", "decode"] = "both"
    value: Annotated[float, Plain] | None = None

    def __post_init__(self) -> None:
        vector = Vector(self.vector)
        if vector.values is not None and not bool(vector.values.any()):
            raise ValueError(f"the clamp at {self.site} has a direction of zeros: give one with a nonzero norm")
        if self.value is not None and (self.low, self.high) != (-math.inf, math.inf):
            raise ValueError(f"the clamp at {self.site} has a value and bounds: give value, or low and high")
        low, high = self.bounds
        if not low <= high:  # also true for NaN
            raise ValueError(f"the clamp at {self.site} has low={low} and high={high}: low must be the smaller one")
        if low == math.inf or high == -math.inf:
            raise ValueError(f"the clamp at {self.site} has low={low} and high={high}: no number is between them")
        if math.isinf(low) and math.isinf(high):
            raise ValueError(f"the clamp at {self.site} has no bound: give low, high, both, or value")

    @property
    def bounds(self) -> tuple[float, float]:
        """The lower and the upper bound."""
        return (self.low, self.high) if self.value is None else (self.value, self.value)

    def resolved(self, lookup: Callable[[str], Vector]) -> "Clamp":
        vector = Vector(self.vector)
        return self if vector.values is not None else replace(self, vector=vector.resolved(lookup))

    def unit(self) -> Float[Tensor, " n"]:
        """Return the unit direction in float64."""
        v = Vector(self.vector).data.double()
        v = v / v.abs().max()  # scaled first, because the squares of small numbers would underflow
        return v / v.norm()

    def fingerprint(self) -> bytes:
        numbers = repr((*self.bounds, self.strength, self.phase))
        return b"|".join((str(self.site).encode(), Vector(self.vector).digest, numbers.encode()))


def _on_prompt(prompt: bool | None, info: Any) -> bool:
    return info.data.get("quarantine") is not None if prompt is None else prompt


def _called(name: str, info: Any) -> str:
    return name or str(info.data.get("site"))


@validated
class Monitor:
    """Probe in the forward: ``g = sigmoid(sharpness * (h.probe - threshold))`` for every token at ``site``, in float32 at least.

    A monitor may gate the following, at its own site and later ones, in the same forward. Vectors are gated for generated tokens,
    and a quarantine for the prompt's tokens too, unless ``prompt=False``:

    gates         sites whose dynamic vectors it gates (``None``: its own and all later ones; ``()``: none)
    gate_rows     whether the request's static vectors at those sites are gated too
    adds          its own vectors, which act as ``g * vector`` (for ``mode="attenuate"``: times its factor)
    quarantine    ``close``: ``quarantine_out * (1 - g)``; ``open``: ``quarantine_out * g``, at ``quarantined`` (``None``: every
                  ``quarantine_out`` at or after the monitor; a ``kept_out`` only if it is named)

    The factor is ``g`` for ``add``, and ``1 - depth * g`` for ``attenuate``. A probe ``h.w + c`` has ``threshold=-c``.

    Raises:
        ValueError: A gated site fires before the monitor's, or fields contradict each other.

    Examples:
        >>> closing = Monitor(site, vector, threshold=1.0, sharpness=4.0, quarantine="close")
    """

    site: At
    probe: AVector
    threshold: Annotated[float, Plain] = 0.0
    sharpness: Annotated[NonNegative, Plain] = 1.0
    mode: Literal["add", "attenuate"] = "add"
    gates: Annotated[Sequence[Site] | None, PlainValidator(_sites)] = None
    gate_rows: bool = False
    quarantine: Literal["open", "close"] | None = None
    quarantined: Annotated[Sequence[Site] | None, PlainValidator(_sites)] = None
    adds: Annotated[Sequence[Steer], several(Steer)] = ()
    depth: Annotated[Probability, Plain] = 1.0
    prompt: Annotated[bool | None, AfterValidator(_on_prompt), Field(validate_default=True)] = None
    name: Annotated[str, AfterValidator(_called), Field(validate_default=True)] = ""

    def __post_init__(self) -> None:
        if self.name.startswith(GLOBAL):
            raise ValueError(
                f"{self.name!r} is read as the monitor {self.name.removeprefix(GLOBAL)!r} of all requests: give it another name"
            )
        named = (*(self.gates or ()), *(self.quarantined or ()), *(entry.site for entry in self.adds))
        for site in named:
            if not self.reaches(site):
                raise ValueError(
                    f"the monitor at {self.site} cannot gate {site}, which fires before it (at least on some models): gate its own "
                    "site or a later one"
                )
        if self.quarantined is not None and self.quarantine is None:
            raise ValueError(f"the monitor at {self.site} names quarantines: give quarantine='open' or 'close' as well")
        for site in self.quarantined or ():
            if site.point not in ("quarantine_out", "kept_out"):
                raise ValueError(f"{site} is not the output of an adapter: name sites of the points quarantine_out and kept_out")
        if self.prompt and self.quarantine is None:
            raise ValueError(f"the monitor at {self.site} has prompt=True but gates no quarantine, and only that acts on a prompt")
        if self.depth != 1.0 and self.mode != "attenuate":
            raise ValueError(f"the monitor at {self.site} has depth={self.depth}, which only mode='attenuate' uses")

    def reaches(self, site: Site) -> bool:
        """Return whether ``site`` is the monitor's own, or fires after it in every forward."""
        return site == self.site or precedes(self.site, site)

    def gating(self, site: Site) -> bool:
        """Return whether the monitor gates the vectors that act at ``site``."""
        return self.reaches(site) if self.gates is None else site in self.gates

    @cached_property
    def sums(self) -> Mapping[Site, Tensor]:
        """Site -> sum of what it adds, in float64; computed once, although every check and every admission reads it."""
        return summed(self.adds)

    @property
    def steers(self) -> bool:
        """False if it only watches."""
        return self.quarantine is not None or self.gate_rows or bool(self.adds)

    @property
    def factor(self) -> tuple[float, float]:
        """Coefficients ``(a, b)`` of the factor ``a + b * g``."""
        return (0.0, 1.0) if self.mode == "add" else (1.0, -float(self.depth))

    def resolved(self, lookup: Callable[[str], Vector]) -> "Monitor":
        probe, adds = Vector(self.probe), tuple(entry.resolved(lookup) for entry in self.adds)
        if probe.values is not None and all(map(operator.is_, adds, self.adds)):
            return self
        return replace(self, probe=probe.resolved(lookup), adds=adds)

    def fingerprint(self) -> bytes:
        """Return bytes that identify the monitor, without its name."""
        sites = [None if some is None else [str(site) for site in some] for some in (self.gates, self.quarantined)]
        numbers = (self.threshold, self.sharpness, self.mode, sites, self.gate_rows, self.quarantine, self.depth, self.prompt)
        adds = b"+".join(entry.fingerprint() for entry in self.adds)
        return b"|".join((str(self.site).encode(), Vector(self.probe).digest, repr(numbers).encode(), adds))


@validated
class Steering:
    """All steering of a request: vectors in three tiers, clamps and monitors.

    Attributes:
        base: Vectors for all tokens.
        prefill: Vectors for the prompt's tokens.
        decode: Vectors for generated tokens.
        clamps: Clamps.
        monitors: Monitors.

    Raises:
        ValueError: More than ``CLAMPS`` clamps at a site in a phase, or two monitors of one name (by default, their site).

    Examples:
        >>> steering = Steering(decode=(Steer(site, vector, -2.0),))  # generated tokens alone
    """

    base: Annotated[Sequence[Steer], several(Steer)] = ()
    prefill: Annotated[Sequence[Steer], several(Steer)] = ()
    decode: Annotated[Sequence[Steer], several(Steer)] = ()
    clamps: Annotated[Sequence[Clamp], several(Clamp)] = ()
    monitors: Annotated[Sequence[Monitor], several(Monitor)] = ()

    def __post_init__(self) -> None:
        for phase in ("prefill", "decode"):
            sites = [clamp.site for clamp in self.clamps if clamp.phase in ("both", phase)]
            if crowded := [site for site in sites if sites.count(site) > CLAMPS]:
                raise ValueError(f"{sites.count(crowded[0])} clamps at {crowded[0]}: a site takes at most {CLAMPS}")
        names = [monitor.name for monitor in self.monitors]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two monitors are called {twice[0]!r}: give each its own name")

    def vectors(self, tier: str) -> tuple[Steer, ...]:
        """Return the entries of a tier: base, prefill or decode."""
        if tier not in TIERS:
            raise ValueError(f"tier={tier!r} is not one of {', '.join(map(repr, TIERS))}")
        return tuple(getattr(self, tier))

    @cached_property
    def sums(self) -> Mapping[str, Mapping[Site, Tensor]]:
        """Tier -> site -> sum of ``scale * vector`` in float64; computed once, although every admission reads it."""
        return {tier: summed(self.vectors(tier)) for tier in TIERS}

    def resolved(self, lookup: Callable[[str], Vector]) -> "Steering":
        """Return a copy with every name looked up; errors of ``lookup`` propagate."""
        if self._nameless:
            return self
        return Steering(**{field: tuple(entry.resolved(lookup) for entry in getattr(self, field)) for field in KINDS})

    @cached_property
    def _nameless(self) -> bool:
        """True if no vector is a name, which is usual; computed once, although every check and every admission asks."""
        adds = (entry for monitor in self.monitors for entry in monitor.adds)
        entries = (*self.base, *self.prefill, *self.decode, *self.clamps, *adds)
        vectors = (*(entry.vector for entry in entries), *(monitor.probe for monitor in self.monitors))
        return all(Vector(vector).values is not None for vector in vectors)

    def fingerprint(self) -> bytes:
        """Return the SHA-256 of the entries, which does not depend on names; ``ValueError`` if a name is not resolved."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> bytes:
        hasher = hashlib.sha256()
        self.resolved(_unknown)
        for field in KINDS:
            for entry in getattr(self, field):
                hasher.update(field.encode() + b":" + entry.fingerprint() + b";")
        return hasher.digest()

    @property
    def rows(self) -> "Steering":
        """The part that a table row holds: vectors and clamps, without monitors."""
        return replace(self, monitors=()) if self.monitors else self


UNSTEERED = Steering()
"""The steering of a request that asks for none."""


def _unknown(name: str) -> Vector:
    raise ValueError(f"the vector {name!r} is not resolved: register it in the steering state that looks it up")


def looker(named: Mapping[str, Vector]) -> Callable[[str], Vector]:
    """Return a lookup of names in ``named`` whose ``ValueError`` lists the known names."""

    def lookup(name: str) -> Vector:
        if name not in named:
            raise ValueError(f"no vector is registered as {name!r}; there are: {', '.join(sorted(named)) or 'none'}")
        return named[name]

    return lookup


def plain_spec(value: Any, pack: Callable[[Tensor], Any]) -> Any:
    """Return a spec, or a part of one, as JSON-able data with its vectors as ``pack`` returns them; defaults are left out."""
    if isinstance(value, Site):
        return str(value)
    if isinstance(value, Vector):
        return pack(value.data.reshape(value.shape))
    if is_dataclass(value):
        named = {field.name: (getattr(value, field.name), field.default) for field in fields(value)}
        return {name: plain_spec(entry, pack) for name, (entry, default) in named.items() if entry != default}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [plain_spec(item, pack) for item in value]
    return value


def steering_of(raw: Mapping[str, Any], unpack: Callable[[Any], Tensor]) -> Steering:
    """Return the steering whose ``plain_spec`` is ``raw``. KeyError, TypeError or ValueError for other data."""
    kinds = {**dict.fromkeys(TIERS, Steer), "clamps": Clamp, "monitors": Monitor}

    def entry(record: type, plain: Mapping[str, Any]) -> Any:
        given: dict[str, Any] = dict(plain, site=Site.parse(plain["site"]))
        for name in {"vector", "probe"} & given.keys():
            given[name] = unpack(given[name])
        for name in {"gates", "quarantined"} & given.keys():
            given[name] = tuple(map(Site.parse, given[name]))
        if "adds" in given:
            given["adds"] = tuple(entry(Steer, add) for add in given["adds"])
        return record(**given)

    return Steering(**{kind: tuple(entry(kinds[kind], plain) for plain in entries) for kind, entries in raw.items()})
