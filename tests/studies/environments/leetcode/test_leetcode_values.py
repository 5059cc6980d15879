"""Values survive the way out of the jail by their plain type, and nothing that only looks like them does."""

import contextlib
import json
import math
from collections import deque
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from timing import at_most

from studies.environments.leetcode import values
from studies.environments.leetcode.values import Linked, Nodes, Opaque, Tree, decode, encode
from studies.sandbox.wire import read_reply

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=["Cs"]))
HASHABLE = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=4)


def containers(inner: st.SearchStrategy) -> st.SearchStrategy:
    lists = st.lists(inner, max_size=4)
    chains = st.lists(inner, min_size=1, max_size=4).map(lambda items: Linked(tuple(items)))
    trees = inner.map(lambda item: Tree(((item,), None, (item,))))
    sets, dicts = st.sets(HASHABLE, max_size=3), st.dictionaries(HASHABLE, inner, max_size=3)
    return lists | lists.map(tuple) | sets | dicts | chains | trees


VALUES = st.recursive(SCALARS, containers, max_leaves=12)


def identical(one: Any, other: Any) -> bool:
    """The same value and the same types all the way down, NaN included."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return one == other or (math.isnan(one) and math.isnan(other))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(identical, one, other))
    if isinstance(one, Linked | Tree):
        return identical(vars(one), vars(other))
    if isinstance(one, dict):
        return identical(list(one.items()), list(other.items()))
    if isinstance(one, set):  # in what order it is written depends on how it was built
        return sorted(map(repr, one)) == sorted(map(repr, other))
    return one == other


@given(VALUES)
def test_a_value_comes_back_as_it_was_through_a_strict_reader(value: Any) -> None:
    text = json.dumps({"returns": [["value", encode(value), False]]}, allow_nan=False).encode() + b"\n"
    assert identical(decode(read_reply(text, len(text))["returns"][0][1]), value)


class Liar(int):
    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


@pytest.mark.parametrize(
    "value",
    [
        Liar(3),
        [1, Liar(3)],
        {"a": Liar(3)},
        deque([1]),
        3j,
        b"3",
        object,
        range(3),
        iter([1]),
        type("L", (list,), {"__len__": None})(),
    ],
)
def test_what_equals_no_plain_value_or_any_is_no_data(value: Any) -> None:
    encoded = encode(value)
    assert isinstance(encoded, dict)
    assert set(encoded) == {"opaque"}
    found = decode(encoded)
    assert isinstance(found, Opaque)
    assert found != decode(encoded)


def test_cycles_and_sizes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "MAX_ITEMS", 1000)  # checked annotations make a walk slow
    ring: list[Any] = []
    ring.append(ring)
    assert encode(ring) == {"opaque": "too large"}
    wide: list[Any] = [0] * 1000
    for _ in range(3):
        wide = [wide] * 1000  # a billion items out of four lists
    assert encode(wide) == {"opaque": "too large"}
    assert encode([0] * 999) == [0] * 999
    assert encode([0] * 1000) == {"opaque": "too large"}
    assert encode(1 << 20_000) == {"opaque": "too large"}
    assert encode("\ud800") == {"opaque": "half a character"}


class Node:
    def __init__(self, val: Any, next: Any = None, left: Any = None, right: Any = None) -> None:
        self.val, self.next, self.left, self.right = val, next, left, right


class Other(Node):
    pass


LISTS, TREES = Nodes(linked=(Node,)), Nodes(tree=(Node,))


def test_chains_and_trees_are_read_from_nodes() -> None:
    assert encode(Node(1, Node(2.0, Node([3]))), LISTS) == {"linked": [1, {"float": "2.0"}, [3]]}
    assert encode(Node(1, left=None, right=Node(2, left=Node(3))), TREES) == {"tree": [[1], None, [2], [3]]}
    assert encode(Node(1), Nodes()) == {"opaque": "other type"}
    assert encode(None, LISTS) is None


def test_nodes_that_are_none_are_opaque() -> None:
    ring = Node(1)
    ring.next = ring
    assert encode(ring, LISTS) == {"opaque": "broken chain"}
    assert encode(Node(1, Other(2)), LISTS) == {"opaque": "broken chain"}
    shared = Node(1)
    assert encode(Node(0, left=shared, right=shared), TREES) == {"opaque": "broken tree"}
    bare = Node(1)
    del bare.next
    assert encode(bare, LISTS) == {"opaque": "broken node"}


PRIME = 2**61 - 1
"""Multiples of it have one hash, 0."""
SHARED_HEAD: tuple[Any, ...] = (0,) * 200
COLLIDING = {
    "a set": {"set": [k * PRIME for k in range(1, 60_000)]},
    "the keys of a dict": {"dict": [[k * PRIME, 0] for k in range(1, 60_000)]},
    "floats": {"set": [{"float": repr(float(k << 61))} for k in range(1, 40_000)]},
    "tuples": {"set": [{"tuple": [*SHARED_HEAD, k * PRIME]} for k in range(1, 900)]},
    "many sets": [{"set": [k * PRIME for k in range(1, 900)]} for _ in range(40)],
}


@pytest.mark.parametrize("name", COLLIDING)
def test_integers_of_one_hash_cost_little_to_decode(name: str) -> None:
    """A set of n members with one hash is built by n * n / 2 comparisons: 60,000 took a minute."""
    with at_most(3):
        with contextlib.suppress(ValueError):
            decode(COLLIDING[name])


@pytest.mark.parametrize(
    "data",
    [
        {"float": " 1.0"}, {"float": "1_0.0"}, {"float": "1"}, {"set": [1, 1]}, {"dict": [[1, 2], [1, 3]]}, {"set": [1, True]},
        {}, {"a": 1, "b": 2}, 1.5, {"nothing": 1}, {"float": 1.5}, {"float": "x"}, {"tuple": 3}, {"dict": [[1]]},
        {"dict": [[[], 1]]},
        {"set": [[]]}, {"linked": []}, {"linked": 3}, {"tree": []}, {"tree": [None]}, {"tree": [[1, 2]]}, {"tree": [3]},
        {"opaque": 3}, {"tree": {"a": 1}}, {"tree": "a"}, {"linked": {"a": 1}}, {"tuple": {}},
    ],
)  # fmt: skip
def test_malformed_data_is_refused(data: Any) -> None:
    with pytest.raises(ValueError, match=r"malformed|unknown tag|neither plain|could not convert"):
        decode(data)


TAGS = ("float", "tuple", "set", "dict", "linked", "tree", "opaque", "other")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.floats(-1, 1) | st.sampled_from(["", "nan", "1.0", "a"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(TAGS), inner, max_size=2),
    max_leaves=8,
)


@given(JSON | st.builds(lambda tag, inner: {tag: inner}, st.sampled_from(TAGS), JSON))
def test_whatever_a_program_forges_is_a_value_or_a_value_error(data: Any) -> None:
    """Any other exception would end the grader of a whole batch."""
    with contextlib.suppress(ValueError):
        assert encode(decode(data)) is not None or data is None
