"""Run ``python -m tests.attacks [--only NAME] [--class C] [--layers] [--out FILE]`` to attack the jail.

Each attack runs twice: without the protections that should stop it, and with all protections. The exit code is 1 if an attack was
not stopped, and 2 if none can run.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from studies.sandbox import JailUnavailableError
from tests.attacks.attack import CLASSES, Attack
from tests.attacks.report import markdown, summary, write
from tests.attacks.suite import Suite, attacks


@dataclass(frozen=True)
class Command:
    """Run the attacks on the jail: first without the protections that should stop them, then with all protections."""

    only: str | None = None
    """run only the attack of this name"""
    group: Annotated[str | None, tyro.conf.arg(name="class")] = None
    """run only the attacks of this class"""
    layers: bool = False
    """also find which single layers stop each attack"""
    out: Path | None = None
    """a .md or .json file for the result; in a page with the lines `report.BEGIN` and `report.END` only the part between changes"""
    workers: int = 2
    """jobs at a time"""

    def __call__(self) -> int:
        try:
            chosen = self._chosen()
            if self.out is not None and (self.out.suffix not in (".md", ".json") or not self.out.parent.is_dir()):
                raise ValueError(f"{self.out} cannot be written: choose a .md or .json file in an existing folder")
            with Suite(workers=self.workers) as suite:
                findings = suite.findings(chosen, layers=self.layers, progress=True)
        except (ValueError, JailUnavailableError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        if self.out is None:
            print(markdown(findings))
        else:
            write(self.out, findings)
            print(summary(findings))
        return int(any(finding.breach for finding in findings))

    def _chosen(self) -> tuple[Attack, ...]:
        if self.group not in (None, *CLASSES):
            raise ValueError(f"there is no class {self.group!r}: choose among {', '.join(CLASSES)}")
        of_class = [attack for attack in attacks() if self.group in (None, attack.group)]
        chosen = tuple(attack for attack in of_class if self.only in (None, attack.name))
        if not chosen:
            raise ValueError(f"there is no attack {self.only!r} here: choose among {', '.join(each.name for each in of_class)}")
        return chosen


if __name__ == "__main__":
    sys.exit(tyro.cli(Command, prog="python -m tests.attacks")())
