"""Hook of mkdocs: every notebook is also a page, made of its cells and committed outputs, whose links are checked as any page's."""

import base64
import json
import re
from pathlib import PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page and its pictures beside each notebook."""
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        path, parts, pictures = PurePosixPath(file.src_uri), list[str](), list[bytes]()
        for cell in json.loads(file.content_string)["cells"]:
            source = "".join(cell["source"])
            parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
            for output in cell.get("outputs", []):
                parts.append(_shown(output, f"{path.stem}-{len(pictures)}.png", pictures))
        parts.append(f'[Download this notebook]({path.name} "{path.name}")')
        files.append(File.generated(config, str(path.with_suffix(".md")), content="\n\n".join(parts)))
        for number, picture in enumerate(pictures):
            files.append(File.generated(config, str(path.with_name(f"{path.stem}-{number}.png")), content=picture))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to notebooks, which GitHub shows, lead to their pages."""
    return markdown.replace(".ipynb)", ".md)")


def _shown(output: dict[str, Any], name: str, pictures: list[bytes]) -> str:
    data = output.get("data", {})
    if "image/png" in data:
        pictures.append(base64.b64decode(data["image/png"]))
        return f"![{name}]({name})"
    if "text/html" in data:
        table = re.sub(r"<style.*?</style>\n", "", "".join(data["text/html"]), flags=re.DOTALL)
        return table.replace(' border="1" class="dataframe"', "")  # the theme styles tables without a class
    text = "".join(output["text"] if "text" in output else data["text/plain"]).rstrip()
    return f"```text\n{text}\n```"
