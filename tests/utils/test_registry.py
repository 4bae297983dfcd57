"""Registry: the three ways in, and what each message says."""

import re
import sys

import pytest

from halfmesh.errors import RegistryError
from halfmesh.utils.registry import Registry


@pytest.fixture
def shapes() -> Registry:
    return Registry("shape", "halfmesh_tests.shapes", lambda obj: None if callable(obj) else f"{obj} is no class")


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs a package with the module `shape_package`, and entry points of it."""

    def install(content, **entry_points):
        (tmp_path / "shape_package.py").write_text(content)
        info = tmp_path / "shape-package-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shape-package\nVersion: 1.0\n")
        lines = [f"{key} = {value}" for key, value in entry_points.items()]
        (info / "entry_points.txt").write_text("\n".join(["[halfmesh_tests.shapes]", *lines]) + "\n")
        monkeypatch.syspath_prepend(tmp_path)

    yield install
    sys.modules.pop("shape_package", None)


def test_register_as_call_and_as_decorator(shapes):
    @shapes.register("Square")
    class Square: ...

    assert shapes.register("disc", print) is print
    assert shapes.get("SQUARE") is Square
    assert shapes.names() == ["square", "disc"]
    assert "Disc" in shapes
    said = r"no shape named 'sqare'; did you mean 'square'\? Registered: square, disc\. A package adds one"
    with pytest.raises(RegistryError, match=said):
        shapes.get("sqare")
    shapes.unregister("disc")
    assert shapes.names() == ["square"]
    with pytest.raises(RegistryError, match=r"a shape needs a name: write register\('name'\)"):
        shapes.register(Square)


def test_a_taken_name_is_rejected_unless_overridden(shapes):
    shapes.register_lazy("square", "fractions:Fraction")
    with pytest.raises(RegistryError, match=r"the shape 'Square' is already registered \(fractions:Fraction\)"):
        shapes.register("Square", print)
    shapes.register("square", print, override=True)
    assert shapes.get("square") is print


def test_an_installed_package_joins_and_replaces_nothing(shapes, install, caplog):
    install("class Square: ...\n", disc="fractions:Fraction", square="shape_package:Square")
    shapes.register("square", print)
    assert shapes.get("square") is print
    assert "shape_package" not in sys.modules
    assert shapes.get("disc").__name__ == "Fraction"
    assert caplog.messages == ["the shape 'square' of the package 'shape-package' is left out: the name is taken"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [("raise OSError('closed')\n", "OSError: closed"), ("Hexagon = 6\n", "6 is no class")],
)
def test_a_package_that_does_not_work_is_left_out_and_told_once(content, reason, shapes, install, caplog):
    install(content, hexagon="shape_package:Hexagon")
    shapes.register("disc", print)
    where = "the shape 'hexagon' is registered as 'shape_package:Hexagon' by the package 'shape-package', which fails: "
    with pytest.raises(RegistryError, match=where + reason):
        shapes.get("hexagon")
    for _ in range(2):
        assert list(shapes.each()) == [("disc", print)]
    assert len(caplog.messages) == 1
    assert re.match(where + reason + "; it is left out", caplog.messages[0])
