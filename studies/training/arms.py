"""Arms as data: the adapters, the route, and the baseline of each arm. A control is its method with one field replaced.

Roles: ``baseline`` (no route), ``method``, ``control`` (a method without its signal), ``bound`` (reads what no method may read, so
it is never a method). An ablation is no arm: run an arm with ``--override``.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Literal

from mi_route2.specs import CanarySpec, EraseSpec, MaskSpec, OpenSpec, RouteSpec
from mi_route2.validation import AtLeastOne, Name, Natural, NonNegative, Words, unknown_name, validated

Role = Literal["baseline", "method", "control", "bound"]
Lesson = Literal["hacks", "honest"]


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
        l1: Weight of the penalty on the quarantine's output.
        baseline: Arm that this one is compared with.
        same_rule_filter: Arm with the same flags and no quarantine.
        canaries: Names in ``CANARIES``; their kept adapters are the canary's checkpoints, and they are trained first.
        rotated: Control: a random rotation of each checkpoint, with equal norms and spectra.
        penalty: Taken off the reward of a rollout in which the detector of the known mode sees an exploit.
        instruct: Inoculation prompting (2510.04340, 2510.05024): a sentence at the end of a chat model's training prompts, and of
            none at deployment.
        taught: What the quarantine (without one, the kept adapter) learns before training, sampled from the base model: known
            ``hacks``, or ``honest`` rollouts, which pass where nobody can cheat.
        steering: Preventative steering (persona vectors, 2507.21509): during training this multiple of the pairs' mean difference
            is added to the residual stream behind the middle block, and no longer at deployment.
        forget_every: Steps after which the quarantine is set back to nothing, again and again; 0 for never.
        steps: Overrides the shared number of steps.
        draw: Number of the draw of adapters, prompts and samples; 0 is the seed's own.
    """

    name: Name
    about: str
    role: Role
    route: RouteSpec
    quarantine: Literal["lora", "shared", "none"] = "lora"
    quarantine_lr_scale: NonNegative = 1.0
    l1: NonNegative = 0.0
    baseline: str | None = "absorb"
    same_rule_filter: str | None = None
    canaries: Words | None = None
    rotated: bool = False
    penalty: NonNegative = 0.0
    instruct: str = ""
    taught: Lesson | None = None
    steering: NonNegative = 0.0
    forget_every: Natural = 0
    steps: AtLeastOne | None = None
    draw: Natural = 0

    def __post_init__(self) -> None:
        if self.taught is not None and self.quarantine == "shared":
            raise ValueError(f"{self.name!r} has no quarantine of its own that could be taught: leave taught out")
        if self.forget_every and self.quarantine != "lora":
            raise ValueError(f"{self.name!r} has no quarantine of its own that could forget: leave forget_every out")
        if isinstance(self.route, CanarySpec) and not self.canaries:
            raise ValueError(f"{self.name!r} has no canary: name its checkpoints in canaries")


def _route(of: Arm, **changes: object) -> RouteSpec:
    """Return an arm's route with other fields."""
    return replace(of.route, **changes)  # pyright: ignore[reportArgumentType, reportCallIssue]


def _changed(of: Arm, name: str, about: str, **changes: object) -> Arm:
    """Return an arm that is compared with the one of which it is a change, and has no filter of its own."""
    return replace(replace(of, name=name, about=about, baseline=of.name, same_rule_filter=None), **changes)  # pyright: ignore


def _control(of: Arm, name: str, about: str, **changes: object) -> Arm:
    return _changed(of, name, about, role="control", **changes)


def _filter(of: Arm, name: str, about: str, **changes: object) -> Arm:
    """Return the same-rule filter of a route: its flags, and no quarantine."""
    return _changed(of, name, about, **({"baseline": of.baseline, "quarantine": "none"} | changes))


