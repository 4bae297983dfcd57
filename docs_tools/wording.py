"""Turns an expression that makes a text into the text, with {places} for what is only known when it is said."""

from __future__ import annotations

import ast
from collections.abc import Mapping

_PASSES_ON = """
    show show_name cut shorten str repr sorted list tuple set map join int float dict keys values items strip lower
    upper removeprefix removesuffix enumerate reversed bullet_list splitlines split partition filter format get
"""
"""Calls whose result is named by what they are given."""

_NEAR = frozenset({"did_you_mean", "near_names", "_near", "find_near"})
_VAGUE = "name names value values size shape dtype rank text key keys kind item args type id label"
"""Attributes that say little without their owner."""


class Wording:
    """Renders the text expressions of one module."""

    def __init__(self, tree: ast.Module, parents: Mapping[ast.AST, ast.AST]) -> None:
        self._parents = parents
        self.taken_in: set[ast.AST] = set()
        """Expressions that stand in a variable, and became part of another text."""

    def render(self, node: ast.expr) -> str:
        """The text of `node`."""
        if isinstance(node, ast.Constant):
            return str(node.value)
        if isinstance(node, ast.JoinedStr):
            return "".join(map(self.render, node.values))
        if isinstance(node, ast.FormattedValue):
            return self._inner(node.value)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self._inner(node.left) + self._inner(node.right)
        if isinstance(node, ast.IfExp):
            return self._choice(node)
        return self._inner(node)

    def _inner(self, node: ast.expr) -> str:
        """What stands at a place: text that is known, or {a name for it}."""
        if isinstance(node, (ast.Constant, ast.JoinedStr)):
            return self.render(node)
        if isinstance(node, ast.IfExp) and _is_text(node):
            return self._choice(node)
        if isinstance(node, ast.BinOp) and _is_text(node):
            return self.render(node)
        if isinstance(node, ast.BoolOp) and isinstance(node.values[0], ast.Call):
            return self._inner(node.values[0])
        if isinstance(node, ast.Call) and _call_name(node) in _NEAR:
            return "[; did you mean ...?]"
        if isinstance(node, ast.Name) and (known := self._assigned(node)) is not None:
            self.taken_in.add(known)
            return self.render(known)
        return "{" + self.place(node) + "}"

    def _choice(self, node: ast.IfExp) -> str:
        body, orelse = self._inner(node.body), self._inner(node.orelse)
        if not body or not orelse:
            only = body or orelse
            return only if only.startswith("[") and only.find("]") == len(only) - 1 else f"[{only}]"
        return f"[{body} | {orelse}]"

    def _assigned(self, name: ast.Name) -> ast.expr | None:
        """The text that a variable of this function holds, if there is one such text only."""
        scope: ast.AST = name
        while not isinstance(scope, (ast.FunctionDef, ast.Module)):
            scope = self._parents[scope]
        if isinstance(scope, ast.Module):
            return None
        given: list[ast.expr] = []
        for node in ast.walk(scope):
            if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name.id for t in node.targets):
                given.append(node.value)
            elif isinstance(node, (ast.AugAssign, ast.For, ast.comprehension, ast.NamedExpr)) and name.id in _names(
                node.target
            ):
                return None
        return given[0] if len(given) == 1 and _is_text(given[0]) and name not in ast.walk(given[0]) else None

    def place(self, node: ast.expr) -> str:
        """A name for what is put in there, in a few words."""
        if isinstance(node, ast.Name):
            return _words(node.id)
        if isinstance(node, ast.Attribute):
            if node.attr == "__name__":
                return self.place(node.value)
            if node.attr in _VAGUE.split() and isinstance(node.value, (ast.Name, ast.Attribute)):
                owner = self.place(node.value)
                return f"{owner} {node.attr}" if owner != "self" else _words(node.attr)
            return _words(node.attr)
        if isinstance(node, ast.Call):
            return self._place_of_call(node)
        if isinstance(node, (ast.Subscript, ast.Starred)):
            return self.place(node.value)
        if isinstance(node, (ast.GeneratorExp, ast.ListComp, ast.SetComp)):
            return self.place(node.generators[0].iter)
        if isinstance(node, ast.IfExp):
            return self.place(node.body)
        if isinstance(node, ast.BoolOp):
            return self.place(node.values[0])
        if isinstance(node, ast.BinOp):
            sides = [node.left, node.right]
            named = [side for side in sides if not isinstance(side, ast.Constant)]
            return self.place(named[0]) if named else ast.unparse(node)
        if isinstance(node, (ast.List, ast.Tuple, ast.Set)) and node.elts:
            return self.place(node.elts[0])
        return "..."

    def _place_of_call(self, node: ast.Call) -> str:
        name = _call_name(node)
        if name == "len" and node.args:
            return f"number of {self.place(node.args[0])}"
        if name == "type" and node.args:
            return f"type of {self.place(node.args[0])}"
        if name in _PASSES_ON.split():
            given = node.args[-1] if name in ("map", "filter") and node.args else (node.args[0] if node.args else None)
            if isinstance(node.func, ast.Attribute) and name != "join":
                given = node.func.value
            return self.place(given) if given is not None else "..."
        return _words(name)


def _is_text(node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str)
    if isinstance(node, ast.IfExp):
        return _is_text(node.body) or _is_text(node.orelse)
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.Add) and (_is_text(node.left) or _is_text(node.right))
    if isinstance(node, ast.Call):
        return _call_name(node) in _NEAR
    return isinstance(node, ast.JoinedStr)


def _names(target: ast.expr) -> set[str]:
    return {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}


def _call_name(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _words(name: str) -> str:
    words = name.strip("_")
    for prefix in ("get_", "find_", "show_"):
        words = words.removeprefix(prefix)
    return words.replace("_", " ") or "..."
