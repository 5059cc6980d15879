"""The arms of the study: each differs from another in one field.

    gptj (the record's baseline) -> short                          a quarter of the steps
      -> shipped (two lanes, learned) -> frozen                    the same, but the routing scalars are not trained
                                      -> asymmetric
                                      -> short
                                      -> wide (a loop) -> embeddings, head bias;  narrow -> embeddings
                                      -> momentum .98, .99

Arms of one seed share the order of the data, and the initial weights wherever shapes agree:
matrices are drawn in a fixed order from one generator, and no arm has a matrix that another lacks.
"""

from collections.abc import Mapping
from dataclasses import field, replace
from types import MappingProxyType
from typing import Literal

from mi_route2.validation import AtLeastOne, Name, Natural, Positive, Probability, validated
from studies.lanes.config import LanesConfig, Loop, StartName, WiringName, sized
from studies.lanes.optim import OptimSettings

Looped = Literal["none", "wide", "narrow"]
ENABLED_AT = 0.5
"""Fraction of the steps before which a loop does not run."""


@validated
class LanesArm:
    """One arm. Fields that `LanesConfig` has too are explained there.

    Attributes:
        about: How the arm differs from the others, in words.
        looped: Which loop of `LanesSize` runs.
        embeddings: True to add an embedding of each pass.
        steps: Number of training steps as a fraction of the study's.
        momentum: Momentum, if it differs from the study's.
    """

    name: Name
    about: str
    wiring: WiringName = "sequential"
    start: StartName = "symmetric"
    learned: bool = True
    looped: Looped = "none"
    embeddings: bool = False
    head_bias: bool = False
    steps: Positive = 1.0
    momentum: Probability | None = None

    def config(self, size: "LanesSize") -> LanesConfig:
        """Return the model configuration of this arm at a size."""
        loop = {"none": None, "wide": size.wide, "narrow": size.narrow}[self.looped]
        fields = {"wiring": self.wiring, "start": self.start, "learned": self.learned}
        return sized(size, loop=loop, loop_embeddings=self.embeddings, head_bias=self.head_bias, **fields)

    def optim(self, usual: OptimSettings) -> OptimSettings:
        """Return the optimizer settings of this arm."""
        return usual if self.momentum is None else replace(usual, momentum=self.momentum)


@validated
class LanesSize:
    """Model sizes that all arms share.

    Attributes:
        wide: The loop over more blocks with fewer passes.
        narrow: The loop over fewer blocks with more passes; both have the same number of virtual steps.

    """

    layers: AtLeastOne = 6
    d_model: AtLeastOne = 48
    heads: AtLeastOne = 3
    mlp: AtLeastOne = 3
    lane_start: Natural = 4
    wide: Loop = field(default_factory=lambda: Loop(1, 3, 2))
    narrow: Loop = field(default_factory=lambda: Loop(2, 3, 3))


BASELINE = LanesArm(
    "gptj", "the record's baseline: one stream, both sublayers read and write at once behind the fork", wiring="gptj"
)
SHIPPED = replace(BASELINE, name="shipped", about="two lanes as shipped, routing learned from 1", wiring="shipped")
ASYMMETRIC = replace(SHIPPED, name="asymmetric", about="shipped, routing learned from (1.3, .7)", start="asymmetric")
WIDE = replace(SHIPPED, name="wide", about="shipped, with a wide loop that runs from half of the steps on", looped="wide")
NARROW = replace(WIDE, name="narrow", about="as deep as wide, with a loop over fewer blocks", looped="narrow")
SHORT = 0.25

ARMS: Mapping[str, LanesArm] = MappingProxyType(
    {
        arm.name: arm
        for arm in (
            BASELINE,
            SHIPPED,
            replace(BASELINE, name="gptj-short", about="gptj, trained for a quarter of the steps", steps=SHORT),
            replace(SHIPPED, name="shipped-short", about="shipped, trained for a quarter of the steps", steps=SHORT),
            replace(SHIPPED, name="frozen", about="shipped, routing frozen at 1", learned=False),
            ASYMMETRIC,
            NARROW,
            replace(NARROW, name="narrow-embeddings", about="narrow, with an embedding of each pass", embeddings=True),
            WIDE,
            replace(WIDE, name="wide-embeddings", about="wide, with an embedding of each pass", embeddings=True),
            replace(WIDE, name="wide-head-bias", about="wide, with a bias of each pass on the keys of one head", head_bias=True),
            replace(SHIPPED, name="momentum-98", about="shipped, momentum .98 for .95", momentum=0.98),
            replace(SHIPPED, name="momentum-99", about="shipped, momentum .99 for .95", momentum=0.99),
        )
    }
)
