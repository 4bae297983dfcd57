"""The public surface: frozen, importable, and cheap to import."""

from __future__ import annotations

import ast
import py_compile
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import halfmesh
from halfmesh.errors import ConfigError, HalfmeshError, IncompatibleConfigError


def test_every_name_is_there():
    """Which ones there are, with their signatures, is in frozen_names.txt."""
    assert dir(halfmesh) == sorted(halfmesh.__all__)
    assert all(getattr(halfmesh, name) is not None for name in halfmesh.__all__)


def printed(code, **options):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


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
    found = printed(first + IMPORTS + "print(halfmesh.verify({'parallel': {'tensor': 3}}, 'x:y', world_size=2).equal)")
    assert found[2:] == ["False"]
    assert first or found[:2] == ["0", "False"]


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


def test_the_names_are_known_without_the_source(tmp_path):
    """As in an image with .pyc files only."""
    source = Path(halfmesh.__file__)
    py_compile.compile(str(source), str(tmp_path / "halfmesh" / "__init__.pyc"), doraise=True)
    code = "import halfmesh; print(halfmesh.__file__.rpartition('.')[2], 'Engine' in halfmesh.__all__)"
    assert printed(code, cwd=tmp_path) == ["pyc", "True"]


def test_an_editable_install_is_a_path():
    """By default it is a finder, which type checkers do not run: they would find no halfmesh."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    assert project["tool"]["distutils"]["editable_wheel"]["mode"] == "compat"


def test_a_config_error_has_all_problems_and_is_a_value_error():
    error = ConfigError(["a: wrong", "b: wrong"], "config.py")
    assert (error.problems, error.source) == (("a: wrong", "b: wrong"), "config.py")
    assert str(error) == "2 problems in config.py:\n  - a: wrong\n  - b: wrong"
    assert issubclass(IncompatibleConfigError, ConfigError)
    assert issubclass(ConfigError, (HalfmeshError, ValueError))
