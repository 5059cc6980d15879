"""``python -m studies.sandbox.attacks [--only NAME] [--class C] [--layers] [--out FILE]``: run the attacks, say what stopped them.

Each runs twice: with what should stop it left off, and as deployed. Exit code 1 where one was not stopped, 2 where none can run.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from studies.sandbox import JailUnavailableError
from studies.sandbox.attacks.attack import CLASSES, Attack
from studies.sandbox.attacks.report import markdown, summary, write
from studies.sandbox.attacks.suite import Suite, attacks


@dataclass(frozen=True)
class Command:
    """Run the attacks on the jail: with what should stop them left off, and as deployed."""

    only: str | None = None
    """the attack of this name"""
    group: Annotated[str | None, tyro.conf.arg(name="class")] = None
    """the attacks of this class"""
    layers: bool = False
    """also which single layer stops each one"""
    out: Path | None = None
    """a .md or .json file for the result; a page with the lines of `report.BEGIN` and `report.END` keeps what is around them"""
    workers: int = 2
    """jobs at a time"""

    def __call__(self) -> int:
        try:
            chosen = self._chosen()
            if self.out is not None and (self.out.suffix not in (".md", ".json") or not self.out.parent.is_dir()):
                raise ValueError(f"{self.out} cannot be written: choose a .md or .json file in a folder that is there")
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
        names, kept = [attack.name for attack in attacks()], attacks()
        if self.group is not None:
            if self.group not in CLASSES:
                raise ValueError(f"there is no class {self.group!r}: choose among {', '.join(CLASSES)}")
            kept = tuple(attack for attack in kept if attack.group == self.group)
        if self.only is not None:
            kept = tuple(attack for attack in kept if attack.name == self.only)
        if not kept:
            raise ValueError(f"there is no attack {self.only!r} here: choose among {', '.join(names)}")
        return kept


if __name__ == "__main__":
    sys.exit(tyro.cli(Command)())
