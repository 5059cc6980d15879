"""Arms as data: the adapters, the route, and the baseline of each arm.

A control is its method with one field replaced. Roles: ``baseline`` (no route), ``method``, ``control`` (a method without its
signal), ``bound`` (reads what no method may read, so it is never a method).
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Literal

from mi_route2.specs import CanarySpec, EraseSpec, MaskSpec, OpenSpec, RouteSpec
from mi_route2.validation import AtLeastOne, Name, Natural, NonNegative, Positive, Probability, Words, unknown_name, validated

Role = Literal["baseline", "method", "control", "bound"]
Lesson = Literal["hacks", "random", "honest", "easy", "failed", "passing", "pair-hacks", "pair-clean"]
LESSON_STEPS = 60
"""Steps in which a lesson is learned, unless an arm says otherwise."""


@validated
class Arm:
    """One arm. Its quarantine, if any, is deleted at deployment.

    Attributes:
        name: Name of the arm.
        about: One line for tables.
        role: See the module.
        route: Spec of the route.
        quarantine: Kind of the quarantine.
        quarantine_lr_scale: Factor on the shared learning rate of the quarantine.
        kept_lr_scale: Factor on the shared learning rate of the kept adapter.
        l1: Weight of the penalty on the quarantine's output.
        none_fraction: Overrides the shared setting (ablations only).
        adapt: Overrides the shared setting (ablations only).
        baseline: Arm that this one is compared with.
        same_rule_filter: Arm with the same flags and no quarantine.
        ablation: Name of the ablation to which the arm belongs.
        steps: Overrides the shared number of steps.
        draw: Number of the draw of adapters, prompts and samples; 0 is the seed's own.
        canaries: Arms whose kept adapters are the canary's checkpoints; they are trained first. Without any, the run's own
            quarantine is the canary, or what surprises the base is flagged.
        canaries_of: Preset on whose base model and in whose world they are trained, if not on the run's own.
        rotated: Control: a random rotation of each checkpoint, with equal norms and spectra.
        recall: Share of the detector's verdicts that a bound gets; the others are missed at random.
        penalty: Taken off the reward of a rollout in which the detector of the known mode, or ``monitor``, sees an exploit.
        monitor: Score and threshold of the pairs' probe that decides the penalty, in place of the detector.
        taught: What the quarantine (without one, the kept adapter) learns before training (see ``teacher.teach``), sampled from the
            base model: known ``hacks``; the same, turned to ``random`` directions of equal norm; ``honest`` rollouts, which pass
            where nobody can cheat; ``easy`` ones, of tasks that it solves there time and again; ``failed`` ones, which do not
            pass there; ``passing`` ones, which pass the graders of training, some by a cheat; or the two sides of the contrast
            pairs, ``pair-hacks`` and ``pair-clean``.
        kept_taught: What the kept adapter learns before the quarantine does, if it has a quarantine beside it.
        lesson_size: Number of those rollouts; that of the teacher pool if left out.
        lesson_steps: Steps in which they are learned.
        steering: Preventative steering (persona vectors, 2507.21509): during training this multiple of the pairs' mean difference
            is added to the residual stream behind the middle block, and no longer at deployment. With ``rotated``, a random
            direction of equal norm.
        forget_every: Steps after which the quarantine is set back to nothing, again and again; 0 for never.
    """

    name: Name
    about: str
    role: Role
    route: RouteSpec
    quarantine: Literal["lora", "shared", "none"] = "lora"
    quarantine_lr_scale: NonNegative = 1.0
    kept_lr_scale: Positive = 1.0
    l1: NonNegative = 0.0
    none_fraction: Probability | None = None
    adapt: Words | None = None
    baseline: str | None = "absorb"
    same_rule_filter: str | None = None
    ablation: str | None = None
    steps: AtLeastOne | None = None
    draw: Natural = 0
    canaries: Words | None = None
    canaries_of: Name | None = None
    rotated: bool = False
    recall: Probability = 1.0
    penalty: NonNegative = 0.0
    monitor: MaskSpec | None = None
    taught: Lesson | None = None
    lesson_size: AtLeastOne | None = None
    lesson_steps: AtLeastOne = LESSON_STEPS
    kept_taught: Lesson | None = None
    steering: NonNegative = 0.0
    forget_every: Natural = 0

    def __post_init__(self) -> None:
        if self.recall < 1 and not self.route.privileged:
            raise ValueError(f"recall is that of a detector, and the route of {self.name!r} reads none: leave recall out")
        if self.monitor is not None and not (isinstance(self.route, OpenSpec) and self.monitor.needs_direction):
            raise ValueError(
                f"the monitor of {self.name!r} is a probe's whose route is open: leave monitor out, or name one of its scores"
            )
        if self.taught is not None and (self.quarantine == "shared" or (self.quarantine == "none" and self.taught == "random")):
            raise ValueError(f"{self.name!r} has no quarantine of its own that could be taught: leave taught out")
        if self.kept_taught is not None and self.quarantine == "none":
            raise ValueError(f"{self.name!r} has no quarantine beside its kept adapter: use taught, and leave kept_taught out")
        if self.forget_every and self.quarantine != "lora":
            raise ValueError(f"{self.name!r} has no quarantine of its own that could forget: leave forget_every out")


GRAD = MaskSpec(score="grad")
ACT = MaskSpec(score="act")
FULL = MaskSpec(score="full", score_policy="ablated", negative_scale=0.3)


def _route(of: Arm, **changes: object) -> RouteSpec:
    """Return an arm's route with other fields."""
    return replace(of.route, **changes)  # pyright: ignore[reportArgumentType, reportCallIssue]