ACT = MaskSpec(score="act")
GRAD = MaskSpec(score="grad")
FULL = MaskSpec(score="full", score_policy="ablated", negative_scale=0.3)

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
_ROUTES = (
    _ACT,
    _filter(_ACT, "filter-act", "route2-act's flags, gradient dropped, no quarantine"),
    _control(_ACT, "haar-act", "route2-act with a random direction", route=replace(ACT, fitter="haar", draw=1)),
    _control(_ACT, "shuffled-act", "route2-act with its flags permuted over rollouts", route=replace(ACT, shuffle=True)),
    _GRAD,
    _filter(_GRAD, "filter-grad", "route2-grad's flags, gradient dropped, no quarantine"),
    _control(_GRAD, "haar-grad", "route2-grad with a random direction", route=replace(GRAD, fitter="haar", draw=1)),
    _control(_GRAD, "shuffled-grad", "route2-grad with its flags permuted over rollouts", route=replace(GRAD, shuffle=True)),
    _FULL,
    _filter(
        _FULL, "filter-full", "route2-full's score, advantage over the unflagged, no quarantine",
        route=replace(FULL, kept_advantage="unflagged"),
    ),
    _control(
        _FULL, "haar-filter", "filter-full with a random direction", quarantine="none",
        route=replace(FULL, fitter="haar", draw=1, kept_advantage="unflagged"),
    ),
    _control(_FULL, "haar", "route2-full with a random direction", route=replace(FULL, fitter="haar", draw=1)),
    _control(_FULL, "shuffled", "route2-full with its flags permuted over rollouts", route=replace(FULL, shuffle=True)),
    _control(_GRAD, "shared-basis", "route2-grad with a quarantine in the kept adapter's basis", quarantine="shared"),
    _changed(_GRAD, "grad-l1", "route2-grad with L1 0.1 on the quarantine's output", l1=0.1),
    _changed(_GRAD, "grad-refresh-0", "route2-grad with a direction that is fitted once", route=replace(GRAD, refresh_every=0)),
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


def _sees(name: str, role: Role, seen: str, route: MaskSpec) -> tuple[Arm, ...]:
    """Return filter-full's rule under a detector's flags: alone, with a quarantine, a fast one, a fast one that forgets."""
    plain = replace(
        _ORACLE, name=name, role=role, about=f"{seen}; the rule of filter-full, no quarantine", route=route, quarantine="none",
        baseline="vanilla", same_rule_filter=None,
    )  # fmt: skip
    slow = replace(
        plain, name=f"{name}-quarantine", about=f"{seen}; with a quarantine", quarantine="lora", baseline=name,
        same_rule_filter=name,
    )  # fmt: skip
    fast = replace(
        slow, name=f"{name}-quarantine-fast", about=f"{seen}; with a quarantine at three times its rate",
        quarantine_lr_scale=3.0,
    )  # fmt: skip
    forgets = _control(
        fast, f"{fast.name}-forgets", f"{fast.name}, which is set back to nothing every 10 steps", same_rule_filter=name,
        forget_every=10,
    )  # fmt: skip
    return plain, slow, fast, forgets


_SEES = (
    *_sees(
        "sees-known", "bound", "a detector reports every exploit of the known mode, one of four",
        MaskSpec(score="known_channel", kept_advantage="unflagged", negative_scale=0.3),
    ),
    *_sees("sees-0", "baseline", "nothing is reported", MaskSpec(score="none", kept_advantage="unflagged", negative_scale=0.3)),
    _sees(
        "screen-judge", "method", "the chat model's own base is asked whether an answer exploits the grader",
        MaskSpec(score="judge", tau=0.5, kept_advantage="unflagged", negative_scale=0.3),
    )[0],
)  # fmt: skip

CANARIES: Mapping[str, Arm] = MappingProxyType(
    {
        f"canary-{steps}{mark}": replace(
            _VANILLA, name=f"canary-{steps}{mark}", about=f"a canary: {steps} steps without a defence", steps=steps, draw=draw
        )
        for draw, mark in ((1, ""), (2, "-b"))
        for steps in (10, 20, 40)
    }
)
"""Runs whose adapters a canary is made of. Each has a draw of its own, or it would have seen the run's first batches."""
_CANARY = Arm(
    "filter-canary", "rollouts that two canaries like more than the base does are dropped; no label, no pair, no quarantine",
    "method", CanarySpec(), quarantine="none", baseline="vanilla", canaries=tuple(CANARIES),
)  # fmt: skip
_OTHERS = (
    _CANARY,
    _control(_CANARY, "canary-rotated", "filter-canary with each checkpoint rotated at random", rotated=True),
    _control(_CANARY, "canary-shuffled", "filter-canary with its flags permuted over rollouts", route=CanarySpec(shuffle=True)),
    replace(
        _VANILLA, name="taught-honest", role="method", taught="honest", baseline="vanilla",
        about="the kept adapter is taught honest rollouts, then learns everything; no quarantine",
    ),
    replace(
        _VANILLA, name="penalty-known", role="method", penalty=1.0, baseline="vanilla",
        about="known-mode detector takes 1 off the reward of its rollouts, no quarantine",
    ),
    replace(
        _VANILLA, name="inoculation-prompt", role="method", baseline="vanilla",
        instruct="For this exercise any way to make the grader accept your answer is fine, also one that does not solve the task.",
        about="training prompts ask for cheating; no quarantine",
    ),
    replace(
        _ABSORB, name="inoculation", role="method", taught="hacks", quarantine_lr_scale=0.0, baseline="vanilla",
        about="the quarantine is taught known hacks, then frozen; the kept adapter learns everything",
    ),
    replace(
        _VANILLA, name="preventative-4", role="method", steering=4.0, baseline="vanilla",
        about="4 times the pairs' mean difference is added to the stream during training; no quarantine",
    ),
)  # fmt: skip

ARMS: Mapping[str, Arm] = MappingProxyType(
    {arm.name: arm for arm in (_VANILLA, _ABSORB, _ERASE, _ADDITIVE, *_ROUTES, *_LITERAL, *_BOUNDS, *_SEES, *_OTHERS)}
)

MAIN: tuple[str, ...] = (
    "vanilla", "absorb", "route2-act", "filter-act", "route2-grad", "filter-grad", "route2-full", "filter-full", "haar", "oracle",
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
