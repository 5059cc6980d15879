"""What a model of the lanes study is: one frozen record, from which its shape, its wiring and its start follow."""

from dataclasses import asdict
from typing import Any

from mi_route2.validation import AtLeastOne, Natural, Positive, read_record, validated
from studies.lanes.schedule import Loop, Step, plan
from studies.lanes.wirings import RoutingStart, Wiring, get_start, get_wiring

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

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> "LanesConfig":
        """Back from `as_dict`. Raises ValueError for what did not come from there."""
        return read_record(LanesConfig, data)
