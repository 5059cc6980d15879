"""Evidence of an attack's success: one test per kind."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from studies.sandbox import JailLimits, JailOutcome
from tests.attacks.attack import Attack
from tests.attacks.canary import Canary
from tests.attacks.naive import Naive, is_plain, strict

DEPTH = 64
"""Maximum levels of nesting of a reply."""


@dataclass(frozen=True)
class Scene:
    """Everything that can be inspected after a run.

    Attributes:
        attack: The attack.
        canary: Its canaries.
        limits: Limits of the job.
        outcome: Outcome of the job.
        expected: Correct answers, which only the strict verdict knows.
        naive: Naive verdict of a control run; None in the protected run, which uses the strict verdict.
        neighbours: Whether all honest jobs after this one were answered.
    """

    attack: Attack
    canary: Canary
    limits: JailLimits
    outcome: JailOutcome
    expected: Sequence[Any]
    naive: Naive | None
    neighbours: bool = True


def _passed(scene: Scene) -> bool:
    return scene.naive.accepts(scene.outcome) if scene.naive else strict(scene.outcome.reply, scene.expected)


def _denied(scene: Scene) -> bool:
    return scene.naive.accepts(scene.outcome) if scene.naive else not scene.neighbours


def _carried(scene: Scene) -> bytes:
    outcome = scene.outcome
    return b"\n".join((json.dumps(outcome.reply).encode(), outcome.stdout, outcome.stderr, *outcome.files.values()))


EVIDENCE: Mapping[str, Callable[[Scene], bool]] = MappingProxyType(
    {
        "passed": _passed,
        "denied": _denied,
        "done": lambda scene: scene.outcome.reply == "done",
        "outlives": lambda scene: scene.outcome.seconds > scene.limits.seconds + 1.2,
        "token": lambda scene: scene.canary.token.encode() in _carried(scene),
        "residue": lambda scene: scene.canary.token in json.dumps(scene.outcome.reply),
        "said": lambda scene: scene.canary.mark.encode() in scene.outcome.stdout,
        "poison": lambda scene: scene.outcome.status == "replied" and not is_plain(scene.outcome.reply, DEPTH, scene.limits.reply),
        "changed": lambda scene: scene.canary.changed(),
        "appeared": lambda scene: bool(scene.canary.appeared()),
        "heard": lambda scene: scene.canary.heard(),
        "hurt": lambda scene: scene.canary.hurt(),
        "survives": lambda scene: bool(scene.canary.survivors()),
        "lasting": lambda scene: bool(scene.canary.lasting()),
    }
)
"""``{kind: function that returns whether the attack has succeeded}``.

passed    the run's verdict accepted a wrong answer
denied    honest jobs beside the attack were not answered
done      the attack's code ran to its end and replied so, without any other effect outside
outlives  the job existed more than a second after its time limit
token     the secret is in the outcome
residue   the secret of an earlier job is in the reply
said      the mark is in stdout, where only a program that the attack started writes it
poison    a reply was accepted that has infinite numbers, broken characters, too many levels or too many bytes
changed, appeared, heard, hurt, survives, lasting   see the methods of `Canary`
"""
