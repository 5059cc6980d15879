"""Values as tagged JSON data: the arguments and results of programs.

    None, bool, int, str   themselves          list    [value, ...]
    float                  {"float": repr}     tuple   {"tuple": [value, ...]}
    dict                   {"dict": [[key, value], ...]}     set     {"set": [value, ...]}
    chain of nodes         {"linked": [value, ...]}          binary tree, level by level   {"tree": [[value] or null, ...]}
    anything else          {"opaque": reason}

A value of another type (Counter, Decimal, a subclass of list, ...) is encoded as the plain value that it equals under its ``==``.
If there is none, or if it equals anything, it is ``opaque`` and equals nothing. A chain with a cycle, a list that contains itself
and everything deeper than `MAX_DEPTH` or larger than `MAX_ITEMS` are opaque as a whole. Data to decode come from a process in which
a program could do anything, so the same bounds hold there, and no value takes long to read.

Standard library only: the confined driver loads this file by its path.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

MAX_DEPTH = 16
"""Each level takes at most three levels of JSON, within the limit of a strict reader of replies."""
MAX_ITEMS = 200_000
MAX_TEXT = 1 << 20
MAX_BITS = 13_000
"""Python refuses to print an int of more than 4,300 digits, 14,285 bits; the limit is below that."""
MAX_FLOAT = 32
"""Maximum number of characters of a float; none has so many."""
MAX_HASHING = 1 << 20
"""Maximum product of the members of a set (or keys of a dict) and all items in them, for example 1024 numbers.

Members that are chosen to have equal hashes are compared pairwise, and numbers of equal hash are easy to find."""


SCALARS = (type(None), bool, int, float, str)
CONVERSIONS: dict[type, Callable[[Any], object]] = {
    int: int, float: float, str: str.__str__, list: list, tuple: tuple, set: set, dict: dict,
}  # fmt: skip
"""Conversions to plain types; ``str`` itself would take anything."""


BUILTIN = (*SCALARS, complex, bytes, dict, set, frozenset)
PROBES = (
    (7_364_218, 2_718_281), (0.318, 1.442), ("quartz", "vellum"), ([11], [13]), ((11,), (13,)), (True, False),
    ({11: 0}, {13: 0}), ({11}, {13}),
)  # fmt: skip
"""Pairs of different values: a value that equals both of a pair has a false ``==``."""


@dataclass(frozen=True)
class Linked:
    """Chain of nodes with ``val`` and ``next``; never empty, because an empty chain is None."""

    values: tuple


@dataclass(frozen=True)
class Tree:
    """Binary tree level by level: ``(value,)`` for a node and None for a missing child, without trailing ones."""

    levels: tuple


@dataclass(frozen=True, eq=False)
class Opaque:
    """Value that is not plain data. It equals nothing."""

    reason: str


@dataclass(frozen=True)
class Nodes:
    """Types by which chains and trees are recognized (exactly), and builders from `Linked` and `Tree`."""

    linked: tuple[type, ...] = ()
    tree: tuple[type, ...] = ()
    build_linked: Callable[[Linked], object] = field(default=lambda chain: chain)
    build_tree: Callable[[Tree], object] = field(default=lambda tree: tree)


DATA = Nodes()
"""Nodes that keep chains and trees as `Linked` and `Tree`."""


class _UnencodableError(Exception):
    """Error for a value that is not bounded plain data; its text says why."""


def encode(value: object, nodes: Nodes = DATA) -> object:
    """Return the value as JSON data; ``{"opaque": reason}`` if it cannot be encoded. A value can never make it raise."""
    try:
        return _Encoder(nodes).encode(value, 0)
    except _UnencodableError as error:
        return {"opaque": str(error)}


class _Encoder:
    """Encoder of one value, with its remaining budget of items."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes, self._left = nodes, MAX_ITEMS

    def encode(self, value: Any, depth: int) -> object:
        self._left -= 1
        if depth > MAX_DEPTH or self._left < 0:
            raise _UnencodableError("too large")
        value_type = type(value)
        if value_type is list:
            return self._all(value, depth)
        if value_type is tuple:
            return {"tuple": self._all(value, depth)}
        if value_type is set:
            return {"set": self._hashed(len(value), lambda: self._all(value, depth))}
        if value_type is dict:
            keys = self._hashed(len(value), lambda: [self.encode(key, depth + 1) for key in value])
            return {"dict": [[key, self.encode(inner, depth + 1)] for key, inner in zip(keys, value.values(), strict=True)]}
        if value_type is Linked or _is_one_of(value_type, self._nodes.linked):
            return {"linked": self._all(self._chain(value), depth)}
        if value_type is Tree or _is_one_of(value_type, self._nodes.tree):
            return {"tree": [None if node is None else [self.encode(node[0], depth + 1)] for node in self._levels(value)]}
        return _scalar(value) if _is_one_of(value_type, SCALARS) else self.encode(_plain(value), depth)

    def _hashed(self, count: int, encode: Callable[[], list[object]]) -> list[object]:
        """Encode members of a set, or keys of a dict."""
        left = self._left
        encoded = encode()
        if count * (left - self._left) > MAX_HASHING:
            raise _UnencodableError("too large")
        return encoded

    def _all(self, values: Any, depth: int) -> list[object]:
        if all(type(value) is int and value.bit_length() <= MAX_BITS for value in values):  # most lists, and long ones, are these
            self._left -= len(values)
            if self._left >= 0 and depth < MAX_DEPTH:
                return list(values)
        return [self.encode(value, depth + 1) for value in values]

    def _chain(self, node: object) -> tuple:
        """Return the values along a chain, which ends at the first None."""
        if isinstance(node, Linked):
            return node.values
        values, seen = [], set()
        while node is not None:
            if not _is_one_of(type(node), self._nodes.linked) or id(node) in seen or len(seen) > self._left:
                raise _UnencodableError("broken chain")
            seen.add(id(node))
            values.append(_attribute(node, "val"))
            node = _attribute(node, "next")
        return tuple(values)

    def _levels(self, root: object) -> tuple:
        if isinstance(root, Tree):
            return root.levels
        levels, queue, seen = [], [root], set()
        for node in queue:  # breadth first: the queue grows during the loop
            if node is None:
                levels.append(None)
                continue
            if not _is_one_of(type(node), self._nodes.tree) or id(node) in seen or len(seen) > self._left:
                raise _UnencodableError("broken tree")
            seen.add(id(node))
            levels.append((_attribute(node, "val"),))
            queue += [_attribute(node, "left"), _attribute(node, "right")]
        return _trimmed(levels)


