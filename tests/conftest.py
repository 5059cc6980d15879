"""One thread (results then do not depend on the machine's cores), one set of hypothesis examples, a Ctrl-C that works;
and the marker ``matrix`` for those parameter sets of a test that add only a combination."""

import signal
from collections.abc import Iterable, Sequence
from itertools import combinations, groupby

import pytest
import torch
from families import FAMILIES
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("fixed", derandomize=True, deadline=None, database=None)
settings.load_profile("fixed")
# A suite that was started in the background ignores SIGINT, and so would every process that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)


def factors(item: pytest.Function) -> tuple[object, ...]:
    """Return the parameters of a test one by one, tuples taken apart, as things that can be compared."""
    values = (part for value in item.callspec.params.values() for part in (value if isinstance(value, tuple) else (value,)))
    return tuple(
        value if isinstance(value, str | int | float | bool | None) else getattr(value, "__qualname__", repr(value))
        for value in values
    )


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


FEW = {"Qwen3", "GPT2", "MicroGPT"}
"""Architectures that differ in most: gated and not, rotary and learned positions, one from transformers and ours."""


@pytest.hookimpl(tryfirst=True)  # before ``-m`` chooses
def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    """Mark ``matrix`` the parameter sets of a test that a covering choice leaves out, and all but few architectures."""
    made = (item for item in items if isinstance(item, pytest.Function) and hasattr(item, "callspec"))
    for _, group in groupby(made, key=lambda item: (item.path, item.originalname, item.cls)):
        tests = list(group)
        rows = [factors(test) for test in tests]
        if len(tests) < 4:
            continue
        kept = [place for place, row in enumerate(rows) if not set(row) & (FAMILIES.keys() - FEW)] or list(range(len(rows)))
        chosen = {kept[place] for place in covering([rows[place] for place in kept])}
        for place, test in enumerate(tests):
            if place not in chosen:
                test.add_marker("matrix")
