"""Reads from the source what halfmesh says when something is wrong: each message as a template with {places}."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .wording import Wording

PACKAGE = Path(__file__).resolve().parents[1] / "halfmesh"

LEAST_WORDS = 3
"""A text with fewer words is a name or a piece, not a message; one less where it is raised."""

OUTPUT = (
    *("cli/", "plan/show", "plan/picture.py", "plan/writing.py", "plan/ranking.py", "plan/advice.py", "plan/search.py"),
    *("summary.py", "deferred/late.py", "amp/o1.py", "launching/env.py", "launching/failures.py"),
)
"""What stands in these is no message, unless it is raised: what they print, or look for in others' errors."""


@dataclass(frozen=True, order=True)
class Message:
    """One thing that is said. `kind` is the exception's name, "warning", "info", or "" for a line within a longer
    message."""

    module: str
    place: int
    kind: str
    text: str


def find_messages(package: Path = PACKAGE) -> Iterator[Message]:
    """All of them, in the order of the source."""
    for path in sorted(package.rglob("*.py")):
        yield from sorted(_Module(path, path.relative_to(package).as_posix()).messages())


class _Module:
    def __init__(self, path: Path, name: str) -> None:
        self.name = name
        self.tree = ast.parse(path.read_text())
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        self.is_output = name.startswith(OUTPUT)

    def messages(self) -> Iterator[Message]:
        """Those of this module. A text that another one takes in whole is not one by itself."""
        wording = Wording(self.tree, self.parents)
        found: list[tuple[ast.AST, Message]] = []
        for node in ast.walk(self.tree):
            if not isinstance(node, (ast.Constant, ast.JoinedStr, ast.BinOp, ast.IfExp)) or self._within_text(node):
                continue
            kind = self._kind(node)
            if kind is None or (self.is_output and not kind):
                continue
            text = self._key(node) + " ".join(wording.render(node).split())
            if _count_words(text) >= LEAST_WORDS - kind.endswith("Error") and not _is_foreign(text):
                found.append((node, Message(self.name, node.lineno, kind, text)))
        seen: set[tuple[str, str]] = set()
        for node, message in found:
            if node not in wording.taken_in and (message.kind, message.text) not in seen:
                seen.add((message.kind, message.text))
                yield message

    def _key(self, node: ast.AST) -> str:
        """The key that a value of a table of messages is for."""
        parent = self.parents[node]
        if isinstance(parent, ast.Dict) and node in parent.values:
            key = parent.keys[parent.values.index(node)]
            return f"{key.value}: " if isinstance(key, ast.Constant) and isinstance(key.value, str) else ""
        return ""

    def _within_text(self, node: ast.AST) -> bool:
        """Whether `node` is a part of a text expression, which is taken as a whole; or no text at all."""
        if isinstance(node, ast.Constant) and not isinstance(node.value, str):
            return True
        if isinstance(node, (ast.BinOp, ast.IfExp)) and not _holds_text(node):
            return True
        parent = self.parents[node]
        if isinstance(parent, ast.Expr):  # a docstring
            return True
        if isinstance(parent, ast.IfExp):
            return node is parent.test or _holds_text(parent)
        if isinstance(parent, ast.BinOp):
            return _holds_text(parent)
        return isinstance(parent, (ast.JoinedStr, ast.FormattedValue, ast.Compare))

    def _kind(self, node: ast.AST) -> str | None:
        """What is done with a text; None: it is nothing that is said."""
        child = node
        while (parent := self.parents.get(child)) is not None:
            if isinstance(parent, ast.keyword) and parent.arg in ("help", "epilog"):
                return None
            if isinstance(parent, ast.Call):
                name = _name_of(parent.func)
                if name in ("warning", "info", "error"):
                    return "info" if name == "info" else "warning"
                if re.search(r"(Error|Fault|BadParameter)$", name):
                    return name
                if name in ("print", "echo", "TypeVar", "Registry", "entry_points", "filterwarnings"):
                    return None
            if isinstance(parent, (ast.FunctionDef, ast.ClassDef, ast.Module)):
                return self._kind_of_use(node, parent)
            child = parent
        return None

    def _kind_of_use(self, node: ast.AST, scope: ast.AST) -> str:
        """What becomes of a variable that a text is assigned to, in the same function."""
        parent = self.parents[node]
        if not (isinstance(parent, ast.Assign) and isinstance(parent.targets[0], ast.Name)):
            return ""
        for used in ast.walk(scope):
            if isinstance(used, ast.Name) and used.id == parent.targets[0].id and isinstance(used.ctx, ast.Load):
                child: ast.AST = used
                while not isinstance(child, ast.stmt):
                    child = self.parents[child]
                    if isinstance(child, ast.Call) and _name_of(child.func).endswith("Error"):
                        return _name_of(child.func)
        return ""


def _holds_text(node: ast.AST) -> bool:
    """Whether an expression is a text by itself: a literal, or literals joined by + or by if."""
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.Add) and (_holds_text(node.left) or _holds_text(node.right))
    if isinstance(node, ast.IfExp):
        return _holds_text(node.body) or _holds_text(node.orelse)
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _name_of(func: ast.expr) -> str:
    return func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")


def _is_foreign(text: str) -> bool:
    """Whether it is what another library says, which is looked for."""
    return text.startswith(("Casting complex values", "Accessing the data pointer", "torch.distributed is disabled"))


def _count_words(text: str) -> int:
    return len(re.findall(r"(?<!\S)[a-zA-Z][a-zA-Z'-]*(?=[\s,;:.)]|$)", re.sub(r"\{[^{}]*\}", "", text)))
