"""What a model of the study is: the order in which blocks run, how lanes are read and written, and the one record of both."""

from dataclasses import dataclass
from typing import Any, Literal

from mi_route2.validation import AtLeastOne, Natural, Positive, validated


@validated
class Loop:
    """Blocks `start .. end`, both included, run `loops` more times."""

    start: Natural
    end: Natural
    loops: Natural

    @property
    def passes(self) -> int:
        return self.loops + 1


@dataclass(frozen=True)
class Step:
    """One virtual step.

    block: the block that runs. entry: the number of the pass that begins here, None elsewhere. loop_pass: the pass that the step
    lies in, None outside of the loop. skip: the number of the skip that is mixed into its input, None without one. source: the
    virtual step whose output that skip is. parallel: whether it stands at or behind the fork of the lanes.
    """

    block: int
    entry: int | None
    loop_pass: int | None
    skip: int | None
    source: int | None
    parallel: bool


def order_of(layers: int, loop: Loop | None) -> tuple[int, ...]:
    """The block of every virtual step. Raises ValueError where the loop does not lie within the blocks."""
    if loop is None:
        return tuple(range(layers))
    if not 0 <= loop.start <= loop.end < layers or loop.loops < 0:
        raise ValueError(
            f"a loop of {layers} blocks runs from 0 <= start <= end <= {layers - 1} with loops >= 0, "
            f"not start {loop.start}, end {loop.end}, loops {loop.loops}"
        )
    body = tuple(range(loop.start, loop.end + 1))
    return (*range(loop.start), *(body * loop.passes), *range(loop.end + 1, layers))


def split(order: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Encoder and decoder."""
    return order[: len(order) // 2], order[len(order) // 2 :]


def plan(layers: int, lane_start: int, loop: Loop | None, *, skips: bool = True, skips_in_fork: bool = True) -> tuple[Step, ...]:
    """Every virtual step. Raises ValueError where the lanes would fork before the decoder, or inside the loop."""
    order = order_of(layers, loop)
    encoder, _ = split(order)
    if (
        not 0 <= lane_start <= layers
        or any(block >= lane_start for block in encoder)
        or (loop is not None and lane_start <= loop.end)
    ):
        first = max(max(encoder, default=-1), -1 if loop is None else loop.end) + 1
        raise ValueError(f"lanes fork behind the encoder and the loop: lane_start is {first} to {layers}, not {lane_start}")
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
    """The encoder step whose output each decoder step takes: the newest first."""
    return dict(zip(range(encoder, steps), reversed(range(encoder)), strict=False)) if skips else {}


Weights = tuple[float, ...]


@dataclass(frozen=True)
class Wiring:
    """One wiring. Weights are by lane; those of a read or of the read-out add up to 1.

    attn, mlp: the lanes that each sublayer reads, weighted.
    out: the lanes that the final norm reads, weighted.
    norm: whether the weighted sum is taken before the rms norm, or over each lane's norm.
    mlp_reads: `after` the attention has written (a sequential block), or `before` (both reads come before both writes).
    writes: `in turn` (`l <- ar l + A`, then `l <- mr l + M`) or `at once` (lane 0 keeps `ar l`, lane 1 `mr l`, both add A and M).
    skips: the lanes into which a skip of the U-Net is mixed.
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
    """The wiring of that name. Raises KeyError with the names that there are."""
    if name not in WIRINGS:
        raise KeyError(f"no wiring is named {name!r}; there are {', '.join(WIRINGS)}")
    return WIRINGS[name]


@dataclass(frozen=True)
class RoutingStart:
    """Start values of the routing scalars: by lane, what attention and MLP write into it; and what a lane keeps of itself."""

    name: str
    attn: tuple[float, float]
    mlp: tuple[float, float]
    keep: float = 1.1**0.5


STARTS: dict[str, RoutingStart] = {
    start.name: start
    for start in (RoutingStart("symmetric", (1.0, 1.0), (1.0, 1.0)), RoutingStart("asymmetric", (1.3, 0.7), (0.7, 1.3)))
}


def get_start(name: str) -> RoutingStart:
    """The start values of that name. Raises KeyError with the names that there are."""
    if name not in STARTS:
        raise KeyError(f"no start of the routing is named {name!r}; there are {', '.join(STARTS)}")
    return STARTS[name]


BOS = 256  # starts every document; the other tokens are the 256 bytes
VOCABULARY = 257


@validated
class LanesConfig:
    """A byte-level language model.

    layers, d_model, heads, mlp: blocks, features, attention heads, and hidden features of the MLP as a multiple of d_model.
    wiring: one of `wirings.WIRINGS`. lane_start: the first block behind the fork; of no effect on the wiring `sequential`.
    start: one of `wirings.STARTS`. learned: whether the routing scalars are trained, or stay as they start.
    loop: blocks that run more than once, None for none. loop_embeddings: an embedding of each pass, added where it begins.
    head_bias: a bias of each pass on the keys of one head, in the block where a pass begins.
    skips: those of the U-Net. skips_in_fork: whether they are mixed in behind the fork too.
    zero_init: whether the output projections start at 0, as the record's do.
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
            raise ValueError("embeddings and biases of passes need a loop: set loop=Loop(start, end, loops)")
        for look_up in (lambda: self.lanes, lambda: self.routing, lambda: self.steps):
            look_up()  # each refuses what there is not

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
        """Every virtual step, in order."""
        start = self.lane_start if self.wiring != "sequential" else self.layers
        return plan(self.layers, start, self.loop, skips=self.skips, skips_in_fork=self.skips_in_fork)


def sized(sizes: object, **other: Any) -> LanesConfig:
    """The model of a record that has the fields layers, d_model, heads, mlp and lane_start; ``other`` fields beside them."""
    return LanesConfig(**{name: getattr(sizes, name) for name in ("layers", "d_model", "heads", "mlp", "lane_start")} | other)
