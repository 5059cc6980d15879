"""Equality with the expected value: one table for the grader's comparison and for the oracle's, which share no code."""

import collections
import enum
import math
import random
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from studies.environments.leetcode.grader import equal
from studies.environments.leetcode.oracle import agrees
from studies.environments.leetcode.values import Linked, Opaque, Tree, decode, encode

INF, NAN, HUGE = math.inf, math.nan, 10**400

EQUAL = [
    (2, 2), (2.0, 2), (2, 2.0), (0.0, 0), (-0.0, 0.0), (True, True), (None, None), ("a", "a"), (HUGE, HUGE),
    (1.000009, 1.0), (0.999991, 1.0), (1e10 + 9e4, 1e10), (10, 10.00005), (1e-10, 0.0), (0, 1e-10), (0, 1e-9), (1e-9, 0.0),
    (INF, INF), (-INF, -INF), (NAN, NAN), ([1, 2.0], [1.0, 2]), ((1, "a"), (1, "a")), ([], []), ([[1], []], [[1], []]),
    ({1, 2}, {2, 1.0}), ({"a": [1.0]}, {"a": [1]}), ({1: "x"}, {1.0: "x"}), ({2: 1.000001, 1: 0}, {1: 0, 2: 1.0}),
    (Linked((1, 2)), Linked((1.0, 2))), (Tree(((1,), None, (2,))), Tree(((1,), None, (2,)))), ({(1, True)}, {(1, True)}),
    ({float("nan"), 1.5}, {1.5, NAN}), ({float("nan"): 1}, {NAN: 1.0}), ({(10.0, NAN)}, {(10, float("nan"))}),
    ({0.0, INF}, {INF, -0.0}), ({NAN: 1, float("nan"): 1}, {NAN: 1, float("nan"): 1.0}),
]  # fmt: skip
DIFFERENT = [
    (True, 2), (0, True), (False, 0.5), (2.5, 2), (1.00002, 1.0), (2.0000001, 2), (1e-8, 0.0), (1, 2),
    (INF, -INF), (INF, 1e308), (1e308, INF), (HUGE, INF), (HUGE, 1e308), (NAN, 1.0), (1.0, NAN), (NAN, 1), (1, NAN), (INF, NAN),
    ("1", 1), (1, "1"), ("a", "b"), (None, 0), (0, None), (None, False), ("", None), ([1], (1,)), ((1,), [1]), ([1], [1, 1]),
    ([1, 2], [2, 1]), ([True], [0]), ([[1]], [1]), ({1}, [1]), ([1], {1}), ({1}, {1, 2}), ({True}, {0}), ({2}, {True}),
    ({"a": 1}, {"a": 2}), ({"a": 1}, {"b": 1}), ({2: 1}, {True: 1}), ({(1, 2)}, {(1, True)}), ({"a": 1}, {}), ([], ()),
    ({1.000001}, {1.0}), ({9.999999, 10.5}, {10.0, 10.5}), ({1.000001: 0}, {1.0: 0}), ({("bool", 1)}, {True}),
    ({("bool", True)}, {True}), ({Linked((1,))}, {Linked((False,))}), ({NAN, float("nan")}, {NAN}),
    ({NAN: 1, float("nan"): 1}, {NAN: 1, 1: 1}),
    (Linked((1, 2)), [1, 2]), ([1, 2], Linked((1, 2))), (None, Linked((1,))), (Linked((1,)), None), (Linked((1,)), Linked((1, 1))),
    (Tree(((1,),)), Linked((1,))), (Tree(((1,), (2,))), Tree(((1,), None, (2,)))), (Tree(((1,),)), [1]), (NAN, "nan"), ("x", 0.0),
]  # fmt: skip


@pytest.mark.parametrize(("value", "expected"), EQUAL)
def test_these_are_equal(value: Any, expected: Any) -> None:
    assert equal(value, expected)
    assert agrees(expected, value)


@pytest.mark.parametrize(("value", "expected"), DIFFERENT)
def test_these_are_not(value: Any, expected: Any) -> None:
    assert not equal(value, expected)
    assert not agrees(expected, value)


class Numbers(list):
    pass


class Color(enum.IntEnum):
    RED = 3


class Name(str, enum.Enum):  # noqa: UP042 - its str() is another text
    FIRST = "a"