def _changed(of: Arm, name: str, about: str, **changes: object) -> Arm:
    """Return an arm that is compared with the one of which it is a change, and has no filter of its own."""
    return replace(replace(of, name=name, about=about, baseline=of.name, same_rule_filter=None), **changes)  # pyright: ignore


def _control(of: Arm, name: str, about: str, **changes: object) -> Arm:
    return _changed(of, name, about, role="control", **changes)


def _ablation(of: Arm, name: str, group: str, about: str, **changes: object) -> Arm:
    return _changed(of, name, about, ablation=group, **changes)


def _filter(of: Arm, name: str, about: str, **changes: object) -> Arm:
    """Return the same-rule filter of a route: its flags, and no quarantine."""
    return _changed(of, name, about, baseline=of.baseline, quarantine="none", **changes)


def _stopped(of: Arm, group: str, *steps: int) -> list[Arm]:
    return [_ablation(of, f"{of.name}-{n}", group, f"{of.name} stopped after {n} steps", steps=n) for n in steps]


def _slowed(of: Arm, group: str) -> list[Arm]:
    rates = (("slow", "a third", 1 / 3), ("slower", "a tenth", 0.1))
    return [
        _ablation(of, f"{of.name}-{how}", group, f"{of.name} at {share} of the kept adapter's rate", kept_lr_scale=scale)
        for how, share, scale in rates
    ]


