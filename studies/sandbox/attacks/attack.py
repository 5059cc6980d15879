"""Attacks as data: what each one does, by what its success is judged, and what stops it.

The texts are in the .toml files beside this module, one a class. A control run of an attack leaves off everything in its
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
"""Canaries that are made only for the attacks that ask for them."""
NAIVE = "naive_"
OF_A_VERDICT = ("passed", "denied", "residue")
"""Evidence whose control run needs a naive verdict."""


@dataclass(frozen=True, eq=False)
class Attack:
    """One attack.

    name        unique within all classes together with `group`
    group       its class, one of `CLASSES`
    kind        its family within the class
    title       what it does, in one sentence
    code        its text
    stopped_by  names out of `PROTECTIONS`, and at most one of a naive verdict
    evidence    how success is judged: a name out of `evidence.EVIDENCE`
    answer      of what kind the expected answers are where the evidence is "passed"
    limits      fields of `Limits` in place of the suite's own
    needs       out of `NEEDS`
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
        """The naive verdict that its control run believes."""
        return next((name for name in self.stopped_by if name.startswith(NAIVE)), None)

    @property
    def protections(self) -> frozenset[str]:
        """What its control run leaves off."""
        return frozenset(self.stopped_by) - {self.naive}


def read(group: str, table: Mapping[str, Mapping[str, Any]], verdicts: Iterable[str], kinds: Iterable[str]) -> tuple[Attack, ...]:
    """The attacks of one class. Raises ValueError, naming the attack, for a name that there is not."""
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
            raise ValueError(f"{where}: {name!r} is no {what}; choose out of {', '.join(sorted(known))}")


def load(path: Path) -> dict[str, Any]:
    """A .toml file's tables."""
    return tomllib.loads(path.read_text(encoding="utf-8"))
