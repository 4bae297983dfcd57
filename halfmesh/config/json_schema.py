"""A JSON Schema of configs in YAML and JSON, by which editors complete keys and mark mistakes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..amp.plugin import AMP_PLUGINS, PRECISIONS
from ..options import Options
from ..parallel.registries import AXES, DATA_STRATEGIES, PARTITIONERS, SCHEDULES, TENSOR_PLANS
from .config import Config
from .schema import data_config, parallel_config

_NULL = {"type": "null"}
_INTEGER = {"type": "integer", "minimum": 1}


def json_schema() -> dict[str, Any]:
    """The schema, with the modes, axes and strategies of installed packages."""
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
