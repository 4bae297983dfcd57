"""The JSON Schema of configs: what it takes is loaded, and what is a mistake to it is one to halfmesh."""

from __future__ import annotations

import json

import jsonschema
import pytest

import halfmesh
from halfmesh.config.load import json_schema
from halfmesh.parallel.registries import DATA_STRATEGIES


@pytest.fixture(scope="module")
def validator():
    schema = json.loads(json.dumps(json_schema()))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize(
    "config",
    [
        {"fp16": {"mode": "naive", "hysteresis": 2}, "clip_grad_norm": 1.0, "compile": True, "checkpoint": "folder"},
        {"bf16": {"mode": "torch"}, "fp16": None, "activation_checkpoint": "full", "NUM_EPOCHS": 3, "seed": 1},
        {"parallel": {"tensor": {"size": 2, "plan": {"*.fc": "colwise"}}, "pipeline": {"size": 2, "partition": ["a"]}}},
        {"parallel": {"data": {"strategy": "fsdp", "prefetch": 2}, "context": 2}},
        *({"parallel": {"data": name}} for name in DATA_STRATEGIES.names()),
    ],
)
def test_configs_that_are_right(validator, config):
    halfmesh.load_config(config)
    assert list(validator.iter_errors(config)) == []


@pytest.mark.parametrize(
    "config",
    [
        {"gradient_acumulation": 2},
        {"fp16": {"mode": "naive", "hysterisis": 2}},
        {"fp16": {"hysteresis": 2}},
        {"parallel": {"tensor": 0}},
        {"parallel": {"pipeline": {"size": 2, "schedule": "1f2b"}}},
        {"parallel": {"data": {"strategy": "zero1", "prefetch": 2}}},
    ],
)
def test_mistakes(validator, config):
    assert list(validator.iter_errors(config))
    with pytest.raises(halfmesh.ConfigError):
        halfmesh.load_config(config)
