"""Writes tests/frozen_names.txt, every public name with its signature: `python -m docs_tools.public_names`.

It is read from the source, and nothing is imported: the list is the same under every version of Python and torch. The
commands and their options are in docs/cli.md, which a test compares.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FROZEN = ROOT / "tests" / "frozen_names.txt"


@dataclass(frozen=True)
class Place:
    """A top-level definition, and the module that it is in ("halfmesh.amp.recipe")."""

    module: str
    node: ast.stmt


def render() -> str:
    """The list."""
    return "\n".join([*_names("halfmesh"), *_names("halfmesh.hooks"), *_names("halfmesh.nn")]) + "\n"


def public_places(package: str = "halfmesh") -> dict[str, Place]:
    """The public names of `package`, each with its definition."""
    body = _tree(package).body
    body = next((node.body for node in body if isinstance(node, ast.If)), body)  # TYPE_CHECKING, if the rest is lazy
    imports = [node for node in body if isinstance(node, ast.ImportFrom) and node.module]  # not of whole modules
    is_package = ROOT.joinpath(*package.split(".")).is_dir()
    modules = {name.name: _absolute(node, package, is_package) for node in imports for name in node.names}
    found = {name: _find(module, name) for name, module in modules.items()}
    return {name: place for name, place in sorted(found.items()) if place is not None}


def _names(package: str) -> Iterator[str]:
    for name, place in public_places(package).items():
        yield from _describe(f"{package}.{name}", place)


def _describe(name: str, place: Place) -> Iterator[str]:
    node = place.node
    if isinstance(node, ast.FunctionDef):
        yield f"{name}{_signature(node)}"
    elif isinstance(node, ast.ClassDef):
        yield f"class {name}({', '.join(ast.unparse(base) for base in node.bases)})"
        fields, methods = _members(place)
        yield from (f"    {line}" for line in [*fields.values(), *(methods[name] for name in sorted(methods))])
    elif isinstance(node, ast.AnnAssign):
        yield f"{name}: {ast.unparse(node.annotation)}"
    elif isinstance(node, ast.Assign):
        yield f"{name} = {ast.unparse(node.value)}"


def _members(place: Place) -> tuple[dict[str, str], dict[str, str]]:
    """Public fields, in their order, and methods, both by name; inherited ones of this package included."""
    assert isinstance(place.node, ast.ClassDef)
    fields: dict[str, str] = {}
    methods: dict[str, str] = {}
    for base in reversed(place.node.bases):
        parent = _find(place.module, ast.unparse(base).partition("[")[0])
        if parent is not None and isinstance(parent.node, ast.ClassDef):
            inherited = _members(parent)
            fields.update(inherited[0])
            methods.update(inherited[1])
    for node in place.node.body:
        if isinstance(node, ast.FunctionDef) and _is_public(node.name):
            methods[node.name] = _method(node)
        elif isinstance(node, (ast.AnnAssign, ast.Assign)):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            if isinstance(target, ast.Name) and _is_public(target.id):
                fields[target.id] = ast.unparse(node)
    return fields, methods


def _method(node: ast.FunctionDef) -> str:
    kinds = {ast.unparse(decorator) for decorator in node.decorator_list}
    if kinds & {"property", "cached_property"}:
        return f"{node.name}: {ast.unparse(node.returns) if node.returns is not None else 'Any'}"
    return f"{node.name}{_signature(node)}"


def _signature(node: ast.FunctionDef) -> str:
    returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    return f"({ast.unparse(node.args)}){returns}"


def _is_public(name: str) -> bool:
    return not name.startswith("_") or name in ("__init__", "__call__", "__enter__", "__exit__")


@cache
def _tree(module: str) -> ast.Module:
    path = ROOT.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text())


def _find(module: str, name: str) -> Place | None:
    """The definition of `name`, as it is known in `module`: there, or where it is imported from in this package."""
    is_package = ROOT.joinpath(*module.split(".")).is_dir()
    for node in ast.walk(_tree(module)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name and node in _tree(module).body:
            return Place(module, node)
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node in _tree(module).body:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and target.id == name:
                return Place(module, node)
        if isinstance(node, ast.ImportFrom) and node.level and any((a.asname or a.name) == name for a in node.names):
            return _find(
                _absolute(node, module, is_package), next(a.name for a in node.names if (a.asname or a.name) == name)
            )
    return None


def _absolute(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    """The module that a relative import names."""
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + (1 if is_package else 0)]
    return ".".join([*parts, node.module]) if node.module else ".".join(parts)


def main() -> None:
    """Write the file."""
    FROZEN.write_text(render())


if __name__ == "__main__":
    main()
