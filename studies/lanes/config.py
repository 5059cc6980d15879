"""Configuration of the study's models: the order of the blocks, the wiring of the lanes, and the routing start."""

from dataclasses import dataclass
from typing import Any, Literal

from mi_route2.validation import AtLeastOne, Natural, validated


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
class VirtualStep:
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
    """Return the block of every virtual step."""
    if loop is None:
        return tuple(range(layers))
    body = tuple(range(loop.start, loop.end + 1))
    return (*range(loop.start), *(body * loop.passes), *range(loop.end + 1, layers))


def plan(
    layers: int, lane_start: int, loop: Loop | None, *, skips: bool = True, skips_in_fork: bool = True
) -> tuple[VirtualStep, ...]:
    """Return every virtual step. The first half of them are the encoder's, whose outputs the others take, the latest one first.

    Raises:
        ValueError: If the loop does not lie within the blocks, or if the lanes would fork before the decoder or inside the loop.
    """
    if loop is not None and not loop.start <= loop.end < layers:
        raise ValueError(f"a loop over {layers} blocks needs start <= end <= {layers - 1}, not {loop.start} and {loop.end}")
    order = order_of(layers, loop)
    half = len(order) // 2
    first = max((-1 if loop is None else loop.end), *order[:half], -1) + 1
    if not first <= lane_start <= layers:
        raise ValueError(f"lanes must fork behind encoder and loop: choose lane_start from {first} to {layers}, not {lane_start}")
    sources = dict(zip(range(half, len(order)), reversed(range(half)), strict=False)) if skips else {}
    steps: list[VirtualStep] = []
    passes = -1
    for k, block in enumerate(order):
        in_loop = loop is not None and loop.start <= block <= loop.end
        entry = loop is not None and block == loop.start
        passes += entry
        parallel = block >= lane_start
        mixed = k in sources and (skips_in_fork or not parallel)
        number, source = (k - half, sources[k]) if mixed else (None, None)
        steps.append(VirtualStep(block, passes if entry else None, passes if in_loop else None, number, source, parallel))
    return tuple(steps)


WiringName = Literal["sequential", "gptj", "shipped", "simultaneous", "gauge", "z2"]
StartName = Literal["symmetric", "asymmetric"]
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

    name: WiringName
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
WIRINGS: dict[WiringName, Wiring] = {
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


@dataclass(frozen=True)
class RoutingStart:
    """Initial values of the routing scalars.

    Attributes:
        name: Name of the start.
        attn: Weight of attention's output in each lane.
        mlp: Weight of the MLP's output in each lane.
        keep: Factor with which a lane keeps its own value.
    """

    name: StartName
    attn: tuple[float, float]
    mlp: tuple[float, float]
    keep: float = 1.1**0.5


STARTS: dict[StartName, RoutingStart] = {
    start.name: start
    for start in (RoutingStart("symmetric", (1.0, 1.0), (1.0, 1.0)), RoutingStart("asymmetric", (1.3, 0.7), (0.7, 1.3)))
}


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
    """

    layers: AtLeastOne = 6
    d_model: AtLeastOne = 64
    heads: AtLeastOne = 4
    mlp: AtLeastOne = 4
    wiring: WiringName = "shipped"
    lane_start: Natural = 4
    start: StartName = "symmetric"
    learned: bool = True
    loop: Loop | None = None
    loop_embeddings: bool = False
    head_bias: bool = False
    skips: bool = True
    skips_in_fork: bool = True
    zero_init: bool = True

    def __post_init__(self) -> None:
        if self.d_model % (2 * self.heads):
            raise ValueError(f"d_model {self.d_model} must be a multiple of twice the {self.heads} heads")
        if self.loop is None and (self.loop_embeddings or self.head_bias):
            raise ValueError("loop_embeddings and head_bias need a loop: set loop=Loop(start, end, loops)")
        plan(self.layers, self.fork, self.loop)  # raises for a fork or a loop that does not fit

    @property
    def d_head(self) -> int:
        return self.d_model // self.heads

    @property
    def lanes(self) -> Wiring:
        return WIRINGS[self.wiring]

    @property
    def routing(self) -> RoutingStart:
        return STARTS[self.start]

    @property
    def fork(self) -> int:
        """The first block behind the fork; in the wiring `sequential` none is."""
        return self.lane_start if self.wiring != "sequential" else self.layers

    @property
    def steps(self) -> tuple[VirtualStep, ...]:
        """All virtual steps, in order."""
        return plan(self.layers, self.fork, self.loop, skips=self.skips, skips_in_fork=self.skips_in_fork)


def sized(sizes: object, **other: Any) -> LanesConfig:
    """Return the configuration with the layers, d_model, heads, mlp and lane_start of ``sizes``, and ``other`` fields."""
    return LanesConfig(**{name: getattr(sizes, name) for name in ("layers", "d_model", "heads", "mlp", "lane_start")} | other)
