"""Specs of adapters and routes as data. No torch is needed for them, so that command lines can name them at once.

Those of routes say what is scored, on which policy, over which unit, and what a flag does:

    flag_b   = score_b > tau                 and A_b > 0 if ``reinforced_only``
    weight_b = 0 if flagged, else ``negative_scale`` if the kept advantage is negative, else 1
    kept gradient = sum_b weight_b g_b               g_b: of rollout b's whole loss, a KL term included

``LEGAL`` lists the legal combinations.
"""

from typing import Literal

from mi_route2.validation import AtLeastOne, Fraction, Natural, NonNegative, Positive, validated


@validated
class AdapterSpec:
    """Kind and rank of the adapters at every selected Linear.

    Attributes:
        kept: Kind of the kept adapter.
        rank: Rank of the kept adapter; ``None`` is full rank (SVD only).
        quarantine: Kind of the quarantine.
        quarantine_rank: Rank of a LoRA quarantine.

    Examples:
        >>> spec = AdapterSpec(kept="lora", rank=8, quarantine_rank=8)
    """

    kept: Literal["svd", "lora"] = "svd"
    rank: AtLeastOne | None = None
    quarantine: Literal["lora", "shared", "none"] = "lora"
    quarantine_rank: AtLeastOne = 4

    def __post_init__(self) -> None:
        if self.kept == "lora" and self.rank is None:
            raise ValueError("a LoRA kept adapter needs a rank, for example rank=4")


Score = Literal["none", "act", "grad", "full", "judge", "own_channel", "known_channel"]
Unit = Literal["token", "rollout", "pooled"]
Through = Literal["detach", "filter"]
ScorePolicy = Literal["live", "ablated"]

PRIVILEGED: frozenset[str] = frozenset({"own_channel", "known_channel"})
"""Scores that read a detector over the student's own rollouts: bounds and baselines, never methods."""

_BOTH, _FILTER = frozenset({"filter", "detach"}), frozenset({"filter"})

LEGAL: dict[tuple[str, str, str], frozenset[str]] = {
    ("act", "token", "live"): _BOTH,
    ("act", "pooled", "live"): _BOTH,
    ("act", "pooled", "ablated"): _BOTH,
    ("grad", "rollout", "live"): _BOTH,
    # Detaching a flagged rollout at one module would change the gradients, and so the flag, below it.
    ("grad", "pooled", "live"): _FILTER,
    ("grad", "pooled", "ablated"): _BOTH,
    ("full", "pooled", "live"): _FILTER,
    ("full", "pooled", "ablated"): _BOTH,
    ("judge", "pooled", "live"): _BOTH,
    ("own_channel", "pooled", "live"): _BOTH,
    ("known_channel", "pooled", "live"): _BOTH,
    ("none", "pooled", "live"): _BOTH,
}
"""(score, unit, score_policy) -> what a flag may do."""