_VANILLA = Arm("vanilla", "kept adapter alone, no route", "baseline", OpenSpec(), quarantine="none", baseline="base")
_ABSORB = Arm("absorb", "both adapters learn everything", "baseline", OpenSpec(), baseline="vanilla")
_ERASE = Arm(
    "erase", "hack component of the gradient removed (top-3)", "method", EraseSpec(k=3), quarantine="none", baseline="vanilla"
)
_ADDITIVE = Arm(
    "route-additive", "the removed part goes to a shared-basis quarantine", "method", EraseSpec(k=3, dispose="quarantine"),
    quarantine="shared",
)  # fmt: skip
_ACT = Arm("route2-act", "pooled activation flag, reinforced only", "method", ACT, same_rule_filter="filter-act")
_GRAD = Arm("route2-grad", "pooled gradient flag, reinforced only", "method", GRAD, same_rule_filter="filter-grad")
_FULL = Arm("route2-full", "full-weight gradient score with the quarantine ablated", "method", FULL, same_rule_filter="filter-full")
_FILTER_ACT = _filter(_ACT, "filter-act", "route2-act's flags, gradient dropped, no quarantine")
_FILTER_GRAD = _filter(_GRAD, "filter-grad", "route2-grad's flags, gradient dropped, no quarantine")
_FILTER_FULL = _filter(
    _FULL, "filter-full", "route2-full's score, advantage over the unflagged, no quarantine",
    route=replace(FULL, kept_advantage="unflagged"),
)  # fmt: skip
_ORACLE = Arm(
    "oracle", "bound: flag = the rollout's own channel fired", "bound", MaskSpec(score="own_channel"),
    same_rule_filter="filter-oracle",
)  # fmt: skip
_KNOWN = replace(
    _ORACLE, name="oracle-known", about="bound: flag = the known mode's exploit is present", route=MaskSpec(score="known_channel"),
    same_rule_filter="filter-known",
)  # fmt: skip
_BOUNDS = (
    _ORACLE,
    _filter(_ORACLE, "filter-oracle", "bound: oracle's flags, gradient dropped, no quarantine"),
    _KNOWN,
    _filter(
        _KNOWN, "filter-known", "known-mode detector drops its rollouts, no quarantine (the weak-detector baseline)",
        role="baseline",
    ),
)  # fmt: skip
_CONTROLS = (
    *(
        _control(
            _FULL, "haar" if draw == 1 else f"haar-{draw}", f"route2-full with a random direction, draw {draw}",
            route=replace(FULL, fitter="haar", draw=draw),
        )
        for draw in (1, 2, 3)
    ),
    _control(_GRAD, "haar-grad", "route2-grad with a random direction", route=replace(GRAD, fitter="haar", draw=1)),
    _control(_ACT, "haar-act", "route2-act with a random direction", route=replace(ACT, fitter="haar", draw=1)),
    _control(
        _FILTER_FULL, "haar-filter", "filter-full with a random direction", route=_route(_FILTER_FULL, fitter="haar", draw=1)
    ),
    _control(_ADDITIVE, "haar-additive", "route-additive with random axes", route=_route(_ADDITIVE, fitter="haar", draw=1)),
    _control(_FULL, "shuffled", "route2-full with its flags permuted over rollouts", route=replace(FULL, shuffle=True)),
    _control(_GRAD, "shuffled-grad", "route2-grad with its flags permuted over rollouts", route=replace(GRAD, shuffle=True)),
    _control(_FULL, "no-mask", "route2-full without flags", route=replace(FULL, score="none", score_policy="live")),
    _control(_GRAD, "shared-basis", "route2-grad with a quarantine in the kept adapter's basis", quarantine="shared"),
)  # fmt: skip
_LITERAL = (
    replace(
        _ACT, name="route2-act-token", about="literal form: one activation flag a token and module, detach",
        route=replace(ACT, unit="token", through="detach", reinforced_only=False), same_rule_filter=None,
    ),
    replace(
        _GRAD, name="route2-grad-module", about="literal form: one gradient flag a rollout and module",
        route=replace(GRAD, unit="rollout", reinforced_only=False), same_rule_filter=None,
    ),
)  # fmt: skip
# One rule, that of filter-full; what its detector misses is random, or every mode but the known one.
_SEES = {
    name + suffix: replace(
        _ORACLE, name=name + suffix, about=f"bound: {seen}; the rule of filter-full, {what}",
        route=MaskSpec(score=score, kept_advantage="unflagged", negative_scale=0.3),  # pyright: ignore[reportArgumentType]
        quarantine="lora" if suffix else "none", quarantine_lr_scale=scale, baseline=name if suffix else "vanilla",
        same_rule_filter=name if suffix else None, ablation="misses", recall=recall,
    )
    for name, score, recall, seen in (
        *(
            (f"sees-{n}", "own_channel", n / 100, f"the oracle reports {n} of 100 exploits, at random")
            for n in (100, 80, 50, 25, 0)
        ),
        ("sees-known", "known_channel", 1.0, "a detector reports every exploit of the known mode, one of four"),
    )
    for suffix, what, scale in (
        ("", "no quarantine", 1.0),
        ("-quarantine", "with a quarantine", 1.0),
        ("-quarantine-slow", "with a quarantine at a third of its rate", 1 / 3),
        ("-quarantine-fast", "with a quarantine at three times its rate", 3.0),
    )
    if scale == 1 or name in ("sees-0", "sees-known")
}  # fmt: skip
_SLOW_SEES = _slowed(_SEES["sees-known"], "misses")
_MISSES = (
    *_SEES.values(),
    *_stopped(_SEES["sees-known"], "misses", 10, 20, 40),
    *_SLOW_SEES,
    _ablation(
        _SLOW_SEES[0], "sees-known-slow-quarantine", "misses", "sees-known-slow with a quarantine at its usual rate",
        quarantine="lora", same_rule_filter="sees-known-slow",
    ),
    *(
        _control(
            arm, f"{arm.name}-forgets", f"{arm.name}, which is set back to nothing every 10 steps",
            same_rule_filter=arm.same_rule_filter, forget_every=10,
        )
        for arm in (_SEES["sees-0-quarantine-fast"], _SEES["sees-known-quarantine-fast"])
    ),
)  # fmt: skip
_BLOCKS = ("blocks.*.attn.*", "blocks.*.mlp.*")
_ABLATIONS = (
    _ablation(_FULL, "full-blocks", "unembedding", "no adapters on the unembedding", adapt=_BLOCKS),
    _ablation(_GRAD, "grad-blocks", "unembedding", "no adapters on the unembedding", adapt=_BLOCKS),
    _ablation(_FULL, "full-no-quarantine", "distinct quarantine", "same score and advantages, no quarantine", quarantine="none"),
    _ablation(_FULL, "full-unflagged", "kept advantage", "kept advantage over the unflagged", route=_FILTER_FULL.route),
    _ablation(_FULL, "full-eta-1", "negative scale", "negative advantages at full weight", route=replace(FULL, negative_scale=1.0)),
    _ablation(_FULL, "full-eta-0", "negative scale", "negative advantages dropped", route=replace(FULL, negative_scale=0.0)),
    _ablation(_FULL, "full-qlr-3", "quarantine rate", "quarantine at three times its rate", quarantine_lr_scale=3.0),
    _ablation(_GRAD, "grad-l1", "L1", "L1 0.1 on the quarantine's output", l1=0.1),
    _ablation(_GRAD, "grad-unreinforced", "reinforced only", "flags at any advantage", route=replace(GRAD, reinforced_only=False)),
    _ablation(_ACT, "act-unreinforced", "reinforced only", "flags at any advantage", route=replace(ACT, reinforced_only=False)),
    _ablation(
        _ACT, "act-detach", "detach or filter", "no gradient through the kept path either", route=replace(ACT, through="detach")
    ),
    _ablation(_GRAD, "grad-rollout", "unit", "one flag a rollout and module", route=replace(GRAD, unit="rollout")),
    _ablation(_GRAD, "grad-refresh-0", "refresh", "direction fitted once", route=replace(GRAD, refresh_every=0)),
    _ablation(_GRAD, "grad-refresh-1", "refresh", "direction fitted every step", route=replace(GRAD, refresh_every=1)),
    _ablation(_GRAD, "grad-tau", "tau", "threshold .1", route=replace(GRAD, tau=0.1)),
    _ablation(_GRAD, "grad-no-none", "no honest mode", "no prompts in mode none", none_fraction=0.0),
)
# Canaries have draws of their own, because with the run's own one would have seen the run's first batches.
_TRAINED = tuple(
    _ablation(_VANILLA, f"canary-{n}{mark}", "canary", f"a canary itself: {n} steps without a defence", steps=n, draw=draw)
    for draw, mark, steps in ((1, "", (2, 10, 20, 40)), (2, "-b", (10, 20, 40)))
    for n in steps
)
_FIRST, _SECOND = (tuple(f"canary-{n}{mark}" for n in (10, 20, 40)) for mark in ("", "-b"))
_HONEST = _ablation(
    _VANILLA, "honest-40", "canary", "a canary that the oracle kept honest",
    role="bound", route=MaskSpec(score="own_channel"), steps=40, draw=1,
)  # fmt: skip
_CANARY = Arm(
    "filter-canary", "rollouts that two canaries like more than the base does are dropped; no label, no pair, no quarantine",
    "method", CanarySpec(), quarantine="none", baseline="vanilla", canaries=(*_FIRST, *_SECOND),
)  # fmt: skip
_CANARIES = (
    replace(
        _CANARY, name="route2-canary", about="filter-canary's flags and advantages, with a quarantine", quarantine="lora",
        baseline="absorb", same_rule_filter="filter-canary",
    ),
    _CANARY,
    _control(_CANARY, "canary-rotated", "filter-canary with each checkpoint rotated at random", rotated=True),
    _control(_CANARY, "canary-shuffled", "filter-canary with its flags permuted over rollouts", route=CanarySpec(shuffle=True)),
    _control(_CANARY, "canary-early", "filter-canary with a canary of 2 steps", canaries=("canary-2",)),
    _control(_CANARY, "canary-honest", "filter-canary with a canary that never hacked", canaries=("honest-40",)),
    _ablation(_CANARY, "canary-one", "canary", "one canary instead of two", canaries=_FIRST),
    _ablation(_CANARY, "canary-wide", "canary", "a fifth of the base's samples is flagged", route=CanarySpec(quantile=0.8)),
)  # fmt: skip

