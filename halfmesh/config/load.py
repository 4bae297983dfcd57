"""Loads a config from a file, a dict or another config; overrides from the command line; runs a .py config.

A .py config runs in a separate namespace. Its imports of sibling files go through an import function that only
configs see; `sys.path` and `sys.modules` stay as they are. So two directories may each have a base.py, and a config
named json.py shadows nothing.

`json_schema` describes config files to editors.
"""

from __future__ import annotations

import builtins
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from ..amp.plugin import AMP_PLUGINS, PRECISIONS
from ..errors import ConfigError, cut, did_you_mean, shorten, show
from ..options import Options
from ..parallel.registries import AXES, DATA_STRATEGIES, PARTITIONERS, SCHEDULES, TENSOR_PLANS
from .config import OWN_NAMES, Config, build
from .schema import Settings, data_config, parallel_config
from .text import UnreadableError, as_json, read_json, read_value, read_yaml

_SHORT = MappingProxyType(
    {"parallel.data": "strategy", "clip_grad_norm": "max_norm", "compile": "enabled", "checkpoint": "directory"}
)
"""The key that a shorthand value sets, so that others can be added to it. Of an axis it is size: tensor=2 is
tensor=dict(size=2)."""
_NEVER_SIBLINGS = frozenset({*sys.stdlib_module_names, "halfmesh", "torch"})
"""`import torch` beside a config called torch.py means torch."""
CHECKED = "HALFMESH_CHECKED_CONFIG"
"""The environment variable by which `halfmesh run` tells the ranks what it has checked."""


def load_config(source: str | Path | Mapping[str, Any] | Config, overrides: Sequence[str] = ()) -> Config:
    """The config of a .py, .yaml, .yml or .json file, or of a dict; a Config is returned as it is.

    Args:
        overrides: keys to set: "parallel.tensor=2", "fp16.mode=naive", "NUM_EPOCHS=3". A dot leads into a dict. Write
            values as in YAML, where `null` is None. `--set` of `get_default_parser` collects them.

    Raises:
        ConfigError: with all problems at once.
    """
    if isinstance(source, Config) and not overrides:
        return source
    raw, hint = read_raw(source)
    name = str(source) if isinstance(source, (str, Path)) else "the config"
    if overrides:
        raw, name = override(raw, overrides), f"{name} with {', '.join(overrides)}"
    return build(raw, name, hint)


def tell_checked(config: Config, name: str) -> str:
    """The value of `CHECKED` for a config that was checked under this name."""
    return json.dumps({"name": name, "keys": _settings(config)})


def find_unchecked(config: Config, source: object) -> str | None:
    """A warning if `halfmesh run` has checked a config with other keys than `config`, which the script got from
    `source`; None if it is the same, or none was checked. Constants do not count: a script may change them. Once
    the checked config is used, further engines of the script may have others."""
    try:
        checked = json.loads(os.environ[CHECKED])
    except (KeyError, ValueError):  # none, or text of another program
        return None
    own = json.loads(json.dumps(_settings(config)))
    keys = [key for key in Settings.model_fields if own[key] != checked["keys"].get(key)]
    if not keys:
        del os.environ[CHECKED]
        return None
    name = str(source) if isinstance(source, (str, Path)) else "another config" if source else "no config"
    return (
        f"halfmesh run checked {checked['name']}, but this script trains with {name} (they differ in: {shorten(keys)});"
        " read --config and --set in the script (halfmesh.get_default_parser), or drop these options"
    )


def _settings(config: Config) -> dict[str, Any]:
    return dict(as_json(config.model_dump(exclude=set(config.user))))


def read_raw(source: object) -> tuple[Mapping[Any, Any], str]:
    """The keys and values, and a hint how this kind of source names constants and helpers."""
    if isinstance(source, Config):
        return source.to_dict(), OWN_NAMES
    if isinstance(source, Mapping):
        return source, OWN_NAMES
    if not isinstance(source, (str, Path)):
        kinds = f"a path ({', '.join(_READERS)}), a dict ({{}} trains in fp32) or a Config"
        raise ConfigError([f"a {type(source).__name__} was given, but a config must be {kinds}"])
    path = Path(source).expanduser()
    suffix = path.suffix.lower()
    try:
        if suffix not in _READERS:
            allowed = ", ".join(_READERS)
            what = "it is a directory" if path.is_dir() else f"its suffix is {show(path.suffix)}"
            raise UnreadableError(f"{what}; allowed: {allowed}", str(source))
        content = _READERS[suffix](path)
    except FileNotFoundError:
        place = path.resolve().parent
        beside = [other.name for other in place.iterdir() if other.suffix in _READERS] if place.is_dir() else []
        problem = f"there is no such file in {place}{did_you_mean(path.name, beside)}"
        raise UnreadableError(problem, str(source)) from None
    except OSError as error:
        raise UnreadableError(f"{type(error).__name__}: {error}", str(source)) from error
    if not isinstance(content, Mapping):
        problem = f"its top level is of type {type(content).__name__}, but a config must map keys to values"
        raise UnreadableError(problem, str(source))
    return content, f"{OWN_NAMES}, and begin helpers with an underscore" if suffix == ".py" else OWN_NAMES