def _is_one_of(value_type: type, kinds: tuple[type, ...]) -> bool:
    """Return True if a class is among others by identity, because a metaclass can override ``==`` of classes."""
    return any(value_type is allowed for allowed in kinds)


def _attribute(node: object, name: str) -> object:
    """Return an attribute of a node, whose class may be the program's own and do anything."""
    try:
        return getattr(node, name)
    except Exception:
        raise _UnencodableError("broken node") from None


def _trimmed(levels: list) -> tuple:
    while levels and levels[-1] is None:
        levels.pop()
    return tuple(levels)


def _plain(value: Any) -> object:
    """Return the plain value that a value of another type equals, by its own ``==``, which may be the program's and do anything."""
    for plain_type, convert in CONVERSIONS.items():
        with contextlib.suppress(Exception):
            if plain_type in SCALARS or len(value) <= MAX_ITEMS:  # an iterator has no length, and may have no end
                plain = convert(value)
                if _equals(value, plain) and not overrides(value):
                    return plain
    raise _UnencodableError("other type")


def overrides(value: Any) -> bool:
    """Return True if ``value == expected`` would hold for any expected value, tested with values that it cannot all equal."""
    value_type = type(value)
    if _is_one_of(value_type, BUILTIN):
        return False
    if value_type is list or value_type is tuple:
        return bool(value) and all(overrides(item) for item in value)
    return _equals(value, object()) or any(_equals(value, probe) and _equals(value, other) for probe, other in PROBES)


def _equals(value: Any, other: object) -> bool:
    try:
        return bool(value == other)
    except Exception:
        return False