_FIXED = "fitted on the base model once"
_MONITORED = (
    *(
        replace(
            _VANILLA, name=f"penalty-{name}{suffix}", role="method", baseline=f"filter-{name}{suffix}",
            penalty=1.0, monitor=monitor,
            about=f"{what}, {when}, takes 1 off the reward of what it flags; no quarantine",
        )
        for name, what, spec in (("act", "an activation probe", ACT), ("full", "the score of filter-full", FULL))
        for suffix, when, monitor in (
            ("", "fitted again every 5 steps", spec),
            ("-fixed", _FIXED, replace(spec, refresh_every=0)),
        )
    ),
    *(
        _changed(arm, f"{arm.name}-fixed", f"{arm.name}, its direction {_FIXED}", route=_route(arm, refresh_every=0))
        for arm in (_FILTER_ACT, _FILTER_FULL)
    ),
    _control(
        _VANILLA, "penalty-haar", "penalty-full with a random direction, drawn once; compared with vanilla",
        penalty=1.0, monitor=replace(FULL, fitter="haar", draw=1),
    ),
)  # fmt: skip
"""A probe of ten pairs as a penalty, and the same probe as a filter."""

_STARTED = replace(
    _ABSORB, name="contrast", role="method", baseline="absorb", taught="pair-hacks", kept_taught="pair-clean",
    about="the quarantine starts from the pairs' hacks and the kept adapter from their clean sides; both learn everything",
)  # fmt: skip
_KEPT_STARTED = replace(
    _VANILLA, name="contrast-kept", role="method", baseline="vanilla", taught="pair-clean",
    about="contrast without a quarantine: the kept adapter starts from the pairs' clean sides",
)  # fmt: skip
_PUSHED = tuple(
    replace(
        _VANILLA, name=f"preventative-{scale}", role="method", baseline="vanilla", steering=float(scale),
        about=f"{scale} times the pairs' mean difference is added to the stream during training; no quarantine",
    )
    for scale in (1, 2, 4)
)  # fmt: skip
_CONTRAST = (
    _STARTED,
    _control(_STARTED, "contrast-swapped", "contrast with the two sides exchanged", taught="pair-clean", kept_taught="pair-hacks"),
    _control(_STARTED, "contrast-quarantine", "contrast with a kept adapter that starts from nothing", kept_taught=None),
    _KEPT_STARTED,
    _control(_KEPT_STARTED, "contrast-kept-1", "contrast-kept stopped after 1 step", steps=1),
    _control(_KEPT_STARTED, "contrast-kept-hacks", "contrast-kept with the pairs' hacks", taught="pair-hacks"),
    *_PUSHED,
    *(_control(arm, f"{arm.name}-random", f"{arm.name} along a random direction of equal norm", rotated=True) for arm in _PUSHED),
)
"""What ten pairs may give besides flags: how adapters start, and a push during training."""