class Always(int):
    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


class Agreeable:
    def __eq__(self, other: object) -> bool:
        return isinstance(other, int)

    def __hash__(self) -> int:
        return 0


Point = collections.namedtuple("Point", "x y")
COUNT = collections.Counter("aab")
OTHER_TYPES = [
    (COUNT, {"a": 2, "b": 1}), (collections.defaultdict(list, {1: [2]}), {1: [2]}),
    (collections.OrderedDict(b=1, a=2), {"a": 2, "b": 1}),
    (collections.UserDict({1: 2}), {1: 2}), (collections.UserList([1]), [1]), (Numbers([1, Numbers([2])]), [1, [2]]),
    (Point(1, [2]), (1, [2])), (Decimal("3"), 3), (Decimal("0.5"), 0.5), (Fraction(7, 2), 3.5), (Color.RED, 3), (Name.FIRST, "a"),
    (frozenset({1}), {1}), ({1: 2}.keys(), {1}), ([Decimal(1)], [1.0]), (True, 1), (0.0, False), ([0], [False]),
    ({1: True}, {True: 1}), ({True}, {1}), ({(1, True)}, {(1.0, 1)}),
]  # fmt: skip


def answered(value: Any) -> Any:
    """The value as it comes out of the jail."""
    return decode(encode(value))


@pytest.mark.parametrize(("value", "expected"), OTHER_TYPES)
def test_what_is_equal_in_python_is_equal_here(value: Any, expected: Any) -> None:
    assert value == expected
    assert equal(answered(value), expected)
    assert agrees(expected, answered(value))


@pytest.mark.parametrize(
    "value", [collections.deque([1]), range(1, 2), (1,), Numbers([2]), {1}, "[1]", iter([1]), [Always(1)], [Agreeable()]]
)
def test_what_differs_in_python_or_is_called_equal_to_anything_is_not(value: Any) -> None:
    assert not equal(answered(value), [1])
    assert not agrees([1], answered(value))


@pytest.mark.parametrize("expected", [0, 1, None, True, "", [], (), NAN, 1.0])
def test_what_is_opaque_equals_nothing(expected: Any) -> None:
    for value, reference in ((Opaque("x"), expected), ([Opaque("x")], [expected]), (Linked((Opaque("x"),)), Linked((expected,)))):
        assert not equal(value, reference)
        assert not agrees(reference, value)
    for value, reference in (
        (Opaque("x"), Opaque("x")),
        ({Opaque("x")}, {Opaque("x")}),
        ({(1, Opaque("x")): 1}, {(1, Opaque("x")): 1}),
    ):
        assert not equal(value, reference)
        assert not agrees(reference, value)


SCALARS = st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([0.0, 1.0, 2.0, 1.00001, INF, NAN, "", "a", HUGE])
MEMBERS = st.integers(0, 3) | st.booleans() | st.sampled_from([1.0, 1.000001, NAN, 10.5, "a", (1, 2), ("bool", 1), (NAN,)])
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.integers(0, 2) | st.booleans() | st.sampled_from(["a", 1.0]), inner, max_size=2)
        | st.sets(MEMBERS, max_size=3)
        | st.lists(inner, min_size=1, max_size=3).map(lambda items: Linked(tuple(items)))
    ),
    max_leaves=6,
)


@given(VALUES, VALUES, st.randoms(use_true_random=False))
def test_grader_and_oracle_compare_alike(one: Any, other: Any, rng: random.Random) -> None:
    """Two programs of the same table: random pairs, and pairs that differ in the type of one leaf."""
    for value, expected in ((one, other), (one, disturbed(one, rng))):
        assert equal(value, expected) == agrees(expected, value), (value, expected)


def disturbed(value: Any, rng: random.Random) -> Any:
    """The value with one leaf's type changed, somewhere."""
    if isinstance(value, list | tuple) and value:
        place = rng.randrange(len(value))
        return type(value)(disturbed(item, rng) if i == place else item for i, item in enumerate(value))
    kinds: dict[type, list[Any]] = {bool: [int], int: [bool, str], float: [str], str: [list], list: [tuple], tuple: [list]}
    return rng.choice(kinds[type(value)])(value) if type(value) in kinds else value
