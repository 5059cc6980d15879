"""Publishing of all studies: lossless packing, provenance, and atomic replacement of folders."""

import hashlib
import io
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

from mi_route2.files import whole_folder, write_whole

PROVENANCE = "provenance.json"


def compact(value: Any) -> str:
    """Return JSON without white space, except for a line break per top-level entry so that differences stay readable."""
    if isinstance(value, dict):
        body = ",\n".join(f"{json.dumps(key)}:{_entry(entry)}" for key, entry in value.items())
        return f"{{\n{body}\n}}\n"
    return _entry(value) + "\n"


def _entry(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(_dumps(each) for each in value) + "\n]"
    return _dumps(value)


def _dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def repacked(png: bytes) -> bytes:
    """Return the same pixels in fewer bytes, without an unused alpha channel and with stronger zlib compression."""
    image = Image.open(io.BytesIO(png))
    if image.mode == "RGBA" and image.getchannel("A").getextrema() == (255, 255):
        image = image.convert("RGB")
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True, dpi=image.info.get("dpi", (200, 200)))
    return min(png, buffer.getvalue(), key=len)


def nested(markdown: str) -> str:
    """Return a page as a part of another page: every heading one level lower."""
    return re.sub(r"^#", "##", markdown, flags=re.MULTILINE)


def write_texts(folder: Path, texts: Mapping[str, str]) -> list[Path]:
    """Write the texts of a report by file name, each atomically; return their paths."""
    return [write_whole(folder / name, text.encode()) for name, text in texts.items()]


@contextmanager
def published(place: Path, provenance: Mapping[str, Any]) -> Iterator[Path]:
    """Context: an empty folder, which replaces ``place`` on a clean exit and is deleted otherwise.

    Figures in it are repacked. ``provenance`` (the settings and the command of the run) is written to provenance.json, with the
    SHA-256 of every other file.

    Raises:
        OSError: The folder cannot be written; an existing folder is then unchanged.
    """
    with whole_folder(place, overwrite=True) as folder:
        yield folder
        for figure in folder.glob("*.png"):
            figure.write_bytes(repacked(figure.read_bytes()))
        sums = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}
        (folder / PROVENANCE).write_text(json.dumps({**provenance, "files": sums}, indent=1) + "\n", encoding="utf-8")
