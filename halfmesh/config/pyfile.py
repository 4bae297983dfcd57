"""A .py config: run in a namespace of its own, then asked which of its names are settings.

Nothing of it reaches `sys.path`, and nothing stays in `sys.modules`: the file's import statements go through a hook
that only this file and its siblings see. So two directories may each have a base.py, and a config called json.py
hides nothing.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import ConfigError, cut, show
from .problems import is_constant

_NEVER_SIBLINGS = frozenset({*sys.stdlib_module_names, "halfmesh", "torch"})
"""`import torch` beside a config called torch.py means torch."""


class _Kind(IntEnum):
    """How a name was bound, and so whether it can be a setting. The highest of its bindings counts."""

    HELPER = 0
    """By def, class, import, `for`, `with` or `except`: never a setting."""
    LOOSE = 1
    """In a loop's body or from another package: a setting if it has the name of one; never a mistake."""
    STRICT = 2
    """By a plain assignment: a setting, or a mistake."""


def run_config(path: Path, known: Collection[str]) -> dict[str, Any]:
    """Run the config at `path`; its settings, its constants, and assignments that are neither.

    Raises:
        ConfigError: the file, or a sibling that it imports, does not compile or raises.
    """
    run = _Run(path.resolve())
    try:
        unit = run.execute(run.path)
        kinds = run.find_kinds(unit.path)
    except (Exception, SystemExit) as error:
        raise ConfigError([run.describe(error)], str(path)) from error
    names = {name: (value, kinds.get(name, _Kind.LOOSE)) for name, value in vars(unit.module).items()}
    return {name: value for name, (value, kind) in names.items() if _counts(name, value, kind, known)}


def _counts(name: str, value: object, kind: _Kind, known: Collection[str]) -> bool:
    """Whether the name is a setting, a constant, or a mistake to report."""
    if name.startswith("_") or kind is _Kind.HELPER:
        return False
    if kind is _Kind.LOOSE:
        is_code = inspect.ismodule(value) or inspect.isclass(value) or inspect.isroutine(value)
        return (name in known or is_constant(name)) and not is_code
    if is_constant(name):
        return not inspect.ismodule(value)
    return name in known or not (callable(value) or inspect.ismodule(value))  # no setting is misspelt with a function


