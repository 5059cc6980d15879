"""Configuration of the study's models: the order of the blocks, the wiring of the lanes, and the routing start."""

from dataclasses import dataclass
from typing import Any, Literal

from mi_route2.validation import AtLeastOne, Natural, Positive, validated


@validated
class Loop:
    """A loop in which blocks `start .. end`, both inclusive, run `loops` additional times."""

    start: Natural
    end: Natural
    loops: Natural

    @property
    def passes(self) -> int:
        return self.loops + 1


@dataclass(frozen=True)
class Step:
    """One virtual step.

    Attributes:
        block: The block that runs.
        entry: Number of the pass that begins here; None elsewhere.
        loop_pass: The pass that contains the step; None outside of the loop.
        skip: Number of the skip connection that is mixed into the step's input; None without one.
        source: The virtual step whose output that skip is.
        parallel: True if the step is at or behind the fork of the lanes.
    """

    block: int
    entry: int | None
    loop_pass: int | None
    skip: int | None
    source: int | None
    parallel: bool


def order_of(layers: int, loop: Loop | None) -> tuple[int, ...]:
    """Return the block of every virtual step.

    Raises:
        ValueError: If the loop does not lie within the blocks.
    """
    if loop is None:
        return tuple(range(layers))
    if not 0 <= loop.start <= loop.end < layers or loop.loops < 0:
        raise ValueError(
            f"a loop over {layers} blocks needs 0 <= start <= end <= {layers - 1} and loops >= 0, "
            f"not start {loop.start}, end {loop.end}, loops {loop.loops}"
        )
    body = tuple(range(loop.start, loop.end + 1))
    return (*range(loop.start), *(body * loop.passes), *range(loop.end + 1, layers))


