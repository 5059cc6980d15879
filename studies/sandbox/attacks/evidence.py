"""By what an attack's success is judged: a small table of kinds."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from studies.sandbox import Limits, Outcome
from studies.sandbox.attacks.attack import Attack
from studies.sandbox.attacks.canary import Canary
from studies.sandbox.attacks.naive import Naive, is_plain, strict

DEPTH = 64
"""Levels of nesting that a reply may have."""


@dataclass(frozen=True)
class Scene:
    """Everything that can be looked at after a run.

    naive       the naive verdict that a control run believes; None in the protected run, where the verdict is strict
    expected    the answers that would be right; the strict verdict's alone
    neighbours  what became of the honest jobs after this one
    """

    attack: Attack
    canary: Canary
    limits: Limits
    outcome: Outcome
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
"""Kind -> whether the attack has succeeded.

passed    a wrong answer was taken for right, by the run's verdict
denied    honest jobs beside it were not answered
done      the attack's text came to its end and said so, with nothing else to see outside
outlives  the job was there more than a second after its time limit
token     the secret is in what came back
residue   the secret of an earlier job is in the reply
said      the mark is in stdout, where only a program that the attack started writes it
poison    the reply was accepted and is not finite, whole, flat and short
changed, appeared, heard, hurt, survives, lasting   what `Canary` sees
"""
