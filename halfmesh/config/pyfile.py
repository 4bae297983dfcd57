"""Runs a .py config in a namespace of its own.

Its imports of sibling files go through an import function that only configs see; `sys.path` and `sys.modules` stay as
they are. So two directories may each have a base.py, and a config named json.py shadows nothing.
"""

from __future__ import annotations

import builtins
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import ConfigError, cut
from .schema import Settings

_NEVER_SIBLINGS = frozenset({*sys.stdlib_module_names, "halfmesh", "torch"})
"""`import torch` beside a config called torch.py means torch."""


def run_config(path: Path) -> dict[str, Any]:
    """Run the config at `path`, and return its keys and constants by name.

    `_x` is a helper, UPPERCASE a constant; every other name is a key, except modules, functions and classes.

    Raises:
        ConfigError: the file, or a sibling that it imports, does not compile or raises an error.
    """
    files: dict[Path, ModuleType] = {}
    try:
        module = _execute(path.resolve(), files)
    except (Exception, SystemExit) as error:
        raise ConfigError([_describe(error, files)], str(path)) from error
    return {name: value for name, value in vars(module).items() if _counts(name, value)}


def _counts(name: str, value: object) -> bool:
    if name.startswith("_") or isinstance(value, ModuleType) or type(value).__module__ == "__future__":
        return False
    if name.isupper() or name in Settings.model_fields:
        # NORM = nn.LayerNorm is a constant, an imported AMP_TYPE is not; and seed = len is a mistake to report.
        return getattr(value, "__name__", None) != name
    return not callable(value)


def _execute(path: Path, files: dict[Path, ModuleType]) -> ModuleType:
    """Run the file at `path`, unless it is in `files` (complete, or half done if siblings import each other)."""
    if path in files:
        return files[path]
    module = files[path] = ModuleType(f"_halfmesh_config_{path.stem}")

    def find(
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        """`import base` and `from .base import x` mean a file beside this one, if it exists."""
        sibling = path.with_name(f"{name}.py")
        if (level == 1 or (level == 0 and name not in _NEVER_SIBLINGS)) and sibling.is_file():
            return _execute(sibling.resolve(), files)
        return builtins.__import__(name, globals, locals, fromlist or (), level)

    module.__file__ = str(path)
    vars(module)["__builtins__"] = {**vars(builtins), "__import__": find}
    sys.modules[module.__name__] = module  # a dataclass looks up its module when it is defined
    try:
        exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), vars(module))
    finally:
        sys.modules.pop(module.__name__, None)
    return module


def _describe(error: BaseException, files: Mapping[Path, ModuleType]) -> str:
    """`error` with the file and line of the config, or of a sibling, that raised it."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return f"{error.filename}:{error.lineno}: SyntaxError: {error.msg}"
    own = {str(path) for path in files}
    lines = [f"{at.filename}:{at.lineno}: " for at in traceback.extract_tb(error.__traceback__) if at.filename in own]
    return f"{lines[-1] if lines else ''}{type(error).__name__}: {cut(str(error))}"
