"""Notebooks and the gallery, run and drawn anew: ``python tests/support/notebooks.py [name ...]`` (`make notebooks`).

Cells run in this process, one namespace a notebook, so that all of them share the imports. Outputs are those of Jupyter: what was
printed, pictures of pyplot, and the value of a last expression. Pictures are made small.
"""

import ast
import base64
import contextlib
import io
import json
import linecache
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from pages import ROOT, run_page
from PIL import Image

NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))
GALLERY = ROOT / "docs/gallery.md"
PICTURES = [GALLERY.parent / name for name in re.findall(r"!\[.+\]\((.+)\)", GALLERY.read_text(encoding="utf-8"))]
NUMBER = re.compile(r"[-+]?\d*\.\d+(?:e[-+]?\d+)?")


def run_notebook(path: Path) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Run the code cells in order; yield each with its outputs."""
    plt.switch_backend("agg")
    namespace: dict[str, Any] = {"__name__": "notebook"}
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    for count, cell in enumerate((cell for cell in cells if cell["cell_type"] == "code"), 1):
        source, name, printed = "".join(cell["source"]), f"{path}:{count}", io.StringIO()
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)  # nnsight reads it back
        tree, value = ast.parse(source), None
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        with contextlib.redirect_stdout(printed):
            exec(compile(tree, name, "exec"), namespace)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
        outputs = [{"name": "stdout", "output_type": "stream", "text": text}] if (text := printed.getvalue()) else []
        for number in plt.get_fignums():  # as Jupyter does
            plt.figure(number).savefig(picture := io.BytesIO(), dpi=150, bbox_inches="tight")
            outputs.append({"data": shown(Image.open(picture)), "metadata": {}, "output_type": "display_data"})
        plt.close("all")
        if value is not None and not source.endswith(";"):
            outputs.append({"data": shown(value), "execution_count": count, "metadata": {}, "output_type": "execute_result"})
        yield cell | {"execution_count": count}, outputs


def shown(value: Any) -> dict[str, str]:
    """Return what Jupyter shows of a value: a picture, a table, or its text."""
    if isinstance(value, Image.Image):
        return {"image/png": base64.b64encode(small(value)).decode(), "text/plain": "<picture>"}
    return {"text/plain": repr(value)} | ({"text/html": value._repr_html_()} if hasattr(value, "_repr_html_") else {})


def small(picture: Image.Image) -> bytes:
    """Return a PNG of at most 1200 pixels across and 64 colors, a fifth of the bytes."""
    picture = picture.convert("RGB")
    picture.thumbnail((1200, 3000))
    picture.quantize(64).save(buffer := io.BytesIO(), "png", optimize=True)
    return buffer.getvalue()


def same_text(committed: str, fresh: str) -> bool:
    """True if two texts differ at most in decimal numbers, and these by 2% or .02: threads and processors round differently."""
    pairs = list(zip(*(map(float, NUMBER.findall(text)) for text in (committed, fresh))))
    rest = [re.sub(r"\s+", " ", NUMBER.sub("", text)) for text in (committed, fresh)]
    return rest[0] == rest[1] and all(abs(a - b) <= 0.02 + 0.02 * abs(a) for a, b in pairs)


def text_of(outputs: list[dict[str, Any]]) -> str:
    """Return all text of a cell's outputs."""
    return "".join("".join(o["text"]) if "text" in o else "".join(o["data"]["text/plain"]) for o in outputs)


if __name__ == "__main__":
    os.chdir(tempfile.mkdtemp())
    for path in [path for path in NOTEBOOKS if path.stem in sys.argv[1:] or len(sys.argv) == 1]:
        fresh = iter([cell | {"outputs": outputs} for cell, outputs in run_notebook(path)])
        notebook = json.loads(path.read_text(encoding="utf-8"))
        notebook["cells"] = [next(fresh) if cell["cell_type"] == "code" else cell for cell in notebook["cells"]]
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if "gallery" in sys.argv[1:] or len(sys.argv) == 1:
        run_page(GALLERY)
        for picture in PICTURES:
            picture.write_bytes(small(Image.open(picture.name)))
