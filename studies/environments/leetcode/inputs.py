"""New inputs derived from a problem's tests: the same types and shapes with other contents.

The input of a test is changed in one to three places, by values that its parameter has had: an integer within its range or a
neighbor, a character of its alphabet, two elements swapped. A statement's constraints that relate several parameters are not known,
so some inputs
violate them: `answered_inputs` drops those on which the reference solution raises or does not end.
"""

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from studies.environments.leetcode.expressions import Call
from studies.environments.leetcode.problems import Case, LeetCodeTask, make_test
from studies.environments.leetcode.programs import Programs, Returned, allowing
from studies.environments.leetcode.values import Linked, Opaque, Tree, decode

ATTEMPTS = 10
"""Attempts for each new input, because a change may give an input that already exists."""
LeafChange = Callable[[tuple[int, ...], object], object]
"""(path to the leaf, leaf) -> another leaf."""
SECONDS = 3.0
"""Maximum processor time of the reference solution for one new input."""
SWAP = 0.3
"""Probability that two elements of a list are swapped."""


def new_inputs(tests: Sequence[Case], seed: int, count: int) -> list[Case]:
    """Return at most ``count`` calls that differ from each other and from those of the tests; their results are not known."""
    rng = random.Random(f"{seed} {tests[0].key}")
    origins = _origins([_call(test) for test in tests])
    seen = {test.key for test in tests}
    new: list[Case] = []
    for _ in range(ATTEMPTS * count if origins else 0):
        origin = rng.choice(origins)
        call = origin.call
        for _ in range(rng.choice((1, 1, 2, 3))):
            call = origin.changed(call, rng)
        test = make_test(call, Opaque("not known"))
        if test.key not in seen:
            seen.add(test.key)
            new.append(test)
            if len(new) == count:
                break
    return new


def answered_inputs(task: LeetCodeTask, programs: Programs, seed: int, count: int) -> list[Case]:
    """Return new inputs with the reference solution's results; fewer than ``count`` if it raises or does not end."""
    tests = new_inputs(task.tests, seed, count)
    together = programs.run([task.calling(task.solution, tests)])[0]
    if together.status == "ok":
        returns = list(together.returns)
    else:  # one input ended the process of all, so each runs in its own
        slow = allowing(programs.limits, SECONDS)
        one_by_one = programs.run([task.calling(task.solution, [test]) for test in tests], limits=slow)
        returns = [execution.returns[0] if execution.returns else Returned() for execution in one_by_one]
    answers = zip(tests, returns, strict=True)
    return [replace(test, expected=answer.value) for test, answer in answers if not isinstance(answer.value, Opaque)]


def _call(test: Case) -> Call:
    args, kwargs = json.loads(test.call)
    return Call(tuple(decode(value) for value in args), {name: decode(value) for name, value in kwargs.items()})


LeafPath = tuple[str | int | None, ...]
"""A parameter, and for each depth the column if all rows there have the same width (``[from, to, cost]``), else None."""
Pools = Mapping[tuple[LeafPath, type], list]
"""Sorted values of leaves, by path and type."""


@dataclass(frozen=True)
class _Origin:
    """A test's call, and the values that its leaves may take: those in this call, and those in all calls."""

    call: Call
    weights: Mapping[str, int]
    widths: Mapping[tuple[str, int], bool]
    in_call: Pools
    in_all: Pools

    def changed(self, call: Call, rng: random.Random) -> Call:
        """Return a variation of the call with a change in one of its parameters; a longer parameter is changed more often."""
        chosen = rng.choices(list(self.weights), list(self.weights.values()))[0]

        def leaf(places: tuple[int, ...], old: object) -> object:
            key = (_path(chosen, places, self.widths), type(old))
            return _leaf(old, self.in_call[key], self.in_all[key], rng) if key in self.in_call else old

        named = {name: _change(value, leaf, (), rng) if name == chosen else value for name, value in _parameters(call)}
        return Call(tuple(named.pop(str(place)) for place in range(len(call.args))), named)


