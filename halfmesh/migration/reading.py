"""From what the user names (a file, JSON, key=value pairs) to the keys and values of another engine's config."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..config.text import read_json, read_yaml
from ..errors import ConfigError, InputError, cut, did_you_mean, show_name
from .from_apex import POSITIONAL
from .from_colossal import RULES
from .source import Code
from .static import UnknownValueError, evaluate, find_calls, read_assignments, read_call

_INITIALIZE = ("amp.initialize", "apex.amp.initialize")


def read(given: str, origin: str) -> Mapping[Any, Any]:
    """The keys and values that `given` holds. Nothing of it is run.

    Args:
        given: a .py, .json, .yaml or .yml file, a dict as JSON or Python has it, or "key=value key=value".
        origin: the engine, which says what is looked for in a .py file.

    Raises:
        InputError: there is nothing of the kind.
    """
    if given.lstrip().startswith("{"):
        return _read_dict(given)
    path = Path(given).expanduser()
    try:
        is_file = path.is_file()
    except (OSError, ValueError):
        is_file = False
    if not is_file:
        if "=" in given:
            return _read_pairs(given)
        near = did_you_mean(path.name, [one.name for one in path.parent.iterdir()] if path.parent.is_dir() else [])
        raise InputError(f"{show_name(given)}: there is no such file{near}; a dict or key=value pairs will do, too")
    if path.suffix == ".py":
        return _read_python(path, origin)
    if path.suffix not in (".json", ".yaml", ".yml"):
        raise InputError(f"{path}: its ending is not one of .py, .json, .yaml, .yml")
    try:
        content = read_json(path) if path.suffix == ".json" else read_yaml(path)
    except ConfigError as error:
        raise InputError(str(error)) from None
    if not isinstance(content, Mapping):
        raise InputError(f"{path}: its top level is a {type(content).__name__}, not keys with values")
    return content


def _read_dict(given: str) -> Mapping[Any, Any]:
    try:
        value = json.loads(given)
    except ValueError:
        try:
            value = evaluate(ast.parse(given.strip(), mode="eval").body, {})
        except (SyntaxError, UnknownValueError, TypeError, ValueError) as error:
            raise InputError(f"{show_name(given)}: neither JSON nor a Python dict ({cut(str(error), 100)})") from None
    if not isinstance(value, Mapping):
        raise InputError(f"{show_name(given)}: not a dict")
    return value


def _read_pairs(given: str) -> dict[str, Any]:
    """`opt_level=O2 loss_scale=128`; a value that is no literal is a string."""
    pairs: dict[str, Any] = {}
    for pair in filter(None, re.split(r"[\s,]+", given)):
        key, sign, value = pair.partition("=")
        if not sign or not key:
            raise InputError(f"{show_name(pair)}: expected key=value pairs, such as opt_level=O2")
        if key in pairs:
            raise InputError(f"{show_name(key)} is given twice")
        try:
            pairs[key] = evaluate(ast.parse(value, mode="eval").body, {})
        except (SyntaxError, UnknownValueError, TypeError, ValueError):
            pairs[key] = {"true": True, "false": False}.get(value, value)
    return pairs


def _read_python(path: Path, origin: str) -> Mapping[Any, Any]:
    try:
        tree = ast.parse(path.read_bytes(), str(path))
        names = read_assignments(tree, {name.partition(".")[0] for name in RULES} if origin == "colossal" else ())
    except (RecursionError, MemoryError):  # Python's parser says the latter of what is nested too deep
        raise InputError(f"{path}: its expressions are nested too deep to be read") from None
    except (SyntaxError, ValueError, OSError) as error:
        raise InputError(f"{path}: it cannot be read ({cut(str(error))})") from None
    if origin == "colossal":
        return names
    found = _IN_PYTHON[origin](tree, names)
    if found is None:
        raise InputError(f"{path}: there is no {_WANTED[origin]} in it")
    return found


def _find_apex(tree: ast.Module, names: dict[str, Any]) -> Mapping[Any, Any] | None:
    return _one_call(tree, names, "amp.initialize", POSITIONAL)


def _find_accelerate(tree: ast.Module, names: dict[str, Any]) -> Mapping[Any, Any] | None:
    found = _one_call(tree, names, "Accelerator", ("device_placement", "split_batches", "mixed_precision"))
    return None if found is None else {"Accelerator": found}


def _find_deepspeed(tree: ast.Module, names: dict[str, Any]) -> Mapping[Any, Any] | None:
    calls = _one_call(tree, names, "deepspeed.initialize", ()) or {}
    for name in ("config", "config_params"):
        if isinstance(calls.get(name), Mapping):
            return calls[name]
    return _first_dict(names, ("ds_config", "deepspeed_config", "config"))


def _find_sagemaker(tree: ast.Module, names: dict[str, Any]) -> Mapping[Any, Any] | None:
    found: dict[str, Any] = {}
    calls = [call for name in ("PyTorch", "HuggingFace", "TensorFlow") for call in find_calls(tree, name)]
    for call in calls:
        arguments = read_call(call, names)
        found |= {
            name: arguments[name] for name in ("distribution", "instance_count", "instance_type") if name in arguments
        }
    if "distribution" not in found:
        known = _first_dict(names, ("distribution", "smp_options", "smp_config", "parameters"))
        found |= (_one_call(tree, names, "smp.init", ("parameters",)) or {}) if known is None else dict(known)
    found |= _one_call(tree, names, "smp.DistributedOptimizer", ("optimizer",)) or {}
    return found or None


def _first_dict(names: dict[str, Any], wanted: tuple[str, ...]) -> Mapping[Any, Any] | None:
    return next((names[name] for name in wanted if isinstance(names.get(name), Mapping)), None)


def _one_call(tree: ast.Module, names: dict[str, Any], name: str, positional: tuple[str, ...]) -> dict[str, Any] | None:
    calls = list(find_calls(tree, name))
    read_calls = [read_call(call, names, positional) for call in calls]
    if any(repr(one) != repr(read_calls[0]) for one in read_calls[1:]):
        lines = ", ".join(str(call.lineno) for call in calls)
        raise InputError(f"{name} is called with different arguments, in lines {lines}: give one of them as key=value")
    return read_calls[0] if read_calls else None


_IN_PYTHON: dict[str, Callable[[ast.Module, dict[str, Any]], Mapping[Any, Any] | None]] = {
    "apex": _find_apex,
    "accelerate": _find_accelerate,
    "deepspeed": _find_deepspeed,
    "sagemaker": _find_sagemaker,
}
_WANTED = {
    "apex": "call of amp.initialize",
    "accelerate": "call of Accelerator",
    "deepspeed": "dict that deepspeed.initialize gets as config",
    "sagemaker": "distribution={...} of an estimator, and no smp.DistributedOptimizer",
}
__all__ = ["Code", "read"]
