"""How residual lanes are read, written and read out: every wiring is a row of data.

    stream      sublayer reads                      writes                          read out by the final norm
    shipped     attention lane 0, MLP lane 1        A, then M, into both lanes      lane 1 (lane 0 is thrown away)
    simultaneous  the same                          A and M at once                 lane 1
    gauge       the mean of the lanes               A, then M, into both lanes      the mean of the lanes
    z2          (rms l0 + rms l1) / 2               A, then M, into both lanes      (rms l0 + rms l1) / 2
    gptj        one stream, both sublayers          A and M at once                 the stream
    sequential  one stream, the MLP after A         A, then M                       the stream

`gauge` depends on the sum of a sublayer's two weights alone, so moving weight between the lanes changes nothing. `z2` is unchanged
by an exchange of the lanes, so weights that start equal stay equal. `shipped` has neither property.
Source: parameter-golf, pull requests 1204 (two lanes), 1518 (shipped, asymmetric) and 1529 (both writes at once).
"""

from dataclasses import dataclass
from typing import Literal

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