def _scalar(value: Any) -> object:
    value_type = type(value)
    if value is None or value_type is bool:
        return value
    if value_type is int and value.bit_length() <= MAX_BITS:
        return value
    if value_type is float:
        return {"float": repr(value)}
    if value_type is str and len(value) <= MAX_TEXT:
        return _text(value)
    raise _UnencodableError("too large")


def _text(value: str) -> str:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise _UnencodableError("half a character") from None
    return value


def decode(data: object, nodes: Nodes = DATA) -> object:
    """Return the value of encoded data. Raises ValueError for data that `encode` cannot have written, after bounded work."""
    try:
        return _Decoder(nodes).decode(data, 0)
    except (TypeError, RecursionError) as error:
        raise ValueError("malformed value") from error


class _Decoder:
    """Decoder of one value, with its remaining budget of items; the counterpart of `_Encoder`."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes, self._left = nodes, MAX_ITEMS

    def decode(self, data: Any, depth: int) -> object:
        self._left -= 1
        if depth > MAX_DEPTH or self._left < 0:
            raise ValueError("too large")
        value_type = type(data)
        if value_type is dict:
            return self._tagged(data, depth)
        if value_type is list:
            return self._all(data, depth)
        if (value_type is int and data.bit_length() > MAX_BITS) or (value_type is str and len(data) > MAX_TEXT):
            raise ValueError("too large")
        if data is None or value_type is bool or value_type is int or value_type is str:
            return data
        raise ValueError("a value is neither plain nor tagged")

    def _tagged(self, data: dict[str, Any], depth: int) -> object:
        if len(data) != 1:
            raise ValueError("a value is neither plain nor tagged")
        ((tag, inner),) = data.items()
        if tag == "float":
            return _float(inner)
        if tag == "tuple":
            return tuple(self._all(inner, depth))
        if tag == "set":
            return self._set(inner, depth)
        if tag == "dict":
            return self._dict(inner, depth)
        if tag == "linked" and inner:
            return self._nodes.build_linked(Linked(tuple(self._all(inner, depth))))
        if tag == "tree" and inner and _list(inner)[0] is not None:
            return self._nodes.build_tree(Tree(tuple(None if node is None else self._node(node, depth) for node in inner)))
        if tag == "opaque" and type(inner) is str:
            return Opaque(inner)
        raise ValueError(f"malformed {tag}" if tag in ("linked", "tree", "opaque") else f"unknown tag {tag[:80]!r}")

    def _all(self, data: Any, depth: int) -> list:
        if all(type(item) is int and item.bit_length() <= MAX_BITS for item in _list(data)):
            self._left -= len(data)
            if self._left >= 0 and depth < MAX_DEPTH:
                return list(data)
        return [self.decode(item, depth + 1) for item in data]

    def _set(self, data: Any, depth: int) -> set:
        _check_hashing(len(_list(data)), len(data))
        left = self._left
        members = self._all(data, depth)
        _check_hashing(len(members), left - self._left)
        return _distinct(set(members), members)

    def _dict(self, data: Any, depth: int) -> dict:
        if any(type(pair) is not list or len(pair) != 2 for pair in _list(data)):
            raise ValueError("malformed dict")
        _check_hashing(len(data), len(data))
        left = self._left
        keys = [self.decode(key, depth + 1) for key, _ in data]
        _check_hashing(len(keys), left - self._left)
        return _distinct(dict(zip(keys, (self.decode(value, depth + 1) for _, value in data), strict=True)), keys)

    def _node(self, data: Any, depth: int) -> tuple[object]:
        if len(_list(data)) != 1:
            raise ValueError("malformed tree")
        return (self.decode(data[0], depth + 1),)


def _check_hashing(count: int, items: int) -> None:
    """Raise ValueError if `count` members with so many items would take too long in a hash table with equal hashes."""
    if count * items > MAX_HASHING:
        raise ValueError("too large")


def _distinct(table: Any, members: list) -> Any:
    if len(table) != len(members):
        raise ValueError("malformed set or dict: a member or a key comes twice")
    return table


def _list(data: Any) -> list:
    if type(data) is not list:
        raise ValueError("malformed items")
    return data


def _float(data: Any) -> float:
    if type(data) is not str or len(data) > MAX_FLOAT or repr(value := float(data)) != data:
        raise ValueError("malformed float")
    return value
