"""Parser of tests: ``assert Solution().f(a = [1, 2]) == 3`` is read as data, without evaluating anything.

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
"""Maximum number of characters of one test."""

NAMES: Mapping[str, object] = MappingProxyType({"null": None, "true": True, "false": False, "inf": math.inf, "nan": math.nan})
COMPARISONS = ("is_same_list", "is_same_tree")


@dataclass(frozen=True)
class Call:
    """Arguments of a test's call."""

    args: tuple
    kwargs: Mapping[str, object]


def parse_assert(text: str, function: str) -> tuple[Call, object]:
    """Return the call and the expected value of a test. Raises ValueError with the reason if it has another form."""
    module = _parse(text)
    if len(module.body) != 1 or not isinstance(module.body[0], ast.Assert):
        raise ValueError("a test must be one assert statement")
    return read_assert(module.body[0], function)


def parse_check(text: str, function: str) -> list[tuple[Call, object]]:
    """Return the calls and expected values of all assert statements in ``def check(candidate): ...``; see `parse_assert`.

    Raises:
        ValueError: The text has another form; the message gives the reason.
    """
    checks = [node for node in _parse(text).body if isinstance(node, ast.FunctionDef)]
    if len(checks) != 1 or not all(isinstance(node, ast.Assert) for node in checks[0].body):
        raise ValueError("tests must be one function check(candidate) of assert statements")
    return [read_assert(node, function) for node in checks[0].body if isinstance(node, ast.Assert)]


def read_assert(statement: ast.Assert, function: str) -> tuple[Call, object]:
    """Return the call and the expected value of a parsed statement; see `parse_assert`."""
    match statement.test:
        case ast.Compare(left=call, ops=[ast.Eq()], comparators=[expected]):
            pass
        case ast.Call(func=ast.Name(id=name), args=[call, expected], keywords=[]) if name in COMPARISONS:
            pass
        case _:
            raise ValueError(f"a test must compare with == or with one of {', '.join(COMPARISONS)}")
    return read_call(call, function), read_value(expected)


def read_call(node: ast.expr, function: str) -> Call:
    """Return the arguments of ``Solution().function(...)`` or ``candidate(...)``."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Call(func=ast.Name(id="Solution"), args=[], keywords=[]), attr=name)):
            called = name
        case ast.Call(func=ast.Name(id="candidate")):
            called = function
        case _:
            raise ValueError(f"a test must call Solution().{function} or candidate")
    if called != function:
        raise ValueError(f"a test calls {called}, not {function}")
    if any(keyword.arg is None for keyword in node.keywords):
        raise ValueError("a call must name its arguments one by one")
    names = [str(keyword.arg) for keyword in node.keywords]
    if len(set(names)) != len(names):
        raise ValueError("a call names an argument twice")
    values = [read_value(keyword.value) for keyword in node.keywords]
    return Call(tuple(read_value(arg) for arg in node.args), MappingProxyType(dict(zip(names, values, strict=True))))


def read_value(node: ast.expr) -> object:
    """Return the value of a literal, of a known name or of a helper's call. Raises ValueError for every other expression."""
    try:
        return _value(node)
    except RecursionError as error:
        raise ValueError("a value is nested too deeply") from error
    except OverflowError as error:
        raise ValueError("a number is beyond the range of floats") from error
    except TypeError as error:
        raise ValueError("members of a set and keys of a dict must be hashable") from error


def _value(node: ast.expr) -> object:
    match node:
        case ast.Constant(value=value) if value is None or type(value) in (bool, int, float, str):
            return value
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
            number = _value(operand)
            if type(number) not in (int, float):
                raise ValueError("a sign must stand before a number")
            return -number if isinstance(sign, ast.USub) else number  # type: ignore[operator]
        case ast.List(elts=items):
            plain = [item.value for item in items if isinstance(item, ast.Constant) and type(item.value) is int]
            return plain if len(plain) == len(items) else [_value(item) for item in items]
        case ast.Tuple(elts=items):
            return tuple(_value(item) for item in items)
        case ast.Set(elts=items):
            return {_value(item) for item in items}
        case ast.Dict(keys=keys, values=values) if all(key is not None for key in keys):
            return {_value(k): _value(v) for k, v in zip(keys, values, strict=True) if k is not None}
        case ast.Name(id=name) if name in NAMES:
            return NAMES[name]
        case ast.Attribute(value=ast.Name(id="math"), attr="inf" | "nan" as name):
            return NAMES[name]
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in HELPERS:
            return HELPERS[name](_value(argument))
    raise ValueError(f"cannot read a value from {ast.unparse(node)[:40]}")


def _list_node(values: object) -> Linked | None:
    if type(values) is not list:
        raise ValueError("list_node takes a list")
    return Linked(tuple(values)) if values else None


def _tree_node(values: object) -> Tree | None:
    """Return the binary tree of a list in level order, in which None marks an absent child."""
    if type(values) is not list or (values and values[0] is None):
        raise ValueError("tree_node takes a list that begins with a value")
    if not values:
        return None
    levels: list[tuple | None] = [(values[0],)]
    childless = 1  # nodes whose children have not been read; entries after the children of the last node are ignored
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
        raise ValueError(f"a test must have at most {LIMIT} characters")
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError("a test must be valid Python") from error
