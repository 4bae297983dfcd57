"""Values of a Python file without running it: literals, what is calculated from them, and names of such values."""

from __future__ import annotations

import ast
import operator
from collections.abc import Container, Iterator
from typing import Any

from .source import Code

_MOST = 2**64
_OPERATORS: dict[type[ast.AST], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
}


class UnknownValueError(Exception):
    """A value is not known without running the file."""


def read_assignments(tree: ast.Module, imported: Container[str] = ()) -> dict[str, Any]:
    """The names that the file's top level binds, and their values; `Code` where they are not known.

    What could bind or change names in a way that is not followed (if, for, with, a change of an item, an import of
    everything) has an entry of its own, "line 7", with its text; names keep the values that they had before it.

    Args:
        imported: names that are values also where they are imported: `Code`.
    """
    found: dict[str, Any] = {}
    for statement in tree.body:
        match statement:
            case ast.Assign(targets=targets, value=value) if all(isinstance(one, ast.Name) for one in targets):
                for one in targets:
                    found[one.id] = _evaluate_or_code(value, found)  # type: ignore[attr-defined]
            case ast.AnnAssign(target=ast.Name(id=name), value=value):
                if value is not None:
                    found[name] = _evaluate_or_code(value, found)
            case ast.AugAssign(target=ast.Name(id=name), op=op, value=value):
                joined = ast.BinOp(ast.Name(name), op, value)
                found[name] = _evaluate_or_code(joined, found)
            case ast.Import():
                continue
            case ast.ImportFrom(names=names) if not _takes_all(statement):
                found |= {name: Code(_text(statement)) for one in names if (name := one.asname or one.name) in imported}
            case ast.Expr(value=ast.Constant()) | ast.Pass():
                continue
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found[name] = Code(f"{'class' if isinstance(statement, ast.ClassDef) else 'def'} {name}")
            case _:
                found[f"line {statement.lineno}"] = Code(_text(statement))
                for name in sorted(_names_bound(statement) - found.keys()):
                    found[name] = Code(f"{name}, which line {statement.lineno} may set")
    return found


def find_calls(tree: ast.Module, name: str) -> Iterator[ast.Call]:
    """Calls of a function whose dotted name ends in `name`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            dotted = _text(node.func)
            if dotted == name or dotted.endswith(f".{name}"):
                yield node


def read_call(call: ast.Call, names: dict[str, Any], positional: tuple[str, ...] = ()) -> dict[str, Any]:
    """The arguments of a call by name; those of no name as "argument 3", and `**more` under its text."""
    found: dict[str, Any] = {}
    for place, value in enumerate(call.args):
        name = positional[place] if place < len(positional) else f"argument {place + 1}"
        found[name] = _evaluate_or_code(value, names)
    for keyword in call.keywords:
        found[keyword.arg or f"more {_text(keyword.value)}"] = (
            _evaluate_or_code(keyword.value, names) if keyword.arg else Code(f"**{_text(keyword.value)}")
        )
    return found


def evaluate(node: ast.expr, names: dict[str, Any]) -> Any:
    """The value of an expression.

    Raises:
        UnknownValueError: it is more than literals.
    """
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name) if name in names and not isinstance(names[name], Code):
            return names[name]
        case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
            values = [evaluate(item, names) for item in items]
            return {ast.List: list, ast.Tuple: tuple, ast.Set: set}[type(node)](values)
        case ast.Dict(keys=keys, values=values) if all(key is not None for key in keys):
            pairs = zip(keys, values, strict=True)
            return {evaluate(key, names): _evaluate_or_code(value, names) for key, value in pairs if key is not None}
        case ast.Call(func=ast.Name(id="dict"), args=[], keywords=keywords) if all(one.arg for one in keywords):
            return {one.arg: _evaluate_or_code(one.value, names) for one in keywords}
        case ast.Call(func=ast.Name(id="float" | "int" as kind), args=[ast.Constant(value=str(value))], keywords=[]):
            return _attempt({"float": float, "int": int}[kind], value)
        case ast.Attribute(attr=attribute) if _text(node).rpartition(".")[0].endswith("AMP_TYPE"):
            return attribute.lower()
        case ast.Attribute(value=ast.Name(id="torch"), attr=attribute):
            return f"torch.{attribute}"
        case ast.Subscript(value=value, slice=place):
            return _attempt(operator.getitem, evaluate(value, names), evaluate(place, names))
        case ast.JoinedStr(values=parts):
            return "".join(_format(part, names) for part in parts)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _attempt(_OPERATORS[type(op)], evaluate(operand, names))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _calculate(op, evaluate(left, names), evaluate(right, names))
    raise UnknownValueError


def _format(part: ast.expr, names: dict[str, Any]) -> str:
    """A piece of an f-string, of texts and numbers without a format of their own."""
    if isinstance(part, ast.FormattedValue):
        value = evaluate(part.value, names)
        if part.conversion != -1 or part.format_spec is not None or type(value) not in (str, int, float, bool):
            raise UnknownValueError
        return str(value)
    return str(evaluate(part, names))


def _evaluate_or_code(node: ast.expr, names: dict[str, Any]) -> Any:
    try:
        return evaluate(node, names)
    except (UnknownValueError, TypeError):  # the latter: a list as a key
        return Code(_text(node))


def _calculate(op: ast.operator, left: Any, right: Any) -> Any:
    """Numbers of a usual size, and texts that are joined: nothing that takes long."""
    if isinstance(left, str) and isinstance(right, str) and isinstance(op, ast.Add):
        return left + right
    if not all(type(one) in (int, float) and abs(one) <= _MOST for one in (left, right)):
        raise UnknownValueError
    if isinstance(op, ast.Pow) and abs(right) > 128:
        raise UnknownValueError
    return _attempt(_OPERATORS[type(op)], left, right)


def _attempt(function: Any, *values: Any) -> Any:
    try:
        return function(*values)
    except (ArithmeticError, LookupError, TypeError, ValueError):
        raise UnknownValueError from None


def _takes_all(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.ImportFrom) and any(alias.name == "*" for alias in statement.names)


def _names_bound(statement: ast.stmt) -> set[str]:
    """Names that a statement may bind."""
    nodes = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
    return {node.id for node in nodes if isinstance(node.ctx, ast.Store)}


def _text(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 200 else f"{text[:197]}..."
