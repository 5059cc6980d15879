"""The choice of what to run: few parameter sets that still have every pair of values, and files by their markers."""

import re
from collections.abc import Sequence
from itertools import chain, combinations

from _pytest.mark.expression import Expression


def covering(rows: Sequence[tuple[object, ...]]) -> set[int]:
    """Return the places of a small choice of rows that has every pair of values of any two factors that any row has.

    Of two factors alone every pair would be every row: there, each value once is enough. Greedy, so small and not smallest.
    """
    strength = 2 if max(len(row) for row in rows) > 2 else 1

    def tokens(row: tuple[object, ...]) -> set[tuple[tuple[int, object], ...]]:
        return set(combinations(enumerate(row), strength))

    missing, chosen = set().union(*map(tokens, rows)), set[int]()
    while missing:
        best = max(range(len(rows)), key=lambda i: (len(tokens(rows[i]) & missing), -i))
        chosen.add(best)
        missing -= tokens(rows[best])
    return chosen


MARK = re.compile(r"\bmark\.(\w+)")
ON_ALL = re.compile(r"^pytestmark = (\[\n.*?^\]|[^\n]*)", re.MULTILINE | re.DOTALL)


def choosable(text: str, asked: str) -> bool:
    """Return False if no test of a file with this text can have markers that the expression ``asked`` (``-m``) chooses.

    Markers are those that the text names: those of ``pytestmark`` are on every test, the others and ``matrix`` on any.
    """
    expression = Expression.compile(asked)
    on_all = set(MARK.findall(" ".join(ON_ALL.findall(text))))
    on_some = ({*MARK.findall(text), "matrix"} - on_all) & set(re.findall(r"\w+", asked))
    sets = chain.from_iterable(combinations(on_some, n) for n in range(len(on_some) + 1))
    return any(expression.evaluate(lambda name, /, **_: name in on_all or name in some) for some in sets)  # noqa: B023
