"""Tests as text: ``assert Solution().f(a = [1, 2]) == 3`` is parsed, and its values are read, without evaluating anything.

assert CALL == VALUE          assert is_same_list(CALL, VALUE)          assert is_same_tree(CALL, VALUE)
CALL    Solution().f(...) or candidate(...), positional and keyword arguments
VALUE   literals, None / True / False / null / true / false, inf, nan, a sign before a number, float("inf"), math.inf,
        list_node([...]), tree_node([...])
"""

import ast
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from studies.environments.leetcode.values import Linked, Tree

LIMIT = 1 << 20
"""Characters of one test."""

NAMES: Mapping[str, object] = MappingProxyType({"null": None, "true": True, "false": False, "inf": math.inf, "nan": math.nan})
COMPARISONS = ("is_same_list", "is_same_tree")


@dataclass(frozen=True)
class Call:
    """The arguments of a test's call."""

    args: tuple
    kwargs: Mapping[str, object]


def parse_assert(text: str, function: str) -> tuple[Call, object]:
    """The call and the expected value of a test. Raises ValueError with the reason where it is not of the known form."""
    module = _parse(text)
    if len(module.body) != 1 or not isinstance(module.body[0], ast.Assert):
        raise ValueError("a test is one assert statement")
    return read_assert(module.body[0], function)


def parse_check(text: str, function: str) -> list[tuple[Call, object]]:
    """The same of every assert in ``def check(candidate): ...``. Raises ValueError with the reason."""
    checks = [node for node in _parse(text).body if isinstance(node, ast.FunctionDef)]
    if len(checks) != 1 or not all(isinstance(node, ast.Assert) for node in checks[0].body):
        raise ValueError("tests are one function check(candidate) of assert statements")
    return [read_assert(node, function) for node in checks[0].body if isinstance(node, ast.Assert)]


def read_assert(statement: ast.Assert, function: str) -> tuple[Call, object]:
    """`parse_assert` of a statement that is parsed already."""
    match statement.test:
        case ast.Compare(left=call, ops=[ast.Eq()], comparators=[expected]):
            pass
        case ast.Call(func=ast.Name(id=name), args=[call, expected], keywords=[]) if name in COMPARISONS:
            pass
        case _:
            raise ValueError(f"a test compares with == or one of {', '.join(COMPARISONS)}")
    return read_call(call, function), read_value(expected)


def parse_call(arguments: str) -> Call:
    """The call ``f(arguments)``, arguments as a statement prints them: ``s = "ab", k = 3``. Raises ValueError with the reason."""
    match _parse(f"candidate({arguments})").body:
        case [ast.Expr(value=call)]:
            return read_call(call, "candidate")
    raise ValueError("a list of arguments is one expression")


def parse_value(text: str) -> object:
    """A value that stands alone. Raises ValueError with the reason."""
    match _parse(text.strip()).body:
        case [ast.Expr(value=value)]:
            return read_value(value)
    raise ValueError("a value is one expression")


def read_call(node: ast.expr, function: str) -> Call:
    """The arguments of ``Solution().function(...)`` or ``candidate(...)``."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Call(func=ast.Name(id="Solution"), args=[], keywords=[]), attr=name)):
            called = name
        case ast.Call(func=ast.Name(id="candidate")):
            called = function
        case _:
            raise ValueError(f"a test calls Solution().{function} or candidate")
    if called != function:
        raise ValueError(f"a test calls {called}, not {function}")
    if any(keyword.arg is None for keyword in node.keywords):
        raise ValueError("a call names its arguments one by one")
    names = [str(keyword.arg) for keyword in node.keywords]
    if len(set(names)) != len(names):
        raise ValueError("a call names an argument twice")
    values = [read_value(keyword.value) for keyword in node.keywords]
    return Call(tuple(read_value(arg) for arg in node.args), MappingProxyType(dict(zip(names, values, strict=True))))


def read_value(node: ast.expr) -> object:
    """The value of a literal, of a known name or of a helper's call. Raises ValueError for every other expression."""
    try:
        return _value(node)
    except RecursionError as error:
        raise ValueError("a value is nested too deeply") from error
    except OverflowError as error:
        raise ValueError("a number is beyond every float") from error


def _value(node: ast.expr) -> object:
    match node:
        case ast.Constant(value=value) if value is None or type(value) in (bool, int, float, str):
            return value
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
            number = _value(operand)
            if type(number) not in (int, float):
                raise ValueError("a sign stands before a number")
            return -number if isinstance(sign, ast.USub) else number  # type: ignore[operator]
        case ast.List(elts=items):
            plain = [item.value for item in items if isinstance(item, ast.Constant) and type(item.value) is int]
            return plain if len(plain) == len(items) else [_value(item) for item in items]
        case ast.Tuple(elts=items):
            return tuple(_value(item) for item in items)
        case ast.Set(elts=items):
            return _hashed(lambda: {_value(item) for item in items})
        case ast.Dict(keys=keys, values=values) if all(key is not None for key in keys):
            return _hashed(lambda: {_value(k): _value(v) for k, v in zip(keys, values, strict=True) if k is not None})
        case ast.Name(id=name) if name in NAMES:
            return NAMES[name]
        case ast.Attribute(value=ast.Name(id="math"), attr="inf" | "nan" as name):
            return NAMES[name]
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in HELPERS:
            return HELPERS[name](_value(argument))
    raise ValueError(f"no value is read from {ast.unparse(node)[:40]}")


def _hashed(build: Callable[[], object]) -> object:
    try:
        return build()
    except TypeError as error:
        raise ValueError("a member of a set and a key of a dict are hashable") from error


def _list_node(values: object) -> Linked | None:
    if type(values) is not list:
        raise ValueError("list_node takes a list")
    return Linked(tuple(values)) if values else None


def _tree_node(values: object) -> Tree | None:
    """The tree of a level order, None for a child that is absent."""
    if type(values) is not list or (values and values[0] is None):
        raise ValueError("tree_node takes a list that begins with a value")
    if not values:
        return None
    levels: list[tuple | None] = [(values[0],)]
    childless = 1  # nodes whose two children are still to be read; entries beyond the last of them belong to no node
    while childless and len(levels) < len(values):
        children = values[len(levels) : len(levels) + 2]
        levels += [None if value is None else (value,) for value in children]
        childless += sum(value is not None for value in children) - 1
    while levels[-1] is None:
        levels.pop()
    return Tree(tuple(levels))


def _float(text: object) -> float:
    if type(text) not in (str, int, float):
        raise ValueError("float takes a number or its text")
    return float(text)  # type: ignore[arg-type]


HELPERS: Mapping[str, Callable[[object], object]] = MappingProxyType(
    {"list_node": _list_node, "tree_node": _tree_node, "float": _float}
)


def _parse(text: str) -> ast.Module:
    if len(text) > LIMIT:
        raise ValueError(f"a test has at most {LIMIT} characters")
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError("a test is Python") from error
