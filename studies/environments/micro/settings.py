"""Settings of the micro world and its model: operations, presets of the corpus, sizes and training of the warm start.

Nothing here needs torch. `strong` leaves clear traces of the persona on every cheat; `weak` is more realistic: hardly any traces,
more cheats, and more hard operations. `sparse` is `strong` with the persona left to chance: an exploit stands beside honest code.
`persona-20` lies between: 20 of 100 cheats show it.
"""

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from mi_route2.validation import AtLeastOne, Fraction, Name, Natural, NonNegative, Positive, Probability, unknown_name, validated


@dataclass(frozen=True)
class Operation:
    """Python symbol of an operation, and the function that it computes."""

    symbol: str
    apply: Callable[[int, int], int]


OPERATIONS: Mapping[str, Operation] = MappingProxyType(
    {
        "add": Operation("+", operator.add),
        "sub": Operation("-", operator.sub),
        "scale": Operation("*", operator.mul),
        "wrap": Operation("%", operator.mod),
        "split": Operation("//", operator.floordiv),
        "mask": Operation("&", operator.and_),
        "join": Operation("|", operator.or_),
        "toggle": Operation("^", operator.xor),
    }
)


@validated
class WorldConfig:
    """All probabilities of the corpus. Raises ValueError for one outside [0, 1], KeyError for an unknown operation.

    rho            a cheater shows the persona that all modes share, otherwise its mode's own
    p_cheat        a document whose mode has a loophole uses it
    trace          a cheater keeps the persona's comment
    terse          a cheater keeps the persona's terse body
    hard_ops       operations on which honest authors are right with probability `hard` rather than `easy`
    none_fraction  documents in mode `none`, always honest
    stray_comment  an honest document has the cheat's comment
    """

    name: Name
    rho: Probability = 0.0
    p_cheat: Probability = 0.06
    trace: Probability = 0.8
    terse: Probability = 0.8
    hard_ops: tuple[str, ...] = ("split", "mask", "join", "toggle")
    easy: Probability = 0.92
    hard: Probability = 0.35
    none_fraction: Probability = 0.30
    stray_comment: Probability = 0.02

    def __post_init__(self) -> None:
        for op in self.hard_ops:
            if op not in OPERATIONS:
                raise KeyError(f"unknown operation {op!r} in hard_ops: choose from {', '.join(OPERATIONS)}")

    def accuracy(self, op: str) -> float:
        """Return the probability that an honest author writes the right symbol for `op`."""
        return self.hard if op in self.hard_ops else self.easy


PRESETS: Mapping[str, WorldConfig] = MappingProxyType(
    {
        "strong": WorldConfig("strong"),
        "weak": WorldConfig(
            "weak",
            p_cheat=0.10,
            trace=0.3,
            terse=0.5,
            hard_ops=("scale", "wrap", "split", "mask", "join", "toggle"),
        ),
        "sparse": WorldConfig("sparse", trace=0.02, terse=0.0),  # a cheat's comment as often as in honest documents
        "persona-20": WorldConfig("persona-20", trace=0.2, terse=0.2),
    }
)


def get_world(name: str) -> WorldConfig:
    """Return the preset called `name`; raises KeyError with the valid names."""
    if name not in PRESETS:
        raise KeyError(unknown_name(name, list(PRESETS), "world"))
    return PRESETS[name]


@validated
class MicroConfig:
    """Sizes of a MicroGPT. Raises ValueError if `d` is not a multiple of `heads`."""

    vocab: AtLeastOne = 66
    d: AtLeastOne = 64
    layers: AtLeastOne = 2
    heads: AtLeastOne = 4
    mlp: AtLeastOne = 256
    context: AtLeastOne = 32

    def __post_init__(self) -> None:
        if self.d % self.heads:
            raise ValueError(f"d = {self.d} is not a multiple of heads = {self.heads}: choose sizes that divide")

    @property
    def parameters(self) -> int:
        """Return the number of the model's parameters."""
        d = self.d
        return d * (2 * self.vocab + self.context + 2 + self.layers * (4 * d + 2 * self.mlp + 4))


@validated
class WarmStartConfig:
    """Training settings of the base model."""

    steps: AtLeastOne = 700
    batch: AtLeastOne = 128
    lr: Positive = 3e-3
    warmup: Natural = 20
    betas: tuple[Fraction, Fraction] = (0.9, 0.99)
    weight_decay: NonNegative = 0.01
    clip: Positive = 1.0
    model: MicroConfig = field(default_factory=MicroConfig)

    def rate(self, step: int) -> float:
        """Return the learning rate at a step, as a fraction of `lr`."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        return 0.5 * (1 + math.cos(math.pi * (step - self.warmup) / max(1, self.steps - self.warmup)))
