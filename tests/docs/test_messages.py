"""How messages and public names are read from the source."""

from __future__ import annotations

import ast
import re
import textwrap

import halfmesh
from docs_tools.messages import PACKAGE, find_messages
from docs_tools.public_names import public_places, render


def read(tmp_path, source):
    (tmp_path / "part.py").write_text(textwrap.dedent(source))
    return [(message.kind, message.text) for message in find_messages(tmp_path)]


def test_what_a_message_is_made_of(tmp_path):
    source = '''
        """A module that says things."""

        def check(size, names, model):
            """Not a message, of course."""
            hint = f"; use {size + 1}" if size else ""
            if size > 3:
                raise InputError(f"size={size!r} is too large{hint}" + did_you_mean(size, names))
            reason = "it is much too small"
            problems = [f"{', '.join(names)} of {type(model).__name__} ({len(names)}): {reason} for us"]
            _log.warning("this is odd: %s", size)
            return problems or None
    '''
    assert read(tmp_path, source) == [
        ("InputError", "size={size} is too large[; use {size}][; did you mean ...?]"),
        ("", "{names} of {type of model} ({number of names}): it is much too small for us"),
        ("warning", "this is odd: %s"),
    ]


def test_what_no_message_is(tmp_path):
    source = """
        KEY = "a.dotted:reference"
        app = Option(help="What this option does to a run.")
        def f():
            print("this is shown to the user")
    """
    assert read(tmp_path, source) == []


def test_messages_that_one_has_seen():
    found = {message.text: message for message in find_messages()}
    assert found["the ranks were given different configs; start all of them with the same one"].kind == "InputError"
    refused = next(message for text, message in found.items() if text.startswith("only strategy='fsdp' has it"))
    assert (refused.module, refused.kind) == ("key_checks.py", "")
    assert refused.text.endswith("and the strategy is {strategy}; remove it")


def test_whatever_is_raised_with_words_is_a_message():
    places = {(message.module, message.place) for message in find_messages()}
    lost = []
    for path in PACKAGE.rglob("*.py"):
        module = path.relative_to(PACKAGE).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call):
                continue
            texts = [part.value for part in ast.walk(node.exc) if isinstance(part, ast.Constant)]
            words = [text for text in texts if isinstance(text, str) and len(re.findall(r"[a-z]{2,}", text)) > 2]
            if words and not any((module, line) in places for line in range(node.lineno, node.end_lineno + 1)):
                lost.append(f"{module}:{node.lineno} {words}")
    assert lost == []


def test_public_names_are_found_with_their_signatures():
    lines = render().splitlines()
    names = {line.partition("(")[0].partition(":")[0].partition(" = ")[0].removeprefix("class ") for line in lines}
    assert {f"halfmesh.{name}" for name in halfmesh.__all__ if name != "__version__"} <= names
    engine = lines[lines.index("class halfmesh.Engine(Health)") :]
    assert "    backward(self, loss: Any, loss_id: int=0, *, retain_graph: bool=False) -> None" in engine
    assert (
        "    save(self, directory: str | Path, *, keep: int | None=None, in_background: bool=False) -> Path" in engine
    )
    assert "$ halfmesh check --json = False" in lines


def described(package):
    """Public classes and functions of a package with their docstrings, and methods of classes that override none."""
    hook = public_places()["Hook"].node
    inherited = {node.name for node in hook.body if isinstance(node, ast.FunctionDef)}
    for name, place in public_places(package).items():
        if isinstance(place.node, (ast.ClassDef, ast.FunctionDef)):
            yield name, ast.get_docstring(place.node)
        for node in place.node.body if isinstance(place.node, ast.ClassDef) else ():
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
                continue
            is_overload = any(ast.unparse(decorator) == "overload" for decorator in node.decorator_list)
            if not is_overload and (name == "Hook" or node.name not in inherited):
                yield f"{name}.{node.name}", ast.get_docstring(node)


def test_every_public_name_has_a_docstring():
    found = {name: words for package in ("halfmesh", "halfmesh.hooks") for name, words in described(package)}
    assert len(found) > 120
    assert [name for name, words in found.items() if len((words or "").split()) < 3] == []


def test_what_docstrings_say_of_arguments_is_true():
    """Each name under "Args:" is an argument (or, of a dataclass, a field)."""
    wrong = []
    for name, place in public_places().items():
        node = place.node
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and "Args:" in (ast.get_docstring(node) or ""):
            named = ast.get_docstring(node).split("Args:\n")[1].split("\n\n")[0]
            takes = {argument.arg for argument in ast.walk(node) if isinstance(argument, ast.arg)}
            takes |= {field.target.id for field in getattr(node, "body", ()) if isinstance(field, ast.AnnAssign)}
            wrong += [
                f"{name}: {word}" for word in re.findall(r"^    (\w+):", named, re.MULTILINE) if word not in takes
            ]
    assert wrong == []
