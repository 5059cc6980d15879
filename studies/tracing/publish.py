"""Copies what a tracing folder says to where the write-up includes it: docs/results/tracing/, with checksums and the command.

The folder appears whole or not at all. The tables are written again first, so that they are those of the artifacts.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path

from studies.publishing import compact, repacked, replace_folder
from studies.route2.headline import seeds_text
from studies.route2.settings import PRESETS
from studies.tracing.figures import BESIDE, CARRIED, DELETING
from studies.tracing.measures import Found, load
from studies.tracing.report import HEADLINE, TABLE, TABLES, write_report

NAME = "tracing"
PUBLISHED = (TABLE, TABLES, HEADLINE, "settings.json", "training.json", CARRIED, BESIDE, DELETING)


def publish(root: Path, to: Path) -> Path:
    """Publish the tracing folder ``root`` under ``to``; the folder made.

    ``ValueError`` where it is not whole, or where its arms were not trained under a preset as it is.
    """
    found = load(root)
    if found.training != PRESETS[str(found.training["preset"])].as_dict():
        raise ValueError(f"the arms of {root} were trained under changed settings; publish a run of a preset as it is")
    write_report(root)
    place, part = to / NAME, to / f".{NAME}.{os.getpid()}.part"
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        for name in PUBLISHED:
            content = (root / name).read_bytes()
            if name == TABLE:
                content = compact(json.loads(content)).encode()
            (part / name).write_bytes(repacked(content) if name.endswith(".png") else content)
        (part / "provenance.json").write_text(provenance(found, part), encoding="utf-8")
        replace_folder(part, place)
    except OSError as error:
        raise ValueError(f"cannot write {place}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return place


def provenance(found: Found, part: Path) -> str:
    """provenance.json: the command, the hashes of settings and artifacts, and the SHA-256 of each published file."""
    content = {
        "study": found.root.name,
        "training": found.settings.training,
        "command": command(found),
        "artifacts": {f"{arm}, seed {seed}": one["sha256"] for (arm, seed), one in sorted(found.contents.items())},
        "files": {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(part.iterdir())},
    }
    return json.dumps(content, indent=1) + "\n"


def command(found: Found) -> str:
    """The command line that makes this folder."""
    seeds = seeds_text(found.seeds(found.arms[0])).partition(" ")[2].replace(" ", "")
    seeds = f"{seeds}-{seeds}" if seeds.isdigit() else seeds
    own, usual = found.settings, type(found.settings)(found.settings.training)
    names = ("prompts", "answers", "pairs", "draws", "rated")
    changed = "".join(f" --{name} {getattr(own, name)}" for name in names if getattr(own, name) != getattr(usual, name))
    return f"python -m studies.tracing run --preset {found.training['preset']} --seeds {seeds} --arms {' '.join(own.arms)}{changed}"