def override(raw: Mapping[Any, Any], overrides: Sequence[str]) -> dict[Any, Any]:
    """`raw` with the overrides applied in order, as a new dict.

    Args:
        overrides: `key=value` each. A dot leads into a dict (`fp16.mode=naive`); the value is read as in YAML: `2`,
            `1e-3`, `true`, `null`, `naive`, `{size: 2, microbatches: 4}`.

    Raises:
        ConfigError: one has no `=`, a value that is not YAML, or a path into something that is not a dict.
    """
    found, problems = dict(raw), list[str]()
    for text in overrides:
        path, separator, value = text.partition("=")
        keys = path.strip().split(".")
        if not separator or not all(keys):
            problems.append(f"{show(text)}: an override is key=value, such as parallel.tensor=2 or fp16.mode=naive")
            continue
        try:
            _set(found, keys, read_value(value))
        except ValueError as error:
            problems.append(f"{text}: {error}")
    if problems:
        raise ConfigError(problems, "the overrides")
    return found


def _set(inside: dict[Any, Any], keys: Sequence[str], value: Any) -> None:
    for depth, key in enumerate(keys[:-1]):
        path, given = ".".join(keys[: depth + 1]), inside.get(key)
        short = "size" if path.partition("parallel.")[2] in AXES.names() else _SHORT.get(path)
        if short and not isinstance(given, Mapping | None):
            given = {short: given}
        if not isinstance(given, Mapping | None):
            raise ValueError(f"{path} is {show(given)}, which has no keys; set it as a whole: {path}={{...}}")
        inside[key] = dict(given or {})
        inside = inside[key]
    inside[keys[-1]] = value


def run_config(path: Path) -> dict[str, Any]:
    """Run the config at `path`, and return its keys and constants by name.

    `_x` is a helper, UPPERCASE a constant; every other name is a key, except modules, functions and classes.

    Raises:
        UnreadableError: the file, or a sibling that it imports, does not compile or raises an error.
    """
    files, found = dict[Path, ModuleType](), path.resolve(strict=True)
    try:
        module = _execute(found, files)
    except (Exception, SystemExit) as error:
        raise UnreadableError(_describe(error, files), str(path)) from error
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

    def find(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> ModuleType:
        """`import base` and `from .base import x` mean a file beside this one, if it exists."""
        sibling = path.with_name(f"{name}.py")
        if (level == 1 or (level == 0 and name not in _NEVER_SIBLINGS)) and sibling.is_file():
            return _execute(sibling.resolve(), files)
        return builtins.__import__(name, globals, locals, fromlist, level)

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


_READERS: Mapping[str, Callable[[Path], Any]] = MappingProxyType(
    {".py": run_config, ".yaml": read_yaml, ".yml": read_yaml, ".json": read_json}
)


# -- for editors -------------------------------------------------------------------------------------------------------

_NULL = {"type": "null"}
_INTEGER = {"type": "integer", "minimum": 1}


def json_schema() -> dict[str, Any]:
    """A JSON Schema of configs in YAML and JSON, with the modes, axes and strategies of installed packages. Editors
    complete keys and mark mistakes by it."""
    schema = Config.model_json_schema()
    keys = schema["properties"]
    for key, dtype in PRECISIONS.items():
        keys[key] = {"anyOf": [*_modes(dtype), _NULL]}
    keys["parallel"] = {"anyOf": [_object(_layouts()), _NULL]}
    shorthands: dict[str, dict[str, Any]] = {
        "clip_grad_norm": {"type": ["number", "null"], "minimum": 0},
        "activation_checkpoint": {"enum": ["full", "selective", True, False, None]},
        "compile": {"type": ["boolean", "null"]},
    }
    for key, shorthand in shorthands.items():
        keys[key]["anyOf"] = [{"$ref": keys[key].pop("$ref")}, shorthand]
    keys["checkpoint"]["anyOf"].append({"type": "string"})
    used = {"ActivationCheckpointConfig", "CheckpointConfig", "ClipConfig", "CompileConfig"}
    return schema | {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A config of halfmesh",
        "$defs": {name: schema["$defs"][name] for name in sorted(used)},
        "additionalProperties": False,
        "patternProperties": {"^[A-Z][A-Z0-9_]*$": {"description": "yours: engine.config.NAME"}},
    }


def _modes(dtype: str) -> Iterator[dict[str, Any]]:
    """The modes that have `dtype`, with the keys of each."""
    for name, plugin in AMP_PLUGINS.each():
        if dtype in plugin.composes.dtypes:
            mode = {"const": name, "description": (plugin.__doc__ or "").partition("\n")[0]}
            yield _object({"mode": mode, **_keys(plugin.options)}, required=["mode"])


def _layouts() -> Mapping[str, Any]:
    """Each axis, as a number of ranks or with its keys; and the data strategies."""
    names = {"schedule": SCHEDULES, "partition": PARTITIONERS, "plan": TENSOR_PLANS}
    layouts = dict[str, Any]()
    for name in AXES.names():
        keys = _keys(parallel_config((name,)).model_fields[name].annotation)
        for key in keys.keys() & names.keys():
            also = [] if key == "schedule" else ["auto"]
            others = [one for one in keys[key].get("anyOf", ()) if one.get("type") != "string"]
            keys[key] = {"anyOf": [{"enum": [*also, *names[key].names()]}, *others]}
        layouts[name] = {"anyOf": [_INTEGER, _object(keys), _NULL]}
    strategies = DATA_STRATEGIES.names()
    each = [_object(_keys(data_config(name)) | {"strategy": {"const": name}}) for name in strategies]
    layouts["data"] = {"anyOf": [{"enum": strategies}, *each, _NULL]}
    return layouts


def _keys(options: Any) -> dict[str, Any]:
    assert issubclass(options, Options)
    return dict(options.model_json_schema().get("properties", {}))


def _object(keys: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": dict(keys), "additionalProperties": False, **more}
