"""Registry: the three ways in, and what each message says."""

import re
import sys

import pytest

from halfmesh.errors import RegistryError
from halfmesh.registry import Registry


@pytest.fixture
def shapes() -> Registry:
    return Registry("shape", "halfmesh_tests.shapes")


def add_distribution(path, name, entry_points):
    info = path / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"{key} = {value}" for key, value in entry_points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[halfmesh_tests.shapes]", *lines]) + "\n")


def test_register_as_call_and_as_decorator(shapes):
    @shapes.register("Square")
    class Square: ...

    assert shapes.register("disc", 7) == 7
    assert shapes.get("SQUARE") is Square
    assert shapes.names() == ["square", "disc"]
    assert "Disc" in shapes
    assert 3 not in shapes


def test_unknown_name_has_the_nearest_and_the_list(shapes):
    shapes.register("square", 1)
    shapes.register("disc", 2)
    message = (
        "no shape named 'sqare'; did you mean 'square'?; registered: square, disc. A package adds one with the "
        "entry point group 'halfmesh_tests.shapes' or with the decorator `.register('sqare')`"
    )
    with pytest.raises(RegistryError, match=re.escape(message)):
        shapes.get("sqare")


def test_taken_name_says_by_whom(shapes):
    shapes.register_lazy("square", "fractions:Fraction")
    message = "the shape 'Square' is already registered (fractions:Fraction); choose another name, or pass override"
    with pytest.raises(RegistryError, match=re.escape(message)):
        shapes.register("Square", 1)
    shapes.register("square", 1, override=True)
    assert shapes.get("square") == 1


@pytest.mark.parametrize("name", ["", None])
def test_name_must_be_a_string(shapes, name):
    with pytest.raises(RegistryError, match="a shape is registered under a non-empty string"):
        shapes.register(name, 1)


def test_lazy_is_imported_on_get_only(shapes):
    shapes.register_lazy("square", "halfmesh_no_such_module:Square")
    assert shapes.names() == ["square"]
    assert shapes.peek("SQUARE") == "halfmesh_no_such_module:Square"
    with pytest.raises(RegistryError, match="'square' is registered as 'halfmesh_no_such_module:Square', which fails"):
        shapes.get("square")


def test_lazy_attribute_missing(shapes):
    shapes.register_lazy("square", "fractions:Square")
    with pytest.raises(RegistryError, match="which fails: module 'fractions' has no attribute 'Square'"):
        shapes.get("square")


def test_peek_and_unregister(shapes):
    shapes.register("disc", 2)
    assert shapes.peek("Disc") == 2
    shapes.unregister("disc")
    assert shapes.peek("disc") is None
    assert shapes.names() == []


def test_entry_point_joins(shapes, tmp_path, monkeypatch):
    (tmp_path / "shape_package.py").write_text("class Hexagon: ...\n")
    add_distribution(tmp_path, "shape-package", {"hexagon": "shape_package:Hexagon"})
    monkeypatch.syspath_prepend(tmp_path)
    shapes.register("square", 1)
    assert "hexagon" in shapes
    assert "shape_package" not in sys.modules
    assert shapes.get("hexagon").__name__ == "Hexagon"
    monkeypatch.delitem(sys.modules, "shape_package")


def test_entry_point_does_not_replace_silently(shapes, tmp_path, monkeypatch):
    add_distribution(tmp_path, "shape-package", {"disc": "fractions:Fraction", "square": "shape_package:Square"})
    monkeypatch.syspath_prepend(tmp_path)
    shapes.register("square", 1)
    shapes.register("line", 2)
    message = (
        "the shape 'square' is already registered (builtins.int), and entry point 'shape_package:Square' by the "
        "package 'shape-package' has the same name; rename one of them, remove the package, or register "
        "yours with override"
    )
    for _ in range(2):  # the second call must not pass because the first one failed
        with pytest.raises(RegistryError, match=re.escape(message)):
            shapes.get("square")
    assert shapes.names() == ["disc", "square", "line"], "other names are as good as before"
    assert (shapes.get("line"), shapes.get("disc").__name__) == (2, "Fraction")
    shapes.register("square", 3, override=True)
    assert shapes.get("square") == 3


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("import no_such_thing\n", "No module named 'no_such_thing'"),
        ("class Hexagon(\n", r"SyntaxError: .*"),
        ("raise OSError('no licence')\n", "OSError: no licence"),
        ("Hexagon = 6\n", "6 is no class"),
        ("", "module 'broken_shape' has no attribute 'Hexagon'"),
    ],
)
def test_a_package_that_does_not_work(content, reason, tmp_path, monkeypatch, caplog):
    (tmp_path / "broken_shape.py").write_text(content)
    add_distribution(tmp_path, "shape-package", {"hexagon": "broken_shape:Hexagon"})
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken_shape", raising=False)
    shapes = Registry("shape", "halfmesh_tests.shapes", lambda obj: None if callable(obj) else f"{obj} is no class")
    shapes.register("disc", print)
    where = r"the shape 'hexagon' is registered as 'broken_shape:Hexagon' by the package 'shape-package', which fails: "
    with pytest.raises(RegistryError, match=where + reason):
        shapes.get("hexagon")
    for _ in range(2):
        assert list(shapes.each()) == [("disc", print)]
    assert len(caplog.messages) == 1, "it is told once"
    assert re.match(where + reason + "; it is left out", caplog.messages[0])


def test_each_raises_where_halfmesh_itself_is_broken(shapes):
    shapes.register_lazy("square", "halfmesh_no_such_module:Square")
    with pytest.raises(RegistryError, match="which fails"):
        list(shapes.each())


def test_override_wins_over_an_entry_point(shapes, tmp_path, monkeypatch):
    add_distribution(tmp_path, "shape-package", {"square": "shape_package:Square"})
    monkeypatch.syspath_prepend(tmp_path)
    shapes.register("square", 1, override=True)
    assert shapes.get("square") == 1