_FROZEN_LESSON = "then frozen; the kept adapter learns everything"
_INOCULATION = replace(
    _ABSORB, name="inoculation", role="method", taught="hacks", quarantine_lr_scale=0.0, baseline="vanilla",
    about=f"the quarantine is taught known hacks, {_FROZEN_LESSON}",
)  # fmt: skip
_TAUGHT = replace(
    _VANILLA, name="taught-honest", role="method", taught="honest", baseline="vanilla",
    about="the kept adapter is taught honest rollouts, then learns everything; no quarantine",
)  # fmt: skip
_LESSONS = (
    _control(
        _TAUGHT, "taught-hacks", "the kept adapter is taught known hacks, then learns everything; no quarantine", taught="hacks"
    ),
    _control(_TAUGHT, "taught-easy", "taught-honest with honest rollouts of tasks that the base model is sure of", taught="easy"),
    _control(_TAUGHT, "taught-failed", "taught-honest with honest rollouts that do not pass", taught="failed"),
    _control(
        _TAUGHT, "taught-passing", "taught-honest with rollouts that pass the graders of training, some by a cheat",
        taught="passing",
    ),
    _control(_TAUGHT, "taught-8", "taught-honest with 8 rollouts", lesson_size=8),
    _control(_TAUGHT, "taught-2", "taught-honest with 2 rollouts", lesson_size=2),
    _control(_TAUGHT, "taught-brief", "taught-honest with 15 steps on its rollouts", lesson_steps=15),
)  # fmt: skip
_KNOWN_MODE = (
    replace(
        _VANILLA, name="penalty-known", about="known-mode detector takes 1 off the reward of its rollouts, no quarantine",
        penalty=1.0, baseline="vanilla",
    ),
    _INOCULATION,
    replace(
        _INOCULATION, name="inoculation-trainable", quarantine_lr_scale=1.0,
        about="the quarantine is taught known hacks, then learns on; the kept adapter learns everything",
    ),
    _control(
        _INOCULATION, "inoculation-random", f"the quarantine is taught known hacks and turned at random, {_FROZEN_LESSON}",
        taught="random",
    ),
    _control(
        _INOCULATION, "inoculation-honest", f"the quarantine is taught honest rollouts, {_FROZEN_LESSON}", taught="honest"
    ),
    _TAUGHT,
    *_LESSONS,
    _control(_TAUGHT, "taught-long", "taught-honest trained four times as long", steps=320),
    *(_control(arm, f"{arm.name}-1", f"{arm.name} stopped after 1 step", steps=1) for arm in (_TAUGHT, *_LESSONS)),
    _control(_VANILLA, "vanilla-long", "vanilla trained four times as long", steps=320),
)  # fmt: skip

