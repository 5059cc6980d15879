"""Packing without loss: JSON without its white space, all records of a study in one file, figures in fewer bytes."""

import io
import json
from typing import Any

from PIL import Image

from studies.route2.report.load import RunSet


def compact(value: Any) -> str:
    """JSON without white space but for one line break a top-level entry, so that differences stay readable."""
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


def packed(runs: RunSet) -> str:
    """runs.json: ``{"arm_specs": {arm: spec}, "runs": [{"eval", "manifest"}]}``; a manifest's ``arm_spec`` is in ``arm_specs``.

    ``ValueError`` where an arm's spec differs between seeds.
    """
    specs: dict[str, Any] = {}
    records = []
    for (arm, seed), run in runs.runs.items():
        manifest = json.loads((run.folder / "manifest.json").read_text(encoding="utf-8"))
        spec = manifest.pop("arm_spec")
        if specs.setdefault(arm, spec) != spec:
            raise ValueError(f"arm {arm} is defined differently on seed {seed}: run it again on every seed")
        records.append({"eval": json.loads((run.folder / "eval.json").read_text(encoding="utf-8")), "manifest": manifest})
    return compact({"arm_specs": specs, "runs": records})


def unpacked(text: str) -> dict[tuple[str, int], tuple[dict[str, Any], dict[str, Any]]]:
    """``(arm, seed)`` to its eval.json and manifest.json, from the text of runs.json."""
    content = json.loads(text)
    out = {}
    for record in content["runs"]:
        manifest = record["manifest"] | {"arm_spec": content["arm_specs"][record["manifest"]["arm"]]}
        out[manifest["arm"], manifest["seed"]] = (record["eval"], manifest)
    return out


def repacked(png: bytes) -> bytes:
    """The same pixels in fewer bytes: an alpha channel that hides nothing is left out, and zlib tries harder."""
    image = Image.open(io.BytesIO(png))
    if image.mode == "RGBA" and image.getchannel("A").getextrema() == (255, 255):
        image = image.convert("RGB")
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True, dpi=image.info.get("dpi", (200, 200)))
    return min(png, buffer.getvalue(), key=len)
