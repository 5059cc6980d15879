"""Copies what a study folder says to where the write-up includes it: docs/results/lanes/, with checksums and the command.

headline.md     the table of claims         tables.md   every arm        claims.json, settings.json, *.png, provenance.json

The folder appears whole or not at all. The tables are written again first, so that they are those of the artifacts.
"""

import hashlib
import json
import os
import platform
import re
import shutil
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType

from mi_route2.validation import read_object
from studies.lanes.found import load
from studies.lanes.report import ARMS_TABLE, JSON, TABLE, write_report
from studies.lanes.settings import FILE, Settings
from studies.publishing import compact, repacked, replace_folder

COMMANDS = MappingProxyType({"default": "python -m studies.lanes run", "full": "python -m studies.lanes run --full"})
NAME, HEADLINE, TABLES = "lanes", "headline.md", "tables.md"


def publish(root: Path, to: Path) -> Path:
    """Publish the study folder ``root`` under ``to``; the folder made. ``ValueError`` where it is not whole, or was a trial."""
    profile = Settings.read(root).profile
    if profile not in COMMANDS:
        raise ValueError(f"{root} is a trial of the profile {profile!r}; publish a run without --quick and --dev")
    found = load(root)
    paths, place = write_report(root), to / NAME
    part = place.with_name(f".{NAME}.{os.getpid()}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        for path in (path for path in paths if path.suffix == ".png"):
            (part / path.name).write_bytes(repacked(path.read_bytes()))
        for name in (JSON, FILE):
            (part / name).write_text(
                compact(read_object(root / name, f"`python -m studies.lanes report {root}` writes it again")), encoding="utf-8"
            )
        for name, text in ((HEADLINE, TABLE), (TABLES, ARMS_TABLE)):
            (part / name).write_text(inside((root / text).read_text(encoding="utf-8")), encoding="utf-8")
        content = {
            "study": root.name,
            "settings_hash": found.settings.digest,
            "text_hash": found.settings.text,
            "python": platform.python_version(),
            "versions": {name: version(name) for name in ("mi-route2", "torch")},
            "seeds": list(found.seeds),
            "command": f"{COMMANDS[profile]} --seeds {','.join(map(str, found.seeds))}",
            "files": {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(part.iterdir())},
        }
        (part / "provenance.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        replace_folder(part, place)
    except OSError as error:
        raise ValueError(f"cannot write {place}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return place


def inside(text: str) -> str:
    """A page's text as a part of another page: without its title, its sections one level down."""
    return re.sub(r"^#", "##", text.partition("\n")[2].lstrip(), flags=re.MULTILINE)
