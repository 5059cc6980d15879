"""Page that describes the interface, from the OpenAPI schema: paths, bodies and their fields. No script and no other host."""

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

_STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif }
body { max-width: 60rem; margin: 0 auto; padding: 1rem }
table { border-collapse: collapse; width: 100%; display: block; overflow-x: auto }
td, th { border-top: 1px solid #8886; padding: .25rem .6rem .25rem 0; text-align: left; vertical-align: top }
code { overflow-wrap: anywhere }
"""


def reference(schema: Mapping[str, Any]) -> str:
    """Return a page of HTML about ``schema``, the OpenAPI description of the server."""
    models = schema.get("components", {}).get("schemas", {})
    used = [(name, model) for name, model in sorted(models.items()) if "properties" in model]
    title = escape(schema["info"]["title"])
    return "\n".join(
        [
            f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{title}: interface</title>",
            f"<meta name='viewport' content='width=device-width, initial-scale=1'><style>{_STYLE}</style></head><body>",
            f"<h1>{title}: interface</h1><p>The same for programs: <a href='openapi.json'>openapi.json</a>. "
            "An error is one sentence, in <code>error.message</code>.</p><h2>Addresses</h2><table>",
            *_addresses(schema["paths"]),
            "</table><h2>Bodies</h2>",
            *(line for name, model in used for line in _fields(name, model)),
            "</body></html>",
        ]
    )


def _addresses(paths: Mapping[str, Any]) -> Iterator[str]:
    for path, methods in paths.items():
        for method, about in methods.items():
            body = about.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            takes = f" Body: {_kind(body)}." if body else ""
            told = escape(" ".join(about.get("description", "").split()))
            yield f"<tr><td><code>{method.upper()} {escape(path)}</code></td><td>{told}{takes}</td></tr>"


def _fields(name: str, model: Mapping[str, Any]) -> Iterator[str]:
    yield f"<h3 id='{escape(name)}'>{escape(name)}</h3><p>{escape(' '.join(model.get('description', '').split()))}</p><table>"
    for field, about in model["properties"].items():
        needed = "needed" if field in model.get("required", ()) else ""
        usual = f"usually <code>{escape(repr(about['default']))}</code>" if "default" in about else needed
        told = escape(" ".join(about.get("description", "").split()))
        yield f"<tr><td><code>{escape(field)}</code></td><td>{_kind(about)}</td><td>{usual}</td><td>{told}</td></tr>"
    yield "</table>"


def _kind(about: Mapping[str, Any]) -> str:
    """Return a schema as a few words, with links to models."""
    if "$ref" in about:
        name = escape(about["$ref"].rpartition("/")[2])
        return f"<a href='#{name}'>{name}</a>"
    for many in ("anyOf", "oneOf", "allOf"):
        if many in about:
            return " or ".join(dict.fromkeys(_kind(one) for one in about[many]))
    if "enum" in about or "const" in about:
        return " or ".join(f"<code>{escape(repr(one))}</code>" for one in about.get("enum", [about.get("const")]))
    if about.get("type") == "array":
        return f"list of {_kind(about.get('items', {}))}"
    bounds = [f"{sign} {about[key]}" for key, sign in _BOUNDS.items() if key in about]
    return escape(" ".join([str(about.get("type", "anything")), ", ".join(bounds)]).strip())


_BOUNDS = {
    "minimum": "from", "exclusiveMinimum": "above", "maximum": "to", "exclusiveMaximum": "below",
    "minLength": "of at least", "maxLength": "of at most",
}  # fmt: skip
