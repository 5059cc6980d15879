"""Which Linears of a model: glob patterns over module names, with a count that can be asserted.

``select(model, "blocks.*.attn.q", expect=2)`` returns ``{name: module}`` in the model's own order. Nothing selected is an
error that names the nearest candidates, so that a silent no-match cannot happen.
"""

import difflib
from fnmatch import fnmatchcase

from torch import nn


def nearest(name: str, known: list[str], n: int = 5) -> str:
    """The ``n`` known names closest to ``name``, as text for an error message."""
    close = difflib.get_close_matches(name, known, n=n, cutoff=0.0)
    return ", ".join(close) if close else "none at all"


def select(model: nn.Module, *patterns: str, expect: int | None = None) -> dict[str, nn.Linear]:
    """The ``nn.Linear`` modules whose dotted name matches one of the glob ``patterns``.

    Every pattern must match at least one Linear (``KeyError`` with the nearest names otherwise); ``expect`` asserts the
    total (``ValueError``).
    """
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    if not patterns:
        raise ValueError("give at least one pattern, for example 'blocks.*.attn.*'")
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in linears):
            raise KeyError(f"no Linear matches {pattern!r}; the nearest names are: {nearest(pattern, list(linears))}")
    chosen = {name: module for name, module in linears.items() if any(fnmatchcase(name, p) for p in patterns)}
    if expect is not None and len(chosen) != expect:
        raise ValueError(f"{patterns} selected {len(chosen)} Linears, not {expect}: {', '.join(chosen)}")
    return chosen
