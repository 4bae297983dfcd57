"""The house: imports run down its floors, and few files stand loose."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1] / "halfmesh"
FLOORS = (
    ("__main__",),
    ("cli",),
    ("hooks", "verify"),
    ("trainer", "dry_run", "migration"),
    ("report",),
    ("engine",),
    ("debug",),
    ("checkpoint", "data"),
    ("compat",),
    ("config",),
    ("parallel", "amp"),
    ("distributed",),
    ("utils", "options", "nn"),
    ("errors",),
)
"""From the top; the rooms of a floor do not import each other. What is imported for type checkers only is not counted,
and `halfmesh` itself is above all: it imports public names when they are asked for."""
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """The rooms from which a file imports at run time, with the line."""
    parts = path.relative_to(ROOT).parts[:-1]
    tree = ast.parse(path.read_text())
    typed = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and getattr(block.test, "id", "") == "TYPE_CHECKING"
        for inner in block.body
        for node in ast.walk(inner)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level and id(node) not in typed:
            base = [*parts[: len(parts) - node.level + 1], *(node.module or "").split(".")]
            names = base[:1] if base != [""] else [alias.name for alias in node.names]
            yield from ((name, node.lineno) for name in names if not name.startswith("__"))


def test_imports_run_down_the_floors():
    wrong = []
    for path in ROOT.rglob("*.py"):
        room = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        wrong += [
            f"{path.relative_to(ROOT)}:{line} imports {other}"
            for other, line in imports(path)
            if other != room and FLOOR_OF[other] <= FLOOR_OF[room]
        ]
    assert not wrong


def test_rooms_are_few():
    folders = [path for path in ROOT.iterdir() if path.is_dir() and (path / "__init__.py").exists()]
    loose = list(ROOT.glob("*.py"))
    assert len(loose) <= 6
    assert len(folders) + len(loose) <= 22
