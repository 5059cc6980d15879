"""The arms of the study: each differs from another in one field.

    gptj (the record's baseline) -> sequential                     the control: the MLP reads what attention wrote
                                 -> short                          a quarter of the steps
      -> shipped (two lanes, learned) -> frozen                    the same, but the routing scalars are not trained
                                      -> asymmetric -> frozen
                                      -> short
                                      -> simultaneous, gauge, z2   other wirings of the lanes
                                      -> wide (a loop) -> embeddings, head bias, early, wider;  narrow -> embeddings
                                      -> early fork                two lanes from the middle on
                                      -> low decay, momentum .98, .99     other optimizer settings

The default study trains the arms that most of the claims need. A full study also trains what the record tried and dropped, and arms
for questions of our own (`full`). Arms of one seed share the order of the data, and the initial weights wherever shapes agree:
matrices are drawn in a fixed order from one generator, and no arm has a matrix that another lacks.
"""

from collections.abc import Mapping
from dataclasses import field, replace
from types import MappingProxyType
from typing import Literal

from mi_route2.validation import AtLeastOne, Name, Natural, NonNegative, Positive, Probability, validated
from studies.lanes.config import LanesConfig, Loop, StartName, WiringName, sized
from studies.lanes.optim import OptimSettings

Looped = Literal["none", "wide", "narrow", "wider"]
USUAL, EARLY = 0.5, 0.35  # fractions of the steps after which the record's loop runs, and ran in an experiment that it dropped


@validated
class Arm:
    """One arm. Fields that `LanesConfig` has too are explained there.

    Attributes:
        about: How the arm differs from the others, in words.
        looped: Which loop of `Size` runs.
        embeddings: True to add an embedding of each pass.
        enable_at: Fraction of the steps before which the loop does not run.
        steps: Number of training steps as a fraction of the study's.
        early_fork: True if the lanes fork at the start of the decoder.
        decay: Weight decay, if it differs from the study's.
        momentum: Momentum, if it differs from the study's.
        full: True if only a full study trains the arm.
    """

    name: Name
    about: str
    wiring: WiringName = "sequential"
    start: StartName = "symmetric"
    learned: bool = True
    looped: Looped = "none"
    embeddings: bool = False
    head_bias: bool = False
    enable_at: Probability = USUAL
    steps: Positive = 1.0
    early_fork: bool = False
    decay: NonNegative | None = None
    momentum: Probability | None = None
    full: bool = False

    def config(self, size: "Size") -> LanesConfig:
        """Return the model configuration of this arm at a size."""
        loop = {"none": None, "wide": size.wide, "narrow": size.narrow, "wider": size.wider}[self.looped]
        given = {"lane_start": size.layers // 2} if self.early_fork else {}
        given |= {"wiring": self.wiring, "start": self.start, "learned": self.learned}
        return sized(size, loop=loop, loop_embeddings=self.embeddings, head_bias=self.head_bias, **given)

    def optim(self, usual: OptimSettings) -> OptimSettings:
        """Return the optimizer settings of this arm."""
        changed = {name: value for name in ("decay", "momentum") if (value := getattr(self, name)) is not None}
        return replace(usual, **changed)


@validated
class Size:
    """Model sizes that all arms share.

    Attributes:
        wide: The loop over more blocks with fewer passes.
        narrow: The loop over fewer blocks with more passes; both have the same number of virtual steps.

    Raises:
        ValueError: If the two loops differ in depth, or if the lanes would fork before a loop ends.
    """

    layers: AtLeastOne = 6
    d_model: AtLeastOne = 48
    heads: AtLeastOne = 3
    mlp: AtLeastOne = 3
    lane_start: Natural = 4
    wide: Loop = field(default_factory=lambda: Loop(1, 3, 2))
    narrow: Loop = field(default_factory=lambda: Loop(2, 3, 3))

    def __post_init__(self) -> None:
        depths = [len(sized(self, loop=loop).steps) for loop in (None, self.wide, self.narrow)]
        if depths[1] != depths[2]:
            raise ValueError(
                f"the wide and the narrow loop must have the same depth, but they have {depths[1]} and {depths[2]} steps"
            )

    @property
    def wider(self) -> Loop:
        """The wide loop with one more block in front of it (the lanes may fork right behind it)."""
        return replace(self.wide, start=self.wide.start - 1)


BASELINE = Arm("gptj", "the record's baseline: one stream, both sublayers read and write at once behind the fork", wiring="gptj")
SHIPPED = replace(BASELINE, name="shipped", about="two lanes as shipped, routing learned from 1", wiring="shipped")
ASYMMETRIC = replace(SHIPPED, name="asymmetric", about="shipped, routing learned from (1.3, .7)", start="asymmetric")
WIDE = replace(SHIPPED, name="wide", about="shipped, with a wide loop that runs from half of the steps on", looped="wide")
NARROW = replace(WIDE, name="narrow", about="as deep as wide, with a loop over fewer blocks", looped="narrow")
SHORT = 0.25

ARMS: Mapping[str, Arm] = MappingProxyType(
    {
        arm.name: arm
        for arm in (
            BASELINE,
            Arm("sequential", "one stream, the MLP reads what attention wrote", full=True),
            SHIPPED,
            replace(BASELINE, name="gptj-short", about="gptj, trained for a quarter of the steps", steps=SHORT),
            replace(SHIPPED, name="shipped-short", about="shipped, trained for a quarter of the steps", steps=SHORT),
            replace(SHIPPED, name="frozen", about="shipped, routing frozen at 1", learned=False),
            ASYMMETRIC,
            replace(ASYMMETRIC, name="asymmetric-frozen", about="shipped, routing frozen at (1.3, .7)", learned=False, full=True),
            replace(SHIPPED, name="simultaneous", about="shipped, both sublayers write at once", wiring="simultaneous", full=True),
            replace(SHIPPED, name="gauge", about="two lanes, read and read out by their mean", wiring="gauge", full=True),
            replace(SHIPPED, name="z2", about="two lanes, read and read out by the mean of their norms", wiring="z2", full=True),
            replace(SHIPPED, name="early-fork", about="shipped, lanes from the middle on", early_fork=True, full=True),
            NARROW,
            replace(NARROW, name="narrow-embeddings", about="narrow, with an embedding of each pass", embeddings=True),
            WIDE,
            replace(WIDE, name="wide-embeddings", about="wide, with an embedding of each pass", embeddings=True),
            replace(WIDE, name="wide-head-bias", about="wide, with a bias of each pass on the keys of one head", head_bias=True),
            replace(WIDE, name="wide-early", about="wide, the loop running from .35 of the steps on", enable_at=EARLY, full=True),
            replace(WIDE, name="wider", about="wide, with one more block in the loop", looped="wider", full=True),
            replace(SHIPPED, name="low-decay", about="shipped, weight decay .05 for .12", decay=0.05, full=True),
            replace(SHIPPED, name="momentum-98", about="shipped, momentum .98 for .95", momentum=0.98),
            replace(SHIPPED, name="momentum-99", about="shipped, momentum .99 for .95", momentum=0.99),
        )
    }
)


def arms_of(full: bool) -> tuple[str, ...]:
    """Return the names of the arms of a study."""
    return tuple(name for name, arm in ARMS.items() if full or not arm.full)
