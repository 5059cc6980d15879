"""Mutants, wrong programs that look right: reference solutions with one change in their syntax tree.

    off_by_one   an integer, a length or a bound of range() is one more or one less
    constant     a constant is another one: 0, 1, another number of the same program, the other truth value, an empty text
    comparison   < for <=, == for !=, in for not in, and so on
    operator     + for -, * for +, // for %, and for or, min for max

Mutants of a program are all different, none is the program, and their order depends only on the seed.
"""

import ast
import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

Kind = str


@dataclass(frozen=True)
class Mutant:
    """Program that differs from its original in one place; ``line`` is that place in the original's normal form."""

    kind: Kind
    line: int
    code: str


COMPARISONS: Mapping[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = MappingProxyType(
    {
        ast.Lt: (ast.LtE, ast.Gt),
        ast.LtE: (ast.Lt, ast.GtE),
        ast.Gt: (ast.GtE, ast.Lt),
        ast.GtE: (ast.Gt, ast.LtE),
        ast.Eq: (ast.NotEq,),
        ast.NotEq: (ast.Eq,),
        ast.In: (ast.NotIn,),
        ast.NotIn: (ast.In,),
    }
)
OPERATORS: Mapping[type[ast.operator], tuple[type[ast.operator], ...]] = MappingProxyType(
    {
        ast.Add: (ast.Sub,),
        ast.Sub: (ast.Add,),
        ast.Mult: (ast.Add,),
        ast.FloorDiv: (ast.Mod,),
        ast.Mod: (ast.FloorDiv,),
        ast.BitAnd: (ast.BitOr,),
        ast.BitOr: (ast.BitAnd,),
        ast.BitXor: (ast.BitOr,),
        ast.LShift: (ast.RShift,),
        ast.RShift: (ast.LShift,),
    }
)
SWAPPED = MappingProxyType({"min": "max", "max": "min"})

Change = tuple[ast.AST, ast.AST]
"""A node and its replacement; never an operator node, because Python shares one object for all its occurrences."""


def mutants(code: str, seed: int, per_kind: int | None = None) -> list[Mutant]:
    """Return the mutants of a program, at most ``per_kind`` of each kind. Raises SyntaxError for text that is not Python."""
    tree = ast.parse(ast.unparse(ast.parse(code)))
    seen = {ast.unparse(tree) + "\n"}
    chosen: list[Mutant] = []
    for mutation, changes in KINDS.items():
        drawn = list(changes(tree))
        random.Random(f"{seed} {mutation} {code}").shuffle(drawn)
        made = (Mutant(mutation, getattr(old, "lineno", 0), text) for old, new in drawn for text in _changed(tree, old, new, seen))
        chosen += itertools.islice(made, per_kind)
    return chosen


def _changed(tree: ast.AST, old: ast.AST, new: ast.AST, seen: set[str]) -> Iterator[str]:
    """Yield the program with the change, unless it was seen before; the tree is restored afterwards."""
    _Replace(old, new).visit(tree)
    text = ast.unparse(tree) + "\n"
    _Replace(new, old).visit(tree)
    if text not in seen:
        seen.add(text)
        yield text


class _Replace(ast.NodeTransformer):
    """Transformer that replaces a node, which is found by identity."""

    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self._old, self._new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self._new if node is self._old else self.generic_visit(node)


def _body(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield nodes that are executed: neither annotations nor expression statements of texts."""
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop(0)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        yield node
        skipped = {id(getattr(node, name, None)) for name in ("annotation", "returns")}
        todo += [child for child in ast.iter_child_nodes(node) if id(child) not in skipped]


def _numbers(tree: ast.AST) -> list[ast.Constant]:
    return [node for node in _body(tree) if isinstance(node, ast.Constant) and type(node.value) is int]


def _plus(node: ast.expr, step: int) -> ast.expr:
    return ast.BinOp(node, ast.Add() if step > 0 else ast.Sub(), ast.Constant(abs(step)))


def _off_by_one(tree: ast.AST) -> Iterator[Change]:
    for number in _numbers(tree):
        assert isinstance(number.value, int)
        yield number, ast.Constant(number.value + 1)
        yield number, ast.Constant(number.value - 1) if number.value else ast.UnaryOp(ast.USub(), ast.Constant(1))
    for node in _body(tree):
        match node:
            case ast.Call(func=ast.Name(id="len")):
                yield from ((node, _plus(node, step)) for step in (1, -1))
            case ast.Call(func=ast.Name(id="range"), args=args):
                bounds = [bound for bound in args[:2] if not isinstance(bound, ast.Constant)]
                yield from ((bound, _plus(bound, step)) for bound in bounds for step in (1, -1))


def _constants(tree: ast.AST) -> Iterator[Change]:
    values = sorted({number.value for number in _numbers(tree) if isinstance(number.value, int)} | {0, 1})
    for node in _body(tree):
        match node:
            case ast.Constant(value=bool(old)):
                yield node, ast.Constant(not old)
            case ast.Constant(value=int(old)):  # neighbors are mutants of another kind
                yield from ((node, ast.Constant(value)) for value in values if abs(value - old) > 1)
            case ast.Constant(value=str(old)) if old:
                yield node, ast.Constant("")


def _comparisons(tree: ast.AST) -> Iterator[Change]:
    for node in _body(tree):
        if isinstance(node, ast.Compare):
            for place, operator in enumerate(node.ops):
                for wrong in COMPARISONS.get(type(operator), ()):
                    yield node, ast.Compare(node.left, [*node.ops[:place], wrong(), *node.ops[place + 1 :]], node.comparators)


def _operators(tree: ast.AST) -> Iterator[Change]:
    for node in _body(tree):
        match node:
            case ast.BinOp(left=left, op=op, right=right):
                yield from ((node, ast.BinOp(left, wrong(), right)) for wrong in OPERATORS.get(type(op), ()))
            case ast.AugAssign(target=target, op=op, value=value):
                yield from ((node, ast.AugAssign(target, wrong(), value)) for wrong in OPERATORS.get(type(op), ()))
            case ast.BoolOp(op=op, values=values):
                yield node, ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
            case ast.Name(id=name, ctx=context) if name in SWAPPED:
                yield node, ast.Name(SWAPPED[name], context)


KINDS: Mapping[Kind, Callable[[ast.AST], Iterator[Change]]] = MappingProxyType(
    {"off_by_one": _off_by_one, "constant": _constants, "comparison": _comparisons, "operator": _operators}
)
