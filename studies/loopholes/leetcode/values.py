"""Values as tagged JSON data: what a program is called with and what it gives back, by exact type.

    None, bool, int, str   themselves          list    [value, ...]
    float                  {"float": repr}     tuple   {"tuple": [value, ...]}
    dict                   {"dict": [[key, value], ...]}     set     {"set": [value, ...]}
    chain of nodes         {"linked": [value, ...]}          binary tree, level by level   {"tree": [[value] or null, ...]}
    anything else          {"opaque": reason}

A subclass is not its base, so a value with an ``==`` of its own leaves as ``opaque`` and equals nothing. A chain with a cycle, a
list in itself and whatever is deeper than `MAX_DEPTH` or larger than `MAX_ITEMS` are opaque as a whole.

Standard library only: the confined driver loads this file by its path.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

MAX_DEPTH = 16
"""Three levels of JSON each at most, which a strict reader of replies still takes."""
MAX_ITEMS = 200_000
MAX_TEXT = 1 << 20
MAX_BITS = 13_000
"""Python refuses to print an int of more than 4,300 digits, 14,285 bits; the limit is below that."""


@dataclass(frozen=True)
class Linked:
    """A chain of nodes with ``val`` and ``next``; never empty, since an empty chain is None."""

    values: tuple


@dataclass(frozen=True)
class Tree:
    """A binary tree level by level: ``(value,)`` a node and None for a child that is absent, without those at the end."""

    levels: tuple


@dataclass(frozen=True, eq=False)
class Opaque:
    """A value that is no plain data. It equals nothing."""

    reason: str


@dataclass(frozen=True)
class Nodes:
    """How chains and trees are recognised and built: exact types, and builders from `Linked` and `Tree`."""

    linked: tuple[type, ...] = ()
    tree: tuple[type, ...] = ()
    build_linked: Callable[[Linked], object] = field(default=lambda chain: chain)
    build_tree: Callable[[Tree], object] = field(default=lambda tree: tree)


DATA = Nodes()
"""Chains and trees stay `Linked` and `Tree`."""


class _UnencodableError(Exception):
    """The value is no bounded plain data; ``reason`` says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def encode(value: object, nodes: Nodes = DATA) -> object:
    """The value as JSON data. Never raises for a value's own doing: what cannot be encoded is ``{"opaque": reason}``."""
    try:
        return _Encoder(nodes).encode(value, 0)
    except _UnencodableError as error:
        return {"opaque": error.reason}


class _Encoder:
    """One value's walk, with what is left of its budget."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes, self._left = nodes, MAX_ITEMS

    def encode(self, value: Any, depth: int) -> object:
        self._left -= 1
        if depth > MAX_DEPTH or self._left < 0:
            raise _UnencodableError("too large")
        kind = type(value)
        if kind is list:
            return self._all(value, depth)
        if kind is tuple or kind is set:
            return {kind.__name__: self._all(value, depth)}
        if kind is dict:
            return {"dict": [[self.encode(k, depth + 1), self.encode(v, depth + 1)] for k, v in value.items()]}
        if kind is Linked or _is_one_of(kind, self._nodes.linked):
            return {"linked": self._all(self._chain(value), depth)}
        if kind is Tree or _is_one_of(kind, self._nodes.tree):
            return {"tree": [None if node is None else [self.encode(node[0], depth + 1)] for node in self._levels(value)]}
        return _scalar(value)

    def _all(self, values: Any, depth: int) -> list[object]:
        if all(type(value) is int and value.bit_length() <= MAX_BITS for value in values):  # most lists, and long ones, are these
            self._left -= len(values)
            if self._left >= 0 and depth < MAX_DEPTH:
                return list(values)
        return [self.encode(value, depth + 1) for value in values]

    def _chain(self, node: object) -> tuple:
        """The values along a chain, which ends at the first None."""
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
        for node in queue:  # grows while it is walked: breadth first
            if node is None:
                levels.append(None)
                continue
            if not _is_one_of(type(node), self._nodes.tree) or id(node) in seen or len(seen) > self._left:
                raise _UnencodableError("broken tree")
            seen.add(id(node))
            levels.append((_attribute(node, "val"),))
            queue += [_attribute(node, "left"), _attribute(node, "right")]
        return _trimmed(levels)


def _is_one_of(kind: type, kinds: tuple[type, ...]) -> bool:
    """Identity: a class may have an ``==`` of its own, from its metaclass."""
    return any(kind is one for one in kinds)


def _attribute(node: object, name: str) -> object:
    """An attribute of a node, whose class may be the program's own and do anything."""
    try:
        return getattr(node, name)
    except Exception:
        raise _UnencodableError("broken node") from None


def _trimmed(levels: list) -> tuple:
    while levels and levels[-1] is None:
        levels.pop()
    return tuple(levels)


def _scalar(value: Any) -> object:
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is int and value.bit_length() <= MAX_BITS:
        return value
    if kind is float:
        return {"float": repr(value)}
    if kind is str and len(value) <= MAX_TEXT:
        return _text(value)
    raise _UnencodableError("too large" if kind is int or kind is str else "other type")


def _text(value: str) -> str:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise _UnencodableError("half a character") from None
    return value


def decode(data: object, nodes: Nodes = DATA) -> object:
    """The value of encoded data. Raises ValueError for data that `encode` cannot have written."""
    if data is None or type(data) in (bool, int, str):
        return data
    if type(data) is list:
        return _decode_items(data, nodes)
    if type(data) is not dict or len(data) != 1:
        raise ValueError("a value is neither plain nor tagged")
    (tag, inner), *_ = data.items()
    decoder = _DECODERS.get(tag)
    if decoder is None:
        raise ValueError(f"unknown tag {tag!r}")
    try:
        return decoder(inner, nodes)
    except (TypeError, RecursionError) as error:
        raise ValueError(f"malformed {tag}") from error


def _decode_float(inner: object, nodes: Nodes) -> float:
    if type(inner) is not str:
        raise ValueError("malformed float")
    return float(inner)


def _decode_items(inner: object, nodes: Nodes) -> list:
    if type(inner) is not list:
        raise ValueError("malformed items")
    if all(type(item) is int for item in inner):
        return list(inner)
    return [decode(item, nodes) for item in inner]


def _decode_dict(inner: object, nodes: Nodes) -> dict:
    pairs = _decode_items(inner, nodes)
    if any(type(pair) is not list or len(pair) != 2 for pair in pairs):
        raise ValueError("malformed dict")
    return dict(pairs)


def _decode_linked(inner: object, nodes: Nodes) -> object:
    values = tuple(_decode_items(inner, nodes))
    if not values:
        raise ValueError("malformed linked")
    return nodes.build_linked(Linked(values))


def _decode_tree(inner: object, nodes: Nodes) -> object:
    levels = tuple(None if node is None else tuple(node) for node in _decode_items(inner, nodes))
    if not levels or levels[0] is None or any(node is not None and len(node) != 1 for node in levels):
        raise ValueError("malformed tree")
    return nodes.build_tree(Tree(levels))


def _decode_opaque(inner: object, nodes: Nodes) -> Opaque:
    if type(inner) is not str:
        raise ValueError("malformed opaque")
    return Opaque(inner)


_DECODERS: dict[str, Callable[[object, Nodes], object]] = {
    "float": _decode_float,
    "tuple": lambda inner, nodes: tuple(_decode_items(inner, nodes)),
    "set": lambda inner, nodes: set(_decode_items(inner, nodes)),
    "dict": _decode_dict,
    "linked": _decode_linked,
    "tree": _decode_tree,
    "opaque": _decode_opaque,
}
