"""The titles of figures, as they are saved."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from matplotlib.figure import Figure


def titles(figure: Figure) -> list[str]:
    """Return the title of a figure, those of its legends, which may stand in for it, and those of its panels."""
    legends = [legend.get_title().get_text() for legend in figure.legends]
    return [text for text in (figure.get_suptitle(), *legends, *(axes.get_title() for axes in figure.axes)) if text]


@contextmanager
def saved_titles() -> Iterator[list[list[str]]]:
    """Context: the titles of each figure that is saved meanwhile, by whatever function draws it."""
    seen: list[list[str]] = []
    save = Figure.savefig

    def saving(figure: Figure, *given: Any, **named: Any) -> None:
        seen.append(titles(figure))
        save(figure, *given, **named)

    with patch.object(Figure, "savefig", saving):
        yield seen


def untitled(seen: list[list[str]], preset: str) -> list[list[str]]:
    """Return the titles of figures that do not say of which preset they are."""
    return [texts for texts in seen if not any(preset in text for text in texts)]
