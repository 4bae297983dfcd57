"""The public surface: frozen, importable, and cheap to import."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import halfmesh


def test_every_name_is_there():
    """Which ones there are, with their signatures, is in frozen_names.txt."""
    assert dir(halfmesh) == sorted(halfmesh.__all__)
    assert all(getattr(halfmesh, name) is not None for name in halfmesh.__all__)


IMPORTS = """
import sys, torch
before = set(sys.modules)
import halfmesh
new = set(sys.modules) - before
print(len([name for name in new if not name.startswith("halfmesh")]), "pydantic" in new)
assert callable(halfmesh.hooks.MetricHook) and callable(halfmesh.compat.check)
first = halfmesh.verify
import halfmesh.verify.phases as phases
from halfmesh.verify.report import VerifyReport
assert first is halfmesh.verify and first.phases is phases
"""


@pytest.mark.parametrize("first", ["", "import halfmesh.verify.report", "from halfmesh import verify"])
def test_names_are_imported_when_they_are_used(first):
    """Nothing heavy before. `verify` is called by the name of its package, whichever of both was imported first."""
    code = first + IMPORTS + "print(halfmesh.verify({'parallel': {'tensor': 3}}, 'x:y', world_size=2).equal)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    *heavy, equal = done.stdout.split()
    assert equal == "False"
    assert first or heavy == ["0", "False"]


def test_unknown_names():
    with pytest.raises(
        AttributeError, match="module 'halfmesh' has no attribute 'intialize'; did you mean 'initialize'"
    ):
        _ = halfmesh.intialize


def test_type_checkers_see_the_same_names():
    tree = ast.parse(Path(halfmesh.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = [(node.module, a.name, a.asname) for node in block.body for a in node.names]
    public = {(module, name, name) for module, names in halfmesh._NAMES.items() for name in names.split()}
    assert set(seen) == public | {(None, name, name) for name in ("compat", "hooks", "nn")}, (
        "`X as X`, or mypy --strict sees none"
    )
    assert "__getattr__" not in [getattr(node, "name", "") for node in tree.body], "it would hide typos"