def _origins(calls: Sequence[Call]) -> list[_Origin]:
    """Return the calls that have a leaf to change."""
    widths = _widths(calls)
    everywhere = _pools(calls, widths)
    origins = []
    for call in calls:
        weights = {name: min(8, sum(1 for _ in _leaves(value, ()))) for name, value in _parameters(call)}
        if any(weights.values()):
            origins.append(_Origin(call, weights, widths, _pools([call], widths), everywhere))
    return origins


def _pools(calls: Sequence[Call], widths: Mapping[tuple[str, int], bool]) -> Pools:
    seen: dict[tuple[LeafPath, type], set] = {}
    for call in calls:
        for name, value in _parameters(call):
            for places, leaf in _leaves(value, ()):
                seen.setdefault((_path(name, places, widths), type(leaf)), set()).add(leaf)
    return {key: sorted(values) for key, values in seen.items()}


def _path(name: str, places: tuple[int, ...], widths: Mapping[tuple[str, int], bool]) -> LeafPath:
    return (name, *(place if widths.get((name, depth)) else None for depth, place in enumerate(places)))


def _widths(calls: Sequence[Call]) -> dict[tuple[str, int], bool]:
    """Return, for each parameter and depth below the outermost, whether all lists there are equally long, and short."""
    lengths: dict[tuple[str, int], set[int]] = {}

    def note(name: str, value: object, depth: int) -> None:
        items = _items(value)
        if items is not None:
            lengths.setdefault((name, depth), set()).add(len(items))
            for item in items:
                note(name, item, depth + 1)

    for call in calls:
        for name, value in _parameters(call):
            note(name, value, 0)
    return {key: key[1] > 0 and len(counts) == 1 and max(counts) <= 4 for key, counts in lengths.items()}


def _parameters(call: Call) -> Iterator[tuple[str, object]]:
    yield from ((str(place), value) for place, value in enumerate(call.args))
    yield from call.kwargs.items()


def _items(value: object) -> Sequence[object] | None:
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, Linked):
        return value.values
    return value.levels if isinstance(value, Tree) else None


def _leaves(value: object, places: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], object]]:
    """Yield every value that is not a list, with the path to it."""
    items = _items(value)
    if items is not None:
        for place, item in enumerate(items):
            yield from _leaves(item, (*places, place))
    elif isinstance(value, bool | int | float | str):
        yield places, value


def _change(value: object, leaf: LeafChange, places: tuple[int, ...], rng: random.Random) -> object:
    """Return a value with one leaf, or the order of one list, changed."""
    items = _items(value)
    if items is None:
        return leaf(places, value)
    present = [place for place, item in enumerate(items) if item is not None]
    if not present:
        return value
    changed = list(items)
    if len(present) > 1 and rng.random() < SWAP and not isinstance(value, Tree) and not places:
        one, other = rng.sample(present, 2)
        changed[one], changed[other] = changed[other], changed[one]
    else:
        place = rng.choice(present)
        changed[place] = _change(changed[place], leaf, (*places, place), rng)
    return type(value)(tuple(changed)) if isinstance(value, Linked | Tree | tuple) else changed


def _leaf(old: object, seen: list, everywhere: list, rng: random.Random) -> object:
    """Return another value of the same type: from the test's own range if it has several values there, else from all tests."""
    if isinstance(old, bool):
        return not old
    pool = seen if len(seen) > 1 else everywhere
    if isinstance(old, int | float):
        near = old + rng.choice((-1, 1))
        return near if rng.random() < 0.5 and pool[0] <= near <= pool[-1] else rng.choice(pool)
    if isinstance(old, str) and old and len(seen) == 1:
        place = rng.randrange(len(old))
        return old[:place] + rng.choice(rng.choice(everywhere) or old) + old[place + 1 :]
    return rng.choice(pool)
