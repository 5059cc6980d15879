"""Copies a finished folder's numbers and figures to where the write-up includes them: docs/results/steering/.

headline.md      the answer in sentences        tables.md      every table        results.json, *.png, provenance.json
"""

import hashlib
import json
import os
import re
import shutil
from importlib.metadata import version
from pathlib import Path

from studies.publishing import compact, repacked, replace_folder
from studies.steering.report import write_report
from studies.steering.results import load_study

PLACE, ANSWER = "steering", "answer.md"


def publish(folder: Path, to: Path) -> Path:
    """Write the report again and copy it; the folder made, which appears whole or not at all."""
    study = load_study(folder)
    paths, place = write_report(folder), to / PLACE
    part = place.with_name(f".{PLACE}.{os.getpid()}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        for path in (path for path in paths if path.suffix != ".md"):
            data = path.read_bytes()
            data = repacked(data) if path.suffix == ".png" else compact(json.loads(data)).encode()
            (part / path.name).write_bytes(data)
        (part / "headline.md").write_text((folder / ANSWER).read_text(encoding="utf-8"), encoding="utf-8")
        # read inside of a page: what is a page's heading in the folder is one of its sections there
        texts = [path.read_text(encoding="utf-8") for path in paths if path.suffix == ".md" and path.name != ANSWER]
        (part / "tables.md").write_text("\n".join(re.sub(r"^#", "##", t, flags=re.MULTILINE) for t in texts), encoding="utf-8")
        settings = study.settings
        content = {
            "study": folder.name,
            "settings_hash": settings.digest,
            "run_settings_hash": settings.run.digest,
            "versions": {name: version(name) for name in ("mi-route2", "torch")},
            "seeds": list(study.seeds),
            "command": f"python -m studies.steering run --preset {settings.run.preset} --seeds {','.join(map(str, study.seeds))}",
            "files": {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(part.iterdir())},
        }
        (part / "provenance.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        replace_folder(part, place)
    except OSError as error:
        raise ValueError(f"cannot write {place}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return place
