"""Attacks as data: code, evidence of success, and the protections that stop each attack.

The .toml files beside this module hold the attacks, one file per class. The control run of an attack leaves off everything in its
``stopped_by``; the protected run leaves off nothing.
"""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from studies.sandbox import PROTECTIONS

HERE = Path(__file__).parent
CLASSES = ("forgery", "resources", "filesystem", "processes", "kernel")
NEEDS = ("victim", "tcp", "udp", "unix", "abstract")
"""Canaries that are made only for attacks that need them."""
NAIVE = "naive_"
OF_A_VERDICT = ("passed", "denied", "residue")
"""Kinds of evidence whose control run needs a naive verdict."""


@dataclass(frozen=True, eq=False)
class Attack:
    """One attack on the jail.

    Attributes:
        name: Name, unique within the class.
        group: Class, one of `CLASSES`.
        kind: Family within the class.
        title: Description in one sentence.
        code: Python code of the attack.
        stopped_by: Names from `PROTECTIONS`, and at most one of a naive verdict.
        evidence: Kind of evidence that shows success, a name in `evidence.EVIDENCE`.
        answer: Kind of the expected answers if the evidence is "passed".
        limits: Fields of `JailLimits` that replace the suite's own.
        needs: Canaries from `NEEDS`.
    """

    name: str
    group: str
    kind: str
    title: str
    code: str
    stopped_by: tuple[str, ...]
    evidence: str = "passed"
    answer: str = "int"
    limits: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    needs: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        return f"{self.group}/{self.name}"

    @property
    def naive(self) -> str | None:
        """Name of the naive verdict that the control run uses, or None."""
        return next((name for name in self.stopped_by if name.startswith(NAIVE)), None)

    @property
    def protections(self) -> frozenset[str]:
        """Protections that the control run leaves off."""
        return frozenset(self.stopped_by) - {self.naive}


def read(group: str, table: Mapping[str, Mapping[str, Any]], verdicts: Iterable[str], kinds: Iterable[str]) -> tuple[Attack, ...]:
    """Return the attacks of one class.

    Raises:
        ValueError: A name is unknown; the message names the attack.
    """
    verdicts, kinds = tuple(verdicts), tuple(kinds)
    known = {each.name for each in fields(Attack)} - {"name", "group"}
    attacks = []
    for name, entry in table.items():
        where = f"attack {group}/{name}"
        _check(where, "field", entry, known)
        _check(where, "protection or naive verdict", entry.get("stopped_by", ()), (*PROTECTIONS, *verdicts))
        _check(where, "canary", entry.get("needs", ()), NEEDS)
        _check(where, "evidence", (entry.get("evidence", "passed"),), kinds)
        attack = Attack(
            name=name,
            group=group,
            **{**entry, "stopped_by": tuple(entry["stopped_by"]), "needs": tuple(entry.get("needs", ()))},
        )
        if (attack.naive is None) == (attack.evidence in OF_A_VERDICT):
            raise ValueError(f"{where}: a naive verdict goes with the evidence {', '.join(OF_A_VERDICT)}, and with no other")
        attacks.append(attack)
    return tuple(attacks)


def _check(where: str, what: str, given: Iterable[str], known: Iterable[str]) -> None:
    for name in given:
        if name not in known:
            raise ValueError(f"{where}: unknown {what} {name!r}; choose from {', '.join(sorted(known))}")


def load(path: Path) -> dict[str, Any]:
    """Read the tables of a .toml file."""
    return tomllib.loads(path.read_text(encoding="utf-8"))
