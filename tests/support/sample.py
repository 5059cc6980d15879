"""A small choice of parameter sets that still has every pair of values."""

from collections.abc import Sequence
from itertools import combinations


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