class _Unit:
    """One executed file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.source = path.read_bytes()
        self.module = ModuleType(f"_halfmesh_config_{path.stem}_{id(self):x}")
        self.tree = ast.parse(self.source, str(path))


class _Run:
    """One load: the files it executed, by path."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.units: dict[Path, _Unit] = {}
        self._kinds: dict[Path, dict[str, _Kind]] = {}

    def execute(self, path: Path) -> _Unit:
        if path in self.units:
            return self.units[path]  # perhaps half done: siblings may import each other, as modules may
        unit = _Unit(path)
        self.units[path] = unit
        unit.module.__file__ = str(path)
        vars(unit.module)["__builtins__"] = {**vars(builtins), "__import__": self._import_for(path)}
        sys.modules[unit.module.__name__] = unit.module  # dataclasses look their module up while they are made
        try:
            exec(compile(unit.source, str(path), "exec", dont_inherit=True), vars(unit.module))
        finally:
            del sys.modules[unit.module.__name__]
        return unit

    def _import_for(self, importer: Path) -> Any:
        """The `__import__` of the file `importer`."""

        def hook(
            name: str,
            globals: Mapping[str, object] | None = None,
            locals: Mapping[str, object] | None = None,
            fromlist: Sequence[str] | None = (),
            level: int = 0,
        ) -> ModuleType:
            sibling = self._find_sibling(name, level, importer)
            if sibling is not None:
                return self.execute(sibling).module
            return builtins.__import__(name, globals, locals, fromlist or (), level)

        return hook

    def _find_sibling(self, name: str, level: int, importer: Path) -> Path | None:
        """`import base` is a file beside the config, `from .base import x` one beside the importing file."""
        if "." in name or not name or level > 1 or (level == 0 and name in _NEVER_SIBLINGS):
            return None
        file = (importer if level else self.path).with_name(f"{name}.py")
        return file.resolve() if file.is_file() else None

    def find_kinds(self, path: Path) -> dict[str, _Kind]:
        """How each name of the file at `path` was bound."""
        if path not in self._kinds:
            self._kinds[path] = {}  # two files that import each other end here
            self._bind(self.units[path].tree.body, _Kind.STRICT, path)
        return self._kinds[path]

    def _bind(self, statements: Iterable[ast.stmt], assigned: _Kind, path: Path) -> None:
        for statement in statements:
            inner = _Kind.LOOSE if isinstance(statement, (ast.For, ast.AsyncFor, ast.While)) else assigned
            match statement:
                case ast.Assign(targets=targets):
                    self._note(_targets(targets), assigned, path)
                case ast.AnnAssign(target=target, value=value):
                    self._note(_targets([target]) if value else [], assigned, path)
                case ast.AugAssign(target=target):
                    self._note(_targets([target]), assigned, path)
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    self._note([name], _Kind.HELPER, path)
                    continue
                case ast.Import(names=aliases):
                    self._note([alias.asname or alias.name.partition(".")[0] for alias in aliases], _Kind.HELPER, path)
                case ast.ImportFrom():
                    self._bind_from(statement, path)
                case ast.For(target=target) | ast.AsyncFor(target=target):
                    self._note(_targets([target]), _Kind.HELPER, path)
                case ast.With(items=items) | ast.AsyncWith(items=items):
                    self._note(_targets([item.optional_vars for item in items]), _Kind.HELPER, path)
                case ast.Match(cases=cases):
                    self._note(_captures(cases), _Kind.HELPER, path)
                case _:
                    pass
            for block in _blocks(statement):
                self._bind(block, inner, path)

    def _bind_from(self, statement: ast.ImportFrom, path: Path) -> None:
        """A sibling's names keep the kind they have there; those of other packages are loose."""
        sibling = self._find_sibling(statement.module or "", statement.level, path)
        kinds = self.find_kinds(sibling) if sibling in self.units and sibling is not None else {}
        for alias in statement.names:
            if alias.name == "*":
                for name, kind in kinds.items():
                    self._note([name], kind, path)
            else:
                self._note([alias.asname or alias.name], kinds.get(alias.name, _Kind.LOOSE), path)

    def _note(self, names: Iterable[str], kind: _Kind, path: Path) -> None:
        kinds = self._kinds[path]
        for name in names:
            kinds[name] = max(kind, kinds.get(name, _Kind.HELPER))

    def describe(self, error: BaseException) -> str:
        """`error` with the file and line of the config, or of a sibling, where it arose."""
        text = f"{type(error).__name__}: {_words(error)}"
        if isinstance(error, SyntaxError) and error.filename and error.lineno:
            return f"{error.filename}:{error.lineno}: SyntaxError: {error.msg}"
        files = {str(path) for path in self.units}
        where, trace = "", error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename in files:
                where = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}: "
            trace = trace.tb_next
        return f"{where}{text}"


def _words(error: BaseException) -> str:
    """(Its class may be the config's own.)"""
    try:
        return cut(str(error))
    except Exception:
        return show(error)


def _blocks(statement: ast.stmt) -> list[list[ast.stmt]]:
    """The blocks of statements inside a compound statement."""
    parts: list[Any] = [statement, *getattr(statement, "handlers", ()), *getattr(statement, "cases", ())]
    return [getattr(part, name, []) for part in parts for name in ("body", "orelse", "finalbody")]


def _targets(targets: Iterable[ast.expr | None]) -> list[str]:
    """The names that assignment targets bind (`a, (b, *c) = ...` binds three; `d["x"] = ...` none)."""
    found: list[str] = []
    for target in targets:
        if isinstance(target, ast.Name):
            found.append(target.id)
        elif isinstance(target, (ast.Tuple, ast.List)):
            found += _targets(target.elts)
        elif isinstance(target, ast.Starred):
            found += _targets([target.value])
    return found


def _captures(cases: Iterable[ast.match_case]) -> list[str]:
    nodes = [node for case in cases for node in ast.walk(case.pattern)]
    names = [getattr(node, "name", None) or getattr(node, "rest", None) for node in nodes]
    return [name for name in names if name]