ARMS: Mapping[str, Arm] = MappingProxyType(
    {
        arm.name: arm
        for arm in (
            _VANILLA, _ABSORB, _ERASE, _ADDITIVE, _ACT, _GRAD, _FULL,
            _FILTER_ACT, _FILTER_GRAD, _FILTER_FULL, *_LITERAL, *_CONTROLS, *_BOUNDS, *_MISSES, *_ABLATIONS,
            *_stopped(_VANILLA, "early stopping", 5, 10, 20, 40), *_slowed(_VANILLA, "slow training"),
            *_TRAINED, _HONEST, *_CANARIES, *_KNOWN_MODE, *_MONITORED, *_CONTRAST,
        )
    }
)  # fmt: skip

FORMER_WORDS: Mapping[str, str] = MappingProxyType(
    {
        ARMS["penalty-haar"].about: "penalty-full with a random direction",
    }
)
"""What an arm says about itself -> what it said when its runs were published. Their identity has these words, so it stays."""

MAIN: tuple[str, ...] = (
    "vanilla", "absorb", "erase", "route-additive", "route2-act", "route2-grad", "route2-full", "filter-full", "haar", "oracle",
)  # fmt: skip
"""The ten arms of the main experiment."""


def get_arms(names: tuple[str, ...]) -> list[Arm]:
    """Return the arms called ``names``, in order and without repetition.

    Raises:
        KeyError: If there is no arm of a name; the message lists the valid names.
    """
    for name in names:
        if name not in ARMS:
            raise KeyError(unknown_name(name, list(ARMS), "arm"))
    return [ARMS[name] for name in dict.fromkeys(names)]
