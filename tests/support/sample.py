"""The choice of what to run: few parameter sets that still have every pair of values, and files by their markers."""

import re
from collections.abc import Sequence
from itertools import chain, combinations

from _pytest.mark.expression import Expression


def covering(rows: Sequence[tuple[object, ...]]) -> set[int]:
    """Return the places of a small choice of rows that has every pair of values of any two factors that any row has.

    Of two factors alone every pair would be every row: there, each value once is enough.
    """
    strength = 2 if max(map(len, rows)) > 2 else 1
    return _having([set(combinations(enumerate(row), strength)) for row in rows])


def covering_more(rows: Sequence[tuple[object, ...]], taken: Sequence[tuple[object, ...]], first: set[int]) -> set[int]:
    """Return the places ``first`` and as few more as give every combination of values of any three factors that any row has.

    Of three factors alone every triple would be every row: there, every pair is enough. Each row of ``taken``, of parameters before
    they were taken apart into factors, has its values once in any case.
    """
    strength = 3 if max(map(len, rows)) > 3 else 2
    sizes = [min(strength, len(row)) for row in rows]  # a shorter row is a combination of its own
    apart = [set(combinations(enumerate(row), size)) for row, size in zip(rows, sizes)]
    return _having([tokens | {("taken", at) for at in enumerate(values)} for tokens, values in zip(apart, taken)], first)


def _having(tokens: Sequence[set[tuple[object, ...]]], first: set[int] = frozenset()) -> set[int]:
    """Return the places of sets that together have what all have: those of ``first``, then greedily, so few and not fewest."""
    chosen = set(first)
    missing = set().union(*tokens) - set().union(*(tokens[place] for place in chosen))
    while missing:
        best = max(range(len(tokens)), key=lambda i: (len(tokens[i] & missing), -i))
        chosen.add(best)
        missing -= tokens[best]
    return chosen


MARK = re.compile(r"\bmark\.(\w+)")
ON_ALL = re.compile(r"^pytestmark = (\[\n.*?^\]|[^\n]*)", re.MULTILINE | re.DOTALL)


def choosable(text: str, asked: str) -> bool:
    """Return False if no test of a file with this text can have markers that the expression ``asked`` (``-m``) chooses.

    Markers are those that the text names: those of ``pytestmark`` are on every test, the others, ``matrix`` and ``spare`` on any.
    """
    expression = Expression.compile(asked)
    on_all = set(MARK.findall(" ".join(ON_ALL.findall(text))))
    on_some = ({*MARK.findall(text), "matrix", "spare"} - on_all) & set(re.findall(r"\w+", asked))
    sets = chain.from_iterable(combinations(on_some, n) for n in range(len(on_some) + 1))
    return any(expression.evaluate(lambda name, /, **_: name in on_all or name in some) for some in sets)  # noqa: B023
