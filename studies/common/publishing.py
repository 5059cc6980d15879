"""Publishing of all studies: lossless packing, and atomic replacement of folders."""

import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

from PIL import Image


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


def replace_folder(new: Path, place: Path) -> None:
    """Rename ``new`` to ``place``; an existing folder is moved aside first, and restored if the rename fails."""
    old = place.with_name(f".{place.name}.{os.getpid()}.old")
    if place.exists():
        place.rename(old)
    try:
        new.rename(place)
    except OSError:
        if old.exists():
            old.rename(place)
        raise
    shutil.rmtree(old, ignore_errors=True)
