"""The order in which blocks run, with loops, and the skips of a U-Net over that order.

    order = 0 .. start-1,  (loops + 1) x [start .. end],  end+1 .. layers-1
    encoder = the first len(order) // 2 virtual steps, decoder = the rest

Each encoder step saves the stream; each decoder step takes the saved one that is newest, until none is left. `(start, end, loops) =
(3, 5, 2)` over 11 blocks has 17 virtual steps. Source: parameter-golf, pull requests 1204 and 1420.
"""

from dataclasses import dataclass

from mi_route2.validation import Natural, validated


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