def split(order: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the encoder and the decoder part of the order."""
    return order[: len(order) // 2], order[len(order) // 2 :]


def plan(layers: int, lane_start: int, loop: Loop | None, *, skips: bool = True, skips_in_fork: bool = True) -> tuple[Step, ...]:
    """Return every virtual step.

    Raises:
        ValueError: If the lanes would fork before the decoder, or inside the loop.
    """
    order = order_of(layers, loop)
    encoder, _ = split(order)
    if (
        not 0 <= lane_start <= layers
        or any(block >= lane_start for block in encoder)
        or (loop is not None and lane_start <= loop.end)
    ):
        first = max(max(encoder, default=-1), -1 if loop is None else loop.end) + 1
        raise ValueError(f"lanes must fork behind encoder and loop: choose lane_start from {first} to {layers}, not {lane_start}")
    sources = _sources(len(order), len(encoder), skips)
    steps: list[Step] = []
    passes = -1
    for k, block in enumerate(order):
        in_loop = loop is not None and loop.start <= block <= loop.end
        entry = loop is not None and block == loop.start
        passes += entry
        parallel = block >= lane_start
        mixed = k in sources and (skips_in_fork or not parallel)
        number, source = (list(sources).index(k), sources[k]) if mixed else (None, None)
        steps.append(Step(block, passes if entry else None, passes if in_loop else None, number, source, parallel))
    return tuple(steps)


def _sources(steps: int, encoder: int, skips: bool) -> dict[int, int]:
    """Return the encoder step whose output each decoder step takes, the latest encoder step first."""
    return dict(zip(range(encoder, steps), reversed(range(encoder)), strict=False)) if skips else {}


Weights = tuple[float, ...]


@dataclass(frozen=True)
class Wiring:
    """One wiring of lanes and sublayers. Weights are indexed by lane; those of a read or of the read-out sum to 1.

    Attributes:
        name: Name of the wiring.
        attn: Weights of the lanes that attention reads.
        mlp: Weights of the lanes that the MLP reads.
        out: Weights of the lanes that the final norm reads.
        norm: Whether the RMS norm is of the weighted sum, or of each lane before it is summed.
        mlp_reads: `after` attention has written (a sequential block), or `before` (both sublayers read before either writes).
        writes: `in turn` (`l <- ar l + A`, then `l <- mr l + M`) or `at once` (lane 0 keeps `ar l`, lane 1 `mr l`, both add A and
            M).
        skips: The lanes into which a U-Net skip connection is mixed.
    """

    name: str
    attn: Weights
    mlp: Weights
    out: Weights
    norm: Literal["of the sum", "of each lane"] = "of the sum"
    mlp_reads: Literal["before", "after"] = "before"
    writes: Literal["in turn", "at once"] = "in turn"
    skips: Literal["first lane", "every lane"] = "every lane"

    @property
    def lanes(self) -> int:
        return len(self.out)


HALVES = (0.5, 0.5)
WIRINGS: dict[str, Wiring] = {
    wiring.name: wiring
    for wiring in (
        Wiring("sequential", (1.0,), (1.0,), (1.0,), mlp_reads="after"),
        Wiring("gptj", (1.0,), (1.0,), (1.0,)),
        Wiring("shipped", (1.0, 0.0), (0.0, 1.0), (0.0, 1.0), skips="first lane"),
        Wiring("simultaneous", (1.0, 0.0), (0.0, 1.0), (0.0, 1.0), writes="at once", skips="first lane"),
        Wiring("gauge", HALVES, HALVES, HALVES),
        Wiring("z2", HALVES, HALVES, HALVES, norm="of each lane"),
    )
}


def get_wiring(name: str) -> Wiring:
    """Return the wiring with that name.

    Raises:
        KeyError: If there is none; the message lists the valid names.
    """
    if name not in WIRINGS:
        raise KeyError(f"unknown wiring {name!r}: choose from {', '.join(WIRINGS)}")
    return WIRINGS[name]


@dataclass(frozen=True)
class RoutingStart:
    """Initial values of the routing scalars.

    Attributes:
        name: Name of the start.
        attn: Weight of attention's output in each lane.
        mlp: Weight of the MLP's output in each lane.
        keep: Factor with which a lane keeps its own value.
    """

    name: str
    attn: tuple[float, float]
    mlp: tuple[float, float]
    keep: float = 1.1**0.5


STARTS: dict[str, RoutingStart] = {
    start.name: start
    for start in (RoutingStart("symmetric", (1.0, 1.0), (1.0, 1.0)), RoutingStart("asymmetric", (1.3, 0.7), (0.7, 1.3)))
}


def get_start(name: str) -> RoutingStart:
    """Return the initial values with that name.

    Raises:
        KeyError: If there are none; the message lists the valid names.
    """
    if name not in STARTS:
        raise KeyError(f"unknown routing start {name!r}: choose from {', '.join(STARTS)}")
    return STARTS[name]


BOS = 256  # first token of every document; the other tokens are the 256 bytes
VOCABULARY = 257


@validated
class LanesConfig:
    """Configuration of a byte-level language model.

    Attributes:
        layers: Number of blocks.
        d_model: Number of features.
        heads: Number of attention heads.
        mlp: Hidden features of the MLP as a multiple of d_model.
        wiring: One of `WIRINGS`.
        lane_start: The first block behind the fork; has no effect on the wiring `sequential`.
        start: One of `STARTS`.
        learned: True if the routing scalars are trained; otherwise they keep their initial values.
        loop: Blocks that run more than once; None for no loop.
        loop_embeddings: True to add an embedding of each pass where the pass begins.
        head_bias: True to add a bias of each pass to the keys of one head, in the block where the pass begins.
        skips: True for U-Net skip connections.
        skips_in_fork: True to mix them in behind the fork too.
        zero_init: True if the output projections start at 0, as the record's do.
        q_gain: Initial gain of the queries of each head.
        softcap: Bound of the logits, by tanh.
    """

    layers: AtLeastOne = 6
    d_model: AtLeastOne = 64
    heads: AtLeastOne = 4
    mlp: AtLeastOne = 4
    wiring: str = "shipped"
    lane_start: Natural = 4
    start: str = "symmetric"
    learned: bool = True
    loop: Loop | None = None
    loop_embeddings: bool = False
    head_bias: bool = False
    skips: bool = True
    skips_in_fork: bool = True
    zero_init: bool = True
    q_gain: float = 1.5
    softcap: Positive = 30.0

    def __post_init__(self) -> None:
        if self.d_model % (2 * self.heads):
            raise ValueError(f"d_model {self.d_model} must be a multiple of twice the {self.heads} heads")
        if self.loop is None and (self.loop_embeddings or self.head_bias):
            raise ValueError("loop_embeddings and head_bias need a loop: set loop=Loop(start, end, loops)")
        for look_up in (lambda: self.lanes, lambda: self.routing, lambda: self.steps):
            look_up()  # each raises for invalid names or sizes

    @property
    def d_head(self) -> int:
        return self.d_model // self.heads

    @property
    def lanes(self) -> Wiring:
        return get_wiring(self.wiring)

    @property
    def routing(self) -> RoutingStart:
        return get_start(self.start)

    @property
    def steps(self) -> tuple[Step, ...]:
        """All virtual steps, in order."""
        start = self.lane_start if self.wiring != "sequential" else self.layers
        return plan(self.layers, start, self.loop, skips=self.skips, skips_in_fork=self.skips_in_fork)


def sized(sizes: object, **other: Any) -> LanesConfig:
    """Return the configuration with the layers, d_model, heads, mlp and lane_start of ``sizes``, and ``other`` fields."""
    return LanesConfig(**{name: getattr(sizes, name) for name in ("layers", "d_model", "heads", "mlp", "lane_start")} | other)