@validated
class MaskSpec:
    """Rule of a mask route; see the module's equations.

    Attributes:
        score: Feature whose cosine with a direction is the score (``act``, ``grad``, ``full``), ``judge`` for scores between 0 and
            1 that come with the step, a detector channel, or ``none``.
        unit: Unit of a flag: a real token at each module, a rollout at each module, or a rollout over all modules (``pooled``).
        through: ``filter`` removes flagged gradients from the kept adapter; ``detach`` also stops them from passing through it.
        score_policy: ``live`` scores the training pass, ``ablated`` an extra pass with the quarantine off.
        fitter: Source of the direction.
        draw: Number of the random draw, for a control's direction.
        reinforced_only: Flag only rollouts with a positive advantage.
        tau: Threshold of the score.
        shuffle: Control: the same number of flags on random rollouts.
        refresh_every: Steps between refits of the direction; 0 for never.
        kept_advantage: Advantage of the kept adapter: its ``own``, or relative to the group's ``unflagged`` rollouts.
        negative_scale: Weight of rollouts with a negative kept advantage.

    Raises:
        ValueError: An illegal combination.

    Examples:
        >>> spec = MaskSpec(score="full", score_policy="ablated", negative_scale=0.3)
    """

    score: Score = "grad"
    unit: Unit = "pooled"
    through: Through = "filter"
    score_policy: ScorePolicy = "live"
    fitter: Literal["persona", "haar"] = "persona"
    draw: Natural = 0
    reinforced_only: bool = True
    tau: float = 0.0
    shuffle: bool = False
    refresh_every: Natural = 5
    kept_advantage: Literal["own", "unflagged"] = "own"
    negative_scale: NonNegative = 1.0

    def __post_init__(self) -> None:
        key = (self.score, self.unit, self.score_policy)
        if self.through not in LEGAL.get(key, ()):
            legal = "; ".join(f"{', '.join(each)} with {' or '.join(sorted(allowed))}" for each, allowed in LEGAL.items())
            raise ValueError(f"{', '.join(key)} with {self.through} is no rule: choose score, unit and score_policy among {legal}")
        if self.kept_advantage == "unflagged" and self.decided_at != "begin":
            raise ValueError(
                "kept_advantage='unflagged' needs one flag per rollout before the loss: use unit='pooled' with "
                "score_policy='ablated', or a channel score"
            )
        if self.score == "judge" and not 0 < self.tau < 1:
            raise ValueError(f"a judge's scores lie between 0 and 1, so tau={self.tau} flags all or none: choose tau=0.5, say")
        if self.shuffle and self.unit != "pooled":
            raise ValueError("shuffle=True permutes flags over rollouts: use unit='pooled'")

    @property
    def decided_at(self) -> Literal["begin", "backward", "finish"]:
        """Time when flags are decided: before the loss, at a module's first gradient, or after the whole backward."""
        if self.score_policy == "ablated" or not self.needs_direction:
            return "begin"
        # An activation score is known after the forward; a pooled gradient score needs the whole backward.
        return "backward" if self.score == "act" or self.unit == "rollout" else "finish"

    @property
    def needs_direction(self) -> bool:
        return self.score in ("act", "grad", "full")

    @property
    def privileged(self) -> bool:
        return self.score in PRIVILEGED


@validated
class EraseSpec:
    """Rule that removes the one-sided hack component ``relu(V g) V`` from the kept gradient.

    Attributes:
        k: Number of axes.
        dispose: Drop the component, or add it to the quarantine.
        fitter: ``persona`` takes the axes of the pairs, ``haar`` random orthonormal ones.
        draw: Number of the random draw.
        refresh_every: Steps between refits of the axes; 0 for never.
        privileged: Whether the route may see detector verdicts.
    """

    k: AtLeastOne = 3
    dispose: Literal["drop", "quarantine"] = "drop"
    fitter: Literal["persona", "haar"] = "persona"
    draw: Natural = 0
    refresh_every: Natural = 5
    privileged: bool = False


@validated
class OpenSpec:
    """Spec of no route: every adapter learns from everything."""

    privileged: bool = False


@validated
class CanarySpec:
    """Rule of a canary route; see ``mi_route2.routing.canary`` for the equations.

    Attributes:
        quantile: Share of the base's own samples whose scores lie below the threshold.
        nats: The threshold itself, of the largest mean log-ratio, not standardized; in place of the quantile, which must flag more
            of the base's samples than hack.
        top: Number of a rollout's largest log-ratios that are averaged, because a hack is few tokens; ``None`` for all.
        through: Effect of a flag; see ``MaskSpec``, also for the next three.
        reinforced_only: Flag only rollouts with a positive advantage.
        kept_advantage: Advantage that the kept adapter learns from.
        negative_scale: Weight of rollouts with a negative kept advantage.
        shuffle: Control: the same number of flags on random rollouts.

    Examples:
        >>> spec = CanarySpec(quantile=0.95)
    """

    quantile: Fraction = 0.9
    nats: Positive | None = None
    top: AtLeastOne | None = 3
    through: Through = "filter"
    reinforced_only: bool = True
    kept_advantage: Literal["own", "unflagged"] = "unflagged"
    negative_scale: NonNegative = 0.3
    shuffle: bool = False

    def __post_init__(self) -> None:
        if self.nats is not None and self.quantile != 0.9:
            raise ValueError("a threshold in nats takes the place of the quantile: leave one of them out")

    @property
    def privileged(self) -> bool:
        return False


RouteSpec = MaskSpec | EraseSpec | OpenSpec | CanarySpec
