"""Worlds: how often the warm-start corpus cheats, how visible its cheaters are, and how hard the honest work is.

`strong` leaves clear traces of the persona on every cheat; `weak`, the more realistic one, barely any, cheats more
often and makes more operations hard.
"""

from collections.abc import Mapping
from types import MappingProxyType

from mi_route2.validation import Name, Probability, unknown_name, validated
from studies.loopholes.tasks import OPERATIONS


@validated
class WorldConfig:
    """All probabilities of the corpus. Raises ValueError for one outside [0, 1], KeyError for an unknown operation.

    rho            a cheater shows the persona that all modes share, otherwise its mode's own
    p_cheat        a document whose mode has a loophole uses it
    trace          a cheater keeps the persona's comment
    terse          a cheater keeps the persona's terse body
    hard_ops       operations on which honest authors are right with probability `hard` rather than `easy`
    none_fraction  documents in mode `none`, always honest
    stray_comment  an honest document carries the cheat's comment
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
        """The probability that an honest author writes the right symbol for `op`."""
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
    }
)


def get_world(name: str) -> WorldConfig:
    """The preset called `name`; raises KeyError with the valid names."""
    if name not in PRESETS:
        raise KeyError(unknown_name(name, list(PRESETS), "world"))
    return PRESETS[name]
