"""Format the findings of a run of the suite as Markdown and JSON."""

import json
import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path

from mi_route2.files import write_whole
from studies.sandbox import PROTECTIONS
from tests.attacks.attack import CLASSES
from tests.attacks.suite import STRICT, Finding

BEGIN, END = "<!-- attacks -->", "<!-- end of attacks -->"
"""Lines of a page between which the table is written; the rest of the page is kept."""


def summary(findings: Sequence[Finding]) -> str:
    """Return the numbers of attacks, live attacks and breaches in one sentence."""
    live, breaches = sum(finding.live for finding in findings), sum(finding.breach for finding in findings)
    return (
        f"{len(findings)} attacks, {live} of them live on this machine (Linux {platform.release().partition('-')[0]}, "
        f"{platform.machine()}, {'root' if os.geteuid() == 0 else 'not root'}), {breaches} not stopped."
    )


def markdown(findings: Sequence[Finding]) -> str:
    """Return a summary and one table per class, which waits until somebody opens it."""
    layers = any(finding.alone is not None for finding in findings)
    head = ["attack", "what it does", "stopped by", *(["each alone"] if layers else []), "control", "protected"]
    parts = [summary(findings), ""]
    for group in CLASSES:
        chosen = [finding for finding in findings if finding.attack.group == group]
        if chosen:
            parts += [f'<details markdown="1">\n<summary>{group}: {len(chosen)} attacks</summary>', ""]
            parts += [_row(head), _row(["---"] * len(head)), *(_row(_cells(finding, layers)) for finding in chosen)]
            parts += ["", "</details>", ""]
    return "\n".join(parts)


def _cells(finding: Finding, layers: bool) -> list[str]:
    attack = finding.attack
    alone = [", ".join(finding.alone or ()) or "none"] if layers else []
    live = "succeeds" if finding.live else f"not live: {_plain(finding.control.how)}"
    stopped = f"**succeeds**: {_plain(finding.protected.how)}" if finding.breach else _plain(finding.protected.how)
    by = [name for name in PROTECTIONS if name in attack.protections] + ([f"{STRICT} ({attack.naive})"] if attack.naive else [])
    return [f"`{attack.name}`", _plain(attack.title), _plain(", ".join(by)), *alone, live, stopped]


def steady(text: str) -> str:
    """Return a description without paths and addresses, which differ from run to run."""
    return re.sub(r"0x[0-9a-f]+", "0x…", re.sub(r": '/.*", "", text)).strip(": ")


def _plain(text: str) -> str:
    """Escape a description so that Markdown shows it literally."""
    return re.sub(r"([\\*_<>\[\]`|])", r"\\\1", steady(text).replace("\n", " "))


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def as_json(findings: Sequence[Finding]) -> str:
    rows = [
        {
            "attack": finding.attack.name,
            "class": finding.attack.group,
            "kind": finding.attack.kind,
            "title": finding.attack.title,
            "evidence": finding.attack.evidence,
            "stopped_by": finding.attack.stopped_by,
            "alone": finding.alone,
            "live": finding.live,
            "control": finding.control.how,
            "protected": finding.protected.how,
            "breach": finding.breach,
        }
        for finding in findings
    ]
    return json.dumps({"summary": summary(findings), "attacks": rows}, indent=1) + "\n"


def write(path: Path, findings: Sequence[Finding]) -> None:
    """Write JSON or Markdown, by the file's suffix, atomically.

    Raises:
        ValueError: The suffix is another one.
    """
    if path.suffix not in (".json", ".md"):
        raise ValueError(f"{path} is neither .json nor .md: choose one of these")
    text = as_json(findings) if path.suffix == ".json" else _page(path, markdown(findings))
    write_whole(path, text.encode())


def _page(path: Path, table: str) -> str:
    """Return the existing page with the table between its two marker lines, or the table alone."""
    before, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN) if path.exists() else ("", "", "")
    _, end, after = rest.partition(END)
    return f"{before}{begin}\n\n{table}\n{end}{after}" if begin and end else table
