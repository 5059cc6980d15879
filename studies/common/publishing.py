"""Publishing of all studies: lossless packing, provenance, and atomic replacement of folders."""

import hashlib
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

from mi_route2.files import whole_folder, write_whole
from mi_route2.validation import read_object

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


_BLOCK = re.compile(r"(<!-- shown: (\S+) -->\n).*?(<!-- end of \2 -->)", re.DOTALL)
_MARK = re.compile(r"<!-- shown: (\S+)")


def filled(page: Path) -> str:
    """Return the text of a page in which the blocks that show other files are filled with the current content of these files.

    A block starts with ``<!-- shown: PATH -->`` and ends with ``<!-- end of PATH -->``; the path is relative to the page. Pages
    thus contain everything that they show, and can be read without a site generator. A Python file is shown as code.

    Raises:
        ValueError: A block names a file that does not exist, or has no end.
    """
    text = page.read_text(encoding="utf-8")
    whole = {match.start() for match in _BLOCK.finditer(text)}
    for mark in _MARK.finditer(text):
        if mark.start() not in whole:  # it would stay as it is, and show an older file
            raise ValueError(
                f"{page} shows {mark[1]} in a block that has no end of its own: write <!-- shown: {mark[1]} --> in a line "
                f"before it, and <!-- end of {mark[1]} --> behind it"
            )

    def block(match: re.Match[str]) -> str:
        path = page.parent / match[2]
        if not path.is_file():
            raise ValueError(f"{page} shows {match[2]}, which does not exist: publish it first, or remove the block")
        snippet = path.read_text(encoding="utf-8").strip()
        shown = f"```python\n{snippet}\n```" if path.suffix == ".py" else snippet
        return f"{match[1]}\n{shown}\n\n{match[3]}"

    return _BLOCK.sub(block, text)


def update_pages(pages: Iterable[Path]) -> list[Path]:
    """Write the pages whose blocks are not up to date (see `filled`), and return their paths."""
    texts = {page: filled(page) for page in pages}
    return [write_whole(page, text.encode()) for page, text in texts.items() if text != page.read_text(encoding="utf-8")]


def update_showing(folder: Path) -> list[Path]:
    """Update the pages of the docs, two folders above ``folder``, that show files of it; return those that were written."""
    folder = folder.resolve()  # it may be given as `.`
    mark, pages = f"<!-- shown: {folder.parent.name}/{folder.name}/".encode(), folder.parent.parent.glob("*.md")
    return update_pages(page for page in pages if page.is_file() and mark in page.read_bytes())


@contextmanager
def published(place: Path, provenance: Mapping[str, Any]) -> Iterator[Path]:
    """Context: an empty folder, which replaces ``place`` on a clean exit and is deleted otherwise.

    Figures in the folder are repacked. ``provenance`` (the settings and the command of the run) is written to provenance.json, with
    the SHA-256 of every other file. Pages that show its files are updated (`update_showing`).

    Raises:
        ValueError: ``place`` holds what was not published, as runs or notes of the user: it would be gone.
        OSError: The folder cannot be written; an existing folder is then unchanged.
    """
    record = place / PROVENANCE
    ours = {PROVENANCE, *read_object(record, "give another --to").get("files", ())} if record.exists() else set()
    if strange := sorted({path.name for path in place.iterdir()} - ours if place.is_dir() else ()):
        raise ValueError(
            f"{place} holds {strange[0]}, which was not published, and publishing would replace all that is in it: "
            "move that, or give another --to"
        )
    with whole_folder(place, overwrite=True) as folder:
        yield folder
        for figure in folder.glob("*.png"):
            figure.write_bytes(repacked(figure.read_bytes()))
        sums = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}
        (folder / PROVENANCE).write_text(json.dumps({**provenance, "files": sums}, indent=1) + "\n", encoding="utf-8")
    update_showing(place)
